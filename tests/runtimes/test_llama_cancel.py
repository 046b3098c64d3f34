"""How a forward of llama.cpp is cancelled: natively, without the interpreter lock."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import CancelledError, RuntimeUnavailableError
from edgespec.interfaces.model import Sequence
from edgespec.runtimes.llama import context as llama_context
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.native import library as native_library
from tests.support.kernel_calls import require_native
from tests.support.loading import load_model
from tests.support.tiny_gguf import write_tiny_gguf

ENOUGH = 0.3


@pytest.fixture(scope="module")
def wide_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prefill chunk takes a tenth of a second."""
    return write_tiny_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", layers=12, width=256)


def share_computed_without_the_interpreter_lock(path: Path) -> float:
    """The share of a forward that is computed while this thread keeps the lock: until it is ENOUGH."""

    def others_s() -> float:
        return time.process_time() - time.thread_time()

    with load_model(path, LlamaSettings()) as model, model.open(256) as sequence:
        sequence.forward([5] * 256, 0)
        sequence.rewind(0)
        interval = sys.getswitchinterval()
        before = others_s()
        sequence.forward([5] * 256, 0)
        whole_s = others_s() - before
        sequence.rewind(0)
        before = others_s()
        forward = sequence.submit(lambda: sequence.forward([5] * 256, 0))
        while others_s() < before + 0.005:
            time.sleep(0)  # not yet in native code
        try:
            sys.setswitchinterval(60)  # no thread gets the lock by requesting it
            started, before = time.perf_counter(), others_s()
            while time.perf_counter() < started + 0.5 and others_s() - before <= ENOUGH * whole_s:
                pass
            computed = others_s() - before
        finally:
            sys.setswitchinterval(interval)
        forward.result(60)
    return computed / whole_s


@pytest.mark.slow
@pytest.mark.skipif(sys.maxsize < 2**32, reason="there is no native abort callback on 32-bit machines")
def test_the_abort_callback_needs_no_interpreter_lock(wide_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the forward may end before the lock is taken, or get no core until then.
    assert any(share_computed_without_the_interpreter_lock(wide_gguf) > ENOUGH for _ in range(30))
    # For comparison: a callback that waits for the lock at each node of the graph.
    monkeypatch.setattr(
        llama_context, "_native_abort_callback", lambda api: api.ggml_abort_callback(lambda _data: False)
    )
    assert all(share_computed_without_the_interpreter_lock(wide_gguf) < ENOUGH for _ in range(3))


@pytest.mark.skipif(sys.maxsize < 2**32, reason="there is no native abort callback on 32-bit machines")
def test_the_abort_callback_does_not_slow_forwards_down(wide_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_s(sequence: Sequence) -> float:
        """Processor time: other programs count little."""
        started = sequence.run(time.thread_time)
        sequence.forward([5] * 64, 0)
        took_s = sequence.run(time.thread_time) - started
        sequence.rewind(0)
        return took_s

    with load_model(wide_gguf, LlamaSettings()) as model, model.open(256) as called:
        monkeypatch.setattr(llama_context, "_native_abort_callback", lambda _api: None)
        with model.open(256) as uncalled:
            pairs = [(forward_s(called), forward_s(uncalled)) for _ in range(10)]
    with_s, without_s = (min(times) for times in zip(*pairs, strict=True))
    assert with_s < 4 * without_s


def test_without_a_native_callback_a_cancel_waits_for_the_chunk_only(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, chunks = load().api, list[int]()
    decode = api.llama_decode
    monkeypatch.setattr(llama_context, "_native_abort_callback", lambda _api: None)
    with load_model(tiny_gguf, LlamaSettings()) as model, model.open(2000) as sequence:

        def cancel_in_the_second(*arguments: Any) -> int:
            chunks.append(1)
            if len(chunks) == 2:
                sequence.cancel()
            return int(decode(*arguments))

        monkeypatch.setattr(api, "llama_decode", cancel_in_the_second)
        with pytest.raises(CancelledError):
            sequence.forward([5] * 2000, 1)
        assert (len(chunks), sequence.length) == (2, 0)


@pytest.fixture(params=["our library's", "the C library's"])
def native_callback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each of the two native callbacks, installed as llama.cpp's."""
    if request.param == "our library's":
        require_native()
    else:
        monkeypatch.setattr(llama_context, "_our_kernels", lambda: None)
    callback = llama_context._native_abort_callback(load().api)
    if callback is None:
        pytest.skip("no native abort callback on this platform")
    return callback


def test_the_abort_callback_returns_the_flag_as_a_bool(native_callback: Any) -> None:
    flag = llama_context.AbortFlag()
    address = ctypes.cast(flag.native, ctypes.c_void_p)
    assert not native_callback(address)
    flag.set(True)
    assert native_callback(address)
    flag.set(False)
    assert not native_callback(address)


def test_a_cancel_ends_the_chunk_in_flight(native_callback: Any, wide_gguf: Path) -> None:
    with load_model(wide_gguf, LlamaSettings()) as model, model.open(256) as sequence:
        # As if another thread raised the flag after Python's last check: only the callback can see it.
        sequence._check_cancelled = lambda: None  # type: ignore[method-assign]
        sequence.cancel()
        with pytest.raises(CancelledError):
            sequence.forward([5] * 200, 1)
        assert sequence.length == 0
        sequence.reset_cancel()
        assert sequence.forward([5] * 4, 1).count == 1


def test_the_abort_callback_is_our_librarys_if_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    api, own = load().api, require_native().api.es_abort
    chosen = llama_context._native_abort_callback(api)
    assert ctypes.cast(chosen, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert llama_context._native_abort_callback(api) is not None

    def missing() -> None:
        raise RuntimeUnavailableError("it was not built", hint="a compiler")

    monkeypatch.setattr(native_library, "load", missing)
    assert llama_context._native_abort_callback(api) is None
