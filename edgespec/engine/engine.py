"""Engine: a target, its drafters and the plan for them, loaded; it opens sessions and measures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from edgespec.calibration.timing import QUICK, Scope
from edgespec.decoding.sampling import Sampling
from edgespec.engine.assembly import (
    WAITING,
    Limits,
    fastest_plain,
    load_pair,
    resolve_profile,
)
from edgespec.engine.background_calibration import CALIBRATION_BUDGET_S, BackgroundCalibration
from edgespec.engine.drafter_offer import DrafterOffer
from edgespec.engine.events import LoadProgress
from edgespec.engine.loaded_pair import LoadedPair, Speculation
from edgespec.engine.pair_measurements import PairMeasurements
from edgespec.engine.request_checks import check_messages, check_system
from edgespec.engine.session import Session
from edgespec.errors import ClosedError, InvalidRequestError
from edgespec.files.home import Home, home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Cancelled
from edgespec.hardware.machine import Machine
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.drafting import Drafter
from edgespec.interfaces.policy import DepthPolicy
from edgespec.placement.memory import require_memory
from edgespec.planning.choice.options import Ranking, Rejected
from edgespec.planning.choice.plan import Plan
from edgespec.profiles.profile import Profile
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import LoadedModel
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.tokenizer import Tokenizer

# How long the processors are looked at before it is believed that they are quiet.
_LOOK_S = 0.3


class Engine:
    """A target, perhaps a drafter, and the plan for them. Use as a context manager or call ``close``."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self.left_out: tuple[str, ...] = ()  # by the last ``calibrate``: what it had no time for
        self._calibration: BackgroundCalibration | None = None
        # Weakly: an engine that is forgotten must not live on through its own pair.
        pair.on_new_power = weakref.WeakMethod(self._give_up_calibration)

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
        worker: WorkerSettings | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a target and plan for it.

        ``overrides`` are profile values by name (``draft``, ``context``, ``depth``, ``threads``, ``exactness``, ...).
        Without ``download`` nothing touches the network. Where nobody names a drafter one is found among the models
        on this machine, by its vocabulary; ``drafter_offer`` says what else could be fetched as one. ``calibrate``
        measures what is not known of these models on this machine, once, in under a minute for a 1.5B model; without
        it and without stored measurements the plan goes by the times of similar machines, or is plain in runtimes
        other than our kernels, and ``calibrate_for`` can measure between answers. A depth given as a number, or near
        exactness, needs the check which widths are bit-equal (about 20 seconds in other runtimes), and makes it.
        ``worker`` says how processes for drafters are started: a frozen application has to. ``progress`` is told each
        step, on the calling thread.

        Model files stay mapped, and are read while answers are decoded. To truncate or overwrite one in place ends
        the process with SIGBUS; to rename another file over it is safe.

        Raises EdgespecError and its subclasses only.
        """
        own_home = store_home or home()
        own_home.read_format()
        tell = progress or (lambda _event: None)
        chosen = resolve_profile(profile, {"target": target, **overrides}, own_home)
        locator = Locator(store=Store(own_home), download=download, progress=progress, cancelled=cancelled)
        pair = load_pair(chosen, own_home, locator, limits or Limits(), tell, calibrate=calibrate, worker=worker)
        engine = cls(pair)
        try:
            pair.prepare_drafter(tell)
            if calibrate and engine.unmeasured and chosen.depth != 0:
                engine.calibrate(progress=tell)
        except BaseException:
            engine.close()
            raise
        return engine

    # ------------------------------------------------------------------------------ what is loaded now

    @property
    def profile(self) -> Profile:
        return self.pair.profile

    @property
    def machine(self) -> Machine:
        return self.pair.machine

    @property
    def plan(self) -> Plan:
        return self.pair.plan

    @property
    def policy(self) -> DepthPolicy:
        return self.pair.policy

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self.pair.drafters

    @property
    def measurements(self) -> PairMeasurements:
        return self.pair.measurements

    @property
    def tokenizer(self) -> Tokenizer:
        return self.pair.tokenizer

    @property
    def target_model(self) -> LoadedModel:
        return self.pair.target

    @property
    def has_chat_template(self) -> bool:
        """Whether the target can be talked to; otherwise only ``raw`` text can be continued."""
        return self.pair.prompts.has_template

    @property
    def file_sampling(self) -> Sampling:
        """How the target's file says that answers are drawn; where it says nothing, the makers of its family.

        Greedy where neither does, or where what the file says cannot be.
        """
        stated = self.pair.target.header.sampling
        if not stated and self.pair.family is not None:
            stated = self.pair.family.sampling
        try:
            return Sampling(**cast(dict[str, Any], stated))
        except InvalidRequestError:
            return Sampling()

    @property
    def drafter_offer(self) -> DrafterOffer | None:
        """A drafter that is not on this machine and would make the target faster; None if it has one, or none pays.

        Nothing is fetched: ``edgespec pull``, or ``Engine.load`` with ``draft=offer.model`` and ``download=True``,
        does that, and later loads find it by themselves.
        """
        return self.pair.drafter_offer()

    @property
    def considered_drafters(self) -> tuple[Rejected, ...]:
        """Model files on this machine that do not draft for the target, and why not each. Empty if one was named."""
        return self.pair.considered

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the target's template can leave thinking out: what ``session(think=False)`` asks of it."""
        return self.pair.prompts.has_thinking_switch

    def session(
        self,
        *,
        system: str | None = None,
        speculation: Speculation | None = None,
        messages: Sequence[Mapping[str, str]] = (),
        think: bool = True,
    ) -> Session:
        """A new conversation. Sessions of one engine interleave freely; each equals running alone.

        ``speculation`` replaces the plan's drafters and policy in this session. ``messages`` are turns that went
        before: mappings with a role and a content, a user's and an assistant's in turns. Without ``think`` the
        template is told to leave thinking out, where it knows of that (``has_thinking_switch``).
        """
        pair = self.pair
        check_system(system)
        check_messages(messages)
        with pair.lock:
            if pair.closed:
                raise ClosedError("this engine is closed")
            others = sum(not session.closed for session in pair.sessions)
            if others:
                more = replace(pair.session_memory, weights_bytes=0)
                require_memory("another session", more, pair.pool.left_bytes - (others - 1) * more.total_bytes)
            session = Session(pair, system=system, speculation=speculation, messages=messages, think=think)
            pair.sessions.add(session)
        return session

    def load_drafter(self) -> None:
        """Load the drafter and wait for it, so that the next answer may draft from its first round on.

        Nobody has to: answers go on plainly meanwhile. Does nothing without a drafter. Raises what loading raises.
        """
        if self.pair.pool.drafter is not None:
            self.pair.pool.drafter_model().wait()

    # ------------------------------------------------------------------------------------ measurements

    @property
    def unmeasured(self) -> bool:
        """Whether a plan needs something that has not been measured here, or ``calibrate_for`` is not done yet."""
        pair = self.pair
        begun = self._calibration is not None and not self._calibration.complete
        missing = begun or pair.measurements.missing or pair.measurements.unproven
        return pair.can_rewind and missing

    @property
    def can_calibrate(self) -> bool:
        """Whether ``calibrate_for`` has something to measure, or to measure again when the machine is quiet."""
        return self.profile.depth == "auto" and (self.unmeasured or self.measurements.disturbed)

    def calibrate(
        self,
        scope: Scope = QUICK,
        *,
        afresh: bool = False,
        alternatives: bool = False,
        progress: LoadProgress | None = None,
        budget_s: float | None = None,
    ) -> float:
        """Measure what is missing (everything if ``afresh``) and plan anew. Call it while no answer is generated.

        ``alternatives`` also times plain decoding in the other settings the target could run in. Waits for another
        process that calibrates. Returns the largest share of the processors, 0 to 1, that other programs took
        during a measurement: above 0.1 its times are only kept until ``calibrate_for`` finds the machine quiet.
        With ``budget_s`` it ends after about so many seconds, and ``left_out`` names what there was no time for.
        Raises what a forward or loading the drafter raises.
        """
        calibration = BackgroundCalibration(self.pair, scope, afresh=afresh, alternatives=alternatives)
        tell = progress or (lambda _event: None)
        exclusive = self.measurements.store.exclusive
        self.pair.read_ahead.put_off()
        with exclusive(self.pair.home.locks, wait=True, waiting=lambda: tell(WAITING)):
            self._give_up_calibration()  # which may hold the target a second time
            calibration.run(progress, budget_s=budget_s)
        self.left_out = calibration.left_out
        self.pair.replan()
        return calibration.most_taken

    def calibrate_for(
        self, seconds: float = CALIBRATION_BUDGET_S, stop: threading.Event | None = None
    ) -> tuple[str, ...]:
        """Measure what is missing for at most ``seconds``, or until ``stop`` is set: for the time between answers.

        What is left goes on with the next call. Times that other programs disturbed are measured again, where the
        machine is quiet now. Returns the reasons of the new plan once nothing is missing any more, else nothing.
        Does nothing while another process calibrates or an answer of this engine is under way. Raises what a forward
        or loading the drafter raises.
        """
        stop = stop or threading.Event()
        again = not self.unmeasured
        if not self.can_calibrate or (again and _is_busy(stop)):
            return ()
        self.pair.read_ahead.put_off()
        with self.measurements.store.exclusive(self.pair.home.locks, wait=False) as alone:
            if not alone:
                return ()
            # Kept apart: an answer that begins meanwhile on another source of power gives the measuring up.
            calibration = None if again else self._calibration
            self._calibration = calibration = calibration or BackgroundCalibration(self.pair, QUICK, again=again)
            if calibration.complete or not calibration.run_for(seconds, stop):
                return ()
        if self.pair.closed:
            return ()
        self.pair.replan()
        return () if again else self.plan.reasons

    def _give_up_calibration(self) -> None:
        calibration, self._calibration = self._calibration, None
        if calibration is not None:
            calibration.close(wait=False)

    def in_setting(self, **settings: Any) -> LoadedModel:
        """The target's weights in other caches or threads, beside it; closed with the engine.

        ``settings`` are those of ``LoadedModel.with_settings``, which says what is raised.
        """
        return self.pair.pool.keep(self.pair.target.with_settings(**settings))

    def load_comparable(self, files: Sequence[LocatedModel], *, for_prompts: bool = False) -> tuple[LoadedModel, ...]:
        """Other models beside the target, each as it is known to decode fastest; closed with the engine.

        ``for_prompts``: after them those that can decode, each in the setting that reads prompts fastest, where that
        is another one.

        Raises MemoryLimitError, before anything is loaded, if they do not all fit beside the drafter with two caches
        each (a session's, and one to be timed in), and what loading raises.
        """
        return self.pair.pool.load_comparable(files, self.plan.context_length, for_prompts=for_prompts)

    def fastest_plain(self) -> tuple[Mapping[str, Any], float] | None:
        """The setting (for ``in_setting``) known to decode plainly faster than the target's own, and how many times.

        None if its own is the fastest that was timed.
        """
        return fastest_plain(self.pair.target, self.measurements.store)

    def ranking(self) -> Ranking | None:
        """Every way to run on this machine that was measured, the plan first; None before anything was."""
        return self.pair.ranking

    def close(self) -> None:
        """End every session, then free the models. Idempotent."""
        pair = self.pair
        with pair.lock:
            if pair.closed:
                return
            pair.closed = True
            sessions = list(pair.sessions)
        with ExitStack() as parts:  # the last first, and all, also where a Ctrl-C interrupts one
            parts.callback(pair.tokenizer.close)
            parts.callback(pair.target.close)
            parts.callback(pair.pool.close)
            for drafter in pair.drafters:
                parts.callback(drafter.close)
            parts.callback(pair.measurements.keep, pair.policy)
            if self._calibration is not None:
                parts.callback(self._calibration.close)
            parts.callback(pair.read_ahead.put_off)
            for session in sessions:
                parts.callback(session.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _is_busy(stop: threading.Event) -> bool:
    """Whether other programs keep the processors busy now; so it is called where ``stop`` is set."""
    neighbours = Neighbours()
    with neighbours:
        stopped = stop.wait(_LOOK_S)
    return stopped or neighbours.busy
