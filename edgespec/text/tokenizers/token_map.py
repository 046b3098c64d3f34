"""Makes the map between the vocabularies of a target and a drafter, once, from both headers.

Each token is mapped by itself, by the bytes of its text (token-level intersection: Timor et al., 2025): the target's
text is never cut again, so the map of a prefix is the prefix of the map, and the drafter's cache works as with its
own vocabulary. Whatever the map gets wrong only costs guesses: the target checks them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.gguf.vocabulary import vocabulary_digest
from edgespec.files.token_map import TokenMap, read_token_map, write_token_map
from edgespec.interfaces.drawing import IdArray
from edgespec.text.tokenizers.gguf import GgufTokenizer, written
from edgespec.text.tokenizers.vocabulary import Kind, Vocabulary, unsupported

# The least share of the sample's tokens that must be in both vocabularies: a drafter cannot propose the rest. A
# choice; SmolLM2 has 0.95 of Qwen2.5's (docs/results/other-vocabularies.md).
LEAST_COVERAGE = 0.9

# The drafter reads at most the last 32 of its tokens for one token of the target: a piece of a hostile file may
# have thousands, and a forward scores at most 64.
MOST_PIECES = 32

# What the coverage is counted on: prose, a list, code and numbers, as answers have them.
SAMPLE = """Sure! Here is a short summary of the article. The study was carried out by researchers at the University
of Oxford, who found that people sleep better when they walk for at least 30 minutes a day. However, the authors say
that more work is needed, because only 412 of the participants were older than 65.

1. **Plan your week**: decide what you want to do, and write it down.
2. **Start early**: it's easier to change things at the beginning.

```python
def total(prices):
    result = 0
    for price in prices:
        result += price
    return result
```

In this example, the function adds up all prices of a list. To find the total price, we multiply 3 by 24 and add 10:
the answer is 82. If you'd like to know more about this topic, please let me know!
"""

# The tokens that begin a turn of a conversation, by vocabulary.
_TURN_BEGINS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|turn>", "<|start|>")
# The tokens that end a turn, in the order in which they are looked for.
_TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<turn|>", "<|end|>", "<|end_of_text|>", "</s>")


def token_map(target: GgufHeader, drafter: GgufHeader, folder: Path | None) -> TokenMap:
    """The map of two vocabularies, kept in ``folder`` (None: nowhere), which is the drafter's.

    Raises InvalidRequestError if edgespec's own tokenizer does not know one of the vocabularies, and ModelFileError.
    """
    _require_known(target, drafter)
    key = hashlib.sha256(_facts(target) + _facts(drafter) + SAMPLE.encode()).digest()
    path = None if folder is None else folder / f"tokens-{key.hex()[:16]}.map"
    kept = None
    if path is not None:
        kept = read_token_map(path, key, target.vocabulary_size, drafter.vocabulary_size)
    if kept is not None:
        return kept
    made = make_token_map(GgufTokenizer(target), GgufTokenizer(drafter))
    if path is not None:
        write_token_map(path, key, made)
    return made


def _facts(header: GgufHeader) -> bytes:
    """A digest of everything that a map depends on."""
    named = {key: value for key, value in header.metadata.items() if isinstance(value, str | int | bool)}
    kinds = hashlib.sha256(bytes(int(kind) & 0xFF for kind in header.values("tokenizer.ggml.token_type")))
    tokenizer = sorted((key, value) for key, value in named.items() if key.startswith("tokenizer."))
    return vocabulary_digest(header) + hashlib.sha256(kinds.digest() + repr(tokenizer).encode()).digest()


def shared_coverage(target: GgufHeader, drafter: GgufHeader) -> float:
    """The share of the sample's tokens, as the target cuts it, that the drafter has as one token.

    Takes a fraction of the time that a map takes. Raises as ``token_map``.
    """
    _require_known(target, drafter)
    other = Vocabulary(drafter)
    sample = target.once("sample in its tokens", lambda: _sample(GgufTokenizer(target)))
    return _share(sample, lambda piece: written(other, piece) in other.ids)


def _sample(tokenizer: GgufTokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(SAMPLE)]


def _share(pieces: Sequence[bytes], known: Callable[[bytes], bool]) -> float:
    return sum(map(known, pieces)) / max(1, len(pieces))


def _require_known(target: GgufHeader, drafter: GgufHeader) -> None:
    for header, who in ((target, "the target's vocabulary"), (drafter, "its own")):
        if (reason := unsupported(header)) is not None:
            raise InvalidRequestError(f"it cannot be translated, because edgespec does not read {who}: {reason}")


@dataclass(slots=True)
class _Side:
    """One vocabulary: its tokens by the bytes of their text, and the bytes of each (empty: it has no text)."""

    tokenizer: GgufTokenizer
    texts: list[bytes] = field(default_factory=list)
    by_bytes: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: GgufTokenizer) -> _Side:
        size, kinds = tokenizer.vocabulary_size, tokenizer.vocabulary.kinds
        texts = [tokenizer.token_bytes(token) for token in range(size)]
        by_bytes: dict[bytes, int] = {}
        # A byte's own token stands for a text that no other token has; of equal texts the first counts.
        for bytes_too in (False, True):
            for token, text in enumerate(texts):
                if text and (kinds[token] == Kind.BYTE) == bytes_too:
                    by_bytes.setdefault(text, token)
        return cls(tokenizer, texts, by_bytes)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary

    def longest_number(self) -> int:
        """The most digits of a number that is one token, of three at most."""
        return max((len(text) for text in self.by_bytes if text.isdigit() and len(text) <= 3), default=0)

    def roles(self) -> Iterator[tuple[str, int]]:
        """The tokens that a conversation and a prompt with a hole are marked with, by what they do."""
        vocabulary, ids = self.vocabulary, self.vocabulary.ids
        named = [("begin", vocabulary.bos), ("end", vocabulary.eos)]
        turn = [("turn", next((ids[text] for text in _TURN_BEGINS if text in ids), None))]
        turn += [("turn end", next((ids[text] for text in _TURN_ENDS if ids.get(text) in vocabulary.stop_ids), None))]
        hole = vocabulary.fill_in
        if hole is not None:
            names = ("prefix", "suffix", "middle", "repository", "file")
            turn += [(name, getattr(hole, name)) for name in names]
        for role, token in [*turn, *named]:
            if token is not None and not self.texts[token]:
                yield role, token


def make_token_map(target: GgufTokenizer, drafter: GgufTokenizer) -> TokenMap:
    """The map of two vocabularies. Raises InvalidRequestError for a token's text that cannot be cut."""
    own, other = _Side.of(target), _Side.of(drafter)
    pairs = {token: other.by_bytes[text] for text, token in own.by_bytes.items() if text in other.by_bytes}
    shared = {piece: own.texts[token] for token, piece in pairs.items()}
    pairs |= _controls(own, other)
    pieces = _spelled(own, other, pairs)
    starts = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
    longer = own.longest_number() > other.longest_number()
    guessed = [token for token in pairs if not (longer and own.texts[token].isdigit())]
    tokens = np.array(sorted(guessed), dtype=np.int64)
    rows = np.array([pairs[token] for token in tokens.tolist()], dtype=np.int64)
    return TokenMap(
        starts=starts,
        pieces=np.array([piece for one in pieces for piece in one], dtype=np.int32),
        tokens=tokens,
        rows=rows,
        firsts=_firsts(own, other, tokens, rows, longer=longer),
        coverage=_share(_sample(target), set(shared.values()).__contains__),
    )


