"""Record an answer as a terminal shows it with its guesses shaded: ``docs/guesses.svg``, from a real run.

    python scripts/picture.py [--target MODEL] [--draft MODEL] [--prompt TEXT] [--max-tokens N] [--output FILE]

The answer is greedy, and missing models are fetched. The picture moves as the run did: the text of a round appears
when it came. Where pictures do not move, all of it is there. Measured times decide how far each round drafts, so the
guessed tokens differ by machine. The text does not.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from edgespec import Done, EdgespecError, Engine, Event, Text
from edgespec.files.atomic import write_text

PROMPT = "Write a Python function that tells whether a number is prime, with type hints and a docstring. Only code."
OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "guesses.svg"

# Pixels. A character of the common monospaced fonts is 0.6 of its size wide; textLength makes others fit as well.
SIZE, ADVANCE, LINE, MARGIN, BAR = 14, 8.4, 21, 20, 34
COLUMNS = 84
MOST_BYTES = 40_000

STYLE = """\
text{white-space:pre;font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24292f}
.screen{fill:#ffffff;stroke:#d0d7de}.bar{fill:#d0d7de}.guess{fill:#c8e1ff}.dim{fill:#57606a}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.screen{fill:#0d1117;stroke:#30363d}.bar{fill:#30363d}
.guess{fill:#1f4b7a}.dim{fill:#9198a1}}
.later{animation:appear 1ms backwards}@keyframes appear{from{opacity:0}}
@media(prefers-reduced-motion:reduce){.later{animation:none}}
"""


@dataclass(frozen=True)
class Piece:
    """Characters of an answer, when they came (``at``, seconds), and whether a drafter guessed their token."""

    text: str
    guessed: bool = False
    at: float = 0.0


@dataclass(frozen=True)
class Line:
    """A line of the screen; ``dim`` is the colour of the counts."""

    pieces: tuple[Piece, ...]
    dim: bool = False


def timed(events: Iterable[Event]) -> Iterator[tuple[float, Event]]:
    """Each event, with the seconds since the first was asked for."""
    started = time.monotonic()
    for event in events:
        yield time.monotonic() - started, event


def pieces_of(events: Iterable[tuple[float, Event]]) -> list[Piece]:
    """The text of an answer, token by token; characters that came with no token are the target's."""
    pieces = []
    for at, event in events:
        if not isinstance(event, Text):
            continue
        start = 0
        for token in event.tokens:
            end = start + len(token.text)
            pieces.append(Piece(event.text[start:end], token.guessed_by is not None, at))
            start = end
        pieces.append(Piece(event.text[start:], at=at))
    return [piece for piece in pieces if piece.text]


def lines_of(pieces: Sequence[Piece]) -> list[Line]:
    """Break pieces at line ends and after ``COLUMNS`` characters."""
    lines: list[list[Piece]] = [[]]
    columns = 0
    for piece in pieces:
        for part in re.findall(r"\n|[^\n]", piece.text.expandtabs(4)):
            if part == "\n" or columns == COLUMNS:
                lines.append([])
                columns = 0
            if part != "\n":
                lines[-1].append(Piece(part, piece.guessed, piece.at))
                columns += 1
    return [Line(tuple(line)) for line in lines]


def moments_of(line: Line) -> list[tuple[int, tuple[Piece, ...]]]:
    """First column and characters of each stretch of a line that came at one time."""
    found, column = [], 0
    for _at, stretch in itertools.groupby(line.pieces, lambda piece: piece.at):
        pieces = tuple(stretch)
        found.append((column, pieces))
        column += sum(len(piece.text) for piece in pieces)
    return found


def runs_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """First character and length of each run of guessed characters, without the blanks at the start."""
    text = "".join(piece.text for piece in pieces)
    guessed = "".join(("x" if piece.guessed else "-") * len(piece.text) for piece in pieces)
    indent = len(text) - len(text.lstrip())
    runs = [(max(run.start(), indent), run.end()) for run in re.finditer("x+", guessed)]
    return [(start, end - start) for start, end in runs if end > start]


def stretch(first: int, top: int, pieces: Sequence[Piece], *, dim: bool) -> Iterator[str]:
    """The shapes of characters that came at one time, from column ``first`` on, in a line that begins at ``top``."""
    at = pieces[0].at
    later, when = (" later", f' style="animation-delay:{at:.2f}s"') if at else ("", "")
    for start, length in runs_of(pieces):
        x = MARGIN + (first + start) * ADVANCE
        shape = f'x="{x:g}" y="{top + 2}" width="{length * ADVANCE:g}" height="{LINE - 3}" rx="3"'
        yield f'<rect class="guess{later}"{when} {shape}/>'
    text = "".join(piece.text for piece in pieces)
    if shown := text.strip():
        x = MARGIN + (first + len(text) - len(text.lstrip())) * ADVANCE
        place = f'x="{x:g}" y="{top + 15}" textLength="{len(shown) * ADVANCE:g}" lengthAdjust="spacingAndGlyphs"'
        css = f"{'dim' if dim else ''}{later}".strip()
        named = f' class="{css}"' if css else ""
        yield f'<text{named}{when} {place} xml:space="preserve">{escape(shown, quote=False)}</text>'


def draw(lines: Sequence[Line], title: str) -> str:
    """The SVG of a screen with these lines; its text is text."""
    width = 2 * MARGIN + COLUMNS * ADVANCE
    height = BAR + len(lines) * LINE + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="screen" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
        *(f'<circle class="bar" cx="{MARGIN + 18 * dot:g}" cy="17" r="5.5"/>' for dot in range(3)),
    ]
    for number, line in enumerate(lines):
        for first, pieces in moments_of(line):
            parts += stretch(first, BAR + number * LINE, pieces, dim=line.dim)
    return "\n".join([*parts, "</svg>", ""])


def picture(engine: Engine, prompt: str, max_tokens: int) -> str:
    """Answer ``prompt`` greedily and draw the prompt, the answer and its counts.

    The speed is left out: the speed of a single run proves nothing.
    """
    with engine.session() as session:
        events = list(timed(session.generate(prompt, max_tokens=max_tokens)))
    end, done = events[-1]
    assert isinstance(done, Done), "a generation ends with Done"
    asked = lines_of([Piece(f"> {prompt}\n")])[:-1]
    answer = lines_of(pieces_of(events))
    stats = done.stats
    counts = (
        f"{stats.guessed_tokens} of {stats.emitted_tokens} tokens were guessed · "
        f"{stats.accepted} of {stats.proposed} guesses were right"
    )
    title = "An answer in a terminal. Shaded: tokens that a drafter guessed and the model confirmed."
    return draw([*asked, *answer, Line((Piece(counts, at=end),), dim=True)], title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture; 1 if an engine's error or a picture that is too large prevents it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    try:
        with Engine.load(chosen.target, draft=chosen.draft, download=True) as engine:
            drawn = picture(engine, chosen.prompt, chosen.max_tokens)
        if len(drawn.encode()) > MOST_BYTES:
            print(f"the picture has more than {MOST_BYTES} bytes: lower --max-tokens", file=sys.stderr)
            return 1
        write_text(chosen.output, drawn)
    except EdgespecError as error:
        print(f"{error.message}\n{error.hint or ''}".strip(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
