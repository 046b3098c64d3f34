"""A tiny llama as Optimum would write it, built from plain operators, and a worker that delivers it.

The graph takes attention_mask and position_ids, extends its cache by Concat and holds constants of all the kinds that
PyTorch's tracer leaves behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.onnx.from_folder import export_folder_to_onnx
from edgespec.export.optimum import process as optimum_process
from edgespec.files.home import Home
from edgespec.files.safetensors import read_safetensors_folder
from tests.support.hf_folder import write_hf_folder
from tests.support.provenance import described
from tests.support.tiny_gguf import write_tiny_gguf

__all__ = ["LONGEST", "WORKER_TEXT", "DecoderGraph", "write_fake_worker", "write_folder", "write_whole_onnx"]

LONGEST = 32_768  # the contract opens a sequence of this many tokens

# Has the real worker's protocol, but copies a prepared graph instead of converting.
WORKER_TEXT = """
import json, shutil, sys
from pathlib import Path
def say(**values): print(json.dumps(values), flush=True)
command, *rest = sys.argv[1:]
prepared = Path({prepared!r})
if command == "probe":
    say(result={{"versions": {{"torch": "1"}}}})
elif command == "convert":
    say(stage="converting the model")
    (Path(rest[1]) / "model.onnx").write_bytes(b"x")
    say(result={{}})
else:
    for name in ("packed.onnx", "packed.data"):
        if (prepared / name).exists():
            shutil.copyfile(prepared / name, Path(rest[0]) / name)
    say(result={{"versions": {{"optimum-onnx": "0.1.0"}}}})
