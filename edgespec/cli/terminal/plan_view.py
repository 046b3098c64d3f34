"""A plan in five lines for people: the model, who guesses, the expected speed, what limits it, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.terminal.output import EXACTNESS_WORDS

if TYPE_CHECKING:
    from edgespec.planning.choice.options import Candidate, Ranking
    from edgespec.planning.choice.plan import Plan, PlannedDrafter

# What to do, by the code of a reason in the plan. The first that is there counts. {} is the command that measures.
_NEXT = {
    "depth_zero": "leave out what asks for plain decoding",
    "no_drafter": "a drafter can be named: --draft MODEL",
    "no_drafter_pays": "nothing: plain decoding is the fastest here",
    "not_calibrated": "`{} --quick` measures this machine",
    "measured_busy": "calibrate again when the machine is idle",
    "times_estimated": "nothing, or `{}`: chats measure too",
    "widths_not_measured": "`{}` compares the widths",
}

# Why a drafter is left out.
_REFUSED = {"no_room", "memory_not_known", "cannot_pay"}


def plan_lines(plan: Plan, ranking: Ranking | None, more: str, calibrate: str) -> list[tuple[str, str]]:
    """Labels and texts. ``more`` says where the rest stands; ``calibrate`` is the command that measures."""
    target, best = plan.target, None if ranking is None else ranking.best
    threads = f", {target.threads} threads" if target.threads > 1 else ""
    where = f"on {target.device} ({target.runtime}{threads})"
    codes = {reason.code for reason in plan.why}
    to_do = next((text for code, text in _NEXT.items() if code in codes), "nothing")
    return [
        ("model", f"{target.model} {where}, context {plan.context_length}"),
        ("drafter", "none" if plan.drafter is None else drafter_words(plan.drafter)),
        ("speed", _speed(plan, best)),
        ("limit", _limit(plan, best)),
        ("to do", f"{to_do.format(calibrate)}; {more}"),
    ]


def drafter_words(drafter: PlannedDrafter) -> str:
    """A drafter with its device, and whether copies are guessed too."""
    parts = [] if drafter.model is None else [f"{drafter.model} on {drafter.device} ({drafter.runtime})"]
    if "lookup" in drafter.kind.split("+"):
        parts.append("copies of the text")
    return " and ".join(parts)


def _speed(plan: Plan, best: Candidate | None) -> str:
    expected = plan.predicted_tokens_per_s
    per_s = expected if expected is not None or best is None else best.tokens_per_s
    if per_s is None:
        return "not measured"
    words = f"{per_s:.1f} tokens/s"
    if best is not None and best.depth:
        words += f", {best.speedup:.2f}x plain decoding"
    busy = any(reason.code == "measured_busy" for reason in plan.why)
    if expected is None:
        why = "measured only while other programs ran" if busy else "not measured here"
        words = f"about {words}; estimated, {why}"
    elif busy:
        words += ", measured while other programs ran"
    if plan.mode != "plain" and plan.exactness != "W":
        words += f"; the text: {EXACTNESS_WORDS[plan.exactness]}"
    return words


def _limit(plan: Plan, best: Candidate | None) -> str:
    """Why it is not faster."""
    refused = next((reason for reason in plan.why if reason.code in _REFUSED), None)
    plain = plan.plain_because or (refused if plan.mode == "plain" else None)
    if plain is not None:
        return plain.text
    if plan.drafter_off is not None:
        return plan.drafter_off
    if best is None or plan.mode == "plain":
        return "every token reads all weights"
    whose = "the drafter's guesses" if best.depth else "guesses"
    most = f"at most {best.possible_speedup:.1f}x, if all {whose} are right"
    round_words = f"{best.tokens_per_round:.1f} tokens are expected of a round"
    return f"{most}; {round_words if best.depth else 'what copies gain varies'}"
