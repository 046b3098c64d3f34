"""The acceptance steps for our own kernels: as true as llama.cpp, the same bits at every width, and faster.

    python scripts/acceptance_native.py [--only STEP]

Quality is measured on the files as they are in the store. The reference holds the same weights as float32, where
llama.cpp computes with float32 activations, a float32 cache and no flash attention. llama.cpp itself runs with the
float16 cache that its own programs have by default, as our kernels do, with flash attention, as they have it, and
without, as llama-cpp-python has it. Ours are held against the one that comes closer to the reference, line by line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from acceptance_bench import brief, edgespec, identical
from acceptance_equality import row_of, verification_prompts
from acceptance_quality import FLOAT32, PERPLEXITY_WITHIN, Results, export, kl_divergences, tokens_to_predict, windows

from edgespec.bench import quality
from edgespec.bench.suite import builtin_suite
from edgespec.files.home import home
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.runtime import LoadedModel, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store

# What the issue asks for.
TOKENS, KL_TOKENS = 4096, 512
AGREEMENT_MINUS = 0.01
FOUR_OVER_ONE, EIGHT_OVER_ONE, PROMPT_SPEEDUP = 1.25, 1.9, 2.0
FIRST_LOAD_S, NEXT_LOAD_S = 6.0, 1.0
GEOMEAN_STOCK, GEOMEAN_TRIMMED, CODE, NEVER_SLOWER = 1.3, 1.45, 1.8, 0.97
FAST_CATEGORIES = ("code", "code-edit")

MODELS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m", "gemma3-270m")
TARGET, DRAFTER = MODELS[:2]
WINDOW = 1024
NATIVE = "native"
LLAMA_FLASH = {"llama": False, "llama_flash": True}  # llama.cpp's own ways to attend, by name
DEEPEST = 8
WIDEST_ROW = 32
ROW_THREADS = (1, 2, 3, 7)
# Five hundred positions in all; the middle ones lie across the edge of a block of 256 that attention reduces alone.
ROW_CONTEXTS, ROW_POSITIONS = (0, 240, 1000, 2040, 3990), 100
ROOT = Path(__file__).resolve().parent.parent


# ----------------------------------------------------------------------------------------------- quality


def rows_of(model: LoadedModel, tokens: Sequence[int], at_once: int) -> Iterator[npt.NDArray[np.float32]]:
    """Teacher-forced scores, so many rows a forward."""
    with closing(model.open(len(tokens))) as sequence:
        yield from quality.teacher_forced_rows(sequence, tokens, rows_at_once=at_once)


def losses_of(model: LoadedModel, tokens: Sequence[int]) -> list[float]:
    """The loss of each token but the first, each window predicted from an empty cache."""
    found: list[float] = []
    for window in windows(tokens, WINDOW):
        done = 0
        for rows in rows_of(model, window[:-1], quality.ROWS_AT_ONCE):
            found += quality.token_losses(rows, window[done + 1 : done + 1 + len(rows)]).tolist()
            done += len(rows)
    return found


def divergences_of(models: dict[str, LoadedModel], tokens: Sequence[int]) -> dict[str, npt.NDArray[np.float64]]:
    """The KL of each model from the reference after each of the same tokens, in nats."""
    streams = [rows_of(model, tokens, quality.ROWS_AT_ONCE) for model in models.values()]
    found: dict[str, list[float]] = {name: [] for name in models if name != FLOAT32}
    for rows in zip(*streams, strict=True):
        scores = dict(zip(models, rows, strict=True))
        for name, own in found.items():
            own += kl_divergences(scores[FLOAT32], scores[name]).tolist()
    return {name: np.array(own) for name, own in found.items()}


def least_divergent(kl: dict[str, npt.NDArray[np.float64]]) -> str:
    """The way in which llama.cpp's scores come closest to the reference's."""
    return min(LLAMA_FLASH, key=lambda name: float(np.mean(kl[name])))


def perplexities_compared(perplexity: dict[str, float]) -> dict[str, Any]:
    """All, and ours over llama.cpp's that is nearest to the reference's."""
    nearest = min(LLAMA_FLASH, key=lambda name: abs(perplexity[name] - perplexity[FLOAT32]))
    return {
        "perplexity": perplexity,
        "perplexity_held_against": nearest,
        "perplexity_ratio": perplexity[NATIVE] / perplexity[nearest],
    }


def compared(kl: dict[str, npt.NDArray[np.float64]], rival: str) -> dict[str, Any]:
    """All means, ours over the rival's, and the mean difference of these token by token in its standard errors."""
    ours, theirs = kl[NATIVE], kl[rival]
    more = ours - theirs
    return {
        "kl_tokens": len(more),
        "mean_kl_nats": {name: float(np.mean(own)) for name, own in kl.items()},
        "kl_ratio": float(np.mean(ours) / np.mean(theirs)),
        "kl_excess_in_standard_errors": float(np.mean(more) / (np.std(more, ddof=1) / np.sqrt(len(more)))),
    }


