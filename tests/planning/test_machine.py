"""What is known of the machine: its memory under limits, and an identity that measurements can be filed under."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import edgespec
from edgespec.planning import machine as module
from edgespec.planning.machine import Machine, describe_machine, memory_bytes

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
def test_the_fingerprint_follows_what_measurements_depend_on(change: dict[str, object]) -> None:
    assert replace(MACHINE, **change).fingerprint != MACHINE.fingerprint  # type: ignore[arg-type]


def test_the_fingerprint_does_not_follow_memory_in_use() -> None:
    assert replace(MACHINE, available_memory_bytes=1, total_memory_bytes=2).fingerprint == MACHINE.fingerprint


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = "from edgespec.planning.machine import describe_machine; print(describe_machine().fingerprint)"
    root = str(Path(edgespec.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == describe_machine().fingerprint
    assert len(done.stdout.strip()) == 16


# ----------------------------------------------------------------------------------------------- this machine


def test_this_machine_makes_sense() -> None:
    machine = describe_machine()
    assert 1 <= machine.physical_cores <= machine.logical_cores
    assert 0 < machine.available_memory_bytes <= machine.total_memory_bytes
    assert machine.processor
    assert len(machine.system.split()) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process to cores")
def test_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        machine = describe_machine()
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.logical_cores, machine.physical_cores) == (1, 1)


def test_an_unknown_number_of_cores_is_the_logical_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    machine = describe_machine()
    assert machine.physical_cores == machine.logical_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", None),
        ("", None),
        ("100000", None),
        ("x y", None),
        ("100000 0", None),
    ],
)
def test_a_processor_quota_limits_the_cores(
    group: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    (group / "cpu.max").write_text(text + "\n", encoding="ascii")
    machine = describe_machine()
    assert (machine.logical_cores, machine.physical_cores) == ((8, 8) if cores is None else (cores, cores))


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
def test_name_and_instruction_sets(
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
def test_without_that_file_there_is_still_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_how: str) -> str:
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    machine = describe_machine()
    assert machine.processor
    assert machine.isa == ()


# ----------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group's folder, on a machine with 16 GiB of which 8 are free."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=8 * GIB))
    return tmp_path


def limits(group: Path, **files: object) -> None:
    for name, content in files.items():
        (group / f"memory.{name}").write_text(f"{content}\n", encoding="ascii")


def test_without_a_group_the_machine_counts(group: Path) -> None:
    assert memory_bytes() == (16 * GIB, 8 * GIB)


def test_no_limit_is_no_limit(group: Path) -> None:
    limits(group, max="max", current=GIB)
    assert memory_bytes() == (16 * GIB, 8 * GIB)


def test_a_limit_above_the_machine_is_no_limit(group: Path) -> None:
    limits(group, max=32 * GIB, current=GIB)
    assert memory_bytes() == (16 * GIB, 8 * GIB)


def test_a_limit_below_the_machine_counts(group: Path) -> None:
    limits(group, max=4 * GIB, current=GIB)
    assert memory_bytes() == (4 * GIB, 3 * GIB)


def test_page_cache_is_given_back_on_demand(group: Path) -> None:
    limits(group, max=4 * GIB, current=3 * GIB, stat=f"anon 7\nfile 9\ninactive_file {2 * GIB}\nactive_file 3")
    assert memory_bytes() == (4 * GIB, 3 * GIB)


def test_the_machine_may_have_less_than_the_group_allows(group: Path) -> None:
    limits(group, max=12 * GIB, current=GIB)
    assert memory_bytes() == (12 * GIB, 8 * GIB)


def test_an_unknown_use_never_promises_more_than_the_limit(group: Path) -> None:
    limits(group, max=2 * GIB)
    assert memory_bytes() == (2 * GIB, 2 * GIB)


def test_odd_statistics_never_promise_more_than_the_limit(group: Path) -> None:
    limits(group, max=2 * GIB, current=0, stat=f"inactive_file {100 * GIB}")
    assert memory_bytes() == (2 * GIB, 2 * GIB)


def test_a_group_over_its_limit_has_nothing_left(group: Path) -> None:
    limits(group, max=GIB, current=3 * GIB)
    assert memory_bytes() == (GIB, 0)


@pytest.mark.parametrize("content", ["", "-1", "1e9", "²", "12 34", "0x10"])
def test_garbage_in_a_group_is_ignored(group: Path, content: str) -> None:
    (group / "memory.max").write_text(content, encoding="utf-8")
    (group / "memory.current").write_bytes(b"\xff")
    (group / "memory.stat").write_text("inactive_file\ninactive_file x\n", encoding="ascii")
    assert memory_bytes() == (16 * GIB, 8 * GIB)
