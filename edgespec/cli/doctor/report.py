"""What ``edgespec doctor`` looks at and prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from edgespec import __version__
from edgespec.architectures.table import ARCHITECTURES
from edgespec.calibration.measurement_store import load_bandwidth
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import State, note, print_json
from edgespec.errors import DownloadError, RuntimeUnavailableError
from edgespec.files.disk import is_folder, is_there
from edgespec.files.home import Home, home
from edgespec.hardware.machine import Conditions, Machine, describe_conditions, describe_machine
from edgespec.runtimes.llama.library import install_hint, load
from edgespec.runtimes.native import library as native_library
from edgespec.runtimes.native.tensors import TYPES
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.table import DeviceReport, list_devices
from edgespec.store.references import ONLINE
from edgespec.store.store import Store
from edgespec.store.web import hub_settings

# A broken native library can kill the process (an instruction that the CPU lacks), so a child process imports first.
_PROBES = {
    "llama": "from edgespec.runtimes.llama.library import load; load().devices()",
    "onnx": "from edgespec.runtimes.onnx.providers import list_devices; list_devices()",
}
_PROBE_TIMEOUT_S = 60.0
_GIB = 2**30


def run_doctor(state: State, *, json: bool) -> None:
    """Look at the machine and print the report. Raises typer.Exit(1) if it has problems."""
    machine, conditions, user_home, problems = describe_machine(), describe_conditions(), home(), list[str]()
    devices = list_devices(_broken(state.interrupts))
    llama = _runtime("llama", devices, load, hint=install_hint())
    native = _native()
    # ONNX Runtime is optional, so a missing one is not listed as a problem.
    onnx = _runtime("onnx", devices, onnx_providers.load, hint=onnx_providers.install_hint())
    onnx["broken_plugins"] = dict(onnx_providers.broken_plugins()) if onnx["available"] else {}
    if not llama["available"] and not native["available"]:
        problems.append(f"no runtime works: {native['reason']}; {llama['reason']}")
    disk = _disk(user_home, problems)
    measured = load_bandwidth(user_home.measurements, machine)  # measured on this machine and power source
    report: dict[str, Any] = {
        "edgespec": __version__,
        "python": sys.version.split()[0],
        "machine": machine.as_json(),
        "conditions": asdict(conditions),
        "runtimes": {"llama": llama, "onnx": onnx, "native": native},
        "disk": disk,
        "models": [stored.name for stored in Store(user_home).list()],
        "bandwidth": {"read_bytes_per_s": None} if measured is None else measured.as_json(),
        "problems": problems,
    }
    if json:
        print_json(report)
    else:
        _print(report, machine, conditions)
    if problems:
        raise typer.Exit(1)


def _broken(interrupts: Interrupts) -> dict[str, str]:
    """Runtimes that must not be loaded into this process because a child process crashed, with the reason."""
    reasons = {}
    for runtime, script in _PROBES.items():
        try:
            code = _exit_code(script, interrupts)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons[runtime] = f"the check could not run: {error}"
            continue
        if code < 0:
            reasons[runtime] = f"its native code was killed by signal {-code} (wrong CPU build?)"
        elif code > 1:  # 1 is a Python exception, which loading in this process raises again
            reasons[runtime] = f"its native code ended with code {code:#x} (wrong CPU build?)"
    return reasons


def _exit_code(script: str, interrupts: Interrupts) -> int:
    """That of a child process that runs ``script``. Raises KeyboardInterrupt, OSError, TimeoutExpired."""
    silent = subprocess.DEVNULL
    # With -P a file in the current folder is not imported in place of a module.
    child = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=silent, stderr=silent)
    with child, interrupts.during(child.kill):
        try:
            code = child.wait(_PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    interrupts.check()
    return code


def _runtime(name: str, devices: DeviceReport, load_library: Callable[[], Any], *, hint: str) -> dict[str, Any]:
    reason = devices.missing.get(name)
    library = load_library() if reason is None else None
    return {
        "available": reason is None,
        "version": None if library is None else library.version,
        "build": None if library is None else library.build,
        "devices": [device.as_json() for device in devices.of(name)],
        "reason": reason,
        "hint": None if reason is None else hint,
    }


def _native() -> dict[str, Any]:
    """The native runtime: edgespec's own kernels, which need a C compiler at installation."""
    try:
        library = native_library.load()
    except RuntimeUnavailableError as error:
        return {
            "available": False,
            "build": None,
            "levels": [],
            "left_out": {},
            "reason": error.message,
            "hint": error.hint,
        }
    return {
        "available": True,
        "build": library.build,
        "levels": list(library.levels),
        "left_out": dict(library.left_out),
        "reason": None,
        "hint": None,
    }


