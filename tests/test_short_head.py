"""Which rows of its head a drafter has by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import opening
from edgespec.decoding.contracts import IdArray
from edgespec.files.gguf_types import GgufHeader
from edgespec.files.locations import Home
from edgespec.files.store import Store
from edgespec.locate import LocatedModel, Locator
from edgespec.opening import describe, describe_drafter, drafter_memory, open_drafter
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama import LlamaSettings
from edgespec.runtimes.native import NativeSettings
from edgespec.runtimes.restarting import WorkerSettings
from edgespec.short_head import SHORT_HEAD_ROWS, short_head_ids
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

PROFILE = load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
NORMAL, CONTROL, BYTE = 1, 3, 6
KEPT = np.arange(250, 350)


def header(size: int, types: Mapping[int, int] | None = None, model: str = "gpt2") -> GgufHeader:
    """A vocabulary of so many tokens; ``types`` are those that are not normal ones."""
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


# ----------------------------------------------------------------------------------------------- which rows


def test_it_is_the_first_merges_and_what_is_always_kept() -> None:
    size = 3 * SHORT_HEAD_ROWS
    found = short_head_ids(header(size, {size - 1: CONTROL, size - 9: CONTROL, 7: BYTE}))
    assert found is not None
    assert (found.dtype, len(found)) == (np.int64, SHORT_HEAD_ROWS)
    assert list(found) == [*range(SHORT_HEAD_ROWS - 2), size - 9, size - 1]


@pytest.mark.parametrize(
    ("size", "model"), [(2 * SHORT_HEAD_ROWS - 1, "gpt2"), (32000, "gpt2"), (3 * SHORT_HEAD_ROWS, "llama")]
)
def test_heads_that_stay_whole(size: int, model: str) -> None:
    assert short_head_ids(header(size, model=model)) is None


def test_from_twice_its_length_on_a_head_is_shortened() -> None:
    assert short_head_ids(header(2 * SHORT_HEAD_ROWS)) is not None


def test_a_vocabulary_of_special_tokens_stays_whole() -> None:
    size = 3 * SHORT_HEAD_ROWS
    assert short_head_ids(header(size, dict.fromkeys(range(size), CONTROL))) is None


# ---------------------------------------------------------------------------------------------- who gets it


@pytest.fixture
def located(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.drafter))


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> IdArray:
    """Every model has a short head of a hundred rows."""
    require_native()
    monkeypatch.setattr(opening, "short_head_ids", lambda _header: KEPT)
    return KEPT


def test_facts_before_and_after_loading_agree(located: LocatedModel, hundred: IdArray) -> None:
    settings = NativeSettings()
    said = describe_drafter(PROFILE, located, settings)
    model = open_drafter(PROFILE, located, settings, WorkerSettings())
    assert model.facts == said
    model.close()
    whole = describe(located, settings)
    assert said.settings == {**whole.settings, "head_rows": 100}
    row = said.bytes_per_forward - describe(located, settings, head_rows=99).bytes_per_forward
    assert whole.bytes_per_forward - said.bytes_per_forward == row * (whole.vocabulary_size - 100) > 0
    memory = drafter_memory(PROFILE, located, 512, settings)
    other = drafter_memory(replace(PROFILE, draft_head="whole"), located, 512, settings)
    assert memory.total_bytes - other.total_bytes == 100 * row


def test_only_drafters_in_our_own_kernels_and_process_get_it(located: LocatedModel, hundred: IdArray) -> None:
    native, llama = NativeSettings(), LlamaSettings()
    for profile, settings in (
        (replace(PROFILE, draft_head="whole"), native),
        (replace(PROFILE, draft_isolation="process"), native),
        (PROFILE, llama),
    ):
        assert "head_rows" not in describe_drafter(profile, located, settings).settings
    assert "head_rows" not in describe(located, native).settings


def test_an_engine_drafts_with_it_and_writes_the_same(tiny: TinyModels, hundred: IdArray) -> None:
    found = []
    for head in ("auto", "whole"):
        with tiny.load_speculating(runtime="native", draft_runtime="native", lookup=False, draft_head=head) as engine:
            drafted = answer(engine.session().generate("one two three", max_tokens=60, depth=4))
            plain = answer(engine.session().generate("one two three", max_tokens=60, depth=0))
            assert drafted.stats.accepted > 0
            assert drafted.token_ids == plain.token_ids
            found.append((drafted.token_ids, engine.drafter_model().facts.settings.get("head_rows")))
    assert [rows for _, rows in found] == [100, None]
    assert found[0][0] == found[1][0]
