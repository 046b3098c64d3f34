"""A prompt that ends inside a token: its end is taken back, and the answer's first tokens spell it again.

A model has hardly seen ``retur`` in its tokens: its texts have the token ``return``. So behind a prompt that
is cut there it continues a text that it does not know (token healing; Token Alignment: Athiwaratkun et al., 2024).
The first tokens are drawn from those that agree with the bytes that were taken back. Tokens that spell no more than
these belong to the prompt; what the first other one has beyond them is the beginning of the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgespec.interfaces.drawing import UintArray
from edgespec.text.tokenizers.spellings import Spellings
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Tokens that are taken back at most: as many as llguidance looks at.
MOST_TOKENS = 4
# Bytes that are taken back at most. Longer ones are runs of one character, such as the blanks before a line.
MOST_BYTES = 64


@dataclass(frozen=True)
class Healing:
    """The end of a prompt that its answer spells again: ``text``, for which the prompt had ``taken`` tokens.

    Implements decoding's Healing. Tokens of ``banned`` spell nothing.
    """

    text: bytes
    taken: int
    spellings: Spellings
    banned: frozenset[int] = frozenset()

    @cached_property
    def _ways(self) -> list[list[int]]:
        """For each byte of the text the tokens that spell more of it from there on.

        From the end on: a token that spells a part of the rest is none of them unless others spell the remainder.
        """
        text, size = self.text, len(self.text)
        ways: list[list[int]] = [[] for _ in text]
        for begin in reversed(range(size)):
            found = self.spellings.longer(text[begin:])
            for end in range(begin + 1, size + 1):
                if end == size or ways[end]:
                    found += self.spellings.of(text[begin:end])
            ways[begin] = [token for token in found if token not in self.banned]
        return ways

    @property
    def is_possible(self) -> bool:
        """Whether tokens that are not banned spell the text."""
        return bool(self._ways[0])

    def mask(self, spelled: int) -> UintArray | None:
        if spelled == len(self.text):
            return None
        size = self.spellings.size
        allowed = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
        allowed[self._ways[spelled]] = 1
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def spelled(self, before: int, token: int) -> tuple[int, int]:
        length = self.spellings.length(token)
        return min(len(self.text), before + length), max(0, before + length - len(self.text))


def healing(
    tokenizer: Tokenizer, spellings: Spellings, tokens: Sequence[int], banned: Collection[int] = ()
) -> Healing | None:
    """What is taken back of a prompt: its last tokens whose text begins a longer token, as many as there are.

    The first token always stays. None if no token's text begins with that of the last ones, so that it cannot
    change what they are, and if tokens of ``banned`` are needed to spell it again.
    """
    found, text = None, b""
    for taken, token in enumerate(reversed(tokens[-MOST_TOKENS:]), 1):
        own = tokenizer.token_bytes(token)
        text = own + text
        if taken == len(tokens) or not own or tokenizer.control_token(token) is not None or len(text) > MOST_BYTES:
            break
        if spellings.longer(text):
            found = Healing(text, taken, spellings, frozenset(banned))
    return found if found is not None and found.is_possible else None
