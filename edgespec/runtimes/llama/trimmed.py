"""What llama.cpp needs for a drafter with a trimmed output head: embeddings for tokens, source ids for rows.

llama.cpp requires as many rows in a model's input table as in its head. So tokens enter as embeddings, read from a
separate file with a row for every token of the source, and the columns of the head are mapped back to the source's
ids. All other code uses source ids (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.trimmed_drafter import EmbeddingTable, TrimmedDrafter
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.llama.library import install_hint
from edgespec.runtimes.sequence import TrimmedRows

# Dequantised rows kept for repeated tokens: dequantising a row takes 0.15 ms in numpy, 2 % of a small drafter's
# forward (0.5B at four bits, two cores). A text has a few thousand different tokens; at 1000 weights each they take
# 16 MB.
_REMEMBERED_ROWS = 4096


class EmbeddingRows:
    """The rows of an embedding file, dequantised on demand; the file is only mapped.

    Raises ModelFileError if the file cannot be mapped or its type cannot be dequantised.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        try:
            import gguf  # takes 0.1 s to import, and only trimmed drafters need it
        except ImportError as error:
            raise RuntimeUnavailableError("a trimmed drafter needs the package gguf", hint=install_hint()) from error

        self.columns = table.columns
        self._scale = np.float32(table.scale)
        try:
            self._rows: Any = np.memmap(table.path, dtype=np.uint8, mode="r", shape=(table.rows, table.row_bytes))
            self._dequantize = functools.partial(gguf.dequantize, qtype=gguf.GGMLQuantizationType[table.type_name])
            self._dequantize(self._rows[:1])
            # A closure over its inputs, not over this object: a reference to itself would keep the object alive.
            self._read_one = functools.lru_cache(_REMEMBERED_ROWS)(
                functools.partial(_read_one, self._rows, self._dequantize, self._scale)
            )
        except (KeyError, NotImplementedError) as error:
            reason = f"embeddings of type {table.type_name} cannot be dequantised"
            raise ModelFileError(table.path, reason, hint="export the drafter from a file of another type") from error
        except (OSError, ValueError) as error:
            raise ModelFileError(table.path, f"the file cannot be read: {error}") from error

    def read(self, ids: IdArray) -> LogitsArray:
        """What enters the model for these tokens: float32 (len(ids), columns), read-only."""
        if len(ids) == 1:
            return self._read_one(int(ids[0]))
        rows: LogitsArray = self._dequantize(self._rows[ids])
        return rows * self._scale


def _read_one(rows: Any, dequantize: Callable[[Any], LogitsArray], scale: np.float32, token: int) -> LogitsArray:
    """One dequantised row: float32 (1, columns)."""
    row = dequantize(rows[token : token + 1]) * scale
    row.flags.writeable = False  # later callers get the same array
    return row


class TrimmedVocabulary:
    """Maps source ids to the inputs of a trimmed model, and its outputs back to source ids."""

    def __init__(self, artefact: TrimmedDrafter) -> None:
        self.path = artefact.path
        self.vocabulary_size = artefact.embedding.rows
        self.embedding = EmbeddingRows(artefact.embedding)
        self._ids: IdArray = artefact.ids.astype(np.int64)

    def check_loaded(self, api: Any, model_pointer: Any, head_rows: int) -> None:
        """Compare the loaded model's sizes with those of the file and the embeddings.

        llama.cpp reads as many weights a token as it derives from the file, for some models another number than the
        width of their layers. Raises ModelFileError, or RuntimeUnavailableError if this build cannot report the
        sizes.
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
                hint="export the drafter again with `edgespec export`",
            )

    def rows(self, rows: Rows) -> TrimmedRows:
        """The rows of a trimmed head, in source ids."""
        return TrimmedRows(rows, self._ids, self.vocabulary_size)
