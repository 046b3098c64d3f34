"""Thinking: text between marks before a model's answer, and the templates' switch for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from edgespec.text.conversation.pieces import overlap

# The template variable that turns thinking off, in Qwen3's templates and later ones.
SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks before and after a model's thinking."""

    opening: str
    closing: str

    def open_in(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking: some templates write the opening mark."""
        return prompt.rfind(self.opening) > prompt.rfind(self.closing) and prompt.rstrip().endswith(self.opening)

    def answer_in(self, text: str) -> str:
        """The part of a whole text after its thinking."""
        before, closing, after = text.partition(self.closing)
        return (after if closing else before).lstrip()


# Qwen3, DeepSeek R1, SmolLM3 and most others; Magistral; Seed-OSS. Marks that are control tokens are not listed: they
# never become text.
_KNOWN = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
)


def thinking_marks(template: str | None) -> ThinkingMarks | None:
    """The thinking marks in a chat template; None without marks."""
    return next((marks for marks in _KNOWN if template and marks.closing in template), None)


def has_switch(template: str | None) -> bool:
    """Whether a chat template has a switch for thinking."""
    return template is not None and re.search(rf"\b{SWITCH}\b", template) is not None


class Says(Enum):
    """What a stretch of an answer's text is. The blanks around a mark belong to it."""

    MARK = "a mark of thinking"
    THOUGHT = "thinking"
    ANSWER = "the answer"


class ThinkingText:
    """Separates thinking from the answer in a text that arrives in chunks.

    Thinking comes first: an opening mark inside the answer is text. ``inside``: the prompt has opened the thinking
    (``ThinkingMarks.open_in``); the model may open it again.
    """

    def __init__(self, marks: ThinkingMarks, *, inside: bool = False) -> None:
        self._marks = marks
        self._without_mark = Says.THOUGHT if inside else Says.ANSWER
        self._next = Says.MARK  # what comes next: the opening mark, thinking, the blanks after it, or the answer
        self._closed = False
        self._held = ""

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
        return [(held, kind)] if held else []

    def _cut(self) -> tuple[int, Says] | None:
        """Where the next stretch ends, and what it is; None if more text must come."""
        held, opening, closing = self._held, self._marks.opening, self._marks.closing
        if self._next is Says.ANSWER:
            return len(held), Says.ANSWER
        begun = held.lstrip()
        blanks = len(held) - len(begun)
        if self._closed:
            self._next = Says.ANSWER if begun else Says.MARK
            return blanks, Says.MARK
        if self._next is Says.MARK:
            if begun.startswith(opening):
                self._next = Says.THOUGHT
                return blanks + len(opening), Says.MARK
            if opening.startswith(begun):
                return None
            self._next = self._without_mark
            return 0, self._next
        if held.startswith(closing):
            self._closed, self._next = True, Says.MARK
            return len(closing), Says.MARK
        end = held.find(closing)
        cut = end if end >= 0 else len(held) - overlap(held, (closing,))
        return (cut, Says.THOUGHT) if cut else None
