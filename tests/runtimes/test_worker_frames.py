"""Frames: what is sent arrives, and anything else raises WorkerLostError."""

from __future__ import annotations

import io
import json
import random
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import errors
from edgespec.errors import (
    EdgespecError,
    ForwardError,
    MemoryLimitError,
    ModelFileError,
    NonFiniteLogitsError,
    WorkerLostError,
)
from edgespec.files.checked import to_json
from edgespec.runtimes.process.frames import (
    MOST_BODY_BYTES,
    Frame,
    LoadRequest,
    describe_error,
    encode_frame,
    ids_bytes,
    read_facts,
    read_frame,
    read_load_request,
    rebuild_error,
    scores_bytes,
)
from tests.support.planning import model_facts

FACTS = model_facts(vocabulary_size=50, can_rewind=False, settings={"repack": True, "gpu_layers": -1, "mode": "fast"})


def stream(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(data))


def test_frames_are_read_in_order_until_the_stream_ends() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"id": 1}, b""),
        ({"id": 2, "text": "schön"}, b"\0" * 1000),
        ({}, b"x"),
    ]
    source = stream(b"".join(encode_frame(header, body) for header, body in sent))
    for header, body in sent:
        frame = read_frame(source)
        assert frame is not None
        assert (frame.header, bytes(frame.body)) == (header, body)
    assert read_frame(source) is None


def test_token_ids_and_scores_survive_a_frame_bit_for_bit() -> None:
    ids = np.array([0, 1, 2**31 - 1], dtype=np.int64)
    scores = np.array([-0.0, np.inf, np.nan, 1e-45, 3.0], dtype=np.float32)
    frame = Frame({}, bytearray(ids_bytes(ids) + scores_bytes(scores)))
    assert np.array_equal(frame.ids(0, 3), ids)
    assert frame.ids(0, 3).dtype == np.int64
    found = frame.scores(3, 5)
    assert found.tobytes() == scores.tobytes()
    found[0] = 5  # the receiver may overwrite it
    assert len(frame.ids()) == len(frame.scores()) == 8
    assert len(frame.ids(2)) == 6


@pytest.mark.parametrize(("start", "count"), [(0, 3), (2, 1), (3, None)])
def test_reading_beyond_a_frames_numbers_is_an_error(start: int, count: int | None) -> None:
    with pytest.raises(WorkerLostError):
        Frame({}, bytearray(8)).ids(start, count)


def test_a_frame_body_with_a_partial_number_is_an_error() -> None:
    with pytest.raises(WorkerLostError, match="7 bytes"):
        Frame({}, bytearray(7)).scores()


@pytest.mark.parametrize("value", [None, True, -1, 1.0, "1", [1]])
def test_a_frame_field_that_is_not_a_natural_number_is_an_error(value: Any) -> None:
    with pytest.raises(WorkerLostError, match="id is"):
        Frame({"id": value}).integer("id")
    assert Frame({"id": 0}).integer("id") == 0


def test_a_frame_field_that_is_not_a_string_is_an_error() -> None:
    assert Frame({"op": "row"}).text("op") == "row"
    with pytest.raises(WorkerLostError, match="op is 5"):
        Frame({"op": 5}).text("op")


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    assert len(encode_frame({}, bytes(MOST_BODY_BYTES))) > MOST_BODY_BYTES
    with pytest.raises(ForwardError, match="too large"):
        encode_frame({}, bytes(MOST_BODY_BYTES + 1))
    with pytest.raises(ForwardError, match="too large"):
        encode_frame({"text": "x" * 70_000})


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    whole = encode_frame({"id": 1}, b"body")
    for length in range(1, len(whole)):
        with pytest.raises(WorkerLostError, match="ends inside a frame"):
            read_frame(stream(whole[:length]))


@pytest.mark.parametrize(
    ("size", "header"),
    [(2**32 - 1, 2), (2**32 - 1, 2**32 - 1), (4 + 2 + MOST_BODY_BYTES + 1, 2), (70_004, 70_000), (5, 2), (0, 0)],
)
def test_frame_sizes_are_checked_before_memory_is_allocated(size: int, header: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WorkerLostError, match="claims"):
            read_frame(stream(struct.pack("<II", size, header) + b"{}"))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def raw_frame(header: bytes) -> bytes:
    return struct.pack("<II", 4 + len(header), len(header)) + header


@pytest.mark.parametrize(
    "header", [b"", b"{", b"\xff", b"[" * 60_000, b"9" * 60_000, b'{"a":1}x', b"null", b"[]", b'"text"', b"NaN"]
)
def test_a_frame_header_that_is_not_a_json_object_is_an_error(header: bytes) -> None:
    with pytest.raises(WorkerLostError):
        read_frame(stream(raw_frame(header)))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_frames_are_read_or_raise_worker_lost_error(seed: int) -> None:
    rng = random.Random(seed)
    answers = [
        encode_frame({"id": 1, "facts": to_json(FACTS)}),
        encode_frame({"id": 2, "length": 7, "not_finite": [[0, "a sentence"]]}, ids_bytes(np.arange(5))),
        encode_frame({"id": 3, "error": describe_error(ModelFileError("a", "b", offset=3))}),
    ]
    refused = 0
    for _ in range(400):
        data = bytearray(b"".join(rng.choices(answers, k=3)))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data))
            damage = rng.randrange(3)
            if damage == 0:
                data[place] = rng.randrange(256)
            elif damage == 1:
                del data[place : place + rng.randrange(1, 9)]
            else:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
        source = stream(bytes(data))
        try:
            while (frame := read_frame(source)) is not None:
                if "facts" in frame.header:
                    read_facts(frame.header["facts"])
                assert rebuild_error(frame.header.get("error")) is None or "error" in frame.header
                frame.integer("id")
                frame.ids()
        except WorkerLostError:
            refused += 1
    assert refused > 200


