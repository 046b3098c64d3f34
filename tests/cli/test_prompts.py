"""Prompts: what a text between quotes is, and the file of those that were typed."""

from __future__ import annotations

import contextlib
import errno
import io
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgespec.cli.chat import editing
from edgespec.cli.chat.chat_commands import SETTINGS, is_command, suggest, unescaped
from edgespec.cli.chat.pastes import MOST_CHARACTERS, MOST_LINES, Pastes
from edgespec.cli.chat.prompt_history import KEPT, PromptHistory
from edgespec.cli.chat.prompts import LinePrompts, Prompt, unquoted
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.files.home import Home


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("hello", Prompt("hello")),
        ("two\nlines", Prompt("two\nlines")),
        ('"""one line"""', Prompt("one line", quoted=True)),
        ('"""\nfirst\n  second\n"""', Prompt("first\n  second", quoted=True)),
        ('  """first\nsecond"""  \n', Prompt("first\nsecond", quoted=True)),
        ('"""', None),
        ('"""\nopen', None),
        ('"""Doc string."""\nimport os\n', Prompt('"""Doc string."""\nimport os\n')),
        ('say """this"""', Prompt('say """this"""')),
    ],
)
def test_triple_quotes_enclose_a_prompt_of_several_lines(text: str, prompt: Prompt | None) -> None:
    assert unquoted(text) == prompt


LONG = "\n".join(f"line {number}" for number in range(190))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hello", "hello"),
        ("\n" * (MOST_LINES - 1), "\n" * (MOST_LINES - 1)),
        ("x" * MOST_CHARACTERS, "x" * MOST_CHARACTERS),
        ("\n" * MOST_LINES, "[13 lines pasted]"),
        ("x" * (MOST_CHARACTERS + 1), "[1001 characters pasted]"),
        (LONG, "[190 lines pasted]"),
    ],
)
def test_a_marker_stands_for_a_long_text(text: str, shown: str) -> None:
    pastes = Pastes()
    assert pastes.shown(text) == shown
    assert pastes.whole(f"a {shown} b {shown}") == f"a {text} b {text}"


def test_a_prompt_comes_back_as_the_line_that_was_sent() -> None:
    pastes = Pastes()
    line = f"{pastes.shown(LONG)} What is this?"
    assert pastes.line(pastes.whole(line)) == "[190 lines pasted, 2]", "nothing of it was sent"
    assert pastes.sent(line) == f"{LONG} What is this?"
    assert pastes.line(pastes.whole(line)) == line
    assert pastes.line("short") == "short"


def test_ctrl_z_leaves_an_empty_line_on_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(keys: str, platform: str) -> str:
        with monkeypatch.context() as patch, create_pipe_input() as keyboard:
            patch.setattr(sys, "platform", platform)
            bindings = editing._keys(Pastes())
            patch.undo()
            keyboard.send_text(keys)
            session: PromptSession[str] = PromptSession(input=keyboard, output=DummyOutput(), key_bindings=bindings)
            return session.prompt()

    with pytest.raises(EOFError):
        typed("\x1a\r", "win32")
    assert typed("a\x1a\r", "win32") == "a\x1a"
    assert typed("\x1a\r", "linux") == "\x1a"


def test_each_text_has_its_marker_and_a_marker_in_a_text_is_text() -> None:
    pastes, other = Pastes(), LONG.replace("line 0", "[190 lines pasted]")
    assert [pastes.shown(text) for text in (LONG, other, LONG)] == [
        "[190 lines pasted]",
        "[190 lines pasted, 2]",
        "[190 lines pasted]",
    ]
    assert pastes.whole("[190 lines pasted, 2][190 lines pasted]") == other + LONG
    assert pastes.ends_with("see [190 lines pasted, 2]") == "[190 lines pasted, 2]"
    assert pastes.ends_with("[190 lines pasted] see") is None


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", True),
        ("/etc/passwd is what?", True),  # and the answer says how to send it
        ("//help", False),
        ("help", False),
        ("/usr/bin/env\nfails here", False),
        ("/system be brief\nand kind", True),
    ],
)
def test_a_line_with_a_slash_is_a_command_and_several_lines_only_if_it_is_known(text: str, command: bool) -> None:
    assert is_command(text) is command


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("//help", "/help"),
        ("///help", "//help"),
        ("// what is a comment?", "/ what is a comment?"),
        ("//system be brief\nand kind", "/system be brief\nand kind"),
        ("// adds one\nint f(int x);", "// adds one\nint f(int x);"),
        ("hello", "hello"),
    ],
)
def test_two_slashes_stand_for_one_but_in_pasted_code(text: str, prompt: str) -> None:
    assert unescaped(text) == prompt


def test_a_prompt_that_comes_back_is_shown_where_it_cannot_be_edited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for first, shown in (("> ", "what is water\n> "), ("", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), encoding="utf-8"))
        assert LinePrompts(Interrupts(), first).read("what is water") == Prompt("hello")
        assert capsys.readouterr().err == shown


