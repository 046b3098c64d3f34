"""The runtime of target and drafter, asked for and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import InProcess
from tests.support.kernel_calls import require_native
from tests.support.processor import first_runtime, processor_runtimes
from tests.support.tiny_models import TinyModels


@pytest.fixture
def options(tiny: TinyModels) -> tuple[str, ...]:
    return ("--target", str(tiny.target), "--draft", str(tiny.drafter), "--context", "300")


def plans(here: InProcess, options: tuple[str, ...]) -> list[Any]:
    """What generating, chatting and planning say of where they run."""
    found = []
    for arguments, stdin in (
        (("generate", "hello", *options, "--max-tokens", "3", "--json"), ""),
        (("chat", *options, "--max-tokens", "3", "--json"), "hello\n"),
        (("plan", *options, "--json"), ""),
    ):
        result = here(*arguments, stdin=stdin)
        assert result.code == 0, result.err
        found.append(json.loads(result.out.splitlines()[0])["plan"])
    return found


def test_the_default_runtime_is_the_processors_first(here: InProcess, options: tuple[str, ...]) -> None:
    for plan in plans(here, options):
        assert plan["target"] == {"model": "target", "runtime": first_runtime(), "device": "cpu", "threads": 1}
    assert f"target on cpu ({first_runtime()})" in here("plan", *options).out


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_the_environment_can_choose_the_runtime(
    here: InProcess, options: tuple[str, ...], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_RUNTIME", runtime)
    assert [plan["target"]["runtime"] for plan in plans(here, options)] == [runtime] * 3


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_plan_prints_the_drafters_runtime(
    here: InProcess, options: tuple[str, ...], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_DRAFT_RUNTIME", runtime)
    monkeypatch.setenv("EDGESPEC_LOOKUP", "false")
    monkeypatch.setenv("EDGESPEC_DEPTH", "1")
    found = here("generate", "hello", *options, "--max-tokens", "3", "--json")
    assert found.code == 0, found.err
    drafter = found.json["plan"]["drafter"]
    assert (drafter["model"], drafter["runtime"], drafter["device"]) == ("drafter", runtime, "cpu")


def test_a_project_file_can_choose_the_runtime(here: InProcess, options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "edgespec.toml").write_text('[profile]\nruntime = "llama"\n')
    assert [plan["target"]["runtime"] for plan in plans(here, options)] == ["llama"] * 3


def test_an_unavailable_runtime_is_reported_in_one_sentence(
    here: InProcess, tiny: TinyModels, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    monkeypatch.setenv("EDGESPEC_RUNTIME", "native")
    narrow = tiny._make("narrow-alone", heads=4, kv_heads=4)
    result = here("generate", "hello", "--target", narrow, "--draft", "none")
    result.failed_well("the native runtime does not run narrow-alone")
    assert result.hint == 'runtime "auto" or "llama" runs it with llama.cpp'
    monkeypatch.setenv("EDGESPEC_DEVICE", "Vulkan0")
    here("generate", "hello", *options).failed_well("runs on the processor, not on Vulkan0", code=2)
    monkeypatch.setenv("EDGESPEC_RUNTIME", "onnx")
    here("generate", "hello", *options).failed_well("EDGESPEC_RUNTIME must be", code=2)
