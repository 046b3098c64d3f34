"""The chat templates of about seventy real models, and jinja as chat templates are otherwise rendered with it.

The templates are those that llama.cpp is tested with. They lie in the source package of llama-cpp-python.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.files.atomic import write_json
from edgespec.store.mirrors import pip_download

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
TEMPLATES = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models/templates/"


class IndexUnreachableError(Exception):
    """The package index cannot be reached; the message says why."""


def real_templates(folder: Path) -> dict[str, str]:
    """Each template's source by its name, fetched into one file in ``folder`` the first time."""
    kept = folder / f"chat-templates-{PACKAGE}-{VERSION}.json"
    if not kept.exists():
        with TemporaryDirectory(prefix="templates-", dir=folder) as work:
            write_json(kept, _read(_download(Path(work))))
    templates: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
    return templates


def _download(folder: Path) -> Path:
    # pip checks the hash before it runs anything of the package; what it then runs for the metadata compiles nothing.
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
        reason = pip_download._reason(log, pip.returncode)
        if reason in {sentence for _, sentence in pip_download._REASONS}:
            raise IndexUnreachableError(reason)
        raise AssertionError(f"pip could not deliver the source package of {PACKAGE}: {reason}\n{log[-2000:]}")
    (archive,) = folder.glob("*.tar.gz")
    with archive.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return archive


def _read(archive: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(archive) as members:
        for member in members:
            if member.name.startswith(TEMPLATES) and member.name.endswith(".jinja"):
                file = members.extractfile(member)
                assert file is not None
                found[member.name.removeprefix(TEMPLATES).removesuffix(".jinja")] = file.read().decode("utf-8")
    return found


class _Generation(Extension):
    """``{% generation %}``: what is inside, as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def reference(now: datetime) -> ImmutableSandboxedEnvironment:
    """Jinja set up as transformers does it, at the time ``now``."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment
