"""The judgement of the acceptance step for Optimum, without models."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
GOOD = {"text": "An answer.", "as_llama_cpp": True, "drafted_as_alone": True, "proposed": 9, "accepted": 3}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("acceptance_optimum")


@pytest.mark.parametrize(
    ("keep", "q4", "verdict"),
    [
        ({}, {}, True),
        ({}, {"as_llama_cpp": False}, True),
        ({"as_llama_cpp": False}, {}, False),
        ({"text": " "}, {}, False),
        ({}, {"drafted_as_alone": False}, False),
        ({}, {"accepted": 0}, False),
    ],
)
def test_it_holds_if_both_answer_and_draft(
    module: ModuleType, keep: dict[str, Any], q4: dict[str, Any], verdict: bool
) -> None:
    assert module.holds({"keep": {**GOOD, **keep}, "q4": {**GOOD, **q4}}) is verdict


def test_one_of_two_is_not_enough(module: ModuleType) -> None:
    assert not module.holds({"keep": GOOD})
    assert not module.holds({})


def test_the_step_is_listed(module: ModuleType) -> None:
    assert module.OPTIMUM_STEPS["optimum-chats"] is module.optimum_chats


def test_a_command_that_fails_says_why(module: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="missing"):
        module.edgespec("export", "missing.gguf", "--to", "gguf", "-o", "out")
