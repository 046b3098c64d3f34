"""The site that `make docs` builds has no warning, no dead link, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import edgespec
from tests.support.pages import PAGES, ROOT

pytestmark = pytest.mark.slow

# Tags that make a browser fetch a file, and the attribute with its address.
FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


@dataclass
class Page(HTMLParser):
    """The links of a page, the files it fetches, and its anchors."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in FETCHED and FETCHED[tag] in found:
            self.fetched.append(found[FETCHED[tag]])


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does, in another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", source / "mkdocs.yml", "--site-dir", site]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=source, env=quiet, check=False)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: read(path) for path in sorted(site.rglob("*.html"))}


def dead_links(pages: dict[Path, Page], site: Path) -> list[str]:
    """Links to a missing file of the site, or to a missing anchor of a file."""
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            # The 404 page may be shown at any address and links from the site's root.
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            there = pages[target].anchors if target in pages else {anchor}
            if not target.is_file() or (anchor and anchor not in there):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_make_docs_builds_strictly_into_the_stated_folder() -> None:
    # Without the flags of a `make` that runs the tests: with them `make` prints the folders it enters.
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    recipe = subprocess.run(
        ["make", "-n", "docs"], capture_output=True, text=True, cwd=ROOT, env=alone, check=True
    ).stdout
    assert recipe.splitlines()[-1].endswith("mkdocs build --strict")
    assert re.search(r"^site_dir: build/docs$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_docs_page_is_in_the_site(site: Path) -> None:
    missing = [page for page in PAGES if not (site / page.removeprefix("docs/").replace(".md", ".html")).is_file()]
    assert missing == []


def test_the_site_has_no_dead_links(pages: dict[Path, Page], site: Path) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert dead_links(pages, site) == []


def test_the_link_checker_detects_a_dead_link(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a><a href="c.html">y</a><a href="#there">z</a>')
    (tmp_path / "b.html").write_text('<h1 id="elsewhere">B</h1>')
    pages = {path: read(path) for path in (tmp_path / "a.html", tmp_path / "b.html")}
    assert dead_links(pages, tmp_path) == ["a.html: b.html#here", "a.html: c.html", "a.html: #there"]


def test_the_docs_build_fails_on_a_dead_link(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[gone](gone.md) and [nowhere](#nowhere)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.partition("\nnav:")[0].replace("extra_css:\n  - style.css\n", "")
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stderr
    assert "#nowhere" in done.stderr


def test_the_docs_site_loads_nothing_from_other_hosts(pages: dict[Path, Page], site: Path) -> None:
    fetched = {name for page in pages.values() for name in page.fetched}
    assert fetched
    assert [name for name in fetched if urlsplit(name).netloc] == []
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?https?:[^)\"']*", sheets)


def test_every_public_name_is_in_the_api_reference(pages: dict[Path, Page], site: Path) -> None:
    anchors = set().union(*(page.anchors for path, page in pages.items() if path.parent == site / "api"))
    public = set(edgespec.__all__) - {"__version__", "Event"}  # a version, and a union of public names
    named = {name for name in public if {f"edgespec.{name}", f"edgespec.errors.{name}"} & anchors}
    assert public - named == set()
