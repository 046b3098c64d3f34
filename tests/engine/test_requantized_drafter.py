"""Drafters requantised to four bits: which ones, their facts, and an unchanged text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.placement.prepared import PreparedModel, prepare_drafter
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native import runtime as native_runtime
from edgespec.runtimes.native.model import NativeModel, NativeSettings, bytes_spared
from edgespec.runtimes.native.runtime import NATIVE_SIDECAR, REQUANTIZED_SIDECAR, NativeRuntime
from edgespec.runtimes.runtime import DraftForm, Settings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

require_native()

PROFILE = load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
AS_IN_THE_FILE = replace(PROFILE, draft_weights="file")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requantise drafters of any size."""
    monkeypatch.setattr(native_runtime, "LEAST_REQUANTIZED_PARAMETERS", 0)


@pytest.fixture
def located(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.drafter))


def prepared(profile: Profile, file: LocatedModel, settings: Settings) -> PreparedModel:
    return prepare_drafter(profile, file, settings, 512)


def test_facts_of_a_requantised_drafter_are_equal_before_and_after_loading(located: LocatedModel) -> None:
    settings = NativeSettings()
    drafter, whole = prepared(PROFILE, located, settings), NativeRuntime().describe(located, settings)
    said = drafter.facts
    model = drafter.load()
    assert model.facts == said
    model.close()
    spared = bytes_spared(located)
    assert spared == drafter.spared_bytes > 0
    assert said.settings == {**whole.settings, "weights": "Q4_0"}
    assert said.bytes_per_forward == whole.bytes_per_forward - spared
    needed = [prepared(each, located, settings).memory.weights_bytes for each in (AS_IN_THE_FILE, PROFILE)]
    assert needed == [located.weight_bytes, located.weight_bytes - spared]


def test_only_drafters_in_our_kernels_and_this_process_are_requantised(located: LocatedModel) -> None:
    native, llama = NativeSettings(), LlamaSettings()
    for profile, settings in (
        (AS_IN_THE_FILE, native),
        (replace(PROFILE, draft_isolation="process"), native),
        (PROFILE, llama),
    ):
        drafter = prepared(profile, located, settings)
        assert "weights" not in drafter.facts.settings
        assert drafter.spared_bytes == 0
    with NativeRuntime().load(located, native) as target:
        assert "weights" not in target.facts.settings


def test_a_small_drafter_is_not_requantised(located: LocatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    size = located.header.parameter_count
    for least, spared in ((size, True), (size + 1, False)):
        monkeypatch.setattr(native_runtime, "LEAST_REQUANTIZED_PARAMETERS", least)
        assert (prepared(PROFILE, located, NativeSettings()).spared_bytes > 0) is spared


def test_a_requantised_drafter_may_also_have_a_frequent_head(
    located: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_runtime, "frequent_head_ids", lambda _header: np.arange(250, 350))
    monkeypatch.setattr(native_runtime, "frequent_head_rows", lambda _header: 100)
    drafter = prepared(PROFILE, located, NativeSettings())
    said = drafter.facts
    with cast(NativeModel, drafter.load()) as model:
        assert model.facts == said
        assert (said.settings["weights"], said.settings["head_rows"]) == ("Q4_0", 100)
        four_bits = DraftForm(requantized=True)
        whole = NativeRuntime().describe(located, NativeSettings(), four_bits)
        row = located.header.embedding_length // 32 * 18
        assert whole.bytes_per_forward - said.bytes_per_forward == row * (said.vocabulary_size - 100)
        with NativeRuntime().load(located, NativeSettings(), four_bits) as other, other.open(8) as plain:
            expected = plain.forward([5, 6, 7], 1).logits(0)
        with model.open(8) as sequence:
            sequence.score_frequent([2])
            found = sequence.forward([5, 6, 7], 1).logits(0)
            scored = np.isfinite(found)
            assert (scored.sum(), scored[2]) == (101, True)
            assert np.array_equal(found[scored], expected[scored])


def test_a_model_used_as_target_and_drafter_has_two_prepared_files(located: LocatedModel, tmp_path: Path) -> None:
    folder = tmp_path / "of the model"
    folder.mkdir()
    stored = replace(located, identity="sha256:ab", prepared_folder=folder)
    for _ in range(2):
        NativeRuntime().load(stored, NativeSettings()).close()
        prepared(PROFILE, stored, NativeSettings()).load().close()
    sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
    assert sizes.keys() == {NATIVE_SIDECAR, REQUANTIZED_SIDECAR}
    assert sizes[REQUANTIZED_SIDECAR] < sizes[NATIVE_SIDECAR]


@pytest.mark.parametrize(
    "sampling", [None, Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0, seed=3, rule="rejection")]
)
def test_an_engine_drafts_with_a_requantised_drafter_and_keeps_the_text(
    tiny: TinyModels, sampling: Sampling | None
) -> None:
    for weights in ("auto", "file"):
        with tiny.load_speculating(
            runtime="native", draft_runtime="native", lookup=False, draft_weights=weights
        ) as engine:
            coarse = weights == "auto"
            assert engine.pair.pool.drafter_model().facts.settings.get("weights") == ("Q4_0" if coarse else None)
            assert "weights" not in engine.pair.target.facts.settings
            assert ("kept in four bits" in " ".join(engine.plan.reasons)) is coarse
            drafted, plain = (
                answer(engine.session().generate("one two three", max_tokens=60, depth=depth, sampling=sampling))
                for depth in (4, 0)
            )
            assert drafted.stats.accepted > 0
            if sampling is None or sampling.rule != "rejection":  # under the rejection rule guesses affect the text
                assert drafted.token_ids == plain.token_ids
