"""From messages to tokens: the model's own template, and one conversation's text and history."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from edgespec.errors import EdgespecError, InvalidRequestError, PromptTooLongError, TemplateError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.text.chat_template.origin import SAID, origins_of, written
from edgespec.text.conversation.answer_parts import AnswerParts, AnswerText, Said
from edgespec.text.conversation.call_formats import call_format
from edgespec.text.conversation.ends import Ends
from edgespec.text.conversation.healing import Healing, healing
from edgespec.text.conversation.hole import Hole, hole_tokens
from edgespec.text.conversation.messages import THINKING, begun, check_messages
from edgespec.text.conversation.model_template import ModelTemplates
from edgespec.text.conversation.pieces import ToolCall
from edgespec.text.conversation.prompt_format import Messages, encode, first_that_fits, is_far_longer
from edgespec.text.conversation.thinking import (
    SWITCH,
    ThinkingMarks,
    ThinkingText,
    has_switch,
    switched,
    thinking_marks,
)
from edgespec.text.conversation.tool_use import ToolUse, tool_use, with_calls_in_text
from edgespec.text.conversation.tools import Message, eased
from edgespec.text.conversation.variables import DOCUMENTS
from edgespec.text.plain import mended
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.spellings import Spellings
from edgespec.text.tokenizers.tokenizer import Tokenizer, control_tokens

# Share of the context kept free for the answer when a conversation outgrows it.
_ANSWER_SHARE = 4


class PromptFormat:
    """A model's prompt format: its tokenizer, its chat template if it has one, its longest context.

    ``longest`` is the model's context length in tokens; None if its file does not say. ``named_templates``
    are the file's further templates, for tools and documents. ``system`` is the system message of conversations
    without one. ``other_template``: the program that keeps a template which only it reads.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: str | None,
        longest: int | None,
        *,
        named_templates: Mapping[str, str] | None = None,
        system: str | None = None,
        other_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self.thinking = thinking_marks(template)
        self.has_thinking_switch = has_switch(template)
        self._name = name
        self._system = system
        self._other_template = other_template
        self._templates = ModelTemplates(template, named_templates or {}, lambda: tokenizer.template_tokens)

    @cached_property
    def thinking_tokens(self) -> dict[int, bytes]:
        """The control tokens in the marks of thinking, and their names, which become text in an answer."""
        return {} if self.thinking is None else control_tokens(self.tokenizer, self.thinking.all)

    @property
    def thinks_apart(self) -> bool:
        """Whether an answer's text cannot be shown with its marks: templates and messages have no control tokens."""
        return self.thinking is not None and bool(self.thinking.answer or self.thinking_tokens)

    @property
    def template_source(self) -> str | None:
        """The default template as the file has it."""
        return None if self._templates.default is None else self._templates.default.source

    @property
    def has_template(self) -> bool:
        """Whether the model can chat; otherwise it can only continue ``raw`` text."""
        return self._templates.default is not None

    @property
    def _no_template_hint(self) -> str:
        if self._other_template is None:
            return "use `--raw` to continue plain text, or an instruction-tuned model"
        return (
            f"{self._other_template} keeps a template for it in its own language, which edgespec cannot read: "
            "use `--raw` to continue plain text, or a GGUF file that has a chat template"
        )

    def tool_use(self, tools: Sequence[Message], variables: Mapping[str, Any] | None = None) -> ToolUse | None:
        """How the model uses these tools; None without tools.

        Raises InvalidRequestError if it cannot, and TemplateError.
        """
        if not tools:
            return None
        template = self._templates.chosen(tools=True, documents=bool((variables or {}).get(DOCUMENTS)))
        source, shows = (None, False) if template is None else (template.source, template.shows_tools)
        return tool_use(self._name, source, self.tokenizer, tools, shows=shows)

    def read(
        self,
        messages: Messages,
        tools: Messages = (),
        variables: Mapping[str, Any] | None = None,
        budget: RequestBudget | None = None,
        *,
        continues: bool = False,
    ) -> str:
        """The prompt of a conversation in its usual form, its tools, and the template's own variables.

        With ``continues`` it ends with the content of the last message, the assistant's, and no mark behind it.
        Raises TemplateError, InvalidRequestError, and what ``budget`` raises.
        """
        variables = variables or {}
        called = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        documents = bool(variables.get(DOCUMENTS))
        template = self._templates.chosen(tools=bool(tools), calls=called, documents=documents)
        if template is None:
            raise TemplateError(f"{self._name} has no chat template", hint=self._no_template_hint)
        if self._system is not None and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self._system}, *messages]
        if documents and not template.reads(DOCUMENTS):
            raise InvalidRequestError(
                f"{self._name} cannot be given documents: its chat template does not read them", param=DOCUMENTS
            )
        if called and not template.shows_calls:
            form = call_format(template.source)
            if form is None or form.heads:
                raise InvalidRequestError(f"{self._name} cannot read calls: its chat template cannot show them")
            messages = [with_calls_in_text(message, form) for message in messages]
        shaped = template.shaped([dict(message) for message in messages], tools=bool(tools))
        values = {**variables, "messages": shaped}
        write = template.continued if continues else template.render
        try:
            prompt = write({**values, "tools": tools} if tools else values, budget)
        except TemplateError:
            if not tools or (others := eased(tools)) == list(tools):
                raise
            prompt = write({**values, "tools": others}, budget)
        if prompt is None:
            raise InvalidRequestError(
                f"{self._name} cannot continue the assistant's message: its chat template does not show it last",
                hint="end with a user message",
            )
        if not variables.keys() - switched({SWITCH: True}).keys():  # others may be what the template shows
            asked = next((each["content"] for each in reversed(messages) if each["role"] == "user"), "")
            if asked.strip() not in prompt and template.ignores_messages(tools=bool(tools)):
                raise TemplateError("the chat template does not show the messages", hint="use another model file")
        # Where marks are control tokens, those in a content are text, and the template's thinking is the only one.
        if not continues or self.thinking is None or self.thinking_tokens or messages[-1].get(THINKING[0]):
            return prompt
        return self.thinking.once(prompt, messages[-1]["content"])

    def encode(self, prompt: str, budget: RequestBudget | None = None) -> list[int]:
        """Tokens of what ``read`` returned; a begin-of-sequence token is added unless the template wrote one."""
        bos = self.tokenizer.bos_token
        begun = bos and prompt.startswith(bos) and SAID not in origins_of(prompt[: len(bos)])
        return encode(self.tokenizer, prompt, add_bos=not begun, budget=budget)

    def encode_raw(self, text: str, budget: RequestBudget | None = None) -> list[int]:
        """Tokens of ``raw`` text, in which every name of a control token is that token."""
        return self.encode(written(text), budget)

    def request_tokens(self, text: str) -> list[int]:
        """Tokens of a conversation with one message; of the text itself for a model that cannot chat."""
        if not self.has_template:
            return self.encode_raw(text)
        return self.encode(self.read([{"role": "user", "content": text}]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt as the model reads it. ``message`` is None for plain text outside the conversation.

    ``dropped`` old messages were left out because the conversation outgrew the context; ``notice`` says so.
    ``earlier`` replaces the conversation before the message (None: it stays). ``follows`` is the conversation that
    stays, when the prompt was read; None for a prompt without it.
    ``after`` are calls and results that follow the message, and what is ``begun`` of the answer.
    ``tools`` are what the answer may call. ``healing`` is the prompt's end, which is not in the tokens: the answer
    spells it again.
    """

    message: str | None
    text: str
    tokens: list[int]
    dropped: int = 0
    notice: str | None = None
    earlier: tuple[Message, ...] | None = None
    follows: tuple[Message, ...] | None = None
    after: tuple[Message, ...] = ()
    tools: ToolUse | None = None
    healing: Healing | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as it is written."""
        return len(self.tokens) + (0 if self.healing is None else self.healing.taken)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt if its end is spelled byte by byte."""
        return len(self.tokens) + (0 if self.healing is None else len(self.healing.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """A conversation as it can be copied and saved.

    ``rendered`` is the text of the ``history``'s tokens, "" if unknown.
    """

    system: str | None
    messages: tuple[Message, ...]
    history: tuple[int, ...]
    rendered: str = ""


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
        # Always the one switch: some templates leave thinking out by default. The other ones only to turn it off.
        self._variables = {SWITCH: think} if think else switched({SWITCH: think})
        self._messages: list[Message] = check_messages(messages)
        self._gone: list[Message] = []  # dropped from the front of the messages
        self._rendered = ""  # the text of the history's tokens
        self.system = system
        self.history: list[int] = []

    @staticmethod
    def of(prompts: PromptFormat, state: ConversationState, *, think: bool = True) -> Conversation:
        """The conversation with that state."""
        made = Conversation(prompts, state.system, state.messages, think=think)
        made.history = list(state.history)
        made._rendered = state.rendered
        return made

    @property
    def state(self) -> ConversationState:
        """What ``of`` makes this conversation from."""
        return ConversationState(
            system=self.system,
            messages=tuple(self._messages),
            history=tuple(self.history),
            rendered=self._rendered,
        )

    @property
    def state_to_save(self) -> ConversationState:
        """``state`` without tokens that the messages do not spell: of turns that were removed, and of raw text."""
        state = self.state
        if self._rendered or not state.history:
            return state
        shared = 0
        with contextlib.suppress(EdgespecError):  # a template may refuse a conversation without a message
            own = self._prompts.encode(self._prompts.read(self.messages, variables=self._variables))
            shared = common_prefix(self.history, own)
        return replace(state, history=state.history[:shared])

    def copy(self) -> Conversation:
        """The same conversation, to be continued separately."""
        return Conversation.of(self._prompts, self.state, think=self._variables[SWITCH])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, beginning with the system message if there is one."""
        return tuple(deepcopy([*self._head, *self._messages]))

    @property
    def token_count(self) -> int:
        """Tokens of the messages in the model's template; 0 without a message. Raises TemplateError."""
        if not self._messages:
            return 0
        if self._rendered:
            return len(self.history)
        return len(self._prompts.encode(self._prompts.read(self.messages, variables=self._variables)))

    def clear(self) -> None:
        """Forget the messages, but keep the system message and the history."""
        self._messages.clear()
        self._gone.clear()
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
        self._head: list[Message] = [] if text is None else [{"role": "system", "content": mended(text)}]
        self._rendered = ""

    def forget_text(self) -> None:
        """Forget the history's text: the next prompt is tokenised as a whole."""
        self._rendered = ""

    def turn(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None,
        context_length: int,
        *,
        raw: bool,
        earlier: Sequence[Message] | None = None,
        after: Sequence[Message] = (),
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] | None = None,
        keep_all: bool = False,
        hole: Hole | None = None,
        heals: Spellings | None = None,
        banned: Collection[int] = (),
        budget: RequestBudget | None = None,
    ) -> Turn:
        """The next turn, or ``raw`` text or tokens unchanged, or a ``hole``. ``earlier`` replaces the conversation.

        ``after`` are calls and results that follow the prompt, and what is ``begun`` of the answer. All messages have
        been checked. ``variables`` are the
        template's in this turn. With ``keep_all`` no turn is dropped. With ``heals`` the end of raw text that a
        longer token may have is taken back, and spelled again without tokens of ``banned``.

        Raises InvalidRequestError for a prompt without a token, PromptTooLongError, TemplateError, and what
        ``budget`` raises.
        """
        budget = budget or RequestBudget()
        if hole is not None:
            room = context_length - _reserve(max_tokens, context_length)
            tokens = hole_tokens(self._prompts.tokenizer, hole, room, budget)
            turn = Turn(message=None, text=hole.before, tokens=tokens)
        elif not isinstance(prompt, str):
            turn = Turn(message=None, text="", tokens=list(prompt))
        elif raw:
            self._check_length(prompt, context_length, budget)
            turn = Turn(message=None, text=prompt, tokens=self._prompts.encode_raw(prompt, budget))
        else:
            use = self._prompts.tool_use(tools, variables)
            shown = {**self._variables, **switched(variables or {})}
            turn = self._next(
                prompt, max_tokens, context_length, earlier, after, use, shown, budget, keep_all=keep_all
            )
        if not turn.tokens:
            raise InvalidRequestError("the prompt is empty", hint="give at least one character")
        if len(turn.tokens) >= context_length:
            raise self._too_long(f"{len(turn.tokens)}", context_length)
        if heals is None or not raw or not isinstance(prompt, str) or hole is not None:
            return turn
        healed = self._healed(turn, heals, banned)
        return turn if healed.most_tokens >= context_length else healed

    def _healed(self, turn: Turn, spellings: Spellings, banned: Collection[int]) -> Turn:
        """The turn without the end of its prompt that a longer token may have."""
        found = healing(self._prompts.tokenizer, spellings, turn.tokens, banned)
        return turn if found is None else replace(turn, tokens=turn.tokens[: -found.taken], healing=found)

    def _check_length(self, text: str, context_length: int, budget: RequestBudget) -> None:
        """The budget's context may be a longer one, of a server's other model."""
        if is_far_longer(self._prompts.tokenizer, text, budget):
            raise self._too_long(f"more than {budget.context_length}", context_length)

    def _too_long(self, tokens: str, context_length: int) -> PromptTooLongError:
        larger = self._prompts.longest is None or self._prompts.longest > context_length
        return PromptTooLongError(
            f"the prompt has {tokens} tokens, which exceeds the available context size of {context_length} tokens",
            hint=f"shorten the prompt{' or use a larger context (--context)' if larger else ''}",
        )

    def _next(
        self,
        prompt: str,
        max_tokens: int | None,
        context: int,
        earlier: Sequence[Message] | None,
        after: Sequence[Message],
        tools: ToolUse | None,
        variables: Mapping[str, Any],
        budget: RequestBudget,
        *,
        keep_all: bool,
    ) -> Turn:
        """The conversation with ``prompt`` added, without the oldest turns if it would not fit.

        Whole turns are dropped, the oldest first, and a few more than needed: after a drop the rest is read again,
        which must not happen at every later turn.
        """
        reserve = _reserve(max_tokens, context)
        head, messages = (self._head, self._messages) if earlier is None else _split(earlier)
        kept = list(messages)
        if not keep_all and earlier is not None and (head, messages) == (self._head, [*self._gone, *self._messages]):
            kept = list(self._messages)  # the others were dropped before: what is kept stays in the cache
        shown = () if tools is None else tools.tools

        @cache
        def read(first: int) -> tuple[str, list[int]]:
            """The prompt, and its tokens, with the kept messages from number ``first`` on."""
            whole = [*head, *kept[first:], {"role": "user", "content": prompt}, *after]
            asked = self._prompts.read(whole, shown, variables, budget, continues=begun(after) is not None)
            return asked, self._encode(asked, context, budget, own=earlier is None and not shown)

        def fits(first: int, room: int) -> bool:
            # A message has at least one token.
            return len(kept) - first < room and len(read(first)[1]) + reserve <= room

        first, notice = 0, None
        if not keep_all and kept and not fits(0, context):
            asked_at = [position for position, message in enumerate(kept) if message["role"] == "user"]
            room = context - context // _ANSWER_SHARE
            first = first_that_fits([*asked_at[1:], len(kept)], lambda position: fits(position, room))
            notice = self._dropped(sum(position < first for position in asked_at), context)
        asked, tokens = read(first)
        return Turn(
            message=prompt,
            text=str.__str__(asked),
            tokens=tokens,
            dropped=len(messages) - len(kept) + first,
            notice=notice,
            earlier=None if earlier is None else (*head, *messages),
            follows=(*head, *messages) if earlier is None else None,
            after=tuple(after),
            tools=tools,
        )

    def _dropped(self, turns: int, context: int) -> str:
        """A sentence for the user about dropped turns, and how to keep more of them."""
        larger = min(2 * context, self._prompts.longest or 2 * context)
        more = f"--context {larger} keeps more" if larger > context else "this model's context is not larger"
        oldest = "turn was" if turns == 1 else f"{turns} turns were"
        return f"the conversation outgrew the context: the oldest {oldest} dropped ({more})"

    def _encode(self, prompt: str, context: int, budget: RequestBudget, *, own: bool) -> list[int]:
        """Tokens of ``prompt``. If its messages are the session's ``own``, the history's tokens are kept.

        Tokenising an answer again could give other tokens, and the cache would be lost. A caller's messages are
        tokenised as a whole, so an answer to them does not depend on what is in the cache.
        """
        tokenizer = self._prompts.tokenizer
        if own and self._rendered and prompt.startswith(self._rendered):
            kept = self.history
            if kept and not tokenizer.token_bytes(kept[-1]):
                kept = kept[:-1]  # a hidden token ended the answer; the template writes the end of the turn itself
            return [*kept, *encode(tokenizer, prompt[len(self._rendered) :], budget=budget)]
        self._check_length(prompt, context, budget)
        return self._prompts.encode(prompt, budget)

    def parts(self, turn: Turn, ends: Ends) -> AnswerParts:
        """What reads the answer to the turn."""
        thinking, tools, shown = self.thinking(turn), turn.tools, dict[int, bytes]()
        before = (begun(turn.after) or {}).get("content", "")
        if thinking is not None:
            shown |= self._prompts.thinking_tokens
        if tools is not None:
            shown |= tools.marks
        reader = None if thinking is None else ThinkingText(thinking[0], inside=thinking[1], begun=before)
        return AnswerParts(AnswerText(self._prompts.tokenizer, ends, shown), thinking=reader, tools=tools)

    def thinking(self, turn: Turn) -> tuple[ThinkingMarks, bool] | None:
        """The marks of the answer's thinking, and whether the prompt has opened it; None for raw text."""
        marks, before = self._prompts.thinking, begun(turn.after)
        if marks is None or turn.message is None:
            return None
        return marks, marks.open_in(turn.text) if before is None else marks.left_open_in(before["content"])

    def check(self, turn: Turn) -> None:
        """Raise InvalidRequestError if the conversation is not the one that the turn follows."""
        if turn.follows not in (None, (*self._head, *self._messages)):
            raise InvalidRequestError(
                "the conversation has changed since this answer was prepared",
                hint="call generate again, behind the change",
            )

    def begin(self, turn: Turn, history: list[int]) -> None:
        """Begin to answer the turn: ``history`` holds its tokens, and the answer's are added."""
        if turn.earlier is not None:
            self._head, self._messages = _split(turn.earlier)
            self._gone = []
        self._gone += self._messages[: turn.dropped]
        del self._messages[: turn.dropped]
        self._rendered = ""  # before the history, which the messages do not spell until the turn joins them
        self.history = history

    def end(self, turn: Turn, said: Said, answer_ids: list[int]) -> None:
        """End the turn: it joins the conversation unless the answer has no token. Its text may be empty.

        An answer that was begun stays also if no token was added.
        """
        del self.history[len(turn.tokens) + len(answer_ids) :]
        if turn.message is None:
            return
        if not (said.raw or answer_ids):
            if begun(turn.after) is not None:
                self._messages += [{"role": "user", "content": turn.message}, *turn.after]
            return
        answer = {"role": "assistant", "content": said.text, **_as_messages(said.calls)}
        if self._prompts.thinks_apart:
            answer["content"] = said.content
            answer |= {THINKING[0]: said.reasoning} if said.reasoning else {}
        after = list(turn.after)
        if begun(after) is not None:
            before = after.pop()
            answer |= {
                name: before[name] + answer.get(name, "") for name in ("content", THINKING[0]) if name in before
            }
        self._messages += [{"role": "user", "content": turn.message}, *after, answer]
        # After a stop string, or cut within a character, the tokens hold more than the text: the text is tokenised
        # again. The same holds for two hidden tokens, of which ``_encode`` leaves out one.
        tokenizer, last = self._prompts.tokenizer, answer_ids[-2:]
        hidden = len(last) == 2 and not any(map(tokenizer.token_bytes, last))
        if not hidden and tokenizer.detokenize(answer_ids) == said.raw:
            self._rendered = turn.text + said.raw


def _reserve(max_tokens: int | None, context: int) -> int:
    """Tokens of the context that a prompt leaves to its answer, if the prompt can be cut."""
    return min(context if max_tokens is None else max(1, max_tokens), context // _ANSWER_SHARE)


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
