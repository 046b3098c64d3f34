"""Calls that an answer must have: valid in the model's own format, and the same with and without drafting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.errors import InvalidRequestError
from tests.engine.test_tools import TEMPLATE, tool
from tests.support.tiny_models import TinyModels, answer

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS: Any = [tool(parameters=WEATHER), tool("clock", parameters={"type": "object", "properties": {}})]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(tiny.with_template("tools", TEMPLATE), draft=str(tiny.drafter), depth=3) as engine:
        yield engine


def ask(engine: Engine, **settings: Any) -> Done:
    with engine.session() as session:
        return answer(session.generate("hello", **{"tools": TOOLS, "max_tokens": 200, **settings}))


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_a_named_tool_is_called_once_with_valid_arguments_and_drafting_changes_no_token(
    engine: Engine, sampling: Sampling | None
) -> None:
    found = [ask(engine, tool_choice=NAMED, sampling=sampling, depth=depth) for depth in (0, None)]
    for done in found:
        (call,) = done.tool_calls
        own = json.loads(call.arguments)
        assert call.name == "weather"
        assert own.pop("city") in ("Oslo", "Rome")
        assert own.pop("days", 1) in range(1, 10)
        assert not own
        assert not done.content
        assert done.finish_reason == "stop"
    assert found[0].token_ids == found[1].token_ids


def test_a_required_call_is_one_of_the_tools(engine: Engine) -> None:
    for seed in range(4):
        done = ask(engine, tool_choice="required", sampling=Sampling(temperature=2.0, seed=seed))
        assert done.tool_calls
        assert {call.name for call in done.tool_calls} <= {"weather", "clock"}


def test_with_tools_and_a_schema_the_answer_is_a_call_or_json(engine: Engine) -> None:
    kinds = set()
    for seed in range(12):
        sampling = Sampling(temperature=3.0, seed=seed)
        done = ask(engine, schema={"enum": ["<done>", "<end>"]}, sampling=sampling)
        kinds.add(bool(done.tool_calls))
        assert done.tool_calls or json.loads(done.content) in ("<done>", "<end>")
    assert kinds == {True, False}
    done = ask(engine, schema={"enum": [7]}, tool_choice="none")
    assert done.content == "7"


def test_a_forced_call_excludes_other_forms(engine: Engine) -> None:
    for form, said in (({"schema": {}}, "has no other form"), ({"regex": "a"}, "has no other form")):
        with pytest.raises(InvalidRequestError, match=said):
            ask(engine, tool_choice="required", **form)
    with pytest.raises(InvalidRequestError, match="cannot be bound to a regex"):
        ask(engine, regex="a")


def test_arguments_that_cannot_be_followed_are_refused(engine: Engine) -> None:
    strict = tool(parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(InvalidRequestError, match="a call of these tools cannot be followed") as raised:
        ask(engine, tools=[strict], tool_choice="required")
    assert raised.value.param == "tools"
