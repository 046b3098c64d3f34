"""The editor for prompts in a terminal. Importing it loads prompt_toolkit, which takes a tenth of a second."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import ConditionalKeyBindings, KeyBindings, KeyBindingsBase, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth

from edgespec.cli.chat.pastes import Pastes
from edgespec.cli.chat.prompt_history import PromptHistory
from edgespec.cli.chat.prompts import FIRST, FURTHER, Prompt, unquoted
from edgespec.cli.chat.typed_ahead import TypedAhead
from edgespec.cli.suggestions import Suggest
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import decode_input, note


class EditedPrompts:
    """Reads prompts of one or more lines. Enter sends, Alt-Enter and Ctrl-J start a line, pasted lines stay together.

    A marker stands for long text that is pasted, recalled or given back; Backspace behind a marker removes it.
    The arrow keys recall earlier prompts, and Ctrl-R searches them. Ctrl-C clears a line with text.
    Commands are completed while the user types. Within ``held``, keys typed between prompts are for the next ones.
    """

    drawn = True

    def __init__(self, interrupts: Interrupts, history: PromptHistory, suggest: Suggest) -> None:
        self._interrupts = interrupts
        self._pastes = Pastes()
        session: PromptSession[str] = PromptSession(
            FIRST,
            multiline=True,
            prompt_continuation=lambda width, _line, wraps: "" if wraps else FURTHER.rjust(width),
            history=_Known(history, self._pastes),
            completer=_Commands(suggest),
            complete_while_typing=Condition(lambda: _begins_command(session.default_buffer.text)),
            key_bindings=_keys(self._pastes),
            enable_suspend=True,
            color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
            interrupt_exception=_InterruptedError,
        )
        self._session = session
        self._ahead = TypedAhead(session.input)

    def held(self) -> AbstractContextManager[None]:
        return self._ahead.held()

    def typed_ahead(self) -> bool:
        return bool(self._ahead)

    def unsend(self) -> None:
        self._ahead.unsend()

    def read(self, begun: str = "") -> Prompt | None:
        while True:
            try:
                return self._edited(begun)
            except _ClearedError:
                begun = ""

    def _edited(self, begun: str) -> Prompt | None:
        if begun:  # a prompt that is given back is edited: the user decides
            self.unsend()
        try:
            with (
                self._ahead.given(),
                self._interrupts.during(self._leave_editor, forgives=(signal.SIGINT,)),
            ):
                shown = self._session.prompt(default=self._pastes.line(begun), handle_sigint=False)
        except _InterruptedError:
            if not self._interrupts.pending():  # Ctrl-C as a key
                signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt from None
        except EOFError:
            note("")
            return None
        # The editor gives bytes that are not UTF-8 as surrogates.
        text = decode_input(self._pastes.sent(shown).encode("utf-8", "surrogateescape"))
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


class _ClearedError(Exception):
    """Ctrl-C in a line with text, which is left on the screen as it is."""


class _InterruptedError(Exception):
    """Ctrl-C, which is a key and not a signal while a prompt is edited."""


def _begins_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _keys(pastes: Pastes) -> KeyBindingsBase:
    """The keys of the prompt itself: within the search of Ctrl-R each key has its usual meaning."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unquoted(pastes.whole(buffer.text)) is None:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        pasted = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(pastes.shown(pasted))

    @keys.add("backspace")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        marker = pastes.ends_with(buffer.document.text_before_cursor)
        buffer.delete_before_cursor(event.arg if marker is None else len(marker))

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        left = _ClearedError() if event.current_buffer.text else _InterruptedError()
        event.app.exit(exception=left, style="class:aborting")

    if sys.platform == "win32":  # there Ctrl-Z and Enter end what is typed

        @keys.add("c-z", filter=Condition(lambda: not get_app().current_buffer.text))
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=EOFError(), style="class:exiting")

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return ConditionalKeyBindings(keys, has_focus(DEFAULT_BUFFER))


class _Known(History):
    """The history of prompts for prompt_toolkit, newest first."""

    def __init__(self, history: PromptHistory, pastes: Pastes) -> None:
        super().__init__()
        self._history, self._pastes = history, pastes

    def load_history_strings(self) -> Iterable[str]:
        return map(self._pastes.line, reversed(self._history.prompts))

    def store_string(self, string: str) -> None:
        self._history.add(self._pastes.whole(string))


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
