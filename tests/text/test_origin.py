"""Text in a template knows which of its characters the template itself wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.text.chat_template.budget import METHODS, Budget, TemplateLimits
from edgespec.text.chat_template.origin import OWN, SAID, joined, origins_of, replaced, traced, written
from edgespec.text.chat_template.template import ChatTemplate

# Which of both a character is, is seen by the character: none is in both, in any case.
OWNS, SAYS = "aA< ", "bB|\n"


def expected(text: str) -> str:
    return "".join(OWN if character in OWNS else SAID for character in text)


def as_written(text: str) -> str:
    return traced(text, expected(text))


texts = st.text(alphabet=OWNS + SAYS, max_size=12)
ends = st.none() | st.integers(-14, 14)
OPERATIONS: dict[str, Callable[[str, str, int], Any]] = {
    "slice": lambda text, other, number: text[number:],
    "slice with a step": lambda text, other, number: text[::-2],
    "repeat": lambda text, other, number: text * (number % 4),
    "strip": lambda text, other, number: text.strip(),
    "strip of characters": lambda text, other, number: text.strip(other),
    "lstrip": lambda text, other, number: text.lstrip(other or None),
    "rstrip": lambda text, other, number: text.rstrip(other or None),
    "removeprefix": lambda text, other, number: text.removeprefix(other),
    "removesuffix": lambda text, other, number: text.removesuffix(other),
    "partition": lambda text, other, number: text.partition(other or "a"),
    "rpartition": lambda text, other, number: text.rpartition(other or "a"),
    "split": lambda text, other, number: text.split(other or None, number),
    "rsplit": lambda text, other, number: text.rsplit(other or None, number),
    "splitlines": lambda text, other, number: text.splitlines(number > 0),
    "upper": lambda text, other, number: text.upper(),
    "lower": lambda text, other, number: text.lower(),
    "title": lambda text, other, number: text.title(),
    "capitalize": lambda text, other, number: text.capitalize(),
}


def every(found: Any) -> list[str]:
    return [found] if isinstance(found, str) else list(found)


@given(texts, texts, st.integers(-1, 5))
def test_every_operation_gives_the_text_that_str_gives_with_the_origin_of_each_character(
    text: str, other: str, number: int
) -> None:
    for name, run in OPERATIONS.items():
        found = every(run(as_written(text), as_written(other), number))
        assert found == every(run(text, other, number)), name
        assert [origins_of(one) for one in found] == [expected(one) for one in found], name


@given(texts, texts, texts, st.integers(-1, 3))
def test_texts_are_joined_and_replaced_with_their_origins(text: str, old: str, new: str, count: int) -> None:
    times = text.count(old) if count < 0 else min(count, text.count(old))
    changed = replaced(as_written(text), as_written(old), as_written(new), times)
    assert changed == text.replace(old, new, count)
    assert not old or origins_of(changed) == expected(changed)
    whole = joined([as_written(text), new], as_written(old))
    assert whole == old.join([text, new])
    assert origins_of(whole) == expected(text) + expected(old) + SAID * len(new)
    assert origins_of(joined([as_written(text), as_written(new)])) == expected(text + new)


@given(texts, texts)
def test_no_method_of_templates_makes_a_messages_character_the_templates_own(text: str, other: str) -> None:
    budget = Budget(TemplateLimits(deadline_s=60), 0)
    for name, method in METHODS[str].items():
        for arguments in ([], [as_written(other)], [as_written(other), as_written(text)], [[as_written(other)]]):
            try:
                found = method(budget, as_written(text), *arguments)
            except Exception:  # these arguments do not fit the method
                continue
            for one in every(found) if isinstance(found, str | list | tuple) else ():
                assert all(
                    origin == SAID or character in OWNS
                    for character, origin in zip(one, origins_of(one), strict=True)
                ), name


def test_a_text_whose_case_changes_its_length_has_no_origins() -> None:
    assert origins_of(written("straße").upper()) == SAID * 7
    assert origins_of(written("Ab").lower()) == OWN * 2


def test_plain_text_counts_as_said_and_written_text_as_own() -> None:
    assert origins_of(written("ab")) == OWN * 2
    assert origins_of("ab") == SAID * 2
    assert replaced(written("ab"), "", "-", 3) == "-a-b-"


@pytest.mark.parametrize(
    ("template", "own"),
    [
        ("<{{ m }}>", "<>"),
        ("{{ '<' + m ~ '>' }}", "<>"),
        ("{% set x %}<{{ m }}>{% endset %}{{ x | trim }}", "<>"),
        ("{% macro x(y) %}<{{ y }}>{{ caller() }}{% endmacro %}{% call x(m) %}!{% endcall %}", "<>!"),
        ("{% filter upper %}a{{ m }}{% endfilter %}", "A"),
        ("{% for x in ['<', m, '>'] recursive %}{{ x }}{% endfor %}", "<>"),
        ("{{ ['<', '>'] | join(m) }}{{ '-'.join([m, m]) }}", "<>-"),
        ("{{ m.replace('b', '<>') }}", "<>"),
        ("{{ '<{}>'.format(m) }}", "<>"),
        ("{{ '<x>'.split('x') | join(m) }}{{ ('<' ~ m)[:1] }}", "<><"),
        ("{{ {'k': '<'}['k'] }}{{ m if not m else '>' }}{{ z | default('!') }}", "<>!"),
        ("{% set n = namespace(x='<') %}{% set n.x = n.x + m %}{{ n.x }}", "<"),
        ("{{ bos_token }}{{ eos_token }}{{ messages[0].role }}", "BEuser"),
        ("{{ messages[1].role }}{{ m | tojson }}{{ [m, '<'] }}{{ 12 }}{{ '<' | list | string }}", ""),
    ],
)
def test_a_templates_own_characters_are_known_through_every_way_of_writing(template: str, own: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "<|im_start|>"}]
    made = ChatTemplate(template, tokens={"bos_token": "B", "eos_token": "E"}).render(messages, extra={"m": "abc"})
    assert "".join(c for c, origin in zip(made, origins_of(made), strict=True) if origin == OWN) == own
