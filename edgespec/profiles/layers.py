"""The keys of profiles with their types and ranges, and the reading of one layer of values.

A layer is one source of values: a built-in profile, a user's file, the environment, or the options of a command. Each
layer is checked separately, so that an error names the source of the value.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.errors import ProfileError

DESCRIPTION = "description"
INHERITS = "inherits"

# The table of rarely used keys. Profiles of 0.1.0 have these keys at the top level, where they are still read.
ADVANCED = "advanced"

# Earlier names of depth policies: profiles, options and benchmark arms may still use them.
OLD_POLICY_NAMES = {"bandit": "cost"}

# A profile is a page of text. The bound prevents reading a wrong file, such as a model, into memory.
MAX_FILE_BYTES = 1_000_000

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class _Key:
    """One key: ``read`` parses text (environment, options), ``fits`` checks the value, ``made`` converts it.
    ``allowed`` describes the values in messages.
    """

    allowed: str
    fits: Callable[[Any], bool]
    read: Callable[[str], object] = str
    made: Callable[[Any], Value] = lambda value: value


@dataclass(frozen=True, slots=True)
class Layer:
    """Checked values from one ``source``. ``origins`` has the origin of each value, for messages."""

    source: str
    values: Mapping[str, Value]
    origins: Mapping[str, str]
    inherits: str | None = None


# --------------------------------------------------------------------------------------------- the keys


def _read_number(text: str) -> object:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _read_bool(text: str) -> object:
    return {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }.get(text.lower(), text)


def _text(allowed: str) -> _Key:
    return _Key(allowed, lambda value: isinstance(value, str) and bool(value.strip()), made=str.strip)


def _choice(*choices: str, old: Mapping[str, str] = MappingProxyType({})) -> _Key:
    """One of ``choices``, or an earlier name of one: ``old`` maps it to the name of today."""
    allowed = " or ".join(f'"{choice}"' for choice in choices)
    return _Key(
        allowed,
        lambda value: isinstance(value, str) and (value in choices or value in old),
        made=lambda value: old.get(value, value),
    )


def _integer(low: int, high: int, *, auto: bool, what: str = "an integer") -> _Key:
    def fits(value: Any) -> bool:
        # True is an integer in Python, but `threads = true` is a mistake.
        number = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return number or (auto and value == "auto")

    allowed = f"{what} from {low} to {high}"
    return _Key(f'"auto" or {allowed}' if auto else allowed, fits, _read_number)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1  # False for NaN


_FRACTION = _Key("a number above 0 and up to 1", _is_fraction, _read_number, float)
_BOOLEAN = _Key("true or false", lambda value: isinstance(value, bool), _read_bool)
_BOOLEAN_OR_AUTO = _Key('"auto", true or false', lambda value: isinstance(value, bool) or value == "auto", _read_bool)

KEYS: Mapping[str, _Key] = {
    "target": _text("a MODEL: a catalogue name, a path, or hf:ORG/REPO"),
    "draft": _text('a MODEL, "auto" or "none"'),
    # The lower bound holds a chat template and a short question; the upper exceeds every model of 2026.
    "context": _integer(128, 1_048_576, auto=False, what="a number of tokens"),
    # Longer chains are hardly ever accepted whole, and every width up to the maximum must be probed for exactness.
    "depth": _integer(0, 16, auto=True),
    "mode": _choice("auto", "serial", "pipelined"),
    "depth_policy": _choice("cost", "fixed", "entropy", "confidence", old=OLD_POLICY_NAMES),
    "rule": _choice("keyed", "rejection"),
    "exactness": _choice("stable", "near"),
    "threads": _integer(1, 1024, auto=True),
    "device": _text('"auto" or a device name such as "cpu" or "Vulkan0"'),
    "draft_device": _text('"auto" or a device name such as "cpu" or "Vulkan0"'),
    "runtime": _choice("auto", "llama", "native"),
    "draft_runtime": _choice("auto", "llama", "native"),
    "draft_isolation": _choice("auto", "process", "thread"),
    "draft_head": _choice("auto", "whole"),
    "draft_weights": _choice("auto", "file"),
    "gpu_layers": _integer(0, 10_000, auto=True),
    "max_memory_fraction": _FRACTION,
    "lookup": _BOOLEAN,
    "learned": _BOOLEAN_OR_AUTO,
    "history": _BOOLEAN_OR_AUTO,
    "native_sidecar": _BOOLEAN,
}
_MODEL_KEYS = ("target", "draft")
ADVANCED_KEYS = (
    "depth_policy",
    "rule",
    "draft_runtime",
    "draft_isolation",
    "draft_head",
    "draft_weights",
    "native_sidecar",
)


# ------------------------------------------------------------------------------------------ the layers


def read_toml(path: Path, name: str, content: bytes | None = None) -> dict[str, object]:
    """Parse a TOML file. Messages call it ``name``. ``content``: the file's bytes, if already read.

    Raises ProfileError if the file cannot be read, is too large, or is not TOML; the message has the line.
    """
    if content is None:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ProfileError(f"{name} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ProfileError(f"{name} is larger than {MAX_FILE_BYTES // 1_000_000} MB, so it is not a profile")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ProfileError(f"{name}, line {line}: not UTF-8 text") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line = _split_toml_error(str(error), text)
        raise ProfileError(f"{name}, line {line}: not valid TOML: {reason}") from error
    except RecursionError as error:
        raise ProfileError(f"{name} nests its values too deeply to be a profile") from error


def _split_toml_error(message: str, text: str) -> tuple[str, int]:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if found is None:
        return message, 1
    at_line = int(found[1]) if found[1] else max(1, len(text.splitlines()))
    return message[: found.start()], at_line


def from_table(table: Mapping[str, object], origin: str, *, folder: Path | None) -> Layer:
    """Check the table of one profile. Relative model paths are relative to ``folder``, the file's folder.

    Raises ProfileError for an unknown key, a wrong type or a value out of range.
    """
    values: dict[str, Value] = {}
    inherits = None
    for key, value in _flat(table, origin).items():
        if key == INHERITS:
            inherits = str(_checked(_text("the name of a profile"), value, f"{origin}: {key}"))
        elif key == DESCRIPTION:
            values[key] = _checked(_text("a text"), value, f"{origin}: {key}")
        elif key in KEYS:
            values[key] = _checked(KEYS[key], value, f"{origin}: {key}")
            if key in _MODEL_KEYS and folder is not None:
                values[key] = _anchored(str(values[key]), folder)
        else:
            raise unknown_key(key, origin, [*KEYS, DESCRIPTION, INHERITS, ADVANCED])
    return Layer(origin, values, dict.fromkeys(values, origin), inherits)


def _flat(table: Mapping[str, object], origin: str) -> Mapping[str, object]:
    """The table with the keys of ``[advanced]`` moved to the top level, where they replace equal keys."""
    advanced = table.get(ADVANCED, {})
    if not isinstance(advanced, dict):
        raise ProfileError(f"{origin}: {ADVANCED} must be a table, [{ADVANCED}], got {advanced!r}")
    for key in advanced:
        if key not in ADVANCED_KEYS:
            raise unknown_key(key, f"{origin}, [{ADVANCED}]", ADVANCED_KEYS)
    return {**{key: value for key, value in table.items() if key != ADVANCED}, **advanced}


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Read one variable per key, such as ``EDGESPEC_CONTEXT``. An empty variable counts as unset."""
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for key, spec in KEYS.items():
        variable = f"EDGESPEC_{key.upper()}"
        text = environ.get(variable, "").strip()
        if text:
            values[key] = _checked(spec, spec.read(text), variable)
            origins[key] = variable
    return Layer("the environment", values, origins)


