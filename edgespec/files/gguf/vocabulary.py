"""Compares the vocabularies of a target and a drafter, token by token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from edgespec.files.gguf.records import GgufArray, GgufHeader

# Known models pad their tables to a multiple of at most 1024 rows (Qwen adds 128 to 512); a larger difference means
# another vocabulary.
_MOST_PADDING = 1024
_LONGEST_SHOWN = 80  # bytes of a token in a message: a hostile file may hold a token of a gigabyte
_UNUSED = 5  # LLAMA_TOKEN_TYPE_UNUSED
_PADDING_TEXT = re.compile(rb"\[PAD\d+\]")  # what llama.cpp's converters call a row without a token


@dataclass(frozen=True, slots=True)
class VocabularyDifference:
    """Why two vocabularies differ, in one sentence; ``token_id`` is the first differing id, if any."""

    reason: str
    token_id: int | None = None


def compare_vocabularies(target: GgufHeader, drafter: GgufHeader) -> VocabularyDifference | None:
    """The first difference that forbids drafting, or None if the vocabularies match.

    They match if each id of the target has the same text, in bytes, in the drafter; ids that only the target has must
    be padding. A one-pass drafter's mask token is left out, since it is never proposed. Nothing else is compared: the
    target alone splits text, and it checks every token. Raises ModelFileError if a file changed since its header was
    read.
    """
    for header, who in ((target, "target"), (drafter, "drafter")):
        if "tokenizer.ggml.tokens" not in header.metadata:
            return VocabularyDifference(f"the {who} holds no vocabulary")
    different = _texts_differ(target, drafter)
    models = [header.metadata.get("tokenizer.ggml.model") for header in (target, drafter)]
    if different is not None and models[0] != models[1]:
        reason = f"the target's tokenizer is {models[0]!r} but the drafter's is {models[1]!r}"
        return VocabularyDifference(reason, different.token_id)
    return different


def vocabulary_digest(header: GgufHeader) -> bytes:
    """The sha256 of the tokenizer model and the token texts: with equal digests, equal ids mean equal tokens.

    Reads the table once: a few milliseconds. Raises ModelFileError.
    """
    tokens = header.metadata["tokenizer.ggml.tokens"]
    texts = tokens.sha256() if isinstance(tokens, GgufArray) else _digest_of(_texts(header))
    return hashlib.sha256(f"{header.metadata.get('tokenizer.ggml.model')} {texts}".encode()).digest()


def _digest_of(texts: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:  # as a GGUF stores strings
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _texts_differ(target: GgufHeader, drafter: GgufHeader) -> VocabularyDifference | None:
    if _same_bytes(target, drafter, "tokenizer.ggml.tokens"):
        return None
    for token, (left, right) in enumerate(zip(_texts(target), _texts(drafter), strict=False)):
        if left != right and token != drafter.mask_token_id:
            reason = f"token {token} is {_show(left)!r} in the target but {_show(right)!r} in the drafter"
            return VocabularyDifference(reason, token_id=token)
    shared = drafter.vocabulary_size
    extra = target.vocabulary_size - shared
    if extra > _MOST_PADDING:
        return VocabularyDifference(
            f"the target has {extra} tokens more than the drafter, and at most {_MOST_PADDING} can be padding",
            token_id=shared,
        )
    types = dict(enumerate(target.values("tokenizer.ggml.token_type")))
    for token, text in enumerate(islice(_texts(target), shared, None), start=shared):
        if types.get(token) != _UNUSED and not _PADDING_TEXT.fullmatch(text):
            return VocabularyDifference(
                f"token {token} is {_show(text)!r} in the target, is not padding, and is missing in the drafter",
                token_id=token,
            )
    return None


def _same_bytes(target: GgufHeader, drafter: GgufHeader, key: str) -> bool:
    left, right = target.metadata[key], drafter.metadata[key]
    if isinstance(left, GgufArray) and isinstance(right, GgufArray):
        return left.count == right.count and left.byte_count == right.byte_count and left.sha256() == right.sha256()
    return left == right


def _texts(header: GgufHeader) -> Iterator[bytes]:
    tokens = header.metadata["tokenizer.ggml.tokens"]
    if isinstance(tokens, GgufArray):
        return tokens.raw_strings()
    assert isinstance(tokens, tuple)  # read_header has checked the type
    return (str(token).encode("utf-8") for token in tokens)


def _show(text: bytes) -> str:
    return text[:_LONGEST_SHOWN].decode("utf-8", "backslashreplace")
