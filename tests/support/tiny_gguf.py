"""Small GGUF models with random weights that llama.cpp can load, so that tests need no download.

Their text is meaningless but deterministic and varied, over a real SentencePiece vocabulary with byte tokens,
multi-byte pieces and chat control tokens. Models with the same ``vocabulary`` are a target and drafter pair.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from edgespec.architectures.deltas import Deltas
from edgespec.architectures.shape import (
    FEATURE_OUT,
    INPUT_ROWS,
    LONG_FACTORS,
    PAIR,
    ROPE_FACTORS,
    ROUTER,
    SHORT_FACTORS,
    Facts,
    Part,
    Sizes,
    layer_parts,
)
from edgespec.architectures.table import READERS, find
from tests.support.k_quants import quantize

__all__ = ["CHATML", "FILL_IN", "VOCABULARY", "similar_drafter", "write_tiny_gguf"]

Quant = Literal[
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]
_FILE_TYPES: dict[Quant, gguf.LlamaFileType] = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q3_K": gguf.LlamaFileType.MOSTLY_Q3_K_S,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
    "IQ3_XXS": gguf.LlamaFileType.MOSTLY_IQ3_XXS,
    "IQ3_S": gguf.LlamaFileType.MOSTLY_IQ3_S,
    "IQ4_NL": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "IQ4_XS": gguf.LlamaFileType.MOSTLY_IQ4_XS,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}

# Attention scores with a spread of about 2: positions matter, and the text does not repeat soon.
_SCALES = {"attn_q": 2.0, "attn_output": 2.0, "ffn_down": 2.0, ROUTER: 2.0}
_FLOATS = (ROUTER, "ssm_conv1d")
_EVEN = ("attn_norm", "ffn_norm")  # norms whose weights are all one

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = """
the of and to in is it that was for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know user
assistant system naïve café straße über ångström Привет мир слово 你好 世界 模型 日本 語 한국 🙂 🚀 👩‍💻
"""
_CHARACTERS = "\n\tabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()[]{}<>|_-+*/=#%&@\\`~^$"


def _pieces(words: Iterable[str]) -> tuple[str, ...]:
    """Every character and every prefix of every word: SentencePiece reaches a piece only by merging shorter ones."""
    found: dict[str, None] = dict.fromkeys(["▁", *_CHARACTERS])
    for word in words:
        text = f"▁{word}"
        found.update(dict.fromkeys(text))
        found.update(dict.fromkeys(text[:end] for end in range(2, len(text) + 1)))
    return tuple(found)


VOCABULARY: tuple[str, ...] = _pieces(_WORDS.split())
# Qwen2.5-Coder's tokens around a hole: prefix, suffix, middle, repository, file.
FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
_CONTROLS = ("<|im_start|>", "<|im_end|>")
_BOS = 1


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    vocabulary: Sequence[str] = VOCABULARY,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context_length: int = 2048,
    quant: Quant = "F32",
    chat_template: str | list[dict[str, str]] | None = CHATML,
    extra_tokens: int = 0,
    end_scale: float = 0.0,
    architecture: str = "llama",
    tied: bool = False,
    head_length: int | None = None,
    window: int = 0,
    rope_factors: bool = False,
    long_factors: bool = False,
    rope_length: int | None = None,
    leave_out: Sequence[int] = (),
    experts: tuple[int, int] = (6, 2),
    deltas: tuple[int, int, int, int] = (4, 2, 32, 4),
    interval: int = 2,
    shared: int = 0,
    drafting: Sequence[str] | None = None,
    settings: Mapping[str, int | float | str | list[int]] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Write a model to ``path`` and return the path.

    The layers have the tensors that the architecture declares, with random weights; biases only where it always has
    them. gemma2 and gemma3 have an always tied head. ``window``: a sliding window.

    ``vocabulary`` holds the word pieces between the special and byte tokens and the two chat tokens; the end of
    sequence is ``<|im_end|>``. ``extra_tokens`` unused tokens pad the end of the table. With ``end_scale`` 0 greedy
    text never ends; 1 makes the end as likely as any word. ``width`` must be a multiple of 32, of 256 for types with
    super-blocks. ``tied`` leaves the head out: the embedding replaces it.

    ``head_length`` is width / heads unless given, and ``rope_length`` as long. ``rope_factors`` writes Llama 3's
    divisors of rotary frequencies, ``long_factors`` those for short and for long contexts.
    Of ``experts`` each layer has the first number and each row uses the second, if the architecture has any;
    ``shared`` is the length of one more that every row uses. Gated delta layers have ``deltas``: heads, key heads,
    elements of each, rows of the convolution; every layer whose number from 1 is a multiple of ``interval`` has
    attention instead. ``drafting`` adds a layer that drafts, which has those tensors for itself, not the model's:
    ``embed_tokens``, ``shared_head_norm``, ``shared_head_head``. Layers of ``leave_out`` are drawn but not written,
    and later layers move up. ``settings``: more keys of the architecture.

    Every third layer of gemma4 and of its assistant sees all positions; the others have a window and heads of half
    that length. Their tensors are all that may be, but for those whose names hold a word of ``without``.
    """
    tokens, types = _token_table(vocabulary, extra_tokens)
    eos = tokens.index(_CONTROLS[1].encode())
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(f"tiny-{seed}")
    writer.add_context_length(context_length)
    writer.add_block_count(layers - len(leave_out) + (drafting is not None))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_width = width // heads if head_length is None else head_length
    turned = head_width if rope_length is None else rope_length
    writer.add_rope_dimension_count(turned)
    is_gemma_4 = architecture.startswith("gemma4")
    if is_gemma_4:
        settings = _gemma_4(head_width) | dict(settings or {})
        writer.add_sliding_window_pattern([layer % 3 != 2 for layer in range(layers)])
        rope_factors = True
    if head_length is not None or is_gemma_4:
        head_length = head_width
        writer.add_key_length(head_length)
        writer.add_value_length(head_length)
    if window:
        writer.add_sliding_window(window)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 10000.0)
    form = READERS.get(architecture) or find(architecture)
    has_experts = form.experts is not None and experts[0] > 0
    if has_experts:
        writer.add_expert_count(experts[0])
        writer.add_expert_used_count(experts[1])
        writer.add_expert_feed_forward_length(width)
        if shared:
            writer.add_expert_shared_feed_forward_length(shared)
    of_deltas = None
    if form.deltas is not None:
        of_deltas = _add_deltas(writer, deltas, interval, layers, turned // 2)
    for key, value in (settings or {}).items():
        adders: dict[type, Any] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add = adders[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(_FILE_TYPES[quant])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(_BOS)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    random = np.random.default_rng(seed)
    is_gemma = is_gemma_4 or architecture in ("gemma2", "gemma3")
    written = {layer: number for number, layer in enumerate(each for each in range(layers) if each not in leave_out)}

    # Padding rows are zero and not drawn: the same seed gives the same model with any padding.
    padding, rows = ((0, extra_tokens), (0, 0)), len(tokens) - extra_tokens
    # Entries of about 1; gemma scales by sqrt(width) itself, and its head is the embedding.
    embedding = _normal(random, rows, width, 3.0 if is_gemma else np.sqrt(width))
    if is_gemma:
        embedding *= np.maximum(_head_scales(types[:rows], eos, end_scale), 0.1)[:, None]
    _add(writer, "token_embd.weight", np.pad(embedding, padding), quant)
    if rope_factors:
        factors = np.geomspace(1, 8, turned // 2, dtype=np.float32)
        if is_gemma_4:  # a quarter of the pairs is rotated
            factors[turned // 8 :] = 1e30
        writer.add_tensor(ROPE_FACTORS, factors)
    if long_factors:
        writer.add_tensor(SHORT_FACTORS, np.linspace(1, 2, turned // 2, dtype=np.float32))
        writer.add_tensor(LONG_FACTORS, np.geomspace(1, 40, turned // 2, dtype=np.float32))
    sizes = Sizes(
        layers=layers,
        context=context_length,
        width=width,
        inner=width if has_experts else 2 * width,
        heads=heads,
        kv_heads=kv_heads,
        head=head_width,
        experts=experts[0] if has_experts else 0,
        shared=shared,
        deltas=of_deltas,
    )
    drawn = _Drawn(writer, architecture, layers, without)
    differing = None if form.varied is None else form.varied(drawn)
    tensors = () if differing is None else drawn.tensors
    for name, shape in {} if differing is None else differing.tensors.items():
        if len(shape) == 1:
            writer.add_tensor(name, 1 + 0.5 * random.random(shape[0], dtype=np.float32))
        else:
            rows_of_token = name == INPUT_ROWS
            scale = 1.0 if name in (PAIR, FEATURE_OUT) else np.sqrt(0.1 * shape[0])
            data = _normal(random, len(tokens) if rows_of_token else shape[1], shape[0], scale)
            _add(writer, name, data, quant)
    for layer in range(layers):
        number = written.get(layer, layers)  # a layer that is left out has a number that is not written
        own, forms = (sizes, None) if differing is None else (differing.sizes[layer], differing.forms[layer])
        has_biases = form.saved.needs_biases or form.requires_biases
        parts = layer_parts(form, own, tensors, number, forms=forms, all_biases=has_biases)
        for name, data in _layer(random, parts):
            if layer not in written:
                continue
            if data.ndim == 1 or name.endswith(".bias"):
                writer.add_tensor(name, data)
            else:
                _add(
                    writer, name, data, "F32" if any(each in name for each in _FLOATS) else quant
                )  # as llama.cpp's quantiser leaves it
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    # Logits with a spread of about 3, so that distributions are neither flat nor one-hot.
    head = _normal(random, rows, width, 3.0)
    head *= _head_scales(types[:rows], eos, end_scale)[:, None]
    if not tied and not is_gemma:
        _add(writer, "output.weight", np.pad(head, padding), quant)

    if drafting is not None:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
        named = {"embed_tokens": np.sqrt(width), "shared_head_head": 3.0}
        tables = [(f"nextn.{name}.weight", _normal(random, len(tokens), width, named[name])) for name in named]
        norm = np.linspace(0.5, 2, width, dtype=np.float32)
        given = [(f"blk.{layers}.{name}", data) for name, data in (*tables, ("nextn.shared_head_norm.weight", norm))]
        given = [(name, data) for name, data in given if any(each in name for each in drafting)]
        parts = layer_parts(form, sizes, (), layers, forms=form.drafting_layer)
        for name, data in (*_layer(random, parts), *given):
            if data.ndim == 1:
                writer.add_tensor(name, data)
            else:
                _add(writer, name, data, "F32" if ROUTER in name else quant)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Drawn(Facts):
    """What ``writer`` was given, with all tensors that may be but those that hold a word of ``without``."""

    def __init__(self, writer: gguf.GGUFWriter, architecture: str, layers: int, without: Sequence[str]) -> None:
        values = {
            key: tuple(each.value) if isinstance(each.value, list) else each.value
            for key, each in writer.kv_data[0].items()
        }
        super().__init__(Path(), architecture, values, {})
        first = layers - self.integer("attention.shared_kv_layers", 0)
        self.tensors = _Every((*without, *(() if self.integer("expert_count", 0) else (ROUTER,))), first)


class _Every(dict[str, tuple[int, ...]]):
    """The names of tensors: layers that see all have no values, and those from ``first`` on no keys either."""

    def __init__(self, without: Sequence[str], first: int) -> None:
        self._without, self._first = without, first

    def __contains__(self, name: object) -> bool:
        if not str(name).startswith("blk."):
            return False
        _, number, what, *_ = str(name).split(".")
        lacks = {*self._without, *(["attn_v"] if int(number) % 3 == 2 else [])}
        lacks |= {"attn_k", "attn_v"} if int(number) >= self._first else set()
        return not any(word in what for word in lacks)


def _gemma_4(head_length: int) -> dict[str, int | float | str | list[int]]:
    return {
        "attention.key_length_swa": head_length // 2,
        "attention.value_length_swa": head_length // 2,
        "rope.dimension_count_swa": head_length // 2,
        "rope.freq_base_swa": 3000.0,
        "embedding_length_per_layer_input": 0,
    }


def _layer(
    random: np.random.Generator, parts: Iterable[tuple[str, Part]]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """A layer's tensors: matrices with all rows of their parts, then biases, then norms."""
    matrices: dict[str, list[npt.NDArray[np.float32]]] = {}
    biases: dict[str, int] = {}
    norms: dict[str, int] = {}
    experts: dict[str, int] = {}  # by the names of matrices and biases
    for role, part in parts:
        if part.columns is None:
            norms[part.tensor] = part.rows
            continue
        rows = _normal(random, part.rows, part.columns, _SCALES.get(role, 1.0))
        matrices.setdefault(part.tensor, []).append(rows)
        if part.experts:
            experts[part.tensor] = part.experts
        if part.bias is not None:
            biases[part.bias] = part.height
            experts |= {part.bias: part.experts} if part.experts else {}
    for name, drawn in matrices.items():
        whole = np.concatenate(drawn)
        yield name, whole.reshape(experts[name], -1, whole.shape[1]) if name in experts else whole
    for name, length in biases.items():
        drawn_bias = random.standard_normal(length, dtype=np.float32)
        yield name, drawn_bias.reshape(experts[name], -1) if name in experts else drawn_bias
    for name, length in norms.items():
        role = name.split(".")[2]
        if role in _EVEN:
            yield name, np.ones(length, np.float32)
        elif role == "ssm_a":  # a state forgets
            yield name, -random.random(length, dtype=np.float32)
        elif role == "ffn_gate_inp_shexp":
            yield name, 0.2 * random.standard_normal(length, dtype=np.float32)
        elif role.startswith("post"):
            yield name, 0.5 + random.random(length, dtype=np.float32)
        else:
            yield name, 1 + 0.5 * random.random(length, dtype=np.float32)


def _add_deltas(
    writer: gguf.GGUFWriter, shape: tuple[int, int, int, int], interval: int, layers: int, pairs: int
) -> Deltas:
    heads, key_heads, length, kernel = shape
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_state_size(length)
    writer.add_ssm_inner_size(heads * length)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_full_attention_interval(interval)
    writer.add_rope_dimension_sections([*(len(range(first, pairs, 3)) for first in range(3)), 0])
    return Deltas(
        heads=heads,
        key_heads=key_heads,
        length=length,
        kernel=kernel,
        layers=tuple((layer + 1) % interval != 0 for layer in range(layers)),
    )


def similar_drafter(path_target: Path, path_out: Path, noise: float) -> Path:
    """Write ``path_target``'s model with noise on its matrices to ``path_out`` and return the path.

    ``noise`` is relative to each matrix's spread. Of 120 greedy tokens 0.02 kept 86 %, 0.05 71 %, 0.1 50 % and 0.4 3
    %.
    """
    shutil.copyfile(path_target, path_out)
    random = np.random.default_rng(20250101)
    with path_out.open("r+b") as file:
        for tensor in gguf.GGUFReader(str(path_target)).tensors:
            if len(tensor.shape) < 2:
                continue
            weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            weights += noise * weights.std() * random.standard_normal(weights.shape, dtype=np.float32)
            file.seek(int(tensor.data_offset))
            file.write(gguf.quantize(weights, tensor.tensor_type).tobytes())
    return path_out


def _token_table(vocabulary: Sequence[str], extra_tokens: int) -> tuple[list[bytes], list[int]]:
    kind = gguf.TokenType
    table = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    table += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    table += [(piece, kind.NORMAL) for piece in vocabulary]
    table += [(control, kind.CONTROL) for control in _CONTROLS]
    table += [(f"[PAD{number}]", kind.UNUSED) for number in range(extra_tokens)]
    return [text.encode() for text, _ in table], [int(each) for _, each in table]


def _head_scales(types: Sequence[int], eos: int, end_scale: float) -> npt.NDArray[np.float32]:
    """Words freely, raw bytes more rarely, control tokens never."""
    per_type = {int(gguf.TokenType.NORMAL): 1.0, int(gguf.TokenType.BYTE): 0.7}
    scales = np.array([per_type.get(each, 0.0) for each in types], dtype=np.float32)
    scales[eos] = end_scale
    return scales


def _normal(random: np.random.Generator, rows: int, columns: int, scale: float) -> npt.NDArray[np.float32]:
    weights: npt.NDArray[np.float32] = random.standard_normal((rows, columns), dtype=np.float32)
    return weights * np.float32(scale / np.sqrt(columns))


def _add(writer: Any, name: str, weights: npt.NDArray[np.float32], quant: Quant) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    writer.add_tensor(name, quantize(weights, kind), raw_dtype=kind)
