"""A GGUF's vocabulary: texts and kinds of its tokens, which of them end an answer, and which are never shown.

llama.cpp is the reference. Where a file leaves something open, llama.cpp decides by the texts of tokens; the tables
here state the same facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from edgespec.errors import ModelFileError
from edgespec.files.gguf.records import GgufHeader
from edgespec.text.tokenizers.tokenizer import ControlToken, FillInTokens
from edgespec.text.tokenizers.word_splits import WORD_SPLITS

BPE, SENTENCEPIECE, GEMMA_4 = "gpt2", "llama", "gemma4"  # tokenizer.ggml.model


class Kind(IntEnum):
    """tokenizer.ggml.token_type: llama.h's LLAMA_TOKEN_TYPE_*."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end an answer in any vocabulary that has them as more than ordinary text.
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<start_function_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
# Fill-in-the-middle tokens, by the metadata key that may name a different token. Where a vocabulary has the first
# three, all of them are marks, even if the file calls them text, as Qwen2.5's files do.
_FILL_IN = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_FILL_IN_TEXTS = frozenset(text for texts in _FILL_IN.values() for text in texts)
_FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_OLDER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# gpt-oss marks its channels with these tokens; they are shown.
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
# Tokens that a template writes as marks of turns, and that may be shown.
MARKS = (*sorted(_SHOWN), "<|end|>")

BYTE_TOKEN = "<0x%02X>"

# Of those that a file lists; models have up to ten.
_MOST_ENDS = 64

# Default begin- and end-of-sequence ids.
_DEFAULT_ENDS = {BPE: (11, 11), SENTENCEPIECE: (1, 2), GEMMA_4: (None, None)}

# In Phi-3 every special token strips the blanks after it, except these. The file does not say so.
PHI_3 = re.compile("phi-?3", re.IGNORECASE)
PHI_3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def unsupported(header: GgufHeader) -> str | None:
    """Why our tokenizer does not support this vocabulary, in a few words; None if it does."""
    model, split = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if model == SENTENCEPIECE:
        return None if "tokenizer.ggml.scores" in header.metadata else "its pieces have no scores"
    if model not in (BPE, GEMMA_4):
        return f"its tokenizer is {model!r}"
    if "tokenizer.ggml.merges" not in header.metadata:
        return "it has no merges"
    return None if split in WORD_SPLITS or model == GEMMA_4 else f"its pre-tokenizer is {split!r}"


def suppressed(header: GgufHeader, size: int) -> frozenset[int]:
    """The tokens, of ``size``, that are never drawn, as a file made from generation_config.json lists them."""
    return _listed(header, "suppress_tokens", size, size)


def further_tokens(header: GgufHeader, size: int) -> dict[str, int]:
    """The tokens, of ``size``, for unknown text and for padding that a file states, by their names in templates."""
    named = {"unk_token": "unknown", "pad_token": "padding"}
    stated = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return {name: token for name, token in stated.items() if type(token) is int and 0 <= token < size}


