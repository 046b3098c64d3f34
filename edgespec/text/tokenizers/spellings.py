"""The tokens of a vocabulary by the bytes of their text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from edgespec.text.tokenizers.tokenizer import Tokenizer


class Spellings:
    """Which tokens spell a text, and which begin with it. Control tokens spell nothing. For any thread."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Reads the vocabulary, which takes a fraction of a second. ``size`` tokens have scores."""
        self.size = size
        self._tokenizer = tokenizer
        found = sorted(
            (text, token)
            for token in range(min(size, tokenizer.vocabulary_size))
            if (text := tokenizer.token_bytes(token)) and tokenizer.control_token(token) is None
        )
        self._texts = [text for text, _ in found]
        self._tokens = [token for _, token in found]

    def of(self, text: bytes) -> list[int]:
        """The tokens that have this text: none, one, or several."""
        first = bisect_left(self._texts, text)
        return self._tokens[first : bisect_right(self._texts, text, lo=first)]

    def longer(self, text: bytes) -> list[int]:
        """The tokens whose text begins with this one and is longer."""
        first = bisect_right(self._texts, text)
        return self._tokens[first : bisect_right(self._texts, text, lo=first, key=lambda own: own[: len(text)])]

    def length(self, token: int) -> int:
        """The bytes of a token's text."""
        return len(self._tokenizer.token_bytes(token))
