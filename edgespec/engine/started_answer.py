"""An answer as it begins, as a plain record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.decoding.sampling import Sampling
from edgespec.drafters.combination import CombinationState
from edgespec.engine.answer import AnswerTask
from edgespec.engine.events import Done
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Plan
from edgespec.text.conversation.conversation import Turn
from edgespec.text.conversation.thinking import ThinkingText, split_thinking
from edgespec.text.conversation.tool_calls import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAnswer:
    """One answer as it begins: its turn, how it is decoded, and the task that decodes it.

    ``history`` are the turn's tokens; the loop adds the answer's tokens. ``thinking`` makes what separates the
    answer's thinking; it returns None if the template has none.
    """

    turn: Turn
    sampling: Sampling
    seed_is_fresh: bool
    depth: AnswerPolicy
    plan: Plan
    drafts: CombinationState
    history: list[int]
    task: AnswerTask
    thinking: Callable[[], ThinkingText | None]

    def calls(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The delivered text without its calls, and the calls."""
        text, tools = self.task.delivered_text, self.turn.tools
        return (text, ()) if tools is None else tools.split(text, self.thinking())

    def done(self, off: Reason | None, plain_tokens_per_s: float | None) -> Done:
        """The answer's last event; ``off`` is why a drafter was not used."""
        task = self.task
        return Done(
            finish_reason=task.finish_reason,
            text=task.delivered_text,
            token_ids=tuple(task.delivered_ids),
            stats=task.stats,
            plan=self.plan,
            sampling=self.sampling,
            speculation_off=None if off is None else off.text,
            speculation_off_code=None if off is None else off.code,
            plain_tokens_per_s=plain_tokens_per_s,
            reasoning=split_thinking(task.delivered_text, self.thinking())[0],
            tool_calls=self.calls()[1],
        )
