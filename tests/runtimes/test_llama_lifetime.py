"""llama.cpp prints nothing, and its memory is freed in order."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.errors import ClosedError
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.library import load
from tests.support.loading import load_model
from tests.support.quiet_process import CANCELLED, LEFT_RUNNING

REPOSITORY = Path(edgespec.__file__).parent.parent


# ---------------------------------------------------------------------------------------------- no output


QUIET = """
import sys, threading, time
from pathlib import Path
from edgespec.errors import CancelledError, EdgespecError
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.llama.model import LlamaSettings, load_model
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer

good, bad = map(Path, sys.argv[1:])
try:
    load_model(read_model_file(bad), LlamaSettings())
except EdgespecError:
    steps = ["refused"]
vocabulary = LlamaTokenizer(good)
steps.append(vocabulary.detokenize(vocabulary.encode("hello")).strip())
model = load_model(read_model_file(good), LlamaSettings())
opened = lambda: model.open(3000)
"""


def test_llama_cpp_prints_nothing_and_the_process_exits_with_status_zero(tiny_gguf: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(tiny_gguf.read_bytes())
    bad.write_bytes(tiny_gguf.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"))
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{QUIET}{CANCELLED}sequence.close(){LEFT_RUNNING}"
    done = subprocess.run([sys.executable, "-c", code, good, bad], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert Path(f"{good}.steps").read_text(encoding="utf-8") == "refused hello cancelled"


def test_native_log_lines_go_to_the_native_logger(
    tiny_gguf: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec.native")
    with load_model(tiny_gguf, LlamaSettings()) as model, model.open(64) as sequence:
        sequence.forward([1, 2], 1)
    native = [record for record in caplog.records if record.name == "edgespec.native"]
    assert any("llama" in record.getMessage() for record in native)
    assert all("\n" not in record.getMessage().rstrip("\n") for record in native[:20])
    assert {record.name for record in caplog.records} <= {"edgespec.native"}
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


# ------------------------------------------------------------------------------------------ freeing in order


CACHE = ("llama_batch_free", "llama_free")


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which native memory is freed."""
    api, order = load().api, list[str]()

    def recording(name: str) -> Callable[[Any], None]:
        free = getattr(api, name)

        def record(pointer: Any) -> None:
            order.append(name)
            free(pointer)

        return record

    for name in ("llama_batch_free", "llama_free", "llama_model_free"):
        monkeypatch.setattr(api, name, recording(name))
    return order


def test_weights_outlive_their_caches_on_close(tiny_gguf: Path, freed: list[str]) -> None:
    model = load_model(tiny_gguf, LlamaSettings())
    sequences = [model.open(64) for _ in range(2)]
    model.close()
    model.close()
    assert freed == [*CACHE, *CACHE, "llama_model_free"]
    with pytest.raises(ClosedError):
        sequences[0].forward([1], 1)


@pytest.mark.slow
def test_weights_outlive_their_caches_in_a_collected_cycle(tiny_gguf: Path, freed: list[str]) -> None:
    class Holder:
        pass

    gc.collect()
    freed.clear()
    for attempt in range(2):  # in both orders of creation
        holder: Any = Holder()
        holder.model = load_model(tiny_gguf, LlamaSettings())
        holder.sequence = holder.model.open(64)
        holder.model.cycle = holder.sequence.cycle = holder
        holder.sequence.forward([1, 2], 1)
        if attempt:
            gc.collect()  # both old: another generation's list
        del holder
        gc.collect()
        assert freed == [*CACHE, "llama_model_free"]
        freed.clear()


def test_a_sequence_keeps_the_weights_of_an_unreferenced_model_alive(tiny_gguf: Path, freed: list[str]) -> None:
    sequence = load_model(tiny_gguf, LlamaSettings()).open(64)
    gc.collect()
    assert freed == []
    assert np.isfinite(sequence.forward([1, 2], 1).logits(0)).all()
    with closing(sequence):
        pass
    del sequence
    gc.collect()
    assert freed == [*CACHE, "llama_model_free"]


def test_weights_are_freed_after_a_cache_that_another_thread_is_closing(
    tiny_gguf: Path, freed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = load().api
    free, entered, go_on = api.llama_free, threading.Event(), threading.Event()

    def slow_free(pointer: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        free(pointer)

    monkeypatch.setattr(api, "llama_free", slow_free)
    model = load_model(tiny_gguf, LlamaSettings())
    closer = threading.Thread(target=model.open(64).close)
    closer.start()
    assert entered.wait(60)
    second = threading.Thread(target=model.close)
    second.start()
    time.sleep(0.1)
    assert freed == ["llama_batch_free"]
    go_on.set()
    closer.join(60)
    second.join(60)
    del model
    assert freed == [*CACHE, "llama_model_free"]
