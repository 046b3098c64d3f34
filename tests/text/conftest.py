"""The tokenizer of the tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.files.gguf.header import read_header
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.support.tiny_models import TinyModels


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModels) -> Iterator[GgufTokenizer]:
    tokenizer = GgufTokenizer(read_header(tiny.target))
    yield tokenizer
    tokenizer.close()
