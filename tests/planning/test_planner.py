"""The planner: which setting a model is kept in, and what is decided from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.contracts import ModelFacts
from edgespec.errors import CancelledError, ModelFileError
from edgespec.planning.measurements import Measurements
from edgespec.planning.plan import Plan
from edgespec.planning.planner import SLOWER_ALLOWED, Wish, find_stable_model, make_plan, stable_settings
from edgespec.planning.widths import WIDEST, ContextProbe, WidthProbe, probe_widths
from edgespec.runtimes.llama import LlamaSettings
from tests.planning.noisy_model import NoisyModel, Rule, no_noise

PREFERRED = LlamaSettings(threads=3)
SECOND = replace(PREFERRED, repack=False)


def all_noisy(width: int, _position: int, _written: Sequence[int]) -> float:
    return 0.5 * (width > 1)


def beyond_three(width: int, _position: int, _written: Sequence[int]) -> float:
    return 0.5 * (width > 3)


class Shelf:
    """Opens models whose noise depends on the setting, and remembers which."""

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
    slower_allowed: float = math.inf,  # fakes take microseconds, whose ratios mean nothing
) -> tuple[Any, WidthProbe | None]:
    model, probe = find_stable_model(
        shelf,
        preferred,
        kept,
        measure=measure,
        complete=complete,
        context_length=context_length,
        progress=progress,
        slower_allowed=slower_allowed,
    )
    assert shelf.left_open == [model]  # exactly the one that is handed out
    return model, probe


# ----------------------------------------------------------------------------------------- finding a setting


def test_settings_worth_probing() -> None:
    assert stable_settings(PREFERRED) == (PREFERRED, SECOND)
    assert stable_settings(SECOND) == (SECOND,)


def test_a_stable_preferred_setting_is_kept(kept: Measurements) -> None:
    shelf = Shelf(beyond_three)
    model, probe = find(shelf, kept)
    assert shelf.settings == [PREFERRED]
    assert probe is not None
    assert probe.widths == (1, 2, 3)
    assert kept.load_widths(model.facts) == probe


def test_a_stored_probe_is_used_silently(kept: Measurements) -> None:
    _, first = find(Shelf(beyond_three), kept)
    told: list[float] = []
    for measure in (True, False):
        again = Shelf(no_noise)
        _, probe = find(again, kept, measure=measure, progress=told.append)
        assert probe == first
        assert again.probed == []
    assert told == []


def test_an_unstable_preferred_setting_gives_way_to_the_second(kept: Measurements) -> None:
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
def test_a_stable_setting_that_costs_plain_more_than_its_limit_is_not_taken(
    kept: Measurements, ratio: float, taken: bool
) -> None:
    find(Shelf(all_noisy, beyond_three), kept)
    for settings, seconds in ((PREFERRED, 0.1), (SECOND, 0.1 * ratio)):
        facts = Shelf(no_noise)(settings).facts
        stored = kept.load_widths(facts)
        assert stored is not None
        kept.save_widths(facts, replace(stored, plain_forward_s=seconds))
    model, probe = find(Shelf(all_noisy, beyond_three), kept, measure=False, slower_allowed=SLOWER_ALLOWED)
    assert (model.facts.settings == SECOND.as_json()) is taken
    assert probe is not None
    assert probe.depth_cap == (2 if taken else 0)


def test_where_nothing_is_stable_the_fastest_setting_decodes_plainly(kept: Measurements) -> None:
    shelf = Shelf(all_noisy, all_noisy)
    model, probe = find(shelf, kept)
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert probe.widths == (1,)
    assert shelf.probed == [PREFERRED, SECOND]


def test_a_setting_without_an_alternative(kept: Measurements) -> None:
    shelf = Shelf(all_noisy, all_noisy)
    model, probe = find(shelf, kept, preferred=SECOND)
    assert set(shelf.settings) == {SECOND}
    assert model.facts.settings == SECOND.as_json()
    assert probe is not None
    assert probe.depth_cap == 0


def test_without_leave_to_measure_nothing_is_probed(kept: Measurements) -> None:
    shelf = Shelf(no_noise)
    model, probe = find(shelf, kept, measure=False)
    assert (shelf.settings, shelf.probed, probe) == ([PREFERRED], [], None)
    assert kept.load_widths(model.facts) is None


def test_an_unmeasured_second_setting_is_not_chosen_over_the_fastest(kept: Measurements) -> None:
    """The probe of the second setting was interrupted, say: only the first one's failure is known."""
    first = Shelf(all_noisy)(PREFERRED)
    kept.save_widths(first.facts, probe_widths(first, context_length=300))
    model, probe = find(Shelf(all_noisy), kept, measure=False)
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert probe.depth_cap == 0


