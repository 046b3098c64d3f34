"""The command line: the only place that prints, handles signals and turns errors into exit codes."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``edgespec`` program."""
    from edgespec.cli.app import run

    sys.exit(run(sys.argv[1:]))
