"""Chooses the tokenizer of a GGUF."""

from __future__ import annotations

from collections.abc import Callable
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
    """The tokenizer that ``choose_tokenizer`` chooses. Without a ``header`` the file is read and checked first.

    Raises ModelFileError, RuntimeUnavailableError.
    """
    return choose_tokenizer(path, read_header(path) if header is None else header)()


def choose_tokenizer(path: Path, header: GgufHeader) -> Callable[[], Tokenizer]:
    """What opens our own tokenizer if it supports the vocabulary, else llama.cpp's.

    Raises RuntimeUnavailableError if the vocabulary needs llama.cpp and llama.cpp cannot be used. Opening raises
    ModelFileError.
    """
    reason = unsupported(header)
    if reason is None:
        return lambda: GgufTokenizer(header)
    try:
        load()
    except RuntimeUnavailableError as error:
        what = f"{path.name} needs llama.cpp, because {reason}; {error.message}"
        raise RuntimeUnavailableError(what, hint=error.hint) from error
    return lambda: LlamaTokenizer(path, header)
