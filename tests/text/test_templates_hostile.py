"""Hostile templates end in TemplateError or in a small harmless text, quickly and with little memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.template import ChatTemplate
from tests.text.hostile_templates import CHEAP, REFUSED

# Ten times the default deadline of a template: a busy machine once took more than twice the deadline. Without limits
# macro-wide-defaults still runs after 20 s.
SECONDS = 10 * TemplateLimits().deadline_s
MEGABYTES = 50
HARMLESS = 100_000  # most characters that a harmless template prints

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]


def run(source: str, limits: TemplateLimits | None = None) -> str | TemplateError:
    try:
        return ChatTemplate(source, tokens={"bos_token": "<s>", "eos_token": "</s>"}, limits=limits).render(MESSAGES)
    except TemplateError as error:
        return error


@pytest.fixture(scope="module", autouse=True)
def _jinja_is_loaded() -> None:
    run("{{ messages | tojson }}")  # jinja2's import must not count


def measured(source: str) -> str | TemplateError:
    """``run(source)`` twice: once to check the time, once to check the memory (tracing is slow)."""
    before = time.process_time()
    result = run(source)
    seconds = time.process_time() - before
    tracemalloc.start()
    try:
        run(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < MEGABYTES * 1_000_000
    return result


@pytest.mark.slow
@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_a_hostile_template_is_refused_quickly_and_with_little_memory(source: str) -> None:
    result = measured(source)
    assert isinstance(result, TemplateError)
    assert 10 < len(result.message) < 600
    assert "\n" not in result.message


@pytest.mark.slow
@pytest.mark.parametrize("source", CHEAP.values(), ids=CHEAP.keys())
def test_an_odd_but_cheap_template_is_refused_or_prints_little(source: str) -> None:
    result = measured(source)
    assert isinstance(result, TemplateError) or len(result) < HARMLESS


WORST = [
    "keeping-megabytes", "keeping-lists", "keeping-namespaces", "wide-text-doubling", "filling-the-output",
    "source-outputs", "source-parentheses", "split-by-letter",
]  # fmt: skip
CHILD = """
import pathlib, sys
from edgespec.errors import TemplateError
from edgespec.text.chat_template.template import ChatTemplate
source = sys.stdin.read()
ChatTemplate("{{ messages | tojson }}", tokens={"bos_token": "", "eos_token": ""}).render([])
def peak():
    # Not ru_maxrss on Linux: a child inherits its parent's.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1e3
    if sys.platform == "win32":
        import psutil
        return psutil.Process().memory_info().peak_wset / 1e6
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
before = peak()
try:
    ChatTemplate(source, tokens={"bos_token": "", "eos_token": ""}).render([{"role": "user", "content": "x"}])
except TemplateError:
    pass
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_a_hostile_template_makes_the_process_grow_little(name: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=REFUSED[name], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(child.stdout) < MEGABYTES


def test_the_deadline_stops_a_template_within_the_step_limit() -> None:
    limits = TemplateLimits(steps=10**12, total_bytes=10**12, deadline_s=0.1)
    before = time.process_time()
    result = run("{% for a in range(9999) %}{% for b in range(99) %}{{ b }}{% endfor %}{% endfor %}", limits)
    assert isinstance(result, TemplateError)
    assert "0.1 s" in result.message
    assert time.process_time() - before < SECONDS


def test_the_step_limit_always_stops_a_template_at_the_same_point() -> None:
    source = "{% for i in range(N) %}{{ i }}{% endfor %}"
    limits = TemplateLimits(steps=10_000, deadline_s=60)
    first = [isinstance(run(source.replace("N", str(n)), limits), str) for n in range(1000, 3000, 50)]
    again = [isinstance(run(source.replace("N", str(n)), limits), str) for n in range(1000, 3000, 50)]
    assert first == again == sorted(first, reverse=True)
    assert True in first
    assert False in first


def test_renderings_of_one_template_share_no_state() -> None:
    """Two threads with one template share no budget, namespace or global."""
    template = ChatTemplate(
        "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
        tokens={"bos_token": "", "eos_token": ""},
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


def test_templates_cannot_change_messages_or_see_their_attributes() -> None:
    class Secret(str):
        password = "hunter2"

    message = {"role": Secret("user"), "content": "x"}
    result = ChatTemplate("{{ messages[0].role.password }}", tokens={"bos_token": "", "eos_token": ""}).render(
        [message]
    )
    assert result == ""
    assert message == {"role": "user", "content": "x"}
