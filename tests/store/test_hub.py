from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.errors import CancelledError, DiskSpaceError, DownloadError, HashMismatchError
from edgespec.files import disk
from edgespec.files.progress import QUIET, Job, ProgressEvent
from edgespec.store import transfer, web
from edgespec.store.hub.file import FetchedHubFile, fetch_hub_file
from edgespec.store.references import HubFile, Network
from tests.support.hub_server import COMMIT, HubServer, running

DATA = random.Random(1).randbytes(600_000)
WANTED = HubFile("org/repo", "model-q4_k_m.gguf")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running(
        HubServer(files={"model-q4_k_m.gguf": DATA, "README.md": b"read me"}, small_files={"README.md"})
    ) as hub:
        yield hub


@pytest.fixture
def fetch(hub: HubServer, tmp_path: Path) -> Callable[..., FetchedHubFile]:
    def call(wanted: HubFile = WANTED, job: Job = QUIET, *, offline: bool = False) -> FetchedHubFile:
        return fetch_hub_file(wanted, Network(endpoint=hub.endpoint, cache=tmp_path, offline=offline), job)

    return call


Fetch = Callable[..., FetchedHubFile]


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob("*.incomplete"))


def test_a_downloaded_file_is_verified_and_stored_in_the_hub_cache(
    fetch: Fetch, hub: HubServer, tmp_path: Path
) -> None:
    events: list[ProgressEvent] = []
    fetched = fetch(job=Job(events.append))
    assert fetched.path.read_bytes() == DATA
    assert fetched.sha256 == hashlib.sha256(DATA).hexdigest()
    assert fetched.commit == COMMIT
    assert partials(tmp_path) == []
    assert events[-1].done_bytes == events[-1].total_bytes == len(DATA)
    # huggingface_hub finds the file without a network.
    from huggingface_hub import hf_hub_download

    path = hf_hub_download("org/repo", "model-q4_k_m.gguf", cache_dir=tmp_path, local_files_only=True)
    assert Path(path) == fetched.path
    # The next fetch transfers nothing.
    assert fetch().path == fetched.path
    assert len(hub.bodies()) == 1


def test_a_file_cached_by_huggingface_hub_is_used_after_verification(
    fetch: Fetch, hub: HubServer, tmp_path: Path
) -> None:
    blob = tmp_path / "models--org--repo" / "blobs" / hub.etag("model-q4_k_m.gguf")
    blob.parent.mkdir(parents=True)
    blob.write_bytes(DATA)
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies() == []
    blob.write_bytes(DATA[:-1] + b"!")  # a damaged cached file is replaced
    assert fetch().path.read_bytes() == DATA
    assert len(hub.bodies()) == 1


def test_small_hub_files_are_verified_by_their_git_hash(fetch: Fetch, hub: HubServer) -> None:
    assert fetch(HubFile("org/repo", "README.md")).path.read_bytes() == b"read me"
    hub.etag_override, hub.requests = "0" * 40, []
    with pytest.raises(HashMismatchError):
        fetch(HubFile("org/repo", "README.md"))


