"""HTTP requests for the hub and the package index, with failures reported as one precise sentence.

The client comes from huggingface_hub. It takes certificates from SSL_CERT_FILE and SSL_CERT_DIR, else those of the
system. Companies also set REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE, which the client ignores and this module honours.
The proxy is chosen here (``proxies.py``), for the first address and for each that a redirect names.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urljoin, urlsplit, urlunsplit

from edgespec.errors import CancelledError, DownloadError
from edgespec.files.installation import package_command
from edgespec.store.proxies import Proxy, any_proxy, proxy_of, read_proxy

# A host that does not accept a connection within 5 s will not deliver a gigabyte.
CONNECT_TIMEOUT_S = 5.0

# 429 and 5xx are retried within this many seconds in total: enough for a short outage, too short to look like a hang.
RETRY_BUDGET_S = 6.0
FIRST_PAUSE_S = 0.4
RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})

MAX_REDIRECTS = 10

_CHECK = "check the network, or use --offline with what is already on this machine"
_PLAIN = "a server behind a proxy has to redirect to https; or a network's sign-in page is answering"
_SIGN_IN = "a network's sign-in page may be answering: open a browser, sign in, and try again"
_READ_BY_THE_CLIENT = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_READ_HERE = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_NETWORK_SIGN_IN, _PROXY_SIGN_IN = 511, 407


class UnreachableError(DownloadError):
    """The host is unreachable (network, time-out, overload): callers may use what is on this machine instead."""


class LostError(UnreachableError):
    """The network was lost, or the connection broke off: it may return by itself. Only transfers tell it apart."""


def hub_settings() -> Any:
    """huggingface_hub's constants, imported on first use because the import takes a tenth of a second.

    Raises UnreachableError if a time in the environment cannot be read: nothing of huggingface_hub works then.
    """
    try:
        with warnings.catch_warnings():  # the import warns about deprecated variables on stderr
            warnings.simplefilter("ignore")
            from huggingface_hub import constants
    except ValueError as error:
        raise UnreachableError(
            "HF_HUB_ETAG_TIMEOUT or HF_HUB_DOWNLOAD_TIMEOUT is not a whole number of seconds",
            hint="correct or unset it",
        ) from error
    return constants


class Response(Protocol):
    """The part of the client's response that is used here."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    def iter_bytes(self) -> Iterator[bytes]: ...


def with_user_of(url: str, known: str) -> str:
    """``url`` with the user and password in ``known``, if it has none and is at the same scheme, host and port.

    Raises ValueError if one of them cannot be read.
    """
    given, own = urlsplit(url), urlsplit(known)
    user, _, host = own.netloc.rpartition("@")
    if not user or (given.scheme, given.netloc) != (own.scheme, host):
        return url
    return urlunsplit(given._replace(netloc=own.netloc))


def certificates(environ: Mapping[str, str], first: tuple[str, ...] = ()) -> Path | None:
    """The file or folder of certificates in an environment variable that the client ignores.

    Variables in ``first`` take precedence over the client's. Raises UnreachableError if a named file cannot be read:
    no request is made then, and callers may use what is on this machine.
    """
    for name in (*first, *_READ_BY_THE_CLIENT, *_READ_HERE):
        location = environ.get(name)
        if not location:
            continue
        locations = location.split(os.pathsep) if name == "SSL_CERT_DIR" else [location]  # in OpenSSL's notation
        if not any(os.access(each, os.R_OK) for each in locations):
            raise UnreachableError(f"{name} names {location}, which cannot be read", hint=f"correct or unset {name}")
        return None if name in _READ_BY_THE_CLIENT else Path(location)
    return None


def tls_context(location: Path) -> ssl.SSLContext:
    """A context that trusts only the certificates in a file or a folder. Raises UnreachableError."""
    try:
        if location.is_dir():
            return ssl.create_default_context(capath=str(location))
        return ssl.create_default_context(cafile=str(location))
    except (OSError, ssl.SSLError) as error:
        raise UnreachableError(
            f"{location} holds no certificates in PEM form", hint="correct the variable that names it"
        ) from error


# The other end, or a router, closed the connection while it was set up: nothing is known of the certificate.
_ENDED_BY_THEM = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


