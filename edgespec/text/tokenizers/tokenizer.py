"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A token that encoding makes only with ``special``, and whether it strips the blanks next to it."""

    text: str
    strips_left: bool = False
    strips_right: bool = False


class Tokenizer(Protocol):
    """Converts text to ids, and ids to bytes or text."""

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
        """The token's ControlToken; None for an ordinary token."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for control tokens, which are never shown."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, invalid UTF-8 replaced."""

    def close(self) -> None: ...
