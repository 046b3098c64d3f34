"""What a chat does where a line begins with a slash."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.cli.options import check_thinking
from edgespec.cli.output import note, stdout_is_rich
from edgespec.cli.status import STATS_COLUMNS, stats_lines
from edgespec.cli.suggestions import Suggestion, for_model
from edgespec.cli.talk import Talk
from edgespec.errors import InvalidRequestError

# Each command as it is written, and what it does.
COMMANDS = (
    ("/help", "this list"),
    ("/retry", "answer the last prompt again, with another seed"),
    ("/undo", "take the last prompt and its answer back"),
    ("/set", "how answers are drawn; to change it: /set temperature 0.7"),
    ("/system TEXT", 'another system message; "none" removes it, nothing shows it'),
    ("/model NAME", "go on with another model; nothing shows which it is"),
    ("/guesses", "shade the tokens that were guessed, or stop doing so"),
    ("/copy", "copy the last answer as it was written"),
    ("/clear", "forget the conversation"),
    ("/stats", "what the last answer took, and how many guesses were right"),
    ("/plan", "what runs where, who guesses, and why"),
    ("/exit", "leave (Ctrl-D too)"),
)

# What else there is to know, in the same two columns.
_KEYS = (
    ("//", "a prompt that begins with a slash"),
    ('"""', "starts and ends several lines; so does pasting them"),
    ("Alt-Enter", "another line (Ctrl-J too)"),
    ("Ctrl-C", "stops an answer; twice leaves"),
)

_GUESS = (
    "A guess is a token that a smaller model, or a copy of the text, proposes. Several are checked at once, and "
    "those that the model would have written itself are kept."
)

# What /set knows: fields of Sampling by the names they are shown under, and values that are common.
SETTINGS: dict[str, tuple[type, tuple[str, ...]]] = {
    "temperature": (float, ("0", "0.7", "1")),
    "top-p": (float, ("0.8", "0.95", "1")),
    "top-k": (int, ("0", "20", "40")),
    "min-p": (float, ("0", "0.05")),
    "repeat-penalty": (float, ("1", "1.1")),
    "presence-penalty": (float, ("0", "1.5")),
    "frequency-penalty": (float, ("0",)),
    "seed": (int, ("none",)),
}

# Terminals take at least so much (that is hterm's and tmux's limit of old), and what is longer may be dropped.
_LONGEST_COPY = 74_994

# tmux takes milliseconds; a server that hangs is not waited for.
_TMUX_S = 2.0


@dataclass(frozen=True, slots=True)
class Leave:
    """The chat ends."""


@dataclass(frozen=True, slots=True)
class Ask:
    """This prompt is to be answered."""

    prompt: str


def is_command(text: str) -> bool:
    """Whether a prompt is a command. Several lines are one only where its name is known: paths begin so too."""
    if not text.startswith("/") or text.startswith("//"):
        return False
    return "\n" not in text.strip() or text.split(maxsplit=1)[0] in _names()


def suggest(before: tuple[str, ...], word: str) -> Iterable[Suggestion]:
    """What ``word`` may become after these words of a command."""
    match before:
        case ():
            return ((usage.split()[0], what) for usage, what in COMMANDS)
        case ("/set",):
            return ((name, "") for name in SETTINGS)
        case ("/set", name) if name in SETTINGS:
            return ((value, "") for value in SETTINGS[name][1])
        case ("/model",):
            return for_model(word)
    return ()


def _names() -> set[str]:
    return {usage.split()[0] for usage, _ in COMMANDS} | {"/quit", "/bye"}


