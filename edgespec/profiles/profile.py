"""Profiles: named constraints and preferences, and the layers that override their values.

Later layers win: the named profile and its parents, the user's ``config.toml``, the user's profile of that name, the
project's ``edgespec.toml``, ``EDGESPEC_*`` variables, options. A profile never holds a measurement.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from edgespec.errors import ProfileError
from edgespec.files.disk import expanded, is_file, shell_word
from edgespec.profiles.layers import (
    DESCRIPTION,
    Layer,
    Value,
    Values,
    from_environment,
    from_flags,
    from_table,
    is_path,
    read_toml,
    unknown_key,
)

BASE = "default"
PROJECT_FILE = "edgespec.toml"
USER_FILE = "config.toml"
PROFILE_VARIABLE = "EDGESPEC_PROFILE"


# Profiles of 0.1.0 that are not listed any more, with what they change of the default.
_OLD: Mapping[str, Mapping[str, str | int | float]] = {
    "desktop": {"device": "cpu", "draft_device": "cpu"},
    "desktop-gpu": {},
    "laptop-battery": {"draft": "none", "context": 2048},
    "npu": {"context": 2048, "max_memory_fraction": 0.6},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Values):
    """A profile with every value resolved. ``origins`` has the source of each field's value.

    ``usual`` are the values of a command that has no options. ``ignored`` is a sentence about a project's file that
    was not read; None if there is none.
    """

    origins: Mapping[str, str]
    usual: Mapping[str, Value]
    ignored: str | None = None

    def values(self) -> dict[str, str | int | float | bool]:
        """Field name to value, without what is about them: what ``edgespec profiles show`` prints."""
        return {f.name: getattr(self, f.name) for f in fields(Values)}

    def command(self, name: str) -> str:
        """``edgespec NAME`` for these models, which are named where a command without options has others."""
        target = "" if self.target == self.usual["target"] else f" {shell_word(self.target)}"
        draft = "" if self.draft == self.usual["draft"] else f" --draft {shell_word(self.draft)}"
        return f"edgespec {name}{target}{draft}"

    @property
    def old(self) -> str | None:
        """What to use in place of a built-in profile that is not listed any more; None if it is listed."""
        if self.origins["description"] != f"built-in {self.name}.toml" or self.name not in _OLD:
            return None
        return f"the profile {self.name} is not listed any more; {self.description}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """One line of ``edgespec profiles``. ``problem`` says why the profile cannot be used; None if it can."""

    name: str
    description: str
    origin: str
    problem: str | None = None


def load_profile(
    name_or_path: str | None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    user_dir: Path,
    flags: Mapping[str, object] | None = None,
    only_the_named: bool = False,
) -> Profile:
    """Resolve all layers. ``name_or_path`` is the value of ``--profile``, if given.

    If None, the profile is named by ``EDGESPEC_PROFILE``, else by ``inherits`` in the ``[profile]`` table of the
    project, else of the user, else it is ``default``. ``only_the_named`` ignores the project's file and the user's
    ``config.toml``, for applications that embed edgespec. Raises ProfileError for a profile that cannot be used.
    """
    project, ignored = (None, None) if only_the_named else _project_layer(cwd)
    user = None if only_the_named else _table_file_layer(user_dir / USER_FILE)
    name, chosen_by = _choose(name_or_path, environ, project, user)
    layers = _profile_layers(name, cwd, user_dir, user)
    layers += [project] if project else []
    layers.append(from_environment(environ))
    # Without options a profile that was named by one does not count: of its layers the first is the default's.
    usual = layers if name_or_path is None else [layers[0], *filter(None, (user, project)), layers[-1]]
    without_options = {key: value for layer in usual for key, value in layer.values.items()}
    layers.append(from_flags(flags or {}, arguments=only_the_named))

    values: dict[str, str | int | float | bool] = {"name": Path(name).stem if is_path(name) else name}
    origins = {"name": chosen_by}
    for layer in layers:
        values.update(layer.values)
        origins.update(layer.origins)
    # Every chain starts with default.toml, which sets all fields. layers.py checked the values.
    kept = {"origins": MappingProxyType(origins), "usual": MappingProxyType(without_options), "ignored": ignored}
    return Profile(**cast("dict[str, Any]", values | kept))


def list_profiles(user_dir: Path) -> tuple[ProfileSummary, ...]:
    """Built-in and user's profiles, sorted by name. A file that cannot be used is listed with its problem."""
    summaries = {}
    for name in _builtin_names():
        layer = _builtin_layer(name)
        summaries[name] = ProfileSummary(
            name=name, description=str(layer.values.get("description", "")), origin=f"built-in {name}.toml"
        )
    for name in _user_names(user_dir):
        origin, description, problem = str(_user_path(user_dir, name)), "", None
        try:
            description = str(_last_value(_profile_layers(name, user_dir, user_dir, None), "description"))
        except ProfileError as error:
            problem = error.message
        summaries[name] = ProfileSummary(name=name, description=description, origin=origin, problem=problem)
    return tuple(summaries[name] for name in sorted(summaries))


# ---------------------------------------------------------------------------------- which profile it is


def _choose(
    name_or_path: str | None, environ: Mapping[str, str], project: Layer | None, user: Layer | None
) -> tuple[str, str]:
    if name_or_path is not None:
        return name_or_path, "--profile"
    if environ.get(PROFILE_VARIABLE, "").strip():
        return environ[PROFILE_VARIABLE].strip(), PROFILE_VARIABLE
    for layer in (project, user):
        if layer is not None and layer.inherits is not None:
            return layer.inherits, layer.source
    return BASE, "built-in"


