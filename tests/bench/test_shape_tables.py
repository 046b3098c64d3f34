"""Reports of real shapes, the gain that is computed from their times, and the tables of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarks.shape_tables as module
from edgespec.planning.cost.curve import Curve, expected_tokens

WIDTHS = (1, 2, 4, 8)
PAGE = Path(__file__).parents[2] / "docs" / "results" / "architectures.md"


def measured(t1_s: float, prompt_s: float, **more: Any) -> dict[str, Any]:
    forward_s = {str(width): t1_s * (1 + width / 10) / 1.1 for width in WIDTHS}
    return {"threads": 2, "load_s": 1.0, "forward_s": forward_s, "prompt_s": prompt_s, **more}


def reported(name: str = "Qwen3-30B-A3B", **more: Any) -> dict[str, Any]:
    turn = {"native": measured(0.1, 1.0, **more), "repacked": measured(0.2, 1.5), "filed": measured(0.12, 4.0)}
    return module.report_of(name, (16, 48), 512, [turn, turn, turn])


def drafting(**more: Any) -> dict[str, Any]:
    times = {str(width): 0.005 * width for width in WIDTHS}
    return {"drafter": "layer", "drafter_s": times, "beside_drafter_s": 0.1, **more}


def test_llama_cpp_counts_with_its_fastest_setting_of_each_kind() -> None:
    report = reported()
    assert (report["t1_over_native"], report["prompt_speedup"]) == (1.2, 1.5)
    (table,) = module.tables_of([report])
    assert table.splitlines()[2].startswith(
        "| Qwen3-30B-A3B, 16 of 48 layers | 100.0 | 1.09, 1.27, 1.64 | 512 | 1.0 |"
    )


def test_a_setting_that_ended_in_a_run_does_not_count() -> None:
    turn = {"native": measured(0.1, 1.0), "repacked": measured(0.05, 0.5), "filed": measured(0.12, 4.0)}
    report = module.report_of("Qwen3-30B-A3B", (16, 48), 512, [turn, {of: turn[of] for of in ("native", "filed")}])
    assert (report["llama_setting"], report["llama_prompt_setting"]) == ("filed, 2 threads", "filed")
    assert (report["t1_over_native"], report["prompt_speedup"]) == (1.2, 4.0)


def test_states_and_drafters_have_a_second_table() -> None:
    report = reported(**drafting(replay_s={"1": 0.002, "4": 0.003, "8": 0.004}))
    assert report["replay"] == {1: 0.02, 4: 0.03, 8: 0.04}
    assert report["drafted"][1] == 0.05
    _times, costs = module.tables_of([reported("Other"), report])
    rows = costs.splitlines()[2:]
    assert len(rows) == 1
    assert rows[0].startswith("| Qwen3-30B-A3B, 16 of 48 layers | 2.0, 3.0, 4.0 | layer | 5.0 |")
    assert rows[0].count("|") == module.DRAFTING.count("|")


def test_a_drafter_is_compared_with_forwards_that_were_timed_in_turn() -> None:
    """Times of another minute, in which memory was half as fast, do not enter its price."""
    slow = {"drafter": "layer", "drafter_s": {str(w): 0.01 * w for w in WIDTHS}, "beside_drafter_s": 0.2}
    assert reported(**slow)["gains"] == reported(**drafting())["gains"]


def test_a_replay_below_the_noise_counts_as_none() -> None:
    assert reported(**drafting(replay_s={"1": -0.001, "8": 0.0}))["replay"] == {1: 0.0, 8: 0.0}


FLAT = Curve(widths=WIDTHS, forward_s=(1.0, 1.0, 1.0, 1.0))
CHEAP = Curve(widths=WIDTHS, forward_s=(1e-9,) * 4)


def test_with_forwards_of_any_width_equal_and_a_free_drafter_the_gain_is_the_expected_tokens() -> None:
    for acceptance in module.ACCEPTANCES:
        gain = module.emulated_gain(FLAT, CHEAP, None, acceptance)
        assert gain.depth == 7
        assert gain.speedup == pytest.approx(expected_tokens([acceptance] * 7))


def test_a_drafter_as_slow_as_the_target_brings_no_gain() -> None:
    gain = module.emulated_gain(FLAT, FLAT, None, 0.9)
    assert (gain.depth, gain.speedup) == (0, 1.0)


def test_what_the_drafter_reads_again_and_what_states_replay_lower_the_gain() -> None:
    """At depth 1 and acceptance 1, a round commits two tokens."""
    steep = Curve(widths=WIDTHS, forward_s=(1.0, 1.0, 100.0, 200.0))
    reads = Curve(widths=WIDTHS, forward_s=(0.1, 0.3, 0.5, 0.9))
    replay = Curve(widths=(1, 4), forward_s=(0.05, 0.35))
    assert module.emulated_gain(steep, CHEAP, None, 1.0).speedup == pytest.approx(2.0)
    assert module.emulated_gain(steep, reads, None, 1.0).speedup == pytest.approx(2.0 / 1.3)
    assert module.emulated_gain(steep, reads, replay, 1.0).speedup == pytest.approx(2.0 / 1.4)


def test_new_rows_replace_those_of_their_shape_and_leave_the_others() -> None:
    first = module.tables_of([reported("A"), reported("B")])
    page = module.with_tables("# Page\n\nText.\n", first)
    assert page == f"# Page\n\nText.\n\n{first[0]}\n"
    page += "\nMore.\n"
    assert module.with_tables(page, first) == page
    again = dict(reported("B"), layers=48)
    longer = module.with_tables(page, module.tables_of([reported("C"), again]))
    rows = [line for line in longer.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == ["A, 16 of 48 layers", "B", "C, 16 of 48 layers"]
    assert longer.endswith("\n\nMore.\n")


def test_the_page_of_results_has_a_place_for_each_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    report = reported("New", **drafting(replay_s={"1": 0.002, "4": 0.003, "8": 0.004}))
    longer = module.with_tables(page, module.tables_of([report]))
    added = set(longer.splitlines()) - set(page.splitlines())
    assert len(longer.splitlines()) == len(page.splitlines()) + 2
    assert all(line.startswith("| New, 16 of 48 layers |") for line in added)
    assert longer.splitlines()[-1] == page.splitlines()[-1]
