"""What llama.cpp drafts behind a text: by a layer in the target's file, or by Gemma 4's assistant.

The steps are those of `draft-mtp` (common/speculative.cpp), of which llama-cpp-python's libraries hold the forwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.llama.library import load

__all__ = ["llama_draft"]

# Functions of C++ (src/llama-ext.h), by the names that the library exports: a context, flags or a row.
_KEEP_ROWS = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_ROW = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"
_ROOM = 256


def llama_draft(
    target: Path, tokens: Sequence[int], count: int, *, assistant: Path | None = None
) -> tuple[list[int], list[LogitsArray]]:
    """The ``count`` likeliest tokens behind a text, each with its scores."""
    with ExitStack() as stack:
        found = _Contexts(stack, target, assistant)
        before, last = list(tokens[:-1]), len(tokens) - 1
        found.read(found.target, before, range(last))
        hidden = [found.row(found.target, index) for index in range(last)]
        if assistant is None:  # its own cache of pairs
            found.read(found.drafter, before, range(last), [np.zeros_like(hidden[0]), *hidden[:-1]])
        token, row = tokens[-1], hidden[-1]
        drafted, scores = list[int](), list[LogitsArray]()
        for step in range(count):
            position = last + (step if assistant is None else 0)
            found.read(found.drafter, [token], [position], [row], scored=True)
            row = found.row(found.drafter, 0)
            scores.append(found.scores())
            drafted.append(token := int(scores[-1].argmax()))
        return drafted, scores


class _Contexts:
    """A target's context, and that of what drafts for it. ``stack`` frees them."""

    def __init__(self, stack: ExitStack, target: Path, assistant: Path | None) -> None:
        self._api: Any = load().api
        self._stack = stack
        model = self._loaded(target)
        drafting = model if assistant is None else self._loaded(assistant)
        self.target = self._opened(model, None)
        self.drafter = self._opened(drafting, self.target)
        self._width = int(self._api.llama_model_n_embd_out(model))
        self._vocabulary = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(drafting)))
        keep = self._api._lib[_KEEP_ROWS]
        keep.argtypes, keep.restype = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool), None
        keep(self.target, True, False)  # of all tokens
        keep(self.drafter, True, True)  # of scored ones
        self._row = self._api._lib[_ROW]
        self._row.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        self._row.restype = ctypes.POINTER(ctypes.c_float)

    def _loaded(self, path: Path) -> Any:
        params = self._api.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts, params.load_mtp = 0, False, True
        model = self._api.llama_model_load_from_file(str(path).encode(), params)
        assert model
        self._stack.callback(self._api.llama_model_free, model)
        return model

    def _opened(self, model: Any, target: Any) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _ROOM
        params.n_seq_max = 1
        params.n_outputs_max = _ROOM
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 1  # halves
        params.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if target is not None:
            params.ctx_type, params.ctx_other = self._api.LLAMA_CONTEXT_TYPE_MTP, target
        context = self._api.llama_init_from_model(model, params)
        assert context
        self._stack.callback(self._api.llama_free, context)
        return context

    def read(
        self,
        context: Any,
        tokens: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[np.ndarray] = (),
        *,
        scored: bool = False,
    ) -> None:
        """A forward of tokens, each with the hidden row of the one before where ``rows`` are given."""
        api = self._api
        batch = api.llama_batch_ext_init(context)
        for index, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            assert api.llama_batch_ext_add_token(batch, 0, token) == index
            assert api.llama_batch_ext_set_pos(batch, index, ctypes.byref(ctypes.c_int32(position)))
            if rows:
                address = rows[index].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                assert api.llama_batch_ext_set_embd_token(batch, index, api.llama_embd(address, 1, self._width))
            if scored or index == len(tokens) - 1:
                assert api.llama_batch_ext_set_output_logits(batch, index, True)
        status = api.llama_process(context, api.LLAMA_PROCESS_TYPE_DECODE, batch)
        api.llama_batch_ext_free(batch)
        assert status == 0

    def row(self, context: Any, index: int) -> np.ndarray:
        """The hidden row that the last forward gave for a token."""
        found = np.ctypeslib.as_array(self._row(context, index), (self._width,))
        return np.array(found, dtype=np.float32)

    def scores(self) -> LogitsArray:
        """Of the one token of the drafter's last forward."""
        found = np.ctypeslib.as_array(self._api.llama_get_logits_ith(self.drafter, 0), (self._vocabulary,))
        return np.array(found, dtype=np.float32)
