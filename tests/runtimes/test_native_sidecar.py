"""The native runtime's sidecar: written by one load, mapped by the next, and refused if its content changed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.errors import CancelledError, ModelFileError
from edgespec.files import disk
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.native import sidecar as native_sidecar, weights as native_weights
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import NativeLibrary
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.sidecar import HEADER_BYTES, Sidecar
from edgespec.runtimes.native.weights import NativeWeights, SidecarFile, load_weights
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = [5, 6, 7, 8, 9]
SHA256 = "sha256:ab"


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return require_native()


@pytest.fixture(scope="module")
def path(library: NativeLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "model.gguf", quant="Q4_0", width=128)


@pytest.fixture
def sidecar(tmp_path: Path) -> Path:
    return tmp_path / "tiles"


def scores(path: Path, sidecar: Path | None, *, sha256: str = SHA256, threads: int = 1) -> bytes:
    model = load_native(path, NativeSettings(threads=threads), sha256=sha256, sidecar=sidecar)
    with model, model.open(20) as sequence:
        rows = sequence.forward(TOKENS, len(TOKENS))
        return b"".join(rows.logits(row).tobytes() for row in range(len(TOKENS)))


class Relayed:
    """Counts the strips that a load lays out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strips = 0
        original = NativeWeights.relay

        def relay(weights: NativeWeights, strip: Any) -> int:
            self.strips += 1
            return original(weights, strip)

        monkeypatch.setattr(NativeWeights, "relay", relay)

    def of(self, load: Callable[[], object]) -> int:
        before = self.strips
        load()
        return self.strips - before


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> Relayed:
    return Relayed(monkeypatch)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_second_load_maps_the_sidecar_and_scores_the_same(
    path: Path, sidecar: Path, relayed: Relayed, threads: int
) -> None:
    expected = scores(path, None)
    assert relayed.of(lambda: scores(path, sidecar, threads=threads)) > 0
    written = sidecar.stat()
    found: list[bytes] = []
    assert relayed.of(lambda: found.append(scores(path, sidecar, threads=threads))) == 0
    assert found == [expected]
    assert sidecar.stat().st_mtime_ns == written.st_mtime_ns
    assert [each.name for each in sidecar.parent.iterdir()] == [sidecar.name]  # no temporaries


def test_no_sidecar_is_written_without_a_place(path: Path, sidecar: Path) -> None:
    scores(path, None)
    assert list(sidecar.parent.iterdir()) == []


def test_a_sidecar_of_another_model_is_replaced(
    path: Path, sidecar: Path, relayed: Relayed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same shapes, so that only the content differs."""
    other = write_tiny_gguf(tmp_path_factory.mktemp("other") / "other.gguf", quant="Q4_0", width=128, seed=1)
    scores(other, sidecar, sha256="sha256:cd")
    assert scores(path, sidecar) == scores(path, None)
    assert relayed.of(lambda: scores(path, sidecar)) == 0
    # Even with the same sha256 the file's rows show the difference.
    assert scores(other, sidecar) == scores(other, None)


def changed_everywhere(data: bytes) -> list[tuple[str, bytes]]:
    damaged = bytearray(data)
    damaged[HEADER_BYTES + 5000] ^= 1
    last = bytearray(data)
    last[-1] ^= 128
    return [
        ("empty", b""),
        ("not ours", b"GGUF" * 2000),
        ("header only", data[:HEADER_BYTES]),
        ("truncated", data[:-1]),
        ("too long", data + b"\0"),
        ("another format", data[:15] + b"0" + data[16:]),
        ("another key", data[:16] + bytes(32) + data[48:]),
        ("another seal", data[:48] + bytes(32) + data[80:]),
        ("a torn page", data[: HEADER_BYTES + 8192] + bytes(4096) + data[HEADER_BYTES + 12288 :]),
        ("one bit", bytes(damaged)),
        ("the last bit", bytes(last)),
    ]


def test_a_damaged_sidecar_is_refused_and_written_again(path: Path, sidecar: Path, relayed: Relayed) -> None:
    expected = scores(path, sidecar)
    good = sidecar.read_bytes()
    for what, data in changed_everywhere(good):
        assert data != good, what
        sidecar.write_bytes(data)
        found: list[bytes] = []
        assert relayed.of(lambda found=found: found.append(scores(path, sidecar))) > 0, what  # type: ignore[misc]
        assert found == [expected], what
        assert sidecar.read_bytes() == good, what


def test_hostile_sidecars_are_refused_or_harmless(path: Path, sidecar: Path) -> None:
    """Any content with a valid seal: no byte beyond the file is read; otherwise this process crashes."""
    scores(path, sidecar)
    good, header = sidecar.read_bytes(), read_header(path)
    library = require_native()
    layout = read_layout(header)
    expected = scores(path, None)
    for seed in range(20):
        random_ = random.Random(seed)
        tiles = np.frombuffer(bytearray(random_.randbytes(len(good) - HEADER_BYTES)), dtype=np.uint8)
        forged(library, sidecar, good[16:48], tiles)
        assert scores(path, sidecar) == expected  # the first tile shows the damage
        tiles = np.frombuffer(bytearray(good[HEADER_BYTES:]), dtype=np.uint8)
        tiles[random_.randrange(len(tiles)) :][:64] = 255
        forged(library, sidecar, good[16:48], tiles)
        weights = load_weights(library, header, layout, 1, SidecarFile(path=sidecar, sha256=SHA256))
        del weights
        with load_native(path, NativeSettings(), sha256=SHA256, sidecar=sidecar) as model, model.open(20) as sequence:
            assert sequence.forward(TOKENS, 1).count == 1


def forged(library: NativeLibrary, path: Path, key: bytes, tiles: np.ndarray) -> None:
    path.unlink()
    made = Sidecar(
        path=path, key=key, tile_bytes=len(tiles), library=library, threads=1, cancelled=lambda: False
    ).write(tiles.ctypes.data)
    assert made


def test_a_sidecar_with_another_tile_layout_is_laid_out_again(
    path: Path, sidecar: Path, relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of other kernels: the same sizes, and one line of each tile reversed."""
    expected = scores(path, None)
    original = NativeWeights._relay_to

    def relay_backwards(weights: NativeWeights, strip: Any, tiles: int) -> int:
        code = original(weights, strip, tiles)
        tile = weights.library.api.es_relaid_bytes(strip.weight.type_number, 16, strip.weight.columns)
        for start in range(0, -(-strip.rows // 16) * tile, tile):
            line = np.ctypeslib.as_array((ctypes.c_uint32 * 16).from_address(tiles + start))
            line[:] = line[::-1].copy()
        return code

    with monkeypatch.context() as patch:
        patch.setattr(NativeWeights, "_relay_to", relay_backwards)
        assert scores(path, sidecar) != expected
        assert relayed.of(lambda: scores(path, sidecar)) == 0
    assert scores(path, sidecar) == expected
    assert relayed.of(lambda: scores(path, sidecar)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["no folder", "full", "little space", "not a file", "unwritable"])
def test_a_sidecar_that_cannot_be_written_is_not_an_error(
    path: Path, sidecar: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    def fail(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    def refuse(*_arguments: object, **_options: object) -> int:
        raise PermissionError(13, "Permission denied")

    if trouble == "no folder":
        sidecar = sidecar / "gone" / "tiles"
    elif trouble == "full":
        monkeypatch.setattr(native_sidecar, "_CHUNK_BYTES", 4096)
        monkeypatch.setattr(native_sidecar, "time", SimpleNamespace(monotonic=second_call(fail)))
    elif trouble == "little space":
        size = native_weights.tile_bytes(require_native(), read_layout(read_header(path)))
        monkeypatch.setattr(disk, "free_bytes", lambda _path: 3 * size + disk.SLACK_BYTES)
    elif trouble == "unwritable":  # read-only, also for root
        monkeypatch.setattr(native_sidecar, "replacing", refuse)
    else:
        sidecar.mkdir()
    before = sorted(sidecar.parent.parent.rglob("*"))
    assert scores(path, sidecar) == scores(path, None)
    assert sorted(sidecar.parent.parent.rglob("*")) == before


class SlowDisk:
    """A clock by which a look takes 1000 s."""

    def __init__(self, now: float) -> None:
        self.now, self.passed = now, 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        self.passed += 1000.0
        return self.passed


def test_a_disk_that_was_too_slow_is_tried_again_after_a_month(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = np.ones(64, dtype=np.uint8)
    sidecar, other = (
        Sidecar(path=tmp_path / "tiles", key=key, tile_bytes=64, library=library, threads=1, cancelled=lambda: False)
        for key in (bytes(32), b"another model".ljust(32))
    )
    day_s = 24 * 3600
    disk_ = SlowDisk(time.time())
    monkeypatch.setattr(native_sidecar, "time", disk_)
    assert sidecar.may_be_written()
    assert not sidecar.write(tiles.ctypes.data)
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.slow"]
    assert not sidecar.may_be_written()
    assert other.may_be_written()
    monkeypatch.setattr(native_sidecar, "time", SimpleNamespace(monotonic=lambda: 0.0, time=disk_.time))  # a fast one
    for days in (29, -1):
        disk_.now += days * day_s
        assert not sidecar.write(tiles.ctypes.data)
    disk_.now += 3 * day_s
    assert sidecar.may_be_written()
    assert sidecar.write(tiles.ctypes.data)
    assert sidecar.is_there()


def second_call(fail: Callable[..., int]) -> Callable[[], float]:
    calls = []

    def clock() -> float:
        calls.append(1)
        return 0.0 if len(calls) == 1 else float(fail())

    return clock


def test_no_sidecar_is_written_for_a_model_with_bad_scales(path: Path, sidecar: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes())
    tensor = next(each for each in read_header(path).tensors if each.name == "blk.0.ffn_up.weight")
    with bad.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.array([np.nan], dtype=np.float16).tobytes())
    with pytest.raises(ModelFileError):
        scores(bad, sidecar)
    assert not sidecar.exists()


@pytest.mark.parametrize("while_reading", [True, False])
def test_a_cancelled_load_stops_at_a_chunk_and_leaves_no_sidecar(
    library: NativeLibrary, tmp_path: Path, while_reading: bool
) -> None:
    tiles = np.ones(64, dtype=np.uint8)
    sidecar = Sidecar(
        path=tmp_path / "tiles", key=bytes(32), tile_bytes=64, library=library, threads=2, cancelled=lambda: False
    )
    if while_reading:
        assert sidecar.write(tiles.ctypes.data)
    before = list(tmp_path.iterdir())
    cancelled = Sidecar(
        path=sidecar.path, key=sidecar.key, tile_bytes=64, library=library, threads=2, cancelled=lambda: True
    )
    with pytest.raises(CancelledError):
        _ = cancelled.read() if while_reading else cancelled.write(tiles.ctypes.data)
    assert list(tmp_path.iterdir()) == before


def test_a_mapped_sidecar_stays_usable_when_replaced_or_removed(path: Path, sidecar: Path) -> None:
    expected = scores(path, sidecar)
    model = load_native(path, NativeSettings(), sha256=SHA256, sidecar=sidecar)
    sidecar.unlink()
    with model, model.open(20) as sequence:
        rows = sequence.forward(TOKENS, len(TOKENS))
        assert b"".join(rows.logits(row).tobytes() for row in range(len(TOKENS))) == expected
        del rows
    del model, sequence
    gc.collect()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings to look at")
def test_a_sidecar_is_mapped_read_only_until_the_model_is_closed(path: Path, sidecar: Path) -> None:
    def mappings() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[1] for line in lines if line.endswith(str(sidecar))]

    scores(path, sidecar)
    model = load_native(path, NativeSettings(), sha256=SHA256, sidecar=sidecar)
    assert mappings() == ["r--s"]
    model.close()
    del model
    gc.collect()
    assert mappings() == []


SMAPS = """\
7f0000000000-7f0000400000 r--s 00000000 fe:00 1234                       /a folder/other:name
Size:               4096 kB
FilePmdMapped:      4096 kB
7f0000400000-7f0000800000 r--s 00000000 fe:00 1235                       /a folder/tiles
Size:               4096 kB
Rss:                4096 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:   {large:7} kB
VmFlags: rd sh mr mw me
7fff00000000-7fff00001000 rw-p 00000000 00:00 0                          [stack]
Size:                  4 kB
"""


@pytest.mark.parametrize(
    ("setting", "large", "gains"),
    [
        ("always [madvise] never", 0, True),
        ("always [madvise] never", 1024, True),
        ("always [madvise] never", 2048, False),
        ("[always] madvise never", 0, True),
        ("always madvise [never]", 0, False),
        (None, 0, False),
    ],
)
def test_small_pages_of_a_mapped_sidecar_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, large: int, gains: bool
) -> None:
    (tmp_path / "smaps").write_text(SMAPS.format(large=large))
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(native_sidecar, "_LARGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(native_sidecar, "_MAPPINGS", tmp_path / "smaps")
    assert native_sidecar._would_gain_large_pages(0x7F0000401000) is gains


@pytest.mark.parametrize("gains", [True, False])
def test_sidecar_tiles_in_small_pages_are_copied_into_memory(
    path: Path, sidecar: Path, relayed: Relayed, monkeypatch: pytest.MonkeyPatch, gains: bool
) -> None:
    expected = scores(path, sidecar)
    monkeypatch.setattr(native_sidecar, "_LARGE_PAGES_MATTER_BYTES", 0)
    monkeypatch.setattr(native_sidecar, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(native_sidecar, "_would_gain_large_pages", lambda _address: gains)
    scores(path, sidecar)  # in other chunks the file has another seal
    copies: list[int] = []
    copy = Sidecar.copy

    def count_and_copy(*arguments: Any) -> None:
        copies.append(1)
        copy(*arguments)

    monkeypatch.setattr(Sidecar, "copy", count_and_copy)
    found: list[bytes] = []
    assert relayed.of(lambda: found.append(scores(path, sidecar, threads=2))) == 0
    assert found == [expected]
    assert len(copies) == gains


def test_every_single_bit_changes_the_checksum(library: NativeLibrary) -> None:
    random_ = random.Random(1)
    for length in (0, 1, 7, 8, 63, 64, 65, 200, 3 * mmap.PAGESIZE):
        data = np.frombuffer(bytearray(random_.randbytes(length) or b"\0"), dtype=np.uint8).copy()
        whole = library.api.es_checksum(data.ctypes.data, length)
        seen = {whole}
        places = range(8 * length) if length <= 200 else random_.sample(range(8 * length), 300)
        for bit in places:
            data[bit // 8] ^= 1 << bit % 8
            seen.add(library.api.es_checksum(data.ctypes.data, length))
            data[bit // 8] ^= 1 << bit % 8
        assert len(seen) == len(places) + 1, length
        if length:
            assert library.api.es_checksum(data.ctypes.data, length - 1) != whole
    zeros = np.zeros(4096, dtype=np.uint8)
    assert len({library.api.es_checksum(zeros.ctypes.data, length) for length in range(4096)}) == 4096
