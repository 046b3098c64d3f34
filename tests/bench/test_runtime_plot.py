"""The panel of several runtimes: its labels, and where overlapping labels are moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.plot_data import read_runtimes, read_speedups
from edgespec.bench.plots import RED, apart, plot_report
from edgespec.errors import InvalidRequestError
from tests.bench.test_plots import arm, texts

WIDTH = [1, 2, 4, 8]


def entry(name: str, plain_s: float, **more: Any) -> dict[str, Any]:
    runtime, _, model = name.partition(":")
    return {
        "name": name, "arm": name, "model": model, "runtime": runtime, "device": "cpu", "threads": 2, "context": 96,
        "width": WIDTH, "forward_s": [plain_s * (1 + 0.2 * (width - 1)) for width in WIDTH],
        "t1_ratio": plain_s / 0.04, **more,
    }  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "arms": {"planned": arm(1.2, chat=1.1), "onnx:export": {**arm(0.8, chat=0.7), "same_class": False}},
        "runtimes": [
            entry("llama:whole", 0.040, arm="plain"),
            entry("onnx:export", 0.0504),
            entry("llama:small-head", 0.030, arm=None),
        ],
    }


def test_the_runtime_plot_labels_each_model_with_time_and_ratio(tmp_path: Path, report: dict[str, Any]) -> None:
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    shown = texts(path)
    for text in (
        "How long a step takes in each runtime",
        "cpu, 2 threads, 96 tokens of context:",
        "llama:whole:  T(1) 40 ms (1.00×)",
        "onnx:export:  T(1) 50.4 ms (1.26×)",
        "llama:small-head:  T(1) 30 ms (0.75×)",
    ):
        assert text in shown
    # The name is also next to its line.
    assert shown.splitlines().count("onnx:export") == 1
    assert shown.splitlines().count("llama:small-head") == 1


def test_runtime_curves_replace_the_calibrations_curves(tmp_path: Path, report: dict[str, Any]) -> None:
    curve = {"model": "whole", "runtime": "llama", "device": "cpu", "threads": 2, "context": 96}
    calibration = {"curves": [curve | {"width": WIDTH, "forward_s": [1, 1, 1, 2]}]}
    path = tmp_path / "plot.svg"
    plot_report(report, calibration, path)
    assert "in each runtime" in texts(path)
    assert "T(w) / T(1)" not in texts(path)
    del report["runtimes"][1:]
    plot_report(report, calibration, path)
    assert "in each runtime" not in texts(path)
    assert "T(w) / T(1)" in texts(path), "one model alone gives no comparison"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_plotting_the_same_runtimes_twice_gives_the_same_file(
    tmp_path: Path, report: dict[str, Any], suffix: str
) -> None:
    del report["arms"]
    path = tmp_path / f"plot{suffix}"
    plot_report(report, None, path)
    content = path.read_bytes()
    plot_report(report, None, path)
    assert path.read_bytes() == content


def test_the_runtime_plot_draws_many_models_with_unusual_names(tmp_path: Path, report: dict[str, Any]) -> None:
    report["runtimes"] += [entry(f"onnx:$m$\n{number}", 0.03, device=f"d{number}") for number in range(20)]
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    assert "onnx:$m$ 19:  T(1) 30 ms (0.75×)" in texts(path)
    assert "2 threads, 96 tokens of context:" in texts(path), "only the settings that all lines share"


def test_unmeasured_runtimes_and_widths_are_left_out_of_the_plot(report: dict[str, Any]) -> None:
    report["runtimes"][1]["forward_s"] = [None] * 4
    report["runtimes"][2]["forward_s"][0] = None
    report["runtimes"][2]["t1_ratio"] = None
    found = read_runtimes(report)
    assert found is not None
    assert list(found.lines) == ["llama:whole", "llama:small-head"]
    assert [width for width, _ in found.lines["llama:small-head"].points] == [2, 4, 8]
    assert (found.lines["llama:small-head"].ratio, found.lines["llama:small-head"].arm) == (None, None)
    assert read_runtimes({}) is None
    assert read_runtimes({"runtimes": [entry("a:b", 1.0, forward_s=[None] * 4)] * 2}) is None


def test_a_runtime_line_without_width_one_shows_no_plain_time(tmp_path: Path, report: dict[str, Any]) -> None:
    report["runtimes"][2] |= {"forward_s": [None, 0.1, 0.1, 0.1], "t1_ratio": None}
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    assert "llama:small-head:" not in texts(path)
    assert texts(path).splitlines().count("llama:small-head") == 2


def test_plotting_malformed_runtimes_gives_a_one_sentence_error(tmp_path: Path, report: dict[str, Any]) -> None:
    report["runtimes"][1]["forward_s"] = [0.1]
    with pytest.raises(InvalidRequestError, match="is not a report of edgespec"):
        plot_report(report, None, tmp_path / "plot.svg")


def test_a_different_answer_in_another_numeric_class_is_not_a_warning(tmp_path: Path, report: dict[str, Any]) -> None:
    report["arms"]["onnx:export"]["identical_fraction"] = 0.25
    report["pairs"] = [{"id": "a", "category": "chat", "arm": "onnx:export", "identical_to_plain": False}]
    data = read_speedups(report)
    assert data is not None
    assert all(dot.identical for dot in data.arms["onnx:export"].values())
    path = tmp_path / "plot.svg"
    plot_report(report, None, path)
    assert RED.lower() not in path.read_text(encoding="utf-8").lower()
    report["arms"]["onnx:export"]["same_class"] = True
    plot_report(report, None, path)
    assert "not identical to plain" in texts(path)


def test_overlapping_plot_labels_are_moved_apart_in_order() -> None:
    assert apart([]) == []
    assert apart([0.2, 0.8]) == [0.2, 0.8]
    close = apart([0.5, 0.49, 0.51])
    assert close[1] < close[0] < close[2]
    assert all(b - a > 0.06 for a, b in zip(sorted(close), sorted(close)[1:], strict=False))
    top = apart([1.0, 0.99, 0.98, 1.0])
    assert max(top) == 1.0
    assert all(b - a > 0.06 for a, b in zip(sorted(top), sorted(top)[1:], strict=False))
    crowded = apart([0.5] * 30)
    assert min(crowded) >= -1e-9
    assert max(crowded) <= 1
