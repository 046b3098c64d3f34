"""The form of an answer, as requests of four programs name it, and the threads on which it is compiled."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, InvalidRequestError, RuntimeUnavailableError
from edgespec.server.errors import ApiError, sentence
from edgespec.server.json_schema import Schema
from edgespec.server.threads import Steps, Threads
from edgespec.text.conversation.tools import check_tools, choose_tools
from edgespec.text.grammar.form import Form, form_of
from edgespec.text.request_budget import RequestBudget

# The costliest forms take half a second of one processor.
MOST_COMPILING = 2

RESPONSE_FORMAT: Schema = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
}
OUTPUT_FORMAT: Schema = {
    "type": ["object", "null"],
    "required": ["type", "schema"],
    "properties": {"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}},
}
SCHEMA: Schema = {"anyOf": [{"type": ["object", "null"]}, {"type": "string"}, {"const": False}]}
TEXT: Schema = {"anyOf": [{"type": ["string", "null"]}, {"const": False}]}
MEMBERS: Schema = {"anyOf": [{"type": ["object", "null"]}, {"const": False}]}

# Members of vLLM's structured_outputs that name a form, by the argument of ``form_of``.
_STRUCTURED = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A form, and the field that names it."""

    form: Form
    field: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request says of the form of its answers."""

    form: AskedForm | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None

    @property
    def field(self) -> str:
        """The field that asks for a form."""
        return "tool_choice" if self.form is None else self.form.field


def asked(kind: str, name: str) -> Callable[[Any], AskedForm | None]:
    """Reads the values of the field ``name``, which are forms of one kind. Empty ones name none."""
    return lambda given: None if given is False or given in ("", []) else _form(name, **{kind: given})


def _form(name: str, **arguments: Any) -> AskedForm | None:
    try:
        form = form_of(**{"lenient": True, **arguments})
    except InvalidRequestError as error:
        raise ApiError(f"{name}: {sentence(error)}", param=name) from error
    return None if form is None else AskedForm(form, name)


def _any_object(name: str) -> AskedForm | None:
    """Any object, whose names the model chooses: it finds better ones in the blanks that it is used to."""
    return _form(name, schema={"type": "object"}, spacing="free")


def narrower(one: AskedForm, other: AskedForm) -> AskedForm | None:
    """The one of two forms that keeps the other too; None if neither does."""
    if one == other:
        return one
    for less, more in ((one, other), (other, one)):
        is_stricter = replace(less.form, lenient=True) == more.form
        if is_stricter or (more == _any_object(more.field) and _is_of_objects(less.form)):
            return less
    return None


def _is_of_objects(form: Form) -> bool:
    return form.kind == "schema" and json.loads(form.text).get("type") == "object"


def response_format(given: Mapping[str, Any]) -> AskedForm | None:
    """OpenAI's field. llama.cpp takes a schema beside either type of JSON, and as OpenAI does. Raises ApiError."""
    if given["type"] == "text":
        return None
    name, member = "response_format.json_schema", given.get("json_schema")
    if given["type"] == "json_object" and not (isinstance(member, Mapping) and "schema" in member):
        schema = given.get("schema")
        return _form("response_format.schema", schema=schema) if schema else _any_object("response_format")
    if member is None and "schema" in given:
        return _json_schema(given, "response_format")
    if not isinstance(member, Mapping):
        raise ApiError(f"{name} must be an object with a schema", param=name)
    return _json_schema(member, name)


def text_format(given: Mapping[str, Any]) -> AskedForm | None:
    """The field of OpenAI's Responses API: ``response_format`` whose schema is not in an inner object."""
    return _json_schema(given, "text.format") if given["type"] == "json_schema" else response_format(given)


def _json_schema(member: Mapping[str, Any], name: str) -> AskedForm | None:
    strict = member.get("strict")
    if strict in ("true", "false"):  # LM Studio's examples write it as text
        strict = strict == "true"
    if not isinstance(strict, bool | None):
        raise ApiError(f"{name}.strict must be true or false", param=f"{name}.strict")
    if not isinstance(schema := member.get("schema"), Mapping):
        raise ApiError(f"{name}.schema must be an object", param=f"{name}.schema")
    return _form(f"{name}.schema", schema=schema, lenient=not strict)


def output_format(given: Mapping[str, Any]) -> AskedForm | None:
    """Anthropic's field. Raises ApiError."""
    return _form("output_config.format.schema", schema=given["schema"])


def ollama_format(given: Any) -> AskedForm | None:
    """``json``, which is any object, or a schema. Raises ApiError."""
    return _any_object("format") if given == "json" else asked("schema", "format")(given)


def structured_outputs(given: Any) -> AskedForm | None:
    """vLLM's object, of which one member names the form. Raises ApiError."""
    named = {} if given is False else {name: value for name, value in given.items() if value not in (None, False, "")}
    if named.pop("json_object", False):
        if not named:
            return _any_object("structured_outputs")
        named.setdefault("json", {"type": "object"})
    for name in named:
        if name not in _STRUCTURED:
            message = f"structured_outputs names {name[:40]!r}, and a form is {', '.join(_STRUCTURED)} or json_object"
            raise ApiError(message, param="structured_outputs")
    return _form("structured_outputs", **{_STRUCTURED[name]: value for name, value in named.items()})


class FormCompiler:
    """Compiles forms on a few threads, those of one client one after another."""

    def __init__(self) -> None:
        """Raises MemoryLimitError if the threads cannot be started."""
        self._threads = Threads(MOST_COMPILING)
        self._own: defaultdict[str, Steps] = defaultdict(partial(Steps, self._threads))

    def prepare(self, engine: Engine) -> Future[None]:
        """Read the vocabulary of a loaded model, so that no request waits for it."""

        def work() -> None:
            with suppress(EdgespecError):  # the first form raises it again
                engine.pair.forms.prepare()

        prepared: Future[None] = Future()
        self._threads.hand_over(work, prepared)
        return prepared

    async def compile(self, engine: Engine, asked: Asked, owner: str, budget: RequestBudget) -> tuple[str, ...]:
        """Compile what the answers to a request are bound to, also if they call a tool only perhaps.

        Returns what of a lenient schema is not kept. Raises ApiError.
        """
        form = None if asked.form is None else asked.form.form
        free = form is None and asked.tool_choice in (None, "auto", "none")
        if free and not asked.tools:
            return ()

        def work() -> tuple[str, ...]:
            if budget.cancelled:  # an exception without a waiting caller would be logged
                return ()
            usable, must = choose_tools(check_tools(asked.tools), asked.tool_choice)
            if free:
                engine.pair.prepare_calls(usable, owner)
                return ()
            compiled = engine.pair.compiled_form(form, usable, must, owner)
            return () if compiled is None else compiled.warnings

        try:
            return await self._own[owner].run(work)
        except InvalidRequestError as error:
            of_form = form is not None and error.param == form.kind
            code = "unsupported_schema" if of_form and error.param == "schema" else None
            raise ApiError(sentence(error), param=asked.field if of_form else error.param, code=code) from error
        except RuntimeUnavailableError as error:
            raise ApiError(sentence(error), param=asked.field, code="unsupported_parameter") from error
        except BaseException:
            budget.cancel()  # the client left: a form whose turn has not come is not compiled
            raise

    def close(self) -> None:
        """End the threads once they have done what is queued. Idempotent; does not wait."""
        self._threads.close()
