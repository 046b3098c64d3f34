"""A chat: it reads prompts, obeys commands and prints answers until it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from edgespec.cli.chat.chat_commands import (
    Ask,
    Commands,
    Edit,
    GoOn,
    Leave,
    is_command,
    leaves,
    suggest,
    unescaped,
)
from edgespec.cli.chat.drafter_offer import open_with_offer
from edgespec.cli.chat.idle_calibration import IdleCalibration
from edgespec.cli.chat.kept_conversation import KeptConversation, name_of
from edgespec.cli.chat.prompts import FIRST, FURTHER, LinePrompts, Prompt, Prompts
from edgespec.cli.chat.talk import Talk
from edgespec.cli.memory import for_chat
from edgespec.cli.options import AnswerFlags, SeededFlags, check_thinking, open_engine
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import State, note, print_error, shortened
from edgespec.cli.terminal.status import StatusLine, follow_answer, print_done
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.files.disk import counted
from edgespec.files.home import home
from edgespec.store.locate import Locator
from edgespec.store.store import Store

_NOT_BEGUN = "stopped before the answer began; /more asks again, /undo brings your text back"


def run_chat(
    state: State,
    flags: AnswerFlags,
    drawn: SeededFlags,
    *,
    system: str | None,
    continued: bool,
    max_tokens: int | None,
    think: bool,
    json: bool,
) -> None:
    """Run the chat that ``edgespec chat`` asks for, to its end."""
    named = flags.named
    drawn.over(Sampling())  # reports wrong values before a model is loaded
    kept = KeptConversation.read(home()) if continued else None
    if kept is not None:
        named, system = named or kept.model, kept.system if system is None else system
    profile = flags.resolve(target=named)
    Locator(store=Store(home())).check(profile.target)  # before anything is printed
    chosen = for_chat(profile)

    def load(another: str | None) -> Engine:
        other = flags.resolve(target=another or named)
        if another is not None and other.draft != "none":  # a named drafter is for the first model only
            other = replace(other, draft="auto")
        return open_engine(for_chat(other), state)

    interactive, prompts = sys.stdin.isatty(), _prompts(state.interrupts, keeps=chosen.history is True)
    with (
        open_with_offer(chosen, state, as_json=json, prompts=prompts) as engine,
        prompts.held(),
        Talk(
            engine,
            load,
            system=system,
            messages=() if kept is None else kept.messages,
            think=think,
            drawn=drawn.given(),
            as_file=interactive and not json,
            max_tokens=max_tokens,
            before_reload=state.interrupts.obeyed,
        ) as talk,
    ):
        check_thinking(engine, think=think)
        greeting = [f"{engine.plan.target.model} is ready. /help lists commands."]
        greeting = greeting if interactive and not state.quiet else []
        if kept is not None:
            greeting.append(continues(talk.session.messages))
        measuring = interactive and engine.can_calibrate
        status = StatusLine(reasons=not flags.plain, measuring=measuring, verbose=state.verbose, quiet=state.quiet)
        keeps = interactive and not json and chosen.history is True
        going = _Chat(talk, state.interrupts, status, as_json=json, keeps=keeps, interactive=interactive)
        going.run(prompts, greeting)


def _prompts(interrupts: Interrupts, *, keeps: bool) -> Prompts:
    """The reader of prompts that fits stdin: with an editor on a capable terminal, else line by line.

    ``keeps``: the lines that are typed in the editor are kept for later chats.
    """
    if not sys.stdin.isatty():
        return LinePrompts(interrupts)
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return LinePrompts(interrupts, FIRST, FURTHER)
    from edgespec.cli.chat.editing import EditedPrompts
    from edgespec.cli.chat.prompt_history import PromptHistory

    return EditedPrompts(interrupts, PromptHistory(home(), keeps=keeps), suggest)


class _Chat:
    def __init__(
        self,
        talk: Talk,
        interrupts: Interrupts,
        status: StatusLine,
        *,
        as_json: bool,
        keeps: bool,
        interactive: bool,
    ) -> None:
        """``keeps``: the conversation is kept for ``--continue``. ``interactive``: a person types the prompts."""
        self._talk = talk
        self._commands = Commands(talk)
        self._interrupts = interrupts
        self._as_json = as_json
        self._status = status
        self._failed = False
        self._keeps = keeps
        self._interactive = interactive
        self._forgives = (signal.SIGINT,) if interactive else ()
        self._kept = talk.session.messages  # as the file has them, or as the chat began
        self._begun = ""  # of the next prompt
        # Used only if prompts are typed: from a pipe the next prompt is available immediately.
        self._idle = IdleCalibration(talk.engine)

    def run(self, prompts: Prompts, greeting: Sequence[str]) -> None:
        """Print the lines of ``greeting``, and answer prompts until the chat ends."""
        with self._interrupts.during(forgives=self._forgives), self._idle:
            for line in greeting:  # from now on Ctrl-C does not end the program
                note(line, dim=True)
            while True:
                try:
                    if not self._turn(prompts):
                        break
                except KeyboardInterrupt:
                    if self._interrupts.leaving:
                        raise
                    # A terminal that we do not draw needs a line break after the typed text.
                    note(f"{'' if prompts.drawn else chr(10)}Ctrl-C again within 2 s, or /exit, leaves", dim=True)
                if self._interrupts.pending():
                    prompts.unsend()
                self._interrupts.obeyed()
        if self._failed and not self._interactive:
            raise typer.Exit(1)

    def _turn(self, prompts: Prompts) -> bool:
        """Read a prompt and obey or answer it; False at the end. Raises KeyboardInterrupt."""
        try:
            begun, self._begun = self._begun, ""
            prompt = prompts.read(begun)
            self._say_what_was_measured()
        except EdgespecError as error:  # a line that is not UTF-8; the chat continues with the next line
            self._fail(error)
            return True
        if prompt is None or (self._interactive and not prompt.quoted and leaves(prompt.text)):
            asked = None
        else:
            asked = self._to_answer(prompt)
        self._keep()
        if asked is None or (isinstance(asked, str) and not asked.strip()):
            return asked is not None
        self._answer_until_stopped(asked)
        if self._interrupts.leaving:
            raise KeyboardInterrupt
        if self._interactive:
            self._idle.engine = self._talk.engine
            self._status.measuring |= self._talk.engine.can_calibrate
            self._idle.start()
        return True

    def _say_what_was_measured(self) -> None:
        line = self._idle.stop()
        if line is not None:
            note(line, dim=True)

    def _keep(self) -> None:
        """Write the conversation to its file if it has changed."""
        if self._keeps and not self._talk.session.closed and self._talk.session.messages != self._kept:
            before, self._kept = self._kept, self._talk.session.messages
            session, model = self._talk.session, name_of(self._talk.engine.profile.target)
            turns = self._talk.turns()
            # A system message alone does not take the place of an earlier chat's conversation.
            if turns or any(message["role"] != "system" for message in before):
                KeptConversation(model, session.system, turns).write(home())

    def _to_answer(self, prompt: Prompt) -> str | GoOn | None:
        """Run commands; return the text to answer, "" if there is none, None if the chat ends."""
        if prompt.quoted or not is_command(prompt.text):
            return prompt.text if prompt.quoted else unescaped(prompt.text)
        try:
            match self._commands.obey(prompt.text.strip()):
                case Leave():
                    return None
                case Ask(again):
                    return again
                case GoOn() as more:
                    return more
                case Edit(before):
                    self._begun = before
        except EdgespecError as error:
            if self._talk.session.closed:  # no model is loaded any more
                raise
            self._fail(error)
        return ""

    def _answer_until_stopped(self, prompt: str | GoOn) -> None:
        try:
            with self._interrupts.during(self._talk.cancel, forgives=self._forgives, counts=False):
                self._answer(prompt)
                self._keep()
        except KeyboardInterrupt:  # Ctrl-C came just before
            if self._interrupts.leaving or isinstance(prompt, GoOn):
                raise
            self._talk.ask(prompt)
            note(_NOT_BEGUN, dim=True)

    def _answer(self, prompt: str | GoOn) -> None:
        talk = self._talk
        try:
            generation = talk.go_on() if isinstance(prompt, GoOn) else talk.generate(prompt)
            begun = talk.begun if isinstance(prompt, GoOn) else ""
            shades = self._commands.shows_guesses
            done = follow_answer(generation, as_json=self._as_json, guesses=shades, begun=begun)
            talk.ended(done)
            if talk.unanswered is None:
                talk.last = done
            print_done(done, self._status, as_json=self._as_json, instead=talk.unanswered and _NOT_BEGUN)
        except EdgespecError as error:
            talk.ended(None)
            self._fail(error)

    def _fail(self, error: EdgespecError) -> None:
        """Report an error. The chat continues, and the conversation does not contain a prompt that failed."""
        self._failed = True
        print_error(error, as_json=self._as_json)


def continues(messages: Sequence[Mapping[str, Any]]) -> str:
    """A line that says which conversation is continued."""
    asked = [str(message["content"]) for message in messages if message["role"] == "user"]
    last = shortened(asked[-1]) if asked else ""
    return f"the last conversation continues: {counted(len(asked), 'turn')}, the last one: {last}"
