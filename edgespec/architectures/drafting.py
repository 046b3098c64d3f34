"""The layer behind a model's other layers that drafts for it (multi-token prediction, Gloeckle et al., 2024).

It reads a token's embedding, and the hidden row that the model computed of the token before, behind its last norm.
Both are normed, put next to each other, the embedding first, and projected to the layer's input. The layer's output
has a norm and a head, which may be the model's. The names are llama.cpp's (``nextn``).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.architectures.facts import Facts, UnsupportedError
from edgespec.architectures.shape import (
    EMBEDDING,
    HEAD,
    OUTPUT_NORM,
    Layer,
    Shape,
    TensorForm,
    check_shapes,
    layer_parts,
    matrix,
    vector,
)

PROJECTION, TOKEN_NORM, HIDDEN_NORM = "nextn.eh_proj", "nextn.enorm", "nextn.hnorm"

PAIR: tuple[TensorForm, ...] = (
    vector(TOKEN_NORM, "width"),
    vector(HIDDEN_NORM, "width"),
    matrix(PROJECTION, "width", "pair"),
)
"""The tensors before the layer's usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingLayer:
    """The parts of the layer by role, and the tensors of its embedding, norm and head: its own or the model's."""

    layer: Layer
    embedding: str
    output_norm: str
    head: str


def read_drafting_layer(shape: Shape, facts: Facts) -> DraftingLayer | None:
    """The layer that drafts, with every tensor's shape checked; None for a file without one.

    Raises UnsupportedError for one that is not computed here, ModelFileError for one that contradicts the model.
    """
    count, number = facts.integer("nextn_predict_layers", 0), shape.sizes.layers
    if not count:
        return None
    if not shape.architecture.drafting_layer:
        raise UnsupportedError(f"such layers are not computed for {shape.architecture.name}")
    if count > 1:
        raise UnsupportedError(f"it has {count} such layers, of which each drafts another token")
    forms, block = shape.architecture.drafting_layer, f"blk.{number}."
    parts = dict(layer_parts(shape.architecture, shape.sizes, facts.tensors, number, forms=forms))
    wanted = {part.tensor: part.shape for part in parts.values()}
    width, rows = shape.sizes.width, shape.rows

    def own(name: str, other: str, lengths: tuple[int, ...]) -> str:
        """The layer's tensor of that name if the file has it, else the model's ``other``."""
        tensor = f"{block}nextn.{name}.weight"
        if tensor not in facts.tensors:
            return other
        wanted[tensor] = lengths
        return tensor

    embedding = own("embed_tokens", EMBEDDING, (width, rows))
    output_norm = own("shared_head_norm", OUTPUT_NORM, (width,))
    head = own("shared_head_head", EMBEDDING if shape.tied else HEAD, (width, rows))
    check_shapes(wanted, facts)
    strange = next((name for name in facts.tensors if name.startswith(block) and name not in wanted), None)
    if strange is not None:
        raise UnsupportedError(f"it has a tensor {strange}")
    layer = Layer(parts=parts, sizes=shape.sizes, window=0, rope=0, cache=0)
    return DraftingLayer(layer=layer, embedding=embedding, output_norm=output_norm, head=head)
