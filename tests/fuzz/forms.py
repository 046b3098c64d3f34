"""Cursors of random schemas take tokens and give them back: the masks are those of fresh cursors."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.random_schemas import lenient_schema, schema
from edgespec.files.gguf.header import read_header
from edgespec.text.grammar.compiled import Forms
from edgespec.text.grammar.form import form_of
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.fuzz.findings import Findings
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.wandering import wander

STEPS = 100  # of each schema


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as place:
        tokenizer = GgufTokenizer(read_header(write_tiny_gguf(Path(place) / "model.gguf")))
        forms = Forms(tokenizer, tokenizer.vocabulary_size)
        for _ in rounds:
            number, kind = chance.randrange(10**9), chance.choice((schema, lenient_schema))
            spacing = chance.choice(("line", "compact", "free"))
            form = form_of(kind(number), spacing=spacing, lenient=True)
            assert form is not None
            size, stops = tokenizer.vocabulary_size, tokenizer.stop_ids
            different = wander(forms.compiled(form).cursor, chance, STEPS, size, stops)
            findings.unless(not different, f"{kind.__name__} {number}, {spacing}: {different[:1]}")
            findings.counts["schemas"] += 1
        tokenizer.close()
