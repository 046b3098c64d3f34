"""Does Ctrl-C end every command well, at any moment of it?

    python -m benchmarks.interrupts
    python -m benchmarks.interrupts --moments 100 --seed 7 --only calibrate
    python -m benchmarks.interrupts --moments 30000 --forked

Commands on tiny models receive SIGINT at random moments, from the first in which they handle signals to their end.
Each has to end with 130 and one line, or as complete, without a traceback, a half written file or a temporary one;
afterwards it runs to its end in the same home. With --forked the commands are forks of a process that has loaded all
modules: several times as many moments a minute, but none while modules load. Prints one JSON object; every complaint
names its command and moment.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.files.home import Home
from tests.support.hub_server import HubServer, running
from tests.support.interrupting import Ended, Forks, Interruptible, commands, complaints, interrupted, pulling
from tests.support.tiny_models import TinyModels

MOMENTS = 2000
ENDLESS_S = 2.0


def series(
    command: Interruptible, moments: int, seed: int, forked: bool, hub: HubServer, work: Path
) -> dict[str, Any]:
    """One command, interrupted at ``moments`` moments."""
    env = pulling(work / "home", hub, work / "hub")
    work.mkdir()
    if not forked:
        return tried(command, moments, seed, partial(interrupted, command, env), work)
    with Forks(env) as forks:
        return tried(command, moments, seed, partial(forks.interrupted, command, work), work)


def tried(
    command: Interruptible, moments: int, seed: int, run: Callable[[float | None], Ended], work: Path
) -> dict[str, Any]:
    """The counts of a command; ``run`` interrupts it after seconds, or never for None."""
    home, drawn = work / "home", random.Random(f"{seed} {command.name}")

    def ended_after(after_s: float | None) -> Ended:
        if command.name == "pull":  # else there is nothing to fetch
            shutil.rmtree(home / "models", ignore_errors=True)
            shutil.rmtree(work / "hub", ignore_errors=True)
        return run(after_s)

    # The first run prepares files that later ones find, and takes longer.
    whole = None if command.endless else [ended_after(None) for _ in range(2)][-1]
    lasts_s = ENDLESS_S if whole is None else whole.took_s
    wrong = [] if whole is None or whole.code == 0 else [f"{command.name} without a signal: {whole.err[-300:]}"]
    finished, slowest_s = 0, 0.0
    for _ in range(moments):
        after_s = drawn.uniform(0, lasts_s)
        ended = ended_after(after_s)
        finished += ended.code == 0
        slowest_s = max(slowest_s, ended.took_s)
        where = f"{command.name} after {after_s:.3f} s"
        wrong += [f"{where}: {what} ({ended.err[-300:]})" for what in complaints(command, ended, home)]
        if ended.code == 0 and whole is not None and whole.out and not ended.out:
            wrong.append(f"{where}: it ended as complete and was not")
    if not command.endless and ended_after(None).code != 0:
        wrong.append(f"{command.name} no longer works")
    return {"moments": moments, "finished": finished, "lasts_s": lasts_s, "slowest_s": slowest_s, "wrong": wrong}


def measure(moments: int, seed: int, only: list[str], forked: bool, at_once: int) -> dict[str, Any]:
    """Every command's series; each has its own folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = TinyModels(folder, Home(folder / "home"))
        hub = HubServer(files={"model.gguf": tiny.slow.read_bytes()}, chunk_delay_s=0.002)
        with running(hub):
            names = [each.name for each in commands(tiny, folder / "work", hub)]
            # Each command has its own folder: another's temporary file is not its fault.
            every = [commands(tiny, folder / f"work-{at}", hub)[at] for at in range(len(names))]
            chosen = [each for each in every if not only or each.name in only]
            share = -(-moments // len(chosen))
            with ThreadPoolExecutor(at_once) as pool:
                found = [
                    pool.submit(series, each, share, seed, forked, hub, folder / f"place-{number}")
                    for number, each in enumerate(chosen)
                ]
                by_command = {each.name: result.result() for each, result in zip(chosen, found, strict=True)}
    wrong = [complaint for result in by_command.values() for complaint in result.pop("wrong")]
    return {"seed": seed, "moments": share * len(chosen), "commands": by_command, "wrong": wrong}


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=MOMENTS, help="how many, over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="COMMAND", help="repeatable")
    parser.add_argument("--forked", action="store_true", help="fork a process that has loaded all modules")
    parser.add_argument("--at-once", type=int, default=2, help="commands that run together")
    given = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore it, and so would these
    print(json.dumps(measure(given.moments, given.seed, given.only, given.forked, given.at_once)))


if __name__ == "__main__":
    main()
