"""The chat's slash commands."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.cli.answer_form import schema_text
from edgespec.cli.chat.talk import Talk
from edgespec.cli.options import check_thinking
from edgespec.cli.suggestions import Suggestion, for_file, for_model
from edgespec.cli.terminal.output import note, shortened, stdout_is_rich
from edgespec.cli.terminal.plan_view import plan_lines
from edgespec.cli.terminal.status import STATS_COLUMNS, stats_lines
from edgespec.errors import InvalidRequestError
from edgespec.files.disk import counted, expanded, readable_bytes
from edgespec.text.grammar.form import form_of

# Each command's usage, and what the command does, on one line of 80 columns: /help fits 80x24.
COMMANDS = (
    ("/help", "this list"),
    ("/retry", "answer the last prompt again, with another seed"),
    ("/more", "continue an answer that was cut or stopped"),
    ("/undo", "put the last prompt back in the line, and remove its answer"),
    ("/set", "show the sampling settings; to change one: /set temperature 0.7"),
    ("/system TEXT", 'set the system message; "none" removes it; without TEXT, show it'),
    ("/json", "answer in JSON; also /json SCHEMA, /json FILE; /json off ends it"),
    ("/save FILE", "save the conversation, with what the model has read of it"),
    ("/load FILE", "continue a saved conversation instead of this one"),
    ("/model NAME", "switch to another model; without NAME, show the current one"),
    ("/guesses", "turn the shading of guessed tokens on or off"),
    ("/copy", "copy the last answer to the clipboard"),
    ("/clear", "forget the conversation"),
    ("/stats", "show times and counts of the last answer"),
    ("/plan", "show where models run, and what guesses; /plan why says why"),
    ("/exit", "leave the chat (also Ctrl-D)"),
)

# Commands whose text may have several lines.
_LONG = ("/system", "/json")

# Keys and marks, listed by /help after the commands.
_KEYS = (
    ("//", "starts a prompt that begins with a slash"),
    ('"""', "starts and ends a prompt of several lines; a paste needs none"),
    ("Alt-Enter", "starts a new line (also Ctrl-J)"),
    ("Ctrl-C", "stops the answer, clears the line; in an empty line twice: leaves"),
)

_GUESS = (
    "A guess is a token from a smaller model or a copied text. The model checks several in one pass, and keeps "
    "those that it would have written."
)

_MOST = "max-tokens"

# Settings of /set: names of fields of Sampling, and the longest answer, with their types and common values.
SETTINGS: dict[str, tuple[type, tuple[str, ...]]] = {
    "temperature": (float, ("0", "0.7", "1")),
    "top-p": (float, ("0.8", "0.95", "1")),
    "top-k": (int, ("0", "20", "40")),
    "min-p": (float, ("0", "0.05")),
    "repeat-penalty": (float, ("1", "1.1")),
    "repeat-last-n": (int, ("-1", "64")),
    "presence-penalty": (float, ("0", "1.5")),
    "frequency-penalty": (float, ("0",)),
    "seed": (int, ("none",)),
    _MOST: (int, ("none", "200")),
}

# Width of the column with the labels of a plan.
_PLAN_COLUMNS = 9

# Characters that every terminal accepts (the limit of hterm and of old tmux). Some terminals drop longer copies.
_LONGEST_COPY = 74_994

# tmux answers within milliseconds; the limit is for a tmux server that hangs.
_TMUX_S = 2.0


@dataclass(frozen=True, slots=True)
class Leave:
    """The command ends the chat."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The command asks the model to answer ``prompt``."""

    prompt: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """The command asks the model to continue its answer."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The command gives ``prompt`` back, to be edited."""

    prompt: str


# What the chat has to do after a command.
Next: TypeAlias = Leave | Ask | GoOn | Edit


def is_command(text: str) -> bool:
    """Whether a prompt is a command. A prompt of several lines is a command only if the command's name exists."""
    if not text.startswith("/") or text.startswith("//"):
        return False
    return "\n" not in text.strip() or text.split(maxsplit=1)[0] in _names()


def unescaped(text: str) -> str:
    """A prompt without the slash that keeps it from being a command; code that begins with a comment stays whole."""
    return text[1:] if text.startswith("//") and is_command(f"/{text.lstrip('/')}") else text


def suggest(before: tuple[str, ...], word: str) -> Iterable[Suggestion]:
    """Completions of ``word``, which follows the words ``before`` in a command."""
    match before:
        case ():
            return ((usage.split()[0], what) for usage, what in COMMANDS)
        case ("/set",):
            return ((name, "") for name in SETTINGS)
        case ("/set", name) if name in SETTINGS:
            return ((value, "") for value in SETTINGS[name][1])
        case ("/plan",):
            return [("why", "all reasons")]
        case ("/json",):
            return [("off", "answers may be any text again")]
        case ("/model",):
            return for_model(word)
        case ("/save",) | ("/load",):
            return for_file(word)
    return ()


