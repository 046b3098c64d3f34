"""Session: one conversation's mutable state."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.decoding.pipelined.loop import Budget, PipelinedLoop
from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.decoding.stats import DecodeStats
from edgespec.drafters.combination import Combination, CombinationState
from edgespec.engine.answer import AnswerTask, AnswerText
from edgespec.engine.events import Done
from edgespec.engine.generation import Generation
from edgespec.errors import ClosedError, EdgespecError, InvalidRequestError, PromptTooLongError, RewindError
from edgespec.interfaces.drafting import Drafter, DraftRequest, common_prefix
from edgespec.interfaces.model import Model
from edgespec.interfaces.model import Sequence as TokenSequence
from edgespec.interfaces.policy import DepthPolicy
from edgespec.planning.choice.plan import Plan, plain_version
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.thread import WorkerThread

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Who drafts in a session and how far, in place of the engine's plan: for measuring and comparing.

    A ``depth_cap`` beyond the engine's numeric class gives up plain decoding's exact text. ``target`` takes the place
    of the engine's: the same weights in another setting, say. With ``budget`` (called for each answer) drafting and
    verifying go on at once; without one, or where it gives none, in turns. Without ``siblings`` a round in turns puts
    forward a chain alone, also where the target scores trees.
    """

    drafters: tuple[Drafter, ...]
    policy: DepthPolicy
    depth_cap: int
    target: Model | None = None
    budget: Callable[[], Budget | None] | None = None
    siblings: bool = True


# Share of the context kept free for the answer when a conversation outgrows it.
_ANSWER_SHARE = 4


