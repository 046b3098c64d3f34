"""Thinking: what models write between marks before they answer, and the switch that some templates have for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The variable of templates that turns thinking off, as Qwen3's and those after it call it.
SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """What stands before and after a model's thinking in its text."""

    opening: str
    closing: str

    def open_in(self, prompt: str) -> bool:
        """Whether a prompt ends inside of thinking, as templates do that begin it themselves."""
        return prompt.rfind(self.opening) > prompt.rfind(self.closing) and prompt.rstrip().endswith(self.opening)

    def answer_in(self, text: str) -> str:
        """What a whole text says after its thinking."""
        before, closing, after = text.partition(self.closing)
        return (after if closing else before).lstrip()


# Qwen3, DeepSeek R1, SmolLM3 and most others; Magistral; Seed-OSS. Marks that are control tokens are never text.
_KNOWN = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
)


def thinking_marks(template: str | None) -> ThinkingMarks | None:
    """The marks that a chat template knows; None where it knows none."""
    return next((marks for marks in _KNOWN if template and marks.closing in template), None)


def has_switch(template: str | None) -> bool:
    """Whether thinking can be turned off in a chat template."""
    return template is not None and re.search(rf"\b{SWITCH}\b", template) is not None


class ThinkingText:
    """Tells thinking from the answer in a text that comes bit by bit. The marks belong to the thinking.

    Thinking comes first: what looks like an opening mark after the answer has begun is text.
    """

    def __init__(self, marks: ThinkingMarks, *, inside: bool = False) -> None:
        """``inside``: the prompt has begun the thinking (``ThinkingMarks.open_in``)."""
        self.marks = marks
        self._inside = inside
        self._answering = False
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """Parts of the text and whether they are thinking; what may become a mark is held back."""
        self._held += text
        parts = list[tuple[str, bool]]()
        while self._held and not self._answering:
            if self._inside:
                if not self._take_thinking(parts):
                    return parts
            elif not self._take_beginning():
                return parts
        if self._held:
            parts.append((self._held, False))
            self._held = ""
        return parts

    def flush(self) -> list[tuple[str, bool]]:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        return [(held, self._inside)] if held else []

    def _take_thinking(self, parts: list[tuple[str, bool]]) -> bool:
        """Move thinking over, up to the closing mark; False where more has to come."""
        closing = self.marks.closing
        end = self._held.find(closing)
        if end >= 0:
            cut = end + len(closing)
            self._inside, self._answering = False, True
        else:
            cut = len(self._held) - _overlap(self._held, closing)
        if cut:
            parts.append((self._held[:cut], True))
        self._held = self._held[cut:]
        return end >= 0

    def _take_beginning(self) -> bool:
        """Whether thinking begins or the answer does, once that can be told."""
        begun = self._held.lstrip()
        if begun.startswith(self.marks.opening):
            self._inside = True
        elif self.marks.opening.startswith(begun):
            return False
        else:
            self._answering = True
        return True


def split_thinking(text: str, splitter: ThinkingText | None) -> tuple[str | None, str]:
    """The thinking in a whole answer, without its marks and blank ends, and the rest; None where it has none."""
    if splitter is None:
        return None, text
    marks = splitter.marks
    parts = splitter.feed(text) + splitter.flush()
    thought = "".join(part for part, thinking in parts if thinking)
    if not thought:
        return None, text
    thought = thought.strip().removeprefix(marks.opening).removesuffix(marks.closing)
    return thought.strip(), "".join(part for part, thinking in parts if not thinking).lstrip()


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
