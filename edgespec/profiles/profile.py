"""Profiles: named constraints and preferences, and the layers that lie over them.

Lowest first: the named profile with what it inherits, the user's ``config.toml``, the user's profile of that name,
the project's ``edgespec.toml``, ``EDGESPEC_*`` variables, options. A profile never holds a measurement.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from edgespec.errors import ProfileError
from edgespec.profiles.layers import Layer, from_environment, from_flags, from_table, read_toml, unknown_key

BASE = "default"
PROJECT_FILE = "edgespec.toml"
USER_FILE = "config.toml"
PROFILE_VARIABLE = "EDGESPEC_PROFILE"

Auto = Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Every value resolved. ``origins`` tells for each field (and ``name``) where its value came from."""

    name: str
    description: str
    target: str
    draft: str
    context: int
    depth: int | Auto
    depth_policy: Literal["cost", "fixed", "entropy", "confidence", "bandit"]
    mode: Literal["auto", "serial", "pipelined"]
    rule: Literal["keyed", "rejection"]
    exactness: Literal["stable", "near"]
    threads: int | Auto
    device: str
    draft_device: str
    runtime: str
    draft_runtime: str
    draft_isolation: Literal["auto", "process", "thread"]
    draft_head: Literal["auto", "whole"]
    draft_weights: Literal["auto", "file"]
    gpu_layers: int | Auto
    max_memory_fraction: float
    lookup: bool
    native_sidecar: bool
    origins: Mapping[str, str]

    def values(self) -> dict[str, str | int | float | bool]:
        """Field name to value, without ``origins``: what ``edgespec profiles show`` prints."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "origins"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """One line of ``edgespec profiles``. ``problem`` is the sentence that says why it cannot be used, if so."""

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

    Without it, ``EDGESPEC_PROFILE`` names the profile, then ``inherits`` in the project's or the user's
    ``[profile]`` table, then ``default`` applies. ``only_the_named`` leaves out the project's file and the user's
    ``config.toml``: an application that embeds edgespec means the profile it names. Raises ProfileError for anything
    that cannot be used.
    """
    project = None if only_the_named else _project_layer(cwd)
    user = None if only_the_named else _table_file_layer(user_dir / USER_FILE)
    name, chosen_by = _choose(name_or_path, environ, project, user)
    layers = _profile_layers(name, cwd, user_dir, user)
    layers += [project] if project else []
    layers += [from_environment(environ), from_flags(flags or {})]

    values: dict[str, str | int | float | bool] = {"name": Path(name).stem if _is_path(name) else name}
    origins = {"name": chosen_by}
    for layer in layers:
        values.update(layer.values)
        origins.update(layer.origins)
    # Every field is there because default.toml, at the bottom of every chain, sets them all; layers.py checked them.
    return Profile(**cast("dict[str, Any]", values), origins=MappingProxyType(origins))


def list_profiles(user_dir: Path) -> tuple[ProfileSummary, ...]:
    """Built-in profiles and the user's, by name; a file that cannot be used is listed with its problem."""
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


def _is_path(name: str) -> bool:
    """A path has a separator or a suffix; a name has neither, so a name can never leave the profiles folder."""
    return "/" in name or "\\" in name or name.endswith(".toml")


def _profile_layers(name: str, cwd: Path, user_dir: Path, user: Layer | None) -> list[Layer]:
    """The named profile's layers, lowest first, with the user's ``config.toml`` right above the last built-in one.

    The user's general settings thus override what edgespec ships, and a profile of the user's own overrides both.
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
    """What a profile lies on, and whether a file of the user's may stand for it."""
    if is_builtin:
        # On built-in ones only: what edgespec ships means the same whatever files the user has.
        return None if name == BASE else (layer.inherits or BASE, False)
    # A user's laptop.toml refines the built-in laptop, whether it says `inherits = "laptop"` or nothing.
    if name in _builtin_names() and layer.inherits in (None, name):
        return name, False
    return layer.inherits or BASE, True


def _find(name: str, may_be_users: bool, cwd: Path, user_dir: Path) -> tuple[Layer, bool]:
    if _is_path(name):
        path = Path(name)
        try:
            path = path.expanduser()
        except RuntimeError as error:
            raise ProfileError(f"profile {name}: there is no home directory to look in") from error
        path = path if path.is_absolute() else cwd / path
        if not path.is_file():
            raise ProfileError(
                f"there is no profile file {path}", hint="A name without a slash means a known profile."
            )
        return from_table(read_toml(path, str(path)), str(path), folder=path.parent), False
    if may_be_users and name in _user_names(user_dir):
        path = _user_path(user_dir, name)
        return from_table(read_toml(path, str(path)), str(path), folder=path.parent), False
    if name in _builtin_names():
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


@cache
def _builtin_layer(name: str) -> Layer:
    origin = f"built-in {name}.toml"
    content = resources.files("edgespec.profiles").joinpath(f"{name}.toml").read_bytes()
    return from_table(read_toml(Path(f"{name}.toml"), origin, content), origin, folder=None)


def _user_path(user_dir: Path, name: str) -> Path:
    return user_dir / "profiles" / f"{name}.toml"


def _user_names(user_dir: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.stem for path in (user_dir / "profiles").glob("*.toml") if path.is_file()))
    except OSError:
        return ()


def _project_layer(cwd: Path) -> Layer | None:
    """The ``[profile]`` table of the nearest ``edgespec.toml`` in ``cwd`` or above."""
    cwd = cwd.absolute()
    for folder in (cwd, *cwd.parents):
        layer = _table_file_layer(folder / PROJECT_FILE)
        if layer is not None:
            return layer
    return None


def _table_file_layer(path: Path) -> Layer | None:
    """A file that holds a ``[profile]`` table beside what else it may hold one day; None if there is no such file."""
    try:
        if not path.is_file():
            return None
    except OSError:  # a parent folder that may not be looked into has no say
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
