"""Benchmarks of several answers on one engine, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks import batched_answers, batched_clients, prompts_under_load
from edgespec.engine.engine import Engine
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels

WORDS = ("hello world", "the world of that", "and in a world")


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    require_native()
    with tiny.load_speculating(runtime="native", draft_runtime="native", context=2000, threads=2) as engine:
        yield engine


def test_an_answer_is_the_same_in_every_run() -> None:
    asked = [batched_answers.wanted(number, WORDS) for number in range(200)]
    assert asked == [batched_answers.wanted(number, WORDS) for number in range(200)]
    assert {each.drafting for each in asked} == {"planned", "plain", "chains", "trees"}
    assert {each.sampling.greedy for each in asked} == {True, False}
    assert 10 < sum(each.leave_after is not None for each in asked) < 60


def test_tokens_are_compared_as_far_as_an_answer_was_read() -> None:
    each = batched_answers.wanted(0, WORDS)
    whole, left = replace(each, leave_after=None), replace(each, leave_after=2)
    assert batched_answers.is_same(whole, [1, 2], [1, 2])
    assert not batched_answers.is_same(whole, [1, 2], [1])
    assert batched_answers.is_same(left, [1, 2, 3], [1, 2])
    assert not batched_answers.is_same(left, [1, 2, 3], [1, 3])
    assert not batched_answers.is_same(left, [1, 2, 3], [])


def test_answers_in_batches_are_compared_with_answers_alone(engine: Engine) -> None:
    report = batched_answers.measure(engine, WORDS, 24, (4,))
    found = report["clients"]["4"]
    assert found["different"] == []
    assert found["alternatives"] > 0
    assert found["with_other_answers"] > 0


def test_another_answer_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = batched_answers.answer

    def altered(own: batched_answers.Client, each: batched_answers.Wanted, *given: object, late: bool) -> list[int]:
        found = answer(own, each, *given, late=late)  # type: ignore[arg-type]
        return [found[0] + 1, *found[1:]] if late and each.prompt.endswith("(3)") else found

    monkeypatch.setattr(batched_answers, "answer", altered)
    assert batched_answers.measure(engine, WORDS, 6, (2,))["clients"]["2"]["different"] == [3]


def test_every_client_asks_until_no_question_is_left(engine: Engine) -> None:
    seconds, found = batched_clients.run_clients(engine, 3, 4, 0)
    assert seconds > 0
    assert sorted(found) == list(range(len(batched_clients.QUESTIONS)))


def test_answers_during_a_prompt_are_compared_with_the_same_tokens_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_under_load, "BEFORE_S", 0.01)
    monkeypatch.setattr(prompts_under_load, "LONG_TOKENS", 500)  # long enough for tokens of the answers
    found = prompts_under_load.while_reading(engine, 2)
    assert found["kept"] > 0
    assert found["longest_gap_s"] > 0
    assert found["prompt_s"] > 0
