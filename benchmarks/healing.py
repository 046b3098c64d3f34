"""Prompts that end inside a token, where one ends, and behind the blanks of a line: how often the rest is right.

    python -m benchmarks.healing [MODEL] [--cuts N] [--prose] [--drafts]

Cuts lines of this project's sources, or of its pages, inside of words, where a token of the whole text ends, and
before the first sign, at places that a seed chooses. Each beginning is continued to the line's end with and without
healing. Prints a line for each prompt where the two differ, and a JSON object for each kind: in how many the first
word and the whole rest of the line are right, how many characters are right on average, how many texts are equal.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fill_in import own_sources
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.text.tokenizers.tokenizer import Tokenizer

PAGES = Path(__file__).parents[1] / "docs"
CUTS, SEED = 60, 42
# Lines before a cut that are in its prompt, at most and at least.
_MOST_BEFORE, _LEAST_BEFORE = 40, 20
# Characters of a line that is cut, and those that stay behind a cut.
_LEAST_LINE, _LEAST_REST = 12, 2
_MOST_TOKENS = 24
_WORD = re.compile(r"\w+|\W")


@dataclass(frozen=True, slots=True)
class Beginning:
    """A text, and the ``rest`` of its last line."""

    text: str
    rest: str

    @property
    def word(self) -> str:
        """The rest of the word, or the one character that is none."""
        return _first_word(self.rest)


@dataclass(frozen=True, slots=True)
class Continued:
    """What followed a beginning, ``healed`` and ``plain``."""

    beginning: Beginning
    healed: str
    plain: str


def own_pages() -> dict[str, str]:
    """The project's pages by their paths."""
    return {path.relative_to(PAGES).as_posix(): path.read_text(encoding="utf-8") for path in PAGES.rglob("*.md")}


def beginnings(
    texts: Mapping[str, str], tokenizer: Tokenizer, count: int, seed: int = SEED
) -> dict[str, list[Beginning]]:
    """``count`` beginnings of each kind: inside a word and a token, where a token ends, and before the first sign."""
    chance, found = random.Random(seed), dict[str, list[Beginning]]({"inside": [], "at_ends": [], "blanks": []})
    long = [name for name in sorted(texts) if texts[name].count("\n") >= 2 * _LEAST_BEFORE]
    while len(found["inside"]) < count:
        lines = texts[chance.choice(long)].splitlines(keepends=True)
        row = chance.randrange(_LEAST_BEFORE, len(lines) - 1)
        before, line = "".join(lines[max(0, row - _MOST_BEFORE) : row]), lines[row].rstrip("\n")
        ends = set(_ends(before, line, tokenizer))
        words = [place for place in _places(line) if line[place - 1].isalpha() and line[place].isalpha()]
        kinds = {
            "inside": [place for place in words if place not in ends],
            "at_ends": [place for place in _places(line) if place in ends],
            "blanks": [_indent(line)],
        }
        if line.isascii() and all(kinds.values()):
            for kind, places in kinds.items():
                place = chance.choice(places)
                found[kind].append(Beginning(before + line[:place], line[place:]))
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _places(line: str) -> range:
    """Where a line may be cut behind its first sign."""
    first = _indent(line)
    return range(first + 1, len(line) - _LEAST_REST) if len(line) - first >= _LEAST_LINE else range(0)


def _ends(before: str, line: str, tokenizer: Tokenizer) -> Iterator[int]:
    """The characters of an ASCII line before each end of a token."""
    sizes = [len(tokenizer.token_bytes(token)) for token in tokenizer.encode(before + line)]
    place = len(line) - sum(sizes)  # some vocabularies put a blank before a text
    for size in sizes:
        place += size
        yield place


def _first_word(text: str) -> str:
    found = _WORD.match(text)
    return found[0] if found else ""


def _right(text: str, rest: str) -> int:
    """The characters that are right."""
    pairs = enumerate(zip(text, rest, strict=False))
    return next((at for at, (own, other) in pairs if own != other), min(len(text), len(rest)))


def figures(continued: Sequence[Continued]) -> dict[str, Any]:
    """The figures of some beginnings."""

    def counted(texts: Sequence[str]) -> dict[str, Any]:
        pairs = [(text, each.beginning) for text, each in zip(texts, continued, strict=True)]
        return {
            "words": sum(_first_word(text) == own.word for text, own in pairs),
            "lines": sum(text.rstrip() == own.rest.rstrip() for text, own in pairs),
            "characters": sum(_right(text, own.rest) for text, own in pairs) / len(pairs),
        }

    return {
        "beginnings": len(continued),
        "equal": sum(each.healed == each.plain for each in continued),
        "healed": counted([each.healed for each in continued]),
        "plain": counted([each.plain for each in continued]),
    }


def _asked(session: Session, beginning: Beginning, *, heal: bool, depth: int | None) -> str:
    answer = session.generate(beginning.text, raw=True, heal=heal, stop=["\n"], max_tokens=_MOST_TOKENS, depth=depth)
    return answer.text


def measure(model: str | None, texts: Mapping[str, str], count: int, depth: int | None) -> None:
    """Continue the beginnings of each kind, and print what became of them."""
    with Engine.load(model) as engine, engine.session() as session:
        for kind, some in beginnings(texts, engine.tokenizer, count).items():
            continued = list[Continued]()
            for own in some:
                healed, plain = (_asked(session, own, heal=heal, depth=depth) for heal in (True, False))
                continued.append(Continued(own, healed, plain))
                if healed != plain:
                    print(f"{own.text[-16:]!r} {own.rest[:30]!r}: {healed[:30]!r}, not {plain[:30]!r}", flush=True)
            print(json.dumps({"kind": kind, **figures(continued)}), flush=True)


def main() -> None:
    """Print where the two differ, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the default model if not given")
    parser.add_argument("--cuts", type=int, default=CUTS, metavar="N", help="prompts of each kind")
    parser.add_argument("--prose", action="store_true", help="cut pages, not sources")
    parser.add_argument("--drafts", action="store_true", help="with drafts, which change no text")
    given = parser.parse_args()
    texts = own_pages() if given.prose else own_sources()
    measure(given.model, texts, given.cuts, None if given.drafts else 0)


if __name__ == "__main__":
    main()
