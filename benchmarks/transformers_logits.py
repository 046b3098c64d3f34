"""Do exported Hugging Face folders compute the logits that transformers computes?

    python -m benchmarks.transformers_logits [--transformers PYTHON] [--only KIND]

PYTHON is an interpreter with torch and transformers (by default EDGESPEC_TRANSFORMERS_PYTHON); edgespec itself needs
neither. PYTHON makes each kind of model with random weights; the model is exported and run by llama.cpp on the
float32 GGUF. Prints one JSON object: the largest difference of a logit, by kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.processes import ROOT
from edgespec.export.huggingface.gguf import export_from_folder
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.home import home
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.onnx.model import load_onnx
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from edgespec.store.catalogue import lookup
from edgespec.store.store import Store
from scripts.transformers_reference import KINDS, POSITIONS, REAL
from tests.support.hf_folder import write_byte_level_tokenizer, write_hf_folder

INTERPRETER = "EDGESPEC_TRANSFORMERS_PYTHON"

REAL_MODEL = "smollm2-135m"  # as a folder made from its GGUF

# llama.cpp reads GELU from a table in float16, which moves these logits by 2e-3. ONNX Runtime computes GELU, so that
# its logits show whether the export is right; llama.cpp's difference is reported separately.
TABLED = ("gemma3",)


def llama_logits(path: Path, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """llama.cpp's logits after each of the tokens, float32 (positions, rows), with a float32 cache on one thread."""
    api: Any = load().api
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # GCC 12 compiles the code for AMX wrongly
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


def onnx_logits(source: Path, folder: Path, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """ONNX Runtime's logits after each of the tokens, float32 (positions, rows), of the GGUF exported as ONNX."""
    export_onnx(source, folder, Provenance(name=source.parent.name))
    rows = []
    with load_onnx(read_model_file(folder), OnnxSettings()) as model, model.open(len(tokens)) as sequence:
        for start in range(0, len(tokens), MAX_SCORED_ROWS):
            some = tokens[start : start + MAX_SCORED_ROWS].tolist()
            scored = sequence.forward(some, len(some))
            rows += [scored.logits(row) for row in range(len(some))]
    return np.stack(rows)


def largest_difference(interpreter: str, kind: str, folder: Path) -> dict[str, float]:
    """The largest difference of the logits of one kind, and the spread of the reference's logits."""
    source = folder / kind
    if kind == REAL_MODEL:
        write_hf_folder(Store(home()).fetch(lookup(REAL_MODEL)).path, source)
    else:
        source.mkdir()
    reference = ROOT / "scripts" / "transformers_reference.py"
    command = [interpreter, str(reference), REAL if kind == REAL_MODEL else kind, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    if kind != REAL_MODEL:
        write_byte_level_tokenizer(source)
    # Not the kind: of a model that is called phi3, llama.cpp expects the tokens of Phi-3.
    export_from_folder(source, folder / f"{kind}-gguf", Provenance(name="tiny"))
    theirs = np.load(source / "logits.npy", allow_pickle=False)
    made, tokens = folder / f"{kind}-gguf" / "model.gguf", np.load(source / "tokens.npy", allow_pickle=False)
    ours = onnx_logits(made, folder / f"{kind}-onnx", tokens) if kind in TABLED else llama_logits(made, tokens)
    if ours.shape != theirs.shape or len(ours) != POSITIONS:
        raise RuntimeError(f"logits of {kind}: {ours.shape} here, {theirs.shape} there")
    found = {"largest_difference": float(np.abs(ours - theirs).max()), "spread": float(theirs.std())}
    if kind in TABLED:
        found["llama_difference"] = float(np.abs(llama_logits(made, tokens) - theirs).max())
    return found


def compare(interpreter: str, kinds: Iterable[str]) -> dict[str, Any]:
    """``largest_difference`` of each kind, or its error."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec export ") as folder:
        for kind in kinds:
            try:
                found[kind] = largest_difference(interpreter, kind, Path(folder))
            except Exception as error:  # the other kinds still run
                found[kind] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{kind}: {json.dumps(found[kind])}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", default=os.environ.get(INTERPRETER), help="a Python with transformers")
    parser.add_argument("--only", action="append", choices=[*KINDS, REAL_MODEL], help="this kind (repeatable)")
    given = parser.parse_args()
    if not given.transformers:
        parser.error(f"give --transformers PYTHON, or set {INTERPRETER} to a Python with torch and transformers")
    print(json.dumps({"kinds": compare(given.transformers, given.only or (*KINDS, REAL_MODEL))}))


if __name__ == "__main__":
    main()
