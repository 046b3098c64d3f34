"""How this edgespec was installed, and the commands that add one of its extras, or a package, to it."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgespec.files.disk import shell_word

_SOURCES = Path(__file__).parents[2]


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
    """The command for an environment of `uv tool install`; None for others, and if its receipt has another form.

    What the command does not name is gone afterwards, so it names what is there.
    """
    try:
        receipt = (Path(sys.prefix) / "uv-receipt.toml").read_text("utf-8")
        requirements = tomllib.loads(receipt)["tool"]["requirements"]
        kept = [extra for each in requirements if each["name"] == "edgespec" for extra in each.get("extras", [])]
        others = [_with(**each) for each in requirements if each["name"] != "edgespec"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    further = dict.fromkeys([*others, *map(_with, packages)])
    return f"uv tool install --force {' '.join([*further, _edgespec(list(dict.fromkeys(kept + extras)))])}"


def _with(name: str, *, extras: Sequence[str] = (), **source: str) -> str:
    """The option that names a further package of a tool, from its line in the receipt.

    Raises ValueError for a form that uv 0.13 does not write, or that needs several options.
    """
    package = name + _suffix(extras)
    match list(source.items()):
        case []:
            pass
        case [("specifier", versions)]:
            package += versions
        case [("editable", folder)]:
            return f"--with-editable {shell_word(folder + _suffix(extras))}"
        case [("directory" | "path" | "url", place)]:
            package += f" @ {place}"
        case [("git", place)] if not {*"?&#"} & {*place.replace("?rev=", "@")}:
            package += f" @ git+{place.replace('?rev=', '@')}"
        case _:
            raise ValueError(f"the receipt has another form: {source}")
    return f"--with {shell_word(package)}"


def _installer() -> str:
    """What installs into this environment, whichever the shell would find."""
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen application is its own executable
        return "pip install"
    python = shell_word(sys.executable)
    if util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    if sys.platform == "win32" and python != sys.executable:  # PowerShell takes a quoted first word for a text
        return f"python -m pip --python {python} install"
    return f"{python} -m pip install"


def _suffix(extras: Sequence[str]) -> str:
    return f"[{','.join(extras)}]" if extras else ""


def _edgespec(extras: list[str]) -> str:
    """The arguments that name this edgespec with these extras."""
    suffix = _suffix(extras)
    if (_SOURCES / "pyproject.toml").is_file():  # a copy would not follow later changes of the clone
        return f"--editable {shell_word(f'{_SOURCES}{suffix}')}"
    return shell_word(_requirement(suffix))


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