class Web:
    """Requests for one fetch. ``stopped`` is called between attempts; ``overdue`` is for the watching thread.

    ``proxy``: its address in pip's configuration (None: HTTPS_PROXY and similar variables decide). Without context
    and proxy the client is huggingface_hub's own, as the user may have configured it. Raises UnreachableError if a
    certificate file named by a variable cannot be read, and as ``hub_settings``.
    """

    def __init__(
        self,
        host: str,
        stopped: Callable[[], bool],
        timeout_s: float,
        *,
        context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        hub_settings()  # of the client's package
        self.host = host
        self._stopped = stopped
        self._timeout_s = timeout_s
        self.longest_wait_s = CONNECT_TIMEOUT_S + timeout_s  # for one answer, before ``overdue``
        self._proxy = proxy
        self._waiting_since: float | None = None
        self._random = random.Random()
        if context is None and (location := certificates(os.environ)) is not None:
            context = tls_context(location)
        self._context = context
        self._own: dict[Proxy | None, Any] = {}

    def close(self) -> None:
        """Close the connections that edgespec opened. Idempotent."""
        for client in self._own.values():
            client.close()

    def _client(self, proxy: Proxy | None) -> Any:
        """The client for requests through ``proxy``."""
        if self._context is None and proxy is None and not any_proxy():
            from huggingface_hub import get_session

            return get_session()
        if proxy not in self._own:
            if proxy is None:
                # The client would read every variable for a proxy, and fail with those that do not concern this host.
                options = {"verify": self._context or _trusted(), "trust_env": False}
            else:
                options = {"verify": True if self._context is None else self._context, "proxy": proxy.address}
            self._own[proxy] = _client_class()(timeout=None, **options)
        return self._own[proxy]

    @contextmanager
    def answer(
        self,
        method: str,
        url: str,
        refusal: Callable[[Response], DownloadError],
        *,
        headers: Mapping[str, str],
        follow: bool = True,
        accept: tuple[int, ...] = (),
    ) -> Iterator[Response]:
        """The answer, its body unread. ``refusal`` makes the error for a status from 400 that ``accept`` lacks.

        Raises UnreachableError, CancelledError.
        """
        deadline = time.monotonic() + RETRY_BUDGET_S
        attempt = hops = 0
        while True:
            self._check_stopped()
            proxy = self._proxy_of(url)
            self._waiting_since = time.monotonic()
            try:
                request = self._client(proxy).stream(
                    method, url, headers=headers, timeout=self._timeouts, follow_redirects=False
                )
                opened = request.__enter__()
            except Exception as error:
                raise transport_failure(error, self.host, proxy) from error
            finally:
                self._waiting_since = None
            try:
                response = cast(Response, opened)
                if response.status_code in (_NETWORK_SIGN_IN, _PROXY_SIGN_IN):
                    raise _wants_sign_in(response.status_code, self.host, proxy)
                target = response.headers.get("location") if 300 <= response.status_code < 400 else None
                if follow and target and hops < MAX_REDIRECTS:
                    hops += 1
                    url, headers = self._redirected(url, target, headers)
                    continue
                if response.status_code < 400 or response.status_code in accept:
                    yield response
                    return
                if response.status_code not in RETRY_STATUSES:
                    raise refusal(response)
                pause = self._pause_before_retry(response, attempt)
                if time.monotonic() + pause > deadline:
                    raise refusal(response)
            finally:
                request.__exit__(None, None, None)
            self.pause(pause)
            attempt += 1

    def body(self, response: Response) -> Iterator[bytes]:
        """The answer's bytes as they arrive. Raises UnreachableError if the connection breaks, CancelledError."""
        chunks = response.iter_bytes()
        while True:
            try:
                chunk = next(chunks)
            except StopIteration:
                return
            except Exception as error:
                raise transport_failure(error, self.host, None) from error
            self._check_stopped()
            yield chunk

    def whole(self, response: Response, most_bytes: int, what: str) -> bytes:
        """All bytes of the answer, which ``what`` names. Raises DownloadError if it is too long, and as ``body``."""
        found = bytearray()
        for chunk in self.body(response):
            found += chunk
            if len(found) > most_bytes:
                raise DownloadError(f"{what} is too long")
        return bytes(found)

    def refuse_page(self, response: Response) -> None:
        """Raise UnreachableError if the answer is a web page instead of a file or data."""
        if response.headers.get("content-type", "").lower().startswith("text/html"):
            raise UnreachableError(f"a web page arrived instead of the answer of {self.host}", hint=_SIGN_IN)

    def pause(self, seconds: float) -> None:
        """Sleep, but notice a stop within a tenth of a second. Raises CancelledError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check_stopped()
            time.sleep(min(left, 0.1))

    def overdue(self) -> UnreachableError | None:
        """An error if a request waits longer than ``longest_wait_s``.

        The client's time-outs do not cover the name lookup, and that of a connection is for each of the host's
        addresses.
        """
        since = self._waiting_since
        if since is None or time.monotonic() - since <= self.longest_wait_s:
            return None
        return UnreachableError(f"{self.host} did not answer within {self.longest_wait_s:.0f} s", hint=_CHECK)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise CancelledError("the download was cancelled; what has arrived is kept")

    def _pause_before_retry(self, response: Response, attempt: int) -> float:
        asked = response.headers.get("retry-after", "")
        # Jitter, so that clients refused at the same time do not retry at the same time.
        backoff = FIRST_PAUSE_S * 2.0**attempt * float(self._random.uniform(0.5, 1.5))
        return max(float(asked), backoff) if asked.isascii() and asked.isdigit() and len(asked) < 6 else backoff

    def _redirected(self, url: str, target: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """The address that ``url`` redirects to, with the headers for it: another host gets no token.

        Encryption is never left: anyone on the way could exchange what comes.
        """
        try:
            new = with_user_of(urljoin(url, target), url)
            (scheme, host), own = urlsplit(new)[:2], urlsplit(url)[:2]
        except ValueError as error:
            raise UnreachableError(f"{self.host} redirects to an address that cannot be read", hint=_CHECK) from error
        if own[0] == "https" != scheme:
            raise UnreachableError(f"{self.host} redirects to an address without encryption", hint=_PLAIN)
        if own == (scheme, host):
            return new, headers
        return new, {name: value for name, value in headers.items() if name.lower() != "authorization"}

    @property
    def _timeouts(self) -> tuple[float, ...]:
        return CONNECT_TIMEOUT_S, self._timeout_s, self._timeout_s, CONNECT_TIMEOUT_S

    def _proxy_of(self, url: str) -> Proxy | None:
        """The proxy of a request; None without one. Raises UnreachableError."""
        try:
            proxy = proxy_of(url) if self._proxy is None else read_proxy(self._proxy, "pip's setting proxy")
        except ValueError as error:
            raise UnreachableError(f"{error}", hint="the form is http://HOST:PORT or socks5://HOST:PORT") from error
        if proxy is not None and proxy.address.startswith("socks") and find_spec("socksio") is None:
            raise UnreachableError(
                f"{proxy.named} names a SOCKS proxy, and the package socksio is not installed",
                hint=f"run: {package_command('socksio')} (or name an HTTP proxy)",
            )
        return proxy


def _client_class() -> Any:
    """The class of huggingface_hub's clients, of httpx or httpx2. Its own client reads all variables for proxies."""
    from huggingface_hub.errors import HfHubHTTPError

    return import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0]).Client


