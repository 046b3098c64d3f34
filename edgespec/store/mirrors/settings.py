"""The package indexes that pip is configured with: by environment variables and pip's configuration files.

Pip need not be installed. `uv` does not use pip's configuration; uv's variables are read where pip has no setting.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.disk import expanded
from edgespec.store.web import certificates

DEFAULT_INDEX = "https://pypi.org/simple"

# The sections for `pip download`; the command's own section overrides [global].
_SECTIONS = ("global", "download")
_UV_INDEX, _UV_MORE = ("UV_DEFAULT_INDEX", "UV_INDEX_URL"), ("UV_INDEX", "UV_EXTRA_INDEX_URL")
_TRUE = frozenset({"1", "y", "yes", "t", "true", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """``indexes``: simple package indexes, asked in order. ``links``: folders, pages or wheels to try first.

    Each is a URL or a path. ``certificates``: a file or folder to trust instead of the system's. ``proxy``: None if
    HTTPS_PROXY and similar variables decide.
    """

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    links: tuple[str, ...] = ()
    certificates: Path | None = None
    proxy: str | None = None


def read_settings(environ: Mapping[str, str] = os.environ, user: Path | None = None) -> IndexSettings:
    """The settings of ``user`` (None: the current user). Raises DownloadError if a file cannot be read."""
    found: dict[str, str] = {}
    for path in _files(environ, user or expanded("~")):
        found.update(_read(path))
    # pip reads every option from a variable; an empty variable counts as unset.
    found.update({_key(name[4:]): value for name, value in environ.items() if name.startswith("PIP_") and value})
    main = found.get("index-url") or _first(environ, _UV_INDEX) or DEFAULT_INDEX
    more = (found.get("extra-index-url") or _first(environ, _UV_MORE) or "").split()
    alone = found.get("no-index", "").lower() in _TRUE
    named = found.get("cert")
    return IndexSettings(
        indexes=() if alone else (main, *more),
        links=tuple(found.get("find-links", "").split()),
        certificates=certificates({**environ, "PIP_CERT": named}, ("PIP_CERT",)) if named else certificates(environ),
        proxy=found.get("proxy"),
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _key(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def _files(environ: Mapping[str, str], user: Path) -> Iterator[Path]:
    """Pip's configuration files, lowest precedence first (pip's documentation, "Configuration")."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    if sys.platform == "win32":
        yield Path(environ.get("PROGRAMDATA") or "C:/ProgramData") / "pip" / name
        yield user / "pip" / name
        yield Path(environ.get("APPDATA") or user / "AppData" / "Roaming") / "pip" / name
    else:
        if sys.platform == "darwin":
            yield Path("/Library/Application Support/pip") / name
        for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
            yield Path(folder) / "pip" / name
        yield Path("/etc") / name
        yield user / ".pip" / name
        own = user / "Library" / "Application Support" / "pip"
        if sys.platform != "darwin" or not own.is_dir():
            own = Path(environ.get("XDG_CONFIG_HOME") or user / ".config") / "pip"
        yield own / name
    yield Path(sys.prefix) / name
    if named:
        yield Path(named)


def _read(path: Path) -> dict[str, str]:
    """The options in one file; none if the file does not exist."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        said = str(error).splitlines()[0]
        raise DownloadError(
            f"pip's configuration {path} cannot be read: {said}", hint="correct it, or set PIP_CONFIG_FILE"
        ) from error
    found: dict[str, str] = {}
    for section in _SECTIONS:
        if parser.has_section(section):
            found.update({_key(name): value for name, value in parser.items(section) if value})
    return found
