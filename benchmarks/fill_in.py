"""Holes in this project's own sources, filled as editors ask for it: the same text with drafts, and how fast.

    python -m benchmarks.fill_in [--limit N] [--holes N] [--piece N]

Cuts holes of the rest of a line, and of a few lines, at places that a seed chooses. Each is asked for beside two
other files: with drafts and nothing in the cache, without drafts, and with one more character typed. Prints one JSON
object: how many texts differ with and without drafts, how many begin with the text that was cut out, the ratio of
decoding speeds, and that of the second key's time to the first token to the first key's. A line for each hole goes
to stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.bench.statistics import geomean
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session

SOURCES = Path(__file__).parents[1] / "edgespec"
HOLES, SEED = 100, 41
# Files with fewer lines have no place in the middle.
_LEAST_LINES = 60
# Characters of each of the two other files, as editors send pieces of files.
PIECE = 4000
# Lines of the longer holes.
_MOST_LINES = 3
_MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """A hole: the text ``before`` it, the text ``inside`` it, the text ``after`` it, and other files' texts."""

    before: str
    inside: str
    after: str
    files: tuple[tuple[str, str], ...]

    @property
    def is_line(self) -> bool:
        return "\n" not in self.inside

    @property
    def typed(self) -> Cut:
        """The hole once its first character is typed."""
        return Cut(self.before + self.inside[0], self.inside[1:], self.after, self.files)


def cuts(texts: Mapping[str, str], count: int, seed: int = SEED, piece: int = PIECE) -> list[Cut]:
    """Holes in files by name, the rest of a line and some lines in turn, with ``piece`` characters of two others."""
    chance, names = random.Random(seed), sorted(texts)
    long = [name for name in names if texts[name].count("\n") >= _LEAST_LINES]
    found = list[Cut]()
    while len(found) < count:
        name, *others = chance.sample(long, 3)
        lines = texts[name].splitlines(keepends=True)
        first = chance.randrange(_LEAST_LINES // 3, len(lines) - _MOST_LINES)
        last = first + (chance.randint(1, _MOST_LINES - 1) if len(found) % 2 else 0)
        text = lines[first].rstrip("\n")
        indent = len(text) - len(text.lstrip())
        if len(text) - indent < 12:
            continue
        column = chance.randrange(indent, len(text) - 4)
        inside = text[column:] + "".join(["\n", *lines[first + 1 : last + 1]] if last > first else []).rstrip("\n")
        before, whole = "".join(lines[:first]) + text[:column], "".join(lines)
        pieces = tuple((other, texts[other][:piece]) for other in others)
        found.append(Cut(before, inside, whole[len(before) + len(inside) :], pieces))
    return found


def own_sources() -> dict[str, str]:
    """The project's sources by their paths."""
    return {path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}


def ask(session: Session, cut: Cut, depth: int | None) -> Done:
    """What the model fills in, at most a line where a line was cut out."""
    stop = ["\n"] if cut.is_line else []
    events = session.generate(
        cut.before, suffix=cut.after, files=cut.files, stop=stop, depth=depth, max_tokens=_MOST_TOKENS
    )
    return next(event for event in events if isinstance(event, Done))


@dataclass(frozen=True, slots=True)
class Filled:
    """The answers for one hole: the first with nothing in the cache, one without drafts, and one a key later."""

    cut: Cut
    first: Done
    plain: Done
    second: Done

    @property
    def is_same(self) -> bool:
        return self.first.token_ids == self.plain.token_ids

    @property
    def is_exact(self) -> bool:
        """Whether the answer begins with the text that was cut out."""
        return self.first.text.startswith(self.cut.inside)

    @property
    def speed_ratio(self) -> float | None:
        own, plain = (done.stats.decode_tokens_per_s for done in (self.first, self.plain))
        return own / plain if own and plain else None

    @property
    def key_ratio(self) -> float:
        return (self.second.stats.ttft_s or 0.0) / (self.first.stats.ttft_s or 1.0)


def figures(filled: Sequence[Filled]) -> dict[str, Any]:
    """The figures of all holes."""
    ratios = [ratio for each in filled if (ratio := each.speed_ratio) is not None]
    return {
        "holes": len(filled),
        "different": sum(not each.is_same for each in filled),
        "exact": sum(each.is_exact for each in filled),
        "speed_ratio": geomean(ratios) if ratios else None,
        "prompt_tokens": median(each.first.stats.prompt_tokens for each in filled),
        "first_key_s": median(each.first.stats.ttft_s or 0.0 for each in filled),
        "second_key_s": median(each.second.stats.ttft_s or 0.0 for each in filled),
        "second_key_ratio": median(each.key_ratio for each in filled),
        "largest_second_key_ratio": max(each.key_ratio for each in filled),
    }


def measure(count: int, limit: int | None, piece: int) -> dict[str, Any]:
    """Fill the first ``limit`` of ``count`` holes."""
    filled = list[Filled]()
    with Engine.load() as engine, engine.session() as session:
        engine.load_drafter()
        for cut in cuts(own_sources(), count, piece=piece)[:limit]:
            session.clear(keep_cache=False)
            first, plain = ask(session, cut, None), ask(session, cut, 0)
            filled.append(Filled(cut, first, plain, ask(session, cut.typed, None)))
            print(_line(filled[-1]), file=sys.stderr, flush=True)
    return figures(filled)


def _line(own: Filled) -> str:
    """One hole's figures."""
    ratio = own.speed_ratio
    speed = "" if ratio is None else f", {ratio:.2f} times the speed without drafts"
    keys = f"second key {own.key_ratio:.3f} of the first"
    return f"{own.first.stats.prompt_tokens} tokens, same {own.is_same}, exact {own.is_exact}, {keys}{speed}"


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holes", type=int, default=HOLES, metavar="N", help="holes that are cut")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N of them; all if not given")
    parser.add_argument("--piece", type=int, default=PIECE, metavar="N", help="characters of each of the other files")
    given = parser.parse_args()
    print(json.dumps(measure(given.holes, given.limit, given.piece)))


if __name__ == "__main__":
    main()
