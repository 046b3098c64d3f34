"""Chooses the tokenizer of a GGUF."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.llama.library import load
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from edgespec.text.tokenizers.tokenizer import Tokenizer
from edgespec.text.tokenizers.vocabulary import unsupported


def open_tokenizer(path: Path, header: GgufHeader | None = None) -> Tokenizer:
    """Our own tokenizer if it supports the vocabulary, else llama.cpp's.

    Without a ``header`` the file is read and checked first. Raises ModelFileError, RuntimeUnavailableError.
    """
    header = read_header(path) if header is None else header
    require_tokenizer(path, header)
    return GgufTokenizer(header) if unsupported(header) is None else LlamaTokenizer(path, header)


def require_tokenizer(path: Path, header: GgufHeader) -> None:
    """Raise RuntimeUnavailableError if the vocabulary needs llama.cpp and llama.cpp cannot be used."""
    reason = unsupported(header)
    if reason is not None:
        try:
            load()
        except RuntimeUnavailableError as error:
            what = f"{path.name} needs llama.cpp, because {reason}; {error.message}"
            raise RuntimeUnavailableError(what, hint=error.hint) from error
