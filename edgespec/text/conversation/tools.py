"""Checks of tools, calls and their results in a request, which may come from anywhere. What they return is a copy."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.files.checked import finite, no_constant
from edgespec.text.chat_template.budget import INTEGER_BITS
from edgespec.text.conversation.call_formats import MOST_NAME
from edgespec.text.plain import mended, plain

Message = dict[str, Any]

# OpenAI allows 128; agents with many MCP servers offer more.
MOST_TOOLS = 1024
# MCP's names may have dots, too.
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MOST_NAME}}}")
# What may be half of a surrogate pair in JSON.
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# A context of 128 000 tokens holds about half of it.
_MOST_CHARACTERS = 2**20
# Deeper than JSON schemas of real tools, and within the nesting of a template's values.
_DEEPEST = 48
# A model that writes arguments between marks could not name other parameters in a call.
_KEY = re.compile(r"[^<>\x00-\x1f]{1,256}")


def choose_tools(own: tuple[Message, ...], choice: object) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The checked tools that an answer may call, and the names of those of which it must call one.

    The choice ``auto`` demands none, ``none`` leaves all tools out, ``required`` demands any, and a function itself.
    Raises InvalidRequestError.
    """
    names = tuple(tool["function"]["name"] for tool in own)
    if choice in (None, "auto"):
        return own, ()
    if choice == "none":
        return (), ()
    if choice == "required" and own:
        return own, names
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if named := tuple(each for each in names if each == name):
        return own, named
    raise InvalidRequestError(
        f"tool_choice must be auto, none, required or one of the tools, not {choice!r:.70}",
        hint='a tool is {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def check_tools(tools: object, *, raw: bool = False) -> tuple[Message, ...]:
    """The tools in their usual form. Raises InvalidRequestError."""
    try:
        own = _listed(tools)
        if own and raw:
            raise InvalidRequestError("tools need the model's chat template, which raw text leaves out")
    except InvalidRequestError as error:
        error.param = "tools"
        raise
    return own


def _listed(tools: object) -> tuple[Message, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError(f"tools must be a list, not {type(tools).__name__}")
    if len(tools) > MOST_TOOLS:
        raise InvalidRequestError(f"there are {len(tools)} tools", hint=f"allowed: at most {MOST_TOOLS}")
    own = [_tool(number, tool) for number, tool in enumerate(copied(list(tools), "a tool"))]
    for name, times in Counter(tool["function"]["name"] for tool in own).items():
        if times > 1:
            raise InvalidRequestError(f"two tools are called {name}")
    return tuple(own)


def _tool(number: int, tool: Any) -> Message:
    if isinstance(tool, dict) and "function" not in tool and "name" in tool:  # as in Responses
        tool = {"type": tool.get("type"), "function": {key: each for key, each in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") not in (None, "function"):
        raise InvalidRequestError(
            f"tool {number} is not a function", hint='a tool is {"type": "function", "function": {"name": ...}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tool {number} has no valid name: {name!r:.70}",
            hint=f"1 to {MOST_NAME} letters of ASCII, digits, underscores, hyphens and dots",
        )
    described = {key: value for key, value in function.items() if value is not None}
    described.setdefault("parameters", {"type": "object", "properties": {}})
    if not isinstance(described.get("description", ""), str):
        raise InvalidRequestError(f"the description of the tool {name} is not text")
    parameters = described["parameters"]
    parameters = {} if parameters == [] else parameters  # PHP's empty object
    if isinstance(parameters, dict):  # Go writes null for what is absent
        absent = [key for key in ("properties", "required") if key in parameters and parameters[key] is None]
        absent += ["properties"] if parameters.get("properties") == [] else []
        parameters = described["parameters"] = {key: each for key, each in parameters.items() if key not in absent}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequestError(f"the parameters of the tool {name} are not a JSON schema of an object")
    _check_keys(parameters.get("properties", {}), name)
    return {**tool, "type": "function", "function": described}


def eased(tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The tools for a template that fails without a description or properties, or joins texts: each has them, and
    defaults in a choice are texts.

    The templates of gpt-oss and Seed-OSS do.
    """

    def texts(value: Any) -> Any:
        if isinstance(value, list):
            return [texts(each) for each in value]
        if not isinstance(value, dict):
            return value
        own = {key: texts(each) for key, each in value.items()}
        if ("enum" in own or "oneOf" in own) and not isinstance(own.get("default", ""), str):
            own["default"] = json.dumps(own["default"], ensure_ascii=False)
        return own

    own = list[Message]()
    for tool in tools:
        parameters = tool["function"]["parameters"]
        parameters = texts({**parameters, "properties": parameters.get("properties", {})})
        own.append({**tool, "function": {"description": "", **tool["function"], "parameters": parameters}})
    return own


def read_calls(number: int, calls: object) -> list[Message]:
    """The calls of message ``number`` in their usual form, each with an id.

    Ids and names are opaque texts. Raises InvalidRequestError for what is not a list of functions' calls.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequestError(f"the tool_calls of message {number} are not a list of calls")
    own = list[Message]()
    for call in (copied(each, f"a call in message {number}") for each in list(calls)):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"a call in message {number} has no function name")
        assert isinstance(function, dict)
        arguments = _arguments(function.get("arguments"))
        given = read_id(call.get("id"), f"a call in message {number}") or f"call{number % 1000:03d}{len(own):02d}"
        own.append({"id": given, "type": "function", "function": {"name": mended(name), "arguments": arguments}})
    return own


def read_id(given: object, where: str) -> str | None:
    """The id of a call, None if it has none. Raises InvalidRequestError if it is neither text nor a whole number."""
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if given is None or isinstance(given, str):
        return mended(given or "") or None
    raise InvalidRequestError(f"the id of {where} must be text, not {type(given).__name__} {given!r:.40}")


def _arguments(given: object) -> str:
    """The arguments as the JSON text of an object: ``{}`` for others, which templates do not take.

    Models write such calls, or their answer ended within one. A refusal would end the conversation for ever.
    """
    text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    try:
        arguments, text = _json(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return "{}"
    if _ESCAPED_SURROGATE.search(text):
        text = json.dumps(arguments, ensure_ascii=False)
    text = mended(text)
    try:
        copied(arguments, "an argument")
    except InvalidRequestError:
        return "{}"
    return text


def _json(text: str) -> tuple[Any, str]:
    """The value of a text, and the text as JSON. Raises ValueError.

    Models and clients also write control characters in texts as they are, and numbers that are not finite: null.
    """
    try:
        return json.loads(text, parse_constant=no_constant, parse_float=finite), text
    except ValueError:
        value = json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite)
        return value, json.dumps(value, ensure_ascii=False)


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _check_keys(names: Mapping[str, Any], tool: str) -> None:
    for name in names:
        if not _KEY.fullmatch(name):
            raise InvalidRequestError(
                f"a parameter of the tool {tool} is named {name!r:.40}",
                hint="names have at most 256 characters and no <, > or line break",
            )


def copied(value: Any, what: str) -> Any:
    """A copy in Python's own types. Raises InvalidRequestError for what is not JSON, too deep or too large."""
    left = _MOST_CHARACTERS

    def visit(value: Any) -> None:
        nonlocal left
        left -= len(value) if isinstance(value, str) else 1
        left -= sum(map(len, value)) if isinstance(value, Mapping) else 0
        if left < 0:
            raise InvalidRequestError(f"{what} has more than {_MOST_CHARACTERS} characters")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{what} holds float {value}, which is not JSON")
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise InvalidRequestError(f"{what} holds a number of more than {INTEGER_BITS} bits")

    return plain(value, what, _DEEPEST, visit)
