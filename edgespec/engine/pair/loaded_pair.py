"""A loaded target with its drafters and their plan: the state that sessions and calibrations share."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

from edgespec.calibration.measurement_store import Measurements
from edgespec.decoding.constraint import Bound, Constraint
from edgespec.decoding.pipelined.budget import Budget
from edgespec.drafters.forced import ForcedDrafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.stored import KINDS
from edgespec.drafters.trimmed import TrimmedHeadDrafter
from edgespec.engine.learned.texts import StoredTexts
from edgespec.engine.pair.drafter_gain import judge_drafter
from edgespec.engine.pair.drafter_offer import DrafterOffer, best_offer, universal_offer
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.engine.prefixes.prefixes import Prefixes
from edgespec.errors import (
    CancelledError,
    ClosedError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    RuntimeUnavailableError,
)
from edgespec.files.home import Home
from edgespec.files.model_file import KeptSettings, LocatedModel
from edgespec.files.progress import Loading, LoadProgress
from edgespec.hardware.machine import Machine, power_source
from edgespec.hardware.neighbours import Neighbours, worker_seconds
from edgespec.interfaces.drafting import Drafter
from edgespec.interfaces.model import Model, ModelFacts
from edgespec.interfaces.policy import AnswerPolicy, DepthPolicy
from edgespec.placement.cache_rooms import CacheRoom
from edgespec.placement.model_pool import ModelPool
from edgespec.planning.choice.options import Ranking, Rejected
from edgespec.planning.choice.plan import Plan
from edgespec.planning.choice.planner import DraftingModel, PlanRequest, make_plan
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.widths import WIDEST, WidthProbe, exact_length
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.control import DepthControl, make_policy
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.profiles.profile import Profile
from edgespec.runtimes.runtime import LoadedModel
from edgespec.runtimes.thread import OwnProcess
from edgespec.store.families import Family, family_of
from edgespec.text.conversation.conversation import Conversation, PromptFormat, Turn
from edgespec.text.conversation.messages import begun, check_conversation
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.conversation.tools import check_tools, choose_tools
from edgespec.text.conversation.variables import check_variables
from edgespec.text.grammar.after_thinking import AfterThinking, BehindMark, tokens_of
from edgespec.text.grammar.begun_calls import BegunCalls
from edgespec.text.grammar.calls import bare_beginning, begun_form, call_form
from edgespec.text.grammar.compiled import CompiledForm, Forms
from edgespec.text.grammar.form import Form
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.spellings import Spellings
from edgespec.text.tokenizers.token_map import LEAST_COVERAGE
from edgespec.text.tokenizers.tokenizer import Tokenizer

S = TypeVar("S", bound=contextlib.AbstractContextManager[Any])  # a session
T = TypeVar("T")

# How often a callback hears of a wait, which its exception ends.
_TELL_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Who drafts for one answer and how far. A session with a Speculation ignores the plan: to measure and compare.

    A ``depth_cap`` beyond the engine's numeric class gives up plain decoding's exact text. ``target`` replaces the
    engine's, for example by the same weights in another setting. ``budget`` is called for each answer: if it gives a
    Budget, drafting and verifying are pipelined, else serial. Without ``trees`` a serial round proposes a chain
    only, also if the target scores trees.
    """

    drafters: tuple[Drafter, ...]
    policy: DepthPolicy
    depth_cap: int
    target: Model | None = None
    budget: Callable[[], Budget | None] | None = None
    trees: bool = True


