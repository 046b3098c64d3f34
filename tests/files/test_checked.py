from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import ModelFileError
from edgespec.files.checked import (
    Check,
    Fields,
    From,
    Key,
    Length,
    Range,
    Sha256,
    WrongValueError,
    fields_of,
    is_line,
    is_text,
    kind_of,
    parse_object,
    ranges_of,
    read,
    read_fields,
    read_regular_file,
    shown,
)

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
        (b'{"a": 1, "b": 2, "a": 3}', 'the name "a" occurs twice'),
        (b'{"a": {"b": 1, "b": 2}}', 'the name "b" occurs twice'),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
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
    with pytest.raises(ModelFileError, match="it is too large: more than 7 bytes"):
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
        with pytest.raises(ModelFileError, match=f"{name} is missing: it must be a whole number from 0 to 1"):
            found.integer(name, 0, 1)
        with pytest.raises(ModelFileError, match=f"{name} is missing: it must be a number from 0 to 1"):
            found.number(name, 0, 1)


@pytest.mark.parametrize("value", [True, "1", 2, 10**400, float("nan")])
def test_a_member_out_of_range_or_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: a must be a whole number from 0 to 1, got "):
        fields(a=value).integer("a", 0, 1)
    with pytest.raises(ModelFileError, match="a must be a number from 0 to 1, got "):
        fields(a=value).number("a", 0, 1)


def test_members_of_another_type_are_refused_with_their_name() -> None:
    found = fields(a=1)
    for member in (found.flag, found.text, found.items, found.member):
        with pytest.raises(ModelFileError, match=r"a must be .*, got 1"):
            member("a")
    inner = fields(a={"b": "x" * 1000}).member("a")
    assert inner is not None
    with pytest.raises(ModelFileError, match=r'a\.b must be true or false, got "xxx') as caught:
        inner.flag("b")
    assert len(caught.value.message) < 200


def test_half_a_surrogate_pair_is_refused_as_text() -> None:
    assert is_text("a🙂")
    assert not is_text("\ud83d")
    with pytest.raises(ModelFileError, match="a must be a string"):
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


# ------------------------------------------------------------------------------------------------ records

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: Annotated[str, Length(1, 8)]
    threads: Annotated[int, Range(1, 64, "a number of threads")] = 1
    layers: Literal["auto"] | Annotated[int, Range(0, 16)] = "auto"
    share: Annotated[float, Range(0, 1, above=True)] | None = None
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.threads > 32 and self.share is None:
            raise ValueError("many threads need a share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Generic[V]):
    first: V
    second: V | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    devices: Annotated[tuple[Device, ...], Length(1, 3)]
    label: Annotated[str, Key("class"), Check(str.islower, "a lower-case word")] = "none"
    names: frozenset[str] = frozenset()
    point: tuple[int, float] = (1, 1.0)
    sizes: Mapping[str, int] = field(default_factory=dict)
    digest: Sha256 | None = None
    day: Annotated[date, From(str, date.fromisoformat)] | None = None
    double: Annotated[int, From(Annotated[int, Range(0)], lambda value: 2 * value)] = 0
    root: Path = Path()
    on: bool = False
    rest: Any = None
    counted: int = field(default=0, init=False)


def machine(device: Mapping[str, object] | None = None, **values: object) -> dict[str, object]:
    return {"devices": [{"name": "cpu", **(device or {})}], **values}


def test_a_record_is_read_with_its_defaults_and_nested_records() -> None:
    assert read(Machine, machine()) == Machine(devices=(Device(name="cpu"),))
    full = machine(
        {"threads": 64, "layers": 16, "share": 1, "rate": 10**30},
        names=["a", "b"],
        point=[2, 3],
        sizes={"x": 1},
        digest="0" * 64,
        day="2026-01-31",
        double=4,
        root="models/\udcff",
        on=True,
        rest=[{"anything": None}],
        **{"class": "small"},
    )
    found = read(Machine, full)
    (device,) = found.devices
    assert device == Device(name="cpu", threads=64, layers=16, share=1.0, rate=1e30)
    assert isinstance(device.share, float)
    assert (found.label, found.names, found.point) == ("small", {"a", "b"}, (2, 3.0))
    assert (found.sizes, found.double, found.root, found.on) == ({"x": 1}, 8, Path("models/\udcff"), True)
    assert found.day == date(2026, 1, 31)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "it must be a table, got a list of length 0"),
        ({}, "devices is missing: it must be a list of 1 to 3 entries"),
        (machine(devices="cpu"), 'devices must be a list of 1 to 3 entries, got "cpu"'),
        (machine(devices=[{"name": "x"}] * 4), "devices must be a list of 1 to 3 entries, got a list of length 4"),
        (machine(devices=[3]), "devices 1 must be a table, got 3"),
        (machine({"name": ""}), 'devices 1, name must be a string of 1 to 8 characters, got ""'),
        (machine({"name": "\ud83d"}), 'devices 1, name must be a string of 1 to 8 characters, got "\\ud83d"'),
        (machine({"threads": True}), "devices 1, threads must be a number of threads from 1 to 64, got true"),
        (machine({"threads": 2.0}), "devices 1, threads must be a number of threads from 1 to 64, got 2.0"),
        (machine({"threads": None}), "devices 1, threads must be a number of threads from 1 to 64, got null"),
        (machine({"threads": 33}), "devices 1: many threads need a share"),
        (machine({"layers": "all"}), 'devices 1, layers must be "auto" or a whole number from 0 to 16, got "all"'),
        (machine({"layers": 17}), 'devices 1, layers must be "auto" or a whole number from 0 to 16, got 17'),
        (machine({"share": 0}), "devices 1, share must be a number above 0 and up to 1, got 0"),
        (machine({"share": math.nan}), "devices 1, share must be a number above 0 and up to 1, got nan"),
        (machine({"rate": math.inf}), "devices 1, rate must be a number, got inf"),
        (machine({"rate": 10**400}), "devices 1, rate must be a number, got a number of 401 digits"),
        (machine({"rate": 10**5000}), "devices 1, rate must be a number, got a number of 5001 digits"),
        (machine({"rate": "1"}), 'devices 1, rate must be a number, got "1"'),
        (machine(names=["a", "b", "a"]), 'names: "a" occurs twice'),
        (machine(names=["a", 1]), "names 2 must be a string, got 1"),
        (machine(point=[1]), "point must be a list of 2 entries, got a list of length 1"),
        (machine(point=[1, False]), "point 2 must be a number, got false"),
        (machine(sizes={"\x1b": 2**63}), 'sizes, "\\u001b" must be a whole number, got a number of 19 digits'),
        (machine(sizes=[]), "sizes must be a table, got a list of length 0"),
        (machine(digest="A" * 64), f'digest must be 64 lower-case hex digits, got "{"A" * 60}...'),
        (machine(day="May"), "day: Invalid isoformat string: 'May'"),
        (machine(double=-1), "double must be a whole number of at least 0, got -1"),
        (machine(root="a\0b"), 'root must be a path, got "a\\u0000b"'),
        (machine(on=1), "on must be true or false, got 1"),
        (machine(counted=1), 'unknown key "counted"'),
        (machine(**{"class": "Big"}), 'class must be a lower-case word, got "Big"'),
        (machine(**{"class": 1}), "class must be a lower-case word, got 1"),
    ],
)
def test_a_value_that_does_not_fit_its_record_is_named_with_what_is_wanted(document: object, sentence: str) -> None:
    with pytest.raises(WrongValueError) as caught:
        read(Machine, document)
    assert str(caught.value) == sentence


