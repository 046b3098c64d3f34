"""Texts on which tokenizers differ: Unicode of every kind, blanks, code, pieces, halves of special tokens."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec.files.gguf.header import read_header
from edgespec.text.tokenizers.vocabulary import Vocabulary
from edgespec.text.tokenizers.word_splits import WORD_SPLITS

ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = ((0xA0, 0x600), (0x600, 0x1200), (0x1200, 0x3000), (0x3000, 0xA000), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF))
_BLANKS = " \t\n\r\u00a0\u2003\u3000\u0085\u200b\u2028"
_SIGNS = "0123456789'.,;:!?()[]{}<>/\\\"sStTrReEvVmMlLdD"
_LETTERS = "éüñçßÅØλжш語中あ한กא"


def special_texts(path: Path) -> list[str]:
    """Texts of the special tokens of a GGUF, control tokens included."""
    return [special.text for special in Vocabulary(read_header(path)).specials]


def token_texts(seed: int, pieces: Sequence[str], specials: Sequence[str]) -> Iterator[str]:
    """Endless texts. ``pieces``: texts of tokens; ``specials``: texts of tokens that are matched first."""
    rng = random.Random(seed)
    words = [
        word
        for path in ("README.md", "edgespec/engine/session.py")
        for word in (ROOT / path).read_text(encoding="utf-8").split(" ")
    ]

    def character() -> str:
        kind = rng.random()
        if kind < 0.25:
            return chr(rng.randrange(32, 127))
        if kind < 0.4:
            return rng.choice(_BLANKS)
        if kind < 0.7:
            return chr(rng.randrange(*rng.choice(_BLOCKS)))
        if kind < 0.75:
            return chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))
        return rng.choice(_SIGNS if kind < 0.9 else _LETTERS)

    def mixed() -> str:
        blanks = rng.choice(" \n\t") * rng.randrange(1, 9)
        special = rng.choice(specials) if specials else ""
        half = special[: rng.randrange(len(special) + 1)]
        return rng.choice((blanks, character(), rng.choice(words), special, half))

    def phrase() -> str:
        first = rng.randrange(len(words) - 8)
        return " ".join(words[first : first + rng.randrange(1, 8)])

    kinds = (
        lambda: "".join(character() for _ in range(rng.randrange(1, 12))),
        lambda: "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 6))),
        phrase,
        lambda: "".join(mixed() for _ in range(rng.randrange(1, 7))),
        lambda: "".join(rng.choices("abcd", k=rng.randrange(1, 40))),
    )
    while True:
        yield rng.choice(kinds)()


# Letters, digits and marks that Unicode 16 added (DerivedAge.txt), known to ``tokenizers`` but not to llama.cpp.
_UNICODE_16 = (
    (0x0897, 0x0897), (0x1C89, 0x1C8A), (0xA7CB, 0xA7CD), (0xA7DA, 0xA7DC), (0x105C0, 0x105F3), (0x10D40, 0x10D85),
    (0x10EC2, 0x10EC4), (0x10EFC, 0x10EFC), (0x11380, 0x113E2), (0x116D0, 0x116E3), (0x11BC0, 0x11BF9),
    (0x11F5A, 0x11F5A), (0x13460, 0x143FA), (0x16100, 0x16139), (0x16D40, 0x16D79), (0x18CFF, 0x18CFF),
    (0x1CCF0, 0x1CCF9), (0x1E5D0, 0x1E5FA),
)  # fmt: skip


def is_of_unicode_16(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _UNICODE_16)


def is_cut_otherwise(character: str, pre: str) -> bool:
    """Whether llama.cpp, which approximates splits that know capitals and marks, may cut otherwise at a character."""
    split = WORD_SPLITS.get(pre)
    if split is None or r"\p{Lu}" not in split.patterns[0] or character.isascii():
        return False
    return unicodedata.category(character) in ("Lu", "Lt", "Ll", "Mn", "Mc", "Me")


# Each text is split differently if the character is a letter, a digit, a mark, a blank or none of these.
CLASS_PROBE = "{0}(JW\n({0}JW {0} ({0} 1{0}2 1{0}(JW {0}'s .{0}.JW a{0}(JW"
