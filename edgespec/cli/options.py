"""Options that mean the same in every command, and opening an Engine from them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.output import ProgressPrinter, State, note
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.files.home import home
from edgespec.hardware.machine import describe_machine
from edgespec.placement.settings import choose_threads
from edgespec.profiles.profile import Profile, load_profile

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="As --target.", autocompletion=suggestions.for_model)
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="MODEL",
        help="Catalogue name, path, or hf:ORG/REPO[@REV][/FILE].",
        autocompletion=suggestions.for_model,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL|auto|none",
        help="The drafter: a smaller model that guesses ahead.",
        autocompletion=suggestions.for_drafter,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Constraints and preferences to start from.",
        autocompletion=suggestions.for_profile,
    ),
]
ContextOption = Annotated[int | None, typer.Option("--context", metavar="N", help="Tokens of conversation to keep.")]
DepthOption = Annotated[
    str | None, typer.Option("--depth", metavar="N|auto", help="Guesses in a row that a round verifies; 0: none.")
]
ExactnessOption = Annotated[
    str | None,
    typer.Option(
        "--exactness",
        metavar="stable|near",
        help="near: the text may differ in rare ties.",
        autocompletion=suggestions.one_of("stable", "near"),
    ),
]
ThreadsOption = Annotated[
    str | None, typer.Option("--threads", metavar="N|auto", help="Threads of the target; auto: as measured.")
]
NoThinkOption = Annotated[
    bool, typer.Option("--no-think", help="Answer without thinking first, where the model's template knows how.")
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this mass; 1 keeps all.")
]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", help="Drop tokens under this share of the likeliest; 0: none.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same text; without one it is drawn and told.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


def sampling_of(usual: Sampling, **flags: Any) -> Sampling:
    """``usual`` with the options that were given. Raises InvalidRequestError."""
    return replace(usual, **{key: value for key, value in flags.items() if value is not None})


def state_of(context: typer.Context) -> State:
    """The shared options of the command line at hand."""
    return context.obj if isinstance(context.obj, State) else State()


def resolve_profile(name: str | None, **flags: Any) -> Profile:
    """The profile in force: built-in < user < project < environment < flags. Raises ProfileError."""
    return load_profile(
        name,
        environ=os.environ,
        cwd=Path.cwd(),
        user_dir=home().root,
        flags={key: value for key, value in flags.items() if value is not None},
    )


def open_engine(profile: Profile, state: State, *, calibrate: bool = False) -> Engine:
    """Load what the profile asks for, fetching models that are missing, with progress on stderr.

    ``calibrate`` is that of ``Engine.load``.
    """
    with ProgressPrinter(quiet=state.quiet).shown() as progress:
        return Engine.load(
            profile=profile,
            download=not state.offline,
            progress=progress,
            calibrate=calibrate,
        )


def check_thinking(engine: Engine, *, think: bool) -> None:
    """Say so where ``--no-think`` changes nothing."""
    if not think and not engine.has_thinking_switch:
        name = engine.plan.target.model
        note(f"--no-think changes nothing: the template of {name} has no switch for thinking", dim=True)


def default_threads() -> int:
    """Threads for work beside decoding: those that the profile in force gives a target on this processor."""
    return choose_threads(resolve_profile(None), describe_machine(), None)
