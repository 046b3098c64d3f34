"""How this edgespec was installed, and the command that adds one of its extras to it."""

from __future__ import annotations

import json
import shlex
import sys
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
    wanted = _requirement(extra)
    # Every shell takes double quotes, and cmd.exe no others.
    what = shlex.quote(wanted) if sys.platform != "win32" and _READ_BY_SHELLS & set(wanted) else f'"{wanted}"'
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():  # `uv tool install` made this environment
        return f"uv tool install --force {what}"
    return f"pip install {what}" if util.find_spec("pip") is not None else f"uv pip install {what}"


def _requirement(extra: str) -> str:
    if (_SOURCES / "pyproject.toml").is_file():
        return f"{_SOURCES}[{extra}]"
    try:
        address = str(json.loads(metadata.distribution("edgespec").read_text("direct_url.json") or "")["url"])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):  # it came from an index
        return f"edgespec[{extra}]"
    parts = urlsplit(address)
    if parts.scheme != "file":
        return f"edgespec[{extra}] @ {address}"
    path = unquote(parts.path)
    return f"{path[1:] if path[2:3] == ':' else path}[{extra}]"  # /C:/folder on Windows