class LoadedPair:
    """Target, drafters, tokenizer and measurements, their plan, and the sessions that use them."""

    def __init__(
        self,
        *,
        profile: Profile,
        machine: Machine,
        home: Home,
        target: LoadedModel,
        kept: KeptSettings | None,
        tokenizer: Tokenizer,
        pool: ModelPool,
        request: PlanRequest,
        probe: WidthProbe | None,
        store: Measurements,
        notices: tuple[str, ...] = (),
        most_threads: int | None = None,
        considered: tuple[Rejected, ...] = (),
    ) -> None:
        self.profile = profile
        self.machine = machine
        self.home = home
        self.target = target
        self.tokenizer = tokenizer
        self.kept = KeptSettings(program="edgespec") if kept is None else kept
        self.forms = Forms(tokenizer, target.facts.vocabulary_size)
        self.prompts = PromptFormat(
            target.facts.name,
            tokenizer,
            target.header.chat_template,
            target.header.context_length,
            named_templates=target.header.named_templates,
            system=self.kept.system,
            other_template=self.kept.program if self.kept.has_template else None,
        )
        self.pool = pool
        self.request = request
        self.probe = probe
        self.considered = considered  # files on this machine that do not draft, with reasons
        self._notices = notices  # for the reader of the next answer
        self.most_threads = most_threads or target.settings.threads  # fewer threads may be faster
        self.lock = threading.RLock()
        self.process = OwnProcess()
        self.closed = False
        # Weak: a server opens thousands of sessions, and the pair must not keep them alive.
        self.sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        # Weak references to methods that end a running calibration, and that free the memory only it needs.
        self.on_new_power: Callable[[], Callable[[], None] | None] = lambda: None
        self.on_answer: Callable[[], Callable[[], None] | None] = lambda: None
        # Closes a conversation that is not in use, if memory is short; False if there is none.
        self.make_room: Callable[[], bool] = lambda: False
        stored = StoredTexts.open(profile, home, target.header)
        self._notices += stored.notices
        self.answers = stored.answers  # the history of answers; None if it is off
        self.prefixes = Prefixes(home, target.facts) if profile.prefixes is True else None
        drafters: list[Drafter] = []
        if profile.lookup:
            drafters += [LookupDrafter(), *stored.drafters]
        if pool.drafter is not None:
            drafters.append(_model_drafter(pool, request.drafters[0].source))
        self.drafters: tuple[Drafter, ...] = tuple(drafters)
        self.measurements = self._measurements_in(store)
        self.read_ahead = ReadAhead(self)
        costs = self.costs()
        self.ranking: Ranking | None = None
        self.plan: Plan = self._plan_by(costs)
        self.policy: DepthPolicy = self._policy_by(costs)
        self.keeps_learned = True  # whether what answers taught the policy is stored at the end

    # ----------------------------------------------------------------------------------------- facts

    @property
    def vocabulary_size(self) -> int:
        return self.target.facts.vocabulary_size

    @property
    def can_rewind(self) -> bool:
        """Whether the target's cache can drop rejected tokens."""
        return self.target.facts.can_rewind

    @property
    def depth_cap_allowed(self) -> int:
        """The largest depth that keeps the requested exactness, whether or not the plan drafts."""
        if not self.can_rewind or self.probe is None:
            return 0
        return WIDEST - 1 if self.profile.exactness == "near" else self.probe.depth_cap

    @property
    def family(self) -> Family | None:
        """The target's model family; None if unknown."""
        return family_of(self.target.header, self.pool.target.name)

    @property
    def stated_sampling(self) -> Mapping[str, object]:
        """What the target's file, or else its family's makers, and before them the program that keeps it state."""
        stated = self.target.header.sampling
        if not stated and self.family is not None:
            stated = self.family.sampling
        return {**stated, **self.kept.sampling}

    def drafter_offer(self) -> DrafterOffer | None:
        """A drafter to fetch for a target without one, if it is expected to be faster than plain decoding."""
        request, target = self.request, self.target.facts
        if self.profile.draft != "auto" or request.depth == 0 or self.pool.drafter is not None or not self.can_rewind:
            return None

        def expected_speedup(drafter: ModelFacts, translated: float | None = None) -> float | None:
            drafting = DraftingModel(facts=drafter, translated=translated)
            judged = judge_drafter(self.measurements.store, target, drafting, request, self.pool.allowed_bytes)
            return None if judged.why_not is not None else judged.speedup

        here = {one.what for one in self.considered}  # already on this machine, and it does not draft
        offer = best_offer(self.family, target, expected_speedup)
        if offer is None or offer.model in here:  # how many tokens are shared is known once it is here
            offer = universal_offer(target, lambda drafter: expected_speedup(drafter, LEAST_COVERAGE))
        return None if offer is None or offer.model in here else offer

    @property
    def answering(self) -> bool:
        """Whether an answer is running, or waits for its reader."""
        with self.lock:  # no session may be added during the loop
            return any(session.answering for session in self.sessions)

    def admit(self, make: Callable[[CacheRoom], S], tokens: int = 0, *, spare: bool = False) -> S:
        """The session that ``make`` opens, if there is memory for it. Its caches begin with ``tokens``.

        With ``spare`` memory must also hold a conversation that fills the context, and none is given up for it.
        ``make`` is called without the lock of the pair: it may read a large cache. Raises ClosedError,
        MemoryLimitError.
        """

        def admitted() -> S:
            with self.lock:
                self._check_open()
                room = self.pool.rooms.open(tokens, spare=spare)
            with contextlib.ExitStack() as failed:
                failed.callback(room.close)
                try:
                    session = make(room)
                except CancelledError:
                    self._check_open()  # the end of the engine has cancelled it
                    raise
                failed.push(session)
                with self.lock:
                    self._check_open()
                    self.sessions.add(session)
                failed.pop_all()
            return session

        return admitted() if spare else self._with_room(admitted)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this engine is closed")

    def grow(self, room: CacheRoom, tokens: int) -> None:
        """Let a session's caches hold that many tokens. Takes no lock of the pair. Raises MemoryLimitError."""
        self._with_room(lambda: room.grow(tokens))

    def _with_room(self, take: Callable[[], T]) -> T:
        """What ``take`` returns. If memory is short, conversations that are not in use are given up first."""
        while True:
            try:
                return take()
            except MemoryLimitError:
                if not self.make_room():
                    raise

    def speculation(self) -> Speculation:
        """The current plan. Where anything drafts, tokens that a form forces are guesses too."""
        drafters = (*self.drafters, ForcedDrafter()) if self.drafters else ()
        return Speculation(
            drafters=drafters, policy=self.policy, depth_cap=self.plan.depth_cap, budget=self.pipeline_budget
        )

    def pipeline_budget(self) -> Budget | None:
        """The budget of each round of one answer if the plan is pipelined; else None."""
        if self.plan.mode != "pipelined":
            return None
        return MeasuredBudget(self.plan.depth_cap, self.costs())

    def costs(self) -> Costs:
        """The current estimates of times and costs."""
        return replace(self.measurements.costs(), load_s=self.pool.load_s)

    def prepare_drafter(self, tell: LoadProgress) -> None:
        """Lay out the drafter's weights if the plan uses the drafter and later loads can map the result.

        Runs once on a machine and takes seconds, before the first answer. A failure is not raised here: the answer
        that drafts reports it.
        """
        drafter, own = self.plan.drafter, self.pool.drafter
        if own is None or drafter is None or drafter.model is None or not self.plan.depth_cap or not own.will_prepare:
            return
        step = Loading(f"preparing {own.file.name}, once on this machine")
        tell(step)
        with contextlib.suppress(EdgespecError):
            drafting = self.pool.drafter_model()
            while not drafting.wait(_TELL_AGAIN_S):
                tell(step)

    # ------------------------------------------------------------------------------------------ plan

    def replan(self) -> None:
        """Plan again from the stored measurements. The next answers follow the new plan."""
        self.probe = self.measurements.widths() or self.probe
        costs = self.costs()
        self.plan = self._plan_by(costs)
        if isinstance(self.policy, DepthControl):
            pipelined = self.plan.mode == "pipelined"
            self.policy.replan(costs, self.plan.depth_cap, self.measurements.priors, pipelined=pipelined)
        else:
            self.policy = self._policy_by(costs)

    def _plan_by(self, costs: Costs) -> Plan:
        """The best way of the ranking, as a plan."""
        near = self.profile.exactness == "near"
        # The longest context at which drafting keeps the requested exactness; None: any length.
        self.exact_length = None if near else exact_length(self.probe, self.target.facts)
        allowed = self.pool.allowed_bytes
        self.ranking = self.measurements.ranking(self.probe, costs, self.pool.places, allowed)
        facts, notes = self.target.facts, self.measurements.notes
        return make_plan(self.request, facts, self.probe, notes, costs, self.ranking)

    def _policy_by(self, costs: Costs) -> DepthPolicy:
        name = self.profile.depth_policy if self.profile.depth == "auto" else "fixed"
        known, pipelined = self.measurements, self.plan.mode == "pipelined"
        return make_policy(name, self.plan.depth_cap, costs, known.priors, known.history, pipelined=pipelined)

    def compiled_form(
        self, form: Form | None, tools: Sequence[dict[str, Any]], must: Sequence[str], owner: str
    ) -> CompiledForm | None:
        """The form of an answer that may call ``tools``, and must call one of the tools named ``must``, if any.

        None for an answer without a form. ``owner`` is that of ``Engine.session``. Raises InvalidRequestError, and
        RuntimeUnavailableError without llguidance.
        """
        if form is not None and must:
            raise InvalidRequestError("an answer that is a call has no other form", param="tool_choice")
        use = self.prompts.tool_use(tools) if must or form is not None else None
        if use is not None:
            names = must or [tool["function"]["name"] for tool in tools]
            several, thinking = len(names) > 1 or not must, self.prompts.thinking
            marks = () if thinking is None else thinking.answer
            use = replace(use, marks={**use.marks, **self.prompts.thinking_tokens})
            form = call_form(use, names, several=several, otherwise=form, marks=marks)
        return None if form is None else self.forms.compiled(form, owner)

    @cached_property
    def spellings(self) -> Spellings:
        """The target's tokens by their texts."""
        return Spellings(self.tokenizer, self.vocabulary_size)

    def load_comparable(self, files: Sequence[LocatedModel], *, for_prompts: bool = False) -> tuple[LoadedModel, ...]:
        """``ModelPool.load_comparable`` for the plan's context: models to compare, next to the target."""
        return self.pool.load_comparable(files, self.plan.context_length, for_prompts=for_prompts)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        template_variables: Mapping[str, Any] | None,
        budget: RequestBudget | None,
    ) -> list[int]:
        """``Engine.prompt_tokens``, the tokens themselves."""
        prompt, earlier, after = check_conversation(None, messages, raw=False)
        usable, _ = choose_tools(check_tools(tools), tool_choice)
        turn = Conversation(self.prompts, None).turn(
            prompt,
            None,
            sys.maxsize,
            raw=False,
            earlier=earlier,
            after=after,
            tools=usable,
            variables=check_variables(template_variables),
            keep_all=True,
            budget=budget,
        )
        return turn.tokens

    def bound(self, conversation: Conversation, turn: Turn, form: CompiledForm | None, owner: str) -> Bound | None:
        """The cursors of an answer that has a form, which begins behind its thinking, or that may call tools."""
        thinking, prompt_tokens = conversation.thinking(turn), len(turn.tokens)
        if form is None:
            calls = None if turn.tools is None else self.begun_calls(turn.tools, thinking, owner)
            return None if calls is None else Bound(calls, prompt_tokens)
        continued = begun(turn.after) is not None and thinking is not None and not thinking[1]
        return Bound(self._behind(form, None if continued else thinking), prompt_tokens)

    def _behind(self, form: CompiledForm, thinking: tuple[ThinkingMarks, bool] | None) -> Constraint:
        """The form behind an answer's thinking, and behind the mark of the answer unless it is a call."""
        if thinking is None:
            return form
        marks, inside = thinking
        behind: Constraint = form
        if marks.answer and form.form.kind != "call":
            behind = BehindMark(form, tuple(tuple(tokens_of(mark, self.tokenizer)) for mark in marks.answer))
        return AfterThinking(behind, marks, inside, self.tokenizer)

    def begun_calls(self, use: ToolUse, thinking: tuple[ThinkingMarks, bool] | None, owner: str) -> BegunCalls:
        """What binds the calls of an answer that may have some.

        The grammar of a call is compiled when the first one begins: other answers do not wait for it.
        """
        marks, inside = (None, False) if thinking is None else thinking
        # Once for all cursors of the answer: the text of 1024 tools takes 0.2 to 0.4 s, also if it is then too large.
        begun = cache(lambda bare: self._begun_call(use, owner, bare=bare))
        return BegunCalls(
            marks=use.format.whole_beginnings,
            names=frozenset(tool["function"]["name"] for tool in use.tools),
            bare=bare_beginning(use),
            begin=lambda bare: None if (form := begun(bare)) is None else form.cursor(),
            thinking=marks,
            inside=inside,
            tokenizer=self.tokenizer,
        )

    def prepare_calls(self, tools: Sequence[dict[str, Any]], owner: str) -> None:
        """Compile what an answer that may call ``tools`` needs once it begins a call. Raises InvalidRequestError."""
        use = self.prompts.tool_use(tools)
        if use is not None:
            for bare in (False, True)[: 1 + use.format.bare]:
                self._begun_call(use, owner, bare=bare)

    def _begun_call(self, use: ToolUse, owner: str, *, bare: bool) -> CompiledForm | None:
        """The form of a begun call; None if it cannot be compiled, which binds nothing."""
        try:
            return self.forms.compiled(begun_form(use, bare=bare), owner)
        except (InvalidRequestError, RuntimeUnavailableError):
            return None

    def begin_answer(self) -> None:
        """Prepare for an answer: stop reading ahead, free calibration memory, follow the power source."""
        self.read_ahead.put_off()
        if (free := self.on_answer()) is not None:
            free()
        self.follow_power()

    def answered(self, depth: AnswerPolicy, *, beside_others: bool) -> None:
        """Hold a measured plan to what an ended answer got, and plan again if answers agree that it does not hold.

        An answer ``beside_others``, which other programs slowed, tells nothing. Nor does an answer that ends while
        another thread changes the pair, since it must not wait.
        """
        outcome = depth.outcome() if isinstance(depth, AnswerDepth) else None
        if outcome is None or beside_others or not self.lock.acquire(blocking=False):
            return
        try:
            if self.closed or self.ranking is None or not self.ranking.best.target.measured:
                return
            best = self.ranking.best
            promised = replace(
                outcome,
                promised_tokens_per_round=best.tokens_per_round,
                promised_token_s=1.0 / best.tokens_per_s,
            )
            if self.measurements.learn_answer(promised):
                self.replan()
        finally:
            self.lock.release()

    def take_notices(self) -> tuple[str, ...]:
        """The pending notices for the reader of an answer. Each notice is returned once."""
        with self.lock:
            notices, self._notices = self._notices, ()
        if self.answers is not None and (damage := self.answers.take_notice()) is not None:
            notices += (damage,)
        if notices:
            self.measurements.place_announced()
        return notices

    def follow_power(self) -> bool:
        """Plan again if the machine switched between battery and mains: each has its own measurements.

        Whether there is a new plan; a notice of the next answer says so. An unreadable source counts as unchanged.
        """
        now = power_source()
        with self.lock:  # sessions answer in parallel
            if self.closed or now is None or now == self.machine.power_source:
                return False
            self.machine = replace(self.machine, power_source=now)
            self.measurements = self._measurements_in(self.measurements.store.on_power(now))
            if (give_up := self.on_new_power()) is not None:
                give_up()
            self.replan()
            self._notices += (f"the machine runs on {now} now: planned again",)
        return True

    def adopt(self, *, threads: int) -> bool:
        """Run the target's weights with another number of threads; False while a session is open."""
        with self.lock:
            if self.closed or self.pool.rooms.positions:  # a session that is being opened has a room
                return False
            other = self.target.with_settings(threads=threads)
            self.target.close()
            self.target, self.probe = other, None
            self.pool.lend(other)
            self.pool.use_threads(other.settings.threads)  # drafters use the target's threads
            if (drafter := self.pool.drafter) is not None:
                models = tuple(replace(model, facts=drafter.facts) for model in self.request.drafters)
                self.request = replace(self.request, drafters=models)
            self.pool.load_prepared()
            self.measurements = self._measurements_in(self.measurements.store)
            self.replan()  # the old plan's depths belong to another numeric class
        return True

    def _measurements_in(self, store: Measurements) -> PairMeasurements:
        """The stored measurements of the target and its drafter in their current settings."""
        stored_texts = [drafter.kind for drafter in self.drafters if drafter.kind in KINDS]
        return PairMeasurements(store, self.target.facts, self.request, stored_texts)


