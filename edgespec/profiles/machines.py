"""Reads descriptions of machines: built-in ones from ``machines/``, or any file."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from pathlib import Path

from edgespec.errors import ProfileError
from edgespec.files.disk import expanded, is_file
from edgespec.profiles.layers import is_path, read_toml


@cache
def machine_names() -> tuple[str, ...]:
    """Names of the built-in descriptions of machines."""
    names = (entry.name for entry in resources.files("edgespec.profiles").joinpath("machines").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_machine(name_or_path: str, *, cwd: Path) -> tuple[str, str, dict[str, object]]:
    """Read a described machine: the file's name for messages, the machine's name, and the unchecked table.

    A path has a slash or ends in ``.toml``. Raises ProfileError if there is no such machine or the file is not TOML.
    """
    if is_path(name_or_path):
        path = cwd / expanded(name_or_path)
        if not is_file(path):
            raise ProfileError(f"there is no machine file {name_or_path}", hint=_known())
        return str(path), path.stem, read_toml(path, str(path))
    if name_or_path not in machine_names():
        near = difflib.get_close_matches(name_or_path, machine_names(), n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ProfileError(f'there is no described machine "{name_or_path}"', hint=meant + _known())
    origin = f"built-in machines/{name_or_path}.toml"
    content = resources.files("edgespec.profiles").joinpath("machines", f"{name_or_path}.toml").read_bytes()
    return origin, name_or_path, read_toml(Path(f"{name_or_path}.toml"), origin, content)


def _known() -> str:
    return f"Described machines: {', '.join(machine_names())}; or the path of a file."