def test_commands_settings_and_their_values_are_suggested() -> None:
    commands = [name for name, _ in suggest((), "")]
    assert {"/help", "/model", "/guesses", "/copy", "/exit"} <= set(commands)
    assert [name for name, _ in suggest(("/set",), "")] == list(SETTINGS)
    assert ("none", "") in suggest(("/set", "seed"), "")
    for words in (("/set", "warmth"), ("/set", "seed", "none"), ("/help",), ("hello",)):
        assert list(suggest(words, "")) == []


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_commands_with_a_file_suggest_paths(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "talks").mkdir()
    (tmp_path / "talk.session").touch()
    monkeypatch.chdir(tmp_path)
    assert [value for value, _ in suggest((command,), "talk")] == ["talk.session", "talks/"]


def test_slash_model_suggests_model_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgespec.cli import suggestions

    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    suggestions.models_to_name.cache_clear()
    try:
        assert ("smollm2-135m", "SmolLM2 135M Instruct, Q4_1: tiny, for tests and first steps (to fetch)") in suggest(
            ("/model",), ""
        )
        assert "humaneval" not in [name for name, _ in suggest(("/model",), "")], "a prompt set is not a model"
        (tmp_path / "own.gguf").touch()
        assert list(suggest(("/model",), f"{tmp_path}/o")) == [(f"{tmp_path}/own.gguf", "")]
    finally:
        suggestions.models_to_name.cache_clear()


# --------------------------------------------------------------------------------------------------- history


def test_the_history_keeps_each_prompt_when_it_is_entered(tmp_path: Path) -> None:
    place = Home(tmp_path / "home")
    history = PromptHistory(place)
    for prompt in ("first", "first", " ", "several\nlines\r\nof it", "/help"):
        history.add(prompt)
    kept = ["first", "several\nlines\nof it", "/help"]
    assert PromptHistory(place).prompts == kept
    assert len(place.history.read_text(encoding="utf-8").split("\n")) == len(kept) + 1, "a line each"
    if sys.platform != "win32":
        assert stat.S_IMODE(place.history.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_a_shortened_history_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Home(tmp_path)
    place.history.write_text("".join(f"prompt {number}\n" for number in range(2 * KEPT + 1)), encoding="utf-8")
    monkeypatch.setattr(Path, "chmod", lambda _path, _mode: None)
    assert len(PromptHistory(place).prompts) == KEPT
    assert len(place.history.read_text(encoding="utf-8").splitlines()) == KEPT
    assert stat.S_IMODE(place.history.stat().st_mode) == 0o600


def test_two_chats_share_one_history_without_losing_prompts(tmp_path: Path) -> None:
    place = Home(tmp_path)
    one, two = PromptHistory(place), PromptHistory(place)
    one.add("to one")
    two.add("to two")
    assert PromptHistory(place).prompts == ["to one", "to two"]


def test_files_of_readline_and_of_libedit_are_read(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.history.write_text("a plain line\nC:\\134temp stays\n", encoding="utf-8")
    assert PromptHistory(place).prompts == ["a plain line", "C:\\134temp stays"]
    place.history.write_text("_HiStOrY_V2_\na\\040plain\\040line\nback\\134slash\n", encoding="utf-8")
    assert PromptHistory(place).prompts == ["a plain line", "back\\slash"]
    assert place.history.read_text(encoding="utf-8") == "a plain line\nback\\slash\n"


def test_a_long_history_keeps_the_latest_prompts(tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.history.write_text("".join(f"prompt {number}\n" for number in range(2 * KEPT + 1)), encoding="utf-8")
    assert PromptHistory(place).prompts[0] == f"prompt {KEPT + 1}"
    assert len(place.history.read_text(encoding="utf-8").splitlines()) == KEPT


def test_a_prompt_of_another_chat_survives_the_shortening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Home(tmp_path)
    place.history.write_text("".join(f"prompt {number}\n" for number in range(2 * KEPT + 1)), encoding="utf-8")

    @contextlib.contextmanager
    def locked(*_: object, **_settings: float) -> Iterator[None]:
        with place.history.open("a", encoding="utf-8") as file:  # the other chat had the lock until now
            file.write("late\n")
        yield

    monkeypatch.setattr(Home, "locked", locked)
    assert PromptHistory(place).prompts[-2:] == [f"prompt {2 * KEPT}", "late"]
    assert place.history.read_text(encoding="utf-8").endswith("late\n")


def test_prompts_are_written_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **_settings: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(Home, "locked", none)
    PromptHistory(Home(tmp_path)).add("hello")
    assert PromptHistory(Home(tmp_path)).prompts == ["hello"]


def test_a_home_that_cannot_be_written_loses_no_prompt_of_this_chat(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    history = PromptHistory(Home(tmp_path / "home"))
    history.add("hello")
    assert history.prompts == ["hello"]


def test_prompts_that_are_not_kept_are_this_chats_alone(tmp_path: Path) -> None:
    PromptHistory(Home(tmp_path)).add("kept")
    history = PromptHistory(Home(tmp_path), keeps=False)
    history.add("not kept")
    assert history.prompts == ["not kept"]
    assert PromptHistory(Home(tmp_path)).prompts == ["kept"]
