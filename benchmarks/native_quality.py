"""Perplexity, KL divergence and best tokens of the native kernels and of llama.cpp, for one model.

    python -m benchmarks.native_quality MODEL FLOAT32_FOLDER

MODEL is measured unchanged. The reference is an export of MODEL with float32 weights: llama.cpp computes it with
float32 activations, a float32 cache and no flash attention. llama.cpp runs MODEL with a float16 cache, the default
of its programs and of the native kernels, with flash attention (the default of its programs) and without it (the
default of llama-cpp-python). The native kernels are compared with the variant that is closest to the reference,
separately for KL and perplexity. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.score_distance import (
    FLOAT32,
    KL_TOKENS,
    TOKENS,
    WINDOW,
    kl_divergences,
    reference_settings,
    tokens_to_predict,
    windows,
)
from edgespec.decoding import scores
from edgespec.files.home import home
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.runtime import LoadedModel, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store

NATIVE = "native"
LLAMA_FLASH = {"llama": False, "llama_flash": True}  # flash attention of llama.cpp, by name


def rows_of(model: LoadedModel, tokens: Sequence[int], block: int) -> Iterator[npt.NDArray[np.float32]]:
    """Teacher-forced scores, ``block`` rows per forward."""
    with closing(model.open(len(tokens))) as sequence:
        yield from scores.teacher_forced_rows(sequence, tokens, rows_at_once=block)


def losses_of(model: LoadedModel, tokens: Sequence[int]) -> list[float]:
    """The loss of each token but the first; each window starts with an empty cache."""
    found: list[float] = []
    for window in windows(tokens, WINDOW):
        done = 0
        for rows in rows_of(model, window[:-1], scores.ROWS_AT_ONCE):
            found += scores.token_losses(rows, window[done + 1 : done + 1 + len(rows)]).tolist()
            done += len(rows)
    return found


def divergences_of(models: dict[str, LoadedModel], tokens: Sequence[int]) -> dict[str, npt.NDArray[np.float64]]:
    """KL divergence of each model from the reference after each token, in nats."""
    streams = [rows_of(model, tokens, scores.ROWS_AT_ONCE) for model in models.values()]
    found: dict[str, list[float]] = {name: [] for name in models if name != FLOAT32}
    for rows in zip(*streams, strict=True):
        computed = dict(zip(models, rows, strict=True))
        for name, own in found.items():
            own += kl_divergences(computed[FLOAT32], computed[name]).tolist()
    return {name: np.array(own) for name, own in found.items()}


def least_divergent(kl: dict[str, npt.NDArray[np.float64]]) -> str:
    """The llama.cpp variant with the smallest mean KL divergence from the reference."""
    return min(LLAMA_FLASH, key=lambda name: float(np.mean(kl[name])))


def perplexities_compared(perplexity: dict[str, float]) -> dict[str, Any]:
    """All perplexities, and the native one over that of the llama.cpp variant nearest to the reference."""
    nearest = min(LLAMA_FLASH, key=lambda name: abs(perplexity[name] - perplexity[FLOAT32]))
    return {
        "perplexity": perplexity,
        "perplexity_held_against": nearest,
        "perplexity_ratio": perplexity[NATIVE] / perplexity[nearest],
    }


def compared(kl: dict[str, npt.NDArray[np.float64]], rival: str) -> dict[str, Any]:
    """Mean KL of each model, native over ``rival``, and their mean difference per token in standard errors."""
    ours, theirs = kl[NATIVE], kl[rival]
    more = ours - theirs
    return {
        "kl_tokens": len(more),
        "mean_kl_nats": {name: float(np.mean(own)) for name, own in kl.items()},
        "kl_ratio": float(np.mean(ours) / np.mean(theirs)),
        "kl_excess_in_standard_errors": float(np.mean(more) / (np.std(more, ddof=1) / np.sqrt(len(more)))),
    }


def best_tokens(model: LoadedModel, tokens: Sequence[int], width: int) -> npt.NDArray[np.intp]:
    """The best token after each token, computed in forwards of ``width`` rows."""
    return np.concatenate([rows.argmax(axis=-1) for rows in rows_of(model, tokens, width)])


def agreements(own: LoadedModel, theirs: LoadedModel, tokens: Sequence[int]) -> dict[str, float]:
    """The share of equal best tokens: native and llama.cpp one row per forward, llama.cpp one and eight rows."""
    at_1 = best_tokens(theirs, tokens, 1)
    return {
        "agreement_with_llama_at_1": float(np.mean(best_tokens(own, tokens, 1) == at_1)),
        "agreement_of_llama_at_1_and_8": float(np.mean(best_tokens(theirs, tokens, 8) == at_1)),
    }


def load(file: LocatedModel, settings: Settings) -> LoadedModel:
    """Load a model in the runtime of ``settings``."""
    return runtime_of(settings).load(file, settings)


def measure(model: str, float32: str) -> dict[str, Any]:
    """All figures of one model; ``float32`` is the folder of the reference."""
    located = Locator(store=Store(home()), download=True).locate(model)
    exported = Locator(store=Store(home())).locate(float32)
    text = tokens_to_predict(located.path, TOKENS)
    threads = describe_machine().physical_cores
    with ExitStack() as stack:
        models = {
            FLOAT32: stack.enter_context(load(exported, reference_settings(threads))),
            NATIVE: stack.enter_context(load(located, NativeSettings(threads=threads))),
        }
        for llama, flash in LLAMA_FLASH.items():
            settings = LlamaSettings(threads=threads, kv_type="f16", flash_attention=flash)
            models[llama] = stack.enter_context(load(located, settings))
        kl = divergences_of(models, text[:KL_TOKENS])
        rival = least_divergent(kl)
        losses = {each: losses_of(loaded, text) for each, loaded in models.items()}
        return {
            "model": model,
            "tokens": TOKENS,
            "held_against": rival,
            **compared(kl, rival),
            **perplexities_compared({each: scores.perplexity(own) for each, own in losses.items()}),
            **agreements(models[NATIVE], models[rival], text),
        }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model of the store, or a path")
    parser.add_argument("float32", metavar="FLOAT32_FOLDER", help="its export with float32 weights")
    given = parser.parse_args()
    print(json.dumps(measure(given.model, given.float32)))


if __name__ == "__main__":
    main()
