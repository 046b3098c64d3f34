"""Counting tokens: how texts are read, cut into pieces and split, and which answers are saved between exports."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import InvalidRequestError
from edgespec.export.trim import token_counts as emissions
from edgespec.export.trim.token_counts import (
    HELD_OUT_EVERY,
    PIECE_CHARACTERS,
    TOKENS_PER_PROMPT,
    CountedAnswer,
    CountedAnswersKey,
    TokenCounts,
    count_tokens,
    load_answers,
    pieces,
    read_text,
    save_answers,
    split,
)

TEXTS = st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=12)

KEY = CountedAnswersKey(target="sha256:ab", prompts_sha256="cd", prompt_ids=("a", "b"), tokens_per_prompt=3)
ANSWERS = (
    CountedAnswer(prompt_id="a", token_ids=(5, 6, 5), text="one 你好"),
    CountedAnswer(prompt_id="b", token_ids=(), text=""),
)


# ---------------------------------------------------------------------------------- splitting and counting


@given(st.lists(st.integers()))
def test_split_holds_out_every_third_item_and_loses_none(items: list[int]) -> None:
    ranking, held_out = split(items)
    assert held_out == items[2::3]
    assert HELD_OUT_EVERY == 3
    assert Counter(ranking) + Counter(held_out) == Counter(items)
    assert split(items) == (ranking, held_out)


@given(TEXTS, st.integers(1, 30))
def test_count_tokens_ignores_ids_outside_the_vocabulary(texts: list[list[int]], size: int) -> None:
    counts = count_tokens(texts, size)
    inside = [token for text in texts for token in text if token < size]
    assert counts == Counter(inside)
    assert count_tokens([[-1, size]], size) == Counter()


@given(TEXTS, TEXTS)
def test_token_counts_of_two_sources_add_up(first: list[list[int]], second: list[list[int]]) -> None:
    both = TokenCounts.of(first, 31) + TokenCounts.of(second, 31)
    ranking = [*split(first)[0], *split(second)[0]]
    held_out = [*split(first)[1], *split(second)[1]]
    assert both == TokenCounts(ranking=count_tokens(ranking, 31), held_out=count_tokens(held_out, 31))


def test_token_counts_use_96_tokens_of_each_answer() -> None:
    assert TOKENS_PER_PROMPT == 96


# ------------------------------------------------------------------------------------------------- texts


@given(st.text(st.sampled_from("ab \n\r\u2028é"), max_size=200), st.integers(1, 30))
def test_joined_pieces_are_the_text_and_only_the_last_is_short(text: str, characters: int) -> None:
    found = pieces(text, characters)
    assert "".join(found) == text
    assert all(len(piece) >= characters for piece in found[:-1])
    assert all(len(piece) < 2 * characters for piece in found)
    assert "" not in found


def test_pieces_end_at_line_ends_and_have_1000_characters() -> None:
    text = "a line of some length\n" * 200
    found = pieces(text)
    assert all(piece.endswith("\n") for piece in found)
    assert all(PIECE_CHARACTERS <= len(piece) < PIECE_CHARACTERS + 22 for piece in found[:-1])


def test_read_text_removes_the_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffGrüße\r\n".encode())
    assert read_text(path) == "Grüße\r\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"text\xff\xfe", "byte 4"), (b"", "holds no text"), (b" \n\t", "holds no text"), (None, "No such file")],
)
def test_a_file_that_is_not_text_is_refused_with_a_reason(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        read_text(path)
    assert caught.value.hint
    assert str(path) in caught.value.message


def test_read_text_refuses_folders_pipes_and_invalid_paths(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidRequestError, match="it is not a regular file"):
            read_text(path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_text(Path("a\0b"))


def test_read_text_refuses_a_too_long_file_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("four")
    monkeypatch.setattr(emissions, "MOST_TEXT_BYTES", 4)
    assert read_text(path) == "four"
    path.write_text("fives")
    with pytest.raises(InvalidRequestError, match="it is too large: more than 4 bytes"):
        read_text(path)


# -------------------------------------------------------------------------------------- kept between exports


def test_saved_answers_are_loaded_again(tmp_path: Path) -> None:
    assert load_answers(tmp_path, KEY) == ()
    save_answers(tmp_path, KEY, ANSWERS)
    assert load_answers(tmp_path, KEY) == ANSWERS
    (file,) = tmp_path.iterdir()
    assert file.name == KEY.file_name
    save_answers(tmp_path, KEY, ANSWERS)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "other",
    [
        {"target": "sha256:ac"},
        {"prompts_sha256": "ce"},
        {"tokens_per_prompt": 4},
        {"prompt_ids": ("a", "c")},
        {"prompt_ids": ("b", "a")},
        {"prompt_ids": ("a",)},
    ],
)
def test_answers_saved_for_another_key_are_not_loaded(tmp_path: Path, other: dict[str, Any]) -> None:
    save_answers(tmp_path, KEY, ANSWERS)
    changed = replace(KEY, **other)
    if "prompt_ids" not in other:
        assert changed.file_name != KEY.file_name
        (tmp_path / KEY.file_name).rename(tmp_path / changed.file_name)
    assert load_answers(tmp_path, changed) == ()


def answers(document: dict[str, Any]) -> Any:
    return document["answers"]


def test_an_incomplete_set_of_answers_is_loaded_again(tmp_path: Path) -> None:
    """An export that was interrupted while the target answered resumes with the saved answers."""
    for count in range(len(ANSWERS) + 1):
        save_answers(tmp_path, KEY, ANSWERS[:count])
        assert load_answers(tmp_path, KEY) == ANSWERS[:count]


SPOILT: list[Callable[[dict[str, Any]], object]] = [
    lambda document: document.pop("answers"),
    lambda document: document.update(answers=5),
    lambda document: document.update(schema_version=2),
    lambda document: answers(document).pop(0),
    lambda document: answers(document).append(answers(document)[0]),
    lambda document: answers(document).insert(0, "text"),
    lambda document: answers(document)[0].update(token_ids=[1, 2, 3, 4]),
    lambda document: answers(document)[0].update(token_ids=[-1]),
    lambda document: answers(document)[0].update(token_ids=[2**31]),
    lambda document: answers(document)[0].update(token_ids=[True]),
    lambda document: answers(document)[0].update(token_ids=[1.0]),
    lambda document: answers(document)[0].update(token_ids="abc"),
    lambda document: answers(document)[0].update(text=None),
    lambda document: answers(document)[0].update(prompt=1),
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_invalid_cache_of_answers_loads_nothing(tmp_path: Path, spoil: Callable[[dict[str, Any]], object]) -> None:
    save_answers(tmp_path, KEY, ANSWERS)
    path = tmp_path / KEY.file_name
    document = json.loads(path.read_bytes())
    spoil(document)
    path.write_text(json.dumps(document))
    assert load_answers(tmp_path, KEY) == ()


def test_a_damaged_cache_of_answers_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / KEY.file_name
    save_answers(tmp_path, KEY, ANSWERS)
    whole = path.read_bytes()
    for content in (b"", b"{", whole[:-20], b"\xff" + whole, b"[1]", b"[" * 100_000):
        path.write_bytes(content)
        assert load_answers(tmp_path, KEY) == ()
    path.unlink()
    path.mkdir()
    assert load_answers(tmp_path, KEY) == ()
    path.rmdir()
    save_answers(tmp_path, KEY, ANSWERS)
    assert load_answers(tmp_path, KEY) == ANSWERS
    monkeypatch.setattr(emissions, "_LARGEST_CACHE_BYTES", len(whole) - 1)
    assert load_answers(tmp_path, KEY) == ()
