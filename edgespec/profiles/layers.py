"""The keys of profiles with their types and ranges, and the reading of one layer of values.

A layer is one source of values: a built-in profile, a user's file, the environment, or the options of a command. Each
layer is checked separately, so that an error names the source of the value.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypedDict, get_args

from edgespec.errors import ProfileError, reason_of
from edgespec.files.checked import Check, From, Kind, Range, WrongValueError, fields_of, kind_of, unknown_name
from edgespec.files.disk import expanded, in_utf_8, is_folder

DESCRIPTION = "description"
INHERITS = "inherits"

# The table of rarely used keys. Profiles of 0.1.0 have some of them at the top level, where all are still read.
ADVANCED = "advanced"

# Earlier names of depth policies: profiles, options and benchmark arms may still use them.
OLD_POLICY_NAMES = {"bandit": "cost"}

# A profile is a page of text. The bound prevents reading a wrong file, such as a model, into memory.
MAX_FILE_BYTES = 1_000_000

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Layer:
    """Checked values from one ``source``. ``origins`` has the origin of each value, for messages."""

    source: str
    values: Mapping[str, Value]
    origins: Mapping[str, str]
    inherits: str | None = None


# --------------------------------------------------------------------------------------------- the keys

Auto: TypeAlias = Literal["auto"]


_PolicyName: TypeAlias = Literal["cost", "fixed", "entropy", "confidence"]
_Policy: TypeAlias = Annotated[
    _PolicyName,
    From(str, lambda name: OLD_POLICY_NAMES.get(name, name)),
    Check(get_args(_PolicyName).__contains__, kind_of(_PolicyName).wanted),
]
# str.strip is empty, and so refuses, for a text of spaces.
_Device: TypeAlias = Annotated[str, Check(str.strip, '"auto" or a device name such as "cpu" or "Vulkan0"')]
# A file may name these two; the runtime of an exported folder replaces "auto" later.
_Runtime: TypeAlias = Annotated[str, From(Literal["auto", "llama", "native"], str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The keys of a profile with what each may be, and its name."""

    name: str
    description: Annotated[str, Check(str.strip, "a text")]
    target: Annotated[str, Check(str.strip, "a MODEL: a catalogue name, a path, or hf:ORG/REPO")]
    draft: Annotated[str, Check(str.strip, 'a MODEL, "auto" or "none"')]
    # The lower bound holds a chat template and a short question; the upper exceeds every model of 2026.
    context: Auto | Annotated[int, Range(128, 1_048_576, "a number of tokens")]
    # Longer chains are hardly ever accepted whole, and every width up to the maximum must be probed for exactness.
    depth: Auto | Annotated[int, Range(0, 16)]
    depth_policy: _Policy
    mode: Literal["auto", "serial", "pipelined"]
    rule: Literal["keyed", "rejection"]
    exactness: Literal["stable", "near"]
    threads: Auto | Annotated[int, Range(1, 1024)]
    device: _Device
    draft_device: _Device
    runtime: _Runtime
    draft_runtime: _Runtime
    draft_isolation: Literal["auto", "process", "thread"]
    draft_head: Literal["auto", "whole"]
    draft_weights: Literal["auto", "file"]
    gpu_layers: Auto | Annotated[int, Range(0, 10_000)]
    max_memory_fraction: Annotated[float, Range(0, 1, above=True)]
    lookup: bool
    learned: Auto | bool
    history: Auto | bool
    prefixes: Auto | bool
    native_sidecar: bool


