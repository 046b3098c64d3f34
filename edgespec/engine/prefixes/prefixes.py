"""The prefixes of one target: filled into caches before an answer, and written between answers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.engine.prefixes.beginnings import (
    LEAST_TOKENS,
    Tokens,
    as_tokens,
    read_beginnings,
    write_beginnings,
)
from edgespec.engine.prefixes.stored import (
    beginnings_path,
    longest_prefix,
    opened,
    prefixes_lock,
    remove,
    write_prefix,
)
from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError, SessionFileError, reason_of
from edgespec.files.disk import readable_bytes
from edgespec.files.home import Home
from edgespec.files.provenance import NO_MAC, mac_in
from edgespec.interfaces.model import ModelFacts, SavableSequence
from edgespec.runtimes.thread import WorkerThread

# A prefix is read from the disk if that saves an eighth of its tokens: reading a token's cache takes a tenth of the
# time of computing it for the smallest models, and a hundredth for one of 1.5 billion weights
# (docs/results/server.md).
_PART_WORTH_READING = 8

# Prompts that wait to be remembered and beginnings that wait to be written, at 80 kB for 20 000 tokens.
_MOST_WAITING = 32


class CacheHolder(Protocol):
    """A session whose cache may hold a beginning."""

    def cache_sizes(self, owner: str, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The number of parts of these tokens' cache, and the bytes of each; None unless the owner's cache has them.

        Raises InvalidRequestError during an answer, ClosedError.
        """

    def cache_part(self, tokens: Sequence[int], part: int) -> bytes:
        """One of these parts. Raises InvalidRequestError during an answer or if the cache changed, ClosedError."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The tokens of a prompt, or of a beginning, whose they are, and the key that its hashes are made by."""

    owner: str
    key: bytes
    tokens: Tokens


