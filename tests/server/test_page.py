"""The page at ``/`` over HTTP: who gets it, and what it may do in a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from edgespec.server import page as serving
from edgespec.server.page import RUNNING, policy, wants_page
from edgespec.server.security import Access
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

BROWSER = {
    "accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
}
PAGE = serving._FILE.read_text(encoding="utf-8")


def test_a_browser_gets_the_page(server: Running) -> None:
    with server.client() as client:
        reply = client.get("/", headers=BROWSER)
        assert reply.status_code == 200
        assert reply.text == PAGE
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert client.head("/", headers=BROWSER).status_code == 200


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/plain", "", "text/html;q=0, */*"])
def test_other_clients_get_a_line_of_text(server: Running, accept: str) -> None:
    with server.client() as client:
        reply = client.get("/", headers={**BROWSER, "accept": accept})
        assert (reply.status_code, reply.text) == (200, RUNNING)
        assert reply.headers["content-type"].startswith("text/plain")
        assert reply.headers["vary"] == "Accept, User-Agent"
        assert client.head("/").status_code == 200
        java = {"accept": "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2", "user-agent": "Java/21.0.2"}
        assert client.get("/", headers=java).text == RUNNING


def test_capital_letters_and_blanks_make_no_difference() -> None:
    assert wants_page("application/json, Text/HTML ; q=0.5", "Mozilla/5.0")
    assert not wants_page("text/html-like", "Mozilla/5.0")


def test_the_policy_lets_the_pages_own_script_and_style_run_and_nothing_else(server: Running) -> None:
    with server.client() as client:
        sent = client.get("/", headers=BROWSER).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in sent.split("; "))
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{element}-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"
    assert "unsafe" not in sent


def test_another_script_would_have_another_hash() -> None:
    assert policy(PAGE) != policy(PAGE.replace('"use strict";', '"use strict"; '))
    with pytest.raises(ValueError, match="too many"):
        policy(PAGE + "<script>alert()</script>")


def test_the_page_names_no_other_origin_and_makes_no_markup_of_text() -> None:
    assert set(re.findall(r"\w+://[^\s'\"`)]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "import("):
        assert dangerous not in PAGE
    assert not re.search(r"\son\w+=|\sstyle=", PAGE), "the policy would refuse it"


def test_the_page_comes_without_a_key_and_answers_do_not(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(depth=3), access=Access(keys=("a-long-key",))) as own, own.client() as client:
        assert client.get("/", headers=BROWSER).text == PAGE
        assert client.get("/v1/models").status_code == 401


def test_the_page_is_not_for_a_host_that_is_not_this_machine(server: Running) -> None:
    with server.client() as client:
        assert client.get("/", headers={**BROWSER, "host": "evil.example"}).status_code == 403
