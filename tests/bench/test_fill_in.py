"""The benchmark of holes: what is cut out of the sources, and what its figures say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks import fill_in
from benchmarks.fill_in import HOLES, Cut, Filled, cuts, figures, own_sources


def test_holes_are_cut_out_of_the_sources_the_same_each_time() -> None:
    texts = own_sources()
    found = cuts(texts, HOLES)
    assert found == cuts(texts, HOLES)
    assert len(found) == HOLES == len(set(found))
    assert {cut.before + cut.inside + cut.after for cut in found} <= set(texts.values())
    assert HOLES // 3 < sum(cut.is_line for cut in found) < 2 * HOLES // 3
    for cut in found:
        assert len(cut.inside) >= 4
        assert cut.after.startswith("\n")
        assert len(cut.files) == 2
        assert cut.typed.before + cut.typed.inside == cut.before + cut.inside


def answer(text: str, ids: tuple[int, ...], ttft_s: float, speed: float) -> Any:
    stats = SimpleNamespace(prompt_tokens=100, ttft_s=ttft_s, decode_tokens_per_s=speed)
    return SimpleNamespace(text=text, token_ids=ids, stats=stats)


def test_the_figures_compare_drafts_and_keys() -> None:
    cut = Cut("a", "bc", "\n", ())
    same = Filled(cut, answer("bcd", (1,), 2.0, 30), answer("bcd", (1,), 0.1, 20), answer("cd", (2,), 0.1, 30))
    other = Filled(cut, answer("x", (1,), 1.0, 30), answer("y", (2,), 0.1, 20), answer("", (3,), 0.2, 30))
    found = figures([same, other])
    assert (found["holes"], found["different"], found["exact"]) == (2, 1, 1)
    assert round(found["speed_ratio"], 6) == 1.5
    assert found["second_key_ratio"] == 0.125
    assert found["largest_second_key_ratio"] == 0.2


def test_only_the_figures_are_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fill_in", "--limit", "2"])
    monkeypatch.setattr(fill_in, "Engine", MagicMock())
    monkeypatch.setattr(fill_in, "ask", lambda *_: answer("x", (1,), 1.0, 30))
    fill_in.main()
    written = capsys.readouterr()
    assert json.loads(written.out)["holes"] == 2
    assert written.err.count("second key 1.000 of the first") == 2
