from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from edgespec.errors import ModelFileError
from edgespec.files.checked import Fields, Range, is_text, parse_object, ranges_of, read_fields, read_regular_file

PATH = Path("config.json")


@dataclass
class Record:
    name: str
    size: Annotated[int, "bytes", Range(1)]
    share: Annotated[float | None, Range(0, 1)] = None


def fields(**values: Any) -> Fields:
    return Fields(PATH, values)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the name 'b' occurs twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": 1', "not valid JSON"),
    ],
)
def test_malformed_json_is_refused_with_a_reason(raw: bytes, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        parse_object(PATH, raw)
    assert words in caught.value.message
    assert caught.value.hint
    assert caught.value.offset is None
    assert len(caught.value.message) < 400


def test_a_json_error_states_the_byte_offset() -> None:
    with pytest.raises(ModelFileError, match="at byte 8"):
        parse_object(PATH, b"{", offset=8)


def test_json_files_above_the_size_limit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}')
    assert read_regular_file(path, 8) == b'{"a": 1}'
    assert read_fields(path, 8).integer("a", 0, 9) == 1
    with pytest.raises(ModelFileError, match="8 bytes are too large"):
        read_regular_file(path, 7)
    with pytest.raises(ModelFileError, match="no such file"):
        read_regular_file(tmp_path / "other", 8)
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_regular_file(tmp_path, 1 << 20)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_named_pipe_is_refused_without_opening_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_regular_file(path, 8)


def test_members_of_the_right_type_are_returned() -> None:
    found = fields(a=3, b=2.5, c=True, d="x", e=[1], f={"g": 1}, h=None)
    assert found.integer("a", 3, 3) == 3
    assert found.number("a", 3, 3) == 3.0
    assert isinstance(found.number("a", 3, 3), float)
    assert found.number("b", 2, 3) == 2.5
    assert found.flag("c") is True
    assert found.text("d") == "x"
    assert found.items("e") == [1]
    inner = found.member("f")
    assert inner is not None
    assert inner.integer("g", 0, 1) == 1
    assert found.has_object("f")
    assert not found.has_object("e")
    assert found.raw("e") == [1]
    assert found.names() == ["a", "b", "c", "d", "e", "f"]


def test_a_null_member_counts_as_absent() -> None:
    found = fields(h=None)
    for name in ("h", "i"):
        assert found.integer(name, 0, 1, 1) == 1
        assert found.number(name, 0, 1, 0.5) == 0.5
        assert (found.flag(name), found.text(name), found.items(name), found.member(name)) == (None,) * 4
        with pytest.raises(ModelFileError, match=f"{name} is missing: a whole number from 0 to 1 is needed"):
            found.integer(name, 0, 1)
        with pytest.raises(ModelFileError, match=f"{name} is missing: a number from 0 to 1 is needed"):
            found.number(name, 0, 1)


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 2, 10**400, [], {}])
def test_a_member_that_is_not_an_integer_in_range_is_refused(value: Any) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: a is .* a whole number from 0 to 1 is needed"):
        fields(a=value).integer("a", 0, 1)


@pytest.mark.parametrize("value", [True, "1", -1, 2, 10**400, float("inf"), float("nan"), []])
def test_a_member_that_is_not_a_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(ModelFileError, match="a number from 0 to 1 is needed"):
        fields(a=value).number("a", 0, 1)


def test_members_of_another_type_are_refused_with_their_name() -> None:
    found = fields(a=1)
    for read in (found.flag, found.text, found.items, found.member):
        with pytest.raises(ModelFileError, match="a is 1"):
            read("a")
    inner = fields(a={"b": "x" * 1000}).member("a")
    assert inner is not None
    with pytest.raises(ModelFileError, match=r"a\.b is 'xxx") as caught:
        inner.flag("b")
    assert len(caught.value.message) < 200


def test_half_a_surrogate_pair_is_refused_as_text() -> None:
    assert is_text("a🙂")
    assert not is_text("\ud83d")
    with pytest.raises(ModelFileError, match="a string is needed"):
        fields(a="\ud83d").text("a")


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(0, 100), [0, 0.5, 100], [-1e-9, 100.5, 10**400, float("nan")], "a number from 0 to 100"),
        (Range(0, 1, above=True), [1e-300, 1], [0, 1.5, float("nan")], "a number above 0 and up to 1"),
        (Range(1), [1, 10**400, float("inf")], [0, float("nan")], "a number of at least 1"),
    ],
)
def test_a_range_has_its_ends_and_says_so(
    allowed: Range, inside: list[float], outside: list[float], words: str
) -> None:
    assert all(allowed.admits(value) for value in inside)
    assert not any(allowed.admits(value) for value in outside)
    assert allowed.wanted("a number") == words


def test_ranges_are_read_from_a_records_annotations() -> None:
    assert ranges_of(Record) == {"size": Range(1), "share": Range(0, 1)}
