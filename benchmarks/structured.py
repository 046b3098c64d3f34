"""Answers of a given form: how fast they are, how often valid, and how often right.

    python -m benchmarks.structured [--limit N] [--seconds N] [--max-tokens N] [--turns N] [--temperature T]
                                    [--first-tokens]

Extracts values from the texts of structured.jsonl with the default models. Six arms answer each prompt one after
another, in an order that changes with the prompt: `free` is drafted and asked for JSON in words alone, the others are
bound to the prompt's schema. `plain`, `drafted` and `alone` have one text: plain decoding, drafts, and drafts without
a drafting model. `compact` and `spaced` are drafted with the spacings compact and free. The prompt is the same in all
arms, and all forms are compiled before. ``--turns`` asks each prompt that often, each time in the opposite order, and
the median of its times counts. A free answer counts as valid without a frame of backquotes only; its values are read
within one too. At the end each prompt is asked again for one token, once free and once with its form, while its
tokens are in the cache: the difference is what a form that is compiled delays the first token. ``--first-tokens``
measures nothing else. Prints a line for each arm, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.bench.statistics import geomean
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.server.json_schema import fits
from edgespec.text.grammar.form import form_of

PROMPTS = Path(__file__).with_suffix(".jsonl")
BOUND = ("plain", "drafted", "alone")
# Pairs of first tokens for each prompt.
FIRST_PAIRS = 6
SPACINGS = {"compact": "compact", "spaced": "free"}
ARMS = ("free", *BOUND, *SPACINGS)
# The arms whose speeds are compared, the faster one first if all is well.
RATIOS = (("drafted", "free"), ("drafted", "plain"), ("alone", "plain"))


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: whether it ended by itself, is JSON of the schema, and has the expected values."""

    finished: bool
    valid: bool
    right: bool
    seconds: float
    tokens_per_s: float | None
    ids: tuple[int, ...]


