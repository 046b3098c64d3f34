"""Options that several commands share, and the opening of an Engine from these options."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.terminal.output import ProgressPrinter, State, note
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.files.home import home
from edgespec.hardware.machine import describe_machine
from edgespec.placement.settings import choose_threads
from edgespec.profiles.profile import Profile, load_profile

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model, as in --target.", autocompletion=suggestions.for_model),
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
ContextOption = Annotated[int | None, typer.Option("--context", metavar="N", help="Context length, in tokens.")]
DepthOption = Annotated[
    str | None, typer.Option("--depth", metavar="N|auto", help="Most guesses in a row per pass; 0: no guesses.")
]
ExactnessOption = Annotated[
    str | None,
    typer.Option(
        "--exactness",
        metavar="stable|near",
        help="stable: same text as without guesses; near: may differ in rare ties.",
        autocompletion=suggestions.one_of("stable", "near"),
    ),
]
ThreadsOption = Annotated[
    str | None, typer.Option("--threads", metavar="N|auto", help="Threads of the model; auto: the fastest measured.")
]
NoThinkOption = Annotated[
    bool, typer.Option("--no-think", help="Answer without thinking first, if the model's template supports it.")
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this total probability; 1: all.")
]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.")]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", help="Drop tokens below this fraction of the top probability; 0: none.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same text; random if not given.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def sampling_of(usual: Sampling, **flags: Any) -> Sampling:
    """``usual`` with the given options replaced; None is not given. Raises InvalidRequestError."""
    return replace(usual, **{key: value for key, value in flags.items() if value is not None})


def state_of(context: typer.Context) -> State:
    """The shared options of this command line."""
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


def with_learned_text(profile: Profile) -> Profile:
    """The profile of a command that answers people: it copies from learned text unless the profile says otherwise."""
    return replace(profile, learned=True) if profile.learned == "auto" else profile


def open_engine(profile: Profile, state: State, *, calibrate: bool = False) -> Engine:
    """Load the profile's models, with progress on stderr. Missing models are downloaded unless ``state.offline``.

    ``calibrate`` is passed to ``Engine.load``.
    """
    with ProgressPrinter(quiet=state.quiet).shown() as progress:
        return Engine.load(
            profile=profile,
            download=not state.offline,
            progress=progress,
            calibrate=calibrate,
        )


def check_thinking(engine: Engine, *, think: bool) -> None:
    """Report on stderr that ``--no-think`` has no effect, if the template has no switch for it."""
    if not think and not engine.has_thinking_switch:
        name = engine.plan.target.model
        note(f"--no-think has no effect: the template of {name} has no switch for thinking", dim=True)


def default_threads() -> int:
    """Threads for work other than decoding: as many as the profile gives a target on this processor."""
    return choose_threads(resolve_profile(None), describe_machine(), None)
