"""Counts tokens in texts to rank the rows of a drafter's head: in the target's answers, or in the user's text.

A drafter only needs tokens that its target emits, so the target's answers rank best (VocabTrim, Goel et al., 2025). A
user's text ranks best for similar text (FR-Spec, Zhao et al., 2025). These functions split, count, and keep answers
between two exports; the caller generates the answers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from edgespec.errors import InvalidRequestError, ModelFileError, reason_of
from edgespec.files.atomic import write_json
from edgespec.files.checked import Key, Range, WrongValueError, read, read_object
from edgespec.files.disk import in_utf_8, read_bounded

T = TypeVar("T")

# Every third text is held out to judge the ranking. The ranking loses only rare tokens, and a third of the built-in
# prompts, 1700 tokens, measures a coverage of 95 % with a standard deviation of half a percent.
HELD_OUT_EVERY = 3

# Counted tokens per answer: after its first sentences an answer repeats words, while another prompt brings new words.
# The 56 built-in prompts take three minutes with a 1.5B model on two cores (31 tokens/s).
TOKENS_PER_PROMPT = 96

# A text is split into pieces of 1000 characters, about 250 tokens: long enough for a separate topic, short enough
# that a few pages give many pieces.
PIECE_CHARACTERS = 1000

# A choice, not a measurement: about ten million words, after which only the tail of a ranking changes.
MOST_TEXT_BYTES = 64_000_000

SCHEMA_VERSION = 1

# The built-in prompts give a cache of 60 kB; a far larger file is not a cache.
_LARGEST_CACHE_BYTES = 16 << 20

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAnswer:
    """One answer of a target: its ``token_ids`` in the target's vocabulary, and their ``text``."""

    prompt_id: Annotated[str, Key("prompt")]
    token_ids: tuple[Annotated[int, Range(0, _LARGEST_ID)], ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Counts of each token id in the ranking text, and in the text held out to judge the ranking."""

    ranking: Counter[int]
    held_out: Counter[int]

    @staticmethod
    def of(texts: Sequence[Sequence[int]], vocabulary_size: int) -> TokenCounts:
        """Count texts given as token ids, after ``split``."""
        ranking, held_out = split(texts)
        return TokenCounts(
            ranking=count_tokens(ranking, vocabulary_size), held_out=count_tokens(held_out, vocabulary_size)
        )

    @property
    def all(self) -> Counter[int]:
        """All counts: they choose the rows once the number of rows is decided."""
        return self.ranking + self.held_out

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(ranking=self.ranking + other.ranking, held_out=self.held_out + other.held_out)


def split(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split into (ranking items, held-out items): every third item is held out."""
    ranking = [item for number, item in enumerate(items, start=1) if number % HELD_OUT_EVERY]
    return ranking, list(items[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def count_tokens(texts: Iterable[Sequence[int]], vocabulary_size: int) -> Counter[int]:
    """Count each id of the vocabulary. Ids beyond the vocabulary do not count: a target may have a padded table."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(token for token in text if 0 <= token < vocabulary_size)
    return counts


# ------------------------------------------------------------------------------------------ texts of the user's


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises InvalidRequestError if it is not UTF-8, not readable, empty or too long."""
    try:
        text = in_utf_8(read_bounded(path, MOST_TEXT_BYTES)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="convert it first, for example with iconv"
        ) from error
    except (OSError, ValueError) as error:
        hint = "give a file of text to --trim-from" if isinstance(error, OSError) else "give a sample of the text"
        raise InvalidRequestError(f"the text {path} cannot be read: {reason_of(error)}", hint=hint) from error
    if not text.strip():
        raise InvalidRequestError(f"{path} holds no text", hint="give a file with text similar to the text to draft")
    return text


def pieces(text: str, characters: int = PIECE_CHARACTERS) -> list[str]:
    """Cut ``text`` at line ends into pieces of at least ``characters``; the last piece may be shorter.

    The joined pieces are the text. A line longer than ``characters`` is cut inside.
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
    """The inputs of cached answers. ``target`` is the model's identity, ``prompts_sha256`` the prompts' digest."""

    target: str
    prompts_sha256: str
    prompt_ids: tuple[str, ...]
    tokens_per_prompt: int

    @property
    def file_name(self) -> str:
        """The file name, different for each key."""
        return f"{hashlib.sha256(json.dumps(self._record()).encode()).hexdigest()[:32]}.json"

    def _record(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "prompts_sha256": self.prompts_sha256,
            "tokens_per_prompt": self.tokens_per_prompt,
        }


def save_answers(folder: Path, key: CountedAnswersKey, answers: Sequence[CountedAnswer]) -> None:
    """Save the answers so far in the existing ``folder``. Raises DiskSpaceError, OSError."""
    listed = [{"prompt": each.prompt_id, "token_ids": list(each.token_ids), "text": each.text} for each in answers]
    write_json(folder / key.file_name, {**key._record(), "answers": listed})


def load_answers(folder: Path, key: CountedAnswersKey) -> tuple[CountedAnswer, ...]:
    """The saved answers to the first prompts of ``key``, in order; empty if any is invalid. Raises nothing."""
    try:
        document = read_object(folder / key.file_name, _LARGEST_CACHE_BYTES)
        answers = read(tuple[CountedAnswer, ...], document.pop("answers", None))
    except (ModelFileError, WrongValueError):
        return ()
    known = tuple(each.prompt_id for each in answers) == key.prompt_ids[: len(answers)]
    short = all(len(each.token_ids) <= key.tokens_per_prompt for each in answers)
    return answers if document == key._record() and known and short else ()
