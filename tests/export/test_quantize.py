from __future__ import annotations

import codecs
import logging
import sys
import threading
from pathlib import Path

import pytest

from edgespec.errors import CancelledError, DiskSpaceError, InvalidRequestError, ModelFileError
from edgespec.export.gguf import quantize
from edgespec.export.gguf.quantize import QUANTS, find_quant, most_bytes, requantize
from edgespec.files.gguf.header import read_header
from edgespec.files.progress import Job, ProgressEvent
from edgespec.runtimes.llama.library import load
from tests.export.models import WIDTH, loads


def matrix_types(path: Path) -> set[str]:
    return {tensor.type_name for tensor in read_header(path).tensors if len(tensor.shape) > 1}


@pytest.mark.parametrize("name", ["Q8_0", "q4_0", "f16", "f32", "q4"])
@pytest.mark.parametrize("source", ["f32", "untied"])
def test_a_requantised_model_loads_in_llama_cpp(models: Path, tmp_path: Path, source: str, name: str) -> None:
    """``untied`` is Q8_0, so the test also covers a quantised source."""
    path = tmp_path / "new.gguf"
    header = requantize(models / f"{source}.gguf", path, name, 2)
    assert header == read_header(path)
    file_type = {"q8_0": 7, "q4_0": 2, "f16": 1, "f32": 0, "q4_k_m": 15}[find_quant(name).name]
    assert header.metadata["general.file_type"] == file_type
    if find_quant(name).name in {"q8_0", "f16", "f32"}:
        assert matrix_types(path) == {name.upper()}
    assert loads(path)
    assert header.file_bytes <= most_bytes(read_header(models / f"{source}.gguf"), find_quant(name))


def test_every_listed_format_works_and_stays_below_its_size_bound(models: Path, tmp_path: Path) -> None:
    header = read_header(models / "f32.gguf")
    for quant in QUANTS.values():
        assert hasattr(load().api, quant.constant)
        made = requantize(models / "f32.gguf", tmp_path / f"{quant.name}.gguf", quant.name, 1)
        assert made.file_bytes <= most_bytes(header, quant)
        assert made.tensors[0].shape[0] == WIDTH


@pytest.mark.parametrize("name", ["q3_7", "", "keep", "iq1_s"])
def test_unknown_formats_are_refused_with_the_list_of_names(models: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown quantisation") as caught:
        requantize(models / "f32.gguf", tmp_path / "new.gguf", name, 1)
    for known in ("q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "f16", "q4"):
        assert known in (caught.value.hint or "")


def test_requantising_on_fewer_than_one_thread_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="threads"):
        requantize(models / "f32.gguf", tmp_path / "new.gguf", "q8_0", 0)


def test_requantising_a_broken_or_empty_gguf_is_refused(models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "a.gguf"
    broken.write_bytes((models / "f32.gguf").read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="truncated"):
        requantize(broken, tmp_path / "new.gguf", "q8_0", 1)
    assert not (tmp_path / "new.gguf").exists()


def test_on_windows_the_quantizers_output_is_named_in_the_code_page(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code_page(name: str) -> codecs.CodecInfo | None:
        return codecs.lookup("cp1252") if name == "mbcs" else None

    def write(_source: bytes, destination: bytes, _settings: object) -> int:
        (tmp_path / destination.decode("cp1252")).write_bytes((models / "f32.gguf").read_bytes())
        return 0

    monkeypatch.setattr(load().api, "llama_model_quantize", write)
    monkeypatch.setattr(sys, "platform", "win32")
    codecs.register(code_page)
    try:
        assert requantize(models / "f32.gguf", tmp_path / "modèle.gguf", "q8_0", 1).tensors
        with pytest.raises(InvalidRequestError, match=r"llama\.cpp cannot write to .*モデル") as caught:
            requantize(models / "f32.gguf", tmp_path / "モデル.gguf", "q8_0", 1)
    finally:
        codecs.unregister(code_page)
    assert "-o" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["modèle.gguf"]


def test_a_failure_of_the_quantizer_raises_an_error_and_leaves_no_file(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An architecture unknown to llama.cpp passes the header check and fails in the quantizer."""
    source = tmp_path / "a.gguf"
    data = (models / "f32.gguf").read_bytes()
    source.write_bytes(data.replace(b"llama", b"lhama"))
    with caplog.at_level(logging.DEBUG, "edgespec.native"), pytest.raises(ModelFileError, match=r"q8_0 \(code 1\)"):
        requantize(source, tmp_path / "new.gguf", "q8_0", 1)
    assert not (tmp_path / "new.gguf").exists()
    assert any("lhama" in record.message for record in caplog.records)


def test_a_quantizer_failure_on_a_full_disk_raises_disk_space_error(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError, match="filled up"):
        requantize(models / "f32.gguf", tmp_path / "no" / "folder" / "new.gguf", "q8_0", 1)


def test_a_cancelled_quantisation_returns_immediately_and_leaves_no_file(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, started = threading.Event(), threading.Event()
    native = load().api.llama_model_quantize

    def slow(*arguments: object) -> int:
        started.set()
        release.wait(60)
        return int(native(*arguments))

    monkeypatch.setattr(load().api, "llama_model_quantize", slow)
    try:
        with pytest.raises(CancelledError):
            requantize(models / "f32.gguf", tmp_path / "new.gguf", "q8_0", 1, job=Job(cancelled=started.is_set))
        assert list(tmp_path.iterdir()) == []
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "edgespec-quantize":
                thread.join()
    assert list(tmp_path.iterdir()) == []  # the quantizer's thread left no file either


def test_quantisation_progress_reports_the_bytes_written(models: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    header = requantize(models / "f32.gguf", tmp_path / "new.gguf", "q8_0", 1, job=Job(events.append))
    assert events[-1].done_bytes == header.file_bytes
    assert {(event.stage, event.total_bytes) for event in events} == {("quantising", None)}
