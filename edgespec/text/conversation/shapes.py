"""A conversation in the form that a chat template can show.

Templates differ in what they take: some have no system role, refuse a call's id, leave out a text next to a call, or
show contents as lists of typed parts alone. No template says so. Each is tried: a small conversation is rendered, and
the prompt must have all of its texts. So no template is known by its name, and nothing of a conversation is dropped
that another form of it would show.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import product, starmap
from typing import Any

from edgespec.errors import EdgespecError, InvalidRequestError
from edgespec.files.checked import strict_json
from edgespec.text.conversation.messages import THINKING, joined
from edgespec.text.conversation.tools import Message, copied

# What the small conversations say: words that no template writes.
_ASKED, _TOLD, _CALLED, _FOUND = "kestrel 1", "kestrel 2", "kestrel 3", "kestrel 4"
# A list of typed parts that is printed as it is.
_LISTED = re.compile("['\"]text['\"]: ?['\"]kestrel")
_ID = "call00001"
_NAME = "trial_function"
# Ids of Mistral's models, which some of their templates require.
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
# The function of a result that names none: some templates print a name.
_UNKNOWN = "unknown"
_RESPONSES = "tool_responses"
# Characters of a conversation's results that are given as JSON, from the first on. A template writes each value by
# itself, in about 40 of its steps: 8000 numbers take four fifths of what it may take.
_MOST_RESPONSES = 16384


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written: arguments as mappings or as JSON text, and the content next to calls without a text.

    ``parts``: their results are lists of typed parts.
    """

    parts: bool
    mappings: bool
    silence: str | None


# The first suits almost all templates.
_FORMS = tuple(starmap(_Form, product((False, True), (True, False), ("", None))))

# The tool of the small conversations.
TRIAL_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A function",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text"}},
            "required": ["x"],
        },
    },
}


def _user(text: str = _ASKED) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str = _TOLD, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


# What shows whether a template takes the contents of a role as texts.
_TRIALS: Mapping[str, tuple[list[Message], list[str]]] = {
    "user": ([_user()], [_ASKED]),
    "system": ([{"role": "system", "content": _TOLD}, _user()], [_TOLD, _ASKED]),
    "assistant": ([_user(), _answer(), _user(_FOUND)], [_TOLD]),
}


def _call(text: str = _CALLED, own: str = _ID) -> Message:
    return {"id": own, "type": "function", "function": {"name": _NAME, "arguments": json.dumps({"x": text})}}


def _result(text: str = _FOUND, own: str = _ID) -> Message:
    return {"role": "tool", "tool_call_id": own, "name": _NAME, "content": text}


