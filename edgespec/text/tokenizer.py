"""The Tokenizer protocol, and text from tokens as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class IncrementalText:
    """Decodes UTF-8 as it arrives; what was returned is never taken back.

    The texts returned for any split of some bytes, with ``flush`` at the end, join to
    ``bytes.decode("utf-8", "replace")``: invalid bytes become U+FFFD, and an incomplete end does so at ``flush``.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that ``data`` completes; at most three bytes, of one unfinished character, are kept back."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character at the end becomes. Afterwards this is as new."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest

    @property
    def pending(self) -> bytes:
        """The bytes kept back."""
        return self._decoder.getstate()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A token that text becomes only where control tokens are looked for, and whether it strips blanks beside it."""

    text: str
    strips_left: bool = False
    strips_right: bool = False


class Tokenizer(Protocol):
    """Text to ids and ids to bytes."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def bos_token(self) -> str:
        """Text of the begin-of-sequence token, or ""."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token, or ""."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of ``text``. With ``special``, control tokens written out in the text become those tokens."""

    def control_token(self, token: int) -> ControlToken | None:
        """What kind of control token it is; None for an ordinary one."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for control tokens, which are never shown."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, invalid UTF-8 replaced."""

    def close(self) -> None: ...
