"""Who may ask: API keys, and the pages in a browser that may not.

A page on any website can send requests to this machine's servers. Its ``Origin`` gives it away; a page that points
its own name at this machine (DNS rebinding) has that name in ``Host``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import InvalidRequestError
from edgespec.server.errors import ApiError

# Without keys, every client is the same owner.
EVERYBODY = "local"
_SHORTEST_KEY = 8

# Where keys may be, beside ``Authorization``: Anthropic's header and Azure's.
_KEY_HEADERS = ("x-api-key", "api-key")

# RFC 6761: every name under localhost is this machine.
_LOCALHOST = re.compile(r"([a-z0-9_-]+\.)*localhost")
# An origin of an extension or of a program that shows pages has a scheme of that program, and a name without dots.
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
# The origin of pages that hide where they are from. Any website can have such a page, in a frame.
_HIDDEN = "null"
# Origins without a host. A program that opens its pages from files has the other one, which no website has.
_WITHOUT_HOST = {_HIDDEN: _HIDDEN, "file://": "file://", "file:///": "file://"}
# A client that connects to one of these addresses reaches its own machine: Ollama's clients send the address at which
# OLLAMA_HOST lets a server listen. No other name can be given to an address.
_UNSPECIFIED = ("0.0.0.0", "[::]")
# The value of a Host header: an IPv6 address in brackets or a name, and a port.
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^\[\]:@]+)(:[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Whether only this machine's programs reach ``host``."""
    name = host.lower().removesuffix(".")
    if _LOCALHOST.fullmatch(name):
        return True
    try:
        if name.startswith("[") and name.endswith("]"):
            return ipaddress.IPv6Address(name[1:-1]).is_loopback
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_origin(text: str) -> str | None:
    """An origin as browsers write it: in small letters and ASCII, without the usual port. None for other texts.

    A slash at the end may be there, as in an address bar.
    """
    if (known := _WITHOUT_HOST.get(text.strip().lower())) is not None:
        return known
    try:
        found = _ORIGIN.fullmatch(text.strip().lower() if text.isascii() else _in_ascii(text.strip().lower()))
    except UnicodeError:
        return None
    if found is None:
        return None
    scheme, host, port = found["scheme"], found["host"], int(found["port"] or 0)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            return None
    if found["port"] and not 0 < port < 65536:
        return None
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


def _in_ascii(text: str) -> str:
    """The origin with the name of its host as it is looked up: ``xn--...``. Raises UnicodeError."""
    scheme, slashes, rest = text.partition("://")
    host, colon, port = rest.partition(":")
    return f"{scheme}{slashes}{host.rstrip('/').encode('idna').decode()}{colon}{port}"


@dataclass(frozen=True, slots=True)
class Access:
    """The keys that are accepted (none: no key is needed), and the origins whose pages may ask.

    Origins are kept as browsers write them; what is none is kept unchanged, for ``check_host``.
    """

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", tuple(read_origin(each) or each for each in self.origins))

    def check_host(self, host: str) -> None:
        """Raise InvalidRequestError if a server on ``host`` would be open to other machines without a key."""
        for key in self.keys:
            wrong = f"is too short: it has {len(key)} characters" if len(key) < _SHORTEST_KEY else ""
            if not key.isascii() or not key.isprintable() or " " in key:
                wrong = "has characters that a header cannot hold"
            if wrong:
                hint = f"use at least {_SHORTEST_KEY} letters, digits and signs, without spaces"
                raise InvalidRequestError(f"an API key {wrong}", hint=hint)
        if not host or "/" in host or "]:" in host or host.count(":") == 1:
            raise InvalidRequestError(
                f"{host!r:.80} is not a host alone",
                hint="give a name or an address alone; a port is apart: --host 127.0.0.1 --port 8080",
            )
        if not self.keys and not is_loopback(host):
            raise InvalidRequestError(
                f"{host} is reachable from other machines, so a key is needed",
                hint="set EDGESPEC_API_KEY, or leave out --host",
            )
        if _HIDDEN in self.origins and not self.keys:
            raise InvalidRequestError(
                f"the origin {_HIDDEN!r} needs a key: a page of any website can have it", hint="set EDGESPEC_API_KEY"
            )
        for origin in self.origins:
            if read_origin(origin) is None:
                raise InvalidRequestError(
                    f"{origin!r:.80} is not an origin",
                    hint="an origin is a scheme and a host, with a port if it has one: http://localhost:3000",
                )

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner that the request's key stands for. Raises ApiError with status 401."""
        if not self.keys:
            return EVERYBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        # Programs that have a placeholder in one of these headers may have the key in another.
        given = [_digest(key) for key in (bearer, *(headers.get(name, "") for name in _KEY_HEADERS)) if key]
        known = [_digest(key) for key in self.keys]
        # All are compared, so that the time says nothing.
        found = [own for key in given for own in known if hmac.compare_digest(own, key)]
        if not found:
            message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(message, status=401, code="invalid_api_key")
        return found[0]

    def check_browser(
        self,
        hosts: Sequence[str],
        origins: Sequence[str],
        *,
        other_site: bool = False,
        browser: bool = False,
        needs_host: bool = True,
    ) -> str | None:
        """The allowed origin that a page has, None without a page. Raises ApiError with status 403.

        ``hosts`` and ``origins`` are all values of these headers. ``other_site``: a browser says that a page of
        another site asks, which has no ``Origin`` where that page cannot read the answer, as of a picture. A
        ``browser`` says that of the addresses of this machine alone. HTTP/1.0 needs no ``Host``: health checks of
        load balancers have none, and browsers always have one.
        """
        if not (needs_host or hosts or origins or other_site):
            return None
        if len(hosts) != 1 or len(origins) > 1:
            raise ApiError("a request must have one Host and at most one Origin", status=400, code="invalid_header")
        host = hosts[0].lower()
        name = _name_of(host)
        if not self.keys and not is_loopback(name) and (browser or name not in _UNSPECIFIED):
            message = f"the host {host[:64]!r} is not this machine; other hosts need a server with a key (--api-key)"
            raise ApiError(message, status=403, code="host_not_allowed")
        if not origins and other_site:
            raise ApiError("pages of other sites may not use this server", status=403, code="origin_not_allowed")
        if not origins:
            return None
        origin = origins[0]
        read = read_origin(origin)
        # Pages that this server sent may ask, too.
        if read is not None and read in (*self.origins, *(read_origin(f"{own}://{host}") for own in _DEFAULT_PORTS)):
            return origin
        message = f"pages of {origin[:64]!r} may not use this server"
        if read == _HIDDEN and not self.keys:
            message += ", as a page of any website can have this origin; a server with a key can let them (--api-key)"
        elif read is not None:
            message += "; start it with --allow-origin to let them"
        raise ApiError(message, status=403, code="origin_not_allowed")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _name_of(host: str) -> str:
    """The host without its port; "" if it is none."""
    found = _HOST_AND_PORT.fullmatch(host)
    return "" if found is None else found[1]
