"""Texts whose tokens are counted to rank the rows of a drafter's head: what its target writes, or the user's own.

A drafter only ever has to say what its target says, so the target's own answers rank best (VocabTrim, Goel et al.,
2025); a text of the user's kind ranks for that text (FR-Spec, Zhao et al., 2025). Who lets the target answer is not
decided here: these functions split, count, and keep answers between two exports.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import InvalidRequestError
from edgespec.files.atomic import write_json
from edgespec.files.disk import megabytes

T = TypeVar("T")

# Every third text judges the ranking of the others. A ranking loses little by that: rare tokens are what it lacks
# either way, and a third of our prompts, 1700 tokens, knows a coverage of 95 % to half a percent (one deviation).
HELD_OUT_EVERY = 3

# Tokens of each answer that are counted: past its first sentences an answer repeats the words it has found, while
# another prompt brings new ones. Our 56 prompts take three minutes at the 31 tokens/s of a 1.5B model on two cores.
TOKENS_PER_PROMPT = 96

# A text is held out in pieces of so many characters, some 250 tokens: long enough to have a topic of its own, short
# enough that a few pages are many pieces.
PIECE_CHARACTERS = 1000

# A choice, not a measurement: some ten million words, after which only the tail of a ranking still moves.
MOST_TEXT_BYTES = 64_000_000

SCHEMA_VERSION = 1

# Our own prompts make a cache of 60 kB; anything far larger is not one, and is not worth reading.
_LARGEST_CACHE_BYTES = 16 << 20

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAnswer:
    """One answer of a target: its ``token_ids`` in the target's vocabulary, and the ``text`` they stand for."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How often each token id occurs in the text that ranks, and in the text held out to judge the ranking."""

    ranking: Counter[int]
    held_out: Counter[int]

    @staticmethod
    def of(texts: Sequence[Sequence[int]], vocabulary_size: int) -> TokenCounts:
        """Counts of texts given as token ids, split as ``split`` does."""
        ranking, held_out = split(texts)
        return TokenCounts(
            ranking=count_tokens(ranking, vocabulary_size), held_out=count_tokens(held_out, vocabulary_size)
        )

    @property
    def all(self) -> Counter[int]:
        """Everything counted: what the rows are chosen by once their number is settled."""
        return self.ranking + self.held_out

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(ranking=self.ranking + other.ranking, held_out=self.held_out + other.held_out)


def split(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """(the items that rank, those held out): always the same ones, every third is held out."""
    ranking = [item for place, item in enumerate(items, start=1) if place % HELD_OUT_EVERY]
    return ranking, list(items[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def count_tokens(texts: Iterable[Sequence[int]], vocabulary_size: int) -> Counter[int]:
    """How often each id of the vocabulary occurs. Ids past it do not count: a target may have padded its table."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(token for token in text if 0 <= token < vocabulary_size)
    return counts


# ------------------------------------------------------------------------------------------ texts of the user's


def read_text(path: Path) -> str:
    """A file of UTF-8 text. Raises InvalidRequestError if it is none, cannot be read, or is far too long."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # before opening: opening a named pipe would wait for ever
            raise InvalidRequestError(f"{path} is not a file", hint="give a file of text to --trim-from")
        if status.st_size > MOST_TEXT_BYTES:
            raise InvalidRequestError(
                f"{path} has {megabytes(status.st_size)}, and at most {megabytes(MOST_TEXT_BYTES)} are counted",
                hint="a sample of it ranks as well",
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="convert it first, for example with iconv"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(
            f"the text {path} cannot be read: {reason}", hint="give a file of text to --trim-from"
        ) from error
    if not text.strip():
        raise InvalidRequestError(f"{path} holds no text", hint="give a file with text of the kind to be drafted")
    return text


def pieces(text: str, characters: int = PIECE_CHARACTERS) -> list[str]:
    """``text`` cut into pieces of at least ``characters``, the last one excepted, at line ends where there are any.

    Together they are the text. A line longer than that is cut inside.
    """
    found: list[str] = []
    parts: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), characters):
            part = line[start : start + characters]
            parts.append(part)
            size += len(part)
            if size >= characters:
                found.append("".join(parts))
                parts, size = [], 0
    return [*found, "".join(parts)] if parts else found


# ---------------------------------------------------------------------------------------- kept between exports


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAnswersKey:
    """What answers depend on. ``target`` is its identity, ``prompts_sha256`` that of the prompts ``prompt_ids``."""

    target: str
    prompts_sha256: str
    prompt_ids: tuple[str, ...]
    tokens_per_prompt: int

    @property
    def file_name(self) -> str:
        """Another one for each key."""
        return f"{hashlib.sha256(json.dumps(self._record()).encode()).hexdigest()[:32]}.json"

    def _record(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "prompts_sha256": self.prompts_sha256,
            "tokens_per_prompt": self.tokens_per_prompt,
        }


def save_answers(folder: Path, key: CountedAnswersKey, answers: Sequence[CountedAnswer]) -> None:
    """Keep the answers so far in ``folder``, which exists. Raises DiskSpaceError, OSError."""
    listed = [{"prompt": each.prompt_id, "token_ids": list(each.token_ids), "text": each.text} for each in answers]
    write_json(folder / key.file_name, {**key._record(), "answers": listed})


def load_answers(folder: Path, key: CountedAnswersKey) -> tuple[CountedAnswer, ...]:
    """The answers kept for ``key``, to its first prompts in order; none if any is not sound. Raises nothing."""
    path = folder / key.file_name
    try:
        if path.stat().st_size > _LARGEST_CACHE_BYTES:
            return ()
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(document, dict) or any(document.get(name) != value for name, value in key._record().items()):
        return ()
    answers = document.get("answers")
    if not isinstance(answers, list):
        return ()
    found = [_counted_answer(answer, key) for answer in answers]
    sound = tuple(each for each in found if each is not None)
    if len(sound) != len(found) or tuple(each.prompt_id for each in sound) != key.prompt_ids[: len(found)]:
        return ()
    return sound


def _counted_answer(answer: Any, key: CountedAnswersKey) -> CountedAnswer | None:
    if not isinstance(answer, dict):
        return None
    prompt_id, ids, text = answer.get("prompt"), answer.get("token_ids"), answer.get("text")
    if not isinstance(prompt_id, str) or not isinstance(text, str) or not isinstance(ids, list):
        return None
    if len(ids) > key.tokens_per_prompt or not all(type(token) is int and 0 <= token <= _LARGEST_ID for token in ids):
        return None
    return CountedAnswer(prompt_id=prompt_id, token_ids=tuple(ids), text=text)
