"""Figures are valid files that name what they show, omit unmeasured values and change nothing else."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from edgespec.bench.plot_data import read_curves, read_headline, read_speedups, read_traffic
from edgespec.bench.plots import RED, plot_report
from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.installation import install_command
from tests.support.command_line import run_python

HEADS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def interval(value: float) -> dict[str, Any]:
    return {"geomean": value, "ci95": [value / 1.1, value * 1.1], "prompts": 4}


def arm(value: float, *, identical: float | None = 1.0, **categories: float) -> dict[str, Any]:
    by_category = {name: interval(own) for name, own in categories.items()}
    return {
        "decode_tokens_per_s_geomean": 10 * value,
        "bytes_per_token": 1e9 / value,
        "speedup": {**interval(value), "by_category": by_category},
        "identical_fraction": identical,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    plain = arm(1.0) | {"speedup": {"geomean": 1.0, "ci95": [1.0, 1.0], "by_category": {}}}
    return {
        "schema_version": 1,
        "date": "2026-11-28",
        "machine": {"processor": "Example CPU & Sons"},
        "plan": {"target": {"model": "big", "threads": 4}, "drafter": {"model": "small"}},
        "suite": {"name": "quick", "sha256": "0" * 64},
        "arms": {"plain": plain, "planned": arm(1.5, chat=1.1, code=2.0), "lookup $4$": arm(1.2, chat=0.9)},
        "pairs": [
            {"id": "a", "category": "chat", "arm": "planned", "identical_to_plain": True},
            {"id": "b", "category": "code", "arm": "planned", "identical_to_plain": True},
        ],
        "noise": {"aa_ci95": [0.99, 1.01]},
    }


@pytest.fixture
def calibration() -> dict[str, Any]:
    curve = {"runtime": "llama", "device": "cpu", "threads": 4, "context": 256, "width": [1, 2, 4]}
    return {
        "schema_version": 1,
        "read_bytes_per_s": 2e10,
        "curves": [
            curve | {"model": "big", "forward_s": [0.1, 0.12, 0.2]},
            curve | {"model": "small", "forward_s": [0.02, 0.03, None], "threads": 1},
        ],
    }


def texts(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    return "\n".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


# ------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
@pytest.mark.parametrize("suffix", HEADS)
def test_plots_are_written_in_the_format_of_their_suffix(
    tmp_path: Path,
    report: dict[str, Any],
    calibration: dict[str, Any],
    suffix: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(matplotlib.rcParams)
    figures: dict[str, Callable[[Path], None]] = {
        "all": lambda path: plot_report(report, calibration, path),
        "curves": lambda path: plot_report({}, calibration, path),
        "speedups and traffic": lambda path: plot_report(report, None, path),
    }
    for name, draw in figures.items() if suffix == ".svg" else [("all", figures["all"])]:
        path = tmp_path / f"{name}{suffix.upper()}"
        draw(path)
        content = path.read_bytes()
        assert content.startswith(HEADS[suffix])
        draw(path)
        assert path.read_bytes() == content, f"{name} differs when it is drawn again"
    assert dict(matplotlib.rcParams) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_plotted_report_names_everything_it_shows(
    tmp_path: Path, report: dict[str, Any], calibration: dict[str, Any]
) -> None:
    path = tmp_path / "plot.svg"
    plot_report(report, calibration, path)
    shown = texts(path)
    for text in (
        "big  ·  drafter small  ·  4 threads  ·  2026-11-28",
        "Example CPU & Sons  ·  suite quick  ·  2 prompts",
        "all prompts",
        "chat",
        "code",
        "planned: 1.50×, 15.0 tokens/s",
        "lookup $4$: 1.20×",
        "plain against itself",
        "95 % interval",
        "T(w) / T(1)",
        "big, 4 threads",
        "small, 1 thread",
        "llama, cpu, 256 tokens of context, as calibrated:",
        "10.0 GB/s, 50 %",
        "of 20.0 measured",
    ):
        assert text in shown
    assert "plain: 1.00×" not in shown  # the baseline is a line, not a dot
    assert "not identical" not in shown
    assert RED.lower() not in path.read_text(encoding="utf-8").lower()


def test_arms_that_differ_from_plain_are_red_and_labelled(tmp_path: Path, report: dict[str, Any]) -> None:
    path = tmp_path / "plot.svg"
    report["arms"]["planned"]["identical_fraction"] = 0.5
    report["pairs"][1]["identical_to_plain"] = False
    plot_report(report, None, path)
    assert "not identical to plain" in texts(path)
    assert RED.lower() in path.read_text(encoding="utf-8").lower()
    data = read_speedups(report)
    assert data is not None
    assert {name: dot.identical for name, dot in data.arms["planned"].items()} == {
        "": False,
        "chat": True,
        "code": False,
    }
    assert all(dot.identical for dot in data.arms["lookup $4$"].values())


@pytest.mark.slow
def test_plots_draw_long_and_unusual_names_without_warnings(
    tmp_path: Path, report: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        report["arms"][f"arm\n{number} 試験 {'x' * 80}"] = arm(
            0.2 * (number + 1), **{f"c{k}": 1.0 for k in range(40)}
        )
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    assert "12 more categories are not shown" in texts(path)
    assert f"arm 11 試験 {'x' * 29}…: 2.40×" in texts(path)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------ what was measured


def test_panels_without_data_are_left_out(
    tmp_path: Path, report: dict[str, Any], calibration: dict[str, Any]
) -> None:
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    assert "as fast as plain decoding" in texts(path)
    assert "T(w)" not in texts(path)
    assert "bandwidth" not in texts(path)
    plot_report({"arms": {"plain": {"decode_tokens_per_s_geomean": 3.0, "speedup": None}}}, calibration, path)
    assert "as fast as plain decoding" not in texts(path)
    assert "T(w)" in texts(path)
    assert "bandwidth" not in texts(path)


def test_null_values_are_not_plotted(report: dict[str, Any], calibration: dict[str, Any]) -> None:
    report["arms"]["planned"]["speedup"]["by_category"] = {"chat": None, "code": {"geomean": None}, "qa": 1.25}
    report["arms"]["lookup $4$"]["bytes_per_token"] = None
    data = read_speedups(report)
    assert data is not None
    assert set(data.arms["planned"]) == {"", "qa"}
    assert data.arms["planned"]["qa"].ci95 is None
    traffic = read_traffic(report, calibration)
    assert traffic is not None
    assert set(traffic.arms) == {"plain", "planned"}
    curves = read_curves(calibration)
    assert curves is not None
    assert curves.lines["big, 4 threads"] == ((1, 1), (2, pytest.approx(1.2)), (4, pytest.approx(2)))
    assert [width for width, _ in curves.lines["small, 1 thread"]] == [1, 2]
    calibration["curves"][0]["forward_s"][0] = None
    calibration["curves"].pop()
    assert read_curves(calibration) is None  # without T(1) there is no ratio
    assert read_headline({}) == ""


def test_plotted_bandwidth_comes_from_the_calibration_or_the_machine(
    report: dict[str, Any], calibration: dict[str, Any]
) -> None:
    assert read_traffic(report, None) is None
    report["machine"]["read_bytes_per_s"] = 4e10
    for given, measured in ((None, 4e10), (calibration, 2e10)):
        traffic = read_traffic(report, given)
        assert traffic is not None
        assert traffic.measured == measured


def test_a_curve_measured_twice_is_drawn_twice(calibration: dict[str, Any]) -> None:
    calibration["curves"] = [calibration["curves"][0]] * 3
    curves = read_curves(calibration)
    assert curves is not None
    assert list(curves.lines) == ["big", "big (again)", "big (again) (again)"]


# ------------------------------------------------------------------------------------------------- errors


def test_a_report_with_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    for calibration in (None, {"curves": []}, {"read_bytes_per_s": 1.0}):
        with pytest.raises(InvalidRequestError, match="holds no measurements"):
            plot_report({}, calibration, path)
    assert not path.exists()


@pytest.mark.parametrize(
    "report",
    [
        [],
        {"arms": [1]},
        {"arms": {"a": 1}},
        {"arms": {"a": {"speedup": {"geomean": "fast"}}}},
        {"arms": {"a": {"speedup": {"geomean": -1}}}},
        {"arms": {"a": {"speedup": {"geomean": 1.2, "ci95": [1]}}}},
        {"pairs": [{}], "arms": {}},
    ],
)
def test_plotting_a_malformed_report_gives_a_one_sentence_error(tmp_path: Path, report: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is not a report of edgespec"):
        plot_report(report, None, tmp_path / "plot.png")
    with pytest.raises(InvalidRequestError, match="is not a report of edgespec"):
        plot_report({}, {"curves": [{"width": [1, 2], "forward_s": [1]}]}, tmp_path / "plot.png")


def test_plotting_to_an_unwritable_path_gives_a_one_sentence_error(tmp_path: Path, report: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"as plot\.jpeg") as caught:
        plot_report(report, None, tmp_path / "plot.jpeg")
    assert ".svg" in str(caught.value.hint)
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        plot_report(report, None, tmp_path / "nowhere" / "plot.png")


def test_plotting_without_matplotlib_tells_how_to_install_it(
    tmp_path: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeUnavailableError) as caught:
        plot_report(report, None, tmp_path / "plot.png")
    assert caught.value.hint == install_command("plot")


def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edgespec.bench import plots; print('matplotlib' in sys.modules); "
        f"plots.plot_report({{}}, {{'curves': [{{'model': 'm', 'width': [1, 2], 'forward_s': [1, 1.5]}}]}}, "
        f"Path({str(tmp_path / 'plot.png')!r})); print('matplotlib.pyplot' in sys.modules)"
    )
    result = run_python(code, home=tmp_path)
    assert (result.code, result.out.split()) == (0, ["False", "False"]), result.err
