"""A graph of fixed shapes through OpenVINO, as a provider of ONNX Runtime.

OpenVINO comes as a plugin (`pip install onnxruntime-ep-openvino`), for Intel's hardware only, or built into another
onnxruntime (`onnxruntime-openvino`). A registered plugin stays as long as the process, so these tests run in a
separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from edgespec.export.provenance import Provenance
from tests.support.tiny_onnx import ARCHITECTURES, VOCABULARY_SIZE, write_tiny_model

REPOSITORY = Path(edgespec.__file__).parent.parent
TOKENS = np.random.default_rng(9).integers(3, VOCABULARY_SIZE, 90).tolist()

FIND = """
import json
from edgespec.runtimes.onnx import providers as onnx_providers
named = [each.name for each in onnx_providers.list_devices() if each.name.startswith("OpenVINO")]
print(json.dumps({"devices": named, "broken": dict(onnx_providers.broken_plugins())}))
"""

RUN = """
import json, sys
import numpy as np
from pathlib import Path
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.onnx.model import OnnxSettings, load_onnx

asked = json.loads(sys.argv[1])
settings = OnnxSettings(provider=asked["device"], options=asked["options"])
with load_onnx(read_model_file(Path(asked["folder"])), settings) as model, model.open(128) as sequence:
    tokens, found = asked["tokens"], []
    sequence.forward(tokens[:70], 0)
    for token in tokens[70:]:
        sequence.forward([5, 6], 1)  # a draft that is taken back
        sequence.rewind(sequence.length - 2)
        found.append(sequence.forward([token], 1).logits(0).tolist())
    print(json.dumps({"device": model.facts.device, "logits": found}))
"""

# Each build has another option: without it, processors with bfloat16 compute in bfloat16.
IN_FLOAT32 = {
    "OpenVINO": {"precision": "FP32"},
    "OpenVINO-CPU": {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},
}


def python(code: str, *arguments: str) -> str:
    header = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", header + code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def device() -> str:
    """The processor's name as a device of OpenVINO."""
    found = json.loads(python(FIND))
    for name in ("OpenVINO-CPU", "OpenVINO"):
        if name in found["devices"]:
            return name
    reasons = [f"{module}: {reason}" for module, reason in found["broken"].items() if "openvino" in module]
    pytest.skip(f"no processor here is a device of OpenVINO ({'; '.join(reasons) or 'it is not installed'})")


def scores(folder: Path, device: str, options: dict[str, str]) -> np.ndarray:
    asked = {"folder": str(folder), "device": device, "options": options, "tokens": TOKENS}
    answer = json.loads(python(RUN, json.dumps(asked)))
    assert answer["device"] == device
    return np.array(answer["logits"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_weights_through_openvino_give_the_same_logits(architecture: str, device: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", architecture, context_length=LEAST_STATIC_CACHE)
    export_onnx(source, tmp_path / "out", Provenance(name="tiny"), static_cache=LEAST_STATIC_CACHE)
    wanted, found = (scores(tmp_path / "out", name, IN_FLOAT32.get(name, {})) for name in ("cpu", device))
    assert wanted.std() > 0.5
    np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_quantised_blocks_with_openvinos_defaults_give_nearly_the_same_logits(
    quant: str, device: str, tmp_path: Path
) -> None:
    """Both round activations, to 8 bits in blocks or to bfloat16: a tenth of the spread at most, on average."""
    source = write_tiny_model(tmp_path / "a.gguf", "qwen2", quant=quant, context_length=LEAST_STATIC_CACHE)
    export_onnx(source, tmp_path / "out", Provenance(name="tiny"), static_cache=LEAST_STATIC_CACHE)
    wanted, found = (scores(tmp_path / "out", name, {}) for name in ("cpu", device))
    assert np.abs(found - wanted).mean() < 0.1 * wanted.std()
