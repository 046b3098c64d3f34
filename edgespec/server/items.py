"""The items and tools of OpenAI's Responses API as the messages and tools of a chat: its shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.server.errors import ApiError, unsupported
from edgespec.server.messages import (
    IS_ERROR,
    OF_ANOTHER_SERVER,
    Message,
    lacking,
    left_out,
    read_content,
    result_texts,
    text_arguments,
    thought_text,
    without_thoughts,
)
from edgespec.server.strict_json import check_text, check_texts
from edgespec.text.conversation.messages import THINKING, role_of

_JOIN = "__"
_FUNCTION = "function"


def flat_name(namespace: object, name: str) -> str:
    """The name by which the model calls a function: that of its namespace comes first, as Codex writes it."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix(_JOIN)}{_JOIN}{name}"


# ------------------------------------------------------------------------------------------------------------ items


def read_items(given: str | list[Any]) -> list[Message]:
    """The messages that the items stand for, in their order. A text is the user's. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    each_lacks = zip(_with_call_ids(given), lacking(given), strict=True)
    found = (_item(each, f"input[{number}]", lacks=lacks) for number, (each, lacks) in enumerate(each_lacks))
    return [message for message in found if message is not None]


def _with_call_ids(given: list[Any]) -> list[Any]:
    """The items with the ``call_id`` of results of a local shell: in OpenAI's package they have an ``id`` alone.

    It is the call's ``call_id``, or its ``id``.
    """
    calls = {str(each.get("id")): each.get("call_id") for each in given if each.get("type") == "local_shell_call"}
    return [
        {"call_id": calls.get(str(each.get("id"))) or each.get("id"), **each}
        if each.get("type") == "local_shell_call_output"
        else each
        for each in given
    ]


def left_out_items(given: str | list[Any]) -> tuple[str, ...]:
    """The warning about items that ``read_items`` leaves out."""
    kinds = () if isinstance(given, str) else (each.get("type") for each in given)
    return left_out("items", (kind for kind in kinds if kind in ELSEWHERE), OF_ANOTHER_SERVER)


def _item(given: Mapping[str, Any], param: str, *, lacks: bool) -> Message | None:
    kind = given.get("type")
    if kind == "message" or (kind is None and "role" in given):
        return _message(given, param, lacks=lacks)
    read = _ITEMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise unsupported(param, f"an item of the type {str(kind)[:32]!r} ({param})")
    return read(given, param)


def _message(given: Mapping[str, Any], param: str, *, lacks: bool) -> Message:
    role = role_of(given.get("role"))
    if role in (None, "tool"):
        raise ApiError(f"the role of {param} must be user, system, developer or assistant", param=param)
    said, thought = given.get("content"), ""
    if role == "assistant":
        said, thought = without_thoughts(said, param)
    thinking = {THINKING[0]: thought} if thought else {}
    return {"role": role, "content": read_content(said, role, param, lacks=lacks), **thinking}


def _call(given: Mapping[str, Any], param: str) -> Message:
    return _called(given, given.get("arguments"), param)


def _custom_call(given: Mapping[str, Any], param: str) -> Message:
    return _called(given, text_arguments(given.get("input")), param)


def _own_call(given: Mapping[str, Any], param: str) -> Message:
    """A call of a tool of OpenAI's that the client runs. The item's type has the name."""
    named = {**given, "name": given["type"].removesuffix("_call")}
    return _called(named, given.get("action", given.get("operation")), param)


def _called(given: Mapping[str, Any], arguments: object, param: str) -> Message:
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise ApiError(f"the call {param} has no name", param=param)
    function = {"name": check_text(flat_name(given.get("namespace"), name), param), "arguments": arguments}
    call = {"id": check_texts(given.get("call_id"), param), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(given: Mapping[str, Any], param: str) -> Message:
    content = "\n".join(result_texts(given.get("output")))
    if (status := given.get("status")) == "failed":  # maybe without an output
        content = IS_ERROR + (content or status)
    return {"role": "tool", "tool_call_id": check_texts(given.get("call_id"), param), "content": content}


def _reasoning(given: Mapping[str, Any], param: str) -> Message | None:
    """Thinking that the client has as text. Summaries are not what was thought, and encrypted texts are others'."""
    thought = thought_text(given.get("content"), "content", param)
    return {"role": "assistant", "content": "", THINKING[0]: thought} if thought else None


