"""The acceptance step for exported Hugging Face folders: the same logits as transformers, for each architecture.

    python scripts/acceptance_export.py --transformers PYTHON [--only KIND]

PYTHON is an interpreter with torch and transformers, which edgespec itself never needs; as a step of
`make acceptance` it is named by EDGESPEC_TRANSFORMERS_PYTHON. Each kind of model is made there with random weights,
exported here, and run by llama.cpp on the float32 GGUF.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the tests' tokenizer

from transformers_reference import KINDS, POSITIONS  # noqa: E402

from edgespec.export.hf_gguf import export_from_folder  # noqa: E402
from edgespec.runtimes.llama_library import load  # noqa: E402
from tests.support.hf_folder import write_byte_level_tokenizer  # noqa: E402

INTERPRETER = "EDGESPEC_TRANSFORMERS_PYTHON"

# What the issue asks for, of logits of about 1.
WITHIN = 1e-3


class Results(Protocol):
    def save(self, name: str, **values: Any) -> None: ...


def llama_logits(path: Path, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """llama.cpp's logits after each of the tokens, float32 (positions, rows), with a float32 cache on one thread."""
    api: Any = load().api
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {path}")
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 2 * len(tokens), len(tokens), len(tokens)
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = api.GGML_TYPE_F32
    settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, settings)
    if not context:
        api.llama_model_free(model)
        raise RuntimeError(f"llama.cpp makes no context for {path}")
    batch = api.llama_batch_init(len(tokens), 0, 1)
    try:
        for row, token in enumerate(tokens.tolist()):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, 1
        batch.n_tokens = len(tokens)
        code = api.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama.cpp's forward failed with code {code}")
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (size,)) for row in range(len(tokens))]
        return np.stack(rows)
    finally:
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)


def largest_difference(interpreter: str, kind: str, folder: Path) -> dict[str, float]:
    """How far the logits of one kind are apart, and their own spread."""
    source = folder / kind
    source.mkdir()
    reference = Path(__file__).with_name("transformers_reference.py")
    done = subprocess.run(
        [interpreter, str(reference), kind, str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    write_byte_level_tokenizer(source)
    export_from_folder(source, folder / f"{kind}-gguf", name=kind)
    theirs = np.load(source / "logits.npy", allow_pickle=False)
    ours = llama_logits(folder / f"{kind}-gguf" / "model.gguf", np.load(source / "tokens.npy", allow_pickle=False))
    if ours.shape != theirs.shape or len(ours) != POSITIONS:
        raise RuntimeError(f"logits of {kind}: {ours.shape} here, {theirs.shape} there")
    return {"largest_difference": float(np.abs(ours - theirs).max()), "spread": float(theirs.std())}


def compare(interpreter: str, kinds: Iterable[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """``largest_difference`` of each kind, or the error that it ended in."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec export ") as folder:
        for kind in kinds:
            try:
                found[kind] = largest_difference(interpreter, kind, Path(folder))
            except Exception as error:  # one broken kind must not cost the others their run
                found[kind] = {"error": f"{type(error).__name__}: {error}"}
            tell(f"{kind}: {json.dumps(found[kind])}")
    return found


def holds(found: dict[str, Any]) -> bool:
    """Whether every kind is within the bound, and its logits are not all alike."""
    return bool(found) and all(
        each.get("largest_difference", WITHIN) < WITHIN and each["spread"] > 100 * WITHIN for each in found.values()
    )


def transformers_logits(results: Results, name: str) -> bool:
    """Exported folders compute what transformers computes."""
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        raise RuntimeError(f"set {INTERPRETER} to a Python that has torch and transformers")
    found = compare(interpreter, KINDS, lambda _line: None)
    results.save(name, kinds=found)
    return holds(found)


EXPORT_STEPS: dict[str, Callable[[Results, str], bool]] = {"export-transformers": transformers_logits}


def main() -> int:
    """Compare the kinds asked for; 0 if all are within the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", default=os.environ.get(INTERPRETER), help="a Python with transformers")
    parser.add_argument("--only", action="append", choices=[*KINDS], help="this kind (repeatable)")
    arguments = parser.parse_args()
    if not arguments.transformers:
        parser.error(f"give --transformers PYTHON, or set {INTERPRETER}")
    return 0 if holds(compare(arguments.transformers, arguments.only or KINDS, print)) else 1


if __name__ == "__main__":
    sys.exit(main())
