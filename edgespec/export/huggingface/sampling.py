"""Reads how the makers of a model draw its tokens, from generation_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from edgespec.errors import ModelFileError
from edgespec.export.huggingface.config import Value
from edgespec.files.checked import read_fields
from edgespec.files.progress import QUIET, Job

_FILE = "generation_config.json"
_MOST_BYTES = 1 << 20  # real files have a few hundred bytes
_USUAL_TEMPERATURE = 1.0  # transformers', for a file that states none

# By transformers' name: the GGUF's, and the range.
_NUMBERS: Mapping[str, tuple[str, float, float]] = {
    "temperature": ("temp", 0.0, 100.0),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("penalty_repeat", 1e-6, 10.0),
}

T = TypeVar("T")


def read_sampling(folder: Path, job: Job = QUIET) -> dict[str, Value]:
    """The GGUF's keys for the sampling that ``folder`` states; none if it states greedy decoding, or nothing.

    A value that cannot be read is left out with a note: a conversion needs none. Raises ModelFileError for a file
    that is not a JSON object.
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    fields = read_fields(path, _MOST_BYTES)

    def readable(read: Callable[..., T], *wanted: object) -> T | None:
        try:
            return read(*wanted)
        except ModelFileError as error:
            job.tell("reading", _FILE, note=f"{error.reason}; it is left out")
            return None

    draws = readable(fields.flag, "do_sample")
    if draws is False or (draws is None and fields.raw("temperature") is None):
        return {}
    fields = fields.or_else({"temperature": _USUAL_TEMPERATURE})
    found: dict[str, Value | None] = {}
    if fields.raw("top_k") is not None:
        top_k = readable(fields.integer, "top_k", -1, 2**31 - 1)
        found["top_k"] = None if top_k is None else max(top_k, 0)  # -1 stands for all, as 0 does
    for name, (key, least, most) in _NUMBERS.items():
        if fields.raw(name) is not None:
            found[key] = readable(fields.number, name, least, most)
    return {f"general.sampling.{key}": value for key, value in found.items() if value is not None}
