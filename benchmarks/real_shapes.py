"""How fast are our kernels and llama.cpp on files of real shapes with random weights?

Writes a file of each shape with the published mixture of types, its blocks drawn at random (shape_files.py), and
times both runtimes on it: T(1), T(2), T(4), T(8), a prompt of 512 tokens, and loading. Each runtime runs in a
separate process, one after the other, so that one model is in memory at a time. llama.cpp counts with its fastest
setting: weights repacked or as in the file, with all threads or half of them. Prepared weights are not written to a
disk. Where file and prepared weights exceed 18 GiB, the file has a third of the layers, and the table says so. Text
of such weights means nothing.

Of a mixture of experts the forwards also say what is predicted of them: the calibrated T(w), and the seconds of an
expert for each that a forward reads more or less than calibrated. Rows of one token read the fewest.

Of a model whose layers have a state it is also timed what applying accepted rows to the states takes (replay), and of
one with a drafter (a layer of the file, or an assistant) what a drafted token takes. From these times the gain at
some acceptances is computed. Which acceptance a real drafter reaches cannot be measured with random weights.

    python -m benchmarks.real_shapes SHAPE [SHAPE ...] [--folder FOLDER] [--threads N] [--runs N] [--layers N]
        [--page FILE]

Prints a JSON object for each shape, and the tables. --page puts their rows in the page's own tables, in which rows of
other shapes stay. Requires an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shape_files import SHAPES, that_fits, with_layers, write_shape
from benchmarks.shape_tables import NATIVE, report_of, tables_of, with_tables
from edgespec.calibration.timing import Scope, measure_target
from edgespec.files.model_file import read_model_file
from edgespec.interfaces.features import FeatureSequence, FollowingSequence
from edgespec.interfaces.model import Model, Sequence as TokenSequence
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.llama.model import load_model
from edgespec.runtimes.native.model import NativeModel, NativeSettings, load_native
from edgespec.runtimes.native.runtime import FREQUENT_HEAD_ROWS

WIDTHS = (1, 2, 4, 8)
REPACKED = "repacked"
CONTEXT, PROMPT = 96, 512
PASSES, PROMPTS = 7, 2

# Rows applied to states before a timed forward, 0 to compare with, and turns: a difference of a hundredth of T(1) is
# sought in times that differ by some hundredths.
REPLAYED, REPLAYS = (0, 1, 4, 8), 15

# A prompt that took longer is read once by a process.
_LONG_S = 5.0


# ------------------------------------------------------------------------------------------------------- times


def random_tokens(count: int, vocabulary_size: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(vocabulary_size), k=count)


def time_forwards(model: Model, passes: int, widths: Sequence[int] = WIDTHS) -> dict[int, float]:
    """Median seconds by width, measured alternately.

    Where layers have a state, which llama.cpp cannot rewind, the text grows, and each timed forward follows one of
    one row: it applies that row, as in plain decoding.
    """
    grows = not model.facts.can_rewind or has_states(model)
    room = (passes + 1) * sum(width + 1 for width in widths) if grows else max(widths)
    tokens = random_tokens(CONTEXT + room, model.facts.vocabulary_size)
    times: dict[int, list[float]] = {width: [] for width in widths}
    with closing(model.open(CONTEXT + room)) as sequence:
        sequence.forward(tokens[:CONTEXT], 0)

        def measure() -> None:
            for turn, width in itertools.product(range(passes + 1), widths):
                at = CONTEXT
                if grows:
                    seconds_of(sequence, tokens[sequence.length : sequence.length + 1], sequence.length)
                    at = sequence.length
                seconds = seconds_of(sequence, tokens[at : at + width], at)
                if turn:
                    times[width].append(seconds)

        sequence.run(measure)
    return {width: statistics.median(seconds) for width, seconds in times.items()}


def has_states(model: Model) -> bool:
    return model.facts.windowed.state_bytes > 0


def seconds_of(sequence: TokenSequence, tokens: Sequence[int], at: int = CONTEXT) -> float:
    """Of a forward after ``at`` tokens, with the choice of the best tokens."""
    if sequence.length > at:
        sequence.rewind(at)
    started = time.perf_counter()
    sequence.forward(tokens, len(tokens)).argmax()
    return time.perf_counter() - started


def time_prompt(model: Model, times: int) -> float:
    tokens, found = random_tokens(PROMPT, model.facts.vocabulary_size, 2), list[float]()
    with closing(model.open(PROMPT)) as sequence:
        while len(found) < times and not (found and found[0] > _LONG_S):
            sequence.rewind(0)
            started = time.perf_counter()
            sequence.forward(tokens, 1).argmax()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def time_replay(model: NativeModel, turns: int) -> dict[int, float]:
    """Median seconds by which a forward of one row takes longer if it applies as many rows of the forward before to
    the states, instead of none.

    Before each timed forward eight rows are computed at the same place, and all but those are taken back. A forward
    at the place itself applies none, since the states are those before it. Differences are of forwards of one turn.
    """
    tokens = random_tokens(CONTEXT + max(WIDTHS) + 1, model.facts.vocabulary_size, 5)
    found: dict[int, list[float]] = {rows: [] for rows in REPLAYED[1:]}
    with closing(model.open(len(tokens))) as sequence:
        sequence.forward(tokens[:CONTEXT], 0)
        for turn in range(turns + 1):
            seconds: dict[int, float] = {}
            for rows in REPLAYED if turn % 2 else REPLAYED[::-1]:
                sequence.rewind(CONTEXT)
                sequence.forward(tokens[CONTEXT : CONTEXT + max(WIDTHS)], max(WIDTHS)).argmax()
                seconds[rows] = seconds_of(sequence, tokens[CONTEXT + rows :][:1], CONTEXT + rows)
            if turn:
                for rows, taken in found.items():
                    taken.append(seconds[rows] - seconds[0])
    return {rows: statistics.median(taken) for rows, taken in found.items()}


def time_drafter(target: Model, drafter: Model, passes: int) -> tuple[dict[int, float], float]:
    """Median seconds of a drafter's forwards by the tokens read, of which the last is scored, and T(1) beside them.

    It follows the target as in decoding: the text's tokens have the rows that the target computed.
    """
    tokens = random_tokens(CONTEXT + max(WIDTHS), target.facts.vocabulary_size, 6)
    times: dict[int, list[float]] = {width: [] for width in (0, *WIDTHS)}  # 0: the target's
    with closing(target.open(len(tokens))) as followed, closing(drafter.open(len(tokens))) as following:
        assert isinstance(followed, FeatureSequence)
        assert isinstance(following, FollowingSequence)
        following.follow(followed.keep_features(scored=drafter.facts.borrows), followed)
        followed.forward(tokens[:CONTEXT], 1)
        following.forward(tokens[:CONTEXT], 0)
        for turn, width in itertools.product(range(passes + 1), times):
            sequence = following if width else followed
            sequence.rewind(CONTEXT)
            started = time.perf_counter()
            sequence.forward(tokens[CONTEXT : CONTEXT + max(1, width)], 1).argmax()
            if turn:
                times[width].append(time.perf_counter() - started)
    medians = {width: statistics.median(seconds) for width, seconds in times.items()}
    return {width: medians[width] for width in WIDTHS}, medians[0]


def predicted_ratios(model: NativeModel, passes: int) -> dict[int, list[float]]:
    """By width, the predicted seconds of forwards over the measured ones, from many experts to few.

    Predicted from a calibration on other tokens: its T(w), and its seconds for each expert more or less than counted.
    """
    size = model.facts.vocabulary_size
    text = random_tokens(4 * CONTEXT, size, 3)
    steps = measure_target(model, 2 * CONTEXT, Scope(widths=WIDTHS, repetitions=passes), text=text)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            curves = done.value[0].curves
            break
    experts = curves.experts
    assert experts is not None
    cases = list(itertools.product(WIDTHS[1:], (1.0, 0.5, 0.0)))
    measured: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    expected: dict[tuple[int, float], float] = {}
    tokens = random_tokens(max(WIDTHS), size, 4)
    with model.open(CONTEXT + max(WIDTHS)) as sequence:
        sequence.forward(text[:CONTEXT], 0)
        # In turn, so that a disturbance of a second does not fall on all forwards of one case.
        for _, (width, others) in itertools.product(range(passes), cases):
            different = max(1, round(others * width))
            seconds = seconds_of(sequence, [tokens[at % different] for at in range(width)])
            more = sequence.experts_read - experts.read_by(width)
            measured[width, others].append(seconds)
            expected[width, others] = curves.at(CONTEXT).seconds(width) + experts.expert_s * more
    found: dict[int, list[float]] = {}
    for case in cases:
        found.setdefault(case[0], []).append(round(expected[case] / statistics.median(measured[case]), 3))
    return found


@contextmanager
def drafter_of(model: NativeModel, name: str, assistant: Path | None, threads: int) -> Iterator[tuple[str, Model]]:
    """What drafts for a model, in words, loaded: the layer behind its others, or the assistant in a file.

    A layer has the short head with which it drafts for a vocabulary of byte pairs.
    """
    with ExitStack() as stack:
        if assistant is not None:
            loaded = load_native(read_model_file(assistant), NativeSettings(threads=threads))
            yield "assistant", stack.enter_context(loaded)
            return
        layer = stack.enter_context(model.drafting_layer())
        if SHAPES[name].short_head and model.facts.vocabulary_size > FREQUENT_HEAD_ROWS:
            layer = stack.enter_context(layer.with_head_rows(np.arange(FREQUENT_HEAD_ROWS)))
        yield "layer", layer


def ours(name: str, path: Path, threads: int, passes: int) -> dict[str, Any]:
    """Our kernels' times of a shape's file, next to which its assistant's file may lie."""
    started = time.perf_counter()
    with load_native(read_model_file(path), NativeSettings(threads=threads)) as model:
        found: dict[str, Any] = {"threads": threads, "load_s": time.perf_counter() - started}
        found |= {"forward_s": time_forwards(model, passes), "prompt_s": time_prompt(model, PROMPTS)}
        if has_states(model):
            found["replay_s"] = time_replay(model, REPLAYS)
        assistant = assistant_path(name, path)
        if SHAPES[name].drafting or assistant is not None:
            with drafter_of(model, name, assistant, threads) as (found["drafter"], drafter):
                found["drafter_s"], found["beside_drafter_s"] = time_drafter(model, drafter, passes)
        if model.facts.mixture is not None:
            found["predicted"] = predicted_ratios(model, passes)
    return found


