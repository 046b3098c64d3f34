"""How fast are our kernels and llama.cpp on files of real shapes with random weights?

Writes a file of each shape with the published mixture of types, its blocks drawn at random, and times both
runtimes on it: T(1), T(2), T(4), T(8), a prompt of 512 tokens, and loading. Each runtime runs in a separate process,
one after the other, so that one model is in memory at a time. llama.cpp counts with its fastest setting: weights
repacked or as in the file, with all threads or half of them. Prepared weights are not written to a disk. Where file
and prepared weights exceed 18 GiB, the file has a third of the layers, and the table says so. Text of such weights
means nothing.

Of a mixture of experts the forwards also say what is predicted of them: the calibrated T(w), and the seconds of an
expert for each that a forward reads more or less than calibrated. Rows of one token read the fewest.

    python -m benchmarks.real_shapes SHAPE [SHAPE ...] [--folder FOLDER] [--threads N] [--runs N] [--layers N]
        [--page FILE]

Prints a JSON object for each shape, and a table, which --page puts in the place of the page's own. Requires an idle
machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.shape_files import SHAPES, that_fits, with_layers, write_shape
from edgespec.calibration.timing import Scope, measure_target
from edgespec.files.model_file import read_model_file
from edgespec.interfaces.model import Model, Sequence as TokenSequence
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.model import load_model
from edgespec.runtimes.native.model import NativeModel, NativeSettings, load_native

WIDTHS = (1, 2, 4, 8)
CONTEXT, PROMPT = 96, 512
PASSES, PROMPTS = 7, 2


def random_tokens(count: int, vocabulary_size: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(vocabulary_size), k=count)


def time_forwards(model: Model, passes: int) -> dict[int, float]:
    """Median seconds by width, measured alternately."""
    tokens = random_tokens(CONTEXT + max(WIDTHS), model.facts.vocabulary_size)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with closing(model.open(CONTEXT + max(WIDTHS))) as sequence:
        sequence.forward(tokens[:CONTEXT], 0)

        def measure() -> None:
            for turn in range(passes + 1):
                for width in WIDTHS:
                    seconds = seconds_of(sequence, tokens[CONTEXT : CONTEXT + width])
                    if turn:
                        times[width].append(seconds)

        sequence.run(measure)
    return {width: statistics.median(seconds) for width, seconds in times.items()}


def seconds_of(sequence: TokenSequence, tokens: Sequence[int]) -> float:
    """Of a forward at CONTEXT, with the choice of the best tokens."""
    sequence.rewind(CONTEXT)
    started = time.perf_counter()
    sequence.forward(tokens, len(tokens)).argmax()
    return time.perf_counter() - started


def time_prompt(model: Model, times: int) -> float:
    tokens, found = random_tokens(PROMPT, model.facts.vocabulary_size, 2), []
    with closing(model.open(PROMPT)) as sequence:
        for _ in range(times):
            sequence.rewind(0)
            started = time.perf_counter()
            sequence.forward(tokens, 1).argmax()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


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


def ours(path: Path, threads: int, passes: int) -> list[dict[str, Any]]:
    started = time.perf_counter()
    with load_native(read_model_file(path), NativeSettings(threads=threads)) as model:
        found: dict[str, Any] = {"setting": f"{threads} threads", "load_s": time.perf_counter() - started}
        found |= {"forward_s": time_forwards(model, passes), "prompt_s": time_prompt(model, PROMPTS)}
        if model.facts.mixture is not None:
            found["predicted"] = predicted_ratios(model, passes)
    return [found]


def llamas(path: Path, threads: int, passes: int) -> list[dict[str, Any]]:
    """llama.cpp in each setting that may be its fastest, one after the other. Prompts are read with all threads."""
    found = []
    for repack in (True, False):
        started = time.perf_counter()
        settings = LlamaSettings(threads=threads, repack=repack, kv_type="f16")
        with load_model(read_model_file(path), settings) as whole:
            load_s, prompt_s = time.perf_counter() - started, time_prompt(whole, PROMPTS)
            for count in sorted({threads, max(1, threads // 2)}, reverse=True):
                with whole.with_settings(threads=count) as model:
                    weights = "repacked" if repack else "as in the file"
                    found.append(
                        {
                            "setting": f"{weights}, {count} threads",
                            "load_s": load_s,
                            "forward_s": time_forwards(model, passes),
                            "prompt_s": prompt_s,
                        }
                    )
    return found


RUNTIMES = {"native": ours, "llama": llamas}


def in_its_process(runtime: str, path: Path, threads: int, passes: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.real_shapes", "--child", runtime, str(path)]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--passes", str(passes)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# ------------------------------------------------------------------------------------------------------ report


def report_of(name: str, layers: int, runs: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Medians of the runs. Forwards are llama.cpp's in its setting with the least T(1), prompts in that with the
    fastest prompt.
    """

    def median(runtime: str, setting: int, what: str, width: int | None = None) -> float:
        values = [run[runtime][setting][what] for run in runs]
        return statistics.median(float(value if width is None else value[str(width)]) for value in values)

    settings = range(len(runs[0]["llama"]))
    fastest = min(settings, key=lambda own: median("llama", own, "forward_s", 1))
    prompts = min(settings, key=lambda own: median("llama", own, "prompt_s"))
    own_s = {width: median("native", 0, "forward_s", width) for width in WIDTHS}
    their_s = {width: median("llama", fastest, "forward_s", width) for width in WIDTHS}
    prompt_s = median("native", 0, "prompt_s"), median("llama", prompts, "prompt_s")
    return {
        "shape": name,
        "layers": layers,
        "of_layers": SHAPES[name].sizes.layers,
        "runs": len(runs),
        "forward_ms": {width: round(1e3 * seconds, 2) for width, seconds in own_s.items()},
        "llama_forward_ms": {width: round(1e3 * seconds, 2) for width, seconds in their_s.items()},
        "ratios": {width: round(own_s[width] / own_s[1], 3) for width in WIDTHS[1:]},
        "llama_ratios": {width: round(their_s[width] / their_s[1], 3) for width in WIDTHS[1:]},
        "t1_over_native": round(their_s[1] / own_s[1], 3),
        "prompt_tokens_per_s": [round(PROMPT / seconds, 1) for seconds in prompt_s],
        "prompt_speedup": round(prompt_s[1] / prompt_s[0], 3),
        "load_s": [round(median("native", 0, "load_s"), 1), round(median("llama", fastest, "load_s"), 1)],
        "llama_setting": runs[0]["llama"][fastest]["setting"],
        "llama_prompt_setting": runs[0]["llama"][prompts]["setting"],
        "predicted": runs[-1]["native"][0].get("predicted"),
    }


