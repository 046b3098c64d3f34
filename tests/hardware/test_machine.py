"""The machine: its memory under limits, and a fingerprint under which measurements are filed."""

from __future__ import annotations

import math
import mmap
import os
import platform
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import edgespec
from edgespec.errors import EdgespecError
from edgespec.hardware import machine as control_groups, machine as module
from edgespec.hardware.machine import (
    Conditions,
    Machine,
    allowed_processors,
    describe_conditions,
    describe_machine,
    memory_bytes,
    physical_cores,
    process_bytes,
    usable_processors,
)
from edgespec.hardware.neighbours import processor_seconds, worker_seconds

GIB = 2**30

MACHINE = Machine(
    system="Linux x86_64",
    processor="A processor",
    isa=("avx", "avx2"),
    physical_cores=4,
    logical_cores=8,
    total_memory_bytes=16 * GIB,
    available_memory_bytes=8 * GIB,
)


# ------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    "change",
    [
        {"system": "Linux aarch64"},
        {"processor": "Another"},
        {"isa": ("avx",)},
        {"physical_cores": 2},
        {"logical_cores": 4},
    ],
    ids=str,
)
def test_the_fingerprint_changes_with_processor_cores_and_system(change: dict[str, object]) -> None:
    assert replace(MACHINE, **change).fingerprint != MACHINE.fingerprint  # type: ignore[arg-type]


def test_the_fingerprint_ignores_memory_in_use() -> None:
    assert replace(MACHINE, available_memory_bytes=1, total_memory_bytes=2).fingerprint == MACHINE.fingerprint


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = "from edgespec.hardware.machine import describe_machine; print(describe_machine().fingerprint)"
    root = str(Path(edgespec.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == describe_machine().fingerprint
    assert len(done.stdout.strip()) == 16


# ----------------------------------------------------------------------------------------------- this machine


def test_this_machine_has_plausible_values() -> None:
    machine = describe_machine()
    assert 1 <= machine.physical_cores <= machine.logical_cores
    assert 0 < machine.available_memory_bytes <= machine.total_memory_bytes
    assert machine.processor
    assert len(machine.system.split()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages of mapped files are not available")
def test_pages_of_a_mapped_file_are_not_held(tmp_path: Path) -> None:
    size = 64 * 2**20
    (tmp_path / "weights").write_bytes(bytes(size))
    before = process_bytes()
    with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"x") == -1  # reads all pages
        assert process_bytes() - before < size // 2
    own = bytearray(b"x") * size
    assert process_bytes() - before > size // 2
    del own


@pytest.mark.skipif(sys.platform == "win32", reason="sessions are a matter of POSIX")
@pytest.mark.parametrize("apart", [False, True])
def test_memory_of_a_process_that_works_for_this_one_is_held_and_that_of_a_browser_is_not(apart: bool) -> None:
    size = 64 * 2**20
    before = process_bytes()
    script = f"own = bytearray(b'x') * {size}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=apart
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert (process_bytes() - before > size // 2) is not apart
        child.communicate(b"\n")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process to cores")
def test_a_sandbox_that_hides_processes_leaves_this_one_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_process: psutil.Process, **_: bool) -> list[psutil.Process]:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "children", refused)
    assert process_bytes() > 0


def test_only_cores_this_process_may_use_are_counted() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        machine = describe_machine()
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.logical_cores, machine.physical_cores) == (1, 1)


def described(folder: Path, siblings: dict[int, str]) -> Path:
    """Processors as Linux describes them, each with the processors of its core."""
    for number, text in siblings.items():
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n", encoding="ascii")
    return folder


PAIRS = {0: "0,8", 1: "1,9", 8: "0,8", 9: "1,9"}
IN_A_ROW = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
HYBRID = {0: "0-1", 1: "0-1", 2: "2", 3: "3"}  # one core with two threads, two with one


