"""The tokenizer of a GGUF, built with Hugging Face's ``tokenizers``: llama.cpp's ids, except in two word splits.

BPE (Sennrich et al., 2016) with a letter for each byte (GPT-2, Radford et al., 2019), and SentencePiece's BPE with
scores and with bytes for text outside the vocabulary (Kudo and Richardson, 2018). Gemma 4 has the pieces and bytes of
the latter, merges them by rank as the former, and never across the border of a run of newlines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Regex, Tokenizer as Merger, models, pre_tokenizers

from edgespec.errors import ClosedError, InvalidRequestError, ModelFileError
from edgespec.files.gguf.cursor import DOWNLOAD_AGAIN
from edgespec.files.gguf.records import GgufHeader
from edgespec.text.tokenizers.tokenizer import ControlToken, FillInTokens
from edgespec.text.tokenizers.vocabulary import (
    BPE,
    BYTE_TOKEN,
    GEMMA_4,
    SENTENCEPIECE,
    Kind,
    Special,
    Vocabulary,
    scores,
    strings,
)

_BLANK = "\u2581"  # SentencePiece's letter for a blank
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
# Longer pieces are never merged: they have too many splits to try. Gemma 3's longest has 31 characters.
_LONGEST_PIECE = 512
# From this many characters on, other threads run while text is cut: a million takes seconds. Shorter ones take less
# than changing threads.
_LONG_TEXT = 10_000
_NEWLINES = re.compile("(\n+)")
_ASCII_BLANKS = " \t\n\v\f\r"


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable bytes are themselves, other bytes are U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}
# The byte of each letter as a character of Latin-1. Other characters of Latin-1 become one that Latin-1 lacks.
_AS_LATIN_1 = dict.fromkeys(range(256), _BLANK) | {ord(letter): byte for letter, byte in _BYTES.items()}


class GgufTokenizer:
    """Text to ids and back. Implements Tokenizer; thread-safe.

    Only for files without a reason in ``vocabulary.unsupported``. Raises ModelFileError if the file's tables
    contradict each other.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._vocabulary = vocabulary = Vocabulary(header)
        try:
            self._merger = _MAKERS[vocabulary.model](header, vocabulary)
        except BaseException as error:  # the library raises no narrower type
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            reason = _odd_merge(header, vocabulary) or f"its tokenizer cannot be built: {error}"
            raise ModelFileError(header.path, reason, hint=DOWNLOAD_AGAIN) from error
        self._pieces: dict[int, bytes] = {}
        self._closed = False

    @property
    def vocabulary_size(self) -> int:
        return len(self._vocabulary.texts)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._vocabulary.stop_ids

    @property
    def suppressed(self) -> frozenset[int]:
        return self._vocabulary.suppressed

    @property
    def marks(self) -> Mapping[int, ControlToken]:
        return self._vocabulary.marks

    @property
    def bos_token(self) -> str:
        return self._text_of(self._vocabulary.bos)

    @property
    def eos_token(self) -> str:
        return self._text_of(self._vocabulary.eos)

    @property
    def template_tokens(self) -> Mapping[str, str]:
        further = {name: self._text_of(token) for name, token in self._vocabulary.further.items()}
        return {"bos_token": self.bos_token, "eos_token": self.eos_token, **further}

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.texts[token]

    @property
    def fill_in(self) -> FillInTokens | None:
        return self._vocabulary.fill_in

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects a begin-of-sequence token before raw text."""
        return self._vocabulary.adds_bos

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        self._check_open()
        bos = self._vocabulary.bos
        ids = [bos] if add_bos and self.adds_bos and bos is not None else []
        begins = True  # at the start of the text, and after a special token
        for part in self._parts(text.encode("utf-8", "replace").decode("utf-8"), special=special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._merge(part, begins=begins))
            begins = isinstance(part, int)
        return ids

    def _merge(self, text: str, *, begins: bool) -> list[int]:
        if self._vocabulary.has_blanks:
            blank = " " if begins and self._vocabulary.adds_blank else ""
            text = (blank + text).replace(" ", _BLANK)
        try:
            if self._vocabulary.model == GEMMA_4 and "\n" in text:
                found = self._merge_lines(text)
            # The library keeps the interpreter's lock in ``encode``, but not for a batch.
            elif len(text) < _LONG_TEXT:
                found = self._merger.encode(text, add_special_tokens=False).ids
            else:
                found = self._merger.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise InvalidRequestError(
                "the text cannot be cut into words", hint="it may hold millions of blanks in a row: shorten them"
            ) from error
        size = self.vocabulary_size
        return [token for token in found if token < size]

    def _merge_lines(self, text: str) -> list[int]:
        """Lines apart from the runs of newlines between them; a run that is a token becomes this token."""
        words = [word for word in _NEWLINES.split(text) if word]
        known = [self._vocabulary.ids.get(word) if word[0] == "\n" else None for word in words]
        rest = [word for word, token in zip(words, known, strict=True) if token is None]
        merged = iter(self._merger.encode_batch_fast(rest, add_special_tokens=False))
        return [each for token in known for each in (next(merged).ids if token is None else [token])]

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def spell(self, pieces: Sequence[bytes]) -> list[list[int]]:
        """Ids of each piece by itself, as inside a text: without a blank or a token before it.

        Bytes that are not UTF-8 are spelled one by one, if the vocabulary has them. Raises InvalidRequestError.
        """
        self._check_open()
        texts = [_text_or_none(piece) for piece in pieces]
        has_blanks = self._vocabulary.has_blanks
        letters = [(text or "").replace(" ", _BLANK) if has_blanks else text or "" for text in texts]
        try:
            found = self._merger.encode_batch_fast(letters, add_special_tokens=False)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise InvalidRequestError("a token's text cannot be cut into words") from error
        size = self.vocabulary_size
        return [
            [token for token in one.ids if token < size] if text is not None else self._spell_bytes(piece)
            for one, text, piece in zip(found, texts, pieces, strict=True)
        ]

    def _spell_bytes(self, piece: bytes) -> list[int]:
        names = (BYTE_TOKEN % byte if self._vocabulary.has_blanks else _LETTERS[byte] for byte in piece)
        return [self._vocabulary.ids[name] for name in names if name in self._vocabulary.ids]

    def _parts(self, text: str, *, special: bool) -> list[int | str]:
        """The special tokens in the text, and the texts between them."""
        parts: list[int | str] = [text] if text else []
        if not self._may_hold_special.search(text):
            return parts
        for one in self._vocabulary.specials:
            if (special or not one.is_control) and one.text in text:
                parts = [
                    part for old in parts for part in ([old] if isinstance(old, int) else _cut(old, one))
                ]  # fmt: skip
        return parts

    @cached_property
    def _may_hold_special(self) -> re.Pattern[str]:
        starts = {one.text[:2] for one in self._vocabulary.specials}
        return re.compile("|".join(map(re.escape, sorted(starts))) if starts else r"\b\B")

    def control_token(self, token: int) -> ControlToken | None:
        self._check_open()
        return self._vocabulary.controls.get(token)

    def token_bytes(self, token: int) -> bytes:
        known = self._pieces.get(token)
        if known is None:
            self._check_open()
            if not 0 <= token < self.vocabulary_size:
                return b""
            known = self._pieces[token] = self._piece(token)
        return known

    def _piece(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        if token in vocabulary.stop_ids:
            return b""
        kind, text = vocabulary.kinds[token], vocabulary.texts[token]
        if kind == Kind.USER_DEFINED:
            return text.encode()
        if kind == Kind.BYTE:
            found = _BYTE.fullmatch(text)
            return bytes([int(found[1], 16)]) if found else b""
        if kind != Kind.NORMAL:
            return b""
        if vocabulary.has_blanks:
            return text.replace(_BLANK, " ").encode()
        try:
            return text.translate(_AS_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # only damaged vocabularies have letters that encode no byte
            return b"".join(bytes([_BYTES[letter]]) if letter in _BYTES else letter.encode() for letter in text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, invalid UTF-8 replaced."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this tokenizer is closed")

    def close(self) -> None:
        """Idempotent."""
        self._closed = True


def written(vocabulary: Vocabulary, piece: bytes) -> str:
    """How the vocabulary writes the token with these bytes, if it has one."""
    if not vocabulary.has_blanks:
        return "".join(_LETTERS[byte] for byte in piece)
    text = _text_or_none(piece)
    return "".join(BYTE_TOKEN % byte for byte in piece) if text is None else text.replace(" ", _BLANK)


def _text_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _cut(text: str, special: Special) -> Iterator[int | str]:
    """Split a text at a special token: the texts between, and the token's id at each occurrence."""
    first, *others = text.split(special.text)
    if first:
        yield first
    for other in others:
        yield special.token
        rest = other.lstrip(_ASCII_BLANKS) if special.strips_right else other
        if rest:
            yield rest


