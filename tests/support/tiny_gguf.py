"""Small GGUF models with random weights that llama.cpp can load, so that tests need no download.

Their text is meaningless but deterministic and varied, over a real SentencePiece vocabulary with byte tokens,
multi-byte pieces and chat control tokens. Models with the same ``vocabulary`` are a target and drafter pair.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.k_quants import quantize

__all__ = ["CHATML", "VOCABULARY", "similar_drafter", "write_tiny_gguf"]

Quant = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
_FILE_TYPES: dict[Quant, gguf.LlamaFileType] = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
}
Architecture = Literal["llama", "qwen2", "qwen3", "gemma3"]

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
    chat_template: str | None = CHATML,
    extra_tokens: int = 0,
    end_scale: float = 0.0,
    architecture: Architecture = "llama",
    tied: bool = False,
    head_length: int | None = None,
    window: int = 0,
    rope_factors: bool = False,
    leave_out: Sequence[int] = (),
    settings: Mapping[str, int | float | str] | None = None,
) -> Path:
    """Write a model to ``path`` and return the path.

    qwen2 has biases on queries, keys and values; qwen3 and gemma3 have head norms with random weights; gemma3 also
    has norms after each half of a layer, a sliding ``window``, and an always tied head.

    ``vocabulary`` holds the word pieces between the special and byte tokens and the two chat tokens; the end of
    sequence is ``<|im_end|>``. ``extra_tokens`` unused tokens pad the end of the table. With ``end_scale`` 0 greedy
    text never ends; 1 makes the end as likely as any word. ``width`` must be a multiple of 32, of 256 for K-quants.
    ``tied`` leaves the head out: the embedding replaces it.

    ``head_length`` is width / heads unless given. ``rope_factors`` writes Llama 3's divisors of rotary frequencies.
    Layers of ``leave_out`` are drawn but not written, and later layers move up. ``settings``: more keys of the
    architecture.
    """
    tokens, types = _token_table(vocabulary, extra_tokens)
    eos = tokens.index(_CONTROLS[1].encode())
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(f"tiny-{seed}")
    writer.add_context_length(context_length)
    writer.add_block_count(layers - len(leave_out))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_width = width // heads if head_length is None else head_length
    queries, keys = heads * head_width, kv_heads * head_width
    writer.add_rope_dimension_count(head_width)
    if head_length is not None:
        writer.add_key_length(head_length)
        writer.add_value_length(head_length)
    if window:
        writer.add_sliding_window(window)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 10000.0)
    for key, value in (settings or {}).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
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
    is_gemma = architecture == "gemma3"
    written = {layer: number for number, layer in enumerate(each for each in range(layers) if each not in leave_out)}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        weights = _normal(random, rows, columns, scale)
        if name:
            _add(writer, name, weights, quant)

    def vector(name: str, weights: npt.NDArray[np.float32]) -> None:
        if name:
            writer.add_tensor(name, weights)

    # Padding rows are zero and not drawn: the same seed gives the same model with any padding.
    padding, rows = ((0, extra_tokens), (0, 0)), len(tokens) - extra_tokens
    # Entries of about 1; gemma3 scales by sqrt(width) itself, and its head is the embedding.
    embedding = _normal(random, rows, width, 3.0 if is_gemma else np.sqrt(width))
    if is_gemma:
        embedding *= np.maximum(_head_scales(types[:rows], eos, end_scale), 0.1)[:, None]
    _add(writer, "token_embd.weight", np.pad(embedding, padding), quant)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.geomspace(1, 8, head_width // 2, dtype=np.float32))
    for layer in range(layers):

        def named(name: str, layer: int = layer) -> str:
            return f"blk.{written[layer]}.{name}" if layer in written else ""

        vector(named("attn_norm.weight"), np.ones(width, np.float32))
        # Attention scores with a spread of about 2: positions matter, and the text does not repeat soon.
        matrix(named("attn_q.weight"), queries, width, 2.0)
        matrix(named("attn_k.weight"), keys, width)
        matrix(named("attn_v.weight"), keys, width)
        matrix(named("attn_output.weight"), width, queries, 2.0)
        vector(named("ffn_norm.weight"), np.ones(width, np.float32))
        matrix(named("ffn_gate.weight"), 2 * width, width)
        matrix(named("ffn_up.weight"), 2 * width, width)
        matrix(named("ffn_down.weight"), width, 2 * width, 2.0)
        if architecture == "qwen2":
            for name, rows_ in (("q", queries), ("k", keys), ("v", keys)):
                vector(named(f"attn_{name}.bias"), random.standard_normal(rows_, dtype=np.float32))
        if architecture in ("qwen3", "gemma3"):
            for name in ("q", "k"):
                vector(named(f"attn_{name}_norm.weight"), 1 + 0.5 * random.random(head_width, dtype=np.float32))
        if is_gemma:
            for name in ("attention", "ffw"):
                vector(named(f"post_{name}_norm.weight"), 0.5 + random.random(width, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    # Logits with a spread of about 3, so that distributions are neither flat nor one-hot.
    head = _normal(random, rows, width, 3.0)
    head *= _head_scales(types[:rows], eos, end_scale)[:, None]
    if not tied and not is_gemma:
        _add(writer, "output.weight", np.pad(head, padding), quant)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
