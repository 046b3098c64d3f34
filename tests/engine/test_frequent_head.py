"""The frequent head: which rows of its output head a drafter keeps by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray
from edgespec.placement.prepared import prepare_drafter
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native import runtime as native_runtime
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.runtime import FREQUENT_HEAD_ROWS, NativeRuntime, frequent_head_ids, frequent_head_rows
from edgespec.runtimes.runtime import DraftForm, Settings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer
from tests.support.trimmed_folder import write_trimmed_folder

PROFILE = load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
NORMAL, CONTROL, BYTE = 1, 3, 6
KEPT = np.arange(250, 350)


def header(size: int, types: Mapping[int, int] | None = None, model: str = "gpt2") -> GgufHeader:
    """A vocabulary of ``size`` tokens; ``types`` has the kinds of tokens that are not normal."""
    kinds = tuple((types or {}).get(token, NORMAL) for token in range(size))
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.tokens": ("",) * size,
    }
    return GgufHeader(
        path=Path("model.gguf"),
        file_bytes=0,
        version=3,
        architecture="qwen2",
        alignment=32,
        metadata=metadata,
        tensors=(),
        data_offset=0,
    )


# ----------------------------------------------------------------------------------------------- rows


def test_the_frequent_head_has_the_first_tokens_and_the_control_tokens() -> None:
    size = 3 * FREQUENT_HEAD_ROWS
    found = frequent_head_ids(header(size, {size - 1: CONTROL, size - 9: CONTROL, 7: BYTE}))
    assert (found.dtype, len(found)) == (np.int64, FREQUENT_HEAD_ROWS)
    assert list(found) == [*range(FREQUENT_HEAD_ROWS - 2), size - 9, size - 1]


@pytest.mark.parametrize(
    ("size", "model"), [(2 * FREQUENT_HEAD_ROWS - 1, "gpt2"), (32000, "gpt2"), (3 * FREQUENT_HEAD_ROWS, "llama")]
)
def test_small_and_sentencepiece_heads_are_not_shortened(size: int, model: str) -> None:
    assert frequent_head_rows(header(size, model=model)) is None


def test_a_head_of_at_least_twice_the_frequent_rows_is_shortened() -> None:
    assert frequent_head_rows(header(2 * FREQUENT_HEAD_ROWS)) == FREQUENT_HEAD_ROWS


def test_with_only_control_tokens_the_frequent_head_has_the_first_ones() -> None:
    size = 3 * FREQUENT_HEAD_ROWS
    found = frequent_head_ids(header(size, dict.fromkeys(range(size), CONTROL)))
    assert np.array_equal(found, np.arange(FREQUENT_HEAD_ROWS))


# -------------------------------------------------------------------------- drafters with a frequent head


@pytest.fixture
def located(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.drafter))


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> IdArray:
    """Every model gets a frequent head of a hundred rows."""
    require_native()
    monkeypatch.setattr(native_runtime, "frequent_head_ids", lambda _header: KEPT)
    monkeypatch.setattr(native_runtime, "frequent_head_rows", lambda _header: len(KEPT))
    return KEPT


def described(profile: Profile, file: LocatedModel, settings: Settings) -> ModelFacts:
    return prepare_drafter(profile, file, settings, 512).facts


def test_facts_of_a_frequent_head_are_equal_before_and_after_loading(located: LocatedModel, hundred: IdArray) -> None:
    settings = NativeSettings()
    drafter = prepare_drafter(PROFILE, located, settings, 512)
    said = drafter.facts
    model = drafter.load()
    assert model.facts == said
    model.close()
    whole = NativeRuntime().describe(located, settings)
    assert said.settings == {**whole.settings, "head_rows": 100}
    row = (
        said.bytes_per_forward
        - NativeRuntime().describe(located, settings, DraftForm(head_rows=99)).bytes_per_forward
    )
    assert whole.bytes_per_forward - said.bytes_per_forward == row * (whole.vocabulary_size - 100) > 0


def test_only_drafters_in_our_kernels_and_this_process_get_a_frequent_head(
    located: LocatedModel, hundred: IdArray, tmp_path: Path
) -> None:
    native, llama = NativeSettings(), LlamaSettings()
    for profile, settings in (
        (replace(PROFILE, draft_head="whole"), native),
        (replace(PROFILE, draft_isolation="process"), native),
        (PROFILE, llama),
    ):
        assert "head_rows" not in described(profile, located, settings).settings
    folder = write_trimmed_folder(located.path, tmp_path / "trimmed", KEPT.tolist())
    trimmed = Locator(store=Store(Home(tmp_path))).locate(str(folder))
    assert "head_rows" not in described(PROFILE, trimmed, native).settings
    assert "head_rows" not in NativeRuntime().describe(located, native).settings


@pytest.mark.parametrize(
    "sampling", [None, Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0, seed=3, rule="rejection")]
)
def test_an_engine_drafts_with_a_frequent_head_and_keeps_the_text(
    tiny: TinyModels, hundred: IdArray, sampling: Sampling | None
) -> None:
    texts = []
    for head, rows in (("auto", 100), ("whole", None)):
        with tiny.load_speculating(runtime="native", draft_runtime="native", lookup=False, draft_head=head) as engine:
            assert engine.pair.pool.drafter_model().facts.settings.get("head_rows") == rows
            assert "head_rows" not in engine.pair.target.facts.settings
            said = " ".join(engine.plan.reasons)
            assert ("the drafter reads 100 of the" in said) is (rows is not None)
            assert "the drafter's second choices are verified as well" in said
            drafted, plain = (
                answer(engine.session().generate("one two three", max_tokens=60, depth=depth, sampling=sampling))
                for depth in (4, 0)
            )
            assert drafted.stats.accepted > 0
            assert drafted.token_ids == plain.token_ids or (sampling is not None and sampling.rule == "rejection")
            texts.append(plain.token_ids)
    assert texts[0] == texts[1]
