"""Hostile templates: each must end in TemplateError or in a small harmless text, fast, and without eating memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from edgespec.errors import TemplateError
from edgespec.text.templates import ChatTemplate, TemplateLimits

SECONDS = 1.0
MEGABYTES = 50
HARMLESS = 100_000  # characters that a template may print without having done any harm

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]


def doubled(start: str, step: str, use: str, times: int = 60) -> str:
    return (
        "{% set n = namespace(x=" + start + ") %}"
        "{% for i in range(" + str(times) + ") %}{% set n.x = " + step + " %}{% endfor %}{{ " + use + " }}"
    )


MEGA = "('x' * 1000000)"
NEST = doubled("[1]", "[n.x, n.x]", "USE")  # 2**60 leaves in sixty small lists
DEEP = doubled("[1]", "[n.x]", "USE", 5000)

# Ends in TemplateError.
REFUSED = {
    # --- sizes of single operations
    "text-times": "{{ 'x' * 10**9 }}",
    "times-text": "{{ 10**9 * 'x' }}",
    "list-times": "{{ [0] * 10**9 }}",
    "tuple-times": "{{ (0, 1) * 10**9 }}",
    "power-tower": "{{ 10**10**9 }}",
    "power-in-set": "{% set x = 9 ** 9 ** 9 %}",
    "negative-power-tower": "{{ (-3) ** 100000000 }}",
    "integer-squaring": doubled("3", "n.x * n.x", "n.x"),
    "integer-adding": doubled("3", "n.x + n.x", "n.x", 5000),
    "huge-literal": "{{ " + "9" * 60_000 + " }}",
    "huge-hex-literal": "{{ 0x" + "f" * 60_000 + " }}",
    "huge-literal-in-arithmetic": "{{ " + "9" * 4000 + " * 2 }}",
    "float-overflow": "{{ 1e308 ** 9 }}",
    "complex-number": "{{ (-1) ** 0.5 }}",
    "division-by-zero": "{{ 1 // 0 }}",
    # --- text formatting
    "percent-width": "{{ '%0999999999d' % 1 }}",
    "percent-star": "{{ '%*d' % (999999999, 1) }}",
    "format-method": "{{ '{:>999999999}'.format(1) }}",
    "format-attribute-walk": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "format-map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format-filter": "{{ '%999999999s' | format(1) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "rjust": "{{ 'x'.rjust(10**9) }}",
    "center-method": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "translate": "{{ 'x'.translate({120: 'y' * 1000000}) }}",
    "encode": "{{ 'x'.encode('utf-32') }}",
    "replace-method": "{% set s = " + MEGA + " %}{{ s.replace('x', s) }}",
    "replace-filter": "{% set s = " + MEGA + " %}{{ s | replace('x', s) }}",
    "replace-nothing": "{% set s = " + MEGA + " %}{{ s.replace('', s) }}",
    "join-method": "{% set s = " + MEGA + " %}{{ s.join(range(5000) | map('string')) }}",
    "join-filter": "{% set s = " + MEGA + " %}{{ range(5000) | join(s) }}",
    "join-many-references": "{% set s = " + MEGA + " %}{{ ''.join([s] * 50000) }}",
    "concat-many": "{% set s = " + MEGA + " %}{{ " + " ~ ".join(["s"] * 50) + " }}",
    "date-width": "{{ strftime_now('%999999999d') }}",
    "date-long": "{{ strftime_now('%B' * 100000) }}",
    "json-indent": "{{ messages | tojson(indent=1000000000) }}",
    "json-separators": "{{ messages | tojson(separators=('x' * 1000000, 'y')) }}",
    "json-escapes": "{% set s = '\x01' * 3000000 %}{{ [s, s] | tojson }}",
    "indent-width": "{{ 'a\\nb' | indent(10**9) }}",
    "indent-text": "{{ ('\\n' * 1000000) | indent('x' * 1000000) }}",
    "center-filter": "{{ 'x' | center(10**9) }}",
    "wordwrap": "{{ " + MEGA + " | wordwrap(1) }}",
    "truncate": "{{ 'x' | truncate(5, True, 'x' * 10**9) }}",
    "urlize": "{{ ('http://' * 100000) | urlize }}",
    "striptags": "{{ ('<' * 1000000) | striptags }}",
    "escape": "{{ ('<' * 1000000) | escape }}",
    "xmlattr": "{{ {'a': 'x'} | xmlattr }}",
    "pprint": "{{ messages | pprint }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice-filter": "{{ [1] | slice(10**9) | list }}",
    "round-huge": "{{ 5 | round(-1000000000) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "split-all": "{{ (('a ' * 2000000).split()) | length }}",
    "split-by-letter": "{{ ('a' * 4000000).split('a') | length }}",
    "split-lines": "{{ ('\\n' * 4000000).splitlines() | length }}",
    "list-of-text": "{{ ('x' * 4000000) | list | length }}",
    "upper-of-many": doubled("'\u0390' * 100000", "n.x.upper()", "n.x | length"),
    # --- growth
    "concat-doubling": doubled("'x'", "n.x ~ n.x", "n.x"),
    "add-doubling": doubled("'x'", "n.x + n.x", "n.x"),
    "list-doubling": doubled("[1]", "n.x + n.x", "n.x | length"),
    "wide-text-doubling": doubled("'\U0001f600'", "n.x ~ n.x", "n.x"),
    "keeping-megabytes": doubled("[]", "n.x + [" + MEGA + " ~ loop.index]", "n.x | length", 1000),
    "keeping-slices": "{% set s = " + MEGA + " %}" + doubled("[]", "n.x + [s[i:]]", "n.x | length", 1000),
    "keeping-namespaces": doubled("none", "namespace(a=n.x, b=[i, i])", "n.x", 100_000),
    "keeping-lists": doubled("none", "[n.x, [], {}, i * 1000]", "n.x", 99_000),
    "keeping-macros": (
        "{% set n = namespace(x=none) %}{% for i in range(90000) %}"
        "{% macro m(a, b, c) %}{{ a }}{% endmacro %}{% set n.x = [n.x, m] %}{% endfor %}"
    ),
    "filling-a-set-block": "{% set x %}{% for i in range(90000) %}" + "y" * 5000 + "{% endfor %}{% endset %}",
    "filling-a-macro": (
        "{% macro m() %}{% for i in range(90000) %}" + "y" * 5000 + "{% endfor %}{% endmacro %}{% set x = m() %}"
    ),
    "filling-a-filter-block": "{% filter upper %}{% for i in range(90000) %}" + "y" * 5000 + "{% endfor %}{% endfilter %}",
    "filling-the-output": "{% for i in range(90000) %}" + "y" * 5000 + "{% endfor %}",
    # --- time
    "range-huge": "{% for i in range(10**9) %}{% endfor %}",
    "range-beyond-64-bits": "{{ range(10**30) | length }}",
    "range-nested": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "range-nested-deep": "{% for a in range(99) %}" * 8 + "{{ a }}" + "{% endfor %}" * 8,
    "loop-filtered": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "loop-wide-body": "{% for a in range(90000) %}" + "{% if q %}{% endif %}" * 1000 + "{% endfor %}",
    "loop-wide-test": "{% for a in range(90000) if " + " and ".join(["true"] * 90) + " %}{% endfor %}" * 1
    + "{% for a in range(90000) if " + " and ".join(["true"] * 90) + " %}{% endfor %}",
    "macro-wide-defaults": (
        "{% macro m(" + ", ".join(f"a{i}=q" for i in range(1500)) + ") %}{% endmacro %}"
        "{% for i in range(90000) %}{% if m() %}{% endif %}{% endfor %}"
    ),
    "macro-recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro-double-recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "macro-mutual-recursion": (
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}"
    ),
    "call-block-recursion": (
        "{% macro m() %}{{ caller() }}{% call m() %}{% endcall %}{% endmacro %}{% call m() %}x{% endcall %}"
    ),
    "loop-recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loop-recursion-wide": "{% for a in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "reverse-search": "{% set a = 'a' * 2000000 %}{{ a.rfind('b' ~ 'a' * 1000000) }}",
    "reverse-split": "{% set a = 'a' * 2000000 %}{{ a.rsplit('b' ~ 'a' * 1000000) }}",
    "reverse-partition": "{% set a = 'a' * 2000000 %}{{ a.rpartition('b' ~ 'a' * 1000000) }}",
    "strip-large-set": "{{ ('a' * 2000000).strip('b' * 2000000 ~ 'a') }}",
    "trim-large-set": "{{ ('a' * 2000000) | trim('b' * 2000000 ~ 'a') }}",
    "search-loop": "{% set a = 'a' * 2000000 %}{% for i in range(99999) %}{% if 'ab' in a %}{% endif %}{% endfor %}",
    "find-loop": "{% set a = 'a' * 2000000 %}{% for i in range(99999) %}{% set x = a.find('ab') %}{% endfor %}",
    "count-loop": "{% set a = 'a' * 2000000 %}{% for i in range(99999) %}{% set x = a.count('ab') %}{% endfor %}",
    "equal-loop": (
        "{% set a = 'a' * 2000000 ~ 'b' %}{% set b = 'a' * 2000000 ~ 'c' %}"
        "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}"
    ),
    "in-list-of-large-texts": (
        "{% set a = 'a' * 1000000 ~ 'b' %}{% set b = 'a' * 1000000 ~ 'c' %}{{ a in [b] * 100000 }}"
    ),
    "sort-large-texts": "{% set a = 'a' * 1000000 %}{{ ([a ~ 'b', a ~ 'c'] * 50000) | sort | length }}",
    "colliding-hashes": "{{ range(0, 99999 * (2**61 - 1), 2**61 - 1) | unique | list | length }}",
    "groupby": "{{ range(99999) | groupby('real') }}",
    "sum": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "map-of-map": "{% for i in range(9999) %}{% set x = range(9999) | map('string') %}{% endfor %}",
    "select-by-in": "{{ range(9999) | map('string') | select('in', range(9999) | map('string')) | list | length }}",
    "selectattr-deep-path": "{{ messages | selectattr('role' ~ '.a' * 1000000) | list }}",
    # --- values that are endless to walk
    "dag-print": NEST.replace("USE", "n.x"),
    "dag-text": NEST.replace("USE", "n.x | string | length"),
    "dag-concat": NEST.replace("USE", "(n.x ~ '') | length"),
    "dag-json": NEST.replace("USE", "n.x | tojson"),
    "dag-equal": doubled("[1]", "[n.x, n.x]", "n.x == [n.x, [n.x, 1]]"),
    "dag-equal-copy": doubled("[[1], [1]]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "n.x[0] == n.x[1]"),
    "dag-in": doubled("[[1], [1]]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "n.x[0] in [n.x[1]]"),
    "dag-less": doubled("[[1], [1]]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "n.x[0] < n.x[1]"),
    "dag-eq-test": doubled("[[1], [1]]", "[[n.x[0], n.x[0]], [n.x[1], n.x[1]]]", "n.x[0] is eq(n.x[1])"),
    "dag-hash": doubled("(1,)", "(n.x, n.x)", "{}[n.x]"),
    "dag-hash-key": doubled("(1,)", "(n.x, n.x)", "{n.x: 1}"),
    "dag-hash-get": doubled("(1,)", "(n.x, n.x)", "{}.get(n.x)"),
    "dag-hash-in": doubled("(1,)", "(n.x, n.x)", "n.x in {}"),
    "dag-join": doubled("[1]", "[n.x, n.x]", "n.x | join"),
    "dag-raise": doubled("[1]", "[n.x, n.x]", "raise_exception(n.x)"),
    "deep-print": DEEP.replace("USE", "n.x"),
    "deep-json": DEEP.replace("USE", "n.x | tojson"),
    "deep-equal": DEEP.replace("USE", "n.x == [n.x]"),
    "namespace-cycle": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "namespace-cycle-in-list": "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x }}",
    "namespace-cycle-json": "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x | tojson }}",
    # --- getting out
    "class": "{{ ''.__class__ }}",
    "class-by-item": "{{ ''['__class__'] }}",
    "class-by-concat": "{{ ''['__cla' ~ 'ss__'] }}",
    "class-of-messages": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "class-of-undefined": "{{ nothing.__class__ }}",
    "class-by-map": "{{ [''] | map(attribute='__class__') | list }}",
    "class-by-selectattr": "{{ [''] | selectattr('__class__') | list }}",
    "class-by-attr": "{{ '' | attr('__class__') }}",
    "class-by-sort": "{{ ['', ''] | sort(attribute='__class__') }}",
    "mro": "{{ namespace.mro() }}",
    "function-globals": "{{ raise_exception.__globals__ }}",
    "function-code": "{{ range.__code__ }}",
    "method-self": "{{ messages[0].get.__self__ }}",
    "method-owner": "{{ messages[0].get.owner }}",
    "macro-internals": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "macro-environment": "{% macro m() %}{% endmacro %}{{ m._environment.globals }}",
    "caller-internals": "{% macro m() %}{{ caller._environment }}{% endmacro %}{% call m() %}{% endcall %}",
    "loop-internals": "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
    "loop-changed": "{% for m in messages %}{{ loop.changed(m) }}{% endfor %}",
    "undefined-internals": "{{ nothing._undefined_obj }}",
    "undefined-hint": "{{ messages[0].nothing._undefined_obj }}",
    "namespace-internals": "{{ namespace()._Namespace__attrs }}",
    "namespace-class": "{{ namespace().__class__ }}",
    "self": "{{ self }}",
    "self-internals": "{{ self._TemplateReference__context }}",
    "self-as-name": "{{ self.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "config": "{{ environment.globals }}",
    "context-internals": "{{ context.environment.x }}",
    "import": "{% import 'os' as os %}",
    "from-import": "{% from 'os' import path %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "block": "{% block a %}{{ super() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "debug-tag": "{% debug %}",
    "do-append": "{{ messages.append(1) }}",
    "pop": "{{ messages.pop() }}",
    "dict-update": "{{ messages[0].update({'a': 1}) }}",
    "dict-from-pairs": "{{ dict([['a', 1]]) }}",
    "call-text": "{{ 'x'() }}",
    "call-number": "{{ 5() }}",
    "call-undefined": "{{ nothing() }}",
    "print-method": "{{ 'x'.upper }}",
    "print-macro": "{% macro m() %}{% endmacro %}{{ m }}",
    "print-function": "{{ range }}",
    "print-loop": "{% for m in messages %}{{ loop }}{% endfor %}",
    "internal-filter-by-name": "{{ messages | map(' charge', 0, 0) | list }}",
    "loop-vars": "{{ range(3, _loop_vars={'a': 1}, b=2) }}",
    # --- the source itself
    "source-huge": "x" * 10_000_000,
    "source-parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "source-brackets": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "source-not": "{{ " + "not " * 16_000 + "1 }}",
    "source-minus": "{{ " + "-" * 60_000 + "1 }}",
    "source-plus-chain": "{{ 1" + " + 1" * 16_000 + " }}",
    "source-attributes": "{{ a" + ".b" * 30_000 + " }}",
    "source-items": "{{ a" + "[0]" * 20_000 + " }}",
    "source-filters": "{{ a" + "|list" * 12_000 + " }}",
    "source-if-else": "{{ " + "1 if 1 else " * 5_000 + "1 }}",
    "source-blocks": "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "source-loops": "{% for a in b %}" * 2_000 + "{% endfor %}" * 2_000,
    "source-macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(2_000)) * 2,
    "source-names": "".join("{%set a%d=1%}".replace("%d", str(i)) for i in range(4_500)),
    "source-branches": "".join("{%set a" + str(i) + "=1%}{%if a%}{%set b=1%}{%endif%}" for i in range(1_500)),
    "source-unclosed-tags": "{%" * 30_000,
    "source-unclosed-comments": "{#" * 30_000,
    "source-unclosed-raw": "{% raw %}" * 7_000,
    "source-quotes": "{{ " + "'" * 59_999 + " }}",
    "source-escapes": "{{ '" + "\\" * 60_000 + " }}",
    "source-digits-and-underscores": "{{ " + "1_" * 30_000 + "x }}",
    "source-floats": "{{ " + "1" * 30_000 + "e" * 30_000 + " }}",
    "source-spaces": "{{" + " " * 60_000 + "%",
    "source-nul": "{{ '\x00' * 10**9 }}",
    "source-commas": "{{ [" + "1," * 31_000 + "] }}",
    "source-outputs": "{{a}}" * 13_000,
    "keyword-twice": "{{ namespace(a=1, a=2) }}",
    "argument-twice": "{% macro m(a, a) %}{% endmacro %}",
    "break-outside": "{% break %}",
    "unknown-tag": "{% generationx %}",
    "generation-unclosed": "{% generation %}",
}  # fmt: skip

# May print something small, as long as it is cheap.
CHEAP = {
    "int-million-digits": "{{ ('9' * 1000000) | int }}",
    "float-million-digits": "{{ ('9' * 1000000) | float }}",
    "unicode-digits": "{{ ('\u0663' * 1000000) | int }}",
    "infinite-float": "{{ 1e999 }}",
    "whitespace-runs": " " * 60_000 + "{%- if 1 -%}" + " " * 2_000 + "{%- endif -%}",
    "whitespace-then-tags": (" " * 20 + "{% if 1 %}" + "\n" * 5 + "{% endif %}") * 1_000,
    "newlines": "\r\n" * 30_000,
    "braces": "{ " * 30_000,
    "raw-block": "{% raw %}" + "{{" * 20_000 + "{% endraw %}",
    "flat-elif": "{% if a %}" + "{% elif a %}" * 2_000 + "{% endif %}",
    "shadowed-functions": "{% set range = 5 %}{% set namespace = 6 %}{{ range }}",
    "dunder-name": "{{ __builtins__ }}{{ __import__ }}",
    "dunder-namespace": "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
    "unused-bad-filter": "{% if false %}{{ 1 | urlize }}{% endif %}",
    "many-small-loops": "{% for a in range(100) %}{% for b in range(100) %}{% endfor %}{% endfor %}",
    "undefined-walk": "{{ nothing }}{{ nothing | list }}{{ nothing | length }}{% for a in nothing %}{% endfor %}",
}


def run(source: str, limits: TemplateLimits | None = None) -> str | TemplateError:
    try:
        return ChatTemplate(source, bos_token="<s>", eos_token="</s>", limits=limits).render(MESSAGES)
    except TemplateError as error:
        return error


@pytest.fixture(scope="module", autouse=True)
def _jinja_is_loaded() -> None:
    run("{{ messages | tojson }}")  # its import is not the templates' doing


def measured(source: str) -> str | TemplateError:
    """``run(source)``, once against the clock and once against the memory, which tracing makes slow."""
    before = time.perf_counter()
    result = run(source)
    seconds = time.perf_counter() - before
    tracemalloc.start()
    try:
        run(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < MEGABYTES * 1_000_000
    return result


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_a_hostile_template_is_refused_quickly(source: str) -> None:
    result = measured(source)
    assert isinstance(result, TemplateError)
    assert 10 < len(result.message) < 600
    assert "\n" not in result.message


@pytest.mark.parametrize("source", CHEAP.values(), ids=CHEAP.keys())
def test_an_odd_template_is_harmless(source: str) -> None:
    result = measured(source)
    assert isinstance(result, TemplateError) or len(result) < HARMLESS


WORST = [
    "keeping-megabytes", "keeping-lists", "keeping-namespaces", "wide-text-doubling", "filling-the-output",
    "source-outputs", "source-parentheses", "split-by-letter",
]  # fmt: skip
CHILD = """
import resource, sys
from edgespec.errors import TemplateError
from edgespec.text.templates import ChatTemplate
source = sys.stdin.read()
ChatTemplate("{{ messages | tojson }}", bos_token="", eos_token="").render([])
def peak():
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 1e6 if sys.platform == "darwin" else size / 1e3
before = peak()
try:
    ChatTemplate(source, bos_token="", eos_token="").render([{"role": "user", "content": "x"}])
