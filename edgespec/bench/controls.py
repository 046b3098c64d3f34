"""Drafters that know the answer: the oracle is always right, the worst drafter always wrong.

They bound the speed-up of every real drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftRequest, DraftState, Proposal


class Script:
    """The tokens of a prompt and its plain answer, replaced for each prompt."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()


class ReplayDrafter:
    """Proposes the script's next tokens; with ``wrong``, always different tokens. Proposals are free."""

    def __init__(self, script: Script, *, wrong: bool = False) -> None:
        self._script = script
        self._wrong = wrong

    @property
    def kind(self) -> str:
        return "worst" if self._wrong else "oracle"

    def start(self, request: DraftRequest) -> ReplayState:
        return ReplayState(self._script, request.vocabulary_size, self.kind, wrong=self._wrong)

    def close(self) -> None:
        """Holds nothing."""


class ReplayState(DraftState):
    """One session's replay."""

    free = True

    def __init__(self, script: Script, vocabulary_size: int, kind: str, *, wrong: bool) -> None:
        self._script, self._vocabulary_size, self._kind, self._wrong = script, vocabulary_size, kind, wrong

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        tokens = list(self._script.tokens[len(context) : len(context) + depth])
        if self._wrong:
            # Beyond the end of the answer the wrong drafter has proposals too.
            tokens += [0] * (depth - len(tokens))
            tokens = [(token + 1) % self._vocabulary_size for token in tokens]
        if not tokens:
            return NOTHING
        return Proposal(tokens=tuple(tokens), sources=(self._kind,) * len(tokens), drafted_by=self._kind)
