"""Stored measurements: found again only if nothing that they depend on has changed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.calibration import kinds
from edgespec.calibration.measurement_store import SCHEMA_VERSION, Measurements
from edgespec.calibration.timing import ModelTimes
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.widths import ContextProbe, WidthProbe
from tests.support.planning import model_facts

FACTS = model_facts("model", kv_type="q8_0", settings={"flash_attention": True, "repack": True})

PROBE = WidthProbe(
    widths=(1, 2, 4),
    contexts=(
        ContextProbe(start=96, positions=12, max_abs_diff={3: 0.1 + 0.2}),
        ContextProbe(start=250, positions=12, max_abs_diff={3: 1e-7, 5: 1e30, 0: 2.0}),
    ),
    complete=True,
    plain_forward_s=0.01,
)


TIMES = ModelTimes(
    contexts=(96, 1018),
    widths=(1, 2, 4),
    forward_s=((0.1, 0.11, 0.12), (0.2, 0.1 + 0.2, 0.4)),
    prompt_token_s=0.003,
    repetitions=5,
)
BUSY = replace(TIMES, busy=0.5)


@pytest.fixture
def kept(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "not" / "yet" / "there", "machine-1")


def stored_file(kept: Measurements) -> Path:
    (path,) = kept.folder.glob("*")
    return path


def test_a_saved_width_probe_is_loaded_again(kept: Measurements) -> None:
    assert kept.load(kinds.WIDTHS, FACTS) is None
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE
    assert Measurements(kept.folder, "machine-1").load(kinds.WIDTHS, FACTS) == PROBE


@pytest.mark.slow
@given(
    widths=st.sets(st.integers(2, 64)),
    diffs=st.lists(st.floats(min_value=0, exclude_min=True, allow_infinity=True), max_size=4),
    complete=st.booleans(),
)
def test_every_width_probe_survives_the_store(
    tmp_path_factory: pytest.TempPathFactory, widths: set[int], diffs: list[float], complete: bool
) -> None:
    kept = Measurements(tmp_path_factory.mktemp("kept"), "machine-1")
    contexts = tuple(
        ContextProbe(start=start, positions=12, max_abs_diff={100 + start: diff}) for start, diff in enumerate(diffs)
    )
    probe = WidthProbe(widths=(1, *sorted(widths)), contexts=contexts, complete=complete)
    kept.save(kinds.WIDTHS, probe, FACTS)
    assert kept.load(kinds.WIDTHS, FACTS) == probe


def test_an_unbounded_difference_survives_the_store(kept: Measurements) -> None:
    probe = WidthProbe(widths=(1,), contexts=(ContextProbe(start=96, positions=12, max_abs_diff={2: math.inf}),))
    kept.save(kinds.WIDTHS, probe, FACTS)
    found = kept.load(kinds.WIDTHS, FACTS)
    assert found is not None
    assert found.max_abs_diff == math.inf


FARTHER = replace(PROBE, contexts=(*PROBE.contexts, ContextProbe(start=8180, positions=12, max_abs_diff={})))


@pytest.mark.parametrize(
    ("later", "stays"),
    [
        (PROBE, True),
        (replace(PROBE, complete=False), True),
        (replace(PROBE, widths=(1, 2, 4, 5)), True),
        (replace(PROBE, widths=(1, 2)), False),
        (replace(FARTHER, complete=False), True),
        (replace(FARTHER, plain_forward_s=0.02), False),
    ],
)
def test_a_shorter_probe_replaces_a_longer_one_only_if_it_contradicts_it(
    kept: Measurements, later: WidthProbe, stays: bool
) -> None:
    kept.save(kinds.WIDTHS, FARTHER, FACTS)
    kept.save(kinds.WIDTHS, later, FACTS)
    assert kept.load(kinds.WIDTHS, FACTS) == (FARTHER if stays else later)


def test_a_later_probe_replaces_the_earlier_one(kept: Measurements) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    kept.save(kinds.WIDTHS, replace(PROBE, widths=(1, 2)), FACTS)
    assert len(list(kept.folder.iterdir())) == 1
    found = kept.load(kinds.WIDTHS, FACTS)
    assert found is not None
    assert found.widths == (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "sha256:cd"},
        {"sha256": None},
        {"name": "other"},
        {"weight_bytes": 10**9 + 1},
        {"runtime": "onnx"},
        {"build": "0.3.37+abc"},
        {"device": "cuda0"},
        {"threads": 5},
        {"kv_type": "f16"},
        {"settings": {"flash_attention": True, "repack": False}},
        {"settings": {"flash_attention": True}},
        {"settings": {"flash_attention": True, "repack": True, "gpu_layers": -1}},
    ],
    ids=str,
)
def test_a_probe_is_not_found_once_anything_in_its_key_changes(kept: Measurements, change: dict[str, Any]) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert kept.load(kinds.WIDTHS, replace(FACTS, **change)) is None
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE
    kept.save(kinds.TIMES, TIMES, FACTS)
    assert kept.load(kinds.TIMES, replace(FACTS, **change)) is None
    assert kept.notes == []  # a missing file is not damaged


def test_a_probe_from_another_machine_is_not_used(kept: Measurements) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert Measurements(kept.folder, "machine-2").load(kinds.WIDTHS, FACTS) is None


OURS = replace(FACTS, runtime="native", build="7+abc", settings={"level": "avx2"}, bit_equal_by_construction=True)


@pytest.mark.parametrize("change", [{"threads": 9}, {"device": "cpu2"}])
def test_a_self_check_applies_to_any_machine_and_thread_count(kept: Measurements, change: dict[str, Any]) -> None:
    kept.save(kinds.WIDTHS, PROBE, OURS)
    assert kept.load(kinds.WIDTHS, replace(OURS, **change)) == PROBE
    assert Measurements(kept.folder, "machine-2").load(kinds.WIDTHS, OURS) == PROBE


@pytest.mark.parametrize("change", [{"build": "8+def"}, {"settings": {"level": "avx-vnni"}}, {"sha256": "sha256:cd"}])
def test_another_build_level_or_file_needs_a_new_self_check(kept: Measurements, change: dict[str, Any]) -> None:
    kept.save(kinds.WIDTHS, PROBE, OURS)
    assert kept.load(kinds.WIDTHS, replace(OURS, **change)) is None


def test_times_of_another_build_of_our_kernels_are_used(kept: Measurements) -> None:
    drafter = replace(OURS, name="small")
    kept.save(kinds.TIMES, BUSY, OURS)
    kept.save(kinds.PLAIN, 0.5, OURS)
    kept.save(kinds.CONTENTION, Contention(target_factor=1.5, drafter_factor=1.25), OURS, drafter)
    later = Measurements(kept.folder, "machine-1")
    new, small = replace(OURS, build="8+def"), replace(drafter, build="8+def")
    assert (later.load(kinds.TIMES, new), later.busy_share(new), later.load(kinds.PLAIN, new)) == (BUSY, 0.5, 0.5)
    assert later.load(kinds.CONTENTION, new, small) == Contention(target_factor=1.5, drafter_factor=1.25)
    for change in ({"threads": 9}, {"settings": {"level": "avx-vnni"}}, {"bit_equal_by_construction": False}):
        assert later.load(kinds.TIMES, replace(new, **change)) is None, change  # type: ignore[arg-type]
    assert Measurements(kept.folder, "machine-2").load(kinds.TIMES, new) is None
    assert later.notes == []


def test_times_of_this_build_then_of_the_latest_build_are_used(kept: Measurements) -> None:
    builds = {"1+a": 1000, "3+c": 3000, "2+b": 2000}
    for build, moment in builds.items():
        before = set(kept.folder.glob("*"))
        kept.save(kinds.PLAIN, moment / 1e6, replace(OURS, build=build))
        (path,) = set(kept.folder.glob("*")) - before
        os.utime(path, (moment, moment))
    later, new = Measurements(kept.folder, "machine-1"), replace(OURS, build="8+def")
    assert later.load(kinds.PLAIN, new) == 0.003
    later.save(kinds.PLAIN, 0.5, new)
    assert later.load(kinds.PLAIN, new) == 0.5
    later.forget(kinds.PLAIN, new)
    assert later.load(kinds.PLAIN, new) is None
    assert list(kept.folder.iterdir()) == []


def test_a_damaged_file_of_another_build_is_skipped(kept: Measurements) -> None:
    kept.save(kinds.PLAIN, 0.5, OURS)
    stored_file(kept).write_text("{")
    later = Measurements(kept.folder, "machine-1")
    assert later.load(kinds.PLAIN, replace(OURS, build="8+def")) is None
    assert later.notes == []


def test_a_measurement_under_the_wrong_name_is_ignored(kept: Measurements) -> None:
    """As if two keys had one digest, or the user had renamed the file."""
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    mine = stored_file(kept)
    data = mine.read_bytes()
    mine.unlink()
    other = replace(FACTS, threads=1)
    kept.save(kinds.WIDTHS, PROBE, other)
    stored_file(kept).write_bytes(data)
    assert kept.load(kinds.WIDTHS, other) is None


def changed(document: Any, *path: str | int, to: Any) -> Any:
    """The document with one value replaced."""
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return document


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "older version": lambda d: changed(d, "schema_version", to=SCHEMA_VERSION - 1),
    "newer version": lambda d: changed(d, "schema_version", to=SCHEMA_VERSION + 1),
    "no version": lambda d: {key: value for key, value in d.items() if key != "schema_version"},
    "no key": lambda d: changed(d, "key", to=None),
    "another key": lambda d: changed(d, "key", "threads", to=99),
    "no widths": lambda d: changed(d, "widths", to=None),
    "widths without 1": lambda d: changed(d, "widths", "widths", to=[2, 3]),
    "no width at all": lambda d: changed(d, "widths", "widths", to=[]),
    "widths out of order": lambda d: changed(d, "widths", "widths", to=[1, 4, 2]),
    "a width twice": lambda d: changed(d, "widths", "widths", to=[1, 2, 2]),
    "widths that also differ": lambda d: changed(d, "widths", "widths", to=[1, 2, 3, 4]),
    "a forward of 0 s": lambda d: changed(d, "widths", "plain_forward_s", to=0),
    "context without start": lambda d: changed(d, "widths", "contexts", 0, to={}),
    "a difference of 0": lambda d: changed(d, "widths", "contexts", 0, "max_abs_diff", to={"3": 0.0}),
    "a negative difference": lambda d: changed(d, "widths", "contexts", 0, "max_abs_diff", to={"3": -1.0}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_malformed_document_is_noted_and_replaced(kept: Measurements, name: str) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    path = stored_file(kept)
    path.write_text(json.dumps(DAMAGES[name](json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    assert kept.load(kinds.WIDTHS, FACTS) is None
    assert kept.load(kinds.WIDTHS, FACTS) is None
    (note,) = kept.notes  # once, however often it is loaded
    assert note.startswith(f"the measurement {path.name} is ignored and made again: ")
    words = {"older version": "another version", "newer version": "another version", "another key": "another machine"}
    assert words.get(name, "") in note
    kept.save(kinds.WIDTHS, PROBE, FACTS)  # and replaced
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"schema_version": ' + b"9" * 10_000 + b"}",
        b'{"schema_version": 1e999, "key": NaN}',
    ],
    ids=["empty", "cut", "not UTF-8", "zeros", "deep", "long number", "no numbers"],
)
def test_a_damaged_file_is_noted_and_replaced(kept: Measurements, data: bytes) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    stored_file(kept).write_bytes(data)
    assert kept.load(kinds.WIDTHS, FACTS) is None
    assert len(kept.notes) == 1
    assert "is ignored and made again" in kept.notes[0]


def test_a_file_truncated_at_any_byte_is_ignored(kept: Measurements) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    path = stored_file(kept)
    data = path.read_bytes()
    for length in range(0, len(data.rstrip()), 7):
        path.write_bytes(data[:length])
        assert kept.load(kinds.WIDTHS, FACTS) is None, length


def test_a_huge_measurement_file_is_not_read(kept: Measurements) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    path = stored_file(kept)
    data = path.read_bytes()
    path.write_bytes(data + b" " * 2**21)  # still valid JSON
    assert kept.load(kinds.WIDTHS, FACTS) is None
    assert kept.notes[0].endswith("it is damaged")
    path.write_bytes(data + b" " * (2**20 - len(data)))
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE


def test_a_folder_at_the_measurements_path_is_not_an_error(kept: Measurements) -> None:
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    path = stored_file(kept)
    path.unlink()
    path.mkdir()
    assert kept.load(kinds.WIDTHS, FACTS) is None
    assert "it cannot be read" in kept.notes[0]
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE  # in this process
    assert Measurements(kept.folder, "machine-1").load(kinds.WIDTHS, FACTS) is None


def test_an_uncreatable_folder_keeps_measurements_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    kept = Measurements(tmp_path / "file" / "measurements", "machine-1")
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE  # the measurement is kept while this process lives
    assert Measurements(kept.folder, "machine-1").load(kinds.WIDTHS, FACTS) is None


@pytest.mark.skipif(sys.platform == "win32", reason="folder permissions do not forbid writing on Windows")
def test_a_read_only_folder_keeps_measurements_in_this_process(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    kept = Measurements(folder, "machine-1")
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert Measurements(folder, "machine-1").load(kinds.WIDTHS, FACTS) is None


def test_a_full_disk_keeps_measurements_in_this_process(kept: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgespec.files.atomic.os.fsync", full)
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert list(kept.folder.iterdir()) == []
    assert kept.load(kinds.WIDTHS, FACTS) == PROBE
    monkeypatch.undo()
    kept.save(kinds.WIDTHS, replace(PROBE, plain_forward_s=0.02), FACTS)  # there is room again
    assert kept.load(kinds.WIDTHS, FACTS) == replace(PROBE, plain_forward_s=0.02)
    assert Measurements(kept.folder, "machine-1").load(kinds.WIDTHS, FACTS) == replace(PROBE, plain_forward_s=0.02)


def test_unstored_gives_the_reason_until_everything_is_stored(
    kept: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept.unstored is None

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edgespec.files.atomic.os.fsync", full)
        kept.save(kinds.WIDTHS, PROBE, FACTS)
        assert "is full" in (kept.unstored or "")
        assert "is full" in (kept.on_power("battery").unstored or "")

    def too_large(*_arguments: object) -> None:
        raise OSError(27, "File too large")  # a limit on file sizes names no file

    with monkeypatch.context() as patch:
        patch.setattr("edgespec.files.atomic.os.fsync", too_large)
        kept.save(kinds.WIDTHS, PROBE, FACTS)
        assert (kept.unstored or "").startswith(str(kept.folder))
        assert (kept.unstored or "").endswith(": File too large")
    kept.save(kinds.WIDTHS, PROBE, FACTS)
    assert kept.unstored is None


# ------------------------------------------------------------------------------------------------ a busy machine


def test_times_of_a_busy_machine_are_replaced_only_by_quieter_ones(kept: Measurements) -> None:
    assert kept.busy_share(FACTS) == 0.0
    kept.save(kinds.TIMES, BUSY, FACTS)
    assert (kept.load(kinds.TIMES, FACTS), kept.busy_share(FACTS)) == (BUSY, 0.5)
    assert kept.plain_s(FACTS) is None
    worse, better = replace(TIMES, prompt_token_s=0.9, busy=0.6), replace(TIMES, prompt_token_s=0.2, busy=0.3)
    kept.save(kinds.TIMES, worse, FACTS)
    assert kept.load(kinds.TIMES, FACTS) == BUSY
    kept.save(kinds.TIMES, better, FACTS)
    assert kept.load(kinds.TIMES, FACTS) == better
    kept.save(kinds.TIMES, replace(TIMES, prompt_token_s=0.1), FACTS)
    kept.save(kinds.TIMES, better, FACTS)
    assert kept.load(kinds.TIMES, FACTS) == replace(TIMES, prompt_token_s=0.1)
    assert kept.busy_share(FACTS) == 0.0
    kept.save(kinds.TIMES, TIMES, FACTS)
    assert kept.load(kinds.TIMES, FACTS) == TIMES
    assert "busy" not in stored_file(kept).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("quiet", "busy", "replaced"), [(250, 1018, True), (1018, 4080, False), (4080, 1018, False), (1018, 250, False)]
)
def test_times_of_too_short_contexts_are_replaced_also_by_those_of_a_busy_machine(
    kept: Measurements, quiet: int, busy: int, replaced: bool
) -> None:
    short, long = replace(TIMES, contexts=(96, quiet)), replace(BUSY, contexts=(96, busy))
    kept.save(kinds.TIMES, short, FACTS)
    kept.save(kinds.TIMES, long, FACTS)
    assert kept.load(kinds.TIMES, FACTS) == (long if replaced else short)


def test_forgetting_plain_times_keeps_everything_else(kept: Measurements) -> None:
    kept.save(kinds.TIMES, TIMES, FACTS)
    kept.save(kinds.PLAIN, 0.5, FACTS)
    kept.forget(kinds.PLAIN, FACTS)
    assert kept.load(kinds.PLAIN, FACTS) is None
    assert kept.load(kinds.TIMES, FACTS) == TIMES
    kept.forget(kinds.PLAIN, FACTS)
