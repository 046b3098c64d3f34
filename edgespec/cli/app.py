"""The ``edgespec`` program: commands, exit codes, and the error messages that a person sees."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import typer

from edgespec import __version__
from edgespec.cli.parser import SETTINGS, Place, Program, nearest, value_sentence
from edgespec.cli.suggestions import names_with_colons
from edgespec.cli.terminal.interrupts import EXIT_INTERRUPTED
from edgespec.cli.terminal.output import NARROWEST, State, enable_native_log, prepare_streams, print_error
from edgespec.errors import CancelledError, DiskSpaceError, EdgespecError, InvalidRequestError, ProfileError
from edgespec.files.disk import FULL

EXIT_FAILED, EXIT_USAGE = 1, 2

_ANYWHERE = ("--debug", "--offline", "--quiet", "--verbose")

_USE, _MODELS, _MEASURE, _ADVANCED = "Use", "Models", "Measure", "Advanced"


class _Edgespec(Program):
    places: ClassVar[Mapping[str, Place]] = {
        "chat": Place(_USE, "edgespec.cli.chat.command", "chat", "Chat with a model."),
        "generate": Place(_USE, "edgespec.cli.generate", "generate", "Write one answer to stdout."),
        "serve": Place(_USE, "edgespec.cli.serve", "serve", "Serve a model over HTTP."),
        "pull": Place(_MODELS, "edgespec.cli.models", "pull", "Download models."),
        "models": Place(_MODELS, "edgespec.cli.models", "app", "List models; remove or verify some."),
        "doctor": Place(
            _MEASURE, "edgespec.cli.doctor.command", "doctor", "Check this machine: devices, runtimes, disk."
        ),
        "bench": Place(_MEASURE, "edgespec.cli.bench", "bench", "Measure how much faster guesses make answers."),
        "plan": Place(_ADVANCED, "edgespec.cli.plan", "plan", "Show what would run on which device, and why."),
        "calibrate": Place(_ADVANCED, "edgespec.cli.calibrate", "calibrate", "Measure the models on this machine."),
        "verify": Place(_ADVANCED, "edgespec.cli.verify", "verify", "Check that guesses leave the text unchanged."),
        "export": Place(_ADVANCED, "edgespec.cli.export.export", "export", "Write a model as GGUF or ONNX."),
        "memory": Place(_ADVANCED, "edgespec.cli.memory", "app", "Texts and answers that are copied from."),
        "profiles": Place(_ADVANCED, "edgespec.cli.profiles", "app", "List profiles; show one's values."),
    }


app = typer.Typer(
    cls=_Edgespec,
    name="edgespec",
    help="Language models on this machine: faster, and with exactly the same output.",
    no_args_is_help=True,
    **SETTINGS | {"add_completion": True},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"edgespec {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and the native log. Accepted anywhere.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network. Accepted anywhere.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress and no status lines. Accepted anywhere.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more. Accepted anywhere.")] = False,
) -> None:
    """``run`` removes the options that are accepted anywhere from the arguments before typer parses them."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0 ok, 1 failed, 2 usage, 130 interrupted.

    After SIGTERM or SIGHUP the exit code is 128 plus the signal's number, as in a shell.
    """
    arguments, state = _take_global_flags(arguments)
    with state.interrupts.installed() as interrupts, names_with_colons():
        try:
            code = _run(arguments, state)
        except OSError as error:  # printing an error message failed
            code = _output_lost(error)
    return code if interrupts.exit_code is None else interrupts.exit_code


def _run(arguments: Sequence[str], state: State) -> int:
    try:
        if not prepare_streams():
            return _stdout_closed()
        if state.debug:
            enable_native_log()
        width = max(min(shutil.get_terminal_size().columns, 80) - 2, NARROWEST)
        code = app(args=list(arguments), prog_name="edgespec", standalone_mode=False, obj=state, terminal_width=width)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:  # typer's answer to a KeyboardInterrupt
            return _interrupted(state)
        return code if isinstance(code, int) else 0
    except EdgespecError as error:
        if state.debug:
            traceback.print_exc()
        if state.interrupts.leaving:  # the interrupt made it fail
            return _interrupted(state)
        print_error(error, as_json=state.json)
        return EXIT_USAGE if isinstance(error, InvalidRequestError | ProfileError) else EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(state)
    except OSError as error:
        if error.errno in FULL and error.filename:
            full = f"no space is left on the disk that holds {error.filename}"
            print_error(
                DiskSpaceError(full, needed_bytes=0, free_bytes=0, hint="free some space"), as_json=state.json
            )
            return EXIT_FAILED
        # Writing to a closed terminal fails with EIO, on Windows to a closed pipe with EINVAL.
        closed = {errno.EPIPE, errno.EIO if state.interrupts.number else errno.EPIPE}
        if sys.platform == "win32" and error.filename is None:
            closed.add(errno.EINVAL)
        if error.errno not in {*FULL, *closed}:
            return _unexpected(error, state)
        return _output_lost(error)
    except SystemExit as error:  # typer's answer to a closed pipe
        return _stdout_closed("") if error.code == EXIT_FAILED else int(error.code or 0)
    except Exception as error:
        if not hasattr(error, "format_message"):
            return _unexpected(error, state)
        if not arguments:  # without a command, typer's exception holds the help text
            print(error.format_message(), file=sys.stderr)
            return EXIT_USAGE
        # The option parser's own errors: a wrong option, a missing argument.
        print_error(_usage_error(error, arguments), as_json=state.json)
        return EXIT_USAGE


def _unexpected(error: Exception, state: State) -> int:
    if state.debug:
        traceback.print_exc()
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    bug = EdgespecError(f"something unexpected went wrong: {reason}", hint="--debug shows where")
    print_error(bug, as_json=state.json)
    return EXIT_FAILED


def _take_global_flags(arguments: Sequence[str]) -> tuple[list[str], State]:
    """Split off the options that are accepted anywhere before a ``--``."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    head, tail = list(arguments[:end]), list(arguments[end:])
    state = State(
        debug="--debug" in head,
        offline="--offline" in head,
        json="--json" in head,
        less="--quiet" in head,
        verbose="--verbose" in head,
    )
    return [argument for argument in head if argument not in _ANYWHERE] + tail, state


