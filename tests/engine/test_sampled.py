"""Sampled answers: the text of plain decoding with the same seed, without copying whole score rows to numpy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from edgespec.decoding import sampling as sampling_module
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.files.gguf.header import read_header
from edgespec.interfaces import rows as rows_module
from edgespec.runtimes.native import draws as draws_module, runtime as native_runtime
from edgespec.runtimes.native.cache import NativeCache
from edgespec.runtimes.process.frames import Frame
from edgespec.runtimes.sequence import TrimmedRows
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import SHAPE, TinyModels, answer, invent_measurements, load_drafter
from tests.support.trimmed_folder import write_trimmed_folder

SAMPLINGS = (
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.7, top_p=0.95, seed=8),
    Sampling(temperature=1.0, top_k=40, seed=9),
    Sampling(temperature=1.0, min_p=0.05, seed=10),
    Sampling(temperature=0.8, top_p=0.9, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=11),
)
DEPTH = 3


def whole(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"draft_runtime": "native"}


def frequent_head(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    kept = np.arange(read_header(tiny.drafter).vocabulary_size - 20)
    monkeypatch.setattr(native_runtime, "frequent_head_ids", lambda _header: kept)
    monkeypatch.setattr(native_runtime, "frequent_head_rows", lambda _header: len(kept))
    return {"draft_runtime": "native"}


def padded(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    drafter = write_tiny_gguf(folder / "padded.gguf", seed=4, extra_tokens=9, **SHAPE)  # type: ignore[arg-type]
    return {"draft": str(drafter), "draft_runtime": "native"}


def padded_llama(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {**padded(tiny, folder, monkeypatch), "draft_runtime": "llama"}


def llama(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"draft_runtime": "llama"}


def trimmed(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    kept = [token for token in range(640) if token % 4]
    return {"draft": str(write_trimmed_folder(tiny.drafter, folder / "trimmed", kept))}


def process(tiny: TinyModels, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"draft_runtime": "native", "draft_isolation": "process"}


def answers(engine: Engine, depth: int) -> list[tuple[int, ...]]:
    found = []
    with engine.session() as session:
        for sampling in SAMPLINGS:
            done = answer(session.generate("hello world", max_tokens=40, sampling=sampling, depth=depth))
            assert (done.stats.proposed > 0) == (depth > 0)
            found.append(done.token_ids)
            session.clear()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "drafting"),
    [
        *(("native", each) for each in (whole, frequent_head, padded, padded_llama, llama, trimmed, process)),
        ("llama", whole),
    ],
)
def test_sampled_drafting_copies_no_score_rows_and_keeps_the_text(
    target: str,
    drafting: Callable[[TinyModels, Path, pytest.MonkeyPatch], dict[str, Any]],
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_native()

    def refuse(*_arguments: object) -> NoReturn:
        raise AssertionError("a row of scores was read into numpy")

    settings = drafting(tiny, tmp_path, monkeypatch)
    with tiny.load(runtime=target, lookup=False, **settings) as engine:
        invent_measurements(engine)
        load_drafter(engine)
        for module in (rows_module, draws_module):
            monkeypatch.setattr(module, "draw_from", refuse)
        for name in ("penalised", "truncated", "first_to_arrive"):
            monkeypatch.setattr(sampling_module, name, refuse)
        monkeypatch.setattr(NativeCache, "row", refuse)
        monkeypatch.setattr(TrimmedRows, "logits", refuse)
        monkeypatch.setattr(Frame, "scores", refuse)
        assert answers(engine, 0) == answers(engine, DEPTH)


def test_penalties_copy_only_the_score_rows_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without penalties is not copied."""
    scores = np.zeros(1000, dtype=np.float32)
    rows = draws_module.DrawnRows(1, lambda _: scores)
    asked = list[int]()
    monkeypatch.setattr(draws_module.NativeDraws, "draw", lambda _self, address, *_others: asked.append(address))
    rows.draw(0, rows_module.DrawRequest())
    rows.draw(0, rows_module.DrawRequest(seen={1: 1}, presence_penalty=1.0))
    assert asked[0] == scores.ctypes.data != asked[1]


def test_presence_and_frequency_penalties_count_the_tokens_of_the_answer(tiny: TinyModels) -> None:
    sampling, prompt = Sampling(presence_penalty=1.0, frequency_penalty=0.5), list(range(4, 600, 2))
    with tiny.load_speculating() as engine:
        text = list(prompt)
        with closing(engine.pair.target.open(engine.plan.context_length)) as target:
            target.forward(prompt[:-1], 0)
            for _ in range(20):
                scores = target.forward(text[-1:], 1).logits(0).astype(np.float64)
                counts = np.bincount(text[len(prompt) :], minlength=len(scores))
                text.append(int(np.argmax(scores - 1.0 * (counts > 0) - 0.5 * counts)))
        assert set(prompt) & set(text[len(prompt) :]), "tokens of the prompt are as likely as others"
        with engine.session() as session:
            for depth in (0, DEPTH):
                found = answer(session.generate(prompt, raw=True, max_tokens=20, sampling=sampling, depth=depth))
                assert list(found.token_ids) == text[len(prompt) :]
                session.clear()
