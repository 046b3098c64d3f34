"""Split GGUF models, written by the gguf package from a model in one file."""

from __future__ import annotations

from pathlib import Path

from edgespec.files.gguf.names import part_name
from tests.support.rewritten_gguf import rewrite_gguf


def split_gguf(
    source: Path, folder: Path, *, tensors: int, name: str = "split", small_first: bool = False
) -> list[Path]:
    """Split the model ``source`` into parts of ``tensors`` tensors in ``folder``; returns their paths in order.

    ``small_first``: the first part holds no tensor, as llama-gguf-split --no-tensor-first-split writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rewrite_gguf(source, folder / f"{name}.gguf", split_max_tensors=tensors, small_first_shard=small_first)
    parts = sorted(path for path in folder.glob(f"{name}-*.gguf") if part_name(path.name) is not None)
    assert len(parts) > 1
    return parts