def _interrupted(state: State) -> int:
    if state.json and not state.answered:
        print_error(CancelledError("interrupted"), as_json=True)
    else:
        print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def _output_lost(error: OSError) -> int:
    """Report that stdout cannot be written as the disk is full. Nothing is printed if its reader or terminal left."""
    if error.errno not in FULL:
        return _stdout_closed("")
    return _stdout_closed(
        "no space is left on the disk that the output is written to", "free some space, or write elsewhere"
    )


def _stdout_closed(why: str = "the output was closed before everything was written", hint: str = "") -> int:
    """Say on stderr why stdout cannot be written, and keep Python from printing a second error at exit."""
    try:
        if why:
            print(f"edgespec: {why}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        pass
    return EXIT_FAILED


# Command names of similar programs, and what does the same here; {} is the model that was named.
_CALLED_HERE = {
    "run": "use `edgespec chat {}`",
    "start": "use `edgespec serve {}`",
    "list": "use `edgespec models`",
    "ls": "use `edgespec models`",
    "show": "use `edgespec models`, or `edgespec plan {}` for one",
    "rm": "use `edgespec models rm {}`",
    "download": "use `edgespec pull {}`",
    "ps": "no model stays loaded when a command ends; `edgespec models` lists those on the disk",
    "stop": "no model stays loaded when a command ends; Ctrl-C ends `edgespec serve`",
    "create": "use a profile, which names a model and its settings (`edgespec profiles`), or "
    "`edgespec export {} --to gguf -o DIR`",
    "cp": "use a profile, which names a model and its settings (`edgespec profiles`), or "
    "`edgespec serve {} --alias NAME`",
    "push": "use `edgespec export {} --to gguf -o DIR`, and upload the files; edgespec uploads nothing",
}


def _usage_error(error: Any, arguments: Sequence[str]) -> InvalidRequestError:
    """The parser's ``error`` in our words, with the option or command that was meant as its hint."""
    context, wrong = error.ctx, getattr(error, "option_name", None)
    if (told := value_sentence(error)) is not None:
        return InvalidRequestError(told, hint=f"see `{context.command_path} --help`")
    meant = None if wrong is None else nearest(wrong, context)
    if meant is not None:
        return InvalidRequestError(_sentence(error.message), hint=f"did you mean {meant}?")
    command, model, *_ = [*(argument for argument in arguments if not argument.startswith("-")), "", "MODEL"]
    own = None if context.parent else _CALLED_HERE.get(command)
    own = own and own.replace("{}", shlex.quote(model or "MODEL"))
    if "show" in getattr(context.command, "commands", ()):
        own = f"use `{context.command_path} show NAME`"
    if own:
        return InvalidRequestError(_sentence(error.message), hint=own)
    return InvalidRequestError(_sentence(error.format_message()), hint=f"see `{context.command_path} --help`")


def _sentence(message: str) -> str:
    return (message[:1].lower() + message[1:]).rstrip(".")
