"""Copies of callers' JSON values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import InvalidRequestError
from edgespec.text.plain import plain

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda own: st.lists(own) | st.dictionaries(st.text(), own),
    max_leaves=8,
)


class Text(str):
    """Another text."""


class Number(int):
    """Another number."""


def copied(value: Any, deepest: int = 8) -> Any:
    return plain(value, "it", deepest, lambda value: None)


@given(_values)
def test_a_copy_equals_its_value_and_every_value_is_visited(value: Any) -> None:
    seen = list[Any]()
    assert plain(value, "it", 99, seen.append) == value
    assert seen[0] is value
    assert len(seen) == 1 + _inside(value)


def _inside(value: Any) -> int:
    items = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return len(items) + sum(map(_inside, items))


def test_a_copy_has_pythons_own_types_and_shares_nothing() -> None:
    inner = [Text("x"), Number(3), True]
    given = OrderedDict({Text("a"): inner, "b": (1.5, None)})
    found = copied(given)
    assert found == {"a": ["x", 3, True], "b": [1.5, None]}
    assert [type(each) for each in (found, *found, *found["a"])] == [dict, str, str, str, int, bool]
    inner.clear()
    assert found["a"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "it holds object"),
        ([b"x"], "it holds bytes b'x', which is not JSON"),
        ({1: 2}, "it has a key that is not text"),
        ([[[1]]], "it nests more than 2 deep"),
    ],
)
def test_what_is_not_json_or_too_deep_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        copied(value, 2)
    assert caught.value.message.startswith(said)


def test_what_a_visitor_raises_ends_the_copy() -> None:
    def visit(value: Any) -> None:
        if value == 2:
            raise InvalidRequestError("no two")

    with pytest.raises(InvalidRequestError, match="no two"):
        plain([1, [2, object()]], "it", 9, visit)
