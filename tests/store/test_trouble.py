"""The first download with problems: proxies, certificates, sign-in pages, lost networks, full and read-only disks."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edgespec.errors import DiskSpaceError, DownloadError
from edgespec.files import disk
from edgespec.files.home import Home
from edgespec.files.installation import package_command
from edgespec.files.progress import Job
from edgespec.store import transfer, web
from edgespec.store.found import ModelFolders
from edgespec.store.hub.file import FetchedHubFile, fetch_hub_file
from edgespec.store.hub.http import HubHttp
from edgespec.store.hub.listing import list_hub_files
from edgespec.store.proxies import proxy_of, read_proxy
from edgespec.store.references import HubFile, HubReference, Network, spec_of_hub_reference
from edgespec.store.store import Store
from tests.support.hub_server import HubServer, running
from tests.support.loopback_proxy import Proxy, running_proxy
from tests.support.loopback_tls import server_context, write_certificate

DATA = random.Random(1).randbytes(600_000)
WANTED = HubFile("org/repo", "model.gguf")
Fetch = Callable[[], FetchedHubFile]
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def _own_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the test's proxies and certificates; the client reads them at construction."""
    from huggingface_hub.utils import close_session

    for name in (*PROXIES, *CERTIFICATES):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    close_session()
    yield
    close_session()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running(HubServer(files={"model.gguf": DATA})) as hub:
        yield hub


@pytest.fixture
def fetch(hub: HubServer, tmp_path: Path) -> Fetch:
    return lambda: fetch_hub_file(WANTED, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))


def partial(folder: Path) -> Path:
    (found,) = folder.rglob("*.incomplete")
    return found


def failure(fetch: Callable[[], object]) -> tuple[str, str]:
    """The error's message and hint."""
    with pytest.raises((DownloadError, DiskSpaceError)) as caught:
        fetch()
    return caught.value.message, caught.value.hint or ""


# ----------------------------------------------------------------------------------------------------- proxies


