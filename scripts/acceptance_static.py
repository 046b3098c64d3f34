"""The acceptance step for drafters of fixed shapes: on ONNX Runtime's own processor code, and through OpenVINO.

    python scripts/acceptance_static.py

The drafter is exported as a user would, with and without ``--static-cache``. Its scores are held against those of the
ordinary graph, and it drafts for a larger model, whose answers must be plain decoding's. All of that happens once on
the device ``cpu`` and, where OpenVINO knows the processor here, a second time through it. Its plugin
(`pip install onnxruntime-ep-openvino`) takes Intel's processors only; `onnxruntime-openvino`, which is installed in
place of onnxruntime, takes any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from acceptance_bench import edgespec
from acceptance_quality import agreements, bytes_of, kl_divergences, tokens_to_predict

from edgespec.files.onnx.folder import TOKENIZER_NAME, read_onnx_folder
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.onnx.model import load_onnx
from edgespec.runtimes.onnx.session import OnnxSettings

TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
STATIC_CACHE = 1024
PROMPT_TOKENS, SCORED_TOKENS = 192, 64
PROMPTS = (
    "Write a Python function that merges two sorted lists, and explain it.",
    "Why is the sky blue? Answer in three sentences.",
    "Rename the variable a to total in: a = 0\nfor x in xs:\n    a += x\nprint(a)",
)
ANSWER_TOKENS = 64

# A drafter only proposes, so this is about mistakes in the graph, which show as nats. Rounding activations to 8 bits
# in another order was seen to cost 0.001 nats, computing in bfloat16 as OpenVINO does 0.003.
MOST_KL = 0.02
LEAST_AGREEING = 0.9


class Results(Protocol):
    def save(self, name: str, **values: Any) -> None: ...


# ------------------------------------------------------------------------------------------------ children

# Plugins stay with a process, and so does memory: every device is asked in a process of its own.


def _tell_devices() -> None:
    named = [each.name for each in onnx_providers.list_devices()]
    print(json.dumps({"devices": named, "broken": dict(onnx_providers.broken_plugins())}))


def _tell_scores(folder: str, device: str, tokens: str, out: str) -> None:
    inputs: list[int] = json.loads(Path(tokens).read_text(encoding="utf-8"))
    settings = OnnxSettings(provider=device, threads=describe_machine().physical_cores)
    with load_onnx(read_onnx_folder(Path(folder)), settings) as model, model.open(len(inputs)) as sequence:
        sequence.forward(inputs[:-SCORED_TOKENS], 0)
        rows = [sequence.forward([token], 1).logits(0) for token in inputs[-SCORED_TOKENS:]]
        np.save(out, np.stack(rows))
        print(json.dumps({"device": model.facts.device, "build": model.facts.build}))


CHILDREN: dict[str, Callable[..., None]] = {"devices": _tell_devices, "scores": _tell_scores}


def child(what: str, *arguments: str | Path) -> dict[str, Any]:
    """The JSON of one child. Raises RuntimeError with its errors."""
    command = [sys.executable, __file__, "--child", what, *map(str, arguments)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def openvino() -> tuple[str | None, str]:
    """The processor's name as a device of OpenVINO, or why there is none."""
    found = child("devices")
    for name in ("OpenVINO-CPU", "OpenVINO"):
        if name in found["devices"]:
            return name, ""
    reasons = [f"{module}: {reason}" for module, reason in found["broken"].items() if "openvino" in module]
    return None, "; ".join(reasons) or "it is not installed"


# ------------------------------------------------------------------------------------------------ measuring


