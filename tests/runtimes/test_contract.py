"""Every runtime, held to the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.runtimes.llama.context import LlamaSettings
from tests.runtimes.contract import Runtime, SequenceContract
from tests.runtimes.thread_contract import ThreadContract
from tests.support.fake_runtime import FakeModel
from tests.support.loading import load_model
from tests.support.tiny_gguf import Quant


class TestFake(SequenceContract):
    @pytest.fixture(scope="class", params=[False, True], ids=["plain", "forking"])
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest) -> Runtime:
        return Runtime(open_model=lambda: FakeModel(50, seed=3, can_fork=request.param))


def llama(path: Path, settings: LlamaSettings) -> Runtime:
    # Compute buffers for one chunk of a tiny model (attention and scores): less than a second copy of its cache.
    return Runtime(
        open_model=lambda: load_model(path, settings), prefill_tokens=4000, context_overhead_bytes=12 * 2**20
    )


class TestLlama(SequenceContract):
    @pytest.fixture(
        scope="class",
        params=[
            ("F32", LlamaSettings()),
            ("Q8_0", LlamaSettings()),
            ("Q4_0", LlamaSettings()),
            ("Q4_0", LlamaSettings(kv_type="f16", flash_attention=False, repack=False)),
        ],
        ids=["F32", "Q8_0", "Q4_0", "Q4_0 with other settings"],
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, tiny_ggufs: dict[Quant, Path]) -> Runtime:
        quant: Any
        quant, settings = request.param
        return llama(tiny_ggufs[quant], settings)


class TestThreadsOfLlama(ThreadContract):
    """What other threads do to a sequence does not depend on the type of its weights."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, tiny_ggufs: dict[Quant, Path]) -> Runtime:
        return llama(tiny_ggufs["Q4_0"], LlamaSettings())
