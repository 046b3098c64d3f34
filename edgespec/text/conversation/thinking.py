"""Thinking: text between marks before a model's answer, and the templates' switch for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


class ThinkingText:
    """Separates thinking from the answer in a text that arrives in chunks. The marks belong to the thinking.

    Thinking comes first: an opening mark inside the answer is text.
    """

    def __init__(self, marks: ThinkingMarks, *, inside: bool = False) -> None:
        """``inside``: the prompt has opened the thinking (``ThinkingMarks.open_in``)."""
        self.marks = marks
        self._inside = inside
        self._answering = False
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """(part of the text, whether it is thinking), in order; a possible mark is held back."""
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
        """The text held back, once all text has come."""
        held, self._held = self._held, ""
        return [(held, self._inside)] if held else []

    def _take_thinking(self, parts: list[tuple[str, bool]]) -> bool:
        """Append thinking to ``parts`` up to the closing mark; False without a closing mark yet."""
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
        """Decide whether thinking or the answer begins; False if more text is needed."""
        begun = self._held.lstrip()
        if begun.startswith(self.marks.opening):
            self._inside = True
        elif self.marks.opening.startswith(begun):
            return False
        else:
            self._answering = True
        return True


def split_thinking(text: str, splitter: ThinkingText | None) -> tuple[str | None, str]:
    """(thinking without marks and outer blanks, the rest) of a whole answer; None without thinking."""
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
    """Length of the longest suffix of ``text`` that is a prefix of ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
