"""The shipped priors for unmeasured machines: every number has its source."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.priors import (
    expected_acceptance,
    expected_curves,
    expected_draft_cost,
    expected_plain_s,
)
from edgespec.interfaces.model import Mixture
from edgespec.planning.cost.acceptance import UNKNOWN
from edgespec.runtimes.native.library import LEVELS, PORTABLE
from tests.support.fake_runtime import FakeModel

ROOT = Path(__file__).parent.parent.parent
TABLES = tomllib.loads(resources.files("edgespec.calibration").joinpath("priors.toml").read_text(encoding="utf-8"))
TARGET = replace(
    FakeModel(bit_equal_by_construction=True).facts,
    bytes_per_forward=1_000_000_000,
    settings={"level": "avx512-vnni"},
)
DRAFTER = replace(TARGET, name="small", bytes_per_forward=250_000_000)


def tables_with_numbers(table: Mapping[str, Any], name: str = "priors") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if any(isinstance(value, int | float | list) for value in table.values()):
        yield name, table
    for key, value in table.items():
        if isinstance(value, dict):
            yield from tables_with_numbers(value, f"{name}.{key}")


FOUND = dict(tables_with_numbers(TABLES))


def test_priors_have_every_kind_of_number() -> None:
    assert {name.split(".")[1] for name in FOUND} == {"reading", "verification", "context", "drafting", "acceptance"}


@pytest.mark.parametrize("name", FOUND)
def test_every_prior_names_its_source(name: str) -> None:
    source = FOUND[name]["source"]
    assert len(source.split()) >= 10
    for path, section in re.findall(r'(docs/\S+\.md), "([^"]+)"', source.replace("\n", " ")):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^#+ .*{re.escape(section)}", text, re.MULTILINE), (path, section)
    assert not re.search(r"(^|\s)/\w|shared/", source), "sources outside this repository are not allowed"


def test_every_vectorised_level_has_priors_and_portable_c_has_none() -> None:
    levels = set(LEVELS) - {PORTABLE}
    assert set(TABLES["verification"]) == levels
    assert set(TABLES["drafting"]["reading"]) - {"source"} == levels


@pytest.mark.parametrize("level", sorted(set(LEVELS) - {PORTABLE}))
def test_expected_curves_start_at_plain_time_and_rise(level: str) -> None:
    curves = expected_curves(replace(TARGET, settings={"level": level}), 0.04)
    assert curves is not None
    assert curves.at(0).plain_s == pytest.approx(0.04)
    for context in (0, 1000, 4096):
        seconds = [curves.at(context).seconds(width) for width in range(1, 33)]
        assert seconds == sorted(seconds)
        assert seconds[3] < 4 * seconds[0], "four rows are cheaper than four forwards"
    assert curves.at(1000).seconds(8) > curves.at(0).seconds(8)


def test_rows_of_a_mixture_are_expected_to_share_experts_by_chance_alone() -> None:
    """Two thirds of the bytes are those of 8 of 128 experts: every second row reads nearly as many again."""
    mixed, dense = (
        expected_curves(replace(TARGET, mixture=mixture), 0.04)
        for mixture in (Mixture(used=8 * 48, count=128 * 48, share=2 / 3), None)
    )
    assert mixed is not None
    assert dense is not None
    assert dense.experts is None
    assert mixed.experts is not None
    assert mixed.experts.read_by(1) == pytest.approx(8 * 48)
    assert mixed.experts.read_by(2) == pytest.approx(8 * 48 * (2 - 8 / 128))
    for context in (0, 1000):
        near = mixed.at(context), dense.at(context)
        assert near[0].plain_s == pytest.approx(near[1].plain_s)
        assert near[0].seconds(4) == pytest.approx(
            near[1].seconds(4) / 3 + near[1].seconds(1) * 2 / 3 * mixed.experts.read_by(4) / (8 * 48), rel=0.05
        )


def test_priors_give_the_default_pairs_numbers() -> None:
    curves, cost = expected_curves(TARGET, 0.04), expected_draft_cost(DRAFTER, TARGET, 0.04)
    assert curves is not None
    assert [curves.at(0).ratio(width) for width in (2, 4, 8)] == pytest.approx([1.12, 1.27, 1.5])
    assert cost is not None
    assert cost.token_s == pytest.approx(0.04 * 0.25 * 1.25)
    assert cost.lag_token_s == pytest.approx(0.12 * cost.token_s)
    assert expected_plain_s(TARGET) == pytest.approx(0.04)


@pytest.mark.parametrize(
    "change",
    [{"settings": {"level": PORTABLE}}, {"settings": {}}, {"bit_equal_by_construction": False}, {"device": "cuda0"}],
    ids=str,
)
def test_models_without_priors_have_no_expected_times(change: dict[str, Any]) -> None:
    other = replace(TARGET, **change)
    assert expected_curves(other, 0.04) is None
    assert expected_draft_cost(other, TARGET, 0.04) is None
    assert expected_draft_cost(DRAFTER, other, 0.04) is None


def test_a_one_pass_drafters_cost_is_not_estimated() -> None:
    assert expected_draft_cost(replace(DRAFTER, mask_id=3), TARGET, 0.04) is None


@pytest.mark.parametrize("source", ["model", "lookup"])
def test_prior_acceptance_equals_the_policies_initial_rate(source: str) -> None:
    assert expected_acceptance(source) == UNKNOWN
