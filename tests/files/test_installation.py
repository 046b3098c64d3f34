"""Install hints name the clone, the wheel or the address that edgespec was installed from, quoted for every shell."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from edgespec.files import disk, installation
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


def receipt(source: str | None = None) -> str:
    """As uv 0.13 writes it, with a further package."""
    further = "" if source is None else f', {{ name = "more", {source} }}'
    return f'[tool]\nrequirements = [{{ name = "edgespec" }}{further}]'


@pytest.mark.parametrize(
    ("receipt", "extras", "further"),
    [
        (RECEIPT, "serve,onnx,", '--with "tomli-w>=1" '),
        (receipt(), "", ""),
        (receipt('extras = ["a", "b"], specifier = ">=1"'), "", '--with "more[a,b]>=1" '),
        (receipt('directory = "/a b/more"'), "", '--with "more @ /a b/more" '),
        (receipt('extras = ["a"], path = "/more.whl"'), "", '--with "more[a] @ /more.whl" '),
        (receipt('url = "https://example.org/more.whl"'), "", '--with "more @ https://example.org/more.whl" '),
        (receipt('git = "https://example.org/more"'), "", '--with "more @ git+https://example.org/more" '),
        (receipt('git = "ssh://git@host/more?rev=v1"'), "", '--with "more @ git+ssh://git@host/more@v1" '),
        (receipt('extras = ["a"], editable = "/more"'), "", '--with-editable "/more[a]" '),
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
    "receipt",
    [
        "",
        "[tool",
        "tool = 3",
        "[tool]\nrequirements = [3]",
        receipt('marker = "python_version > 3"'),
        receipt('specifier = ">=1", index = "https://example.org"'),
        receipt('git = "https://example.org/more?rev=v1&subdirectory=x"'),
        receipt("specifier = 3"),
    ],
)
def test_a_tool_of_uv_that_is_not_understood_is_added_to_and_not_installed_again(
    receipt: str, no_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)  # uv installs no pip there
    monkeypatch.setattr(sys, "executable", "/tool/python")
    (no_clone / "uv-receipt.toml").write_text(receipt, encoding="utf-8")
    assert package_command("socksio") == "uv pip install --python /tool/python socksio"


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


@pytest.mark.parametrize(("python", "frozen"), [("", False), (None, False), ("/opt/application", True)])
def test_without_an_interpreter_no_path_is_named(
    python: str | None, frozen: bool, no_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executable of a frozen application is the application."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(None))
    assert package_command("socksio") == "pip install socksio"
    assert install_command("llama") == 'pip install "edgespec[llama]"'


@pytest.mark.parametrize("pip", [True, False])
def test_a_command_for_windows_does_not_begin_with_a_quoted_path(
    pip: bool, no_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PowerShell takes it for a text."""
    monkeypatch.setattr(util, "find_spec", lambda _name: object() if pip else None)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", r"C:\my venv\python.exe")
    form = "python -m pip --python {} install socksio" if pip else "uv pip install --python {} socksio"
    assert package_command("socksio") == form.format(r'"C:\my venv\python.exe"')
    monkeypatch.setattr(sys, "executable", r"C:\venv\python.exe")
    assert package_command("socksio").startswith("C:" if pip else "uv")


def test_a_clone_stays_the_place_that_runs(no_clone: Path) -> None:
    (no_clone / "pyproject.toml").touch()
    assert install_command("llama").endswith(f'install --editable "{no_clone}[llama]"')


@pytest.mark.parametrize(
    ("python", "word"),
    [(r"C:\venv\python.exe", r"C:\venv\python.exe"), (r"C:\my venv\python.exe", r'"C:\my venv\python.exe"')],
)
def test_a_path_of_windows_is_quoted_for_its_blanks_alone(
    python: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert disk.shell_word(python) == word


@pytest.mark.skipif(sys.platform == "win32", reason="names of folders differ there")
def test_a_folder_with_characters_that_shells_read_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "$HOME `x` 'y'"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "_SOURCES", folder)
    assert shlex.split(install_command("onnx"))[-1] == f"{folder}[onnx]"
