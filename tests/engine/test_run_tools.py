"""``Session.run_tools``: schemas of functions, calls with checked arguments, bounded rounds. Calls are scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, ToolResult
from edgespec.engine.functions import MOST_ROUNDS, tools_of
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.answer_parts import AnswerText
from edgespec.text.conversation.pieces import ToolCall
from tests.engine.test_tools import TEMPLATE
from tests.support.tiny_models import TinyModels


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load_speculating(tiny.with_template("tools", TEMPLATE)) as engine:
        yield engine


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the answers say, one after the other, each at its first token; None: what the model says."""
    answers, feed, seen = list[str | None](), AnswerText.feed, dict[int, AnswerText]()

    def scripted(self: AnswerText, token: int, held: int = 0) -> tuple[str, bool]:
        if id(self) not in seen:
            seen[id(self)] = self
            if answers and (text := answers.pop(0)) is not None:
                return text, True
        return feed(self, token, held)

    monkeypatch.setattr(AnswerText, "feed", scripted)
    return answers


def call(arguments: Any, name: str = "weather") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """The weather in a city."""
    return {"city": city, "days": days}


def read(session: Session, *functions: Callable[..., object], **more: Any) -> tuple[Done, list[ToolResult]]:
    events = list[object]()
    done = session.run_tools(functions, "hello", max_tokens=9, on_event=events.append, **more)
    assert done in events
    return done, [event for event in events if isinstance(event, ToolResult)]


def test_a_call_is_made_and_its_result_is_read(session: Session, says: list[str | None]) -> None:
    says += [call({"city": "Paris"}) + "\n" + call({"city": "Rome", "days": 2}), "Sunny."]
    done, results = read(session, weather)
    assert (done.content, done.finish_reason) == ("Sunny.", "stop")
    assert [json.loads(each.text) for each in results] == [{"city": "Paris", "days": 1}, {"city": "Rome", "days": 2}]
    assert not any(each.failed for each in results)
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["content"] for message in session.messages[2:4]] == [each.text for each in results]


def test_without_a_call_the_answer_is_that_of_generate(session: Session) -> None:
    done, results = read(session, weather, temperature=0.9, seed=4)
    assert not results
    session.clear()
    shown = [each.shown for each in tools_of([weather]).values()]
    own = session.generate("hello", tools=shown, max_tokens=9, sampling=Sampling(temperature=0.9, seed=4)).result()
    assert done.token_ids == own.token_ids
    done = session.run_tools([weather], messages=[{"role": "user", "content": "hello"}], max_tokens=9, stop=["\0"])
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": 3}, "city must be a string, got 3"),
        ({"city": "x", "days": True}, "days must be a whole number, got true"),
        ({"city": "x", "days": 10**400}, "days must be a whole number, got a number of 401 digits"),
        ({"city": "x", "days": [[[]]]}, "days must be a whole number, got a list of length 1"),
        ({"days": 2}, "city is missing"),
        ({"city": "x", "__class__": 1}, "there is no argument '__class__'"),
        ({"city": "fail"}, "ValueError: no such city"),
        ({"city": "long"}, "ValueError: " + "x" * 488),
    ],
)  # fmt: skip
def test_what_is_wrong_goes_to_the_model(
    session: Session, says: list[str | None], arguments: dict[str, Any], said: str
) -> None:
    def weather(city: str, days: int = 1) -> str:
        raise ValueError({"fail": "no such city", "long": "x" * 9999}.get(city, "was called"))

    says += [call(arguments), "Sorry."]
    done, (result,) = read(session, weather)
    assert (result.failed, json.loads(result.text)) == (True, {"error": said})
    assert session.messages[2]["content"] == result.text
    assert done.content == "Sorry."


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_of_a_function_is_the_callers(
    session: Session, says: list[str | None], stop: type[BaseException]
) -> None:
    def weather(city: str) -> None:
        raise stop

    says += [call({"city": "x"})]
    with pytest.raises(stop):
        read(session, weather)
    session.clear()
    assert session.generate("hello", max_tokens=2).text


@pytest.mark.parametrize(("rounds", "answers"), [(1, 2), (3, 4), (None, MOST_ROUNDS + 1)])
def test_the_rounds_are_bounded(session: Session, says: list[str | None], rounds: int | None, answers: int) -> None:
    says += [call({"city": "x", "days": each}) for each in range(20)]
    before = len(says)
    done, results = read(session, weather, **({} if rounds is None else {"rounds": rounds}))
    assert (before - len(says), len(results)) == (answers, answers - 1)
    assert not done.tool_calls, "the last answer has no tools"


