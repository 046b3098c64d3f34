"""llama.cpp's own test data: real chat templates and vocabularies, from llama-cpp-python's source package."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# pip's messages for an unreachable index, which does not fail a test.
_UNREACHABLE = re.compile(
    r"NameResolutionError|Name or service not known|name resolution|ProxyError|CERTIFICATE_VERIFY_FAILED|SSLError"
    r"|Connection refused|ConnectTimeoutError|ReadTimeoutError|timed out|Network is unreachable|No route to host"
    r"|\b401\b.*Unauthorized|\b403\b.*Forbidden"
)
MODELS = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models/"


class IndexUnreachableError(Exception):
    """The package index cannot be reached; the message has the reason."""


def read_models(folder: Path, *endings: str) -> dict[str, bytes]:
    """Files with these endings in llama.cpp's folder of models, fetched through ``folder``."""
    with TemporaryDirectory(prefix="source-", dir=folder) as work, tarfile.open(_download(Path(work))) as members:
        found = {}
        for member in members:
            if member.name.startswith(MODELS) and member.name.endswith(endings):
                file = members.extractfile(member)
                assert file is not None
                found[member.name.removeprefix(MODELS)] = file.read()
        return found


def _download(folder: Path) -> Path:
    # pip checks the hash before it runs the package's code; reading the metadata compiles nothing.
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", f"--no-binary={PACKAGE}"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["-d", str(folder), "-r", str(wanted)]
    pip = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, check=False
    )
    if pip.returncode != 0:
        log = pip.stdout.decode("utf-8", "replace")
        if unreachable := _UNREACHABLE.search(log):
            raise IndexUnreachableError(unreachable[0])
        raise AssertionError(f"pip could not deliver the source package of {PACKAGE}:\n{log[-2000:]}")
    (archive,) = folder.glob("*.tar.gz")
    with archive.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return archive