def assistant_path(name: str, path: Path) -> Path | None:
    """Where the file of a shape's assistant lies, next to the shape's own; None without one."""
    drafter = SHAPES[name].drafter
    return None if drafter is None else path.with_name(f"{drafter}.gguf")


def llamas(path: Path, threads: int, passes: int, *, repack: bool) -> dict[str, Any]:
    """llama.cpp's times. Prompts are read with all threads, and forwards with all or half of them: those with the
    least T(1)."""
    started = time.perf_counter()
    settings = LlamaSettings(threads=threads, repack=repack, kv_type="f16")
    with ExitStack() as stack:
        whole = stack.enter_context(load_model(read_model_file(path), settings))
        load_s, prompt_s = time.perf_counter() - started, time_prompt(whole, PROMPTS)
        counts = sorted({threads, max(1, threads // 2)}, reverse=True)
        models = {count: stack.enter_context(whole.with_settings(threads=count)) for count in counts}
        fastest = min(counts, key=lambda count: time_forwards(models[count], passes, (1,))[1])
        forward_s = time_forwards(models[fastest], passes)
    return {"threads": fastest, "load_s": load_s, "forward_s": forward_s, "prompt_s": prompt_s}


# What runs in a process: our kernels, and llama.cpp with each layout of its weights.
PROCESSES: Mapping[str, Callable[[str, Path, int, int], dict[str, Any]]] = {
    NATIVE: ours,
    REPACKED: lambda _name, path, threads, passes: llamas(path, threads, passes, repack=True),
    "as in the file": lambda _name, path, threads, passes: llamas(path, threads, passes, repack=False),
}


def in_its_process(of: str, name: str, path: Path, threads: int, passes: int) -> dict[str, Any] | None:
    """What a process found; None if a signal ended llama.cpp, as where its build does not fit the processor."""
    command = [sys.executable, "-m", "benchmarks.real_shapes", "--child", of, name, str(path)]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--passes", str(passes)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode < 0 and of != NATIVE:
        print(f"{name}, llama.cpp, weights {of}: ended by signal {-done.returncode}", file=sys.stderr)
        return None
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_shape(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The report of a shape, whose files are removed."""
    shape = with_layers(SHAPES[name], given.layers) if given.layers else that_fits(SHAPES[name])
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        path = Path(place) / f"{name}.gguf"
        write_shape(shape, path)
        if (assistant := assistant_path(name, path)) is not None:
            write_shape(SHAPES[assistant.stem], assistant)
        # Such a build of llama.cpp gets weights as in the file only (runtimes/llama/facts.py).
        kinds = [of for of in PROCESSES if of != REPACKED or not load().has_tiles]
        runs = []
        for _ in range(given.runs):
            found = {of: in_its_process(of, name, path, given.threads, given.passes) for of in kinds}
            runs.append({of: each for of, each in found.items() if each is not None})
    return report_of(name, (shape.sizes.layers, SHAPES[name].sizes.layers), PROMPT, runs)


def main() -> None:
    """Print a JSON object for each shape, and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--folder", type=Path, help="where the files are written; they are removed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2, help="processes of each runtime")
    parser.add_argument("--passes", type=int, default=PASSES, help="timed forwards of each width in a process")
    parser.add_argument("--layers", type=int, help="of the file; without it as many as fit")
    parser.add_argument("--page", type=Path, help="a page whose tables get the rows")
    parser.add_argument("--child", nargs=3, metavar=("PROCESS", "SHAPE", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        of, name, path = given.child
        json.dump(PROCESSES[of](name, Path(path), given.threads, given.passes), sys.stdout)
        return
    reports = []
    for name in given.shapes:
        reports.append(measure_shape(name, given))
        print(json.dumps(reports[-1]), flush=True)
        if given.page:  # after each shape: what was measured stays if a later one fails
            page = given.page.read_text(encoding="utf-8") if given.page.exists() else "# Architectures\n"
            given.page.write_text(with_tables(page, tables_of(reports[-1:])), encoding="utf-8")
    print("\n\n".join(tables_of(reports)))


if __name__ == "__main__":
    main()
