"""Print an answer: its text, then a status line with the speed and the gain; all counters are for ``/stats``."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.cli.terminal.output import (
    EXACTNESS_WORDS,
    NARROWEST,
    cells,
    note,
    print_json,
    stderr_columns,
    stdout_is_rich,
    wrapped,
)
from edgespec.cli.terminal.reading import ReadingLine
from edgespec.engine.answer import Generation
from edgespec.engine.events import Done, Notice, Reading, Text
from edgespec.files.disk import counted

if TYPE_CHECKING:
    from edgespec.cli.terminal.answer_view import AnswerView

_SEPARATOR = " · "

# Width of the column with the names of the counters.
STATS_COLUMNS = 15

# Tokens of an answer whose ratio to plain decoding is shown: that of a shorter one is mostly noise.
FEWEST_FOR_A_RATIO = 32

# Codes of reasons that begin after a model is loaded; the others are in /plan.
_CHANGED = {"drafter_failed"}


def follow_answer(
    generation: Generation, *, as_json: bool, guesses: bool = False, markdown: bool = True, begun: str = ""
) -> Done:
    """Stream the text to stdout (not with ``as_json``) and notices to stderr; return the last event.

    On a terminal a line says how much of a long prompt is read, and the text wraps between words and has colours.
    ``guesses`` shades guessed tokens. Without ``markdown`` the text is not coloured as Markdown. ``begun`` is the
    text that the answer continues.
    """
    view = _view(guesses, markdown, begun) if sys.stdout.isatty() and not as_json else None
    reading = ReadingLine(quiet=as_json)
    try:
        with generation:
            for event in generation:
                if isinstance(event, Reading):
                    reading.show(event)
                    continue
                reading.stop()
                if isinstance(event, Text) and not as_json:
                    _write(event.text if view is None else view.feed(event))
                elif isinstance(event, Notice):
                    note(event.text, dim=True)
                elif isinstance(event, Done):
                    done = event
    finally:  # also if the answer failed
        reading.stop()
        if view is not None:
            _write(view.flush())
    return done


def _view(guesses: bool, markdown: bool, begun: str) -> AnswerView:
    from edgespec.cli.terminal.answer_view import AnswerView

    return AnswerView(
        lambda: max(NARROWEST, shutil.get_terminal_size().columns),
        colours=stdout_is_rich(),
        markdown=markdown,
        guesses=guesses,
        begun=begun,
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class StatusLine:
    """The status line after each answer of a session, on a terminal. It says when a drafter was lost."""

    def __init__(
        self, *, reasons: bool = True, measuring: bool = False, verbose: bool = False, quiet: bool = False
    ) -> None:
        """Without ``reasons`` the line gives no reason, because the user asked for plain decoding.

        ``measuring``: edgespec measures the machine between answers, so the user need not run calibrate.
        ``verbose`` adds guesses, exactness, seed, and once each reason why there are no guesses, and writes the line
        also without a terminal; ``quiet`` writes none.
        """
        self._reasons, self.measuring = reasons, measuring
        self._verbose, self._quiet = verbose, quiet
        self._said: set[str] = set()

    def print(self, done: Done, instead: str | None = None) -> None:
        """End the answer on stdout and write the status line, or ``instead``, to stderr, wrapped to the terminal."""
        sys.stdout.write("\n")
        sys.stdout.flush()
        columns = stderr_columns()
        if not self._quiet and (self._verbose or columns is not None):
            note(instead or self.text(done, columns), dim=True)

    def text(self, done: Done, columns: int | None = None) -> str:
        """For example ``48 tok/s · 1.6x``.

        ``columns`` wraps the line between its parts, and within a part that is longer than a line.
        """
        parts = [*(_all_parts(done) if self._verbose else _parts(done)), *self._reason(done)]
        if columns is None:
            return _SEPARATOR.join(parts)
        lines = [parts[0]]
        for part in parts[1:]:
            if cells(lines[-1] + _SEPARATOR + part) <= columns:
                lines[-1] += _SEPARATOR + part
            else:
                lines += wrapped(part, columns, "  ")
        return "\n".join(lines)

    def _reason(self, done: Done) -> list[str]:
        """Why no drafter, or not every drafter, guesses; empty if an earlier line gave the same reason.

        Unless ``verbose``, only what has changed since the model was loaded is a reason.
        """
        if not self._verbose and done.speculation_off_code not in _CHANGED:
            return []
        stats = done.stats
        reason = done.speculation_off or ("" if stats.proposed or not stats.rounds else "nothing to guess from yet")
        if self.measuring and done.speculation_off_code == "not_calibrated":
            reason = "measuring this machine between answers; guessing starts when that is done"
        key = re.sub(r"[0-9.]+", "#", reason)  # a reason that differs only in its figures is not repeated
        if not self._reasons or not reason or key in self._said:
            return []
        self._said.add(key)
        return [reason if stats.proposed else f"no guesses: {reason}"]


def print_done(done: Done, status: StatusLine, *, as_json: bool, instead: str | None = None) -> None:
    """Print what follows the text: the status line or ``instead`` on stderr, or the JSON object on stdout."""
    if as_json:
        print_json(generate_json(done))
    else:
        status.print(done, instead)


def _parts(done: Done) -> list[str]:
    """The speed, what guessing gained, and what is not as usual."""
    speed = done.stats.decode_tokens_per_s
    parts = [counted(done.stats.emitted_tokens, "token") if speed is None else f"{rounded(speed)} tok/s"]
    times = _gain(done)
    if times is not None:
        parts.append(f"{times:.1f}x")
    if not done.same_text or (done.stats.proposed and done.plan.exactness != "W"):
        parts.append(_same_text(done))
    return parts + _ending(done)


def rounded(speed: float) -> str:
    """Tokens a second with two or more digits."""
    return f"{speed:.1f}" if speed < 9.95 else f"{speed:.0f}"


def _gain(done: Done) -> float | None:
    """How many times as fast as without guesses; None for short answers, without a guess, or if plain decoding was
    not timed.
    """
    stats = done.stats
    if not stats.proposed or not done.plain_tokens_per_s or stats.emitted_tokens < FEWEST_FOR_A_RATIO:
        return None
    return stats.times_plain(done.plain_tokens_per_s)


def _ending(done: Done) -> list[str]:
    ways = {"cancelled": ["stopped"], "length": ["cut at the token limit"]}
    return ways.get(done.finish_reason, [])


def _all_parts(done: Done) -> list[str]:
    stats = done.stats
    speed = stats.decode_tokens_per_s
    parts = [counted(stats.emitted_tokens, "token") if speed is None else f"{speed:.1f} tok/s"]
    if stats.proposed:
        times = _gain(done)
        if times is not None:
            parts.append(_times(times))
        parts += [_guesses(done), _same_text(done)]
    if not done.sampling.greedy:
        parts.append(f"seed {done.sampling.seed}")
    return parts + _ending(done)


def _times(ratio: float) -> str:
    shown = f"{ratio:.2f}"
    if float(shown) == 1:
        return "as fast as without"
    return f"{shown}x faster than without" if ratio > 1 else f"{shown}x the speed without"


_COPIES = {
    "lookup": "copies",
    "history": "earlier answers",
    "datastore": "learned text",
    "forced": "the answer's form",
}


def _guesses(done: Done) -> str:
    stats = done.stats
    guesses = f"{stats.accepted} of {counted(stats.proposed, 'guess', 'guesses')} right"
    # Draft models come first.
    sources = sorted(stats.rounds_by_source, key=lambda source: source != "model")
    return f"{guesses} ({' + '.join(_drafter(done, source) for source in sources)})" if sources else guesses


def _drafter(done: Done, source: str) -> str:
    """A short name for a drafter: where copies are from, or a draft model's size if its name contains one."""
    if source != "model":
        return _COPIES.get(source, source)
    name = done.plan.drafter.model if done.plan.drafter is not None else None
    size = re.search(r"(?<![\w.])\d+(?:\.\d+)?[bm](?![a-z0-9])", name or "", re.IGNORECASE)
    return f"{size.group().upper()} drafter" if size else "drafter"


