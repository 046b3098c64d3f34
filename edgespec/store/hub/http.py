"""Requests to a model hub through huggingface_hub's own HTTP client, with failures told as one precise sentence.

Only the client, the token and the settings are taken from huggingface_hub. Its download functions cannot resume
after the process ends, wait up to a minute for a host that does not answer, and report through a logger that
writes to stderr (seen in version 2.4.0); its header builder fetches a list for telemetry.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast
from urllib.parse import quote, urljoin, urlsplit

from edgespec.errors import CancelledError, DownloadError
from edgespec.store.references import HubFile

# A host that does not accept a connection within 5 s is not going to deliver a gigabyte.
CONNECT_TIMEOUT_S = 5.0

# 429 and 5xx are retried within this many seconds in total: enough for a hiccup, too short to be taken for a hang.
RETRY_BUDGET_S = 6.0
FIRST_PAUSE_S = 0.4
RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})

MAX_REDIRECTS = 10
# The listing of the largest repositories stays well under this; more is not a listing.
LARGEST_JSON_BYTES = 32 << 20


class HubUnreachableError(DownloadError):
    """The hub could not be asked at all (network, time-out, overload): what the cache holds may stand in."""


class Response(Protocol):
    """The part of the client's response that is used here."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    def iter_bytes(self) -> Iterator[bytes]: ...


def hub_settings() -> Any:
    """huggingface_hub's constants; imported on first use because the import alone takes a tenth of a second."""
    with warnings.catch_warnings():  # it warns at import about deprecated variables, on stderr
        warnings.simplefilter("ignore")
        from huggingface_hub import constants

    return constants


class HubHttp:
    """Requests for one fetch. ``stopped`` is asked between attempts; ``overdue`` is for the watching thread."""

    def __init__(self, endpoint: str | None, stopped: Callable[[], bool]) -> None:
        self._settings = hub_settings()
        self.endpoint = (endpoint or self._settings.ENDPOINT).rstrip("/")
        self._stopped = stopped
        self._waiting_since: float | None = None
        self._random = random.Random()

    # ------------------------------------------------------------------------------------------ requests

    def file_url(self, repo: str, revision: str, filename: str) -> str:
        """Where the hub serves a file."""
        return f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(filename)}"

    def get_json(self, path: str, wanted: HubFile) -> Any:
        """The JSON the hub answers with. Raises DownloadError, HubUnreachableError, CancelledError."""
        with self._answer("GET", f"{self.endpoint}{path}", wanted, follow=True) as response:
            body = bytearray()
            for chunk in self.body(response):
                body += chunk
                if len(body) > LARGEST_JSON_BYTES:
                    raise DownloadError(f"the hub's description of {wanted.repo} does not end")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DownloadError(f"{self.endpoint} does not answer like a model hub (no JSON)") from error

    def get_listing(self, wanted: HubFile) -> Any:
        """What the hub says of the repository of ``wanted`` at its revision, with the sizes of its files.

        Raises what ``get_json`` raises.
        """
        return self.get_json(
            f"/api/models/{wanted.repo}/revision/{quote(wanted.revision, safe='')}?blobs=true", wanted
        )

    def head(self, url: str, wanted: HubFile) -> Mapping[str, str]:
        """The headers that describe a file. Redirects inside the hub are followed, one to a CDN is the answer."""
        for _ in range(MAX_REDIRECTS):
            with self._answer("HEAD", url, wanted, follow=False) as response:
                location = response.headers.get("location")
                if not 300 <= response.status_code < 400 or not location:
                    return response.headers
                target = urljoin(url, location)
                if urlsplit(target).netloc not in (urlsplit(url).netloc, urlsplit(self.endpoint).netloc):
                    return response.headers
                url = target
        raise DownloadError(f"the hub redirects the request for {wanted.label} in circles")

    @contextmanager
    def stream(self, url: str, offset: int, wanted: HubFile) -> Iterator[Response]:
        """The file's bytes from ``offset`` on: status 206, or 200 if the server starts over, or 416."""
        extra = {"range": f"bytes={offset}-"} if offset else {}
        with self._answer("GET", url, wanted, follow=True, extra=extra, accept=(416,) if offset else ()) as response:
            yield response

    def body(self, response: Response) -> Iterator[bytes]:
        """The answer's bytes as they arrive. Raises HubUnreachableError if they break off, CancelledError."""
        chunks = response.iter_bytes()
        while True:
            try:
                chunk = next(chunks)
            except StopIteration:
                return
            except Exception as error:
                raise transport_failure(error, self._host()) from error
            if self._stopped():
                raise CancelledError("the download was cancelled; what has arrived is kept")
            yield chunk

    def pause(self, seconds: float) -> None:
        """Sleep, but notice a stop within a tenth of a second. Raises CancelledError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._stopped():
                raise CancelledError("the download was cancelled; what has arrived is kept")
            time.sleep(min(left, 0.1))

    def overdue(self) -> HubUnreachableError | None:
        """An error if a request has waited longer than its time-outs allow: a name lookup has none of its own."""
        since = self._waiting_since
        limit = CONNECT_TIMEOUT_S + self._settings.HF_HUB_ETAG_TIMEOUT
        if since is None or time.monotonic() - since <= limit:
            return None
        return HubUnreachableError(f"{self._host()} did not answer within {limit:.0f} s")

    @contextmanager
    def _answer(
        self,
        method: str,
        url: str,
        wanted: HubFile,
        *,
        follow: bool,
        extra: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (),
    ) -> Iterator[Response]:
        from huggingface_hub import get_session

        read_timeout = float(self._settings.HF_HUB_ETAG_TIMEOUT)
        timeouts = (CONNECT_TIMEOUT_S, read_timeout, read_timeout, CONNECT_TIMEOUT_S)
        headers = self._headers() | dict(extra or {})
        deadline = time.monotonic() + RETRY_BUDGET_S
        attempt = 0
        while True:
            if self._stopped():
                raise CancelledError("the download was cancelled; what has arrived is kept")
            self._waiting_since = time.monotonic()
            try:
                request = get_session().stream(
                    method, url, headers=headers, timeout=timeouts, follow_redirects=follow
                )
                opened = request.__enter__()
            except Exception as error:
                raise transport_failure(error, self._host()) from error
            finally:
                self._waiting_since = None
            try:
                response = cast(Response, opened)
                if response.status_code < 400 or response.status_code in accept:
                    yield response
                    return
                if response.status_code not in RETRY_STATUSES:
                    raise refusal(response, self._host(), wanted)
                pause = self._pause_before_retry(response, attempt)
                if time.monotonic() + pause > deadline:
                    raise refusal(response, self._host(), wanted)
            finally:
                request.__exit__(None, None, None)
            self.pause(pause)
            attempt += 1

    def _pause_before_retry(self, response: Response, attempt: int) -> float:
        asked = response.headers.get("retry-after", "")
        # Jitter, so that many clients turned away together do not come back together.
        backoff = FIRST_PAUSE_S * 2.0**attempt * float(self._random.uniform(0.5, 1.5))
        return max(float(asked), backoff) if asked.isdigit() and len(asked) < 6 else backoff

    def _headers(self) -> dict[str, str]:
        from huggingface_hub import get_token

        # Compression would hide the size and break resuming.
        headers = {"user-agent": "edgespec", "accept-encoding": "identity"}
        token = None if self._settings.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["authorization"] = f"Bearer {token}"
        return headers

    def _host(self) -> str:
        return urlsplit(self.endpoint).netloc or self.endpoint


# --------------------------------------------------------------------------------------------- failures


def refusal(response: Response, host: str, wanted: HubFile) -> DownloadError:
    """The sentence for an HTTP error, from its status and the hub's own error code."""
    status = response.status_code
    code = response.headers.get("x-error-code", "")
    page = f"the page of {wanted.repo} on the hub"
    wait = response.headers.get("retry-after")
    after = f" and asks to wait {wait} s" if wait and wait.isdigit() else ""
    refusals: tuple[tuple[bool, type[DownloadError], str, str], ...] = (
        (
            code == "GatedRepo",
            DownloadError,
            f"{wanted.repo} is gated: its terms must be accepted first (HTTP {status})",
            f"accept them on {page}, then run: hf auth login",
        ),
        (
            code == "RevisionNotFound",
            DownloadError,
            f"{wanted.repo} has no revision {wanted.revision!r}",
            "check the part after @",
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
            "check the name; for a private repository run: hf auth login",
        ),
        (
            status == 401,
            DownloadError,
            f"{host} wants a valid token for {wanted.repo} (HTTP 401)",
            "run: hf auth login (or correct HF_TOKEN)",
        ),
        (
            status == 403,
            DownloadError,
            f"{host} forbids access to {wanted.repo} (HTTP 403)",
            f"check the token's permissions and {page}",
        ),
        (
            status == 429,
            HubUnreachableError,
            f"{host} limits the rate of requests (HTTP 429){after}",
            "try again later",
        ),
        (status >= 500, HubUnreachableError, f"{host} has a problem of its own (HTTP {status})", "try again later"),
    )
    for applies, kind, message, hint in refusals:
        if applies:
            return kind(message, hint=hint)
    return DownloadError(f"{host} refused the request for {wanted.label} (HTTP {status})")


