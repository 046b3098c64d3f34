"""What was measured of this machine itself, kept between runs in one file of the measurements folder."""

from __future__ import annotations

import json
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_json
from edgespec.hardware.bandwidth import BandwidthMeasurement
from edgespec.hardware.machine import Machine

SCHEMA_VERSION = 1

# A measurement of every thread count of a large server takes some tens of kilobytes.
_LARGEST_FILE_BYTES = 2**20


def load_bandwidth(folder: Path, machine: Machine) -> BandwidthMeasurement | None:
    """The bandwidth measured on this machine at its present power source, or None if there is none to trust."""
    try:
        path = _path(folder, machine)
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema_version"] != SCHEMA_VERSION or stored["machine"] != machine.fingerprint:
            return None
        if stored["power_source"] != machine.power_source:
            return None
        return BandwidthMeasurement.from_json(stored["bandwidth"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # missing, or damaged: measured again


def save_bandwidth(folder: Path, machine: Machine, measurement: BandwidthMeasurement) -> None:
    """Keep a measurement. A folder that cannot be written costs a new one next time, not an error now."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "machine": machine.fingerprint,
        "power_source": machine.power_source,
        "bandwidth": measurement.as_json(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(_path(folder, machine), document)
    except (OSError, EdgespecError):
        return


def _path(folder: Path, machine: Machine) -> Path:
    return folder / f"machine-{machine.fingerprint}.json"
