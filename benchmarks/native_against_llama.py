"""How do our kernels compare with llama.cpp on the same file: T(w), and the speed of reading a prompt?

llama.cpp runs in every setting that changes its kernels: on each power of two of threads, with weights repacked for
this processor and as in the file. All models alternate in one process; each figure is the median of its turns, and
ratios compare times of the same turn. Where the memory's speed changes from second to second, the share of bandwidth
that plain decoding uses requires simultaneous measurements: so our plain forwards alternate with bare reading, and
each turn's share is relative to the readings directly before and after it.

    python benchmarks/native_against_llama.py MODEL.gguf [--threads N] [--prompt TOKENS] [--turns N]

Prints one JSON object. Requires an idle machine; compare the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.bench.runtimes import REST_S, NamedModel, RuntimeTimes, measure_runtimes
from edgespec.calibration.width_probe import probe_tokens
from edgespec.files.model_file import read_model_file
from edgespec.hardware.bandwidth import measure_read_bandwidth
from edgespec.interfaces.model import Model, Sequence
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.model import load_model
from edgespec.runtimes.native.model import NativeSettings, load_native

NATIVE = "native"

# A turn of readings or plain forwards: short, so that both see the same memory speed; 10 to 20 of each at 50 GB/s.
READING_S = 0.1
SHARE_TURNS = 9
PLAIN_FORWARDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Bytes per second of plain forwards, turn by turn, and of the readings directly before and after them."""

    plain_bytes_per_s: tuple[float, ...]
    read_bytes_per_s: tuple[float, ...]  # one more value: each turn lies between two

    def of_turns(self) -> list[float]:
        between = itertools.pairwise(self.read_bytes_per_s)
        return [own / statistics.mean(reads) for own, reads in zip(self.plain_bytes_per_s, between, strict=True)]


def open_models(stack: ExitStack, path: Path, threads: int) -> dict[str, Model]:
    """The native model first, then llama.cpp in each setting."""
    models: dict[str, Model] = {
        NATIVE: stack.enter_context(load_native(read_model_file(path), NativeSettings(threads=threads)))
    }
    for repack in (True, False):
        settings = LlamaSettings(threads=threads, repack=repack, kv_type="f16")
        loaded = stack.enter_context(load_model(read_model_file(path), settings))
        weights = "repacked" if repack else "as in the file"
        models[f"llama, {weights}, {threads} threads"] = loaded
        fewer = threads // 2
        while fewer:
            own = stack.enter_context(loaded.with_settings(threads=fewer))
            models[f"llama, {weights}, {fewer} threads"] = own
            fewer //= 2
    return models


def time_widths(models: dict[str, Model], context: int) -> tuple[RuntimeTimes, ...]:
    named = [NamedModel(name=name, arm=None, model=model) for name, model in models.items()]
    steps = measure_runtimes(named, context)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            times: tuple[RuntimeTimes, ...] = done.value
            return times


def time_shares(model: Model, threads: int) -> Shares:
    """Plain forwards alternating with bare reading; each figure is the median of its turn."""

    def read() -> float:
        return measure_read_bandwidth([threads], seconds=READING_S).by_threads[0].median_bytes_per_s

    ids = probe_tokens(PLAIN_FORWARDS, model.facts.vocabulary_size)
    plain, reads = [], [read()]
    with closing(model.open(PLAIN_FORWARDS)) as sequence:
        for _ in range(SHARE_TURNS):
            times = []
            for token in ids:
                started = time.perf_counter()
                sequence.forward([token], 1).argmax()
                times.append(time.perf_counter() - started)
            sequence.rewind(0)
            plain.append(model.facts.bytes_per_forward / statistics.median(times))
            reads.append(read())
    return Shares(plain_bytes_per_s=tuple(plain), read_bytes_per_s=tuple(reads))


def time_prompts(models: dict[str, Model], tokens: int, turns: int) -> dict[str, list[float]]:
    """Seconds to read a prompt of ``tokens`` tokens from an empty cache, for each model and turn."""
    found: dict[str, list[float]] = {name: [] for name in models}
    with ExitStack() as stack:
        sequences: dict[str, Sequence] = {
            name: stack.enter_context(closing(model.open(tokens))) for name, model in models.items()
        }
        for turn in range(turns + 1):  # the first turn is not counted
            for name, sequence in list(sequences.items())[:: 1 if turn % 2 else -1]:
                ids = probe_tokens(tokens, models[name].facts.vocabulary_size)
                sequence.rewind(0)
                time.sleep(REST_S)
                started = time.perf_counter()
                sequence.forward(ids, 1).argmax()
                if turn:
                    found[name].append(time.perf_counter() - started)
    return found


def report_of(times: tuple[RuntimeTimes, ...], prompts: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    own = times[0]
    fastest = min(times[1:], key=lambda each: each.t1_ratio)
    prompt_speedups = {
        name: round(statistics.median(a / b for a, b in zip(theirs, prompts[NATIVE], strict=True)), 3)
        for name, theirs in prompts.items()
        if name != NATIVE
    }
    return {
        "forward_ms": {
            each.name: {width: round(1e3 * s, 3) for width, s in zip(each.widths, each.forward_s, strict=True)}
            for each in times
        },
        "ratio_to_plain": {
            each.name: {
                width: round(s / each.forward_s[0], 3) for width, s in zip(each.widths, each.forward_s, strict=True)
            }
            for each in times
        },
        "t1_over_native": {each.name: [round(each.t1_ratio, 3), *map(_short, each.t1_ratio_range)] for each in times},
        "plain_speedup_over_fastest_llama": round(fastest.t1_ratio, 3),
        "fastest_llama": fastest.name,
        "plain_bytes_per_s": round(own.facts.bytes_per_forward / own.forward_s[0]),
        "prompt_tokens": tokens,
        "prompt_tokens_per_s": {name: round(tokens / statistics.median(s), 1) for name, s in prompts.items()},
        "prompt_speedup": prompt_speedups,
        "prompt_speedup_over_fastest_llama": min(prompt_speedups.values()),
    }


def _short(value: float) -> float:
    return round(value, 3)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--turns", type=int, default=3, help="times that each reads the prompt")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        models = open_models(stack, arguments.model, arguments.threads)
        times = time_widths(models, 256)
        prompts = time_prompts(models, arguments.prompt, arguments.turns)
        shares = time_shares(models[NATIVE], arguments.threads)
    report = {
        "model": arguments.model.name,
        "threads": arguments.threads,
        **report_of(times, prompts, arguments.prompt),
    }
    of_turns = shares.of_turns()
    report["read_bytes_per_s"] = [round(min(shares.read_bytes_per_s)), round(max(shares.read_bytes_per_s))]
    report["share_of_read_bandwidth"] = round(statistics.median(of_turns), 3)
    report["share_of_read_bandwidth_range"] = [_short(min(of_turns)), _short(max(of_turns))]
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
