"""Draws computed by the kernels: the same tokens as ``interfaces.drawing``, in a tenth of the time."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import Any

import numpy as np

from edgespec.errors import ForwardError, RuntimeUnavailableError
from edgespec.interfaces.drawing import (
    Drawn,
    DrawRequest,
    IdArray,
    add_bias,
    draw_from,
    none_allowed,
    not_finite,
    seen_columns,
)
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.native.library import (
    BAD_REQUEST,
    LEVELS,
    NONE_ALLOWED,
    NOT_FINITE,
    DrawnStruct,
    DrawRequestStruct,
    load,
)


class NativeDraws:
    """Draws at one instruction set level, one at a time, with scratch memory. For any thread."""

    def __init__(self, api: Any, level: str) -> None:
        self._api = api
        self._level = LEVELS[level]
        self._request, self._drawn = DrawRequestStruct(), DrawnStruct()
        self._scratch = np.empty(0, dtype=np.uint8)
        self._lock = threading.Lock()

    def draw(self, address: int, count: int, request: DrawRequest, ids: IdArray | None) -> Drawn:
        """Draw from ``count`` scores at ``address``, and leave the scores unchanged. As ``Rows.draw``."""
        with self._lock:
            if not request.bias:
                return self._draw(address, count, request, ids)
            scores = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
            columns, before = add_bias(scores, request, ids)
            try:
                return self._draw(address, count, request, ids)
            finally:
                scores[columns] = before

    def _draw(self, address: int, count: int, request: DrawRequest, ids: IdArray | None) -> Drawn:
        columns, occurrences = seen_columns(request.seen, count, ids) if request.seen else (None, None)
        own, drawn = self._request, self._drawn
        named = None if ids is None else np.ascontiguousarray(ids)
        own.ids = None if named is None else named.ctypes.data
        own.seen, own.occurrences, own.seen_count = None, None, 0
        if columns is not None and occurrences is not None:
            own.seen, own.occurrences, own.seen_count = columns.ctypes.data, occurrences.ctypes.data, len(columns)
        mask = None if request.mask is None else np.ascontiguousarray(request.mask)
        own.mask, own.mask_words = (None, 0) if mask is None else (mask.ctypes.data, len(mask))
        own.repeat_penalty = request.repeat_penalty
        own.presence_penalty, own.frequency_penalty = request.presence_penalty, request.frequency_penalty
        own.top_k, own.top_p, own.min_p = min(request.top_k, count), request.top_p, request.min_p
        own.noisy = request.key is not None
        if request.key is not None:
            own.key[:] = request.key
        own.scale, own.wanted, own.measures = request.scale, request.wanted, request.measure
        if math.isfinite(own.scale):  # the kernels take another scale, and draw nothing
            code = self._api.es_draw(address, count, own, self._memory(count), drawn, self._level)
        else:
            code = BAD_REQUEST
        if code == NOT_FINITE:
            raise not_finite(drawn.values[0], drawn.ids[0], request)
        if code == NONE_ALLOWED:
            raise none_allowed()
        if code:
            raise ForwardError(f"a draw from {count} scores was refused", code=code)
        found = drawn.count
        return Drawn.of(drawn.ids[:found], drawn.values[:found], request, drawn.mass, drawn.spread)

    def _memory(self, count: int) -> int:
        needed = self._api.es_draw_scratch(count)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.uint8)
        return self._scratch.ctypes.data


class DrawnRows(Rows):
    """Rows of another runtime in this process: the kernels, if available, draw from them."""

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        row, draws = self._row(index), _fastest()
        if draws is None:
            return draw_from(row, request, ids)
        # Bias and penalties are written into the scores for a moment, and memory of other owners may be read-only.
        changed = request.seen or request.bias
        row = np.array(row, dtype=np.float32) if changed else np.ascontiguousarray(row, dtype=np.float32)
        return draws.draw(row.ctypes.data, len(row), request, ids)

    def first(self, size: int) -> Rows:
        return DrawnRows(self.count, lambda index: self._row(index)[:size])


@functools.cache
def _fastest() -> NativeDraws | None:
    try:
        library = load()
    except RuntimeUnavailableError:
        return None
    return NativeDraws(library.api, library.levels[-1])
