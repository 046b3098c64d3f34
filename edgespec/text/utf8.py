"""Bytes of tokens in, text out: a character that is split over two tokens waits for its rest."""

from __future__ import annotations

import codecs


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