def _profile_layers(name: str, cwd: Path, user_dir: Path, user: Layer | None) -> list[Layer]:
    """The named profile's layers, lowest first, with the user's ``config.toml`` right after the last built-in one.

    So the user's general settings override built-in profiles, and the user's profiles override both.
    """
    chain: list[tuple[bool, Layer]] = []
    visited: list[str] = []
    following: tuple[str, bool] | None = (name, True)
    while following is not None:
        current, may_be_users = following
        layer, is_builtin = _find(current, may_be_users, cwd, user_dir)
        label = f"{current} (built-in)" if is_builtin else current
        if label in visited:
            raise ProfileError(f"profile {name} inherits from itself: {' -> '.join([*visited, label])}")
        visited.append(label)
        chain.insert(0, (is_builtin, layer))
        following = _parent(current, layer, is_builtin)
    layers = [layer for _, layer in chain]
    if user is not None:
        builtin_count = max(i for i, (is_builtin, _) in enumerate(chain) if is_builtin) + 1
        layers.insert(builtin_count, user)
    return layers


def _parent(name: str, layer: Layer, is_builtin: bool) -> tuple[str, bool] | None:
    """The name of a profile's parent, and whether the parent may be a user's file."""
    if is_builtin:
        # Built-in profiles inherit only from built-in ones, so that user's files do not change them.
        return None if name == BASE else (layer.inherits or BASE, False)
    # A user's laptop.toml inherits from the built-in laptop, with `inherits = "laptop"` and without.
    if _is_builtin(name) and layer.inherits in (None, name):
        return name, False
    return layer.inherits or BASE, True


def _find(name: str, may_be_users: bool, cwd: Path, user_dir: Path) -> tuple[Layer, bool]:
    if is_path(name):
        try:
            path = (cwd / expanded(name)).absolute()
        except FileNotFoundError as error:
            hint = "change to another folder, or give the file's whole path"
            raise ProfileError("the current folder was removed", hint=hint) from error
        if not is_file(path):
            raise ProfileError(f"there is no profile file {path}", hint="Names without a slash are known profiles.")
        return from_table(read_toml(path, str(path)), str(path), folder=path.parent), False
    if may_be_users and name in _user_names(user_dir):
        path = _user_path(user_dir, name)
        return from_table(read_toml(path, str(path)), str(path), folder=path.parent), False
    if _is_builtin(name):
        return _builtin_layer(name), True
    known = sorted({*_builtin_names(), *_user_names(user_dir)})
    near = difflib.get_close_matches(name, known, n=2)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ProfileError(f'there is no profile "{name}"', hint=f"{meant}Known profiles: {', '.join(known)}.")


def _last_value(layers: Sequence[Layer], key: str) -> object:
    return next((layer.values[key] for layer in reversed(layers) if key in layer.values), "")


# ------------------------------------------------------------------------------------- where layers are


@cache
def _builtin_names() -> tuple[str, ...]:
    names = (entry.name for entry in resources.files("edgespec.profiles").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def _is_builtin(name: str) -> bool:
    return name in _builtin_names() or name in _OLD


@cache
def _builtin_layer(name: str) -> Layer:
    origin = f"built-in {name}.toml"
    if name in _OLD:
        values = _OLD[name]
        words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
        description = f"it stands for {words}" if words else "it stands for the default"
        return from_table({DESCRIPTION: description, **values}, origin, folder=None)
    content = resources.files("edgespec.profiles").joinpath(f"{name}.toml").read_bytes()
    return from_table(read_toml(Path(f"{name}.toml"), origin, content), origin, folder=None)


def _user_path(user_dir: Path, name: str) -> Path:
    return user_dir / "profiles" / f"{name}.toml"


def _user_names(user_dir: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.stem for path in (user_dir / "profiles").glob("*.toml") if path.is_file()))
    except OSError:
        return ()


def _project_layer(cwd: Path) -> tuple[Layer | None, str | None]:
    """The ``[profile]`` table of the nearest ``edgespec.toml`` from ``cwd`` upwards; what to say of one left out."""
    cwd, ignored = cwd.absolute(), None
    for folder in (cwd, *cwd.parents):
        path = folder / PROJECT_FILE
        if is_file(path) and not _is_trusted(path):
            ignored = ignored or f"{path} is another user's file and was not read; a copy that is yours is read"
        elif (layer := _table_file_layer(path)) is not None:
            return layer, ignored
    return None, ignored


def _is_trusted(path: Path) -> bool:
    """Whether the file is this user's or root's: anyone may write into some folders above, such as /tmp."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    try:
        return {path.lstat().st_uid, path.stat().st_uid} <= {0, os.geteuid()}
    except OSError:
        return False


def _table_file_layer(path: Path) -> Layer | None:
    """Read the ``[profile]`` table of a file; None if the file does not exist."""
    if not is_file(path):  # or in a folder that this user may not read
        return None
    content = read_toml(path, str(path))
    for key in content:
        if key != "profile":
            error = unknown_key(key, str(path), ["profile"])
            raise ProfileError(error.message, hint="Values of a profile go under a [profile] heading.")
    table = content.get("profile", {})
    if not isinstance(table, dict):
        raise ProfileError(f"{path}: profile must be a table, [profile], got {table!r}")
    return from_table(table, str(path), folder=path.parent)
