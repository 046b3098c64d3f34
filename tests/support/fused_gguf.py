"""A tiny llama as another architecture: its keys under that name, and some of its matrices joined in one tensor.

``fused_layout`` is its layout in the native runtime, with the parts of those tensors as its matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.runtimes.native.tensors import LayerTensors, ModelLayout, WeightTensor

__all__ = ["FUSED", "fused_layout", "write_fused"]

# Tensors of a block, and the matrices whose rows they hold one after another, as in files of Phi-3.
FUSED: Mapping[str, tuple[str, ...]] = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


def write_fused(
    source: Path,
    path: Path,
    *,
    architecture: str = "phi3",
) -> Path:
    """Write ``source``'s model with the tensors of FUSED."""
    reader = gguf.GGUFReader(source)
    own = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        is_own = field.name.startswith(f"{own}.")
        name = f"{architecture}.{field.name.removeprefix(f'{own}.')}" if is_own else field.name
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    left = {tensor.name: tensor for tensor in reader.tensors}
    for number in range(read_header(source).block_count):
        for name, together in FUSED.items():
            for kind in ("weight", "bias"):
                parts = [left.pop(f"blk.{number}.{each}.{kind}", None) for each in together]
                if parts[0] is not None:
                    data = np.concatenate([part.data for part in parts])
                    writer.add_tensor(f"blk.{number}.{name}.{kind}", data, raw_dtype=parts[0].tensor_type)
    for tensor in left.values():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fused_layout(own: ModelLayout, header: GgufHeader) -> ModelLayout:
    """``own``, the layout of a model, with its tensors in the file that ``write_fused`` made of it."""
    tensors = {tensor.name: tensor for tensor in header.tensors}

    def moved(tensor: TensorInfo) -> TensorInfo:
        return tensors.get(tensor.name, tensor)  # the rows of a trimmed drafter's embedding are in another file

    def matrix(weight: WeightTensor) -> WeightTensor:
        return replace(weight, tensor=moved(weight.tensor), bias=None if weight.bias is None else moved(weight.bias))

    def parts(number: int, name: str, *weights: WeightTensor) -> list[WeightTensor]:
        stem = f"blk.{number}.{name}"
        if name not in FUSED:
            return [matrix(weight) for weight in weights]
        rows = sum(weight.rows for weight in weights)
        whole = WeightTensor(tensors[f"{stem}.weight"], tensors.get(f"{stem}.bias"), rows, weights[0].columns)
        starts = np.cumsum([0, *(weight.rows for weight in weights)]).tolist()
        return [whole.some_rows(start, weight.rows) for start, weight in zip(starts, weights, strict=False)]

    def layer(number: int, plain: LayerTensors) -> LayerTensors:
        assert plain.key is not None
        assert plain.value is not None
        assert plain.up is not None
        query, key, value = parts(number, "attn_qkv", plain.query, plain.key, plain.value)
        gate, up = parts(number, "ffn_up", plain.gate, plain.up)
        return replace(
            plain,
            attention_norm=moved(plain.attention_norm),
            feed_forward_norm=moved(plain.feed_forward_norm),
            query=query,
            key=key,
            value=value,
            output=matrix(plain.output),
            gate=gate,
            up=up,
            down=matrix(plain.down),
        )

    return replace(
        own,
        layers=tuple(layer(number, plain) for number, plain in enumerate(own.layers)),
        output_norm=moved(own.output_norm),
        head=matrix(own.head),
        embedding_rows=matrix(own.embedding_rows),
    )
