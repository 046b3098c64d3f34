"""Measuring what a plan needs and the store does not hold: at once, or a few seconds at a time between answers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from edgespec.calibration.timing import (
    Scope,
    measure_agreement,
    measure_contention,
    measure_drafter,
    measure_plain_ratio,
    measure_target,
)
from edgespec.engine.events import Loading
from edgespec.engine.loaded_pair import LoadedPair
from edgespec.errors import ClosedError, EdgespecError, WorkerLostError
from edgespec.hardware.neighbours import BUSY_SHARE, Neighbours
from edgespec.interfaces.model import Model, ModelFacts
from edgespec.placement.candidates import Placement, same_place
from edgespec.placement.settings import fewer_threads, other_caches, setting_words
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.runtimes.background import BackgroundModel

# Longest time spent between two answers: a person reads an answer for about that long.
CALIBRATION_BUDGET_S = 8.0

# Longest time that a quick calibration takes beside loading the models. With a last step and with what timing the
# memory takes (2 s, 3 on busy cores) it is 50 s.
QUICK_BUDGET_S = 45.0

# Times that fewer threads have to be found faster: on a shared machine two cores were slower than one in one second
# of twelve.
_THREADS_CONFIRMED = 3

# How long a step waits for a model that is loaded beside it.
_LOOK_AGAIN_S = 0.2

# Loads of a second copy of the target that are given up before nobody tries again: a chat whose pauses were too short
# three times has no longer ones.
_RIVAL_ATTEMPTS = 3

T = TypeVar("T")

# What drafter and target are compared on: code, which drafters are good at, an explanation, and a list.
REQUESTS = (
    "Write a function that returns the n smallest numbers of a list.",
    "Why do leaves change colour in autumn?",
    "Name five things to pack for a day in the mountains, and why.",
)

Steps = Generator[Loading, None, None]


class BackgroundCalibration:
    """One walk through everything that is missing for a pair's plan, in steps of well under a second.

    Each measurement is stored as soon as it is complete, so what an interrupted walk has learned is kept. With
    ``afresh`` stored measurements are made again, with ``again`` those that other programs disturbed; with
    ``alternatives`` plain decoding is also timed in the other settings the target could run in.
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
        # Near exactness rests on how far unequal widths differ.
        self._scope = replace(scope, complete=True) if pair.profile.exactness == "near" else scope
        self._afresh = afresh
        self._again = again
        self._alternatives = alternatives
        self._taken = 0.0  # of the processors, by others, during the last measurement
        self.most_taken = 0.0  # and the most during any
        # With how many times longer a forward takes with them.
        self._other_threads: list[tuple[ModelFacts, float]] = []
        self._steps: Steps | None = None
        self._lock = threading.Lock()  # around a step: a generator cannot be closed while it runs
        self._closed = False
        self._dropping = False
        self._rival: BackgroundModel | None = None  # the target a second time, loading or loaded
        self._given_up: BackgroundModel | None = None  # and one that may still be loading, for nobody
        self._rivals_dropped = 0
        self._compared = False  # whether the target was timed in another place
        self.complete = False  # whether ``run_for`` has been through everything
        self._hurried = False
        self._later: list[str] = []  # what comes after the part under way
        self.left_out: tuple[str, ...] = ()  # what ``run`` had no time for

    def run(
        self,
        progress: Callable[[Loading], None] | None = None,
        *,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Everything, now, or what is done within ``budget_s``. Raises what a forward or loading a model raises."""
        self._hurried = budget_s is not None
        end = None if budget_s is None else clock() + budget_s
        with closing(self._all_steps()) as steps:
            for step in steps:
                if progress is not None:
                    progress(step)
                # What is measured to its end is stored with the next step.
                if end is not None and clock() >= end and step.fraction != 1.0:
                    self.left_out = (step.stage.removeprefix("measuring "), *self._later)
                    break

    @property
    def _busy(self) -> float:
        """``most_taken`` of the last measurement, if that is too much to believe its times."""
        return self._taken if self._taken > BUSY_SHARE else 0.0

    def _labelled(
        self, steps: Generator[float, None, T], label: str, drafter: ModelFacts | None = None
    ) -> Generator[Loading, None, T]:
        """A measurement, and what others take of the processors meanwhile: an answer of this engine takes all.

        A ``drafter`` in a process of its own would count among them, so nobody can tell.
        """
        neighbours, answering = Neighbours(), False
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
            apart = drafter is not None and "process" in drafter.settings
            self._taken = 1.0 if answering else 0.0 if apart else neighbours.share
            self.most_taken = max(self.most_taken, self._taken)

    def run_for(self, seconds: float, stop: threading.Event, clock: Callable[[], float] = time.perf_counter) -> bool:
        """Go on where the last call stopped, for so long or until ``stop`` is set; True once nothing is missing.

        Leaves off as well where an answer of this engine begins: both would be slower, and the times wrong.
        """
        end = clock() + seconds
        while not (self.complete or self._closed or stop.is_set() or self._pair.answering) and clock() < end:
            with self._lock:
                self._step()
            if self._closed or self._dropping:  # meanwhile, by who did not wait for the step
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
            self._steps = None  # a generator that raised is over; what it had stored is skipped the next time
            raise

    def close(self, *, wait: bool = True) -> None:
        """Give up the measurement under way, after its present step. Any thread may call it.

        Without ``wait`` a step under way ends by itself, and whoever runs it gives up.
        """
        self._closed = True
        self._leave_soon(wait=wait)

    def drop_rival(self) -> None:
        """An answer begins: the target is not to be in memory twice meanwhile. Waits for no step."""
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
            self._steps = None  # what was stored is skipped the next time
            self._rivals_dropped += dropping

    def _all_steps(self) -> Steps:
        """What changes the plan most comes first; ``_later`` names what is still to come."""
        pair, parts = self._pair, list[tuple[str, Callable[[], Steps]]]()
        target, drafter = pair.target.facts, pair.measurements.drafter
        if self._alternatives and pair.most_threads > 1:
            parts.append((f"{target.name} with fewer threads", self._thread_steps))
        parts.append((target.name, self._target_steps))
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

    def _thread_steps(self) -> Steps:
        """Find the fastest number of threads, and go on with what is settled. The others are kept as ratios to it."""
        pair = self._pair
        settled = pair.target.settings.threads
        if settled < pair.most_threads:
            pair.adopt(threads=pair.most_threads)
        before, busy, store = pair.target, False, pair.measurements.store
        ratios: dict[int, float] = {}
        fewer, own = fewer_threads(pair.target), before.settings.threads
        for threads in fewer:
            # A neighbour that takes a core for a while makes the other one look faster alone: it has to be so again.
            for _ in range(_THREADS_CONFIRMED):
                ratio = yield from self._plain_ratio(threads=threads)
                ratios[threads] = max(ratio, ratios.get(threads, 0.0))
                busy = busy or self._busy > 0
                if busy or ratio * SLOWER_ALLOWED >= 1:
                    break
            if busy:  # none of it would be believed, and the rest of the time is for what is
                break
        facts = {threads: before.facts_with(threads=threads) for threads in (*fewer, own)}
        if busy:  # then fewer threads are faster for as long as the others are there
            for threads in fewer:
                store.forget_plain_s(facts[threads])
            ratios = {}
        ratios[own] = 1.0
        if pair.profile.threads != "auto":
            settled = own
        elif not busy:
            best = min(ratios, key=lambda threads: ratios[threads])
            settled = store.settle_threads(facts[own], best if ratios[best] * SLOWER_ALLOWED < 1 else own)
        if settled != own and settled in facts and pair.adopt(threads=settled):
            own = settled
        self._other_threads = [
            (facts[n], ratio / ratios[own]) for n, ratio in ratios.items() if n != own and not busy
        ]

    def _plain_ratio(self, **caches: Any) -> Generator[Loading, None, float]:
        """How many times longer a plain forward takes in those caches or threads than in the target's own."""
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
        steps = measure_target(pair.target, pair.plan.context_length, self._scope)
        times, probe = yield from self._labelled(steps, label)
        store.save_times(facts, times, busy=self._busy)
        store.save_widths(facts, probe)
        for others, factor in self._other_threads:
            self._keep_plain_s(others, factor * times.curves.curves[0].plain_s)

    def _made_again(self, facts: ModelFacts) -> bool:
        return self._again and self._pair.measurements.store.busy_share(facts) > 0

    def _keep_plain_s(self, facts: ModelFacts, seconds: float) -> None:
        store = self._pair.measurements.store
        store.save_plain_s(facts, seconds)
        store.forget_times(facts)

    def _alternative_steps(self) -> Steps:
        pair, store = self._pair, self._pair.measurements.store
        times = store.load_times(pair.target.facts)
        if times is None:
            return  # a folder that cannot be written keeps nothing to compare with
        own_s = times.curves.curves[0].plain_s
        for caches in other_caches(pair.target):
            try:
                facts = pair.target.facts_with(**caches)
                if self._afresh or store.plain_s(facts) is None:
                    self._keep_plain_s(facts, own_s * (yield from self._plain_ratio(**caches)))
            except EdgespecError:
                continue  # a setting that this model or build does not run in is no alternative

    def _drafter_steps(self) -> Steps:
        pair, store = self._pair, self._pair.measurements.store
        facts, target = pair.measurements.drafter, pair.target.facts
        if facts is None:
            return
        known = store.load_times(facts) is not None and not self._made_again(facts)
        paired = store.load_contention(target, facts) is not None
        if known and paired and not pair.measurements.unproven and not self._afresh:
            return
        try:
            drafter = pair.pool.drafter_model()
            yield from _until_loaded(drafter, facts.name)
        except ClosedError:
            return  # the engine is going: nothing was found out about its drafter
        except EdgespecError as error:  # it does not fit beside the target, for one
            pair.measurements.drafter_failure = error.message
            return
        try:
            yield from self._measure_drafter(drafter, facts, known=known, paired=paired)
        except WorkerLostError as error:  # nobody waits for an answer of the drafter's: the others go on without it
            pair.measurements.drafter_failure = error.message

    def _measure_drafter(self, drafter: Model, facts: ModelFacts, *, known: bool, paired: bool) -> Steps:
        pair, store, target = self._pair, self._pair.measurements.store, self._pair.target.facts
        label = f"measuring {facts.name}"
        if not known or self._afresh:
            steps = measure_drafter(drafter, pair.plan.context_length, self._scope)
            times = yield from self._labelled(steps, label, facts)
            store.save_times(facts, times, busy=self._busy)
        if pair.measurements.unproven:
            agreeing = measure_agreement(pair.target, drafter, map(pair.prompts.request_tokens, REQUESTS))
            label = f"measuring how often {facts.name} says what {target.name} says"
            pair.measurements.learn_prior("model", (yield from self._labelled(agreeing, label, facts)))
        if not paired or self._afresh:
            both = measure_contention(pair.target, drafter)
            label = f"measuring {target.name} and {facts.name} side by side"
            store.save_contention(target, facts, (yield from self._labelled(both, label, facts)))

    def _place_steps(self) -> Steps:
        """Target and drafter in every other place that has room for them beside what is loaded.

        What does not load or run there stays unmeasured, and the ranking says so.
        """
        for measure in self._other_places():
            with suppress(EdgespecError):
                yield from measure()

    def _other_places(self) -> list[Callable[[], Steps]]:
        """How target and drafter are measured in each other place that has room."""
        pair, places = self._pair, self._pair.pool.places
        drafter = pair.measurements.drafter
        targets = [
            partial(self._target_at, place)
            for place in places.targets
            if places.room(place) and not same_place(place.facts, pair.target.facts)
        ]
        drafters = [
            partial(self._drafter_at, place)
            for place in places.drafters
            if places.room(place) and (drafter is None or not same_place(place.facts, drafter))
        ]
        return [*targets, *drafters]

    def _rival_steps(self) -> Steps:
        """Plain decoding in the other runtime for this processor: which is faster, nobody knows before.

        Once, and again with the own times: a ratio to times of another hour says little.
        """
        pair, store = self._pair, self._pair.measurements.store
        own = pair.target
        own_s = store.plain_s(own.facts)
        for place in self._rivals():
            whole = store.load_times(place.facts) is not None  # which only a measurement of all places renews
            known = whole or (store.load_plain_s(place.facts) is not None and not self._afresh)
            if own_s is None or known or self._rivals_dropped >= _RIVAL_ATTEMPTS:
                continue
            with suppress(EdgespecError):  # one that has no room stays unmeasured
                ratio = yield from self._rival_ratio(place)
                store.save_plain_s(place.facts, own_s * ratio)
                self._compared = True

    def _rivals(self) -> list[Placement]:
        """The target in other runtimes on its device."""
        own = self._pair.target.facts
        places = self._pair.pool.places.targets
        return [each for each in places if each.facts.device == own.device and each.facts.runtime != own.runtime]

    def _rival_ratio(self, place: Placement) -> Generator[Loading, None, float]:
        """How many times longer a plain forward takes in that place. The target is in memory twice meanwhile."""
        pair = self._pair
        while self._given_up is not None and not self._given_up.wait_until_ended(_LOOK_AGAIN_S):
            yield Loading(f"loading {place.name}")  # two at once are a copy too many
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
        timed = store.load_times(place.facts) is not None
        paired = drafting is None or not apart or store.load_contention(place.facts, drafting) is not None
        if timed and paired and not self._afresh:
            return
        with closing(pair.pool.open_target(place)) as target:
            yield from _until_loaded(target, place.name)
            scope = replace(self._scope, to_end=False)  # of a place that may never be used
            steps = measure_target(target, pair.plan.context_length, scope)
            times, probe = yield from self._labelled(steps, f"measuring {place.name}")
            store.save_times(place.facts, times, busy=self._busy)
            store.save_widths(place.facts, probe)
            self._compared = True
            if drafting is not None and apart:
                drafter = pair.pool.drafter_model()
                yield from _until_loaded(drafter, drafting.name)
                yield from self._contention_of(target, place.facts, drafter, drafting)

    def _drafter_at(self, place: Placement) -> Steps:
        pair, store, target = self._pair, self._pair.measurements.store, self._pair.target
        apart = target.facts.device != place.facts.device
        timed = store.load_times(place.facts) is not None
        if timed and (not apart or store.load_contention(target.facts, place.facts)) and not self._afresh:
            return
        with closing(pair.pool.open_drafter(place)) as drafter:
            yield from _until_loaded(drafter, place.name)
            steps = measure_drafter(drafter, pair.plan.context_length, self._scope)
            times = yield from self._labelled(steps, f"measuring {place.name}", place.facts)
            store.save_times(place.facts, times, busy=self._busy)
            if apart:
                yield from self._contention_of(target, target.facts, drafter, place.facts)

    def _contention_of(self, target: Model, target_facts: ModelFacts, drafter: Model, facts: ModelFacts) -> Steps:
        label = f"measuring {target_facts.name} on {target_facts.device} beside {facts.name} on {facts.device}"
        both = yield from self._labelled(measure_contention(target, drafter), label, facts)
        self._pair.measurements.store.save_contention(target_facts, facts, both)


def _until_loaded(model: BackgroundModel, name: str) -> Steps:
    """Load a model beside this thread, as that takes longer than a step may. Raises what loading raises."""
    while not model.wait(_LOOK_AGAIN_S):
        yield Loading(f"loading {name}")
