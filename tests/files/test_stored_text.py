"""Stored texts: the longest match is found as a plain search finds it, and damaged files do no harm."""

from __future__ import annotations

import os
import random
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.files.stored_text import (
    LEAST_MATCH_TOKENS,
    LONGEST_MATCH_TOKENS,
    DamagedTextError,
    StoredText,
    Text,
    count_tokens,
    open_or_set_aside,
)

VOCABULARY = bytes(range(32))
SIZE = 300


def texts(*several: list[int], names: tuple[str, ...] = ()) -> list[Text]:
    named = names or ("",) * len(several)
    return [Text(np.array(tokens, dtype=np.uint32), name) for tokens, name in zip(several, named, strict=True)]


def stored(*several: list[int], names: tuple[str, ...] = (), size: int = SIZE) -> StoredText:
    return StoredText.of(VOCABULARY, size, texts(*several, names=names))


def expected(several: list[list[int]], tail: list[int]) -> tuple[int, set[int], int]:
    """Longest match of the tail in any text, the tokens that follow its occurrences, and their number."""
    best, following, times = 0, set[int](), 0
    for tokens in several:
        for end in range(1, len(tokens) + 1):
            length = 0
            while (
                length < min(end, len(tail), LONGEST_MATCH_TOKENS) and tokens[end - 1 - length] == tail[-1 - length]
            ):
                length += 1
            if length > best:
                best, following, times = length, set(), 0
            if length == best:
                times += 1
                following |= set(tokens[end : end + 1])
    return best, following, times


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_match_is_found_as_by_comparing_every_place(seed: int) -> None:
    source = random.Random(seed)
    alphabet = source.choice([2, 4, 40, SIZE])
    several = [
        [source.randrange(alphabet) for _ in range(source.choice([0, 1, 2, 30, 90]))]
        for _ in range(source.randint(1, 6))
    ]
    index = stored(*several)
    assert index.tokens == sum(map(len, several))
    assert index.texts == len(several)
    for _ in range(30):
        if source.random() < 0.5:
            tokens = source.choice(several)
            end = source.randint(0, len(tokens))
            tail = tokens[max(0, end - source.randint(1, 40)) : end]
        else:
            tail = [source.randrange(alphabet) for _ in range(source.randint(1, 40))]
        longest, following, times = expected(several, tail)
        length, found = index.continuations(tail, 5)
        if longest >= LEAST_MATCH_TOKENS and times > 4 and not found:
            continue  # the places that were looked at are all ends of texts
        if longest < LEAST_MATCH_TOKENS or not following:
            assert (length, found) == (0, [])
            continue
        assert length == longest
        got = {tokens[0] for tokens in found}
        assert got <= following
        assert times > 4 or got == following
        ends = [" ".join(map(str, tokens)) + " " for tokens in several]
        for tokens in found:
            assert 1 <= len(tokens) <= 5
            copied = " ".join(map(str, [*tail[-longest:], *tokens])) + " "
            assert any(copied in end for end in ends)


def test_the_token_that_followed_most_often_comes_first() -> None:
    index = stored([1, 2, 3, 9, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 3, 5, 8])
    length, found = index.continuations([1, 2, 3], 2)
    assert length == 3
    assert [tokens[0] for tokens in found] == [5, 5, 5, 9]


def test_copies_end_with_their_text() -> None:
    index = stored([1, 2, 3, 4], [7, 8, 9])
    assert index.continuations([0, 1, 2], 10) == (2, [[3, 4]])
    assert index.continuations([3, 4], 10) == (0, [])  # nothing follows
    assert index.continuations([4, 7], 10) == (0, [])  # no match crosses a border


def test_searching_ten_thousand_equal_phrases_looks_at_few_places() -> None:
    index = stored([1, 2, 3] * 10_000)
    assert len(index.continuations([1, 2, 3], 4)[1]) <= 8


@pytest.mark.parametrize("tail", [[], [-1, 2], [2**32, 1], [2**40], [1]])
def test_a_tail_of_odd_tokens_matches_nothing(tail: list[int]) -> None:
    assert stored([1, 2, 3, 4]).continuations(tail, 4) == (0, [])


def test_no_text_at_all() -> None:
    index = stored()
    assert (index.tokens, index.texts, index.continuations([1, 2], 4)) == (0, 0, (0, []))
    assert index.all_texts() == []


