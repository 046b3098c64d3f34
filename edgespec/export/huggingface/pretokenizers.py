"""Finds llama.cpp's name of the pre-tokenizer in a tokenizer.json.

A GGUF stores only the name. By it edgespec splits text exactly as the tokenizer.json does, and llama.cpp almost
(``text/tokenizers/word_splits.py``). A structure that is not exactly one of the known ones is refused: with a wrong
name some texts would silently get other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from edgespec.text.tokenizers.word_splits import WORD_SPLITS

SPACE = "▁"  # SentencePiece's character for a space

# One step of a pre-tokenizer: ("split", regex), ("digits",), or ("bytes", whether GPT-2's regex splits first).
_Step: TypeAlias = tuple[str, str | bool] | tuple[str]

# llama.cpp's name, by the steps and by whether whole words in the vocabulary skip the merges (ignore_merges).
_BYTE_LEVEL: Mapping[tuple[tuple[_Step, ...], bool], str] = {
    ((("bytes", True),), False): "gpt-2",
    ((("digits",), ("bytes", True)), False): "smollm",
    **{
        ((("split", WORD_SPLITS[name].patterns[0]), ("bytes", False)), WORD_SPLITS[name].whole_words): name
        for name in ("llama-bpe", "dbrx", "gpt-4o", "seed-coder", "qwen2", "tekken")
    },
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
