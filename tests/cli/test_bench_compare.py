"""``edgespec bench --compare``: other files of the target's model as arms, and their times side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import edgespec.bench.run as run_module
import edgespec.bench.runtimes as runtimes_module
import edgespec.engine.pair.load as loading_module
from edgespec.bench.runtimes import NamedModel, RuntimeTimes
from edgespec.cli import bench as module
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.hardware.machine import describe_machine
from tests.support.bench_answers import FakeRun
from tests.support.command_line import InProcess
from tests.support.kernel_calls import require_native
from tests.support.processor import first_runtime, processor_runtimes
from tests.support.tiny_models import TinyModels
from tests.support.trimmed_folder import write_trimmed_folder

OWN = first_runtime()
SMALL = ("--suite", "quick", "--category", "qa", "--limit", "1", "--passes", "1", "--max-tokens", "6")


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> tuple[str, ...]:
    """Options of a target that nothing is calibrated for."""
    return ("--target", str(tiny.target), "--draft", "none", "--depth", "0")


@pytest.fixture(scope="module")
def twin(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as an ONNX model."""
    pytest.importorskip("onnxruntime", reason="the ONNX runtime is optional")
    folder = tmp_path_factory.mktemp("beside") / "twin"
    export_onnx(tiny.target, folder, Provenance(name="target"))
    return folder