# Other names of commands; those without a slash leave a chat on a terminal.
_ALSO = {"/?": "/help", "/quit": "/exit", "/bye": "/exit"}
_LEAVES = ("exit", "quit", "bye")


def leaves(text: str) -> bool:
    """Whether a prompt is a word that ends a shell or another chat."""
    return text.strip().lower() in _LEAVES


def _names() -> set[str]:
    return {usage.split()[0] for usage, _ in COMMANDS} | set(_ALSO)


def _full_name(name: str) -> str:
    """The command that ``name`` is, or begins if no other begins so; else ``name`` itself."""
    begun = [each for each in _names() if each.startswith(name)]
    full = name if name in _names() else begun[0] if len(begun) == 1 else name
    return _ALSO.get(full, full)


class Commands:
    """Runs the commands of one chat."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.shows_guesses = False

    def obey(self, line: str) -> Next | None:
        """Run a command and return what the chat has to do next, if anything. Raises EdgespecError."""
        name, *rest = line.split(maxsplit=1)
        text, talk = (rest[0] if rest else None), self._talk
        full = _full_name(name)
        if "\n" in line and full in _names() and full not in _LONG:
            note(f"{full} takes one line, and nothing was run: send the lines after it by themselves")
            return Edit(line)
        match full:
            case "/exit":
                return Leave()
            case "/help":
                _print_help()
            case "/clear":
                talk.session.clear()
                talk.asked = None
                note("the conversation was cleared", dim=True)
            case "/retry":
                return self._retry()
            case "/undo":
                undone = talk.take_back()
                note("there is nothing to undo" if undone is None else f"undone: {shortened(undone)}", dim=True)
                return None if undone is None else Edit(undone)
            case "/more":
                return self._more()
            case "/set":
                self._set(text.split() if text else [])
            case "/system":
                self._set_system(text)
            case "/json":
                self._set_form(text)
            case "/save":
                path = _file_named(name, text)
                size = talk.session.save(path)
                note(f"{_turns(talk)} saved to {path} ({readable_bytes(size)})", dim=True)
            case "/load":
                talk.restore(path := _file_named(name, text))
                note(f"{_turns(talk)} loaded from {path}; the next prompt continues the conversation", dim=True)
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
                self._show_plan(whole=text is not None)
            case other:
                near = get_close_matches(other, _names(), n=1)
                meant = f"did you mean {near[0]}? " if near else ""
                note(f"{other} is not a command; {meant}/help lists them, and // starts a prompt with a slash")
        return None

    def _more(self) -> Ask | GoOn | None:
        talk = self._talk
        if talk.unanswered is not None:
            note(f"asked again: {shortened(talk.unanswered)}", dim=True)
            return Ask(talk.unanswered)
        complete = talk.why_complete()
        if complete is None:
            return GoOn()
        note(complete, dim=True)
        return None

    def _retry(self) -> Ask | None:
        talk = self._talk
        again = talk.take_back()
        if again is None:
            note("there is no answer to try again", dim=True)
            return None
        if talk.sampling.greedy:
            note("greedy decoding gives the same answer again; /set temperature 0.7 samples another", dim=True)
        else:
            talk.set(seed=None)
        return Ask(again)

    def _set_system(self, text: str | None) -> None:
        session = self._talk.session
        if text is not None:
            session.system = None if text.strip().lower() == "none" else text
        own = session.system
        note("there is no system message" if own is None else f"system message: {shortened(own)}", dim=True)

    def _set(self, words: list[str]) -> None:
        """Change the setting that ``words`` name, if any, and show all settings."""
        if words:
            self._talk.set(**_setting(words))
        for name in SETTINGS:
            value = getattr(self._talk if name == _MOST else self._talk.sampling, name.replace("-", "_"))
            unset = "as the context allows" if name == _MOST else "random for each answer"
            note(f"{name:18}{unset if value is None else value}")

    def _set_form(self, text: str | None) -> None:
        """Write the next answers as any JSON object, by a schema, or for ``off`` as any text."""
        talk = self._talk
        if text is not None and text.strip().lower() == "off":
            talk.form = None
            note("the next answers may be any text", dim=True)
            return
        form = form_of({"type": "object"}, spacing="free") if text is None else form_of(schema_text(_path(text)))
        if form is not None:
            talk.engine.pair.forms.compiled(form)  # reports a schema that cannot be followed before a prompt is typed
        talk.form = form
        what = "JSON objects" if text is None else "JSON that the schema allows"
        note(f"the next answers are {what}; /json off ends it", dim=True)

    def _set_model(self, model: str | None) -> None:
        talk = self._talk
        if model is not None:
            talk.switch(_path(model))
            check_thinking(talk.engine, think=talk.think)
        ready = "continues the conversation" if talk.session.messages else "is ready"
        now = "is the model" if model is None else ready
        note(f"{talk.engine.plan.target.model} {now}", dim=True)

    def _show_guesses(self) -> None:
        if not self.shows_guesses and not stdout_is_rich():
            note("guesses are shown in colours, and this terminal shows no colours")
            return
        self.shows_guesses = not self.shows_guesses
        if self.shows_guesses:
            note("from the next answer on, tokens that were guessed correctly are shaded")
        else:
            note("guesses are no longer shaded", dim=True)

    def _show_plan(self, *, whole: bool) -> None:
        engine = self._talk.engine
        if whole:
            for reason in engine.plan.reasons:
                note(f"- {reason}")
            return
        for label, line in plan_lines(engine.plan, engine.pair.ranking, "/plan why says why"):
            note(f"{label:{_PLAN_COLUMNS}}{line}", hang=_PLAN_COLUMNS)

    def _copy(self) -> None:
        talk = self._talk
        if not talk.answered:
            note("no answer yet")
            return
        whole, last = talk.session.messages[-1]["content"], talk.last
        # The end of an answer that was continued, or loaded, is not all of it.
        answer = last.content if last is not None and last.text == whole else talk.begun
        note(copy(answer or whole), dim=True)


def copy(text: str) -> str:
    """Put a text into the terminal's clipboard and return a message about the result."""
    count = counted(len(text), "character")
    named = os.environ.get("TERM", "" if sys.platform == "win32" else "dumb")  # Windows sets no TERM
    if not sys.stdout.isatty() or named in ("dumb", "linux"):
        return "this terminal has no clipboard"
    tmux = shutil.which("tmux") if os.environ.get("TMUX") else None
    if tmux is not None:  # by default tmux ignores escape codes for the clipboard
        command = [tmux, "load-buffer", "-w", "-"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=_TMUX_S)
            return f"{count} copied into tmux's buffer, and to the clipboard if the terminal allows it"
    encoded = base64.b64encode(text.encode()).decode()
    sys.stdout.write(f"\x1b]52;c;{encoded}\x07")
    sys.stdout.flush()
    long = "; some terminals drop a text of this length" if len(encoded) > _LONGEST_COPY else ""
    return f"{count} sent to the terminal, which copies them if it supports OSC 52 (most do){long}"


