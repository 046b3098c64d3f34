"""Invented answers of a benchmark, and what a real run needs of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.run import Answer, RunSettings
from edgespec.bench.suite import Prompt
from edgespec.decoding.round_base import DecodeStats
from edgespec.engine.engine import Engine
from edgespec.interfaces.policy import RoundRecord

# From a prompt, an arm and a turn to the fields of that answer that differ from ``made``.
Make = Callable[[Prompt, str, int], dict[str, Any]]


class FakeRun:
    """Stands in for ``run_passes``: records its calls and answers as ``make`` says."""

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
        on_answer: Callable[[Answer, int, int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[Answer]:
        names = tuple(arm.name for arm in arms)
        self.calls.append((names, tuple(prompts), settings, first_turn))
        answers = []
        total = len(prompts) * len(names)
        for prompt in prompts:
            for name in names:
                answers.append(made(prompt, name, first_turn, self.make(prompt, name, first_turn)))
                if on_answer is not None:
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


def answered(
    arm: str = "plain",
    *,
    prompt: str = "p",
    category: str = "chat",
    turn: int = 0,
    tokens: int = 11,
    decode_s: float = 0.1,
    ttft_s: float | None = None,
    identical: bool = True,
    rounds: Sequence[RoundRecord] = (),
) -> Answer:
    stats = DecodeStats(prompt_tokens=7, emitted_tokens=tokens)
    for record in rounds:
        stats.add_round(record)
    return Answer(
        prompt_id=prompt, category=category, arm=arm, turn=turn, prompt_tokens=7, tokens=tokens, decode_s=decode_s,
        ttft_s=ttft_s, identical=identical, rounds=tuple(rounds), stats=stats,
    )  # fmt: skip


def require_depth(engine: Engine, depth: int) -> None:
    """Skip if llama.cpp's kernels keep too few widths bit-equal for ``depth``, whatever the plan."""
    if engine.pair.depth_cap_allowed < depth:
        pytest.skip(f"needs drafts of {depth} tokens; on this machine only {engine.pair.depth_cap_allowed} are exact")
