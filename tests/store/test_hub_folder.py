"""Model folders of a hub repository, fetched from a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.errors import CancelledError, DownloadError, InvalidRequestError
from edgespec.files.progress import QUIET, Job, ProgressEvent
from edgespec.store.hub.folder import fetch_hub_folder
from edgespec.store.hub.listing import HubEntry, HubListing, list_hub_files
from edgespec.store.references import Network
from tests.support.hub_server import COMMIT, HubServer, running

WANTED = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "other.safetensors": b"second" * 1000,
    "model.safetensors.index.json": (
        b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "other.safetensors"}}'
    ),
}
OTHERS = {
    "model-00002-of-00002.safetensors": b"not in the index",
    "README.md": b"read me",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running(HubServer(files={**WANTED, **OTHERS})) as hub:
        yield hub


def listed(hub: HubServer, cache: Path, job: Job = QUIET, *, offline: bool = False) -> HubListing:
    return list_hub_files("org/repo", "main", Network(endpoint=hub.endpoint, cache=cache, offline=offline), job)


def fetched(hub: HubServer, cache: Path, *, offline: bool = False) -> Path:
    network = Network(endpoint=hub.endpoint, cache=cache, offline=offline)
    return fetch_hub_folder(listed(hub, cache, offline=offline), lambda _folder: None, network)


def test_only_files_that_a_conversion_reads_are_downloaded(hub: HubServer, tmp_path: Path) -> None:
    folder = listed(hub, tmp_path)
    assert (folder.repo, folder.commit, folder.names) == ("org/repo", COMMIT, tuple({**WANTED, **OTHERS}))
    assert folder.is_model_folder
    place = fetched(hub, tmp_path)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == WANTED
    assert len(hub.bodies()) == len(WANTED)


def test_no_weights_are_downloaded_for_a_folder_that_is_refused(hub: HubServer, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert {path.name for path in folder.iterdir()} == {name for name in WANTED if name.endswith(".json")}
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError):
        fetch_hub_folder(listed(hub, tmp_path), refuse, Network(endpoint=hub.endpoint, cache=tmp_path))
    assert not [request.path for request in hub.bodies() if "json" not in request.path]


def test_a_single_file_of_weights_is_read_without_its_index(hub: HubServer, tmp_path: Path) -> None:
    hub.files |= {"model.safetensors": b"whole" * 1000}
    names = {path.name for path in fetched(hub, tmp_path).iterdir()}
    assert {name for name in names if name.endswith(".safetensors")} == {"model.safetensors"}


def test_a_cached_model_folder_needs_no_hub(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="offline"):
        listed(hub, tmp_path, offline=True)
    place = fetched(hub, tmp_path)
    (tmp_path / "models--org--repo" / "refs").mkdir(exist_ok=True)
    (tmp_path / "models--org--repo" / "refs" / "main").write_text(COMMIT)
    asked = len(hub.requests)
    assert fetched(hub, tmp_path, offline=True) == place
    assert len(hub.requests) == asked


def test_an_unreachable_hub_lists_the_cached_model_folder(hub: HubServer, tmp_path: Path) -> None:
    unreachable = Network(endpoint="http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1"):
        list_hub_files("org/repo", "main", unreachable)
    fetched(hub, tmp_path)
    (tmp_path / "models--org--repo" / "refs").mkdir(exist_ok=True)
    (tmp_path / "models--org--repo" / "refs" / "main").write_text(COMMIT)
    folder = list_hub_files("org/repo", "main", unreachable)
    assert set(folder.names) == set(WANTED)


@pytest.mark.parametrize(
    "names",
    [
        {"config.json": b"{}", "model.gguf": b"x", "model.safetensors": b"x"},
        {"config.json": b"{}", "pytorch_model.bin": b"x"},
        {"model.safetensors": b"x"},
    ],
    ids=["a GGUF", "only pickles", "no config"],
)
def test_a_repository_without_plain_safetensors_is_not_a_model_folder(
    hub: HubServer, tmp_path: Path, names: dict[str, bytes]
) -> None:
    hub.files = names
    assert not listed(hub, tmp_path).is_model_folder


def test_fetching_a_repository_without_a_convertible_model_is_an_error(hub: HubServer, tmp_path: Path) -> None:
    listing = HubListing(repo="org/repo", revision="main", commit=COMMIT, entries=(HubEntry("README.md"),))
    with pytest.raises(DownloadError, match="no model"):
        fetch_hub_folder(listing, lambda _folder: None, Network(cache=tmp_path))


def test_listing_a_folder_on_a_server_that_is_not_a_hub_is_an_error(hub: HubServer, tmp_path: Path) -> None:
    hub.revisions = {"main": "../../secret"}
    with pytest.raises(DownloadError, match="like a model hub"):
        listed(hub, tmp_path)


@pytest.mark.slow
def test_listing_a_hub_folder_reports_progress_and_can_be_cancelled(hub: HubServer, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    listed(hub, tmp_path, Job(events.append))
    assert f"{events[0].stage} {events[0].source}".startswith("asking hub ")
    hub.answer_delay_s = 5.0
    with pytest.raises(CancelledError):
        listed(hub, tmp_path, Job(cancelled=lambda: True))