def _controls(own: _Side, other: _Side) -> dict[int, int]:
    """Control tokens of the target, and the drafter's with the same text, or else the same role."""
    ids = other.vocabulary.ids
    found: dict[int, int] = {}
    for text, token in own.vocabulary.ids.items():  # of equal texts the first counts
        same = ids.get(text)
        if not own.texts[token] and same is not None and not other.texts[same]:
            found[token] = same
    roles, taken = dict(other.roles()), set(found.values())
    for role, token in own.roles():
        if token not in found and (piece := roles.get(role)) is not None and piece not in taken:
            found[token] = piece
            taken.add(piece)
    return found


def _spelled(own: _Side, other: _Side, pairs: dict[int, int]) -> list[list[int]]:
    """The drafter's tokens for each token of the target. A control token that it lacks is spelled as text."""
    texts = own.vocabulary.texts
    lacking = [token for token in range(len(texts)) if token not in pairs]
    spelled = other.tokenizer.spell([own.texts[token] or texts[token].encode() for token in lacking])
    nothing = [other.vocabulary.eos or 0]  # a drafter that lacks bytes reads its own end there
    pieces = [[pairs.get(token, 0)] for token in range(len(texts))]
    for token, found in zip(lacking, spelled, strict=True):
        pieces[token] = found[-MOST_PIECES:] or nothing
    return pieces


def _firsts(own: _Side, other: _Side, tokens: IdArray, rows: IdArray, *, longer: bool) -> NDArray[np.int32]:
    """The target's first token of each of the drafter's tokens, int32; -1 where none may be guessed.

    ``longer``: the target has longer numbers as one token than the drafter, whose numbers are then no guesses.
    """
    firsts = np.full(len(other.texts), -1, dtype=np.int32)
    firsts[rows] = tokens
    lacking = [
        token
        for token, text in enumerate(other.texts)
        if text and text not in own.by_bytes and not (longer and text.isdigit())
    ]
    spelled = own.tokenizer.spell([other.texts[token] for token in lacking])
    for token, found in zip(lacking, spelled, strict=True):
        if found:
            firsts[token] = found[0]
    return firsts
