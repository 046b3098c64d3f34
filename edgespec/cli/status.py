"""The one line after an answer: how fast, how, and how exact; or why speculation is off."""

from __future__ import annotations

from typing import Any

from edgespec.events import Done
from edgespec.planning.plan import Plan


def status_line(done: Done) -> str:
    """For example ``31.4 tok/s · 1.35x plain · 2.1 tokens/round · lookup+model on cpu · exact (W)``."""
    stats, plan = done.stats, done.plan
    speed = stats.decode_tokens_per_s
    parts = [f"{stats.emitted_tokens} tokens" if speed is None else f"{speed:.1f} tok/s"]
    speculated = stats.proposed > 0
    if speculated and speed is not None and done.plain_tokens_per_s:
        parts.append(f"{speed / done.plain_tokens_per_s:.2f}x plain")
    if speculated and stats.tokens_per_round is not None:
        parts.append(f"{stats.tokens_per_round:.2f} tokens/round")
        sources = "+".join(stats.rounds_by_source)
        model = plan.drafter.model if plan.drafter is not None and "model" in stats.rounds_by_source else None
        parts.append(f"drafter {sources}" + (f" ({model})" if model else ""))
    parts.append(f"{plan.target.model} on {plan.target.device}")
    parts.append(exactness_words(plan))
    if done.finish_reason == "cancelled":
        parts.append("stopped")
    elif done.finish_reason == "length":
        parts.append("cut at the token limit")
    if done.speculation_off is not None:
        parts.append(f"plain decoding: {done.speculation_off}" if not speculated else done.speculation_off)
    elif not speculated and plan.mode == "plain":
        parts.append(f"plain decoding: {plan.reasons[-1].removeprefix('plain: ')}")
    return " · ".join(parts)


def exactness_words(plan: Plan) -> str:
    """The level of exactness, short."""
    return {"W": "exact (W)", "N": "near (N)", "D": "not probed (D)"}[plan.exactness]


def generate_json(done: Done) -> dict[str, Any]:
    """CLI.md's ``generate`` object."""
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "stats": done.stats.as_json(),
        "plan": done.plan.as_json(),
        "speculation_off": done.speculation_off,
        "plain_tokens_per_s": done.plain_tokens_per_s,
    }