class Session:
    """One conversation: its messages, its caches on both sides, its answers.

    ``generate`` one answer at a time; ``cancel`` from any thread; ``close`` when done. Created by
    ``Engine.session``.
    """

    def __init__(self, engine: Engine, *, system: str | None = None, speculation: Speculation | None = None) -> None:
        self._engine = engine
        self._speculation = speculation
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._history: list[int] = []  # prompt and answer tokens so far
        self._rendered = ""  # the text that the history stands for
        # Re-entrant: a forgotten Generation's destructor may cancel from inside a locked block of the same thread.
        self._lock = threading.RLock()
        self._settling = threading.Lock()
        self._closing = threading.RLock()
        self._closed = False
        self._active: tuple[AnswerTask, Future[None], str | None] | None = None
        # Those of the latest answer: the engine may plan anew while it is written.
        self._policy: DepthPolicy = self._speculating.policy
        self._plan: Plan = engine.plan
        self._target: TokenSequence = self._open_target()
        self._drafts: CombinationState | None = None
        self._draft_thread: WorkerThread | None = None
        self._chooser = Chooser(Sampling())  # shared with the drafters; each answer sets its sampling

    # ------------------------------------------------------------------------------------- conversation

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation so far, the system message first where there is one."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return (*head, *(dict(message) for message in self._messages))

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _speculating(self) -> Speculation:
        """The engine's plan as it is now, unless this session has its own."""
        if self._speculation is not None:
            return self._speculation
        engine = self._engine
        return Speculation(
            drafters=engine.drafters,
            policy=engine.policy,
            depth_cap=engine.plan.depth_cap,
            budget=engine.pipeline_budget,
        )

    def clear(self, *, keep_cache: bool = True) -> None:
        """Forget the conversation, not the system message.

        What a later prompt shares with the old conversation need not be read again, unless ``keep_cache`` is off.
        """
        self._settle_forgotten()
        self._messages.clear()
        self._rendered = ""
        if not keep_cache:
            self._history = []
            self._target.rewind(0)
            drafts, self._drafts = self._drafts, None
            if drafts is not None:
                drafts.close()

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        depth: int | None = None,
    ) -> Generation:
        """Answer ``prompt`` as the next turn, or continue it as plain text with ``raw`` (outside the conversation).

        ``depth`` None is the plan's; a number is capped by the plan's class and is that of chains alone, 0 is plain
        decoding. ``sampling`` None is greedy. Raises InvalidRequestError, PromptTooLongError, TemplateError and
        ClosedError here, everything else from the iteration. The turn joins the conversation when its answer ends,
        however it ends, unless nothing was answered.
        """
        started = time.perf_counter()
        if not raw and not prompt.strip():
            raise InvalidRequestError("the prompt is empty", hint="give at least one character")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {max_tokens}")
        if depth is not None and depth < 0:
            raise InvalidRequestError(f"depth must be 0 or more, not {depth}")
        self._settle_forgotten()
        engine, sampling = self._engine, sampling or Sampling(rule=self._engine.profile.rule)
        notices: list[str] = []
        if engine.follow_power():
            notices.append(f"the machine runs on {engine.machine.power_source or 'unknown power'} now: planned anew")
        if raw:
            text, dropped = prompt, 0
            tokens = engine.encode_prompt(prompt)
        else:
            text, tokens, dropped = self._turn_tokens(prompt, max_tokens, notices)
        if not tokens:
            raise InvalidRequestError("the prompt is empty", hint="give at least one character")
        if len(tokens) >= self._target.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens and the context holds {self._target.context_length}",
                hint="shorten the prompt or use a larger --context",
            )
        self._reopen_if_broken()
        history = list(tokens)
        speculating = self._speculating
        plan = engine.plan
        budget = None if depth == 0 or speculating.budget is None else speculating.budget()
        cap = speculating.depth_cap if depth is None else min(depth, speculating.depth_cap)
        # Beside the target a chain has one token more: a window's forward scores the first token of the next one too.
        policy = speculating.policy if depth is None else FixedDepth(cap + (budget is not None))
        drafts = self._draft_state()
        limits = LoopLimits(
            max_tokens=max_tokens,
            depth_cap=cap,
            vocabulary_size=engine.vocabulary_size,
            stop_ids=engine.tokenizer.stop_ids,
        )
        loop = self._loop(drafts, policy, history, limits, budget)
        stats = DecodeStats(prompt_tokens=len(tokens))
        task = AnswerTask(
            loop=loop,
            history=history,
            answer=AnswerText(engine.tokenizer, stop),
            stats=stats,
            notices=notices,
            started=started,
        )
        prompt_message = None if raw else prompt

        def start(task: AnswerTask) -> None:
            with self._lock:
                if self._closed:
                    raise ClosedError("this session is closed")
                if self._active is not None:
                    raise InvalidRequestError(
                        "this session is already generating an answer", hint="open another session for another one"
                    )

                def prepare() -> None:
                    # What the cache holds is the old history; keep what the new one shares with it.
                    shared = min(common_prefix(self._history[: self._target.length], tokens), len(tokens) - 1)
                    if shared < self._target.length and not engine.can_rewind:
                        shared = 0  # a running state can only be started over
                    stats.cached_tokens = shared
                    del self._messages[:dropped]
                    self._target.rewind(stats.cached_tokens)
                    self._history = history
                    self._chooser.sampling = sampling
                    drafts.policy = self._policy = policy
                    self._plan = plan

                self._active = (task, self._target.submit(lambda: task.run(prepare)), prompt_message)

        return Generation(task, start=start, cancel=self.cancel, settle=lambda task: self._settle(task, text))

    def _loop(
        self,
        drafts: CombinationState,
        policy: DepthPolicy,
        history: list[int],
        limits: LoopLimits,
        budget: Budget | None,
    ) -> Rounds:
        if budget is None:
            siblings = self._speculating.siblings and self._can_branch
            return DecodeLoop(self._target, drafts, policy, self._chooser, history, limits, siblings=siblings)
        if self._draft_thread is None:
            self._draft_thread = WorkerThread("edgespec-draft", lambda: None)  # nobody waits on it
        return PipelinedLoop(
            self._target,
            drafts,
            policy,
            self._chooser,
            history,
            limits,
            submit=self._draft_thread.submit,
            budget=budget,
        )

    def _reopen_if_broken(self) -> None:
        """Start over with an empty cache if the old one could not be rewound: the conversation goes on."""
        try:
            self._target.rewind(self._target.length)
        except RewindError:
            self._target.close()
            self._target = self._open_target()

    def _open_target(self) -> TokenSequence:
        other = None if self._speculation is None else self._speculation.target
        self._can_branch = self._engine.can_branch if other is None else other.facts.can_branch
        return self._engine.open_target() if other is None else other.open(self._engine.plan.context_length)

    def _draft_state(self) -> CombinationState:
        """The drafters' state, kept between answers so that their caches are."""
        if self._drafts is None:
            speculating = self._speculating
            self._drafts = Combination(speculating.drafters, speculating.policy).start(
                DraftRequest(
                    chooser=self._chooser,
                    vocabulary_size=self._engine.vocabulary_size,
                    context_length=self._target.context_length,
                    stop_ids=self._engine.tokenizer.stop_ids,
                )
            )
        return self._drafts

    # ------------------------------------------------------------------------------------ prompt tokens

    def _turn_tokens(self, prompt: str, max_tokens: int | None, notices: list[str]) -> tuple[str, list[int], int]:
        """Text and tokens of the conversation with ``prompt`` added, and how many old messages they leave out.

        Whole turns go, the oldest first, and a few more than needed: dropping one means reading the rest again,
        which should not happen at every turn from then on.
        """
        context = self._target.context_length
        reserve = min(max_tokens or context, context // _ANSWER_SHARE)
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        kept, dropped = list(self._messages), 0
        while True:
            text = self._engine.render([*head, *kept, {"role": "user", "content": prompt}])
            tokens = self._encode(text)
            room = context - context // _ANSWER_SHARE if dropped else context
            if len(tokens) + reserve <= room or not kept:
                break
            del kept[0]
            while kept and kept[0]["role"] != "user":
                del kept[0]
            dropped += 1
        if dropped:
            turns = "turn was" if dropped == 1 else "turns were"
            notices.append(f"the conversation outgrew the context: the oldest {dropped} {turns} dropped")
        return text, tokens, len(self._messages) - len(kept)

    def _encode(self, text: str) -> list[int]:
        """Tokens of ``text``, keeping the ones the model itself wrote where the text continues the history.

        Tokenising an answer again may cut it differently, which would throw its cache away.
        """
        tokenizer = self._engine.tokenizer
        if self._rendered and text.startswith(self._rendered):
            kept = self._history
            if kept and kept[-1] in tokenizer.stop_ids:
                kept = kept[:-1]  # the template writes the end of the turn itself
            return [*kept, *tokenizer.encode(text[len(self._rendered) :], special=True)]
        return self._engine.encode_prompt(text)

    # -------------------------------------------------------------------------------------- end of turn

    def cancel(self) -> None:
        """End the answer in progress within one forward; without one, nothing happens. Any thread may call it."""
        with self._lock:
            if self._active is not None:
                self._target.cancel()
                if self._drafts is not None:
                    self._drafts.cancel()

    def _settle(self, task: AnswerTask, prompt_text: str) -> Done:
        """Bring the session to the last token the reader was given."""
        task.forget()  # its reader is done with it, also if the wait below is interrupted
        with self._settling:  # two threads may come here for one answer: a cancelled ``await`` leaves one behind
            with self._lock:
                active = self._active
            if active is not None and active[0] is task:
                self._end_turn(active, prompt_text)
        return Done(
            finish_reason=task.finish_reason,
            text=task.delivered_text,
            token_ids=tuple(task.delivered_ids),
            stats=task.stats,
            plan=self._plan if self._policy_drafts else plain_version(self._plan),
            sampling=self._chooser.sampling,
            speculation_off=self.speculation_off,
            plain_tokens_per_s=self._speculating.policy.plain_tokens_per_s,
        )

    def _end_turn(self, active: tuple[AnswerTask, Future[None], str | None], prompt_text: str) -> None:
        task, future, prompt = active
        future.result()
        with self._lock:
            self._active = None
            self._target.reset_cancel()
            if self._drafts is not None:
                self._drafts.reset_cancel()
        del self._history[task.stats.prompt_tokens + len(task.delivered_ids) :]
        # A round may have scored more than was delivered. Plain decoding would not have, and the next answer must
        # find the same cache.
        if self._engine.can_rewind:
            with contextlib.suppress(EdgespecError):  # closed meanwhile, or broken: then its next use says so
                self._target.rewind(min(self._target.length, max(0, len(self._history) - 1)))
        self._rendered = ""
        if prompt is not None and task.delivered_text:
            # A turn without an answer is dropped: templates insist on alternating roles.
            self._messages.append({"role": "user", "content": prompt})
            self._messages.append({"role": "assistant", "content": task.delivered_text})
            # After a stop string the tokens say more than the text: then the text is tokenised again.
            if self._engine.tokenizer.detokenize(task.delivered_ids) == task.delivered_text:
                self._rendered = prompt_text + task.delivered_text

    @property
    def _policy_drafts(self) -> bool:
        return not (isinstance(self._policy, FixedDepth) and self._policy.allow("").depth == 0)

    @property
    def speculation_off(self) -> str | None:
        """Why a drafter was not used in the latest answer, or is off now; None if all of them are on."""
        failures = {} if self._drafts is None else self._drafts.failures
        if failures:
            return "; ".join(f"{kind} drafter: {reason}" for kind, reason in failures.items())
        plan = self._plan
        plain_because = [reason for reason in plan.reasons if reason.startswith("plain: ")]
        if plan.drafter_off is not None and not (plain_because and self._engine.drafters):
            return plan.drafter_off
        if plain_because:
            lost = [] if plan.drafter_off is None else [f"no model drafter: {plan.drafter_off}"]
            return "; ".join([plain_because[-1].removeprefix("plain: "), *lost])
        reasons = [self._policy.why_off(drafter.kind) for drafter in self._engine.drafters]
        reasons += [] if self._drafts is None else self._drafts.silences.values()
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None

    def _settle_forgotten(self) -> None:
        """Finish an answer whose reader went away without closing it."""
        with self._lock:
            if self._closed:
                raise ClosedError("this session is closed")
            active = self._active
        if active is None:
            return
        if not active[0].abandoned:
            raise InvalidRequestError(
                "this session is already generating an answer", hint="open another session for another one"
            )
        task = active[0]
        task.abandon()
        self._settle(task, "")
        self._rendered = ""

    def close(self) -> None:
        """End the answer in progress and free the caches. Idempotent; callable from any thread."""
        self.cancel()
        with self._closing:  # a second caller waits for the first: afterwards the caches are gone for both
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                active = self._active
                self.cancel()  # again, for an answer that began in between
            if active is not None:
                active[0].abandon()
                active[1].result()
            if self._draft_thread is not None:
                self._draft_thread.close()
            if self._drafts is not None:
                self._drafts.close()
            self._target.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
