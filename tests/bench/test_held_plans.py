"""Figures of several homes on rows made by hand, and measurements changed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import held_plans as module
from benchmarks.held_plans import agree_on_pipelined, figures, scale_drafter, spread
from edgespec.bench.suite import builtin_suite
from edgespec.calibration.kinds import ANSWERED, CONTENTION, TIMES
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.timing import ModelTimes
from edgespec.planning.cost.contention import Contention
from tests.support.planning import model_facts


def row(decode_s: float, arm: str = "planned", ids: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """The answer to one prompt."""
    told = {"id": "a", "mode": "serial", "tokens_per_round": 1.5, "token_ids": list(ids)}
    return {**told, "arm": arm, "decode_s": decode_s}


def test_each_home_is_compared_with_the_one_that_was_never_calibrated() -> None:
    found = figures({"never": [row(1.0), row(2.0, "plain")], "busy": [row(2.0)], "halved": [row(0.5)]})
    assert found["ratios"] == {"busy": pytest.approx(0.5), "halved": pytest.approx(2.0)}
    assert found["gain"] == pytest.approx(2.0)
    assert found["modes"]["busy"] == {"a": "serial"}
    assert found["tokens_per_round"]["never"] == {"a": 1.5}
    assert found["identical"] is True


def test_other_token_ids_in_one_home_are_not_identical() -> None:
    assert figures({"never": [row(1.0), row(1.0, "plain")], "busy": [row(1.0, ids=(1, 3))]})["identical"] is False


def test_answers_of_one_token_have_no_ratio() -> None:
    short = {"id": "b"}
    found = figures(
        {
            "never": [row(1.0), row(2.0, "plain"), row(0.0) | short, row(0.0, "plain") | short],
            "busy": [row(2.0), row(0.0) | short],
        }
    )
    assert (found["ratios"], found["gain"]) == ({"busy": pytest.approx(0.5)}, pytest.approx(2.0))


def test_the_prompts_are_taken_from_all_of_a_suite() -> None:
    suite = builtin_suite("quick")
    few = spread(suite, 4)
    assert len({prompt.id for prompt in few}) == 4
    assert len({prompt.category for prompt in few}) > 1
    assert len(spread(suite, 10**6)) == len(suite)


def test_measurements_changed_by_hand_are_read_as_measurements(tmp_path: Path) -> None:
    target, drafter = model_facts("target"), model_facts("drafter")
    store = Measurements(tmp_path, "machine")
    times = ModelTimes(contexts=(96,), widths=(1,), forward_s=((0.01,),), prompt_token_s=0.001, repetitions=5)
    for each in (target, drafter):
        store.save(TIMES, times, each)
    store.save(CONTENTION, Contention(target_factor=1.9, drafter_factor=1.8), target, drafter)
    scale_drafter(tmp_path, 2.0)
    agree_on_pipelined(tmp_path)
    read = Measurements(tmp_path, "machine")
    changed, answered = read.load(TIMES, drafter), read.load(ANSWERED, target, drafter)
    assert changed is not None
    assert changed.forward_s == ((0.02,),)
    assert changed.prompt_token_s == 0.002
    assert read.load(TIMES, target) == times
    assert answered is not None
    assert answered.mode.chosen == "pipelined"
    assert read.load(CONTENTION, target, drafter) == Contention()
    assert json.loads(next(tmp_path.glob("answered-*.json")).read_text())["schema_version"] == 3


def test_a_home_is_calibrated_until_its_pair_was_timed_on_a_quiet_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(['{"busy": 0.5}', "{}"])
    monkeypatch.setattr(module, "_calibrate", lambda _: (tmp_path / "contention-1.json").write_text(next(found)))
    module._calibrate_until_quiet({}, tmp_path)
    assert next(found, None) is None
