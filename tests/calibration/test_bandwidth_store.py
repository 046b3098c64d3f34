"""Stored bandwidth: found again on the same machine and power source only."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.measurement_store import load_bandwidth, save_bandwidth
from edgespec.hardware.bandwidth import BandwidthMeasurement, ThreadBandwidth
from edgespec.hardware.machine import Machine

MACHINE = Machine(
    system="Linux x86_64",
    processor="A processor",
    isa=("avx", "avx2"),
    physical_cores=4,
    logical_cores=8,
    total_memory_bytes=2**34,
    available_memory_bytes=2**33,
    power_source="mains",
)
MEASURED = BandwidthMeasurement(
    by_threads=(ThreadBandwidth(threads=4, best_bytes_per_s=0.1 + 0.2, median_bytes_per_s=0.3),), buffer_bytes=2**28
)


def stored_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_saved_bandwidth_is_loaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    assert load_bandwidth(folder, MACHINE) is None
    save_bandwidth(folder, MACHINE, MEASURED)
    assert load_bandwidth(folder, MACHINE) == MEASURED
    assert load_bandwidth(folder, replace(MACHINE, available_memory_bytes=1)) == MEASURED


def test_the_bandwidth_file_is_as_documented(tmp_path: Path) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    path = stored_file(tmp_path)
    assert path.name == f"machine-{MACHINE.fingerprint}.json"
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "schema_version": 1,
        "machine": MACHINE.fingerprint,
        "power_source": "mains",
        "bandwidth": MEASURED.as_json(),
    }


def test_a_later_bandwidth_replaces_the_earlier_one(tmp_path: Path) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    save_bandwidth(tmp_path, MACHINE, replace(MEASURED, buffer_bytes=2**27))
    found = load_bandwidth(tmp_path, MACHINE)
    assert found is not None
    assert found.buffer_bytes == 2**27


@pytest.mark.parametrize(
    "change", [{"power_source": "battery"}, {"power_source": None}, {"processor": "Another"}], ids=str
)
def test_bandwidth_is_stored_by_power_source_and_machine(tmp_path: Path, change: dict[str, Any]) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    assert load_bandwidth(tmp_path, replace(MACHINE, **change)) is None


def test_a_bandwidth_file_under_the_wrong_name_is_ignored(tmp_path: Path) -> None:
    other = replace(MACHINE, processor="Another")
    save_bandwidth(tmp_path, other, MEASURED)
    stored_file(tmp_path).rename(tmp_path / f"machine-{MACHINE.fingerprint}.json")
    assert load_bandwidth(tmp_path, MACHINE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 0},
        {"schema_version": 2},
        {"schema_version": None},
        {"bandwidth": None},
        {"bandwidth": {}},
        {"bandwidth": {**MEASURED.as_json(), "buffer_bytes": -1}},
    ],
    ids=str,
)
def test_a_bandwidth_file_with_a_wrong_value_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    path = stored_file(tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **change}), encoding="utf-8")
    assert load_bandwidth(tmp_path, MACHINE) is None


@pytest.mark.parametrize("missing", ["schema_version", "machine", "power_source", "bandwidth"])
def test_a_bandwidth_file_with_a_missing_key_is_ignored(tmp_path: Path, missing: str) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    path = stored_file(tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    del document[missing]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load_bandwidth(tmp_path, MACHINE) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"null", b"7", b"{", b"[" * 100_000, b'{"a": NaN}'])
def test_a_damaged_bandwidth_file_is_ignored(tmp_path: Path, data: bytes) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    stored_file(tmp_path).write_bytes(data)
    assert load_bandwidth(tmp_path, MACHINE) is None


def test_a_huge_bandwidth_file_is_not_read(tmp_path: Path) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    path = stored_file(tmp_path)
    path.write_bytes(path.read_bytes() + b" " * 2**20)
    assert load_bandwidth(tmp_path, MACHINE) is None


def test_a_folder_at_the_bandwidth_files_path_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / f"machine-{MACHINE.fingerprint}.json").mkdir()
    assert load_bandwidth(tmp_path, MACHINE) is None
    save_bandwidth(tmp_path, MACHINE, MEASURED)
    assert load_bandwidth(tmp_path, MACHINE) is None


def test_an_uncreatable_bandwidth_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_bandwidth(tmp_path / "file" / "measurements", MACHINE, MEASURED)
    assert load_bandwidth(tmp_path / "file" / "measurements", MACHINE) is None


def test_a_failed_bandwidth_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bandwidth(tmp_path, MACHINE, MEASURED)

    def fail(_descriptor: int) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "fsync", fail)
    save_bandwidth(tmp_path, MACHINE, replace(MEASURED, buffer_bytes=1))
    assert load_bandwidth(tmp_path, MACHINE) == MEASURED
    assert stored_file(tmp_path).is_file(), "no temporary file remains"
