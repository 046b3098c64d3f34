"""Loading an engine: choices, arguments refused before loading, and lost drafters, which never end an answer."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgespec.engine.pair.load as loading_module
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.load import Limits
from edgespec.engine.request_checks import check_request
from edgespec.errors import (
    ClosedError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    ModelNotFoundError,
    ProfileError,
    RuntimeUnavailableError,
    TemplateError,
)
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.files.progress import Loading
from edgespec.hardware.machine import describe_machine
from edgespec.placement.memory import estimate_memory
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.native.model import KV_BITS
from edgespec.runtimes.table import RUNTIMES
from tests.support.calibrating import fix_plain_ratio
from tests.support.kernel_calls import require_native
from tests.support.processor import first_runtime, processor_runtimes
from tests.support.started_threads import started_threads
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer, invent_measurements, put_into_store, require_speculation

CATALOGUE_TARGET, CATALOGUE_DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"


def say_hello(engine: Engine, **settings: object) -> Done:
    with engine.session() as session:
        return answer(session.generate("hello world", **{"max_tokens": 25, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(tiny: TinyModels) -> tuple[int, ...]:
    """The answer of ``tiny.target`` to hello without a drafter."""
    with tiny.load(draft="none", lookup=False) as engine:
        return say_hello(engine, depth=0).token_ids


def needed_bytes(path: Path, context_length: int, runtime: str) -> int:
    bits = KV_BITS if runtime == "native" else KV_TYPES[LlamaSettings().kv_type][1]
    return estimate_memory(read_header(path), context_length, bits).total_bytes


# ------------------------------------------------------------------------------------------------ arguments


WRONG_TYPES: dict[str, tuple[tuple[object, ...], dict[str, object], str]] = {
    "no prompt": ((None,), {}, "the prompt must be text, not None"),
    "messages": (([{"role": "user", "content": "hi"}],), {}, "the prompt must be text, not list"),
    "bytes": ((b"hi",), {}, "the prompt must be text, not bytes b'hi'"),
    "max_tokens as text": (("hi",), {"max_tokens": "8"}, "max_tokens must be a whole number, not str '8'"),
    "max_tokens with a fraction": (("hi",), {"max_tokens": 1.5}, "max_tokens must be a whole number, not float 1.5"),
    "max_tokens as truth": (("hi",), {"max_tokens": True}, "max_tokens must be a whole number"),
    "less than no token": (("hi",), {"max_tokens": -1}, "max_tokens must be 0 or more, not -1"),
    "depth as text": (("hi",), {"depth": "auto"}, "depth must be a whole number, not str 'auto'"),
    "negative depth": (("hi",), {"depth": -1}, "depth must be 0 or more, not -1"),
    "sampling as a mapping": (
        ("hi",),
        {"sampling": {"temperature": 1}},
        "sampling must be a Sampling, not dict",
    ),
    "stop as one text": (("hi",), {"stop": "end"}, "stop strings must be a list of texts"),
    "stop of numbers": (("hi",), {"stop": [1]}, "stop strings must be a list of texts, not list"),
    "no stop": (("hi",), {"stop": None}, "stop strings must be a list of texts, not None"),
    "empty stop": (("hi",), {"stop": [""]}, "a stop string is empty"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_arguments_of_a_wrong_type_are_refused_with_a_readable_message(tiny: TinyModels, case: str) -> None:
    arguments, settings, words = WRONG_TYPES[case]
    with tiny.load(draft="none") as engine, engine.session() as session:
        with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
            session.generate(*arguments, **settings)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(settings), "prompt")
        assert say_hello(engine, max_tokens=np.int64(2)).token_ids
        assert answer(session.generate("hello", max_tokens=2)).text, "the session still works"


def test_a_system_message_that_is_not_text_is_refused(tiny: TinyModels) -> None:
    with (
        tiny.load(draft="none") as engine,
        pytest.raises(InvalidRequestError, match="the system message must be text"),
    ):
        engine.session(system=5)  # type: ignore[arg-type]


def test_check_request_has_the_defaults_of_generate() -> None:
    check_request("hi")
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        check_request(" ")
    check_request(" ", raw=True)


def test_an_engine_loads_and_answers_with_all_defaults(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(home.root))
    # By default all cores are used; on a busy test machine two threads mostly wait for each other.
    machine = dataclasses.replace(describe_machine(), physical_cores=1)
    monkeypatch.setattr(loading_module, "describe_machine", lambda: machine)
    with Engine.load(str(tiny.target)) as engine, engine.session() as session:
        assert engine.plan.target.model == "target"
        assert engine.plan.context_length == 2048  # the model's limit, shorter than the profile's
        works = "any small model with the same vocabulary works: --draft hf:ORG/REPO"
        assert engine.plan.drafter_off == f"no drafter is known for target; {works}"
        assert engine.has_chat_template
        done = answer(session.generate("hello", max_tokens=200))
        assert len(done.token_ids) == 200
        assert done.plan == engine.plan
        drafts = engine.plan.target.runtime == "native"
        assert ("not calibrated yet" in (done.speculation_off or "")) != drafts
    unasked = {path.name.partition("-")[0] for path in home.root.rglob("*.json")}
    assert unasked <= ({"widths", "acceptance", "history"} if drafts else set()), (
        "load times nothing without calibrate"
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder that is in use")
def test_engine_load_needs_no_working_folder(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "mine.toml").write_text("context = 256\n")
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with tiny.load(profile=str(tmp_path / "mine.toml")) as engine:
        assert engine.plan.context_length == 256
    with pytest.raises(ProfileError, match="the current folder was removed"):
        tiny.load(profile="./mine.toml")


def test_engine_load_ignores_environment_variables_and_project_files(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CONTEXT", "256")
    monkeypatch.setenv("EDGESPEC_PROFILE", "nonsense")
    (tmp_path / "edgespec.toml").write_text("[profile]\ncontext = 300\n")
    monkeypatch.chdir(tmp_path)
    with tiny.load() as engine:
        assert engine.plan.context_length == 2048


def test_a_profile_can_be_given_by_name_or_as_an_object(tiny: TinyModels, tmp_path: Path) -> None:
    with tiny.load(profile="laptop") as engine:
        assert engine.profile.name == "laptop"
    resolved = load_profile(
        None,
        environ={},
        cwd=tmp_path,
        user_dir=tmp_path,
        flags={"target": str(tiny.target), "draft": "none", "context": 200, "threads": 1, "lookup": False},
    )
    with Engine.load(profile=resolved, store_home=tiny.home) as engine:
        assert engine.plan.context_length == 200
        assert engine.plan.mode == "plain"
    with pytest.raises(InvalidRequestError, match="context was given together with a resolved profile"):
        Engine.load(profile=resolved, context=300, store_home=tiny.home)


def test_keyword_overrides_replace_profile_values(tiny: TinyModels) -> None:
    with tiny.load(depth=2, context=333, rule="rejection", exactness="stable", device="cpu") as engine:
        require_speculation(engine, 2)
        assert (engine.plan.depth_cap, engine.plan.context_length) == (2, 333)
        assert say_hello(engine, depth=9).stats.rounds > 0
    with pytest.raises(ProfileError, match="contxt") as caught:
        tiny.load(contxt=300)
    assert "context" in f"{caught.value} {caught.value.hint}"
    with pytest.raises(ProfileError, match="context"):
        tiny.load(context=3)


def test_near_exactness_allows_deeper_drafts_and_reports_it(tiny: TinyModels, expected: tuple[int, ...]) -> None:
    with tiny.load(depth=4, exactness="near") as engine:
        assert engine.plan.depth_cap == 4
        assert len(say_hello(engine).token_ids) == 25


def test_loading_on_an_unknown_device_is_refused(tiny: TinyModels) -> None:
    with pytest.raises(RuntimeUnavailableError, match="no device 'tpu9'") as caught:
        tiny.load(device="tpu9")
    assert caught.value.hint is not None


def test_the_callers_limit_of_threads_is_kept(tiny: TinyModels) -> None:
    with tiny.load(limits=Limits(max_threads=1), threads="auto") as engine:
        assert engine.plan.target.threads == 1
    with tiny.load(limits=Limits(max_threads=8), threads=2) as engine:
        assert engine.plan.target.threads == 2


@pytest.mark.slow
def test_load_progress_is_reported_on_the_calling_thread(tiny: TinyModels, home: Home) -> None:
    told: list[tuple[object, str]] = []

    def tell(event: object) -> None:
        told.append((event, threading.current_thread().name))

    with tiny.load(progress=tell, store_home=home, calibrate=True):
        pass
    stages = [event.stage for event, _ in told if isinstance(event, Loading)]
    assert stages[0] == "loading target"
    assert {"measuring target", "measuring drafter"} <= set(stages)
    assert {name for _, name in told} == {threading.current_thread().name}


@pytest.mark.slow
def test_without_calibration_a_plan_in_llama_cpp_is_plain(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 100.0)  # else the last engine might choose the other, unmeasured runtime
    with tiny.load(store_home=home, runtime="llama") as engine:
        assert (engine.plan.mode, engine.plan.depth_cap, engine.pair.probe) == ("plain", 0, None)
        assert "not calibrated yet" in engine.plan.reasons[-1]
        assert say_hello(engine, depth=5).token_ids == say_hello(engine, depth=0).token_ids
    with tiny.load(store_home=home, calibrate=True) as engine:
        measured = engine.plan
        assert engine.pair.probe is not None
        assert measured.predicted_tokens_per_s is not None
    with tiny.load(store_home=home) as engine:
        assert engine.plan == measured  # the stored measurements are used


def test_a_depth_given_as_a_number_needs_no_calibration(tiny: TinyModels, home: Home) -> None:
    with tiny.load(store_home=home, depth=3) as engine:
        require_speculation(engine, 3)
        assert engine.plan.depth_cap == 3
        assert say_hello(engine).stats.rounds_by_source
    assert [path.name.partition("-")[0] for path in home.measurements.iterdir()] == ["widths"]


@pytest.mark.slow
def test_with_a_read_only_home_the_width_probe_is_repeated_at_each_load(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with tiny.load(store_home=Home(tmp_path / "file" / "home"), calibrate=True) as engine:
        assert engine.pair.probe is not None
        assert not engine.unmeasured
        assert engine.plan.predicted_tokens_per_s is not None
        assert say_hello(engine).token_ids


def test_depth_zero_loads_no_drafter_model(tiny: TinyModels, expected: tuple[int, ...]) -> None:
    with tiny.load(depth=0, draft="/nowhere/at-all.gguf") as engine:
        assert engine.plan.mode == "plain"
        assert [drafter.kind for drafter in engine.drafters] == ["lookup"]  # lookup needs no model
        assert engine.pair.measurements.drafter is None
        assert say_hello(engine).token_ids == expected


@pytest.mark.parametrize("download", [False, True])
def test_missing_files_and_unknown_model_names_are_refused(tiny: TinyModels, home: Home, download: bool) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        Engine.load(str(home.root / "missing.gguf"), store_home=home, download=download)
    with pytest.raises(ModelNotFoundError, match=r"qwen2\.5-coder-1\.5") as caught:
        Engine.load("qwen2.5-coder-1.5", store_home=home, download=download)
    assert caught.value.hint is not None
    assert "qwen2.5-coder-1.5b" in caught.value.hint
    with pytest.raises(ModelNotFoundError, match="not a model"):
        Engine.load("humaneval", store_home=home)
    with pytest.raises(InvalidRequestError):
        Engine.load("hf:only-one-part", store_home=home)
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        Engine.load(CATALOGUE_TARGET, store_home=home)
    assert not home.root.exists(), "a failed load creates no folder"


def test_a_folder_with_one_model_file_loads_that_model(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    path = tmp_path / "exported" / "model.gguf"
    path.write_bytes(tiny.target.read_bytes())
    with tiny.load(path.parent, draft="none", lookup=False) as engine:
        assert engine.plan.target.model == "model"
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="holds 2 models"):
        tiny.load(path.parent)


# ------------------------------------------------------------------------------------------------- drafters


def test_a_named_drafter_with_another_vocabulary_is_an_error(tiny: TinyModels) -> None:
    with pytest.raises(InvalidRequestError, match="stranger has another vocabulary") as caught:
        tiny.load_speculating(draft=str(tiny.stranger))
    assert "--draft auto" in str(caught.value.hint)


def test_with_drafting_disabled_no_missing_drafter_is_reported(tiny: TinyModels) -> None:
    with tiny.load_speculating(draft="auto") as engine, engine.session() as session:
        done = answer(session.generate("hello", max_tokens=3, depth=0))
        assert (done.speculation_off_code, done.speculation_off) == ("depth_zero", "depth 0 was asked for")
        assert done.plan.mode == "plain"
        done = answer(session.generate("hello", max_tokens=3))
        assert done.speculation_off_code == "no_model_drafter"


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def not_a_model(data: bytes) -> bytes:
    return b"GGML" + data[4:]


def empty(_data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncated, not_a_model, empty])
def test_a_damaged_drafter_is_an_error_only_if_the_caller_named_it(
    tiny: TinyModels, home: Home, damage: Callable[[bytes], bytes]
) -> None:
    """A catalogue drafter's damage is only reported; a named drafter's damage is an error."""
    put_into_store(home, CATALOGUE_TARGET, tiny.target.read_bytes())
    bad = put_into_store(home, CATALOGUE_DRAFTER, damage(tiny.drafter.read_bytes()))
    with Engine.load(CATALOGUE_TARGET, store_home=home, threads=1) as engine:
        invent_measurements(engine)
        assert engine.plan.drafter_off is not None
        assert str(bad) in engine.plan.drafter_off
        done = say_hello(engine)
        assert len(done.token_ids) == 25
        assert done.speculation_off == engine.plan.drafter_off
    for name in (str(bad), CATALOGUE_DRAFTER):
        with pytest.raises(ModelFileError) as caught:
            Engine.load(CATALOGUE_TARGET, draft=name, store_home=home, threads=1)
        assert str(bad) in caught.value.message


def test_the_catalogues_drafter_for_a_target_is_used(tiny: TinyModels, home: Home, expected: tuple[int, ...]) -> None:
    put_into_store(home, CATALOGUE_TARGET, tiny.target.read_bytes())
    with Engine.load(CATALOGUE_TARGET, store_home=home, threads=1, lookup=False) as engine:
        fetch = f"fetch it with `edgespec pull {CATALOGUE_DRAFTER}`"
        assert engine.plan.drafter_off == f"{CATALOGUE_DRAFTER} is not on this machine; {fetch}"
        assert engine.plan.mode == "plain"
        assert say_hello(engine).token_ids == expected
    put_into_store(home, CATALOGUE_DRAFTER, tiny.drafter.read_bytes())
    with Engine.load(CATALOGUE_TARGET, store_home=home, threads=1, lookup=False) as engine:
        invent_measurements(engine)
        require_speculation(engine)
        assert engine.plan.drafter_off is None
        assert engine.plan.drafter is not None
        assert (engine.plan.drafter.kind, engine.plan.drafter.model) == ("model", CATALOGUE_DRAFTER)
        engine.load_drafter()
        done = say_hello(engine, depth=4, max_tokens=120)
        assert done.stats.proposed > 0
        assert done.token_ids[:25] == expected


def test_a_stored_target_whose_content_changed_is_refused(tiny: TinyModels, home: Home) -> None:
    path = put_into_store(home, CATALOGUE_TARGET, tiny.target.read_bytes())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFileError, match="changed since it was stored"):
        Engine.load(CATALOGUE_TARGET, store_home=home)


def test_a_drafter_that_llama_cpp_cannot_load_does_not_end_the_answer(
    tiny: TinyModels, expected: tuple[int, ...]
) -> None:
    """The file's header is valid, so the error appears when the drafter is loaded for its first proposal."""
    with tiny.load(draft=str(tiny.broken_inside()), lookup=False, depth=4) as engine:
        require_speculation(engine)
        done = say_hello(engine, depth=4)
        assert done.token_ids == expected
        assert done.speculation_off is not None
        assert "llama.cpp could not load it" in done.speculation_off


