"""How a command line is read and its help printed: old spellings, groups, and commands imported when they run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

# The group of a command's rare options, as ``rich_help_panel`` of an option names it.
ADVANCED = "Advanced"

# An option that is listed there.
rare = partial(typer.Option, rich_help_panel=ADVANCED)

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

# Old spellings of commands, as words.
OLD_COMMANDS: Mapping[str, Sequence[str]] = {
    "learn": ("memory", "learn"),
    "history": ("memory",),
    "version": ("--version",),
}

# Old spellings of options; a command takes the first of the new ones that it has. After "=" follows the old value.
OLD_OPTIONS: Mapping[str, Sequence[str]] = {
    "--target": ("--model", "--trim-for"),
    "--beside": ("--compare",),
    "--depth": ("--set depth=",),
    "--exactness": ("--set exactness=",),
    "--rule": ("--set rule=",),
}

# What llama.cpp calls options of ours.
_CALLED_ELSEWHERE: Mapping[str, str] = {
    "-t": "--threads",
    **dict.fromkeys(("-c", "--ctx-size"), "--context"),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), "--max-tokens"),
    **dict.fromkeys(("-md", "--model-draft"), "--draft"),
    "--temp": "--temperature",
    "--sys": "--system",
}

# What a value must be, by the kind of error of the library that reads it.
_WANTED: Mapping[str, str] = {
    "int": "a whole number, not {input!r:.40}",
    "float": "a number, not {input!r:.40}",
    "greater_than_equal": "at least {ge}, not {input:.40}",
    "less_than_equal": "at most {le}, not {input:.40}",
}

# What typer adds to a name or a help text: a type, a range, "required".
_TYPE = re.compile(r" <[^>]*>")
_RANGE = re.compile(r"(; )?[\w.]*(<=|<)?x(>=|<=|>|<)[\w.]+|(; )?required")


class Command(TyperCommand):
    """A command whose rare options are listed in a group below the others, and which reads old spellings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments with old spellings replaced."""
        own = {name for param in self.params for name in param.opts}
        with _named(ctx):
            return super().parse_args(ctx, list(modern(args, own)))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; what is not in brackets is needed."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print arguments and options in groups."""
        _print_groups(self, ctx, formatter)


class Group(TyperGroup):
    """A command with commands below it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; errors name this command."""
        with _named(ctx):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print options in groups, and the commands."""
        _print_groups(self, ctx, formatter)
        self.format_commands(ctx, formatter)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command is: a function or an app in a module, which is imported when the command runs."""

    group: str
    module: str
    name: str
    summary: str

    def load(self) -> Any:
        """The command as typer runs it."""
        found = getattr(import_module(self.module), self.name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        single = typer.Typer(**SETTINGS)
        single.command(cls=Command)(found)
        return typer.main.get_command(single)


class Program(Group):
    """The program: its commands are listed in groups from ``places``, and the one that runs is imported."""

    places: ClassVar[Mapping[str, Place]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, short_help=place.summary) for name, place in self.places.items()}

    def get_params(self, ctx: Any) -> list[Any]:
        """The options; the one that prints the shell's code is hidden, as --install-completion writes it."""
        found: list[Any] = super().get_params(ctx)
        for param in found:
            param.hidden = param.hidden or param.name == "show_completion"
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` name, and its arguments."""
        if args[0] == "help":
            args = [*args[1:], "--help"]
        args = [*OLD_COMMANDS.get(args[0], args[:1]), *args[1:]]
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.places and type(command) is TyperCommand:
            command = self.commands[name] = self.places[name].load()
        return name, command, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print the commands in their groups, on one screen of 80x24 with the options."""
        names = max(map(len, self.places))
        formatter.write_paragraph()
        for group in dict.fromkeys(place.group for place in self.places.values()):
            formatter.write(f"{group}:\n")
            own = {name: place.summary for name, place in self.places.items() if place.group == group}
            with formatter.indentation():
                formatter.write_dl([(f"{name:{names}}", summary) for name, summary in own.items()])
        options = [param for param in self.get_params(ctx) if not param.hidden and param.name != "help"]
        shown = [max(param.opts, key=len) for param in options]
        line = f"Options: {' '.join(shown)}"
        formatter.write(f"\n{textwrap.fill(line, formatter.width, break_on_hyphens=False)}\n")


@contextmanager
def _named(ctx: Any) -> Iterator[None]:
    """The option parser's errors in here name the command: it leaves that out where a value is missing."""
    try:
        yield
    except Exception as error:
        if getattr(error, "ctx", ctx) is None:
            vars(error)["ctx"] = ctx
        raise


def value_sentence(error: Any) -> str | None:
    """What is wrong with the value of an option, in one sentence; None if ``error`` is about something else."""
    if type(error).__name__ == "BadOptionUsage":
        return f"{error.option_name} {'needs a' if 'requires' in error.message else 'takes no'} value"
    found = getattr(error.__cause__, "errors", None)  # of the library that reads numbers
    if found is None:
        return None
    first = found()[0]
    for kind, words in _WANTED.items():
        if first["type"].startswith(kind):
            name = max(error.param.opts, key=len)
            return f"{name} must be {words.format(input=first['input'], **first.get('ctx', {}))}"
    return None


def nearest(name: str, ctx: Any) -> str | None:
    """The option of the command that is spelled like ``name``; None if there is none."""
    known = [option for param in ctx.command.params if not param.hidden for option in param.opts]
    if (ours := _CALLED_ELSEWHERE.get(name)) in known:
        return ours
    return next(iter(get_close_matches(name, [*known, "--help"], n=1)), None)


def modern(args: Sequence[str], own: set[str]) -> Iterator[str]:
    """The arguments with old spellings of options replaced by those that the command has."""
    words = iter(args)
    for word in words:
        if word == "--":
            yield from (word, *words)
            return
        name, joined, value = word.partition("=")
        new = next((each for each in OLD_OPTIONS.get(name, ()) if each.partition(" ")[0] in own), None)
        if new is None or name in own:
            yield word
        elif new.endswith("="):
            option, _, key = new.partition(" ")
            yield from (option, key + (value if joined else next(words, "")))
        else:
            yield new + joined + value


def _print_groups(command: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            options = getattr(param, "rich_help_panel", None) or "Options"
            group = "Arguments" if param.param_type_name == "argument" else options
            groups[group].append((_TYPE.sub("", record[0]), re.sub(r"\s*\[\]", "", _RANGE.sub("", record[1]))))
    for name, rows in groups.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)