def best_tokens(model: LoadedModel, tokens: Sequence[int], width: int) -> npt.NDArray[np.intp]:
    """The token that it would write after each of these, scored so many rows at a time."""
    return np.concatenate([rows.argmax(axis=-1) for rows in rows_of(model, tokens, width)])


def agreements(own: LoadedModel, theirs: LoadedModel, tokens: Sequence[int]) -> dict[str, float]:
    """How often both would write the same token row by row, and how often llama.cpp eight rows at a time as well."""
    at_1 = best_tokens(theirs, tokens, 1)
    return {
        "agreement_with_llama_at_1": float(np.mean(best_tokens(own, tokens, 1) == at_1)),
        "agreement_of_llama_at_1_and_8": float(np.mean(best_tokens(theirs, tokens, 8) == at_1)),
    }


def load(file: LocatedModel, settings: Settings) -> LoadedModel:
    """A model's weights in those settings, whichever runtime they are for."""
    return runtime_of(settings).load(file, settings)


def model_quality(model: str) -> Callable[[Results, str], bool]:
    """A step: one model of the store, as it is."""

    def step(results: Results, name: str) -> bool:
        located = Locator(store=Store(home()), download=True).locate(model)
        text = tokens_to_predict(located.path, TOKENS)
        threads = describe_machine().physical_cores
        with tempfile.TemporaryDirectory(prefix="edgespec quality ") as folder, ExitStack() as stack:
            export(model, "--to", "gguf", "--quant", "f32", "-o", Path(folder) / FLOAT32)
            exported = Locator(store=Store(home())).locate(str(Path(folder) / FLOAT32))
            exact = LlamaSettings(threads=threads, kv_type="f32", flash_attention=False, repack=False)
            models = {
                FLOAT32: stack.enter_context(load(exported, exact)),
                NATIVE: stack.enter_context(load(located, NativeSettings(threads=threads))),
            }
            for llama, flash in LLAMA_FLASH.items():
                settings = LlamaSettings(threads=threads, kv_type="f16", flash_attention=flash)
                models[llama] = stack.enter_context(load(located, settings))
            kl = divergences_of(models, text[:KL_TOKENS])
            rival = least_divergent(kl)
            found: dict[str, Any] = {"model": model, "tokens": TOKENS, "held_against": rival, **compared(kl, rival)}
            results.save(name, **found)
            losses = {each: losses_of(loaded, text) for each, loaded in models.items()}
            found |= perplexities_compared({each: quality.perplexity(own) for each, own in losses.items()})
            results.save(name, **found)
            found |= agreements(models[NATIVE], models[rival], text)
        results.save(name, **found)
        return quality_holds(found)

    return step


def quality_holds(found: dict[str, Any]) -> bool:
    """Whether our kernels are as true to the weights as llama.cpp."""
    least = found["agreement_of_llama_at_1_and_8"] - AGREEMENT_MINUS
    return bool(
        abs(found["perplexity_ratio"] - 1) <= PERPLEXITY_WITHIN
        and found["kl_ratio"] <= 1
        and found["agreement_with_llama_at_1"] >= least
    )


# ----------------------------------------------------------------------------------------------- equality


def random_widths(source: random.Random, count: int) -> Iterator[int]:
    """Widths of 1 to 32 that add up to ``count``."""
    while count:
        width = min(count, source.randint(1, WIDEST_ROW))
        yield width
        count -= width


