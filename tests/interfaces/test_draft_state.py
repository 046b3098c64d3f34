"""What a drafter's state does if it overrides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftState, DraftTree
from tests.support.scripted_drafters import Scripted

TEXT = Context([1, 2, 3])


def test_a_state_that_overrides_nothing_is_ready_and_proposes_nothing() -> None:
    state, tree = DraftState(), DraftTree()
    state.load()
    state.grow(TEXT, tree, 0, float)
    assert state.propose(TEXT, 4) is NOTHING
    assert (state.ready, state.silent_because) == (True, None)
    assert not any((state.free, state.grows_trees))
    assert (state.lag(TEXT), state.unread(TEXT), state.read_ahead(TEXT), len(tree)) == (0, 0, [], 0)


class Reading(Scripted):
    stopped = 0

    def stop_reading(self) -> None:
        self.stopped += 1


class Several(DraftState):
    def __init__(self, *parts: DraftState) -> None:
        self._parts = parts

    @property
    def parts(self) -> Sequence[DraftState]:
        return self._parts


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_state_of_parts_cancels_stops_and_closes_each_part(count: int) -> None:
    parts = [Reading(lambda tokens, depth: []) for _ in range(count)]
    whole = Several(*parts)
    whole.cancel()
    assert all(part.cancelled for part in parts)
    whole.reset_cancel()
    whole.stop_reading()
    whole.close()
    assert [(part.cancelled, part.stopped, part.closed) for part in parts] == [(False, 1, 1)] * count
