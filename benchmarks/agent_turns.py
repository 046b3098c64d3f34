"""Are an agent's long conversations answered rightly, by the real model and with guesses?

    python -m benchmarks.agent_turns [--model MODEL] [--only AGENT ...]

Requests of the shapes of Claude Code, Codex and opencode, their texts generated to the recorded 18 905, 9 756 and
7 271 tokens. Each conversation has a tool turn: the model must call a tool that reads a file, gets a result, and
answers. A server with the model's drafter answers them, then one without. Prints one JSON object: for each program
the prompt's tokens, the call, what came after its result, whether both were right, and whether both servers said the
same. The call is right if it has the file's name; what comes next if it has the word that the file holds, in a text
or in another call: a small model may choose either.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import serving
from tests.support.agent_requests import TOKENS, claude_code, codex, opencode, with_output, with_result

WORD, FILE = "marigold", "notes.txt"
ASKED = f"Which word is in the file {FILE}? Read the file, then answer with the word."
RESULT = f"{WORD}\n"
# Of a call or an answer, so that a model that repeats itself ends soon.
# 64 cut off a call of Codex's function, whose parameters are many.
MOST_TOKENS = 512
# The largest of the conversations, with two answers and the result.
CONTEXT = 20_480

# What both servers must say.
SAID = ("calls", "said", "called_again")

Body = dict[str, Any]
Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A conversation: its first request, which must call ``tool``, and the one behind a reply with a call.

    ``calls`` are the names and arguments of a reply's calls, ``text`` is what it says, ``tokens`` its prompt's.
    """

    path: str
    first: Callable[[float], Body]
    choice: Any
    behind: Callable[[Body, Reply], Body]
    calls: Callable[[Reply], list[tuple[str, str]]]
    text: Callable[[Reply], str]
    tokens: Callable[[Reply], int]


def _blocks(reply: Reply, kind: str) -> list[dict[str, Any]]:
    return [block for block in reply["content"] if block["type"] == kind]


def _items(reply: Reply, kind: str) -> list[dict[str, Any]]:
    return [item for item in reply["output"] if item["type"] == kind]


def _message(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][0]["message"]
    return found


def _behind_opencode(body: Body, reply: Reply) -> Body:
    calls = _message(reply)["tool_calls"]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": RESULT} for each in calls]
    return {**body, "messages": [*body["messages"], said, *results]}


PROGRAMS: Mapping[str, Program] = {
    "claude-code": Program(
        "/v1/messages",
        lambda share: {**claude_code(ASKED, share), "max_tokens": MOST_TOKENS},
        {"type": "tool", "name": "Read"},
        lambda body, reply: with_result(body, _blocks(reply, "tool_use")[0], RESULT),
        lambda reply: [(each["name"], json.dumps(each["input"])) for each in _blocks(reply, "tool_use")],
        lambda reply: "".join(each["text"] for each in _blocks(reply, "text")),
        lambda reply: sum(value for name, value in reply["usage"].items() if name != "output_tokens"),
    ),
    "codex": Program(
        "/v1/responses",
        lambda share: {**codex(ASKED, share), "max_output_tokens": MOST_TOKENS},
        {"type": "function", "name": "exec_command"},
        lambda body, reply: with_output(body, reply["output"], RESULT),
        lambda reply: [(each["name"], each["arguments"]) for each in _items(reply, "function_call")],
        lambda reply: "".join(part["text"] for each in _items(reply, "message") for part in each["content"]),
        lambda reply: int(reply["usage"]["input_tokens"]),
    ),
    "opencode": Program(
        "/v1/chat/completions",
        lambda share: {**opencode(ASKED, share), "model": "default", "max_tokens": MOST_TOKENS},
        {"type": "function", "function": {"name": "bash"}},
        _behind_opencode,
        lambda reply: [
            (each["function"]["name"], each["function"]["arguments"])
            for each in _message(reply).get("tool_calls", ())
        ],
        lambda reply: _message(reply)["content"] or "",
        lambda reply: int(reply["usage"]["prompt_tokens"]),
    ),
}


def conversation(url: str, program: Program, share: float = 1.0) -> dict[str, Any]:
    """One program's two requests: what was called and said, and seconds. ``share`` makes their texts shorter.

    Raises RuntimeError for anything but answers.
    """
    greedy = {"temperature": 0, "stream": False}
    body = program.first(share)
    body.pop("stream_options", None)
    first, first_s = _ask(url, program.path, {**body, **greedy, "tool_choice": program.choice})
    calls = program.calls(first)
    if not calls:
        raise RuntimeError(f"there is no call: {json.dumps(first)[:500]}")
    second, second_s = _ask(url, program.path, {**program.behind(body, first), **greedy})
    return {
        "prompt_tokens": program.tokens(first),
        "calls": calls,
        "said": program.text(second),
        "called_again": program.calls(second),
        "first_s": round(first_s, 2),
        "second_s": round(second_s, 2),
    }


def _ask(url: str, path: str, body: Body) -> tuple[Reply, float]:
    started = time.perf_counter()
    response = httpx.post(f"{url}{path}", json=body, timeout=None, trust_env=False)
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(f"{path}: status {response.status_code}: {response.text[:500]}")
    found: Reply = response.json()
    return found, time.perf_counter() - started


def _is_right(found: Mapping[str, Any]) -> bool:
    (_, arguments), *_ = found["calls"]
    return FILE in arguments and WORD in f"{found['said']} {found['called_again']}"


def measure(model: str, names: Sequence[str]) -> dict[str, Any]:
    """The report."""
    sides = list[dict[str, dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as place:
        for options in ((), ("--draft", "none")):
            with serving(Path(place), model, "--context", str(CONTEXT), *options) as (url, _):
                sides.append({name: conversation(url, PROGRAMS[name]) for name in names})
    planned, plain = sides
    return {
        "model": model,
        "agents": {
            name: {
                **planned[name],
                "right": _is_right(planned[name]),
                "near_recorded": abs(planned[name]["prompt_tokens"] / TOKENS[name] - 1.0) <= 0.02,
                "as_plain": all(planned[name][what] == plain[name][what] for what in SAID),
                "plain": plain[name],
            }
            for name in names
        },
    }


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), help="this program (repeatable)")
    given = parser.parse_args()
    json.dump(measure(given.model, given.only or list(PROGRAMS)), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
