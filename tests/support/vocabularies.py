"""GGUF files with only a vocabulary: small ones made here, and real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

from edgespec.files.atomic import write_json
from tests.support.llama_sources import VERSION, read_models

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_vocabulary(
    path: Path,
    tokens: Sequence[tuple[str, int]],
    *,
    model: str = "gpt2",
    pre: str = "qwen2",
    merges: Sequence[str] = (),
    name: str = "tiny",
    ids: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
    template: str | None = None,
    architecture: str = "llama",
) -> Path:
    """Write ``tokens`` (texts and types) to ``path`` and return the path.

    The first pieces have the best scores. ``ids`` name tokens ("eos", "fim_pad"), ``flags`` are other keys of the
    tokenizer ("add_bos_token").
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(name)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text.encode() for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    if model == "llama":
        writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    if merges or model != "llama":
        writer.add_token_merges(merges or ["a b"])
    for key, token in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    for key, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def real_vocabularies(folder: Path) -> dict[str, Path]:
    """The vocabularies of llama.cpp's tests, by name, with their test texts in the same folder (``.inp``, ``.out``).

    They are fetched into a folder in ``folder`` on first use.
    """
    kept = folder / f"vocabularies-{VERSION}"
    done = kept / "complete.json"
    if not done.exists():
        kept.mkdir(exist_ok=True)
        found = read_models(folder, ".gguf", ".gguf.inp", ".gguf.out")
        for name, data in found.items():
            (kept / name).write_bytes(data)
        write_json(done, sorted(found))
    return {path.stem.removeprefix("ggml-vocab-"): path for path in sorted(kept.glob("*.gguf"))}
