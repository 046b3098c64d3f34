"""Which tokenizer a GGUF gets."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.llama.library import INSTALL_HINT
from edgespec.text.gguf_tokenizer import GgufTokenizer
from edgespec.text.llama_tokenizer import LlamaTokenizer
from edgespec.text.tokenizer import Tokenizer
from edgespec.text.vocabulary import unsupported


def open_tokenizer(path: Path, header: GgufHeader | None = None) -> Tokenizer:
    """Our own where the vocabulary is one that it knows, llama.cpp's otherwise.

    The file is checked first, unless its ``header`` was read before. Raises ModelFileError, RuntimeUnavailableError.
    """
    header = read_header(path) if header is None else header
    reason = unsupported(header)
    if reason is None:
        return GgufTokenizer(header)
    try:
        return LlamaTokenizer(path, header)
    except RuntimeUnavailableError as error:
        raise RuntimeUnavailableError(f"{path.name} needs llama.cpp: {reason}", hint=INSTALL_HINT) from error
