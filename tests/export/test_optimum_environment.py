"""The environment with Optimum is created once, completely or not at all; fake tools replace venv and pip."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock
import psutil
import pytest

from edgespec.errors import CancelledError, DiskSpaceError, DownloadError, EdgespecError, StoreLockedError
from edgespec.export.optimum import environment as optimum_environment
from edgespec.export.optimum.environment import (
    environment_folder,
    find_environment,
    prepare_environment,
    run_logged,
)
from edgespec.files import disk
from edgespec.files.home import Home
from edgespec.files.progress import Job, ProgressEvent

Tick = Callable[[], None]


class FakeTools:
    """Fake venv and pip: venv creates an interpreter file, pip gives the test's output."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], scratch: Path, tick: Tick) -> tuple[int, bytes]:
        self.commands.append(list(command))
        assert scratch.is_dir()
        tick()
        if command[1:4] == ["-I", "-m", "venv"]:
            python = Path(command[4]) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.write_text("")
            return 0, b""
        return self.answers.pop(0) if self.answers else (0, b"")

    @property
    def installs(self) -> list[list[str]]:
        return [command for command in self.commands if "install" in command]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The new interpreters that were checked."""
    found: list[Path] = []
    monkeypatch.setattr(optimum_environment, "check_interpreter", lambda python, _job: found.append(python))
    return found


def left(home: Home) -> list[str]:
    return sorted(path.name for path in home.tools.iterdir())


def test_the_optimum_environment_is_created_once_with_pinned_versions(home: Home, checked: list[Path]) -> None:
    tools, events = FakeTools(), list[ProgressEvent]()
    assert find_environment(home) is None
    python = prepare_environment(home, run=tools, job=Job(events.append))
    assert python == find_environment(home)
    assert python.is_relative_to(environment_folder(home))
    assert left(home) == [environment_folder(home).name]
    assert not (environment_folder(home) / "tmp").exists()
    assert tools.commands[0][:4] == [sys.executable, "-I", "-m", "venv"]
    (install,) = tools.installs
    assert install[:4] == [os.fspath(checked[0]), "-I", "-m", "pip"]
    assert Path(install[0]).parent.parent.name.endswith(".tmp")
    assert "--only-binary=:all:" in install
    assert {"optimum-onnx[onnxruntime]==0.1.0", "transformers==4.57.6", "torch==2.13.0+cpu"} < set(install)
    assert [event.stage for event in events] == ["creating an environment for"] * 2 + ["installing"] * 2
    again = FakeTools()
    assert prepare_environment(home, run=again) == python
    assert again.commands == []


def test_a_venv_in_the_current_folder_does_not_run(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv.py").write_text("print('hostile')")
    monkeypatch.chdir(tmp_path)
    tools = FakeTools()
    prepare_environment(home, run=tools)
    _, said = run_logged([*tools.commands[0][:-1], "--help"], tmp_path, lambda: None)
    assert said.startswith(b"usage")


def test_offline_the_environment_is_used_but_not_created(home: Home) -> None:
    tools = FakeTools()
    with pytest.raises(DownloadError, match="offline was asked for") as raised:
        prepare_environment(home, run=tools, download=False)
    assert "--python PATH" in (raised.value.hint or "")
    assert (tools.commands, home.tools.exists()) == ([], False)
    python = prepare_environment(home, run=tools)
    assert prepare_environment(home, run=FakeTools(), download=False) == python


def test_other_pinned_versions_give_another_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_environment(home, run=FakeTools())
    monkeypatch.setattr(optimum_environment, "PINS", ("optimum==1",))
    second = prepare_environment(home, run=FakeTools())
    assert first != second
    assert len(left(home)) == 2


def test_an_environment_without_its_marker_is_created_again(home: Home) -> None:
    python = prepare_environment(home, run=FakeTools())
    (environment_folder(home) / "complete.json").unlink()
    (environment_folder(home) / "rest").write_text("of a deletion that did not end")
    tools = FakeTools()
    assert prepare_environment(home, run=tools) == python
    assert len(tools.commands) == 2
    assert not (environment_folder(home) / "rest").exists()


def test_without_a_cpu_build_of_torch_the_default_build_is_installed(home: Home) -> None:
    tools = FakeTools((1, b"ERROR: No matching distribution found for torch==2.13.0+cpu\n"))
    prepare_environment(home, run=tools)
    assert [("torch==2.13.0+cpu" in each, "torch==2.13.0" in each) for each in tools.installs] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("said", "words", "installs"),
    [
        (b"ERROR: No matching distribution found for transformers\n", "No matching distribution", 2),
        (
            b"ERROR: one\nERROR: cannot reach https://me:secret@index\nWARNING: noise\n",
            "cannot reach https://index",
            1,
        ),
        (b"Killed\n\n", "Killed", 1),
        (b"", "no output", 1),
    ],
)
def test_a_failing_pip_raises_download_error_and_leaves_no_files(
    home: Home, said: bytes, words: str, installs: int
) -> None:
    tools = FakeTools(*[(1, said)] * 2)
    with pytest.raises(DownloadError) as raised:
        prepare_environment(home, run=tools)
    assert words in raised.value.message
    assert "secret" not in raised.value.message
    assert "--python" in (raised.value.hint or "")
    assert len(tools.installs) == installs
    assert left(home) == []
    assert prepare_environment(home, run=FakeTools()).exists()  # the lock was released


def test_a_failing_venv_raises_an_error_with_a_hint(home: Home) -> None:
    with pytest.raises(EdgespecError, match="venv failed: no ensurepip") as raised:
        prepare_environment(home, run=lambda _command, _scratch, _tick: (1, b"no ensurepip\n"))
    assert raised.value.hint
    assert left(home) == []


def test_the_environment_checks_disk_space_before_any_command(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1000)
    tools = FakeTools()
    with pytest.raises(DiskSpaceError):
        prepare_environment(home, run=tools)
    assert tools.commands == []


def test_a_read_only_tools_folder_raises_an_error(home: Home) -> None:
    def refuse(_command: Sequence[str], _scratch: Path, _tick: Tick) -> tuple[int, bytes]:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(EdgespecError, match="Permission denied"):
        prepare_environment(home, run=refuse)


def test_a_python_without_an_executable_path_raises_an_error(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(EdgespecError, match="its own executable") as raised:
        prepare_environment(home, run=FakeTools())
    assert "--python" in (raised.value.hint or "")


def test_cancelling_the_environment_leaves_no_files(home: Home) -> None:
    tools = FakeTools()
    with pytest.raises(CancelledError):
        prepare_environment(home, run=tools, job=Job(cancelled=lambda: len(tools.commands) == 2))
    assert left(home) == []


def test_a_second_process_waits_and_uses_the_first_ones_environment(home: Home) -> None:
    lock = filelock.FileLock(home.create(home.locks) / "optimum-environment.lock")
    lock.acquire()
    waiting, events = threading.Event(), list[ProgressEvent]()
    made: list[Path] = []

    def wait(event: ProgressEvent) -> None:
        events.append(event)
        waiting.set()

    def second() -> None:
        made.append(prepare_environment(home, run=tools, job=Job(wait)))

    tools = FakeTools()
    thread = threading.Thread(target=second)
    thread.start()
    assert waiting.wait(60)
    folder = environment_folder(home)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    python.parent.mkdir(parents=True)
    python.write_text("")
    (folder / "complete.json").write_text("{}")
    lock.release()
    thread.join(60)
    assert made == [python]
    assert tools.commands == []
    assert events[0].stage.startswith("waiting for another process")


def test_waiting_for_the_environments_lock_times_out(home: Home) -> None:
    with filelock.FileLock(home.create(home.locks) / "optimum-environment.lock"):
        with pytest.raises(StoreLockedError, match="0 s"):
            prepare_environment(home, run=FakeTools(), lock_timeout_s=0.0)
        with pytest.raises(CancelledError):
            prepare_environment(home, run=FakeTools(), job=Job(cancelled=lambda: True))


# ------------------------------------------------------------------------------------------------ commands


def test_run_logged_returns_exit_code_and_output(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile; print(tempfile.gettempdir(), flush=True); print('two', file=sys.stderr); sys.exit(3)"
    )
    ticks: list[int] = []
    found, said = run_logged([sys.executable, "-c", code], tmp_path, lambda: ticks.append(1))
    assert (found, said.decode().splitlines()) == (3, [str(tmp_path), "two"])
    assert ticks


def test_an_exception_of_tick_kills_the_command(tmp_path: Path) -> None:
    children: list[psutil.Process] = []

    def tick() -> None:
        children.extend(psutil.Process().children())
        raise CancelledError("enough")

    with pytest.raises(CancelledError):
        run_logged([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, tick)
    assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_prepare_environment_runs_real_commands_by_default(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = FakeTools()
    monkeypatch.setattr(optimum_environment, "run_logged", tools)
    prepare_environment(home)
    assert len(tools.commands) == 2
