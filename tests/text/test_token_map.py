"""The map between two vocabularies: which tokens are one in both, how the others are spelled, and hostile files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.token_map import TokenMap, read_token_map
from edgespec.text.tokenizers import token_map as making
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.token_map import LEAST_COVERAGE, MOST_PIECES, shared_coverage, token_map
from tests.support.foreign_vocabularies import as_byte_pairs, in_another_order
from tests.support.tiny_models import TinyModels
from tests.support.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, byte_letters, write_vocabulary

LETTERS = [(letter, NORMAL) for letter in byte_letters()]
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
ENDS = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]


def tokenizer(path: Path) -> GgufTokenizer:
    return GgufTokenizer(read_header(path))


def made(target: Path, drafter: Path, folder: Path | None = None) -> TokenMap:
    return token_map(read_header(target), read_header(drafter), folder)


def pairs(tokens: TokenMap) -> dict[int, int]:
    return dict(zip(tokens.tokens.tolist(), tokens.rows.tolist(), strict=True))


def byte_pairs(path: Path, *more: tuple[str, int], **settings: object) -> Path:
    return write_vocabulary(path, [*LETTERS, ("ab", NORMAL), *more, *ENDS], **settings)  # type: ignore[arg-type]


FOREIGN: dict[str, Callable[[Path, Path], Path]] = {
    "another order": in_another_order,
    "fewer words": lambda source, path: in_another_order(source, path, keep=lambda text: len(text) < 5),
    "byte pairs": as_byte_pairs,
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_each_token_is_spelled_with_the_same_bytes(
    tiny: TinyModels, tmp_path: Path, kind: str, swapped: bool
) -> None:
    paths = [tiny.target, FOREIGN[kind](tiny.target, tmp_path / "foreign.gguf")]
    target, drafter = reversed(paths) if swapped else paths
    own, other, tokens = tokenizer(target), tokenizer(drafter), made(target, drafter)
    assert tokens.vocabulary_size == own.vocabulary_size
    for token in range(own.vocabulary_size):
        spelled = tokens.spelled(token)
        assert spelled, "every token is at least one"
        if own.token_bytes(token):
            assert b"".join(map(other.token_bytes, spelled)) == own.token_bytes(token)
    assert (np.diff(tokens.tokens) > 0).all()
    assert len(set(tokens.rows.tolist())) == len(tokens.rows), "each of the drafter's tokens stands for one"
    for token, row in pairs(tokens).items():
        assert tokens.spelled(token) == [row]
        assert tokens.firsts[row] == token
    for row, first in enumerate(tokens.firsts.tolist()):
        if first >= 0 and other.token_bytes(row):
            assert other.token_bytes(row).startswith(own.token_bytes(first))
    assert tokens.coverage >= LEAST_COVERAGE
    known = shared_coverage(read_header(target), read_header(drafter))
    assert known == pytest.approx(tokens.coverage)


def test_control_tokens_are_mapped_by_text_and_else_by_role(tmp_path: Path) -> None:
    target = byte_pairs(tmp_path / "a.gguf", ("<|im_other|>", CONTROL), ids={"bos": 258, "eos": 259})
    gemma = [("<pad>", CONTROL), ("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), *BYTES, ("\u2581", NORMAL)]
    drafter = write_vocabulary(tmp_path / "b.gguf", gemma, model="llama", ids={"bos": 0, "eos": 2})
    tokens, own = made(target, drafter), tokenizer(target).vocabulary.ids
    assert tokens.spelled(own["<|im_start|>"]) == [1]
    assert tokens.spelled(own["<|im_end|>"]) == [2]
    other = tokenizer(drafter)
    spelled = tokens.spelled(own["<|im_other|>"])
    assert b"".join(map(other.token_bytes, spelled)) == b"<|im_other|>", "as text, which is not control"
    assert pairs(tokens)[own["<|im_end|>"]] == 2, "the drafter can end the answer"


def test_a_text_that_is_a_control_token_in_one_vocabulary_only_is_not_the_same(tmp_path: Path) -> None:
    plain = byte_pairs(tmp_path / "plain.gguf", ("<|endoftext|>", NORMAL), ("</s>", NORMAL))
    marked = byte_pairs(tmp_path / "marked.gguf", ("<|endoftext|>", CONTROL), ("</s>", CONTROL))
    for target, drafter in ((plain, marked), (marked, plain)):
        tokens, own, other = made(target, drafter), tokenizer(target), tokenizer(drafter)
        for text in ("<|endoftext|>", "</s>"):
            token, row = own.vocabulary.ids[text], other.vocabulary.ids[text]
            assert (own.token_bytes(token) == b"") != (other.token_bytes(row) == b"")
            assert token not in pairs(tokens)
            assert row not in tokens.spelled(token)


def test_of_tokens_with_equal_bytes_one_counts(tmp_path: Path) -> None:
    twice = [("<unk>", UNKNOWN), *BYTES, ("a", NORMAL), ("b", NORMAL), ("\u2581", NORMAL), *ENDS]
    target = write_vocabulary(tmp_path / "a.gguf", twice, model="llama")
    drafter = byte_pairs(tmp_path / "b.gguf")
    tokens, own = made(target, drafter), tokenizer(target).vocabulary.ids
    letter = tokenizer(drafter).vocabulary.ids["a"]
    assert pairs(tokens)[own["a"]] == letter
    assert own["<0x61>"] not in pairs(tokens), "the word, not the byte"
    assert tokens.spelled(own["<0x61>"]) == [letter]


def test_of_control_tokens_with_equal_texts_the_first_counts(tmp_path: Path) -> None:
    """Only Gemma 4's vocabulary may have some."""
    letters = [(text, NORMAL) for text in ("a", "b", "ab", "\u2581")]
    twice = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), *BYTES, *letters, ("<eos>", CONTROL)]
    target = write_vocabulary(tmp_path / "a.gguf", twice, model="gemma4", pre="default", ids={"eos": 1, "bos": 2})
    drafter = byte_pairs(tmp_path / "b.gguf", ("<eos>", CONTROL))
    tokens, row = made(target, drafter), tokenizer(drafter).vocabulary.ids["<eos>"]
    assert [token for token, own in pairs(tokens).items() if own == row] == [1]
    assert tokens.firsts[row] == 1


