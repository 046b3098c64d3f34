from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.files.home import FORMAT, Home, home
from tests.support.command_line import InProcess, command, environment, run_cli
from tests.support.tiny_models import TinyModels


def test_edgespec_home_moves_all_paths_and_creates_nothing(tmp_path: Path) -> None:
    place = home({"EDGESPEC_HOME": str(tmp_path / "état with space")})
    folders = [place.models, place.parts, place.locks, place.measurements, place.counted_answers, place.profiles]
    folders.append(place.tools)
    paths = [*folders, place.history]
    assert all(path.is_relative_to(tmp_path / "état with space") for path in paths)
    assert len(set(paths)) == len(paths)
    assert list(tmp_path.iterdir()) == []
    assert place.create(place.models).is_dir()


def test_without_edgespec_home_the_platforms_data_folder_is_used() -> None:
    place = home({})
    assert place.root.is_absolute()
    assert place.root.name == "edgespec"


def test_a_relative_home_becomes_absolute_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = home({"EDGESPEC_HOME": "state"})
    monkeypatch.chdir("/")
    assert place.root == tmp_path / "state"


def test_an_unusable_home_raises_an_error_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(EdgespecError, match="is a file") as caught:
        home({"EDGESPEC_HOME": str(file)})
    assert caught.value.hint
    with pytest.raises(EdgespecError, match="NUL"):
        home({"EDGESPEC_HOME": "a\0b"})
    with pytest.raises(EdgespecError, match="cannot be read"):
        home({"EDGESPEC_HOME": str(tmp_path / ("n" * 300))})
    with pytest.raises(EdgespecError, match="home folder"):
        home({"EDGESPEC_HOME": "~missing-user-of-edgespec/x"})
    place = Home(file / "below")
    with pytest.raises(EdgespecError, match="cannot be created") as caught:
        place.create(place.models)
    assert "EDGESPEC_HOME" in (caught.value.hint or "")


def test_a_folder_without_write_permission_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind every user (root)
    with pytest.raises(EdgespecError, match="cannot be written"):
        Home(tmp_path).create(tmp_path / "models")


@pytest.mark.parametrize("modules", ["edgespec.store.store, edgespec.store.hub.file", "edgespec.store.catalogue"])
def test_imports_load_no_hub_library_and_need_no_home(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('huggingface_hub' in sys.modules)"
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(Path.cwd())}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


# ------------------------------------------------------------------------------------------- the format number


def numbered(tmp_path: Path, content: bytes) -> Home:
    """A home whose format file has that content."""
    place = Home(tmp_path / "home")
    place.root.mkdir()
    place.format_file.write_bytes(content)
    return place


def files_of(place: Home) -> dict[str, bytes]:
    found = (path for path in place.root.rglob("*") if path.is_file())
    return {path.relative_to(place.root).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("folder", ["models", "parts", "locks", "measurements", "emissions", "tools", "profiles"])
def test_creating_the_first_folder_writes_the_format_number(tmp_path: Path, folder: str) -> None:
    place = Home(tmp_path / "not" / "yet")
    assert place.read_format() is None
    place.create(place.root / folder / "inside")
    assert files_of(place) == {"format": f"{FORMAT}\n".encode()}
    assert place.read_format() == FORMAT


def test_reading_the_home_creates_no_files(tmp_path: Path) -> None:
    place = home({"EDGESPEC_HOME": str(tmp_path / "home")})
    assert place.read_format() is None
    assert list(tmp_path.iterdir()) == []


def test_an_existing_format_number_is_not_rewritten(tmp_path: Path) -> None:
    place = numbered(tmp_path, b" 1 \r\n")
    place.create(place.models)
    assert files_of(place) == {"format": b" 1 \r\n"}
    assert home({"EDGESPEC_HOME": str(place.root)}) == place


def test_a_home_without_format_number_is_readable_and_gets_it_when_written(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.profiles.mkdir()
    (place.profiles / "mine.toml").write_text("context = 512\n")
    assert home({"EDGESPEC_HOME": str(tmp_path)}).read_format() is None
    place.create(place.locks)
    assert files_of(place) == {"format": b"1\n", "profiles/mine.toml": b"context = 512\n"}


@pytest.mark.parametrize("number", [b"2\n", b"10", b"9" * 40])
def test_a_home_with_a_newer_format_is_refused_before_any_write(tmp_path: Path, number: bytes) -> None:
    place = numbered(tmp_path, number)
    before = files_of(place)
    for use in (lambda: home({"EDGESPEC_HOME": str(place.root)}), lambda: place.create(place.models)):
        with pytest.raises(EdgespecError, match="newer edgespec") as caught:
            use()
        assert "update edgespec" in (caught.value.hint or "")
        assert "EDGESPEC_HOME" in (caught.value.hint or "")
    assert files_of(place) == before
    assert not place.models.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"0", b"-1", b"1.0", b"one", b"\xff\xfe1", "\u0661".encode(), b"1 1", b"\0" * 2**20]
)
def test_an_invalid_format_number_raises_an_error(tmp_path: Path, content: bytes) -> None:
    place = numbered(tmp_path, content)
    for use in (lambda: home({"EDGESPEC_HOME": str(place.root)}), lambda: place.create(place.models)):
        with pytest.raises(EdgespecError, match="does not hold a format number") as caught:
            use()
        assert "EDGESPEC_HOME" in (caught.value.hint or "")
    assert files_of(place) == {"format": content}


