"""``edgespec doctor``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from edgespec import __version__
from edgespec.cli.opening import JsonOption
from edgespec.cli.output import note, print_json
from edgespec.errors import EdgespecError, RuntimeUnavailableError
from edgespec.files.locations import Home, home
from edgespec.files.store import Store
from edgespec.planning.machine import Machine, describe_machine
from edgespec.runtimes.llama_library import INSTALL_HINT

# Importing a broken native library can kill the process (an instruction this CPU lacks), so a child tries first.
_PROBE = "from edgespec.runtimes.llama_library import load; load()"
_PROBE_TIMEOUT_S = 60.0


def doctor(json: JsonOption = False) -> None:
    """What is here: machine, runtimes found or missing with the reason, devices, disk, caches."""
    machine, place, problems = describe_machine(), home(), list[str]()
    llama = _llama()
    if not llama["available"]:
        problems.append(f"no runtime works: {llama['reason']}")
    disk = _disk(place, problems)
    report: dict[str, Any] = {
        "edgespec": __version__,
        "python": sys.version.split()[0],
        "machine": _machine_json(machine),
        "runtimes": {"llama": llama},
        "disk": disk,
        "models": [stored.name for stored in Store(place).list()],
        "bandwidth": {"read_bytes_per_s": None},
        "problems": problems,
    }
    if json:
        print_json(report)
    else:
        _print(report, machine)
    if problems:
        raise typer.Exit(1)


def _machine_json(machine: Machine) -> dict[str, Any]:
    return {
        "system": machine.system,
        "processor": machine.processor,
        "isa": list(machine.isa),
        "physical_cores": machine.physical_cores,
        "logical_cores": machine.logical_cores,
        "total_memory_bytes": machine.total_memory_bytes,
        "available_memory_bytes": machine.available_memory_bytes,
        "fingerprint": machine.fingerprint,
    }


def _llama() -> dict[str, Any]:
    """Whether llama.cpp works here, tried in a child process first."""
    missing: dict[str, Any] = {
        "available": False,
        "version": None,
        "build": None,
        "devices": [],
        "hint": INSTALL_HINT,
    }
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**missing, "reason": f"the check could not be run: {error}"}
    if child.returncode < 0:
        return {**missing, "reason": f"its native code was killed by signal {-child.returncode} (wrong CPU build?)"}
    try:
        from edgespec.runtimes.llama_library import load

        library = load()
    except RuntimeUnavailableError as error:
        return {**missing, "reason": error.message, "hint": error.hint}
    return {
        "available": True,
        "version": library.version,
        "build": library.build,
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "free_bytes": device.free_bytes,
                "total_bytes": device.total_bytes,
            }
            for device in library.devices()
        ],
        "reason": None,
        "hint": None,
    }


def _disk(place: Home, problems: list[str]) -> dict[str, Any]:
    existing = next(folder for folder in (place.root, *place.root.parents) if folder.exists())
    writable = os.access(existing, os.W_OK)
    if not writable:
        problems.append(f"{place.root} cannot be written: set EDGESPEC_HOME to a folder you may write to")
    return {
        "home": str(place.root),
        "writable": writable,
        "free_bytes": shutil.disk_usage(existing).free,
        "models_bytes": _size(place.models),
        "hub_cache": _hub_cache(),
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0


def _hub_cache() -> str | None:
    try:
        from huggingface_hub import constants
    except (ImportError, EdgespecError):
        return None
    return str(constants.HF_HUB_CACHE)


def _print(report: dict[str, Any], machine: Machine) -> None:
    gib = 2**30
    llama, disk = report["runtimes"]["llama"], report["disk"]
    print(f"edgespec {report['edgespec']}, Python {report['python']}")
    print(f"machine    {machine.processor}, {machine.physical_cores} cores ({machine.logical_cores} logical)")
    print(f"           {', '.join(machine.isa) or 'instruction sets not known'}; {machine.system}")
    available, total = machine.available_memory_bytes / gib, machine.total_memory_bytes / gib
    print(f"memory     {available:.1f} of {total:.1f} GiB available")
    if llama["available"]:
        print(f"llama.cpp  works: llama-cpp-python {llama['version']} (build {llama['build']})")
        for device in llama["devices"]:
            print(f"  device   {device['name']}: {device['description']} ({device['kind']})")
    else:
        print(f"llama.cpp  missing: {llama['reason']}")
        print(f"           {llama['hint']}")
    print("bandwidth  not measured")
    print(f"home       {disk['home']} ({disk['free_bytes'] / 1e9:.1f} GB free)")
    print(f"models     {', '.join(report['models']) or 'none yet'} ({disk['models_bytes'] / 1e9:.2f} GB)")
    print(f"hub cache  {disk['hub_cache'] or 'huggingface_hub is not installed'}")
    for problem in report["problems"]:
        note(f"problem: {problem}")
