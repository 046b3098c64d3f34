"""Does a server give every client the right text for an hour, whatever the others do?

    python -m benchmarks.mixed_traffic [--model MODEL] [--minutes N] [--clients N]

Serves the model, and asks each request alone first: every route that answers, whole and streamed, greedy and
sampled, short and long prompts, and the routes that count tokens. Then clients repeat the requests in random order.
Others read slowly, open the page and ask about the server, leave in the middle of an answer, send malformed JSON,
prompts and bodies that are too long and half a request, connect and say nothing, or ask again before their hole is
filled. After a sixth of the time and at the end all clients stop, and the server's memory, threads and descriptors
are counted; memory is counted every minute too. It follows the conversations that the server keeps, which are as long
as the requests of the moment. Prints one JSON object.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import psutil

from benchmarks.processes import serving
from tests.support.faces import ANSWERS, TEXTS, TOKENS, Said, Way

STUCK_S = 180.0
QUIET_S = 8.0  # after the last request: sessions, connections and threads that are no longer needed have ended
SAMPLE_S = 60.0
# A reader so slow that the answer waits for it: the pause before each line.
SLOW_S = 0.2
# A body that the server refuses by its length alone.
TOO_LARGE = 10**9

_LONG = "Here is a list of words.\n" + " ".join(f"word{number}" for number in range(150)) + "\nName the third word."
_CODE = "Add type hints.\n```python\n" + "def add(a, b):\n    return a + b\n" * 6 + "```"
_PROMPTS = (("Name three sorting algorithms.", 24), (_LONG, 16), (_CODE, 48))
# Added to the bodies of one prompt, by the route; Ollama's are options.
_DRAWN = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
_MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _DRAWN),
    ("/v1/chat/completions", {"stop": ["a"], "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", _DRAWN),
    ("/v1/responses", {"instructions": "Be brief."}),
    ("/v1/messages", {"system": "Be brief.", "stop_sequences": ["e "]}),
    ("/api/chat", {"options": {"num_predict": 24, **_DRAWN}}),
    ("/infill", {"input_extra": [{"filename": "a.py", "text": "def add(a, b):\n    return a + b\n"}]}),
)
# What a person's browser and programs ask about the server; the page comes to those that ask for HTML.
PAGES = ("/", "/health", "/v1/models", "/props", "/metrics", "/openapi.json", "/api/version", "/api/tags", "/api/ps")

T = TypeVar("T")
# The status of a reply, and what it says; the whole body if the request was refused.
Answer: TypeAlias = tuple[int, Said]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, which may stream where its route does."""

    way: Way
    body: Mapping[str, Any]


REQUESTS: tuple[Asked, ...] = (
    *(
        Asked(way, way.body(*prompt))
        for ways in (ANSWERS, TEXTS, TOKENS)
        for way in ways.values()
        for prompt in _PROMPTS
    ),
    *(Asked(way, {**way.body(*_PROMPTS[0]), **more}) for path, more in _MORE if (way := {**ANSWERS, **TEXTS}[path])),
)
STREAMED = tuple(asked for asked in REQUESTS if asked.way.piece is not None)
# These count the tokens of any text, or leave out what is far from a hole.
_ANY_LENGTH = frozenset((*TOKENS, "/infill"))
_HOLES = tuple(asked for asked in REQUESTS if asked.way.path == "/infill")
_BROKEN = (b"{", b"[]", b"\xff\xfe", b'{"messages": 3, "prompt": 3, "input": 3, "content": 3, "input_prefix": 3}')


