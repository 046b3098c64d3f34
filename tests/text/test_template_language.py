"""The template language: the results of operators, filters, tests, methods and tags equal stock jinja's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.text.chat_template.template import ChatTemplate

USER = {"role": "user", "content": "Hi!"}
ASSISTANT = {"role": "assistant", "content": " Hello. "}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def show(expression: str, **extra: Any) -> str:
    return template("{{ " + expression + " }}").render([USER, ASSISTANT], extra=extra)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("' a '.strip()", "a"),
        ("'xxaxx'.strip('x')", "a"),
        ("' a'.lstrip() ~ 'b '.rstrip()", "ab"),
        ("'a,b,c'.split(',')", "['a', 'b', 'c']"),
        ("'a,b,c'.split(',', 1)", "['a', 'b,c']"),
        ("' a  b c '.split()", "['a', 'b', 'c']"),
        ("' a  b c '.split(none, 1)[1]", "b c "),
        ("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']"),
        ("'a\\nb\\n'.splitlines()", "['a', 'b']"),
        ("'a=b'.partition('=')[2]", "b"),
        ("'abc'.startswith('ab') and 'abc'.endswith(('x', 'bc'))", "True"),
        ("'aBc'.upper() ~ 'aBc'.lower() ~ 'a b'.title() ~ 'ab'.capitalize()", "ABCabcA BAb"),
        ("'a-b-c'.replace('-', '+') ~ 'a-b-c'.replace('-', '+', 1)", "a+b+ca+b-c"),
        ("'banana'.count('an') ~ 'banana'.find('nan') ~ 'banana'.rfind('an')", "223"),
        ("', '.join(['a', 'b'])", "a, b"),
        (
            "'<{}|{}>'.format('日', messages[1:2][0].role) ~ '{}{}{}'.format(1, none, [2.5], 'unused')",
            "<日|assistant>1None[2.5]",
        ),
        ("'unhappy'.removeprefix('un').removesuffix('py')", "hap"),
        ("messages[0].items() | list", "[('role', 'user'), ('content', 'Hi!')]"),
        ("messages[0].keys() | list ~ messages[0].values() | list", "['role', 'content']['user', 'Hi!']"),
        ("messages[0].get('role') ~ messages[0].get('x') ~ messages[0].get('x', 1)", "userNone1"),
        ("messages | map(attribute='role') | join(', ')", "user, assistant"),
        ("messages | map(attribute='x', default='-') | join", "--"),
        ("messages | rejectattr('role', 'eq', 'user') | map(attribute='content') | first | trim", "Hello."),
        ("messages | selectattr('nothing') | list", "[]"),
        ("[1, 2, 3, 4] | select('odd') | list", "[1, 3]"),
        ("[1, 0, 2] | reject | list", "[0]"),
        ("none | selectattr('a') | list ~ none | reject | list ~ false | map('upper') | list", "[][][]"),
        ("['a', 'b'] | map('upper') | list", "['A', 'B']"),
        ("(messages | last).role ~ messages | length ~ messages | count", "assistant22"),
        ("[3, 1, 2] | sort | join ~ (['b', 'A'] | sort | join) ~ ([1, 2] | reverse | list)", "123Ab[2, 1]"),
        ("[3, 1, 2] | min ~ (['b', 'A', 'a'] | min) ~ [] | min", "1A"),
        ("messages | sort(attribute='role') | map(attribute='role') | join(' ')", "assistant user"),
        ("{'b': 1, 'A': 2} | dictsort", "[('A', 2), ('b', 1)]"),
        ("{'b': 1, 'a': 2} | dictsort(by='value', reverse=true)", "[('a', 2), ('b', 1)]"),
        ("messages[::-1][0].role ~ 'abc'[::-1] ~ 'abc'[1:] ~ 'abc'[-1] ~ 'abc'[:-1]", "assistantcbabccab"),
        ("none ~ true ~ 1 ~ 2.5 ~ nothing", "NoneTrue12.5"),
        ("(1 + 2 * 3 - 4) ~ 7 // 2 ~ 7 % 3 ~ 2 ** 8 ~ 1 / 4 ~ -1", "3312560.25-1"),
        ("([1] + [2]) ~ 'ab' * 2 ~ [0] * 2", "[1, 2]abab[0, 0]"),
        ("1 < 2 < 3 and not 1 > 2 and 'a' in 'cat' and 'b' not in ['a'] and 'role' in messages[0]", "True"),
        ("('12' | int + '1.5' | float) ~ 'x' | int ~ 'x' | int(7) ~ 2.567 | round(1) ~ -3 | abs", "13.5072.63"),
        ("nothing | default('d') ~ '' | default('e', true) ~ none | d('f')", "deNone"),
        ("'a\\nb' | indent(2) ~ 'a\\nb' | indent(2, true)", "a\n  b  a\n  b"),
        ("' aXb ' | trim | lower | upper | capitalize | title | replace('x', 'y') | string | safe", "Ayb"),
        (
            "nothing is defined ~ none is none ~ 'x' is string ~ {} is mapping ~ [] is sequence",
            "FalseTrueTrueTrueTrue",
        ),
        ("1 is number ~ true is boolean ~ true is true ~ [] is iterable ~ 1 is integer", "TrueTrueTrueTrueTrue"),
        ("3 is odd ~ 4 is divisibleby(2) ~ 1 is eq(1) ~ 'a' is in(['a']) ~ 2 is ge 3", "TrueTrueTrueTrueFalse"),
        ("range(3) | list ~ range(1, 6, 2) | join", "[0, 1, 2]135"),
        ("dict(a=1).a ~ namespace(a=2).a ~ {'a': {'b': 3}}.a['b']", "123"),
        ("(1, 'a') ~ {'k': [none]}", "(1, 'a'){'k': [None]}"),
        ("bos_token ~ eos_token", "<s></s>"),
        ("[1, 2] == [1, 2] and {'a': 1} != {'a': 2} and messages[0] == messages[0]", "True"),
        ("messages[0]['content'].nothing is defined", "False"),
        ("messages[5] is defined", "False"),
    ],
)
def test_template_expressions_give_jinjas_results(expression: str, expected: str) -> None:
    assert show(expression) == expected


def test_tojson_equals_pythons_json_without_html_escapes() -> None:
    value = {"b": [1, 2.5, None, True, "<&'\">é\n\u2028"], "a": {"c": {}, "d": [[]]}}
    assert show("v | tojson", v=value) == json.dumps(value, ensure_ascii=False)
    assert show("v | tojson(indent=4)", v=value) == json.dumps(value, ensure_ascii=False, indent=4)
    assert show("v | tojson(ensure_ascii=true)", v=value) == json.dumps(value)
    assert show("v | tojson(separators=(',', ':'), sort_keys=true)", v=value) == json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), sort_keys=True
    )


def test_loops_macros_and_set_blocks_render_as_in_jinja() -> None:
    source = """
{%- for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ' first' if loop.first }}{{ ' last' if loop.last }}
{%- if loop.previtem is defined %} after {{ loop.previtem.role }}{% endif %} {{ loop.cycle('a', 'b') }};
{%- endfor %}
{%- for m in [] %}x{% else %}none{% endfor %}
{%- for i in range(9) if i is even %}
    {%- if i == 2 %}{% continue %}{% elif i > 5 %}{% break %}{% endif %}{{ i }}
{%- endfor %}
{%- macro wrap(tag, text='?') %}<{{ tag }}>{{ caller() if caller else text }}{% endmacro %}
{{- wrap('b') }}{% call wrap('i') %}inner{% endcall %}
{%- set block %}a{{ 1 }}{% endset %}{{ block | upper }}
{%- filter upper %}b{% endfilter %}
{%- with x = 5 %}{{ x }}{% endwith %}
{%- for key, value in {'k': 'v'}.items() %}{{ key }}={{ value }}{% endfor %}
{%- for n in [[1, [2]], [3]] recursive %}{{ loop(n) if n is sequence else n }}{% endfor %}"""
    expected = "1/2 first a;2/2 last after user b;none04<b>?<i>innerA1B5k=v123"
    assert template(source).render([USER, ASSISTANT]) == expected


def test_whitespace_around_block_tags_is_trimmed() -> None:
    assert template("a\n  {% if true %}\nb\n  {% endif %}\nc\n").render([]) == "a\nb\nc"
