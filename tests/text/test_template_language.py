"""The template language: the results of operators, filters, tests, methods and tags equal stock jinja's."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from jinja2 import defaults

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import METHODS, Budget, TemplateLimits
from edgespec.text.chat_template.sandbox import Sandbox
from edgespec.text.chat_template.template import ChatTemplate
from tests.support.real_templates import reference

USER = {"role": "user", "content": "Hi!"}
ASSISTANT = {"role": "assistant", "content": " Hello. "}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, tokens={"bos_token": "<s>", "eos_token": "</s>"})


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


PEOPLE = [
    {"name": "Bo", "age": 3, "home": {"town": "Oslo"}},
    {"name": "al", "age": 30, "home": {"town": "oslo"}},
    {"name": "Cy", "age": 3, "home": {}},
]

# The expected text is stock jinja's own.
AS_IN_JINJA = [
    "[3, 1, 2] | max ~ ['b', 'A', 'c'] | max ~ people | max(attribute='age') ~ ([] | max)",
    "['b', 'B', 'a'] | max(case_sensitive=true) ~ ['b', 'B'] | min(true) ~ people | min(attribute='name')",
    "[1, 2.5] | sum ~ people | sum(attribute='age') ~ people | sum('age', 10) ~ [[1], [2]] | sum(start=[])",
    "['a', 'B', 'A', 'b'] | unique | join ~ ['a', 'A'] | unique(true) | join ~ [1, 1.0, true, none] | unique | list",
    "people | unique(attribute='age') | map(attribute='name') | join",
    "people | unique(attribute='home.town') | map(attribute='name') | join",
    "people | groupby('age') | list",
    "people | groupby('home.town', default='') | map(attribute='grouper') | list",
    "people | groupby('home.town', default='', case_sensitive=true) | map('first') | list",
    "(people | groupby('age') | first).list | length ~ (people | groupby('age') | last).grouper",
    "range(7) | batch(3) | list ~ range(7) | batch(3, '-') | list ~ [] | batch(2, 0) | list",
    "range(7) | slice(3) | list ~ range(7) | slice(3, '-') | list ~ range(2) | slice(4) | list",
    "people | sort(attribute='age,name') | map(attribute='name') | join",
    "people | sort(attribute='age', reverse=true) | map(attribute='name') | join",
    "[[2, 'a'], [1, 'b']] | sort ~ [(1, 2), (1, 1)] | min",
    "people | map(attribute='home.town.x', default='?') | list ~ people | map(attribute='home.x', default=0) | list",
    "[['a', 'b'], ['c']] | map('join', d='-') | list ~ ['', 'x'] | map('default', 'e', boolean=true) | list",
    "range(9) | select('divisibleby', num=3) | list ~ people | rejectattr('age', 'gt', 5) | list | length",
    "'aBc' is lower ~ 'abc' is lower ~ 'ABC' is upper ~ 1 is upper ~ ['a', 'B'] | select('upper') | list",
    "'it\\'s a-b (c' | title ~ 'aB' | lower ~ 'aB' | upper ~ 'aB' | capitalize ~ none | upper",
    "'a<b>&\\'\"' | e ~ '<' | escape ~ 5 | e ~ '&amp;' | forceescape",
    "'foo bar baz qux' | truncate(9) ~ 'foo bar baz qux' | truncate(9, true) ~ 'ab cd' | truncate(4, false, '.', 0)",
    "'a' | center(5) ~ 'abc def' | wordcount ~ ('x' | center | length)",
    "'42.7' | int ~ 'x' | int(3) ~ '1f' | int(base=16) ~ 42 | round ~ 41.5 | round(0, 'floor') ~ 1234 | round(-2)",
    "'%s-%s' | format('a', 1) ~ '%(a)05.1f' | format(a=2.25) ~ '%d%%' % 5 ~ '%s' % [1] ~ '%r' % 'a' ~ 'a' % {}",
    "'%-5s|%+d|%x|%c|%.2s' % ('ab', 3, 255, 'z', 'xyz') ~ '%(k)s%(k)s' % {'k': none} ~ '%s' % nothing ~ 7 % 4",
    "'{0}{1}{0}'.format('a', 1) ~ '{k:>4}'.format(k='b') ~ '{:.2f}{{}}'.format(1.234) ~ '{!r}{:,}'.format('a', 1234)",
    "people[0] | attr('name') is defined ~ 'x' | attr('nothing') is defined",
    "'aXbX'.find('X', 2) ~ 'aXbX'.count('X', 0, 2) ~ 'ab'.startswith('b', 1) ~ 'ab'.endswith('a', 0, 1)",
    "'a b'.split(sep=' ', maxsplit=1) ~ 'a\\nb'.splitlines(keepends=true) ~ 'aXb'.rfind('X', 0, 1)",
    "'x'.zfill(3) ~ 'x'.ljust(3, '.') ~ 'x'.rjust(3) ~ 'x'.center(3, '日') ~ 'a\\tb'.expandtabs(4) ~ 'aB'.swapcase()",
    "'aß'.casefold() ~ 'ab'.isascii() ~ 'a1'.isidentifier() ~ 'A b'.istitle() ~ 'a'.isprintable()",
    "[1, 2, 1].count(1) ~ [1, 2].index(2) ~ (1, 2).index(1) ~ {'a': 1}.copy() ~ [1].copy()",
    "people | tojson(indent=2, sort_keys=true) ~ 'é' | tojson(ensure_ascii=true)",
    "people | tojson(separators=[',', ':']) ~ [] | tojson(none) ~ {'a': []} | tojson(indent=1)",
    "'a' ~ 1 ~ 2.0 ~ none ~ [1] ~ nothing ~ ('b' if false)",
    "strftime_now('%e %F %D %T %y %C %G-%V %u %w %h %n %t %-d %^a %Z %%')",
]


@pytest.mark.parametrize("expression", AS_IN_JINJA)
def test_template_expressions_give_what_jinja_itself_gives(expression: str) -> None:
    source = "{{ " + expression + " }}"
    before = datetime.now()
    rendered = template(source).render([], extra={"people": PEOPLE})
    moments = (before, datetime.now())  # midnight may lie between them
    assert rendered in [reference(now).from_string(source).render(people=PEOPLE) for now in moments]


def test_loop_helpers_joiners_and_cyclers_render_as_in_jinja() -> None:
    source = """
{%- set comma, colour = joiner(), cycler('red', 'blue') %}
{%- for p in people %}{{ comma() }}{{ colour.next() }}{{ loop.cycle(1, 2, 3) }}
{%- if loop.changed(p.age, p.home) %} changed{% endif %}{% if loop.changed(nothing) %}!{% endif %}{% endfor %}
{%- for age, group in people | groupby('age') %} {{ age }}:{{ group | map(attribute='name') | join('+') }}{% endfor %}
{{- colour.current }}{{ colour.reset() }}{{ colour.current }}"""
    expected = reference(datetime.now()).from_string(source).render(people=PEOPLE)
    assert template(source).render([], extra={"people": PEOPLE}) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "['a', 1] | sort",
        "['a'] | sum",
        "[] | batch(0) | list",
        "[1] | slice(-1) | list",
        "'%d' % 'a'",
        "'%s' % ()",
        "'%s' % (1, 2)",
        "'%(a)s' % {}",
        "'%' % 1",
        "'{x}'.format(1)",
        "'{'.format(1)",
        "'{:d}'.format('a')",
        "'x' | truncate(2)",
        "cycler()",
        "[1].index(2)",
        "[1] | map('upper', no=1) | list",
        "[1] | map(attribute='a', no=1) | list",
    ],
)
def test_expressions_that_jinja_refuses_are_refused(expression: str) -> None:
    with pytest.raises(TemplateError):
        show(expression)


# Names of stock jinja that are left out on purpose.
ABSENT_FILTERS = {
    "filesizeformat": "prompts show no sizes of files",
    "pprint": "it is for debugging, and lays values out by code that counts nothing",
    "random": "the same messages must give the same prompt",
    "striptags": "it is for web pages",
    "urlencode": "it is for web pages",
    "urlize": "it is for web pages",
    "wordwrap": "prompts wrap no lines, and it wraps by code that counts nothing",
    "xmlattr": "it is for web pages",
}
ABSENT_TESTS = {"escaped": "text carries no mark of being escaped"}
ABSENT_FUNCTIONS = {"lipsum": "the same messages must give the same prompt"}
ABSENT_METHODS = {
    "encode": "a prompt is text, not bytes",
    "format_map": "'format' with names does the same",
    "maketrans": "tables of characters reach further than a prompt needs",
    "translate": "tables of characters reach further than a prompt needs",
}


def test_every_filter_test_function_and_text_method_of_jinja_is_there_or_left_out_on_purpose() -> None:
    sandbox = Sandbox(Budget(TemplateLimits(), 0))
    methods = {name for name in dir(str) if not name.startswith("_")}
    assert set(defaults.DEFAULT_FILTERS) - set(sandbox.filters) == set(ABSENT_FILTERS)
    assert set(defaults.DEFAULT_TESTS) - set(sandbox.tests) == set(ABSENT_TESTS)
    assert set(defaults.DEFAULT_NAMESPACE) - set(sandbox.globals) == set(ABSENT_FUNCTIONS)
    assert methods - set(METHODS[str]) == set(ABSENT_METHODS)
