"""A session in a file: the conversation, its tokens, and its cache where the runtime can save one.

In the home and the numeric class that wrote it, and with the same model file, the cache is used as it is, so the
session continues bit for bit. In another class the tokens are read again. Of a file that was not made in this home
only the messages are read. A notice says why. Another model's file is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.errors import CancelledError, InvalidRequestError, ModelFileError, SessionFileError
from edgespec.files.checked import Fields
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.progress import Cancelled
from edgespec.files.session_file import SessionFile, write_session_file
from edgespec.interfaces.model import ModelFacts, SavableSequence, Sequence
from edgespec.text.conversation.conversation import Conversation, ConversationState
from edgespec.text.conversation.messages import check_messages

# Tokens that a runtime may round a cache up to, and how much more than in this numeric class a token may take in
# another: 16 bits an element are four times 4 bits.
_ROUNDING_TOKENS, _WIDER = 64, 4

_NOT_MADE_HERE = "it was saved elsewhere, by an earlier version, or without this home's secret"

# Characters of a name in a message.
_LONGEST_NAME = 80


def write_session(
    path: Path,
    pair: LoadedPair,
    facts: ModelFacts,
    state: ConversationState,
    sequence: Sequence,
    cancelled: Cancelled,
) -> int:
    """Save a session and return the file's size in bytes. On the sequence's worker thread.

    ``facts`` are those of the model that ``sequence`` belongs to. Raises SessionFileError, DiskSpaceError, and
    CancelledError once ``cancelled()`` is true; a file at ``path`` is then unchanged.
    """
    length = min(sequence.length, len(state.history))
    savable = isinstance(sequence, SavableSequence) and sequence.holds(length)
    count, size = sequence.part_sizes(length) if isinstance(sequence, SavableSequence) and savable else (0, 0)
    angles = sequence.angles if isinstance(sequence, SavableSequence) else ""

    def parts() -> Iterator[bytes]:
        for part in range(count):
            if cancelled():
                raise CancelledError("saving was cancelled")
            assert isinstance(sequence, SavableSequence)
            yield sequence.read_part(part, length)

    document = {
        "model": {"name": facts.name, **_describe(pair.pool.target.header, facts)},
        "class": facts.cache_class | ({"angles": angles} if angles else {}),
        "conversation": {
            "system": state.system,
            "messages": list(state.messages),
            "rendered": state.rendered,
        },
        "cached": length if count else 0,
    }
    return write_session_file(path, pair.home, document, state.history, parts(), (count, size))


def _describe(header: GgufHeader, facts: ModelFacts) -> dict[str, Any]:
    """Which weights these are (``identity``), and what all files of this model have in common."""
    vocabulary = hashlib.sha256()
    for token in header.values("tokenizer.ggml.tokens"):
        text = str(token).encode("utf-8", "surrogatepass")
        vocabulary.update(len(text).to_bytes(4, "little") + text)
    shape = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
    stated = [header.metadata.get(f"{header.architecture}.{key}") for key in shape]
    return {
        "identity": facts.sha256,
        "architecture": header.architecture,
        "vocabulary": vocabulary.hexdigest(),
        "shape": [value if isinstance(value, int) else None for value in stated],
    }


class SavedSession:
    """A saved session, opened and checked for the target of a pair. A context manager."""

    def __init__(self, path: Path, pair: LoadedPair) -> None:
        """Raises SessionFileError for a file that is damaged, of a newer version, or another model's."""
        self._pair = pair
        self._path = path
        self._file = SessionFile(path)
        try:
            self._read()
        except ModelFileError as error:  # of the JSON's fields
            self._file.close()
            raise SessionFileError(path, f"it is damaged: {error.reason}") from error
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        file, facts = self._file, self._pair.target.facts
        model = _object(file.header, "model")
        self._check_model(model)
        self._cached = file.header.integer("cached", 0, file.token_count)
        most = _WIDER * facts.kv_bytes_per_token * (self._cached + _ROUNDING_TOKENS) + facts.windowed.state_bytes
        if file.part_count * file.part_bytes > (most if self._cached else 0):
            raise SessionFileError(self._path, "it is damaged: its cache is too large for the model")
        self._angles = _object(file.header, "class").text("angles") or ""
        self._conversation = _object(file.header, "conversation")
        file.verify()
        self._state, self._why_not = self._read_state(file.tokens()), self._read_again_because(model)
        own = False
        with contextlib.suppress(OSError):
            own = file.made_in(self._pair.home)
        if not own:
            # Its tokens and its cache could say something else than its messages.
            self._state = replace(self._state, history=(), rendered="")
            self._why_not = _NOT_MADE_HERE if file.token_count else None

    def _check_model(self, model: Fields) -> None:
        own = _describe(self._pair.pool.target.header, self._pair.target.facts)
        shapes = zip(own["shape"], model.items("shape") or (), strict=False)
        same = all(left == right or None in (left, right) for left, right in shapes)
        if not same or any(own[name] != model.text(name) for name in ("architecture", "vocabulary")):
            name = (model.text("name") or "another")[:_LONGEST_NAME]
            raise SessionFileError(
                self._path,
                f"it is a session of {name}, and {self._pair.target.facts.name} is loaded",
                hint=f"load {name}",
            )

    def _read_state(self, tokens: list[int]) -> ConversationState:
        read = self._conversation
        try:
            messages = check_messages(read.items("messages") or [])
        except InvalidRequestError as error:
            raise SessionFileError(self._path, f"it is damaged: {error.message}") from error
        size = self._pair.vocabulary_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            raise SessionFileError(self._path, "it is damaged: its conversation is not one of this model")
        return ConversationState(
            system=read.text("system"),
            messages=tuple(messages),
            history=tuple(tokens),
            rendered=read.text("rendered") or "",
        )

    def _read_again_because(self, model: Fields) -> str | None:
        """Why the saved cache cannot be used; None if it can, or if there is nothing to read."""
        if not self._file.token_count:
            return None
        facts, saved = self._pair.target.facts, _object(self._file.header, "class")
        if not self._cached:
            return "the file holds no cache"
        if facts.sha256 is None or model.text("identity") != facts.sha256:
            return "it was saved with another file of the model"
        own = facts.cache_class
        for name in ("runtime", "device", "build", "kv_type", "settings"):
            if saved.raw(name) != own[name]:
                return f"it was saved with another {_WORDS[name]}"
        if self._cached > self._pair.plan.context_length:
            return "its cache is larger than the context"
        return None

    @property
    def notices(self) -> tuple[str, ...]:
        """What the reader of the first answer should know."""
        why = self._why_not
        return () if why is None else (f"the saved conversation is read again: {why}",)

    def conversation(self, *, think: bool) -> Conversation:
        """The saved conversation."""
        return Conversation.of(self._pair.prompts, self._state, think=think)

    @property
    def cached_tokens(self) -> int:
        """How many tokens the cache will hold."""
        return 0 if self._why_not is not None else self._cached

    def open_cache(self) -> Sequence | None:
        """A new Sequence of the target with the saved cache; None if the tokens must be read again.

        Raises SessionFileError if the file changed since it was checked, MemoryLimitError, ClosedError.
        """
        if self._why_not is not None or not self._cached:
            return None
        sequence = self._pair.target.open(self._pair.plan.context_length)
        try:
            if not isinstance(sequence, SavableSequence):
                raise InvalidRequestError("this runtime restores no cache")
            if sequence.angles != self._angles:
                self._why_not = "it was saved with another context length"
                sequence.close()
                return None
            sequence.restore(self._file.parts(), self._cached)
        except InvalidRequestError as error:
            sequence.close()
            raise SessionFileError(self._path, f"it is damaged: {error.message}") from error
        except BaseException:
            sequence.close()
            raise
        return sequence

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()


_WORDS: Mapping[str, str] = {
    "runtime": "runtime",
    "device": "device",
    "build": "build of the kernels",
    "kv_type": "type of cache",
    "settings": "setting",
}


def _object(fields: Fields, name: str) -> Fields:
    found = fields.member(name)
    if found is None:
        raise fields.wrong(name, "an object")
    return found