@pytest.mark.parametrize("mapped", [False, True])
def test_a_saved_file_holds_the_same_texts_and_names(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "texts"
    names = ("a/b.txt", "", "\udcffnot UTF-8 \N{SNOWMAN}")
    stored([1, 2, 3, 4], [], [2, 3, 299], names=names).save(path)
    again = StoredText.open(path, VOCABULARY, SIZE, mapped=mapped)
    assert [text.tokens.tolist() for text in again.all_texts()] == [[1, 2, 3, 4], [], [2, 3, 299]]
    assert tuple(text.name for text in again.all_texts()) == names
    assert (again.texts, again.tokens) == (3, 7)
    assert again.continuations([1, 2], 9) == (2, [[3, 4]])
    again.save(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_file_is_private_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, modes = os.open, list[int]()

    def noted(path: Any, flags: int, mode: int = 0o777, **settings: Any) -> int:
        if flags & os.O_CREAT:
            modes.append(mode)
        return opened(path, flags, mode, **settings)

    monkeypatch.setattr(os, "open", noted)
    stored([1, 2, 3]).save(tmp_path / "texts")
    assert modes == [0o600]


def test_counting_tokens_includes_the_borders() -> None:
    assert count_tokens(texts([1, 2], [3])) == 5


def test_only_the_file_of_the_vocabulary_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    stored([1, 2, 3]).save(path)
    with pytest.raises(DamagedTextError, match="another vocabulary"):
        StoredText.open(path, b"x" * 32, SIZE)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_byte_anywhere_is_found_or_gives_tokens_of_the_vocabulary(tmp_path: Path, mapped: bool) -> None:
    source, path = random.Random(1), tmp_path / "texts"
    stored([source.randrange(5) for _ in range(40)], [1, 2, 3] * 5, names=("one", "two")).save(path)
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << source.randrange(8))]) + whole[place + 1 :])
        refused += harmless(path, mapped)
    header = len(whole) - 8 * (55 + 2)
    assert refused >= header  # header and names have a checksum


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_does_no_harm(tmp_path: Path, seed: int) -> None:
    source, path = random.Random(seed), tmp_path / "texts"
    stored([source.randrange(SIZE) for _ in range(200)], [1, 2, 3] * 30).save(path)
    data = bytearray(path.read_bytes())
    for _ in range(source.randint(1, 40)):
        start = source.randrange(len(data))
        match source.randrange(4):
            case 0:
                data[start : start + 4] = struct.pack("<I", source.choice([0, 2**32 - 1, 2**31, 700, SIZE]))
            case 1:
                data[start : start + 40] = bytes(40)
            case 2 if seed % 2:
                del data[start:]
                data = data or bytearray(b"x")
            case _:
                data[start] = source.randrange(256)
    path.write_bytes(data)
    harmless(path, mapped=bool(seed % 2))


def harmless(path: Path, mapped: bool) -> bool:
    """Search a damaged file in every way; whether it was refused."""
    try:
        index = StoredText.open(path, VOCABULARY, SIZE, mapped=mapped)
    except DamagedTextError:
        return True
    for tail in ([1, 2], [1, 2, 3] * 12, [4, 4, 4], [0] * 40, [SIZE - 1, 3]):
        length, found = index.continuations(tail, 12)
        assert not found or LEAST_MATCH_TOKENS <= length <= LONGEST_MATCH_TOKENS
        assert all(tokens and all(0 <= token < SIZE for token in tokens) for tokens in found)
    try:
        assert all((text.tokens < SIZE).all() for text in index.all_texts())
    except DamagedTextError:
        return True
    return False


@pytest.mark.parametrize("data", [b"", b"EDGETEXT", b"\0" * 500, b"EDGETEXT" + b"\xff" * 200])
def test_another_file_is_set_aside_with_a_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "texts"
    path.write_bytes(data)
    text, said = open_or_set_aside(path, VOCABULARY, SIZE, "the index")
    assert text is None
    assert said is not None
    assert said.startswith("the index is damaged (")
    assert "set aside as" in said
    assert not path.exists()
    assert (tmp_path / "texts.damaged").read_bytes() == data


def test_a_missing_file_needs_no_words_and_a_folder_is_not_set_aside(tmp_path: Path) -> None:
    assert open_or_set_aside(tmp_path / "none", VOCABULARY, SIZE, "it") == (None, None)
    (tmp_path / "folder").mkdir()
    text, said = open_or_set_aside(tmp_path / "folder", VOCABULARY, SIZE, "it")
    assert text is None
    assert said is not None
    assert "cannot be read" in said
    assert (tmp_path / "folder").is_dir()


def test_a_file_of_more_tokens_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    stored([1, 2, 3]).save(path)  # 4 with their border
    for limit in (None, 4):
        given = {} if limit is None else {"most_tokens": limit}
        text, said = open_or_set_aside(path, VOCABULARY, SIZE, "it", **given)
        assert text is not None
        assert said is None
        assert StoredText.open(path, VOCABULARY, SIZE, **given).tokens == 3
    with pytest.raises(DamagedTextError, match="it holds 4 tokens, and at most 3 are stored"):
        StoredText.open(path, VOCABULARY, SIZE, most_tokens=3)
    text, said = open_or_set_aside(path, VOCABULARY, SIZE, "it", most_tokens=3)
    assert text is None
    assert said is not None
    assert "set aside as" in said
    assert not path.exists()


def test_a_sparse_file_that_names_4_billion_tokens_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    tokens = 2**32 - 2
    head = struct.pack("<8sI32sQQQ", b"EDGETEXT", 1, VOCABULARY, 0, 1, tokens)
    with path.open("wb") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)))
        try:
            file.truncate(len(head) + 4 + 8 * tokens)
        except OSError:
            pytest.skip("this disk holds no sparse files of 32 GiB")
    text, said = open_or_set_aside(path, VOCABULARY, SIZE, "it", most_tokens=2**18)
    assert text is None
    assert said is not None
    assert f"it holds {tokens} tokens" in said


def test_a_file_larger_than_the_memory_stays_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts"
    stored([1, 2, 3]).save(path)

    def refuse(*_given: object, **_named: object) -> StoredText:
        raise MemoryError

    monkeypatch.setattr(StoredText, "open", refuse)
    assert open_or_set_aside(path, VOCABULARY, SIZE, "it") == (None, "it cannot be read: it does not fit in memory")
    assert path.exists()


def test_counts_that_would_need_more_than_the_file_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    stored([1, 2, 3]).save(path)
    data = bytearray(path.read_bytes())
    for offset in (44, 52, 60):  # bytes of names, texts, tokens
        for value in (2**64 - 1, 2**32, 2**63):
            damaged = bytearray(data)
            damaged[offset : offset + 8] = struct.pack("<Q", value)
            path.write_bytes(damaged)
            with pytest.raises(DamagedTextError):
                StoredText.open(path, VOCABULARY, SIZE)
