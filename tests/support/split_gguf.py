"""Split GGUF models, written by the gguf package from a model in one file."""

from __future__ import annotations

from pathlib import Path

import gguf

from edgespec.files.gguf.names import part_name


def split_gguf(
    source: Path, folder: Path, *, tensors: int, name: str = "split", small_first: bool = False
) -> list[Path]:
    """The model ``source`` in parts of so many tensors in ``folder``; their paths in order.

    ``small_first``: the first part holds no tensor, as llama-gguf-split --no-tensor-first-split writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(
        folder / f"{name}.gguf", architecture, split_max_tensors=tensors, small_first_shard=small_first
    )
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path for path in folder.glob(f"{name}-*.gguf") if part_name(path.name) is not None)
    assert len(parts) > 1
    return parts
