"""Which loop decodes an answer, and what binds its tokens to a form."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.decoding.constraint import Bound
from edgespec.decoding.pipelined.budget import Budget
from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.interfaces.model import Sequence as TokenSequence
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.runtimes.thread import WorkerThread
from edgespec.text.conversation.conversation import Conversation, Turn
from edgespec.text.conversation.messages import begun
from edgespec.text.grammar.compiled import CompiledForm


def decode_loop(
    target: TokenSequence,
    drafts: CombinationState,
    depth: AnswerPolicy,
    chooser: Chooser,
    history: list[int],
    limits: LoopLimits,
    budget: Budget | None,
    *,
    trees: bool,
    draft_thread: Callable[[], WorkerThread],
) -> Rounds:
    """The pipelined loop with a ``budget``, on the drafters' thread; else the serial one, of ``trees`` or chains."""
    if budget is None:
        return DecodeLoop(target, drafts, depth, chooser, history, limits, trees=trees)
    submit = draft_thread().submit
    return PipelinedLoop(target, drafts, depth, chooser, history, limits, submit=submit, budget=budget)


def bound_of(
    pair: LoadedPair, conversation: Conversation, turn: Turn, form: CompiledForm | None, owner: str
) -> Bound | None:
    """The cursors of an answer that has a form, which begins behind its thinking, or that may call tools."""
    thinking, prompt_tokens = conversation.thinking(turn), len(turn.tokens)
    if form is None:
        calls = None if turn.tools is None else pair.begun_calls(turn.tools, thinking, owner)
        return None if calls is None else Bound(calls, prompt_tokens)
    continued = begun(turn.after) is not None and thinking is not None and not thinking[1]
    return Bound(pair.bound(form, None if continued else thinking), prompt_tokens)