@pytest.fixture(scope="module")
def trimmed(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = [token for token in range(640) if token % 4]
    return write_trimmed_folder(tiny.target, tmp_path_factory.mktemp("trimmed") / "small-head", kept)


@pytest.fixture
def here(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(tiny.home.root, monkeypatch, capsys)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """Answers that were never given."""
    run = FakeRun(lambda _prompt, arm, _turn: {"identical": ":" not in arm})
    monkeypatch.setattr(run_module, "run_passes", run)
    return run


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of forwards that were never made: the second model takes 5/4 of the first one's time, and so on."""

    def measure(models: tuple[NamedModel, ...], _context: int) -> Generator[float, None, tuple[RuntimeTimes, ...]]:
        yield 0.5
        found = []
        for number, each in enumerate(models):
            ratio = 1.25**number
            found.append(
                RuntimeTimes(
                    name=each.name, arm=each.arm, facts=each.model.facts, context=96, widths=(1, 2),
                    forward_s=(0.04 * ratio, 0.05 * ratio), t1_ratio=ratio, t1_ratio_range=(ratio, ratio),
                )
            )  # fmt: skip
        return tuple(found)

    monkeypatch.setattr(runtimes_module, "measure_runtimes", measure)


@pytest.mark.slow
def test_compare_decodes_and_times_an_onnx_export(here: InProcess, target: tuple[str, ...], twin: Path) -> None:
    result = here("bench", *target, *SMALL, "--arms", "plain", "--compare", twin, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert list(found["arms"]) == ["plain", "onnx:twin"]
    own = found["arms"]["onnx:twin"]
    assert own["decode_tokens_per_s_geomean"] > 0
    assert own["speedup"]["geomean"] > 0
    assert own["identical_fraction"] is not None
    assert own["same_class"] is False
    assert found["identical_fraction"] is None, "nothing that promised plain decoding's text was run"
    plain, onnx = found["runtimes"]
    assert (plain["name"], plain["arm"], plain["model"], plain["runtime"]) == (
        f"{OWN}:target", "plain", "target", OWN)  # fmt: skip
    assert (onnx["name"], onnx["arm"], onnx["model"], onnx["runtime"]) == ("onnx:twin", "onnx:twin", "twin", "onnx")
    for each in (plain, onnx):
        assert each["device"] == "cpu"
        assert each["threads"] == 1
        assert each["width"][0] == 1
        assert len(each["width"]) == len(each["forward_s"]) > 4
        assert all(seconds > 0 for seconds in each["forward_s"])
        assert each["bytes_per_forward"] > 0
    assert plain["t1_ratio"] == 1.0
    assert onnx["t1_ratio"] > 0


@pytest.mark.slow
def test_compare_only_times_a_trimmed_drafter(
    here: InProcess, target: tuple[str, ...], trimmed: Path, fake: FakeRun
) -> None:
    result = here("bench", *target, *SMALL, "--compare", trimmed, "--json")
    assert result.code == 0, result.err
    ((arms, *_),) = fake.calls
    assert arms == ("plain", "again", "planned")
    plain, small = result.json["runtimes"]
    assert (small["name"], small["arm"]) == (f"{OWN}:small-head", None)
    assert small["width"] == plain["width"]
    assert small["bytes_per_forward"] < plain["bytes_per_forward"]


def test_compared_models_are_arms_in_order_and_may_differ_in_text(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], trimmed: Path, fake: FakeRun, invented: None
) -> None:
    options = ("--compare", tiny.drafter, "--compare", trimmed, "--compare", tiny.target)
    result = here("bench", *target, *SMALL, *options, "--json")
    assert result.code == 0, "their answers differ, and nothing promised that they would not"
    ((arms, _, settings, _),) = fake.calls
    assert settings.rest_s == runtimes_module.REST_S
    assert arms == ("plain", "again", "planned", f"{OWN}:drafter", f"{OWN}:target (2)")
    found = result.json
    assert found["identical_fraction"] == 1.0
    assert found["arms"][f"{OWN}:drafter"]["identical_fraction"] == 0.0
    names = [f"{OWN}:target", f"{OWN}:drafter", f"{OWN}:small-head", f"{OWN}:target (2)"]
    assert [each["name"] for each in found["runtimes"]] == names
    assert [each["arm"] for each in found["runtimes"]] == ["plain", names[1], None, names[3]]
    assert "differs from plain" not in result.err
    assert f"plain, again, planned, {OWN}:drafter, {OWN}:target (2))" in result.err
    assert "timing" not in result.err, "with --json nothing moves there"


def test_bench_prints_the_time_per_token_of_compared_models(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], fake: FakeRun, invented: None
) -> None:
    result = here("bench", *target, *SMALL, "--compare", tiny.drafter)
    assert result.code == 0, result.err
    assert "a forward of one token after 96, measured alternately" in result.out
    assert f"{OWN}:target   T(1)   40.00 ms" in result.out
    assert f"{OWN}:drafter  T(1)   50.00 ms" in result.out
    assert f"1.25x (1.25-1.25) of {OWN}:target's time" in result.out
    assert f"timing {OWN}:target, {OWN}:drafter" in result.err
    (row,) = [line for line in result.out.splitlines() if line.startswith(f"{OWN}:drafter ")]
    assert "0 %" in row
    assert row.split()[-1] == "-", "nothing is predicted of it"


def test_without_compare_no_other_model_is_timed(
    here: InProcess, target: tuple[str, ...], fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(runtimes_module, "measure_runtimes", refuse)
    found = here("bench", *target, *SMALL, "--json").json
    assert found["runtimes"] == []
    assert "a forward of one token" not in here("bench", *target, *SMALL).out


def test_the_plot_names_the_compared_models(
    here: InProcess,
    tiny: TinyModels,
    target: tuple[str, ...],
    fake: FakeRun,
    invented: None,
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib", reason="plots are optional")
    path = tmp_path / "figure.svg"
    assert here("bench", *target, *SMALL, "--compare", tiny.drafter, "--plot", path).code == 0
    drawn = path.read_text(encoding="utf-8")
    for text in (f"{OWN}:target:  T(1) 40 ms (1.00×)", f"{OWN}:drafter:  T(1) 50 ms (1.25×)"):
        assert text in drawn


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_compare_accepts_a_runtime_before_the_model(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], runtime: str, fake: FakeRun, invented: None
) -> None:
    result = here("bench", *target, *SMALL, "--compare", f"{runtime}:{tiny.target}", "--json")
    assert result.code == 0, result.err
    own, beside = result.json["runtimes"]
    assert (own["name"], own["runtime"]) == (f"{OWN}:target", OWN)
    name = f"{runtime}:target" if runtime != OWN else f"{runtime}:target (2)"
    assert (beside["name"], beside["arm"], beside["runtime"], beside["model"]) == (name, name, runtime, "target")
    assert name in result.json["arms"]
    assert result.json["plan"]["target"]["runtime"] == OWN, "the target's own is not touched"


@pytest.mark.usefixtures("llama_repacks")
def test_whole_requests_are_held_against_llama_cpp_as_it_reads_prompts_fastest_too(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], fake: FakeRun, invented: None
) -> None:
    fake.make = lambda _prompt, arm, _turn: {
        "identical": ":" not in arm, "ttft_s": 0.4 if arm.startswith("llama") else 0.1, "decode_s": 0.1
    }  # fmt: skip
    options = (*SMALL, "--compare", f"llama:{tiny.target}")
    result = here("bench", *target, *options, "--cold", "--json")
    assert result.code == 0, result.err
    name = "llama:target" if OWN != "llama" else "llama:target (2)"
    names = [name, "llama:target for prompts"]
    assert [each["name"] for each in result.json["runtimes"]][1:] == names
    assert [each["settings"]["repack"] for each in result.json["runtimes"][1:]] == [True, False]
    assert list(result.json["arms"]) == ["plain", "again", "planned", *names]
    against = result.json["against"]
    assert list(against) == names
    assert against[name]["request_speedup"]["by_category"]["qa"]["geomean"] == pytest.approx(2.5)
    assert against[name]["ttft_ratio"]["geomean"] == pytest.approx(0.25)
    text = here("bench", *target, *options, "--cold").out
    for each in names:
        assert f"whole requests, planned against {each}, by category" in text
    warm = here("bench", *target, *options, "--json").json
    assert list(warm["arms"]) == ["plain", "again", "planned", name], "decoding alone needs one setting"


@pytest.mark.slow
def test_two_runtimes_of_one_file_are_decoded_and_timed(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...]
) -> None:
    """Nothing is invented here."""
    options = [option for runtime in processor_runtimes() for option in ("--compare", f"{runtime}:{tiny.target}")]
    result = here("bench", *target, *SMALL, "--arms", "plain", *options, "--json")
    assert result.code == 0, result.err
    assert [each["runtime"] for each in result.json["runtimes"]] == [OWN, *processor_runtimes()]
    same = result.json["arms"][f"{OWN}:target (2)"]
    assert same["identical_fraction"] == 1.0
    assert all(arm["decode_tokens_per_s_geomean"] > 0 for arm in result.json["arms"].values())


