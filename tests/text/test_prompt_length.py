"""A prompt that is far longer than the context is refused before all of it is tokenised."""

from __future__ import annotations

from typing import Any, cast

import pytest

from edgespec.errors import CancelledError
from edgespec.text.conversation.prompt_format import is_far_longer
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.tokenizer import Tokenizer

CONTEXT = 10_000


class Windows:
    """A tokenizer of one token each ``characters``. Keeps what it read."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self.read = list[str]()

    def encode(self, text: str, **_: Any) -> list[int]:
        self.read.append(text)
        return [0] * -(-len(text) // self._characters)


def read_of(text: str, characters: int, budget: RequestBudget | None = None) -> tuple[bool, str]:
    """Whether the text is far longer than ``CONTEXT``, and what was tokenised to know it."""
    windows = Windows(characters)
    found = is_far_longer(cast("Tokenizer", windows), text, budget or RequestBudget(CONTEXT))
    return found, "".join(windows.read)


@pytest.mark.parametrize("characters", [1, 8, 100])
def test_a_long_text_is_read_until_it_is_certainly_too_long(characters: int) -> None:
    text = "x" * 10_000_000
    found, read = read_of(text, characters)
    assert found
    assert len(read) <= 1.5 * CONTEXT * characters + 2**15
    assert read_of(text[: 14 * CONTEXT * characters // 10], characters)[0] is False, "it is counted exactly"


def test_a_text_of_usual_length_and_one_from_python_are_not_read_twice() -> None:
    assert read_of("x" * 8 * CONTEXT, 1) == (False, "")
    assert read_of("x" * 80 * CONTEXT, 1, RequestBudget()) == (False, "")


def test_a_cancelled_request_reads_no_further_window() -> None:
    budget = RequestBudget(CONTEXT)

    class Cancelling(Windows):
        def encode(self, text: str, **_: Any) -> list[int]:
            budget.cancel()
            return super().encode(text)

    windows = Cancelling(1000)
    with pytest.raises(CancelledError):
        is_far_longer(cast("Tokenizer", windows), "x" * 1_000_000, budget)
    assert len(windows.read) == 1
