"""Prompts that are typed in a terminal. Importing this loads prompt_toolkit, which takes a tenth of a second."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

from edgespec.cli.output import decode_input, enter_as_key, note
from edgespec.cli.prompt_history import PromptHistory
from edgespec.cli.prompts import FIRST, FURTHER, Prompt, unquoted
from edgespec.cli.suggestions import Suggest

_LONGEST_LINE = 4096  # of a terminal on Linux, in bytes; others have shorter ones


class EditedPrompts:
    """Prompts of one or more lines: pasted lines are one prompt, Enter sends it, Alt-Enter and Ctrl-J break a line.

    The arrow keys walk through earlier ones, and Ctrl-R searches them. Commands are completed as they are typed.
    """

    drawn = True

    def __init__(self, history: PromptHistory, suggest: Suggest) -> None:
        session: PromptSession[str] = PromptSession(
            FIRST,
            multiline=True,
            prompt_continuation=lambda width, _line, _wraps: FURTHER.rjust(width),
            history=_Known(history),
            completer=_Commands(suggest),
            complete_while_typing=Condition(lambda: _begins_command(session.default_buffer.text)),
            key_bindings=_keys(),
            enable_suspend=True,
            color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
            interrupt_exception=_InterruptedError,
        )
        self._session = session

    def read(self) -> Prompt | None:
        try:
            with enter_as_key():  # also until the editor has begun
                ahead = _typed_ahead()
                sent = ahead.removesuffix("\n")
                if sent != ahead and "\n" not in sent:
                    text = self._session.prompt(default=sent, accept_default=True)
                else:  # nobody knows which lines belong together
                    text = self._session.prompt(default=ahead)
        except _InterruptedError:
            signal.raise_signal(signal.SIGINT)  # for who counts them
            raise KeyboardInterrupt from None
        except EOFError:
            note("")
            return None
        # Bytes that are no UTF-8 come as surrogates.
        text = decode_input(text.encode("utf-8", "surrogateescape"))
        return unquoted(text) or Prompt(text)


def _typed_ahead() -> str:
    """What was typed while nobody read, up to the last Enter: the editor would take one for Ctrl-J."""
    typed = b""
    with contextlib.suppress(OSError, ValueError):  # Windows cannot tell of a console
        number = sys.stdin.fileno()
        # A terminal that is not read key by key gives whole lines, one at a time. A Ctrl-D comes as an empty one.
        while select.select([number], [], [], 0)[0] and (line := os.read(number, _LONGEST_LINE)):
            typed += line
    # Enter is a carriage return where it was typed before the editor had ended.
    return typed.replace(b"\r", b"\n").decode("utf-8", "surrogateescape")


class _InterruptedError(Exception):
    """Ctrl-C, which a terminal gives as a key while a prompt is edited."""


def _begins_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unquoted(buffer.text) is None:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _Known(History):
    """The history of prompts, as prompt_toolkit asks for it: the newest first."""

    def __init__(self, history: PromptHistory) -> None:
        super().__init__()
        self._history = history

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._history.prompts)

    def store_string(self, string: str) -> None:
        self._history.add(string)


class _Commands(Completer):
    """Commands and their values, where the line begins with a slash."""

    def __init__(self, suggest: Suggest) -> None:
        self._suggest = suggest

    def get_completions(self, document: Document, _event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if not _begins_command(before):
            return
        word = before.split(" ")[-1]
        words = tuple(before.removesuffix(word).split())
        for value, what in self._suggest(words, word):
            if value.startswith(word):
                yield Completion(value, start_position=-len(word), display_meta=what)
