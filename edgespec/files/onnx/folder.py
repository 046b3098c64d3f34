"""Reads the folder of an exported ONNX model, as hostile input.

``read_onnx_folder`` checks every file, every range of weights and every name in the graph before native code opens
the folder. Weights are not read. ``parser.py`` parses the graph, so only numpy is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgespec.files.checked import shown
from edgespec.files.export_folder import (
    MANIFEST_NAME,
    bad_file,
    check_hash,
    check_manifest,
    check_said,
    check_size,
    checked_ids,
    is_export,
    read_content,
)
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.onnx.artefact import DATA_NAME, OnnxArtefact
from edgespec.files.onnx.interface import CACHES, KEPT_IDS, SHARED, check_interface
from edgespec.files.onnx.parser import INT64, Initializer, OnnxGraph, walk_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ONNX_KIND = "onnx-model"
GRAPH_NAME, TOKENIZER_NAME = "model.onnx", "tokenizer.gguf"
_FILES = (GRAPH_NAME, DATA_NAME, TOKENIZER_NAME)

# An exported graph takes a few kB per layer, under 1 MB in total. A graph with embedded weights must not pass.
_LARGEST_GRAPH_BYTES = 4 << 20

# The tokenizer of the largest known vocabulary (Gemma 3: 262 144 tokens) takes 16 MiB and is hashed at each reading.
_LARGEST_TOKENIZER_BYTES = 64 << 20

# Domains of ONNX Runtime's built-in operators. Any other domain would need a custom library, which is never loaded.
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})

# A compiled graph, in the node or in another file, which a device's driver would run unchecked.
_COMPILED = "EPContext"

# Operator inputs from which a forward reads only a row per token: (operator, position).
_LOOKUPS = frozenset(
    {("Gather", 0), ("GatherBlockQuantized", 0), ("GroupQueryAttention", 7), ("GroupQueryAttention", 8)}
)
_UNREAD = frozenset({("Identity", 0)})  # only kept_ids, an output that forwards do not compute


def is_onnx_folder(folder: Path) -> bool:
    """Whether a folder is an exported ONNX model, even a damaged one. Raises nothing."""
    return is_export(folder, ONNX_KIND, (GRAPH_NAME, DATA_NAME))


def read_onnx_folder(folder: Path) -> OnnxArtefact:
    """Read and check the exported ONNX model in ``folder``.

    The graph and the tokenizer are checked by their sha256, the weights by the file's size and the ranges that the
    graph states. Raises ModelFileError with the reason and a hint.
    """
    manifest, digest = check_manifest(folder, ONNX_KIND, _FILES, links=False)
    limits = {GRAPH_NAME: _LARGEST_GRAPH_BYTES, TOKENIZER_NAME: _LARGEST_TOKENIZER_BYTES}
    sizes = {name: check_size(folder, manifest, name, links=False, most_bytes=limits.get(name)) for name in _FILES}
    tokenizer = _tokenizer(folder, manifest)
    raw = read_content(folder / GRAPH_NAME)
    check_hash(manifest, folder / GRAPH_NAME, raw)
    graph = walk_model(folder / GRAPH_NAME, raw)
    _check_operators(folder / GRAPH_NAME, graph)
    ranges = _check_weights(folder, graph, sizes[DATA_NAME])
    artefact = OnnxArtefact(
        folder=folder,
        manifest=MappingProxyType(manifest),
        graph_path=folder / GRAPH_NAME,
        tokenizer_header=tokenizer,
        ids=None,
        identity=f"onnx:{digest}",
        architecture=tokenizer.architecture,
        vocabulary_size=tokenizer.vocabulary_size,
        kept=_optional_count(folder, manifest, "kept"),
        context_length=tokenizer.context_length,
        block_count=tokenizer.block_count,
        head_count_kv=_uniform(tokenizer),
        key_length=tokenizer.key_length,
        value_length=tokenizer.value_length,
        embedding_length=tokenizer.embedding_length,
        weight_bytes=sum(ranges.values()),
        bytes_per_forward=_read_bytes(graph, ranges),
        static_cache=_optional_count(folder, manifest, "static_cache"),
        cache=_cache(folder, manifest),
        window=_optional_count(folder, manifest, "window"),
    )
    _check_manifest_agrees(artefact)
    check_interface(artefact, graph)
    return artefact if artefact.kept is None else replace(artefact, ids=_ids(artefact, graph))


# ------------------------------------------------------------------------------------- tokenizer and manifest


def _tokenizer(folder: Path, manifest: Mapping[str, Any]) -> GgufHeader:
    path = folder / TOKENIZER_NAME
    check_hash(manifest, path, read_content(path))
    header = read_header(path)
    if header.tensors:
        raise bad_file(path, "it should hold no tensors")
    return header


def _uniform(tokenizer: GgufHeader) -> int:
    heads = tokenizer.head_count_kv
    if isinstance(heads, int):
        return heads
    if len(set(heads)) != 1:
        raise bad_file(tokenizer.path, "its layers differ in their number of key-value heads")
    return heads[0]


def _optional_count(folder: Path, manifest: Mapping[str, Any], name: str) -> int | None:
    value = manifest.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise bad_file(folder / MANIFEST_NAME, f"{name} is {shown(value)}, not a count")
    return value


def _cache(folder: Path, manifest: Mapping[str, Any]) -> str:
    value = manifest.get("cache", SHARED)
    if value not in CACHES:
        raise bad_file(folder / MANIFEST_NAME, f"cache is {shown(value)}, not one of {', '.join(CACHES)}")
    return str(value)


def _check_manifest_agrees(artefact: OnnxArtefact) -> None:
    found: dict[str, object] = {
        "architecture": artefact.architecture,
        "vocabulary_size": artefact.vocabulary_size,
        "context_length": artefact.context_length,
        "block_count": artefact.block_count,
        "embedding_length": artefact.embedding_length,
        "head_count_kv": artefact.head_count_kv,
        "key_length": artefact.key_length,
        "kv_type": "f32",
    }
    check_said(artefact.folder, artefact.manifest, found)
    if artefact.kept is not None and artefact.kept > artefact.vocabulary_size:
        reason = f"it keeps {artefact.kept} rows, more than the vocabulary of {artefact.vocabulary_size} tokens"
        raise bad_file(artefact.folder / MANIFEST_NAME, reason)


# ------------------------------------------------------------------------------------------------- the graph


def _check_operators(path: Path, graph: OnnxGraph) -> None:
    for domain in sorted({*graph.domains, *(node.domain for node in graph.nodes)}):
        if domain not in _DOMAINS:
            raise bad_file(path, f"it uses operators of {shown(domain)}, which ONNX Runtime does not have")
    if any(node.operator == _COMPILED for node in graph.nodes):
        raise bad_file(path, f"it holds a compiled graph ({_COMPILED}), which cannot be checked")


def _check_weights(folder: Path, graph: OnnxGraph, data_bytes: int) -> dict[tuple[int, int] | str, int]:
    """Bytes of each range of weights, by (offset, length) or, inside the graph, by the initializer's name.

    Two initializers may share a range, as a tied head and embedding do.
    """
    path, found = folder / GRAPH_NAME, dict[tuple[int, int] | str, int]()
    for each in graph.initializers.values():
        if each.location is None:
            found[each.name] = each.byte_count
            continue
        if each.location != DATA_NAME:
            raise bad_file(path, f"{shown(each.name)} lies in {shown(each.location)} instead of {DATA_NAME}")
        if each.length != each.byte_count:
            reason = f"{shown(each.name)} of shape {shown(str(each.shape))} takes {each.byte_count} bytes"
            raise bad_file(path, f"{reason}, but its range has {each.length}")
        if each.offset + each.length > data_bytes:
            reason = f"{shown(each.name)} ends at byte {each.offset + each.length} of {DATA_NAME}"
            raise bad_file(path, f"{reason}, which has {data_bytes}")
        found[each.offset, each.length] = each.length
    external = sum(length for key, length in found.items() if not isinstance(key, str))
    if external > data_bytes:
        raise bad_file(path, f"its weights overlap: they take {external} bytes of the {data_bytes} of {DATA_NAME}")
    return found


def _key(each: Initializer) -> tuple[int, int] | str:
    return each.name if each.location is None else (each.offset, each.length)


def _read_bytes(graph: OnnxGraph, ranges: Mapping[tuple[int, int] | str, int]) -> int:
    """Bytes of weights that a forward of width 1 reads: all except lookup tables."""
    read = {
        _key(graph.initializers[name])
        for node in graph.nodes
        for position, name in enumerate(node.inputs)
        if name in graph.initializers and (node.operator, position) not in _LOOKUPS | _UNREAD
    }
    return sum(ranges[key] for key in read)


def _ids(artefact: OnnxArtefact, graph: OnnxGraph) -> NDArray[np.int32]:
    """The token of each row of the head, from the constant that the output kept_ids returns."""
    import numpy as np

    path = artefact.graph_path
    sources = [node.inputs[0] for node in graph.nodes if node.outputs == (KEPT_IDS,) and node.operator == "Identity"]
    constant = graph.initializers.get(sources[0]) if len(sources) == 1 else None
    if constant is None or constant.kind != INT64 or math.prod(constant.shape) != artefact.kept:
        raise bad_file(path, f"its output {KEPT_IDS} is not a constant of {artefact.kept} ids")
    if constant.location is None:
        raw = constant.inline
    else:
        try:
            with artefact.data_path.open("rb") as file:
                file.seek(constant.offset)
                raw = file.read(constant.length)
        except OSError as error:
            raise bad_file(artefact.data_path, f"the file cannot be read: {error}") from error
    if len(raw) != constant.byte_count:
        raise bad_file(path, f"its output {KEPT_IDS} is not a constant of {artefact.kept} ids")
    return checked_ids(artefact.data_path, np.frombuffer(raw, dtype="<i8"), artefact.vocabulary_size)
