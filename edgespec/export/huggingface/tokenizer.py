"""Converts a Hugging Face tokenizer.json to the tokenizer of a GGUF, for two kinds of byte-pair encoding.

Byte-level BPE (GPT-2 and later): a GGUF holds tokens and merges like the file. BPE over characters with bytes as a
fallback (SentencePiece): llama.cpp merges by scores of the pieces instead (Kudo and Richardson, 2018), and the scores
are derived from the order of the merges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.huggingface.config import Value
from edgespec.export.huggingface.pretokenizers import SPACE, byte_level_name, sentencepiece_prefix
from edgespec.export.huggingface.special_tokens import SpecialTokens, read_special_tokens
from edgespec.files.checked import DOWNLOAD_AGAIN, Fields, is_text, read_fields
from edgespec.files.gguf.records import CHAT_TEMPLATE
from edgespec.text.tokenizers.vocabulary import PHI_3, PHI_3_KEEPS

TOKENIZER = "tokenizer.json"
_MOST_BYTES = 64 << 20  # the largest known tokenizer.json, gemma's, has 33 MB
# Below the GGUF reader's limit of 2**21 strings per file.
_MOST_TOKENS, _MOST_MERGES = 1 << 20, 1 << 20
_MOST_TOKEN_CHARACTERS = 4096  # the longest known tokens are runs of some hundred spaces

# enum llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# Added tokens that are never text although not declared special: markers of chats, files and gaps, and reserved
# tokens. llama.cpp's converter makes them control tokens, too.
_MARKER = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer in GGUF form. ``tokens``, ``types`` and ``scores`` have one element per id.

    ``model`` is gpt2 (byte-level, with ``merges``) or llama (SentencePiece, with ``scores``); ``pre`` is llama.cpp's
    name of the pre-tokenizer; ``types`` are numbers of llama.h's llama_token_type. ``strips_right``: special tokens
    take the blanks behind them, as Phi-3's do.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] | None
    scores: tuple[float, ...] | None
    add_space_prefix: bool
    special: SpecialTokens
    strips_right: bool = False

    def named(self, name: str) -> str:
        """The model's name in the file. Readers strip blanks behind special tokens in files of this name alone."""
        return name if not self.strips_right or PHI_3.search(name) else f"Phi-3 {name}"

    def metadata(self) -> dict[str, Value]:
        """The GGUF keys of the tokenizer with their values."""
        values: dict[str, Value] = {
            "model": self.model,
            "pre": self.pre,
            "tokens": self.tokens,
            "token_type": self.types,
        }
        if self.scores is not None:
            values["scores"] = self.scores
        if self.merges:
            values["merges"] = self.merges
        special = self.special
        values |= {f"{name}_token_id": token for name, token in special.ids.items()}
        values |= {
            "add_bos_token": special.add_bos,
            "add_eos_token": special.add_eos,
            "add_space_prefix": self.add_space_prefix,
        }
        found: dict[str, Value] = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
        if special.chat_template is not None:
            found[CHAT_TEMPLATE] = special.chat_template
        if special.named_templates:
            found[f"{CHAT_TEMPLATE}s"] = tuple(special.named_templates)
            found |= {f"{CHAT_TEMPLATE}.{name}": each for name, each in special.named_templates.items()}
        return found


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Read the tokenizer of ``folder`` for a model whose embedding has ``rows`` rows.

    Ids without a token become unused tokens; added tokens beyond the last row are left out. Raises ModelFileError
    for malformed files, InvalidRequestError for a tokenizer that llama.cpp cannot reproduce.
    """
    path = folder / TOKENIZER
    if not path.exists() and (folder / "tokenizer.model").exists():
        hint = "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ModelFileError(path, "no such file; tokenizer.model alone is not read", hint=hint)
    whole = read_fields(path, _MOST_BYTES)
    model = whole.member("model")
    if model is None:
        raise whole.wrong("model", "an object")
    if (kind := model.text("type") or "BPE") != "BPE":
        _refuse(path, f"its model is {kind[:40]!a}, not BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(name):
            _refuse(path, f"it has a {name}")
    pieces = _pieces(model)
    added = list(_added(whole))
    merges = _merges(model, pieces)
    normalizer, pre_tokenizer = whole.raw("normalizer"), whole.raw("pre_tokenizer")
    sentencepiece = model.flag("byte_fallback") is True
    unknown = model.text("unk_token") if sentencepiece else None
    tokens, types = _table(path, pieces, added, rows, unknown=unknown, bytes_marked=sentencepiece)
    special = read_special_tokens(folder, whole, {text: token for token, text in enumerate(tokens)})
    # A GGUF can say it of all tokens that Phi-3 has it for, and of no others.
    stripping = {each.text for each in added if each.strips_right}
    strips_right = bool(stripping) and stripping == {each.text for each in added} - PHI_3_KEEPS
    if sentencepiece:
        prefix = sentencepiece_prefix(normalizer, pre_tokenizer)
        if prefix is None:
            _refuse(path, "its normalizer and pre-tokenizer differ from SentencePiece's")
        if any(piece not in pieces for piece in _BYTE_PIECES):
            raise ModelFileError(
                path, "it falls back to bytes but lacks the tokens of some bytes", hint=DOWNLOAD_AGAIN
            )
        return Vocabulary(
            model="llama",
            pre="default",
            # llama.cpp finds user-defined tokens in the raw text, where a space is not yet replaced.
            tokens=tuple(
                text.replace(SPACE, " ") if type_ == _USER_DEFINED else text
                for text, type_ in zip(tokens, types, strict=True)
            ),
            types=types,
            merges=None,
            scores=_scores(path, tokens, types, merges),
            add_space_prefix=prefix,
            special=special,
            strips_right=strips_right,
        )
    pre = byte_level_name(normalizer, pre_tokenizer, ignore_merges=model.flag("ignore_merges") is True)
    if pre is None:
        _refuse(path, "its normalizer and pre-tokenizer are not known")
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        merges=tuple(f"{left} {right}" for left, right in merges),
        scores=None,
        add_space_prefix=False,
        special=special,
        strips_right=strips_right,
    )


def _refuse(path: Path, what: str) -> NoReturn:
    raise InvalidRequestError(
        f"{path}: {what}; a GGUF cannot hold this tokenizer",
        hint="supported are SentencePiece's BPE and the byte-level BPE of most families; llama.cpp's "
        "convert_hf_to_gguf.py knows more",
    )


# ---------------------------------------------------------------------------------------------- the tokens


def _pieces(model: Fields) -> Mapping[str, int]:
    """The tokens of the vocabulary, without added tokens, with their ids."""
    found = model.raw("vocab")
    if not isinstance(found, dict) or not 0 < len(found) <= _MOST_TOKENS:
        raise model.wrong("vocab", f"an object of 1 to {_MOST_TOKENS} tokens")
    for text, token in found.items():
        _check_token(model.path, text, token)
    return found


def _check_token(path: Path, text: Any, token: Any) -> None:
    if type(token) is not int or not 0 <= token < _MOST_TOKENS:
        raise ModelFileError(path, f"{ascii(token)[:40]} is not a token id", hint=DOWNLOAD_AGAIN)
    fault = None
    if not isinstance(text, str) or not 0 < len(text) <= _MOST_TOKEN_CHARACTERS:
        fault = f"no text of 1 to {_MOST_TOKEN_CHARACTERS} characters"
    elif "\0" in text:  # native code would stop reading the token there
        fault = "a text with a NUL character"
    elif not is_text(text):
        fault = "a text with half of a surrogate pair"
    if fault is not None:
        raise ModelFileError(path, f"token {token} has {fault}", hint=DOWNLOAD_AGAIN)


@dataclass(frozen=True, slots=True)
class _Added:
    text: str
    token: int
    special: bool
    strips_right: bool


def _added(whole: Fields) -> Iterator[_Added]:
    values = whole.items("added_tokens") or []
    if len(values) > _MOST_TOKENS:
        raise ModelFileError(whole.path, f"{len(values)} added_tokens are implausible", hint=DOWNLOAD_AGAIN)
    for value in values:
        if not isinstance(value, dict):
            raise whole.wrong("added_tokens", "an array of objects")
        text, token = value.get("content"), value.get("id")
        _check_token(whole.path, text, token)
        flags = [value.get(name) is True for name in ("special", "rstrip")]
        yield _Added(text, token, *flags)  # type: ignore[arg-type]  # _check_token has checked both


def _table(
    path: Path,
    pieces: Mapping[str, int],
    added: Sequence[_Added],
    rows: int,
    *,
    unknown: str | None,
    bytes_marked: bool,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text and the type of each id."""
    texts: dict[int, str] = {}
    types: dict[int, int] = {}
    marked = frozenset(_BYTE_PIECES) if bytes_marked else frozenset()
    for text, token in pieces.items():
        if token >= rows:
            reason = f"token {token} has no row in the model's embedding of {rows} rows"
            raise ModelFileError(path, reason, hint="tokenizer and weights may belong to different models")
        if token in texts:
            raise ModelFileError(path, f"two tokens have the id {token}", hint=DOWNLOAD_AGAIN)
        texts[token] = text
        types[token] = _BYTE if text in marked else _NORMAL
    for each in added:
        if each.token >= rows:
            continue
        if texts.setdefault(each.token, each.text) != each.text:
            raise ModelFileError(path, f"two tokens have the id {each.token}", hint=DOWNLOAD_AGAIN)
        types[each.token] = _CONTROL if each.special or _MARKER.fullmatch(each.text) else _USER_DEFINED
    if unknown is not None and unknown in pieces:
        types[pieces[unknown]] = _UNKNOWN
    tokens = tuple(texts.get(token, f"[PAD{token}]") for token in range(rows))
    if len(set(tokens)) != rows:
        raise ModelFileError(path, "two ids have the same token", hint=DOWNLOAD_AGAIN)
    return tokens, tuple(types.get(token, _UNUSED) for token in range(rows))