# What a server ran, or encrypted. A refusal would end the conversation.
ELSEWHERE = frozenset(
    (
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
_ITEMS: Mapping[str, Callable[[Mapping[str, Any], str], Message | None]] = {
    "function_call": _call,
    "function_call_output": _result,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _result,
    **dict.fromkeys(("local_shell_call", "shell_call", "apply_patch_call"), _own_call),
    **dict.fromkeys(("local_shell_call_output", "shell_call_output", "apply_patch_call_output"), _result),
    "reasoning": _reasoning,
    **dict.fromkeys(ELSEWHERE, lambda given, param: None),
}

# ------------------------------------------------------------------------------------------------------------ tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The functions that a model may call, in a chat's form.

    ``namespaces`` has the namespace and the own name of each function that has one, by its flat name. ``warnings``
    say which tools are left out.
    """

    functions: tuple[dict[str, Any], ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_chat_tools(given: Sequence[Mapping[str, Any]]) -> Offered:
    """A chat's functions; tools of other types are left out."""
    kinds = [str(tool.get("type") or _FUNCTION)[:32] for tool in given]
    functions = tuple(dict(tool) for tool, kind in zip(given, kinds, strict=True) if kind == _FUNCTION)
    return Offered(functions=functions, warnings=_left_out(kinds))


def read_tools(given: list[Mapping[str, Any]]) -> Offered:
    """Functions, and those of namespaces; others run at OpenAI or take other things than JSON, and are left out."""
    tools = [each for tool in given for each in _flat(tool)]
    known = [each for each in tools if each.kind == _FUNCTION]
    return Offered(
        functions=tuple(each.as_function() for each in known),
        namespaces={each.flat_name: (each.namespace, each.name) for each in known if each.namespace},
        warnings=_left_out(each.kind for each in tools),
    )


def _left_out(kinds: Iterable[str]) -> tuple[str, ...]:
    return left_out("tools", (kind for kind in kinds if kind != _FUNCTION), "only functions are called")


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool as the client gives it, the namespace that it is in, and what is to be known of that."""

    given: Mapping[str, Any]
    namespace: str = ""
    about: str = ""

    @property
    def kind(self) -> str:
        return str(self.given.get("type"))[:32]

    @property
    def name(self) -> Any:
        return self.given.get("name")

    @property
    def flat_name(self) -> Any:
        return flat_name(self.namespace, self.name) if isinstance(self.name, str) else self.name

    def as_function(self) -> dict[str, Any]:
        """The tool in a chat's form, which the session checks. Raises ApiError for a name that is none."""
        if not isinstance(self.name, str):
            raise ApiError("a function has no name", param="tools")
        function = {name: value for name, value in self.given.items() if name in _MEMBERS and value is not None}
        if self.namespace:
            function["name"] = self.flat_name
        if self.about:
            described = function.get("description")
            function["description"] = f"{self.about}\n\n{described}" if isinstance(described, str) else self.about
        return {"type": "function", "function": function}


_MEMBERS = ("name", "description", "parameters", "strict")
# The words of a choice, and what a chat says for them. ``any`` is Mistral's.
_WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def _flat(tool: Mapping[str, Any]) -> list[_Tool]:
    """The tool, or those of a namespace. The first function has what the client says about the namespace."""
    if tool.get("type") != "namespace":
        return [_Tool(tool)]
    name, inner, about = tool.get("name"), tool.get("tools"), tool.get("description")
    if (
        not isinstance(name, str)
        or not isinstance(inner, list)
        or not all(isinstance(each, Mapping) for each in inner)
    ):
        raise ApiError("a namespace must have a name and a list of tools", param="tools")
    first = next((each for each in inner if each.get("type") == "function"), None)
    return [_Tool(each, name, about if each is first and isinstance(about, str) else "") for each in inner]


def choose_offered(offered: Offered, choice: Any) -> tuple[tuple[dict[str, Any], ...], Any]:
    """The functions that an answer may call, and the choice among them in a chat's form. Raises ApiError."""
    choice = _usual(choice)
    kind = choice.get("type") if isinstance(choice, Mapping) else _FUNCTION
    if kind == _FUNCTION:
        return offered.functions, choice
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        return _among(offered, choice["tools"]), _usual(choice.get("mode", "auto"))
    raise ApiError(
        f"tool_choice must be auto, none, required, a function or allowed_tools, not {str(kind)[:32]!r}",
        param="tool_choice",
    )


def choose_in_chat(offered: Offered, choice: Any) -> tuple[tuple[dict[str, Any], ...], Any]:
    """The functions that a chat's answer may call, and the choice among them, which the session checks."""
    named = isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"
    own = choice.get("allowed_tools") if named else None
    if not isinstance(own, Mapping) or not isinstance(tools := own.get("tools"), list):
        return offered.functions, _usual(choice)
    return _among(offered, tools), _usual(own.get("mode", "auto"))


def _usual(choice: Any) -> Any:
    """A choice in a chat's form: a word, which clients also write as the type of an object, or a function."""
    word = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(word, str) and word in _WORDS:
        return _WORDS[word]
    named = word == _FUNCTION and isinstance(choice, Mapping) and "name" in choice
    return {"type": _FUNCTION, "function": {"name": _chosen(choice)}} if named else choice


def _among(offered: Offered, tools: Iterable[object]) -> tuple[dict[str, Any], ...]:
    allowed = {_chosen(each.get("function", each)) for each in tools if isinstance(each, Mapping)}
    return tuple(each for each in offered.functions if _chosen(each.get("function", each)) in allowed)


def _chosen(choice: object) -> str | None:
    if not isinstance(choice, Mapping) or not isinstance(name := choice.get("name"), str):
        return None
    return flat_name(choice.get("namespace"), name)
