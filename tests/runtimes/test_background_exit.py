"""The interpreter exits while a model loads: it does not wait for the load, and frees nothing that the load uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgespec.runtimes.background import EXIT_S
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf

WAIT_S = 60.0

BEGUN = """
import threading, time
from edgespec.runtimes.background import BackgroundModel, LoadingHere
from tests.support.fake_runtime import FakeModel

begun = threading.Event()

def load(job):
    begun.set()
    {load}
    return FakeModel()

model = BackgroundModel(FakeModel().facts, lambda: LoadingHere(load))
model.load()
assert begun.wait(60)
{then}
print("leaving", flush=True)
"""

ASKING = "while not job.cancelled(): time.sleep(0.01)"

NATIVE = """
import sys
from pathlib import Path
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.background import BackgroundModel, LoadingHere
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.runtime import NativeRuntime
from edgespec.runtimes.native.weights import NativeWeights
import threading, time

begun = threading.Event()
relay = NativeWeights.relay

def again_and_again(weights, strip):
    begun.set()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        relay(weights, strip)
    return relay(weights, strip)

NativeWeights.relay = again_and_again
file, runtime, settings = read_model_file(Path(sys.argv[1])), NativeRuntime(), NativeSettings(threads=2)
model = BackgroundModel(
    runtime.describe(file, settings),
    lambda: LoadingHere(lambda job: runtime.load(file, settings, job=job)),
)
model.load()
assert begun.wait(60)
print("leaving", flush=True)
"""


def leaves(script: str, *arguments: str) -> float:
    """Run a script; returns the seconds from its last line to its process's end. The process prints nothing else."""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "leaving\n"
        started = time.perf_counter()
        _, said = process.communicate(timeout=WAIT_S)
        took_s = time.perf_counter() - started
    assert (process.returncode, said) == (0, "")
    return took_s


@pytest.mark.parametrize("then", ["", "model.close()", "del model"])
def test_a_load_that_asks_whether_to_end_ends_before_interpreter_exit(then: str) -> None:
    assert leaves(BEGUN.format(load=ASKING, then=then)) < WAIT_S / 4


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "model.close()"])
def test_interpreter_exit_does_not_wait_for_a_load_that_never_asks(then: str) -> None:
    assert leaves(BEGUN.format(load="time.sleep(600)", then=then)) < EXIT_S + WAIT_S / 4


def test_a_native_load_stops_before_the_interpreter_frees_its_memory(tmp_path: Path) -> None:
    """Every strip takes 0.2 s, so the whole load a minute."""
    require_native()
    path = write_tiny_gguf(tmp_path / "model.gguf", quant="Q4_0", width=256, layers=30)
    assert leaves(NATIVE, str(path)) < WAIT_S / 4
