"""Checks of tools, calls and their results in a request, which may come from anywhere. What they return is a copy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.plain import plain

Message = dict[str, Any]

# OpenAI's limits: 128 functions, whose names have at most 64 letters, digits, underscores and hyphens.
MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The ids of other servers too: "functions.get_weather:0" is one.
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Calls in one message, as many as an answer can have.
_MOST_CALLS = 100
# A context of 128 000 tokens holds about half of it.
_MOST_CHARACTERS = 2**20
# Deeper than JSON schemas of real tools, and within the nesting of a template's values.
_DEEPEST = 24
# A template that writes arguments as marks puts its own text directly behind a key, and together they could spell the
# name of a control token.
_KEY = re.compile(r"[^<>\x00-\x1f]{1,256}")


def choose_tools(own: tuple[Message, ...], choice: object) -> tuple[Message, ...]:
    """The checked tools that an answer may call, none with the choice ``none``. Raises InvalidRequestError."""
    names = [tool["function"]["name"] for tool in own]
    if choice in (None, "auto"):
        return own
    if choice == "none":
        return ()
    name = choice
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        name = choice["function"].get("name")
    if name != "required" and name not in names:
        raise InvalidRequestError(f"tool_choice must be auto or none, not {choice!r:.40}", param="tool_choice")
    raise InvalidRequestError(
        "a call cannot be forced: that needs answers bound to a grammar, which this version does not have",
        hint="use tool_choice auto, and ask for the call in the prompt",
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
    own = [_tool(number, tool) for number, tool in enumerate(_copied(list(tools), "a tool"))]
    names = [tool["function"]["name"] for tool in own]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two tools are called {name}")
    return tuple(own)


def _tool(number: int, tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise InvalidRequestError(
            f"tool {number} is not a function", hint='a tool is {"type": "function", "function": {"name": ...}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tool {number} has no valid name: {name!r:.70}", hint="1 to 64 letters, digits, underscores and hyphens"
        )
    described = {key: value for key, value in function.items() if value is not None}
    described.setdefault("parameters", {"type": "object", "properties": {}})
    if not isinstance(described.get("description", ""), str):
        raise InvalidRequestError(f"the description of the tool {name} is not text")
    parameters = described["parameters"]
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequestError(f"the parameters of the tool {name} are not a JSON schema of an object")
    _check_keys(parameters.get("properties", {}), f"the tool {name}")
    return {**tool, "type": "function", "function": described}


def check_message(number: int, message: Mapping[str, Any], open_calls: Sequence[Message]) -> Message:
    """A message in its usual form: role and content, calls and their ids, whose arguments are JSON text of an object.

    ``open_calls``: those of the assistant's last message that no message has answered. Raises InvalidRequestError.
    """
    role, content = message["role"], message.get("content")
    calls = message.get("tool_calls") if role == "assistant" else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise InvalidRequestError(f"message {number} of the conversation is not text")
    own: Message = {"role": role, "content": content}
    if calls:
        own["tool_calls"] = _calls(number, calls)
    if role == "tool":
        own |= _answered(number, message, open_calls)
    return own


def _calls(number: int, calls: object) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or len(calls) > _MOST_CALLS:
        raise InvalidRequestError(f"the tool_calls of message {number} are not a list of at most {_MOST_CALLS} calls")
    own = list[Message]()
    for call in _copied(list(calls), f"a call in message {number}"):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(f"a call in message {number} has no valid function name")
        assert isinstance(function, dict)
        arguments = _arguments(function.get("arguments"))
        # An id of nine characters, which the templates of Mistral's models require.
        given = call.get("id") or f"call{number % 1000:03d}{len(own):02d}"
        if not isinstance(given, str) or not _ID.fullmatch(given):
            raise InvalidRequestError(f"a call in message {number} has no valid id: {given!r:.40}")
        own.append({"id": given, "type": "function", "function": {"name": name, "arguments": arguments}})
    return own


def _arguments(given: object) -> str:
    """The arguments as the JSON text of an object: ``{}`` for others, which templates do not take.

    Models write such calls, or their answer ended within one. A refusal would end the conversation for ever.
    """
    text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return "{}"
    try:
        _check_keys(_copied(arguments, "an argument"), "a call")
    except InvalidRequestError:
        return "{}"
    return text or "{}"


def _check_keys(names: Mapping[str, Any], where: str) -> None:
    for name in names:
        if not _KEY.fullmatch(name):
            raise InvalidRequestError(
                f"a parameter of {where} is named {name!r:.40}",
                hint="names have at most 256 characters and no <, > or line break",
            )


def _answered(number: int, message: Mapping[str, Any], open_calls: Sequence[Message]) -> Message:
    """The id and the name of the call that a tool's message answers."""
    given = message.get("tool_call_id")
    call = next((call for call in open_calls if given in (None, call["id"])), None)
    if call is None:
        raise InvalidRequestError(
            f"message {number} of the conversation answers no call",
            hint="its tool_call_id is that of a call in the assistant's message before it",
        )
    return {"tool_call_id": call["id"], "name": call["function"]["name"]}


def _copied(value: Any, what: str) -> Any:
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

    return plain(value, what, _DEEPEST, visit)