def _model_drafter(pool: ModelPool, source: str) -> Drafter:
    """Drafts with the pool's model; with a trimmed head, only while its head covers the text."""
    # Weak references: a forgotten engine must not be kept alive by its own drafter.
    open_drafter = weakref.WeakMethod(pool.drafter_in_targets_tokens)
    open_whole: weakref.WeakMethod[Callable[[], Model]] = weakref.WeakMethod(pool.whole_drafter_model)
    drafter = ModelDrafter(lambda: _called(open_drafter), source)
    kept_ids = None if pool.drafter is None else pool.drafter.file.kept_ids
    if kept_ids is None:
        return drafter
    whole = None if pool.whole_drafter is None else ModelDrafter(lambda: _called(open_whole), source)
    return TrimmedHeadDrafter(drafter, whole, kept_ids.tolist())


def _called(method: weakref.WeakMethod[Callable[[], Model]]) -> Model:
    alive = method()
    if alive is None:
        raise ClosedError("this engine is gone")
    return alive()


# Idle time before the drafter reads ahead: a program asks again within milliseconds, a person types for seconds. A
# choice between the two.
IDLE_S = 0.5


class Reader(Protocol):
    """A session whose drafter reads ahead."""

    def read_ahead(self) -> object:
        """Begin to read, and return immediately."""

    def stop_reading(self) -> None:
        """Stop reading soon."""


