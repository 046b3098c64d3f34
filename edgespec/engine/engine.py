"""Engine: a loaded target, its drafters and the plan for them. Opens sessions and calibrates."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from edgespec.calibration.timing import QUICK, Scope
from edgespec.decoding.sampling import USUAL_LAST_N, Sampling, SamplingFields
from edgespec.engine.events import warn_old
from edgespec.engine.pair.calibration_run import CALIBRATION_BUDGET_S, BackgroundCalibration
from edgespec.engine.pair.drafter_offer import DrafterOffer
from edgespec.engine.pair.load import (
    WAITING,
    Limits,
    load_pair,
    resolve_profile,
)
from edgespec.engine.pair.loaded_pair import LoadedPair, Speculation
from edgespec.engine.request_checks import check_path, check_text
from edgespec.engine.saved_session import SavedSession
from edgespec.engine.session import Session
from edgespec.errors import CancelledError, ClosedError, InvalidRequestError
from edgespec.files.home import Home, as_home, home
from edgespec.files.progress import Cancelled, Job, Loading, LoadProgress, ProgressEvent
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.drafting import Drafter
from edgespec.placement.cache_rooms import CacheRoom
from edgespec.planning.choice.options import Rejected
from edgespec.planning.choice.plan import Plan
from edgespec.profiles.layers import LoadOptions
from edgespec.profiles.profile import Profile
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.conversation.conversation import Conversation
from edgespec.text.conversation.messages import check_messages, check_system
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Names of the version before that were for edgespec itself, and where they are.
_OLD = {
    "machine": "machine",
    "measurements": "measurements",
    "policy": "policy",
    "target_model": "target",
    "load_comparable": "load_comparable",
}

# How long the processors are observed before they count as idle.
_LOOK_S = 0.3


class Engine:
    """A target, optionally a drafter, and the plan for them. Use as a context manager or call ``close``."""

    def __init__(self, pair: LoadedPair) -> None:
        """``pair`` is what edgespec's own packages work with. It is not for applications, and may change."""
        self.pair = pair
        self.left_out: tuple[str, ...] = ()  # what the last ``calibrate`` had no time for
        self._calibration: BackgroundCalibration | None = None
        self._asking = threading.Lock()
        self._asked: Session | None = None  # the session of ``ask``
        # A weak reference: a forgotten engine must not be kept alive by its own pair.
        pair.on_new_power = weakref.WeakMethod(self._give_up_calibration)

    @classmethod
    def load(
        cls,
        target: str | os.PathLike[str] | None = None,
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        download: bool = False,
        progress: LoadProgress | None = None,
        cancelled: Cancelled | None = None,
        store_home: Home | Path | str | None = None,
        calibrate: bool = False,
        worker: WorkerSettings | None = None,
        **options: Unpack[LoadOptions],
    ) -> Engine:
        """Load a target and plan for it.

        ``options`` are values of the profile by name (``draft``, ``context``, ``depth``, ``threads``, ...). Without
        ``download`` the network is not used; with it the drafter that the catalogue names is fetched too, unless
        ``draft`` is "none". Otherwise, if no drafter is named, the models on this machine are searched for one with
        the target's vocabulary; ``drafter_offer`` says which could be fetched. ``calibrate`` makes the missing
        measurements, once for a pair and machine, in under a minute for a 1.5B model. Without measurements the plan
        uses the times of similar machines (plain decoding in runtimes other than our kernels), and ``calibrate_for``
        can measure between answers. A depth given as a number, or near exactness, needs a check which widths are
        bit-equal (about 20 seconds in other runtimes), and ``load`` makes the check. ``worker`` says how to start
        drafter processes: frozen applications need it. ``store_home`` is the folder for models and measurements
        instead of EDGESPEC_HOME. ``progress`` is called with each step, on the calling thread. ``cancelled`` is asked
        every few hundred milliseconds; True ends the load with CancelledError.

        Model files stay mapped and are read during decoding. Truncating or overwriting such a file in place ends the
        process with SIGBUS; renaming another file over it is safe.

        Raises EdgespecError and its subclasses only.
        """
        if limits is not None and not isinstance(limits, Limits):
            raise InvalidRequestError(f"limits must be Limits, not {type(limits).__name__}")
        own_home = home() if store_home is None else as_home(store_home)
        own_home.read_format()
        job = Job.of(progress, cancelled)

        def tell(event: Loading | ProgressEvent) -> None:
            job.check("loading was cancelled")
            if progress is not None:
                progress(event)

        chosen = resolve_profile(profile, {"target": target, **options}, own_home, cls.load.__kwdefaults__ or ())
        locator = Locator(store=Store(own_home), download=download, job=job)
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
    def plan(self) -> Plan:
        return self.pair.plan

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self.pair.drafters

    @property
    def tokenizer(self) -> Tokenizer:
        return self.pair.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the target can chat; otherwise it can only continue ``raw`` text."""
        return self.pair.prompts.has_template

    @property
    def file_sampling(self) -> Sampling:
        """The sampling that the target's file states, else the one that its family's makers state.

        Settings of the program that keeps the file come before both. Greedy if nothing states any, or if the values
        are invalid. The rule is the engine's.
        """
        stated = self.pair.stated_sampling
        if stated.get("repeat_penalty", 1) != 1:
            stated = {"repeat_last_n": USUAL_LAST_N, **stated}
        own = Sampling(rule=self.profile.rule)
        try:
            return replace(own, **cast(dict[str, Any], stated))
        except InvalidRequestError:
            return own

    @property
    def drafter_offer(self) -> DrafterOffer | None:
        """A drafter to fetch that would make the target faster; None if there is a drafter already, or no gain.

        Nothing is fetched here. Fetch it with ``edgespec pull``, or by ``Engine.load`` with ``draft=offer.model`` and
        ``download=True``; later loads find the file.
        """
        return self.pair.drafter_offer()

    @property
    def considered_drafters(self) -> tuple[Rejected, ...]:
        """Model files on this machine that do not draft for the target, with reasons. Empty if one was named."""
        return self.pair.considered

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the target's template can leave thinking out, as ``session(think=False)`` requests."""
        return self.pair.prompts.has_thinking_switch

    def session(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        think: bool = True,
        owner: str = "",
        _speculation: Speculation | None = None,
    ) -> Session:
        """A new conversation. Sessions of one engine interleave freely; each gives the text it would give alone.

        ``messages`` are earlier turns as ``Session.generate`` takes them, an answer or a result last. Without
        ``think`` a template that has a switch (``has_thinking_switch``) leaves thinking out. Sessions with another
        ``owner`` get none of its prefixes (``keep_prefixes``). ``_speculation`` is for measurements: it replaces the
        plan's drafters and policy in this session.
        """
        check_system(system)
        check_messages(messages)
        pair = self.pair
        conversation = Conversation(pair.prompts, system, messages, think=think)
        return pair.admit(lambda room: Session(pair, conversation, room, speculation=_speculation, owner=owner))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text alone, without a template. Raises ClosedError, InvalidRequestError."""
        return len(self.pair.tokenizer.encode(check_text("text", text)))

    def prompt_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        budget: RequestBudget | None = None,
    ) -> int:
        """Tokens of the prompt that ``Session.generate`` would read, also of one that is longer than the context.

        Raises InvalidRequestError, TemplateError, and what ``budget`` raises.
        """
        return len(
            self.pair.prompt_ids(
                messages, tools=tools, tool_choice=tool_choice, template_variables=template_variables, budget=budget
            )
        )

    def restore(self, path: Path | str, *, think: bool = True) -> Session:
        """The session that ``Session.save`` wrote to a file; the file stays.

        With the same home, model file, kernels and instruction set the saved cache is used: the session continues bit
        for bit, without reading the conversation again. Otherwise the next answer reads it again, and a Notice says
        why. Of a file that was not saved in this home only the messages count, which are its sender's.
        ``think`` is that of ``session``. Raises SessionFileError, before anything is loaded, for a file that was cut
        or altered, is another model's, or was written by a newer version; ClosedError, MemoryLimitError.
        """
        pair = self.pair
        with SavedSession(check_path(path), pair) as saved:

            def make(room: CacheRoom) -> Session:
                own = saved.conversation(think=think)
                return Session(pair, own, room, target=saved.open_cache(), notices=saved.notices)

            return pair.admit(make, saved.cached_tokens)

    def ask(
        self,
        prompt: str,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        **fields: Unpack[SamplingFields],
    ) -> str:
        """The text of one answer, without its thinking; each call is a separate conversation.

        The arguments are those of ``Session.generate``: ``sampling``, or fields of Sampling by name
        (``temperature=0.7``); greedy without them. The cache keeps what two calls share, so a common system message
        is read once. One call at a time: others wait. Raises what ``Session.generate`` raises.
        """
        check_system(system)
        with self._asking:
            if self._asked is None or self._asked.closed:
                self._asked = self.session()
            self._asked.clear()
            self._asked.system = system
            with self._asked.generate(
                prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, **fields
            ) as answer:
                done = answer.result()
            if done.finish_reason == "cancelled":
                raise ClosedError("this engine was closed before the answer was complete")
            return done.content

    @property
    def memory(self) -> dict[str, Any]:
        """What the models and open sessions take of the machine's memory, in bytes, by name.

        ``allowed_bytes``, ``taken_bytes``, ``left_bytes``; ``sessions``, their number, ``caches_bytes``, what they
        take, and ``session_bytes``, what a new one takes; ``target_weights_bytes``; ``drafters`` and ``others`` by
        name. Caches of the native kernels count as far as they are filled. What a graphics card holds is not counted.
        """
        return self.pair.pool.memory.as_json()

    def load_drafter(self) -> None:
        """Load the drafter and wait for it, so that the next answer may draft from its first round on.

        Optional: without this call answers begin with plain decoding while the drafter loads. Does nothing without a
        drafter. Raises what loading raises.
        """
        if self.pair.pool.drafter is not None:
            self.pair.pool.drafter_model().wait()

    def keep_prefixes(self, stop: threading.Event | None = None) -> tuple[str, ...]:
        """Write the beginnings of at least 2048 tokens that two conversations shared to the home: between answers.

        For a profile in which ``prefixes`` is true, and models whose cache can be saved. Later sessions, also of
        other processes, read the cache of such a beginning from the disk. Ends soon after ``stop`` is set, and the
        next call begins again. Returns sentences for a log.
        """
        pair = self.pair
        if pair.prefixes is None:
            return ()
        with pair.lock:
            sessions = list(pair.sessions)
        return pair.prefixes.keep(sessions, stop or threading.Event())

    # ------------------------------------------------------------------------------------ measurements

    @property
    def unmeasured(self) -> bool:
        """Whether the plan lacks a measurement, or ``calibrate_for`` has begun and not finished."""
        pair = self.pair
        begun = self._calibration is not None and not self._calibration.complete
        missing = begun or pair.measurements.missing or pair.measurements.unproven
        return pair.can_rewind and missing

    @property
    def can_calibrate(self) -> bool:
        """Whether ``calibrate_for`` has something to measure, or to repeat when the machine is idle."""
        if self.pair.closed or self.profile.depth != "auto":
            return False
        return self.unmeasured or self.pair.measurements.disturbed

    def calibrate(
        self,
        *,
        afresh: bool = False,
        alternatives: bool = False,
        progress: LoadProgress | None = None,
        budget_s: float | None = None,
        _scope: Scope = QUICK,
    ) -> float:
        """Measure what is missing (everything if ``afresh``) and plan again. Call it while no answer is generated.

        ``alternatives`` also times plain decoding in the other settings the target could run in. Waits while another
        process calibrates. Returns the largest share of the processors, 0 to 1, that other programs took during a
        measurement; above 0.1, ``calibrate_for`` repeats the measurement when the machine is idle. With ``budget_s``
        the call ends after about ``budget_s`` seconds, and ``left_out`` names the parts that are missing. Raises what
        a forward or loading the drafter raises. Measures nothing for a target that cannot be rewound, which is always
        decoded plainly.
        """
        self.left_out = ()
        if not self.pair.can_rewind:
            return 0.0
        calibration = BackgroundCalibration(self.pair, _scope, afresh=afresh, alternatives=alternatives)
        tell = progress or (lambda _event: None)
        exclusive = self.pair.measurements.store.exclusive

        def waiting() -> None:
            tell(WAITING)
            if self.pair.closed:
                raise CancelledError("calibrating was cancelled")

        self.pair.read_ahead.put_off()
        with exclusive(self.pair.home.locks, wait=True, waiting=waiting):
            self.pair.follow_power()
            self._give_up_calibration()  # it may hold a second copy of the target
            calibration.run(progress, budget_s=budget_s)
        self.left_out = calibration.left_out
        self.pair.replan()
        return calibration.most_taken

    def calibrate_for(
        self, seconds: float = CALIBRATION_BUDGET_S, stop: threading.Event | None = None
    ) -> tuple[str, ...]:
        """Measure what is missing for at most ``seconds``, or until ``stop`` is set: for the time between answers.

        The next call continues. Times that other programs disturbed are measured again if the machine is idle now.
        Returns the reasons of the new plan once all measurements are there, else an empty tuple. While another
        process calibrates or this engine answers it only waits, for a part of a second. Raises what a forward or
        loading the drafter raises.
        """
        stop = stop or threading.Event()
        again = not self.unmeasured
        if not self.can_calibrate or (again and _is_busy(stop)):
            return ()
        if self.pair.answering:
            stop.wait(min(seconds, _LOOK_S))
            return ()
        self.pair.read_ahead.put_off()
        with self.pair.measurements.store.exclusive(self.pair.home.locks, wait=False) as alone:
            if not alone:
                stop.wait(min(seconds, _LOOK_S))
                return ()
            self.pair.follow_power()
            # Keep a reference: an answer on another power source may give up the calibration.
            calibration = None if again else self._calibration
            self._calibration = calibration = calibration or BackgroundCalibration(self.pair, QUICK, again=again)
            try:
                if calibration.complete or not calibration.run_for(seconds, stop):
                    return ()
            except CancelledError:  # the engine was closed, or the program ends
                return ()
        if self.pair.closed:
            return ()
        self.pair.replan()
        return () if again else self.plan.reasons

    def _give_up_calibration(self) -> None:
        calibration, self._calibration = self._calibration, None
        if calibration is not None:
            calibration.close(wait=False)

    def close(self) -> None:
        """End every session, then free the models. Idempotent. A forked process frees nothing: it is its parent's."""
        pair = self.pair
        if pair.process.left:
            pair.closed = True
            return
        with pair.lock:
            if pair.closed:
                return
            pair.closed = True
            sessions = list(pair.sessions)
        with ExitStack() as parts:  # in reverse order; a Ctrl-C in one close skips no other
            parts.callback(pair.tokenizer.close)
            parts.callback(pair.target.close)
            parts.callback(pair.pool.close)
            for drafter in pair.drafters:
                parts.callback(drafter.close)
            if pair.keeps_learned:
                parts.callback(pair.measurements.keep, pair.policy)
            if pair.answers is not None:
                parts.callback(pair.answers.close)
            if pair.prefixes is not None:
                parts.callback(pair.prefixes.close)
            if self._calibration is not None:
                parts.callback(self._calibration.close)
            parts.callback(pair.read_ahead.put_off)
            for session in sessions:
                parts.callback(session.close)

    if not TYPE_CHECKING:  # what went, for one version; type checkers report it

        def __getattr__(self, name: str) -> object:
            if name not in _OLD:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_old(f"Engine.{name}", f"Engine.pair.{_OLD[name]}, which is internal")
            return getattr(self.pair, _OLD[name])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _is_busy(stop: threading.Event) -> bool:
    """Whether other programs keep the processors busy now, or ``stop`` was set."""
    neighbours = Neighbours()
    with neighbours:
        stopped = stop.wait(_LOOK_S)
    return stopped or neighbours.busy
