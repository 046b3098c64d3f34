"""What a drafter with a trimmed output head needs beside llama.cpp: embeddings for its tokens, ids for its rows.

llama.cpp wants a model's input table and its head to have the same rows. So tokens enter as embeddings, taken from a
file of their own that still has a row for every token of the source, and the head's columns are given the source's
ids again on the way out. Everything outside speaks source ids (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al.,
2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.trimmed_drafter import EmbeddingTable, TrimmedDrafter
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.llama.library import INSTALL_HINT
from edgespec.runtimes.sequence import TrimmedRows

# Rows kept as they enter the model, for tokens that come again: dequantising one takes 0.15 ms in numpy, 2 % of a
# small drafter's forward (0.5B at four bits, two cores). A text has a few thousand different tokens; of 1000 weights
# each they take 16 MB.
_REMEMBERED_ROWS = 4096


class EmbeddingRows:
    """The rows of an embedding file, dequantised as they are asked for; the file is only mapped.

    Raises ModelFileError if the file cannot be mapped or its type cannot be dequantised.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        try:
            import gguf  # a tenth of a second, for those who draft with a trimmed model only
        except ImportError as error:
            raise RuntimeUnavailableError("a trimmed drafter needs the package gguf", hint=INSTALL_HINT) from error

        self.columns = table.columns
        self._scale = np.float32(table.scale)
        try:
            self._rows: Any = np.memmap(table.path, dtype=np.uint8, mode="r", shape=(table.rows, table.row_bytes))
            self._dequantize = functools.partial(gguf.dequantize, qtype=gguf.GGMLQuantizationType[table.type_name])
            self._dequantize(self._rows[:1])
            # Over what it reads and not over this object, which would refer to itself and outlive its last use.
            self._read_one = functools.lru_cache(_REMEMBERED_ROWS)(
                functools.partial(_read_one, self._rows, self._dequantize, self._scale)
            )
        except (KeyError, NotImplementedError) as error:
            reason = f"embeddings of type {table.type_name} cannot be dequantised"
            raise ModelFileError(table.path, reason, hint="export it from a file of another type") from error
        except (OSError, ValueError) as error:
            raise ModelFileError(table.path, f"the file cannot be read: {error}") from error

    def read(self, ids: IdArray) -> LogitsArray:
        """What enters the model for these tokens: float32 (len(ids), columns), to be read only."""
        if len(ids) == 1:
            return self._read_one(int(ids[0]))
        rows: LogitsArray = self._dequantize(self._rows[ids])
        return rows * self._scale


def _read_one(rows: Any, dequantize: Callable[[Any], LogitsArray], scale: np.float32, token: int) -> LogitsArray:
    """Float32 (1, columns)."""
    row = dequantize(rows[token : token + 1]) * scale
    row.flags.writeable = False  # whoever asks next gets the same one
    return row


class TrimmedVocabulary:
    """How source ids enter a trimmed model and leave it again."""

    def __init__(self, artefact: TrimmedDrafter) -> None:
        self.path = artefact.path
        self.vocabulary_size = artefact.embedding.rows
        self.embedding = EmbeddingRows(artefact.embedding)
        self._ids: IdArray = artefact.ids.astype(np.int64)

    def check_loaded(self, api: Any, model_pointer: Any, head_rows: int) -> None:
        """Compare what llama.cpp made of the file with what it will be fed and asked for.

        It reads as many weights a token as it thinks there are, which for some models is not the width of their
        layers. Raises ModelFileError, RuntimeUnavailableError where this build cannot say.
        """
        input_columns = getattr(api, "llama_model_n_embd_inp", None)
        if input_columns is None:
            raise RuntimeUnavailableError(
                "this build of llama.cpp is too old for a drafter with a trimmed head",
                hint="upgrade llama-cpp-python, or draft with the untrimmed model",
            )
        found, expected = (head_rows, int(input_columns(model_pointer))), (len(self._ids), self.embedding.columns)
        if found != expected:
            raise ModelFileError(
                self.path,
                f"llama.cpp reads a head of {found[0]} rows and embeddings of {found[1]} weights instead of "
                f"{expected[0]} and {expected[1]}",
                hint="export it again with `edgespec export`",
            )

    def rows(self, rows: Rows) -> TrimmedRows:
        """The rows of a trimmed head, in source ids."""
        return TrimmedRows(rows, self._ids, self.vocabulary_size)
