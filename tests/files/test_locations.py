from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.files.home import Home, home


def test_the_variable_moves_everything_and_nothing_is_created(tmp_path: Path) -> None:
    place = home({"EDGESPEC_HOME": str(tmp_path / "état with space")})
    folders = [place.models, place.parts, place.locks, place.measurements, place.emissions, place.profiles]
    folders.append(place.tools)
    paths = [*folders, place.history]
    assert all(path.is_relative_to(tmp_path / "état with space") for path in paths)
    assert len(set(paths)) == len(paths)
    assert list(tmp_path.iterdir()) == []
    assert place.create(place.models).is_dir()


def test_without_the_variable_it_is_the_platforms_place() -> None:
    place = home({})
    assert place.root.is_absolute()
    assert place.root.name == "edgespec"


def test_a_relative_home_is_fixed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = home({"EDGESPEC_HOME": "state"})
    monkeypatch.chdir("/")
    assert place.root == tmp_path / "state"


def test_a_home_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(EdgespecError, match="is a file") as caught:
        home({"EDGESPEC_HOME": str(file)})
    assert caught.value.hint
    with pytest.raises(EdgespecError, match="NUL"):
        home({"EDGESPEC_HOME": "a\0b"})
    with pytest.raises(EdgespecError, match="home folder"):
        home({"EDGESPEC_HOME": "~nobody-of-this-name/x"})
    place = Home(file / "below")
    with pytest.raises(EdgespecError, match="cannot be created") as caught:
        place.create(place.models)
    assert "EDGESPEC_HOME" in (caught.value.hint or "")


def test_a_folder_that_refuses_writing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind every user (root)
    with pytest.raises(EdgespecError, match="cannot be written"):
        Home(tmp_path).create(tmp_path / "models")


@pytest.mark.parametrize("modules", ["edgespec.store.store, edgespec.store.hub.file", "edgespec.store.catalogue"])
def test_importing_loads_no_hub_library_and_needs_no_home(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('huggingface_hub' in sys.modules)"
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(Path.cwd())}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
