"""An agent's long beginning, read from the disk by a later process.

    python -m benchmarks.beginnings [--model MODEL] [--tokens 18905] [--times 3]

A server in a home without prefixes answers two conversations that share a beginning, pages of the documentation cut
to the number of tokens, and keeps it. New servers answer another conversation, whose beginning is on the disk, and
the first one again. Prints one JSON object: seconds to the first token with and without the disk, tokens that were
not read, the size of the file, and whether the first conversation's text is the one that was read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import ROOT, fresh_home, serving
from edgespec.engine.prefixes.stored import stored_prefixes
from edgespec.files.home import Home, home
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.tokenizers.choice import open_tokenizer

PAGES = ("docs/guide/serve.md", "docs/architecture.md", "docs/kernels.md", "docs/results/drafting.md")
FIRST, SECOND, THIRD = "Which file holds the routes?", "Say in one sentence what a prefix is.", "What is the port?"
# Tokens of a template, a question and its answer.
AROUND = 200
# A prefix is written within seconds; the disk of a shared machine may be busy.
WRITTEN_WITHIN_S = 120.0


def beginning(model: str, tokens: int) -> str:
    """A text of about this number of the model's tokens."""
    file = Locator(store=Store(home()), download=True).locate_to_run(model)
    tokenizer = open_tokenizer(file.tokenizer_path, file.header)
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    ids = tokenizer.encode(pages)
    ids = (ids * (tokens // len(ids) + 1))[:tokens]
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def ask(url: str, system: str, prompt: str) -> dict[str, Any]:
    """A conversation's first answer: seconds to its first text, its text, and the prompt's tokens."""
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=None, trust_env=False) as reply:
        for line in reply.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if said := choice["delta"].get("content"):
                    first, text = first or time.perf_counter() - started, text + said
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"first_s": first, "text": text, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def ready(url: str) -> None:
    """Wait until the model is loaded."""
    while httpx.get(f"{url}/health", trust_env=False).status_code != httpx.codes.OK:
        time.sleep(0.05)


def measure(model: str, tokens: int, times: int, folder: Path) -> dict[str, Any]:
    """Both sides, in a new home in ``folder``."""
    system, options = beginning(model, tokens), ("--context", str(-(-(tokens + AROUND) // 4096) * 4096))
    os.environ.update(fresh_home(folder / "home"))
    own = Home(folder / "home")
    with serving(folder, model, *options) as (url, _):
        ready(url)
        read = ask(url, system, FIRST)
        ask(url, system, SECOND)
        until = time.monotonic() + WRITTEN_WITHIN_S
        while not (kept := stored_prefixes(own)):
            if time.monotonic() > until:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.1)
    later, again = [], []
    for _ in range(times):
        with serving(folder, model, *options) as (url, _):
            ready(url)
            later.append(ask(url, system, THIRD))
        with serving(folder, model, *options) as (url, _):
            ready(url)
            again.append(ask(url, system, FIRST))
    return {
        "prompt_tokens": read["prompt_tokens"],
        "cached_tokens": later[0]["cached_tokens"],
        "prefix_bytes": kept[0].bytes,
        "read_s": read["first_s"],
        "from_disk_s": statistics.median(each["first_s"] for each in later),
        "from_disk_longest_s": max(each["first_s"] for each in later),
        "same_text": all(each["text"] == read["text"] for each in again),
        "all_from_disk": all(each["cached_tokens"] >= kept[0].length for each in (*later, *again)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--tokens", type=int, default=18_905)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(given.model, given.tokens, given.times, Path(folder))))


if __name__ == "__main__":
    main()
