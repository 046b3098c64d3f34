"""From answers to figures: paired speed-ups, predictions, memory traffic."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgespec.bench import predictions
from edgespec.bench.arms import FASTEST, PLAIN, PLANNED
from edgespec.bench.ratios import Compare, by_pass, decoding, first_token, plain_against_itself, requests
from edgespec.bench.repeats import disturbed
from edgespec.bench.run import Answer
from edgespec.bench.statistics import SAME_WITHIN, by_category, geomean, mbsu, regret, speedup
from edgespec.engine.engine import Engine
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.policy import RoundRecord

# Decoding alone, whole requests, and the times to the first token; the last two need prompts that were read.
_COMPARED: dict[str, Compare] = {"speedup": decoding, "request_speedup": requests, "ttft_ratio": first_token}


def arm_report(
    engine: Engine,
    name: str,
    answers: Sequence[Answer],
    read_bytes_per_s: float | None,
    other: ModelFacts | None = None,
) -> dict[str, Any]:
    """One arm in ``bench --json``, without its predictions. ``other``: the compared model that decodes in the arm.

    ``same_class`` tells whether the arm promises plain decoding's text; other kernels and files do not.
    """
    own = [answer for answer in answers if answer.arm == name]
    against = baseline(answers)
    compared = dict.fromkeys(_COMPARED) if name == against else compared_json(answers, name, against)
    gain, speed = compared["speedup"], _tokens_per_s(own)
    if gain is not None and (base := _tokens_per_s([answer for answer in answers if answer.arm == against])):
        speed = gain["geomean"] * base  # an arm's own answers weigh prompts otherwise than the ratio does
    return {
        "decode_tokens_per_s_geomean": speed,
        **compared,
        "identical_fraction": _fraction([answer.identical for answer in own]),
        "same_class": name != FASTEST and other is None,
        **_work(engine, own, read_bytes_per_s, other),
    }


def _tokens_per_s(answers: Sequence[Answer]) -> float | None:
    """Over the prompts the geometric mean of each one's median; None without an answer of two tokens."""
    timed: dict[str, list[float]] = {}
    for answer in answers:
        if answer.tokens_per_s is not None:
            timed.setdefault(answer.prompt_id, []).append(answer.tokens_per_s)
    return geomean([statistics.median(own) for own in timed.values()]) if timed else None


def baseline(answers: Sequence[Answer]) -> str:
    """The arm that every other arm is compared with: the fastest plain decoding."""
    return FASTEST if any(answer.arm == FASTEST for answer in answers) else PLAIN


def compared_json(answers: Sequence[Answer], name: str, against: str) -> dict[str, Any]:
    """Compare one arm with another, overall and by category; None if nothing was measured."""
    categories = {answer.prompt_id: answer.category for answer in answers}
    found: dict[str, Any] = {}
    for key, compare in _COMPARED.items():
        ratios = by_pass(answers, name, against, compare)
        found[key] = None
        if ratios:
            own = {category: each.as_json() for category, each in by_category(ratios, categories).items()}
            found[key] = {**speedup(ratios).as_json(), "by_category": own}
    return found


def noise_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """The A/A arm: plain decoding against itself, and the prompts on which the two differed in speed.

    ``noisy`` is None without the A/A arm.
    """
    ratios = plain_against_itself(answers)
    if not ratios:
        return {"aa_ci95": None, "noisy": None}
    both = speedup(ratios)
    return {
        "aa_ci95": list(both.ci95),
        "aa_geomean": both.geomean,
        "noisy": abs(both.geomean - 1) > SAME_WITHIN or both.wide,
        "disturbed": disturbed(answers),
        "by_prompt": [
            {"id": prompt, "ratio": statistics.median(passes), "passes": len(passes)}
            for prompt, passes in ratios.items()
        ],
    }


def bench_report(
    engine: Engine,
    suite: Mapping[str, Any],
    answers: Sequence[Answer],
    *,
    read_bytes_per_s: float | None,
    compared: Mapping[str, ModelFacts] | None = None,
) -> dict[str, Any]:
    """The object that ``bench --json`` prints.

    ``compared``: the arms that decode with another model than the engine's target. ``against``: the plan's speed as a
    multiple of each of these arms.
    """
    compared = compared or {}
    names = list(dict.fromkeys(answer.arm for answer in answers))
    costs = engine.pair.measurements.costs()
    known = [answer for answer in answers if answer.arm not in compared]  # costs are known only for the target
    now, before = predictions.current(costs, known), predictions.calibrated(costs, known)
    arms = {
        name: arm_report(engine, name, answers, read_bytes_per_s, compared.get(name))
        | {"predicted_vs_measured": now.get(name), "calibrated_vs_measured": before.get(name)}
        for name in names
    }
    planned = arms.get(PLANNED)
    return {
        "machine": {**engine.pair.machine.as_json(), "read_bytes_per_s": read_bytes_per_s},
        "suite": dict(suite),
        "arms": arms,
        "speedup": None if planned is None else planned["speedup"],
        "baseline": baseline(answers),
        # Another setting or another file does not promise plain decoding's text.
        "identical_fraction": _fraction([a.identical for a in answers if a.arm not in (PLAIN, FASTEST, *compared)]),
        "predicted_vs_measured": None if planned is None else planned["predicted_vs_measured"],
        "against": {} if planned is None else {name: compared_json(answers, PLANNED, name) for name in compared},
        "noise": noise_json(answers),
        "regret": _regret(answers),
        "plan": engine.plan.as_json(),
        "pairs": [_pair_json(answer) for answer in answers],
    }


