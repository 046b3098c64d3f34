"""The editor for prompts in a terminal. Importing it loads prompt_toolkit, which takes a tenth of a second."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

from edgespec.cli.chat.prompt_history import PromptHistory
from edgespec.cli.chat.prompts import FIRST, FURTHER, Prompt, unquoted
from edgespec.cli.suggestions import Suggest
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import decode_input, enter_as_key, note

_LONGEST_LINE = 4096  # bytes of a terminal's line on Linux; other systems have less


class EditedPrompts:
    """Reads prompts of one or more lines. Enter sends, Alt-Enter and Ctrl-J start a line, pasted lines stay together.

    The arrow keys recall earlier prompts, and Ctrl-R searches them. Ctrl-C clears a line with text.
    Commands are completed while the user types.
    """

    drawn = True

    def __init__(self, interrupts: Interrupts, history: PromptHistory, suggest: Suggest) -> None:
        self._interrupts = interrupts
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

    def read(self, begun: str = "") -> Prompt | None:
        while True:
            try:
                return self._edited(begun)
            except _ClearedError:
                begun = ""

    def _edited(self, begun: str) -> Prompt | None:
        try:
            with enter_as_key():  # also for keys typed before the editor starts
                ahead = begun + _typed_ahead()
                sent = ahead.removesuffix("\n")
                # Several lines may be one prompt, and a prompt that is given back is edited: the user decides.
                whole = sent != ahead and "\n" not in sent and not begun
                with self._interrupts.during(self._leave_editor, forgives=(signal.SIGINT,)):
                    text = self._session.prompt(
                        default=sent if whole else ahead, accept_default=whole, handle_sigint=False
                    )
        except _InterruptedError:
            if not self._interrupts.pending():  # Ctrl-C as a key
                signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt from None
        except EOFError:
            note("")
            return None
        # The editor gives bytes that are not UTF-8 as surrogates.
        text = decode_input(text.encode("utf-8", "surrogateescape"))
        return unquoted(text) or Prompt(text)

    def _leave_editor(self) -> None:
        """End the editing from another thread."""
        editor = self._session.app
        loop = editor.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(_leave, editor)


def _leave(editor: Application[str]) -> None:
    if editor.is_running and not editor.is_done:
        editor.exit(exception=_InterruptedError())


def _typed_ahead() -> str:
    """Lines typed before the editor started. The editor would read their Enter as Ctrl-J."""
    typed = b""
    with contextlib.suppress(OSError, ValueError):  # Windows cannot select on a console
        number = sys.stdin.fileno()
        # In line mode a terminal gives one whole line for each read, and an empty line for Ctrl-D.
        while select.select([number], [], [], 0)[0] and (line := os.read(number, _LONGEST_LINE)):
            typed += line
    # An Enter typed before the previous editor ended is a carriage return.
    return typed.replace(b"\r", b"\n").decode("utf-8", "surrogateescape")


class _ClearedError(Exception):
    """Ctrl-C in a line with text, which is left on the screen as it is."""


class _InterruptedError(Exception):
    """Ctrl-C, which is a key and not a signal while a prompt is edited."""


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

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        left = _ClearedError() if event.current_buffer.text else _InterruptedError()
        event.app.exit(exception=left, style="class:aborting")

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _Known(History):
    """The history of prompts for prompt_toolkit, newest first."""

    def __init__(self, history: PromptHistory) -> None:
        super().__init__()
        self._history = history

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._history.prompts)

    def store_string(self, string: str) -> None:
        self._history.add(string)


class _Commands(Completer):
    """Completes commands and their values in a line that begins with a slash."""

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