def _listed(header: GgufHeader, name: str, size: int, most: int) -> frozenset[int]:
    """The tokens, of ``size``, among the first ``most`` that a file lists under this name."""
    listed = islice(header.values(f"tokenizer.ggml.{name}"), most)
    return frozenset(token for token in listed if type(token) is int and 0 <= token < size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """A token that is matched before words; ``is_control``: only if control tokens are requested."""

    token: int
    text: str
    is_control: bool
    strips_right: bool


class StatedKinds:
    """The ``kinds`` of a file's tokens as the file states them; none if it does not.

    ``ends`` are those that it lists as ends, as Ollama's converter does of generation_config.json. ``fills_in``:
    whether the vocabulary has a prefix, a suffix and a middle token.
    """

    def __init__(self, header: GgufHeader, size: int, *, fills_in: bool) -> None:
        """``size`` is the number of tokens."""
        self.kinds = [int(kind) for kind in header.values("tokenizer.ggml.token_type")]
        self._fills_in = fills_in
        ends = ("eos", "eot", "eom", *_FILL_IN_ENDS)
        self.ends = _listed(header, "eos_token_ids", size, _MOST_ENDS)
        self._ends = {header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ends} | self.ends
        self._templates = "\n".join([header.chat_template or "", *header.named_templates.values()])

    def is_text(self, token: int, text: str) -> bool:
        """Whether the file calls a token ordinary text, whatever its text looks like.

        ``</s>`` is a tag of HTML in the vocabularies of Gemma and Qwen. A token that the file names as an end is one,
        and so is a token that a chat template writes (Gemma 4's ``<|tool_response>``).
        """
        kind = self.kinds[token] if self.kinds else Kind.UNDEFINED
        if kind not in (Kind.NORMAL, Kind.USER_DEFINED) or token in self._ends or text in self._templates:
            return False
        return not (self._fills_in and text in _FILL_IN_TEXTS)


class Vocabulary:
    """The tokens of a file. Raises ModelFileError if they contradict each other.

    ``texts`` are spelled as in the file: BPE with a letter for each byte, the others with ▁ for a blank
    (``has_blanks``). ``ids`` are the ids by text. ``specials`` are in matching order, longest first; ``controls`` are
    the control tokens among them, and ``marks`` shown ones. ``split`` is how text is cut into words, for BPE only.
    ``adds_bos``: the model expects a begin-of-sequence token before raw text. ``adds_blank``: SentencePiece
    prepends a blank to the text. ``fill_in``: the tokens of a prompt with a hole, if the model has them.
    """

    def __init__(self, header: GgufHeader) -> None:
        _ = header.vocabulary_size  # raises if the file has no vocabulary
        self._header = header
        self.model = str(header.metadata["tokenizer.ggml.model"])
        self.has_blanks = self.model != BPE
        self.texts = [
            text or f"[EMPTY_{token}]" for token, text in enumerate(strings(header, "tokenizer.ggml.tokens"))
        ]
        self.ids = {text: token for token, text in enumerate(self.texts)}
        if len(self.ids) != len(self.texts) and self.model == GEMMA_4:  # Google's own files have three texts twice
            self.ids = {text: token for token, text in reversed([*enumerate(self.texts)])}  # text becomes the first
        elif len(self.ids) != len(self.texts):
            twice = next(token for token, text in enumerate(self.texts) if self.ids[text] != token)
            raise ModelFileError(header.path, f"tokens {twice} and {self.ids[self.texts[twice]]} have the same text")
        stated = StatedKinds(header, len(self.texts), fills_in=all(map(self._has_fill_in, _OLDER_KEYS)))
        self.kinds: list[int] = list(stated.kinds) or [Kind.NORMAL] * len(self.texts)
        if self.model == GEMMA_4:  # Ollama's converter calls its byte tokens ordinary text
            for name in (BYTE_TOKEN % byte for byte in range(256)):
                if name in self.ids:
                    self.kinds[self.ids[name]] = Kind.BYTE
        self.split = WORD_SPLITS.get(str(header.metadata.get("tokenizer.ggml.pre"))) if self.model == BPE else None
        bos, eos = _DEFAULT_ENDS[self.model]
        self.bos = self._token_named("bos", bos if self.split is None or self.split.has_bos else None)
        self.eos = self._token_named("eos", eos)
        self._fill_in = dict[str, int | None]()
        self.stop_ids = self._find_stops(stated)
        self.suppressed = suppressed(header, len(self.texts))
        self.further = further_tokens(header, len(self.texts))
        shown = {self.ids[text]: text for text in MARKS if text in self.ids}
        self.marks = {
            token: ControlToken(text=text)
            for token, text in shown.items()
            if self.kinds[token] == Kind.USER_DEFINED and not stated.is_text(token, text)
        }
        usual = self.split is None or self.split.adds_bos
        # llama.cpp adds Gemma 4's whatever the file says.
        self.adds_bos = self.bos is not None and (self.model == GEMMA_4 or self._flag("add_bos_token", usual))
        self.adds_blank = self.model == SENTENCEPIECE and self._flag("add_space_prefix", True)
        self.specials = self._find_specials()
        self.controls = {
            special.token: ControlToken(text=special.text, strips_right=special.strips_right)
            for special in self.specials
            if special.is_control
        }

    def _flag(self, name: str, usual: bool) -> bool:
        stated = self._header.metadata.get(f"tokenizer.ggml.{name}")
        return stated if isinstance(stated, bool) else usual

    def _find_specials(self) -> tuple[Special, ...]:
        kinds = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
        found = [token for token, kind in enumerate(self.kinds) if kind in kinds]
        found.sort(key=lambda token: -len(self.texts[token].encode()))
        name = self._header.metadata.get("general.name")
        strips = isinstance(name, str) and PHI_3.search(name) is not None
        return tuple(
            Special(
                token=token,
                text=self.texts[token],
                is_control=self.kinds[token] != Kind.USER_DEFINED,
                strips_right=strips and self.texts[token] not in PHI_3_KEEPS,
            )
            for token in found
        )

    def _token_named(self, name: str, default: int | None = None) -> int | None:
        """The token id under this name in the file's metadata, if valid; else ``default``."""
        stated = self._header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for token in (stated, default):
            if isinstance(token, int) and 0 <= token < len(self.texts):
                return token
        return None

    def _find_stops(self, stated: StatedKinds) -> frozenset[int]:
        """The ids that end an answer. Also sets the kinds of tokens with a well-known text."""

        def marks(texts: Iterable[str]) -> list[int]:
            found = [self.ids[text] for text in texts if text in self.ids]
            return [token for token in found if not stated.is_text(token, self.texts[token])]

        stops = set(marks(ENDS))
        for name, texts in _FILL_IN.items():
            token = self._stated_fill_in(name)
            if token is None:
                for token in marks(texts):
                    self.kinds[token] = Kind.CONTROL
            self._fill_in[name] = token
            if token is not None and name in _FILL_IN_ENDS:
                stops.add(token)
        for token in stops - {self._token_named(name) for name in _FILL_IN_ENDS}:
            self.kinds[token] = Kind.CONTROL
        for token in (self.ids[text] for text in _SHOWN if text in self.ids):
            self.kinds[token] = Kind.USER_DEFINED
        # The default eos may be a comma.
        named = (self.eos, self._token_named("eot"), self._token_named("eom"), *stated.ends)
        stops.update(token for token in named if token is not None and not stated.is_text(token, self.texts[token]))
        self._take_back(stops)
        return frozenset(stops)

    @property
    def fill_in(self) -> FillInTokens | None:
        own = self._fill_in
        prefix, suffix, middle = (own[name] for name in _OLDER_KEYS)
        if prefix is None or suffix is None or middle is None:
            return None
        return FillInTokens(
            prefix=prefix, suffix=suffix, middle=middle, repository=own["fim_rep"], file=own["fim_sep"]
        )

    def _has_fill_in(self, name: str) -> bool:
        return self._stated_fill_in(name) is not None or any(text in self.ids for text in _FILL_IN[name])

    def _stated_fill_in(self, name: str) -> int | None:
        token = self._token_named(name)
        return self._token_named(_OLDER_KEYS[name]) if token is None and name in _OLDER_KEYS else token

    def _take_back(self, stops: set[int]) -> None:
        """Remove tokens that look like an end and are not one in this vocabulary."""

        def ends(text: str) -> bool:
            return self.ids.get(text) in stops

        calls = ends("<|call|>") or ends("<|calls|>")
        if ends("<|end|>") and calls and (ends("<|return|>") or ends("<|flush|>")):
            stops.remove(self.ids["<|end|>"])
            self.kinds[self.ids["<|end|>"]] = Kind.USER_DEFINED
        if ends("</s>") and ends("<|tool_response>"):
            stops.remove(self.ids["</s>"])
            self.kinds[self.ids["</s>"]] = Kind.NORMAL


def strings(header: GgufHeader, key: str) -> Iterator[str]:
    """A table's texts, with bytes that are not UTF-8 as ``\\xNN``."""
    return map(str, header.values(key))


def scores(header: GgufHeader) -> list[float]:
    """Each token's score: a higher score is merged first."""
    return [float(score) for score in header.values("tokenizer.ggml.scores")]