def _pair_json(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.prompt_id,
        "category": answer.category,
        "arm": answer.arm,
        "turn": answer.turn,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "decode_s": answer.decode_s,
        "ttft_s": answer.ttft_s,
        "tokens_per_round": answer.stats.tokens_per_round,
        "proposed": answer.stats.proposed,
        "accepted": answer.stats.accepted,
        "rounds_by_depth": _rounds_by_depth(answer),
        "identical_to_plain": answer.identical,
    }


def _rounds_by_depth(answer: Answer) -> list[int]:
    """Number of rounds by proposed depth: index 0 counts the rounds without proposals."""
    depths = Counter(record.depth for record in answer.rounds)
    return [depths[depth] for depth in range(max(depths, default=-1) + 1)]


def _fraction(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


# ------------------------------------------------------------------------------- the memory-bound profile


def _work(
    engine: Engine, own: Sequence[Answer], read_bytes_per_s: float | None, other: ModelFacts | None
) -> dict[str, Any]:
    """The arm's memory traffic and where its time went, over all its answers."""
    target, drafter = other or engine.pair.measurements.target, engine.pair.measurements.drafter
    rounds = [record for answer in own for record in answer.rounds]
    tokens = sum(answer.tokens - 1 for answer in own if answer.tokens > 1)
    seconds = sum(answer.decode_s for answer in own)
    forwards = sum(record.draft_forwards for record in rounds)
    proposed = sum(record.proposed for record in rounds)
    work: dict[str, Any] = {
        "tokens_per_round": None,
        "accepted_per_proposed": sum(r.accepted for r in rounds) / proposed if proposed else None,
        "mean_depth": sum(record.depth for record in rounds) / len(rounds) if rounds else None,
        "mbsu": None,
        "bytes_per_token": None,
        "bandwidth_used": None,
        "share_draft": None,
        "share_verify": None,
        "share_idle": None,
        "share_target_idle": None,
        "share_drafter_idle": None,
    }
    if not rounds or not tokens or not seconds:
        return work
    drafter_bytes = 0 if drafter is None else drafter.bytes_per_forward
    read = sum(target.bytes_per_forward + target.cache_bytes(record.context_length) for record in rounds)
    per_token = (read + forwards * drafter_bytes) / tokens
    drafted_s = sum(record.draft_s for record in rounds)
    verified_s = sum(record.verify_s for record in rounds)
    work |= {
        "tokens_per_round": tokens / len(rounds),
        "mbsu": mbsu(tokens / len(rounds), forwards / len(rounds), drafter_bytes, target.bytes_per_forward),
        "bytes_per_token": per_token,
        "bandwidth_used": None if not read_bytes_per_s else per_token * tokens / seconds / read_bytes_per_s,
        "share_draft": drafted_s / seconds,
        "share_verify": verified_s / seconds,
        "share_idle": max(0.0, 1.0 - (sum(map(_busy_s, rounds))) / seconds),
        "share_target_idle": max(0.0, 1.0 - verified_s / seconds),
        "share_drafter_idle": max(0.0, 1.0 - drafted_s / seconds),
    }
    return work


def _busy_s(record: RoundRecord) -> float:
    """Seconds of a round in which drafter or target was busy; overlapping time counts once."""
    if not record.overlapped:
        return record.draft_s + record.verify_s
    return record.verify_s + min(record.draft_s, record.target_idle_s)


def _regret(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """The planned arm's loss against the best fixed depth of each category; None without fixed depths."""
    names = [n for n in dict.fromkeys(a.arm for a in answers) if n == PLAIN or n.startswith("depth-")]
    found = by_pass(answers, PLANNED, PLAIN, decoding)
    if len(names) < 2 or not found:
        return None
    categories = {answer.prompt_id: answer.category for answer in answers}
    fixed = {name: by_category(by_pass(answers, name, PLAIN, decoding), categories) for name in names}
    planned = by_category(found, categories)
    return {category: asdict(own) for category, own in regret(fixed, planned).items()}