# ---------------------------------------------------------------------------------------------- the merges


def _merges(model: Fields, pieces: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces in merge order; the file writes a pair as two strings, or as one string until 2024."""
    values = model.items("merges")
    if values is None or len(values) > _MOST_MERGES:
        raise model.wrong("merges", f"an array of at most {_MOST_MERGES} pairs")
    found = []
    for value in values:
        pair = value.split(" ") if isinstance(value, str) else value
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ModelFileError(model.path, "a merge is not two pieces", hint=DOWNLOAD_AGAIN)
        left, right = pair
        if left not in pieces or right not in pieces or left + right not in pieces:
            reason = f"the merge of {left[:40]!a} and {right[:40]!a} does not join two tokens into a token"
            raise ModelFileError(model.path, reason, hint=DOWNLOAD_AGAIN)
        if " " in left or " " in right:
            _refuse(model.path, "its merges contain spaces")
        found.append((left, right))
    return found


def _scores(
    path: Path, tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]
) -> tuple[float, ...]:
    """A score per token: the earlier its merges, the higher the score.

    llama.cpp applies the merge whose result has the highest score; the file's rule is the first merge in the list.
    Both rules agree if all merges with the same result are adjacent, as in files made from a SentencePiece model.
    """
    searched = {text for text, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED}
    rank: dict[str, int] = {}
    last = ""
    for left, right in merges:
        piece = left + right
        if piece not in searched:  # llama.cpp finds user-defined tokens before merging
            if piece != last and piece in rank:
                _refuse(path, f"the merges that make {piece[:40]!a} are not adjacent, so no score expresses them")
            last = piece
        rank.setdefault(piece, len(rank))
    # No merge results in a character, byte or marker, so their score has no effect.
    return tuple(-float(rank.get(text, len(rank))) for text in tokens)
