"""Perplexity and KL divergence of an ONNX export and a GGUF with the same weights.

    python -m benchmarks.export_quality GGUF_FOLDER ONNX_FOLDER FLOAT32_FOLDER

The folders are exports with the same weights: a GGUF for llama.cpp, its ONNX twin for ONNX Runtime, and the
reference, a GGUF with float32 weights. For the reference llama.cpp computes with float32 activations, a float32
cache and no flash attention. The GGUF runs with a float16 cache, the default of llama.cpp's programs, and a second
time with edgespec's default cache, whose keys are Q8_0. These keys move Qwen 2.5 several times further from the
reference than rounding all activations does. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.score_distance import (
    FLOAT32,
    KL_TOKENS,
    TOKENS,
    WINDOW,
    agreements,
    kl_divergences,
    reference_settings,
    text_to_predict,
    tokens_to_predict,
    windows,
)
from edgespec.decoding import scores
from edgespec.files.gguf.header import read_header
from edgespec.files.home import home
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.runtime import LoadedModel, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store

LLAMA, LLAMA_OURS, ONNX = "llama", "llama_our_cache", "onnx"


def bytes_of(folder: Path) -> int:
    """Bytes of an export, with its tokenizer and its manifest."""
    return sum(path.stat().st_size for path in folder.iterdir())


def require_float32(folder: Path) -> None:
    """Raise RuntimeError if the reference has weights of another type."""
    types = {tensor.type_name for tensor in read_header(folder / "model.gguf").tensors}
    if types != {"F32"}:
        raise RuntimeError(f"the reference has weights of {', '.join(sorted(types))}")


def settings_here() -> dict[str, Settings]:
    """Settings of the reference, which rounds nothing to fewer bits than float32, and of both models."""
    threads = describe_machine().physical_cores
    return {
        FLOAT32: reference_settings(threads),
        LLAMA: LlamaSettings(threads=threads, kv_type="f16"),
        ONNX: OnnxSettings(threads=threads),
    }


def side_by_side(
    models: Mapping[str, LoadedModel], inputs: Sequence[int]
) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
    """Scores of all models after the same tokens, in blocks of rows: float32 (rows, vocabulary) by model."""
    with ExitStack() as open_here:
        streams = []
        for model in models.values():
            sequence = model.open(len(inputs))
            open_here.callback(sequence.close)
            streams.append(scores.teacher_forced_rows(sequence, inputs))
        for rows in zip(*streams, strict=True):
            yield dict(zip(models, rows, strict=True))


def compare(models: Mapping[str, LoadedModel], tokens: Sequence[int], kl_tokens: int) -> dict[str, Any]:
    """Perplexity of each model on ``tokens``, and KL divergence from the reference on the first ``kl_tokens``.

    ``models`` has the reference as ``float32``.
    """
    losses: dict[str, list[float]] = {name: [] for name in models}
    divergences: dict[str, list[float]] = {name: [] for name in models if name != FLOAT32}
    agreed: dict[str, list[bool]] = {name: [] for name in divergences}
    for window in windows(tokens, WINDOW):
        done = 0
        for computed in side_by_side(models, window[:-1]):
            reference = computed[FLOAT32]
            following = window[done + 1 : done + 1 + len(reference)]
            done += len(reference)
            for name, rows in computed.items():
                left = kl_tokens - len(divergences.get(name, ()))
                losses[name] += scores.token_losses(rows, following).tolist()
                if name != FLOAT32 and left > 0:
                    divergences[name] += kl_divergences(reference[:left], rows[:left]).tolist()
                    agreed[name] += agreements(reference[:left], rows[:left]).tolist()
    return {
        "tokens": len(losses[FLOAT32]),
        "kl_tokens": min(map(len, divergences.values())),
        "perplexity": {name: scores.perplexity(own) for name, own in losses.items()},
        "mean_kl_nats": {name: float(np.mean(own)) for name, own in divergences.items()},
        "argmax_agreement": {name: float(np.mean(own)) for name, own in agreed.items()},
    }


def measure(twins: Mapping[str, Path], tokens: int = TOKENS, kl_tokens: int = KL_TOKENS) -> dict[str, Any]:
    """``compare`` for three exports on this machine, with their sizes and hashes of the predicted text."""
    text = tokens_to_predict(twins[LLAMA] / "model.gguf", tokens)
    settings, locator = settings_here(), Locator(store=Store(home()))
    with ExitStack() as open_here:
        models = {
            name: open_here.enter_context(runtime_of(own).load(locator.locate(str(twins[name])), own))
            for name, own in settings.items()
        }
        ours = models[LLAMA].with_settings(kv_type=LlamaSettings().kv_type)
        models[LLAMA_OURS] = open_here.enter_context(ours)
        found = compare(models, text, kl_tokens)
        kinds = {name: {"kv_type": m.facts.kv_type, **m.facts.settings} for name, m in models.items()}
    perplexity, kl = found["perplexity"], found["mean_kl_nats"]
    return {
        **found,
        "perplexity_ratio": perplexity[ONNX] / perplexity[LLAMA],
        "perplexity_ratio_our_cache": perplexity[ONNX] / perplexity[LLAMA_OURS],
        "kl_ratio": kl[ONNX] / kl[LLAMA],
        "kl_ratio_our_cache": kl[ONNX] / kl[LLAMA_OURS],
        "settings": kinds,
        "bytes": {name: bytes_of(folder) for name, folder in twins.items()},
        "text_sha256": hashlib.sha256(text_to_predict().encode()).hexdigest(),
        "token_ids_sha256": hashlib.sha256(np.array(text, dtype="<i8").tobytes()).hexdigest(),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gguf", "onnx", "float32"):
        parser.add_argument(name, type=Path, metavar=f"{name.upper()}_FOLDER")
    given = parser.parse_args()
    require_float32(given.float32)
    print(json.dumps(measure({LLAMA: given.gguf, ONNX: given.onnx, FLOAT32: given.float32})))


if __name__ == "__main__":
    main()
