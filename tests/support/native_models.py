"""Tiny models, by name, of every architecture that the native runtime supports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.trimmed_drafter import TrimmedDrafter
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.model import NativeModel
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.native.tensors import ModelLayout
from tests.support.tiny_gguf import write_tiny_gguf

__all__ = ["ASSISTANT", "KINDS", "SHARING", "VARIANTS", "Files", "reading", "restored", "some_tokens"]

# Seven layers: the sixth attends to all positions, the others to a window.
_WINDOWED: dict[str, Any] = {"architecture": "gemma3", "window": 30, "kv_heads": 1, "layers": 7}

# The third of three layers sees all positions, with longer heads; its keys are its values.
_GEMMA_4: dict[str, Any] = {"architecture": "gemma4", "window": 40, "layers": 3, "head_length": 64, "experts": (0, 0)}
# The last three of its layers share caches, of whose heads one is long; each layer has inputs.
SHARING: dict[str, Any] = {
    **_GEMMA_4,
    "layers": 6,
    "settings": {
        "attention.shared_kv_layers": 3,
        "attention.head_count_kv": [2, 2, 1] * 2,
        "embedding_length_per_layer_input": 32,
    },
}
# Its assistant: layers with a window, one without, and one more with a window.
ASSISTANT: dict[str, Any] = {
    **_GEMMA_4,
    "architecture": "gemma4-assistant",
    "width": 64,
    "layers": 4,
    "settings": {
        "attention.shared_kv_layers": 4,
        "nextn_predict_layers": 4,
        "attention.head_count_kv": [2, 2, 1, 2],
        "embedding_length_out": 128,
    },
}

# Kinds of model: architecture, weights, a tied head.
KINDS: dict[str, dict[str, Any]] = {
    "llama F32": {"quant": "F32"},
    "llama Q8_0": {"quant": "Q8_0"},
    "llama Q4_0": {"quant": "Q4_0"},
    "qwen2 Q4_0": {"quant": "Q4_0", "architecture": "qwen2", "tied": True},
    "qwen2 Q8_0": {"quant": "Q8_0", "architecture": "qwen2", "heads": 8, "kv_heads": 2},
    "llama F16": {"quant": "F16", "rope_factors": True},
    "qwen3 F32": {"quant": "F32", "architecture": "qwen3", "head_length": 64},
    "qwen3 Q8_0": {"quant": "Q8_0", "architecture": "qwen3", "head_length": 48},
    "gemma3 F32": {"quant": "F32", **_WINDOWED},
    "gemma3 F16": {"quant": "F16", **_WINDOWED, "window": 300, "head_length": 256},
    "gemma3 Q8_0": {"quant": "Q8_0", **_WINDOWED, "window": 100},
    "phi3 F32": {"quant": "F32", "architecture": "phi3", "heads": 4, "kv_heads": 4},
    "phi3 Q8_0": {"quant": "Q8_0", "architecture": "phi3"},
    "olmo2 Q8_0": {"quant": "Q8_0", "architecture": "olmo2", "layers": 5, "window": 40},
    "qwen3moe F32": {"quant": "F32", "architecture": "qwen3moe", "experts": (20, 4)},
    "qwen3moe Q4_0": {"quant": "Q4_0", "architecture": "qwen3moe", "head_length": 64},
    "gemma2 Q8_0": {"quant": "Q8_0", "architecture": "gemma2", "layers": 3, "window": 60},
    "gpt-oss F32": {"quant": "F32", "architecture": "gpt-oss", "layers": 3, "window": 40, "experts": (9, 4)},
    "gpt-oss MXFP4": {"quant": "MXFP4", "architecture": "gpt-oss", "window": 60, "head_length": 64},
    "gemma4 F32": {"quant": "F32", **_GEMMA_4},
    "gemma4 of shared caches Q8_0": {"quant": "Q8_0", **SHARING},
    "gemma4 of experts Q4_0": {"quant": "Q4_0", **_GEMMA_4, "experts": (12, 3)},
}

# llama.cpp divides the scores by logit_scale.
_SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.05, "logit_scale": 1.25}
_LONG_ROPE = {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.19}

_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}

# llama.cpp reads the ramp's bounds of a few architectures alone.
_USUAL_YARN = {name: value for name, value in _YARN.items() if "beta" not in name}

# More models, compared with llama.cpp only.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama scaled": {"settings": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "llama scaled without a type": {"settings": {"rope.scaling.factor": 4.0}},
    "llama with an unused scale": {"settings": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}},
    "llama with an attention factor": {"settings": {"rope.scaling.attn_factor": 1.2}},
    "llama of an old name": {"settings": {"rope.scale_linear": 4.0}},
    # The scaling applies to layers without a window, the second base to layers with one.
    "gemma3 scaled": {
        **_WINDOWED,
        "settings": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 3000.0},
    },
    "gemma3 of another pattern": {
        **_WINDOWED,
        "settings": {"attention.sliding_window_pattern": 3},
    },
    "gemma3 without a window": {"architecture": "gemma3", "layers": 7},
    "granite F32": {"architecture": "granite", "settings": _SCALES},
    "granite Q8_0": {"quant": "Q8_0", "architecture": "granite", "settings": _SCALES},
    "granite that states no scales": {"architecture": "granite", "settings": {"logit_scale": 1.0}},
    "granite that states scales of 0": {
        "architecture": "granite",
        "settings": dict.fromkeys(_SCALES, 0.0) | {"logit_scale": 2.0},
    },
    "smollm3": {"architecture": "smollm3", "layers": 5},
    "mistral3": {"architecture": "mistral3"},
    "mistral3 of long contexts": {
        "architecture": "mistral3",
        "settings": {**_YARN, "rope.scaling.yarn_log_multiplier": 0.7, "attention.temperature_scale": 0.5},
    },
    "mistral3 with YaRN alone": {"architecture": "mistral3", "settings": _YARN},
    "llama with YaRN": {"settings": _USUAL_YARN},
    "gemma2 F32": {"architecture": "gemma2", "layers": 4, "window": 40},
    "gemma2 of stated caps": {
        "architecture": "gemma2",
        "settings": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    },
    "olmo2 F32": {"architecture": "olmo2"},
    "olmo2 with windows and YaRN": {
        "architecture": "olmo2",
        "layers": 5,
        "window": 40,
        "settings": _USUAL_YARN,
    },
    "qwen3moe Q8_0": {"quant": "Q8_0", "architecture": "qwen3moe", "experts": (16, 3)},
    "qwen3moe Q4_K": {"quant": "Q4_K", "architecture": "qwen3moe", "width": 256, "experts": (5, 5)},
    "gpt-oss F16": {"quant": "F16", "architecture": "gpt-oss", "window": 30, "settings": _USUAL_YARN},
    "gpt-oss Q8_0": {
        "quant": "Q8_0",
        "architecture": "gpt-oss",
        "window": 30,
        "kv_heads": 1,
        "settings": _USUAL_YARN,
    },
    "gpt-oss of another base and pattern": {
        "architecture": "gpt-oss",
        "window": 20,
        "layers": 4,
        "seed": 3,  # of seed 0 one row's experts are a near-tie
        "settings": {**_USUAL_YARN, "rope.freq_base_swa": 3000.0, "attention.sliding_window_pattern": 3},
    },
    "qwen3moe of one expert": {"architecture": "qwen3moe", "experts": (1, 1)},
    "qwen35 F32": {"architecture": "qwen35", "layers": 4, "interval": 4},
    "qwen35 Q8_0": {"quant": "Q8_0", "architecture": "qwen35", "deltas": (6, 3, 128, 4)},
    "qwen35moe F32": {"architecture": "qwen35moe", "experts": (12, 3), "shared": 96},
    "qwen35moe Q8_0": {"quant": "Q8_0", "architecture": "qwen35moe", "experts": (12, 3), "shared": 64},
    "glm4": {"architecture": "glm4", "rope_length": 16},
    "exaone4": {"architecture": "exaone4"},
    "seed_oss": {"architecture": "seed_oss"},
    "ernie4_5": {"architecture": "ernie4_5"},
    "phi3 that rotates a part": {"architecture": "phi3", "rope_length": 24},
    "gemma4 F32 of shared caches": {
        **_GEMMA_4,
        "layers": 8,
        "settings": {
            "attention.shared_kv_layers": 5,
            "embedding_length_per_layer_input": 64,
            "feed_forward_length": [256, 256, 256, 512, 512, 512, 512, 96],
            "attention.head_count_kv": [2, 2, 1, 2, 2, 1, 2, 2],
            "final_logit_softcapping": 5.0,
        },
    },
    "gemma4 F32 of experts": {
        **_GEMMA_4,
        "experts": (12, 3),
        "without": ("gate_up",),
        "settings": {"final_logit_softcapping": 0.0},
    },
    "gemma4 without scales": {
        **_GEMMA_4,
        "seed": 5,
        "experts": (4, 2),
        "without": ("layer_output_scale", "ffn_down_exps"),
        "settings": {"final_logit_softcapping": 5.0},
    },
    "phi3 of long contexts": {
        "architecture": "phi3",
        "rope_length": 24,
        "long_factors": True,
        "settings": {**_LONG_ROPE, "rope.scaling.type": "longrope"},
    },
    "phi3 of long contexts as its converter writes it": {
        "architecture": "phi3",
        "long_factors": True,
        "settings": _LONG_ROPE,
    },
}


@dataclass(frozen=True)
class Files:
    """Tiny models, written on first use."""

    folder: Path

    def __call__(self, kind: str) -> Path:
        path = self.folder / f"{kind}.gguf"
        if not path.exists():
            write_tiny_gguf(path, **{"width": 128, **(KINDS | VARIANTS)[kind]})
        return path


@contextmanager
def reading(change: Callable[[ModelLayout], ModelLayout] | ModelLayout) -> Iterator[None]:
    """Models loaded within the block get another layout: their own, changed, or this one."""

    def changed(header: GgufHeader, artefact: TrimmedDrafter | None = None) -> ModelLayout:
        return change if isinstance(change, ModelLayout) else change(read_layout(header, artefact))

    with patch("edgespec.runtimes.native.model.read_layout", changed):
        yield


def some_tokens(path: Path, count: int) -> list[int]:
    return random.Random(11).choices(range(read_header(path).vocabulary_size), k=count)


def restored(model: NativeModel, sequence: NativeSequence, length: int, context: int) -> NativeSequence:
    """Another sequence with the cache of the first ``length`` tokens, by its parts. Closes ``sequence``."""
    count, size = sequence.part_sizes(length)
    parts = [sequence.read_part(part, length) for part in range(count)]
    assert {len(part) for part in parts} == {size}
    other = model.open(context)
    other.restore(parts, length)
    assert [other.read_part(part, length) for part in range(count)] == parts
    sequence.close()
    return other