class Shapes:
    """The forms that one template can show, each tried at its first use.

    ``render`` gives the text of messages, with tools or without. It raises EdgespecError for messages that the
    template does not take.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._ways = dict[tuple[bool, bool, bool], int]()
        self._parts = dict[str, bool | None]()

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation, in its usual form, as this template can show it."""
        own = list(messages)
        if self._works:
            own = self._with_known_calls(own)
            own = self._with_named_ids(own)
            own = self._with_system(own)
            own = [part for each in own for part in self._apart(each)]
            own = self._alternating(own)
        return self._as_given(own)

    def _shows(self, messages: Iterable[Message], *texts: str) -> bool:
        """Whether the template renders these messages, and each of the texts is there."""
        rendered = self._rendered(messages)
        return all(text in rendered for text in texts)

    def _rendered(self, messages: Iterable[Message]) -> str:
        return self._text(self._as_given(messages))

    def _text(self, own: Iterable[Message]) -> str:
        """The text of the messages as they are; empty if the template refuses them."""
        try:
            return self._render(list(own))
        except EdgespecError:
            return ""

    def _in_parts(self, role: str) -> bool | None:
        """Whether the template shows contents of the role as typed parts alone; None if it shows them in no form."""
        if role not in self._parts:
            self._parts[role] = next((parts for parts in (False, True) if self._shows_role(role, parts)), None)
        return self._parts[role]

    def _shows_role(self, role: str, parts: bool) -> bool:
        """Whether the template shows contents of the role as parts, or as texts."""
        messages, texts = _TRIALS[role]
        rendered = self._text(
            _in_part(each) if (parts if each["role"] == role else self._in_parts(each["role"])) else each
            for each in messages
        )
        return all(text in rendered for text in texts) and not (parts and _LISTED.search(rendered))

    @property
    def _works(self) -> bool:
        """Whether the template takes a plain message. If not, it needs what only the caller knows."""
        return self._in_parts("user") is not None

    @cached_property
    def ignores(self) -> bool:
        """Whether the template writes the same whatever the user says, as far as no other variable is set."""
        shown = "" if self._works else self._rendered([_user()])
        return bool(shown) and shown == self._rendered([_user(_TOLD + _FOUND)])

    # ------------------------------------------------------------------------------------- system, alternation

    def _with_system(self, messages: list[Message]) -> list[Message]:
        """A system message joins the user's first one, if the template has no place for it."""
        if not messages or messages[0]["role"] != "system" or self._in_parts("system") is not None:
            return messages
        return joined({**each, "role": "user"} if at == 0 else each for at, each in enumerate(messages))

    @cached_property
    def _silence(self) -> str:
        """The content of an answer without text."""
        silent = self._shows([_user(), _answer(""), _user(_TOLD)], _ASKED, _TOLD)
        blank = not silent and self._shows([_user(), _answer(" "), _user(_TOLD)], _ASKED, _TOLD)
        return " " if blank else ""

    @cached_property
    def _answers_first(self) -> bool:
        """Whether the user may speak after a call or a result only once the assistant has."""
        asked, called, after = _user(), _answer("", tool_calls=[_call()]), _user(_TOLD)
        texts, silence = (_CALLED, _FOUND, _TOLD), _answer(self._silence)
        if self._shows([asked, called, _result(), after], *texts):
            return False
        return self._shows([asked, called, _result(), silence, after], *texts)

    def _alternating(self, messages: list[Message]) -> list[Message]:
        """An answer without text stands where the template needs one."""
        own, before = list[Message](), _user()
        for message in messages:
            called = before["role"] == "tool" or "tool_calls" in before
            if called and message["role"] == "user" and self._answers_first:
                own.append(_answer(""))
            own.append(message)
            before = message
        return [{**each, "content": self._silence} if _is_silent(each) else each for each in own]

    # ------------------------------------------------------------------------------------------ calls, results

    @cached_property
    def _shows_lone_results(self) -> bool:
        first = [_user(), _result(), _answer(), _user()]
        later = [_user(), _answer(), _result(), _answer(), _user()]
        return all(self._shows(self._alternating(each), _TOLD, _FOUND) for each in (first, later))

    def _with_known_calls(self, messages: list[Message]) -> list[Message]:
        """Results that follow no call are the user's, if the template shows them only behind one."""
        own, called, moved = list[Message](), False, False
        for message in messages:
            if message["role"] != "tool":
                called = "tool_calls" in message
            elif not called and not self._shows_lone_results:
                message, moved = _user(message["content"]), True
            own.append(message)
        return joined(own) if moved else own

    @cached_property
    def _shows_ids_as_names(self) -> bool:
        """Whether the template writes a call's id where others write its function: Kimi K2's ids hold both."""
        call, result = _call(), {**_result(), "name": _UNKNOWN}
        call["function"]["name"] = "kestrel 9"
        exchange = [_user(), _answer("", tool_calls=[call]), result]
        return self._shows(exchange, _ID, _CALLED) and not self._shows(exchange, "kestrel 9")

    def _with_named_ids(self, messages: list[Message]) -> list[Message]:
        """Ids that hold their function and a number, as Kimi K2 writes them, if the template shows no other name."""
        if not any("tool_calls" in each for each in messages) or not self._shows_ids_as_names:
            return messages
        own, ids, count = list[Message](), dict[str, str](), 0
        for message in messages:
            calls = list[Message]()
            for call in message.get("tool_calls", ()):
                ids[call["id"]] = f"functions.{call['function']['name']}:{count}"
                calls.append({**call, "id": ids[call["id"]]})
                count += 1
            message = {**message, "tool_calls": calls} if calls else message
            if message["role"] == "tool":
                message = {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
            own.append(message)
        return own

    def _apart(self, message: Message) -> list[Message]:
        """The message as one, or its text and each of its calls apart: the first way that shows everything.

        Its text comes before its calls: some templates write it behind their results.
        """
        calls = message.get("tool_calls", ())
        kind = bool(message["content"]), THINKING[0] in message, len(calls) > 1
        if not calls or kind == (False, False, False):
            return [message]
        if kind not in self._ways:
            self._ways[kind] = self._way(*kind)
        return list(_ways(message))[self._ways[kind]]

    def _way(self, text: bool, thinking: bool, several: bool) -> int:
        calls = [_call(), _call("kestrel 5", "call00002")][: 1 + several]
        results = [_result(), _result("kestrel 6", "call00002")][: 1 + several]
        message = _answer(_TOLD if text else "", tool_calls=calls)
        if thinking:
            message[THINKING[0]] = "kestrel 7"
        needed = [_CALLED, _FOUND, *["kestrel 5", "kestrel 6"] * several, *[_TOLD] * text]
        trials = ([_user(), *way, *results, _answer("kestrel 8"), _user()] for way in _ways(message))
        rendered = [self._rendered(trial) for trial in trials]
        rendered = ["" if re.search("['\"]kestrel 7", shown) else shown for shown in rendered]  # a list as it is
        in_order = [*[_TOLD] * text, _CALLED, _FOUND]
        for order in (in_order, []):
            for texts in ([*needed, "kestrel 7"], needed):  # most templates leave out the thinking of earlier turns
                for number, shown in enumerate(rendered):
                    places = [shown.find(each) for each in order]
                    if all(each in shown for each in texts) and places == sorted(places):
                        return number
        return 0

    @cached_property
    def _form(self) -> _Form:
        """How the template wants calls: the first form in which it shows one and its result."""
        return next((form for form in _FORMS if self._tried(form, _ID)), _FORMS[0])

    @cached_property
    def _ids(self) -> Callable[[str], str]:
        """What an id is for the template: some take Mistral's alone."""
        return str if self._tried(self._form, "a|1") or not self._tried(self._form, _ID) else _short_id

    def _tried(self, form: _Form, own_id: str) -> bool:
        """Whether the template shows a call and its result in this form, with this very id."""
        exchange = [_user(), _answer("", tool_calls=[_call(own=own_id)]), _result(own=own_id)]
        rendered = self._text(self._in_form(each, form, str) for each in exchange)
        return _CALLED in rendered and _FOUND in rendered and not (form.parts and _LISTED.search(rendered))

    @cached_property
    def _responds(self) -> bool:
        """Whether the template takes results as responses of the message that has the calls, as Gemma 4's does."""
        asked, call = map(self._written, (_user(), _answer("", tool_calls=[_call()])))
        rendered = self._text([asked, {**call, _RESPONSES: [{"name": _NAME, "response": _FOUND}]}])
        return _FOUND in rendered and _RESPONSES not in rendered  # not a template that prints messages whole

    def _as_given(self, messages: Iterable[Message]) -> list[Message]:
        """The messages as the template gets them."""
        own, called, left = list[Message](), False, _MOST_RESPONSES
        for message in messages:
            if message["role"] != "tool":
                called = "tool_calls" in message
            elif called and self._responds:
                left -= len(message["content"])
                found = _response(message["content"]) if left >= 0 else message["content"]
                response = {"name": message.get("name", _UNKNOWN), "response": found}
                own[-1].setdefault(_RESPONSES, []).append(response)  # the message that has the calls, as written here
                continue
            own.append(self._written(message))
        return own

    def _written(self, message: Message) -> Message:
        called = message["role"] == "tool" or "tool_calls" in message
        return self._in_form(message, self._form if called else _FORMS[0], self._ids if called else str)

    def _in_form(self, message: Message, form: _Form, ids: Callable[[str], str]) -> Message:
        own, role = _written(message, form, ids), message["role"]
        parts = form.parts if role == "tool" else self._in_parts(role)
        return _in_part(own) if parts else own


def _in_part(message: Message) -> Message:
    """The message with its text as a typed part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _is_silent(message: Message) -> bool:
    return message["role"] == "assistant" and not message["content"] and "tool_calls" not in message


def _ways(message: Message) -> Iterator[list[Message]]:
    """An assistant's message with calls as one message, or as several that say the same in the same order."""
    calls, silent = message["tool_calls"], {**message, "content": ""}
    said = {"role": "assistant", "content": message["content"]}
    apart = [{**silent, "tool_calls": calls[:1]}, *(_answer("", tool_calls=[call]) for call in calls[1:])]
    yield [message]
    yield [said, silent]
    yield [{**message, "tool_calls": calls[:1]}, *apart[1:]]
    yield [said, *apart]
    yield [said, _user(""), silent]  # where roles must alternate, and a call's text is left out
    if THINKING[0] in message:  # as Mistral's reasoning models take it
        blocks = [
            {"type": "thinking", "thinking": message[THINKING[0]]},
            {"type": "text", "text": message["content"]},
        ]
        yield [{**message, "content": blocks if message["content"] else blocks[:1]}]


def _written(message: Message, form: _Form, ids: Callable[[str], str]) -> Message:
    """A message with the names that templates use: thinking under all of its names, calls with arguments and ids."""
    own = dict(message)
    if THINKING[0] in own:
        own |= dict.fromkeys((*THINKING, "tool_plan"), own[THINKING[0]])
    if own["role"] == "tool":
        own |= {"tool_call_id": ids(own["tool_call_id"]), "name": own.get("name", _UNKNOWN)}
    if "tool_calls" in own:
        own["content"] = own["content"] or form.silence
        own["tool_calls"] = [_written_call(call, form, ids) for call in own["tool_calls"]]
    return own


def _written_call(call: Mapping[str, Any], form: _Form, ids: Callable[[str], str]) -> Message:
    function = call["function"]
    arguments = json.loads(function["arguments"]) if form.mappings else function["arguments"]
    written = {"name": function["name"], "arguments": arguments}
    return {**call, "id": ids(call["id"]), "function": written}


def _response(text: str) -> Any:
    """A result as its JSON object, or as its text if it is none that a template takes, or if that would alter it."""
    try:
        found = strict_json(text, _as_it_is)
        json.dumps(found, ensure_ascii=False).encode()  # no tokenizer takes half of a surrogate pair
        return copied(found, "a result") if isinstance(found, dict) else text
    except (ValueError, RecursionError, InvalidRequestError):
        return text


def _as_it_is(digits: str) -> float:
    """A number of JSON. Raises ValueError if a template would write other digits, as of 3.10; 1e-7 may be 1e-07."""
    if Decimal(repr(number := float(digits))).as_tuple() != Decimal(digits).as_tuple():
        raise ValueError(f"{digits} would become {number}")
    return number


def _short_id(given: str) -> str:
    """Nine letters and digits, the same for the same id."""
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
