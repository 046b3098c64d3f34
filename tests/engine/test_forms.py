"""Answers of a given form, on every runtime: valid, and the same with and without drafting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.errors import ConstraintError, InvalidRequestError
from tests.engine.test_ends import SAMPLINGS, ending
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

assert ending  # the fixture: a model and its drafter on every runtime

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "new": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "new"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"schema": SCHEMA},
    "compact": {"schema": json.dumps(SCHEMA), "spacing": "compact"},
    "regex": {"regex": "[a-f]{3}(-[0-9]{2}){1,3}"},
    "grammar": {"grammar": 'root ::= "one" | "two" root'},
    "choice": {"choice": ["yes, of course", "yes, perhaps", "no"]},
}


def valid(form: str, text: str) -> bool:
    if form in ("schema", "compact"):
        own = json.loads(text)
        spaced = json.dumps(own) if form == "schema" else json.dumps(own, separators=(",", ":"))
        return (
            text == spaced
            and list(own) == ["colour", "sizes", "new"]
            and own["colour"] in ("red", "green", "blue")
            and all(type(size) is int and 0 <= size <= 99 for size in own["sizes"])
            and len(own["sizes"]) <= 4
            and type(own["new"]) is bool
        )
    if form == "choice":
        return text in FORMS["choice"]["choice"]
    return bool(re.fullmatch({"regex": FORMS["regex"]["regex"], "grammar": "(two)*one"}[form], text))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "keyed", "rejection"])
def test_an_answer_keeps_its_form_and_drafting_changes_no_token(ending: Engine, sampling: Sampling | None) -> None:
    for form, asked in FORMS.items():
        found: list[Done] = []
        for depth in (0, None, 2):
            with ending.session() as session:
                found.append(
                    answer(session.generate("hello world", max_tokens=300, sampling=sampling, depth=depth, **asked))
                )
        for done in found:
            assert done.finish_reason == "stop" or form == "grammar"  # which has texts of any length
            assert done.finish_reason == "length" or valid(form, done.text), done.text
        if sampling is None or sampling.rule == "keyed":
            assert len({done.token_ids for done in found}) == 1
        if form == "schema" and ending.plan.depth_cap:
            assert found[2].stats.accepted > 0


def test_answers_that_are_decoded_together_keep_their_own_forms(tiny: TinyModels) -> None:
    require_native()
    ways: list[dict[str, Any]] = [{}, *FORMS.values()] * 2
    with tiny.load(tiny.ending, draft=str(tiny.ending), runtime="native", draft_runtime="native", depth=3) as engine:

        def ask(form: dict[str, Any]) -> tuple[int, ...]:
            with engine.session() as session:
                return answer(session.generate("one two", max_tokens=60, sampling=SAMPLINGS[1], **form)).token_ids

        alone = [ask(form) for form in ways]
        with ThreadPoolExecutor(len(ways)) as threads:
            assert list(threads.map(ask, ways)) == alone


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(tiny.target, depth=3) as engine:
        yield engine


def test_an_answer_that_cannot_keep_its_form_ends_with_an_error_and_the_session_is_usable(engine: Engine) -> None:
    with engine.session() as session:
        (token,) = {ids[0] for ids in [engine.tokenizer.encode("Z")[-1:]]}
        with pytest.raises(ConstraintError, match="allows none of the scored tokens"):
            answer(session.generate("hello", regex="Z", sampling=Sampling(logit_bias={token: -100})))
        assert answer(session.generate("hello", choice=["a"], max_tokens=9)).text == "a"
        assert len(answer(session.generate("hello", max_tokens=9)).token_ids) == 9, "a form is that of one answer"


def test_a_session_keeps_no_grammar_between_answers(engine: Engine) -> None:
    with engine.session() as session:
        generation = session.generate("hello", choice=["one", "two"])
        next(generation)
        assert session._chooser.bound is not None
        assert answer(generation).text in ("one", "two")
        assert session._chooser.bound is None


def test_an_answer_that_the_token_limit_cuts_says_so(engine: Engine) -> None:
    with engine.session() as session:
        done = answer(session.generate("hello", schema=SCHEMA, max_tokens=5))
    assert done.finish_reason == "length"
    assert json.dumps(json.loads('{"colour": "red"}'))[:5] == done.text[:5]


def test_keywords_that_a_lenient_schema_loses_are_a_notice(engine: Engine) -> None:
    schema = {"enum": ["a", "b"], "not": {"const": "b"}}
    with engine.session() as session:
        with pytest.raises(InvalidRequestError, match="cannot be followed"):
            session.generate("hello", schema=schema)
        events = list(session.generate("hello", schema=schema, strict=False, max_tokens=20))
    assert any("not" in str(event) for event in events if type(event).__name__ == "Notice")


def test_log_probabilities_of_a_forced_choice_are_those_among_the_choices(engine: Engine) -> None:
    with engine.session() as session:
        events = list(session.generate("hello", choice=["yes", "no"], logprobs=20, max_tokens=20))
    first = next(event for event in events if getattr(event, "tokens", ())).tokens[0]
    assert {each.text[:1] for each in first.top} <= {"y", "n"}