def test_the_token_is_not_sent_to_the_cdn(fetch: Fetch, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch()
    sent = {request.path.split("/")[1]: request.authorization for request in hub.requests}
    assert sent == {"org": "Bearer hf_secret", "cdn": None}


@pytest.mark.parametrize(
    ("status", "headers", "sentence"),
    [
        (401, {}, r"requires a valid token .*\(or set or correct HF_TOKEN\)"),
        (401, {"X-Error-Code": "RepoNotFound"}, "no repository org/repo, or it is private"),
        (403, {}, "forbids access"),
        (403, {"X-Error-Code": "GatedRepo"}, "accept its terms first"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "no revision 'main'"),
        (404, {"X-Error-Code": "EntryNotFound"}, "no file 'model-q4_k_m.gguf'"),
        (404, {}, "no repository"),
        (418, {}, "refused the request"),
    ],
)
def test_each_http_refusal_has_its_own_message_and_is_not_retried(
    fetch: Fetch, hub: HubServer, status: int, headers: dict[str, str], sentence: str
) -> None:
    hub.refuse_always = (status, headers)
    with pytest.raises(DownloadError) as caught:
        fetch()
    assert re.search(sentence, f"{caught.value.message} {caught.value.hint}")
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (HubFile("org/other", "x.gguf"), "no repository org/other"),
        (HubFile("org/repo", "x.gguf", "v9"), "no revision 'v9'"),
        (HubFile("org/repo", "x.gguf"), "no file 'x.gguf'"),
    ],
)
def test_a_missing_repository_revision_or_file_is_named(fetch: Fetch, wanted: HubFile, sentence: str) -> None:
    with pytest.raises(DownloadError, match=sentence):
        fetch(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_to_an_overloaded_hub_is_retried_until_it_succeeds(
    fetch: Fetch, hub: HubServer, status: int
) -> None:
    hub.refuse_next = [(status, {})]
    assert fetch().path.stat().st_size == len(DATA)


def test_retries_to_an_overloaded_hub_end_within_seconds(
    fetch: Fetch, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "RETRY_BUDGET_S", 3.0)
    hub.refuse_always = (503, {})
    with pytest.raises(DownloadError, match="HTTP 503"):
        fetch()
    assert len(hub.requests) > 1
    hub.refuse_always, hub.requests = (429, {"Retry-After": "3600"}), []
    with pytest.raises(DownloadError, match="asks to wait 3600 s"):
        fetch()
    assert len(hub.requests) == 1


@pytest.mark.slow
def test_a_broken_download_resumes_with_a_range_request(fetch: Fetch, hub: HubServer) -> None:
    hub.cut_after = [200_000, 100_000]
    assert fetch().path.read_bytes() == DATA
    ranges = [request.range for request in hub.bodies()]
    assert ranges[0] is None
    assert len(ranges) == 3
    assert all(asked is not None and int(asked[6:-1]) >= 150_000 for asked in ranges[1:])


@pytest.mark.slow
def test_repeated_breaks_without_progress_fail_and_keep_the_partial_file(
    fetch: Fetch, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count(0, 20)  # seconds of each look at the clock
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    monkeypatch.setattr(transfer, "PAUSE_AFTER_BREAK_S", 0.01)
    hub.cut_after = [300_000, 0, 0, 0, 0, 0]
    with pytest.raises(DownloadError, match=r"broke off|too early"):
        fetch()
    assert 200_000 < partials(tmp_path)[0].stat().st_size <= 300_000
    hub.cut_after, hub.requests = [], []
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies()[0].range is not None


def test_a_download_waits_for_a_network_that_returns(
    fetch: Fetch, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PAUSE_AFTER_BREAK_S", 0.02)
    hub.cut_after, stages = [300_000, 0, 0, 0, 0], list[str]()
    assert fetch(job=Job(lambda event: stages.append(event.stage))).path.read_bytes() == DATA
    assert "waiting for the network" in stages


def test_a_download_starts_over_if_the_server_ignores_ranges(fetch: Fetch, hub: HubServer) -> None:
    hub.cut_after, hub.ignore_ranges = [200_000], True
    assert fetch().path.read_bytes() == DATA


def test_a_download_with_a_wrong_hash_is_refused_and_deleted(fetch: Fetch, hub: HubServer, tmp_path: Path) -> None:
    hub.corrupt_next = 5
    with pytest.raises(HashMismatchError, match="another hash"):
        fetch()
    assert partials(tmp_path) == []
    assert list(tmp_path.rglob("*.gguf")) == []


@pytest.mark.parametrize("size", [1000, 600_000, 700_000])
def test_a_damaged_partial_file_is_dropped_and_downloaded_again(
    fetch: Fetch, hub: HubServer, tmp_path: Path, size: int
) -> None:
    partial = tmp_path / "models--org--repo" / "blobs" / f"{hub.etag('model-q4_k_m.gguf')}.edgespec.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * size)
    assert fetch().path.read_bytes() == DATA


@pytest.mark.parametrize("name", ["C:/models/a.gguf", "a.gguf:stream", "b/../a.gguf", "a\x07.gguf"])
def test_a_file_name_that_is_a_path_elsewhere_on_some_system_is_refused(
    fetch: Fetch, hub: HubServer, name: str
) -> None:
    hub.files[name] = DATA
    with pytest.raises(DownloadError, match="unusable file name"):
        fetch(HubFile("org/repo", name))
    assert hub.requests == []


def test_a_redirect_that_cannot_be_read_does_not_come_from_a_hub(fetch: Fetch, hub: HubServer) -> None:
    hub.redirect_to = "http://[x"
    with pytest.raises(DownloadError, match="does not answer like a model hub"):
        fetch()


def test_an_etag_that_is_not_a_safe_file_name_is_refused(fetch: Fetch, hub: HubServer, tmp_path: Path) -> None:
    hub.etag_override = "../../outside"
    with pytest.raises(DownloadError, match="unusable etag"):
        fetch()
    assert list(tmp_path.iterdir()) == []


def test_a_file_whose_hash_the_hub_does_not_state_comes_with_a_notice(fetch: Fetch, hub: HubServer) -> None:
    events: list[ProgressEvent] = []
    fetch(HubFile("org/repo", "README.md"), Job(events.append))
    assert not any(event.note for event in events), "a file in git has git's hash"
    hub.etag_override = "W-1234"
    assert fetch(job=Job(events.append)).path.read_bytes() == DATA
    assert [event.note for event in events if event.note] == [
        "the hub stated no hash of this file, so nothing confirms its content"
    ]


def test_offline_uses_the_hub_cache_without_any_request(fetch: Fetch, hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not in the hub's cache, and offline"):
        fetch(offline=True)
    fetched = fetch()
    hub.requests = []
    assert fetch(offline=True) == fetched
    assert fetch(HubFile("org/repo", WANTED.filename, COMMIT), offline=True).path == fetched.path
    assert hub.requests == []
    fetched.path.resolve().write_bytes(b"changed")
    with pytest.raises(HashMismatchError):
        fetch(offline=True)


def test_a_cached_file_whose_blob_is_in_a_store_that_repositories_share_is_used_offline(
    fetch: Fetch, tmp_path: Path
) -> None:
    """huggingface_hub names the shared blob by another hash of 64 digits, and links the repository's blob to it."""
    fetched = fetch()
    blob, shared = fetched.path.resolve(), tmp_path / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    assert fetch(offline=True) == fetched
    shared.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    with pytest.raises(HashMismatchError):
        fetch(offline=True)


def test_a_cached_file_is_used_if_the_hub_is_unreachable(fetch: Fetch, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(DownloadError, match="refuses the connection"):
            fetch_hub_file(WANTED, Network(endpoint=nowhere, cache=tmp_path))
        fetched = fetch()
        assert fetch_hub_file(WANTED, Network(endpoint=nowhere, cache=tmp_path)) == fetched


def test_an_unknown_host_and_a_silent_server_have_different_messages(
    hub: HubServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(DownloadError, match=r"hub\.invalid cannot be resolved"):
            fetch_hub_file(WANTED, Network(endpoint="http://hub.invalid", cache=tmp_path))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub.answer_delay_s = 1.0
    with pytest.raises(DownloadError, match="stopped answering"):
        fetch()


def test_every_transport_failure_has_a_message() -> None:
    import ssl

    ConnectTimeout = type("ConnectTimeout", (Exception,), {})  # noqa: N806 - named as the client library does
    ProxyError = type("ProxyError", (Exception,), {})  # noqa: N806
    sentences = [
        (ConnectTimeout(), "did not accept a connection within 5 s", True),
        (ProxyError(), "proxy", False),
        (ssl.SSLCertVerificationError(), "certificate", False),
        (ValueError("odd"), "broke off", True),
    ]
    for error, sentence, lost in sentences:
        failure = web.transport_failure(error, "hub")
        assert sentence in failure.message
        assert isinstance(failure, web.LostError) == lost


def test_too_little_disk_space_is_reported_before_the_download(
    fetch: Fetch, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError) as caught:
        fetch()
    assert caught.value.needed_bytes > len(DATA)
    assert hub.bodies() == []


def test_cancelling_a_download_is_quick_and_keeps_the_partial_file(
    fetch: Fetch, hub: HubServer, tmp_path: Path
) -> None:
    hub.chunk_delay_s = 0.1

    def some_came() -> bool:
        return any(path.stat().st_size for path in partials(tmp_path))

    with pytest.raises(CancelledError):
        fetch(job=Job(cancelled=some_came))
    assert 0 < partials(tmp_path)[0].stat().st_size < len(DATA)
    hub.chunk_delay_s, hub.requests = 0, []
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies()[0].range is not None


CHILD = """
import sys
from pathlib import Path
from edgespec.store.hub.file import fetch_hub_file
from edgespec.store.references import HubFile
fetch_hub_file(HubFile("org/repo", "model-q4_k_m.gguf"))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_resumes_and_hub_environment_variables_apply(
    hub: HubServer, fetch: Fetch, tmp_path: Path, how: signal.Signals
) -> None:
    hub.chunk_delay_s = 0.05
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and not (partials(tmp_path) and partials(tmp_path)[0].stat().st_size > 50_000):
        time.sleep(0.02)
    child.send_signal(how)
    output, errors = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert output == b""
    assert errors == b"" if how == signal.SIGKILL else b"KeyboardInterrupt" in errors
    assert list(tmp_path.rglob("*.gguf")) == []
    hub.chunk_delay_s, hub.requests = 0, []
    assert fetch().path.read_bytes() == DATA
    assert hub.bodies()[0].range is not None


@pytest.mark.slow
def test_failed_downloads_print_nothing(hub: HubServer, tmp_path: Path) -> None:
    hub.cut_after, hub.refuse_next = [100_000], [(500, {"X-HF-Warning": "topic; a warning for you"})]
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_ENABLE_HF_TRANSFER": "1",  # deprecated: huggingface_hub warns about it at import
    }
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"", b"")
    environment["HF_HUB_OFFLINE"] = "1"
    hub.requests = []
    subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, check=True, timeout=60)
    assert hub.requests == []
