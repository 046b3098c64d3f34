"""Models of a hub repository, from a real server on loopback: the chosen file, and all parts of a split model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.errors import DiskSpaceError, DownloadError, HashMismatchError, InvalidRequestError, ModelNotFoundError
from edgespec.files import disk
from edgespec.files.atomic import sha256_file, sha256_of_parts
from edgespec.files.home import Home
from edgespec.files.progress import QUIET, Job
from edgespec.store.hub.file import FetchedHubFile
from edgespec.store.hub.model import fetch_hub_model
from edgespec.store.locate import Locator
from edgespec.store.references import HubFile, HubReference, Network, parse_reference, spec_of_hub_reference
from edgespec.store.store import Store, folder_key
from tests.support.hub_server import COMMIT, HubServer, running
from tests.support.split_gguf import split_gguf
from tests.support.tiny_models import TinyModels

NAMES = [f"q8/tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tiny: TinyModels, tmp_path: Path) -> list[Path]:
    return split_gguf(tiny.target, tmp_path / "set", tensors=9, name="tiny")


@pytest.fixture
def hub(parts: list[Path]) -> Iterator[HubServer]:
    files = {name: part.read_bytes() for name, part in zip(NAMES, parts, strict=True)}
    with running(HubServer(files={"README.md": b"x", "mmproj-f16.gguf": b"GGUF", **files})) as hub:
        yield hub


@pytest.fixture
def store(hub: HubServer, home: Home, tmp_path: Path) -> Store:
    return Store(home, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))


Fetch = Callable[..., tuple[FetchedHubFile, ...]]


@pytest.fixture
def fetch(hub: HubServer, tmp_path: Path) -> Fetch:
    def call(
        name: str | None = None, revision: str = "main", job: Job = QUIET, *, offline: bool = False
    ) -> tuple[FetchedHubFile, ...]:
        network = Network(endpoint=hub.endpoint, cache=tmp_path / "cache", offline=offline)
        return fetch_hub_model(HubFile("org/repo", name, revision), network, job).files

    return call


def test_a_reference_to_any_part_means_the_whole_split_model() -> None:
    assert parse_reference(f"hf:org/repo@v1/{NAMES[1]}") == HubReference("org/repo", "v1", NAMES[0])


@pytest.mark.parametrize("name", [None, NAMES[0]])
def test_all_parts_are_downloaded_and_then_available_offline(fetch: Fetch, hub: HubServer, name: str | None) -> None:
    found = fetch(name)
    assert [file.path.read_bytes() for file in found] == [hub.files[each] for each in NAMES]
    assert {file.commit for file in found} == {COMMIT}
    assert len({file.path.parent for file in found}) == 1
    asked = len(hub.requests)
    assert fetch(name, offline=True) == found
    assert len(hub.requests) == asked


def test_a_split_download_resumes_after_a_break_between_parts(fetch: Fetch, hub: HubServer) -> None:
    with pytest.raises(ZeroDivisionError):
        fetch(job=Job(lambda event: 1 / (event.source.count("00002-of") == 0)))
    fetch()
    assert sorted({request.path for request in hub.bodies()}) == [f"/cdn/{name}" for name in NAMES]
    assert [request.path for request in hub.bodies()].count(f"/cdn/{NAMES[0]}") == 1


def test_a_part_missing_from_the_repository_is_reported_before_the_download(fetch: Fetch, hub: HubServer) -> None:
    del hub.files[NAMES[1]]
    with pytest.raises(
        DownloadError, match=r"org/repo has no file 'q8/tiny-00002-of-00003\.gguf', which is part 2 of 3"
    ):
        fetch(NAMES[0])
    assert hub.bodies() == []


def test_a_missing_revision_or_file_of_a_hub_model_is_named(fetch: Fetch) -> None:
    with pytest.raises(DownloadError, match="no revision 'v9'"):
        fetch(None, "v9")
    with pytest.raises(DownloadError, match=r"no file 'x\.gguf'"):
        fetch("x.gguf")
    with pytest.raises(DownloadError, match="org/repo is not in the hub's cache, and offline was asked for"):
        fetch(offline=True)


def test_disk_space_is_checked_for_all_parts_together(
    fetch: Fetch, hub: HubServer, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [part.stat().st_size for part in parts]
    monkeypatch.setattr(disk, "free_bytes", lambda _path: disk.SLACK_BYTES + sum(sizes) - 1)
    with pytest.raises(DiskSpaceError) as caught:
        fetch()
    assert caught.value.needed_bytes == disk.SLACK_BYTES + sum(sizes)
    assert hub.bodies() == []
    monkeypatch.setattr(disk, "free_bytes", lambda _path: disk.SLACK_BYTES + sum(sizes))
    fetch()


# -------------------------------------------------------------------------------------------- in the store


def test_the_store_fetches_lists_and_locates_a_split_model(
    store: Store, home: Home, tiny: TinyModels, parts: list[Path], tmp_path: Path
) -> None:
    spec = spec_of_hub_reference(HubReference("org/repo"))
    model = store.fetch(spec)
    assert model.paths[0] == model.path
    assert [path.read_bytes() for path in model.paths] == [part.read_bytes() for part in parts]
    assert model.bytes == sum(part.stat().st_size for part in parts)
    assert model.sha256 == sha256_of_parts([sha256_file(part) for part in parts])
    assert "and 2 more" in model.how_made
    assert store.find("hf:org/repo") == model == store.verify("hf:org/repo") == store.fetch(spec)
    assert store.list() == [model]
    located = Locator(store=store).locate("hf:org/repo")
    assert [part.path for part in located.header.parts] == list(model.paths)
    assert located.identity == f"sha256:{model.sha256}"
    removed = store.remove("hf:org/repo")
    assert removed.kept == model.paths
    assert store.list() == []
    offline = Store(store.home, Network(offline=True, cache=tmp_path / "cache"))
    assert offline.fetch(spec) == model


def test_a_part_with_a_new_time_is_hashed_again_and_its_manifest_updated(store: Store, home: Home) -> None:
    model = store.fetch(spec_of_hub_reference(HubReference("org/repo")))
    manifest = home.models / folder_key("hf:org/repo") / "manifest.json"
    before = manifest.read_text()
    blob = model.paths[1].resolve()
    blob.touch()
    assert store.find("hf:org/repo") == model
    assert manifest.read_text() != before
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for check in (store.find, store.verify):
        with pytest.raises(HashMismatchError, match=f"{NAMES[1].partition('/')[2]}.*has changed since it was stored"):
            check("hf:org/repo")


def test_a_deleted_part_is_named_and_downloaded_again(store: Store, hub: HubServer, home: Home) -> None:
    spec = spec_of_hub_reference(HubReference("org/repo"))
    model = store.fetch(spec)
    model.paths[2].resolve().unlink()
    assert store.find("hf:org/repo") is None
    assert store.list() == []
    folder = home.models / folder_key("hf:org/repo")
    assert store.ignored() == {folder: f"its file {model.paths[2]} is gone"}
    with pytest.raises(HashMismatchError, match=r"00003-of-00003\.gguf.*cannot be read"):
        store.verify("hf:org/repo")
    hub.requests = []
    assert store.fetch(spec) == model
    assert [request.path for request in hub.bodies()] == [f"/cdn/{NAMES[2]}"]


@pytest.mark.parametrize("parts_said", ["[]x", '{"a": 1}', '[{"path": "../x"}]', "[3]", "null"])
def test_a_manifest_with_malformed_parts_is_ignored(store: Store, home: Home, parts_said: str) -> None:
    store.fetch(spec_of_hub_reference(HubReference("org/repo")))
    manifest = home.models / folder_key("hf:org/repo") / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: text.index('"parts":')] + f'"parts": {parts_said}}}')
    assert store.find("hf:org/repo") is None
    with pytest.raises(ModelNotFoundError, match="manifest of hf:org/repo cannot be used"):
        store.verify("hf:org/repo")


def test_a_malformed_part_name_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="malformed file name"):
        parse_reference("hf:org/repo/../x-00002-of-00003.gguf")
