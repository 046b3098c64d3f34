"""``edgespec models rm`` takes several models, and asks a person first; a mirror is named only for --debug."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.terminal.output import State
from edgespec.files.home import Home
from edgespec.files.progress import ProgressEvent
from edgespec.store.store import Store
from tests.support.command_line import InProcess, command, environment
from tests.support.terminal import Terminal
from tests.support.tiny_models import TinyModels, put_into_store

PAIR = ("qwen2.5-coder-0.5b", "smollm2-135m")


def stored(home: Home) -> list[str]:
    return sorted(each.name for each in Store(home).list())


def filled(root: Path, tiny: TinyModels) -> Home:
    home = Home(root)
    for name in PAIR:
        put_into_store(home, name, tiny.target.read_bytes())
    return home


def test_several_models_are_removed_and_a_script_is_not_asked(here: InProcess, tiny: TinyModels) -> None:
    home = filled(here.home, tiny)
    here("models", "rm", *PAIR, "--json").failed_well("--json removes one model", code=2)
    assert stored(home) == sorted(PAIR)
    said = here("models", "rm", *PAIR, PAIR[0]).out
    assert [line.partition(":")[0] for line in said.splitlines()] == [f"removed {name}" for name in PAIR]
    assert stored(home) == []


def test_a_damaged_model_is_removed(here: InProcess, tiny: TinyModels) -> None:
    home = filled(here.home, tiny)
    damaged = next(each for each in Store(home).list() if each.name == PAIR[0])
    damaged.path.write_bytes(damaged.path.read_bytes()[:5000])
    here("models", "verify", PAIR[0]).failed_well("has changed")
    assert here("models", "rm", PAIR[0]).code == 0
    assert stored(home) == [PAIR[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, sorted(PAIR)), ("", 1, sorted(PAIR)), ("y", 0, [])])
def test_a_person_is_asked_before_models_are_removed(
    answer: str, code: int, left: list[str], tmp_path: Path, tiny: TinyModels
) -> None:
    home = filled(tmp_path / "home", tiny)
    terminal = Terminal(command("models", "rm", *PAIR), environment(home.root))
    try:
        terminal.wait_for(r"Remove qwen2.5-coder-0.5b, smollm2-135m \(.*\)\? \[y/N\] ")
        terminal.type(f"{answer}\r")
        assert terminal.exit_code() == code
    finally:
        terminal.close()
    assert stored(home) == left


@pytest.mark.slow
def test_yes_is_not_asked(tmp_path: Path, tiny: TinyModels) -> None:
    home = filled(tmp_path / "home", tiny)
    terminal = Terminal(command("models", "rm", *PAIR, "--yes"), environment(home.root))
    try:
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
    assert stored(home) == []


@pytest.mark.parametrize("debug", [True, False])
def test_a_mirror_is_named_only_for_debug(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with State(debug=debug).progress() as progress:
        progress(ProgressEvent(stage="downloading", source="some-package==1.0", done_bytes=5, total_bytes=10**7))
    said = capsys.readouterr().err
    assert ("some-package==1.0" in said) is debug
    assert debug or said.startswith("downloading from a mirror")