class LoadOptions(TypedDict, total=False):
    """The keys of a profile that ``Engine.load`` takes by name, for type checkers. None: not given."""

    draft: str | os.PathLike[str] | None
    context: Auto | int | None
    depth: Auto | int | None
    depth_policy: _PolicyName | None
    mode: Literal["auto", "serial", "pipelined"] | None
    rule: Literal["keyed", "rejection"] | None
    exactness: Literal["stable", "near"] | None
    threads: Auto | int | None
    device: str | None
    draft_device: str | None
    runtime: str | None
    draft_runtime: str | None
    draft_isolation: Literal["auto", "process", "thread"] | None
    draft_head: Literal["auto", "whole"] | None
    draft_weights: Literal["auto", "file"] | None
    gpu_layers: Auto | int | None
    max_memory_fraction: float | None
    lookup: bool | None
    learned: Auto | bool | None
    history: Auto | bool | None
    prefixes: Auto | bool | None
    native_sidecar: bool | None


_IN_A_FILE = {name: field.kind for name, field in fields_of(Values).items() if name != "name"}
_INHERITS = kind_of(Annotated[str, Check(str.strip, "the name of a profile")])
KEYS: Mapping[str, Kind[Value]] = {name: kind for name, kind in _IN_A_FILE.items() if name != DESCRIPTION}
_MODEL_KEYS = ("target", "draft")

# What llama.cpp, its Python package and Ollama call keys of ours.
_CALLED_ELSEWHERE = {
    **dict.fromkeys(("n_ctx", "num_ctx", "ctx_size"), "context"),
    **dict.fromkeys(("n_threads", "num_thread"), "threads"),
    **dict.fromkeys(("n_gpu_layers", "num_gpu"), "gpu_layers"),
    **dict.fromkeys(("model_draft", "draft_model"), "draft"),
    **dict.fromkeys(("model", "model_path"), "target"),
}

# How the command line names a key; others are named by --set.
_OPTIONS = {"target": "MODEL", "draft": "--draft", "context": "--context", "threads": "--threads"}

# ORG/REPO, ORG/REPO:QUANT or the address of a page of the hub (store/references.py).
_ON_THE_HUB = re.compile(r"(?:www\.)?(?:huggingface\.co|hf\.co)/.+|[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[\w-]+)?")

# What variables and options may call true and false.
_SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

ADVANCED_KEYS = (
    "mode",
    "exactness",
    "lookup",
    "gpu_layers",
    "depth_policy",
    "rule",
    "draft_runtime",
    "draft_isolation",
    "draft_head",
    "draft_weights",
    "native_sidecar",
)


# ------------------------------------------------------------------------------------------ the layers


def is_path(name: str) -> bool:
    """Whether ``name`` is a path: it has a separator or ends in .toml. So a name cannot leave its folder."""
    return "/" in name or "\\" in name or name.endswith(".toml")


