"""A loaded target with the drafters found for it, and the plan for them: what sessions and calibrations are given."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgespec.calibration.measurement_store import Measurements
from edgespec.decoding.pipelined.budget import Budget
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.trimmed import TrimmedHeadDrafter
from edgespec.engine.conversation import PromptFormat
from edgespec.engine.drafter_gain import judge_drafter
from edgespec.engine.drafter_offer import DrafterOffer, best_offer
from edgespec.engine.events import Loading, LoadProgress
from edgespec.engine.pair_measurements import PairMeasurements
from edgespec.errors import ClosedError, EdgespecError
from edgespec.files.home import Home
from edgespec.hardware.machine import Machine, power_source
from edgespec.interfaces.drafting import Drafter
from edgespec.interfaces.model import Model, ModelFacts
from edgespec.interfaces.policy import DepthPolicy
from edgespec.placement.memory import MemoryEstimate, memory_needed
from edgespec.placement.model_pool import ModelPool
from edgespec.planning.choice.options import Ranking, Rejected
from edgespec.planning.choice.plan import Plan
from edgespec.planning.choice.planner import PlanRequest, make_plan
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.widths import WIDEST, WidthProbe, exact_length
from edgespec.planning.depth.control import DepthControl, make_policy
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.profiles.profile import Profile
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.runtime import LoadedModel
from edgespec.store.families import Family, family_of
from edgespec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Who drafts for one answer and how far. Given to a session it replaces the plan's: for measuring and comparing.

    A ``depth_cap`` beyond the engine's numeric class gives up plain decoding's exact text. ``target`` takes the place
    of the engine's: the same weights in another setting, say. With ``budget`` (called for each answer) drafting and
    verifying are pipelined; without one, or where it gives none, they are serial. Without ``siblings`` a serial round
    puts forward a chain alone, also where the target scores trees.
    """

    drafters: tuple[Drafter, ...]
    policy: DepthPolicy
    depth_cap: int
    target: Model | None = None
    budget: Callable[[], Budget | None] | None = None
    siblings: bool = True


