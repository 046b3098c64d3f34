"""Prompts that are typed in a terminal, and what a terminal is shown."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.files.home import Home
from tests.support.command_line import command, environment, run_python
from tests.support.terminal import CTRL_C, EDITING, ESCAPE_CODE, WAIT_S, Terminal
from tests.support.tiny_models import TinyModels

pytestmark = pytest.mark.slow

CTRL_D, CTRL_J, CTRL_P, CTRL_R, TAB = b"\x04", b"\x0a", b"\x10", b"\x12", b"\x09"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"
# In llama.cpp nothing is drafted before it is measured.
NOTHING_KNOWN = {"EDGESPEC_RUNTIME": "llama", "EDGESPEC_DRAFT_RUNTIME": "llama"}
ANSWERED = r"cut at the token limit"
# The editor has ended, and what is typed waits for the next prompt.
ANSWERING = r"\x1b\[\?2004l\x1b\[\?2004h"

Open = Callable[..., Terminal]


@pytest.fixture
def place(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def opened(tiny: TinyModels, place: Home) -> Iterator[Open]:
    """Chats in terminals that wait for their first prompt."""
    terminals: list[Terminal] = []

    def open_chat(
        *options: str, env: dict[str, str] | None = None, term: str = "xterm-256color", columns: int = 80
    ) -> Terminal:
        arguments = command("chat", "--target", tiny.target, "--draft", "none", "--max-tokens", "4", *options)
        terminals.append(Terminal(arguments, environment(place.root, env), term=term, columns=columns))
        terminals[-1].wait_for(r"is ready")
        terminals[-1].wait_for(EDITING if term != "dumb" else "> ")
        return terminals[-1]

    yield open_chat
    for terminal in terminals:
        terminal.close()


def history(place: Home) -> list[str]:
    return [line.replace("\u2028", "\n") for line in place.history.read_text(encoding="utf-8").split("\n")[:-1]]


def leave(chat: Terminal) -> None:
    chat.type(CTRL_D)
    assert chat.exit_code() == 0


def test_pasted_lines_are_one_prompt_that_enter_sends(opened: Open, place: Home) -> None:
    chat = opened()
    pasted = "def f(x):\r    return x + 1\r\rWhat does f(3) give?"
    chat.type(PASTE_BEGINS + pasted + PASTE_ENDS)
    chat.wait_for(r"f\(3\)")
    time.sleep(0.3)
    assert not chat.find(ANSWERED), "nothing is sent before Enter"
    chat.type(" Now.\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["def f(x):\n    return x + 1\n\nWhat does f(3) give? Now."]
    assert len(re.findall(ANSWERED, chat.plain)) == 1


def test_a_long_paste_is_a_marker_that_is_sent_whole(opened: Open, place: Home) -> None:
    chat = opened("--context", "2048")
    lines = [f"row {number}" for number in range(40)]
    for _ in range(2):  # the second marker is removed again
        chat.type(PASTE_BEGINS + "\r".join(lines) + PASTE_ENDS)
        chat.wait_for(r"\[40 lines pasted\]")
    chat.type(b"\x7f")
    chat.type(" Sum?\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    assert "row 7" not in chat.plain.split("Sum?")[0]
    chat.type(CTRL_P)
    chat.wait_for("pasted")
    chat.type(CTRL_C)
    chat.wait_for(EDITING)
    chat.type("/undo\r")
    chat.wait_for("undone")
    chat.wait_for(EDITING)
    chat.wait_for(r"\[40 lines pasted\] Sum\?")
    chat.type(CTRL_C)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["\n".join([*lines[:-1], "row 39 Sum?"]), "/undo"]


def test_alt_enter_and_triple_quotes_make_prompts_of_several_lines(opened: Open, place: Home) -> None:
    chat = opened()
    for keys in (b"one" + CTRL_J + b"two\r", b"one\x1b\rtwo\r"):
        chat.type(keys)
        chat.wait_for(ANSWERED)
        chat.wait_for(EDITING)
    chat.type('"""\r/help\r"""\r')
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["one\ntwo", '"""\n/help\n"""'], "the same prompt is kept once"
    assert "this list" not in chat.plain, "a quoted line is not a command"


def test_the_up_key_recalls_prompts_of_earlier_chats(opened: Open, place: Home) -> None:
    place.create(place.root)
    place.history.write_text("the first one\nlast time\n", encoding="utf-8")
    chat = opened()
    chat.type(CTRL_P)
    chat.wait_for("last time")
    chat.type(CTRL_P)
    chat.wait_for("the first")
    chat.type("\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["the first one", "last time", "the first one"]


def test_enter_takes_what_ctrl_r_found_and_ctrl_c_keeps_the_typed_line(opened: Open, place: Home) -> None:
    place.create(place.root)
    place.history.write_text("the first one\nlast time\n", encoding="utf-8")
    chat = opened()
    for ends in (CTRL_C, b"\r"):
        chat.type("typed ")
        chat.wait_for("typed")
        chat.type(CTRL_R)
        chat.wait_for("search")
        chat.type("first")
        chat.wait_for("one")
        chat.type(ends)
        chat.type("!\r")
        chat.wait_for(ANSWERED)
        chat.wait_for(EDITING)
    leave(chat)
    assert history(place)[2:] == ["typed !", "the !first one"], "the cursor is where it was found"


def test_commands_and_their_values_are_completed(opened: Open) -> None:
    chat = opened()
    chat.type("/se")
    chat.wait_for("show the sampling settings")  # the menu
    chat.type(TAB)
    time.sleep(1.0)  # the end of a name stands on the screen already
    chat.type(" to")
    chat.wait_for("top-k")
    chat.type(TAB)
    time.sleep(1.0)
    chat.type(" 0.5\r")
    chat.wait_for(r"top-p +0\.5")
    chat.wait_for(EDITING)
    chat.type("no command: /se")
    time.sleep(0.5)
    assert not chat.find("show the sampling settings")
    chat.type(CTRL_C)
    chat.wait_for(EDITING)
    leave(chat)


def test_ctrl_c_clears_a_line_with_text_and_twice_in_an_empty_one_leaves(opened: Open) -> None:
    chat = opened()
    for _ in range(3):
        chat.type("half a prompt")
        chat.wait_for("prompt")
        chat.type(CTRL_C)
        chat.wait_for(EDITING)
    assert "Ctrl-C again" not in chat.plain
    chat.type("hello\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    first_at = chat.interrupt()
    chat.wait_for(EDITING)
    assert chat.interrupt_again(first_at) == 130
    assert "half a prompthello" not in chat.plain


def test_text_typed_during_an_answer_starts_the_next_prompt(opened: Open, place: Home) -> None:
    chat = opened("--max-tokens", "400")
    chat.type("hello\r")
    chat.wait_for(r"hello\S*\s+\S")
    chat.type("typed ahead")
    chat.wait_for(ANSWERED)
    chat.wait_for("typed ahead")
    answer = chat.plain.split("cut at the token limit")[0]
    assert "typed ahead" not in answer, "it is not shown in the midst of the answer"
    chat.type("\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["hello", "typed ahead"]


def test_a_line_entered_during_an_answer_is_the_next_prompt(opened: Open, place: Home) -> None:
    chat = opened("--max-tokens", "400")
    chat.type("hello\r")
    chat.wait_for(r"hello\S*\s+\S")
    chat.type("sent ahead\r")
    chat.wait_for(ANSWERED)
    chat.wait_for("sent ahead")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["hello", "sent ahead"]


def test_a_paste_during_an_answer_is_one_marker_that_waits(opened: Open, place: Home) -> None:
    chat = opened("--max-tokens", "400")
    chat.type("hello\r")
    chat.wait_for(ANSWERING)
    lines = [f"row {number} of a text that is pasted" for number in range(150)]
    chat.type(PASTE_BEGINS + "\r".join(lines) + PASTE_ENDS)
    chat.wait_for(ANSWERED)
    chat.wait_for(r"\[150 lines pasted\]")
    time.sleep(0.3)
    assert not chat.find(ANSWERED), "nothing is sent before Enter"
    chat.type("\r")
    chat.wait_for(EDITING)
    leave(chat)
    assert "row" not in chat.plain
    assert history(place) == ["hello", "\n".join(lines)]


def test_lines_entered_during_an_answer_are_prompts_in_order(opened: Open, place: Home) -> None:
    chat = opened("--max-tokens", "400")
    chat.type("hello\r")
    chat.wait_for(ANSWERING)
    chat.type("/stats\rone\r" + PASTE_BEGINS + "two\rthree" + PASTE_ENDS + "\rfour")
    for shown in (ANSWERED, "first token", "> one", ANSWERED, "three", ANSWERED, "four"):
        chat.wait_for(shown)
    chat.type(CTRL_C)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["hello", "/stats", "one", "two\nthree"]


def test_lines_entered_before_ctrl_c_wait_in_the_editor(opened: Open, place: Home) -> None:
    chat = opened("--max-tokens", "4000", "--context", "8192")
    chat.type("hello\r")
    chat.wait_for(ANSWERING)
    chat.type("/stats\rone\r")
    chat.type(CTRL_C)
    chat.wait_for("stopped")
    chat.wait_for("one")
    chat.type("\r")
    chat.wait_for(r"/stats takes one line, and nothing was run")
    chat.wait_for("one")
    assert "first token" not in chat.plain
    chat.type(CTRL_C)
    chat.wait_for(EDITING)
    leave(chat)
    assert history(place) == ["hello", "/stats\none"]


def test_ctrl_c_after_the_ready_line_does_not_end_the_chat(loading: Terminal) -> None:
    loading.wait_for("is ready")
    loading.type(CTRL_C)
    loading.wait_for("Ctrl-C again within 2 s")
    loading.wait_for(EDITING)
    leave(loading)


def test_slash_help_fits_a_terminal_of_24_rows(opened: Open) -> None:
    chat = opened()
    chat.type("/help\r")
    chat.wait_for("would have written")
    chat.wait_for(EDITING)
    leave(chat)
    shown = chat.plain[chat.plain.index("this list") : chat.plain.index("would have written")]
    assert shown.count("\n") < 22  # the prompts before and after it need two rows


@pytest.fixture
def loading(tiny: TinyModels, place: Home) -> Iterator[Terminal]:
    """A chat that has only just been started."""
    arguments = command("chat", "--target", tiny.target, "--draft", "none", "--max-tokens", "4")
    terminal = Terminal(arguments, environment(place.root), term="xterm-256color")
    yield terminal
    terminal.close()


def test_a_line_entered_while_the_model_loads_is_the_first_prompt(loading: Terminal, place: Home) -> None:
    loading.type("sent early\r")
    loading.wait_for(ANSWERED)
    loading.wait_for(EDITING)
    leave(loading)
    assert history(place) == ["sent early"]


def test_lines_entered_while_the_model_loads_are_prompts_in_order(loading: Terminal, place: Home) -> None:
    loading.wait_for(r"\x1b\[\?2004h")
    loading.type("one\r/stats\r/plan\r")
    for shown in (ANSWERED, "first token", "> /plan"):
        loading.wait_for(shown)
    loading.wait_for(EDITING)
    leave(loading)
    assert history(place) == ["one", "/stats", "/plan"]


def test_several_lines_entered_before_the_chat_begins_wait_in_the_editor(loading: Terminal, place: Home) -> None:
    loading.type("one\rtwo\rthree")
    loading.wait_for("is ready")
    loading.wait_for("three")
    time.sleep(0.3)
    assert not loading.find(ANSWERED), "nothing is sent before Enter"
    loading.type("\r")
    loading.wait_for(ANSWERED)
    loading.wait_for(EDITING)
    leave(loading)
    assert history(place) == ["one\ntwo\nthree"]


# ------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colours", "no-color"])
def test_answers_wrap_between_words(opened: Open, columns: int, env: dict[str, str]) -> None:
    from rich.cells import cell_len

    chat = opened("--max-tokens", "300", env=env, columns=columns)
    chat.type("hello\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)
    answer = chat.screen[chat.screen.index("hello") :]
    answer = answer[answer.index("\n") : answer.index("tok/s")]
    lines = ESCAPE_CODE.sub("", answer).replace("\r", "").split("\n")
    assert max(map(cell_len, lines)) <= columns
    assert len([line for line in lines if line.strip()]) > 3
    if env:
        assert not re.search("\x1b\\[[0-9;]*[1-9][0-9;]*m", answer), "no colour, not even dim"


def test_a_dumb_terminal_gets_words_that_wrap_and_no_codes(opened: Open) -> None:
    chat = opened("--max-tokens", "200", term="dumb", columns=40)
    chat.type("hello\r")
    chat.wait_for(ANSWERED)
    leave(chat)
    assert "\x1b" not in chat.screen


def test_slash_guesses_turns_shading_on_and_off(opened: Open) -> None:
    chat = opened()
    chat.type("/guesses\r")
    chat.wait_for("guessed correctly are shaded")
    chat.wait_for(EDITING)
    chat.type("/guesses\r")
    chat.wait_for("no longer shaded")
    chat.wait_for(EDITING)
    leave(chat)


def test_slash_copy_sends_the_last_answer_to_the_terminals_clipboard(opened: Open) -> None:
    chat = opened(env={"TMUX": ""})
    chat.type("/copy\r")
    chat.wait_for("no answer yet")
    chat.wait_for(EDITING)
    chat.type("hello\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    chat.type("/copy\r")
    chat.wait_for(r"\x1b\]52;c;[A-Za-z0-9+/]+=*\x07")
    chat.wait_for(r"characters? sent to the terminal, which copies them if it supports OSC 52")
    chat.wait_for(EDITING)
    leave(chat)


def test_copy_and_guesses_report_a_terminal_without_clipboard_or_colours(opened: Open) -> None:
    chat = opened(term="dumb")
    for line, said in (
        ("hello", ANSWERED),
        ("/copy", "this terminal has no clipboard"),
        ("/guesses", "guesses are shown in colours, and this terminal shows no colours"),
    ):
        chat.type(f"{line}\r")
        chat.wait_for(said)
        chat.wait_for("> ")
    leave(chat)


# --------------------------------------------------------------------------------------- in parallel


def test_the_machine_is_measured_while_a_prompt_is_edited(tiny: TinyModels, place: Home) -> None:
    """And Ctrl-C, which takes back what was typed, does not end that."""
    options = ("--target", tiny.target, "--draft", tiny.drafter, "--max-tokens", "12", "--context", "300")
    chat = Terminal(command("chat", *options), environment(place.root, NOTHING_KNOWN), term="xterm-256color")
    try:
        chat.wait_for(EDITING)
        chat.type("hello\r")
        chat.wait_for(EDITING)
        chat.type("half a prompt")
        time.sleep(0.5)
        chat.type(CTRL_C)
        until = time.monotonic() + 2 * WAIT_S
        while "measured: " not in chat.screen and time.monotonic() < until:
            chat.wait_for(EDITING)
            time.sleep(1.0)
            chat.type("hello again\r")
            chat.wait_for(r"tok/s")
        assert "(/plan says why)" in chat.plain.replace("\n", " ")
        chat.wait_for(EDITING)
        leave(chat)
    finally:
        chat.close()


def test_sigterm_at_a_prompt_restores_the_terminal(opened: Open) -> None:
    import termios

    chat = opened()
    edited = termios.tcgetattr(chat._controller)[3]  # only the terminal itself knows
    assert not edited & termios.ICANON
    chat.process.send_signal(signal.SIGTERM)
    assert chat.exit_code() == 128 + signal.SIGTERM
    after = termios.tcgetattr(chat._controller)[3]
    assert after & termios.ICANON
    assert after & termios.ECHO


def test_typed_bytes_that_are_not_utf8_are_an_error(opened: Open) -> None:
    chat = opened()
    chat.type(b"caf\xe9 au lait\r")
    chat.wait_for("stdin is not UTF-8 text")
    chat.wait_for(EDITING)
    chat.type("hello\r")
    chat.wait_for(ANSWERED)
    chat.wait_for(EDITING)
    leave(chat)


def test_exit_leaves_as_in_a_shell(opened: Open) -> None:
    chat = opened()
    chat.type("exit\r")
    assert chat.exit_code() == 0
    assert "tok/s" not in chat.plain, "the word was not answered"


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "hello"), ("chat",)], ids=" ".join)
def test_commands_without_a_terminal_do_not_import_the_editor(
    tiny: TinyModels, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code = (
        "import sys; from edgespec.cli.app import run\n"
        "code = run(sys.argv[1:])\n"
        "heavy = {'prompt_toolkit', 'pygments', 'rich'} & sys.modules.keys()\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    model = () if arguments == ("--help",) else ("--target", tiny.target, "--draft", "none", "--max-tokens", "2")
    result = run_python(code, *arguments, *model, home=tmp_path / "home")
    assert result.err.splitlines()[-1] == "0 []", result.err


def test_notes_wrap_to_the_terminal_if_stdout_is_redirected(tiny: TinyModels, place: Home) -> None:
    line = shlex.join(command("generate", "hello", "--target", tiny.target, "--draft", "none", "--max-tokens", "3"))
    terminal = Terminal(["/bin/sh", "-c", f"{line} | cat > /dev/null"], environment(place.root), columns=40)
    try:
        assert terminal.exit_code() == 0
        lines = terminal.plain.splitlines()
        assert "tok/s" in terminal.plain
        assert max(map(len, lines)) <= 40, lines
    finally:
        terminal.close()