@pytest.mark.parametrize(
    ("siblings", "allowed", "cores"),
    [
        (PAIRS, {0, 8}, 1),
        (PAIRS, {0, 9}, 2),
        (PAIRS, {0, 1, 8, 9}, 2),
        (IN_A_ROW, {0, 1}, 1),
        (IN_A_ROW, {1, 2}, 2),
        (HYBRID, {0, 1, 2, 3}, 3),
        (HYBRID, {1, 2}, 2),
    ],
)
def test_hardware_threads_of_one_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], allowed: set[int], cores: int
) -> None:
    monkeypatch.setattr(module, "_PROCESSORS", described(tmp_path, siblings))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: allowed, raising=False)
    assert describe_machine().physical_cores == cores


@pytest.mark.parametrize(
    ("system", "allowed", "cores"),
    [
        ("linux", {0, 8}, 1),
        ("linux", {0, 1}, 2),
        ("linux", {3, 11, 4, 12}, 2),
        ("win32", {0, 1}, 1),
        ("win32", {1, 2}, 2),
    ],
)
def test_without_a_description_threads_of_one_core_are_found_by_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, allowed: set[int], cores: int
) -> None:
    monkeypatch.setattr(module, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(sys, "platform", system)
    assert physical_cores(frozenset(allowed)) == cores


def test_a_system_without_affinity_has_the_cores_of_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "Process", SimpleNamespace)  # as on macOS
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert allowed_processors() == frozenset()
    assert describe_machine().physical_cores == 8


def test_affinity_counts_on_systems_where_only_psutil_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_affinity=lambda: [4, 5]))
    assert usable_processors() == 2


def test_an_unknown_number_of_physical_cores_equals_the_logical_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    machine = describe_machine()
    assert machine.physical_cores == machine.logical_cores


