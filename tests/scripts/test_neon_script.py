"""`make test-neon`: what it asks for before it begins, and what it makes of what the two programs say."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")

TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64", "cc")
# A compiler that copies the script {says} of its folder instead of compiling.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && made="$2"
    shift
done
cp "$(dirname "$0")/{says}" "$made"
chmod +x "$made"
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of programs: those of the system that the script uses, and compilers and an emulator of ours."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "cp", "chmod", "dirname", "mkdir", "mktemp", "rm", "uname"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    write(folder / "aarch64-linux-gnu-gcc", COMPILER.format(says="emulated"))
    write(folder / "cc", COMPILER.format(says="native"))
    write(folder / "qemu-aarch64", '#!/bin/sh\n[ "$1" = -L ] && exec sh "$3"\n')
    for says in ("emulated", "native"):
        write(folder / says, f"#!/bin/sh\necho {says}: all the same\necho digest 1234\n")
    return folder


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(tools: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "scripts/test_neon.sh"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": str(tools), "PYTHON": sys.executable},
        check=False,
    )


@pytest.mark.parametrize("missing", TOOLS)
def test_without_its_tools_it_says_what_to_install(tools: Path, missing: str) -> None:
    (tools / missing).unlink()
    done = run(tools)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"test-neon: {missing} was not found; install ")
    assert len(done.stderr.splitlines()) == 1


ON_ARM = platform.machine() == "aarch64"


@pytest.mark.skipif(ON_ARM, reason="this machine is an ARM one, where the tests themselves compare")
def test_two_processors_of_one_mind_pass(tools: Path) -> None:
    done = run(tools)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "emulated: all the same",
        "digest 1234",
        "native: all the same",
        "digest 1234",
    ]


@pytest.mark.slow
@pytest.mark.skipif(ON_ARM, reason="this machine is an ARM one, where the tests themselves compare")
@pytest.mark.parametrize(
    ("program", "says", "ends", "complaint"),
    [
        ("native", "digest 4321", 0, "the two processors compute different bits"),
        ("emulated", "product differs", 1, "in the emulator: product differs"),
        ("native", "product differs", 1, "on this machine: product differs"),
        ("emulated", "no level but the portable one runs here", 2, "in the emulator: no level"),
    ],
)
def test_a_difference_fails(tools: Path, program: str, says: str, ends: int, complaint: str) -> None:
    write(tools / program, f"#!/bin/sh\necho {says}\nexit {ends}\n")
    done = run(tools)
    assert done.returncode == 1
    assert complaint in done.stderr