def scores(folder: Path, device: str, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """After each of the last tokens, on that device: float32 (SCORED_TOKENS, vocabulary)."""
    with tempfile.TemporaryDirectory(prefix="edgespec scores ") as place:
        asked, out = Path(place) / "tokens.json", Path(place) / "scores.npy"
        asked.write_text(json.dumps(list(tokens)), encoding="utf-8")
        said = child("scores", folder, device, asked, out)
        if said["device"] != device:
            raise RuntimeError(f"{device} was asked for, and {said['device']} computed")
        rows: npt.NDArray[np.float32] = np.load(out, allow_pickle=False)
    return rows


def apart(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> dict[str, float]:
    """How far scores are from the reference's."""
    return {
        "mean_kl_nats": float(kl_divergences(reference, other).mean()),
        "agreeing": float(agreements(reference, other).mean()),
        "largest_difference": float(np.abs(reference - other).max()),
    }


@contextmanager
def drafting_on(device: str) -> Iterator[None]:
    """What is started within loads its drafter on that device."""
    before = os.environ.get("EDGESPEC_DRAFT_DEVICE")
    os.environ["EDGESPEC_DRAFT_DEVICE"] = device
    try:
        yield
    finally:
        del os.environ["EDGESPEC_DRAFT_DEVICE"]
        if before is not None:
            os.environ["EDGESPEC_DRAFT_DEVICE"] = before


def answers(drafter: Path, *options: str) -> list[dict[str, Any]]:
    """The reports of all prompts."""
    asked = ("--target", TARGET, "--draft", str(drafter), "--max-tokens", str(ANSWER_TOKENS), *options)
    return [edgespec("generate", prompt, *asked) for prompt in PROMPTS]


def drafted(reports: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a drafter was good for, and whether the text is plain decoding's."""
    stats = [report["stats"] for report in reports]
    return {
        "device": reports[0]["plan"]["drafter"]["device"],
        "identical": [a["token_ids"] == b["token_ids"] for a, b in zip(reports, plain, strict=True)],
        "rounds_of_the_model": sum(each["rounds_by_source"].get("model", 0) for each in stats),
        "proposed": sum(each["proposed"] for each in stats),
        "accepted": sum(each["accepted"] for each in stats),
    }


def on_device(
    device: str,
    fixed: Path,
    reference: npt.NDArray[np.float32],
    tokens: Sequence[int],
    plain: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """All that is known of the fixed drafter on one device."""
    found: dict[str, Any] = {"scores": apart(reference, scores(fixed, device, tokens))}
    with drafting_on(device):
        found["drafts"] = drafted(answers(fixed, "--depth", "2"), plain)
    return found


def holds(found: dict[str, Any], device: str) -> bool:
    """Whether the device computes the same model, its drafts were used, and no answer changed."""
    near, drafts = found["scores"], found["drafts"]
    return bool(
        near["mean_kl_nats"] <= MOST_KL
        and near["agreeing"] >= LEAST_AGREEING
        and drafts["device"] == device
        and drafts["rounds_of_the_model"] > 0
        and drafts["accepted"] > 0
        and all(drafts["identical"])
    )


def static_cache(results: Results, name: str) -> bool:
    """A drafter of fixed shapes drafts on the processor, and through OpenVINO where that is a device here."""
    with tempfile.TemporaryDirectory(prefix="edgespec static ") as place:
        usual, fixed = Path(place) / "usual", Path(place) / "fixed"
        edgespec("export", DRAFTER, "--to", "onnx", "-o", str(usual), profile=False)
        fixing = ("--static-cache", str(STATIC_CACHE))
        edgespec("export", DRAFTER, "--to", "onnx", *fixing, "-o", str(fixed), profile=False)
        results.save(name, bytes_usual=bytes_of(usual), bytes_fixed=bytes_of(fixed))
        tokens = tokens_to_predict(usual / TOKENIZER_NAME, PROMPT_TOKENS + SCORED_TOKENS)[:-1]
        reference = scores(usual, "cpu", tokens)
        plain = answers(fixed, "--plain")
        device, reason = openvino()
        verdicts = []
        for each in ("cpu", *([device] if device else [])):
            found = on_device(each, fixed, reference, tokens, plain)
            verdicts.append(holds(found, each))
            results.save(name, **{each: found})
        results.save(name, openvino=device or f"not seen: {reason}")
    return all(verdicts)


STATIC_STEPS: dict[str, Callable[[Results, str], bool]] = {"static-cache": static_cache}


class _Shown:
    """Prints what a step saves."""

    def save(self, name: str, **values: Any) -> None:
        print(f"{name}: {json.dumps(values, indent=1)}", flush=True)


def main() -> int:
    """Run the step; 0 if it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs="+", metavar="WHAT", help=argparse.SUPPRESS)
    asked = parser.parse_args().child
    if asked:
        CHILDREN[asked[0]](*asked[1:])
        return 0
    held = static_cache(_Shown(), "static-cache")
    print("holds" if held else "does not hold")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
