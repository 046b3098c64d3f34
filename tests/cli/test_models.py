"""``edgespec models rm`` asks a person first; a stored model has several spellings; mirrors are for --debug."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.serve import _targets
from edgespec.cli.terminal.output import State
from edgespec.files.home import Home
from edgespec.files.progress import ProgressEvent
from edgespec.store.store import Store
from tests.support.command_line import InProcess, command, environment
from tests.support.other_programs import LIBRARY, User
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


def test_a_stored_model_is_listed_with_what_runs_it(here: InProcess, tiny: TinyModels) -> None:
    filled(here.home, tiny)
    shown = here("models").out.splitlines()
    assert sum("llama, runs on our kernels" in line for line in shown) == len(PAIR)
    rows = {row["name"]: row for row in here("models", "--json").json["models"]}
    told = {"family": "llama", "native": True, "reason": None, "vision": False}
    for name in PAIR:
        assert {key: rows[name][key] for key in told} == told


def test_a_damaged_model_is_removed(here: InProcess, tiny: TinyModels) -> None:
    home = filled(here.home, tiny)
    damaged = next(each for each in Store(home).list() if each.name == PAIR[0])
    damaged.path.write_bytes(damaged.path.read_bytes()[:5000])
    here("models", "verify", PAIR[0]).failed_well("has changed")
    assert here("models", "rm", PAIR[0]).code == 0
    assert stored(home) == [PAIR[1]]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("bartowski/Foo-GGUF:q4_k_m", "hf:bartowski/Foo-GGUF:Q4_K_M"),
        ("https://huggingface.co/org/repo/blob/main/b.gguf", "hf:org/repo/b.gguf"),
        ("hf:org/repo/b-00002-of-00003.gguf", "hf:org/repo/b-00001-of-00003.gguf"),
        ("smollm2-135m:latest", "smollm2-135m"),
        ("formerly.gguf", "formerly.gguf"),
    ],
)
def test_a_stored_model_is_verified_removed_and_served_by_every_spelling_of_its_name(
    typed: str, name: str, here: InProcess, tiny: TinyModels
) -> None:
    path = put_into_store(Home(here.home), name, tiny.target.read_bytes())
    assert here("models", "verify", typed).out.startswith(f"{name} is intact: ")
    assert _targets(f"{typed},{name}", None, ()) == [name]
    here("models", "rm", typed, name)
    assert not path.exists()
    here("models", "verify", "smollm2-135m:latest").failed_well("smollm2-135m is not on this machine")


def test_a_model_that_is_kept_elsewhere_is_neither_removed_nor_served_with_others(
    here: InProcess, tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(tmp_path / "user")
    user.to_ollama(f"{LIBRARY}/mine/3b", tiny.target.read_bytes())
    monkeypatch.setenv("OLLAMA_MODELS", str(user.ollama))
    kept = {"ollama:mine:3b": "Ollama keeps it", "mine:3b": "Ollama keeps it", str(tiny.target): "it is a path"}
    for name, words in kept.items():
        for each in (("models", "rm"), ("models", "verify"), ("serve", "--models")):
            refused = here(*each, name)
            refused.failed_well(f"{name} is not in the store of models: {words}")
            assert refused.hint == "the store has the models that `edgespec pull` fetched"


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
