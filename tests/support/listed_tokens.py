"""A vocabulary that is a list of bytes: a Tokenizer that encodes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edgespec.text.tokenizers.tokenizer import ControlToken, FillInTokens


class ListedTokens:
    """Implements Tokenizer but for texts. Tokens without a text are control tokens."""

    stop_ids: frozenset[int] = frozenset()
    bos_token = eos_token = ""
    fill_in: FillInTokens | None = None
    suppressed: frozenset[int] = frozenset()
    marks: Mapping[int, ControlToken] = MappingProxyType({})

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts

    @property
    def vocabulary_size(self) -> int:
        return len(self.texts)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        raise NotImplementedError

    def control_token(self, token: int) -> ControlToken | None:
        return None if self.texts[token] else ControlToken(text=f"<{token}>")

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def close(self) -> None: ...
