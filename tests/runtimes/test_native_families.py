"""Every architecture goes through the same: logits of llama.cpp and transformers, and equal bits in every setting.

``test_native_agreement`` compares each with llama.cpp, ``tests/export/test_hf_families`` with transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.architectures import table
from edgespec.architectures.table import ARCHITECTURES
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.library import OK
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.export.transformers_models import recorded
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_batches import Work, batch_of
from tests.support.native_models import KINDS, VARIANTS, Files, some_tokens

LEVELS = require_native().levels
CONTEXT, START, ROWS = 300, 60, 32  # beyond the windows; longer than the original contexts
# Of several tiny models of an architecture the one with most of its properties; of others the first.
FULLEST = (
    "mistral3 of long contexts",
    "phi3 of long contexts",
    "olmo2 with windows and YaRN",
    "gemma2 Q8_0",
    "gemma4 of shared caches Q8_0",
)
KIND_OF = {
    str(settings.get("architecture", "llama")): kind
    for kinds in (reversed((KINDS | VARIANTS).items()), ((kind, (KINDS | VARIANTS)[kind]) for kind in FULLEST))
    for kind, settings in kinds
}
NOT_EASY = {"gemma3", "gpt-oss", "gemma4", "qwen35", "qwen35moe"}
MOST_LINES = 60  # of the file of an easy family
EXPERTS = {name for name, each in ARCHITECTURES.items() if each.experts is not None}


def test_every_architecture_is_compared_with_llama_cpp_and_with_transformers_and_is_a_short_file() -> None:
    assert set(KIND_OF) == set(ARCHITECTURES)
    compared = {found["config"]["architectures"][0] for found in recorded().values()}
    for name, architecture in ARCHITECTURES.items():
        classes = set(architecture.saved.classes) - architecture.saved.multimodal
        assert classes <= compared, name
        if name not in NOT_EASY:
            assert classes or name in EXPERTS, name
            lines = Path(table.__file__).with_name(f"{name}.py").read_text(encoding="utf-8").count("\n")
            assert lines <= MOST_LINES, (name, lines)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("families"))


def rows_of(model: NativeModel, tokens: list[int], sizes: Iterator[int]) -> list[LogitsArray]:
    """The rows behind the first ``START``, computed in forwards of these sizes."""
    with model.open(CONTEXT) as sequence:
        sequence.forward(tokens[:START], 0)
        found: list[LogitsArray] = []
        while sequence.length < len(tokens):
            piece = tokens[sequence.length :][: next(sizes)]
            found += logits(sequence.forward(piece, len(piece)))
        return found


def always(width: int) -> Iterator[int]:
    while True:
        yield width


def any_width(source: random.Random) -> Iterator[int]:
    while True:
        yield source.randint(1, 32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_every_architecture_have_the_same_bits_in_every_setting(files: Files, architecture: str) -> None:
    path, source = files(KIND_OF[architecture]), random.Random(architecture)
    tokens = some_tokens(path, START + ROWS)
    with load_native(path, NativeSettings()) as model:
        plain = rows_of(model, tokens, always(1))
        for width in range(2, 33):
            assert equal(rows_of(model, tokens, always(width)), plain), width
    for level in LEVELS:
        for threads in (1, source.choice((2, 3, 7))):
            with load_native(path, NativeSettings(threads=threads, level=level)) as model:
                assert equal(rows_of(model, tokens, any_width(source)), plain), (threads, level)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_every_architecture_have_the_same_bits_in_random_batches(files: Files, architecture: str) -> None:
    path, source = files(KIND_OF[architecture]), random.Random(architecture)
    drawn = some_tokens(path, 4 * (START + ROWS))
    texts = [drawn[first::4] for first in range(4)]
    with load_native(path, NativeSettings(threads=1)) as model:
        plain = [b"".join(row.tobytes() for row in rows_of(model, text, always(1))) for text in texts]
        for threads in (1, 3):
            with batch_of(model, threads, source.choice(list(LEVELS))) as batch:
                caches, done, found = [batch.open(CONTEXT) for _ in texts], [0] * 4, [b""] * 4
                while unfinished := [number for number in range(4) if done[number] < len(texts[number])]:
                    work = []
                    for number in source.sample(unfinished, source.randint(1, len(unfinished))):
                        first = done[number]
                        most = START - first if first < START else source.randint(1, 16)
                        piece = texts[number][first : first + most]
                        work.append(Work(caches[number], piece, first, len(piece) if first >= START else 0))
                    assert batch.forward(work) == [OK] * len(work)
                    for each in work:
                        number = caches.index(each.cache)
                        done[number] += len(each.tokens)
                        found[number] += each.cache.scores(each.scored).tobytes() if each.scored else b""
            assert found == plain, threads
