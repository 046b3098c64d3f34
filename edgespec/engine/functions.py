"""Python functions as tools: what the model is shown of them, its calls, and the rounds up to its answer."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from edgespec.engine.answer import Generation
from edgespec.engine.events import Done, Event, ToolResult
from edgespec.errors import InvalidRequestError
from edgespec.files.checked import Kind, Length, Range, WrongValueError, kind_of, no_constant, to_json
from edgespec.text.conversation.pieces import ToolCall
from edgespec.text.conversation.tools import check_tools
from edgespec.text.request_budget import RequestBudget

Function: TypeAlias = Callable[..., object]
OnEvent: TypeAlias = Callable[[Event | ToolResult], object]

# Answers with calls before the one without. A choice, not a measurement: room for a chain of calls, and an end for a
# model that calls in circles.
MOST_ROUNDS = 8

_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_TYPES = "str, int, float, bool, None, Literal, list, dict, dataclasses and unions of these"
_LONGEST_ERROR = 500  # characters of an error that the model reads


@dataclass(frozen=True, slots=True)
class _Tool:
    """A function, what the model is shown of it, and what each of its arguments may be."""

    function: Function
    shown: dict[str, Any]
    kinds: Mapping[str, Kind[Any]]
    required: frozenset[str]

    def called(self, arguments: str) -> tuple[str, bool]:
        """(the result as text, whether it is an error). Raises nothing that a program may go past."""
        try:
            result = self.function(**self._read(arguments))
            text = result if isinstance(result, str) else json.dumps(to_json(result), ensure_ascii=False, default=str)
        except WrongValueError as error:
            return _error(str(error)), True
        except Exception as error:
            logging.getLogger("edgespec.tools").info("a tool failed", exc_info=True)
            return _error(f"{type(error).__name__}: {error}"), True
        return text, False

    def _read(self, arguments: str) -> dict[str, Any]:
        try:
            given = json.loads(arguments, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise WrongValueError(f"the arguments are not JSON: {error}", joint=": ") from error
        if not isinstance(given, dict):
            raise WrongValueError("the arguments are not a JSON object", joint=": ")
        for name in given:
            if name not in self.kinds:
                raise WrongValueError(f"there is no argument {name!r:.60}", joint=": ")
        if missing := sorted(self.required - set(given)):
            raise WrongValueError("is missing", [missing[0]])
        found = {}
        for name, value in given.items():
            try:
                found[name] = self.kinds[name].read(value)
            except WrongValueError as error:
                raise error.within(name) from None
        return found


def _error(text: str) -> str:
    return json.dumps({"error": text[:_LONGEST_ERROR]}, ensure_ascii=False)


# -------------------------------------------------------------------------------------------- the schema


def tools_of(functions: Sequence[Function]) -> dict[str, _Tool]:
    """The functions by name, each with its schema. Raises InvalidRequestError for one that a model cannot call."""
    if not isinstance(functions, Sequence) or isinstance(functions, str) or not functions:
        raise InvalidRequestError("functions must be a list of functions", param="functions")
    tools = [_tool(each) for each in functions]
    check_tools([each.shown for each in tools])  # names that are taken twice, or have other characters
    return {each.shown["function"]["name"]: each for each in tools}


def _tool(function: Function) -> _Tool:
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        problem = f"a tool must be a function that has a name, not {type(function).__name__}"
        raise InvalidRequestError(problem, param="functions")
    if inspect.iscoroutinefunction(function):
        raise InvalidRequestError(
            f"the tool {name} is a coroutine", hint="give a function that waits for its result", param="functions"
        )
    kinds, schemas, required = dict[str, Kind[Any]](), dict[str, Any](), list[str]()
    hints = _hints(function, name)
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            problem = f"the parameter {each} of the tool {name} cannot be given by its name"
            raise InvalidRequestError(problem, param="functions")
        hint = hints.get(each.name, Any)
        try:
            kinds[each.name], schemas[each.name] = kind_of(hint), _schema(hint)
        except Exception:  # also a dataclass that names itself, or what is not there
            problem = f"the parameter {each.name} of the tool {name} has a type that JSON does not have: {hint}"
            raise InvalidRequestError(problem, hint=f"known: {_TYPES}", param="functions") from None
        if each.default is each.empty:
            required.append(each.name)
    shown = {"name": name, "parameters": {"type": "object", "properties": schemas, "required": required}}
    if said := inspect.getdoc(function):
        shown["description"] = said
    return _Tool(function, {"type": "function", "function": shown}, kinds, frozenset(required))


def _hints(function: Function, name: str) -> dict[str, Any]:
    own, scope = cast(Any, function), None
    try:
        stated = getattr(function, "__annotations__", {})
        if "return" in stated and not hasattr(function, "__no_type_check__"):
            # The result's type may be what only a type checker imports.
            own = SimpleNamespace(__annotations__={each: hint for each, hint in stated.items() if each != "return"})
            scope = getattr(inspect.unwrap(function), "__globals__", None)
        return get_type_hints(own, scope, include_extras=True)
    except Exception as error:  # an annotation as text may be any expression
        problem = f"the annotations of the tool {name} cannot be read: {error}"
        raise InvalidRequestError(problem, param="functions") from error


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of an annotation that ``kind_of`` reads. Raises TypeError for others."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        schema = _schema(arguments[0])
        for mark in hint.__metadata__:
            schema |= {"description": mark} if isinstance(mark, str) else _bounds(mark)
        return schema
    if hint is Any:
        return {}
    if origin in _JSON:
        return {"type": _JSON[origin]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each) for each in arguments]}
    if origin in (list, abc.Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _schema(arguments[0]) if arguments else {}}
    if origin in (dict, abc.Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1]) if arguments else {}}
    if dataclasses.is_dataclass(origin):
        return _record(origin)
    raise TypeError(f"no JSON schema for {hint}")


def _bounds(mark: object) -> dict[str, Any]:
    if isinstance(mark, Range):
        least = {"exclusiveMinimum" if mark.above else "minimum": mark.least}
        return least | ({"maximum": mark.most} if mark.most < float("inf") else {})
    if isinstance(mark, Length):
        return {"minLength": mark.least} | ({"maxLength": mark.most} if mark.most < float("inf") else {})
    return {}


def _record(record: Any) -> dict[str, Any]:
    hints = get_type_hints(record, include_extras=True)
    fields = [each for each in dataclasses.fields(record) if each.init]
    needed = [
        each.name
        for each in fields
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]
    properties = {each.name: _schema(hints[each.name]) for each in fields}
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


# -------------------------------------------------------------------------------------------- the rounds


def _plain_json(arguments: str) -> str:
    """Arguments without the blanks and the order in which a model wrote them; other text as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRounds:
    """Answers with calls, the calls' results, and the answer without calls.

    ``generate`` and ``messages`` are the session's, whose ``cancel`` reaches ``whole`` during all of them. ``begin``
    makes the budget of the next answer, which ``cancel`` reaches until the answer begins.
    """

    generate: Callable[..., Generation]
    messages: Callable[[], Sequence[Mapping[str, Any]]]
    whole: RequestBudget
    begin: Callable[[], RequestBudget]
    tools: Mapping[str, _Tool]
    on_event: OnEvent
    settings: Mapping[str, Any]

    def run(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        rounds: int,
    ) -> Done:
        """The last answer's Done. After ``rounds`` answers with calls the tools are taken away from the model."""
        done = self._answer(prompt, messages, tool_choice)
        told: list[tuple[str, str, str]] = []
        asked: list[Mapping[str, Any]] = []  # with the latest results, without the answer to them
        for number in range(rounds):
            if not done.tool_calls or done.finish_reason == "cancelled":
                return done
            before, told, results = told, [], list[dict[str, Any]]()
            for call in done.tool_calls:
                if self.whole.cancelled:
                    return self._answer(prompt, messages, None)  # without a token: the conversation stays as it is
                text = self._call(call)
                told.append((call.name, _plain_json(call.arguments), text))
                results.append({"role": "tool", "tool_call_id": call.id, "content": text})
            # A model that calls in circles would not stop. It answers without its repeated calls: with them in its
            # conversation Qwen2.5-Coder-1.5B writes the call as text.
            circle = told == before
            asked = asked if circle else [*self.messages(), *results]
            last = circle or number == rounds - 1
            done = self._answer(None, asked, "none" if last else None)
            if last:
                return done
        return done

    def _answer(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
    ) -> Done:
        budget = self.begin()
        if self.whole.cancelled:
            budget.cancel()
        shown = [each.shown for each in self.tools.values()]
        with self.generate(
            prompt, messages=messages, tools=shown, tool_choice=tool_choice, budget=budget, **self.settings
        ) as generation:
            for event in generation:
                self.on_event(event)
            return generation.result()

    def _call(self, call: ToolCall) -> str:
        text, failed = self.tools[call.name].called(call.arguments)
        self.on_event(ToolResult(call, text, failed))
        return text
