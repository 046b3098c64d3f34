"""Run a suite and repeat the prompts on which the machine was disturbed; other prompts are not repeated."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from edgespec.bench import run
from edgespec.bench.arms import Arm
from edgespec.bench.ratios import plain_against_itself
from edgespec.bench.statistics import NARROW_WITHIN
from edgespec.bench.suite import Prompt
from edgespec.engine.engine import Engine

# The largest accepted difference of plain decoding from itself on one prompt. Three passes of each of four prompts
# with this standard deviation give an interval of t(8) / sqrt(4) = 1.15 times it, a little wider than required; those
# of five prompts, t(10) / sqrt(5) = 1.00 times it. So a run of few prompts may be noisy although none is disturbed.
DISTURBED = NARROW_WITHIN
# A prompt that is still disturbed after this many repeats is kept and reported.
REPEATS = 3

OnRepeat = Callable[[Sequence[Prompt], int], None]


def disturbed(answers: Sequence[run.Answer]) -> list[str]:
    """The prompts on which plain decoding differed in speed from itself; none without the A/A arm.

    A prompt is judged by the median of all its passes. Both signs count, so that the repeats favour no arm.
    """
    found = plain_against_itself(answers)
    return [prompt for prompt, ratios in found.items() if abs(math.log(statistics.median(ratios))) > DISTURBED]


def run_until_quiet(
    engine: Engine,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: run.RunSettings,
    *,
    on_answer: run.Progress | None = None,
    on_repeat: OnRepeat | None = None,
    stop: threading.Event | None = None,
    within_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[run.Answer]:
    """The answers of ``run_passes``, with every disturbed prompt repeated up to three times.

    With ``within_s`` a prompt is repeated only if that is expected to end within this time from the start. Every
    answer is kept. Raises what ``run_passes`` raises.
    """
    answers: list[run.Answer] = []
    chosen, began, each_s = list(prompts), clock(), 0.0
    for repeat in range(1 + REPEATS):
        if repeat:
            again = set(disturbed(answers))
            chosen = [prompt for prompt in chosen if prompt.id in again]
            if within_s is not None and each_s > 0:
                chosen = chosen[: max(0, int((within_s - (clock() - began)) / each_s))]
            if not chosen:
                break
            if on_repeat is not None:
                on_repeat(chosen, repeat)
        first = 2 * settings.passes * repeat
        answers += run.run_passes(engine, arms, chosen, settings, first_turn=first, on_answer=on_answer, stop=stop)
        if not repeat and prompts:
            each_s = (clock() - began) / len(prompts)
    return answers
