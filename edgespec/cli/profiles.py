"""``edgespec profiles``."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from edgespec.cli import suggestions
from edgespec.cli.options import JsonOption, resolve_profile, state_of
from edgespec.cli.parser import SETTINGS, Command, Group
from edgespec.cli.terminal.output import cells, padded, print_json
from edgespec.files.home import home
from edgespec.profiles.layers import ADVANCED, ADVANCED_KEYS
from edgespec.profiles.profile import list_profiles

app = typer.Typer(
    cls=Group,
    help="List profiles, or show the values of one and their origins.",
    invoke_without_command=True,
    **SETTINGS,
)


@app.callback()
def profiles(context: typer.Context, json: JsonOption = False) -> None:
    """List the profiles."""
    if context.invoked_subcommand is not None:
        return
    summaries = list_profiles(home().root)
    if json:
        print_json(
            {
                "profiles": [
                    {"name": s.name, "description": s.description, "origin": s.origin, "problem": s.problem}
                    for s in summaries
                ]
            }
        )
        return
    width = max(cells(summary.name) for summary in summaries)
    for summary in summaries:
        print(f"{padded(summary.name, width)}  {summary.problem or summary.description}  ({summary.origin})")


@app.command("show", cls=Command, short_help="Show a profile's values, and where each was set.")
def show(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A profile's name or file.", autocompletion=suggestions.for_profile),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show every value of a profile and where it comes from (file, variable or option)."""
    profile = resolve_profile(name)
    values = profile.values()
    if json or state_of(context).json:
        print_json(
            {"profile": {key: {"value": value, "origin": profile.origins.get(key)} for key, value in values.items()}}
        )
        return
    width = max(len(key) for key in values)
    for advanced in (False, True):
        if advanced:
            print(f"\n[{ADVANCED}]")
        for key, value in values.items():
            if (key in ADVANCED_KEYS) == advanced:
                print(
                    f"{key:{width}} = {dumps(value, ensure_ascii=False):40} # {profile.origins.get(key, '')}".rstrip()
                )