def row_bits(results: Results, name: str) -> bool:
    """Each row's bits, whatever is computed beside it, on however many threads, anywhere in the context.

    The truth is one token at a time on one thread. At each of the contexts some positions are scored again in widths
    1 to 32 and in random mixtures, on 1, 2, 3 and 7 threads.
    """
    located = Locator(store=Store(home()), download=True).locate(TARGET)
    source = random.Random(6)
    context = ROW_CONTEXTS[-1] + ROW_POSITIONS
    tokens = tokens_to_predict(located.path, context)
    compared, unequal = 0, []
    with ExitStack() as stack:
        one = stack.enter_context(load(located, NativeSettings(threads=1)))
        assert isinstance(one, NativeModel)
        models = {threads: stack.enter_context(one.with_settings(threads=threads)) for threads in ROW_THREADS}
        sequences = {n: stack.enter_context(closing(model.open(context))) for n, model in models.items()}
        plain = stack.enter_context(closing(one.open(context)))
        for start in ROW_CONTEXTS:
            for sequence in (plain, *sequences.values()):
                sequence.forward(tokens[sequence.length : start], 0) if start else None
            truth = []
            for at in range(start, start + ROW_POSITIONS):
                truth.append(plain.forward(tokens[at : at + 1], 1).logits(0).tobytes())
            plain.rewind(start)
            for threads, sequence in sequences.items():
                for mixture in (*([width] * (ROW_POSITIONS // width) for width in range(1, WIDEST_ROW + 1)), None):
                    at = start
                    for width in random_widths(source, ROW_POSITIONS) if mixture is None else mixture:
                        scored = sequence.forward(tokens[at : at + width], width)
                        for index in range(width):
                            compared += 1
                            if scored.logits(index).tobytes() != truth[at - start + index]:
                                unequal.append((threads, at, index, width))
                        at += width
                    sequence.rewind(start)
            results.save(name, compared=compared, unequal=unequal[:20], context=start)
            print(f"  context {start}: {compared} rows, {len(unequal)} unequal", flush=True)
    return compared > 0 and not unequal


def equality(results: Results, name: str) -> bool:
    """Greedy and seeded speculation eight deep is plain decoding, on every prompt of every suite."""
    from edgespec.bench.equality import PromptResult, check_equality
    from edgespec.bench.suite import BUILTIN_SUITES
    from edgespec.engine.engine import Engine

    prompts = {prompt.id: prompt for suite in BUILTIN_SUITES for prompt in builtin_suite(suite)}
    prompts |= {prompt.id: prompt for prompt in verification_prompts()}
    kept: dict[str, Any] = {}
    with Engine.load(profile="laptop", runtime=NATIVE, download=True, calibrate=True, mode="serial") as engine:

        def keep(result: PromptResult) -> None:
            kept[result.prompt_id] = row_of(result)
            results.save(name, prompts=kept, depth=DEEPEST, depth_cap=engine.pair.depth_cap_allowed)
            print(f"  {len(kept)}/{len(prompts)} {result.prompt_id}: {not result.divergences}", flush=True)

        check_equality(engine, list(prompts.values()), depths=(DEEPEST,), on_result=keep)
        cap = engine.pair.depth_cap_allowed
    same = sum(row["identical"] for row in kept.values())
    results.save(name, identical=same, of=len(kept), accepted=sum(row["accepted"] for row in kept.values()))
    return same == len(kept) == len(prompts) and cap >= DEEPEST


# ----------------------------------------------------------------------------------------------- speed


def benchmark(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a script of benchmarks/ prints. Raises RuntimeError with its errors if there is none."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments], text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def speed(results: Results, name: str) -> bool:
    """T(1), T(4), T(8) and a prompt of 512 tokens against llama.cpp in every setting."""
    located = Locator(store=Store(home()), download=True).locate(TARGET)
    found = benchmark("native_against_llama.py", str(located.path))
    results.save(name, **found)
    ratios = found["ratio_to_plain"][NATIVE]
    return bool(
        found["plain_speedup_over_fastest_llama"] >= 1
        and ratios["4"] <= FOUR_OVER_ONE
        and ratios["8"] <= EIGHT_OVER_ONE
        and found["prompt_speedup_over_fastest_llama"] >= PROMPT_SPEEDUP
    )


def levels(results: Results, name: str) -> bool:
    """T(w) of every instruction set that this processor has, forced one after another.

    Portable C, a test's reference and no fast path, would take a quarter of an hour.
    """
    from edgespec.runtimes.native.library import PORTABLE, load

    located = Locator(store=Store(home()), download=True).locate(TARGET)
    for level in [level for level in reversed(load().levels) if level != PORTABLE]:
        results.save(name, **{level: benchmark("kernels.py", str(located.path), "--level", level, "--passes", "5")})
    return True


def memory(results: Results, name: str) -> bool:
    """Peak memory and load times."""
    located = Locator(store=Store(home()), download=True).locate(TARGET)
    found = benchmark("native_memory.py", str(located.path))
    results.save(name, **found)
    return memory_holds(found)


def memory_holds(found: dict[str, Any]) -> bool:
    """Whether the peak is below the limit, and loading as quick as asked for, first and from the sidecar."""
    runs = found["runs"]
    return bool(
        found["peak_over_limit"] <= 1
        and runs["sidecar_written"]["load_s"] <= FIRST_LOAD_S
        and runs["sidecar_mapped"]["load_s"] <= NEXT_LOAD_S
    )


def over_llama(report: dict[str, Any], arm: str, rival: str) -> dict[str, float]:
    """How many times faster an arm is than llama.cpp's plain decoding in the same run, by category."""
    ours, theirs = (report["arms"][each]["speedup"]["by_category"] for each in (arm, rival))
    return {category: ours[category]["geomean"] / theirs[category]["geomean"] for category in ours}


def mean_depths(report: dict[str, Any], arm: str) -> dict[str, float]:
    """How many tokens a round of this arm drafted one after another, by category."""
    return {
        category: sum(depth * count for depth, count in counts.items()) / counts.total()
        for category, counts in rounds_by_depth(report, arm).items()
    }


def shallow_shares(report: dict[str, Any], arm: str) -> dict[str, float]:
    """The share of this arm's rounds that drafted at most one token after another, by category."""
    counted = rounds_by_depth(report, arm)
    return {category: (counts[0] + counts[1]) / counts.total() for category, counts in counted.items()}


def rounds_by_depth(report: dict[str, Any], arm: str) -> dict[str, Counter[int]]:
    """How many rounds of this arm were how deep, by category; of those that have any."""
    found: dict[str, Counter[int]] = {}
    for answer in report["pairs"]:
        if answer["arm"] == arm and answer["rounds_by_depth"]:
            found.setdefault(answer["category"], Counter()).update(dict(enumerate(answer["rounds_by_depth"])))
    return found


def suite(results: Results, name: str, *drafting: str, least: float) -> bool:
    """The frozen suite as planned, against llama.cpp's plain decoding in the same run."""
    report = edgespec(
        "bench", "--suite", "ours", "--passes", "1", "--arms", "again,planned", "--compare", f"llama:{TARGET}",
        *drafting,
    )  # fmt: skip
    rival = next(arm for arm in report["arms"] if arm.startswith("llama:"))
    gains = over_llama(report, "planned", rival)
    geomean = statistics.geometric_mean(gains.values())
    depths = mean_depths(report, "planned")
    shallow = shallow_shares(report, "planned")
    results.save(
        name, report=brief(report), over_llama=gains, geomean=geomean, mean_depths=depths, shallow_shares=shallow
    )
    return (
        identical(report)
        and geomean >= least
        and all(gains[category] >= CODE for category in FAST_CATEGORIES if category in gains)
        and min(gains.values()) >= NEVER_SLOWER
    )


def stock_suite(results: Results, name: str) -> bool:
    """The suite with the drafter as it is published."""
    return suite(results, name, least=GEOMEAN_STOCK)


def trimmed_suite(results: Results, name: str) -> bool:
    """The suite with the same drafter in four bits and a head of the size that is measured to be best."""
    with tempfile.TemporaryDirectory(prefix="edgespec trimmed ") as place:
        folder = Path(place) / "drafter"
        exported = export(DRAFTER, "--to", "gguf", "--quant", "q4_0", "--trim-vocab", "auto", "-o", folder)
        results.save(name, trim=exported["trim"], bytes_per_token=exported["bytes_per_token"])
        return suite(results, name, "--draft", str(folder), least=GEOMEAN_TRIMMED)


NATIVE_STEPS: dict[str, Callable[[Any, str], bool]] = {
    "native-speed": speed,
    "native-levels": levels,
    "native-memory": memory,
    **{f"native-quality-{model}": model_quality(model) for model in MODELS},
    "native-rows": row_bits,
    "native-equality": equality,
    "native-suite-stock": stock_suite,
    "native-suite-trimmed": trimmed_suite,
}


class _Printed:
    def save(self, name: str, **values: Any) -> None:
        print(json.dumps({"step": name, **values}, indent=1), flush=True)


def main() -> int:
    """Run the steps asked for and print what they find; 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*NATIVE_STEPS], help="run this step (repeatable)")
    arguments = parser.parse_args()
    verdicts = {name: NATIVE_STEPS[name](_Printed(), name) for name in arguments.only or NATIVE_STEPS}
    print(json.dumps({"holds": verdicts}))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
