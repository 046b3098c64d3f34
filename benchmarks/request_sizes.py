"""What do the largest requests cost: their own time, other streams, and the place of a client that leaves?

    python -m benchmarks.request_sizes [--contexts 4096,32768]

The largest texts of many kinds are read until the answer would begin, and texts of half their length: the ratio of
the processor's times, the least of five each. A server of a tiny model gets the largest bodies that it takes, and
short ones of many values, and makes a reply with log-probabilities, while another client reads a stream: the longest
gap between two of its events. Clients send the largest texts and leave: the time until no request runs. Prints one
JSON object.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import tempfile
import threading
import time
import urllib.request
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import serving
from edgespec.files.home import Home
from edgespec.server.bodies import MOST_PARSED_BYTES
from edgespec.text.request_budget import RequestBudget
from tests.support.request_sizes import TEXTS, prepare
from tests.support.tiny_models import TinyModels

LONGEST_CONTEXT = 131_072  # its texts take 50 ms or longer
TURNS = 5
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAVING_S = 0.3  # until then the prompt is read
STREAM_TOKENS = 1500
REPLY = {"n": 8, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20}


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


# ------------------------------------------------------------------------------------------------------------ ratios


def least_s(work: Callable[[], object]) -> float:
    """The least time of the processor, which other programs do not lengthen."""
    times = []
    for _ in range(TURNS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def ratios(tiny: TinyModels) -> dict[str, float]:
    """How much longer the largest text of each kind takes than one of half its length."""
    most = int(RequestBudget(LONGEST_CONTEXT).body_bytes) - 200
    with tiny.load(draft="none", lookup=False, context=2048) as engine, engine.session() as session:

        def once(text: str, size: int) -> float:
            raw = json.dumps(user(text * (size // len(json.dumps(text))))).encode()
            return least_s(lambda: prepare(engine, session, "chat", raw, RequestBudget(LONGEST_CONTEXT)))

        return {name: once(text, most) / once(text, most // 2) for name, text in TEXTS.items()}


# -------------------------------------------------------------------------------------------------------------- gaps


def bodies(most: int) -> dict[str, bytes]:
    """The largest bodies of each kind."""
    budget = RequestBudget((most - 256_000) // 64)
    values = int(0.9 * budget.values)  # with more it would be refused before it is parsed

    def filled(before: str, item: Callable[[int], str], after: str, values: int) -> bytes:
        found, count = before, 0
        while count < values and len(found) < most - 200:
            found += item(count)
            count += 1
        return (found + after).encode().ljust(most)

    return {
        "numbers": filled('{"x":[', lambda _: "0,", "0]}", values),
        "texts": filled('{"x":[', lambda number: f'"{number:x}",', "0]}", values),
        "lists": filled('{"x":[', lambda _: "[],", "0]}", values // 4),
        "names": filled('{"x":{', lambda number: f'"{number:x}":0,', '"":0}}', values // 2),
        "objects": filled('{"x":[', lambda number: f'{{"{number:x}":0}},', "0]}", values // 6),
        "one text": json.dumps(user("word " * ((most - 200) // 5))).encode(),
        "blanks": json.dumps(user(" " * (most - 200))).encode(),
        "escapes": json.dumps(user("\u4e2d" * ((most - 200) // 6))).encode(),
    }


def short_bodies(context: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of many values, which are not parsed on a thread, with their routes."""
    size, values = MOST_PARSED_BYTES - 1000, int(0.9 * RequestBudget(context).values)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": [{}] * min(size // 3, values // 4)}
    found = {
        "a result": (CHATS, {"messages": [*user("hello")["messages"], answer, result]}),
        "prompts": (COMPLETIONS, {"prompt": [[1]] * min(size // 4, values // 5)}),
        "a prompt": (COMPLETIONS, {"prompt": [1] * min(size // 2, values)}),
    }
    return {name: (path, json.dumps(body, separators=(",", ":")).encode()) for name, (path, body) in found.items()}


def sent(url: str, body: bytes, path: str = CHATS) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    own = socket.create_connection((host, int(port)), 60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
    own.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
    return own


def read_all(own: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := own.recv(2**20):
            found += part
    return bytes(found)


@contextlib.contextmanager
def watched(url: str) -> Iterator[list[float]]:
    """Gaps between the events of one client's streams, from now to the end of the block."""
    gaps, ended, begun = list[float](), threading.Event(), threading.Event()
    body = json.dumps({**user("hello"), "max_tokens": STREAM_TOKENS, "stream": True}).encode()

    def watch() -> None:
        while not ended.is_set():
            with contextlib.closing(sent(url, body)) as own:
                own.recv(65_536)
                last = time.perf_counter()
                while own.recv(65_536) and not ended.is_set():
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
                    begun.set()

    thread = threading.Thread(target=watch)
    thread.start()
    begun.wait(60)
    try:
        yield gaps
    finally:
        ended.set()
        thread.join()


def longest_gap(url: str, work: Callable[[], object]) -> dict[str, float]:
    """The longest gap while ``work`` runs: the least of a few turns, as other programs make gaps too."""
    during, before = list[float](), list[float]()
    for _ in range(TURNS):
        with watched(url) as gaps:
            time.sleep(0.3)
            before.append(max(gaps))
            gaps.clear()
            work()
            time.sleep(0.05)
            during.append(max(gaps))
    return {"gap_s": min(during), "before_s": min(before)}


def running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        found = re.search(r"^edgespec_requests_running (\d+)", response.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def place_s(url: str, body: bytes) -> float:
    """Seconds until no request runs after four clients left."""
    own = [sent(url, body) for _ in range(4)]
    time.sleep(LEAVING_S)
    for each in own:
        each.close()
    left = time.perf_counter()
    while running(url):
        time.sleep(0.002)
    return time.perf_counter() - left


def measured(tiny: TinyModels, context: int) -> dict[str, Any]:
    """The server's gaps, and the time until a place is free, at a context length."""
    model = tiny._make(f"context-{context}", seed=3, context_length=context)
    largest = bodies(int(RequestBudget(context).body_bytes))
    asked = json.dumps({**user("hello"), **REPLY}).encode()
    with serving(tiny.folder, str(model), "--draft", "none", "--context", str(context)) as (url, _process):
        read_all(sent(url, json.dumps(user("hello")).encode()))

        def gap(body: bytes, path: str = CHATS) -> dict[str, float]:
            return longest_gap(url, lambda: read_all(sent(url, body, path)))

        short = {name: gap(body, path) for name, (path, body) in short_bodies(context).items()}
        return {
            "bodies": {name: gap(body) for name, body in largest.items()} | short,
            "reply": gap(asked),
            "place_s": {name: place_s(url, largest[name]) for name in ("one text", "blanks", "escapes")},
        }


def measure(contexts: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyModels(Path(folder), Home(Path(folder) / "home"))
        return {"ratios": ratios(tiny), "contexts": {str(each): measured(tiny, each) for each in contexts}}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="4096,32768", help="context lengths of the server, in tokens")
    print(json.dumps(measure([int(each) for each in parser.parse_args().contexts.split(",")]), indent=1))


if __name__ == "__main__":
    main()
