"""The benchmark of structured answers: its prompts, and its figures on answers made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.structured import ARMS, Answer, allowed, figures, first_figures, in_turns, judged, parsed, prompts
from edgespec.text.grammar.form import form_of

GOOD = Answer(finished=True, valid=True, right=True, seconds=1.0, tokens_per_s=20.0, ids=(1, 2))


def test_sixty_prompts_hold_their_values_and_a_schema_that_allows_them() -> None:
    tasks = prompts()
    assert len({task["id"] for task in tasks}) == len({task["prompt"] for task in tasks}) == 60
    for task in tasks:
        assert form_of(task["schema"]) is not None
        assert allowed(task["schema"], task["expected"]), task["id"]
        assert not allowed(task["schema"], {**task["expected"], "more": 1})
        for value in task["expected"].values():
            assert not isinstance(value, str) or value.lower() in task["prompt"].lower(), task["id"]


def test_an_object_within_an_object_has_no_other_properties_either() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {"own": inner}}
    assert allowed(schema, {"own": {"a": 1}})
    for wrong in ({"own": {"a": 1, "b": 2}}, {"own": {}}, {"own": {"a": "1"}}, None):
        assert not allowed(schema, wrong)


def test_a_text_that_is_not_json_has_no_value() -> None:
    assert parsed('{"a": 1}') == {"a": 1}
    assert parsed('```json\n{"a": 1}\n```') is parsed("") is None


def test_values_are_read_within_a_frame_which_is_not_valid_and_keep_their_types() -> None:
    task = next(task for task in prompts() if task["expected"].get("express") is True)
    text = json.dumps(task["expected"])
    stats = SimpleNamespace(ttft_s=0.5, decode_s=None, decode_tokens_per_s=None)

    def judge(text: str, reason: str = "stop") -> Answer:
        done: Any = SimpleNamespace(text=text, finish_reason=reason, stats=stats, token_ids=(1,))
        return judged(task, done)

    assert judge(text) == Answer(finished=True, valid=True, right=True, seconds=0.5, tokens_per_s=None, ids=(1,))
    framed, typed, cut = judge(f"```json\n{text}\n```"), judge(text.replace("true", "1")), judge(text[:-1], "length")
    assert (framed.valid, framed.right) == (False, True)
    assert (typed.valid, typed.right) == (False, False)
    assert (cut.finished, cut.valid, cut.right) == (False, False, False)


def test_figures_are_shares_of_all_answers_and_ratios_by_prompt() -> None:
    cut = Answer(finished=False, valid=False, right=False, seconds=3.0, tokens_per_s=10.0, ids=(1, 3))
    found = figures(
        {
            "free": [GOOD, cut],
            "plain": [replace(GOOD, tokens_per_s=10.0), GOOD],
            "drafted": [GOOD, replace(GOOD, tokens_per_s=40.0)],
            "alone": [replace(GOOD, tokens_per_s=None), replace(GOOD, ids=(1, 4))],
            "compact": [GOOD, GOOD],
            "spaced": [GOOD, replace(GOOD, ids=(5, 6, 7))],
        }
    )
    assert found["tokens_per_s_ratios"] == pytest.approx(
        {"drafted_over_free": 2.0, "drafted_over_plain": 2.0, "alone_over_plain": 1.0}
    )
    assert (found["prompts"], found["same_ids"]) == (2, 1)
    free = {"finished": 0.5, "valid": 0.5, "right": 0.5, "tokens": 4, "seconds_per_finished": 4.0}
    assert found["arms"]["free"] == free
    assert found["arms"]["drafted"]["seconds_per_finished"] == 1.0


def test_without_a_finished_answer_there_are_no_seconds_of_one() -> None:
    cut = replace(GOOD, finished=False, tokens_per_s=None)
    found = figures({arm: [cut] for arm in ARMS})
    assert found["arms"]["plain"]["seconds_per_finished"] is None
    assert set(found["tokens_per_s_ratios"].values()) == {None}


def test_the_delay_of_the_first_token_is_the_median_of_pairs() -> None:
    pairs = [(0.030, 0.031), (0.034, 0.036), (0.030, 0.034), (0.030, 0.330), (0.030, 0.033)]
    found = first_figures(pairs)
    assert found == pytest.approx({"first_token_ms": 30.0, "first_token_later_ms": 3.0, "middle_half_ms": 2.0})


def test_turns_are_one_answer_with_the_median_of_their_times() -> None:
    turns = [
        replace(GOOD, seconds=seconds, tokens_per_s=rate) for seconds, rate in ((3.0, 8.0), (1.0, 12.0), (2.0, None))
    ]
    assert in_turns(turns) == replace(GOOD, seconds=2.0, tokens_per_s=10.0)
    assert in_turns([replace(GOOD, tokens_per_s=None)]).tokens_per_s is None