class ReadAhead:
    """Lets the drafter read the conversation of the latest answer after ``idle_s`` without an answer.

    Thread-safe. Keeps no engine and no session alive.
    """

    def __init__(self, owner: LoadedPair, idle_s: float = IDLE_S) -> None:
        self._owner = weakref.ref(owner)
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._reader: Callable[[], Reader | None] = lambda: None

    def when_idle(self, reader: Reader) -> None:
        """Start the idle time: an answer of ``reader`` ended."""
        self._reader = weakref.ref(reader)
        timer = threading.Timer(self._idle_s, _begin, (self._owner, self._reader))
        timer.daemon, timer.name = True, "edgespec-read-ahead"
        self._exchange(timer)

    def put_off(self) -> None:
        """Stop reading, because an answer or a measurement begins."""
        self._exchange(None)
        reader = self._reader()
        if reader is not None:
            reader.stop_reading()

    def _exchange(self, timer: threading.Timer | None) -> None:
        with self._lock:
            before, self._timer = self._timer, timer
            if before is not None:
                before.cancel()
            if timer is not None:
                with contextlib.suppress(RuntimeError):  # the thread limit is reached: skip reading ahead
                    timer.start()


def _begin(reference: Callable[[], LoadedPair | None], reading: Callable[[], Reader | None]) -> None:
    owner, reader = reference(), reading()
    if owner is not None and reader is not None and not owner.answering:
        reader.read_ahead()


def neighbours_of(drafter: ModelFacts | None) -> Neighbours:
    """Adds up what other programs use: a drafter in a separate process is not one of them."""
    apart = drafter is not None and "process" in drafter.settings
    return Neighbours(workers=worker_seconds) if apart else Neighbours()
