"""Keys, hosts and origins."""

from __future__ import annotations

import socket

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.server.errors import ApiError
from edgespec.server.run import open_sockets
from edgespec.server.security import Access, is_loopback
from edgespec.server.service import client_address
from tests.support.http_server import WAIT_S

KEY, OTHER = "a-long-key", "another-key"
LOCAL = "127.0.0.1:8471"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "::1", "[::1]", "me.localhost"])
def test_this_machines_names_are_loopback(host: str) -> None:
    assert is_loopback(host)
    Access().check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "192.168.1.2",
        "example.com",
        "localhost.example.com",
        "127.0.0.1.x",
        "[::1",
        "::1]",
        "[127.0.0.1]",
    ],
)
def test_another_host_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(InvalidRequestError, match="a key is needed"):
        Access().check_host(host)
    Access(keys=(KEY,)).check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "localhost:8080",
        "localhost:http",
        "[::1]:8080",
        "http://127.0.0.1",
        "http://[::1]:8080/v1",
        "//127.0.0.1",
        "127.0.0.1/",
        "127.0.0.1:8080/v1",
        "",
    ],
)
@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_an_address_with_a_port_or_a_scheme_is_refused_with_the_option_for_the_port(
    host: str, keys: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequestError, match="not a host alone") as found:
        Access(keys=keys).check_host(host)
    assert "a name or an address alone; a port is apart: --host 127.0.0.1 --port 8080" in str(found.value.hint)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_the_address_of_all_families_is_reached_over_both() -> None:
    (own,) = open_sockets("[::]", 0)
    with own:
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, own.getsockname()[1]), WAIT_S):
                client = own.accept()[1]
            assert client_address({"client": client}) == address
    assert client_address({"client": None}) == "?"


@pytest.mark.parametrize("key", ["", "short", "has a space in it", "with\nnewline", "schlüssel-lang"])
def test_a_key_that_a_header_cannot_hold_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="API key"):
        Access(keys=(key,)).check_host("127.0.0.1")