def _same_text(done: Done) -> str:
    if done.same_text:
        return EXACTNESS_WORDS[done.plan.exactness]
    return "same probabilities as without guessing, but not the same text"


def stats_lines(done: Done) -> list[str]:
    """The counters of an answer as lines of text, rounded and with units."""
    stats = done.stats
    cached = f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""
    rows = [
        ("prompt", counted(stats.prompt_tokens, "token") + cached),
        ("answer", counted(stats.emitted_tokens, "token") + _per_second(stats.decode_tokens_per_s)),
        ("first token", _seconds(stats.ttft_s)),
        ("decoding", _seconds(stats.decode_s)),
        ("  target", _seconds(stats.verify_s)),
        ("  drafters", _seconds(stats.draft_s)),
    ]
    if stats.tokens_per_round is not None:
        rows.append(("rounds", f"{stats.rounds}, {stats.tokens_per_round:.2f} tokens/round"))
    if stats.proposed:
        share = f" ({100 * stats.accepted / stats.proposed:.0f} %)"
        rows.append(("guesses", f"{stats.accepted} of {stats.proposed} right{share}"))
        by_source = [(_drafter(done, source), count) for source, count in stats.rounds_by_source.items()]
        rows.append(("guessed by", _in_rounds(by_source)))
        rows.append(("right in a row", _in_rounds(sorted(stats.accepted_lengths.items()))))
        times = _gain(done)
        rows.append(("gain", "not measured" if times is None else _times(times)))
        rows.append(("text", _same_text(done)))
    if stats.invalid_proposals:
        rows.append(("malformed", counted(stats.invalid_proposals, "guess", "guesses")))
    if not done.sampling.greedy:
        rows.append(("seed", str(done.sampling.seed)))
    if done.speculation_off:
        rows.append(("no guesses" if not stats.proposed else "idle drafter", done.speculation_off))
    return [f"{name:{STATS_COLUMNS}}{value}" for name, value in rows]


def _in_rounds(rounds: Sequence[tuple[object, int]]) -> str:
    """Counts of rounds in words, for example ``none in 7 rounds, 1 in 20``."""
    first, *others = rounds or [("none", 0)]
    words = [f"{first[0] or 'none'} in {counted(first[1], 'round')}"]
    return ", ".join(words + [f"{what} in {count}" for what, count in others])


def _per_second(speed: float | None) -> str:
    return "" if speed is None else f", {speed:.1f} tok/s"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def generate_json(done: Done) -> dict[str, Any]:
    """The JSON object of ``generate`` (docs/json.md)."""
    return {
        "text": done.text,
        "reasoning": done.reasoning,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "stats": done.stats.as_json(),
        "plan": done.plan.as_json(),
        "rule": done.sampling.rule,
        "seed": done.sampling.seed,
        "same_text_as_plain": done.same_text and done.plan.exactness == "W",
        "speculation_off": done.speculation_off,
        "speculation_off_code": done.speculation_off_code,
        "plain_tokens_per_s": done.plain_tokens_per_s,
    }
