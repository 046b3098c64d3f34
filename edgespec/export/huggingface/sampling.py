"""Reads how the makers of a model draw its tokens, from generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.export.huggingface.config import Value
from edgespec.files.checked import read_fields

_MOST_BYTES = 1 << 20  # real files have a few hundred bytes
_USUAL_TEMPERATURE = 1.0  # transformers', for a file that states none

# By transformers' name: the GGUF's, and the range.
_NUMBERS: Mapping[str, tuple[str, float, float]] = {
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("penalty_repeat", 1e-6, 10.0),
}


def read_sampling(folder: Path) -> dict[str, Value]:
    """The GGUF's keys for the sampling that ``folder`` states; none if it states greedy decoding, or nothing.

    Raises ModelFileError for a malformed file.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    fields = read_fields(path, _MOST_BYTES)
    draws = fields.flag("do_sample")
    if draws is False or (draws is None and fields.raw("temperature") is None):
        return {}
    found: dict[str, Value] = {"temp": fields.number("temperature", 0.0, 100.0, _USUAL_TEMPERATURE)}
    if fields.raw("top_k") is not None:
        found["top_k"] = max(fields.integer("top_k", -1, 2**31 - 1), 0)  # -1 stands for all, as 0 does
    for name, (key, least, most) in _NUMBERS.items():
        if fields.raw(name) is not None:
            found[key] = fields.number(name, least, most)
    return {f"general.sampling.{key}": value for key, value in found.items()}
