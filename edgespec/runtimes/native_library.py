"""The one place that loads the kernels' shared library and knows its interface (kernels/edgespec_kernels.h)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import threading
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import RuntimeUnavailableError

__all__ = [
    "CANCELLED",
    "LEVELS",
    "OTHER_PROCESS",
    "Layer",
    "Matrix",
    "NativeLibrary",
    "NativeModelStruct",
    "Threads",
    "load",
    "load_from",
]

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
LIBRARY_NAMES = ("libedgespec_kernels.so", "libedgespec_kernels.dylib")
NOTE_NAME = "not_built.txt"
INSTALL_HINT = "install a C compiler (Debian, Ubuntu: gcc; macOS: xcode-select --install) and install edgespec again"

ABI = 1
OK, CANCELLED, BAD_REQUEST, OTHER_PROCESS = range(4)
LEVELS: Mapping[str, int] = {"portable": 0, "avx512-vnni": 1}

_LOADING = threading.Lock()


class Matrix(ctypes.Structure):
    """struct es_matrix"""

    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("type", c_int64),
    )


class Layer(ctypes.Structure):
    """struct es_layer"""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("query", Matrix),
        ("key", Matrix),
        ("value", Matrix),
        ("output", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
    )


class Threads(ctypes.Structure):
    """struct es_threads"""

    _fields_ = (
        ("count", c_int64),
        ("most_busy", c_int64),
        ("processors", POINTER(c_int32)),
    )


class NativeModelStruct(ctypes.Structure):
    """struct es_model"""

    _fields_ = (
        ("layers", c_int64),
        ("embedding", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_length", c_int64),
        ("feed_forward", c_int64),
        ("vocabulary", c_int64),
        ("rope_length", c_int64),
        ("rope", c_int64),
        ("norm_epsilon", c_double),
        ("rope_frequencies", c_void_p),
        ("layer", POINTER(Layer)),
        ("output_norm", c_void_p),
        ("head", Matrix),
        ("embedding_rows", c_void_p),
        ("embedding_type", c_int64),
    )


_FLOATS, _BYTES, _IDS = c_void_p, c_void_p, c_void_p  # addresses: numpy arrays pass theirs

# Calls that take their time, and give the interpreter lock away meanwhile.
_LONG: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "es_open": (c_void_p, (POINTER(NativeModelStruct), c_int64, POINTER(Threads), c_int32)),
    "es_close": (None, (c_void_p,)),
    "es_forward": (c_int32, (c_void_p, _IDS, c_int32, c_int64, c_int32, POINTER(c_uint64))),
    "es_copy": (c_int32, (c_void_p, c_void_p, c_int64)),
    "es_relay": (c_int64, (c_int64, _BYTES, c_int64, c_int64, _BYTES)),
    "es_memory_take": (c_void_p, (c_int64, c_int32)),
    "es_memory_give": (None, (c_void_p, c_int64)),
    "es_checksum": (c_uint64, (_BYTES, c_int64)),
    "es_multiply": (c_int32, (POINTER(Matrix), _FLOATS, c_int64, _FLOATS, c_int32)),
    "es_attend": (
        c_int32,
        (_FLOATS, _FLOATS, c_int64, c_int64, _FLOATS, _IDS, c_int64, _FLOATS, c_int32),
    ),
}
# Calls of microseconds. They keep the lock: beside a busy Python thread, getting it back takes milliseconds.
_SHORT: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "es_abi": (c_int32, ()),
    "es_best_level": (c_int32, ()),
    "es_level_name": (c_char_p, (c_int32,)),
    "es_relaid_bytes": (c_int64, (c_int64, c_int64, c_int64)),
    "es_cancel": (None, (c_void_p, c_int32)),
    "es_scores": (POINTER(c_float), (c_void_p,)),
    "es_abort": (c_bool, (c_void_p,)),
    "es_argmax": (c_int64, (c_void_p, c_int32)),
    "es_top_k": (c_int32, (c_void_p, c_int32, c_int64, _IDS, _FLOATS)),
    "es_normalise": (c_int32, (_FLOATS, _FLOATS, c_double, c_int64, _FLOATS, c_int32)),
    "es_exponential": (c_int32, (_FLOATS, c_int64, _FLOATS, c_int32)),
    "es_swiglu": (c_int32, (_FLOATS, _FLOATS, c_int64, _FLOATS, c_int32)),
    "es_dequantise": (c_int32, (c_int64, _BYTES, c_int64, _FLOATS)),
    "es_quantise": (c_int32, (_FLOATS, c_int64, _BYTES, c_int32)),
}


class _Calls:
    """The library's functions, with their types."""

    def __init__(self, path: Path) -> None:
        for library, calls in ((ctypes.CDLL(str(path)), _LONG), (ctypes.PyDLL(str(path)), _SHORT)):
            for name, (result, arguments) in calls.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """The loaded library. ``levels`` are the instruction sets that run here, the fastest last."""

    api: Any
    build: str
    levels: tuple[str, ...]