def test_an_unknown_name_is_refused_with_the_nearest_known_one_or_ignored() -> None:
    hints = {"thread": 'Did you mean "threads"?', "zzz": "Known keys: layers, name, rate, share, threads."}
    for name, hint in hints.items():
        with pytest.raises(WrongValueError, match=f'devices 1: unknown key "{name}"') as caught:
            read(Machine, machine({name: 1}))
        assert caught.value.hint == hint
        assert read(Machine, machine({name: 1}), ignore_unknown=True) == Machine(devices=(Device(name="cpu"),))


def test_types_other_than_records_are_read_the_same_way() -> None:
    assert read(tuple[int, ...], [1, 2]) == (1, 2)
    assert read(dict[str, bool], {"a": True}) == {"a": True}
    assert read(Pair[tuple[str, int]], {"first": ["a", 1]}) == Pair(first=("a", 1))
    assert read(Pair[int], {"first": 1, "second": None}) == Pair(first=1)
    with pytest.raises(WrongValueError, match="second 2 must be a whole number"):
        read(Pair[tuple[str, int]], {"first": ["a", 1], "second": ["a", "b"]})
    with pytest.raises(WrongValueError, match="it must be a number, got true"):
        read(float, True)
    with pytest.raises(TypeError, match="no value is read from a file as"):
        read(bytes, b"")


def test_fields_can_be_read_one_by_one() -> None:
    fields = fields_of(Machine)
    assert set(fields) == {"class", *Machine.__slots__} - {"label", "counted"}  # type: ignore[attr-defined]
    assert (fields["class"].name, fields["class"].optional, fields["devices"].optional) == ("label", True, False)
    assert fields["class"].kind.read("x") == "x"
    assert kind_of(Annotated[int, Range(-1.5)]).wanted == "a whole number of at least -1.5"
    assert kind_of(Annotated[float, Range(0, above=True)]).wanted == "a number above 0"
    assert kind_of(Annotated[str, Length(2)]).wanted == "a string of 2 or more characters"


def test_any_value_is_shown_short_and_printable() -> None:
    shows = {None: "null", "a\nb": '"a\\nb"', "é": '"é"', 1.5: "1.5", -(10**30): "a number of 31 digits"}
    assert {value: shown(value) for value in shows} == shows
    assert shown({}) == "a table"
    assert shown("x" * 100) == f'"{"x" * 60}...'


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


names = st.sampled_from([*fields_of(Machine), *fields_of(Device), "other"])


def outcome(document: object) -> str:
    try:
        return repr(read(Machine, document))[:7]
    except WrongValueError as error:
        return str(error)


@given(name=names, value=anything)
def test_any_value_is_read_or_refused_in_one_printable_line(name: str, value: object) -> None:
    for document in (machine(**{name: value}), machine({name: value}), value):
        assert is_line(outcome(document))
        assert len(outcome(document)) < 300