class Commands:
    """Obeys them, for one chat."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.shows_guesses = False

    def obey(self, line: str) -> Leave | Ask | None:
        """Do what the line says; what the chat has to do then. Raises EdgespecError."""
        name, *rest = line.split(maxsplit=1)
        text, talk = (rest[0] if rest else None), self._talk
        match name:
            case "/exit" | "/quit" | "/bye":
                return Leave()
            case "/help":
                _print_help()
            case "/clear":
                talk.session.clear()
                talk.asked = None
                note("the conversation is forgotten", dim=True)
            case "/retry":
                return self._retry()
            case "/undo":
                undone = talk.take_back()
                note("there is nothing to undo" if undone is None else f"undone: {_shortened(undone)}", dim=True)
            case "/set":
                self._set(text.split() if text else [])
            case "/system":
                self._set_system(text)
            case "/model":
                self._set_model(text)
            case "/guesses":
                self._show_guesses()
            case "/copy":
                self._copy()
            case "/stats":
                for line in ["no answer yet"] if talk.last is None else stats_lines(talk.last):
                    note(line, hang=STATS_COLUMNS)
            case "/plan":
                for reason in talk.engine.plan.reasons:
                    note(f"- {reason}")
            case other:
                note(f"{other} is not a command; /help lists them, and // begins a prompt with a slash")
        return None

    def _retry(self) -> Ask | None:
        talk = self._talk
        again = talk.take_back()
        if again is None:
            note("there is no answer to try again", dim=True)
            return None
        if talk.sampling.greedy:
            note("greedy decoding gives the same answer; /set temperature 0.7 gives others", dim=True)
        else:
            talk.set(seed=None)
        return Ask(again)

    def _set_system(self, text: str | None) -> None:
        session = self._talk.session
        if text is not None:
            session.system = None if text.strip().lower() == "none" else text
        own = session.system
        note("there is no system message" if own is None else f"system message: {_shortened(own)}", dim=True)

    def _set(self, words: list[str]) -> None:
        """Show how answers are drawn, after changing it as the words say."""
        if words:
            self._talk.set(**_setting(words))
        for name in SETTINGS:
            value = getattr(self._talk.sampling, name.replace("-", "_"))
            note(f"{name:18}{'drawn for each answer' if value is None else value}")

    def _set_model(self, model: str | None) -> None:
        talk = self._talk
        if model is not None:
            if model.startswith("~"):  # which a shell would have replaced
                with contextlib.suppress(RuntimeError):
                    model = str(Path(model).expanduser())
            talk.switch(model)
            check_thinking(talk.engine, think=talk.think)
        now = "answers" if model is None else "goes on with the conversation" if talk.session.messages else "is ready"
        note(f"{talk.engine.plan.target.model} {now}", dim=True)

    def _show_guesses(self) -> None:
        if not self.shows_guesses and not stdout_is_rich():
            note("guesses are shown in colours, and there are none here")
            return
        self.shows_guesses = not self.shows_guesses
        if self.shows_guesses:
            note("shaded: guessed, and found to be what the model itself would have written; from the next answer on")
        else:
            note("guesses are not shaded any more", dim=True)

    def _copy(self) -> None:
        last = self._talk.last
        if last is None:
            note("no answer yet")
            return
        marks = self._talk.engine.pair.prompts.thinking
        text = last.text if last.reasoning is None or marks is None else marks.answer_in(last.text)
        note(copy(text or last.text), dim=True)


def copy(text: str) -> str:
    """Put a text into the clipboard that the terminal knows; what came of it."""
    count = f"{len(text)} character{'' if len(text) == 1 else 's'}"
    named = os.environ.get("TERM", "" if sys.platform == "win32" else "dumb")  # Windows names none
    if not sys.stdout.isatty() or named in ("dumb", "linux"):
        return "this is no terminal with a clipboard"
    tmux = shutil.which("tmux") if os.environ.get("TMUX") else None
    if tmux is not None:  # which takes no escape codes for the clipboard unless it is told to
        command = [tmux, "load-buffer", "-w", "-"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=_TMUX_S)
            return f"{count} copied into tmux's buffer, and to the clipboard where its terminal allows that"
    encoded = base64.b64encode(text.encode()).decode()
    sys.stdout.write(f"\x1b]52;c;{encoded}\x07")
    sys.stdout.flush()
    long = "; it is long, and some terminals drop that" if len(encoded) > _LONGEST_COPY else ""
    return f"{count} sent to the terminal, which copies them if it takes OSC 52 (most do){long}"


def _print_help() -> None:
    width = max(len(usage) for usage, _ in (*COMMANDS, *_KEYS)) + 2
    for usage, what in (*COMMANDS, *_KEYS):
        note(f"{usage:{width}}{what}", hang=width)
    note(_GUESS)


def _setting(words: list[str]) -> dict[str, Any]:
    """The field of Sampling that is to change, and its value. Raises InvalidRequestError."""
    name = words[0].lower().replace("_", "-")
    if name not in SETTINGS:
        raise InvalidRequestError(f"there is no setting {words[0]!r}", hint=f"settings: {', '.join(SETTINGS)}")
    if len(words) != 2:
        raise InvalidRequestError(f"/set {name} takes one value", hint="for example /set temperature 0.7")
    if name == "seed" and words[1].lower() in ("none", "drawn"):
        return {"seed": None}
    kind = SETTINGS[name][0]
    try:
        return {name.replace("-", "_"): kind(words[1])}
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        hint = f"for example /set {name} {'7' if kind is int else '0.7'}"
        raise InvalidRequestError(f"{name} is {what}, not {words[1]!r}", hint=hint) from error


def _shortened(text: str) -> str:
    """A text on one line, cut where it is long."""
    return textwrap.shorten(text, 60, placeholder=" …")