def test_a_model_that_calls_in_circles_must_answer(session: Session, says: list[str | None]) -> None:
    spaced = call({"city": "x", "days": 1}).replace(": ", " :\n ")
    says += [call({"days": 1, "city": "x"}), spaced, "Well."]
    done, results = read(session, weather)
    assert (done.content, len(results)) == ("Well.", 2)
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    session.clear()
    numbers = iter(range(9))
    says += [*[call({}, "count")] * 3, "Done."]

    def count() -> int:
        return next(numbers)

    done, results = read(session, count)
    assert (done.content, [each.text for each in results]) == ("Done.", ["0", "1", "2"]), "the results differ"


def test_the_choice_of_a_tool_is_that_of_the_first_answer(session: Session) -> None:
    done, results = read(session, weather, rounds=1, tool_choice="none")
    assert not results
    assert done.finish_reason == "length"


def test_a_schema_binds_an_answer_without_calls(session: Session) -> None:
    pytest.importorskip("llguidance", reason="forms need llguidance")
    done = session.run_tools([weather], "hello", schema={"enum": ["a", "b"]}, tool_choice="none", max_tokens=9)
    assert json.loads(done.content) in ("a", "b")


def test_cancelling_while_a_function_runs_ends_the_rounds(session: Session, says: list[str | None]) -> None:
    def weather(city: str) -> str:
        threading.Thread(target=session.cancel).start()
        while not any(each.cancelled for each in session._unbegun):
            pass
        return "sunny"

    says += [call({"city": "x"}) + "\n" + call({"city": "y"}), "never said"]
    done, results = read(session, weather)
    assert (done.finish_reason, done.content, len(results)) == ("cancelled", "", 1)
    assert says == ["never said"]
    assert session.generate("hello", max_tokens=2).text


@pytest.mark.parametrize("when", [ToolCall, Done])
def test_cancelling_between_an_answer_and_its_functions_calls_none(
    session: Session, says: list[str | None], when: type
) -> None:
    called = list[str]()

    def weather(city: str) -> None:
        called.append(city)

    def cancel(event: object) -> None:
        if isinstance(event, when):
            session.cancel()

    says += [call({"city": "x"}), "never said"]
    done = session.run_tools([weather], "hello", max_tokens=9, on_event=cancel)
    assert (done.finish_reason, done.text, called, says) == ("cancelled", "", [], ["never said"])
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert session.generate("hello", max_tokens=2).text


def test_functions_may_run_in_a_thread_of_an_event_loop(session: Session, says: list[str | None]) -> None:
    says += [call({"city": "x"}), "Sunny."]
    done = asyncio.run(asyncio.to_thread(session.run_tools, [weather], "hello", max_tokens=9))
    assert done.content == "Sunny."


# ------------------------------------------------------------------------------------------------- the schemas


@dataclass
class Place:
    name: str
    near: list[str] | None = None


def everything(
    a: str,
    b: Annotated[float, "a temperature"],
    c: Literal["x", 2] = "x",
    d: Place | None = None,
    e: list[int] = [],  # noqa: B006
    f: dict[str, bool] = {},  # noqa: B006
    g: tuple[int, ...] = (),
    h: Any = None,
    i: list = [],  # type: ignore[type-arg]  # noqa: B006
    *,
    j: Sequence[str] = (),
) -> object:
    """All types.

    A second paragraph.
    """
    return a, b, c, d, e, f, g, h, i, j


def test_the_schema_is_the_functions_signature() -> None:
    shown = tools_of([everything])["everything"].shown["function"]
    place: dict[str, object] = {"name": {"type": "string"}}
    place["near"] = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    record = {"type": "object", "properties": place, "required": ["name"], "additionalProperties": False}
    assert shown["description"] == "All types.\n\nA second paragraph."
    assert shown["parameters"]["required"] == ["a", "b"]
    assert shown["parameters"]["properties"] == {
        "a": {"type": "string"},
        "b": {"type": "number", "description": "a temperature"},
        "c": {"enum": ["x", 2]},
        "d": {"anyOf": [record, {"type": "null"}]},
        "e": {"type": "array", "items": {"type": "integer"}},
        "f": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "g": {"type": "array", "items": {"type": "integer"}},
        "h": {},
        "i": {"type": "array", "items": {}},
        "j": {"type": "array", "items": {"type": "string"}},
    }


