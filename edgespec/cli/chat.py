"""``edgespec chat``."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import psutil
import typer

from edgespec.cli.drafter_offer import open_with_offer
from edgespec.cli.ending import Ending
from edgespec.cli.idle_calibration import IdleCalibration
from edgespec.cli.interrupts import Interrupts
from edgespec.cli.options import (
    ContextOption,
    DepthOption,
    DraftOption,
    ExactnessOption,
    JsonOption,
    MinPOption,
    ProfileOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    resolve_profile,
    sampling_of,
    state_of,
)
from edgespec.cli.output import decode_input, note, print_error
from edgespec.cli.status import StatusLine, follow_answer, print_done, stats_lines
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.errors import EdgespecError, InvalidRequestError
from edgespec.files.home import Home, home

HELP = """/help         this list
/retry        answer the last prompt again, with another seed
/undo         take the last prompt and its answer back
/set          how answers are drawn; to change it: /set temperature 0.7
/system TEXT  another system message; "none" removes it, nothing shows it
/clear        forget the conversation
/stats        what the last answer took, and how many guesses were right
/plan         what runs where, who guesses, and why
/exit         leave (Ctrl-D too)
//            a prompt that begins with a slash
\"\"\"           starts and ends several lines; Ctrl-C stops, twice leaves
A guess is a token that a smaller model, or a copy of the text, proposes. Several are checked at once."""

# What /set knows: fields of Sampling by the names they are shown under.
SETTINGS = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "repeat-penalty": float,
    "presence-penalty": float,
    "frequency-penalty": float,
    "seed": int,
}


def chat(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --target.")] = None,
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    context_length: ContextOption = None,
    depth: DepthOption = None,
    exactness: ExactnessOption = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> None:
    """Talk to the model. Reads prompts line by line when stdin is not a terminal.

    On a terminal answers are drawn as the model's file says, if it does; from a pipe and with --json greedily.
    """
    state = state_of(context)
    if model is not None and target is not None:
        raise InvalidRequestError("the model was named twice", hint="give MODEL or --target MODEL")
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling_of(Sampling(), **drawn)  # before a model is loaded for it
    chosen = resolve_profile(
        profile, target=model or target, draft=draft, context=context_length, depth=depth, exactness=exactness
    )
    with open_with_offer(chosen, state, as_json=json) as engine, engine.session(system=system) as session:
        interactive = sys.stdin.isatty()
        if interactive and not json:
            note(f"{engine.plan.target.model} is ready. /help lists commands.", dim=True)
        usual = engine.file_sampling if interactive and not json else Sampling()
        sampling = sampling_of(usual, rule=chosen.rule, **drawn)
        with _line_history(home()) if interactive else contextlib.nullcontext():
            status = StatusLine(measuring=interactive and engine.can_calibrate)
            _Chat(engine, session, state.ending, status, as_json=json, max_tokens=max_tokens, sampling=sampling).run(
                _read_prompts(interactive), interactive
            )


def _is_command(prompt: str) -> bool:
    return prompt.startswith("/") and not prompt.startswith("//")


class _Chat:
    def __init__(
        self,
        engine: Engine,
        session: Session,
        ending: Ending,
        status: StatusLine,
        *,
        as_json: bool,
        max_tokens: int | None,
        sampling: Sampling,
    ) -> None:
        self._engine = engine
        self._ending = ending
        self._session = session
        self._as_json = as_json
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._last: Done | None = None
        self._status = status
        self._failed = False
        self._again: str | None = None  # the prompt that /retry answers next
        self._asked: str | None = None  # the latest prompt, answered or not; None once it is taken back
        # From a pipe the next prompt is there already: nobody waits for a person, so nothing is measured meanwhile.
        self._idle = IdleCalibration(engine)

    def run(self, prompts: Iterator[tuple[str, bool]], interactive: bool) -> None:
        with Interrupts(self._session, self._ending).installed() as interrupts, self._idle:
            while True:
                try:
                    try:
                        prompt, quoted = next(prompts, (None, False))
                        self._say_what_was_measured()
                    except EdgespecError as error:  # a line that is no text: the next one may be
                        self._fail(error)
                        prompts = _read_prompts(interactive)
                        continue
                    command = prompt is not None and _is_command(prompt) and not quoted
                    if prompt is None or (command and self._command(prompt.strip())):
                        break
                    if command:
                        prompt, self._again = self._again or "", None
                    elif prompt.startswith("//") and not quoted:
                        prompt = prompt[1:]
                    if not prompt.strip():
                        continue
                    with interrupts.answering():
                        self._answer(prompt)
                    if self._ending.number is not None:
                        raise KeyboardInterrupt
                    if interactive:
                        self._idle.start()
                except KeyboardInterrupt:
                    if interrupts.leaving or self._ending.number is not None or not interactive:
                        raise
                    note("\nCtrl-C again within 2 s, or /exit, leaves", dim=True)
                    prompts = _read_prompts(interactive)
        if self._failed and not interactive:
            raise typer.Exit(1)

    def _say_what_was_measured(self) -> None:
        line = self._idle.stop()
        if line is not None:
            note(line, dim=True)

    def _answer(self, prompt: str) -> None:
        self._asked = prompt
        try:
            generation = self._session.generate(prompt, max_tokens=self._max_tokens, sampling=self._sampling)
            self._last = follow_answer(generation, as_json=self._as_json)
            print_done(self._last, self._status, as_json=self._as_json)
        except EdgespecError as error:
            self._fail(error)

    def _fail(self, error: EdgespecError) -> None:
        """Say it; the chat goes on, and the prompt that failed is not part of the conversation."""
        self._failed = True
        print_error(error, as_json=self._as_json)

    def _command(self, line: str) -> bool:
        """Obey a slash command; True if it ends the chat."""
        name, *rest = line.split(maxsplit=1)
        match name:
            case "/exit" | "/quit" | "/bye":
                return True
            case "/help":
                note(HELP)
            case "/clear":
                self._session.clear()
                self._asked = None
                note("the conversation is forgotten", dim=True)
            case "/retry":
                self._retry()
            case "/undo":
                undone = self._take_back()
                note("there is nothing to undo" if undone is None else f"undone: {_shortened(undone)}", dim=True)
            case "/set":
                self._set(rest[0].split() if rest else [])
            case "/system":
                self._set_system(rest[0] if rest else None)
            case "/stats":
                if self._last is None:
                    note("no answer yet")
                else:
                    for line in stats_lines(self._last):
                        note(line)
            case "/plan":
                for reason in self._engine.plan.reasons:
                    note(f"- {reason}")
            case other:
                note(f"{other} is not a command; /help lists them")
        return False

    def _take_back(self) -> str | None:
        """Forget the latest prompt: the turn that it became, or only itself where nothing was answered."""
        asked, self._asked = self._asked, None
        turns = [message["content"] for message in self._session.messages if message["role"] == "user"]
        if asked is not None and turns[-1:] != [asked]:
            return asked
        return self._session.undo()

    def _retry(self) -> None:
        self._again = self._take_back()
        if self._again is None:
            note("there is no answer to try again", dim=True)
        elif self._sampling.greedy:
            note("greedy decoding gives the same answer; /set temperature 0.7 gives others", dim=True)
        else:
            self._sampling = replace(self._sampling, seed=None)

    def _set_system(self, text: str | None) -> None:
        if text is not None:
            self._session.system = None if text.strip().lower() == "none" else text
        own = self._session.system
        note("there is no system message" if own is None else f"system message: {_shortened(own)}", dim=True)

    def _set(self, words: list[str]) -> None:
        """Show how answers are drawn, after changing it as the words say."""
        try:
            if words:
                self._sampling = replace(self._sampling, **_setting(words))
        except EdgespecError as error:
            print_error(error, as_json=False)
            return
        for name in SETTINGS:
            value = getattr(self._sampling, name.replace("-", "_"))
            note(f"{name:18}{'drawn for each answer' if value is None else value}")


def _setting(words: list[str]) -> dict[str, Any]:
    """The field of Sampling that is to change, and its value. Raises InvalidRequestError."""
    name, kind = words[0].lower().replace("_", "-"), SETTINGS.get(words[0].lower().replace("_", "-"))
    if kind is None:
        raise InvalidRequestError(f"there is no setting {words[0]!r}", hint=f"settings: {', '.join(SETTINGS)}")
    if len(words) != 2:
        raise InvalidRequestError(f"/set {name} takes one value", hint="for example /set temperature 0.7")
    if name == "seed" and words[1].lower() in ("none", "drawn"):
        return {"seed": None}
    try:
        return {name.replace("-", "_"): kind(words[1])}
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        hint = f"for example /set {name} {'7' if kind is int else '0.7'}"
        raise InvalidRequestError(f"{name} is {what}, not {words[1]!r}", hint=hint) from error


def _shortened(text: str) -> str:
    """A text on one line, cut where it is long."""
    return textwrap.shorten(text, 60, placeholder=" …")


def _read_prompts(interactive: bool) -> Iterator[tuple[str, bool]]:
    """Prompts from stdin: a line each, or several lines between two triple quotes (and whether it was those)."""
    while True:
        line = _read_line("> " if interactive else "")
        if line is None:
            return
        if not line.lstrip().startswith('"""'):
            yield line, False
            continue
        lines = [line.lstrip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            following = _read_line(". " if interactive else "")
            if following is None:
                yield "\n".join(lines), True
                return
            lines.append(following)
        lines[-1] = lines[-1].rstrip()[:-3]
        yield "\n".join(lines).strip("\n"), True


# Lines of history kept; bash keeps as many.
_HISTORY_LINES = 500


@contextlib.contextmanager
def _line_history(place: Home) -> Iterator[None]:
    """Lines of earlier chats by arrow key, where the platform has readline. Only the user may read the file."""
    try:
        import readline
    except ImportError:
        yield
        return
    _remove_torn_history(place)
    with contextlib.suppress(OSError):
        readline.read_history_file(place.history)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, EdgespecError):
            place.create(place.root)
            readline.set_history_length(_HISTORY_LINES)
            readline.write_history_file(place.history)
            place.history.chmod(0o600)


def _remove_torn_history(place: Home) -> None:
    """What readline writes beside the history, of processes that were killed meanwhile."""
    with contextlib.suppress(OSError):
        for path in place.root.glob(f"{place.history.name}-*.tmp"):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and not psutil.pid_exists(int(number)):
                path.unlink()


def _read_line(prompt: str) -> str | None:
    if prompt and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing, where the platform has it)
        try:
            return input(prompt)
        except UnicodeDecodeError as error:
            return decode_input(error.object)  # says what is wrong with it
        except EOFError:
            note("")
            return None
    if prompt:
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.buffer.readline()
    return decode_input(line).rstrip("\r\n") if line else None