def _disk(user_home: Home, problems: list[str]) -> dict[str, Any]:
    existing = next(folder for folder in (user_home.root, *user_home.root.parents) if is_there(folder))
    writable = os.access(existing, os.W_OK)
    if not writable:
        problems.append(f"{user_home.root} cannot be written: set EDGESPEC_HOME to a folder you may write to")
    return {
        "home": str(user_home.root),
        "writable": writable,
        "free_bytes": shutil.disk_usage(existing).free,
        "models_bytes": _size(user_home.models),
        "hub_cache": _hub_cache(problems),
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if is_folder(folder) else 0


def _hub_cache(problems: list[str]) -> str | None:
    found = None
    try:
        found = str(ONLINE.hub_cache)
        hub_settings()
    except DownloadError as error:
        problems.append(f"{error}: {error.hint}")
    except ImportError as error:
        problems.append(f"huggingface_hub cannot be imported: {error}")
    return found


def _print(report: dict[str, Any], machine: Machine, conditions: Conditions) -> None:
    disk = report["disk"]
    print(f"edgespec {report['edgespec']}, Python {report['python']}")
    print(f"machine    {machine.processor}, {machine.physical_cores} cores ({machine.logical_cores} logical)")
    print(f"           {', '.join(machine.isa) or 'instruction sets not known'}; {machine.system}")
    available, total = machine.available_memory_bytes / _GIB, machine.total_memory_bytes / _GIB
    print(f"memory     {available:.1f} of {total:.1f} GiB available")
    print(f"power      {machine.power_source or 'not known'}; {_conditions_text(conditions)}")
    _print_runtimes(report["runtimes"])
    print(f"bandwidth  {_bandwidth_text(report['bandwidth'])}")
    print(f"home       {disk['home']} ({disk['free_bytes'] / 1e9:.1f} GB free)")
    print(f"models     {', '.join(report['models']) or 'none yet'} ({disk['models_bytes'] / 1e9:.2f} GB)")
    print(f"hub cache  {disk['hub_cache'] or 'not known'}")
    for problem in report["problems"]:
        note(f"problem: {problem}")


def _conditions_text(conditions: Conditions) -> str:
    temperature, load_average = conditions.temperature_c, conditions.load_average
    return (
        f"temperature {'not measured' if temperature is None else f'{temperature:.0f} °C'}, "
        f"load {'not measured' if load_average is None else f'{load_average:.1f}'}"
    )


def _print_runtimes(runtimes: dict[str, dict[str, Any]]) -> None:
    llama, onnx = runtimes["llama"], runtimes["onnx"]
    if llama["available"]:
        print(f"llama.cpp  works: llama-cpp-python {llama['version']} (build {llama['build']})")
        _print_devices(llama["devices"])
    else:
        print(f"llama.cpp  missing: {llama['reason']}; needed for GPUs and for files the native runtime cannot run")
        print(f"           {llama['hint']}")
    if onnx["available"]:
        print(f"onnx       works: onnxruntime {onnx['version']} (build {onnx['build']})")
        _print_devices(onnx["devices"])
        for plugin, reason in onnx["broken_plugins"].items():
            print(f"  plugin   {plugin} cannot be used: {reason}")
    else:
        print(f"onnx       missing: {onnx['reason']}; needed only for exported ONNX models")
        print(f"           {onnx['hint']}")
    native = runtimes["native"]
    if native["available"]:
        print(f"native     works: build {native['build']} ({native['levels'][-1]})")
        print(f"           runs {', '.join(ARCHITECTURES)}")
        print(f"           in {', '.join(TYPES)}")
        print("           IQ3 takes 4.4 bits a weight in memory, Q3_K 3.6")
        for level, reason in native["left_out"].items():
            print(f"  level    {level} is left out: {reason}")
    else:
        print(f"native     missing: {native['reason']}")
        print(f"           {native['hint']}")


def _print_devices(devices: list[dict[str, Any]]) -> None:
    for device in devices:
        free, total = device["free_bytes"], device["total_bytes"]
        # The machine's own memory is printed on a separate line.
        memory = ""
        if device["kind"] in ("gpu", "igpu") and device["memory"] == "cpu":
            memory = ", in the machine's memory"
        elif device["kind"] == "gpu" and free is not None and total is not None:
            memory = f", {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        print(f"  device   {device['name']}: {device['description']} ({device['kind']}{memory})")


def _bandwidth_text(bandwidth: dict[str, Any]) -> str:
    if bandwidth["read_bytes_per_s"] is None:
        return "not measured"
    by_threads = ", ".join(
        f"{measured['median_bytes_per_s'] / 1e9:.1f} with {measured['threads']}"
        for measured in bandwidth["by_threads"]
    )
    return f"{bandwidth['read_bytes_per_s'] / 1e9:.1f} GB/s read (by threads: {by_threads})"
