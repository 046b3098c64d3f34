"""Thinking: text between marks before a model's answer, and the templates' switch for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from edgespec.text.chat_template.origin import SAID, joined, origins_of
from edgespec.text.conversation.call_formats import HARMONY, Mark
from edgespec.text.conversation.literals import BLANKS

# The template variable that turns thinking off, in Qwen3's templates and later ones.
SWITCH = "enable_thinking"
# That of Granite 3 and DeepSeek V3.1, which do not think by default.
_OTHER_SWITCH = "thinking"


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks before and after a model's thinking.

    ``answer``: marks behind each of which its answer begins, if it has any. ``others`` are then the further marks
    around what it says to others, first the one that begins its next message. Thinking may come again after them.
    ``shown``: what its chat template has where the marks do not show whose they are. ``read``: ``answer`` and
    ``others`` as they are read, where models write them in more ways. ``around``: the marks that its answer has on
    both sides behind thinking. ``calls``: those of calls, which may begin with other marks.
    """

    opening: str
    closing: str
    answer: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    shown: str = ""
    read: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.opening, self.closing, *self.outside, *self.around

    @property
    def outside(self) -> tuple[str, ...]:
        """The marks around what the model says to others."""
        return *self.answer, *self.others

    @property
    def left(self) -> ThinkingMarks:
        """The marks in an answer's text behind which calls were read: those of calls that are none are marks too."""
        every = (*(self.read or self.outside), *self.calls)
        return replace(self, answer=every, others=(), read=every)

    @property
    def end(self) -> str:
        """What stands between thinking and what the model says or calls next."""
        return self.closing + (self.others[0] if self.others else "")

    def fits(self, template: str) -> bool:
        """Whether a chat template has these marks. Some write the closing one alone, which others use too."""
        if self.shown:
            return self.shown in template
        return self.closing in template and (self.opening in template or not self.answer)

    def open_in(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking: some templates write the opening mark."""
        return prompt.rfind(self.opening) > prompt.rfind(self.closing) and prompt.rstrip().endswith(self.opening)

    def left_open_in(self, begun: str) -> bool:
        """Whether the beginning of an answer ends inside thinking."""
        return begun.rfind(self.opening) > begun.rfind(self.closing)

    def once(self, prompt: str, begun: str) -> str:
        """The prompt, which ends with what is ``begun`` of an answer, without a second thinking in front of it.

        That is an empty thinking, or the mark that opens or closes one, of the template's own.
        """
        if self.answer or not begun.lstrip(BLANKS).startswith(self.opening):
            return prompt
        before = prompt[: len(prompt) - len(begun)]
        for mark in (self.closing, self.opening):
            shown = before.rstrip(BLANKS)
            if shown.endswith(mark) and SAID not in origins_of(shown[-len(mark) :]):
                before = shown.removesuffix(mark)
        return joined([before, begun])

    def answer_in(self, text: str) -> str:
        """The part of a whole text after its thinking."""
        before, closing, after = text.partition(self.closing)
        if not (closing and self.around):
            return (after if closing else before).lstrip(BLANKS)
        reader = ThinkingText(self, inside=True)
        read = (*reader.feed(text), *reader.flush())
        return "".join(said for said, says in read if says is Says.ANSWER).strip(BLANKS)


_KNOWN = (
    # gpt-oss. What it says to others is in the channels final and commentary.
    ThinkingMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
        ("<|start|>assistant", "<|channel|>commentary<|message|>", "<|end|>"),
        read=(
            "<|start|>assistant",
            "<|channel|>final\n{word}<|message|>",
            "<|channel|>final\n<|constrain|>{word}<|message|>",
            "<|channel|>commentary\n{word}<|message|>",
            "<|channel|>commentary\n<|constrain|>{word}<|message|>",
            "<|end|>",
        ),
        calls=(*HARMONY.heads, *HARMONY.ends),
    ),
    # Solar Open.
    ThinkingMarks("<|think|>", "<|end|>", ("<|content|>",), ("<|begin|>assistant", "<|end|>")),
    # Granite 3.3.
    ThinkingMarks(
        "<think>",
        "</think>",
        shown="<think></think> and write your response between <response></response>",
        around=("<response>", "</response>"),
    ),
    # Qwen3, DeepSeek R1, SmolLM3 and most others.
    ThinkingMarks("<think>", "</think>"),
    # Magistral.
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    # Hunyuan 3.
    ThinkingMarks("<think:opensource>", "</think:opensource>", shown="'</think{}>'.format("),
    # MiniMax M3.
    ThinkingMarks("<mm:think>", "</mm:think>"),
    # Command R7B and A.
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    # Gemma 4.
    ThinkingMarks("<|channel>thought", "<channel|>"),
)


def thinking_marks(template: str | None) -> ThinkingMarks | None:
    """The thinking marks in a chat template; None without marks."""
    source = template or ""
    return next((marks for marks in _KNOWN if marks.fits(source)), None)


def has_switch(template: str | None) -> bool:
    """Whether a chat template has a switch for thinking."""
    reads_other = rf"\{{%[-+]?\s*(?:el)?if\s+(?:not\s+)?{_OTHER_SWITCH}\b"  # the word is also one of prose
    return re.search(rf"\b{SWITCH}\b|{reads_other}", template or "") is not None


def switched(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables that were asked for, the switch under the names of all templates."""
    return {**({_OTHER_SWITCH: asked[SWITCH]} if SWITCH in asked else {}), **asked}


class Says(Enum):
    """What a stretch of an answer's text is. The blanks around a mark belong to it."""

    MARK = "a mark of thinking"
    THOUGHT = "thinking"
    ANSWER = "the answer"


class ThinkingText:
    """Separates thinking from the answer in a text that arrives in chunks.

    Thinking comes first: unless answers have marks, an opening mark inside the answer is text. ``inside``: the prompt
    has opened the thinking (``ThinkingMarks.open_in``); the model may open it again. ``begun`` is what the answer
    continues.
    """

    def __init__(self, marks: ThinkingMarks, *, inside: bool = False, begun: str = "") -> None:
        self.marks = marks
        self._opening, self._closing = Mark(marks.opening), Mark(marks.closing)
        self._begins = (self._opening, *map(Mark, marks.read or marks.outside))
        # What ends an answer: the head of a call may hold the other marks.
        self._ends = (self._opening, *map(Mark, (*marks.answer, *marks.others[:1], marks.closing)))
        self._around = [Mark(mark) for mark in (marks.around[0], f"\n{marks.around[1]}")] if marks.around else []
        self._is_marked = False  # the mark before the answer came, and the one behind it has not
        self._without_mark = Says.THOUGHT if inside else Says.ANSWER
        self._next = Says.MARK  # what comes next: a mark that begins something, thinking, or the answer
        self._closed = False
        self._held = ""
        _, closing, answer = begun.partition(marks.closing)
        if closing and marks.around:
            answer = answer.strip(BLANKS)
            self._closed, self._next = True, Says.MARK if answer in ("", marks.around[0]) else Says.ANSWER
            self._is_marked = answer.startswith(marks.around[0]) and not answer.endswith(marks.around[1])

    @property
    def inside(self) -> bool:
        """Whether thinking is open: its end has not come."""
        open_before = self._next is Says.MARK and not self._closed and self._without_mark is Says.THOUGHT
        return self._next is Says.THOUGHT or open_before

    def feed(self, text: str) -> list[tuple[str, Says]]:
        """The stretches that are certain, in order; a possible mark is held back."""
        self._held += text
        parts = list[tuple[str, Says]]()
        while self._held and (cut := self._cut()) is not None:
            if cut[0]:
                parts.append((self._held[: cut[0]], cut[1]))
            self._held = self._held[cut[0] :]
        return parts

    def flush(self) -> list[tuple[str, Says]]:
        """The text held back, once all text has come."""
        held, self._held = self._held, ""
        kind = self._without_mark if self._next is Says.MARK and not self._closed else self._next
        if kind is Says.ANSWER and self._is_marked and self._around[1].match(held, 0, final=True):
            kind = Says.MARK
        return [(held, kind)] if held else []

    def _cut(self) -> tuple[int, Says] | None:
        """Where the next stretch ends, and what it is; None if more text must come."""
        held = self._held
        if self._next is Says.MARK:
            return self._cut_mark()
        if self._next is Says.ANSWER and self._is_marked:
            return self._cut_around()
        if self._next is Says.ANSWER:
            return self._cut_before(self._ends if self.marks.answer else (), Says.ANSWER)
        closing = self.marks.closing
        if not held.startswith(closing):
            return self._cut_before((self._closing,), Says.THOUGHT)
        self._closed, self._next, self._without_mark = not self.marks.answer, Says.MARK, Says.ANSWER
        return len(closing), Says.MARK

    def _cut_before(self, marks: Sequence[Mark], says: Says) -> tuple[int, Says] | None:
        """Text up to the first of the marks, which ends the answer."""
        held = self._held
        starts = [start for mark in marks if (start := mark.find(held)) is not None]
        cut = min(starts or [len(held), *(mark.begun_at(held) for mark in marks)])
        if starts and says is Says.ANSWER:
            self._next = Says.MARK
        return (cut, says) if cut or self._next is Says.MARK else None

    def _cut_around(self) -> tuple[int, Says] | None:
        """Text of an answer with a mark on each side, or the mark behind it: the last text, or in front of a call."""
        held, mark = self._held, self._around[1]
        start = mark.find(held)
        if cut := mark.begun_at(held) if start is None else start:
            return cut, Says.ANSWER
        found = mark.match(held, 0, final=False)
        if found is None or not (rest := held[found.end() :].lstrip(BLANKS)) or "<|".startswith(rest):
            return None
        self._is_marked = not rest.startswith("<|")
        return found.end(), Says.ANSWER if self._is_marked else Says.MARK

    def _cut_mark(self) -> tuple[int, Says] | None:
        """The mark that comes next, with the blanks in front of it."""
        begun = self._held.lstrip(BLANKS)
        blanks = len(self._held) - len(begun)
        if self._closed and begun and self._around and not self._is_marked:
            if found := self._around[0].match(begun, 0, final=False):
                self._is_marked = True
                return blanks + found.end(), Says.MARK
            if self._around[0].begins(begun, 0):
                return None
        if self._closed:
            self._next = Says.ANSWER if begun else Says.MARK
            return blanks, Says.MARK
        for mark in self._begins:
            if found := mark.match(begun, 0, final=False):
                self._next = Says.THOUGHT if mark is self._opening else Says.MARK
                self._without_mark = self._without_mark if mark is self._opening else Says.ANSWER
                return blanks + found.end(), Says.MARK
        if any(mark.begins(begun, 0) for mark in self._begins):
            return None
        self._next = self._without_mark
        return 0, self._next
