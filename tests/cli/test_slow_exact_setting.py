"""Commands on a machine where the setting with bit-equal widths is too dear."""

from __future__ import annotations

import pytest

from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from edgespec.planning.choice.planner import EXACT_SETTING_TOO_SLOW
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.calibrating import find_other_faster, fix_plain_ratio, shorten_contention
from tests.support.command_line import InProcess
from tests.support.tiny_models import TinyModels


@pytest.fixture(autouse=True)
def _dear(tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**overrides: object) -> Engine:
        settings = {"store_home": home, "context": 400, "draft": "none", "runtime": "llama", **overrides}
        return tiny.load(**settings)  # type: ignore[arg-type]

    find_other_faster(load, 1.5)
    monkeypatch.setenv("EDGESPEC_THREADS", "1")  # as above
    monkeypatch.setenv("EDGESPEC_RUNTIME", "llama")


@pytest.mark.slow
def test_verify_checks_the_class_whatever_it_costs(here: InProcess, tiny: TinyModels) -> None:
    options = ("--target", str(tiny.target), "--draft", str(tiny.drafter), "--context", "400")
    assert here("generate", "hello", *options, "--max-tokens", "4", "--json").json["plan"]["mode"] == "plain"
    found = here("verify", *options, "--prompts", "1", "--max-tokens", "40", "--suite", _suite(tiny))
    assert found.code == 0, found.err
    assert "the promise holds" in found.out


@pytest.mark.slow
def test_calibrate_measures_the_class_again(
    here: InProcess, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--target", str(tiny.target), "--draft", "none", "--context", "400")
    shorten_contention(monkeypatch)
    fix_plain_ratio(monkeypatch, 0.5)  # others are twice as fast: still too dear
    found = here("calibrate", "--quick", *options, "--json").json
    assert found["width_classes"][0]["settings"]["kv_type"] == LlamaSettings().kv_type
    assert found["plan"]["numeric_class"]["kv_type"] == "f16"
    assert found["plan"]["reasons"][-1] == f"plain: {EXACT_SETTING_TOO_SLOW}"
    fix_plain_ratio(monkeypatch, 1.5)  # it was noise
    found = here("calibrate", "--quick", *options, "--json").json
    assert found["plan"]["numeric_class"]["kv_type"] == LlamaSettings().kv_type
    assert EXACT_SETTING_TOO_SLOW not in "".join(found["plan"]["reasons"])
    said = here("calibrate", "--quick", *options).out
    assert f"plan         {found['plan']['reasons'][-1].split(',')[0]}" in said


def test_a_lost_drafter_is_named_beside_the_dear_class(here: InProcess, tiny: TinyModels) -> None:
    options = ("--target", str(tiny.target), "--draft", str(tiny.stranger), "--context", "400", "--max-tokens", "4")
    off = here("generate", "hello", *options, "--json").json["speculation_off"]
    assert off.startswith(EXACT_SETTING_TOO_SLOW)
    assert "no model drafter: stranger has another vocabulary" in off


def _suite(tiny: TinyModels) -> str:
    path = tiny.folder / "one.jsonl"
    path.write_text('{"id": "one", "category": "chat", "prompt": "the people use water and the people use water"}\n')
    return str(path)
