"""Converts a Hugging Face folder to an ONNX graph and packs the weights; runs under a Python with Optimum.

    python -I worker.py probe
    python -I worker.py convert SOURCE WORK untied|"as stated"
    python -I worker.py pack WORK keep|q4

The worker imports nothing of edgespec, which is not installed there. The worker prints a JSON object per line to
stdout: {"stage": ...}, and last {"result": ...} or {"error": {"kind": ..., "message": ...}}. All output of the tools
goes to stderr. No code of the folder is run, nothing is downloaded, and weights are read from safetensors only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

NEEDED = ("optimum-onnx", "transformers", "torch", "onnx", "onnxruntime")
_IMPORTS = ("optimum.exporters.onnx", "transformers", "torch", "onnx", "onnxruntime")

TASK = "text-generation-with-past"
RAW, PACKED, PACKED_DATA = "model.onnx", "packed.onnx", "packed.data"

# Widths of the forwards that check the converted graph against the original model: a prompt, a token, and a draft.
CHECKED_CHUNKS = (9, 1, 4)

# Another order of float32 operations changes logits (some tens) by 1e-4; a wrong graph changes logits by tens.
WITHIN = 1e-2

# onnxruntime's options: blocks of 32 as in Q4_0, and products of 8-bit integers (accuracy level 4).
BITS, BLOCK, ACCURACY_LEVEL = 4, 32, 4


class Refused(Exception):  # noqa: N818 - an answer, not an error of this program
    """Why a conversion is refused: ``kind`` for programs, the message for users."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def probe() -> dict[str, Any]:
    """The versions of the needed packages."""
    missing = []
    for distribution, module in zip(NEEDED, _IMPORTS, strict=True):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package may raise any exception when imported
            missing.append(f"{distribution} ({type(error).__name__}: {error})"[:300])
    if missing:
        raise Refused("missing", ", ".join(missing))
    return {"versions": versions()}


def versions() -> dict[str, str]:
    found = {}
    for name in NEEDED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def convert(source: Path, work: Path, say: Any, *, untied: bool) -> dict[str, Any]:
    """Trace the model in ``source`` and write ``work``/model.onnx. ``untied``: its head is not its embedding."""
    say(stage="reading the model")  # first: the imports take many seconds
    import torch
    from optimum.exporters.onnx import onnx_export_from_model
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig, AutoModelForCausalLM, __version__ as release
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    if config.model_type not in TasksManager.get_supported_model_type_for_task(TASK, exporter="onnx"):
        raise Refused("unknown", f"Optimum cannot convert models of the type {config.model_type!a}")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stated = (raw.get("text_config") or raw).get("rope_parameters")
    if stated and int(release.partition(".")[0]) < 5:
        _set_rotary(config.get_text_config(), stated, ROPE_INIT_FUNCTIONS)
    if untied:  # whatever config.json says: transformers 4 would drop the head, transformers 5 keeps it
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with _without_compiler(torch):
        model, told = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # transformers fills missing weights with random numbers and only warns.
    absent = sorted(told["missing_keys"]) + sorted(str(each[0]) for each in told["mismatched_keys"])
    if absent:
        raise Refused(
            "weights", f"its weights do not fit its config.json: {len(absent)} are missing, for example {absent[0]}"
        )
    model.eval()
    model.config.use_cache = True
    say(stage="converting the model")
    with torch.no_grad():
        # Lengths whose traced graph is valid for every length; the defaults are 16 tokens after 16.
        onnx_export_from_model(model, output=work, task=TASK, no_post_process=True, do_validation=False)
        if not (work / RAW).is_file():
            raise Refused("unknown", f"Optimum did not write a single graph for a {config.model_type!a} model")
        say(stage="checking the graph")
        rows = getattr(config.get_text_config(), "vocab_size", 2)
        tokens = [(7919 * index + 13) % rows for index in range(sum(CHECKED_CHUNKS))]
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    del model
    gc.collect()
    return {"difference": _check(work / RAW, tokens, expected), "model_type": config.model_type}


