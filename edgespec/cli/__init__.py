"""The command line: the only place that prints, handles signals and turns errors into exit codes."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``edgespec`` program."""
    try:
        from edgespec.cli.app import run
    except KeyboardInterrupt:  # loading takes half a second, and run handles it from there on
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))
