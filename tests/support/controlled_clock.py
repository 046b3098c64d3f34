"""The depth object that is proposed, as a decider of tests/support/simulated_clock.py."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.depth.control import AnswerDepth, DepthControl
from tests.support.drawn_requests import Request, Scenario
from tests.support.simulated_clock import Plain


class Controlled(Plain):
    """The depth object that is proposed (planning/depth/control.py)."""

    def __init__(self, scenario: Scenario) -> None:
        priors = {} if scenario.prior is None else {"model": scenario.prior}
        self._load_s = scenario.believed_load_s
        self.control = DepthControl(scenario.costs, scenario.world.depth_cap, priors, self._load_s)
        self.answer: AnswerDepth | None = None

    @property
    def _now(self) -> AnswerDepth:
        assert self.answer is not None
        return self.answer

    def begin(self, request: Request, prompt_s: float, first_s: float, loaded: bool) -> None:
        self.answer = self.control.answer(
            prompt_tokens=request.prompt_tokens, most=request.max_tokens, prompt_s=prompt_s, first_s=first_s
        )

    def allow(self, source: str, lag: int) -> Allowance:
        return self._now.allow(source, lag)

    @property
    def window(self) -> int | None:  # type: ignore[override]
        return self._now.window

    @property
    def patience_s(self) -> float:  # type: ignore[override]
        return self._now.patience_s

    @property
    def probing(self) -> bool:  # type: ignore[override]
        return self._now.probing

    def loaded(self, seconds: float) -> None:
        self._now.loaded(seconds)

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        self._now.learn(source, confidences, hits)

    def record(self, record: RoundRecord) -> None:
        self._now.record(record)

    def end(self, tokens: int) -> None:
        self._now.end()

    def restart(self) -> None:
        self.control.load_s, self.control.missed_s = self._load_s, 0.0