def _set_rotary(config: Any, stated: dict[str, Any], known: Container[str]) -> None:
    """Set the rotary positions that transformers 5 ``stated``, in a member that transformers 4 does not read.

    ``known`` are the kinds of scaling that can be computed. Raises Refused.
    """
    layers = {name: each for name, each in stated.items() if isinstance(each, dict)}
    whole, local = layers.pop("full_attention", stated), layers.pop("sliding_attention", {})
    kind, share = whole.get("rope_type") or "default", whole.get("partial_rotary_factor")
    values = {
        "rope_theta": whole.get("rope_theta"),
        "rope_scaling": None if kind == "default" else whole,
        "partial_rotary_factor": share,
        "rope_local_base_freq": local.get("rope_theta"),
    }
    lacking = [name for name, value in values.items() if value is not None and not hasattr(config, name)]
    if share == 1.0 and "partial_rotary_factor" in lacking:
        lacking.remove("partial_rotary_factor")  # such a class rotates whole heads
    if kind not in known or local.get("rope_type", "default") != "default":
        lacking.append("rope_type")
    for name in (*lacking, *layers):
        raise Refused("unknown", f"Optimum's transformers cannot compute its rope_parameters ({name[:40]!a})")
    for name, value in values.items():
        if hasattr(config, name) and (value is not None or name == "rope_scaling"):
            setattr(config, name, value)
    if hasattr(config, "rotary_pct") and share is not None:  # GPT-NeoX
        config.rotary_pct = share
    if kind == "longrope" and whole.get("original_max_position_embeddings"):
        config.original_max_position_embeddings = whole["original_max_position_embeddings"]


@contextlib.contextmanager
def _without_compiler(torch: Any) -> Any:
    """Disable torch.compile, as Optimum does to load models: a compiled part cannot be traced."""
    kept = torch.compile
    torch.compile = lambda *_arguments, **_keywords: lambda function: function
    try:
        yield
    finally:
        torch.compile = kept