# --------------------------------------------------------------------------------------------- facts, requests


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_model_facts_survive_the_pipe_unchanged() -> None:
    assert read_facts(through_json(to_json(FACTS))) == FACTS
    one_pass = replace(FACTS, mask_id=49)
    assert read_facts(through_json(to_json(one_pass))) == one_pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", 5),
        ("threads", "2"),
        ("threads", True),
        ("can_rewind", 1),
        ("sha256", 5),
        ("settings", []),
        ("settings", {"a": None}),
        ("settings", {"a": 0.5}),
        ("mask_id", "1"),
        ("mask_id", True),
        ("mask_id", -1),
        ("mask_id", 50),
        ("vocabulary_size", 0),
        ("vocabulary_size", 2**40),
        ("weight_bytes", -1),
        ("bytes_per_forward", 2**63),
        ("kv_bytes_per_token", -1),
        ("windowed", {"bytes_per_token": -1, "positions": 1}),
        ("windowed", {"bytes_per_token": 1, "positions": -1}),
        ("trained_context_length", -1),
        ("a stranger", 1),
    ],
)
def test_impossible_model_facts_are_refused(name: str, value: Any) -> None:
    with pytest.raises(WorkerLostError):
        read_facts({**to_json(FACTS), name: value})


@pytest.mark.parametrize("value", [None, [], {}, {"name": "tiny"}])
def test_a_value_that_is_not_model_facts_is_refused(value: Any) -> None:
    with pytest.raises(WorkerLostError):
        read_facts(value)


def test_a_load_request_survives_the_pipe_unchanged() -> None:
    others = (Path("a") / "c.gguf",)
    request = LoadRequest(
        runtime="llama", path=Path("a") / "b.gguf", others=others, settings={"threads": 2}, name="n"
    )
    assert read_load_request(through_json(to_json(request))) == request
    assert read_load_request(to_json(replace(request, name=None, sha256="00"))).sha256 == "00"


@pytest.mark.parametrize(
    "wrong",
    [{"path": 5}, {"runtime": None}, {"settings": []}, {"others": [5]}, {"others": "a"}, {"loader": "os:system"}],
)
def test_an_invalid_load_request_is_refused(wrong: dict[str, Any]) -> None:
    request = LoadRequest(runtime="llama", path=Path("a"))
    with pytest.raises(WorkerLostError):
        read_load_request({**to_json(request), **wrong})


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "error",
    [
        ModelFileError("folder/a.gguf", "truncated", offset=17, hint="fetch it again"),
        ModelFileError("a.gguf", "no such file"),
        MemoryLimitError("too large", needed_bytes=5, available_bytes=None, hint="less"),
        ForwardError("failed", code=-3),
        NonFiniteLogitsError("nan", hint=None),
        errors.HashMismatchError("a", "another hash"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_pipe_unchanged(error: EdgespecError) -> None:
    found = rebuild_error(through_json(describe_error(error)))
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert str(found) == str(error)


def test_every_error_a_runtime_raises_can_cross() -> None:
    for name in set(errors.__all__) - {"DownloadError", "DiskSpaceError", "WorkerLostError"}:
        described = {"class": name, "message": "m", "hint": "h", "path": "p", "reason": "r"}
        found = rebuild_error(described)
        assert isinstance(found, getattr(errors, name)), name
        assert (found.message, found.hint) == ("m", "h")


@pytest.mark.parametrize(
    "described",
    [
        None,
        "ForwardError",
        {},
        {"class": "ForwardError"},
        {"class": "ForwardError", "message": 5, "hint": None},
        {"class": "ForwardError", "message": "m", "hint": 5},
        {"class": "ForwardError", "message": "m", "hint": None, "code": "x"},
        {"class": "ModelFileError", "message": "m", "hint": None},
        {"class": ["ForwardError"], "message": "m", "hint": None},
        *({"class": name, "message": "m", "hint": None} for name in ("SystemExit", "Path", "__all__", "annotations")),
    ],
)
def test_only_edgespecs_error_classes_are_rebuilt_from_a_frame(described: Any) -> None:
    assert rebuild_error(described) is None


def test_a_very_long_error_message_still_fits_into_a_frame() -> None:
    error = ModelFileError("p" * 10**5, "r" * 10**5, hint="h" * 10**5)
    found = rebuild_error(through_json(describe_error(error)))
    assert found is not None
    assert len(encode_frame({"error": describe_error(error)})) < 10_000