HEADER = (
    "| shape | T(1), ms | T(2), T(4), T(8) / T(1) | prompt, tokens/s | load, s | llama.cpp: T(1), ms "
    "| T(2), T(4), T(8) / T(1) | prompt, tokens/s | load, s | T(1), prompt: times as fast |"
)


def table_of(reports: Iterable[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for own in reports:
        part = "" if own["layers"] == own["of_layers"] else f", {own['layers']} of {own['of_layers']} layers"

        def side(of: str, number: int, own: dict[str, Any] = own) -> str:
            ratios = ", ".join(f"{ratio:.2f}" for ratio in own[f"{of}ratios"].values())
            first = next(iter(own[f"{of}forward_ms"].values()))
            return f"{first:.1f} | {ratios} | {own['prompt_tokens_per_s'][number]:.0f} | {own['load_s'][number]:.1f}"

        gains = f"{own['t1_over_native']:.2f}, {own['prompt_speedup']:.2f}"
        lines.append(f"| {own['shape']}{part} | {side('', 0)} | {side('llama_', 1)} | {gains} |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """The page with this table in the place of the one of the same columns, or at its end."""
    old = re.compile(re.escape(HEADER) + r"\n(\|.*\n?)*")
    return old.sub(lambda _: table + "\n", page) if old.search(page) else f"{page.rstrip()}\n\n{table}\n"


def main() -> None:
    """Print a JSON object for each shape, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--folder", type=Path, help="where the files are written; they are removed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2, help="processes of each runtime")
    parser.add_argument("--passes", type=int, default=PASSES, help="timed forwards of each width in a process")
    parser.add_argument("--layers", type=int, help="of the file; without it as many as fit")
    parser.add_argument("--page", type=Path, help="a page to put the table in")
    parser.add_argument("--child", nargs=2, metavar=("RUNTIME", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        runtime, path = given.child
        json.dump(RUNTIMES[runtime](Path(path), given.threads, given.passes), sys.stdout)
        return
    reports = []
    for name in given.shapes:
        shape = with_layers(SHAPES[name], given.layers) if given.layers else that_fits(SHAPES[name])
        with tempfile.TemporaryDirectory(dir=given.folder) as place:
            path = Path(place) / f"{name}.gguf"
            write_shape(shape, path)
            runs = [
                {runtime: in_its_process(runtime, path, given.threads, given.passes) for runtime in RUNTIMES}
                for _ in range(given.runs)
            ]
        reports.append(report_of(name, shape.sizes.layers, runs))
        print(json.dumps(reports[-1]), flush=True)
    table = table_of(reports)
    print(table)
    if given.page:
        page = given.page.read_text(encoding="utf-8") if given.page.exists() else "# Architectures\n"
        given.page.write_text(with_table(page, table), encoding="utf-8")


if __name__ == "__main__":
    main()
