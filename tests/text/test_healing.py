"""What is taken back of a prompt that ends inside a token, and which tokens may spell it again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgespec.files.gguf.header import read_header
from edgespec.interfaces.drawing import are_allowed
from edgespec.text.conversation.healing import MOST_BYTES, MOST_TOKENS, Healing, healing
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from edgespec.text.tokenizers.spellings import Spellings
from edgespec.text.tokenizers.tokenizer import Tokenizer
from tests.support.foreign_vocabularies import as_byte_pairs
from tests.support.listed_tokens import ListedTokens
from tests.support.tiny_gguf import write_tiny_gguf

# Equal texts, halves of a character, texts that begin others, a token without a text, and none for "c".
TEXTS = [b"a", b"b", b"ab", b"abb", b"ba", b"a", b"\xc3", b"\xa9", b"\xc3\xa9", b"", b"bc", b"\xa9b", b"aabb"]
LISTED = ListedTokens(TEXTS)
SPELLINGS = Spellings(LISTED, len(TEXTS))
CONTROL = TEXTS.index(b"")


def allowed(own: Healing, spelled: int) -> set[int]:
    mask = own.mask(spelled)
    assert mask is not None
    return set(np.flatnonzero(are_allowed(mask, np.arange(32))).tolist())


def spells(text: bytes, banned: frozenset[int] = frozenset()) -> bool:
    """Whether tokens spell the text, of which the last may be longer."""
    return not text or bool(ways(text, banned))


def ways(text: bytes, banned: frozenset[int] = frozenset()) -> set[int]:
    """The tokens that spell more of the text, by trying all."""
    return {
        token
        for token, own in enumerate(TEXTS)
        if own and token not in banned
        and (own.startswith(text) or (text.startswith(own) and spells(text[len(own) :], banned)))
    }  # fmt: skip


@pytest.mark.parametrize("banned", [frozenset(), frozenset([0, 5]), frozenset([1, 11])], ids=str)
def test_those_tokens_are_allowed_that_lead_to_the_text_and_no_others(banned: frozenset[int]) -> None:
    for length in range(1, 5):
        for letters in product(b"ab\xc3\xa9", repeat=length):
            text = bytes(letters)
            own = Healing(text, 1, SPELLINGS, banned)
            assert own.is_possible == spells(text, banned)
            for spelled in range(length):
                if spells(text[spelled:], banned):
                    assert allowed(own, spelled) == ways(text[spelled:], banned)
            assert own.mask(length) is None


def test_a_token_counts_what_it_spells_and_what_it_has_beyond() -> None:
    own = Healing(b"abb", 1, SPELLINGS)
    assert own.spelled(0, TEXTS.index(b"ab")) == (2, 0)
    assert own.spelled(2, TEXTS.index(b"b")) == (3, 0)
    assert own.spelled(2, TEXTS.index(b"bc")) == (3, 1)


def taken(*texts: bytes, banned: Sequence[int] = ()) -> bytes | None:
    found = healing(LISTED, SPELLINGS, [TEXTS.index(text) for text in texts], banned)
    assert found is None or b"".join(texts[-found.taken :]) == found.text
    return None if found is None else found.text


def test_the_longest_end_that_begins_a_longer_token_is_taken_back() -> None:
    assert taken(b"b", b"b") == b"b", "b begins ba"
    assert taken(b"b", b"a", b"ab") == b"aab", "it begins aabb, although ab alone begins abb"
    assert taken(b"b", b"a") == b"ba"[1:], "ba is a token, and none is longer"
    assert taken(b"b", b"\xc3") == b"\xc3"
    assert taken(b"b", b"\xc3\xa9") is None
    assert taken(b"b", b"bc") is None
    assert taken(b"a", b"\xc3", b"\xa9") == b"\xa9", "the end may be half of a character"


def test_the_first_token_and_control_tokens_stay() -> None:
    assert taken(b"a") is None
    assert taken(b"a", b"a", b"b") == b"aab"[1:], "the first token stays"
    assert taken(b"", b"a", b"a") == b"aa"
    assert taken(b"a", b"") is None
    assert taken(b"b", b"a", b"", b"b") == b"b"
    assert healing(LISTED, SPELLINGS, []) is None


def test_an_end_that_needs_a_banned_token_stays() -> None:
    assert taken(b"b", b"a", banned=[0, 5]) == b"a", "ab, abb and aabb spell it too"
    assert taken(b"b", b"a", banned=[0, 2, 3, 5, 12]) is None


def test_long_ends_and_many_tokens_stay() -> None:
    texts = [b" " * length for length in (1, 4, MOST_BYTES, MOST_BYTES + 1, 2 * MOST_BYTES)]
    tokenizer = ListedTokens(texts)
    spellings = Spellings(tokenizer, len(texts))
    found = healing(tokenizer, spellings, [2, 2])
    assert found is not None
    assert (found.taken, len(found.text)) == (1, MOST_BYTES)
    assert healing(tokenizer, spellings, [2, 3]) is None
    found = healing(tokenizer, spellings, [0] * 9)
    assert found is not None
    assert found.taken == MOST_TOKENS


def test_tokens_without_a_score_spell_nothing() -> None:
    assert Spellings(LISTED, 2).longer(b"a") == []
    assert sorted(Spellings(LISTED, 5).longer(b"a")) == [2, 3]
    assert sorted(SPELLINGS.of(b"a")) == [0, 5]


@pytest.mark.parametrize("kind", ["sentencepiece", "byte pairs", "llama.cpp"])
def test_of_real_vocabularies_the_prompts_tokens_may_spell_every_end(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    if kind == "byte pairs":
        path = as_byte_pairs(path, tmp_path / "pairs.gguf")
    tokenizer: Tokenizer = LlamaTokenizer(path) if kind == "llama.cpp" else GgufTokenizer(read_header(path))
    with closing(tokenizer):
        spellings, healed = Spellings(tokenizer, tokenizer.vocabulary_size), 0
        text = "the people of the world would write café, 世界 🙂 and\n    look at this: wor"
        for end in range(1, len(text) + 1):
            tokens = tokenizer.encode(text[:end], add_bos=True)
            own = healing(tokenizer, spellings, tokens)
            if own is None:
                continue
            healed += 1
            assert b"".join(map(tokenizer.token_bytes, tokens[-own.taken :])) == own.text
            mask = own.mask(0)
            assert mask is not None
            first = tokens[-own.taken]
            assert are_allowed(mask, np.array([first]))[0], "the prompt's own tokens may come again"
            for token in np.flatnonzero(are_allowed(mask, np.arange(tokenizer.vocabulary_size))).tolist():
                own_text = tokenizer.token_bytes(token)
                assert own_text.startswith(own.text) or own.text.startswith(own_text)
                assert own_text
        assert healed > 30
