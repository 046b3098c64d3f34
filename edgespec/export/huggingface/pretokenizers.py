"""Which of llama.cpp's pre-tokenizers a tokenizer.json splits text like, told by its structure.

A GGUF holds no rules but a name, behind which llama.cpp has regular expressions of its own. A structure that is not
exactly one of those below is refused: another name would give other tokens, now and then, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

SPACE = "▁"  # what SentencePiece writes a space as

# One step of a pre-tokenizer: ("split", regex), ("digits",), or ("bytes", whether GPT-2's own regex splits first).
_Step: TypeAlias = tuple[str, str | bool] | tuple[str]

# The expressions of the published tokenizers; those of Llama 3 and Qwen 2 differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_LETTER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_NO_LETTER}{_UPPER}*{_LOWER}+|{_NO_LETTER}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# llama.cpp's name, by the steps and by whether words that are tokens as they stand skip the merges.
_BYTE_LEVEL: Mapping[tuple[tuple[_Step, ...], bool], str] = {
    ((("bytes", True),), False): "gpt-2",
    ((("digits",), ("bytes", True)), False): "smollm",
    ((("split", _LLAMA3), ("bytes", False)), True): "llama-bpe",
    ((("split", _QWEN2), ("bytes", False)), False): "qwen2",
    ((("split", _TEKKEN), ("bytes", False)), True): "tekken",
}
# Qwen composes characters (NFC) before it splits. llama.cpp does not, here or for any GGUF of these models: text with
# decomposed accents gets other tokens, which mean the same bytes.
_COMPOSING = "qwen2"


def byte_level_name(normalizer: Any, pre_tokenizer: Any, *, ignore_merges: bool) -> str | None:
    """llama.cpp's name for a pre-tokenizer over bytes; None if it has none for this structure.

    The arguments are members of a tokenizer.json as they are, of which nothing is checked yet.
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
        case "Split" if value.get("behavior") == "Isolated" and value.get("invert") is False:
            pattern = value.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            return ("split", regex) if isinstance(regex, str) else None
    return None


def sentencepiece_prefix(normalizer: Any, pre_tokenizer: Any) -> bool | None:
    """Whether a SentencePiece-like tokenizer puts a space before text; None if llama.cpp has nothing like it.

    The arguments are members of a tokenizer.json as they are, of which nothing is checked yet.
    """
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    # gemma's, without effect: after the replacement there is no space left to split at.
    no_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if pre_tokenizer is None or pre_tokenizer == no_split:
        if normalizer in (replaces, {"type": "Sequence", "normalizers": [replaces]}):
            return False
        return True if normalizer == {"type": "Sequence", "normalizers": [prepends, replaces]} else None
    # With its default, to split at spaces, no token could hold two of them; SentencePiece knows such tokens.
    if normalizer is not None or not isinstance(pre_tokenizer, dict) or pre_tokenizer.get("split") is not False:
        return None
    if pre_tokenizer.get("type") != "Metaspace" or pre_tokenizer.get("replacement") != SPACE:
        return None
    return {"always": True, "first": True, "never": False}.get(str(pre_tokenizer.get("prepend_scheme")))