def prompts() -> list[dict[str, Any]]:
    """Prompts, each with its id, schema and expected values."""
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def parsed(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def allowed(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a schema of ours allows the value: its objects have no other properties."""
    own = schema.get("properties")
    if not fits(schema, value) or own is None:
        return fits(schema, value)
    return all(name in own and allowed(own[name], each) for name, each in value.items())


def judged(task: Mapping[str, Any], done: Done) -> Answer:
    """What an answer to the task is worth."""
    text, schema = done.text, task["schema"]
    framed = parsed(text[text.find("{") : text.rfind("}") + 1])
    return Answer(
        finished=done.finish_reason == "stop",
        valid=allowed(schema, parsed(text)),
        right=framed == task["expected"] and allowed(schema, framed),  # 1 equals True
        seconds=(done.stats.ttft_s or 0.0) + (done.stats.decode_s or 0.0),
        tokens_per_s=done.stats.decode_tokens_per_s,
        ids=done.token_ids,
    )


def in_turns(answers: Sequence[Answer]) -> Answer:
    """The answers of several turns to one prompt as one, with the median of their times."""
    rates = [answer.tokens_per_s for answer in answers if answer.tokens_per_s]
    seconds = median(answer.seconds for answer in answers)
    return replace(answers[0], seconds=seconds, tokens_per_s=median(rates) if rates else None)


def arm_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Shares of all answers, and the seconds of all for each that is finished."""
    count, finished = len(answers), sum(answer.finished for answer in answers)
    return {
        "finished": finished / count,
        "valid": sum(answer.valid for answer in answers) / count,
        "right": sum(answer.right for answer in answers) / count,
        "tokens": sum(len(answer.ids) for answer in answers),
        "seconds_per_finished": sum(answer.seconds for answer in answers) / finished if finished else None,
    }


def figures(found: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """The figures of all arms, whose answers are in the same order of prompts."""
    ratios = dict[str, float | None]()
    for one, other in RATIOS:
        pairs = [(a.tokens_per_s, b.tokens_per_s) for a, b in zip(found[one], found[other], strict=True)]
        own = [a / b for a, b in pairs if a and b]
        ratios[f"{one}_over_{other}"] = geomean(own) if own else None
    ids = zip(*([answer.ids for answer in found[arm]] for arm in BOUND), strict=True)
    return {
        "prompts": len(found["plain"]),
        "same_ids": sum(len(set(own)) == 1 for own in ids),
        "tokens_per_s_ratios": ratios,
        "arms": {arm: arm_figures(found[arm]) for arm in ARMS},
    }


def first_figures(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How much later the first token comes with a form, of pairs of seconds without one and with one."""
    later = sorted(1000 * (bound - free) for free, bound in pairs)
    half = len(later) // 4
    return {
        "first_token_ms": 1000 * median(free for free, _ in pairs),
        "first_token_later_ms": median(later),
        "middle_half_ms": later[-1 - half] - later[half],
    }


def first_tokens(session: Session, tasks: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The seconds until the first token, without a form and with one, for each pair of answers."""
    found = []
    for task, turn in product(tasks, range(FIRST_PAIRS + 1)):
        own = {
            arm: ask(session, arm, task, 1, Sampling(), keep_cache=True).stats.ttft_s or 0.0
            for arm in ("free", "drafted")[:: 1 if turn % 2 else -1]
        }
        if turn:  # the first answer reads the prompt
            found.append((own["free"], own["drafted"]))
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Answer the prompts in every arm, the first one twice: its first answers are not counted."""
    tasks, sampling = prompts()[: given.limit], Sampling(temperature=given.temperature, seed=1)
    found: dict[str, list[Answer]] = {arm: [] for arm in ARMS}
    with (
        Engine.load() as pair,
        Engine.load(draft="none") as single,
        pair.session() as shared,
        single.session() as alone,
    ):
        pair.load_drafter()
        for engine, task, spacing in product((pair, single), tasks, ("line", *SPACINGS.values())):
            if (form := form_of(task["schema"], spacing=spacing)) is not None:
                engine.pair.forms.compiled(form)
        if given.first_tokens:
            return first_figures(first_tokens(shared, tasks))
        end = time.monotonic() + given.seconds
        for number, task in enumerate((tasks[0], *tasks)):
            if number > 1 and time.monotonic() > end:
                break
            first, answers = number % len(ARMS), dict[str, list[Answer]]()
            arms = (*ARMS[first:], *ARMS[:first])
            for turn in range(given.turns if number else 1):
                for arm in arms[:: -1 if turn % 2 else 1]:
                    done = ask(alone if arm == "alone" else shared, arm, task, given.max_tokens, sampling)
                    answers.setdefault(arm, []).append(judged(task, done))
            if number:
                for arm, own in answers.items():
                    found[arm].append(in_turns(own))
        return figures(found) | first_figures(first_tokens(shared, tasks))


def ask(
    session: Session,
    arm: str,
    task: Mapping[str, Any],
    max_tokens: int,
    sampling: Sampling,
    *,
    keep_cache: bool = False,
) -> Done:
    """A new conversation's answer, whose prompt is read from its first token unless the cache is kept."""
    session.clear(keep_cache=keep_cache)
    form = {} if arm == "free" else {"schema": task["schema"], "spacing": SPACINGS.get(arm, "line")}
    depth = 0 if arm == "plain" else None
    events = session.generate(task["prompt"], max_tokens=max_tokens, sampling=sampling, depth=depth, **form)
    return next(event for event in events if isinstance(event, Done))


def main() -> None:
    """Print a line for each arm, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, metavar="N", help="the first N prompts; all if not given")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="longest answer")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N", help="no prompt begins after them")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="times that each prompt is asked")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0, answers are sampled")
    parser.add_argument("--first-tokens", action="store_true", help="measure the delay of first tokens alone")
    given = parser.parse_args()
    found = measure(given)
    for arm, own in found.get("arms", {}).items():
        each = own["seconds_per_finished"]
        seconds = "none finished" if each is None else f"{each:.2f} s a finished answer"
        print(f"{arm:8}{seconds}, {100 * own['valid']:.0f} % valid, {100 * own['right']:.0f} % right")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
