"""A log of what target and drafter predict at each token of an answer, for comparing drafting methods offline.

The format is JSON Lines. The first line is the header, each other line is one answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from edgespec.bench.suite import Prompt
from edgespec.decoding.sampling import Sampling
from edgespec.decoding.scores import Logits, log_softmax, teacher_forced_rows
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.errors import InvalidRequestError, reason_of
from edgespec.interfaces.drawing import highest
from edgespec.interfaces.model import Model

SCHEMA_VERSION = 1

# Predictions kept of each token. The drafter's fifth choice is the target's token in 1 % of positions
# (docs/results/drafting.md).
MOST_PREDICTIONS = 4

Predictions = list[tuple[int, float]]


def write_draft_log(
    engine: Engine,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    max_tokens: int = 96,
    sampling: Sampling | None = None,
) -> Generator[float, None, None]:
    """Answer each prompt and write the log to ``path``; yields the fraction done.

    Each answer is a separate conversation. ``sampling`` is greedy by default. Raises InvalidRequestError if the file
    cannot be written, else what generating raises.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            _write_line(file, header(engine, len(prompts)))
            for number, line in enumerate(logged_answers(engine, prompts, max_tokens, sampling or Sampling()), 1):
                _write_line(file, line)
                yield number / len(prompts)
    except OSError as error:
        raise InvalidRequestError(f"the log {path} cannot be written: {reason_of(error)}") from error


def header(engine: Engine, answers: int) -> dict[str, Any]:
    """The first line. ``drafter`` is None without a drafting model."""
    drafter = _drafting_model(engine)
    return {
        "schema_version": SCHEMA_VERSION,
        "target": engine.pair.target.facts.name,
        "drafter": None if drafter is None else drafter.facts.name,
        "answers": answers,
        "predictions": MOST_PREDICTIONS,
    }


def logged_answers(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """One line for each prompt.

    ``prompt_tokens`` and ``token_ids`` are the token ids of prompt and answer. ``target`` and ``drafter`` hold, for
    each token of the answer, the most probable tokens given all tokens before it: pairs of id and probability, best
    first. The probabilities are those before temperature and penalties.
    """
    drafter = _drafting_model(engine)
    raw = not engine.has_chat_template
    with engine.session() as session:
        for prompt in prompts:
            asked = engine.pair.prompts.request_tokens(prompt.prompt)
            session.clear()
            longest = prompt.longest(max_tokens)
            events = session.generate(prompt.prompt, max_tokens=longest, sampling=sampling, raw=raw)
            answer = list(next(event for event in events if isinstance(event, Done)).token_ids)
            yield {
                "id": prompt.id,
                "category": prompt.category,
                "prompt_tokens": asked,
                "token_ids": answer,
                "target": predictions(engine.pair.target, asked, answer),
                "drafter": None if drafter is None else predictions(drafter, asked, answer),
            }


def predictions(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> list[Predictions]:
    """The most probable tokens of ``model`` at each token of ``answer``, given the tokens before it."""
    found: list[Predictions] = []
    if not answer:
        return found
    tokens = len(prompt) + len(answer)
    room = max(tokens, min(2 * tokens, model.facts.trained_context_length))  # a translated text takes more tokens
    with closing(model.open(room)) as sequence:
        if len(prompt) > 1:
            sequence.forward(prompt[:-1], 0)
        for rows in teacher_forced_rows(sequence, [prompt[-1], *answer[:-1]]):
            found += [best_of(row) for row in rows]
    return found


def best_of(row: Logits, count: int = MOST_PREDICTIONS) -> Predictions:
    """The ``count`` most probable tokens of a row of scores, float32 (vocabulary,), with their probabilities.

    Ties go to the lowest id. Tokens that the model did not score are left out.
    """
    logs = log_softmax(row)
    best = highest(logs, count)
    return [(int(token), round(math.exp(logs[token]), 6)) for token in best if np.isfinite(logs[token])]


def _drafting_model(engine: Engine) -> Model | None:
    """The plan's drafting model, loaded; None without one. Raises what loading raises."""
    engine.load_drafter()
    return None if engine.pair.pool.drafter is None else engine.pair.pool.drafter_in_targets_tokens()


def _write_line(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