def _print_help() -> None:
    width = max(len(usage) for usage, _ in (*COMMANDS, *_KEYS)) + 2
    for usage, what in (*COMMANDS, *_KEYS):
        note(f"{usage:{width}}{what}", hang=width)
    note(_GUESS)


def _setting(words: list[str]) -> dict[str, Any]:
    """The field of Sampling to change, and its new value. Raises InvalidRequestError."""
    name = words[0].lower().replace("_", "-")
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"settings: {', '.join(SETTINGS)}"
        raise InvalidRequestError(f"there is no setting {words[0]!r}", hint=hint)
    if len(words) != 2:
        raise InvalidRequestError(f"/set {name} takes one value", hint="for example /set temperature 0.7")
    if name in ("seed", _MOST) and words[1].lower() in ("none", "drawn"):
        return {name.replace("-", "_"): None}
    kind = SETTINGS[name][0]
    try:
        return {name.replace("-", "_"): kind(words[1])}
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        hint = f"for example /set {name} {'7' if kind is int else '0.7'}"
        raise InvalidRequestError(f"{name} must be {what}, got {words[1]!r}", hint=hint) from error


def _file_named(command: str, text: str | None) -> Path:
    """The file that a command names. Raises InvalidRequestError without one."""
    if text is None:
        raise InvalidRequestError(f"{command} takes a file", hint=f"for example {command} talk.session")
    return Path(_path(text))


def _path(text: str) -> str:
    """The path that a text names, without its quotes, as a shell would expand it; a model's name may be one."""
    path = text.strip()
    quoted = len(path) > 2 and path[0] == path[-1] and path[0] in "'\""  # as in a shell
    path = path[1:-1] if quoted else path
    return str(expanded(path)) if path.startswith("~") else path


def _turns(talk: Talk) -> str:
    return counted(sum(message["role"] == "user" for message in talk.session.messages), "turn")
