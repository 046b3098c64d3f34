"""Control groups: both versions of their files, nested groups, and malformed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.hardware import machine as module
from edgespec.hardware.machine import MemoryLimit, memory_limits, processor_limit

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The groups' file system, empty, with this process in no group."""
    monkeypatch.setattr(module, "_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def member_of(mount: Path, text: str) -> None:
    (mount.parent / "membership").write_text(text, encoding="utf-8")


def put(folder: Path, **files: object) -> None:
    """``memory_max=1`` writes ``memory.max``: the first underscore becomes the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n", encoding="utf-8")


def test_without_control_groups_there_are_no_limits(mount: Path) -> None:
    assert memory_limits() == []
    assert processor_limit() is None


# -------------------------------------------------------------------------------------------------- version 2


def test_a_memory_limit_reports_the_limit_and_the_rest(mount: Path) -> None:
    put(mount, memory_max=4 * GIB, memory_current=GIB)
    assert memory_limits() == [MemoryLimit(4 * GIB, 3 * GIB)]


def test_a_group_set_to_max_has_no_limit(mount: Path) -> None:
    put(mount, memory_max="max", memory_current=GIB, cpu_max="max 100000")
    assert memory_limits() == []
    assert processor_limit() is None


@pytest.mark.parametrize(
    ("most", "high", "limit"), [(4 * GIB, 2 * GIB, 2 * GIB), ("max", GIB, GIB), (GIB, "max", GIB), (GIB, 0, 0)]
)
def test_the_size_at_which_a_group_is_slowed_down_is_a_limit(
    mount: Path, most: object, high: object, limit: int
) -> None:
    put(mount, memory_max=most, memory_high=high)
    assert memory_limits() == [MemoryLimit(limit, limit)]


WEIGHTS = 1_400_000_000


@pytest.mark.parametrize(("inactive", "active"), [(WEIGHTS, 0), (0, WEIGHTS), (WEIGHTS - 3, 3)])
def test_page_cache_counts_as_free_memory(mount: Path, inactive: int, active: int) -> None:
    """Weights that are mapped a second time go to the active list."""
    rest = f"anon 7\nfile 9\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    statistics = f"inactive_file {inactive}\nactive_file {active}\n{rest}"
    put(mount, memory_max=4 * GIB, memory_current=3 * GIB, memory_stat=statistics)
    assert memory_limits() == [MemoryLimit(4 * GIB, GIB + WEIGHTS)]


@pytest.mark.parametrize("used", [None, "", "x", 0])
def test_the_free_memory_never_exceeds_the_limit(mount: Path, used: object) -> None:
    put(mount, memory_max=2 * GIB, memory_stat=f"inactive_file {100 * GIB}")
    if used is not None:
        put(mount, memory_current=used)
    assert memory_limits() == [MemoryLimit(2 * GIB, 2 * GIB)]


def test_a_group_over_its_limit_has_no_free_memory(mount: Path) -> None:
    put(mount, memory_max=GIB, memory_current=3 * GIB)
    assert memory_limits() == [MemoryLimit(GIB, 0)]


@pytest.mark.parametrize("content", ["", "-1", "1e9", "²", "12 34", "0x10"])
def test_malformed_control_group_files_are_ignored(mount: Path, content: str) -> None:
    put(mount, memory_max=content, memory_stat="inactive_file\ninactive_file x")
    (mount / "memory.current").write_bytes(b"\xff")
    assert memory_limits() == []


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("", None),
        ("100000", None),
        ("x y", None),
        ("100000 0", None),
        ("100000 100000 7", None),
    ],
)
def test_a_processor_quota_is_rounded_down_to_whole_processors(mount: Path, text: str, cores: int | None) -> None:
    put(mount, cpu_max=text)
    assert processor_limit() == cores


def test_the_limits_of_parent_groups_apply_too(mount: Path) -> None:
    member_of(mount, "0::/user.slice/app.scope\n")
    put(mount / "user.slice", memory_max=4 * GIB, memory_current=GIB, cpu_max="300000 100000")
    put(mount / "user.slice" / "app.scope", memory_max=2 * GIB, memory_current=GIB, cpu_max="400000 100000")
    put(mount / "user.slice" / "other.scope", memory_max=1, memory_current=1, cpu_max="100000 100000")
    assert memory_limits() == [MemoryLimit(2 * GIB, GIB), MemoryLimit(4 * GIB, 3 * GIB)]
    assert processor_limit() == 3


def test_a_group_without_a_visible_folder_falls_back_to_the_root(mount: Path) -> None:
    put(mount, memory_max=GIB)
    for path in ("/docker/1234", "/../../elsewhere", "/"):
        member_of(mount, f"0::{path}\n")
        assert memory_limits() == [MemoryLimit(GIB, GIB)], path


def test_a_group_outside_the_view_is_not_followed(mount: Path) -> None:
    put(mount, memory_max=4 * GIB)
    put(mount.parent / "elsewhere", memory_max=GIB)
    member_of(mount, "0::/../elsewhere\n")
    assert memory_limits() == [MemoryLimit(4 * GIB, 4 * GIB)]


@pytest.mark.parametrize("text", ["", ":\n::\n", "no colon", "0:memory", "\0"])
def test_a_malformed_membership_falls_back_to_the_root(mount: Path, text: str) -> None:
    member_of(mount, text)
    put(mount, memory_max=GIB)
    assert MemoryLimit(GIB, GIB) in memory_limits()


# -------------------------------------------------------------------------------------------------- version 1


def test_version_1_memory_and_processor_limits(mount: Path) -> None:
    statistics = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}"
    put(mount / "memory", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=3 * GIB, memory_stat=statistics)
    put(mount / "cpu", cpu_cfs_quota_us=250000, cpu_cfs_period_us=100000)
    assert memory_limits() == [MemoryLimit(4 * GIB, 2 * GIB)]
    assert processor_limit() == 2


def test_version_1_without_limits(mount: Path) -> None:
    put(mount / "memory", memory_limit_in_bytes=UNLIMITED_V1, memory_usage_in_bytes=GIB)
    put(mount / "cpu", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    assert [limit.limit_bytes for limit in memory_limits()] == [UNLIMITED_V1], "far above any real memory"
    assert processor_limit() is None


def test_version_1_has_a_group_for_each_controller(mount: Path) -> None:
    member_of(mount, "5:cpu,cpuacct:/jobs\n4:memory:/service/one\n1:name=systemd:/nothing\n0::/\n")
    put(mount / "cpu" / "jobs", cpu_cfs_quota_us=100000, cpu_cfs_period_us=50000)
    put(mount / "memory" / "service" / "one", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
    put(mount / "memory", memory_limit_in_bytes=UNLIMITED_V1)
    assert memory_limits()[0] == MemoryLimit(2 * GIB, GIB)
    assert processor_limit() == 2
