"""Makes the index of the user's own text that a target copies from."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgespec.engine.learned.texts import LEARNED, learned_path
from edgespec.errors import EdgespecError, InvalidRequestError, reason_of
from edgespec.files.disk import expanded, in_utf_8, read_bounded
from edgespec.files.gguf.vocabulary import vocabulary_digest
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.files.stored_text import (
    DamagedTextError,
    StoredText,
    Text,
    count_tokens,
    open_or_set_aside,
    set_aside_words,
)
from edgespec.text.tokenizers.tokenizer import Tokenizer

# About 16 MB of text: a file of 34 MB, made with 350 MB of memory, which a machine with 4 GB has to spare.
MOST_TOKENS = 2**22

# Larger files are rarely written by hand: data, logs, generated code.
MOST_FILE_BYTES = 2_000_000

# Folders of other people's files and of copies. Hidden folders (.git, .venv) are left out too.
_LEFT_OUT = ("node_modules", "__pycache__", "site-packages")

_LOCK_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What an index holds, and what the last ``learn`` changed.

    ``skipped`` counts files by reason: ``binary``, ``too_large``, ``unreadable`` and ``no_room`` (the index is full).
    ``names`` are the paths of all files in the index.
    """

    path: Path
    bytes: int
    tokens: int
    names: tuple[str, ...]
    added_files: int = 0
    removed_files: int = 0
    skipped: tuple[tuple[str, int], ...] = ()
    notice: str | None = None


class TextLearner:
    """Adds files to the index of one target's vocabulary, or removes them; at most ``most_tokens`` in all."""

    def __init__(self, home: Home, target: LocatedModel, *, most_tokens: int = MOST_TOKENS) -> None:
        """Raises ModelFileError."""
        self._home = home
        self._vocabulary = vocabulary_digest(target.header)
        self._size = target.header.vocabulary_size
        self._most = most_tokens
        self._path = learned_path(home, self._vocabulary)

    def known(self) -> Learned:
        """What the index holds."""
        texts, notice = self._texts()
        return self._described(texts, notice)

    def learn(self, paths: Sequence[Path], tokenizer: Tokenizer) -> Generator[float, None, Learned]:
        """Index the text files of ``paths`` (files and folders); they replace what was learned from there.

        Yields the finished fraction. Raises InvalidRequestError for a path that neither exists nor was learned,
        StoreLockedError, DiskSpaceError, EdgespecError.
        """
        roots = [_absolute(path) for path in paths]
        known = {text.name for text in self._texts()[0]}
        for path, root in zip(paths, roots, strict=True):
            if not os.path.lexists(root) and not any(_is_below(name, (root,)) for name in known):
                raise InvalidRequestError(f"there is nothing at {path} to learn from", hint="give files or folders")
        files = list({_compared(file): file for root in roots for file in _files(root)}.values())
        found, skipped, room = list[Text](), Counter[str](), self._most
        for number, file in enumerate(files):
            yield number / len(files)
            text, reason = _read(file)
            if text is None:
                skipped[reason] += 1
                continue
            tokens = np.array(tokenizer.encode(text.removeprefix("\ufeff")), dtype=np.uint32)
            tokens = tokens[tokens < self._size]
            if len(tokens) + 1 > room:
                skipped["no_room"] += 1
            elif len(tokens):
                found.append(Text(tokens, file))
                room -= len(tokens) + 1
        return self._replace(tuple(roots), found, skipped)

    def forget(self, paths: Sequence[Path]) -> Learned:
        """Remove what was learned from ``paths``. Raises StoreLockedError, DiskSpaceError, EdgespecError."""
        return self._replace(tuple(_absolute(path) for path in paths), [], Counter())

    def _replace(self, roots: tuple[str, ...], found: list[Text], skipped: Counter[str]) -> Learned:
        """Replace the texts below ``roots`` by ``found``. Other processes wait."""
        with self._home.locked("learned", "learning", timeout_s=_LOCK_WAIT_S):
            before, notice = self._texts()
            texts = [text for text in before if not _is_below(text.name, roots)]
            removed, room = len(before) - len(texts), self._most - count_tokens(texts)
            added = 0
            for text in found:
                if len(text.tokens) + 1 > room:
                    skipped["no_room"] += 1
                    continue
                texts.append(text)
                room -= len(text.tokens) + 1
                added += 1
            self._save(texts)
        described = self._described(texts, notice)
        left_out = tuple(sorted(skipped.items()))
        return replace(described, added_files=added, removed_files=removed, skipped=left_out)

    def _texts(self) -> tuple[list[Text], str | None]:
        """The indexed texts, and a sentence about a damaged file, which is set aside.

        Raises EdgespecError if the file cannot be read: it would be lost otherwise.
        """
        most = max(self._most, MOST_TOKENS)  # what may have been indexed with another limit
        stored, notice = open_or_set_aside(self._path, self._vocabulary, self._size, LEARNED, most_tokens=most)
        if stored is None:
            if notice is not None and self._path.exists():
                raise EdgespecError(notice, hint=f"check the permissions of {self._path}")
            return [], notice
        try:
            return stored.all_texts(), notice
        except DamagedTextError as error:
            return [], set_aside_words(self._path, LEARNED, error)

    def _save(self, texts: list[Text]) -> None:
        try:
            if texts:
                self._home.create(self._home.learned)
                StoredText.of(self._vocabulary, self._size, texts).save(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise EdgespecError(
                f"{LEARNED} cannot be written: {reason_of(error)}: {self._path}",
                hint="close programs that use it, such as a chat, and try again",
            ) from error

    def _described(self, texts: list[Text], notice: str | None) -> Learned:
        return Learned(
            path=self._path,
            bytes=self._path.stat().st_size if texts else 0,
            tokens=sum(len(text.tokens) for text in texts),
            names=tuple(text.name for text in texts),
            notice=notice,
        )


def _absolute(path: Path) -> str:
    try:
        return os.path.realpath(expanded(path))
    except ValueError as error:
        raise InvalidRequestError(f"{str(path)!r} is not a path", hint="give files or folders") from error


def _is_below(name: str, roots: Sequence[str]) -> bool:
    name = _compared(name)
    return any(name == root or name.startswith(root.rstrip(os.sep) + os.sep) for root in map(_compared, roots))


def _compared(path: str) -> str:
    """A path as it is compared: macOS finds files by names in another case, and of letters in parts, as well."""
    return unicodedata.normalize("NFC", path).casefold() if sys.platform == "darwin" else path


def _files(root: str) -> Iterator[str]:
    """The files at and below ``root`` in a fixed order, without links, hidden files and folders of copies."""
    if not Path(root).is_dir():
        if os.path.lexists(root):
            yield root
        return
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(".") and not file.is_symlink():
                yield str(file)


def _read(file: str) -> tuple[str | None, str]:
    """The text of a file; or None and why it is skipped."""
    try:
        data = in_utf_8(read_bounded(file, MOST_FILE_BYTES))
    except OSError:
        return None, "unreadable"
    except ValueError:
        return None, "too_large"
    try:
        return (None, "binary") if b"\0" in data else (data.decode("utf-8"), "")
    except UnicodeDecodeError:
        return None, "binary"
