"""What a tokenizer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