def test_downloads_go_through_the_configured_proxy(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_proxy(Proxy()) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{proxy.address}")
        assert fetch().path.read_bytes() == DATA
        assert len(proxy.asked) == 3  # the description, the redirect to the bytes, the bytes
        assert proxy.authorizations == {"Basic bWU6c2VjcmV0"}


def test_no_proxy_exempts_a_host(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_proxy(Proxy()) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        assert fetch().path.read_bytes() == DATA
        assert proxy.asked == []


def test_a_proxy_that_requires_a_password_is_reported(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_proxy(Proxy(refuse=407)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
        message, hint = failure(fetch)
    assert message == "the proxy requires a user name and a password (HTTP 407)"
    assert "HTTP_PROXY=http://USER:PASSWORD@HOST:PORT" in hint


def test_an_unreachable_proxy_is_named_without_its_password(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{address}")
        message, hint = failure(fetch)
    assert message == f"the proxy {address} refuses the connection"
    assert hint == "check HTTP_PROXY and NO_PROXY"


def test_a_proxy_with_an_unknown_host_name_is_reported(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message, hint = failure(fetch)
    assert message == "the name of the proxy proxy.invalid:3128 cannot be resolved (no network, or no DNS)"
    assert "HTTP_PROXY" in hint


def test_a_proxy_that_requires_a_password_for_a_tunnel_is_reported(
    fetch_secure: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_proxy(Proxy(refuse=407)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        message, hint = failure(fetch_secure)
    assert message == "the proxy requires a user name and a password (HTTP 407)"
    assert "https_proxy=http://USER:PASSWORD@HOST:PORT" in hint


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("ALL_PROXY", "socks5://me:secret@127.0.0.1:9", "ALL_PROXY names a SOCKS proxy"),
        ("all_proxy", "socks5h://127.0.0.1:9", "all_proxy names a SOCKS proxy"),
        ("ALL_PROXY", "socks://127.0.0.1:9", "ALL_PROXY names a proxy of the kind 'socks'"),
        ("HTTP_PROXY", "ftp://me:secret@127.0.0.1:9", "HTTP_PROXY names a proxy of the kind 'ftp'"),
        ("HTTP_PROXY", "http://127.0.0.1:port", "the address of the proxy in HTTP_PROXY cannot be read"),
        ("HTTP_PROXY", "http://me:secret", "the address of the proxy in HTTP_PROXY cannot be read"),
        ("HTTP_PROXY", "http://me:secret@127.0.0.1:99999", "HTTP_PROXY names a proxy whose port is not"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_reported_in_one_sentence_and_leaves_no_folder(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, address: str, message: str
) -> None:
    monkeypatch.setattr(web, "find_spec", lambda _name: None)  # as without socksio
    monkeypatch.setenv(name, address)
    home = Home(tmp_path / "home")
    store = Store(home, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
    told, hint = failure(lambda: store.fetch(spec_of_hub_reference(HubReference("org/repo", filename="model.gguf"))))
    assert message in told
    assert (package_command("socksio") in hint) == ("a SOCKS proxy" in message)
    assert "secret" not in told + hint
    assert list(home.models.iterdir()) == []
    assert store.ignored() == {}


def test_a_proxy_for_other_addresses_may_have_any_form(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:port")
    assert fetch().path.read_bytes() == DATA  # of an address with http
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*.example, 127.0.0.0/8 [::1")
    assert fetch().path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("address", "url", "shown"),
    [
        ("proxy:3128", "http://proxy:3128", "proxy:3128"),
        ("http://me:p@s/#?w%6frd@proxy:3128/", "http://me:p%40s%2F%23%3Fword@proxy:3128", "proxy:3128"),
        ("HTTPS://[::1]:8080", "https://[::1]:8080", "[::1]:8080"),
        ("socks5://me@proxy", "socks5://me@proxy", "proxy"),
    ],
)
def test_addresses_of_proxies_may_have_a_password_with_any_characters(address: str, url: str, shown: str) -> None:
    proxy = read_proxy(address, "HTTP_PROXY")
    assert (proxy.address, proxy.shown) == (url, shown)


@pytest.mark.parametrize(
    ("no_proxy", "direct"),
    [
        ("*", True),
        ("hub.example", True),
        (".hub.example:80", True),
        ("*.hub.example", True),
        ("other, HUB.example", True),
        ("http://hub.example/", True),
        ("b.example", False),
        ("hub.example:81", False),
        ("10.0.0.0/8 [::1]:80 [", False),
    ],
)
def test_no_proxy_names_hosts_with_their_subdomains(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, direct: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_of("http://www.hub.example/file") is None) is direct


@pytest.mark.parametrize(
    ("no_proxy", "url", "direct"),
    [
        ("10.0.0.0/8", "http://10.1.2.3/file", True),
        ("10.0.0.0/8", "http://11.1.2.3/file", False),
        ("::1", "http://[::1]:8080/file", True),
        ("fd00::/8", "http://[fd12::1]/file", True),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/file", True),
    ],
)
def test_no_proxy_names_addresses_and_networks(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, url: str, direct: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_of(url) is None) is direct


def test_an_address_of_the_hub_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    for endpoint in ("http://127.0.0.1:port", "http://[::1"):
        network = Network(endpoint=endpoint, cache=tmp_path / "cache")
        message, hint = failure(lambda network=network: fetch_hub_file(WANTED, network))  # type: ignore[misc]
        assert "cannot be read" in message
        assert "HF_ENDPOINT" in hint


def test_an_empty_address_of_the_hub_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "")
    assert HubHttp(None, lambda: False).endpoint == "https://huggingface.co"


# ------------------------------------------------------------------------------------------- cache and token

VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
)


@pytest.mark.parametrize(
    ("name", "value", "cache"),
    [(name, "", ".cache/huggingface/hub") for name in VARIABLES[:4]]
    + [("HF_HOME", "$HOME/hfc", "hfc/hub"), ("XDG_CACHE_HOME", "~/x", "x/huggingface/hub")],
)
def test_files_of_the_hub_are_kept_where_they_are_found(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, cache: str
) -> None:
    for each in VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    assert ModelFolders.here().hub_cache == tmp_path / cache
    assert fetch_hub_file(WANTED, Network(endpoint=hub.endpoint)).path.is_relative_to(tmp_path / cache)


@pytest.mark.parametrize("home", ["~no-such-user/hf", "$NOT_SET/hf"])
def test_a_cache_below_a_folder_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", home)
    message, hint = failure(lambda: fetch_hub_file(WANTED))
    assert f"{home}/hub" in message
    assert hint == "set HF_HOME to an absolute path"


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("HF_HOME", "", "Bearer hf_own"),
        ("XDG_CACHE_HOME", "", "Bearer hf_own"),
        ("HF_TOKEN", "hf_named", "Bearer hf_named"),
        ("HF_TOKEN_PATH", "here/token", "Bearer hf_here"),
        ("HF_HOME", "here", "Bearer hf_here"),
    ],
)
def test_a_token_of_the_current_folder_is_read_only_if_a_variable_names_it(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, sent: str | None
) -> None:
    from huggingface_hub import constants

    for each in (*VARIABLES, "HF_TOKEN_PATH"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "here/token")  # read when huggingface_hub is imported
    monkeypatch.chdir(tmp_path)
    for folder, token in (("here", "hf_here"), (".cache/huggingface", "hf_own\n")):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "token").write_text(token, encoding="ascii")
    fetch_hub_file(WANTED, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
    assert hub.requests[0].authorization == sent


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("HF_TOKEN", "“hf_abc”"),
        ("HF_TOKEN", "hf_abc\x07"),
        ("HUGGING_FACE_HUB_TOKEN", "hf_ä"),
        ("file", b"hf_\xff"),
        ("file", None),  # a folder
    ],
)
def test_a_token_that_cannot_be_read_is_reported_and_the_cache_still_serves(
    fetch: Fetch, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes
) -> None:
    from huggingface_hub import constants

    for each in VARIABLES[4:]:
        monkeypatch.delenv(each, raising=False)
    fetched, hub.requests = fetch(), []
    file = tmp_path / "token"
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(file))
    if isinstance(content, str):
        monkeypatch.setenv(name, content)
    elif content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    assert fetch() == fetched
    message, hint = failure(lambda: fetch_hub_file(WANTED, Network(endpoint=hub.endpoint, cache=tmp_path / "empty")))
    assert message == f"the token in {file if name == 'file' else name} cannot be read"
    assert hint == ("correct it, or set HF_TOKEN" if name == "file" else "correct it")
    assert hub.requests == []


# ------------------------------------------------------------------------------------------------ certificates


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[HubServer]:
    with running(HubServer(files={"model.gguf": DATA}, tls=server_context(tmp_path))) as hub:
        yield hub


@pytest.fixture
def fetch_secure(secure: HubServer, tmp_path: Path) -> Fetch:
    return lambda: fetch_hub_file(WANTED, Network(endpoint=secure.endpoint, cache=tmp_path / "cache"))


def test_an_untrusted_certificate_is_reported(fetch_secure: Fetch, secure: HubServer) -> None:
    message, hint = failure(fetch_secure)
    assert message == f"the certificate of 127.0.0.1:{secure.port} cannot be verified"
    assert "SSL_CERT_FILE or REQUESTS_CA_BUNDLE" in hint


def test_a_redirect_to_an_unencrypted_address_of_the_hub_is_not_followed(
    fetch_secure: Fetch, secure: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(write_certificate(tmp_path)))
    secure.redirect_to = f"http://127.0.0.1:{secure.port}/model.gguf"
    assert "does not answer like a model hub" in failure(fetch_secure)[0]
    assert len(secure.requests) == 1


def test_nothing_is_fetched_from_an_unencrypted_address_that_an_encrypted_one_redirects_to(
    secure: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(write_certificate(tmp_path)))
    secure.redirect_to = f"http://127.0.0.1:{secure.port}/model.gguf"
    network = Network(endpoint=secure.endpoint, cache=tmp_path)
    message, _ = failure(lambda: list_hub_files("org/repo", "main", network))
    assert message == f"127.0.0.1:{secure.port} redirects to an address without encryption"
    assert len(secure.requests) == 1


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_company_certificate_is_trusted_if_a_variable_names_it(
    fetch_secure: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(write_certificate(tmp_path)))
    assert fetch_secure().path.read_bytes() == DATA


def test_a_company_certificate_also_works_through_a_proxy(
    fetch_secure: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(write_certificate(tmp_path)))
    with running_proxy(Proxy()) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
        assert fetch_secure().path.read_bytes() == DATA
        assert {host.partition(":")[0] for host in proxy.asked} == {"127.0.0.1", "localhost"}  # tunnels to both hosts
    with running_proxy(Proxy(refuse=403)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
        (tmp_path / "cache").rename(tmp_path / "gone")
        assert failure(fetch_secure)[0].startswith(f"the proxy {proxy.address} refuses 127.0.0.1:")


def test_the_http_clients_own_certificate_variables_take_precedence(tmp_path: Path) -> None:
    good = write_certificate(tmp_path)
    named = {"SSL_CERT_FILE": str(good), "REQUESTS_CA_BUNDLE": str(good)}
    assert web.certificates(named) is None
    assert web.certificates({"REQUESTS_CA_BUNDLE": str(good)}) == good
    assert web.certificates({"CURL_CA_BUNDLE": str(tmp_path), "SSL_CERT_FILE": ""}) == tmp_path
    assert web.certificates({**named, "PIP_CERT": str(tmp_path)}, ("PIP_CERT",)) == tmp_path
    assert web.certificates({}) is None
    assert web.certificates({"SSL_CERT_DIR": os.pathsep.join(("/absent", str(tmp_path)))}) is None
    assert web.tls_context(tmp_path) is not None


@pytest.mark.parametrize("variable", CERTIFICATES)
def test_unreadable_certificates_give_a_one_sentence_error(
    fetch_secure: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "absent.pem"))
    message, hint = failure(fetch_secure)
    assert message == f"{variable} names {tmp_path / 'absent.pem'}, which cannot be read"
    assert hint == f"correct or unset {variable}"


def test_a_certificate_file_without_certificates_is_an_error(
    fetch_secure: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.pem").write_text("no certificate")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "odd.pem"))
    assert failure(fetch_secure)[0] == f"{tmp_path / 'odd.pem'} holds no certificates in PEM form"


def test_a_cached_file_is_used_although_the_hubs_certificate_is_not_trusted(
    fetch_secure: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", str(write_certificate(tmp_path)))
        fetched = fetch_secure()
    assert fetch_secure() == fetched


# ----------------------------------------------------------------------------------------------- sign-in pages

PAGE = "a web page arrived instead of the answer of 127.0.0.1:"


def test_a_sign_in_page_instead_of_the_hub_is_reported(hub: HubServer, fetch: Fetch, tmp_path: Path) -> None:
    hub.page = "all"
    message, hint = failure(fetch)
    assert message == f"{PAGE}{hub.port}"
    assert "open a browser, sign in" in hint
    message, _ = failure(lambda: list_hub_files("org/repo", "main", Network(endpoint=hub.endpoint, cache=tmp_path)))
    assert message == f"{PAGE}{hub.port}"
    hub.page, hub.refuse_always = None, (511, {})
    message, hint = failure(fetch)
    assert message == f"this network requires a sign-in before 127.0.0.1:{hub.port} (HTTP 511)"
    assert "open a browser" in hint
    hub.refuse_always, hub.redirect_to = None, "http://sign-in.invalid/"
    message, hint = failure(fetch)
    assert "does not answer like a model hub" in message
    assert "sign-in page" in hint


def test_a_sign_in_page_during_a_download_keeps_the_partial_file(
    hub: HubServer, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut_after, pauses, stages = [300_000], list[float](), list[str]()

    def pause(_web: web.Web, seconds: float) -> None:
        hub.page = "bodies"
        pauses.append(seconds)

    monkeypatch.setattr(web.Web, "pause", pause)
    network, job = (
        Network(endpoint=hub.endpoint, cache=tmp_path / "cache"),
        Job(lambda each: stages.append(each.stage)),
    )
    message, hint = failure(lambda: fetch_hub_file(WANTED, network, job))
    arrived = partial(tmp_path).stat().st_size
    assert pauses == [0.25, 0.5, 1.0]  # only a lost network is waited for longer
    assert transfer.WAITING not in stages
    assert message == f"{PAGE}{hub.port}; {disk.readable_bytes(arrived)} of 600.0 kB have arrived and are kept"
    assert "sign in" in hint
    assert partial(tmp_path).stat().st_size == arrived
    hub.page, hub.requests = None, []
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies()[0].range == f"bytes={arrived}-"


def test_a_network_lost_during_a_download_reports_the_bytes_kept(
    hub: HubServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(web.Web, "pause", lambda _web, seconds: pauses.append(seconds))
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
    hub.cut_after = [300_000, *[0] * 20]
    message, hint = failure(fetch)
    assert message.endswith(" kB of 600.0 kB have arrived and are kept")
    assert "check the network" in hint
    assert 85 <= sum(pauses) < 85 + transfer.LONGEST_PAUSE_S
    hub.cut_after = []
    assert fetch().path.read_bytes() == DATA


def test_a_network_that_is_missing_from_the_start_is_not_waited_for(
    hub: HubServer, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of an earlier download do not show that there is a network."""
    monkeypatch.setattr(transfer, "PAUSE_AFTER_BREAK_S", 0.01)
    kept = tmp_path / "cache" / "models--org--repo" / "blobs" / f"{hub.etag('model.gguf')}.edgespec.incomplete"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(DATA[:1000])
    hub.cut_after = [0] * 20
    assert "1.0 kB of 600.0 kB have arrived and are kept" in failure(fetch)[0]
    assert len(hub.bodies()) == transfer.BREAKS_WITHOUT_PROGRESS


def transfer_of(own: web.Web, request: Callable[[int], AbstractContextManager[web.Response]]) -> transfer.Transfer:
    """Of a file of 600 bytes."""
    told = list[object]().append
    return transfer.Transfer(web=own, name="file", request=request, size=600, most=600, arrived=told, stage=told)


def test_once_bytes_came_a_connection_may_try_many_silent_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's time-out is for each address of a host; the watching thread bounds them together."""
    own, now, late = web.Web("hub", lambda: False, 10.0), [0.0], list[list[bool]]()
    for module in (web, transfer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(web.Web, "pause", lambda *_: None)

    def connect(*_arguments: object, **_options: object) -> AbstractContextManager[httpx.Response]:
        before, looks = now[0], list[bool]()
        for seconds in (14, 20, 90, 80):  # it takes 80
            now[0] = before + seconds
            looks.append(own.overdue() is not None)
        late.append(looks)
        if len(late) > 1:
            raise TimeoutError
        return nullcontext(httpx.Response(200, content=b"the first bytes"))

    monkeypatch.setattr(own, "_client", lambda _proxy: SimpleNamespace(stream=connect))

    def request(_offset: int) -> AbstractContextManager[web.Response]:
        return own.answer("GET", "http://hub/file", lambda _response: DownloadError("refused"), headers={})

    with (tmp_path / "file").open("ab") as file, pytest.raises(web.UnreachableError, match="15 bytes of 600 bytes"):
        transfer_of(own, request).run(file)
    assert late == [[False, True, True, True], *[[False, False, True, False]] * 2], "the third would begin too late"


def attempts_of(ends: list[int | None], own: web.Web, file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Attempts until the download gives up. The server starts over, and breaks off after the bytes in ``ends``.

    None: it is not reached.
    """
    now, left = [0.0], iter(ends)
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(web.Web, "pause", lambda *_: None)
    asked = list[int]()

    def request(offset: int) -> AbstractContextManager[web.Response]:
        asked.append(offset)
        end = next(left)
        if end is None:
            now[0] += 10
            raise web.LostError("not reached")
        now[0] += 200
        return nullcontext(httpx.Response(200, content=bytes(end)))

    with file.open("ab") as partial, pytest.raises(web.UnreachableError):
        transfer_of(own, request).run(partial)
    return len(asked)


@pytest.mark.parametrize(
    ("ends", "attempts"),
    [
        ([300, 290, 280, 270, 600], 4),  # three in a row
        ([300, 290, 280, 310, 300, 290, 280, 600], 7),
        ([300, 290, *[None] * 8, 310, *[None] * 9, 600], 20),  # each time the network is waited for
    ],
)
def test_a_server_that_starts_over_may_bring_less_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int | None], attempts: int
) -> None:
    """The network counts as reached, though an attempt took minutes."""
    assert attempts_of(ends, web.Web("hub", lambda: False, 10.0), tmp_path / "file", monkeypatch) == attempts


@pytest.mark.parametrize(("timeout_s", "longest_s"), [(10.0, 85.0), (300.0, 305.0)])
def test_the_longest_wait_that_the_user_set_does_not_get_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, longest_s: float
) -> None:
    own = web.Web("hub", lambda: False, timeout_s)
    attempts_of([300, *[None] * 9], own, tmp_path / "file", monkeypatch)
    assert own.longest_wait_s == longest_s


# ------------------------------------------------------------------------------------------------------- disks


def test_a_disk_that_fills_up_during_a_download_keeps_the_partial_file(
    hub: HubServer, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_full(path: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(path, *arguments, **options)
        if path.name.endswith(".incomplete") and "ab" in arguments:
            write, left = file.write, [200_000]

            class Full:
                def write(self, data: bytes) -> int:
                    if len(data) > left[0]:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    left[0] -= len(data)
                    return int(write(data))

                def __getattr__(self, name: str) -> Any:
                    return getattr(file, name)

                def __enter__(self) -> Full:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

            return Full()
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        message, hint = failure(fetch)
    arrived = partial(tmp_path).stat().st_size
    assert 100_000 < arrived <= 200_000
    folder = tmp_path / "cache" / "models--org--repo"
    assert message == (
        f"the disk that holds {folder} is full; {disk.readable_bytes(arrived)} of 600.0 kB have arrived and are kept"
    )
    assert "HF_HOME" in hint
    hub.requests = []
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies()[0].range == f"bytes={arrived}-"


def test_too_little_disk_space_is_reported_with_needed_and_free_bytes(
    hub: HubServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1_000_000)
    message, _ = failure(fetch)
    assert "needs 67.7 MB of free disk space" in message
    assert "1.0 MB are free" in message
    assert hub.bodies() == []


def test_a_hub_cache_that_is_a_file_gives_a_one_sentence_error(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    message, hint = failure(lambda: fetch_hub_file(WANTED, Network(endpoint=hub.endpoint, cache=tmp_path / "cache")))
    assert message == f"the hub's cache {tmp_path / 'cache' / 'models--org--repo'} cannot be written to"
    assert "HF_HOME" in hint


@pytest.mark.skipif(sys.platform == "win32", reason="an error of the file system is made by its number here")
def test_a_read_only_hub_cache_gives_a_one_sentence_error(
    hub: HubServer, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def read_only(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.endswith(".incomplete"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", read_only)
    message, hint = failure(fetch)
    folder = tmp_path / "cache" / "models--org--repo"
    assert message == f"the hub's cache {folder} cannot be used: Read-only file system"
    assert "HF_HOME" in hint


def test_store_errors_contain_the_download_message_and_hint(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(Home(tmp_path / "home"), Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
    spec = spec_of_hub_reference(HubReference("org/repo", filename="model.gguf"))
    hub.page = "all"
    message, hint = failure(lambda: store.fetch(spec))
    assert message.startswith("hf:org/repo/model.gguf could not be fetched (hub org/repo/model.gguf: a web page")
    assert "open a browser" in hint
    hub.page = None
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1_000_000)
    with pytest.raises(DiskSpaceError):
        store.fetch(spec)
    assert list((tmp_path / "home").rglob("manifest.json")) == []