def test_a_number_in_longer_groups_is_read_but_never_guessed(tmp_path: Path) -> None:
    groups = [(str(number), NORMAL) for number in range(10, 1000)]
    merges = [f"{text[:-1]} {text[-1]}" for text, _ in groups]
    grouped = byte_pairs(tmp_path / "grouped.gguf", *groups, merges=merges, pre="llama-bpe")
    single = byte_pairs(tmp_path / "single.gguf")
    own, other = tokenizer(grouped).vocabulary.ids, tokenizer(single).vocabulary.ids
    tokens = made(grouped, single)
    assert tokens.spelled(own["123"]) == [other["1"], other["2"], other["3"]]
    assert tokens.spelled(own["7"]) == [other["7"]]
    assert own["7"] not in pairs(tokens)
    assert tokens.firsts[other["7"]] == -1
    back = made(single, grouped)
    assert back.firsts[own["123"]] == other["1"], "the first digit, where the target has them one by one"


def test_bytes_that_are_not_utf8_and_long_pieces_are_spelled(tmp_path: Path) -> None:
    letters = byte_letters()
    half = "".join(letters[byte] for byte in b"\xf0\x9f\x98")
    long = "".join(random.Random(1).choices("abcdefgh", k=10_000))
    target = byte_pairs(tmp_path / "a.gguf", (half, NORMAL), (long, NORMAL), ("[PAD1]", UNUSED))
    pieces = [("<unk>", UNKNOWN), *BYTES, *((letter, NORMAL) for letter in "abcdefgh"), ("\u2581", NORMAL), *ENDS]
    drafter = write_vocabulary(tmp_path / "b.gguf", pieces, model="llama")
    tokens, own, other = made(target, drafter), tokenizer(target).vocabulary.ids, tokenizer(drafter)
    assert b"".join(map(other.token_bytes, tokens.spelled(own[half]))) == b"\xf0\x9f\x98"
    spelled = tokens.spelled(own[long])
    assert len(spelled) == MOST_PIECES
    assert b"".join(map(other.token_bytes, spelled)).decode() == long[-MOST_PIECES:]
    assert tokens.spelled(own["[PAD1]"])


def test_a_drafter_that_lacks_bytes_reads_something(tmp_path: Path) -> None:
    drafter = write_vocabulary(
        tmp_path / "b.gguf", [("a", NORMAL), ("b", NORMAL), ("ab", NORMAL), *ENDS], ids={"eos": 4}
    )
    target = byte_pairs(tmp_path / "a.gguf")
    tokens = made(target, drafter)
    assert tokens.spelled(tokenizer(target).vocabulary.ids["z"]) == [4]
    assert tokens.coverage < 0.1


def test_a_token_twice_or_an_unknown_vocabulary_is_refused(tmp_path: Path) -> None:
    target = byte_pairs(tmp_path / "a.gguf")
    twice = write_vocabulary(tmp_path / "twice.gguf", [*LETTERS, ("ab", NORMAL), ("a", NORMAL)])
    with pytest.raises(ModelFileError, match="the same text"):
        made(target, twice)
    strange = byte_pairs(tmp_path / "strange.gguf", pre="unheard-of")
    with pytest.raises(InvalidRequestError, match="does not read its own: its pre-tokenizer is 'unheard-of'"):
        made(target, strange)
    with pytest.raises(InvalidRequestError, match="does not read the target's vocabulary"):
        shared_coverage(read_header(strange), read_header(target))


# --------------------------------------------------------------------------------------------------- kept maps


def test_a_map_is_made_once_and_kept(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = in_another_order(tiny.target, tmp_path / "foreign.gguf")
    first = made(tiny.target, drafter, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    monkeypatch.setattr(making, "make_token_map", lambda *_: pytest.fail("made again"))
    again = made(tiny.target, drafter, tmp_path / "kept")
    for name in ("starts", "pieces", "tokens", "rows", "firsts"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
        assert getattr(first, name).dtype == getattr(again, name).dtype, name
    assert first.coverage == again.coverage
    assert kept.suffix == ".map"


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data[:60], lambda data: b"", bytes.swapcase])
def test_a_damaged_map_is_made_again(tiny: TinyModels, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    drafter = in_another_order(tiny.target, tmp_path / "foreign.gguf")
    made(tiny.target, drafter, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert made(tiny.target, drafter, tmp_path / "kept").coverage > 0
    assert kept.read_bytes() == whole


def test_a_map_of_other_vocabularies_is_not_read(tiny: TinyModels, tmp_path: Path) -> None:
    drafter = in_another_order(tiny.target, tmp_path / "foreign.gguf")
    made(tiny.target, drafter, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    size = read_header(tiny.target).vocabulary_size
    key = kept.read_bytes()[53:85]
    assert read_token_map(kept, key, size, size) is not None
    assert read_token_map(kept, bytes(32), size, size) is None
    assert read_token_map(kept, key, size + 1, size) is None
    assert read_token_map(kept, key, size, size - 1) is None
    assert read_token_map(tmp_path / "none.map", key, size, size) is None


def test_a_map_that_cannot_be_kept_still_works(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    drafter = in_another_order(tiny.target, tmp_path / "foreign.gguf")
    assert made(tiny.target, drafter, tmp_path / "file").coverage > 0
