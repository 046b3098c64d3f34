"""Several drafters in order of preference: the first that has something to say is heard.

With no drafter at all this is the absence of speculation: it proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.contracts import (
    NOTHING,
    Context,
    DepthPolicy,
    Drafter,
    DraftRequest,
    DraftState,
    Outcome,
    Proposal,
)
from edgespec.errors import CancelledError, EdgespecError


class Combination:
    """Asks ``drafters`` in turn, each as far as ``policy`` lets it draft now."""

    kind = "combination"

    def __init__(self, drafters: Sequence[Drafter], policy: DepthPolicy) -> None:
        self._drafters = tuple(drafters)
        self._policy = policy

    def start(self, request: DraftRequest) -> CombinationState:
        return CombinationState([(d.kind, d.start(request)) for d in self._drafters], self._policy)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


class CombinationState:
    """One session's states of the combined drafters.

    ``policy`` may be exchanged between answers. A drafter that raises is off for the rest of the session, and
    ``failures`` says why: losing a drafter never ends an answer.
    """

    def __init__(self, parts: Sequence[tuple[str, DraftState]], policy: DepthPolicy) -> None:
        self._parts = tuple(parts)
        self.policy = policy
        self.failures: dict[str, str] = {}

    def propose(self, context: Context, depth: int) -> Proposal:
        for kind, state in self._parts:
            allowed = min(depth, self.policy.depth(kind))
            if allowed < 1 or kind in self.failures:
                continue
            try:
                proposal = state.propose(context, allowed)
            except CancelledError:
                raise
            except EdgespecError as error:
                self.failures[kind] = error.message
                continue
            if proposal.drafted_by is not None:
                return proposal
        return NOTHING

    def observe(self, outcome: Outcome) -> None:
        for kind, state in self._parts:
            if kind == outcome.proposal.drafted_by and kind not in self.failures:
                try:
                    state.observe(outcome)
                except EdgespecError as error:
                    self.failures[kind] = error.message

    def cancel(self) -> None:
        for _, state in self._parts:
            state.cancel()

    def reset_cancel(self) -> None:
        for _, state in self._parts:
            state.reset_cancel()

    def close(self) -> None:
        for _, state in self._parts:
            state.close()
