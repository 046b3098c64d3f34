"""An answer as it is shown: its text, then one line that says how fast, how, and how exact it was."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

from edgespec.cli.output import note, print_json, stderr_columns
from edgespec.engine.events import Done, Notice, Text
from edgespec.engine.generation import Generation

_SEPARATOR = " · "


def follow_answer(generation: Generation, *, as_json: bool) -> Done:
    """Write the text to stdout as it comes (``as_json``: none) and notices to stderr; returns the last event."""
    with generation:
        for event in generation:
            if isinstance(event, Text) and not as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Notice):
                note(event.message, dim=True)
            elif isinstance(event, Done):
                done = event
    return done


def print_done(done: Done, *, as_json: bool) -> None:
    """What comes after the text: the status line on stderr, or the JSON object."""
    if as_json:
        print_json(generate_json(done))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        note(status_line(done, stderr_columns()), dim=True)


def status_line(done: Done, width: int | None = None) -> str:
    """For example ``31.4 tok/s · 1.35x plain · 2.1 tokens/round · drafter lookup · qwen on cpu · exact (W)``.

    With a ``width`` in columns the line is broken between its parts, never inside a word.
    """
    parts = _parts(done)
    if width is None:
        return _SEPARATOR.join(parts)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(_SEPARATOR) + len(part) <= width:
            lines[-1] += _SEPARATOR + part
        else:
            lines += textwrap.wrap(part, max(20, width), initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _parts(done: Done) -> list[str]:
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
    parts.append(exactness_words(done))
    if not done.sampling.greedy:
        parts.append(f"seed {done.sampling.seed}")
    if done.finish_reason == "cancelled":
        parts.append("stopped")
    elif done.finish_reason == "length":
        parts.append("cut at the token limit")
    if speculated:
        parts += [done.speculation_off] if done.speculation_off else []
    else:
        parts.append(f"plain decoding: {done.speculation_off or 'no drafter had anything to propose'}")
    return parts


def exactness_words(done: Done) -> str:
    """The level of exactness, short."""
    if not done.same_text:
        return "same distribution, not the same text"
    return {"W": "exact (W)", "N": "near (N)", "D": "not probed (D)"}[done.plan.exactness]


def generate_json(done: Done) -> dict[str, Any]:
    """CLI.md's ``generate`` object."""
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "stats": done.stats.as_json(),
        "plan": done.plan.as_json(),
        "rule": done.sampling.rule,
        "seed": done.sampling.seed,
        "same_text_as_plain": done.same_text and done.plan.exactness == "W",
        "speculation_off": done.speculation_off,
        "plain_tokens_per_s": done.plain_tokens_per_s,
    }