def test_a_probe_of_a_shorter_context_is_not_trusted_further(kept: Measurements) -> None:
    def beyond_512(width: int, position: int, _written: Sequence[int]) -> float:
        return 0.5 * (width > 2 and position >= 512)

    find(Shelf(beyond_512), kept, context_length=300)
    shelf = Shelf(beyond_512)
    assert find(shelf, kept, measure=False, context_length=4096)[1] is None
    _, probe = find(shelf := Shelf(beyond_512), kept, context_length=4096)
    assert probe is not None
    assert probe.widths == (1, 2)
    assert shelf.probed == [PREFERRED]
    # And the longer one serves the shorter context from now on.
    assert find(again := Shelf(no_noise), kept, context_length=300)[1] == probe
    assert again.probed == []


def test_a_complete_probe_is_made_where_an_ordinary_one_is_stored(kept: Measurements) -> None:
    find(Shelf(beyond_three), kept)
    shelf = Shelf(beyond_three)
    _, probe = find(shelf, kept, complete=True)
    assert shelf.probed == [PREFERRED]
    assert probe is not None
    assert probe.complete
    # It serves both kinds of request afterwards.
    for complete in (True, False):
        assert find(again := Shelf(no_noise), kept, complete=complete)[1] == probe
        assert again.probed == []


def test_a_complete_probe_keeps_the_fastest_setting(kept: Measurements) -> None:
    """Near exactness needs no stable width."""
    shelf = Shelf(all_noisy, beyond_three)
    model, probe = find(shelf, kept, complete=True)
    assert shelf.settings == [PREFERRED]
    assert model.facts.settings == PREFERRED.as_json()
    assert probe is not None
    assert (probe.widths, round(probe.max_abs_diff, 3)) == ((1,), 0.5)


def test_an_ordinary_probe_has_to_do_where_measuring_is_not_allowed(kept: Measurements) -> None:
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
        find_stable_model(refuse, PREFERRED, kept, measure=True, complete=False, context_length=300)


def test_measurements_that_cannot_be_kept_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    _, probe = find(Shelf(no_noise), Measurements(tmp_path / "file", "machine-1"))
    assert probe is not None
    assert probe.depth_cap == WIDEST - 1


def test_a_difference_without_a_bound_is_no_error(kept: Measurements) -> None:
    def garbage(width: int, _position: int, _written: Sequence[int]) -> float:
        return float("nan") if width == 4 else 0.0

    _, probe = find(Shelf(garbage), kept)
    assert find(Shelf(no_noise), kept, measure=False)[1] == probe


# ------------------------------------------------------------------------------------------------ the decision

FACTS = ModelFacts(
    name="big",
    sha256="sha256:ab",
    architecture="llama",
    runtime="llama",
    build="0.3.36+abc",
    device="gpu0",
    threads=4,
    vocabulary_size=1000,
    trained_context_length=2048,
    weight_bytes=1,
    bytes_per_forward=1,
    kv_bytes_per_token=1,
    kv_type="q8_0",
    settings={"repack": True},
)

WISH = Wish(depth="auto", exactness="stable", context_length=2048, sources=("lookup",))


def stable_to(width: int) -> WidthProbe:
    others = dict.fromkeys(range(width + 1, WIDEST + 1), 0.5)
    return WidthProbe(
        widths=tuple(range(1, width + 1)),
        contexts=(ContextProbe(start=96, positions=12, max_abs_diff=others),),
        complete=True,
    )


def plan(probe: WidthProbe | None, *, facts: ModelFacts = FACTS, reasons: Sequence[str] = (), **wish: Any) -> Plan:
    return make_plan(replace(WISH, **wish), facts, probe, reasons)


def test_speculation_within_the_class() -> None:
    made = plan(stable_to(4))
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", "W", 3)
    assert made.numeric_class.widths == (1, 2, 3, 4)
    assert made.drafter is not None
    assert (made.drafter.kind, made.drafter.model, made.drafter.runtime, made.drafter.device) == ("lookup",) + (
        None,
    ) * 3
    assert any("widths 1 to 4 are bit-equal" in reason and "depths to 3" in reason for reason in made.reasons)
    assert any("not calibrated" in reason and "depth up to 3" in reason for reason in made.reasons)


def test_only_consecutive_widths_count() -> None:
    made = plan(WidthProbe(widths=(1, 2, 3, 7, 8)))
    assert made.depth_cap == 2
    assert made.numeric_class.widths == (1, 2, 3, 7, 8)


@pytest.mark.parametrize(("asked", "cap"), [(1, 1), (2, 2), (3, 3), (4, 3), (99, 3)])
def test_a_depth_that_was_asked_for_stays_within_the_class(asked: int, cap: int) -> None:
    made = plan(stable_to(4), depth=asked)
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", "W", cap)
    assert any(f"depth {asked} was asked for" in reason for reason in made.reasons) is (asked > 3)
    assert not any("calibrated" in reason for reason in made.reasons)  # nobody tries what was decreed


@pytest.mark.parametrize("exactness", ["stable", "near"])
@pytest.mark.parametrize("probe", [None, stable_to(4)], ids=["unprobed", "probed"])
def test_depth_zero_is_plain(probe: WidthProbe | None, exactness: str) -> None:
    made = plan(probe, depth=0, exactness=exactness)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert made.reasons == ("plain: depth 0 was asked for",)


