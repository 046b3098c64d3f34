"""Calibration: measures what a plan needs and the store lacks, in one run or in short steps between answers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from edgespec.calibration.kinds import CONTENTION, PLAIN, THREADS, TIMES, WIDTHS
from edgespec.calibration.timing import (
    AGREEMENT_TOKENS,
    Scope,
    measure_agreement,
    measure_contention,
    measure_drafter,
    measure_plain_ratio,
    measure_prompt_ratio,
    measure_target,
    sample_text,
)
from edgespec.engine.pair.loaded_pair import LoadedPair, neighbours_of
from edgespec.errors import ClosedError, EdgespecError, RewindError, WorkerLostError
from edgespec.files.progress import Loading
from edgespec.hardware.neighbours import BUSY_SHARE
from edgespec.interfaces.drafting import MODEL
from edgespec.interfaces.model import Model, ModelFacts
from edgespec.placement.candidates import Placement
from edgespec.placement.prepared import choose_threads, fewer_threads, other_caches, setting_words
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.runtimes.background import BackgroundModel

# Longest time spent between two answers: about as long as a person reads an answer.
CALIBRATION_BUDGET_S = 8.0

# Longest time that a quick calibration takes, loading the models excluded. The last step and timing the memory (2 s,
# 3 s on busy cores) add up to 50 s.
QUICK_BUDGET_S = 45.0

# Fewer threads are chosen after this number of faster results: on a shared machine, two cores were slower than one in
# one second of twelve.
_THREADS_CONFIRMED = 3

# How long a step waits for a model that loads in parallel.
_LOOK_AGAIN_S = 0.2

# Loads of a second copy of the target that are cancelled before no further one is started: after three pauses that
# were too short, the next ones are too.
_RIVAL_ATTEMPTS = 3

T = TypeVar("T")

# Drafter and target are compared on code (which drafters are good at), an explanation and a list.
REQUESTS = (
    "Write a function that returns the n smallest numbers of a list.",
    "Why do leaves change colour in autumn?",
    "Name five things to pack for a day in the mountains, and why.",
)

Steps = Generator[Loading, None, None]


class BackgroundCalibration:
    """One walk through all measurements that a pair's plan lacks, in steps of well under a second.

    Each measurement is stored when it is complete, so an interrupted walk keeps its results. With ``afresh`` all
    measurements are repeated, with ``again`` those that other programs disturbed. With ``alternatives`` plain
    decoding is also timed in the other settings that the target could run in.
    """

    def __init__(
        self,
        pair: LoadedPair,
        scope: Scope,
        *,
        afresh: bool = False,
        alternatives: bool = False,
        again: bool = False,
    ) -> None:
        self._pair = pair
        pair.on_answer = weakref.WeakMethod(self.drop_rival)
        # Near exactness needs the differences between unequal widths.
        self._scope = replace(scope, complete=True) if pair.profile.exactness == "near" else scope
        self._afresh = afresh
        self._again = again
        self._alternatives = alternatives
        self._taken = 0.0  # share of the processors that other programs took in the last measurement
        self.most_taken = 0.0  # the largest such share
        # Settings with other threads, and how many times longer a forward takes.
        self._other_threads: list[tuple[ModelFacts, float]] = []
        self._steps: Steps | None = None
        self._lock = threading.Lock()  # around a step: a generator cannot be closed while it runs
        self._closed = False
        self._dropping = False
        self._rival: BackgroundModel | None = None  # a second copy of the target, loading or loaded
        self._given_up: BackgroundModel | None = None  # an abandoned copy that may still be loading
        self._rivals_dropped = 0
        self._compared = False  # whether the target was timed in another place
        self.complete = False  # whether ``run_for`` has finished every part
        self._hurried = False
        self._later: list[str] = []  # the parts after the current one
        self.left_out: tuple[str, ...] = ()  # the parts that ``run`` had no time for

    def run(
        self,
        progress: Callable[[Loading], None] | None = None,
        *,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure everything, or what fits into ``budget_s``. Raises what a forward or loading a model raises."""
        self._hurried = budget_s is not None
        end = None if budget_s is None else clock() + budget_s
        with closing(self._all_steps()) as steps:
            for step in steps:
                if progress is not None:
                    progress(step)
                # A measurement that is complete is stored in the next step.
                if end is not None and clock() >= end and step.fraction != 1.0:
                    self.left_out = (step.stage.removeprefix("measuring "), *self._later)
                    break

    @property
    def _busy(self) -> float:
        """The last measurement's share for other programs, if it makes the times unreliable; else 0."""
        return self._taken if self._taken > BUSY_SHARE else 0.0

    def _labelled(
        self, steps: Generator[float, None, T], label: str, drafter: ModelFacts | None = None
    ) -> Generator[Loading, None, T]:
        """Run a measurement, and note the share of the processors that others took: 1 if this engine answered.

        A ``drafter`` in a separate process does not count as another program.
        """
        neighbours, answering = neighbours_of(drafter), False
        try:
            with closing(steps):
                while True:
                    try:
                        with neighbours:
                            fraction = next(steps)
                    except StopIteration as done:
                        return done.value  # type: ignore[no-any-return]
                    answering = answering or self._pair.answering
                    yield Loading(label, fraction)
        finally:
            self._taken = 1.0 if answering else neighbours.share
            self.most_taken = max(self.most_taken, self._taken)

    def run_for(self, seconds: float, stop: threading.Event, clock: Callable[[], float] = time.perf_counter) -> bool:
        """Continue for ``seconds`` or until ``stop`` is set; True once no measurement is missing.

        Also stops when this engine begins an answer: answer and measurement would slow each other down.
        """
        end = clock() + seconds
        while not (self.complete or self._closed or stop.is_set() or self._pair.answering) and clock() < end:
            with self._lock:
                self._step()
            if self._closed or self._dropping:  # set by a caller that did not wait for the step
                with self._lock:
                    self._leave()
        return self.complete

    def _step(self) -> None:
        if self._closed:
            return
        self._steps = self._steps or self._all_steps()
        try:
            self.complete = next(self._steps, None) is None
        except BaseException:
            self._steps = None  # a generator that raised has ended; the next one skips what is stored
            raise

    def close(self, *, wait: bool = True) -> None:
        """Give up the running measurement after its current step. Any thread may call it.

        Without ``wait`` the call returns immediately, and the thread that runs the step gives up.
        """
        self._closed = True
        self._leave_soon(wait=wait)

    def drop_rival(self) -> None:
        """Free a second copy of the target when an answer begins. Does not wait for a running step."""
        if self._rival is not None:
            self._dropping = True
            self._leave_soon(wait=False)

    def _leave_soon(self, *, wait: bool) -> None:
        if self._lock.acquire(blocking=wait):
            try:
                self._leave()
            finally:
                self._lock.release()

    def _leave(self) -> None:
        dropping, self._dropping = self._dropping and self._rival is not None, False
        if self._steps is not None and (self._closed or dropping):
            self._steps.close()
            self._steps = None  # the next walk skips what is stored
            self._rivals_dropped += dropping

    def _all_steps(self) -> Steps:
        """All parts, the one that changes the plan most first; ``_later`` names the following ones."""
        pair, parts = self._pair, list[tuple[str, Callable[[], Steps]]]()
        target, drafter = pair.target.facts, pair.measurements.drafter
        parts.append((target.name, self._target_steps))
        if self._alternatives and pair.most_threads > 1:
            label = f"{target.name} with fewer threads"
            if self._hurried:
                parts.append((label, self._hurried_thread_steps))
            else:
                parts.insert(0, (label, self._thread_steps))
        if drafter is not None:
            parts.append((drafter.name, self._drafter_steps))
        if self._alternatives and other_caches(pair.target):
            parts.append((f"{target.name} with other caches", self._alternative_steps))
        if (self._hurried or not self._alternatives) and self._rivals():
            parts.append(("other runtimes", self._rival_steps))
        if self._alternatives and self._other_places():
            parts.append(("other runtimes and devices", self._place_steps))
        self._later = [words for words, _ in parts]
        for _, steps in parts:
            del self._later[0]
            yield from steps()
        if self._compared and self.most_taken <= BUSY_SHARE and pair.profile.runtime == pair.profile.device == "auto":
            pair.measurements.settle_place(pair.pool.places)

    def _hurried_thread_steps(self) -> Steps:
        """Try fewer threads once the target is timed. It keeps its own if no time is left to time it with those."""
        pair, store = self._pair, self._pair.measurements.store
        timed, threads = pair.target.facts, pair.target.settings.threads
        every = pair.target.facts_with(threads=pair.most_threads)
        agreed = store.settled(THREADS, every, every.runtime)
        try:
            yield from self._thread_steps()
            if pair.target.facts != timed:
                yield from self._target_steps()
            elif (plain_s := store.plain_s(timed)) is not None:
                self._keep_other_threads(plain_s)
        except GeneratorExit:
            if pair.target.facts != timed:
                pair.adopt(threads=threads)
                store.save(THREADS, agreed, every, every.runtime)
            raise

    def _keep_other_threads(self, plain_s: float) -> None:
        for facts, factor in self._other_threads:
            self._keep_plain_s(facts, factor * plain_s)

    def _thread_steps(self) -> Steps:
        """Find the fastest number of threads and use the agreed one. Other numbers are kept as ratios to it.

        In a hurry, the numbers that are much smaller are not tried once a larger one is not faster.
        """
        pair = self._pair
        settled = pair.target.settings.threads
        if settled < pair.most_threads:
            pair.adopt(threads=pair.most_threads)
        before, busy, store = pair.target, False, pair.measurements.store
        ratios: dict[int, float] = {}
        fewer, own = fewer_threads(pair.target), before.settings.threads
        for threads in reversed(fewer) if self._hurried else fewer:
            # Another program on one core makes fewer threads look faster for a while: measure again.
            for _ in range(_THREADS_CONFIRMED):
                ratio = yield from self._plain_ratio(threads=threads)
                ratios[threads] = max(ratio, ratios.get(threads, 0.0))
                busy = busy or self._busy > 0
                if busy or ratio * SLOWER_ALLOWED >= 1:
                    break
            # Unreliable ratios, or a number of threads too small: the time is better spent on other parts.
            if busy or (self._hurried and ratio * SLOWER_ALLOWED >= 1):
                break
        facts = {threads: before.facts_with(threads=threads) for threads in (*fewer, own)}
        if busy:  # fewer threads are faster only while other programs run
            ratios = {}
        ratios[own] = 1.0
        if pair.profile.threads != "auto":
            settled = own
        elif not busy and pair.most_threads == choose_threads(pair.profile, pair.machine, None):  # no limit is set
            settled = store.settle_threads(facts[own], (yield from self._fastest(ratios, own)))
        if settled != own and settled in facts and pair.adopt(threads=settled):
            own = settled
        self._other_threads = [
            (facts[n], ratio / ratios[own]) for n, ratio in ratios.items() if n != own and not busy
        ]

    def _fastest(self, ratios: Mapping[int, float], own: int) -> Generator[Loading, None, int]:
        """The number of threads that decodes fastest, if it is clearly faster and reads prompts as fast."""
        best = min(ratios, key=lambda threads: ratios[threads])
        if ratios[best] * SLOWER_ALLOWED >= 1:
            return own
        target = self._pair.target
        with target.with_settings(threads=best) as other:
            steps = measure_prompt_ratio(target, other)
            label = f"measuring how {target.facts.name} reads with {setting_words(other.facts)}"
            slower = yield from self._labelled(steps, label)
        return best if slower <= SLOWER_ALLOWED else own

    def _plain_ratio(self, **caches: Any) -> Generator[Loading, None, float]:
        """How many times longer a plain forward takes with these caches or threads than with the target's own."""
        target = self._pair.target
        with target.with_settings(**caches) as other:
            steps = measure_plain_ratio(target, other, self._pair.plan.context_length)
            return (
                yield from self._labelled(steps, f"measuring {target.facts.name} with {setting_words(other.facts)}")
            )

    def _target_steps(self) -> Steps:
        pair, store = self._pair, self._pair.measurements.store
        facts = pair.target.facts
        known = pair.measurements.target_times() is not None and pair.measurements.widths() is not None
        if known and not self._afresh and not self._made_again(facts):
            return
        label = f"measuring {facts.name}"
        steps = measure_target(pair.target, pair.plan.context_length, self._scope, text=self._text(facts))
        times, probe = yield from self._labelled(steps, label)
        store.save(TIMES, replace(times, busy=self._busy), facts)
        store.save(WIDTHS, probe, facts)
        self._forget_answers()
        self._keep_other_threads(times.curves.curves[0].plain_s)

    def _text(self, facts: ModelFacts) -> list[int]:
        """The text that a target is timed on; empty where any tokens take as long."""
        return [] if facts.mixture is None else self._pair.prompts.encode_raw(sample_text())

    def _forget_answers(self) -> None:
        """What answers said of times that quiet ones replaced is over."""
        if not self._busy:
            self._pair.measurements.forget_answers()

    def _made_again(self, facts: ModelFacts) -> bool:
        return self._again and self._pair.measurements.store.busy_share(facts) > 0

    @property
    def _comparable(self) -> bool:
        """Whether the last measurement and the target's own times are those of a quiet machine."""
        return not self._busy and not self._pair.measurements.store.busy_share(self._pair.target.facts)

    def _keep_plain_s(self, facts: ModelFacts, seconds: float) -> None:
        store = self._pair.measurements.store
        if self._comparable:
            store.save(PLAIN, seconds, facts)
            store.forget(TIMES, facts)

    def _alternative_steps(self) -> Steps:
        pair, store = self._pair, self._pair.measurements.store
        times = store.load(TIMES, pair.target.facts)
        if times is None:
            return  # the folder cannot be written, so no times were kept
        own_s = times.curves.curves[0].plain_s
        for caches in other_caches(pair.target):
            try:
                facts = pair.target.facts_with(**caches)
                if self._afresh or store.plain_s(facts) is None:
                    self._keep_plain_s(facts, own_s * (yield from self._plain_ratio(**caches)))
            except EdgespecError:
                continue  # this model or build does not run in that setting

    def _drafter_steps(self) -> Steps:
        pair, store = self._pair, self._pair.measurements.store
        facts, target = pair.measurements.drafter, pair.target.facts
        if facts is None:
            return
        both = store.load(CONTENTION, target, facts)
        known = store.load(TIMES, facts) is not None and not self._made_again(facts)
        paired = both is not None and not (self._again and both.busy)
        if known and paired and not pair.measurements.unproven and not self._afresh:
            return
        try:
            drafter = pair.pool.drafter_model()
            yield from _until_loaded(drafter, facts.name)
        except ClosedError:
            return  # the engine is closing: this says nothing about the drafter
        except EdgespecError as error:  # for example: no room next to the target
            pair.measurements.drafter_failure = error.message
            return
        try:
            yield from self._measure_drafter(drafter, facts, known=known, paired=paired)
        except (WorkerLostError, RewindError) as error:  # sessions continue without the drafter
            pair.measurements.drafter_failure = error.message

    def _measure_drafter(self, drafter: Model, facts: ModelFacts, *, known: bool, paired: bool) -> Steps:
        pair, store, target = self._pair, self._pair.measurements.store, self._pair.target.facts
        label = f"measuring {facts.name}"
        if not known or self._afresh:
            steps = measure_drafter(drafter, pair.plan.context_length, self._scope)
            times = yield from self._labelled(steps, label, facts)
            store.save(TIMES, replace(times, busy=self._busy), facts)
            self._forget_answers()
        if pair.measurements.unproven:
            guessing = pair.pool.drafter_in_targets_tokens()
            agreeing = measure_agreement(pair.target, guessing, map(pair.prompts.request_tokens, REQUESTS))
            label = f"measuring how often {facts.name} agrees with {target.name}"
            agreed = yield from self._labelled(agreeing, label, facts)
            # Each token counts in several chains.
            pair.measurements.learn_prior(MODEL, agreed, AGREEMENT_TOKENS * len(REQUESTS))
        if not paired or self._afresh:
            label = f"measuring {target.name} and {facts.name} in parallel"
            yield from self._contention_of(pair.target, target, drafter, facts, label)

    def _place_steps(self) -> Steps:
        """Time target and drafter in every other place that has room for them next to the loaded models.

        If a model does not load or run in a place, the ranking lists the place as not measured.
        """
        for measure in self._other_places():
            with suppress(EdgespecError):
                yield from measure()

    def _other_places(self) -> list[Callable[[], Steps]]:
        """The measurements of target and drafter in every other place that has room."""
        pair, places = self._pair, self._pair.pool.places
        drafter = pair.measurements.drafter
        targets = [
            partial(self._target_at, place)
            for place in places.targets
            if places.room(place) and place.facts.place != pair.target.facts.place
        ]
        drafters = [
            partial(self._drafter_at, place)
            for place in places.drafters
            if places.room(place) and (drafter is None or place.facts.place != drafter.place)
        ]
        return [*targets, *drafters]

    def _rival_steps(self) -> Steps:
        """Time plain decoding in the other runtime for this processor: only measuring shows which is faster.

        The other runtime is timed again whenever the target is: a ratio needs both times from the same hour.
        """
        pair, store = self._pair, self._pair.measurements.store
        own = pair.target
        own_s = store.plain_s(own.facts)
        for place in self._rivals():
            whole = store.load(TIMES, place.facts) is not None  # these times are renewed only with all places
            known = whole or (store.load(PLAIN, place.facts) is not None and not self._afresh)
            if own_s is None or known or self._rivals_dropped >= _RIVAL_ATTEMPTS:
                continue
            with suppress(EdgespecError):  # a place without room stays unmeasured
                ratio = yield from self._rival_ratio(place)
                if self._comparable:
                    store.save(PLAIN, own_s * ratio, place.facts)
                    self._compared = True

    def _rivals(self) -> list[Placement]:
        """The target's places in other runtimes on the same device."""
        own = self._pair.target.facts
        places = self._pair.pool.places.targets
        return [each for each in places if each.facts.device == own.device and each.facts.runtime != own.runtime]

    def _rival_ratio(self, place: Placement) -> Generator[Loading, None, float]:
        """How many times longer a plain forward takes in that place. Needs a second copy of the target in memory."""
        pair = self._pair
        while self._given_up is not None and not self._given_up.wait_until_ended(_LOOK_AGAIN_S):
            yield Loading(f"loading {place.name}")  # at most one second copy at a time
        with closing(pair.pool.open_target(place)) as other:
            self._rival = other
            try:
                yield from _until_loaded(other, place.name)
                steps = measure_plain_ratio(pair.target, other, pair.plan.context_length)
                return (yield from self._labelled(steps, f"measuring {place.name}"))
            finally:
                self._rival, self._given_up = None, other

    def _target_at(self, place: Placement) -> Steps:
        pair, store, drafting = self._pair, self._pair.measurements.store, self._pair.measurements.drafter
        apart = drafting is not None and drafting.device != place.facts.device
        timed = store.load(TIMES, place.facts) is not None
        paired = drafting is None or not apart or store.load(CONTENTION, place.facts, drafting) is not None
        if timed and paired and not self._afresh:
            return
        with closing(pair.pool.open_target(place)) as target:
            yield from _until_loaded(target, place.name)
            scope = replace(self._scope, to_end=False)  # the place may never be used
            steps = measure_target(target, pair.plan.context_length, scope, text=self._text(place.facts))
            times, probe = yield from self._labelled(steps, f"measuring {place.name}")
            store.save(TIMES, replace(times, busy=self._busy), place.facts)
            store.save(WIDTHS, probe, place.facts)
            self._compared = True
            if drafting is not None and apart:
                drafter = pair.pool.drafter_model()
                yield from _until_loaded(drafter, drafting.name)
                yield from self._contention_apart(target, place.facts, drafter, drafting)

    def _drafter_at(self, place: Placement) -> Steps:
        pair, store, target = self._pair, self._pair.measurements.store, self._pair.target
        apart = target.facts.device != place.facts.device
        timed = store.load(TIMES, place.facts) is not None
        if (
            timed
            and (not apart or store.load(CONTENTION, target.facts, place.facts) is not None)
            and not self._afresh
        ):
            return
        with closing(pair.pool.open_drafter(place)) as drafter:
            yield from _until_loaded(drafter, place.name)
            steps = measure_drafter(drafter, pair.plan.context_length, self._scope)
            times = yield from self._labelled(steps, f"measuring {place.name}", place.facts)
            store.save(TIMES, replace(times, busy=self._busy), place.facts)
            if apart:
                yield from self._contention_apart(target, target.facts, drafter, place.facts)

    def _contention_apart(self, target: Model, target_facts: ModelFacts, drafter: Model, facts: ModelFacts) -> Steps:
        label = f"measuring {target_facts.name} on {target_facts.device} with {facts.name} on {facts.device}"
        yield from self._contention_of(target, target_facts, drafter, facts, label)

    def _contention_of(
        self, target: Model, target_facts: ModelFacts, drafter: Model, facts: ModelFacts, label: str
    ) -> Steps:
        both = yield from self._labelled(measure_contention(target, drafter), label, facts)
        self._pair.measurements.store.save(CONTENTION, replace(both, busy=self._busy), target_facts, facts)


def _until_loaded(model: BackgroundModel, name: str) -> Steps:
    """Wait in steps until a model is loaded on another thread. Raises what loading raises."""
    while not model.wait(_LOOK_AGAIN_S):
        yield Loading(f"loading {name}")
