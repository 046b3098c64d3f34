"""Install hints name the clone, the wheel or the address that edgespec was installed from, quoted for every shell."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from edgespec.files import installation
from edgespec.files.installation import install_command

WHEEL = "/a b/dist/edgespec-0.1.0-py3-none-any.whl"


class Installed:
    """A distribution with the record of its origin."""

    def __init__(self, record: object) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._record is None else json.dumps(self._record)


@pytest.fixture
def no_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(installation, "_SOURCES", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def test_a_clone_is_named_by_its_folder() -> None:
    clone = Path(installation.__file__).parents[2]
    assert shlex.split(install_command("serve"))[-1] == f"{clone}[serve]"


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"url": f"file://{WHEEL.replace(' ', '%20')}"}, f"{WHEEL}[serve]"),
        ({"url": "file:///home/me/edgespec", "dir_info": {"editable": True}}, "/home/me/edgespec[serve]"),
        ({"url": "file:///C:/Users/me/edgespec"}, "C:/Users/me/edgespec[serve]"),
        ({"url": "https://example.org/edgespec.whl"}, "edgespec[serve] @ https://example.org/edgespec.whl"),
        (None, "edgespec[serve]"),
        ([], "edgespec[serve]"),
    ],
)
def test_other_installations_are_named_by_their_origin(
    record: object, wanted: str, no_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(record))
    command = install_command("serve")
    assert command.endswith(f' "{wanted}"')
    assert shlex.split(command)[-1] == wanted


def test_a_tool_of_uv_is_installed_again(no_clone: Path) -> None:
    (no_clone / "uv-receipt.toml").touch()
    (no_clone / "pyproject.toml").touch()
    assert install_command("llama") == f'uv tool install --force "{no_clone}[llama]"'


@pytest.mark.parametrize("pip", [True, False])
def test_an_environment_without_pip_is_uvs(pip: bool, no_clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: object() if pip else None)
    assert install_command("llama").startswith("pip install " if pip else "uv pip install ")


@pytest.mark.skipif(sys.platform == "win32", reason="names of folders differ there")
def test_a_folder_with_characters_that_shells_read_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "$HOME `x` 'y'"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "_SOURCES", folder)
    assert shlex.split(install_command("onnx"))[-1] == f"{folder}[onnx]"
