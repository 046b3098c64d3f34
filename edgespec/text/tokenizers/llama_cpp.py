"""llama.cpp's tokenizer, for vocabularies that only llama.cpp supports. Loads a GGUF without its weights."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import ClosedError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.thread import WorkerThread
from edgespec.text.tokenizers.tokenizer import ControlToken, FillInTokens
from edgespec.text.tokenizers.vocabulary import MARKS, StatedKinds, further_tokens, suppressed

# llama.h's LLAMA_TOKEN_ATTR_*: control tokens, and tokens that strip blanks.
_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 7, 1 << 8


def _load_vocabulary(api: Any, path: Path) -> Any:
    """llama.cpp's pointer to a model without its weights; may be null.

    Runs on a separate thread: llama.cpp logs while it loads, and a Ctrl-C inside a native callback would be dropped.
    """
    params = api.llama_model_default_params()
    params.vocab_only = True
    loaded: list[Any] = []
    loader = WorkerThread("edgespec-load", lambda: None)  # cannot be cancelled; takes a moment
    try:
        loader.run(lambda: loaded.append(api.llama_model_load_from_file(os.fsencode(path), params)))
    except BaseException:
        for pointer in filter(None, loaded):
            api.llama_model_free(pointer)
        raise
    finally:
        loader.close()
    return loaded[0]


class LlamaTokenizer:
    """A GGUF's vocabulary, loaded by llama.cpp without the weights. Implements Tokenizer; thread-safe.

    Without a ``header`` the file is read and checked first. Raises ModelFileError, RuntimeUnavailableError.
    """

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        self._header = read_header(path) if header is None else header
        self._api: Any = load().api
        pointer = _load_vocabulary(self._api, path)
        if not pointer:
            raise ModelFileError(
                path, "llama.cpp could not load its vocabulary", hint="run with --debug to see llama.cpp's log"
            )
        self._pointer: Any = pointer
        self._vocabulary: Any = self._api.llama_model_get_vocab(pointer)
        self._free = weakref.finalize(self, self._api.llama_model_free, pointer)
        self._free.atexit = False
        self._lock = threading.Lock()
        self._pieces: dict[int, bytes] = {}
        self._controls: dict[int, ControlToken | None] = {}
        self._size = int(self._api.llama_vocab_n_tokens(self._vocabulary))

    @property
    def vocabulary_size(self) -> int:
        return self._size

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        with self._lock:
            is_stop, vocabulary = self._api.llama_vocab_is_eog, self._open_vocabulary()
            ends = [token for token in range(self._size) if is_stop(vocabulary, token)]
            return frozenset(token for token in ends if not self._is_text(token)) | self._kinds.ends

    @cached_property
    def suppressed(self) -> frozenset[int]:
        return suppressed(self._header, self._size)

    @cached_property
    def marks(self) -> Mapping[int, ControlToken]:
        found = {text: self.encode(text, special=True) for text in MARKS}
        shown = {text: ids[0] for text, ids in found.items() if len(ids) == 1 and self.control_token(ids[0]) is None}
        with self._lock:
            return {token: ControlToken(text=text) for text, token in shown.items() if not self._is_text(token)}

    def _is_text(self, token: int) -> bool:
        """Whether the file calls it ordinary text; llama.cpp decides by some well-known texts."""
        return self._kinds.is_text(token, self._text_of(token))

    @cached_property
    def _kinds(self) -> StatedKinds:
        api, vocabulary = self._api, self._open_vocabulary()
        fill_in = (api.llama_vocab_fim_pre, api.llama_vocab_fim_suf, api.llama_vocab_fim_mid)
        return StatedKinds(self._header, self._size, fills_in=all(each(vocabulary) >= 0 for each in fill_in))

    @cached_property
    def bos_token(self) -> str:
        with self._lock:
            return self._text_of(int(self._api.llama_vocab_bos(self._open_vocabulary())))

    @cached_property
    def eos_token(self) -> str:
        with self._lock:
            return self._text_of(int(self._api.llama_vocab_eos(self._open_vocabulary())))

    @cached_property
    def template_tokens(self) -> Mapping[str, str]:
        with self._lock:
            found = further_tokens(self._header, self._size).items()
            further = {name: self._text_of(token) for name, token in found}
        return {"bos_token": self.bos_token, "eos_token": self.eos_token, **further}

    @cached_property
    def fill_in(self) -> FillInTokens | None:
        api = self._api
        named = (
            api.llama_vocab_fim_pre,
            api.llama_vocab_fim_suf,
            api.llama_vocab_fim_mid,
            api.llama_vocab_fim_rep,
            api.llama_vocab_fim_sep,
        )
        with self._lock:
            vocabulary = self._open_vocabulary()
            ids = [int(each(vocabulary)) for each in named]
            found = [token if token >= 0 and not self._is_text(token) else None for token in ids]
        prefix, suffix, middle, repository, file = found
        if prefix is None or suffix is None or middle is None:
            return None
        return FillInTokens(prefix=prefix, suffix=suffix, middle=middle, repository=repository, file=file)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the model expects a begin-of-sequence token before raw text."""
        with self._lock:
            return bool(self._api.llama_vocab_get_add_bos(self._open_vocabulary()))

    def _text_of(self, token: int) -> str:
        if token < 0:
            return ""
        text: bytes | None = self._api.llama_vocab_get_text(self._open_vocabulary(), token)
        return (text or b"").decode("utf-8", "replace")

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        raw = text.encode("utf-8", "replace")
        # No vocabulary gives more than one token a byte, plus the begin and end tokens.
        capacity = len(raw) + 8
        ids = (ctypes.c_int32 * capacity)()
        add_bos = add_bos and self.adds_bos
        tokenize = self._api.llama_tokenize
        with self._lock:
            vocabulary = self._open_vocabulary()
            count = int(tokenize(vocabulary, raw, len(raw), ids, capacity, add_bos, special))
            if count < 0:
                capacity = -count
                ids = (ctypes.c_int32 * capacity)()
                count = int(tokenize(vocabulary, raw, len(raw), ids, capacity, add_bos, special))
        return list(ids[: max(count, 0)])

    def control_token(self, token: int) -> ControlToken | None:
        if token not in self._controls:
            with self._lock:
                kind = int(self._api.llama_vocab_get_attr(self._open_vocabulary(), token))
                text = self._text_of(token)
                is_control = kind & (_UNKNOWN | _CONTROL) and text and not self._is_text(token)
            self._controls[token] = (
                ControlToken(text=text, strips_left=bool(kind & _LSTRIP), strips_right=bool(kind & _RSTRIP))
                if is_control
                else None
            )
        return self._controls[token]

    def token_bytes(self, token: int) -> bytes:
        known = self._pieces.get(token)
        if known is None:
            if not 0 <= token < self._size:
                return b""
            known = self._pieces[token] = self._piece(token)
        return known

    def _piece(self, token: int) -> bytes:
        if token in self.stop_ids or self.control_token(token) is not None:
            return b""
        with self._lock:
            vocabulary, is_text = self._open_vocabulary(), self._is_text(token)
            size = 64
            while True:
                buffer = ctypes.create_string_buffer(size)
                count = int(self._api.llama_token_to_piece(vocabulary, token, buffer, size, 0, is_text))
                if count >= 0:
                    return buffer.raw[:count]
                size = -count

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, invalid UTF-8 replaced."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def _open_vocabulary(self) -> Any:
        if self._pointer is None:
            raise ClosedError("this tokenizer is closed")
        return self._vocabulary

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._pointer = None
            self._free()
