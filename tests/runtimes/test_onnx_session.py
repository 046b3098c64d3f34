"""How a session is made and how its failures are reported, with an onnxruntime that only records calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import EdgespecError, MemoryLimitError, ModelFileError, RuntimeUnavailableError
from edgespec.files.onnx.interface import ROWS, SHARED
from edgespec.runtimes.onnx.providers import OnnxLibrary, Provider
from edgespec.runtimes.onnx.session import WIDE_TOKENS, OnnxSettings, OnnxWeights, StopFlag, load_weights

CPU = Provider(name="cpu", provider="CPUExecutionProvider", kind="cpu", description="")
GPU = Provider(name="DirectML", provider="DmlExecutionProvider", kind="gpu", description="")
PLUGIN = Provider(
    name="OpenVINO-CPU",
    provider="OpenVINOExecutionProvider",
    kind="cpu",
    description="",
    plugin="onnxruntime_ep_openvino 1",
    ep_devices=("the descriptor",),
)
ARTEFACT: Any = SimpleNamespace(graph_path=Path("folder") / "model.onnx", folder=Path("folder"), cache=SHARED)
FIXED: Any = SimpleNamespace(graph_path=Path("folder") / "model.onnx", folder=Path("folder"), cache=ROWS)


class FakeApi:
    """Records how a session is made, or raises ``error``; ``usable`` are the providers that the session keeps."""

    def __init__(self, error: Exception | None = None, usable: list[str] | None = None) -> None:
        self.error = error
        self.usable = usable
        self.path = ""
        self.providers: Any = None
        self.keywords: dict[str, Any] = {}
        self.entries: dict[str, str] = {}
        self.appended: Any = None
        self.options: Any = None
        self.widths: list[int | None] = []

    def SessionOptions(self) -> Any:  # noqa: N802
        self.options = SimpleNamespace(
            add_session_config_entry=self.entries.__setitem__,
            add_provider_for_devices=lambda devices, options: setattr(self, "appended", (devices, options)),
            add_free_dimension_override_by_name=lambda name, width: setattr(own, name, width),
        )
        own = self.options
        return self.options

    def RunOptions(self) -> Any:  # noqa: N802
        entries: dict[str, str] = {}
        return SimpleNamespace(entries=entries, add_run_config_entry=entries.__setitem__, terminate=False)

    def InferenceSession(self, path: str, options: Any, providers: Any, **keywords: Any) -> Any:  # noqa: N802
        if self.error is not None:
            raise self.error
        self.widths.append(getattr(options, "tokens", None))
        self.path, self.providers, self.keywords = path, providers, keywords
        named = [self.appended[0]] if providers is None else [name for name, _ in providers[:1]]
        usable = self.usable if self.usable is not None else named
        return SimpleNamespace(get_providers=lambda: usable)


def loaded(
    api: FakeApi, provider: Provider = CPU, settings: OnnxSettings | None = None, artefact: Any = ARTEFACT
) -> OnnxWeights:
    library = OnnxLibrary(api=api, version="1", build="1+0")
    return load_weights(library, provider, artefact, settings or OnnxSettings())


def test_default_onnx_settings_have_the_documented_values() -> None:
    settings = OnnxSettings()
    assert (settings.threads, settings.provider, settings.pad_to, settings.spinning) == (1, "cpu", 1, True)
    assert settings.options == {}
    assert settings.as_json() == {"pad_to": 1, "spinning": True}
    assert hash(settings) == hash(OnnxSettings())


def test_onnx_settings_of_the_numeric_class_are_written_as_json() -> None:
    settings = OnnxSettings(pad_to=2, spinning=False, options={"precision": "f32", "a": "b"})
    assert settings.as_json() == {"pad_to": 2, "spinning": False, "option.a": "b", "option.precision": "f32"}


def test_a_session_is_made_with_the_settings_options() -> None:
    api = FakeApi()
    weights = loaded(api, settings=OnnxSettings(threads=3, spinning=False, options={"key": "value"}))
    assert api.path == str(ARTEFACT.graph_path)
    assert api.providers == [("CPUExecutionProvider", {"key": "value"})]
    assert (api.options.intra_op_num_threads, api.options.inter_op_num_threads) == (3, 1)
    assert not api.options.enable_mem_pattern
    assert api.options.use_deterministic_compute
    assert api.entries == {"session.intra_op.allow_spinning": "0"}
    assert api.keywords == {"enable_fallback": 0, "read_config_from_model": 0}
    assert weights.on_cpu


def test_onnx_threads_spin_unless_the_settings_disable_it() -> None:
    api = FakeApi()
    loaded(api)
    assert api.entries == {"session.intra_op.allow_spinning": "1"}


def test_a_fixed_shape_graph_gets_two_sessions_except_on_the_cpu() -> None:
    api = FakeApi()
    weights = loaded(api, GPU, artefact=FIXED)
    assert api.widths == [1, WIDE_TOKENS]
    assert weights.session is not weights.wide
    for provider, artefact in ((CPU, FIXED), (CPU, ARTEFACT), (GPU, ARTEFACT)):
        api = FakeApi()
        weights = loaded(api, provider, artefact=artefact)
        assert api.widths == [None]
        assert weights.session is weights.wide


def test_providers_other_than_the_cpu_fall_back_to_it_and_run_serially() -> None:
    api = FakeApi()
    weights = loaded(api, GPU)
    assert api.providers == [("DmlExecutionProvider", {}), "CPUExecutionProvider"]
    assert not weights.on_cpu
    with weights.turn:
        assert weights.turn.locked()  # type: ignore[attr-defined]


def test_a_plugin_device_is_selected_by_its_descriptor() -> None:
    api = FakeApi(usable=["OpenVINOExecutionProvider", "CPUExecutionProvider"])
    weights = loaded(api, PLUGIN, OnnxSettings(provider="OpenVINO-CPU", options={"a": "1"}))
    assert api.appended == (["the descriptor"], {"a": "1"})
    assert api.providers is None
    assert not weights.on_cpu


def test_a_provider_that_onnxruntime_left_out_is_an_error() -> None:
    with pytest.raises(RuntimeUnavailableError, match="DirectML does not work here") as raised:
        loaded(FakeApi(usable=["CPUExecutionProvider"]), GPU)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("provider", "error", "expected"),
    [
        (CPU, RuntimeError("[ONNXRuntimeError] : 1 :\n FAIL : no such operator"), ModelFileError),
        (GPU, RuntimeError("no such operator"), RuntimeUnavailableError),
        (CPU, RuntimeError("std::bad_alloc"), MemoryLimitError),
        (GPU, RuntimeError("bfc_arena.cc Failed to allocate memory for requested buffer"), MemoryLimitError),
        (CPU, MemoryError(), MemoryLimitError),
    ],
)
def test_a_failed_onnx_load_raises_a_one_line_error(
    provider: Provider, error: Exception, expected: type[EdgespecError]
) -> None:
    with pytest.raises(expected) as raised:
        loaded(FakeApi(error=error), provider)
    assert "\n" not in raised.value.message
    assert raised.value.hint
    assert " ".join(str(error).split()) in raised.value.message


def test_a_long_native_message_is_truncated() -> None:
    with pytest.raises(ModelFileError) as raised:
        loaded(FakeApi(error=RuntimeError("stack frame " * 1000)))
    assert len(raised.value.message) < 500


def test_a_stop_flag_ends_short_and_long_runs() -> None:
    stop = StopFlag(loaded(FakeApi()))
    runs = (stop.step_options, stop.prefill_options)
    assert not stop.raised
    stop.set(True)
    assert stop.raised
    assert all(run.terminate for run in runs)
    stop.set(False)
    assert not stop.raised
    assert not any(run.terminate for run in runs)


def test_only_a_long_prompts_memory_is_released_and_only_on_the_cpu() -> None:
    stop = StopFlag(loaded(FakeApi()))
    assert stop.step_options.entries == {}
    assert stop.prefill_options.entries == {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    assert StopFlag(loaded(FakeApi(), GPU)).prefill_options.entries == {}
