"""Does a drafter of fixed shapes compute the same scores and texts, on the processor and through OpenVINO?

    python -m benchmarks.static_scores USUAL FIXED

USUAL and FIXED are ONNX exports of one drafter, FIXED with ``--static-cache``. The scores of FIXED are compared with
those of USUAL on the device ``cpu``, and FIXED drafts for a larger model, whose answers must be plain decoding's.
Both are repeated through OpenVINO if OpenVINO knows the processor. Its plugin (`pip install
onnxruntime-ep-openvino`) supports only Intel's processors; `onnxruntime-openvino`, which replaces onnxruntime,
supports all. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.export_quality import bytes_of
from benchmarks.processes import ROOT, edgespec
from benchmarks.score_distance import agreements, kl_divergences, tokens_to_predict
from edgespec.files.model_file import read_model_file
from edgespec.files.onnx.folder import TOKENIZER_NAME
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.onnx.model import load_onnx
from edgespec.runtimes.onnx.session import OnnxSettings

TARGET = "qwen2.5-coder-1.5b"
PROMPT_TOKENS, SCORED_TOKENS = 192, 64
PROMPTS = (
    "Write a Python function that merges two sorted lists, and explain it.",
    "Why is the sky blue? Answer in three sentences.",
    "Rename the variable a to total in: a = 0\nfor x in xs:\n    a += x\nprint(a)",
)
ANSWER_TOKENS = 64

# Plugins and memory stay with a process: every device is measured in a separate process.


def _tell_devices() -> None:
    named = [each.name for each in onnx_providers.list_devices()]
    print(json.dumps({"devices": named, "broken": dict(onnx_providers.broken_plugins())}))


def _tell_scores(folder: str, device: str, tokens: str, out: str) -> None:
    inputs: list[int] = json.loads(Path(tokens).read_text(encoding="utf-8"))
    settings = OnnxSettings(provider=device, threads=describe_machine().physical_cores)
    with load_onnx(read_model_file(Path(folder)), settings) as model, model.open(len(inputs)) as sequence:
        sequence.forward(inputs[:-SCORED_TOKENS], 0)
        rows = [sequence.forward([token], 1).logits(0) for token in inputs[-SCORED_TOKENS:]]
        np.save(out, np.stack(rows))
        print(json.dumps({"device": model.facts.device, "build": model.facts.build}))


CHILDREN: dict[str, Callable[..., None]] = {"devices": _tell_devices, "scores": _tell_scores}


def child(what: str, *arguments: str | Path) -> dict[str, Any]:
    """The JSON of one child process. Raises RuntimeError with its errors."""
    command = [sys.executable, "-m", "benchmarks.static_scores", "--child", what, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def openvino() -> tuple[str | None, str]:
    """The processor's name as a device of OpenVINO, or the reason why there is no such device."""
    found = child("devices")
    for name in ("OpenVINO-CPU", "OpenVINO"):
        if name in found["devices"]:
            return name, ""
    reasons = [f"{module}: {reason}" for module, reason in found["broken"].items() if "openvino" in module]
    return None, "; ".join(reasons) or "it is not installed"


def scores(folder: Path, device: str, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Scores after each of the last tokens on ``device``: float32 (SCORED_TOKENS, vocabulary)."""
    with tempfile.TemporaryDirectory(prefix="edgespec scores ") as place:
        asked, out = Path(place) / "tokens.json", Path(place) / "scores.npy"
        asked.write_text(json.dumps(list(tokens)), encoding="utf-8")
        said = child("scores", folder, device, asked, out)
        if said["device"] != device:
            raise RuntimeError(f"{device} was asked for, and {said['device']} computed")
        rows: npt.NDArray[np.float32] = np.load(out, allow_pickle=False)
    return rows


def apart(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> dict[str, float]:
    """Distances of scores from the reference."""
    return {
        "mean_kl_nats": float(kl_divergences(reference, other).mean()),
        "agreeing": float(agreements(reference, other).mean()),
        "largest_difference": float(np.abs(reference - other).max()),
    }


def answers(drafter: Path, *options: str, device: str | None = None) -> list[dict[str, Any]]:
    """The reports of all prompts; the drafter runs on ``device``, or where the plan puts it."""
    environment = dict(os.environ) | ({"EDGESPEC_DRAFT_DEVICE": device} if device else {})
    asked = ("--profile", "laptop", "--target", TARGET, "--draft", str(drafter), "--max-tokens", str(ANSWER_TOKENS))
    return [edgespec("generate", prompt, *asked, *options, environment=environment) for prompt in PROMPTS]


def drafted(reports: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a drafter's guesses, and whether each text is plain decoding's."""
    stats = [report["stats"] for report in reports]
    return {
        "device": reports[0]["plan"]["drafter"]["device"],
        "identical": [a["token_ids"] == b["token_ids"] for a, b in zip(reports, plain, strict=True)],
        "rounds_of_the_model": sum(each["rounds_by_source"].get("model", 0) for each in stats),
        "proposed": sum(each["proposed"] for each in stats),
        "accepted": sum(each["accepted"] for each in stats),
    }


def measure(usual: Path, fixed: Path) -> dict[str, Any]:
    """Scores and drafts of the fixed drafter on every device."""
    tokens = tokens_to_predict(usual / TOKENIZER_NAME, PROMPT_TOKENS + SCORED_TOKENS)[:-1]
    reference = scores(usual, "cpu", tokens)
    plain = answers(fixed, "--plain")
    device, reason = openvino()
    devices = {
        each: {
            "scores": apart(reference, scores(fixed, each, tokens)),
            "drafts": drafted(answers(fixed, "--depth", "2", device=each), plain),
        }
        for each in ("cpu", *([device] if device else []))
    }
    return {
        "devices": devices,
        "openvino": device or f"not available: {reason}",
        "bytes_usual": bytes_of(usual),
        "bytes_fixed": bytes_of(fixed),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="USUAL FIXED")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        CHILDREN[given.child[0]](*given.child[1:])
    elif len(given.folders) == 2:
        print(json.dumps(measure(*given.folders)))
    else:
        parser.error("give two folders: USUAL FIXED")


if __name__ == "__main__":
    main()
