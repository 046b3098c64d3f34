"""The only module that loads the kernels' shared library; it mirrors kernels/edgespec_kernels.h."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RuntimeUnavailableError
from edgespec.interfaces.drawing import MOST_DRAWN
from edgespec.runtimes.native.turns import Turns

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# Names on Linux and other Unix systems, macOS, Windows, as in kernels/compile.py.
LIBRARY_NAMES = ("libedgespec_kernels.so", "libedgespec_kernels.dylib", "libedgespec_kernels.dll")
NOTE_NAME = "not_built.txt"
DIGEST_SUFFIX = ".sha256"
_COMPILER = "a C compiler (Debian, Ubuntu: gcc; macOS: xcode-select --install; Windows: LLVM)"

ABI = 21
OK, CANCELLED, BAD_REQUEST, OTHER_PROCESS, NOT_FINITE, NONE_ALLOWED = range(6)
MOST_ENTRIES = 64  # of a shared forward
MOST_THREADS = 8192  # the most processors that Linux can be built for
PORTABLE = "portable"
# The later, the faster; levels of other processor families are never available.
LEVELS: Mapping[str, int] = {PORTABLE: 0, "avx2": 1, "avx-vnni": 2, "avx512-vnni": 3, "neon-dotprod": 4}

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


class Delta(ctypes.Structure):
    """struct es_delta"""

    _fields_ = (
        ("mixed", Matrix),
        ("gate", Matrix),
        ("decay", Matrix),
        ("beta", Matrix),
        ("kernel", c_void_p),
        ("rates", c_void_p),
        ("norm", c_void_p),
    )


class Shared(ctypes.Structure):
    """struct es_shared"""

    _fields_ = (
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("router", Matrix),
    )


class Layer(ctypes.Structure):
    """struct es_layer"""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("feed_forward_post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("sinks", c_void_p),
        ("query", Matrix),
        ("key", Matrix),
        ("value", Matrix),
        ("output", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("router", Matrix),
        ("window", c_int64),
        ("rope_table", c_int64),
        ("delta", Delta),
        ("shared", Shared),
        ("joins_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_length", c_int64),
        ("rope_length", c_int64),
        ("cache_layer", c_int64),
        ("value_norm", c_void_p),
        ("output_scale", c_double),
        ("input_gate", Matrix),
        ("input_down", Matrix),
        ("input_post_norm", c_void_p),
        ("input_at", c_int64),
        ("dense_gate", Matrix),
        ("dense_up", Matrix),
        ("dense_down", Matrix),
        ("router_norm", c_void_p),
        ("experts_norm", c_void_p),
        ("dense_post_norm", c_void_p),
        ("experts_post_norm", c_void_p),
        ("expert_scales", c_void_p),
    )


class Threads(ctypes.Structure):
    """struct es_threads"""

    _fields_ = (
        ("count", c_int64),
        ("most_busy", c_int64),
    )


class EntryStruct(ctypes.Structure):
    """struct es_entry"""

    _fields_ = (
        ("sequence", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("pairs", c_void_p),
        ("kept", c_void_p),
        ("start", c_int64),
        ("count", c_int32),
        ("scored", c_int32),
        ("first", c_int32),
        ("keeps_all", c_int32),
        ("status", c_int32),
    )


class DrawRequestStruct(ctypes.Structure):
    """struct es_draw_request"""

    _fields_ = (
        ("ids", c_void_p),
        ("seen", c_void_p),
        ("occurrences", c_void_p),
        ("seen_count", c_int64),
        ("repeat_penalty", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("mask", c_void_p),
        ("mask_words", c_int64),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("key", c_uint32 * 4),
        ("scale", c_float),
        ("noisy", c_int32),
        ("wanted", c_int32),
        ("measures", c_int32),
    )


class DrawnStruct(ctypes.Structure):
    """struct es_drawn"""

    _fields_ = (
        ("count", c_int64),
        ("ids", c_int64 * MOST_DRAWN),
        ("values", c_double * MOST_DRAWN),
        ("mass", c_int64),
        ("spread", c_int64),
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
        ("experts", c_int64),
        ("experts_used", c_int64),
        ("shared_length", c_int64),
        ("experts_normed", c_int64),
        ("expert_scale", c_double),
        ("gates_heads", c_int64),
        ("delta_heads", c_int64),
        ("delta_key_heads", c_int64),
        ("delta_length", c_int64),
        ("delta_kernel", c_int64),
        ("activation", c_int64),
        ("rope_length", c_int64),
        ("rope", c_int64),
        ("norm_epsilon", c_double),
        ("embedding_scale", c_double),
        ("residual_scale", c_double),
        ("score_scale", c_double),
        ("logit_scale", c_double),
        ("score_cap", c_double),
        ("logit_cap", c_double),
        ("query_factors", c_void_p),
        ("query_factor_count", c_int64),
        ("query_span", c_int64),
        ("rope_tables", c_int64),
        ("rope_magnitudes", c_void_p),
        ("rope_frequencies", c_void_p),
        ("long_frequencies", c_void_p),
        ("original_context", c_int64),
        ("layer", POINTER(Layer)),
        ("output_norm", c_void_p),
        ("head", Matrix),
        ("embedding_rows", c_void_p),
        ("embedding_type", c_int64),
        ("inputs", c_int64),
        ("input_length", c_int64),
        ("input_projection", Matrix),
        ("input_norm", c_void_p),
        ("input_rows", c_void_p),
        ("input_type", c_int64),
        ("input_row_scale", c_double),
        ("input_projection_scale", c_double),
        ("input_scale", c_double),
        ("pair_length", c_int64),
        ("pair_projection", Matrix),
        ("pair_token_norm", c_void_p),
        ("pair_hidden_norm", c_void_p),
        ("borrows", c_int64),
        ("passed_on", Matrix),
    )


_FLOATS, _BYTES, _IDS = c_void_p, c_void_p, c_void_p  # addresses: numpy arrays pass theirs

# Calls that take long, and release the interpreter lock.
_LONG: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "es_batch_open": (c_void_p, (POINTER(NativeModelStruct), POINTER(Threads), c_int32)),
    "es_batch_close": (None, (c_void_p,)),
    "es_batch_forward": (c_int32, (c_void_p, POINTER(EntryStruct), c_int32)),
    "es_open": (c_void_p, (c_void_p, c_int64, c_void_p)),
    "es_close": (None, (c_void_p,)),
    "es_forward": (c_int32, (c_void_p, _IDS, c_int32, c_int64, c_int32)),
    "es_forward_tree": (c_int32, (c_void_p, _IDS, c_int32, c_int64, _IDS, c_int32)),
    "es_keep": (c_int32, (c_void_p, _IDS, c_int32, c_int64)),
    "es_copy": (c_int32, (c_void_p, c_void_p, c_int64, c_int64)),
    "es_read_state": (c_int32, (c_void_p, c_int64, _BYTES, c_int64)),
    "es_write_state": (c_int32, (c_void_p, c_int64, _BYTES, c_int64)),
    "es_forget": (c_int32, (c_void_p, c_int64, c_int64)),
    "es_read_part": (c_int32, (c_void_p, c_int64, c_int64, c_int64, _BYTES, c_int64)),
    "es_write_part": (c_int32, (c_void_p, c_int64, c_int64, c_int64, _BYTES, c_int64)),
    "es_relay": (c_int64, (c_int64, _BYTES, c_int64, c_int64, _BYTES)),
    "es_coarsen": (c_int64, (c_int64, _BYTES, c_int64, c_int64, _BYTES, c_int32)),
    "es_memory_take": (c_void_p, (c_int64, c_int32)),
    "es_memory_give": (None, (c_void_p, c_int64)),
    "es_memory_forget": (None, (c_void_p, c_int64, c_int64)),
    "es_checksum": (c_uint64, (_BYTES, c_int64)),
    "es_multiply": (c_int32, (POINTER(Matrix), _FLOATS, c_int64, _FLOATS, c_int32)),
    "es_attend": (
        c_int32,
        (_FLOATS, _FLOATS, c_int64, c_int64, _FLOATS, _IDS, c_int64, c_int64, c_float, _FLOATS, _FLOATS, c_int32),
    ),
}
# Calls of microseconds. They keep the lock: getting it back from a busy Python thread takes milliseconds.
_SHORT: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "es_abi": (c_int32, ()),
    "es_level_name": (c_char_p, (c_int32,)),
    "es_level_runs": (c_bool, (c_int32,)),
    "es_relaid_bytes": (c_int64, (c_int64, c_int64, c_int64)),
    "es_state_bytes": (c_int64, (c_void_p,)),
    "es_state_floor": (c_int64, (c_void_p,)),
    "es_part_bytes": (c_int64, (c_void_p, c_int64, c_int64, c_int64)),
    "es_borrow": (c_int32, (c_void_p, c_void_p, _IDS)),
    "es_use_heads": (c_int32, (c_void_p, POINTER(Matrix), c_int32)),
    "es_keep_hidden": (c_int32, (c_void_p, _IDS, c_int64)),
    "es_hidden": (c_void_p, (c_void_p, c_int64)),
    "es_scores": (POINTER(c_float), (c_void_p,)),
    "es_experts_read": (c_int64, (c_void_p,)),
    "es_abort": (c_bool, (c_void_p,)),
    "es_argmax": (c_int64, (c_void_p, c_int32)),
    "es_best": (c_int64, (_FLOATS, c_int64, c_int32)),
    "es_top_k": (c_int32, (c_void_p, c_int32, c_int64, _IDS, _FLOATS)),
    "es_draw_scratch": (c_int64, (c_int64,)),
    "es_draw": (
        c_int32,
        (_FLOATS, c_int64, POINTER(DrawRequestStruct), c_void_p, POINTER(DrawnStruct), c_int32),
    ),
    "es_normalise": (c_int32, (_FLOATS, _FLOATS, c_double, c_int64, _FLOATS, c_int32)),
    "es_exponential": (c_int32, (_FLOATS, c_int64, _FLOATS, c_int32)),
    "es_join": (c_int32, (c_int64, _FLOATS, _FLOATS, c_int64, _FLOATS, c_int32)),
    "es_cap": (c_int32, (_FLOATS, c_int64, c_float, c_int32)),
    "es_dequantise": (c_int32, (c_int64, _BYTES, c_int64, _FLOATS)),
    "es_turns": (None, (c_void_p, c_int64, _FLOATS)),
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
    """The loaded library. ``levels`` are the instruction sets that run here, the fastest last. ``left_out`` maps each
    level that this processor has but that cannot be used to the reason. ``turns`` are those of
    this process's models, which share its processors.
    """

    api: Any
    build: str
    levels: tuple[str, ...]
    left_out: Mapping[str, str]
    turns: Turns = field(default_factory=Turns, compare=False)


def load() -> NativeLibrary:
    """The library of this installation, loaded once per process.

    Raises RuntimeUnavailableError, with the reason and what to install, if it is missing or does not fit.
    """
    with _LOADING:
        return _load()


@functools.cache
def _load() -> NativeLibrary:
    own = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    # A checkout that several systems share may hold a library of each: those of others only say what is wrong.
    for name in sorted(LIBRARY_NAMES, key=lambda name: not name.endswith(own)):
        if (KERNELS / name).is_file():
            return load_from(KERNELS / name)
    hint = install_hint()
    try:
        reason = (KERNELS / NOTE_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        reason = "its library was not built"
        if _has_sources() and not os.access(KERNELS, os.W_OK):
            reason, hint = f"{KERNELS} cannot be written", "make it writable and install edgespec again"
    raise RuntimeUnavailableError(f"the native runtime is missing: {reason}", hint=hint)


def _has_sources() -> bool:
    """Whether the kernels' sources are here, as in a checkout, which compiles them; a wheel has no sources."""
    return any(KERNELS.glob("level_*.c"))