def test_a_processor_quota_limits_the_cores(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    assert (describe_machine().logical_cores, describe_machine().physical_cores) == (8, 8)
    (group / "cpu.max").write_text("200000 100000\n", encoding="ascii")
    assert (describe_machine().logical_cores, describe_machine().physical_cores) == (2, 2)
    (group / "cpu.max").write_text("9900000 100000\n", encoding="ascii")
    assert describe_machine().logical_cores == 8


CPUINFO_X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: A Processor 9
flags\t\t: fpu avx sse4_2 avx2 made_up f16c fma

processor\t: 1
model name\t: Not this one
flags\t\t: avx512f
"""
CPUINFO_ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd0c\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux describes its processor in a file")
@pytest.mark.parametrize(
    ("text", "name", "isa"),
    [
        (CPUINFO_X86, "A Processor 9", ("sse4_2", "avx", "fma", "f16c", "avx2")),
        (CPUINFO_ARM, None, ("asimd", "asimddp", "i8mm")),
        ("", None, ()),
        ("garbage without a colon\n:::\n", None, ()),
    ],
    ids=["x86", "arm", "empty", "garbage"],
)
def test_name_and_instruction_sets_come_from_cpuinfo(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str | None, isa: tuple[str, ...]
) -> None:
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: text if str(self) == "/proc/cpuinfo" else read(self, **how)
    )
    machine = describe_machine()
    assert machine.isa == isa
    assert machine.processor == name if name else machine.processor


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux describes its processor in a file")
def test_without_cpuinfo_the_processor_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_how: str) -> str:
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    machine = describe_machine()
    assert machine.processor
    assert machine.isa == ()


class _Key:
    def __enter__(self) -> str:
        return "the key"

    def __exit__(self, *_exception: object) -> None:
        return None


@pytest.mark.parametrize(
    ("answer", "name"),
    [(" A Chip 4 Pro\n", "A Chip 4 Pro"), ("\n", "generic"), (FileNotFoundError(), "generic")],
    ids=["named", "empty", "missing"],
)
def test_macos_names_its_processor(monkeypatch: pytest.MonkeyPatch, answer: str | Exception, name: str) -> None:
    def run(command: tuple[str, ...], **_how: object) -> SimpleNamespace:
        assert command[-1] == "machdep.cpu.brand_string"
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "processor", lambda: "generic")
    monkeypatch.setattr(module.subprocess, "run", run)
    assert describe_machine().processor == name


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("sysctl", 2), subprocess.CalledProcessError(1, "sysctl")]
)
def test_a_failing_sysctl_on_macos_is_not_an_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_command: object, **_how: object) -> None:
        raise error

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "processor", lambda: "generic")
    monkeypatch.setattr(module.subprocess, "run", run)
    assert describe_machine().processor == "generic"


@pytest.mark.parametrize(("answer", "name"), [("A Chip 9 ", "A Chip 9"), ("", "generic"), (None, "generic")])
def test_windows_names_its_processor(monkeypatch: pytest.MonkeyPatch, answer: str | None, name: str) -> None:
    def query(_key: str, value: str) -> tuple[str, int]:
        assert value == "ProcessorNameString"
        if answer is None:
            raise OSError("no such value")
        return answer, 1

    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=0, OpenKey=lambda _root, path: _Key() if path.endswith("\\0") else None, QueryValueEx=query
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "processor", lambda: "generic")
    assert describe_machine().processor == name


# -------------------------------------------------------------------------------------------- power and sensors


@pytest.mark.parametrize(
    ("battery", "source"),
    [
        (None, None),
        (SimpleNamespace(power_plugged=None), None),
        (SimpleNamespace(power_plugged=True), "mains"),
        (SimpleNamespace(power_plugged=False), "battery"),
    ],
)
def test_the_power_source_comes_from_the_battery(
    monkeypatch: pytest.MonkeyPatch, battery: object, source: str | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert describe_machine().power_source == source


def test_the_power_source_does_not_change_the_fingerprint() -> None:
    assert MACHINE.power_source is None
    assert replace(MACHINE, power_source="battery").fingerprint == MACHINE.fingerprint


def sensors(**readings: list[float | None]) -> dict[str, list[SimpleNamespace]]:
    return {name: [SimpleNamespace(current=value) for value in values] for name, values in readings.items()}


@pytest.mark.parametrize(
    ("found", "hottest"),
    [
        ({}, None),
        (sensors(coretemp=[41.0, 63.5, 62.0], nvme=[80.0]), 63.5),
        (sensors(k10temp=[55.25]), 55.25),
        (sensors(cpu_thermal=[48]), 48.0),
        (sensors(acpitz=[27.8], iwlwifi=[50.0]), None),
        (sensors(coretemp=[0.0, -273.15, 65535.0, None, math.nan]), None),
    ],
    ids=["none", "intel", "amd", "board", "others", "broken"],
)
def test_the_temperature_is_that_of_the_processors_hottest_sensor(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, list[SimpleNamespace]], hottest: float | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    assert describe_conditions().temperature_c == hottest


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError, NotImplementedError, AttributeError])
def test_failing_sensors_give_unknown_values(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail() -> None:
        raise error("an odd file")

    monkeypatch.setattr(psutil, "sensors_battery", fail, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", fail, raising=False)
    assert describe_machine().power_source is None
    assert describe_conditions().temperature_c is None


def test_a_system_without_sensors_gives_unknown_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert describe_machine().power_source is None
    assert describe_conditions() == Conditions() == Conditions(temperature_c=None, load_average=None)


def test_the_load_is_the_average_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0), raising=False)
    assert describe_conditions().load_average == 1.5


# ------------------------------------------------------------------------------------------------ as a report


def test_a_machine_as_json() -> None:
    assert replace(MACHINE, power_source="mains").as_json() == {
        "system": "Linux x86_64",
        "processor": "A processor",
        "isa": ["avx", "avx2"],
        "physical_cores": 4,
        "logical_cores": 8,
        "total_memory_bytes": 16 * GIB,
        "available_memory_bytes": 8 * GIB,
        "power_source": "mains",
        "fingerprint": MACHINE.fingerprint,
    }
    assert MACHINE.as_json()["power_source"] is None


def test_machine_conditions_as_fields() -> None:
    conditions = Conditions(temperature_c=61.0, load_average=0.5)
    assert asdict(conditions) == {"temperature_c": 61.0, "load_average": 0.5}


# ----------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group's folder, on a machine with 16 GiB, 8 of them free."""
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=8 * GIB))
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, (16 * GIB, 8 * GIB)),
        ("max", GIB, (16 * GIB, 8 * GIB)),
        (32 * GIB, GIB, (16 * GIB, 8 * GIB)),  # a limit above the machine's memory has no effect
        (4 * GIB, GIB, (4 * GIB, 3 * GIB)),
        (12 * GIB, GIB, (12 * GIB, 8 * GIB)),  # the machine may have less than the group allows
        (2 * GIB, None, (2 * GIB, 2 * GIB)),
        (GIB, 3 * GIB, (GIB, 0)),
    ],
)
def test_a_control_group_limits_total_and_available_memory(
    group: Path, limit: object, used: object, expected: tuple[int, int]
) -> None:
    for name, content in (("max", limit), ("current", used)):
        if content is not None:
            (group / f"memory.{name}").write_text(f"{content}\n", encoding="ascii")
    assert memory_bytes() == expected