def _trusted() -> Any:
    """What a client trusts that may not read the environment: the files that SSL_CERT_FILE and SSL_CERT_DIR name."""
    return ssl.create_default_context() if any(map(os.environ.get, _READ_BY_THE_CLIENT)) else True


def _wants_sign_in(status: int, host: str, proxy: Proxy | None) -> UnreachableError:
    if status == _NETWORK_SIGN_IN:
        return UnreachableError(f"this network requires a sign-in before {host} (HTTP 511)", hint=_SIGN_IN)
    named = "HTTPS_PROXY" if proxy is None else proxy.named
    return UnreachableError(
        "the proxy requires a user name and a password (HTTP 407)",
        hint=f"write them into the variable: {named}=http://USER:PASSWORD@HOST:PORT",
    )


def transport_failure(error: BaseException, host: str, proxy: Proxy | None = None) -> DownloadError:
    """The error for a request without an answer, or with an answer that broke off.

    Decided by the underlying cause and by class names, because the client library (httpx, httpx2) depends on the
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
    unnamed = any(isinstance(link, socket.gaierror) or "Errno -" in str(link) for link in chain)
    refused = any(isinstance(link, ConnectionRefusedError) for link in chain)
    if any(type(link).__name__ == "ProxyError" and str(link).startswith(f"{_PROXY_SIGN_IN}") for link in chain):
        return _wants_sign_in(_PROXY_SIGN_IN, host, proxy)
    check_proxy = "check HTTPS_PROXY and NO_PROXY" if proxy is None else f"check {proxy.named} and NO_PROXY"
    shown = "" if proxy is None else proxy.shown
    through = "" if proxy is None else f" through the proxy {shown}"
    unknown = host if proxy is None else f"of the proxy {shown}"
    lasting = (
        (
            bool(names & {"InvalidURL", "UnsupportedProtocol", "LocalProtocolError"}),
            f"the address of {host} cannot be read",
            "check HF_ENDPOINT and PIP_INDEX_URL",
        ),
        ("OfflineModeIsEnabled" in names, "HF_HUB_OFFLINE forbids requests to the hub", "unset HF_HUB_OFFLINE"),
        (
            "ProxyError" in names,
            f"the proxy refuses to connect to {host}" if proxy is None else f"the proxy {shown} refuses {host}",
            check_proxy,
        ),
        (
            any(isinstance(link, ssl.SSLError) and not isinstance(link, _ENDED_BY_THEM) for link in chain),
            f"the certificate of {host} cannot be verified",
            "check the clock; if a company's proxy has its own certificates, name their file in SSL_CERT_FILE "
            "or REQUESTS_CA_BUNDLE",
        ),
        (refused and proxy is not None, f"the proxy {shown} refuses the connection", check_proxy),
    )
    for applies, message, hint in lasting:
        if applies:
            return UnreachableError(message, hint=hint)
    passing = (
        (
            unnamed,
            f"the name {unknown} cannot be resolved (no network, or no DNS)",
            _CHECK if proxy is None else check_proxy,
        ),
        (refused, f"{host} refuses the connection", _CHECK),
        (
            "ConnectTimeout" in names,
            f"{host} did not accept a connection within {CONNECT_TIMEOUT_S:.0f} s{through}",
            _CHECK if proxy is None else check_proxy,
        ),
        (
            bool(names & {"ReadTimeout", "WriteTimeout", "PoolTimeout", "TimeoutError"}),
            f"{host} stopped answering",
            _CHECK,
        ),
    )
    for applies, message, hint in passing:
        if applies:
            return LostError(message, hint=hint)
    return LostError(f"the connection to {host} broke off ({type(error).__name__})", hint=_CHECK)
