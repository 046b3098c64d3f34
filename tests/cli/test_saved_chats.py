"""``/save`` and ``/load`` in a chat, and a chat whose memory holds one session only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.cli.chat.chat_commands import COMMANDS, _file_named, is_command, suggest
from edgespec.cli.chat.talk import Talk
from edgespec.decoding.sampling import Sampling
from edgespec.errors import EdgespecError, MemoryLimitError, SessionFileError
from tests.support.command_line import run_cli
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels


def chat(tiny: TinyModels, stdin: str, folder: Path) -> tuple[list[dict[str, Any]], str, int]:
    options = ("--draft", "none", "--max-tokens", "6", "--json")
    result = run_cli("chat", tiny.target, *options, home=tiny.home.root, stdin=stdin, cwd=folder)
    assert "Traceback" not in result.err
    found = [json.loads(line) for line in result.out.splitlines()]
    return [each for each in found if "error" not in each], result.err, result.code


def test_a_saved_chat_continues_in_another_process(tiny: TinyModels, tmp_path: Path) -> None:
    require_native()
    stdin = "hello\n/save talk.session\nwhat is water\n/save\n/load notes.txt\n/save notes.txt\n"
    (tmp_path / "notes.txt").write_text("notes", encoding="utf-8")
    (_, water), err, code = chat(tiny, stdin, tmp_path)
    size = (tmp_path / "talk.session").stat().st_size
    assert f"1 turn saved to talk.session ({size / 1000:.1f} kB)" in err
    assert "/save takes a file" in err
    assert "notes.txt: it is not a saved session" in err
    assert "notes.txt: it is not a saved session and is not replaced" in err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "notes"
    assert code == 1, "some commands failed"
    found, err, _ = chat(tiny, "/load\nhello\n/load talk.session\nwhat is water\n/undo\n/undo\n/undo\n", tmp_path)
    assert "/load takes a file" in err
    assert "1 turn loaded from talk.session; the next prompt continues the conversation" in err
    assert found[1]["token_ids"] == water["token_ids"]
    assert found[1]["stats"]["prompt_tokens"] == water["stats"]["prompt_tokens"]
    assert found[1]["stats"]["cached_tokens"] == water["stats"]["cached_tokens"] > 0
    assert err.index("undone: what is water") < err.index("undone: hello") < err.index("there is nothing to undo")


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("a b.session", "a b.session"),
        ("'a b.session'", "a b.session"),
        ('"a.session" ', "a.session"),
        ("'a.session", "'a.session"),
        ("''", "''"),
        ("it's", "it's"),
    ],
)
def test_a_file_may_be_named_in_quotes(typed: str, path: str) -> None:
    assert _file_named("/save", typed) == Path(path)


class FakeSession:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.system = "be kind"
        self.messages = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"})

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Has memory for ``room`` sessions; ``error`` is what the file turns out to be."""

    def __init__(self, room: int, error: EdgespecError | None = None) -> None:
        self.room = room
        self.error = error
        self.made: list[FakeSession] = []
        self.asked: list[dict[str, Any]] = []
        self.file_sampling = Sampling()
        self.profile = SimpleNamespace(rule="keyed")

    def session(self, **settings: Any) -> FakeSession:
        self.asked.append(settings)
        return self._make("new")

    def restore(self, path: Path, *, think: bool) -> FakeSession:
        assert think is False
        made = self._make(str(path))
        if self.error is not None:
            made.close()
            raise self.error
        return made

    def _make(self, name: str) -> FakeSession:
        if sum(not session.closed for session in self.made) >= self.room:
            raise MemoryLimitError("no memory", needed_bytes=2, available_bytes=1)
        self.made.append(FakeSession(name))
        return self.made[-1]

    def close(self) -> None:
        pass


def talk_on(engine: FakeEngine) -> Talk:
    return Talk(cast(Any, engine), cast(Any, None), system="be kind", think=False, drawn={}, as_file=False)


@pytest.mark.parametrize("room", [1, 2])
def test_a_loaded_session_replaces_the_present_one(room: int) -> None:
    engine = FakeEngine(room)
    with talk_on(engine) as talk:
        talk.asked, talk.last = "a prompt without an answer", cast(Any, "its answer")
        talk.restore(Path("talk"))
        assert cast(Any, talk.session).name == "talk"
        assert [session.name for session in engine.made if not session.closed] == ["talk"]
        assert (talk.asked, talk.last) == (None, None)


@pytest.mark.parametrize("room", [1, 2])
def test_a_file_that_cannot_be_loaded_leaves_the_conversation(room: int) -> None:
    engine = FakeEngine(room, SessionFileError("talk", "it was cut"))
    with talk_on(engine) as talk:
        with pytest.raises(SessionFileError):
            talk.restore(Path("talk"))
        assert not talk.session.closed
        if room == 1:  # the caches were freed, and the conversation is read again
            assert engine.asked[-1] == {
                "system": "be kind",
                "messages": [{"role": "user", "content": "hello"}],
                "think": False,
            }
        else:
            assert talk.session is cast(Any, engine.made[0])


def test_the_help_lists_both_commands() -> None:
    usages = {usage.split()[0] for usage, _ in COMMANDS}
    assert {"/save", "/load"} <= usages
    assert is_command("/save a b")
    assert {"/save", "/load"} <= {name for name, _ in suggest((), "/")}
