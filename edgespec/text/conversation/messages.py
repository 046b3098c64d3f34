"""Reads conversations as callers keep them and agents replay them, into the one form that is rendered and kept.

An agent sends its whole history with each request, so a refused message would end its conversation for ever. Roles
and contents are checked; order, ids and missing results are taken as they are. What is read is a copy, and reading it
again changes nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.tools import Message, read_calls, read_id
from edgespec.text.plain import mended

# The roles, also by the names of Gemma's and Llama 3's templates.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "ipython": "tool",
}
_JOINED_BY = "\n\n"
# The names under which servers give thinking and clients send it back. The first is the one that is kept.
THINKING = ("reasoning_content", "reasoning", "thinking")


def read_conversation(messages: object) -> list[Message]:
    """A conversation in its usual form.

    A system message may come first; later ones are the user's, and so is one that stands alone. Then comes the user,
    with an empty text if others come first. Neighbours of one role are joined where that keeps the order of texts and
    calls, but results stay apart. An assistant's message may have ``reasoning_content`` and ``tool_calls``; each call
    has an id, and arguments that are the JSON text of an object. A result has a ``tool_call_id``, and the ``name`` of
    the function if a call has that id.

    Raises InvalidRequestError for unknown roles, and contents that are not text.
    """
    given = [_message(number, each) for number, each in enumerate(list(_listed(messages)))]
    own = joined(_only_first_system(given))
    head = int(bool(own) and own[0]["role"] == "system")
    if own[head:] and own[head]["role"] != "user":
        own.insert(head, {"role": "user", "content": ""})  # templates begin with a user's turn
    _name_results(own)
    return own


def check_conversation(
    prompt: object, messages: Sequence[Mapping[str, Any]], *, raw: bool
) -> tuple[str, list[Message], list[Message]]:
    """The last user message's text, and the messages before and after it: calls and results, and what is ``begun``.

    An empty message of the assistant at the end, which some clients send for the answer, is left out. Raises
    InvalidRequestError for a conversation that cannot be answered.
    """
    if prompt is not None or raw:
        raise InvalidRequestError(
            "messages were given together with a prompt" if prompt is not None else "messages cannot be raw",
            hint="the last of the messages is the prompt",
        )
    own = read_conversation(messages)
    if own[-1:] == [{"role": "assistant", "content": ""}]:
        del own[-1]
    if not own:
        raise InvalidRequestError(
            "the conversation has no message", hint="give a list with at least one user message"
        )
    if own[-1]["role"] == "assistant" and begun(own) is None:
        raise InvalidRequestError(
            "the last message is a call, and its result is missing",
            hint="end with the result of the call, in the role tool, or with a user message",
        )
    last = max(index for index, message in enumerate(own) if message["role"] == "user")
    return own[last]["content"], own[:last], own[last + 1 :]


def begun(messages: Sequence[Message]) -> Message | None:
    """The assistant's message at the end, which the answer continues; None if the answer is the next message."""
    last = messages[-1] if messages else {}
    return last if last.get("role") == "assistant" and "tool_calls" not in last else None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Earlier turns in their usual form. Raises InvalidRequestError for a system message, and for a last prompt."""
    own = read_conversation(messages)
    if own and own[0]["role"] == "system":
        raise InvalidRequestError("the earlier turns begin with a system message", hint="pass it as system=")
    if own and own[-1]["role"] == "user":
        raise InvalidRequestError("the conversation ends with a prompt", hint="pass that prompt to generate")
    return own


def check_system(text: object) -> None:
    """Raise InvalidRequestError unless the system message is text or None."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"the system message must be text, not {type(text).__name__}")


