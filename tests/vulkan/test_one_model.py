"""One model on a second device, in part, or not at all: where its bytes are, and that its scores are the same."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.model import LlamaModel
from edgespec.runtimes.llama.runtime import LlamaRuntime
from edgespec.runtimes.runtime import Device
from edgespec.runtimes.table import list_devices
from tests.support.loading import load_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels
from tests.support.vulkan import NATIVE_LOG, UNSEEN, buffers, needs_vulkan, on_device, second_device, shows_threads

pytestmark = needs_vulkan

PROMPT = list(range(300, 364))
CHECKOUT = Path(edgespec.__file__).parent.parent


@pytest.fixture
def device() -> Device:
    return second_device()


def settings(device: Device | None, layers: int | None = None) -> LlamaSettings:
    name = "cpu" if device is None else device.name
    return LlamaSettings(device=name, gpu_layers=layers, kv_type="f16")


@contextmanager
def at_work(path: Path, wanted: LlamaSettings) -> Iterator[LlamaModel]:
    """A model that has read a prompt, long enough to be offloaded in a batch, and a few single tokens."""
    with load_model(path, wanted) as model, model.open(256) as sequence:
        sequence.forward(PROMPT * 2, 1)
        for token in (5, 6, 7):
            sequence.forward([token], 1)
        yield model


def scores(path: Path, wanted: LlamaSettings) -> np.ndarray:
    with load_model(path, wanted) as model, model.open(256) as sequence:
        rows = sequence.forward(PROMPT, 16)
        return np.array([rows.logits(index) for index in range(rows.count)])


def test_the_vulkan_device_is_listed(device: Device) -> None:
    assert device.kind in ("gpu", "igpu")
    assert device.description
    assert device.name in [gpu.name for gpu in LlamaRuntime().gpus()]
    assert device.total_bytes is not None
    assert device.free_bytes is not None
    assert {"cpu", device.name} <= {found.name for found in list_devices().of("llama")}


def test_a_cpu_model_puts_no_byte_on_the_vulkan_device(
    tiny: TinyModels, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """By llama.cpp's log of its buffers, and by the device's free bytes if it reports them (not in software)."""
    caplog.set_level(logging.DEBUG, logger=NATIVE_LOG)
    with at_work(tiny.slow, settings(None)):
        beside = second_device().free_bytes
    told = buffers(caplog.records)
    assert told, "llama.cpp no longer logs its buffers: this test checks nothing"
    assert on_device(told, device.name) == 0, told
    assert not any(device.name in record.getMessage() for record in caplog.records if record.name == NATIVE_LOG)

    # The same check does find a model that is on the device.
    caplog.clear()
    with at_work(tiny.slow, settings(device)) as model:
        assert model.facts.settings["device_description"] == device.description
        there = second_device().free_bytes
    assert on_device(buffers(caplog.records), device.name) > 10
    if there != device.free_bytes:
        assert beside == device.free_bytes


# A separate process, in which no device was opened yet. ``unlisted`` leaves out the empty list of devices.
WITNESS = """
import pathlib, sys
from edgespec.runtimes.llama import model as llama

real = llama.place
def unlisted(params, device, layers):
    kept = real(params, device, layers)
    params.devices = None
    return kept

path, where = pathlib.Path(sys.argv[1]), sys.argv[2]
if where == "unlisted":
    llama.place = unlisted
device = "cpu" if where in ("cpu", "unlisted") else where
settings = llama.LlamaSettings(device=device, kv_type="f16")
with llama.load_model(path, settings) as model, model.open(256) as sequence:
    sequence.forward(list(range(300, 428)), 1)
    sequence.forward([5], 1)
    names = [entry.read_text() for entry in pathlib.Path("/proc/self/task").glob("*/comm")]
print(sum(name.startswith("llvmpipe") for name in names))
"""


def threads_of_the_driver(path: Path, where: str) -> int:
    """How many threads the software device has while a model runs."""
    command = [sys.executable, "-c", WITNESS, path, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=CHECKOUT)
    return int(done.stdout)


def test_a_cpu_model_does_not_open_the_vulkan_device(tiny: TinyModels, device: Device) -> None:
    """A software device starts threads once it is opened, which llama.cpp's log may not show."""
    if not shows_threads(device):
        pytest.skip(UNSEEN)
    assert threads_of_the_driver(tiny.target, "cpu") == 0
    assert threads_of_the_driver(tiny.target, device.name) > 0
    # For comparison: without the empty list, a model with no layer on a device opens the device.
    assert threads_of_the_driver(tiny.target, "unlisted") > 0


def test_the_requested_layers_are_on_the_vulkan_device(
    tiny: TinyModels, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=NATIVE_LOG)
    sizes = []
    for layers in (0, 1, 3, 6, None):  # of six blocks and the head
        caplog.clear()
        with at_work(tiny.slow, settings(device, layers)) as model:
            assert model.facts.device == ("cpu" if layers == 0 else device.name)
        sizes.append(on_device(buffers(caplog.records), device.name))
    assert sizes[0] == 0
    assert sizes == sorted(set(sizes)), "more layers, more bytes"


# Relative to the spread of all scores, with weights in float32: a device with float32 was 0.0003 off, a device with
# half precision 0.01. With 8-bit weights the difference is 0.1, because the CPU also rounds activations to 8 bits.
ROUNDING = 0.03


@pytest.mark.parametrize("layers", [1, 2, None])
def test_the_vulkan_device_scores_nearly_like_the_cpu(tmp_path: Path, device: Device, layers: int | None) -> None:
    path = write_tiny_gguf(tmp_path / "float.gguf", quant="F32", heads=2, kv_heads=1, seed=3)
    here, there = scores(path, settings(None)), scores(path, settings(device, layers))
    assert np.isfinite(there).all()
    assert np.abs(here - there).max() < ROUNDING * here.std()


def test_an_unknown_vulkan_device_raises_with_the_available_names(tiny: TinyModels, device: Device) -> None:
    with pytest.raises(RuntimeUnavailableError) as raised:
        load_model(tiny.target, LlamaSettings(device="Vulkan77"))
    assert device.name in (raised.value.hint or "")
