"""The model that a trimmed drafter was made from, found in the store."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.tiny_models import TinyModels, put_into_store
from tests.support.trimmed_folder import edit_manifest, write_trimmed_folder


def trimmed(source: Path, folder: Path, home: Home, sha256: str | None) -> LocatedModel:
    write_trimmed_folder(source, folder, range(300))
    edit_manifest(folder, lambda document: document["source"].update(sha256=sha256))
    return Locator(store=Store(home)).locate(str(folder))


def test_the_source_of_a_trimmed_drafter_is_found_by_its_content(
    tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    data = tiny.drafter.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    drafter, locator = trimmed(tiny.drafter, tmp_path / "a", home, sha256), Locator(store=Store(home))
    assert locator.find_source(drafter) is None
    put_into_store(home, "another", tiny.target.read_bytes())
    assert locator.find_source(drafter) is None
    path = put_into_store(home, "small", data)
    found = locator.find_source(drafter)
    assert found is not None
    assert (found.name, found.path, found.identity) == ("small", path, f"sha256:{sha256}")
    assert not found.drafts_only


def test_an_unstated_or_changed_source_of_a_drafter_is_not_found(
    tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    data, locator = tiny.drafter.read_bytes(), Locator(store=Store(home))
    path = put_into_store(home, "small", data)
    assert locator.find_source(trimmed(tiny.drafter, tmp_path / "a", home, None)) is None
    drafter = trimmed(tiny.drafter, tmp_path / "b", home, hashlib.sha256(data).hexdigest())
    edit_manifest(tmp_path / "b", lambda document: document.update(source="a name"))
    assert locator.find_source(locator.locate(str(tmp_path / "b"))) is None
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    assert locator.find_source(drafter) is None
