"""Drafters with a trimmed output head, sliced by hand from a GGUF with the ``gguf`` package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["edit_manifest", "record_file", "write_tied", "write_trimmed_folder"]

FILES = ("drafter.gguf", "embedding.bin", "ids.npy", "tokenizer.gguf")


def write_trimmed_folder(
    source: Path, folder: Path, kept: Iterable[int], *, scale: float = 1.0, extra_tensor: str | None = None
) -> Path:
    """Write ``source`` with only the ``kept`` rows of its head, and optionally another tensor; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    ids = np.array(sorted(kept), dtype=np.int32)
    table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")

    def trimmed(name: str, data: Any) -> Any:
        return data[ids] if name in ("token_embd.weight", "output.weight") else data

    extra: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "tokenizer.ggml.model": ("no_vocab", gguf.GGUFValueType.STRING),
        f"{architecture}.vocab_size": (len(ids), gguf.GGUFValueType.UINT32),
    }
    tensors = [(t.name, trimmed(t.name, t.data), t.tensor_type) for t in reader.tensors]
    if extra_tensor is not None:
        tensors.append((extra_tensor, np.ones(32, np.float32), gguf.GGMLQuantizationType.F32))
    _rewrite(
        reader,
        folder / "drafter.gguf",
        keys=lambda key: not key.startswith("tokenizer.") and key not in extra,
        tensors=tensors,
        extra=extra,
    )
    _rewrite(reader, folder / "tokenizer.gguf", keys=lambda _key: True, tensors=[], extra={})
    (folder / "embedding.bin").write_bytes(table.data.tobytes())
    np.save(folder / "ids.npy", ids)
    columns, rows = (int(length) for length in table.shape)
    manifest = {
        "schema_version": 1,
        "kind": "trimmed-drafter",
        "source": {"name": source.stem, "sha256": None, "bytes": source.stat().st_size},
        "edgespec": "0",
        "architecture": architecture,
        "vocabulary_size": rows,
        "kept": len(ids),
        "quant": "keep",
        "embedding": {
            "type": table.tensor_type.name,
            "rows": rows,
            "columns": columns,
            "bytes": int(table.n_bytes),
            "scale": scale,
        },
        "tensors": {},
        "licence": None,
        "files": {},
        "tools": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name in FILES:
        record_file(folder, name)
    return folder


def write_tied(source: Path, path: Path) -> Path:
    """Write ``source`` without a separate head to ``path``: its embedding is the head. Returns the path."""
    reader = gguf.GGUFReader(str(source))
    tensors = [(t.name, t.data, t.tensor_type) for t in reader.tensors if t.name != "output.weight"]
    _rewrite(reader, path, keys=lambda _key: True, tensors=tensors, extra={})
    return path


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the manifest's document."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def record_file(folder: Path, name: str) -> None:
    """Make the manifest state the current file."""
    content = (folder / name).read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(folder, lambda document: document["files"].update({name: record}))


def _rewrite(
    reader: Any,
    path: Path,
    *,
    keys: Callable[[str], bool],
    tensors: list[tuple[str, Any, Any]],
    extra: dict[str, tuple[Any, gguf.GGUFValueType]],
) -> None:
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or not keys(key):
            continue
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for key, (value, kind) in extra.items():
        writer.add_key_value(key, value, kind)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
