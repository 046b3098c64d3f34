"""qwen35 (Qwen 3.5 and 3.6): three of four layers are gated delta layers, and attention gates its heads' outputs."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.architectures.deltas import LENGTHS, MOST_KERNEL, MOST_LENGTH, Deltas
from edgespec.architectures.drafting import PAIR
from edgespec.architectures.shape import (
    DOWN,
    GATED,
    Architecture,
    Facts,
    OllamaNames,
    Rope,
    SavedForm,
    TensorForm,
    UnsupportedError,
    decoder_layer,
    matrix,
    one_rope,
    vector,
)

_INTERVAL = 4  # llama.cpp's, for a file that does not state which layers have attention
_SECTIONS = "rope.dimension_sections"

QKV = (matrix("attn_q", "asked", "width"), matrix("attn_k", "keys", "width"), matrix("attn_v", "keys", "width"))
NORM = "post_attention_norm"  # of the feed-forward's input

DELTA = (
    vector("attn_norm", "width"),
    matrix("attn_qkv", "mixed", "width"),
    matrix("ssm_alpha", "delta_heads", "width"),
    TensorForm("ssm_dt", {"ssm_dt": "delta_heads"}, ends=".bias"),
    matrix("ssm_beta", "delta_heads", "width"),
    matrix("attn_gate", "scanned", "width"),
    matrix("ssm_conv1d", "mixed", "delta_kernel"),
    TensorForm("ssm_a", {"ssm_a": "delta_heads"}, ends=""),
    vector("ssm_norm", "delta_length"),
    TensorForm("ssm_out", {"attn_output": "width"}, "scanned"),
    TensorForm(NORM, {"ffn_norm": "width"}),
)
"""The tensors of a gated delta layer before its feed-forward, in the order of computation."""


def ropes(facts: Facts) -> tuple[Rope, ...]:
    """Pairs belong to sections, which have one position for text. Raises UnsupportedError, ModelFileError."""
    pairs, sections = facts.integer("rope.dimension_count") // 2, facts.value(_SECTIONS)
    if not isinstance(sections, tuple) or not all(isinstance(each, int) for each in sections) or len(sections) < 3:
        raise facts.wrong(f"its {_SECTIONS} is {sections!r:.40}: the pairs of three positions are needed")
    if sum(sections) != pairs or any(pair >= 3 * sections[pair % 3] for pair in range(pairs)):
        raise UnsupportedError(f"its {_SECTIONS} is {sections!r:.40}, for {pairs} pairs")
    return one_rope(facts)


def deltas(facts: Facts, layers: int) -> Deltas:
    """The gated delta layers. Raises UnsupportedError, ModelFileError."""
    heads, key_heads = facts.integer("ssm.time_step_rank", least=1), facts.integer("ssm.group_count", least=1)
    length, kernel = facts.integer("ssm.state_size", least=1), facts.integer("ssm.conv_kernel", least=1)
    if heads % key_heads:
        raise facts.wrong(f"{heads} heads of its delta layers cannot share {key_heads} key heads")
    if (inner := facts.integer("ssm.inner_size")) != heads * length:
        raise facts.wrong(f"its ssm.inner_size is {inner}, not {heads} heads of {length}")
    if facts.value("ssm.v_head_reordered") is False and heads != key_heads:  # Ollama's key
        raise UnsupportedError("the value heads of its delta layers are in another order than llama.cpp's")
    if length > MOST_LENGTH or length % LENGTHS or kernel > MOST_KERNEL or heads * length % 32:
        raise UnsupportedError(
            f"its delta layers have {heads} heads of {length} and convolve {kernel} rows, and the kernels take "
            f"multiples of {LENGTHS} up to {MOST_LENGTH} and at most {MOST_KERNEL} rows"
        )
    interval = facts.integer("full_attention_interval", _INTERVAL, least=1)
    stated = facts.value("attention.recurrent_layers")
    if stated is None:
        stated = tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(stated, tuple) or len(stated) < layers:
        raise facts.wrong(f"its attention.recurrent_layers is {stated!r:.40}, and it has {layers} layers")
    return Deltas(
        heads=heads, key_heads=key_heads, length=length, kernel=kernel, layers=tuple(map(bool, stated[:layers]))
    )


def as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Keys that Ollama's converter wrote for each layer, or by another name."""
    kind = facts.get("general.architecture")
    heads, sections = facts.get(f"{kind}.attention.head_count_kv"), facts.get(f"{kind}.mrope_sections")
    found: dict[str, object] = {}
    if isinstance(heads, tuple) and 0 in heads:  # of a gated delta layer
        found[f"{kind}.attention.head_count_kv"] = max(heads)
        found[f"{kind}.attention.recurrent_layers"] = tuple(count == 0 for count in heads)
    if sections is not None and f"{kind}.{_SECTIONS}" not in facts:
        found[f"{kind}.{_SECTIONS}"] = sections
    return found or None


OLLAMA = OllamaNames(tensors={"ssm_dt": "ssm_dt.bias"}, aside=("mtp.",))
"""Layers that draft are left out: their norms lack the 1 that is added in llama.cpp's files."""


_LAYER = decoder_layer(qkv=QKV, head_norms=True, feed_forward_norm=NORM)

ARCHITECTURE = Architecture(
    name="qwen35",
    saved=SavedForm(),
    layer=_LAYER,
    drafting_layer=(*PAIR, *_LAYER),
    delta_layer=(*DELTA, *GATED, DOWN),
    deltas=deltas,
    gates_heads=True,
    ropes=ropes,
    completed=as_llama_cpp_reads,
    ollama=OLLAMA,
)
