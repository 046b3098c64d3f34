"""How text is cut into words before BPE merges inside each word, by the pre-tokenizer name in a GGUF.

``tokenizer.ggml.pre`` holds llama.cpp's name. The patterns of a split are applied one after another: each cuts the
pieces that the previous ones left, and unmatched text stays whole. The patterns are those of the models' own
tokenizers. llama.cpp cuts otherwise at two places. Its "tekken" and "gpt-4o" know no marks and only Latin capitals,
so that it cuts within words of Hindi, Thai or decomposed accents. And it takes "'ſ" before a letter for no ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED_WORD, _UNMARKED_SIGNS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Letters without case and marks are both.
_CAPITALS, _SMALLS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+"
_CAPITAL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*"
_SIGNS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True, slots=True)
class WordSplit:
    """``whole_words``: a word that is a token becomes this token, without merges. ``adds_bos``: raw text begins with
    a begin-of-sequence token unless the file says otherwise. ``has_bos``: there is one even if the file names none.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    has_bos: bool = True


_QWEN_2 = WordSplit((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",))
_QWEN_3_5 = WordSplit((rf"{_CONTRACTIONS}|{_MARKED_WORD}|\p{{N}}|{_UNMARKED_SIGNS}|{_BLANKS}",))
_LLAMA_3 = WordSplit(
    (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}",), whole_words=True, adds_bos=True
)
_DBRX = WordSplit(_LLAMA_3.patterns)
_CHATGLM = WordSplit(_LLAMA_3.patterns, has_bos=False)
_GLM_4 = WordSplit(_LLAMA_3.patterns, whole_words=True, has_bos=False)
_SEED = WordSplit((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",))
_TEKKEN = WordSplit(
    (rf"{_SMALL_WORD}|{_CAPITAL_WORD}|\p{{N}}|{_SIGNS_AND_SLASH}|{_BLANKS}",), whole_words=True, adds_bos=True
)
_GPT_4O = WordSplit((
    rf"{_SMALL_WORD}{_CONTRACTIONS}?|{_CAPITAL_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASH}|{_BLANKS}",
))  # fmt: skip
_DIGITS_APART = WordSplit((r"\p{N}", _GPT_2))

WORD_SPLITS: Mapping[str, WordSplit] = {
    "gpt-2": WordSplit((_GPT_2,)),
    "phi-2": WordSplit((_GPT_2,)),
    "mpt": WordSplit((_GPT_2,)),
    "olmo": WordSplit((_GPT_2,)),
    "exaone4": WordSplit((_GPT_2,)),
    "mellum": WordSplit((_GPT_2,)),
    "a.x-4.0": WordSplit((_GPT_2,)),
    "gigachat": WordSplit((_GPT_2,)),
    "smollm": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "stablelm2": _QWEN_2,
    "megrez": _QWEN_2,
    "kormo": _QWEN_2,
    "f2llmv2": _QWEN_2,
    "qwen35": _QWEN_3_5,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "midm-2.0": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "jina-v5-nano": _LLAMA_3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "chatglm-bpe": _CHATGLM,
    "glm4": _GLM_4,
    "seed-coder": _SEED,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "kanana2": _GPT_4O,
    "talkie": _GPT_4O,
}
