"""Comparisons of two vocabularies, and the reported differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.gguf.vocabulary import compare_vocabularies
from tests.support.raw_gguf import ARCH, U32, Key, build, read, tokens
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf


def _pair(tmp_path: Path, target: list[Key], drafter: list[Key]) -> tuple[GgufHeader, GgufHeader]:
    return read(tmp_path / "target.gguf", build(target)), read(tmp_path / "drafter.gguf", build(drafter))


def _words(count: int, **changed: str) -> list[str]:
    return [changed.get(f"w{i}", f"w{i}") for i in range(count)]


@pytest.mark.parametrize("count", [3, 100], ids=["short", "long"])
def test_equal_vocabularies_have_no_difference(tmp_path: Path, count: int) -> None:
    keys = tokens(*_words(count), types=[1] * count, bos=1, eos=2)
    assert compare_vocabularies(*_pair(tmp_path, keys, keys)) is None
    # Keys that only one of the two files states are not compared.
    assert compare_vocabularies(*_pair(tmp_path, keys, tokens(*_words(count)))) is None


@pytest.mark.parametrize("count", [10, 100], ids=["short", "long"])
def test_the_first_differing_token_is_reported(tmp_path: Path, count: int) -> None:
    target, drafter = tokens(*_words(count)), tokens(*_words(count, w7="seven", w9="nine"))
    difference = compare_vocabularies(*_pair(tmp_path, target, drafter))
    assert difference is not None
    assert difference.token_id == 7
    assert difference.reason == "token 7 is 'w7' in the target but 'seven' in the drafter"


def test_tokens_that_are_not_utf8_are_compared_as_bytes(tmp_path: Path) -> None:
    texts: list[str | bytes] = [*_words(80)]
    other: list[str | bytes] = [*_words(80)]
    texts[5], other[5] = b"\xff", b"\\xff"  # equal when shown, different when stored
    difference = compare_vocabularies(*_pair(tmp_path, tokens(*texts), tokens(*other)))
    assert difference is not None
    assert difference.token_id == 5


def test_a_drafter_needs_the_targets_token_texts_and_nothing_more(tmp_path: Path) -> None:
    keys = tokens(*_words(70), types=[1] * 70, bos=1, eos=2)
    for drafter in (
        tokens(*_words(70), types=[1] * 69 + [3], bos=1, eos=2),
        tokens(*_words(70), types=[1] * 70, bos=0, eos=3),
        tokens(*_words(70), model="gpt2"),
        tokens(*_words(70), "more", *(f"[PAD{i}]" for i in range(1025)), types=[1] * 1096, eos=70),
    ):
        assert compare_vocabularies(*_pair(tmp_path, keys, drafter)) is None


def test_another_tokenizer_or_none_is_the_reason_given_for_other_texts(tmp_path: Path) -> None:
    keys = tokens(*_words(70))
    for drafter, words in (
        (tokens(*_words(70, w7="seven"), model="gpt2"), "'llama' but the drafter's is 'gpt2'"),
        ([ARCH], "the drafter holds no vocabulary"),
    ):
        difference = compare_vocabularies(*_pair(tmp_path, keys, drafter))
        assert difference is not None
        assert words in difference.reason


def test_a_target_may_have_padding_that_the_drafter_lacks(tmp_path: Path) -> None:
    plain = tokens(*_words(70), types=[1] * 70)
    by_type = tokens(*_words(70), "unused", types=[1] * 70 + [5])
    by_text = tokens(*_words(70), "[PAD70]", "[PAD71]")
    real = tokens(*_words(70), "[PAD70]", "more", types=[1] * 70 + [5, 1])
    far = tokens(*_words(70), *(f"[PAD{i}]" for i in range(1025)))
    for padded, words in (
        (by_type, None),
        (by_text, None),
        (real, "token 71 is 'more' in the target"),
        (far, "the target has 1025 tokens more"),
    ):
        difference = compare_vocabularies(*_pair(tmp_path, padded, plain))
        assert (difference is None) is (words is None)
        if difference is not None:
            assert str(words) in difference.reason


@pytest.mark.parametrize("count", [10, 100], ids=["short", "long"])
def test_a_one_pass_drafters_mask_may_be_any_token(tmp_path: Path, count: int) -> None:
    mask: Key = ("edgespec.mask_token_id", U32, 7)
    target = tokens(*_words(count), types=[1] * count)
    drafter = tokens(*_words(count, w7="<|mask|>"), types=[*[1] * 7, 3, *[1] * (count - 8)])
    assert compare_vocabularies(*_pair(tmp_path, target, [*drafter, mask])) is None
    assert compare_vocabularies(*_pair(tmp_path, [*target, mask], drafter)) is not None, "a target proposes nothing"
    other = tokens(*_words(count, w7="<|mask|>", w8="eight"), types=[1] * count)
    difference = compare_vocabularies(*_pair(tmp_path, target, [*other, mask]))
    assert difference is not None
    assert difference.token_id == 8


def test_a_mask_behind_the_targets_vocabulary_is_one_of_the_drafters_own_tokens(tmp_path: Path) -> None:
    mask: Key = ("edgespec.mask_token_id", U32, 70)
    target, longer = tokens(*_words(70)), tokens(*_words(70), "<|mask|>", "[PAD71]")
    assert compare_vocabularies(*_pair(tmp_path, target, [*longer, mask])) is None
    assert compare_vocabularies(*_pair(tmp_path, [*longer, mask], target)) is not None


def test_the_tiny_test_models_share_a_vocabulary(tmp_path: Path) -> None:
    target = read_header(write_tiny_gguf(tmp_path / "tiny.gguf"))
    padded = read_header(write_tiny_gguf(tmp_path / "padded.gguf", seed=1, extra_tokens=7))
    assert compare_vocabularies(target, padded) is None
    assert compare_vocabularies(padded, target) is None
    changed = list(VOCABULARY)
    changed[40] = "▁other"
    difference = compare_vocabularies(target, read_header(write_tiny_gguf(tmp_path / "c.gguf", vocabulary=changed)))
    assert difference is not None
    assert difference.token_id == 3 + 256 + 40
    assert "'▁other' in the drafter" in difference.reason
