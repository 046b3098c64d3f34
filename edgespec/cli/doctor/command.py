"""``edgespec doctor``, as it is called. What it reports is imported when it runs: the runtimes take half a second."""

from __future__ import annotations

import typer

from edgespec.cli.options import JsonOption, state_of


def doctor(context: typer.Context, json: JsonOption = False) -> None:
    """Check this machine: runtimes, devices, bandwidth, disk, caches."""
    from edgespec.cli.doctor.report import run_doctor

    run_doctor(state_of(context), json=json)
