"""How fast does `edgespec serve` answer 1, 2 and 4 clients, compared with llama.cpp's server?

    python -m benchmarks.server_against_llama LLAMA_SERVER [--clients 1,2,4] [--tokens N] [--turns N]

LLAMA_SERVER is llama.cpp's server, built for this processor. The source package of llama-cpp-python has its sources:

    pip download --no-deps --no-binary=llama-cpp-python llama-cpp-python
    cmake -S SOURCES/vendor/llama.cpp -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF
    cmake --build BUILD --target llama-server

All servers have the same model file and as many threads. llama.cpp's runs twice: alone, and with the drafting model.
Clients ask over HTTP, one question after another: a closed loop of the questions of benchmarks/batched_clients.py,
greedy, each with a number that makes it new. Servers and numbers of clients alternate. Prints one JSON object: tokens
per second of all clients together, prompts included, and the ratio to llama.cpp's best server, by the number of
clients. Requires an idle machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from benchmarks.batched_clients import QUESTIONS, closed_loop
from benchmarks.mixed_traffic import Client
from benchmarks.processes import serving
from edgespec.files.home import home
from edgespec.hardware.machine import describe_machine
from edgespec.store.locate import Locator
from edgespec.store.store import Store

TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
OURS = "edgespec"
STARTING_S = 120.0
CONTEXT_TOKENS = 1024  # of each client of llama.cpp's server


def file_of(model: str) -> Path:
    """The model's file, fetched if it is missing. Raises EdgespecError."""
    return Locator(store=Store(home()), download=True).locate(model).path


@contextmanager
def llama(program: Path, folder: Path, clients: int, threads: int, *options: str) -> Iterator[str]:
    """llama.cpp's server for as many parallel clients: its address. Raises RuntimeError with its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(program),
        "-m",
        str(file_of(TARGET)),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-t",
        str(threads),
    ]
    command += ["-np", str(clients), "-c", str(clients * CONTEXT_TOKENS), *options]
    log = folder / f"llama-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        until = time.monotonic() + STARTING_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def answers(port: int) -> bool:
    """Whether a server on this port has loaded its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ask(client: Client, question: str, tokens: int) -> int:
    """The number of tokens of a greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0})
    with client.begin("/v1/chat/completions", body.encode()).getresponse() as response:
        found = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(str(found))
        return int(found["usage"]["completion_tokens"])


def rate(url: str, clients: int, tokens: int, time_asked: int) -> float:
    """Tokens per second of all clients together. Raises the error of a client.

    ``time_asked`` begins each question, so that no server has read the same question before.
    """
    questions = [f"Request {time_asked}. {question}" for question in QUESTIONS]

    def ask_one(client: Client, number: int) -> int:
        return ask(client, questions[number], tokens)

    started = time.perf_counter()
    counts = closed_loop(lambda: nullcontext(Client(url)), clients, range(len(questions)), ask_one)
    return sum(counts.values()) / (time.perf_counter() - started)


def measure(program: Path, clients: list[int], tokens: int, turns: int) -> dict[str, object]:
    """The report."""
    threads = describe_machine().physical_cores
    draft = ("--spec-type", "draft-simple", "-md", str(file_of(DRAFTER)), "-td", str(threads))
    with tempfile.TemporaryDirectory() as place, ExitStack() as servers:
        folder = Path(place)
        urls = {
            OURS: servers.enter_context(serving(folder, TARGET, "--threads", str(threads)))[0],
            "llama.cpp": servers.enter_context(llama(program, folder, max(clients), threads)),
            "llama.cpp with a drafter": servers.enter_context(llama(program, folder, max(clients), threads, *draft)),
        }
        rates: dict[int, dict[str, list[float]]] = {count: {name: [] for name in urls} for count in clients}
        for url in urls.values():
            rate(url, max(clients), tokens, 0)  # reads the weights, and lets ours learn
        for turn in range(turns):
            for place_in_turn, count in enumerate(clients, start=1):
                asked = turn * len(clients) + place_in_turn
                for name in list(urls)[turn % len(urls) :] + list(urls)[: turn % len(urls)]:
                    rates[count][name].append(rate(urls[name], count, tokens, asked))
    medians = {count: {name: statistics.median(own) for name, own in found.items()} for count, found in rates.items()}
    return {
        "tokens_per_s": {
            str(count): {name: round(one, 1) for name, one in own.items()} for count, own in medians.items()
        },
        "times_the_best_of_llama": {
            str(count): round(own[OURS] / max(one for name, one in own.items() if name != OURS), 2)
            for count, own in medians.items()
        },
        "all_tokens_per_s": {str(count): found for count, found in rates.items()},
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, metavar="LLAMA_SERVER")
    parser.add_argument("--clients", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    clients = sorted(map(int, given.clients.split(",")))
    about = {"model": TARGET, "processor": describe_machine().processor, "tokens": given.tokens}
    json.dump({**about, **measure(given.program, clients, given.tokens, given.turns)}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