def from_flags(flags: Mapping[str, object]) -> Layer:
    """Read the options of a command by key: ``{"context": 2048}`` for ``--context 2048``. None: not given."""
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for key, value in flags.items():
        if key not in KEYS:
            raise unknown_key(key, "the options", [*KEYS])
        if value is None:
            continue
        option = f"--{key.replace('_', '-')}"
        values[key] = _checked(KEYS[key], KEYS[key].read(value) if isinstance(value, str) else value, option)
        origins[key] = option
    return Layer("the options", values, origins)


def unknown_key(key: str, origin: str, known: Iterable[str]) -> ProfileError:
    """The error for an unknown key, with the nearest known key as a hint."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(known)}."
    return ProfileError(f'{origin}: unknown key "{key}"', hint=hint)


def _checked(spec: _Key, value: object, where: str) -> Value:
    if not spec.fits(value):
        got = (
            f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
        )
        # A long value, such as a whole table, is cut in the message.
        got = got if len(got) <= 60 else f"{got[:57]}..."
        raise ProfileError(f"{where} must be {spec.allowed}, got {got}")
    return spec.made(value)


def _anchored(model: str, folder: Path) -> str:
    """Make a relative model path absolute. Names and hf: references stay unchanged."""
    has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", model)  # two letters at least: C: is a drive
    is_path = "/" in model or "\\" in model or model.lower().endswith(".gguf")
    if has_scheme or not is_path:
        return model
    path = Path(model)
    if model.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:  # no home directory: opening the file will report that it does not exist
            return model
    return str(path if path.is_absolute() else (folder / path).absolute())
