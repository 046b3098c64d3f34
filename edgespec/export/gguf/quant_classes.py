"""How the parts of a model are quantised, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from edgespec.files.gguf.records import TensorInfo

# The part a matrix belongs to, by what its name contains. The first that fits counts.
_CLASSES = (
    ("embedding", "token_embd"),
    ("head", "output.weight"),
    ("attention", "attn"),
    ("feed-forward", "ffn"),
)
_BLOCK = "blk."


def quantisation_by_class(tensors: Iterable[TensorInfo]) -> Mapping[str, str]:
    """For each part of the model the types of its matrices, those of most bytes first: {"head": "Q6_K", ...}.

    Parts are ``embedding`` (also the head, where there is no ``head``), ``head``, ``attention``, ``feed-forward``,
    ``other``, and ``vectors`` for norms and biases; what a model lacks is left out.
    """
    found: dict[str, Counter[str]] = {}
    for tensor in tensors:
        found.setdefault(_class_of(tensor), Counter())[tensor.type_name] += tensor.byte_count
    order = [*(name for name, _ in _CLASSES), "other", "vectors"]
    return {name: ", ".join(kind for kind, _ in found[name].most_common()) for name in order if name in found}


def _class_of(tensor: TensorInfo) -> str:
    if len(tensor.shape) < 2:
        return "vectors"
    if tensor.name == "output.weight":
        return "head"
    for name, mark in _CLASSES:
        if name != "head" and mark in tensor.name:
            return name
    return "other"
