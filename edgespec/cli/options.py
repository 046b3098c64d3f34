"""Options that mean the same in every command, and opening an Engine from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.output import ProgressPrinter, State
from edgespec.files.home import home
from edgespec.profiles.profile import Profile, load_profile

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="MODEL", help="Catalogue name, path, or hf:ORG/REPO[@REV][/FILE]."),
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", metavar="MODEL|auto|none", help="Who drafts for the target.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", metavar="NAME|FILE", help="Constraints and preferences to start from.")
]
ContextOption = Annotated[int | None, typer.Option("--context", metavar="N", help="Tokens of conversation to keep.")]
DepthOption = Annotated[
    str | None, typer.Option("--depth", metavar="N|auto", help="Tokens drafted a round; 0 is plain decoding.")
]
ExactnessOption = Annotated[
    str | None,
    typer.Option("--exactness", metavar="stable|near", help="near also allows depths that may differ at near-ties."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


def state_of(context: typer.Context) -> State:
    """The shared options of the command line at hand."""
    return context.obj if isinstance(context.obj, State) else State()


def resolve_profile(name: str | None, **flags: Any) -> Profile:
    """The profile in force: built-in < user < project < environment < flags. Raises ProfileError."""
    place = home()
    return load_profile(
        name,
        environ=os.environ,
        cwd=Path.cwd(),
        user_dir=place.root,
        flags={key: value for key, value in flags.items() if value is not None},
    )


def open_engine(profile: Profile, state: State, *, calibrate: bool = False, stay_exact: bool = False) -> Engine:
    """Load what the profile asks for, fetching models that are missing, with progress on stderr.

    ``calibrate`` and ``stay_exact`` are those of ``Engine.load``.
    """
    from edgespec.engine.engine import Engine

    with ProgressPrinter(quiet=state.json and not state.debug).shown() as progress:
        return Engine.load(
            profile=profile,
            download=not state.offline,
            progress=progress,
            calibrate=calibrate,
            stay_exact=stay_exact,
        )
