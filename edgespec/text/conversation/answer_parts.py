"""What an answer consists of, read as it comes: bytes become text up to a stop string, then thinking, text and calls.

The size of the chunks never changes what is read. Text that may become a stop string, a mark or a call is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.ends import LONGEST_SEARCHED, Ends
from edgespec.text.conversation.literals import BLANKS
from edgespec.text.conversation.pieces import Piece, ToolCall, joined, overlap
from edgespec.text.conversation.thinking import Says, ThinkingText
from edgespec.text.conversation.tool_calls import CallText
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Halves of surrogate pairs, which no decoded text has.
_HALVES = range(0xD800, 0xE000)
_NONE = dict.fromkeys(_HALVES)


class StopStrings:
    """Watches text for stop strings.

    The text ends before the stop string that is complete first. If several stop strings end at the same character,
    the longest one is used: no part of a stop string is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError for an empty stop string and for a text instead of a list."""
        if isinstance(stops, str):
            raise InvalidRequestError("stop strings must be a list of texts, not one text", param="stop")
        if any(not stop for stop in stops):
            raise InvalidRequestError(
                "a stop string is empty; it would stop before the first character", param="stop"
            )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, chunk: str, *, may_end: bool = True) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). All text after a stop is dropped.

        Unless it ``may_end`` the text, a stop string that the chunk completes is text.
        """
        if self.found is not None:
            return "", True
        text, before = self._held + chunk, len(self._held)
        found = [
            (start + len(stop), start)
            for stop in (self._stops if may_end else ())
            if (start := text.find(stop, max(0, before + 1 - len(stop)))) >= 0  # not one that was text
        ]
        if found:  # the first end, of the longest
            end, start = min(found)
            self._held, self.found = "", text[start:end]
            return text[:start], True
        cut = len(text) - overlap(text, self._stops)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text held back, once all text has come; empty after a stop."""
        rest, self._held = self._held, ""
        return rest


class AnswerText:
    """Turns tokens into text, and holds back a possible stop string or an incomplete character.

    Bytes that are not UTF-8 are shown as U+FFFD, exactly as if all the bytes were decoded together. The half of a
    character at which an answer is cut is left out, so that the answer can be continued before it. A control token
    that a stop text names has no text: where stop strings are searched, half of a surrogate pair stands for it.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Ends, marks: Mapping[int, bytes] | None = None) -> None:
        """``marks``: control tokens that have a text here, and that text. Other tokens that end it have none."""
        self._tokenizer = tokenizer
        self._marks = {**dict.fromkeys(ends.ids, b""), **(marks or {})}
        hidden = [token for token in ends.names if not self._bytes(token)]
        hidden.sort(key=lambda token: len(ends.names[token]), reverse=True)  # a name may be a part of another
        self._stand_ins = dict(zip(hidden, map(chr, _HALVES), strict=False))
        short = [text for text in ends.texts if len(text) <= LONGEST_SEARCHED]
        self._given = {form: text for text in short for form in self._forms(text, ends.names)}
        self._stops = StopStrings([*ends.texts, *self._given])
        self._early = ends.min_tokens  # tokens to come that no stop string ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _forms(self, stop: str, names: Mapping[int, str]) -> tuple[str, ...]:
        """The stop text with stand-ins, as it is written and as the model writes it.

        Many vocabularies put a blank between a control token and a word.
        """
        written = stop
        for token, stand_in in self._stand_ins.items():
            written = written.replace(names[token], stand_in)
        if written == stop:
            return (stop,)
        pieces = [
            self._stand_ins.get(token) or self._bytes(token).decode("utf-8", "replace")
            for token in self._tokenizer.encode(stop, special=True)
        ]
        return (written, "".join(pieces)) if all(pieces) else (written,)  # not of what the vocabulary lacks

    def _bytes(self, token: int) -> bytes:
        return self._marks[token] if token in self._marks else self._tokenizer.token_bytes(token)

    def text_of(self, token: int, held: int = 0) -> str:
        """The text of a token alone, behind its first ``held`` bytes. Half of a character is U+FFFD."""
        return self._tokenizer.token_bytes(token)[held:].decode("utf-8", "replace")

    def feed(self, token: int, held: int = 0) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). The first ``held`` bytes are left out."""
        self._early -= 1
        text = self._decoder.decode(self._bytes(token)[held:])
        if token in self._stand_ins:  # behind it no character is completed
            text += self._decoder.decode(b"", True) + self._stand_ins[token]
        text, stopped = self._stops.feed(text, may_end=self._early < 0)
        return (text.translate(_NONE) if self._stand_ins else text), stopped

    @property
    def stop_text(self) -> str | None:
        """The stop text at which the text ends, also if it is a control token; None if it ends at none."""
        found = self._stops.found
        return found if found is None else self._given.get(found, found)

    def flush(self, *, cut: bool = False) -> str:
        """The text held back, at the end of the answer; ``cut``: it did not end itself."""
        half = "" if cut else self._decoder.decode(b"", True)
        shown, stopped = self._stops.feed(half, may_end=self._early < 0)
        return (shown if stopped else shown + self._stops.flush()).translate(_NONE)


@dataclass(slots=True)
class Said:
    """What pieces sum up to. ``raw`` is all of their text, ``text`` leaves out calls, ``content`` thinking too."""

    raw: str = ""
    text: str = ""
    content: str = ""
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.raw += piece.raw
            self.text += piece.text
            if piece.reasoning is not None:
                self.reasoning = (self.reasoning or "") + piece.reasoning
            else:
                self.content += piece.text
            if piece.call is not None:
                self.calls.append(piece.call)


class AnswerParts:
    """The pieces of one answer. ``tools`` are what it may call, ``thinking`` what separates its thinking."""

    def __init__(
        self, text: AnswerText, *, thinking: ThinkingText | None = None, tools: ToolUse | None = None
    ) -> None:
        self._text = text
        self._thinking = thinking
        marks = None if thinking is None else thinking.marks
        self._left = ThinkingText(marks.left) if marks is not None and marks.answer else None
        self._calls = None if tools is None else tools.parser()
        self._thoughts = _Thoughts(None if tools is None else tools.parser(bare=False))

    @property
    def stop_text(self) -> str | None:
        """The stop text at which the answer ends; None if it ends at none."""
        return self._text.stop_text

    def text_of(self, token: int, held: int = 0) -> str:
        """The text of a token alone, behind its first ``held`` bytes. Half of a character is U+FFFD."""
        return self._text.text_of(token, held)

    @property
    def thinks(self) -> bool:
        """Whether thinking is open."""
        return self._thinking is not None and self._thinking.inside

    def feed(self, token: int, held: int = 0) -> tuple[list[Piece], bool]:
        """(the pieces that are certain, whether a stop string is complete). ``held`` bytes of it are left out."""
        text, stopped = self._text.feed(token, held)
        return self._read(text), stopped

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, at the end of the answer; ``cut``: it did not end itself."""
        pieces = self._read(self._text.flush(cut=cut))
        if self._thinking is not None:
            pieces += self._separated(self._thinking.flush())
        pieces += self._unfinished()
        return joined(pieces + self._thoughts.end(0 if self._calls is None else self._calls.count))

    def _read(self, text: str) -> list[Piece]:
        if self._thinking is None:
            return self._said(text)
        return self._separated(self._thinking.feed(text))

    def _separated(self, stretches: list[tuple[str, Says]]) -> list[Piece]:
        pieces = list[Piece]()
        for text, says in stretches:
            if says is Says.THOUGHT:
                pieces += self._thoughts.feed(text)
            elif says is Says.MARK:
                pieces += [*self._thoughts.close(), *self._unfinished(), Piece(text, text, "")]
            else:
                pieces += self._said(text)
        return joined(pieces)

    def _unfinished(self) -> list[Piece]:
        """What may have become a call outside thinking."""
        pieces = [] if self._calls is None else self._shown(self._calls.flush())
        return pieces if self._left is None else pieces + _without_marks(self._left.flush())

    def _said(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._shown(self._calls.feed(text))
        return self._shown([Piece(text, text)] if text else [])

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces outside thinking, their text without the marks that are left in it."""
        if self._left is None:
            return pieces
        shown = list[Piece]()
        for piece in pieces:
            if piece.call is not None or piece.raw != piece.text:  # a call, or text with the blanks behind one
                blanks = piece.raw.removesuffix(piece.text)
                shown += [*_without_marks(self._left.flush()), replace(piece, raw=blanks, text="")]
            shown += _without_marks(self._left.feed(piece.text))
        return shown


def _without_marks(stretches: list[tuple[str, Says]]) -> list[Piece]:
    return [Piece(text, text, None if says is Says.ANSWER else "") for text, says in stretches]


class _Thoughts:
    """The pieces of thinking, without its outer blanks.

    Thinking holds no calls, unless it never closes and they are its end: those are held back until more text comes.
    """

    def __init__(self, calls: CallText | None) -> None:
        self._calls = calls
        self._open = False
        self._pending = list[Piece]()  # calls, if no text comes after them
        self._blanks = ""  # held back: blanks before the closing mark are left out
        self._began = self._shown = False  # of the open thinking; of all of it
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        self._open = True
        return self._given([Piece(text, text)] if self._calls is None else self._calls.feed(text))

    def close(self) -> list[Piece]:
        """What was held back: the thinking closes."""
        held = self._pending + (self._calls.flush() if self._open and self._calls is not None else [])
        last = [self._thought("".join(piece.raw for piece in held))] if held else []
        self._pending, self._blanks, self._began = [], "", False
        return last

    def end(self, count: int) -> list[Piece]:
        """What was held back: the answer ends, and its last calls are calls. ``count``: calls outside thinking."""
        self._count = count
        pieces = [] if self._calls is None else self._given(self._calls.flush())
        for piece in self._pending:
            pieces.append(piece if piece.call is None else replace(piece, call=self._numbered(piece.call)))
        return pieces

    def _numbered(self, call: ToolCall) -> ToolCall:
        """The call with its number among those that count."""
        self._count += 1
        return replace(call, index=self._count - 1, id=f"{call.id[:-2]}{self._count - 1:02d}")

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        found = list[Piece]()
        for piece in pieces:
            self._pending.append(piece)
            if piece.text:
                found.append(self._thought("".join(each.raw for each in self._pending)))
                self._pending = []
        return found

    def _thought(self, raw: str) -> Piece:
        text = self._blanks + raw if self._began else raw.lstrip(BLANKS)
        shown = text.rstrip(BLANKS)
        between = "\n\n" if shown and self._shown and not self._began else ""
        self._blanks, self._began = text[len(shown) :], self._began or bool(shown)
        self._shown = self._shown or self._began
        return Piece(raw, raw, between + shown)