def transport_failure(error: BaseException, host: str) -> DownloadError:
    """The sentence for a request that got no answer, or whose answer broke off.

    Decided by the cause underneath and by class names, because the client library (httpx, httpx2) depends on the
    version of huggingface_hub.
    """
    if isinstance(error, DownloadError):
        return error
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    names = {type(link).__name__ for link in chain}
    check = "check the network, or use --offline with what is already here"
    unnamed = any(isinstance(link, socket.gaierror) or "Errno -" in str(link) for link in chain)
    failures = (
        ("OfflineModeIsEnabled" in names, "HF_HUB_OFFLINE forbids asking the hub", "unset HF_HUB_OFFLINE"),
        ("ProxyError" in names, f"the proxy refuses to connect to {host}", "check HTTPS_PROXY and NO_PROXY"),
        (unnamed, f"the name {host} cannot be resolved (no network, or no DNS)", check),
        (
            any(isinstance(link, ssl.SSLError) for link in chain),
            f"the certificate of {host} cannot be verified",
            "check the clock, the proxy, and SSL_CERT_FILE",
        ),
        (any(isinstance(link, ConnectionRefusedError) for link in chain), f"{host} refuses the connection", check),
        (
            "ConnectTimeout" in names,
            f"{host} did not accept a connection within {CONNECT_TIMEOUT_S:.0f} s",
            check,
        ),
        (
            bool(names & {"ReadTimeout", "WriteTimeout", "PoolTimeout", "TimeoutError"}),
            f"{host} stopped answering",
            check,
        ),
    )
    for applies, message, hint in failures:
        if applies:
            return HubUnreachableError(message, hint=hint)
    return HubUnreachableError(f"the connection to {host} broke off ({type(error).__name__})", hint=check)
