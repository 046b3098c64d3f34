"""Three fixed prompts, each answered plainly and with the default plan, side by side. Reads no stdin.

make demo
"""

from __future__ import annotations

import shutil
import sys
import textwrap

from edgespec import Done, EdgespecError, Engine, Loading
from edgespec.files.progress import ProgressEvent

PROMPTS = (
    "Write a Python function that reverses the words of a sentence.",
    "Why is the sky blue? Two sentences.",
    'Repeat this list with every price doubled, same format: "pen 2, book 9, lamp 30, chair 75, desk 140".',
)
MAX_TOKENS = 96


def answer(engine: Engine, prompt: str, depth: int | None) -> Done:
    """One answer in a new conversation; the first forwards of a session are not special."""
    with engine.session() as session:
        for event in session.generate(prompt, max_tokens=MAX_TOKENS, depth=depth):
            if isinstance(event, Done):
                return event
    raise AssertionError("a generation ends with Done")


def columns(left: str, right: str) -> str:
    """Two texts in two columns, as wide as the terminal allows."""
    width = max(24, (min(shutil.get_terminal_size().columns, 140) - 3) // 2)

    def lines(text: str) -> list[str]:
        return [part for line in text.splitlines() for part in (textwrap.wrap(line, width) or [""])]

    rows = [lines(left), lines(right)]
    height = max(map(len, rows))
    rows = [column + [""] * (height - len(column)) for column in rows]
    return "\n".join(f"{one:{width}} | {other}" for one, other in zip(*rows, strict=True))


def say(event: Loading | ProgressEvent) -> None:
    """Progress on stderr, one line a step."""
    if isinstance(event, Loading) and event.fraction is None:
        print(event.stage, file=sys.stderr)


def speed(done: Done) -> str:
    """Tokens per second and per round."""
    stats = done.stats
    rate = "not measured" if stats.decode_tokens_per_s is None else f"{stats.decode_tokens_per_s:.1f} tok/s"
    return rate if stats.tokens_per_round is None else f"{rate}, {stats.tokens_per_round:.2f} tokens/round"


def main() -> int:
    """Print the comparison; 1 if any pair of answers differs."""
    try:
        with Engine.load(profile="laptop", download=True, calibrate=True, progress=say) as engine:
            print(f"{engine.plan.target.model}: plain | default")
            differ = 0
            for prompt in PROMPTS:
                plain, default = answer(engine, prompt, 0), answer(engine, prompt, None)
                same = plain.token_ids == default.token_ids
                differ += not same
                print(f"\n> {prompt}\n")
                print(columns(plain.text, default.text))
                print(columns(speed(plain), speed(default)))
                print("token for token the same" if same else "THE ANSWERS DIFFER")
                if default.speculation_off:
                    print(f"drafting: {default.speculation_off}")
    except EdgespecError as error:
        print(f"demo: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
