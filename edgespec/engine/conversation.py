"""From messages to tokens: the model's own template, and one conversation's text and history.

Control tokens that a message spells out stay text: a user who pastes ``<|im_end|>`` asks about the token, or forges a
turn. Names in a message's content are never control tokens; names that the template writes always are. If a message
contains such a name, the prompt is rendered a second time with a mark of unused digits inside each name. The marks
show which names came from messages, however the template trimmed, joined or escaped the contents.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from edgespec.engine.request_checks import check_messages
from edgespec.engine.tool_checks import Message
from edgespec.engine.tool_use import ToolUse, for_template, tool_use
from edgespec.errors import EdgespecError, InvalidRequestError, PromptTooLongError, TemplateError
from edgespec.interfaces.drafting import common_prefix
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.thinking import SWITCH, ThinkingMarks, has_switch, thinking_marks
from edgespec.text.tokenizer import ControlToken, Tokenizer
from edgespec.text.tool_calls import ToolCall

# Share of the context kept free for the answer when a conversation outgrows it.
_ANSWER_SHARE = 4

# Messages to remember: enough for a few interleaved conversations.
_MESSAGES_KNOWN = 256

# Digits: templates change the case of letters and escape non-ASCII text. No suffix of it is a prefix.
_FIRST_MARK = 7305918264015384

# llama.cpp searches for every name from each hit to the end of the text: quadratic in the hits. With windows it is
# linear. Windows overlap by more than the longest name (20 characters in the catalogue's models).
_WINDOW, _OVERLAP = 2**15, 2**8

# The characters that llama.cpp strips next to a token with a strip flag.
_BLANKS = " \t\n\v\f\r"

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Messages], str]
"""The prompt text of messages and tools."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text that a model reads. Each of the ``points`` lies in a control token's name that is only text."""

    text: str
    points: tuple[int, ...] = ()