def described(value: object) -> str:
    """The given value as Python shows it, for a message."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"


def joined(messages: Iterable[Message]) -> list[Message]:
    """The messages, with neighbours of one role as one message.

    Results stay apart, and so does what the assistant says after its calls: in one message it would come before them.
    """
    groups = list[list[Message]]()
    for message in messages:
        if groups and _follows(groups[-1][-1], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def _follows(before: Message, message: Message) -> bool:
    """Whether both can be one message."""
    if message["role"] != before["role"] or message["role"] == "tool":
        return False
    return "tool_calls" not in before or not (message["content"] or THINKING[0] in message)


def _joined(group: list[Message]) -> Message:
    if len(group) == 1:
        return group[0]
    own: Message = {"role": group[0]["role"], "content": _text(group, "content")}
    if thinking := _text(group, THINKING[0]):
        own[THINKING[0]] = thinking
    if calls := [call for each in group for call in each.get("tool_calls", ())]:
        own["tool_calls"] = calls
    return own


def _text(group: list[Message], name: str) -> str:
    return _JOINED_BY.join(filter(None, (each.get(name) for each in group)))


def _only_first_system(messages: list[Message]) -> list[Message]:
    """The messages, where only those before all others are the system's: templates know no later ones.

    Later ones are the user's, where they stand: what was said before is unchanged, and is not read again. So are
    all, if there are no others.
    """
    first = next((number for number, each in enumerate(messages) if each["role"] != "system"), 0)
    return [
        {**each, "role": "user"} if number >= first and each["role"] == "system" else each
        for number, each in enumerate(messages)
    ]


def _listed(messages: object) -> Sequence[Any]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list, not {type(messages).__name__}", hint="give a list of mappings, such as dicts"
        )
    return messages


def _message(number: int, given: object) -> Message:
    where = f"message {number} of the conversation"
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{where} is not a mapping with a role and a content, but {described(given)}")
    stated, content = given.get("role"), given.get("content")
    role = role_of(stated)
    if role is None:
        raise InvalidRequestError(
            f"{where} has the unknown role {stated!r:.40}", hint="roles are system, user, assistant and tool"
        )
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise InvalidRequestError(f"the content of {where} must be text, not {described(content)}")
    own: Message = {"role": role, "content": mended(content)}
    if role == "assistant":
        own |= _thinking(given, where)
        if calls := given.get("tool_calls"):
            own["tool_calls"] = read_calls(number, calls)
    if role == "tool":
        own |= {"tool_call_id": read_id(given.get("tool_call_id"), where), "name": given.get("name")}
    return own


def role_of(stated: object) -> str | None:
    """The role of that name, in small or capital letters; None if there is none."""
    return ROLES.get(stated.lower()) if isinstance(stated, str) else None


def _thinking(given: Mapping[str, Any], where: str) -> Message:
    for name in THINKING:
        if text := given.get(name):
            if not isinstance(text, str):
                raise InvalidRequestError(f"the {name} of {where} must be text, not {described(text)}")
            return {THINKING[0]: mended(text)}
    return {}


def _name_results(messages: list[Message]) -> None:
    """Give each result the id of the call that it answers, and the name of its function."""
    calls, before = _OpenCalls(), ""
    for at, message in enumerate(messages):
        if message["role"] != "tool" and before != "assistant":
            calls.clear()
        for call in message.get("tool_calls", ()):
            calls.add(call)
        if message["role"] == "tool":
            if before != "tool":
                later = map(messages.__getitem__, range(at, len(messages)))
                row = takewhile(lambda each: each["role"] == "tool", later)
                calls.await_results([each["tool_call_id"] for each in row])
            own_name = message.pop("name")
            message["tool_call_id"] = answered = calls.answered(message["tool_call_id"], own_name)
            name = calls.names.get(answered, own_name)
            if isinstance(name, str) and name:
                message["name"] = mended(name)
        before = message["role"]


class _OpenCalls:
    """The calls without a result, in order, each with another id: models and clients write one twice.

    ``names`` has the functions of all calls so far, by their ids.
    """

    def __init__(self) -> None:
        self.names = dict[str, str]()
        self._open = dict[str, None]()
        self._renamed = defaultdict[str, deque[str]](deque)
        self._numbers = count(2)
        # The calls that no result of this row has the id of: all, and those of each function by its name.
        self._free = defaultdict[str, deque[str]](deque)
        self._one_each = False

    def clear(self) -> None:
        """No call waits for a result any more."""
        self._open.clear()
        self._renamed.clear()

    def add(self, call: Message) -> None:
        """One more call, which gets another id if an open one has its id."""
        given = call["id"]
        if given in self._open:
            numbered = (f"{given}_{number}" for number in self._numbers)
            call["id"] = next(each for each in numbered if each not in self._open)
            self._renamed[given].append(call["id"])
        self.names[call["id"]] = call["function"]["name"]
        self._open[call["id"]] = None

    def await_results(self, ids: Sequence[str | None]) -> None:
        """A row of results begins, which have these ids."""
        awaited = set(ids)
        self._one_each = len(ids) == len(self._open)
        self._free.clear()
        for call in self._open:
            if call not in awaited:
                self._free[_ANY].append(call)
                self._free[self.names[call]].append(call)

    def answered(self, given: str | None, name: object) -> str:
        """The id of the call that a result answers.

        A result without an id answers the first open call of the function that it names, or the first one. So does
        one with an id that no call had if the row has a result for each open call, but only a call of the function
        that it names. None of these calls has the id of another result in the row.
        """
        own = given
        if given is None or (given not in self.names and self._one_each):
            named = name if isinstance(name, str) else _ANY
            own = self._next_free(named) or (self._next_free(_ANY) if given is None else None) or given
        elif given not in self._open and self._renamed[given]:
            own = self._renamed[given].popleft()
        self._open.pop(own or "", None)
        return _NO_CALL if own is None else own

    def _next_free(self, name: str) -> str | None:
        row = self._free.get(name, deque[str]())
        while row:
            if (call := row.popleft()) in self._open:
                return call
        return None


# In place of a function's name.
_ANY = ""
# The id of a result that has none while no call is open.
_NO_CALL = "call00000"