class Client:
    """Sends requests to the server, each on a separate connection. Servers know it by its name."""

    def __init__(self, url: str, name: str = "alone") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)
        self._headers = {"User-Agent": name, "Connection": "close"}

    def begin(
        self, path: str, body: bytes | None = None, accept: str = "*/*", program: str = "Python"
    ) -> http.client.HTTPConnection:
        """Send a request of that ``program``, and leave its reply to the caller."""
        connection = http.client.HTTPConnection(*self.address, timeout=STUCK_S)
        headers = {**self._headers, "Accept": accept, "Content-Type": "application/json", "User-Agent": program}
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection

    def ask(self, asked: Asked, *, stream: bool, pause_s: float = 0.0) -> Answer:
        """The answer. With ``pause_s`` it waits that long before it reads each line."""
        return self.answer(self._begin(asked, stream), asked, stream=stream, pause_s=pause_s)

    def answer(
        self, connection: http.client.HTTPConnection, asked: Asked, *, stream: bool, pause_s: float = 0.0
    ) -> Answer:
        """The answer to a request that was sent."""
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                return response.status, (response.read().decode(), None)
            if stream:
                return response.status, asked.way.streamed(_lines(response, pause_s))
            return response.status, asked.way.whole(json.loads(response.read()))

    def page(self, path: str) -> str:
        """What a browser gets there. Raises ValueError for anything but a page."""
        with self.begin(path, accept="text/html", program="Mozilla/5.0").getresponse() as response:
            if response.status != http.client.OK:
                raise ValueError(f"{path}: status {response.status}")
            return response.read().decode()

    def _begin(self, asked: Asked, stream: bool) -> http.client.HTTPConnection:
        # Ollama's routes stream unless a request says otherwise; those that count tokens ignore the field.
        return self.begin(asked.way.path, json.dumps({**asked.body, "stream": stream}).encode())

    # ------------------------------------------------------------------------------------------------ faults

    def leave(self, chance: random.Random) -> None:
        """Leave after a few lines of a streamed answer, half of the time without the usual farewell."""
        connection = self._begin(chance.choice(STREAMED), True)
        own = connection.sock
        with connection.getresponse() as response:
            for _ in range(chance.randrange(8)):
                response.readline()
            if chance.random() < 0.5 and own is not None:
                with suppress(OSError):  # the answer has ended, and the socket is closed
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def send_nonsense(self, chance: random.Random) -> None:
        """A body that is refused: malformed JSON, wrong types, a prompt that is too long or a body that is."""
        way, is_long = chance.choice(REQUESTS).way, chance.random() < 0.2
        body = json.dumps(way.body("word " * 60_000, 8)).encode() if is_long else chance.choice(_BROKEN)
        try:
            response = self.begin(way.path, body).getresponse()
        except TimeoutError as error:
            raise TimeoutError(f"{way.path}: no reply to {len(body)} bytes") from error
        with response:
            found = response.read()
            # A stream that waits for its turn begins before its prompt is read: its refusal is a line.
            said = json.loads(found)
            told = way.path in _ANY_LENGTH or (isinstance(said, dict) and said.get("error"))
            readable = is_long and told and response.status == http.client.OK
            if not readable and not 400 <= response.status < 500:
                raise ValueError(f"{way.path}: status {response.status} to {body[:60]!r}")
            if not said:
                raise ValueError(f"{way.path}: a refusal says nothing")

    def announce_much(self, chance: random.Random) -> None:
        """The beginning of a body that is too large: it is refused before it has arrived."""
        connection = self._half(chance.choice(REQUESTS).way.path, TOO_LARGE)
        with connection.getresponse() as response:
            if response.status != http.client.REQUEST_ENTITY_TOO_LARGE:
                raise ValueError(f"a body of {TOO_LARGE} bytes: status {response.status}")

    def send_half(self, chance: random.Random) -> None:
        """The beginning of a request, or nothing at all."""
        if chance.random() < 0.7:
            connection = self._half(chance.choice(REQUESTS).way.path, 1000)
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=STUCK_S)
            connection.connect()
        time.sleep(chance.random())
        connection.close()

    def _half(self, path: str, announced: int) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=STUCK_S)
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", str(announced))
        connection.endheaders(b'{"messages": [')
        return connection


def _lines(response: http.client.HTTPResponse, pause_s: float) -> Iterator[str]:
    while line := response.readline():
        time.sleep(pause_s)
        yield line.decode()


@dataclass(frozen=True, slots=True)
class Alone:
    """What each request gets alone, and what the page is."""

    answers: Sequence[Answer]
    page: str


def ask_alone(url: str, *, stream: bool) -> Alone:
    """Ask everything once, one after another. Streams where the routes do if ``stream``."""
    client = Client(url)
    answers = [client.ask(asked, stream=stream and asked.way.piece is not None) for asked in REQUESTS]
    return Alone(answers, client.page("/"))


