"""The longest times of leaving an answer, on times made by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

import benchmarks.leaving as module


@pytest.mark.parametrize(("slowest", "part"), [("cancel", 0), ("cancel", 1), ("Engine.close", 0)])
def test_the_longest_time_counts_and_a_closed_engine_is_replaced(
    monkeypatch: pytest.MonkeyPatch, slowest: str, part: int
) -> None:
    opened: list[str] = []

    def left_after(moment: str, made: Any, way: str) -> tuple[float, ...]:
        assert moment == opened[-1]
        slow = (way, made.prompt) == (slowest, module.LONG)
        return tuple(0.151 if slow and place == part else 0.05 for place in (0, 1))

    def engine(moment: str) -> Any:
        opened.append(moment)
        return nullcontext(moment)

    monkeypatch.setattr(module, "_engine", engine)
    monkeypatch.setattr(module, "_left_after", left_after)
    monkeypatch.setattr(module, "_command_left_after", lambda _moment, _s: 3.0)
    found = module.measure()
    assert len(found["longest_s"]) == 5
    assert found["longest_s"][slowest] == {"load": 0.05, "prompt": 0.151, "round": 0.05}
    assert found["with_freeing_s"]["edgespec generate"] == {"load": 3.0, "prompt": 3.0, "round": 3.0}
    assert len(opened) == 5 * 3 + 3 * module.TURNS


def test_the_time_of_freeing_the_models_is_reported_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_engine", nullcontext)
    monkeypatch.setattr(
        module, "_left_after", lambda _engine, _made, way: (0.05, 2.0 if way == "Engine.close" else 0.05)
    )
    monkeypatch.setattr(module, "_command_left_after", lambda _moment, _s: 0.3)
    found = module.measure()
    assert set(found["with_freeing_s"]["Engine.close"].values()) == {2.0}
    assert max(max(own.values()) for own in found["longest_s"].values()) == 0.05
