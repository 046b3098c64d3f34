"""Does a server give every client the right text for an hour, whatever the others do?

    python -m benchmarks.mixed_traffic [--model MODEL] [--minutes N] [--clients N]

Serves the model, and asks each request alone first. Then clients repeat the requests in random order: greedy and
sampled, streamed and whole, short and long prompts. Others leave in the middle of an answer, send malformed JSON,
prompts that are too long and half a request, or connect and say nothing. After a sixth of the time and at the end all
clients stop, and the server's memory, threads and descriptors are counted. Prints one JSON object.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.processes import serving

STUCK_S = 180.0
QUIET_S = 8.0  # after the last request: sessions, connections and threads that are no longer needed have ended

_LONG = "Here is a list of words.\n" + " ".join(f"word{number}" for number in range(150)) + "\nName the third word."
_CODE = "Add type hints.\n```python\n" + "def add(a, b):\n    return a + b\n" * 6 + "```"


def _request(prompt: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "seed": 7, **more}


REQUESTS: tuple[dict[str, Any], ...] = (
    _request("Name three sorting algorithms.", max_tokens=24),
    _request("Write a Python function that reverses a list.", max_tokens=48),
    _request("Write one sentence about the sea.", max_tokens=24, temperature=0.8),
    _request("Invent a name for a cat.", max_tokens=12, temperature=1.0, top_p=0.9),
    _request(_LONG, max_tokens=16),
    _request(_CODE, max_tokens=64),
    _request(_CODE, max_tokens=48, temperature=0.5),
    _request("Count from one to ten in words.", max_tokens=40, stop=["seven"]),
    _request("What is 17 plus 25?", max_tokens=16, logprobs=True, top_logprobs=2),
)


class Client:
    """Sends requests to the server, each on a separate connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)

    def send(self, body: bytes) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self.address, timeout=STUCK_S)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse()

    def ask(self, request: Mapping[str, Any], *, stream: bool) -> tuple[str, Any]:
        """The text, and why it ended. Raises OSError or ValueError for anything but an answer."""
        with self.send(json.dumps({**request, "stream": stream}).encode()) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read(500)!r}")
            if not stream:
                choice = json.loads(response.read())["choices"][0]
                return choice["message"]["content"], choice["finish_reason"]
            text, reason = "", None
            for line in response:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
            return text, reason

    # ------------------------------------------------------------------------------------------------ faults

    def leave(self, chance: random.Random) -> None:
        """Leave after a few parts of a streamed answer."""
        request = {**chance.choice(REQUESTS), "stream": True}
        with self.send(json.dumps(request).encode()) as response:
            for _ in range(chance.randrange(6)):
                response.readline()

    def send_nonsense(self, chance: random.Random) -> None:
        """A body that is refused: malformed JSON, wrong types, or a prompt that is too long."""
        bodies = (b"{", b"[]", b"\xff\xfe", b'{"messages": 3}', json.dumps(_request("word " * 60_000)).encode())
        with self.send(chance.choice(bodies)) as response:
            assert 400 <= response.status < 500, response.status
            response.read()

    def send_half(self, chance: random.Random) -> None:
        """The beginning of a request, or nothing at all."""
        connection = http.client.HTTPConnection(*self.address, timeout=STUCK_S)
        connection.connect()
        if chance.random() < 0.7:
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("Content-Length", "1000")
            connection.endheaders(b'{"messages": [')
        time.sleep(chance.random())
        connection.close()


class Traffic:
    """Clients in threads. ``counts`` by kind of event; ``problems`` are wrong or stuck answers."""

    def __init__(self, url: str, expected: Mapping[int, tuple[str, Any]]) -> None:
        self.client, self.expected = Client(url), expected
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run_for(self, seconds: float, clients: int, seed: int) -> None:
        """Let the clients run, then wait until all have ended."""
        self._stop.clear()
        jobs: list[tuple[Callable[[random.Random], None], str]] = [(self._ask, "answer")] * clients
        client = self.client
        jobs += [(client.leave, "left"), (client.send_nonsense, "nonsense"), (client.send_half, "half")]
        threads = [
            threading.Thread(target=self._repeat, args=(job, kind, random.Random(f"{seed} {number}")), daemon=True)
            for number, (job, kind) in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(2 * STUCK_S)
            if thread.is_alive():
                self._note("a client did not end")

    def _repeat(self, job: Callable[[random.Random], None], kind: str, chance: random.Random) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                job(chance)
            except Exception as error:  # whatever it is, the client asks again
                self._note(f"{kind}: {type(error).__name__}: {error}")
            if time.monotonic() - begun > STUCK_S:
                self._note(f"{kind}: took {time.monotonic() - begun:.0f} s")
            with self._lock:
                self.counts[kind] += 1
            if kind != "answer":
                self._stop.wait(2.0 * chance.random())

    def _ask(self, chance: random.Random) -> None:
        number = chance.randrange(len(REQUESTS))
        found = self.client.ask(REQUESTS[number], stream=chance.random() < 0.5)
        if found != self.expected[number]:
            self._note(f"request {number}: {found!r} instead of {self.expected[number]!r}")

    def _note(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)


def resources(process: psutil.Process) -> dict[str, float]:
    """What the server holds after a quiet moment."""
    time.sleep(QUIET_S)
    return {
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


def measure(model: str, minutes: float, clients: int) -> dict[str, Any]:
    """The report."""
    with tempfile.TemporaryDirectory() as place, serving(Path(place), model, "--context", "2048") as (url, server):
        client = Client(url)
        expected = {number: client.ask(request, stream=False) for number, request in enumerate(REQUESTS)}
        traffic, process = Traffic(url, expected), psutil.Process(server.pid)
        traffic.run_for(60.0 * minutes / 6.0, clients, seed=1)
        early = resources(process)
        traffic.run_for(60.0 * minutes * 5.0 / 6.0, clients, seed=2)
        late = resources(process)
        again = {number: client.ask(request, stream=True) for number, request in enumerate(REQUESTS)}
    return {
        "model": model,
        "minutes": minutes,
        "clients": clients,
        "requests": dict(traffic.counts),
        "problems": traffic.problems[:20],
        "problem_count": len(traffic.problems),
        "same_afterwards": again == expected,
        "early": early,
        "late": late,
    }


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    json.dump(measure(given.model, given.minutes, given.clients), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