def test_an_unreadable_format_file_raises_an_error(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.format_file.mkdir()
    with pytest.raises(EdgespecError, match="format cannot be read"):
        home({"EDGESPEC_HOME": str(tmp_path)})


def test_a_read_only_home_gets_no_format_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # permissions do not bind every user (root)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("edgespec.files.home.write_text", refuse)
    place = Home(tmp_path)
    assert place.create(place.models).is_dir()
    assert files_of(place) == {}


def test_processes_that_create_a_home_in_parallel_write_the_same_format(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edgespec.files.home import Home\n"
        "print('here', flush=True); sys.stdin.readline()\n"
        "for number in range(50):\n"
        "    place = Home(Path(sys.argv[1]) / str(number)); place.create(place.models)\n"
        "    assert place.read_format() == 1\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(tmp_path),
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"here"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[1] for process in processes] == [b"", b"", b""]
    for number in range(50):
        assert files_of(Home(tmp_path / str(number))) == {"format": b"1\n"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("doctor",),
        ("profiles",),
        ("profiles", "show"),
        ("pull", "smollm2-135m"),
        ("models", "rm", "smollm2-135m"),
        ("generate", "hi"),
        ("chat",),
        ("calibrate",),
        ("bench",),
        ("plan",),
        ("verify",),
        ("export", "smollm2-135m", "--to", "gguf", "-o", "out"),
    ],
)
def test_every_command_refuses_a_home_with_a_newer_format(
    tmp_path: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = numbered(tmp_path, b"2\n")
    result = InProcess(place.root, monkeypatch, capsys)(*arguments, "--offline", "--json")
    result.failed_well("a newer edgespec wrote", "its format is 2, and this edgespec reads 1")
    assert result.json["error"]["type"] == "EdgespecError"
    assert files_of(place) == {"format": b"2\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_help_and_version_work_without_a_home(tmp_path: Path) -> None:
    place = numbered(tmp_path, b"2\n")
    for arguments in (("--version",), ("--help",), ("generate", "--help")):
        done = subprocess.run(command(*arguments), env=environment(place.root), capture_output=True, check=False)
        assert done.returncode == 0


def test_an_engine_writes_the_format_number_and_refuses_a_newer_home(tiny: TinyModels, tmp_path: Path) -> None:
    place, in_place = Home(tmp_path / "home"), {"native_sidecar": False}
    for nothing_to_check in ({"depth": 0}, {"draft": "none", "lookup": False}):
        tiny.load(store_home=place, **in_place, **nothing_to_check).close()
        assert not place.root.exists(), "nothing was measured or prepared, so nothing is written"
    # The bit-equal widths are stored, so later loads do not check again.
    tiny.load(store_home=place, draft="none", depth=2, **in_place).close()
    assert {name.partition("-")[0] for name in files_of(place)} == {"format", "measurements/widths"}
    stored = files_of(place)
    tiny.load(store_home=place, **in_place).close()
    assert files_of(place) == stored, "a plain load that has nothing to check writes nothing"
    place.format_file.write_bytes(b"2\n")
    before = files_of(place)
    with pytest.raises(EdgespecError, match="newer edgespec"):
        tiny.load(store_home=place, depth=2)
    assert files_of(place) == before


def test_calibration_writes_the_format_number_of_the_home(tiny: TinyModels, tmp_path: Path) -> None:
    place = Home(tmp_path / "home")
    options = ("--quick", "--target", tiny.target, "--draft", "none", "--context", "300")
    assert run_cli("calibrate", *options, home=place.root).code == 0
    assert place.read_format() == FORMAT
