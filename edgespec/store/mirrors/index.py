"""Package indexes, read over HTTP and from folders: where a wheel of one exact version is, and its sha256.

The formats are those of the simple repository API (PEP 503, 629, 691): a page of links, or JSON. All content is
untrusted input.
"""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from edgespec.errors import DownloadError
from edgespec.files.disk import expanded
from edgespec.store.mirrors.settings import IndexSettings
from edgespec.store.references import PackagePart
from edgespec.store.web import Response, UnreachableError, Web, tls_context, with_user_of

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"

# Pages of single projects; the largest page of the public index has about ten megabytes.
_LARGEST_PAGE_BYTES = 64 << 20
_MOST_LINKS = 1 << 20

# pip uses the same limit for an answer and for each piece of a file.
TIMEOUT_S = 15.0

_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-(?P<platform>[^-]+)\.whl")


@dataclass(frozen=True, slots=True)
class WheelLink:
    """A wheel's address; a local path is a ``file:`` URL. ``sha256`` is None if the index states none."""

    url: str
    filename: str
    sha256: str | None

    @property
    def path(self) -> Path | None:
        """The wheel's path on this machine, or None if it is remote."""
        return _local(self.url)


class PackageIndex:
    """The indexes of one user. ``stopped`` is called between pieces.

    Raises UnreachableError if a certificate file named by a variable cannot be read.
    """

    def __init__(self, settings: IndexSettings, stopped: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        self._settings = settings
        self._stopped = stopped
        self._timeout_s = timeout_s
        self._context = None if settings.certificates is None else tls_context(settings.certificates)
        self._webs: dict[str, Web] = {}

    def close(self) -> None:
        for web in self._webs.values():
            web.close()

    def web(self, url: str) -> Web:
        """The HTTP client for the host of an address."""
        host = urlsplit(url).netloc.rpartition("@")[2]
        if host not in self._webs:
            proxy = self._settings.proxy
            self._webs[host] = Web(host, self._stopped, self._timeout_s, context=self._context, proxy=proxy)
        return self._webs[host]

    def find(self, part: PackagePart) -> WheelLink:
        """The first wheel of that version that a source offers; a wheel for every platform comes before others.

        Raises DownloadError with the reason if no source offers one, UnreachableError if no source is reachable.
        """
        reasons: list[DownloadError] = []
        project = _normal(part.package)
        indexes = (f"{index.rstrip('/')}/{project}/" for index in self._settings.indexes)
        for source in (*self._settings.links, *indexes):
            try:
                found = [link for link in self._links(source) if _is_wheel_of(link.filename, part)]
            except DownloadError as error:
                reasons.append(error)
                continue
            if found:
                return min(found, key=lambda link: (not link.filename.endswith("-any.whl"), link.filename))
        if reasons:  # of several reasons, the one that may pass by itself or that its hint can solve
            raise next((reason for reason in reasons if isinstance(reason, UnreachableError)), reasons[0])
        raise DownloadError("the package index does not offer this version", hint=_CHECK_INDEX)

    def stream(self, link: WheelLink, offset: int) -> AbstractContextManager[Response]:
        """The bytes of a remote wheel from ``offset``."""
        headers = {"range": f"bytes={offset}-"} if offset else {}
        return self._get(link.url, headers, (416,) if offset else ())

    def _get(self, url: str, headers: Mapping[str, str], accept: tuple[int, ...]) -> AbstractContextManager[Response]:
        web = self.web(url)
        for index in (*self._settings.indexes, *self._settings.links):  # as pip: a page names its files without them
            with suppress(ValueError):  # an index that cannot be read is named when its turn comes
                url = with_user_of(url, index)
        given = {"user-agent": "edgespec", "accept-encoding": "identity", **headers}
        return web.answer(
            "GET", url, lambda response: _refusal(response, web.host), headers=given, accept=accept, follow=True
        )

    def _links(self, source: str) -> Iterator[WheelLink]:
        """The wheels that a folder, a page or a path offers."""
        local = _local(source)
        if local is not None:
            yield from _links_here(local)
            return
        web = self.web(source)
        with self._get(source, {"accept": _ACCEPT}, (404,)) as response:
            if response.status_code == 404:
                return
            body = web.whole(response, _LARGEST_PAGE_BYTES, f"the page of {web.host}")
            kind = response.headers.get("content-type", "").lower()
            base = str(getattr(response, "url", source))
        try:
            yield from (
                _links_of_json(json.loads(body), base)
                if "json" in kind
                else _links_of_page(body.decode("utf-8", "replace"), base)
            )
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise DownloadError(f"{web.host} does not answer like a package index", hint=_CHECK_INDEX) from error


_CHECK_INDEX = "check PIP_INDEX_URL and pip's configuration"


def _links_of_json(document: Any, base: str) -> Iterator[WheelLink]:
    for file in document["files"]:
        stated = (file.get("hashes") or {}).get("sha256")
        sha256 = stated if isinstance(stated, str) and re.fullmatch(r"[0-9a-f]{64}", stated) else None
        yield WheelLink(urljoin(base, str(file["url"])), str(file["filename"]), sha256)


def _links_of_page(text: str, base: str) -> Iterator[WheelLink]:
    anchors = _Anchors()
    anchors.feed(text)
    for target in anchors.targets[:_MOST_LINKS]:
        url, fragment = urldefrag(urljoin(base, target))
        sha256 = _SHA256.search(fragment)
        yield WheelLink(url, unquote(urlsplit(url).path.rpartition("/")[2]), sha256[1] if sha256 else None)


def _links_here(source: Path) -> Iterator[WheelLink]:
    """What a local folder offers: a page of links, or wheel files."""
    try:
        if source.suffix == ".whl" and source.is_file():
            yield WheelLink(source.absolute().as_uri(), source.name, None)
        page = source / "index.html" if source.is_dir() else source
        if page.suffix in (".html", ".htm") and page.is_file():
            yield from _links_of_page(page.read_text(encoding="utf-8"), page.absolute().as_uri())
        if source.is_dir():
            for path in sorted(source.glob("*.whl")):
                yield WheelLink(path.absolute().as_uri(), path.name, None)
    except (OSError, ValueError) as error:
        raise DownloadError(f"{source} cannot be read: {error}", hint=_CHECK_INDEX) from error


class _Anchors(html.parser.HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") if tag == "a" else None
        if target:
            self.targets.append(target)


def _local(source: str) -> Path | None:
    """The local path that a source denotes, or None if the source is remote."""
    scheme = urlsplit(source).scheme
    if scheme == "file":
        return Path(url2pathname(urlsplit(source).path))
    return None if scheme in ("http", "https") else expanded(source)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_wheel_of(filename: str, part: PackagePart) -> bool:
    wheel = _WHEEL.fullmatch(filename)
    return wheel is not None and _normal(wheel["name"]) == _normal(part.package) and wheel["version"] == part.version


def _refusal(response: Response, host: str) -> DownloadError:
    status = response.status_code
    if status in (401, 403):
        hint = "put the user name and password into PIP_INDEX_URL: https://USER:PASSWORD@HOST/simple"
        return UnreachableError(f"{host} refuses access (HTTP {status})", hint=hint)
    if status == 404:
        return DownloadError(f"{host} has no such file (HTTP 404)", hint=_CHECK_INDEX)
    if status == 429 or status >= 500:
        return UnreachableError(f"{host} has an internal problem (HTTP {status})", hint="try again later")
    return DownloadError(f"{host} refused the request (HTTP {status})", hint=_CHECK_INDEX)
