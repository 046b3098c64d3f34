"""Fill in the middle: the texts around a hole as tokens, in the order that the model was trained on.

The order is that of llama.cpp's /infill: other files, the text before the hole, and the text after it. Each text is
read as text: no name of a control token in it becomes that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.prompt_format import first_that_fits
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.tokenizer import FillInTokens, Tokenizer

# Tokens around the hole together: as many as llama.cpp's batch has, of which it takes three quarters before the hole.
# Here it is fifteen sixteenths, because what is after the hole is read again at every key. With 128 tokens after the
# hole the text that was cut out was as likely as with 512 (docs/results/fill-in.md).
MOST_AROUND = 2048
_BEFORE_SHARE = 15 / 16
# Characters a token of source code has, about; of text after the hole, four times as many are looked at.
_CHARACTERS = 4
# A text that is cut begins at a line near a multiple of this many characters a token of what is kept: an eighth.
# The same text is kept, and stays in the cache, while that much is typed.
_STEP = 1 / 2
# llama.cpp's names for what a request does not name, and its text between files of models without a token for that.
_PROJECT, _THIS_FILE, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class Hole:
    """The text ``before`` a hole and ``after`` it, and other files' names and texts, the most important last."""

    before: str
    after: str
    files: tuple[tuple[str, str], ...] = ()


def hole_tokens(tokenizer: Tokenizer, hole: Hole, room: int, budget: RequestBudget) -> list[int]:
    """At most ``room`` tokens; more only if the room is for a few.

    Of the text before the hole the beginning is cut, of that after it the end, and of the files the first are left
    out. Raises InvalidRequestError for a model without the tokens, for text that it cannot read, and what ``budget``
    raises.
    """
    marks = tokenizer.fill_in
    if marks is None:
        raise InvalidRequestError(
            "this model cannot fill in the middle: it has no tokens for the texts around a hole",
            hint="use a model that can, such as qwen2.5-coder-1.5b, or leave out the suffix",
            param="suffix",
        )
    texts = _Texts(tokenizer, marks, budget)
    bos = tokenizer.encode("", add_bos=True)[:1]  # llama.cpp may add an end-of-sequence token as well
    around = min(MOST_AROUND, room - len(bos) - 3)
    before = texts.last(hole.before, int(_BEFORE_SHARE * around))
    after = texts.first(hole.after, int((1 - _BEFORE_SHARE) * around))
    own = [marks.prefix, *before, marks.suffix, *after, marks.middle]
    return [*bos, *texts.files(hole.files, room - len(bos) - len(own)), *own]


class _Texts:
    """Texts of one prompt as tokens."""

    def __init__(self, tokenizer: Tokenizer, marks: FillInTokens, budget: RequestBudget) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._budget = budget

    def tokens(self, text: str) -> list[int]:
        self._budget.read(len(text))
        ids = self._tokenizer.encode(text) if text else []
        marks = {self._marks.prefix, self._marks.suffix, self._marks.middle}
        if not marks.isdisjoint(ids):
            raise InvalidRequestError(
                "a text around the hole spells out a control token, and this model cannot read it as text",
                hint="write it differently, for example with a space inside",
            )
        return ids

    def last(self, text: str, most: int) -> list[int]:
        """At most ``most`` tokens of the end of a text, from the beginning of a line on."""
        starts = list(_starts(text, max(1, int(_STEP * most))))
        begin = first_that_fits(starts, lambda start: len(self.tokens(text[start:])) <= most)
        return self.tokens(text[begin:])

    def first(self, text: str, most: int) -> list[int]:
        """At most ``most`` tokens of the beginning of a text."""
        return self.tokens(text[: 4 * _CHARACTERS * most])[: max(0, most)]

    def files(self, files: Sequence[tuple[str, str]], room: int) -> list[int]:
        """The last of the files that have room."""
        if not files:
            return []
        marks, begins = self._marks, list[int]()
        if marks.repository is not None:
            begins += [marks.repository, *self.tokens(_PROJECT)]
        ends = [] if marks.file is None else [marks.file, *self.tokens(_THIS_FILE)]
        room -= len(begins) + len(ends)
        kept = list[list[int]]()
        for name, text in reversed(files):
            if len(text) > 4 * _CHARACTERS * room:
                break
            head = self.tokens(_SNIPPET) if marks.file is None else [marks.file, *self.tokens(f"{name}\n")]
            own = [*head, *self.tokens(text)]
            room -= len(own)
            if room < 0:
                break
            kept.insert(0, own)
        return [*begins, *(token for each in kept for token in each), *ends] if kept else []


def _starts(text: str, step: int) -> Iterator[int]:
    """Where a cut text may begin, ascending: at its beginning, at lines or in long ones, and at its end."""
    before = 0
    yield before
    for at in range(step, len(text), step):
        line = text.find("\n", at, at + step) + 1 or at
        if line > before:
            before = line
            yield line
    if before < len(text):
        yield len(text)
