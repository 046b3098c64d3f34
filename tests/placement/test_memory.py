"""Whether a model fits: the sum, and the message if it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import MemoryLimitError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.placement.memory import MemoryEstimate, estimate_memory, require_memory
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from tests.support.loading import load_model
from tests.support.tiny_gguf import write_tiny_gguf

GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("memory") / "tiny.gguf", quant="Q8_0", width=128)


@pytest.fixture(scope="module")
def header(tiny: Path) -> GgufHeader:
    return read_header(tiny)


def test_an_estimate_has_weights_cache_and_buffers(header: GgufHeader) -> None:
    estimate = estimate_memory(header, 1000, 16.0)
    assert estimate.weights_bytes == header.tensor_bytes
    # Two layers, two heads of 32, keys and values, two bytes each.
    assert estimate.cache_bytes == 1000 * 2 * 2 * 32 * 2 * 2
    assert estimate.buffers_bytes > 8 * 64 * header.vocabulary_size
    assert estimate.total_bytes == estimate.weights_bytes + estimate.cache_bytes + estimate.buffers_bytes


def test_the_cache_estimate_grows_with_context_and_bits(header: GgufHeader) -> None:
    short, long = (estimate_memory(header, length, 16.0) for length in (1000, 3000))
    assert long.cache_bytes == 3 * short.cache_bytes
    assert long.total_bytes - short.total_bytes == 2 * short.cache_bytes
    by_type = {kind: estimate_memory(header, 1000, bits).cache_bytes for kind, (_, bits) in KV_TYPES.items()}
    assert by_type["f32"] == 2 * by_type["f16"]
    assert by_type["q4_0"] < by_type["q8_0"] < by_type["f16"]


@pytest.mark.parametrize("kv_type", sorted(KV_TYPES))
def test_the_cache_estimate_equals_what_the_runtime_reports(tiny: Path, header: GgufHeader, kv_type: str) -> None:
    with load_model(tiny, LlamaSettings(kv_type=kv_type)) as model:
        estimate = estimate_memory(header, 100, KV_TYPES[kv_type][1])
        assert estimate.cache_bytes == 100 * model.facts.kv_bytes_per_token
        assert estimate.weights_bytes == model.facts.weight_bytes


MEASURE = """
import sys
from pathlib import Path
import psutil
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.llama.model import LlamaSettings, load_model
from edgespec.runtimes.llama.library import load
load()
process = psutil.Process()
before = process.memory_info().rss
file, length = read_model_file(Path(sys.argv[1])), int(sys.argv[2])
with load_model(file, LlamaSettings(kv_type="f32")) as model, model.open(length) as sequence:
    sequence.forward([5] * 600, 64).copy()
    print(process.memory_info().rss - before)
"""


def test_a_real_llama_context_stays_within_its_estimate(tiny: Path, header: GgufHeader) -> None:
    length = 32_768
    estimate = estimate_memory(header, length, KV_TYPES["f32"][1])
    # In a separate process: this process would reuse memory that earlier tests freed.
    environment = {**os.environ, "PYTHONPATH": str(Path(edgespec.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tiny, str(length)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    grown = int(done.stdout)
    assert estimate.cache_bytes < grown < estimate.total_bytes


ESTIMATE = MemoryEstimate(weights_bytes=3 * GIB, cache_bytes=GIB, buffers_bytes=GIB // 2, positions=4096, grows=False)


def test_an_estimate_equal_to_the_allowed_bytes_fits() -> None:
    require_memory("model", ESTIMATE, ESTIMATE.total_bytes)


@pytest.mark.parametrize("allowed", [ESTIMATE.total_bytes - 1, 0, -5])
def test_an_estimate_over_the_limit_raises_with_all_parts(allowed: int) -> None:
    with pytest.raises(MemoryLimitError) as raised:
        require_memory("the-model", ESTIMATE, allowed)
    error = raised.value
    assert (error.needed_bytes, error.available_bytes) == (ESTIMATE.total_bytes, allowed)
    for part in ("the-model", "4.50 GiB", "3.00 GiB", "1.00 GiB"):
        assert part in error.message
    assert "--context" in (error.hint or "")