@pytest.mark.parametrize(
    "failure",
    [FileNotFoundError("/proc/meminfo"), IndexError(), ValueError(), KeyError("MemAvailable"), psutil.AccessDenied()],
    ids=repr,
)
def test_memory_and_cores_are_known_where_psutil_cannot_read_them(
    group: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    figures = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21, "SC_AVPHYS_PAGES": 2**20}
    monkeypatch.setattr(os, "sysconf", figures.__getitem__)
    monkeypatch.setattr(control_groups, "_PROCESSORS", group / "none")
    for name in ("virtual_memory", "cpu_count", "Process", "cpu_times"):
        monkeypatch.setattr(psutil, name, fail)
    assert memory_bytes() == (8 * GIB, 4 * GIB)
    (group / "memory.max").write_text(str(6 * GIB), encoding="ascii")
    assert memory_bytes() == (6 * GIB, 4 * GIB)
    assert physical_cores(frozenset({0, 1})) is None
    assert process_bytes() == worker_seconds() == 0
    assert processor_seconds() is None


@pytest.mark.parametrize(
    ("pages", "available", "expected"),
    [
        (2**21, 2**20, (8 * GIB, 4 * GIB)),
        (2**21, -1, (8 * GIB, 8 * GIB)),
        (2**21, None, (8 * GIB, 8 * GIB)),
        (-1, 2**20, None),
        (None, None, None),
    ],
)
def test_memory_that_the_system_does_not_tell_either_is_the_total_or_one_error(
    group: Path,
    monkeypatch: pytest.MonkeyPatch,
    pages: int | None,
    available: int | None,
    expected: tuple[int, int] | None,
) -> None:
    def sysconf(name: str) -> int:
        value = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages, "SC_AVPHYS_PAGES": available}[name]
        if value is None:
            raise ValueError("unrecognized configuration name")
        return value

    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.delattr(psutil, "virtual_memory")
    if expected is not None:
        assert memory_bytes() == expected
        monkeypatch.delattr(os, "sysconf")
    with pytest.raises(EdgespecError, match="how much memory"):
        memory_bytes()


def test_the_tightest_of_several_memory_limits_applies(group: Path) -> None:
    version_1 = group / "memory"
    version_1.mkdir()
    (version_1 / "memory.limit_in_bytes").write_text(str(4 * GIB), encoding="ascii")
    (version_1 / "memory.usage_in_bytes").write_text(str(3 * GIB), encoding="ascii")
    (group / "memory.max").write_text(str(6 * GIB), encoding="ascii")
    (group / "memory.current").write_text(str(4 * GIB), encoding="ascii")
    assert memory_bytes() == (4 * GIB, GIB)
