"""What a profile may say: every key with its type and range, and how a layer of values is read.

A layer is one place that sets values: a built-in profile, a file of the user's, the environment, the options of a
command. Each is checked on its own, so that an error names the place where the value stands.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ProfileError

DESCRIPTION = "description"
INHERITS = "inherits"

# The table of keys that hardly any user sets. Profiles of 0.1.0 have them among the others, and are still read.
ADVANCED = "advanced"

# A profile is a page of text. The bound keeps a wrong path (a model file, say) from being read into memory.
MAX_FILE_BYTES = 1_000_000

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class _Key:
    """One key: ``fits`` tells a usable value, ``made`` is what becomes of it, ``read`` turns text (environment,
    options) into a typed value first.
    """

    allowed: str
    fits: Callable[[Any], bool]
    read: Callable[[str], object] = str
    made: Callable[[Any], Value] = lambda value: value


@dataclass(frozen=True, slots=True)
class Layer:
    """Checked values from one place, ``source``. ``origins`` says for each where it came from."""

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


def _choice(*choices: str) -> _Key:
    allowed = " or ".join(f'"{choice}"' for choice in choices)
    return _Key(allowed, lambda value: isinstance(value, str) and value in choices)


def _integer(low: int, high: int, *, auto: bool, what: str = "an integer") -> _Key:
    def fits(value: Any) -> bool:
        # TOML's true is Python's 1; `threads = true` is a mistake all the same.
        number = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return number or (auto and value == "auto")

    allowed = f"{what} from {low} to {high}"
    return _Key(f'"auto" or {allowed}' if auto else allowed, fits, _read_number)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1  # NaN fails it too


_FRACTION = _Key("a number above 0 and up to 1", _is_fraction, _read_number, float)
_BOOLEAN = _Key("true or false", lambda value: isinstance(value, bool), _read_bool)

KEYS: Mapping[str, _Key] = {
    "target": _text("a MODEL: a catalogue name, a path, or hf:ORG/REPO"),
    "draft": _text('a MODEL, "auto" or "none"'),
    # The lower bound leaves room for a template and one short question; the upper is beyond any model of today.
    "context": _integer(128, 1_048_576, auto=False, what="a number of tokens"),
    # Longer chains are hardly ever accepted whole, and every width up to the cap has to be probed for exactness.
    "depth": _integer(0, 16, auto=True),
    "mode": _choice("auto", "serial", "pipelined"),
    "depth_policy": _choice("cost", "fixed", "entropy", "confidence", "bandit"),
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
    """The file as a table. ``name`` is what messages call it; ``content`` spares reading it.

    Raises ProfileError if it cannot be read, is too large, or is not TOML; the message has the line.
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
    """Check a profile's own table. A relative model path in it is relative to ``folder``, the file's own.

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
    """The table with the keys of ``[advanced]`` among the others, over which they win."""
    advanced = table.get(ADVANCED, {})
    if not isinstance(advanced, dict):
        raise ProfileError(f"{origin}: {ADVANCED} must be a table, [{ADVANCED}], got {advanced!r}")
    for key in advanced:
        if key not in ADVANCED_KEYS:
            raise unknown_key(key, f"{origin}, [{ADVANCED}]", ADVANCED_KEYS)
    return {**{key: value for key, value in table.items() if key != ADVANCED}, **advanced}


def from_environment(environ: Mapping[str, str]) -> Layer:
    """``EDGESPEC_CONTEXT`` and its like, one per key. An empty variable counts as unset."""
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
    """Options of a command, by key: ``{"context": 2048}`` for ``--context 2048``. None counts as not given."""
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
    """The error for a key nobody knows, with the nearest one that exists."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(known)}."
    return ProfileError(f'{origin}: unknown key "{key}"', hint=hint)


def _checked(spec: _Key, value: object, where: str) -> Value:
    if not spec.fits(value):
        got = (
            f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
        )
        # A whole table pasted in by mistake should not fill the screen.
        got = got if len(got) <= 60 else f"{got[:57]}..."
        raise ProfileError(f"{where} must be {spec.allowed}, got {got}")
    return spec.made(value)


def _anchored(model: str, folder: Path) -> str:
    """A model given as a relative path, made absolute; names and hf: sources stay as they are."""
    has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", model)  # two letters at least: C: is a drive
    is_path = "/" in model or "\\" in model or model.lower().endswith(".gguf")
    if has_scheme or not is_path:
        return model
    path = Path(model)
    if model.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError:  # no home directory; whoever opens the file will say that it is not there
            return model
    return str(path if path.is_absolute() else (folder / path).absolute())
