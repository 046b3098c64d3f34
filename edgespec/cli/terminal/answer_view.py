"""Formats a streaming answer for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from edgespec.cli.terminal.markdown import Markdown
from edgespec.cli.terminal.terminal_text import Harmless, Segment, TerminalText
from edgespec.engine.events import Text

_THINKING = "2"  # dimmed


class AnswerView:
    """Turns an answer's text into the characters for a terminal.

    Thinking is dimmed, Markdown and code are coloured, words wrap at ``columns()``, and with ``guesses`` guessed
    tokens are shaded. No character of the text is lost. Without ``colours`` only the wrapping is added.
    ``begun`` is shown already: text, without its thinking, that the answer continues on a new line of the terminal.
    """

    def __init__(
        self,
        columns: Callable[[], int],
        *,
        colours: bool,
        markdown: bool = True,
        guesses: bool = False,
        begun: str = "",
    ) -> None:
        self._harmless = Harmless()
        self._thinks = False
        self._markdown = Markdown() if markdown and colours else None
        self._out = TerminalText(columns, colours=colours)
        self._guesses = guesses
        self._repeated = 0 if self._markdown is None else self._markdown.resume(self._harmless.feed(begun))

    def feed(self, event: Text) -> str:
        """The output for now. A word is held back until it is complete."""
        if self._guesses:
            for token in event.tokens:
                self._out.mark(len(token.text), guessed=token.guessed_by is not None)
        self._thinks = event.reasoning is not None
        return self._out.write(self._segments(self._harmless.feed(event.text)))

    def flush(self) -> str:
        """The held-back output, at the end of the answer."""
        rest = list(self._segments(self._harmless.flush()))
        if self._markdown is not None:
            rest += self._new(self._markdown.flush())
        return self._out.write(rest) + self._out.flush()

    def _segments(self, text: str) -> Iterable[Segment]:
        if self._thinks or self._markdown is None:
            return [Segment(text, _THINKING if self._thinks else "")]
        return self._new(self._markdown.feed(text))

    def _new(self, segments: list[Segment]) -> list[Segment]:
        """The segments without the characters that are shown already."""
        new = list[Segment]()
        for segment in segments:
            text = segment.text[self._repeated :]
            self._repeated = max(0, self._repeated - len(segment.text))
            if text:
                new.append(replace(segment, text=text))
        return new
