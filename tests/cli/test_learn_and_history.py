"""``edgespec learn`` and ``edgespec history``, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.cli.chat import chat
from edgespec.cli.chat.prompts import LinePrompts
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.engine.engine import Engine
from edgespec.engine.prefixes.beginnings import LEAST_TOKENS, as_tokens
from edgespec.engine.prefixes.stored import model_of, stored_prefixes, write_prefix
from edgespec.files.home import Home
from edgespec.store.store import Store
from tests.support.command_line import InProcess
from tests.support.tiny_models import TinyModels, put_into_store


def test_learning_listing_and_forgetting(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four")
    (tmp_path / "binary").write_bytes(b"\0")
    target = ("--target", tiny.target)
    result = here("learn", tmp_path / "text.txt", tmp_path / "binary", *target)
    assert result.code == 0
    assert "1 file left out: not UTF-8 text" in result.err
    assert "files added: 1, removed or replaced: 0" in result.err
    assert result.out.startswith("learned for ")
    listed = here("learn", *target, "--json")
    found = json.loads(listed.out)["learned"]
    assert found["files"] == [str((tmp_path / "text.txt").resolve())]
    assert found["tokens"] > 0
    assert found["bytes"] == Path(found["path"]).stat().st_size
    assert found["skipped_files"] == {"binary": 0, "too_large": 0, "unreadable": 0, "no_room": 0}
    gone = json.loads(here("learn", "--forget", tmp_path / "text.txt", *target, "--json").out)["learned"]
    assert (gone["files"], gone["bytes"], gone["removed_files"]) == ([], 0, 1)


def test_no_model_is_fetched_if_nothing_is_learned(
    here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was fetched")

    monkeypatch.setattr(Store, "fetch", refuse)
    for words in ((), ("--forget", tmp_path)):
        here("learn", "--target", "smollm2-135m", *words).failed_well("smollm2-135m is not on this machine")


def test_wrong_paths_are_one_sentence(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    result = here("learn", tmp_path / "none", "--target", tiny.target)
    assert result.code == 2
    assert "there is nothing at" in result.err
    result = here("learn", "--forget", "--target", tiny.target, "--json")
    assert result.code == 2
    assert json.loads(result.out)["error"]["message"] == "--forget needs a path"


def test_the_chat_keeps_answers_says_so_once_and_history_removes_them(tiny: TinyModels, here: InProcess) -> None:
    chat = ("chat", "--target", tiny.target, "--draft", "none", "--max-tokens", "8")
    first = here(*chat, stdin="Hello\n")
    assert first.code == 0
    assert "edgespec keeps answers of this chat" in first.err
    assert f"off: history = false under [profile] in {here.home / 'config.toml'}" in here("history").out
    again = here(*chat, "--json", stdin="Hello\nAnd more\n")
    assert again.code == 0
    assert "keeps answers" not in again.err
    found = json.loads(here("history", "--json").out)["history"]
    assert (found["on"], found["answers"], found["path"]) == (True, 3, str(Home(here.home).answers))
    assert found["tokens"] == sum(each["tokens"] for each in found["files"]) > 0
    assert found["bytes"] == sum(Path(each["path"]).stat().st_size for each in found["files"])
    assert "3 answers, " in here("history").out
    assert json.loads(here("history", "clear", "--json").out)["removed"]["answers"] == 3
    assert "no answers are kept" in here("history", "clear").err
    assert json.loads(here("history", "--json").out)["history"]["answers"] == 0


def test_switched_off_the_chat_keeps_and_says_nothing(
    tiny: TinyModels, here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[bool]()

    def prompts(interrupts: Interrupts, *, keeps: bool) -> LinePrompts:
        kept.append(keeps)
        return LinePrompts(interrupts)

    monkeypatch.setattr(chat, "_prompts", prompts)
    here.home.mkdir()
    (here.home / "config.toml").write_text("[profile]\nhistory = false\n")
    result = here("chat", "--target", tiny.target, "--draft", "none", "--max-tokens", "4", stdin="Hello\n")
    assert result.code == 0
    assert "keeps answers" not in result.err
    assert kept == [False], "typed lines are not kept"
    assert not Home(here.home).answers.exists()
    assert here("history").out.startswith("history: off")
    assert json.loads(here("history", "--json").out)["history"]["on"] is False


def test_generate_keeps_nothing(tiny: TinyModels, here: InProcess) -> None:
    assert here("generate", "Hello", "--target", tiny.target, "--draft", "none", "--max-tokens", "4").code == 0
    assert not Home(here.home).answers.exists()
    assert "0 answers, 0 tokens" in here("history").out


def test_history_lists_and_removes_the_beginnings_that_a_server_keeps(tiny: TinyModels, here: InProcess) -> None:
    place = Home(here.home)
    assert json.loads(here("history", "--json").out)["history"]["prefixes"]["files"] == []
    assert "beginning" not in here("history").out
    keep_a_prefix(tiny.load(draft="none", store_home=place, prefixes=True))
    [found] = json.loads(here("history", "--json").out)["history"]["prefixes"]["files"]
    assert (found["tokens"], found["model"]) == (2048, "target")
    assert found["bytes"] == Path(found["path"]).stat().st_size
    (place.prefixes / f"{'0' * 32}-3000-{'1' * 32}.prefix").write_bytes(b"nonsense")
    shown = here("history").out
    assert "2 beginnings of conversations" in shown
    assert "target: 2048 tokens" in shown
    assert "damaged: 3000 tokens" in shown
    assert json.loads(here("history", "clear", "--json").out)["removed"]["prefixes"] == 2
    assert list(place.prefixes.iterdir()) == []
    keep_a_prefix(tiny.load(draft="none", store_home=place, prefixes=True))
    assert "1 beginning removed" in here("history", "clear").err


def test_json_before_a_command_is_the_commands(tiny: TinyModels, here: InProcess) -> None:
    (here.home.parent / "notes.md").write_text("the people use water " * 50)
    found = here("memory", "--json", "learn", here.home.parent / "notes.md", "--model", tiny.target)
    assert json.loads(found.out)["learned"]["target"] == "target"


def test_learned_text_is_listed_with_what_is_kept_and_stays_when_that_is_cleared(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    place = Home(here.home)
    assert "\nlearned: " not in here("memory").out
    assert "learned text" not in here("memory", "clear").err
    (tmp_path / "notes.md").write_text("the people use water " * 50)
    index = json.loads(here("memory", "learn", tmp_path / "notes.md", "-m", tiny.target, "--json").out)["learned"]
    place.history.write_text("typed\n")
    place.conversations.mkdir()
    place.conversation.write_text("{}")
    learned = {"path": str(place.learned), "bytes": index["bytes"], "files": 1, "tokens": index["tokens"]}
    files = {
        name: {"path": str(getattr(place, own)), "bytes": size}
        for name, own, size in (("typed", "history", 6), ("conversation", "conversation", 2))
    }
    found = json.loads(here("memory", "--json").out)["history"]
    assert {name: found[name] for name in (*files, "learned")} == {**files, "learned": learned}
    assert f"learned: 1 file, {index['tokens']} tokens" in here("memory").out
    cleared = json.loads(here("memory", "clear", "--json").out)
    assert {name: cleared["removed"][name] for name in files} == files
    assert cleared["stays"] == {"learned": learned}
    assert "learned text stays" in here("memory", "clear").err
    assert Path(index["path"]).exists()


def test_a_removed_model_leaves_no_beginning(tiny: TinyModels, here: InProcess) -> None:
    place = Home(here.home)
    path = put_into_store(place, "smollm2-135m", tiny.target.read_bytes())
    keep_a_prefix(tiny.load(Path("smollm2-135m"), draft="none", store_home=place, prefixes=True))
    keep_a_prefix(tiny.load(tiny.ending, draft="none", store_home=place, prefixes=True))
    assert len(stored_prefixes(place)) == 2
    assert here("models", "rm", "smollm2-135m").code == 0
    assert not path.exists()
    [other] = stored_prefixes(place)
    assert model_of(other)[0] == "ending"


def keep_a_prefix(engine: Engine) -> None:
    facts, tokens = engine.pair.target.facts, as_tokens(range(LEAST_TOKENS))
    with engine:
        key = facts.name.encode()
        assert write_prefix(engine.pair.home, key, tokens, facts, [b"part"], (1, 4)) is not None


def test_a_damaged_file_is_listed_and_cleared(here: InProcess) -> None:
    place = Home(here.home)
    place.answers.mkdir(parents=True)
    (place.answers / f"{'00' * 32}.text").write_bytes(b"nonsense")
    (place.answers / "odd.text").write_bytes(b"")
    (place.answers / "old.text.damaged").write_bytes(b"nonsense")
    result = here("history", "--json")
    assert result.code == 0
    assert [each["answers"] for each in json.loads(result.out)["history"]["files"]] == [None, None]
    assert "is damaged" in here("history").err
    assert here("history", "clear").code == 0
    assert list(place.answers.iterdir()) == []
