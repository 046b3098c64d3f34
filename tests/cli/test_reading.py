"""The line about a long prompt: what it says, when it comes, and that it is gone before the answer."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.cli.terminal import reading
from edgespec.cli.terminal.output import ProgressPrinter, about, note, show
from edgespec.cli.terminal.reading import LOGGED_EACH_S, LONG_TOKENS, PATIENCE_S, Pace, ReadingLine, ReadingLog
from edgespec.engine.events import Reading
from edgespec.files.progress import ProgressEvent
from tests.support.command_line import command, environment
from tests.support.terminal import Terminal
from tests.support.tiny_models import TinyModels

SHOWN = r"reading the prompt · (\d+ of )?\d+ tokens"


class Screen(io.StringIO):
    """A terminal that stderr goes to."""

    def isatty(self) -> bool:
        return True

    @property
    def left(self) -> str:
        """What is still shown of the last line."""
        return self.getvalue().rpartition("\r")[2].removesuffix("\x1b[K")

    def comes(self, pattern: str) -> bool:
        """Whether the last line becomes this within seconds."""
        until = time.monotonic() + 60
        while not (found := re.fullmatch(pattern, self.left)) and time.monotonic() < until:
            time.sleep(0.02)
        return bool(found)


def watched(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """The terminal that shows stderr from now on; a fixture's would be replaced by pytest's own."""
    found = Screen()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return found


@pytest.mark.parametrize("tell", [note, show])
def test_told_text_controls_no_terminal(tell: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    tell("undone: \x1b[2J\x9b31m\r\u202eok\tand\nmore")
    assert "".join(capsys.readouterr()) == "undone: \\x1b[2J\\x9b31m\\r\\u202eok\tand\nmore\n"


def test_a_bar_shows_the_name_of_a_file_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    with ProgressPrinter() as printer:
        printer(ProgressEvent(stage="downloading", source="a[/b]\x1b[2J.gguf", done_bytes=1, total_bytes=2))
    assert r"downloading a[/b]\x1b[2J.gguf" in screen.getvalue()


def paced(*heard: tuple[int, float], of: int = 4096) -> Pace:
    pace = Pace()
    for tokens, now in heard:
        pace.add(Reading(tokens, of), now)
    return pace


def test_before_the_first_part_is_read_there_is_no_pace_to_tell() -> None:
    assert paced((0, 5.0)).text(6.0) == "reading the prompt · 4096 tokens"


def test_tokens_share_and_seconds_left_follow_the_pace() -> None:
    assert paced((0, 0.0), (256, 2.0)).text(2.0) == "reading the prompt · 256 of 4096 tokens · 6 % · 30 s left"
    assert paced((0, 0.0), (256, 2.0)).text(3.0) == "reading the prompt · 384 of 4096 tokens · 9 % · 29 s left"
    assert paced((0, 0.0), (256, 6.0)).text(6.0).endswith("· 1 min 30 s left")


def test_no_more_is_shown_than_the_part_that_is_being_read() -> None:
    assert " 511 of 4096 tokens " in paced((0, 0.0), (256, 1.0)).text(60.0)
    assert " 299 of 300 tokens · 99 % · 1 s left" in paced((0, 0.0), (256, 1.0), of=300).text(60.0)


def test_the_pace_is_that_of_the_last_parts() -> None:
    slower = paced((0, 0.0), (256, 1.0), (512, 3.0), (768, 5.0), (1024, 7.0))
    assert slower.text(7.0).endswith("· 24 s left")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(59, "less than a minute"), (60, "about 1 minute"), (61, "about 2 minutes"), (175, "about 3 minutes")],
)
def test_durations_are_rounded_up_to_minutes(seconds: float, words: str) -> None:
    assert about(seconds) == words


@pytest.mark.parametrize(
    ("terminal", "shown"), [(False, "one two three four five six\n"), (True, "one two three four\n  five six\n")]
)
def test_lines_of_a_report_wrap_between_words_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show("one two three four five six")
    assert capsys.readouterr().out == shown


def test_narrow_terminals_get_what_matters_most() -> None:
    pace = paced((0, 0.0), (256, 2.0))
    assert pace.text(2.0, 50) == "reading · 256 of 4096 tokens · 6 % · 30 s left"
    assert pace.text(2.0, 37) == "reading · 6 % · 30 s left"
    assert pace.text(2.0, 12) == "reading · 6 "


def test_events_at_one_moment_give_no_pace() -> None:
    assert " 256 of 4096 tokens " in paced((0, 1.0), (256, 1.0)).text(1.0)


def test_a_short_prompt_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    monkeypatch.setattr(reading, "PATIENCE_S", 60.0)
    line = ReadingLine()
    line.show(Reading(0, 200))
    line.stop()
    assert screen.getvalue() == ""


def test_the_line_comes_is_renewed_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PATIENCE_S == 0.3
    screen = watched(monkeypatch)
    line = ReadingLine()
    line.stop()  # a notice, before the prompt is read
    line.show(Reading(0, 900))
    marks = set[str]()
    for _ in range(4):
        assert screen.comes(r". reading the prompt · 900 tokens")
        marks.add(screen.left[0])
        time.sleep(0.2)
    assert len(marks) > 1, "it moves before a part is read"
    line.show(Reading(256, 900))
    assert screen.comes(r". reading the prompt · \d+ of 900 tokens · \d+ % · \d+ s left")
    line.stop()
    shown = screen.getvalue()
    assert screen.left == ""
    line.stop()
    time.sleep(0.3)
    assert screen.getvalue() == shown


def test_the_line_has_fewer_words_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    monkeypatch.setenv("COLUMNS", "24")
    line = ReadingLine()
    line.show(Reading(0, 900))
    assert screen.comes(". reading · 900 tokens")
    line.stop()


@pytest.mark.parametrize("why", ["quiet", "dumb", "pipe"])
def test_nothing_is_shown_where_it_would_disturb(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    screen = watched(monkeypatch)
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why == "pipe":
        monkeypatch.setattr(screen, "isatty", lambda: False)
    line = ReadingLine(quiet=why == "quiet")
    monkeypatch.setattr(reading, "PATIENCE_S", 0.01)
    line.show(Reading(0, 900))
    time.sleep(0.1)
    line.stop()
    assert screen.getvalue() == ""


def test_without_a_thread_nothing_is_shown_and_the_answer_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    screen = watched(monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    line = ReadingLine()
    line.show(Reading(0, 900))
    line.stop()
    assert screen.getvalue() == ""


def test_a_log_says_that_a_long_prompt_is_read_and_then_how_much_every_few_seconds() -> None:
    lines, now = list[str](), [0.0]
    for of in (LONG_TOKENS - 1, 4096):
        log = ReadingLog(lines.append, lambda: now[0])
        for part in range(4):
            log(Reading(256 * part, of))
            now[0] += 0.6 * LOGGED_EACH_S
    assert lines == ["reading the prompt · 4096 tokens", "reading the prompt · 512 of 4096 tokens · 12 % · 42 s left"]


@pytest.mark.slow
def test_generate_shows_that_it_reads_and_removes_that(tiny: TinyModels, tmp_path: Path) -> None:
    said = tmp_path / "answer"
    asked = command("generate", "the " * 5000, "--target", str(tiny.slow), "--draft", "none", "--max-tokens", "3")
    into = ["/bin/sh", "-c", f'exec "$@" > {said}', "sh", *asked, "--context", "8192"]
    terminal = Terminal(into, environment(tiny.home.root), term="xterm", columns=100)
    try:
        terminal.wait_for(SHOWN)
        for _ in range(3):
            terminal.wait_for(r"reading the prompt · \d+ of \d+ tokens · \d+ % · \d+ s left")
        assert terminal.exit_code(200.0) == 0
        behind = terminal.screen.rpartition("reading the prompt")[2].partition("\r\x1b[K")
        assert "left" in behind[0]
        assert "tok/s" in behind[2], "the line is gone before anything else is shown"
    finally:
        terminal.close()
    assert "reading" not in said.read_text()
