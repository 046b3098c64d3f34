"""Install hints name the clone, the wheel or the address that edgespec was installed from, quoted for every shell."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from edgespec.files import installation
from edgespec.files.installation import install_command, package_command

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


RECEIPT = """
[tool]
requirements = [
    { name = "edgespec", extras = ["serve", "onnx"], directory = "/home/me/edgespec" },
    { name = "tomli-w", specifier = ">=1" },
]
"""


@pytest.mark.parametrize(
    ("receipt", "extras", "further"),
    [
        (RECEIPT, "serve,onnx,", '--with "tomli-w>=1" '),
        ('[tool]\nrequirements = [{ name = "edgespec" }]', "", ""),
        ("", "", ""),
        ("[tool", "", ""),
        ("tool = 3", "", ""),
        ("[tool]\nrequirements = [3]", "", ""),
    ],
)
def test_a_tool_of_uv_is_installed_again_with_what_it_has(
    receipt: str, extras: str, further: str, no_clone: Path
) -> None:
    """What the command does not name is gone afterwards."""
    (no_clone / "uv-receipt.toml").write_text(receipt, encoding="utf-8")
    (no_clone / "pyproject.toml").touch()
    own = f"uv tool install --force {further}"
    assert install_command("llama") == f'{own}--editable "{no_clone}[{extras}llama]"'
    assert install_command("serve").count("serve") == 1
    kept = f'"{no_clone}[{extras.rstrip(",")}]"' if extras else no_clone
    assert package_command("socksio") == f"{own}--with socksio --editable {kept}"


@pytest.mark.parametrize(
    ("python", "named"), [("/venv/bin/python", "/venv/bin/python"), ("/my venv/python", '"/my venv/python"')]
)
@pytest.mark.parametrize(("pip", "form"), [(True, "{} -m pip install"), (False, "uv pip install --python {}")])
def test_the_commands_install_into_the_environment_that_runs(
    pip: bool, form: str, python: str, named: str, no_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may be active in the shell, or none. One that uv made has no pip."""
    monkeypatch.setattr(util, "find_spec", lambda _name: object() if pip else None)
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(None))
    monkeypatch.setattr(sys, "executable", python)
    assert install_command("llama") == f'{form.format(named)} "edgespec[llama]"'
    assert package_command("socksio") == f"{form.format(named)} socksio"


def test_a_clone_stays_the_place_that_runs(no_clone: Path) -> None:
    (no_clone / "pyproject.toml").touch()
    assert install_command("llama").endswith(f'install --editable "{no_clone}[llama]"')


@pytest.mark.skipif(sys.platform == "win32", reason="names of folders differ there")
def test_a_folder_with_characters_that_shells_read_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "$HOME `x` 'y'"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "_SOURCES", folder)
    assert shlex.split(install_command("onnx"))[-1] == f"{folder}[onnx]"
