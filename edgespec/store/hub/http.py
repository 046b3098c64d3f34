"""Requests to a model hub through huggingface_hub's HTTP client, with failures reported as one precise sentence.

Only the client, the token and the settings come from huggingface_hub. Its download functions cannot resume after the
process ends, wait up to a minute for an unresponsive host, and log to stderr (seen in version 2.4.0); its header
builder fetches a list for telemetry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from edgespec.errors import DownloadError
from edgespec.files.disk import expanded
from edgespec.store.references import HubFile, hub_home
from edgespec.store.web import MAX_REDIRECTS, Response, UnreachableError, Web, hub_settings

# The listing of the largest repositories stays well under this size.
LARGEST_JSON_BYTES = 32 << 20

# The hub itself, where HF_ENDPOINT is empty.
_PUBLIC = "https://huggingface.co"


class HubHttp:
    """Requests for one fetch. ``stopped`` is called between attempts; ``overdue`` is for the watching thread.

    Raises UnreachableError if the hub's address, or a certificate file that a variable names, cannot be read.
    """

    def __init__(self, endpoint: str | None, stopped: Callable[[], bool]) -> None:
        self._settings = hub_settings()
        self.endpoint = (endpoint or self._settings.ENDPOINT or _PUBLIC).rstrip("/")
        try:
            host = urlsplit(self.endpoint).netloc.rpartition("@")[2] or self.endpoint
        except ValueError as error:
            raise UnreachableError("the address of the hub cannot be read", hint="check HF_ENDPOINT") from error
        self.web = Web(host, stopped, float(self._settings.HF_HUB_ETAG_TIMEOUT))

    def close(self) -> None:
        self.web.close()

    # ------------------------------------------------------------------------------------------ requests

    def file_url(self, repo: str, revision: str, filename: str) -> str:
        """The hub's URL of a file."""
        return f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(filename)}"

    def get_listing(self, wanted: HubFile) -> Any:
        """The hub's description of the repository of ``wanted`` at its revision, with the sizes of its files.

        Raises DownloadError, UnreachableError, CancelledError.
        """
        path = f"/api/models/{wanted.repo}/revision/{quote(wanted.revision, safe='')}?blobs=true"
        with self._answer("GET", f"{self.endpoint}{path}", wanted) as response:
            self.web.refuse_page(response)
            body = self.web.whole(response, LARGEST_JSON_BYTES, f"the hub's description of {wanted.repo}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DownloadError(
                f"{self.endpoint} does not answer like a model hub (no JSON)",
                hint="check HF_ENDPOINT, the proxy, and any sign-in page",
            ) from error

    def head(self, url: str, wanted: HubFile) -> Mapping[str, str]:
        """The headers that describe a file. Redirects within the hub are followed; one to a CDN is the answer."""
        for _ in range(MAX_REDIRECTS):
            with self._answer("HEAD", url, wanted, follow=False) as response:
                location = response.headers.get("location")
                if not 300 <= response.status_code < 400 or not location:
                    if "x-repo-commit" not in response.headers:
                        self.web.refuse_page(response)
                    return response.headers
                try:
                    target = urljoin(url, location)
                    (before, own), (scheme, host) = urlsplit(url)[:2], urlsplit(target)[:2]
                    here = host in (own, urlsplit(self.endpoint).netloc)
                    here = here and (before, scheme) != ("https", "http")  # the token would be readable
                except ValueError:  # an address that nothing can be fetched from
                    here = False
                if not here:
                    return response.headers
                url = target
        raise DownloadError(f"the hub's redirects for {wanted.label} form a loop")

    def stream(self, url: str, offset: int, wanted: HubFile) -> AbstractContextManager[Response]:
        """The file's bytes from ``offset``: status 206, 200 if the server starts over, or 416."""
        extra = {"range": f"bytes={offset}-"} if offset else {}
        return self._answer("GET", url, wanted, extra=extra, accept=(416,) if offset else ())

    def _answer(
        self,
        method: str,
        url: str,
        wanted: HubFile,
        *,
        follow: bool = True,
        extra: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (),
    ) -> AbstractContextManager[Response]:
        return self.web.answer(
            method,
            url,
            lambda response: refusal(response, self.web.host, wanted),
            headers=self._headers() | dict(extra or {}),
            follow=follow,
            accept=accept,
        )

    def _headers(self) -> dict[str, str]:
        # Compression would hide the size and break resuming.
        headers = {"user-agent": "edgespec", "accept-encoding": "identity"}
        token = None if self._settings.HF_HUB_DISABLE_IMPLICIT_TOKEN else self._token()
        if token:
            headers["authorization"] = f"Bearer {token}"
        return headers

    def _token(self) -> str | None:
        """The user's token. Raises UnreachableError if it cannot be read: callers may use what is on this machine."""
        from huggingface_hub import get_token

        variable = next(filter(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")), None)
        file = Path(self._settings.HF_TOKEN_PATH)
        try:
            stated = any(map(os.environ.get, ("HF_HOME", "HF_TOKEN_PATH")))
            if variable is not None or file.is_absolute() or stated:
                token = get_token()
            else:  # an empty variable, for huggingface_hub the current folder, whose files may be anybody's
                file = hub_home(os.environ, expanded("~")) / "token"
                usable = file.is_absolute() and file.exists()
                token = file.read_text(encoding="utf-8").strip() if usable else None
            readable = token is None or (token.isascii() and token.isprintable())
        except (OSError, UnicodeDecodeError):
            readable = False
        if readable:
            return token
        raise UnreachableError(
            f"the token in {variable or file} cannot be read",
            hint="correct it" if variable else "correct it, or set HF_TOKEN",
        )


# --------------------------------------------------------------------------------------------- failures


def refusal(response: Response, host: str, wanted: HubFile) -> DownloadError:
    """The error for an HTTP status, from the status and the hub's own error code."""
    status = response.status_code
    code = response.headers.get("x-error-code", "")
    page = f"the page of {wanted.repo} on the hub"
    wait = response.headers.get("retry-after")
    after = f" and asks to wait {wait} s" if wait and wait.isascii() and wait.isdigit() else ""
    refusals: tuple[tuple[bool, type[DownloadError], str, str], ...] = (
        (
            code == "GatedRepo",
            DownloadError,
            f"{wanted.repo} is gated: accept its terms first (HTTP {status})",
            f"accept them on {page}, then run: hf auth login (or set HF_TOKEN)",
        ),
        (
            code == "RevisionNotFound",
            DownloadError,
            f"{wanted.repo} has no revision {wanted.revision!r}",
            "check the part after @; a quantisation is ORG/REPO:QUANT",
        ),
        (
            code == "EntryNotFound",
            DownloadError,
            f"{wanted.repo} has no file {wanted.filename!r} at revision {wanted.revision!r}",
            f"look at {page} for the names of its files",
        ),
        (
            code == "RepoNotFound" or (status == 404 and not code),
            DownloadError,
            f"the hub has no repository {wanted.repo}, or it is private (HTTP {status})",
            "check the name; for a private repository run: hf auth login (or set HF_TOKEN)",
        ),
        (
            status == 401,
            DownloadError,
            f"{host} requires a valid token for {wanted.repo} (HTTP 401)",
            "run: hf auth login (or set or correct HF_TOKEN)",
        ),
        (
            status == 403,
            DownloadError,
            f"{host} forbids access to {wanted.repo} (HTTP 403)",
            f"check the token's permissions and {page}",
        ),
        (
            status == 429,
            UnreachableError,
            f"{host} limits the rate of requests (HTTP 429){after}",
            "try again later",
        ),
        (status >= 500, UnreachableError, f"{host} has an internal problem (HTTP {status})", "try again later"),
    )
    for applies, kind, message, hint in refusals:
        if applies:
            return kind(message, hint=hint)
    return DownloadError(f"{host} refused the request for {wanted.label} (HTTP {status})")
