"""Which proxy a request takes: ALL_PROXY, HTTPS_PROXY and HTTP_PROXY, or the system's settings, and NO_PROXY.

The HTTP client also reads these variables, all of them for each request: one that it cannot read stops requests that
would not use it. It knows neither networks nor ``*.domain`` in NO_PROXY.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

_KINDS = ("http", "https", "socks5", "socks5h")
_PORTS = {"http": 80, "https": 443}
_ADDRESS = re.compile(
    r"(?:(?P<kind>[A-Za-z][A-Za-z0-9+.-]*)://|//)?(?:(?P<user>.*)@)?(?P<host>[^@/?#]*)(?:[/?#].*)?", re.DOTALL
)
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]%]+)(?::(?P<port>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Proxy:
    """``address``: the URL for the client, with a password if there is one. ``shown``: host and port, for messages.

    ``named``: the variable or setting that names the proxy.
    """

    address: str
    shown: str
    named: str


def any_proxy() -> bool:
    """Whether a variable or the system names a proxy."""
    return not {"http", "https", "all"}.isdisjoint(getproxies())


def proxy_of(url: str) -> Proxy | None:
    """The proxy for ``url``; None for a direct request. Raises ValueError with a sentence if its address is wrong."""
    parts = urlsplit(url)
    proxies = getproxies()
    scheme = next((each for each in (parts.scheme, "all") if proxies.get(each)), None)
    if scheme is None or _is_exempt(
        parts.hostname or "", parts.port or _PORTS.get(parts.scheme), proxies.get("no", "")
    ):
        return None
    small = f"{scheme}_proxy"
    named = next((name for name in (small, small.upper()) if os.environ.get(name)), "the system's proxy setting")
    return read_proxy(proxies[scheme], named)


def read_proxy(address: str, named: str) -> Proxy:
    """The proxy of ``address``, the value of ``named``. Raises ValueError with a sentence that has no password.

    A password may have any characters, those with a meaning in addresses too.
    """
    found = _ADDRESS.fullmatch(address.strip())
    host = None if found is None else _HOST.fullmatch(found["host"])
    if found is None or host is None:
        raise ValueError(f"the address of the proxy in {named} cannot be read")
    kind = (found["kind"] or "http").lower()
    if kind not in _KINDS:
        raise ValueError(f"{named} names a proxy of the kind {kind[:20]!r}, which is not supported")
    if host["port"] and not 0 < int(host["port"][:6]) < 65536:
        raise ValueError(f"{named} names a proxy whose port is not a number from 1 to 65535")
    shown = host["name"] + (f":{host['port']}" if host["port"] else "")
    user, colon, password = (found["user"] or "").partition(":")
    login = f"{quote(unquote(user), safe='')}{colon}{quote(unquote(password), safe='')}@" if user or password else ""
    return Proxy(address=f"{kind}://{login}{shown}", shown=shown, named=named)


def _is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    """Whether NO_PROXY, or the system's list on Windows and macOS, exempts a host.

    NO_PROXY lists names, which stand for their subdomains too, addresses, networks such as 10.0.0.0/8, and ``*``.
    """
    entries = re.split(r"[\s,;]+", no_proxy.lower())
    return any(_exempts(entry, host.lower(), port) for entry in entries if entry) or bool(proxy_bypass(host))


def _exempts(entry: str, host: str, port: int | None) -> bool:
    if entry == "*":
        return True
    entry = entry.rpartition("://")[2].rstrip("/")
    try:
        network = ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        found = _HOST.fullmatch(entry)
        if found is None or (found["port"] and found["port"] != str(port)):
            return False
        name = found["name"].strip("[]").removeprefix("*").removeprefix(".")
        return bool(name) and (host == name or host.endswith(f".{name}"))
    try:
        return ipaddress.ip_address(host) in network
    except ValueError:
        return False
