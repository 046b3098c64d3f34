"""Finds the llama.cpp pre-tokenizer that splits text exactly as a tokenizer.json does.

A GGUF stores only the name of a pre-tokenizer, whose regular expressions are built into llama.cpp. A structure that
is not exactly one of the known ones is refused: with a wrong name some texts would silently get other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

SPACE = "▁"  # SentencePiece's character for a space

# One step of a pre-tokenizer: ("split", regex), ("digits",), or ("bytes", whether GPT-2's regex splits first).
_Step: TypeAlias = tuple[str, str | bool] | tuple[str]

# Regular expressions of published tokenizers, as llama.cpp's src/llama-vocab.cpp quotes them. Every text consists of
# matches. Llama 3 and Qwen 2 differ in the number of digits per piece.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_SEED = _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL, _LARGE = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
_TEKKEN = rf"{_SMALL}|{_LARGE}|\p{{N}}" + _SIGNS
_GPT_4O = rf"{_SMALL}{_ENDINGS}?|{_LARGE}{_ENDINGS}?|\p{{N}}{{1,3}}" + _SIGNS

# llama.cpp's name, by the steps and by whether whole words in the vocabulary skip the merges (ignore_merges).
_BYTE_LEVEL: Mapping[tuple[tuple[_Step, ...], bool], str] = {
    ((("bytes", True),), False): "gpt-2",
    ((("digits",), ("bytes", True)), False): "smollm",
    ((("split", _LLAMA3), ("bytes", False)), True): "llama-bpe",
    ((("split", _LLAMA3), ("bytes", False)), False): "dbrx",
    ((("split", _GPT_4O), ("bytes", False)), False): "gpt-4o",
    ((("split", _SEED), ("bytes", False)), False): "seed-coder",
    ((("split", _QWEN2), ("bytes", False)), False): "qwen2",
    ((("split", _TEKKEN), ("bytes", False)), True): "tekken",
}
# Qwen's tokenizer applies NFC before splitting. llama.cpp does not, for any GGUF of these models: text with
# decomposed accents gets other tokens of the same bytes.
_COMPOSING = "qwen2"


def byte_level_name(normalizer: Any, pre_tokenizer: Any, *, ignore_merges: bool) -> str | None:
    """llama.cpp's name of a byte-level pre-tokenizer; None if llama.cpp has no equivalent.

    The arguments are unchecked members of a tokenizer.json.
    """
    steps = _steps(pre_tokenizer)
    if steps is None:
        return None
    name = _BYTE_LEVEL.get((steps, ignore_merges))
    composes = isinstance(normalizer, dict) and normalizer.get("type") == "NFC"
    return name if normalizer is None or (composes and name == _COMPOSING) else None


def _steps(value: Any) -> tuple[_Step, ...] | None:
    sequence = isinstance(value, dict) and value.get("type") == "Sequence"
    value = value.get("pretokenizers") if sequence else [value]
    if not isinstance(value, list):
        return None
    found = [_step(each) for each in value]
    steps = tuple(step for step in found if step is not None)
    return steps if len(steps) == len(found) else None


def _step(value: Any) -> _Step | None:
    if not isinstance(value, dict):
        return None
    match value.get("type"):
        case "ByteLevel" if value.get("add_prefix_space") is False:
            return ("bytes", value.get("use_regex") is not False)
        case "Digits" if value.get("individual_digits") is True:
            return ("digits",)
        # Without the text between matches, of which there is none, matches are all that is left.
        case "Split" if (value.get("behavior"), value.get("invert")) in (("Isolated", False), ("Removed", True)):
            pattern = value.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            # Some files hold the ends of lines themselves, others their escapes.
            return ("split", regex.replace("\r", r"\r").replace("\n", r"\n")) if isinstance(regex, str) else None
    return None


def sentencepiece_prefix(normalizer: Any, pre_tokenizer: Any) -> bool | None:
    """Whether a SentencePiece-like tokenizer adds a space before text; None if llama.cpp has no equivalent.

    The arguments are unchecked members of a tokenizer.json.
    """
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    # gemma's split has no effect: the replacement has removed all spaces.
    no_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if pre_tokenizer is None or pre_tokenizer == no_split:
        if normalizer in (replaces, {"type": "Sequence", "normalizers": [replaces]}):
            return False
        return True if normalizer == {"type": "Sequence", "normalizers": [prepends, replaces]} else None
    # The default (split at spaces) would allow no token with two spaces, but SentencePiece has such tokens.
    if normalizer is not None or not isinstance(pre_tokenizer, dict) or pre_tokenizer.get("split") is not False:
        return None
    if pre_tokenizer.get("type") != "Metaspace" or pre_tokenizer.get("replacement") != SPACE:
        return None
    return {"always": True, "first": True, "never": False}.get(str(pre_tokenizer.get("prepend_scheme")))