class _Merges(Sequence[tuple[str, str]]):
    """A lazy list of pairs: a list of 150 000 tuples takes Python's garbage collector 0.1 s."""

    def __init__(self, pairs: Iterator[tuple[str, str]]) -> None:
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._pairs

    def __len__(self) -> int:
        return 0  # unknown; the library only reserves memory by it

    def __getitem__(self, index: object) -> Any:
        raise IndexError(index)


def _is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of the library's native code, which has no importable type."""
    return type(error).__name__ == "PanicException"


def _odd_merge(header: GgufHeader, vocabulary: Vocabulary) -> str | None:
    """The error of the first merge whose result is not a token; None without one."""
    for merge in strings(header, "tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if first + second not in vocabulary.ids:
            return f"its merge {merge[:40]!r} makes no token"
    return None


def _ranked_pairs(header: GgufHeader, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for merge in strings(header, "tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if first + second not in ids:  # some such pairs would make the library panic
            raise ValueError(merge)
        yield first, second


def _bpe(header: GgufHeader, vocabulary: Vocabulary) -> Merger:
    split, ids = vocabulary.split, vocabulary.ids
    assert split is not None  # checked by ``unsupported``
    # Some vocabularies lack rare bytes. Such a byte gives no id, and its neighbours are not merged.
    lacking = [letter for letter in _BYTES if letter not in ids]
    ids = {**ids, **{letter: len(ids) + index for index, letter in enumerate(lacking)}}

    merges = _Merges(_ranked_pairs(header, ids))
    merger = Merger(models.BPE(vocab=ids, merges=merges, ignore_merges=split.whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merger.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    return merger


def _sentencepiece(header: GgufHeader, vocabulary: Vocabulary) -> Merger:
    """SentencePiece merges neighbours whose joined text is a piece, best score first."""
    ids, texts, own = vocabulary.ids, vocabulary.texts, scores(header)

    def pairs() -> Iterator[tuple[str, str]]:
        for token in sorted(range(len(texts)), key=lambda token: -own[token]):
            text = texts[token]
            if len(text) > _LONGEST_PIECE:
                continue
            for index in range(1, len(text)):
                if text[:index] in ids and text[index:] in ids:
                    yield text[:index], text[index:]

    return Merger(models.BPE(vocab=ids, merges=_Merges(pairs()), byte_fallback=True))


def _gemma_4(header: GgufHeader, vocabulary: Vocabulary) -> Merger:
    merges = _Merges(_ranked_pairs(header, vocabulary.ids))
    return Merger(models.BPE(vocab=vocabulary.ids, merges=merges, byte_fallback=True))


_MAKERS = {BPE: _bpe, SENTENCEPIECE: _sentencepiece, GEMMA_4: _gemma_4}
