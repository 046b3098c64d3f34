"""How this edgespec was installed, and the commands that add one of its extras, or a package, to it."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SOURCES = Path(__file__).parents[2]

# Characters that a shell reads within double quotes.
_READ_BY_SHELLS = frozenset('"$`\\!')


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, quoted for POSIX shells, PowerShell and cmd.exe.

    It names the clone, wheel or address that edgespec was installed from: an index may hold another package of the
    name.
    """
    return _tool_command([extra], []) or f"{_installer()} {_edgespec([extra])}"


def package_command(package: str) -> str:
    """The command that adds a package that is in no extra."""
    return _tool_command([], [package]) or f"{_installer()} {package}"


def _tool_command(extras: list[str], packages: list[str]) -> str | None:
    """The command for an environment of `uv tool install`; None for others.

    What the command does not name is gone afterwards, so it names what is there.
    """
    receipt = Path(sys.prefix) / "uv-receipt.toml"
    if not receipt.is_file():
        return None
    kept, others = _kept(receipt)
    further = [f"--with {_word(each)} " for each in dict.fromkeys(others + packages)]
    return f"uv tool install --force {''.join(further)}{_edgespec(list(dict.fromkeys(kept + extras)))}"


def _kept(receipt: Path) -> tuple[list[str], list[str]]:
    """The extras of a tool of uv, and the other packages in its environment; none if uv wrote it in another form."""
    try:
        requirements = tomllib.loads(receipt.read_text("utf-8"))["tool"]["requirements"]
        extras = [extra for each in requirements if each["name"] == "edgespec" for extra in each.get("extras", [])]
        others = [each["name"] + each.get("specifier", "") for each in requirements if each["name"] != "edgespec"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return [], []
    return extras, others


def _installer() -> str:
    """What installs into this environment, whichever the shell would find."""
    python = _word(sys.executable)
    return f"{python} -m pip install" if util.find_spec("pip") is not None else f"uv pip install --python {python}"


def _edgespec(extras: list[str]) -> str:
    """The arguments that name this edgespec with these extras."""
    suffix = f"[{','.join(extras)}]" if extras else ""
    if (_SOURCES / "pyproject.toml").is_file():  # a copy would not follow later changes of the clone
        return f"--editable {_word(f'{_SOURCES}{suffix}')}"
    return _word(_requirement(suffix))


def _requirement(suffix: str) -> str:
    try:
        address = str(json.loads(metadata.distribution("edgespec").read_text("direct_url.json") or "")["url"])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):  # it came from an index
        return f"edgespec{suffix}"
    parts = urlsplit(address)
    if parts.scheme != "file":
        return f"edgespec{suffix} @ {address}"
    path = unquote(parts.path)
    return f"{path[1:] if path[2:3] == ':' else path}{suffix}"  # /C:/folder on Windows


def _word(text: str) -> str:
    """The text as one word of a command. Every shell takes double quotes, and cmd.exe no others."""
    windows = sys.platform == "win32"
    plain = text.replace("\\", "/") if windows else text
    if shlex.quote(plain) == plain:
        return text
    return shlex.quote(text) if not windows and _READ_BY_SHELLS & set(text) else f'"{text}"'
