"""The native cache in parts: what is read from one cache and written to another gives the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import CancelledError, ClosedError, InvalidRequestError, RuntimeUnavailableError
from edgespec.interfaces.model import SavableSequence
from edgespec.runtimes.native.library import BAD_REQUEST, NOT_FINITE, OK, load
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.fake_runtime import FakeModel
from tests.support.loading import load_native
from tests.support.native_models import Files, some_tokens

try:
    LEVELS = load().levels
except RuntimeUnavailableError as error:
    pytest.skip(error.message, allow_module_level=True)

CONTEXT = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def path(files: Files) -> Path:
    return files("llama Q4_0")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[NativeModel]:
    with load_native(path, NativeSettings(threads=2)) as model:
        yield model


@pytest.fixture
def sequence(model: NativeModel, path: Path) -> Iterator[NativeSequence]:
    with model.open(CONTEXT) as sequence:
        sequence.forward(some_tokens(path, 40), 0)
        yield sequence


def all_parts(sequence: NativeSequence, length: int) -> list[bytes]:
    return [sequence.read_part(part, length) for part in range(sequence.part_sizes(length)[0])]


@pytest.mark.parametrize(
    "kind", ["llama Q4_0", "qwen2 Q8_0", "gemma3 Q8_0", "gemma3 F16", "gpt-oss MXFP4", "gemma4 of shared caches Q8_0"]
)
def test_a_cache_restored_from_its_parts_continues_bit_for_bit(files: Files, kind: str) -> None:
    tokens = some_tokens(files(kind), 299)
    with load_native(files(kind), NativeSettings()) as model, model.open(CONTEXT) as source:
        for length in (1, 15, 16, 17, 250):
            source.rewind(0)
            source.forward(tokens[:length], 0)
            parts = all_parts(source, length)
            assert len(parts) * len(parts[0]) >= length * model.facts.kv_bytes_per_token
            source.forward(tokens[length : length + 3], 3)  # what a rejected guess leaves in the last tile
            source.rewind(length)
            assert all_parts(source, length) == parts, "nothing of it is saved"
            with model.open(length + 50) as other:  # of another size
                other.restore(iter(parts), length)
                assert other.length == length
                expected = source.forward(tokens[length : length + 20], 4)
                found = other.forward(tokens[length : length + 20], 4)
                for row in range(4):
                    assert np.array_equal(found.logits(row), expected.logits(row))


def test_only_native_sequences_can_be_saved(sequence: NativeSequence) -> None:
    assert isinstance(sequence, SavableSequence)
    assert not isinstance(FakeModel(seed=1).open(16), SavableSequence)


def test_parts_that_a_cache_does_not_have_are_refused(sequence: NativeSequence) -> None:
    count, size = sequence.part_sizes(40)
    assert count == 2 * 2 * 2  # keys and values of two layers with two heads
    assert size == 48 * 32 * 2  # three tiles of 16 positions, 32 elements of two bytes
    assert sequence.part_sizes(0) == sequence.part_sizes(-1) == sequence.part_sizes(CONTEXT + 1) == (0, 0)
    for part, length in ((-1, 40), (count, 40), (0, 0), (0, 41), (0, -5)):
        with pytest.raises(InvalidRequestError, match="there is no part"):
            sequence.read_part(part, length)


def test_a_restore_that_fails_leaves_the_cache_empty_and_usable(
    model: NativeModel, sequence: NativeSequence, path: Path
) -> None:
    parts = all_parts(sequence, 40)
    infinite = b"\x00\xfc" + parts[0][2:]
    wrong: dict[str, list[bytes]] = {
        "none": [],
        "one missing": parts[:-1],
        "one more": [*parts, parts[0]],
        "a short one": [*parts[:-1], parts[0][:-2]],
        "a long one": [parts[0] + b"\0\0", *parts[1:]],
        "not finite": [*parts[:-1], infinite],
    }
    expected = model.open(CONTEXT).forward(some_tokens(path, 40), 1).logits(0)
    with model.open(CONTEXT) as other:
        for given in wrong.values():
            with pytest.raises(InvalidRequestError):
                other.restore(given, 40)
            assert other.length == 0
        for length in (0, -1, CONTEXT + 1):
            with pytest.raises(InvalidRequestError):
                other.restore(parts, length)
        other.cancel()
        with pytest.raises(CancelledError):
            other.restore(parts, 40)
        other.reset_cancel()
        assert np.array_equal(other.forward(some_tokens(path, 40), 1).logits(0), expected)
        with pytest.raises(InvalidRequestError, match="an empty one"):
            other.restore(parts, 40)
    for use in (lambda: other.restore(parts, 40), lambda: other.read_part(0, 1)):
        with pytest.raises(ClosedError):
            use()


def test_the_library_checks_every_bound_itself(sequence: NativeSequence) -> None:
    """Python checks them too; a mistake there must not become a write outside of the cache."""
    api, pointer = load().api, sequence._native._open()
    size = api.es_part_bytes(pointer, 0, 0, 40)
    room = (ctypes.c_uint8 * (2 * size))()
    for part, first, length, count in (
        (-1, 0, 40, size),
        (8, 0, 40, size),
        (2**62, 0, 40, size),
        (0, 0, 0, 0),
        (0, 0, -1, size),
        (0, 0, CONTEXT + 1, size),
        (0, 0, 2**62, size),
        (0, -16, 40, size),
        (0, 8, 40, size),
        (0, 48, 40, size),
        (0, 16, 40, size),
        (0, 0, 40, size - 1),
        (0, 0, 40, 2 * size),
        (0, 0, 40, -size),
    ):
        assert api.es_read_part(pointer, part, first, length, room, count) == BAD_REQUEST
        assert api.es_write_part(pointer, part, first, length, room, count) == BAD_REQUEST
    for first, end in ((-1, 16), (16, 0), (0, 2**62), (0, CONTEXT + 17)):
        assert api.es_forget(pointer, first, end) == BAD_REQUEST
    assert api.es_read_part(pointer, 7, 0, 40, room, size) == OK
    for bits in (0x7C00, 0xFC00, 0x7E01):  # infinity, its negative, not a number
        bad = bytearray(bytes(room)[:size])
        bad[-2:] = bits.to_bytes(2, "little")
        assert api.es_write_part(pointer, 7, 0, 40, (ctypes.c_uint8 * size).from_buffer(bad), size) == NOT_FINITE
    assert sequence.read_part(7, 40) == bytes(room)[:size], "a refused part changes nothing"
