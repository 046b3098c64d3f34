"""Options that several commands share: records of options, and the commands that take them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edgespec.cli.app import app, run
from edgespec.cli.options import AnswerFlags, ModelFlags, SamplingFlags, SeededFlags, expanded
from edgespec.cli.parser import Command, modern
from edgespec.decoding.sampling import Sampling
from edgespec.errors import InvalidRequestError, ProfileError
from tests.support.command_line import InProcess

NAMES = ("model", "target", "draft", "context", "profile", "threads", "settings")

MOST_OPTIONS, MOST_IN_THE_FIRST_GROUP = 60, 12


def all_commands() -> dict[str, Any]:
    """Every command that can be called, by its words."""
    found: dict[str, Any] = {}

    def walk(command: Any, *words: str) -> None:
        found[" ".join(words)] = command
        context = typer.Context(command)
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            walk(command.resolve_command(context, [name])[1], *words, name)

    walk(typer.main.get_command(app))
    return found


def shown_options(command: Any) -> list[Any]:
    params = command.get_params(typer.Context(command))
    return [each for each in params if each.param_type_name == "option" and not each.hidden and each.name != "help"]


def test_an_option_without_its_value_is_a_usage_error_in_every_command(here: InProcess) -> None:
    named = [
        (words, option)
        for words, command in all_commands().items()
        for param in command.params
        if param.param_type_name == "option" and not param.is_flag
        for option in param.opts
    ]
    assert {"--max-tokens", "-m", "--seed", "--port", "--draft", "--suite"} <= {option for _, option in named}
    for words, option in named:
        result = here(*words.split(), option)
        result.failed_well(f"edgespec: {option} needs a value", code=2)
        assert result.hint == f"see `edgespec {words} --help`"
    here("serve", "--port", "65536").failed_well("--port must be at most 65535, not 65536", code=2)
    assert here("generate", "--json", "hi", "-m").json["error"]["message"] == "-m needs a value"
    assert not here.home.exists()


def test_the_program_has_few_options_and_a_command_begins_with_few() -> None:
    commands = all_commands()
    assert {"chat", "models rm", "memory learn", "profiles show"} <= commands.keys()
    options = {max(option.opts, key=len) for each in commands.values() for option in shown_options(each)}
    assert len(options) <= MOST_OPTIONS, sorted(options)
    for words, command in commands.items():
        first = [option for option in shown_options(command) if not option.rich_help_panel]
        assert len(first) + len(["--help"]) <= MOST_IN_THE_FIRST_GROUP, words


def test_a_command_that_takes_a_model_takes_it_first() -> None:
    for words in ("chat", "generate", "serve", "plan", "bench", "calibrate", "verify", "export", "pull"):
        (first, *_) = [each for each in all_commands()[words].params if each.param_type_name == "argument"]
        assert first.name == "model", words


def test_the_overview_fits_a_terminal_of_80_by_24(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80


def test_the_overview_and_completion_of_options_import_neither_models_nor_numbers() -> None:
    """The modules count, not the seconds: a busy machine cannot change them."""
    script = (
        "import sys; from edgespec.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "sys.stderr.write(str(code) + ' ' + ' '.join(sys.modules))"
    )
    commands = ("chat", "generate", "pull", "bench", "plan", "calibrate", "doctor")
    for words, most in ((["--help"], 12), (["--version"], 12), *(([name, "--help"], 40) for name in commands)):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
        code, *modules = done.stderr.split()
        assert code == "0"
        assert len([name for name in modules if name.startswith("edgespec")]) <= most, words
        assert not {"numpy", "rich.console", "edgespec.engine.engine"} & set(modules), words


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--target", "m", "--depth", "2"], ["--model", "m", "--set", "depth=2"]),
        (["--target=m", "--exactness=near"], ["--model=m", "--set", "exactness=near"]),
        (["--rule", "rejection", "--", "--target"], ["--set", "rule=rejection", "--", "--target"]),
        (["--depth"], ["--set", "depth="]),
        (["--target-other", "--draft", "x"], ["--target-other", "--draft", "x"]),
    ],
)
def test_old_spellings_of_options_are_read(old: list[str], new: list[str]) -> None:
    assert list(modern(old, {"--model", "--set", "--draft"})) == new


def test_an_old_spelling_that_a_command_has_no_new_one_for_stays() -> None:
    assert list(modern(["--target", "m"], {"--trim-for"})) == ["--trim-for", "m"]
    assert list(modern(["--target", "m"], {"--json"})) == ["--target", "m"]


def test_keys_of_profiles_are_set_by_name() -> None:
    chosen = ModelFlags(settings=["depth=2", "draft-device = cpu"], threads="3").resolve()
    assert (chosen.depth, chosen.draft_device, chosen.threads) == (2, "cpu", 3)
    assert chosen.origins["depth"] == "--set depth"
    with pytest.raises(ProfileError, match="depht") as error:
        ModelFlags(settings=["depht=2"]).resolve()
    assert "depth" in str(error.value.hint)
    with pytest.raises(ProfileError, match="no value"):
        ModelFlags(settings=["depth"]).resolve()


def test_a_removed_working_folder_is_reported_in_one_sentence(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    here("generate", "hi").failed_well("the current folder was removed", code=2)


def test_what_a_command_does_not_change_is_as_the_command_line_says() -> None:
    flags = ModelFlags(settings=["target=a", "draft=none"])
    assert (flags.resolve(target=None).target, flags.resolve(target="b").target) == ("a", "b")
    assert AnswerFlags(settings=["target=a"], plain=True).resolve(target=None, draft=None).target == "a"
    assert ModelFlags(model="c", settings=["target=a"]).resolve().target == "c"


def test_each_record_adds_options_and_none_is_given_by_default() -> None:
    assert tuple(inspect.signature(ModelFlags).parameters) == NAMES
    assert ModelFlags().given() == {}


def test_only_given_options_replace_the_usual_sampling() -> None:
    usual = Sampling(temperature=0.5, top_k=20, seed=1)
    assert SamplingFlags().over(usual) == usual
    assert SeededFlags(top_k=0).over(usual) == Sampling(temperature=0.5, top_k=0, seed=1)
    assert SamplingFlags(top_k=0).over(usual, seed=3) == Sampling(temperature=0.5, top_k=0, seed=3)
    assert SeededFlags().given() == {}


def test_a_wrong_option_of_sampling_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingFlags(temperature=-1.0).over(Sampling())


def test_a_record_becomes_options_in_its_place_and_the_command_gets_the_record() -> None:
    seen = list[Any]()

    def command(ctx: typer.Context, *, first: bool = False, flags: ModelFlags, last: int = 7) -> None:
        seen.append((ctx.params["last"], first, flags, last))

    shown = expanded(command)
    assert list(inspect.signature(shown).parameters) == ["ctx", "first", *NAMES, "last"]
    program = typer.Typer()
    program.command(cls=Command)(shown)
    result = CliRunner().invoke(program, ["--target", "m", "--context", "64", "--first"])
    assert result.exit_code == 0, result.output
    assert seen == [(7, True, ModelFlags(target="m", context="64"), 7)]


def test_a_model_named_twice_is_an_error() -> None:
    assert ModelFlags(model="a").named == ModelFlags(target="a").named == "a"
    assert ModelFlags().named is None
    with pytest.raises(InvalidRequestError, match="named twice"):
        _ = ModelFlags(model="a", target="b").named