class PromptFormat:
    """A model's prompt format: its tokenizer, its chat template if it has one, its longest context.

    ``longest`` is the model's context length in tokens; None if its file does not say.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, template: str | None, longest: int | None) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self.thinking: ThinkingMarks | None = thinking_marks(template)
        self.has_thinking_switch = has_switch(template)
        self._has_calls = template is not None and "tool_calls" in template
        self._name = name
        self._source = template
        self._template: ChatTemplate | None = None  # compiled at its first use
        # Every turn repeats all earlier messages: remember what they spell out.
        self._spelled = lru_cache(maxsize=_MESSAGES_KNOWN)(partial(spelled_controls, tokenizer))

    @property
    def has_template(self) -> bool:
        """Whether the model can chat; otherwise it can only continue ``raw`` text."""
        return self._source is not None

    def render(self, messages: Messages, tools: Messages = (), *, think: bool = True) -> str:
        """The prompt text of a conversation and its tools, by the model's own template.

        Without ``think`` a template with a thinking switch leaves thinking out. Raises TemplateError.
        """
        if self._template is None:
            if self._source is None:
                raise TemplateError(
                    f"{self._name} has no chat template",
                    hint="use `--raw` to continue plain text, or an instruction-tuned model",
                )
            bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token
            self._template = ChatTemplate(self._source, bos_token=bos, eos_token=eos)
        # Always passed: some templates leave thinking out by default.
        extra: dict[str, Any] = {SWITCH: think} if self.has_thinking_switch else {}
        return self._template.render(messages, extra=extra | {"tools": tools} if tools else extra)

    def tool_use(self, tools: Sequence[Message]) -> ToolUse | None:
        """How the model uses these tools; None without tools. Raises InvalidRequestError if it cannot."""
        return tool_use(self._name, self._source, self.tokenizer, tools) if tools else None

    def read(self, messages: Messages, tools: Messages = (), *, think: bool = True) -> Prompt:
        """``render``, with the places where a message spells out a control token's name.

        Raises TemplateError, InvalidRequestError.
        """
        if not self._has_calls and any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            raise InvalidRequestError(f"{self._name} cannot read calls: its chat template has no place for them")
        own = [for_template(message) for message in messages]
        return read_messages(self.tokenizer, partial(self.render, think=think), own, self._spelled, tools)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt; a begin-of-sequence token is added unless the text begins with one."""
        bos = self.tokenizer.bos_token
        return encode(self.tokenizer, prompt, add_bos=not (bos and prompt.text.startswith(bos)))

    def request_tokens(self, text: str) -> list[int]:
        """Tokens of a conversation with one message; of the text itself for a model that cannot chat."""
        return self.encode(self.read([{"role": "user", "content": text}]) if self.has_template else Prompt(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt as the model reads it. ``message`` is None for plain text outside the conversation.

    ``dropped`` old messages were left out because the conversation outgrew the context; ``notice`` says so.
    ``points`` are those of the Prompt. ``earlier`` replaces the conversation before the message (None: it stays).
    ``after`` are calls and results that follow the message, ``tools`` what the answer may call.
    """

    message: str | None
    text: str
    tokens: list[int]
    dropped: int = 0
    notice: str | None = None
    points: tuple[int, ...] = ()
    earlier: tuple[Message, ...] | None = None
    after: tuple[Message, ...] = ()
    tools: ToolUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """A conversation as it can be copied and saved.

    ``rendered`` is the text of the ``history``'s tokens, "" if unknown; the prompt in it has ``prompt_length``
    characters and those ``points``.
    """

    system: str | None
    messages: tuple[Message, ...]
    history: tuple[int, ...]
    rendered: str = ""
    prompt_length: int = 0
    points: tuple[int, ...] = ()


class Conversation:
    """The messages so far, and the ``history``: the tokens in the caches now or last."""

    def __init__(
        self,
        prompts: PromptFormat,
        system: str | None,
        messages: Messages = (),
        *,
        think: bool = True,
    ) -> None:
        self._prompts = prompts
        self._think = think
        self._messages: list[Message] = check_messages(messages)
        self._rendered = ""  # the text of the history's tokens
        self._read = ""  # the prompt that this text begins with
        self._points: tuple[int, ...] = ()  # of that prompt
        self.system = system
        self.history: list[int] = []

    @staticmethod
    def of(prompts: PromptFormat, state: ConversationState, *, think: bool = True) -> Conversation:
        """The conversation with that state."""
        made = Conversation(prompts, state.system, state.messages, think=think)
        made.history = list(state.history)
        made._rendered, made._points = state.rendered, state.points
        made._read = state.rendered[: state.prompt_length]
        return made

    @property
    def state(self) -> ConversationState:
        """What ``of`` makes this conversation from."""
        return ConversationState(
            system=self.system,
            messages=tuple(self._messages),
            history=tuple(self.history),
            rendered=self._rendered,
            prompt_length=len(self._read) if self._rendered else 0,
            points=self._points if self._rendered else (),
        )

    @property
    def state_to_save(self) -> ConversationState:
        """``state`` without tokens that the messages do not spell: of turns that were removed, and of raw text."""
        state = self.state
        if self._rendered or not state.history:
            return state
        shared = 0
        with contextlib.suppress(EdgespecError):  # a template may refuse a conversation without a message
            own = self._prompts.encode(self._prompts.read(self.messages, think=self._think))
            shared = common_prefix(self.history, own)
        return replace(state, history=state.history[:shared])

    def copy(self) -> Conversation:
        """The same conversation, to be continued separately."""
        return Conversation.of(self._prompts, self.state, think=self._think)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, beginning with the system message if there is one."""
        return tuple(deepcopy([*self._head, *self._messages]))

    def clear(self) -> None:
        """Forget the messages, but keep the system message and the history."""
        self._messages.clear()
        self._rendered = ""

    def undo(self) -> str | None:
        """Remove the last turn, but keep the history. Returns the turn's prompt; None without a turn."""
        if not self._messages:
            return None
        self._rendered = ""
        while self._messages[-1]["role"] != "user":
            del self._messages[-1]
        prompt: str = self._messages.pop()["content"]
        return prompt

    @property
    def system(self) -> str | None:
        """The system message."""
        return str(self._head[0]["content"]) if self._head else None

    @system.setter
    def system(self, text: str | None) -> None:
        self._head: list[Message] = [] if text is None else [{"role": "system", "content": text}]
        self._rendered = ""

    def forget_text(self) -> None:
        """Forget the history's text: the next prompt is tokenised as a whole."""
        self._rendered = ""

    def turn(
        self,
        prompt: str,
        max_tokens: int | None,
        context_length: int,
        *,
        raw: bool,
        earlier: Sequence[Message] | None = None,
        after: Sequence[Message] = (),
        tools: Sequence[Message] = (),
        keep_all: bool = False,
    ) -> Turn:
        """The next turn, or ``raw`` text unchanged. ``earlier`` replaces the conversation so far.

        ``after`` are calls and results that follow the prompt. All messages have been checked. With ``keep_all`` no
        turn is dropped.

        Raises InvalidRequestError for a prompt without a token, PromptTooLongError, TemplateError.
        """
        if raw:
            turn = Turn(message=None, text=prompt, tokens=self._prompts.encode(Prompt(prompt)))
        else:
            use = self._prompts.tool_use(tools)
            turn = self._next(prompt, max_tokens, context_length, earlier, after, use, keep_all=keep_all)
        if not turn.tokens:
            raise InvalidRequestError("the prompt is empty", hint="give at least one character")
        if len(turn.tokens) >= context_length:
            raise PromptTooLongError(
                f"the prompt has {len(turn.tokens)} tokens and the context holds {context_length}",
                hint="shorten the prompt or use a larger --context",
            )
        return turn

    def _next(
        self,
        prompt: str,
        max_tokens: int | None,
        context: int,
        earlier: Sequence[Message] | None,
        after: Sequence[Message],
        tools: ToolUse | None,
        *,
        keep_all: bool,
    ) -> Turn:
        """The conversation with ``prompt`` added, without the oldest turns if it would not fit.

        Whole turns are dropped, the oldest first, and a few more than needed: after a drop the rest is read again,
        which must not happen at every later turn.
        """
        reserve = min(max_tokens or context, context // _ANSWER_SHARE)
        head, messages = (self._head, self._messages) if earlier is None else _split(earlier)
        kept, dropped = list(messages), 0
        own = self._messages
        if not keep_all and earlier is not None and head == self._head and own and messages[-len(own) :] == own:
            kept = list(own)  # the older messages were dropped before: what is kept stays in the cache
        shown = () if tools is None else tools.tools
        while True:
            whole = [*head, *kept, {"role": "user", "content": prompt}, *after]
            asked = self._prompts.read(whole, shown, think=self._think)
            tokens = self._encode(asked, own=earlier is None and not shown)
            room = context - context // _ANSWER_SHARE if dropped else context
            if keep_all or len(tokens) + reserve <= room or not kept:
                break
            del kept[0]
            while kept and kept[0]["role"] != "user":
                del kept[0]
            dropped += 1
        notice = self._dropped(dropped, context) if dropped else None
        return Turn(
            message=prompt,
            text=asked.text,
            tokens=tokens,
            dropped=len(messages) - len(kept),
            notice=notice,
            points=asked.points,
            earlier=None if earlier is None else (*head, *messages),
            after=tuple(after),
            tools=tools,
        )

    def _dropped(self, turns: int, context: int) -> str:
        """A sentence for the user about dropped turns, and how to keep more of them."""
        larger = min(2 * context, self._prompts.longest or 2 * context)
        more = f"--context {larger} keeps more" if larger > context else "this model's context is not larger"
        oldest = "turn was" if turns == 1 else f"{turns} turns were"
        return f"the conversation outgrew the context: the oldest {oldest} dropped ({more})"

    def _encode(self, prompt: Prompt, *, own: bool) -> list[int]:
        """Tokens of ``prompt``. If its text continues the history, the history's tokens are kept.

        Tokenising an answer again could give other tokens, and the cache would be lost. ``own``: the messages are the
        history's. Messages of a caller may only spell out the history's text: the names of control tokens must come
        from the same places, and an answer with such a name is read again.
        """
        tokenizer = self._prompts.tokenizer
        if self._rendered and prompt.text.startswith(self._rendered) and (own or self._same_names(prompt)):
            kept = self.history
            if kept and kept[-1] in tokenizer.stop_ids:
                kept = kept[:-1]  # the template writes the end of the turn itself
            return [*kept, *encode(tokenizer, prompt, len(self._rendered))]
        return self._prompts.encode(prompt)

    def _same_names(self, prompt: Prompt) -> bool:
        """Whether a prompt that begins with the history's text has the same names of control tokens in it."""
        points = tuple(point for point in prompt.points if point < len(self._rendered))
        return points == self._points and not spelled_controls(
            self._prompts.tokenizer, self._rendered[len(self._read) :]
        )

    def begins_thinking(self, turn: Turn) -> bool:
        """Whether the template has opened the thinking that the answer continues."""
        marks = self._prompts.thinking
        return marks is not None and turn.message is not None and marks.open_in(turn.text)

    def begin(self, turn: Turn, history: list[int]) -> None:
        """Begin to answer the turn: ``history`` holds its tokens, and the answer's are added."""
        if turn.earlier is not None:
            self._head, self._messages = _split(turn.earlier)
        del self._messages[: turn.dropped]
        self.history = history

    def end(
        self, turn: Turn, answer: str, answer_ids: list[int], calls: tuple[str, Sequence[ToolCall]] | None = None
    ) -> None:
        """End the turn: it joins the conversation unless the answer is empty.

        ``calls``: the answer without its calls, and the calls; None if it has none.
        """
        del self.history[len(turn.tokens) + len(answer_ids) :]
        self._rendered = ""
        if turn.message is None or not answer:  # templates insist on alternating roles
            return
        content, called = (answer, ()) if calls is None else calls
        self._messages += [{"role": "user", "content": turn.message}, *turn.after]
        self._messages.append({"role": "assistant", "content": content, **_as_messages(called)})
        # After a stop string the tokens hold more than the text: the text is tokenised again.
        if self._prompts.tokenizer.detokenize(answer_ids) == answer:
            self._rendered = turn.text + answer
            self._read, self._points = turn.text, turn.points


def _as_messages(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The calls as a message holds them."""
    if not calls:
        return {}
    functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in calls]
    return {"tool_calls": [{"id": own, "type": "function", "function": function} for own, function in functions]}


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The system message, if there is one, and the others."""
    own = list(messages)
    head = own[:1] if own and own[0]["role"] == "system" else []
    return head, own[len(head) :]


# ------------------------------------------------------------------------- control tokens that are text


def spelled_controls(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    """The names in ``text`` that a tokenizer would turn into control tokens."""
    return tuple(sorted(_named(tokenizer, text)))


def _named(tokenizer: Tokenizer, text: str) -> dict[str, tuple[int, ControlToken]]:
    """The control tokens whose names ``text`` contains, by name."""
    found = set[int]()
    for begin in range(0, max(1, len(text) - _OVERLAP), _WINDOW):
        found.update(tokenizer.encode(text[begin : begin + _WINDOW + _OVERLAP], special=True))
    controls = ((token, tokenizer.control_token(token)) for token in found)
    return {
        control.text: (token, control) for token, control in controls if control is not None and control.text in text
    }


def read_messages(
    tokenizer: Tokenizer,
    render: Render,
    messages: Messages,
    spelled: Callable[[str], tuple[str, ...]],
    tools: Messages = (),
) -> Prompt:
    """The prompt of these messages and tools; ``spelled`` is ``spelled_controls`` of a text.

    Raises what ``render`` raises, and InvalidRequestError if the origin of a name cannot be determined.
    """
    text = render(messages, tools)
    said, shown = list(_texts(messages)), "\n".join(_texts(tools))  # tools stay the same: remembered as one text
    if not any(map(spelled, [*said, shown])):
        return Prompt(text)
    mark = _mark(text, *said, shown)
    marked = render(*_each_text([messages, tools], partial(_marked, tokenizer, mark)))
    parts = marked.split(mark)
    whole = tokenizer.encode(marked, special=True)
    if "".join(parts) != text:
        # The template itself looks for such names. If it removed them all, no name came from a message.
        if _controls(tokenizer, tokenizer.encode(text, special=True)) == _controls(tokenizer, whole):
            return Prompt(text)
        raise _unreadable()
    if encode(tokenizer, Prompt(marked), in_pieces=True) != whole:
        raise _unreadable()
    points, at = [], 0
    for part in parts[:-1]:
        at += len(part)
        points.append(at)
    return Prompt(text, tuple(points))


def encode(
    tokenizer: Tokenizer, prompt: Prompt, start: int = 0, *, add_bos: bool = False, in_pieces: bool = False
) -> list[int]:
    """Tokens of the prompt's text from ``start`` on; ``in_pieces``: name by name even without ``points``.

    Raises InvalidRequestError if the tokenizer makes a control token of ordinary text.
    """
    text = prompt.text[start:]
    points = [point - start for point in prompt.points if point > start]
    if not points and not in_pieces:
        return tokenizer.encode(text, special=True, add_bos=add_bos)
    controls = _named(tokenizer, text)
    made = tokenizer.encode("", add_bos=add_bos)
    begin, before = 0, None
    for name in _genuine(text, list(controls), points):
        token, control = controls[name.group()]
        made += _piece(tokenizer, text[begin : name.start()], before, control)
        made.append(token)
        begin, before = name.end(), control
    return made + _piece(tokenizer, text[begin:], before, None)


def _genuine(text: str, names: Sequence[str], points: Sequence[int]) -> list[re.Match[str]]:
    """Where the template itself wrote these names; the longest match counts, as in llama.cpp."""
    if not names:
        return []
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    return [name for name in pattern.finditer(text) if not _marks(points, name)]


def _marks(points: Sequence[int], name: re.Match[str]) -> bool:
    """Whether one of the ascending ``points`` is inside the name."""
    after = bisect_right(points, name.start())
    return after < len(points) and points[after] < name.end()


def _piece(tokenizer: Tokenizer, text: str, before: ControlToken | None, after: ControlToken | None) -> list[int]:
    """Tokens of text between two control tokens."""
    if before is not None and before.strips_right:
        text = text.lstrip(_BLANKS)
    if after is not None and after.strips_left:
        text = text.rstrip(_BLANKS)
    ids = tokenizer.encode(text) if text else []
    if any(control.text in text for control in _controls(tokenizer, ids)):
        raise _unreadable()
    return ids


def _controls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[ControlToken]:
    return [control for token in ids if (control := tokenizer.control_token(token)) is not None]


def _mark(*texts: str) -> str:
    number = _FIRST_MARK
    while any(str(number) in text for text in texts):
        number += 1
    return str(number)


def _texts(value: Any) -> Iterator[str]:
    """All texts in lists and mappings, keys too, but for roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            if key != "role":
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with each of the ``_texts`` changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): item if key == "role" else _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def _marked(tokenizer: Tokenizer, mark: str, content: str) -> str:
    """The content with a mark behind the first character of every name; a name may contain another name."""
    while names := spelled_controls(tokenizer, content):
        if min(map(len, names)) < 2:
            raise _unreadable()
        for name in names:
            content = content.replace(name, f"{name[0]}{mark}{name[1:]}")
    return content


def _unreadable() -> InvalidRequestError:
    return InvalidRequestError(
        "a message spells out a control token of this model, and this model cannot read it as text",
        hint="write it differently, for example with a space inside",
    )