def read_toml(path: Path, name: str, content: bytes | None = None) -> dict[str, object]:
    """Parse a TOML file. Messages call it ``name``. ``content``: the file's bytes, if already read.

    Raises ProfileError if the file cannot be read, is too large, or is not TOML; the message has the line.
    """
    if content is None:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ProfileError(f"{name} cannot be read: {reason_of(error)}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ProfileError(f"{name} is larger than {MAX_FILE_BYTES // 1_000_000} MB, so it is not a profile")
    content = in_utf_8(content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ProfileError(f"{name}, line {line}: not UTF-8 text") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line = _split_toml_error(str(error), text)
        raise ProfileError(f"{name}, line {line}: not valid TOML: {reason}") from error
    except ValueError as error:  # Python refuses to read very long whole numbers
        raise ProfileError(f"{name} holds a number that is too long") from error
    except RecursionError as error:
        raise ProfileError(f"{name} nests its values too deeply to be a profile") from error


def _split_toml_error(message: str, text: str) -> tuple[str, int]:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if found is None:
        return message, 1
    at_line = int(found[1]) if found[1] else max(1, len(text.splitlines()))
    return message[: found.start()], at_line


def from_table(table: Mapping[str, object], origin: str, *, folder: Path | None) -> Layer:
    """Check the table of one profile. Relative paths in it are relative to ``folder``, the file's folder.

    Raises ProfileError for an unknown key, a wrong type or a value out of range.
    """
    values: dict[str, Value] = {}
    inherits = None
    for key, value in _flat(table, origin).items():
        if key == INHERITS:
            inherits = str(_checked(_INHERITS, value, f"{origin}: {key}"))
            if folder is not None and is_path(inherits):
                # One name for a file that inherits from itself; a link stays as it is written.
                inherits = os.path.abspath(folder / expanded(inherits))  # noqa: PTH100
        elif key in _IN_A_FILE:
            values[key] = _checked(_IN_A_FILE[key], value, f"{origin}: {key}")
            if key in _MODEL_KEYS and folder is not None:
                values[key] = _anchored(str(values[key]), folder)
        else:
            raise unknown_key(key, origin, [*_IN_A_FILE, INHERITS, ADVANCED])
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
    given = {f"EDGESPEC_{key.upper()}": key for key in KEYS}
    origins = {key: variable for variable, key in given.items() if environ.get(variable, "").strip()}
    values = {key: _of_text(KEYS[key], environ[variable], variable) for key, variable in origins.items()}
    return Layer("the environment", values, origins)


def from_flags(flags: Mapping[str, object], *, arguments: bool = False) -> Layer:
    """Read the options of a command by key: ``{"context": 2048}`` for ``--context 2048``. None: not given.

    Errors name the ``arguments`` of a Python call in place of options.
    """
    source = "the arguments" if arguments else "the options"
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for key, value in flags.items():
        if key not in KEYS:
            raise unknown_key(key, source, KEYS)
        if value is not None:
            origins[key] = key if arguments else _OPTIONS.get(key, f"--set {key}")
            read = _of_text if isinstance(value, str) else _checked
            values[key] = read(KEYS[key], value, origins[key])
    return Layer(source, values, origins)


def from_settings(settings: Iterable[str]) -> dict[str, str]:
    """Keys and the texts of their values from texts such as ``depth=2``. Raises ProfileError."""
    values = {}
    for setting in settings:
        key, given, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if key not in KEYS:
            raise unknown_key(key, "--set", KEYS)
        if not given:
            raise ProfileError(f"--set {key} has no value", hint=f"--set {key}=VALUE")
        values[key] = value
    return values


def unknown_key(key: str, origin: str, known: Iterable[str]) -> ProfileError:
    """The error for an unknown key, with the nearest known key as a hint."""
    error, ours = unknown_name(key, known := list(known)), _CALLED_ELSEWHERE.get(key)
    hint = f'Did you mean "{ours}"?' if ours in known else error.hint
    return ProfileError(f"{origin}: {error}", hint=hint)


def _checked(kind: Kind[Value], value: object, where: str) -> Value:
    try:
        found = kind.read(value)
    except WrongValueError as error:
        raise ProfileError(str(error.within(where))) from error
    return found.strip() if isinstance(found, str) else found


def _of_text(kind: Kind[Value], given: object, where: str) -> Value:
    """The value that the text of a variable or an option means: itself, a number, or a word for true or false."""
    text = str(given).strip()
    meant: list[object] = [text, _SWITCHES.get(text.lower())]
    for convert in (int, float):
        with suppress(ValueError):
            meant.append(convert(text))
    for value in meant:
        with suppress(WrongValueError):
            return kind.read(value)
    return _checked(kind, text, where)


def _anchored(model: str, folder: Path) -> str:
    """Make a relative model path absolute. Names and what is on the hub stay unchanged."""
    has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", model)  # two letters at least: C: is a drive
    is_file = model.lower().endswith(".gguf")
    has_slash = "/" in model or "\\" in model
    is_address = _ON_THE_HUB.fullmatch(model) and not is_file
    is_hub = is_address and not is_folder(folder / model.partition("/")[0])
    if has_scheme or is_hub or not (is_file or has_slash):
        return model
    path = expanded(model)
    return str(path if path.is_absolute() else (folder / path).absolute())
