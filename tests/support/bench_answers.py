"""Answers of a benchmark that never ran, and what one that runs needs of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.run import Answer, RunSettings
from edgespec.bench.suite import Prompt
from edgespec.decoding.stats import DecodeStats
from edgespec.engine import Engine

# From a prompt, an arm and a turn to what is special about that answer.
Make = Callable[[Prompt, str, int], dict[str, Any]]


class FakeRun:
    """Stands for ``run_passes``: remembers what it was asked, and answers as ``make`` says."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.calls: list[tuple[tuple[str, ...], tuple[Prompt, ...], RunSettings, int]] = []

    def __call__(
        self,
        _engine: object,
        arms: Sequence[Arm],
        prompts: Sequence[Prompt],
        settings: RunSettings,
        *,
        first_turn: int = 0,
        on_answer: Callable[[Answer, int, int], None],
    ) -> list[Answer]:
        names = tuple(arm.name for arm in arms)
        self.calls.append((names, tuple(prompts), settings, first_turn))
        answers = []
        total = len(prompts) * len(names)
        for prompt in prompts:
            for name in names:
                answers.append(made(prompt, name, first_turn, self.make(prompt, name, first_turn)))
                on_answer(answers[-1], len(answers), total)
        return answers


def made(prompt: Prompt, arm: str, turn: int, changes: dict[str, Any]) -> Answer:
    """An answer at 100 tokens a second, with ``changes``."""
    fields: dict[str, Any] = {
        "prompt_id": prompt.id, "category": prompt.category, "arm": arm, "turn": turn, "prompt_tokens": 7,
        "tokens": 11, "decode_s": 0.1, "ttft_s": None, "identical": True, "rounds": (),
        "stats": DecodeStats(prompt_tokens=7, emitted_tokens=11),
    }  # fmt: skip
    return Answer(**{**fields, **changes})


def require_depth(engine: Engine, depth: int) -> None:
    """Skip where llama.cpp's kernels keep too few widths bit-equal, whatever the plan makes of them."""
    if engine.depth_cap_allowed < depth:
        pytest.skip(f"needs drafts of {depth} tokens; on this machine only {engine.depth_cap_allowed} are exact")
