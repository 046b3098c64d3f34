"""The history: a model's answers in a file, kept to guess later answers from."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from edgespec.errors import EdgespecError
from edgespec.files.home import Home
from edgespec.files.stored_text import (
    DamagedTextError,
    StoredText,
    Text,
    count_tokens,
    open_or_set_aside,
    set_aside_words,
)

# About a thousand answers of 250 tokens: weeks of use. The file of 2 MB is written whole after each answer: 60 ms of
# one core of an AMD EPYC (Zen 5).
MOST_TOKENS = 2**18

_WHAT = "the history of answers"

Stamp = tuple[int, int, int]


def answers_path(home: Home, vocabulary: bytes) -> Path:
    """The file with the answers of models with this vocabulary."""
    return home.answers / f"{vocabulary.hex()}.text"


def answers_lock(home: Home) -> AbstractContextManager[None]:
    """The lock under which files of answers are changed. Raises EdgespecError, OSError."""
    return home.locked("answers", "writing the history")


class KeptAnswers:
    """The answers of one vocabulary, oldest first in a file of at most ``most_tokens``.

    The oldest answers make room for new ones. Processes share the file: each adds to what the others wrote. Without
    room on the disk, or a home that can be written, answers are kept in memory only. No prompts are kept.
    """

    def __init__(
        self, home: Home, vocabulary: bytes, vocabulary_size: int, *, most_tokens: int = MOST_TOKENS
    ) -> None:
        self.path = answers_path(home, vocabulary)
        self._home = home
        self._vocabulary = vocabulary
        self._size = vocabulary_size
        self._most = most_tokens
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Text] = []  # answers that no job of the pool has taken yet
        self._scheduled = False  # whether a job will take them
        self._closed = False
        self.text: StoredText | None = None
        self.notice: str | None = None
        self._may_replace = True
        self._stamp: Stamp | None = None  # of the file that was read or written last
        self._read(_stamp(self.path))

    def add(self, tokens: Sequence[int]) -> None:
        """Keep an answer, given as token ids. Returns immediately: a thread sorts and writes.

        Answers that come while it writes are written together, so that at most ``most_tokens`` wait.
        """
        sound = np.array([token for token in tokens if 0 <= token < self._size], dtype=np.uint32)
        if not len(sound):
            return
        with self._lock:
            if self._closed:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgespec-history")
            self._waiting.append(Text(sound[-(self._most - 1) :]))
            self._shorten(self._waiting)
            if not self._scheduled:
                with contextlib.suppress(RuntimeError):  # no thread can be started, or the interpreter is ending
                    self._pool.submit(self._add_waiting)
                    self._scheduled = True

    def _add_waiting(self) -> None:
        with self._lock:
            answers, self._waiting, self._scheduled = self._waiting, [], False
        kept = False
        try:
            with answers_lock(self._home):
                self._read_if_changed()
                self.text, kept = self._with(answers), True
                if self._may_replace:
                    self._home.create(self._home.answers)
                    self.text.save(self.path)
                    self._stamp = _stamp(self.path)
        except (OSError, EdgespecError):
            # A full disk, a home that cannot be written, a lock held for long: the answer is kept in memory.
            if not kept:
                self.text = self._with(answers)

    def _read_if_changed(self) -> None:
        """Take what another process wrote, or that the file is gone."""
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            self._read(stamp)

    def _read(self, stamp: Stamp | None) -> None:
        most = max(self._most, MOST_TOKENS)  # what may have been kept with another limit
        text, notice = open_or_set_aside(self.path, self._vocabulary, self._size, _WHAT, most_tokens=most)
        could = self._may_replace
        self._may_replace = text is not None or not self.path.exists()  # else it could not be read, and is read again
        if self._may_replace:
            self.text, self._stamp = text, stamp
        if self._may_replace or could:  # each failure would say the same
            self.notice = notice or self.notice

    def _shorten(self, texts: list[Text]) -> None:
        """Drop the oldest until the others have at most ``most_tokens``."""
        while count_tokens(texts) > self._most:
            del texts[0]

    def _with(self, answers: Sequence[Text]) -> StoredText:
        try:
            texts = [] if self.text is None else self.text.all_texts()
        except DamagedTextError as error:
            texts = []
            self.notice = set_aside_words(self.path, _WHAT, error)
        texts += answers
        self._shorten(texts)
        return StoredText.of(self._vocabulary, self._size, texts)

    def take_notice(self) -> str | None:
        """What became of a damaged file, once."""
        notice, self.notice = self.notice, None
        return notice

    def close(self) -> None:
        """Wait until every answer is written. Idempotent."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            pool.shutdown(wait=True)


def _stamp(path: Path) -> Stamp | None:
    """What changes with the file; None if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
