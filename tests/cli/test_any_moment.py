"""Ctrl-C at some moments of every command. `python -m benchmarks.interrupts` tries thousands."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, running
from tests.support.interrupting import Interruptible, commands, complaints, interrupted, pulling
from tests.support.tiny_models import TinyModels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="a signal is sent"),
]

NAMES = (
    "generate", "generate --json", "chat", "calibrate", "verify", "bench", "export", "export --trim-vocab",
    "export to ONNX", "learn", "pull", "models", "doctor", "plan", "serve",
)  # fmt: skip
LONGEST_S = 2.0


@pytest.fixture
def hub(tiny: TinyModels) -> Iterator[HubServer]:
    """Sends a model for a second."""
    data = tiny.slow.read_bytes()
    with running(HubServer(files={"model.gguf": data}, chunk_delay_s=0.01)) as served:
        yield served


@pytest.fixture
def every(tiny: TinyModels, hub: HubServer, tmp_path: Path) -> dict[str, Interruptible]:
    return {each.name: each for each in commands(tiny, tmp_path / "work", hub)}


def test_every_command_that_takes_long_is_interrupted(every: dict[str, Interruptible]) -> None:
    assert tuple(every) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_at_any_moment_ends_a_command_with_one_line(
    every: dict[str, Interruptible], hub: HubServer, tmp_path: Path, name: str
) -> None:
    home = tmp_path / "home"
    drawn = random.Random(name)
    for after_s in (0.0, drawn.uniform(0, LONGEST_S)):
        ended = interrupted(every[name], pulling(home, hub, tmp_path / "hub"), after_s)
        assert not complaints(every[name], ended, home), (after_s, ended)
