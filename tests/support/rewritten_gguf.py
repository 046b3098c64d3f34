"""A GGUF file rewritten by the gguf package: with other keys, with more tensors, or in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

_KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


def rewrite_gguf(
    source: Path,
    path: Path,
    *,
    keep: Callable[[str], bool] = lambda _key: True,
    keys: Mapping[str, Any] | None = None,
    lists: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    architecture: str | None = None,
    rename: Callable[[str], str] = str,
    **writing: Any,
) -> Path:
    """Write the keys and tensors of ``source`` to ``keep``, further ``keys`` and ``tensors``, and longer arrays.

    ``lists`` (of strings, numbers) are appended to the arrays. ``rename`` names the keys and tensors of ``source``.
    """
    reader = gguf.GGUFReader(source)
    own = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture or own, **writing)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or not keep(field.name):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        content = field.contents()
        if field.name in (lists or {}):
            content = [*content, *lists[field.name]]  # type: ignore[index]
        writer.add_key_value(rename(field.name), content, kind, sub_type=inner)
    for key, value in (keys or {}).items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=_KINDS[type(value[0])])
        else:
            writer.add_key_value(key, value, _KINDS[type(value)])
    for tensor in filter(lambda tensor: keep(tensor.name), reader.tensors):
        writer.add_tensor(rename(tensor.name), tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