# --------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("runtime", ["llama", "native"])
def test_an_onnx_folder_is_run_by_no_other_runtime(
    here: InProcess, target: tuple[str, ...], twin: Path, fake: FakeRun, runtime: str
) -> None:
    result = here("bench", *target, *SMALL, "--compare", f"{runtime}:{twin}")
    result.failed_well(f"twin is an ONNX model, which {runtime} does not run", code=2)
    assert fake.calls == []


def test_compare_with_an_unsupported_runtime_says_why(
    here: InProcess, target: tuple[str, ...], tiny: TinyModels, fake: FakeRun
) -> None:
    require_native()
    narrow = tiny._make("narrow-alone", heads=4, kv_heads=4)
    result = here("bench", *target, *SMALL, "--compare", f"native:{narrow}")
    result.failed_well("the native runtime does not run narrow-alone: 1 heads of 16 elements share a key")
    assert result.hint == 'runtime "auto" or "llama" runs it with llama.cpp'
    assert fake.calls == []


def test_compare_with_a_runtime_and_a_missing_model_is_an_error(
    here: InProcess, target: tuple[str, ...], tmp_path: Path, fake: FakeRun
) -> None:
    here("bench", *target, *SMALL, "--compare", f"llama:{tmp_path / 'nowhere.gguf'}").failed_well("nowhere.gguf")
    result = here("bench", *target, *SMALL, "--compare", "llama:")
    assert result.code in (1, 2)
    assert "Traceback" not in result.err
    assert fake.calls == []


def test_a_wrong_compare_option_is_an_error_before_the_target_is_loaded(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(module, "open_engine", refuse)
    here("bench", *target, "--compare", tmp_path / "nowhere.gguf").failed_well("nowhere.gguf: no such file")
    stranger = here("bench", *target, "--compare", tiny.drafter, "--compare", tiny.stranger)
    stranger.failed_well("stranger has another vocabulary than target", code=2)
    assert "ONNX" in stranger.hint
    runtime = here("bench", *target, "--compare", f"cuda:{tiny.drafter}")
    runtime.failed_well("there is no runtime 'cuda'", code=2)
    assert runtime.hint == "the runtimes are native, llama, onnx"
    (tmp_path / "empty").mkdir()
    here("bench", *target, "--compare", tmp_path / "empty").failed_well("holds 0 models")


def test_too_little_memory_for_a_compared_model_is_an_error_before_loading(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(describe_machine(), available_memory_bytes=600 * 2**20)
    monkeypatch.setattr(loading_module, "describe_machine", lambda: small)
    result = here("bench", *target, *SMALL, *("--compare", tiny.drafter) * 8)
    result.failed_well("drafter needs about", "may be used")
    assert fake.calls == []


def test_a_context_too_long_for_a_compared_model_is_an_error(
    here: InProcess, tiny: TinyModels, target: tuple[str, ...], tmp_path: Path, fake: FakeRun
) -> None:
    pytest.importorskip("onnxruntime", reason="the ONNX runtime is optional")
    short = tiny._make("short-context", seed=3, context_length=64)
    export_onnx(short, tmp_path / "short", Provenance(name="short"))
    result = here("bench", *target, *SMALL, "--context", "256", "--compare", tmp_path / "short")
    result.failed_well("short has positions for 64 tokens", code=2)
    assert fake.calls == []
