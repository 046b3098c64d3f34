"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A token that encoding makes only with ``special``, and whether it strips the blanks next to it."""

    text: str
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTokens:
    """The tokens of a prompt with a hole: they precede the text before it, the text after it, and what fills it.

    ``repository`` begins a prompt with several files, ``file`` each of them; None in a vocabulary without them.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None


class Tokenizer(Protocol):
    """Converts text to ids, and ids to bytes or text."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def suppressed(self) -> frozenset[int]:
        """Ids that the file says are never drawn, such as Gemma 4's marks for pictures and sounds."""

    @property
    def bos_token(self) -> str:
        """Text of the begin-of-sequence token, or ""."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token, or ""."""

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """Texts of tokens by their names in chat templates: ``bos_token``, ``eos_token``, and what a file states of
        ``unk_token`` and ``pad_token``."""

    @property
    def marks(self) -> Mapping[int, ControlToken]:
        """Control tokens that are shown: gpt-oss's marks of turns. ``encode`` makes them of any text."""

    @property
    def fill_in(self) -> FillInTokens | None:
        """The tokens of a prompt with a hole; None if the model has none."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of ``text``. With ``special``, control tokens written out in the text become those tokens."""

    def control_token(self, token: int) -> ControlToken | None:
        """The token's ControlToken; None for an ordinary token."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for control tokens, which are never shown."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, invalid UTF-8 replaced."""

    def close(self) -> None: ...


def control_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[int, bytes]:
    """The control tokens that the texts name, and their names."""
    found = dict[int, bytes]()
    for text in texts:
        for token in tokenizer.encode(text, special=True):
            control = tokenizer.control_token(token)
            if control is not None and control.text in text:  # not the token for what a vocabulary lacks
                found[token] = control.text.encode()
    return found
