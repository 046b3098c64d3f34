"""A chat loses nothing: the last conversation is kept, /undo gives the prompt back, /more continues a cut answer."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.chat.chat import _Chat
from edgespec.cli.chat.kept_conversation import KeptConversation, name_of
from edgespec.cli.chat.prompts import LinePrompts
from edgespec.cli.chat.talk import Talk
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.status import StatusLine
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.errors import InvalidRequestError
from edgespec.files.home import Home
from tests.support.command_line import InProcess, command, environment, run_here
from tests.support.terminal import EDITING, Terminal
from tests.support.tiny_models import TinyModels

CTRL_D = b"\x04"
CUT = "cut at the token limit"
SAID = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"})

Open = Callable[..., Terminal]


@pytest.fixture
def place(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def opened(tiny: TinyModels, place: Home) -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_chat(*options: str) -> Terminal:
        arguments = command("chat", "--draft", "none", "--max-tokens", "4", *options)
        terminals.append(Terminal(arguments, environment(place.root), term="xterm-256color"))
        terminals[-1].wait_for(r"is ready")
        terminals[-1].wait_for(EDITING)
        return terminals[-1]

    yield open_chat
    for terminal in terminals:
        terminal.close()


def typed(chat: Terminal, *lines: str) -> None:
    for line in lines:
        chat.type(f"{line}\r")
        chat.wait_for(CUT)
        chat.wait_for(EDITING)


def leave(chat: Terminal) -> None:
    chat.type(CTRL_D)
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_the_last_conversation_is_kept_and_continued(opened: Open, place: Home, tiny: TinyModels) -> None:
    chat = opened("--target", tiny.target, "--system", "be kind")
    typed(chat, "hello")
    leave(chat)
    kept = KeptConversation.read(place)
    assert (kept.model, kept.system) == (str(tiny.target), "be kind")
    assert next(message["content"] for message in kept.messages) == "hello"
    assert stat.S_IMODE(place.conversation.stat().st_mode) == 0o600
    again = opened("--continue")
    assert "the last conversation continues: 1 turn, the last one: hello" in again.plain
    typed(again, "and then")
    leave(again)
    continued = KeptConversation.read(place).messages
    assert [message["content"] for message in continued if message["role"] == "user"] == ["hello", "and then"]
    assert list(continued[:2]) == list(kept.messages)


@pytest.mark.slow
def test_a_cleared_conversation_is_not_kept(opened: Open, place: Home, tiny: TinyModels) -> None:
    chat = opened("--target", tiny.target)
    typed(chat, "hello")
    assert place.conversation.exists()
    chat.type("/clear\r")
    chat.wait_for("cleared")
    chat.wait_for(EDITING)
    leave(chat)
    assert not place.conversation.exists()


@pytest.mark.parametrize("line", ["/system Answer briefly.", "/system none"])
def test_a_system_message_alone_replaces_no_conversation(
    line: str, place: Home, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(place.root))
    KeptConversation("m", None, SAID).write(place)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{line}\n/exit\n".encode())))
    with (
        Engine.load(target=str(tiny.target), draft="none") as engine,
        Talk(engine, lambda _: engine, system="be kind", think=False, drawn={}, as_file=True) as talk,
    ):
        interrupts = Interrupts()
        chat = _Chat(talk, interrupts, StatusLine(), as_json=False, keeps=True, interactive=False)
        chat.run(LinePrompts(interrupts), [])
        assert talk.session.system != "be kind"
    assert KeptConversation.read(place).messages == list(SAID)


@pytest.mark.slow
def test_no_conversation_is_kept_if_history_is_off(opened: Open, place: Home, tiny: TinyModels) -> None:
    place.create(place.root)
    (place.root / "config.toml").write_text("[profile]\nhistory = false\n", encoding="utf-8")
    chat = opened("--target", tiny.target)
    typed(chat, "hello")
    leave(chat)
    assert not place.conversations.exists()


@pytest.mark.slow
def test_undo_puts_the_prompt_back_into_the_line(opened: Open, tiny: TinyModels) -> None:
    chat = opened("--target", tiny.target)
    typed(chat, "tell me more of it")
    chat.type("/undo\r")
    chat.wait_for("undone")
    chat.wait_for(EDITING)
    chat.wait_for("tell me more of it")
    chat.type(" now")
    chat.wait_for("now")
    chat.type("\r")
    chat.wait_for(CUT)
    chat.wait_for(EDITING)
    leave(chat)


def chat_of_lines(tiny: TinyModels, lines: str, tmp_path: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    options = ("--target", str(tiny.target), "--draft", "none", "--max-tokens", "4", *more)
    done = run_here("chat", *options, home=tmp_path / "home", stdin=lines)
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")], done.err


def test_more_continues_a_cut_answer(tiny: TinyModels, tmp_path: Path) -> None:
    whole, _ = chat_of_lines(tiny, "hello\n", tmp_path, "--json", "--max-tokens", "8")
    parts, _ = chat_of_lines(tiny, "hello\n/more\n", tmp_path, "--json")
    assert [part["finish_reason"] for part in parts] == ["length", "length"]
    assert "".join(part["text"] for part in parts) == whole[0]["text"]


def test_more_needs_an_answer_that_is_not_complete_and_not_json(tiny: TinyModels, tmp_path: Path) -> None:
    _, said = chat_of_lines(tiny, "/more\nhello\n/json\n/more\n", tmp_path)
    assert "there is no answer to continue" in said
    assert "an answer in JSON cannot be continued" in said


def test_an_answer_that_gets_no_more_tokens_stays(tiny: TinyModels) -> None:
    with (
        Engine.load(target=str(tiny.target), draft="none") as engine,
        engine.session(messages=SAID) as session,
    ):
        generation = session.generate(messages=session.messages)
        session.cancel()
        done = list(generation)[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "cancelled"
        assert [message["content"] for message in session.messages] == ["hello", "hi"]


def test_a_missing_or_damaged_conversation_is_an_error(place: Home, here: InProcess) -> None:
    here("chat", "--continue").failed_well("no conversation is kept", code=2)
    place.create(place.conversations)
    for text in ("{", "[]", '{"schema_version": 1, "model": "m", "system": null, "messages": [{"role": "me"}]}'):
        place.conversation.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidRequestError, match="the kept conversation is damaged"):
            KeptConversation.read(place)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_in_place_of_the_conversation_is_not_waited_for(place: Home) -> None:
    place.create(place.conversations)
    os.mkfifo(place.conversation)
    with pytest.raises(InvalidRequestError, match="cannot be read: it is not a regular file"):
        KeptConversation.read(place)


def test_history_lists_and_removes_the_last_conversation(place: Home, here: InProcess) -> None:
    assert json.loads(here("history", "--json").out)["history"]["conversation"]["bytes"] is None
    own = Home(here.home)
    KeptConversation("m", None, SAID).write(own)
    assert "the last conversation, " in here("history").out
    assert json.loads(here("history", "--json").out)["history"]["conversation"]["bytes"]
    assert "the last conversation removed" in here("history", "clear").err
    assert not own.conversation.exists()


def test_a_conversation_without_messages_is_removed(place: Home) -> None:
    KeptConversation("m", "be kind", SAID).write(place)
    KeptConversation("m", "be kind", ()).write(place)
    assert not place.conversation.exists()


def test_a_models_file_is_kept_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert name_of("m.gguf") == str(tmp_path / "m.gguf")
    (tmp_path / "qwen2.5-coder-1.5b").mkdir()
    assert name_of("qwen2.5-coder-1.5b") == "qwen2.5-coder-1.5b", "as the chat itself found it"
    assert name_of("ollama:llama3.2:3b") == "ollama:llama3.2:3b"
