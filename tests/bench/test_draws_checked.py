"""Draws of the kernels and of numpy against the specification, on a few rows."""

from __future__ import annotations

import pytest

import benchmarks.draws_checked as module


def test_every_level_and_numpy_draw_the_specified_token_on_320_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", {0: 300, 300: 20})
    found = module.measure()
    assert (found["rows"], found["of"], found["different"]) == (320, 320, [])
    assert 0 < found["not_finite"] < 320
    assert "portable" in found["levels"]
