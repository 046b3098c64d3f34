"""Write a suite of prompts of 300, 1000 and 3000 tokens, four of each.

    python -m benchmarks.prompt_lengths OUT.jsonl

The prompts are parts of the README and the changelog with a question. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.processes import ROOT

LENGTHS = (300, 1000, 3000)
QUESTIONS = ("What is this text about?", "Name two commands in it.", "Who is it for?", "List its subjects.")


def lines() -> list[str]:
    """The suite's lines, of about 3.1 characters a token."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = []
    for length in LENGTHS:
        for number, question in enumerate(QUESTIONS):
            start = 3000 * number
            prompt = f"{text[start : start + int(3.1 * length)]}\n\n{question}"
            found.append(json.dumps({"id": f"{length}-{number}", "category": f"prompt {length}", "prompt": prompt}))
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    out: Path = parser.parse_args().out
    written = lines()
    out.write_text("\n".join(written) + "\n", encoding="utf-8")
    print(json.dumps({"suite": str(out), "prompts": len(written)}))


if __name__ == "__main__":
    main()