class LoadedPair:
    """Target, drafters, tokenizer and measurements, the plan that follows from them, and the sessions that use it."""

    def __init__(
        self,
        *,
        profile: Profile,
        machine: Machine,
        home: Home,
        target: LoadedModel,
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
        self.prompts = PromptFormat(
            target.facts.name, tokenizer, target.header.chat_template, target.header.context_length
        )
        self.pool = pool
        self.request = request
        self.probe = probe
        self.considered = considered  # files on this machine that do not draft, and why
        self._notices = notices  # for the reader of the next answer
        self.most_threads = most_threads or target.settings.threads  # of which fewer may be faster
        self.lock = threading.RLock()
        self.closed = False
        # Not kept alive by the pair: a server opens thousands of sessions in its life.
        self.sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        # Weak references: what ends a calibration that is under way, and what frees what only a calibration needs.
        self.on_new_power: Callable[[], Callable[[], None] | None] = lambda: None
        self.on_answer: Callable[[], Callable[[], None] | None] = lambda: None
        drafters: list[Drafter] = []
        if profile.lookup:
            drafters.append(LookupDrafter())
        if pool.drafter is not None:
            drafters.append(_model_drafter(pool))
        self.drafters: tuple[Drafter, ...] = tuple(drafters)
        self.measurements = self._measurements_in(store)
        self.read_ahead = ReadAhead(self)
        costs = self.costs()
        self.ranking: Ranking | None = None
        self.plan: Plan = self._plan_by(costs)
        self.policy: DepthPolicy = self._policy_by(costs)

    # ----------------------------------------------------------------------------------------- facts

    @property
    def vocabulary_size(self) -> int:
        return self.target.facts.vocabulary_size

    @property
    def can_rewind(self) -> bool:
        """Whether the target's cache can drop its last tokens."""
        return self.target.facts.can_rewind

    @property
    def depth_cap_allowed(self) -> int:
        """The deepest draft that keeps the exactness asked for, whether or not the plan drafts at all."""
        if not self.can_rewind or self.probe is None:
            return 0
        return WIDEST - 1 if self.profile.exactness == "near" else self.probe.depth_cap

    @property
    def family(self) -> Family | None:
        """The known family that the target is of."""
        return family_of(self.target.header, self.pool.target.name)

    def drafter_offer(self) -> DrafterOffer | None:
        """A drafter to fetch for a target without one, where that is expected to pay."""
        request, target = replace(self.request, sources=("model",)), self.target.facts
        if self.profile.draft != "auto" or request.depth == 0 or self.pool.drafter is not None or not self.can_rewind:
            return None

        def expected_speedup(drafter: ModelFacts) -> float | None:
            allowed = self.pool.left_bytes + self.session_memory.total_bytes
            judged = judge_drafter(self.measurements.store, target, drafter, request, allowed)
            return None if judged.why_not is not None else judged.speedup

        offer = best_offer(self.family, target, expected_speedup)
        here = {one.what for one in self.considered}  # fetched before, and it does not draft
        return None if offer is None or offer.model in here else offer

    @property
    def session_memory(self) -> MemoryEstimate:
        """What the target takes with one session."""
        return memory_needed(self.pool.target, self.target.settings, self.request.context_length)

    @property
    def answering(self) -> bool:
        """Whether an answer is under way, or waits for its reader."""
        with self.lock:  # no session is added meanwhile
            return any(session.answering for session in self.sessions)

    def speculation(self) -> Speculation:
        """The plan as it is now."""
        return Speculation(
            drafters=self.drafters, policy=self.policy, depth_cap=self.plan.depth_cap, budget=self.pipeline_budget
        )

    def pipeline_budget(self) -> Budget | None:
        """How much each round of one answer verifies where the plan drafts beside the target; None where not."""
        if self.plan.mode != "pipelined":
            return None
        return MeasuredBudget(self.plan.depth_cap, self.costs())

    def costs(self) -> Costs:
        """What is known of times and prices now."""
        return replace(self.measurements.costs(), load_s=self.pool.load_s)

    def prepare_drafter(self, tell: LoadProgress) -> None:
        """Lay out the drafter's weights, where the plan uses it and later loads will only have to map them.

        That is done once on a machine, takes seconds and is waited for: no answer pays for it. Failing is no error
        here: the answer that drafts tells of it.
        """
        drafter, own = self.plan.drafter, self.pool.drafter
        if own is None or drafter is None or drafter.model is None or not self.plan.depth_cap or not own.will_prepare:
            return
        tell(Loading(f"preparing {own.file.name}, once on this machine"))
        with contextlib.suppress(EdgespecError):
            self.pool.drafter_model().wait()

    # ------------------------------------------------------------------------------------------ plan

    def replan(self) -> None:
        """Plan from what is stored now; answers that begin from here on follow the new plan."""
        self.probe = self.measurements.widths() or self.probe
        costs = self.costs()
        self.plan = self._plan_by(costs)
        if isinstance(self.policy, DepthControl):
            pipelined = self.plan.mode == "pipelined"
            self.policy.replan(costs, self.plan.depth_cap, self.measurements.priors, pipelined=pipelined)
        else:
            self.policy = self._policy_by(costs)

    def _plan_by(self, costs: Costs) -> Plan:
        """The best of what was ranked, in words."""
        near = self.profile.exactness == "near"
        # The longest context at which drafting keeps the exactness asked for; None where length does not matter.
        self.exact_length = None if near else exact_length(self.probe, self.target.facts)
        allowed = self.pool.left_bytes + self.session_memory.total_bytes
        self.ranking = self.measurements.ranking(self.request, self.probe, costs, self.pool.places, allowed)
        facts, notes = self.target.facts, self.measurements.notes
        return make_plan(self.request, facts, self.probe, notes, costs, self.ranking)

    def _policy_by(self, costs: Costs) -> DepthPolicy:
        name = self.profile.depth_policy if self.profile.depth == "auto" else "fixed"
        known, pipelined = self.measurements, self.plan.mode == "pipelined"
        return make_policy(name, self.plan.depth_cap, costs, known.priors, known.history, pipelined=pipelined)

    def begin_answer(self) -> None:
        """What every answer begins with."""
        self.read_ahead.put_off()
        if (free := self.on_answer()) is not None:
            free()
        self._notices += self.follow_power()

    def take_notices(self) -> tuple[str, ...]:
        """The sentences that the reader of an answer is about to see, and nobody after that."""
        notices, self._notices = self._notices, ()
        if notices:
            self.measurements.place_announced()
        return notices

    def follow_power(self) -> tuple[str, ...]:
        """Plan anew if the machine went on battery or back to mains: times measured on the other do not hold.

        Returns the sentence that says so, if there is a new plan. A source that cannot
        be told for a moment is no change.
        """
        now = power_source()
        with self.lock:
            if self.closed or now is None or now == self.machine.power_source:
                return ()
            self.machine = replace(self.machine, power_source=now)
            self.measurements = self._measurements_in(self.measurements.store.on_power(now))
            if (give_up := self.on_new_power()) is not None:
                give_up()
            self.replan()
        return (f"the machine runs on {now} now: planned anew",)

    def adopt(self, *, threads: int) -> bool:
        """Go on with the target's weights on other threads; False while a session is open."""
        with self.lock:
            if self.closed or any(not session.closed for session in self.sessions):
                return False
            other = self.target.with_settings(threads=threads)
            self.target.close()
            self.target, self.probe = other, None
            self.pool.use_threads(other.settings.threads)  # drafters run as the target does
            self.pool.load_prepared()
            self.measurements = self._measurements_in(self.measurements.store)
            self.replan()  # the depths of the old plan are those of another numeric class
        return True

    def _measurements_in(self, store: Measurements) -> PairMeasurements:
        """What is stored of the target and its drafter as they are now."""
        drafter = self.pool.drafter
        facts = None if drafter is None else drafter.facts
        return PairMeasurements(store, self.target.facts, facts, self.request.sources, self.request.context_length)


def _model_drafter(pool: ModelPool) -> Drafter:
    """Drafts with the pool's model; if its head is trimmed, only while it can say what is being written."""
    # Weakly: an engine that is forgotten must not live on through its own drafter.
    open_drafter, open_whole = weakref.WeakMethod(pool.drafter_model), weakref.WeakMethod(pool.whole_drafter_model)
    drafter = ModelDrafter(lambda: _called(open_drafter))
    kept_ids = None if pool.drafter is None else pool.drafter.file.kept_ids
    if kept_ids is None:
        return drafter
    whole = None if pool.whole_drafter is None else ModelDrafter(lambda: _called(open_whole))
    return TrimmedHeadDrafter(drafter, whole, kept_ids.tolist())


def _called(method: weakref.WeakMethod[Callable[[], BackgroundModel]]) -> Model:
    alive = method()
    if alive is None:
        raise ClosedError("this engine is gone")
    return alive()


# How long nothing is answered before the drafter reads ahead. A program asks again within milliseconds, a person who
# types takes seconds. A choice between the two.
IDLE_S = 0.5


class Answers(Protocol):
    """Who knows whether somebody waits."""

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""


class Reader(Protocol):
    """Whose drafter reads ahead."""

    def read_ahead(self) -> object:
        """Begin to read, and return at once."""

    def stop_reading(self) -> None:
        """End it soon."""


class ReadAhead:
    """Lets the drafter read the conversation of the latest answer, once nothing was answered for ``idle_s``.

    Thread-safe; keeps nobody alive.
    """

    def __init__(self, owner: Answers, idle_s: float = IDLE_S) -> None:
        self._owner = weakref.ref(owner)
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._reader: Callable[[], Reader | None] = lambda: None

    def when_idle(self, reader: Reader) -> None:
        """An answer of ``reader`` ended."""
        self._reader = weakref.ref(reader)
        timer = threading.Timer(self._idle_s, _begin, (self._owner, self._reader))
        timer.daemon, timer.name = True, "edgespec-read-ahead"
        self._exchange(timer)

    def put_off(self) -> None:
        """An answer or a measurement begins: reading ends."""
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
                with contextlib.suppress(RuntimeError):  # there are limits on threads: it reads when it pays
                    timer.start()


def _begin(reference: Callable[[], Answers | None], reading: Callable[[], Reader | None]) -> None:
    owner, reader = reference(), reading()
    if owner is not None and reader is not None and not owner.answering:
        reader.read_ahead()
