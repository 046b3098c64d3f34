"""Engine: loaded models, a plan, and what is learned across requests. The only place that wires the parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.timing import QUICK, Scope
from edgespec.decoding.pipelined.loop import Budget
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.trimmed import EscapeDrafter
from edgespec.engine.assembly import Limits, Parts, class_too_dear, fastest_plain, know, load_parts, resolve_profile
from edgespec.engine.background_calibration import LEARNING_BUDGET_S, Learning
from edgespec.engine.events import LoadProgress
from edgespec.engine.session import Session, Speculation
from edgespec.errors import ClosedError, TemplateError
from edgespec.files.home import Home, home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Cancelled
from edgespec.hardware.machine import power_source
from edgespec.interfaces.drafting import Drafter
from edgespec.interfaces.model import Model
from edgespec.interfaces.model import Sequence as CacheSequence
from edgespec.interfaces.policy import DepthPolicy
from edgespec.placement.memory import MemoryEstimate, require_memory
from edgespec.placement.model_pool import DrafterModels, Elsewhere
from edgespec.placement.settings import (
    LoadedModel,
    drafter_memory,
    drafter_settings,
    memory_needed,
    open_model,
    other_settings,
    target_settings,
)
from edgespec.planning.choice.options import Ranking
from edgespec.planning.choice.plan import Plan
from edgespec.planning.choice.planner import CLASS_TOO_DEAR, make_plan
from edgespec.planning.choice.ranking import HEADROOM_BYTES
from edgespec.planning.cost.widths import WIDEST
from edgespec.planning.depth.bandit import BanditDepth
from edgespec.planning.depth.cost_model import CostDepth, Costs
from edgespec.planning.depth.factory import make_budget, make_policy
from edgespec.planning.depth.pipelined import PipelinedDepth
from edgespec.profiles.profile import Profile
from edgespec.runtimes.process.restarting import WorkerSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.chat_template.template import ChatTemplate


class Engine:
    """A target, perhaps a drafter, and the plan for them. Use as a context manager or call ``close``."""

    def __init__(self, parts: Parts) -> None:
        profile, wish, located = parts.profile, parts.wish, parts.drafter
        self.profile = profile
        self.machine = parts.machine
        self.probe = parts.probe
        self.tokenizer = parts.tokenizer
        self.knowledge = parts.knowledge
        self._wish = wish
        self._home = parts.home
        self._target = parts.target
        self.elsewhere = Elsewhere(parts)
        self._located_drafter = located
        self._located_whole_drafter = parts.whole_drafter
        self._memory_allowed_bytes = parts.memory_left_bytes  # beyond the target and one session
        self._lock = threading.RLock()
        self._closed = False
        # Not kept alive by the engine: a server opens thousands in its life.
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._drafter_models = DrafterModels(profile, wish.context_length, parts.worker)
        self._template: ChatTemplate | None = None
        self._learning: Learning | None = None
        self._others: list[LoadedModel] = []  # the target's weights in other settings
        drafters: list[Drafter] = []
        if profile.lookup:
            drafters.append(LookupDrafter())
        if located is not None:
            drafters.append(self._model_drafter(located))
        self.drafters: tuple[Drafter, ...] = tuple(drafters)
        costs = self.knowledge.costs()
        self.plan: Plan = self._plan_by(costs)
        self.policy: DepthPolicy = self._policy_by(costs)

    @classmethod
    def load(
        cls,
        target: str | None = None,
        *,
        profile: Profile | str | None = None,
        limits: Limits | None = None,
        download: bool = False,
        progress: LoadProgress | None = None,
        cancelled: Cancelled | None = None,
        store_home: Home | None = None,
        calibrate: bool = False,
        keep_class: bool = False,
        worker: WorkerSettings | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a target and plan for it.

        ``overrides`` are profile values by name (``draft``, ``context``, ``depth``, ``threads``, ``exactness``, ...).
        Without ``download`` nothing touches the network. ``calibrate`` measures what is not known of these models on
        this machine, once, in under a minute for a 1.5B model; without it and without stored measurements the plan is
        plain, and ``learn`` can measure between answers. A depth given as a number, or near exactness, needs the
        check which widths are bit-equal (about 20 seconds), and makes it. ``keep_class`` stays in the setting whose
        widths are bit-equal also where plain decoding was measured to be so much faster in another that drafting is
        not expected to win it back: for measuring and checking. ``worker`` says how processes for drafters are
        started: a frozen application has to. ``progress`` is told each step, on the calling thread.

        Raises EdgespecError and its subclasses only.
        """
        place = store_home or home()
        tell = progress or (lambda _event: None)
        chosen = resolve_profile(profile, {"target": target, **overrides}, place)
        locator = Locator(store=Store(place), download=download, progress=progress, cancelled=cancelled)
        parts = load_parts(chosen, place, locator, limits or Limits(), tell, calibrate=calibrate, worker=worker)
        engine = cls(parts)
        try:
            if not keep_class:
                engine.leave_dear_class()
            if calibrate and engine.unmeasured and chosen.depth != 0:
                engine.calibrate(progress=tell)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def vocabulary_size(self) -> int:
        return self._target.facts.vocabulary_size

    @property
    def can_rewind(self) -> bool:
        """Whether the target's cache can drop its last tokens."""
        return self._target.facts.can_rewind

    @property
    def can_branch(self) -> bool:
        """Whether the target scores a tree of tokens in one forward, as it scores each path."""
        return self._target.facts.can_branch

    @property
    def has_chat_template(self) -> bool:
        """Whether the target can be talked to; otherwise only ``raw`` text can be continued."""
        return self._target.header.chat_template is not None

    def session(self, *, system: str | None = None, speculation: Speculation | None = None) -> Session:
        """A new conversation. Sessions of one engine interleave freely; each equals running alone.

        ``speculation`` replaces the plan's drafters and policy in this session.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            others = sum(not session.closed for session in self._sessions)
            if others:
                estimate = self._target_estimate()
                more = replace(estimate, weights_bytes=0)
                require_memory("another session", more, self._memory_allowed_bytes - (others - 1) * more.total_bytes)
            session = Session(self, system=system, speculation=speculation)
            self._sessions.add(session)
            return session

    def _target_estimate(self) -> MemoryEstimate:
        target = self._target
        return memory_needed(target.header, target.facts.weight_bytes, self.plan.context_length, target.settings)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, by the model's own template. Raises TemplateError."""
        if self._template is None:
            source = self._target.header.chat_template
            if source is None:
                raise TemplateError(
                    f"{self._target.facts.name} has no chat template",
                    hint="use `--raw` to continue plain text, or an instruction-tuned model",
                )
            self._template = ChatTemplate(
                source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token
            )
        return self._template.render(messages)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a rendered prompt; the begin-of-sequence token is added unless the text spells it out."""
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(text, special=True, add_bos=not (bos and text.startswith(bos)))

    def request_tokens(self, text: str) -> list[int]:
        """Tokens of a conversation that is one request; of the text itself for a model that cannot be talked to."""
        rendered = self.render([{"role": "user", "content": text}]) if self.has_chat_template else text
        return self.encode_prompt(rendered)

    def open_target(self) -> CacheSequence:
        """An empty cache of the target with the plan's context."""
        return self._target.open(self.plan.context_length)

    def _model_drafter(self, located: LocatedModel) -> Drafter:
        """Drafts with that model; if its head is trimmed, only while it can say what is being written."""
        # Weakly: an engine that is forgotten must not live on through its own drafter.
        open_drafter, open_whole = (
            weakref.WeakMethod(self.drafter_model),
            weakref.WeakMethod(self.whole_drafter_model),
        )
        drafter = ModelDrafter(lambda: _called(open_drafter))
        if located.kept_ids is None:
            return drafter
        whole = None if self._located_whole_drafter is None else ModelDrafter(lambda: _called(open_whole))
        return EscapeDrafter(drafter, whole, located.kept_ids.tolist())

    def drafter_model(self) -> Model:
        """The drafter, loaded at its first proposal and shared by all sessions.

        In a process of its own it is ``Restarting``: it may still be loading. Raises ClosedError if there is none,
        MemoryLimitError if it does not fit beside the target.
        """
        return self._loaded_drafter(self._located_drafter)

    def whole_drafter_model(self) -> Model:
        """The model that a trimmed drafter was made from, loaded where the text is not what the head was cut for.

        Raises ClosedError if there is none, MemoryLimitError if it does not fit beside the others.
        """
        return self._loaded_drafter(self._located_whole_drafter)

    def _loaded_drafter(self, located: LocatedModel | None) -> Model:
        if self._closed or located is None:
            raise ClosedError("this engine is closed")
        return self._drafter_models.get(located, self._target.settings.threads, self._memory_allowed_bytes)

    # ------------------------------------------------------------------------------------ measurements

    @property
    def depth_cap_allowed(self) -> int:
        """The deepest draft that keeps the exactness asked for, whether or not the plan drafts at all."""
        if not self.can_rewind or self.probe is None:
            return 0
        return WIDEST - 1 if self.profile.exactness == "near" else self.probe.depth_cap

    @property
    def target_model(self) -> LoadedModel:
        return self._target

    @property
    def unmeasured(self) -> bool:
        """Whether something a plan needs has not been measured on this machine, or ``learn`` is not done yet."""
        begun = self._learning is not None and not self._learning.complete
        missing = begun or self.knowledge.missing or self.knowledge.unproven
        return self.can_rewind and self._wish.plain_because is None and missing

    def calibrate(
        self,
        scope: Scope = QUICK,
        *,
        afresh: bool = False,
        alternatives: bool = False,
        progress: LoadProgress | None = None,
    ) -> None:
        """Measure what is missing (everything if ``afresh``) and plan anew. Call it while no answer is generated.

        ``alternatives`` also times plain decoding in the other settings the target could run in. Waits for another
        process that calibrates. Raises what a forward or loading the drafter raises.
        """
        with self.knowledge.store.exclusive(self._home.locks, wait=True):
            Learning(self, scope, afresh=afresh, alternatives=alternatives).run(progress)
        if self._learning is not None:
            self._learning.close()
            self._learning = None
        self.replan()

    def learn(self, seconds: float = LEARNING_BUDGET_S, stop: threading.Event | None = None) -> tuple[str, ...]:
        """Measure what is missing for at most ``seconds``, or until ``stop`` is set: for the time between answers.

        What is left goes on with the next call. Returns the reasons of the new plan once nothing is missing, else
        nothing. Does nothing while another process calibrates. Raises what a forward or loading the drafter raises.
        """
        if not self.unmeasured or self.profile.depth != "auto":
            return ()
        with self.knowledge.store.exclusive(self._home.locks, wait=False) as alone:
            if not alone:
                return ()
            # Kept apart: an answer that begins meanwhile on another source of power gives the measuring up.
            self._learning = learning = self._learning or Learning(self, QUICK)
            if learning.complete or not learning.run_for(seconds, stop or threading.Event()):
                return ()
        if self._closed:
            return ()
        self.replan()
        return self.plan.reasons

    def replan(self) -> None:
        """Plan from what is stored now; answers that begin from here on follow the new plan."""
        if self._wish.plain_because is None:  # else nothing is drafted, and widths need not be known
            self.probe = self.knowledge.widths() or self.probe
        costs = self.knowledge.costs()
        self.plan = self._plan_by(costs)
        pipelined = isinstance(self.policy, PipelinedDepth)
        if isinstance(self.policy, CostDepth | BanditDepth) and pipelined == (self.plan.mode == "pipelined"):
            self.policy.calibrate(costs, self.plan.depth_cap, self.knowledge.priors)
        else:  # another mode is another policy, which begins with what this one learned
            self.knowledge.keep(self.policy)
            self.policy = self._policy_by(costs)

    def _plan_by(self, costs: Costs) -> Plan:
        return make_plan(self._wish, self._target.facts, self.probe, self.knowledge.notes, costs)

    def _policy_by(self, costs: Costs) -> DepthPolicy:
        name = self.profile.depth_policy if self.profile.depth == "auto" else "fixed"
        pipelined = self.plan.mode == "pipelined"
        return make_policy(
            name, self.plan.depth_cap, self._wish.sources, costs, self.knowledge.priors, pipelined=pipelined
        )

    def pipeline_budget(self) -> Budget | None:
        """How much each round of one answer verifies where the plan drafts beside the target; None where not."""
        return make_budget(self.plan.depth_cap, self.knowledge.costs()) if self.plan.mode == "pipelined" else None

    def follow_power(self) -> bool:
        """Plan anew if the machine went on battery or back to mains: times measured on the other do not hold.

        Each answer begins with this. True if there is a new plan. A source that cannot be told for a moment is no
        change.
        """
        now = power_source()
        with self._lock:
            if self._closed or now is None or now == self.machine.power_source:
                return False
            self.machine = replace(self.machine, power_source=now)
            self._know_by(self.knowledge.store.on_power(now))
            learning, self._learning = self._learning, None
            if learning is not None:
                learning.close()
            self.replan()
        return True

    def _know_by(self, store: Measurements) -> None:
        self.knowledge = know(store, self.profile, self._target, self._located_drafter, self._wish)

    def leave_dear_class(self) -> bool:
        """Decode plainly in another setting, where the numeric class costs more than drafting is expected to gain.

        Nothing changes before other settings were timed (``calibrate``), while a session is open, or where a depth or
        near exactness was asked for. True if there is a new plan.
        """
        if self.profile.depth != "auto" or self.profile.exactness != "stable":
            return False
        faster = class_too_dear(self._target, self.knowledge, self.depth_cap_allowed)
        if faster is None:
            return False
        # Fewer threads are only another class, which may draft as well.
        because = self._wish.plain_because if "threads" in faster else CLASS_TOO_DEAR
        return self.adopt(plain_because=because, **faster)

    def adopt(self, *, plain_because: str | None = None, **caches: Any) -> bool:
        """Go on with the target's weights in other caches or threads; False while a session is open.

        ``caches`` are those of ``LoadedModel.with_caches``. What is planned next is planned for the new setting:
        plainly, if there is a reason ``plain_because``.
        """
        with self._lock:
            if self._closed or any(not session.closed for session in self._sessions):
                return False
            self._drafter_models.unload()  # they run as the target does, so they are loaded again when wanted
            other = self._target.with_caches(**caches)
            self._target.close()
            self._target, self.probe = other, None
            self._wish = replace(self._wish, plain_because=plain_because)
            self._know_by(self.knowledge.store)
            self.replan()  # the depths of the old plan are those of another numeric class
        return True

    def in_setting(self, **caches: Any) -> LoadedModel:
        """The target's weights in other caches or threads, beside it; closed with the engine.

        ``caches`` are those of ``LoadedModel.with_caches``, which says what is raised.
        """
        other = self._target.with_caches(**caches)
        with self._lock:
            self._others.append(other)
        return other

    def load_beside(self, located: Sequence[LocatedModel]) -> tuple[LoadedModel, ...]:
        """Other models beside the target, each in the fastest setting it is known to run in; closed with the engine.

        Raises MemoryLimitError, before anything is loaded, if they do not all fit beside the drafter with two caches
        each (a session's, and one to be timed in), and what loading raises.
        """
        threads, context_length = self._target.settings.threads, self.plan.context_length
        settings = [target_settings(self.profile, threads, each) for each in located]
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            left = self._memory_allowed_bytes
            drafter = self._located_drafter
            if drafter is not None:
                own = drafter_settings(self.profile, threads, drafter)
                left -= drafter_memory(self.profile, drafter, context_length, own).total_bytes
            taken = 0
            for each, wanted in zip(located, settings, strict=True):
                once = memory_needed(each.header, each.weight_bytes, context_length, wanted)
                twice = replace(once, cache_bytes=2 * once.cache_bytes, buffers_bytes=2 * once.buffers_bytes)
                require_memory(each.name, twice, left - taken)
                taken += twice.total_bytes
            self._memory_allowed_bytes -= taken
        models = []
        for each, wanted in zip(located, settings, strict=True):
            models.append(open_model(each, wanted))
            self._others.append(models[-1])
        return tuple(models)

    def fastest_plain(self) -> tuple[Mapping[str, Any], float] | None:
        """The setting (for ``in_setting``) known to decode plainly faster than the target's own, and how many times.

        None if its own is the fastest that was timed.
        """
        return fastest_plain(self._target, self.knowledge.store)

    def ranking(self) -> Ranking | None:
        """Every way to run on this machine that was measured, the fastest first; None before anything was."""
        others = [self._target.facts_with(**caches) for caches in other_settings(self._target)]
        near = self.profile.exactness == "near"
        # What the target takes is taken already: it fits whatever headroom the ranking leaves.
        taken = replace(self._target_estimate(), buffers_bytes=HEADROOM_BYTES)
        allowed = self._memory_allowed_bytes + taken.total_bytes
        return self.knowledge.ranking(
            others, self.plan.context_length, allowed, near=near, places=self.elsewhere.places
        )

    def close(self) -> None:
        """End every session, then free the models. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        if self._learning is not None:
            self._learning.close()
        self.knowledge.keep(self.policy)
        for drafter in self.drafters:
            drafter.close()
        self._drafter_models.close()
        for other in self._others:
            other.close()
        self._target.close()
        self.tokenizer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _called(method: weakref.WeakMethod[Callable[[], Model]]) -> Model:
    alive = method()
    if alive is None:
        raise ClosedError("this engine is gone")
    return alive()
