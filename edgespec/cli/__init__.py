"""The command line: the only package that prints, handles signals and turns errors into exit codes."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``edgespec`` program."""
    # Loading the modules takes half a second, in which Python can lose a KeyboardInterrupt in a destructor or a
    # callback. Nothing needs cleaning up then, nor at the interpreter's exit, so Ctrl-C ends the process directly.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from edgespec.cli.app import run

    sys.exit(run(sys.argv[1:]))


def _leave(_signal: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
