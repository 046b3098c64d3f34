"""Sources with flipped header bytes, truncated, or with huge counts: the result is an EdgespecError or an export."""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import time
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.export.gguf.files import export_trimmed, export_whole
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.token_rows import always_kept, kept_ids
from edgespec.files.trimmed_drafter import read_artefact

ROWS = 280
# Far above the second that a check may take, so that tests pass on a busy machine.
CHECK_S = 10.0


def export(source: Path, folder: Path) -> bool:
    """Whether the source was exported; exceptions other than EdgespecError propagate."""
    started, refusal = time.perf_counter(), None
    try:
        header = read_header(source)
        kept = kept_ids({270: 3, 265: 2}, ROWS, always_kept(header), vocabulary_size=header.vocabulary_size)
        export_trimmed(source, folder / "trimmed", Provenance(name="x"), kept=kept)
        export_whole(source, folder / "whole", Provenance(name="x"))
    except EdgespecError as error:
        refusal = error
    assert time.perf_counter() - started < CHECK_S
    if refusal is not None:
        assert refusal.message
        assert list(folder.glob(".*")) == []
        return False
    with contextlib.suppress(EdgespecError):  # the reader may refuse an invalid export
        read_artefact(folder / "trimmed")
    shutil.rmtree(folder)
    return True


@pytest.fixture
def data(models: Path) -> bytes:
    return (models / "untied.gguf").read_bytes()


@pytest.fixture
def header_bytes(models: Path) -> int:
    return read_header(models / "untied.gguf").data_offset


@pytest.mark.parametrize("seed", range(4))
def test_a_source_with_flipped_bytes_raises_an_edgespec_error_or_exports(
    data: bytes, header_bytes: int, tmp_path: Path, seed: int
) -> None:
    source, place = tmp_path / "a.gguf", random.Random(seed)
    refused = 0
    for attempt in range(60):
        spoilt = bytearray(data)
        # Half of the flips hit the counts and the first keys, which matter most.
        end = header_bytes if attempt % 2 else 400
        for _ in range(place.choice([1, 1, 3])):
            spoilt[place.randrange(end)] ^= 1 << place.randrange(8)
        source.write_bytes(spoilt)
        refused += not export(source, tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert 0 < refused < 60


def test_a_truncated_source_raises_an_edgespec_error(data: bytes, header_bytes: int, tmp_path: Path) -> None:
    source, place = tmp_path / "a.gguf", random.Random(9)
    ends = [place.randrange(header_bytes) for _ in range(20)] + [place.randrange(header_bytes, len(data) - 32)] * 5
    for end in ends:
        source.write_bytes(data[:end])
        assert not export(source, tmp_path / "out")


@pytest.mark.parametrize("offset", [8, 16], ids=["tensors", "keys"])
@pytest.mark.parametrize("count", [0, 2**16, 2**31, 2**32 + 1, 2**63, 2**64 - 1])
def test_implausible_counts_in_a_source_are_refused(data: bytes, tmp_path: Path, offset: int, count: int) -> None:
    spoilt = bytearray(data)
    struct.pack_into("<Q", spoilt, offset, count)
    (tmp_path / "a.gguf").write_bytes(spoilt)
    assert not export(tmp_path / "a.gguf", tmp_path / "out")


@pytest.mark.parametrize("count", [0, 2**16, 2**40, 2**64 - 1])
def test_an_implausible_vocabulary_size_is_refused(data: bytes, tmp_path: Path, count: int) -> None:
    key = b"tokenizer.ggml.tokens"
    at = data.index(key) + len(key) + 4 + 4  # after the value type and the element type
    spoilt = bytearray(data)
    struct.pack_into("<Q", spoilt, at, count)
    (tmp_path / "a.gguf").write_bytes(spoilt)
    assert not export(tmp_path / "a.gguf", tmp_path / "out")