class Traffic:
    """Clients in threads. ``counts`` by kind of event; ``problems`` by what they are: wrong, failed or stuck."""

    def __init__(self, url: str, expected: Alone, *, slow_s: float = SLOW_S) -> None:
        self._url, self._expected, self._slow_s = url, expected, slow_s
        self.counts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.problems: list[tuple[str, str]] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run_for(self, seconds: float, clients: int, seed: int) -> None:
        """Let the clients run, then wait until all have ended."""
        self._stop.clear()
        jobs: list[tuple[Callable[[Client, random.Random], None], str]] = [
            *[(self._ask, "answer")] * clients,
            (self._ask_slowly, "slow"),
            (self._replace, "replaced"),
            (self._look, "page"),
            (Client.leave, "left"),
            (Client.send_nonsense, "nonsense"),
            (Client.announce_much, "too large"),
            (Client.send_half, "half"),
        ]
        threads = [
            threading.Thread(
                target=self._repeat,
                args=(job, kind, Client(self._url, f"client {number}"), random.Random(f"{seed} {number}")),
                daemon=True,
            )
            for number, (job, kind) in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(2 * STUCK_S)
            if thread.is_alive():
                self._note("stuck", "a client did not end")

    def counted(self, what: str) -> int:
        """How many problems of a kind there are."""
        return sum(kind == what for kind, _ in self.problems)

    def _repeat(
        self, job: Callable[[Client, random.Random], None], kind: str, client: Client, chance: random.Random
    ) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                job(client, chance)
            except Exception as error:  # whatever it is, the client asks again
                self._note("failed", f"{kind}: {type(error).__name__}: {error}")
            if time.monotonic() - begun > STUCK_S:
                self._note("stuck", f"{kind}: took {time.monotonic() - begun:.0f} s")
            with self._lock:
                self.counts[kind] += 1
            if kind != "answer":
                self._stop.wait(2.0 * chance.random())

    def _ask(self, client: Client, chance: random.Random) -> None:
        number = chance.randrange(len(REQUESTS))
        stream = REQUESTS[number].way.piece is not None and chance.random() < 0.5
        self._compare(number, client.ask(REQUESTS[number], stream=stream), stream)

    def _ask_slowly(self, client: Client, chance: random.Random) -> None:
        asked = chance.choice(STREAMED)
        number = REQUESTS.index(asked)
        self._compare(number, client.ask(asked, stream=True, pause_s=self._slow_s), True)

    def _replace(self, client: Client, chance: random.Random) -> None:
        """A newer request for a hole ends the older one of the same client; the newer one is answered."""
        older, newer = chance.choice(_HOLES), chance.choice(_HOLES)
        waiting = client.begin(older.way.path, json.dumps(older.body).encode())
        self._compare(REQUESTS.index(newer), client.ask(newer, stream=False), False)
        number = REQUESTS.index(older)
        found = client.answer(waiting, older, stream=False)
        if found[0] != http.client.CONFLICT:
            self._compare(number, found, False)

    def _look(self, client: Client, chance: random.Random) -> None:
        path = chance.choice(PAGES)
        found = client.page(path)
        if path == "/" and found != self._expected.page:
            self._note("wrong", "the page is another one")

    def _compare(self, number: int, found: Answer, stream: bool) -> None:
        path, expected = REQUESTS[number].way.path, self._expected.answers[number]
        with self._lock:
            self.answers[f"{path} {'streamed' if stream else 'whole'}"] += 1
        if found != expected:
            self._note("wrong", f"{path}, request {number}: {found!r} instead of {expected!r}")

    def _note(self, what: str, problem: str) -> None:
        with self._lock:
            self.problems.append((what, problem))


def resources(process: psutil.Process) -> dict[str, float]:
    """What the server holds now."""
    return {
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


@contextmanager
def sampled(look: Callable[[], T], every_s: float = SAMPLE_S) -> Iterator[list[T]]:
    """What ``look`` gives, again and again until the end of the block."""
    found, stop = list[T](), threading.Event()

    def sample() -> None:
        while not stop.wait(every_s):
            found.append(look())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def measure(model: str, minutes: float, clients: int) -> dict[str, Any]:
    """The report."""
    with tempfile.TemporaryDirectory() as place, serving(Path(place), model, "--context", "2048") as (url, server):
        expected = ask_alone(url, stream=False)
        traffic, look = Traffic(url, expected), partial(resources, psutil.Process(server.pid))
        with sampled(look) as by_minute:
            traffic.run_for(60.0 * minutes / 6.0, clients, seed=1)
            time.sleep(QUIET_S)
            early = look()
            traffic.run_for(60.0 * minutes * 5.0 / 6.0, clients, seed=2)
            time.sleep(QUIET_S)
            late = look()
        again = ask_alone(url, stream=True)
    return {
        "model": model,
        "minutes": minutes,
        "clients": clients,
        "requests": dict(traffic.counts),
        "answers": dict(sorted(traffic.answers.items())),
        "refused_alone": sorted({REQUESTS[n].way.path for n, each in enumerate(expected.answers) if each[0] != 200}),
        **{what: traffic.counted(what) for what in ("wrong", "failed", "stuck")},
        "problems": traffic.problems[:20],
        "same_afterwards": again == expected,
        "early": early,
        "late": late,
        "rss_mb_by_minute": [each["rss_mb"] for each in by_minute],
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
