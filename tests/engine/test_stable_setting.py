"""Finding the setting in which a model is kept: stable widths without slowing plain decoding much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.kinds import WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.pair.load import find_stable_model
from edgespec.errors import CancelledError, ModelFileError
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.cost.widths import WIDEST, WidthProbe
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.noisy_model import NoisyModel, Rule, no_noise

PREFERRED = LlamaSettings(threads=3)
SECOND = replace(PREFERRED, repack=False)


def all_noisy(width: int, _position: int, _written: Sequence[int]) -> float:
    return 0.5 * (width > 1)


def beyond_three(width: int, _position: int, _written: Sequence[int]) -> float:
    return 0.5 * (width > 3)


class Shelf:
    """Opens models whose noise depends on the setting, and records them."""

    def __init__(self, first: Rule, second: Rule = no_noise, **facts: object) -> None:
        self.rules = {PREFERRED: first, SECOND: second}
        self.facts = facts
        self.opened: list[tuple[LlamaSettings, NoisyModel]] = []

    def __call__(self, settings: LlamaSettings) -> Any:
        model = NoisyModel(
            self.rules[settings],
            threads=settings.threads,
            kv_type=settings.kv_type,
            settings=settings.as_json(),
            **self.facts,
        )
        self.opened.append((settings, model))
        return model

    @property
    def settings(self) -> list[LlamaSettings]:
        return [settings for settings, _ in self.opened]

    @property
    def probed(self) -> list[LlamaSettings]:
        return [settings for settings, model in self.opened if model.opened]

    @property
    def left_open(self) -> list[NoisyModel]:
        return [model for _, model in self.opened if not model.closed]


@pytest.fixture
def kept(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements", "machine-1")


def find(
    shelf: Shelf,
    kept: Measurements,
    *,
    preferred: LlamaSettings = PREFERRED,
    measure: bool = True,
    complete: bool = False,
    context_length: int = 300,
    progress: Callable[[float], None] | None = None,
    slower_allowed: float = math.inf,  # fake models take microseconds: their ratios are meaningless
) -> tuple[Any, WidthProbe | None]:
    def probe_now(model: Any) -> WidthProbe:
        return probe_widths(model, context_length=context_length, complete=complete, progress=progress)

    model, probe = find_stable_model(
        shelf,
        [preferred, SECOND] if preferred == PREFERRED else [preferred],
        kept,
        measure=probe_now if measure else None,
        complete=complete,
        context_length=context_length,
        slower_allowed=slower_allowed,
    )
    assert shelf.left_open == [model]  # only the returned model
    return model, probe


# ----------------------------------------------------------------------------------------- finding a setting


def test_a_stable_preferred_setting_is_kept(kept: Measurements) -> None:
    shelf = Shelf(beyond_three)
    model, probe = find(shelf, kept)
    assert shelf.settings == [PREFERRED]
    assert probe is not None
    assert probe.widths == (1, 2, 3)
    assert kept.load(WIDTHS, model.facts) == probe


def test_a_stored_probe_is_used_without_measuring(kept: Measurements) -> None:
    _, first = find(Shelf(beyond_three), kept)
    told: list[float] = []
    for measure in (True, False):
        again = Shelf(no_noise)
        _, probe = find(again, kept, measure=measure, progress=told.append)
        assert probe == first
        assert again.probed == []
    assert told == []


def test_if_the_preferred_setting_is_unstable_the_second_one_is_used(kept: Measurements) -> None:
    shelf = Shelf(all_noisy, beyond_three)
    model, probe = find(shelf, kept)
    assert shelf.settings == [PREFERRED, SECOND]
    assert model.facts.settings == SECOND.as_json()
    assert probe is not None
    assert probe.depth_cap == 2

    again = Shelf(all_noisy, beyond_three)
    model, stored = find(again, kept, measure=False)
    assert model.facts.settings == SECOND.as_json()
    assert stored == probe
    assert again.probed == []


@pytest.mark.parametrize(("ratio", "taken"), [(1.02, True), (1.04, False)])
def test_a_stable_setting_that_slows_plain_decoding_too_much_is_not_used(
    kept: Measurements, ratio: float, taken: bool
) -> None:
    find(Shelf(all_noisy, beyond_three), kept)
    for settings, seconds in ((PREFERRED, 0.1), (SECOND, 0.1 * ratio)):
        facts = Shelf(no_noise)(settings).facts
        stored = kept.load(WIDTHS, facts)
        assert stored is not None
        kept.save(WIDTHS, replace(stored, plain_forward_s=seconds), facts)
    model, probe = find(Shelf(all_noisy, beyond_three), kept, measure=False, slower_allowed=SLOWER_ALLOWED)
    assert (model.facts.settings == SECOND.as_json()) is taken
    assert probe is not None
    assert probe.depth_cap == (2 if taken else 0)


def test_without_a_stable_setting_the_preferred_one_decodes_plainly(kept: Measurements) -> None:
    shelf = Shelf(all_noisy, all_noisy)
    model, probe = find(shelf, kept)
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert probe.widths == (1,)
    assert shelf.probed == [PREFERRED, SECOND]


def test_an_unstable_setting_without_an_alternative_decodes_plainly(kept: Measurements) -> None:
    shelf = Shelf(all_noisy, all_noisy)
    model, probe = find(shelf, kept, preferred=SECOND)
    assert set(shelf.settings) == {SECOND}
    assert model.facts.settings == SECOND.as_json()
    assert probe is not None
    assert probe.depth_cap == 0


def test_without_permission_to_measure_no_width_is_probed(kept: Measurements) -> None:
    shelf = Shelf(no_noise)
    model, probe = find(shelf, kept, measure=False)
    assert (shelf.settings, shelf.probed, probe) == ([PREFERRED], [], None)
    assert kept.load(WIDTHS, model.facts) is None


def test_an_unmeasured_second_setting_does_not_replace_the_preferred_one(kept: Measurements) -> None:
    """For example, the second setting's probe was interrupted: only the first setting's result is known."""
    first = Shelf(all_noisy)(PREFERRED)
    kept.save(WIDTHS, probe_widths(first, context_length=300), first.facts)
    model, probe = find(Shelf(all_noisy), kept, measure=False)
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert probe.depth_cap == 0


def test_a_stored_probe_for_a_shorter_context_is_made_again(kept: Measurements) -> None:
    def beyond_512(width: int, position: int, _written: Sequence[int]) -> float:
        return 0.5 * (width > 2 and position >= 512)

    find(Shelf(beyond_512), kept, context_length=300)
    shelf = Shelf(beyond_512)
    assert find(shelf, kept, measure=False, context_length=4096)[1] is None
    _, probe = find(shelf := Shelf(beyond_512), kept, context_length=4096)
    assert probe is not None
    assert probe.widths == (1, 2)
    assert shelf.probed == [PREFERRED]
    # The longer probe is then used for the shorter context too.
    assert find(again := Shelf(no_noise), kept, context_length=300)[1] == probe
    assert again.probed == []


def test_if_a_complete_probe_is_needed_a_stored_ordinary_one_is_replaced(kept: Measurements) -> None:
    find(Shelf(beyond_three), kept)
    shelf = Shelf(beyond_three)
    _, probe = find(shelf, kept, complete=True)
    assert shelf.probed == [PREFERRED]
    assert probe is not None
    assert probe.complete
    # Both kinds of request then use the complete probe.
    for complete in (True, False):
        assert find(again := Shelf(no_noise), kept, complete=complete)[1] == probe
        assert again.probed == []


def test_with_near_exactness_the_preferred_setting_is_kept(kept: Measurements) -> None:
    """Near exactness does not need a stable width."""
    shelf = Shelf(all_noisy, beyond_three)
    model, probe = find(shelf, kept, complete=True)
    assert shelf.settings == [PREFERRED]
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert (probe.widths, round(probe.max_abs_diff, 3)) == ((1,), 0.5)


def test_without_permission_to_measure_an_ordinary_probe_is_used_for_near_exactness(kept: Measurements) -> None:
    _, stored = find(Shelf(beyond_three), kept)
    assert find(Shelf(no_noise), kept, measure=False, complete=True)[1] == stored


def test_a_cache_that_cannot_rewind_is_not_probed(kept: Measurements) -> None:
    shelf = Shelf(no_noise, can_rewind=False)
    _, probe = find(shelf, kept)
    assert (shelf.probed, probe) == ([], None)


def test_a_cancelled_probe_closes_the_model_and_stores_nothing(kept: Measurements) -> None:
    def cancel(_done: float) -> None:
        raise CancelledError("enough")

    shelf = Shelf(no_noise)
    with pytest.raises(CancelledError):
        find(shelf, kept, progress=cancel)
    assert shelf.left_open == []
    assert not kept.folder.exists()


def test_a_model_that_does_not_open_is_raised(kept: Measurements) -> None:
    def refuse(_settings: LlamaSettings) -> Any:
        raise ModelFileError("x.gguf", "broken")

    with pytest.raises(ModelFileError):
        find_stable_model(refuse, [PREFERRED], kept, measure=probe_widths, complete=False, context_length=300)


def test_a_folder_that_cannot_store_measurements_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    _, probe = find(Shelf(no_noise), Measurements(tmp_path / "file", "machine-1"))
    assert probe is not None
    assert probe.depth_cap == WIDEST - 1


def test_a_probe_with_a_nan_difference_is_stored_and_read_without_error(kept: Measurements) -> None:
    def garbage(width: int, _position: int, _written: Sequence[int]) -> float:
        return float("nan") if width == 4 else 0.0

    _, probe = find(Shelf(garbage), kept)
    assert find(Shelf(no_noise), kept, measure=False)[1] == probe
