"""Damaged headers of GGUF files, through reader, layout, tokenizer and template: EdgespecError, or a usable file."""

from __future__ import annotations

import contextlib
import random
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.native.layout import unsupported_reason
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.vocabulary import unsupported
from tests.fuzz.findings import Findings
from tests.support.native_models import ASSISTANT, SHARING
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf

HEADER_BYTES = 60_000
# Forms of layers: states, experts with a shared one, a layer that drafts, shared caches, an assistant.
FORMS: tuple[dict[str, Any], ...] = (
    {"architecture": "qwen35", "drafting": ()},
    {"architecture": "qwen35moe", "shared": 64, "drafting": ("shared_head_head",)},
    SHARING,
    ASSISTANT,
)
SLOW_S = 5.0
TEXT = "hello <|im_end|> wörld 😀"


def damaged(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    end = min(len(data) - 8, HEADER_BYTES)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at, kind = chance.randrange(24 if chance.random() < 0.1 else end), chance.random()
        if kind < 0.5:
            data[at] = chance.getrandbits(8)
        elif kind < 0.65:
            data[at : at + 4] = struct.pack("<I", chance.choice((0, 1, 2**31, 2**32 - 1, 255, 7)))
        elif kind < 0.8:
            data[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**63, 2**64 - 1, 2**40, 300)))
        elif kind < 0.9:
            data[at : at + 4] = b"\xff\xfe\x00\x80"
        else:
            del data[at : at + chance.choice((1, 2, 8))]
    if chance.random() < 0.05:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def use(path: Path, findings: Findings) -> None:
    """Read a header and what its file says about text. Raises EdgespecError."""
    header = read_header(path)
    findings.counts["headers"] += 1
    with contextlib.suppress(EdgespecError):
        findings.counts["layouts" if unsupported_reason(header) is None else "layouts that are not computed"] += 1
    if unsupported(header) is not None:
        return
    tokenizer = GgufTokenizer(header)
    findings.counts["tokenizers"] += 1
    ids = tokenizer.encode(TEXT, special=True)
    findings.unless(all(0 <= each < tokenizer.vocabulary_size for each in ids), "an id is out of range")
    tokenizer.detokenize(ids)
    if header.chat_template is not None:
        template = ChatTemplate(header.chat_template, tokens=tokenizer.template_tokens)
        template.render([{"role": "user", "content": TEXT}])
        findings.counts["prompts"] += 1


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        wholes = [
            write_tiny_gguf(path, seed=1).read_bytes(),
            write_tiny_gguf(path, seed=2, vocabulary=("▁", "a", "b", "▁a", "ab")).read_bytes(),
            *(write_tiny_gguf(path, vocabulary=VOCABULARY[:20], **form).read_bytes() for form in FORMS),
        ]
        for _ in rounds:
            path.write_bytes(damaged(chance.choice(wholes), chance))
            started = time.monotonic()
            try:
                use(path, findings)
            except EdgespecError as error:
                findings.counts[type(error).__name__] += 1
            except Exception as error:  # anything else is a finding
                findings.unless(False, f"{type(error).__name__}: {error}")
            findings.unless(time.monotonic() - started < SLOW_S, "a header took seconds")
