"""Does Ctrl-C end every command well, at any moment of it?

    python -m benchmarks.interrupts
    python -m benchmarks.interrupts --moments 100 --seed 7 --only calibrate

Commands on tiny models receive SIGINT at random moments, from the first in which they handle signals to their end.
Each has to end with 130 and one line, or as complete, without a traceback, a half written file or a temporary one;
afterwards it runs to its end in the same home. Prints one JSON object; every complaint names its command and moment.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edgespec.files.home import Home
from tests.support.hub_server import HubServer, running
from tests.support.interrupting import Interruptible, commands, complaints, interrupted, pulling
from tests.support.tiny_models import TinyModels

MOMENTS, AT_ONCE = 2000, 2
ENDLESS_S = 2.0


def series(command: Interruptible, moments: int, seed: int, hub: HubServer, work: Path) -> dict[str, Any]:
    """One command, interrupted at ``moments`` moments."""
    home, hub_home = work / "home", work / "hub"
    env, drawn = pulling(home, hub, hub_home), random.Random(f"{seed} {command.name}")
    whole = None if command.endless else interrupted(command, env, None)
    lasts_s = ENDLESS_S if whole is None else whole.took_s
    wrong = [] if whole is None or whole.code == 0 else [f"{command.name} without a signal: {whole.err[-300:]}"]
    finished, slowest_s = 0, 0.0
    for _ in range(moments):
        if command.name == "pull":  # else there is nothing to fetch
            shutil.rmtree(home / "models", ignore_errors=True)
            shutil.rmtree(hub_home, ignore_errors=True)
        after_s = drawn.uniform(0, lasts_s)
        ended = interrupted(command, env, after_s)
        finished += ended.code == 0
        slowest_s = max(slowest_s, ended.took_s)
        where = f"{command.name} after {after_s:.3f} s"
        wrong += [f"{where}: {what} ({ended.err[-300:]})" for what in complaints(command, ended, home)]
        if ended.code == 0 and whole is not None and whole.out and not ended.out:
            wrong.append(f"{where}: it ended as complete and was not")
    if not command.endless and interrupted(command, env, None).code != 0:
        wrong.append(f"{command.name} no longer works")
    return {"moments": moments, "finished": finished, "lasts_s": lasts_s, "slowest_s": slowest_s, "wrong": wrong}


def measure(moments: int, seed: int, only: list[str]) -> dict[str, Any]:
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
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = [
                    pool.submit(series, each, share, seed, hub, folder / f"place-{number}")
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
    given = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore it, and so would these
    print(json.dumps(measure(given.moments, given.seed, given.only)))


if __name__ == "__main__":
    main()
