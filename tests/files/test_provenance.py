"""A file was made here if its code is the one by the home's secret."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import DiskSpaceError
from edgespec.files import provenance
from edgespec.files.home import Home
from edgespec.files.provenance import NO_MAC, mac_in, made_in

DIGEST, OTHER = b"d" * 32, b"e" * 32


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_only_the_home_and_the_content_that_a_code_was_made_for_are_recognised(home: Home, tmp_path: Path) -> None:
    assert not made_in(home, DIGEST, NO_MAC)
    assert not home.root.exists(), "asking creates nothing"
    mac = mac_in(home, DIGEST)
    assert made_in(home, DIGEST, mac)
    assert mac_in(home, DIGEST) == mac
    other = Home(tmp_path / "other")
    assert mac_in(other, DIGEST) != mac
    for wrong in ((home, OTHER, mac), (other, DIGEST, mac), (home, DIGEST, NO_MAC), (home, DIGEST, b"")):
        assert not made_in(*wrong)


def test_the_secret_is_private_and_made_once(home: Home) -> None:
    mac_in(home, DIGEST)
    secret = home.secret.read_bytes()
    assert len(secret) == 32
    assert os.name != "posix" or stat.S_IMODE(home.secret.stat().st_mode) == 0o600
    mac_in(home, OTHER)
    assert home.secret.read_bytes() == secret


def test_processes_that_begin_together_make_one_secret(home: Home) -> None:
    program = (
        "import sys; from pathlib import Path; from edgespec.files.home import Home\n"
        "from edgespec.files.provenance import mac_in\n"
        "sys.stdin.read(); print(mac_in(Home(Path(sys.argv[1])), b'd' * 32).hex())"
    )
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(home.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in begun:
        assert process.stdin is not None
        process.stdin.close()
    found = set()
    for process in begun:
        assert process.stdout is not None
        found.add(process.stdout.read().strip())
        process.stdout.close()
        assert process.wait() == 0
    assert found == {mac_in(home, DIGEST).hex()}


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33], ids=["empty", "short", "long"])
def test_a_damaged_secret_is_none_and_is_replaced(home: Home, content: bytes) -> None:
    mac = mac_in(home, DIGEST)
    home.secret.write_bytes(content)
    assert not made_in(home, DIGEST, mac)
    again = mac_in(home, DIGEST)
    assert again != mac
    assert made_in(home, DIGEST, again)


def test_a_home_that_can_keep_no_secret_makes_files_without_a_code(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.root.write_text("a file where the folder should be")
    assert mac_in(home, DIGEST) == NO_MAC
    home.root.unlink()

    def full(*_arguments: object, **_named: object) -> None:
        raise DiskSpaceError("full", needed_bytes=1, free_bytes=0)

    monkeypatch.setattr(provenance, "replacing", full)
    assert mac_in(home, DIGEST) == NO_MAC
    assert not home.secret.exists()


def test_a_secret_that_cannot_be_read_now_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    mac, secret = mac_in(home, DIGEST), home.secret.read_bytes()

    def fails(*_arguments: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(provenance, "read_bounded", fails)
        assert mac_in(home, DIGEST) == NO_MAC
        with pytest.raises(OSError, match="Input/output"):
            made_in(home, DIGEST, mac)
    assert home.secret.read_bytes() == secret
    assert made_in(home, DIGEST, mac)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_secret_is_not_waited_for(home: Home) -> None:
    home.create(home.root)
    os.mkfifo(home.secret)
    assert not made_in(home, DIGEST, NO_MAC)
    assert made_in(home, DIGEST, mac_in(home, DIGEST)), "it is replaced"
