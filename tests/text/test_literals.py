"""The JSON of values that models write as in Python, or with a mark on each side of a text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.text.conversation.literals import JSON, MARKED, PYTHON, as_calls, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def has_quotes(value: Any) -> bool:
    """Whether a text in the value has quotes, with which it may look like two texts."""
    if isinstance(value, dict):
        return has_quotes([*value, *value.values()])
    return any(map(has_quotes, value)) if isinstance(value, list) else isinstance(value, str) and "'" in value


@given(VALUES.filter(lambda value: not has_quotes(value)))
@settings(max_examples=300, deadline=None)
def test_what_python_writes_is_read_as_the_same_value(value: Any) -> None:
    assert json.loads(to_json(repr([value]), PYTHON)) == [value]
    written = json.dumps(value)
    assert to_json(written, JSON) == written


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("['it''s', 'a \"b\" c', \"it's\"]", ["it''s", 'a "b" c', "it's"]),
        (r"['\ud83d\ude00!', '\ud83d', '\ude00\ud83dx']", ["\U0001f600!", "\ufffd", "\ufffd\ufffdx"]),
        (r"['it\'s', '\n\t\\', '\xe4\u00e4', '\q']", ["it's", "\n\t\\", "ää", "\\q"]),
        ('["\\/", "\\u00e4"]', ["/", "ä"]),
        ("['a\nb']", ["a\nb"]),
        ("{'a': None, 'b': [True, False, 3.10, -1e5]}", {"a": None, "b": [True, False, 3.1, -1e5]}),
        ("[f(a=1, b_2='x'), g()]", [
            {"name": "f", "arguments": {"a": 1, "b_2": "x"}}, {"name": "g", "arguments": {}}
        ]),
    ],
)  # fmt: skip
def test_literals_of_python_are_json(literal: str, value: Any) -> None:
    assert json.loads(to_json(literal, PYTHON)) == value


def test_marked_texts_have_no_escapes_and_their_keys_no_quotes() -> None:
    literal = '{a b:<|"|>it\'s "c:\\new" {x}\n<|"|>,<|"|>d<|"|>:[None,true,2.50]}'
    made = to_json(literal, MARKED)
    assert json.loads(made) == {"a b": 'it\'s "c:\\new" {x}\n', "d": [None, True, 2.5]}
    assert "2.50" in made


@pytest.mark.parametrize("literal", ["[a, b]", "['a'", "['a]", "(1, 2)", "[1", "{'a'}", "[f(1)]", "[f(a=)]", ""])
@pytest.mark.parametrize("syntax", [PYTHON, MARKED])
def test_other_texts_are_not_json(literal: str, syntax: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        json.loads(to_json(literal, syntax))


def test_a_list_of_calls_is_written_in_its_syntax() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"a": "ä'", "b": [None, {"c": True}]}), ("g", {})]
    assert as_calls(calls, PYTHON) == """[f(a="ä'", b=[None, {'c': True}]), g()]"""
    assert as_calls(calls, JSON) == json.dumps(
        [{"name": name, "arguments": given} for name, given in calls], ensure_ascii=False
    )
