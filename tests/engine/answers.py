"""Shared by the tests of sessions: a plain answer to compare with, and how long to wait for a thread."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from tests.support.tiny_models import answer
from tests.support.watched_sequences import ProcessorSequence

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
# A test that an answer blocks fails after this time. Machines under load take less; the limit of the suite is longer.
WAIT_S = 60.0


class CallerError(Exception):
    """Raised by the code that reads an answer."""


@dataclass(frozen=True)
class Forward:
    sequence: ProcessorSequence
    tokens: int
    rows: int


def whole_characters(data: bytes) -> str:
    """The text of an answer that is cut: without half of a character at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def plain_text(engine: Engine, prompt: str, **settings: object) -> Done:
    """The answer of a fresh session without speculation."""
    with engine.session() as fresh:
        return answer(fresh.generate(prompt, depth=0, **settings))  # type: ignore[arg-type]
