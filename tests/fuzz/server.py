"""A server with several clients, of which some leave: each complete answer is that of a session alone."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from edgespec.decoding.sampling import Sampling
from edgespec.engine.events import Text
from edgespec.files.home import Home
from tests.fuzz.findings import Findings
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

PROMPTS = (
    "hello",
    "count " * 40,
    "the word " * 120,
    "x" * 200,
    *(f"{'system ' * 60}{end}" for end in ("one", "two")),
)
DRAWN = ((0.0, 0), (0.8, 1), (0.8, 2), (1.5, 3))
AT_ONCE = 4

Asked = tuple[str, float, int, int]  # the prompt, the temperature, the seed, the tokens


def expectation(server: Running) -> dict[Asked, str]:
    """The text of every request, decoded plainly and alone."""
    engine = server.service.keeper.engine
    assert engine is not None
    found = {}
    for prompt in PROMPTS:
        for temperature, seed in DRAWN:
            for tokens in (6, 40):
                sampling = Sampling(temperature=temperature, seed=seed)
                with engine.session() as session:
                    events = session.generate(prompt, max_tokens=tokens, sampling=sampling, depth=0)
                    found[prompt, temperature, seed, tokens] = "".join(e.text for e in events if isinstance(e, Text))
    return found


def one(server: Running, chance: random.Random, expected: dict[Asked, str], findings: Findings) -> None:
    prompt, temperature, seed, tokens = asked = chance.choice(list(expected))
    body = {"temperature": temperature, "seed": seed, "max_tokens": tokens}
    if chance.random() < 0.35:
        with server.connect() as own:
            server.send_chat(own, prompt, **body, stream=chance.random() < 0.5)
            if chance.random() < 0.5:
                own.recv(200)
        findings.counts["left"] += 1
        return
    reply = server.chat(prompt, **body)
    findings.unless(reply.status_code == 200, f"status {reply.status_code}: {reply.text[:200]}")
    if reply.status_code == 200:
        said = reply.json()["choices"][0]["message"]["content"]
        findings.unless(said == expected[asked], f"another text for {prompt[:10]!r}, {temperature}, {seed}, {tokens}")
        findings.counts["answers"] += 1


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as place:
        tiny = TinyModels(Path(place), Home(Path(place) / "home"))
        with running(lambda: tiny.load(tiny.ending, depth=3, draft="none")) as server:
            server.wait_until(lambda: server.service.keeper.state == "ready")
            expected = expectation(server)
            for _ in rounds:
                clients = [
                    threading.Thread(target=one, args=(server, random.Random(chance.random()), expected, findings))
                    for _ in range(AT_ONCE)
                ]
                for each in clients:
                    each.start()
                for each in clients:
                    each.join()
            server.wait_until(lambda: server.service.queue.running == 0)
