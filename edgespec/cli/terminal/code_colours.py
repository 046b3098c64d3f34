"""Colours streaming source code with Pygments' lexers."""

from __future__ import annotations

from typing import Any

# Characters. For each line the lexer reads its window again, at 1.3 ms per 1000 characters (Python and C, AMD EPYC).
# Above the first limit the window is cut at the start of a statement, above the second anywhere. So a line costs
# about 3 ms, while a small model takes 300 ms to write one.
_WINDOW, _LONGEST_WINDOW = 1500, 4000


class CodeColours:
    """Colours the lines of one block of code. An unknown language gets no colours."""

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language)
        self._window = ""  # earlier lines that the lexer needs to see

    def line(self, text: str) -> list[tuple[str, str]]:
        """A line, possibly incomplete, in parts with their styles."""
        if self._lexer is None:
            return [(text, "")]
        begin, parts = len(self._window), list[tuple[str, str]]()
        for at, kind, value in self._tokens(text):
            shown = value[max(0, begin - at) : begin + len(text) - at]
            if shown:
                parts.append((shown, _style(kind)))
        # A lexer may drop characters: at the ends of lines, and of text that its language does not have.
        return parts if "".join(part for part, _ in parts) == text else [(text, "")]

    def end(self, line: str) -> None:
        """Add a complete line to the window that the lexer sees before later lines."""
        if self._lexer is None:
            return
        self._window += line
        if len(self._window) > _WINDOW:
            self._window = self._window[self._fresh_start() :]

    def _tokens(self, line: str) -> list[tuple[int, Any, str]]:
        # Some lexers match a comment only as a whole, so an open comment gets an end.
        text = self._window + line
        closed = text + ("\n*/" if "/*" in text else "")
        return list(self._lexer.get_tokens_unprocessed(closed))

    def _fresh_start(self) -> int:
        """Where to cut the window: at the last line that starts a statement."""
        found = 0
        for at, kind, value in self._lexer.get_tokens_unprocessed(self._window):
            begins = at > 0 and self._window[at - 1] == "\n" and not value[:1].isspace()
            if begins and value[:1] not in ")]}" and "String" not in kind and "Comment" not in kind:
                found = at
        if found == 0 and len(self._window) > _LONGEST_WINDOW:
            return len(self._window)
        return found


def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None


# Styles from the sixteen colours of the user's terminal. The first prefix of the token's kind is used.
_STYLES = (
    ("Comment", "2"),
    ("Literal.String", "32"),
    ("Literal.Number", "36"),
    ("Keyword", "35"),
    ("Operator.Word", "35"),
    ("Name.Builtin", "36"),
    ("Name.Function", "1"),
    ("Name.Class", "1"),
    ("Name.Decorator", "35"),
    ("Name.Tag", "35"),
    ("Generic.Deleted", "31"),
    ("Generic.Inserted", "32"),
    ("Generic.Heading", "1"),
    ("Generic.Subheading", "36"),
)


def _style(kind: Any) -> str:
    name = ".".join(kind)
    return next((style for prefix, style in _STYLES if name.startswith(prefix)), "")
