"""Counters of the server in Prometheus' text format. Nothing of a request's content is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from edgespec.engine.events import Done

_HELP = {
    "requests_total": ("counter", "Requests by path and status; a stream that failed has its error's."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "cached_tokens_total": ("counter", "Tokens of prompts that kept caches already held."),
    "generated_tokens_total": ("counter", "Tokens of answers."),
    "drafted_tokens_total": ("counter", "Tokens that drafters guessed."),
    "accepted_tokens_total": ("counter", "Guessed tokens that the model accepted."),
    "decode_seconds_total": ("counter", "Time from the first to the last token of answers."),
    "first_token_seconds": ("summary", "Time from the start of a request's turn to its first token."),
    "requests_running": ("gauge", "Requests that are answered now."),
    "requests_waiting": ("gauge", "Requests that wait for a slot."),
    "sessions_kept": ("gauge", "Conversations kept between requests."),
    "connections": ("gauge", "Open connections."),
    "model_loaded": ("gauge", "Models that are loaded."),
    "model_loads_total": ("counter", "Times that a model was loaded."),
}


class Metrics:
    """Sums over all requests since the start."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"decode_seconds_total": 0.0, "first_token_seconds_sum": 0.0}

    def count(self, path: str, status: int, answers: Sequence[Done], *, choices: int = 1, begun: int = 0) -> None:
        """Count one request. ``path`` is a route's own, so that there are few of them.

        A prompt counts once, for all of its ``choices``. Without answers it failed: ``begun`` tokens came before.
        """
        self._requests[path, status] += 1
        for done in answers[::choices]:
            self._sums["prompt_tokens_total"] += done.stats.prompt_tokens
            self._sums["cached_tokens_total"] += done.stats.cached_tokens
        if not answers:
            self._sums["generated_tokens_total"] += begun
        for done in answers:
            stats = done.stats
            self._sums["generated_tokens_total"] += stats.emitted_tokens
            self._sums["drafted_tokens_total"] += stats.proposed
            self._sums["accepted_tokens_total"] += stats.accepted
            self._seconds["decode_seconds_total"] += stats.decode_s or 0.0
            if stats.ttft_s is not None:
                self._sums["first_token_seconds_count"] += 1
                self._seconds["first_token_seconds_sum"] += stats.ttft_s

    def text(self, gauges: Mapping[str, int]) -> str:
        """All values. ``gauges`` are those that are known now."""
        lines = list[str]()
        for name, (kind, about) in _HELP.items():
            lines += [f"# HELP edgespec_{name} {about}", f"# TYPE edgespec_{name} {kind}"]
            if name == "requests_total":
                lines += [
                    f'edgespec_{name}{{path="{path}",status="{status}"}} {count}'
                    for (path, status), count in sorted(self._requests.items())
                ]
            elif kind == "summary":
                lines.append(f"edgespec_{name}_sum {self._seconds[f'{name}_sum']:.6f}")
                lines.append(f"edgespec_{name}_count {self._sums[f'{name}_count']}")
            elif name in self._seconds:
                lines.append(f"edgespec_{name} {self._seconds[name]:.6f}")
            else:
                lines.append(f"edgespec_{name} {gauges.get(name, self._sums[name])}")
        return "\n".join(lines) + "\n"