def _check(path: Path, tokens: list[int], expected: Any) -> float:
    """Run the graph in several forwards; returns the largest difference to the expected logits."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {each.name: each for each in session.get_inputs()}
    cache = {
        name: np.zeros([1, each.shape[1], 0, each.shape[3]], np.float32)
        for name, each in names.items()
        if name.startswith("past_key_values.") and len(each.shape) == 4
    }
    outputs = [each.name for each in session.get_outputs()]
    done, differences = 0, []
    for size in CHECKED_CHUNKS:
        feeds: dict[str, Any] = {
            "input_ids": np.array([tokens[done : done + size]], np.int64),
            "attention_mask": np.ones((1, done + size), np.int64),
            "position_ids": np.arange(done, done + size, dtype=np.int64)[None],
        }
        given = {name: value for name, value in {**feeds, **cache}.items() if name in names}
        found = dict(zip(outputs, session.run(outputs, given), strict=True))
        differences.append(np.abs(found["logits"][0] - expected[done : done + size]).max())
        cache = {name: found[name.replace("past_key_values", "present")] for name in cache}
        done += size
    worst = float(np.max(differences))
    if not worst < WITHIN * max(1.0, float(np.abs(expected).max())):
        raise Refused("check", f"the graph that Optimum made gives wrong logits (they differ by {worst:.3g})")
    return worst


def pack(work: Path, quant: str, say: Any) -> dict[str, Any]:
    """Write ``work``/packed.onnx with all weights in packed.data, and remove model.onnx."""
    import onnx

    say(stage="quantising the model" if quant == "q4" else "packing the weights")
    model = onnx.load(work / RAW)
    for file in work.iterdir():  # the weights are in memory now; frees their disk space
        if file.name == RAW or file.name.startswith((f"{RAW}_", f"{RAW}.")):
            file.unlink()
    if quant == "q4":
        model = _quantised(model)
    _halve_tables(model, rounding=quant == "q4")
    onnx.save_model(
        model,
        work / PACKED,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=PACKED_DATA,
        size_threshold=1024,
        convert_attribute=False,
    )
    return {"versions": versions()}


def _quantised(model: Any) -> Any:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        _without_gemm(model),
        bits=BITS,
        block_size=BLOCK,
        is_symmetric=True,
        accuracy_level=ACCURACY_LEVEL,
        # Not Gather: the embedding is a lookup of one row per token, not a product.
        op_types_to_quantize=("MatMul",),
    )
    quantizer.process()
    return quantizer.model.model


def _halve_tables(model: Any, *, rounding: bool) -> None:
    """Store lookup tables with 16 bits if that is lossless, or if ``rounding`` is allowed.

    Weights are published as bfloat16 or float16 and widened only for the conversion.
    """
    import ml_dtypes
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    tensors = {each.name: each for each in model.graph.initializer}
    uses: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in tensors:
                uses.setdefault(name, []).append(node if (node.op_type, index) == ("Gather", 0) else None)
    for name, nodes in uses.items():
        tensor = tensors[name]
        if None in nodes or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        table = numpy_helper.to_array(tensor)
        kinds = [kind for kind in (np.float16, ml_dtypes.bfloat16) if np.array_equal(_narrowed(table, kind), table)]
        if rounding and np.abs(table).max() <= np.finfo(np.float16).max:
            kinds.append(np.float16)
        if not kinds:
            continue
        tensor.CopyFrom(numpy_helper.from_array(table.astype(kinds[0]), name))
        for node in nodes:
            at = list(model.graph.node).index(node)
            found = node.output[0]
            node.output[0] = f"{found}.narrow"
            cast = helper.make_node("Cast", [node.output[0]], [found], to=TensorProto.FLOAT)
            model.graph.node.insert(at + 1, cast)


def _narrowed(table: Any, kind: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):  # a too large number becomes infinite and then differs from the original
        return table.astype(kind).astype(table.dtype)


def _without_gemm(model: Any) -> Any:
    """Replace Gemm with a constant, which some architectures use, by MatMul, which the quantizer supports."""
    from onnx import helper, numpy_helper

    tensors = {each.name: each for each in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        plain = values.get("alpha", 1.0) == values.get("beta", 1.0) == 1.0 and not values.get("transA", 0)
        if node.op_type != "Gemm" or not plain or node.input[1] not in tensors:
            nodes.append(node)
            continue
        weights = node.input[1]
        if values.get("transB", 0):
            weights = f"{weights}.{len(nodes)}"
            across = numpy_helper.to_array(tensors[node.input[1]]).T.copy()
            model.graph.initializer.append(numpy_helper.from_array(across, weights))
        biased = len(node.input) > 2
        product = f"{node.output[0]}.product" if biased else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], weights], [product], name=node.name))
        if biased:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def main(arguments: list[str]) -> int:
    # Tools may print to stdout; answers to the caller go through a handle that only this function has.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        channel.write(json.dumps(values) + "\n")
        channel.flush()

    try:
        command, *rest = arguments
        if command == "probe":
            say(stage="looking for Optimum in")
            result = probe()
        elif command == "convert":
            result = convert(Path(rest[0]), Path(rest[1]), say, untied=rest[2] == "untied")
        else:
            result = pack(Path(rest[0]), rest[1], say)
    except Refused as error:
        say(error={"kind": error.kind, "message": str(error)})
        return 1
    except MemoryError:
        say(error={"kind": "memory", "message": "there is not enough memory for this model in float32"})
        return 1
    except Exception as error:  # the tools may raise any exception; the caller shows the last line
        import traceback

        traceback.print_exc()
        say(error={"kind": "failed", "message": f"{type(error).__name__}: {error}"[:1000]})
        return 1
    say(result=result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