class Prefixes:
    """The prefixes of one target. Thread-safe."""

    def __init__(self, home: Home, facts: ModelFacts) -> None:
        self._home = home
        self._facts = facts
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._keys: dict[tuple[str, str], bytes] = {}
        self._answered: list[_Prompt] = []
        self._wanted: list[_Prompt] = []
        self._notices: list[str] = []
        self._failed = False  # said once until a prefix is written
        self._reader = WorkerThread("edgespec-prefixes", lambda: None)  # reads and hashes a part ahead

    def _key(self, owner: str, angles: str) -> bytes | None:
        """What the hashes of an owner's tokens are made by, for caches that are the same bits; None without a secret.

        By the home's secret, so that a file's name tells nothing of its owner's API key.
        """
        if (owner, angles) not in self._keys:
            about = {"model": self._facts.sha256, "class": self._facts.cache_class, "angles": angles, "owner": owner}
            digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
            key = NO_MAC if self._facts.sha256 is None else mac_in(self._home, digest)
            if key == NO_MAC:  # the next call may read the secret
                return None
            self._keys[owner, angles] = key
        return self._keys[owner, angles]

    # ------------------------------------------------------------------------------------------- reading

    def fill(self, owner: str, tokens: Sequence[int], target: SavableSequence) -> int:
        """Put the longest prefix of ``tokens`` into the cache if it holds enough more of them than the cache does.

        Returns the tokens in the cache. On the target's thread, before an answer.
        """
        held = target.length
        if not _is_worth(len(tokens) - 1, held) or (key := self._key(owner, target.angles)) is None:
            return held
        own = as_tokens(tokens)
        found = longest_prefix(self._home, key, own)
        if found is None or not _is_worth(found.length, held):
            return held
        try:
            with opened(self._home, found, own) as file:
                if (file.part_count, file.part_bytes) != target.part_sizes(found.length):
                    raise SessionFileError(found.path, "its cache is not one of this model")
                target.rewind(0)
                target.restore(self._read_ahead(file.parts()), found.length)
        except CancelledError:  # the answer ends without a token
            pass
        except (EdgespecError, OSError) as error:
            # One that could not be read may be whole, and readable the next time.
            if isinstance(error, SessionFileError) and not isinstance(error.__cause__, OSError):
                remove(found.path)
            self._notices.append(f"a kept beginning is read again: {reason_of(error)}")
        return target.length

    def _read_ahead(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """The parts; each is read and hashed while the one before it is copied."""
        following = self._reader.submit(lambda: next(parts, None))
        while (part := following.result()) is not None:
            following = self._reader.submit(lambda: next(parts, None))
            yield part

    # ------------------------------------------------------------------------------------------- writing

    def answered(self, owner: str, tokens: Sequence[int], target: SavableSequence) -> None:
        """A conversation's prompt was answered. Returns immediately."""
        if len(tokens) <= LEAST_TOKENS or (key := self._key(owner, target.angles)) is None:
            return
        with self._lock:
            self._answered = [*self._answered, _Prompt(owner, key, as_tokens(tokens))][-_MOST_WAITING:]

    def keep(self, holders: Iterable[CacheHolder], stop: threading.Event) -> tuple[str, ...]:
        """Remember the prompts that were answered, and write what two conversations shared, while no answer runs.

        Ends soon after ``stop`` is set; the next call begins again. Returns what a log should say.
        """
        if not self._writing.acquire(blocking=False):
            return ()
        try:
            self.remember()
            while self._wanted and not stop.is_set():
                try:
                    self._write(self._wanted[-1], holders, stop)
                except (CancelledError, InvalidRequestError):  # a request came
                    break
                except (EdgespecError, OSError) as error:
                    self._say_once(f"the beginning of two conversations is not kept: {reason_of(error)}")
                del self._wanted[-1]
        finally:
            self._writing.release()
        said, self._notices = tuple(self._notices), []
        return said

    def remember(self) -> None:
        """Write down with what the answered prompts began, and find what of them is worth keeping."""
        with self._lock:
            answered, self._answered = self._answered, []
        if not answered:
            return
        try:
            with prefixes_lock(self._home):
                path = beginnings_path(self._home)
                known = read_beginnings(path)
                for prompt in answered:
                    known, shared = known.with_prompt(prompt.key, prompt.tokens)
                    self._want(prompt, shared)
                self._home.create(path.parent).chmod(0o700)
                write_beginnings(path, known)
        except (EdgespecError, OSError) as error:
            self._say_once(f"the beginnings of conversations are not remembered: {reason_of(error)}")
            with self._lock:  # the next call tries again
                self._answered = [*answered, *self._answered][-_MOST_WAITING:]

    def _want(self, prompt: _Prompt, shared: int) -> None:
        beginning = prompt.tokens[:shared]
        stored = longest_prefix(self._home, prompt.key, prompt.tokens) if shared else None
        if _is_worth(shared, 0 if stored is None else stored.length):
            self._wanted = [*self._wanted, _Prompt(prompt.owner, prompt.key, beginning)][-_MOST_WAITING:]

    def _write(self, wanted: _Prompt, holders: Iterable[CacheHolder], stop: threading.Event) -> None:
        tokens = wanted.tokens.tolist()
        stored = longest_prefix(self._home, wanted.key, as_tokens([*tokens, 0]))
        if stored is not None and not _is_worth(len(tokens), stored.length):
            return  # another process was first
        found = _holder(holders, wanted.owner, tokens)
        if found is None:
            return  # no cache has it any more; the next conversation that shares it may
        holder, sizes = found

        def parts() -> Iterator[bytes]:
            for part in range(sizes[0]):
                if stop.is_set():
                    raise CancelledError("a request came while a prefix was written")
                yield holder.cache_part(tokens, part)

        written = write_prefix(self._home, wanted.key, wanted.tokens, self._facts, parts(), sizes)
        if written is None:
            self._say_once(f"a beginning of {len(tokens)} tokens is not kept: too little of the disk is free")
            return
        self._failed = False
        self._notices.append(
            f"kept the beginning of {len(tokens)} tokens that two conversations shared "
            f"({readable_bytes(written.bytes)} in {written.path.parent})"
        )

    def _say_once(self, sentence: str) -> None:
        if not self._failed:
            self._failed = True
            self._notices.append(sentence)

    def close(self) -> None:
        """Write down with what the last prompts began. Idempotent."""
        with self._writing:
            self.remember()
        self._reader.close()


def _holder(
    holders: Iterable[CacheHolder], owner: str, tokens: Sequence[int]
) -> tuple[CacheHolder, tuple[int, int]] | None:
    """A session that has these tokens in its cache, and the cache's parts; None if there is none.

    Raises InvalidRequestError if only sessions that answer now may have them.
    """
    answering: InvalidRequestError | None = None
    for holder in holders:
        try:
            if (sizes := holder.cache_sizes(owner, tokens)) is not None:
                return holder, sizes
        except InvalidRequestError as error:
            answering = error
        except EdgespecError:  # it was closed
            pass
    if answering is not None:
        raise answering
    return None


def _is_worth(length: int, held: int) -> bool:
    """Whether a prefix of this length is to be read into, or written besides, one of the tokens that are ``held``."""
    return length >= LEAST_TOKENS and (length - held) * _PART_WORTH_READING >= length
