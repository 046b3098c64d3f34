"""A real Chromium with the server's page: what it shows, asks of the network, and writes to its console."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Running

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_MS = 30_000

# Every character that the answer's text shows, with the kind of guess that shades it.
_SHADES = """() => {
  const answer = [...document.querySelectorAll(".answer > .body")].at(-1), found = [];
  const walk = document.createTreeWalker(answer, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    if (walk.currentNode.parentElement.closest("figcaption")) continue;
    const kind = walk.currentNode.parentElement.closest("i")?.className ?? "";
    for (const each of walk.currentNode.data) found.push([each, kind]);
  }
  return found;
}"""


def chromium() -> str | None:
    """The browser's program: EDGESPEC_TEST_CHROMIUM, or one of the usual names."""
    return os.environ.get("EDGESPEC_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str | None:
    """What a test in a browser lacks, with how to get it."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed: pip install 'edgespec[browser]'"
    if chromium() is None:
        return "no Chromium was found: install one, or name it with EDGESPEC_TEST_CHROMIUM"
    return None


@contextmanager
def browsing() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root may not use the sandbox; only our page is shown.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """The page of a server in one tab. ``page`` is Playwright's; ``asked`` the bodies of requests for answers."""

    page: Any
    url: str
    console: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda said: self.console.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(self.url)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.elsewhere.append(request.url)
        if request.url.endswith("/completions"):
            self.asked.append(request.post_data_json)

    def ask(self, text: str) -> None:
        """Type a message and send it."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def wait(self) -> None:
        """Wait for the end of the answer."""
        self.page.wait_for_function("() => document.querySelector('#send').textContent === 'Send'")

    @property
    def answer(self) -> str:
        """The last answer's text."""
        return "".join(each for each, _ in self.shades)

    @property
    def shades(self) -> list[tuple[str, str]]:
        """The characters of the last answer, each with the kind that shades it; "" without."""
        return [(each, kind) for each, kind in self.page.evaluate(_SHADES)]

    @property
    def foot(self) -> str:
        """The line under the last answer."""
        return str(self.page.locator(".foot .said").last.inner_text())


@contextmanager
def opened(browser: Any, server: Running, *, console: tuple[str, ...] = (), **context: Any) -> Iterator[Watched]:
    """The server's page in a tab with empty storage.

    At the end the console has only messages with one of ``console``, and no other server was asked.
    """
    own = browser.new_context(**context)
    try:
        found = Watched(own.new_page(), server.url)
        try:
            yield found
        except BaseException as error:
            error.add_note(f"the page's console: {found.console}")
            raise
        unexpected = [said for said in found.console if not any(each in said for each in console)]
        assert (unexpected, found.elsewhere) == ([], [])
    finally:
        own.close()


def scripted(page: Any, *chunks: dict[str, Any]) -> None:
    """Answer the page's next requests with these events, in place of the server."""
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events),
    )