@pytest.mark.parametrize("lookup", [False, True])
def test_a_named_drafter_without_room_is_an_error(tiny: TinyModels, lookup: bool) -> None:
    """The size is in the header, so nothing of it is read."""
    limits = Limits(max_memory_bytes=needed_bytes(tiny.target, 2048, first_runtime()) + 1)
    with pytest.raises(MemoryLimitError, match="drafter needs about"):
        tiny.load(limits=limits, lookup=lookup, depth=4)


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_target_larger_than_the_memory_limit_is_not_loaded(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    def load(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(type(RUNTIMES[runtime]), "load", load)
    limit = needed_bytes(tiny.target, 2048, runtime) - 1
    with pytest.raises(MemoryLimitError, match="target needs about") as caught:
        tiny.load(limits=Limits(max_memory_bytes=limit), runtime=runtime)
    assert caught.value.needed_bytes == limit + 1
    assert caught.value.available_bytes == limit
    assert caught.value.hint is not None
    with pytest.raises(AssertionError, match="it was loaded"):  # with one more byte the target is loaded
        tiny.load(draft="none", limits=Limits(max_memory_bytes=limit + 1), runtime=runtime)


def test_a_target_that_fits_only_in_another_runtime_runs_there(tiny: TinyModels) -> None:
    require_native()
    limit = needed_bytes(tiny.target, 2048, "native") - 1
    with tiny.load(limits=Limits(max_memory_bytes=limit), draft="none") as engine:
        assert engine.plan.target.runtime == "llama"


# ------------------------------------------------------------------------------------------------ templates


def test_a_model_without_a_chat_template_continues_raw_text(tiny: TinyModels) -> None:
    with tiny.load(tiny.without_template, draft="none") as engine:
        assert not engine.has_chat_template
        with engine.session() as session:
            with pytest.raises(TemplateError, match="no chat template") as caught:
                session.generate("hello")
            assert caught.value.hint is not None
            assert "raw" in caught.value.hint
            assert len(answer(session.generate("hello", raw=True, max_tokens=10)).token_ids) == 10
            assert session.messages == ()


def test_a_template_that_writes_the_begin_token_gets_no_second_one(tiny: TinyModels) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with tiny.load(tiny.with_template("with-bos", template), draft="none") as engine:
        text = engine.pair.prompts.read([{"role": "user", "content": "hello"}])
        assert text == "<s>hello"
        assert engine.pair.prompts.encode(text).count(1) == 1
        assert engine.pair.prompts.encode_raw("hello")[0] == 1


# -------------------------------------------------------------------------------------------------- closing


def test_closing_an_engine_twice_closes_its_open_sessions(tiny: TinyModels) -> None:
    engine = tiny.load_speculating()
    sessions = [engine.session() for _ in range(3)]
    generation = sessions[0].generate("hello")
    next(generation)
    answer(sessions[1].generate("hello", max_tokens=5, depth=3))
    engine.close()
    engine.close()
    assert answer(generation).finish_reason == "cancelled"
    for session in sessions:
        with pytest.raises(ClosedError):
            session.generate("hello")
        session.close()
    with pytest.raises(ClosedError, match="engine is closed"):
        engine.session()


def test_closing_an_engine_from_another_thread_ends_running_answers(tiny: TinyModels) -> None:
    engine = tiny.load_speculating()
    outcomes: list[str] = []

    def stream() -> None:
        try:
            with engine.session() as session:
                while True:
                    answer(session.generate("hello", max_tokens=300, depth=3))
                    session.clear()
        except ClosedError:
            outcomes.append("closed")

    readers = [threading.Thread(target=stream) for _ in range(3)]
    for reader in readers:
        reader.start()
    threading.Event().wait(0.3)
    engine.close()
    for reader in readers:
        reader.join(60)
    assert outcomes == ["closed"] * 3


def test_two_engines_can_be_loaded_together_and_again_after_closing(
    tiny: TinyModels, expected: tuple[int, ...]
) -> None:
    """Two engines together, and again after both are closed."""
    for _ in range(2):
        with tiny.load_speculating() as one, tiny.load(draft="none") as two:
            assert say_hello(one).token_ids == say_hello(two).token_ids == expected
    before = len(started_threads())
    with tiny.load_speculating() as engine:
        say_hello(engine, depth=3)
    deadline = time.monotonic() + 60  # closing does not wait for a thread that is about to end
    while len(started_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(started_threads()) <= before


def test_the_plan_is_frozen_and_converts_to_json(tiny: TinyModels) -> None:
    with tiny.load(depth=3) as engine:
        with pytest.raises(dataclasses.FrozenInstanceError):
            engine.plan.mode = "plain"  # type: ignore[misc]
        shape = engine.plan.as_json()
        assert shape["mode"] == engine.plan.mode
        assert all(isinstance(reason, str) and reason for reason in shape["reasons"])
        assert shape["predicted_tokens_per_s"] is None  # not measured, so not predicted


def test_a_replaced_model_file_has_no_measurements_of_the_old_one(
    tiny: TinyModels, tmp_path: Path, home: Home
) -> None:
    """Measurements belong to a file's content, not to its path."""
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", heads=2, kv_heads=1, seed=1)
    with tiny.load(path, draft="none", store_home=home, depth=2) as engine:
        first = say_hello(engine).token_ids
    write_tiny_gguf(path, quant="Q8_0", heads=2, kv_heads=1, seed=2)
    with tiny.load(path, draft="none", store_home=home, depth=2) as engine:
        assert say_hello(engine).token_ids != first
    assert len(list(home.measurements.glob("widths-*.json"))) == 2
