"""The folder of prefixes: files with the cache of a beginning that conversations share; the oldest make room.

A prefix is a saved session without messages (``files/session_file.py``), made in this home. Its name says whose it is
and of which tokens, as hashes by the home's secret, so that no file is opened to find one. Processes share the
folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from edgespec.engine.prefixes.beginnings import Tokens, hash_of
from edgespec.errors import EdgespecError, SessionFileError
from edgespec.files.disk import free_bytes
from edgespec.files.home import Home
from edgespec.files.session_file import SessionFile, write_session_file
from edgespec.interfaces.model import ModelFacts

# All prefixes together: seven of an agent's beginning of 19 000 tokens for a model of 1.5 billion weights.
MOST_BYTES = 4 * 10**9
# And this part of the disk that is free without them.
_SHARE_OF_FREE = 10

_NAME = re.compile(r"(?P<key>[0-9a-f]{32})-(?P<length>[0-9]{1,8})-(?P<tokens>[0-9a-f]{32})\.prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """One file. ``key`` is the hash of whose it is and for what cache, ``tokens`` that of its ``length`` tokens."""

    path: Path
    key: str
    length: int
    tokens: str
    bytes: int
    used_s: float


def prefix_path(home: Home, key: bytes, tokens: Tokens) -> Path:
    """Where the prefix of these tokens is kept."""
    return home.prefixes / f"{hash_of(key, tokens[:0])}-{len(tokens)}-{hash_of(key, tokens)}.prefix"


def prefixes_lock(home: Home) -> AbstractContextManager[None]:
    """The lock under which the folder's files are removed or counted. Raises EdgespecError, OSError."""
    return home.locked("prefixes", "writing a prefix")


def stored_prefixes(home: Home) -> list[StoredPrefix]:
    """Every prefix of the home, the one that was not used for the longest time first."""
    found = []
    with contextlib.suppress(OSError):
        for path in home.prefixes.iterdir():
            named = _NAME.fullmatch(path.name)
            if named is None:
                continue
            with contextlib.suppress(OSError):  # another process has just removed it
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    found.append(
                        StoredPrefix(
                            path=path,
                            key=named["key"],
                            length=int(named["length"]),
                            tokens=named["tokens"],
                            bytes=status.st_size,
                            used_s=status.st_mtime,
                        )
                    )
    return sorted(found, key=lambda each: each.used_s)


def longest_prefix(home: Home, key: bytes, tokens: Tokens) -> StoredPrefix | None:
    """The longest prefix of these tokens that is shorter than they are; None without one."""
    own = hash_of(key, tokens[:0])
    fitting = [each for each in stored_prefixes(home) if each.key == own and each.length < len(tokens)]
    for each in sorted(fitting, key=lambda each: -each.length):
        if hash_of(key, tokens[: each.length]) == each.tokens:
            return each
    return None


@contextlib.contextmanager
def opened(home: Home, prefix: StoredPrefix, tokens: Tokens) -> Iterator[SessionFile]:
    """A prefix of these tokens, whose ``parts`` are its cache.

    Raises SessionFileError if it is damaged, of other tokens, or was not made in this home.
    """
    with SessionFile(prefix.path) as file:
        file.read_stated()
        same = file.header.text("prefix") == prefix.key and file.tokens() == tokens[: prefix.length].tolist()
        if not same or not file.made_in(home):
            raise SessionFileError(prefix.path, "it was not made here as what its name says")
        yield file
    with contextlib.suppress(OSError):
        os.utime(prefix.path)  # now the last one that was used


def write_prefix(
    home: Home, key: bytes, tokens: Tokens, facts: ModelFacts, parts: Iterable[bytes], sizes: tuple[int, int]
) -> StoredPrefix | None:
    """Keep a prefix of these tokens, and remove the oldest ones for which there is no room. None without room for it.

    ``facts`` are the model's. ``sizes`` are the number of ``parts`` and the bytes of each. Raises EdgespecError,
    OSError, and what the iteration raises; nothing has changed then.
    """
    size = sizes[0] * sizes[1]
    if size > room_bytes(home):
        return None
    folder, path = home.create(home.prefixes), prefix_path(home, key, tokens)
    folder.chmod(stat.S_IRWXU)
    own = hash_of(key, tokens[:0])
    header = {"prefix": own, "model": facts.name, "identity": facts.sha256}
    # Every reader checks the whole file, so a power cut costs one prefix at most.
    written = write_session_file(path, home, header, tokens.tolist(), parts, sizes, durable=False)
    with prefixes_lock(home):
        _make_room(home, path)
    return StoredPrefix(
        path=path,
        key=own,
        length=len(tokens),
        tokens=hash_of(key, tokens),
        bytes=written,
        used_s=path.stat().st_mtime,
    )


def room_bytes(home: Home) -> int:
    """What all prefixes together may take."""
    used = sum(each.bytes for each in stored_prefixes(home))
    return min(MOST_BYTES, (free_bytes(home.prefixes) + used) // _SHARE_OF_FREE)


def _make_room(home: Home, newest: Path) -> None:
    """Remove the prefixes that were not used for the longest time until the others have room."""
    kept, room = stored_prefixes(home), room_bytes(home)
    used = sum(each.bytes for each in kept)
    for each in kept:
        if used <= room:
            return
        if each.path != newest and remove(each.path):
            used -= each.bytes


def remove(path: Path) -> bool:
    """Remove a prefix; False if it stays, as an open file does on Windows."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def model_of(prefix: StoredPrefix) -> tuple[str | None, str | None]:
    """The name and the identity of the model that a prefix is of; None for what a damaged file does not say."""
    with contextlib.suppress(EdgespecError), SessionFile(prefix.path) as file:
        return file.header.text("model"), file.header.text("identity")
    return None, None


def clear_prefixes(home: Home, identity: str | None = None) -> list[StoredPrefix]:
    """Remove the prefixes of the model with this identity; None: all, and what is remembered of beginnings.

    ``identity`` is that of its LocatedModel. Returns the removed ones. Raises OSError, EdgespecError.
    """
    if not home.prefixes.is_dir():
        return []
    with prefixes_lock(home):
        gone = [each for each in stored_prefixes(home) if identity in (None, model_of(each)[1])]
        for each in gone:
            each.path.unlink(missing_ok=True)
        if identity is None:
            beginnings_path(home).unlink(missing_ok=True)
    return gone


def beginnings_path(home: Home) -> Path:
    """The file with the last conversations' beginnings."""
    return home.prefixes / "beginnings.json"
