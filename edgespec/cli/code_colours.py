"""Source text in colours as it streams, with the lexers of Pygments."""

from __future__ import annotations

from typing import Any

# A lexer takes 1.3 ms for 1000 characters (measured on Python and C, on an AMD EPYC), and reads its window again for
# each line. So the window is cut where a line begins afresh once it is longer than the first, and anywhere beyond the
# second: 3 ms a line, of the 300 ms in which a small model writes one.
_WINDOW, _LONGEST_WINDOW = 1500, 4000


class CodeColours:
    """Colours the lines of one block of code in the language of that name; of one that is not known, none."""

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language)
        self._window = ""  # the lines before this one that the lexer needs to see

    def line(self, text: str) -> list[tuple[str, str]]:
        """The line, or as much of it as there is, in parts with their styles."""
        if self._lexer is None:
            return [(text, "")]
        begin, parts = len(self._window), list[tuple[str, str]]()
        for at, kind, value in self._tokens(text):
            shown = value[max(0, begin - at) : begin + len(text) - at]
            if shown:
                parts.append((shown, _style(kind)))
        # A lexer may leave characters out at the ends of lines, and of what is nothing in its language.
        return parts if "".join(part for part, _ in parts) == text else [(text, "")]

    def end(self, line: str) -> None:
        """This was a whole line: those that come know of it."""
        if self._lexer is None:
            return
        self._window += line
        if len(self._window) > _WINDOW:
            self._window = self._window[self._fresh_start() :]

    def _tokens(self, line: str) -> list[tuple[int, Any, str]]:
        # The end of a comment makes one of what would be no token of a language that reads comments whole.
        text = self._window + line
        closed = text + ("\n*/" if "/*" in text else "")
        return list(self._lexer.get_tokens_unprocessed(closed))

    def _fresh_start(self) -> int:
        """Where the window can be cut: the last line but this that begins with a token of its own."""
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


# The sixteen colours of every terminal, which its user chose; the first that holds the kind of a token.
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