@pytest.mark.parametrize(
    ("named", "origin"),
    [
        ("HTTP://LOCALHOST:3000", "http://localhost:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://localhost:80", "http://localhost"),
        ("https://page.example:443/", "https://page.example"),
        ("https://page.example:80", "https://page.example:80"),
        (" http://localhost:03000 ", "http://localhost:3000"),
        ("http://[0:0::1]:8080", "http://[::1]:8080"),
        ("https://Bücher.example", "https://xn--bcher-kva.example"),
        ("https://bücher.example:8443/", "https://xn--bcher-kva.example:8443"),
        ("chrome-extension://AbC", "chrome-extension://abc"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("file://", "file://"),
        ("File:///", "file://"),
    ],
)
def test_an_origin_is_kept_as_browsers_write_it(named: str, origin: str) -> None:
    access = Access(origins=(named,))
    access.check_host("127.0.0.1")
    assert access.origins == (origin,)
    assert access.check_browser([LOCAL], [origin]) == origin


@pytest.mark.parametrize(
    "origin",
    [
        *[
            "*",
            "localhost:3000",
            "http://",
            "http://a/b",
            "",
            "file://a/b",
            "http://a:0",
            "http://a:65536",
            "http://a:",
            "//a",
        ],
        *[
            "http://me:secret@a",
            "http://a?b",
            "http://a#b",
            "http://a b",
            "http://[::g]",
            "http://[::1",
            "http://a\nb",
        ],
        *["http://*.page.example", "http://" + "ü" * 80],
    ],
)
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(InvalidRequestError, match="not an origin"):
        Access(origins=(origin,)).check_host("127.0.0.1")


def test_pages_that_hide_their_origin_need_a_key() -> None:
    """A page of any website can have this origin, in a frame: an address without a key would be open to all."""
    with pytest.raises(InvalidRequestError, match="needs a key"):
        Access(origins=("null",)).check_host("127.0.0.1")
    with pytest.raises(ApiError, match="--api-key") as found:
        Access().check_browser([LOCAL], ["null"])
    assert "--allow-origin" not in found.value.message
    with pytest.raises(ApiError, match="--allow-origin"):
        Access(keys=(KEY,)).check_browser([LOCAL], ["null"])
    access = Access(keys=(KEY,), origins=("NULL",))
    access.check_host("127.0.0.1")
    assert access.check_browser([LOCAL], ["null"]) == "null"


def test_no_option_is_named_for_an_origin_that_is_none() -> None:
    with pytest.raises(ApiError, match="may not use") as found:
        Access().check_browser([LOCAL], ["http://["])
    assert "--" not in found.value.message


@pytest.mark.parametrize(
    ("hosts", "origins", "other_site"), [([], ["null"], False), ([], [], True), (["evil.example"], [], False)]
)
def test_http_1_0_needs_no_host_and_checks_one_that_is_there(
    hosts: list[str], origins: list[str], other_site: bool
) -> None:
    assert Access().check_browser([], [], needs_host=False) is None
    with pytest.raises(ApiError):
        Access().check_browser(hosts, origins, other_site=other_site, needs_host=False)


def test_each_key_is_another_owner_and_a_wrong_key_is_none() -> None:
    access = Access(keys=(KEY, OTHER))
    first = access.owner({"authorization": f"Bearer {KEY}"})
    assert first == access.owner({"x-api-key": KEY}) == access.owner({"authorization": f"bearer  {KEY} "})
    assert first != access.owner({"authorization": f"Bearer {OTHER}"})
    assert KEY not in first
    for headers in ({}, {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": "Ã©"}):
        with pytest.raises(ApiError) as found:
            access.owner(headers)
        assert (found.value.status, found.value.code) == (401, "invalid_api_key")
    assert Access().owner({}) == Access().owner({"authorization": "Bearer not-needed"})


@pytest.mark.parametrize(
    ("headers", "wrong"),
    [
        ({"authorization": "Bearer none", "x-api-key": OTHER}, None),
        ({"authorization": "Bearer ", "x-api-key": OTHER}, None),
        ({"authorization": "Basic bm9uZQ==", "x-api-key": OTHER}, None),
        ({"authorization": f"Bearer {OTHER}", "x-api-key": "none"}, None),
        ({"api-key": OTHER}, None),
        ({"x-api-key": "none", "api-key": OTHER}, None),
        ({"authorization": "Bearer none", "x-api-key": "none", "api-key": "none"}, "is wrong"),
        ({"api-key": "none"}, "is wrong"),
        ({"authorization": "Bearer", "x-api-key": "", "api-key": ""}, "is needed"),
    ],
)
def test_any_key_that_a_request_has_may_be_the_right_one(headers: dict[str, str], wrong: str | None) -> None:
    access = Access(keys=(KEY, OTHER))
    if wrong is None:
        assert access.owner(headers) == access.owner({"authorization": f"Bearer {OTHER}"})
    else:
        with pytest.raises(ApiError, match=wrong):
            access.owner(headers)


ANY = ["0.0.0.0:8471", "0.0.0.0", "[::]:8471"]  # where OLLAMA_HOST lets a server listen, and its clients connect


@pytest.mark.parametrize("host", [LOCAL, "localhost:8471", "localhost", "[::1]:8471", "[::1]", *ANY])
def test_programs_of_this_machine_are_let_in(host: str) -> None:
    assert Access().check_browser([host], []) is None
    assert Access().check_browser([host], [f"http://{host}"]) == f"http://{host}"


def test_a_page_reaches_no_address_whose_requests_say_nothing_of_their_origin() -> None:
    """Browsers send no Sec-Fetch-Site to 0.0.0.0, and no Origin with the request of a picture."""
    assert Access().check_browser([LOCAL], [], browser=True) is None
    for host in ANY:
        with pytest.raises(ApiError, match="is not this machine"):
            Access().check_browser([host], [], browser=True)


@pytest.mark.parametrize(
    ("hosts", "origins"),
    [
        ([], []),
        (["evil.example:8471"], []),  # DNS rebinding
        (["evil.example:8471"], ["http://evil.example:8471"]),
        ([LOCAL], ["http://evil.example"]),
        ([LOCAL], ["null"]),
        (["0.0.0.0:8471"], ["http://evil.example"]),
        (["0.0.0.0.evil.example"], []),
        ([LOCAL], ["http://localhost:3000"]),
        ([LOCAL], ["http://127.0.0.1:8472"]),
        ([LOCAL], ["http://["]),
        (["["], []),
        (["[::1"], []),
        (["[::1]evil.example"], []),
        (["[::1]:1@evil.example"], []),
        (["localhost:1@evil.example"], []),
        (["evil@localhost"], []),
        (["evil@me.localhost"], []),
        (["localhost:8471:1"], []),
        ([":8471"], []),
        ([""], []),
        ([LOCAL, LOCAL], []),
        ([LOCAL], [f"http://{LOCAL}", f"http://{LOCAL}"]),
    ],
)
def test_pages_of_other_sites_are_refused(hosts: list[str], origins: list[str]) -> None:
    with pytest.raises(ApiError) as found:
        Access().check_browser(hosts, origins)
    assert found.value.status in (400, 403)


def test_a_browser_that_fetches_for_another_site_without_an_origin_is_refused() -> None:
    with pytest.raises(ApiError) as found:
        Access().check_browser([LOCAL], [], other_site=True)
    assert found.value.status == 403
    access = Access(origins=("https://page.example",))
    assert access.check_browser([LOCAL], ["https://page.example"], other_site=True) == "https://page.example"


def test_a_named_origin_may_ask_and_a_key_allows_any_host() -> None:
    access = Access(keys=(KEY,), origins=("HTTP://LOCALHOST:3000",))
    assert access.origins == ("http://localhost:3000",)
    access.check_host("0.0.0.0")
    assert access.check_browser(["my-server.lan:8471"], []) is None
    assert access.check_browser([LOCAL], ["http://localhost:3000"]) == "http://localhost:3000"
    with pytest.raises(ApiError):
        access.check_browser([LOCAL], ["http://localhost:3001"])