@pytest.mark.parametrize("exactness", ["stable", "near"])
@pytest.mark.parametrize("depth", ["auto", 3])
def test_without_a_probe_it_is_plain(exactness: str, depth: int | str) -> None:
    made = plan(None, exactness=exactness, depth=depth)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert made.numeric_class.widths == (1,)
    assert made.reasons == ("plain: which widths are bit-equal here has not been measured",)


@pytest.mark.parametrize("depth", ["auto", 3])
def test_without_a_stable_width_it_is_plain(depth: int | str) -> None:
    made = plan(stable_to(1), depth=depth)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert any(reason.startswith("plain: no width beyond 1") for reason in made.reasons)


@pytest.mark.parametrize("probe", [None, stable_to(1), stable_to(4)], ids=["unprobed", "unstable", "stable"])
@pytest.mark.parametrize("exactness", ["stable", "near"])
def test_without_a_drafter_it_is_plain(probe: WidthProbe | None, exactness: str) -> None:
    made = plan(probe, sources=(), exactness=exactness)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert "plain: there is no drafter" in made.reasons


def test_a_cache_that_cannot_rewind_makes_it_plain() -> None:
    for exactness in ("stable", "near"):
        made = plan(stable_to(8), facts=replace(FACTS, can_rewind=False), exactness=exactness)
        assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
        assert any("cannot drop" in reason for reason in made.reasons)


@pytest.mark.parametrize(
    ("asked", "stable", "cap", "level"),
    [
        ("auto", 1, WIDEST - 1, "N"),
        ("auto", 4, WIDEST - 1, "N"),
        ("auto", WIDEST, WIDEST - 1, "W"),
        (2, 4, 2, "W"),
        (3, 4, 3, "W"),
        (4, 4, 4, "N"),
        (99, 4, WIDEST - 1, "N"),
        (5, 1, 5, "N"),
    ],
)
def test_near_exactness_goes_beyond_the_class_and_says_so(
    asked: int | str, stable: int, cap: int, level: str
) -> None:
    made = plan(stable_to(stable), exactness="near", depth=asked)
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", level, cap)
    says = [reason for reason in made.reasons if "near exactness was asked for" in reason]
    assert len(says) == (level == "N")
    if says:
        assert f"depth up to {cap}" in says[0]
        assert f"depths to {stable - 1} are bit-equal" in says[0]


def test_near_is_never_chosen_unasked() -> None:
    for stable in range(1, WIDEST + 1):
        for depth in ("auto", *range(WIDEST + 2)):
            assert plan(stable_to(stable), depth=depth).exactness == "W"
            assert plan(stable_to(stable), depth=depth).depth_cap <= stable - 1


def test_a_model_drafter_is_named() -> None:
    made = plan(stable_to(4), sources=("lookup", "model"), drafter_model="small", drafter_device="gpu1")
    assert made.drafter is not None
    drafter = made.drafter
    assert (drafter.kind, drafter.model, drafter.runtime, drafter.device) == (
        "lookup+model",
        "small",
        "llama",
        "gpu1",
    )


def test_why_there_is_no_model_drafter_is_said_in_every_mode() -> None:
    for probe in (None, stable_to(1), stable_to(4)):
        made = plan(probe, drafter_off="another vocabulary")
        assert made.drafter_off == "another vocabulary"
        assert "no model drafter: another vocabulary" in made.reasons


def test_the_plan_repeats_what_it_stands_on() -> None:
    given = ["big on gpu0, 4 threads"]
    made = plan(stable_to(3), reasons=given, context_length=777)
    assert made.reasons[0] == given[0]
    assert given == ["big on gpu0, 4 threads"]  # pure
    assert made == plan(stable_to(3), reasons=given, context_length=777)
    assert made.context_length == 777
    assert (made.target.model, made.target.runtime, made.target.device, made.target.threads) == (
        "big",
        "llama",
        "gpu0",
        4,
    )
    kind = made.numeric_class
    assert (kind.runtime, kind.build, kind.device, kind.threads, kind.kv_type) == (
        "llama",
        "0.3.36+abc",
        "gpu0",
        4,
        "q8_0",
    )
    assert kind.settings == {"repack": True}
    assert made.predicted_tokens_per_s is None  # not measured
    with pytest.raises(FrozenInstanceError):
        made.depth_cap = 9  # type: ignore[misc]


def test_a_plan_as_json() -> None:
    made = plan(stable_to(3), drafter_model="small", sources=("model",), reasons=["why"]).as_json()
    assert made["drafter"] == {"kind": "model", "model": "small", "runtime": "llama", "device": "cpu"}
    assert made["target"] == {"model": "big", "runtime": "llama", "device": "gpu0", "threads": 4}
    assert made["numeric_class"]["widths"] == [1, 2, 3]
    assert (made["mode"], made["exactness"], made["depth_cap"]) == ("serial", "W", 2)
    assert made["predicted_tokens_per_s"] is None
    assert made["reasons"][0] == "why"
    assert plan(None).as_json()["drafter"] is None