def install_hint() -> str:
    """How to get a fitting library for this installation."""
    from edgespec.kernels.binary import this_process  # only where something is wrong

    if _has_sources():
        return f"install {_COMPILER} and install edgespec again"
    return (
        f"install the wheel for {this_process()}, or {_COMPILER} and edgespec from its sources "
        "(pip install --force-reinstall --no-cache-dir --no-binary edgespec ...)"
    )


def load_from(path: Path) -> NativeLibrary:
    """Load a library that was built elsewhere from these sources. Raises RuntimeUnavailableError."""
    digest = _checked_digest(path)
    try:
        calls: Any = _Calls(path)
        abi = int(calls.es_abi())
    except (OSError, AttributeError) as error:
        raise RuntimeUnavailableError(_why_unloadable(path, error), hint=install_hint()) from error
    if abi != ABI:
        raise RuntimeUnavailableError(
            f"the native runtime's library has interface {abi} and edgespec needs {ABI}", hint=install_hint()
        )
    wanted = [name for name, number in LEVELS.items() if calls.es_level_runs(number)]
    built = [name for name in wanted if calls.es_level_name(LEVELS[name])]
    levels = _sound_levels(calls, built)
    left_out = {name: _UNSOUND if name in built else _NOT_BUILT for name in wanted if name not in levels}
    return NativeLibrary(api=calls, build=f"{ABI}+{digest[:12]}", levels=levels, left_out=left_out)


