"""Which prompts are repeated, how often, and which answers are kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgespec.bench import run as run_module
from edgespec.bench.repeats import DISTURBED, REPEATS, disturbed, run_until_quiet
from edgespec.bench.run import Answer, RunSettings
from edgespec.bench.suite import Prompt
from tests.support.bench_answers import FakeRun, Make, answered

ENGINE: Any = object()
PROMPTS = [Prompt(id=name, category="chat", prompt=name) for name in ("a", "b", "c")]


class NamedArm:
    def __init__(self, name: str) -> None:
        self.name = name


ARMS: Any = [NamedArm("plain"), NamedArm("again"), NamedArm("planned")]


def ran(monkeypatch: pytest.MonkeyPatch, make: Make, passes: int = 3) -> tuple[FakeRun, list[Answer], list[Any]]:
    fake, told = FakeRun(make), []
    monkeypatch.setattr(run_module, "run_passes", fake)
    answers = run_until_quiet(
        ENGINE, ARMS, PROMPTS, RunSettings(passes=passes), on_repeat=lambda *event: told.append(event)
    )
    return fake, answers, told


def ids(fake: FakeRun) -> list[tuple[list[str], int]]:
    return [([prompt.id for prompt in prompts], first_turn) for _, prompts, _, first_turn in fake.calls]


def again(*ratios: float, prompt: str = "p") -> list[Answer]:
    """Answers of the plain arm and of the again arm, whose speed is ``ratios`` times plain's, pass by pass."""
    answers = []
    for number, ratio in enumerate(ratios):
        answers.append(answered(prompt=prompt, turn=2 * number))
        answers.append(answered("again", prompt=prompt, turn=2 * number, decode_s=0.1 / ratio))
    return answers


def test_a_run_without_disturbances_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, answers, told = ran(monkeypatch, lambda *_: {})
    assert ids(fake) == [(["a", "b", "c"], 0)]
    assert told == []
    assert len(answers) == 3 * 3


def test_only_disturbed_prompts_are_repeated_and_all_answers_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # One pass a run. b is disturbed in the first pass, and by its median until two quiet passes follow; c always is.
    def make(prompt: Prompt, arm: str, turn: int) -> dict[str, Any]:
        slow = arm == "again" and (prompt.id == "c" or (prompt.id == "b" and turn == 0))
        return {"decode_s": 0.11 if slow else 0.1}

    fake, answers, told = ran(monkeypatch, make)
    assert ids(fake) == [(["a", "b", "c"], 0), (["b", "c"], 6), (["b", "c"], 12), (["c"], 18)]
    assert [repeat for _, repeat in told] == [1, 2, 3], "at most three repeats"
    assert [prompt.id for prompt in told[0][0]] == ["b", "c"]
    kept = {(a.prompt_id, a.turn) for a in answers if a.arm == "planned"}
    assert kept == {("a", 0), ("b", 0), ("b", 6), ("b", 12), ("c", 0), ("c", 6), ("c", 12), ("c", 18)}
    assert len({(a.arm, a.prompt_id, a.turn) for a in answers}) == len(answers)
    assert disturbed(answers) == ["c"], "still disturbed, and reported"


@pytest.mark.parametrize(
    ("within_s", "repeated"), [(None, [3, 3, 3]), (100.0, [3, 3, 3]), (5.0, [2]), (3.5, []), (1.0, [])]
)
def test_repeats_that_would_not_end_in_time_are_left_out(
    monkeypatch: pytest.MonkeyPatch, within_s: float | None, repeated: list[int]
) -> None:
    now = 0.0

    def run_passes(_engine: object, _arms: object, prompts: list[Prompt], *_: object, **__: object) -> list[Answer]:
        nonlocal now
        now += len(prompts)  # a second each
        return [answer for prompt in prompts for answer in again(1.5, prompt=prompt.id)]

    monkeypatch.setattr(run_module, "run_passes", run_passes)
    told = list[int]()
    run_until_quiet(
        ENGINE,
        ARMS,
        PROMPTS,
        RunSettings(),
        on_repeat=lambda prompts, _: told.append(len(prompts)),
        within_s=within_s,
        clock=lambda: now,
    )
    assert told == repeated


def test_repeated_passes_continue_the_turn_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _, _ = ran(monkeypatch, lambda _, arm, __: {"decode_s": 0.2 if arm == "again" else 0.1}, passes=5)
    assert [first_turn for _, first_turn in ids(fake)] == [10 * repeat for repeat in range(1 + REPEATS)]


def test_without_the_again_arm_no_prompt_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(lambda _, __, turn: {"decode_s": 0.1 + turn})
    monkeypatch.setattr(run_module, "run_passes", fake)
    run_until_quiet(ENGINE, [ARMS[0], ARMS[2]], PROMPTS, RunSettings())
    assert len(fake.calls) == 1


def test_every_repeat_gets_the_callers_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def run_passes(*arguments: object, **more: object) -> list[Answer]:
        given.append((arguments, more))
        return again(1.5, prompt="a")

    monkeypatch.setattr(run_module, "run_passes", run_passes)
    stop, settings = threading.Event(), RunSettings(passes=1)

    def tell(_answer: Answer, _done: int, _total: int) -> None:
        """Not called."""

    run_until_quiet(ENGINE, ARMS, PROMPTS, settings, on_answer=tell, stop=stop)
    assert [arguments for arguments, _ in given] == [
        (ENGINE, ARMS, PROMPTS, settings), *[(ENGINE, ARMS, PROMPTS[:1], settings)] * REPEATS
    ]  # fmt: skip
    assert all(more["stop"] is stop and more["on_answer"] is tell for _, more in given)


def test_a_prompt_is_disturbed_by_the_median_of_its_passes() -> None:
    assert DISTURBED == 0.02
    assert disturbed(again(1.0, 1.0, 3.0)) == []
    assert disturbed(again(1.03, 1.0, 1.04)) == ["p"]
    assert disturbed(again(1.019, 1.019, 1.019)) == []
    assert disturbed(again(1.021, 1.021, 1.021)) == ["p"]


@pytest.mark.parametrize("ratio", [0.9, 0.978, 0.99, 1.0, 1.015, 1.021, 1.3])
def test_a_faster_second_plain_arm_also_counts_as_disturbed(ratio: float) -> None:
    assert disturbed(again(ratio)) == disturbed(again(1 / ratio))