def load() -> NativeLibrary:
    """The library that came with edgespec, loaded once per process.

    Raises RuntimeUnavailableError, with the reason and what to install, if there is none or it does not fit.
    """
    with _LOADING:
        return _load()


@functools.cache
def _load() -> NativeLibrary:
    for name in LIBRARY_NAMES:
        if (KERNELS / name).is_file():
            return load_from(KERNELS / name)
    note = KERNELS / NOTE_NAME
    try:
        reason = note.read_text(encoding="utf-8").strip()
    except OSError:
        reason = "its library was not built"
    raise RuntimeUnavailableError(f"the native runtime is missing: {reason}", hint=INSTALL_HINT)


def load_from(path: Path) -> NativeLibrary:
    """A library of these sources, built elsewhere. Raises RuntimeUnavailableError."""
    try:
        calls: Any = _Calls(path)
        abi = int(calls.es_abi())
    except (OSError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"the native runtime's library does not load: {error}", hint=INSTALL_HINT
        ) from error
    if abi != ABI:
        raise RuntimeUnavailableError(
            f"the native runtime's library has interface {abi} and edgespec needs {ABI}", hint=INSTALL_HINT
        )
    offered = (name for name, number in LEVELS.items() if calls.es_level_name(number))
    levels = tuple(name for name in offered if name == "portable" or _computes_portable_bits(calls, LEVELS[name]))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return NativeLibrary(api=calls, build=f"{ABI}+{digest[:12]}", levels=levels)


def _computes_portable_bits(calls: Any, level: int) -> bool:
    """Whether a level does here what it should: one that a compiler or a virtual machine broke is not offered.

    A small product of each quantised type, in a few milliseconds.
    """
    draw = random.Random(0)
    rows, columns, inputs = 16, 288, 9
    x = np.array([draw.gauss(0, 1) for _ in range(inputs * columns)], dtype=np.float32)
    for number, block_bytes, halves in ((2, 18, 1), (3, 20, 2), (8, 34, 1)):
        raw = np.frombuffer(bytearray(draw.randbytes(rows * columns // 32 * block_bytes)), dtype=np.uint8)
        raw.reshape(-1, block_bytes)[:, : 2 * halves] = np.full(halves, 0.0625, dtype="<f2").view(np.uint8)
        tiles = np.zeros(calls.es_relaid_bytes(number, rows, columns), dtype=np.uint8)
        calls.es_relay(number, raw.ctypes.data, rows, columns, tiles.ctypes.data)
        matrix = Matrix(tiles=tiles.ctypes.data, rows=rows, columns=columns, type=number)
        found = []
        for each in (LEVELS["portable"], level):
            y = np.zeros(inputs * rows, dtype=np.float32)
            calls.es_multiply(ctypes.byref(matrix), x.ctypes.data, inputs, y.ctypes.data, each)
            found.append(y.tobytes())
        if found[0] != found[1]:
            return False
    return True