def _checked_digest(path: Path) -> str:
    """The library's SHA-256, which the build wrote next to it: damaged code would kill the process.

    A packager of an application may strip or sign the library, so that a frozen one is not compared, and has the
    digest that was written: each signature gives the same kernels another SHA-256, which would discard saved caches.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RuntimeUnavailableError(f"the native runtime's library cannot be read: {error}") from error
    noted, built = path.with_name(path.name + DIGEST_SUFFIX), ""
    with contextlib.suppress(OSError):
        built = noted.read_text(encoding="ascii", errors="replace").partition(" ")[0].strip()
    if getattr(sys, "frozen", False):
        return built or digest
    if built != digest:
        raise RuntimeUnavailableError(
            f"the native runtime's library is damaged or incomplete: it does not match the digest in {noted}",
            hint=_rebuild_hint(),
        )
    return digest


def _rebuild_hint() -> str:
    if _has_sources():
        return f'compile it again: python "{KERNELS / "compile.py"}"'
    return "install edgespec again: pip install --force-reinstall --no-cache-dir --no-deps edgespec"


def _why_unloadable(path: Path, error: Exception) -> str:
    from edgespec.kernels.binary import read_binary, this_process

    here, found = this_process(), None
    with contextlib.suppress(OSError):
        found = read_binary(path)
    if found is not None and not found.runs(here):
        return f"the native runtime's library is for {found}, and this process is {here}"
    return f"the native runtime's library does not load: {error}"


_NOT_BUILT = "the C compiler could not build it; with a newer one, install edgespec again from its sources"
_UNSOUND = "its results here differ from those of portable C"

# Number in GGUF, columns of a block, bytes of a block, and offsets of half-precision numbers that need plausible
# values: scales, scales of minimums, exponents.
_PROBED = (
    (0, 1, 4, (2,)),
    (1, 1, 2, (0,)),
    (30, 1, 2, (0,)),
    (2, 32, 18, (0,)),
    (3, 32, 20, (0, 2)),
    (6, 32, 22, (0,)),
    (7, 32, 24, (0, 2)),
    (8, 32, 34, (0,)),
    (11, 256, 110, (108,)),
    (12, 256, 144, (0, 2)),
    (13, 256, 176, (0, 2)),
    (14, 256, 210, (208,)),
    (18, 256, 98, (0,)),
    (20, 32, 18, (0,)),
    (21, 256, 110, (0,)),
    (23, 256, 136, (0,)),
    (39, 32, 17, (0,)),
)
_TILE_ROWS = 16
_PROBED_INPUTS = 9  # two passes, of 4 and 5
_MANY_INPUTS = 39  # enough for two tiles at a time, in passes of 7 and 8, or of 3 and 4
_NOWHERE = 2**40  # where a tree would start: beyond every probed position
_PROBED_POSITIONS = 300  # more than one block of attention


def _sound_levels(calls: Any, levels: list[str]) -> tuple[str, ...]:
    """The levels whose results here equal those of the portable level: a level that a compiler or a virtual machine
    broke is not offered.

    Checks two small products of each type and a little attention, in some milliseconds for all levels together.
    """
    draw = np.random.default_rng(0)
    rows = _TILE_ROWS
    for number, block, block_bytes, halves in _PROBED:
        columns = 288 if block <= 32 else 512  # more than one group
        x = draw.standard_normal((_PROBED_INPUTS, columns), dtype=np.float32)
        raw = draw.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
        for at in halves:
            raw[:, at : at + 2] = (0x7B, 0x2C)  # the half 0.07; its first byte is a usual exponent of MXFP4
        tiles = np.zeros(calls.es_relaid_bytes(number, rows, columns), dtype=np.uint8)
        calls.es_relay(number, raw.ctypes.data, rows, columns, tiles.ctypes.data)
        few = [_product(calls, name, number, tiles, x) for name in levels]
        levels = _like_the_first(levels, few)
        # The same tile twice and the same inputs again, which portable C need not multiply.
        again = np.tile(np.resize(few[0], (_MANY_INPUTS, rows)), 2)
        tiles, x = np.tile(tiles, 2), np.resize(x, (_MANY_INPUTS, columns))
        many = [_product(calls, name, number, tiles, x) for name in levels[1:]]
        levels = _like_the_first(levels, [again, *many])
    keys, values = draw.standard_normal((2, _PROBED_POSITIONS, 32), dtype=np.float32)
    seen = np.array([[0, _PROBED_POSITIONS], [1, 7]], dtype=np.int64)
    mixed = [np.zeros((2, 32), dtype=np.float32) for _ in levels]
    for name, out in zip(levels, mixed, strict=True):
        calls.es_attend(
            keys.ctypes.data,
            values.ctypes.data,
            len(keys),
            32,
            keys.ctypes.data,  # used as queries as well
            seen.ctypes.data,
            len(seen),
            _NOWHERE,
            0.0,  # no cap
            None,  # no sinks
            out.ctypes.data,
            LEVELS[name],
        )
    return tuple(_like_the_first(levels, mixed))


def _product(
    calls: Any, level: str, number: int, tiles: NDArray[np.uint8], x: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Whole tiles of a type times each row of ``x``."""
    inputs, columns = x.shape
    rows = _TILE_ROWS * tiles.nbytes // int(calls.es_relaid_bytes(number, _TILE_ROWS, columns))
    matrix = Matrix(tiles=tiles.ctypes.data, rows=rows, columns=columns, type=number)
    y = np.zeros((inputs, rows), dtype=np.float32)
    calls.es_multiply(ctypes.byref(matrix), x.ctypes.data, inputs, y.ctypes.data, LEVELS[level])
    return y


def _like_the_first(levels: list[str], found: list[NDArray[np.float32]]) -> list[str]:
    return [name for name, own in zip(levels, found, strict=True) if own.tobytes() == found[0].tobytes()]