def test_arguments_arrive_as_the_annotated_types() -> None:
    given = {"a": "é", "b": 2, "d": {"name": "n", "near": ["m"]}, "e": [1], "f": {"k": True}, "g": [2], "i": ["y", 3]}
    got: list[object] = []

    def probe(
        a: str, b: float, d: Place | None, e: list[int], f: dict[str, bool], g: tuple[int, ...], i: list
    ) -> str:  # type: ignore[type-arg]
        got.append((a, b, d, e, f, g, i))
        return "ok"

    assert tools_of([probe])["probe"].called(json.dumps(given)) == ("ok", False)
    assert got == [("é", 2.0, Place("n", ["m"]), [1], {"k": True}, (2,), ["y", 3])]


@pytest.mark.parametrize(
    "arguments", ["[]", '{"city": NaN}', '{"city"', '{"city": ' + "[" * 100_000, '{"city": "\\ud800"}']
)
def test_hostile_arguments_reach_no_function(arguments: str) -> None:
    text, failed = tools_of([weather])["weather"].called(arguments)
    assert failed
    assert len(text) < 600
    assert json.loads(text)["error"]


def test_the_type_of_a_result_does_not_matter() -> None:
    assert tools_of([gives_what_only_a_checker_knows])["gives_what_only_a_checker_knows"].required == {"city"}


@pytest.mark.parametrize(
    ("result", "text"),
    [("so", "so"), (None, "null"), (Place("n"), '{"name": "n", "near": null}'), ({1, }, "{1}"), (b"x", "b'x'")],
)  # fmt: skip
def test_results_are_text_or_json(result: object, text: str) -> None:
    def give() -> object:
        return result

    found, failed = tools_of([give])["give"].called("{}")
    assert (found.strip('"'), failed) == (text, False)


async def waits(city: str) -> None: ...


def of_a_type(city: complex) -> None: ...


def of_an_unknown_name(city: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def of_any(*cities: str) -> None: ...


@dataclass
class Node:
    children: list[Node]


@dataclass
class Torn:
    part: Nowhere  # type: ignore[name-defined]  # noqa: F821


def of_itself(node: Node) -> None: ...


def of_a_torn_type(node: Torn) -> None: ...


def gives_what_only_a_checker_knows(city: str) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ([], "functions must be a list of functions"),
        (weather, "functions must be a list of functions"),
        (["weather"], "a tool must be a function that has a name, not str"),
        ([partial(weather, "x")], "a tool must be a function that has a name, not partial"),
        ([lambda city: city], "tool 0 has no valid name: '<lambda>'"),
        ([weather, weather], "two tools are called weather"),
        ([waits], "the tool waits is a coroutine"),
        ([of_a_type], "the parameter city of the tool of_a_type has a type that JSON does not have"),
        ([of_an_unknown_name], "the annotations of the tool of_an_unknown_name cannot be read"),
        ([of_itself], "the parameter node of the tool of_itself has a type that JSON does not have"),
        ([of_a_torn_type], "the parameter node of the tool of_a_torn_type has a type that JSON does not have"),
        ([of_any], r"the parameter \*cities: 'str' of the tool of_any cannot be given by its name"),
    ],
)
def test_a_function_that_no_model_can_call_is_refused(session: Session, functions: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        session.run_tools(functions, "hello")


def test_a_wrong_number_of_rounds_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="rounds must be at least 1, not 0"):
        session.run_tools([weather], "hello", rounds=0)


# ------------------------------------------------------------------------------------------- counts of tokens


def test_a_session_counts_its_tokens(engine: Engine, session: Session) -> None:
    assert (session.tokens, session.context_length) == (0, engine.plan.context_length)
    done = session.generate("hello world", max_tokens=9).result()
    assert session.tokens == done.stats.prompt_tokens + len(done.token_ids)
    session.generate("more", max_tokens=9).result()
    two = session.tokens
    session.undo()
    assert 0 < session.tokens < two
    with engine.session(messages=session.messages) as same:
        assert same.tokens == session.tokens
    assert engine.count_tokens("") == 0
    assert engine.count_tokens("hello world") == len(engine.tokenizer.encode("hello world"))
    assert engine.count_tokens("\ud800") > 0


def test_the_turn_in_progress_is_not_counted(engine: Engine, session: Session) -> None:
    session.generate("hello world", max_tokens=9).result()
    with engine.session(messages=session.messages) as same, session.generate("more", max_tokens=9) as generation:
        next(generation)
        assert session.tokens == same.tokens
        done = generation.result()
    assert session.tokens == done.stats.prompt_tokens + len(done.token_ids)
