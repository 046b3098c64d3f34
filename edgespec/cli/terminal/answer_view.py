"""Formats a streaming answer for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgespec.cli.terminal.markdown import Markdown
from edgespec.cli.terminal.terminal_text import Harmless, Segment, TerminalText
from edgespec.engine.events import Text
from edgespec.text.conversation.thinking import ThinkingText

_THINKING = "2"  # dimmed


class AnswerView:
    """Turns an answer's text into the characters for a terminal.

    Thinking is dimmed, Markdown and code are coloured, words wrap at ``columns()``, and with ``guesses`` guessed
    tokens are shaded. No character of the text is lost. Without ``colours`` only the wrapping is added.
    """

    def __init__(
        self,
        columns: Callable[[], int],
        *,
        colours: bool,
        markdown: bool = True,
        thinking: ThinkingText | None = None,
        guesses: bool = False,
    ) -> None:
        self._harmless = Harmless()
        self._thinking = thinking
        self._markdown = Markdown() if markdown and colours else None
        self._out = TerminalText(columns, colours=colours)
        self._guesses = guesses

    def feed(self, event: Text) -> str:
        """The output for now. A word is held back until it is complete."""
        if self._guesses:
            for characters, guessed_by in zip(event.lengths, event.guessed_by, strict=True):
                self._out.mark(characters, guessed=guessed_by is not None)
        return self._out.write(self._parts(self._harmless.feed(event.text)))

    def flush(self) -> str:
        """The held-back output, at the end of the answer."""
        rest = list(self._parts(self._harmless.flush()))
        if self._thinking is not None:
            rest += self._split(self._thinking.flush())
        if self._markdown is not None:
            rest += self._markdown.flush()
        return self._out.write(rest) + self._out.flush()

    def _parts(self, text: str) -> Iterable[Segment]:
        return self._split([(text, False)] if self._thinking is None else self._thinking.feed(text))

    def _split(self, parts: Iterable[tuple[str, bool]]) -> Iterable[Segment]:
        for text, thinking in parts:
            if thinking:
                yield Segment(text, _THINKING)
            elif self._markdown is None:
                yield Segment(text)
            else:
                yield from self._markdown.feed(text)