"""


def write_folder(folder: Path, *, context_length: int = LONGEST, tied: bool = False, **shape: Any) -> Path:
    """A Hugging Face folder of a tiny llama and a GGUF with the same weights."""
    source = folder.with_suffix(".gguf")
    write_tiny_gguf(source, quant="F32", context_length=context_length, **shape)
    write_hf_folder(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    return folder


def write_fake_worker(place: Path, prepared: Path) -> Path:
    place.write_text(WORKER_TEXT.format(prepared=str(prepared)))
    return place


def write_whole_onnx(source: Path, folder: Path, place: Path, *, head: str = "plain", **more: Any) -> Path:
    """Export the Hugging Face folder ``source`` through a worker that only delivers our own graph of it."""
    prepared = place / f"{folder.name}-prepared"
    prepared.mkdir()
    DecoderGraph(source, head=head).write(prepared)
    worker = write_fake_worker(place / f"{folder.name}-worker.py", prepared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimum_process, "WORKER", worker)
        provenance, options = described(more, name="tiny", home=Home(place / "home"), python=Path(sys.executable))
        export_folder_to_onnx(source, folder, provenance, **options)
    return folder


class DecoderGraph:
    """Builds the graph. ``head``: "plain", "scaled" (followed by a Mul), or "hidden", where no product is found."""

    def __init__(self, source: Path, *, head: str = "plain") -> None:
        self._config = json.loads((source / "config.json").read_text())
        self._weights = {name: each.float32() for name, each in read_safetensors_folder(source).items()}
        self._head = head
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._count = 0
        self.heads, self.kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        self.width, self.layers = self._config["hidden_size"], self._config["num_hidden_layers"]
        self.length = self._config.get("head_dim") or self.width // self.heads

    def write(self, folder: Path) -> None:
        """Write packed.onnx and packed.data in the worker's format."""
        onnx.save_model(
            self.model(),
            folder / "packed.onnx",
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location="packed.data",
            size_threshold=1024,
            convert_attribute=False,
        )

    def model(self) -> Any:
        hidden = self._add("Gather", [self._weight("model.embed_tokens.weight"), "input_ids"])
        cos, sin = self._angles()
        mask = self._mask()
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{block}.input_layernorm")
            hidden = self._add("Add", [hidden, self._attention(layer, normed, cos, sin, mask)])
            normed = self._norm(hidden, f"{block}.post_attention_layernorm")
            gate, up = (self._product(normed, f"{block}.mlp.{name}_proj") for name in ("gate", "up"))
            gated = self._add("Mul", [self._add("Mul", [gate, self._add("Sigmoid", [gate])]), up])
            hidden = self._add("Add", [hidden, self._product(gated, f"{block}.mlp.down_proj")])
        self._logits(self._norm(hidden, "model.norm"))
        rows = len(self._weights["model.embed_tokens.weight"])
        cache = ["batch", self.kv_heads, "past", self.length]
        longer = ["batch", self.kv_heads, "past + tokens", self.length]
        parts = [f"{layer}.{part}" for layer in range(self.layers) for part in ("key", "value")]
        value, integers, floats = helper.make_tensor_value_info, TensorProto.INT64, TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes,
            "main_graph",
            [
                value("input_ids", integers, ["batch", "tokens"]),
                value("attention_mask", integers, ["batch", "past + tokens"]),
                value("position_ids", integers, ["batch", "tokens"]),
                *(value(f"past_key_values.{part}", floats, cache) for part in parts),
            ],
            [
                value("logits", floats, ["batch", "tokens", rows]),
                *(value(f"present.{part}", floats, longer) for part in parts),
            ],
            initializer=self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    # ------------------------------------------------------------------------------------------ parts

    def _attention(self, layer: int, normed: str, cos: str, sin: str, mask: str) -> str:
        block, group = f"model.layers.{layer}.self_attn", self.heads // self.kv_heads

        def heads(name: str, count: int) -> str:
            product = self._product(normed, f"{block}.{name}_proj")
            split = self._add("Reshape", [product, self._constant([0, 0, count, self.length])])
            return self._add("Transpose", [split], perm=[0, 2, 1, 3])

        query = self._rotated(heads("q", self.heads), cos, sin)
        key = [f"past_key_values.{layer}.key", self._rotated(heads("k", self.kv_heads), cos, sin)]
        value = [f"past_key_values.{layer}.value", heads("v", self.kv_heads)]
        key_rows = self._add("Concat", key, f"present.{layer}.key", axis=2)
        value_rows = self._add("Concat", value, f"present.{layer}.value", axis=2)
        grouped = self._add("Reshape", [query, self._constant([1, self.kv_heads, group, -1, self.length])])
        two = self._constant([2])
        across = self._add("Transpose", [self._add("Unsqueeze", [key_rows, two])], perm=[0, 1, 2, 4, 3])
        scores = self._add("MatMul", [grouped, across])
        # PyTorch writes such a scale as a double.
        scale = self._add("Cast", [self._constant(np.array(0.5, np.float64))], to=TensorProto.FLOAT)
        scale = self._add("Mul", [scale, self._constant(np.array(2 / np.sqrt(self.length), np.float32))])
        scores = self._add("Where", [mask, self._add("Mul", [scores, scale]), self._lowest()])
        weights = self._add("Softmax", [scores], axis=-1)
        mixed = self._add("MatMul", [weights, self._add("Unsqueeze", [value_rows, two])])
        mixed = self._add("Reshape", [mixed, self._constant([1, self.heads, -1, self.length])])
        mixed = self._add("Transpose", [mixed], perm=[0, 2, 1, 3])
        mixed = self._add("Reshape", [mixed, self._constant([0, 0, self.heads * self.length])])
        return self._product(mixed, f"{block}.o_proj")

    def _lowest(self) -> str:
        # A scalar: its list of dimensions is empty.
        value = numpy_helper.from_array(np.array([-1e30], np.float32))
        return self._add("ConstantOfShape", [self._constant(np.zeros(0, np.int64))], value=value)

    def _angles(self) -> tuple[str, str]:
        base = self._config["rope_theta"]
        inverse = base ** -(np.arange(0, self.length, 2, dtype=np.float64) / self.length)
        places = self._add("Cast", ["position_ids"], to=TensorProto.FLOAT)
        places = self._add("Unsqueeze", [places, self._constant([2])])
        angles = self._add("Mul", [places, self._constant(inverse.astype(np.float32)[None, None])])
        both = self._add("Concat", [angles, angles], axis=-1)
        one = self._constant([1])
        cos, sin = (self._add("Unsqueeze", [self._add(name, [both]), one]) for name in ("Cos", "Sin"))
        return cos, sin

    def _rotated(self, heads: str, cos: str, sin: str) -> str:
        half, end, axis = self._constant([self.length // 2]), self._constant([self.length]), self._constant([3])
        first = self._add("Slice", [heads, self._constant([0]), half, axis])
        second = self._add("Slice", [heads, half, end, axis])
        turned = self._add("Concat", [self._add("Neg", [second]), first], axis=-1)
        return self._add("Add", [self._add("Mul", [heads, cos]), self._add("Mul", [turned, sin])])

    def _mask(self) -> str:
        """The attention mask: (1, 1, 1, tokens, all)."""
        total = self._add("Gather", [self._add("Shape", ["attention_mask"]), self._constant(1)])
        zero, one = self._constant(0), self._constant(1)
        keys = self._add("Range", [zero, total, one])
        queries = self._add("Unsqueeze", ["position_ids", self._constant([1, 2, 4])])
        seen = self._add("LessOrEqual", [keys, queries])
        given = self._add("Cast", ["attention_mask"], to=TensorProto.BOOL)
        given = self._add("Unsqueeze", [given, self._constant([1, 2, 3])])
        true = numpy_helper.from_array(np.array([True]))
        always = self._add("ConstantOfShape", [self._add("Shape", [keys])], value=true)
        seen = self._add("And", [self._add("And", [seen, always]), self._constant(np.array(True))])
        return self._add("And", [seen, given])

    def _norm(self, hidden: str, name: str) -> str:
        squares = self._add("Pow", [hidden, self._constant(np.array(2, np.float32))])
        mean = self._add("ReduceMean", [squares, self._constant([-1])], keepdims=1)
        epsilon = self._constant(np.array(self._config["rms_norm_eps"], np.float32))
        root = self._add("Sqrt", [self._add("Add", [mean, epsilon])])
        return self._add("Mul", [self._weight(f"{name}.weight"), self._add("Div", [hidden, root])])

    def _logits(self, hidden: str) -> None:
        tied = "lm_head.weight" not in self._weights
        name = "model.embed_tokens" if tied else "lm_head"
        if self._head == "hidden":
            # Not a product with a constant: all rows are computed.
            table = self._add("Transpose", [self._weight(f"{name}.weight")], perm=[1, 0])
            self._add("MatMul", [hidden, table], "logits")
        elif self._head == "scaled":
            product = self._product(hidden, name, of="/lm_head/MatMul")
            doubled = self._add("Mul", [product, self._constant(np.array(2, np.float32))])
            self._add("Div", [doubled, self._constant(np.array(2, np.float32))], "logits")
        else:
            self._product(hidden, name, "logits", of="/lm_head/MatMul")

    # ------------------------------------------------------------------------------------------ pieces

    def _product(self, hidden: str, name: str, output: str = "", of: str = "") -> str:
        across = np.ascontiguousarray(self._weights[f"{name}.weight"].T)
        stored = f"onnx::MatMul_{name}"
        self.initializers.append(numpy_helper.from_array(across, stored))
        output = self._add("MatMul", [hidden, stored], output)
        self.nodes[-1].name = of or f"/{name.replace('.', '/')}/MatMul"
        return output

    def _weight(self, name: str) -> str:
        if name not in {each.name for each in self.initializers}:
            self.initializers.append(numpy_helper.from_array(self._weights[name], name))
        return name

    def _constant(self, value: Sequence[int] | int | npt.NDArray[Any]) -> str:
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        return self._add("Constant", [], value=numpy_helper.from_array(array))

    def _add(self, operator: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        self._count += 1
        output = output or f"/{operator}_{self._count}_output_0"
        self.nodes.append(
            helper.make_node(operator, inputs, [output], name=f"/{operator}_{self._count}", **attributes)
        )
        return output