except TemplateError:
    pass
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the resource module exists on POSIX only")
@pytest.mark.parametrize("name", WORST)
def test_the_whole_process_grows_little(name: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=REFUSED[name], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(child.stdout) < MEGABYTES


def test_the_deadline_stops_what_the_steps_allow() -> None:
    limits = TemplateLimits(steps=10**12, total_bytes=10**12, deadline_s=0.1)
    before = time.perf_counter()
    result = run("{% for a in range(9999) %}{% for b in range(99) %}{{ b }}{% endfor %}{% endfor %}", limits)
    assert isinstance(result, TemplateError)
    assert "0.1 s" in result.message
    assert time.perf_counter() - before < SECONDS


def test_the_step_budget_is_deterministic() -> None:
    source = "{% for i in range(N) %}{{ i }}{% endfor %}"
    limits = TemplateLimits(steps=10_000, deadline_s=60)
    first = [isinstance(run(source.replace("N", str(n)), limits), str) for n in range(1000, 3000, 50)]
    again = [isinstance(run(source.replace("N", str(n)), limits), str) for n in range(1000, 3000, 50)]
    assert first == again == sorted(first, reverse=True)
    assert True in first
    assert False in first


def test_a_template_changes_nothing_that_outlives_it() -> None:
    """Two threads, one template: no budget, namespace or global is shared."""
    template = ChatTemplate(
        "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
        bos_token="",
        eos_token="",
    )
    results: list[str] = []
    messages = MESSAGES * 200

    def work() -> None:
        results.extend(template.render(messages) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["400"] * 40


def test_messages_are_untouched_and_invisible() -> None:
    class Secret(str):
        password = "hunter2"

    message = {"role": Secret("user"), "content": "x"}
    result = ChatTemplate("{{ messages[0].role.password }}", bos_token="", eos_token="").render([message])
    assert result == ""
    assert message == {"role": "user", "content": "x"}
