"""Beginnings that two conversations shared are kept on disk, and read back bit for bit; or nothing happens."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.prefixes import beginnings as beginning, prefixes as keeping, stored
from edgespec.engine.prefixes.beginnings import (
    BLOCK_TOKENS,
    LEAST_TOKENS,
    MOST_BEGINNINGS,
    Beginnings,
    as_tokens,
    read_beginnings,
    write_beginnings,
)
from edgespec.engine.prefixes.prefixes import Prefixes
from edgespec.engine.prefixes.stored import (
    beginnings_path,
    clear_prefixes,
    longest_prefix,
    model_of,
    prefix_path,
    room_bytes,
    stored_prefixes,
)
from edgespec.errors import DiskSpaceError
from edgespec.files import provenance, session_file
from edgespec.files.home import Home
from edgespec.files.provenance import NO_MAC
from edgespec.interfaces.counted_text import common_prefix
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

WORDS = ["hello", "world", "the", "people", "of", "one", "two", "three", "and", "what", "is", "water"]
SYSTEM = " ".join(random.Random(1).choices(WORDS, k=2300))  # an agent's instructions and tools
CONTEXT = 4096
KEY = b"k" * 32

# A conversation in another process.
ASK = """
import json, sys
from edgespec import Engine
from edgespec.engine.events import Done
from edgespec.files.home import Home
from pathlib import Path

target, home, system, prompt = sys.argv[1:]
settings = {"runtime": "native", "draft": "none", "threads": 2, "context": 4096, "prefixes": True}
with Engine.load(target, store_home=Home(Path(home)), **settings) as engine, engine.session(system=system) as session:
    *_, done = session.generate(prompt, max_tokens=12)
    print(json.dumps([done.token_ids, done.stats.cached_tokens, engine.keep_prefixes()]))
"""


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


@pytest.fixture(scope="module")
def long(tiny: TinyModels) -> Path:
    """A model that holds an agent's beginning."""
    return tiny._make("long", seed=3, context_length=CONTEXT)


@contextmanager
def loaded(long: Path, home: Home, **settings: Any) -> Iterator[Engine]:
    own = {"runtime": "native", "draft": "none", "threads": 1, "context": CONTEXT, "prefixes": True, **settings}
    with Engine.load(str(long), store_home=home, **own) as engine:
        yield engine


def asked(engine: Engine, prompt: str, system: str = SYSTEM, owner: str = "") -> Done:
    """A conversation's first answer, and then its session is gone."""
    with engine.session(system=system, owner=owner) as session:
        done = answer(session.generate(prompt, max_tokens=12))
        engine.keep_prefixes()
        return done


@pytest.fixture(scope="module")
def expected(long: Path, tiny: TinyModels) -> Callable[[str], tuple[int, ...]]:
    """The tokens of an answer without prefixes."""
    found: dict[str, tuple[int, ...]] = {}

    def of(prompt: str) -> tuple[int, ...]:
        if prompt not in found:
            with loaded(long, tiny.home, prefixes=False) as engine:
                found[prompt] = asked(engine, prompt).token_ids
        return found[prompt]

    return of


@pytest.fixture(scope="module")
def kept_home(long: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home in which two conversations left their beginning."""
    home = Home(tmp_path_factory.mktemp("kept") / "home")
    with loaded(long, home) as engine:
        asked(engine, "hello")
        asked(engine, "and what is water")
    return home


@pytest.fixture
def kept(kept_home: Home, tmp_path: Path) -> Home:
    """A copy of that home, for one test."""
    own = Home(tmp_path / "home")
    for path in kept_home.root.rglob("*"):
        if path.is_file():
            copy = own.root / path.relative_to(kept_home.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return own


def the_prefix(home: Home) -> Path:
    [prefix] = stored_prefixes(home)
    return prefix.path


# --------------------------------------------------------------------------------------------------- kept, and read


def test_the_third_conversation_reads_the_beginning_of_two_from_the_disk(
    long: Path, kept: Home, expected: Callable[[str], tuple[int, ...]]
) -> None:
    with loaded(long, kept) as engine:
        done = asked(engine, "three people")
        assert done.token_ids == expected("three people")
        shared = done.stats.cached_tokens
        assert LEAST_TOKENS <= shared < done.stats.prompt_tokens < shared + 2 * BLOCK_TOKENS
        assert asked(engine, "another one of the people", owner="else").stats.cached_tokens == 0
    [prefix] = stored_prefixes(kept)
    assert (prefix.length, model_of(prefix)) == (shared, (engine.pair.target.facts.name, _identity(engine)))
    assert prefix.bytes == prefix.path.stat().st_size > shared * engine.pair.target.facts.kv_bytes_per_token


def _identity(engine: Engine) -> str | None:
    return engine.pair.target.facts.sha256


def test_what_is_read_is_each_bit_of_the_cache_that_was_written(
    long: Path, kept: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[bytes]] = []
    restore = NativeSequence.restore

    def watched(self: NativeSequence, parts: Iterator[bytes], length: int) -> None:
        restore(self, parts, length)
        read.append([self.read_part(part, length) for part in range(self.part_sizes(length)[0])])

    monkeypatch.setattr(NativeSequence, "restore", watched)
    [prefix] = stored_prefixes(kept)
    with loaded(long, kept) as engine, engine.session(system=SYSTEM) as session:
        answer(session.generate("three people", max_tokens=1))
    with loaded(long, kept, prefixes=False) as engine, engine.session(system=SYSTEM) as session:
        answer(session.generate("three people", max_tokens=1))
        own = session._target
        assert isinstance(own, NativeSequence)
        count, _ = own.part_sizes(prefix.length)
        assert read == [[own.read_part(part, prefix.length) for part in range(count)]]


def test_the_second_conversation_may_come_in_another_process(
    long: Path, home: Home, expected: Callable[[str], tuple[int, ...]]
) -> None:
    def run(prompt: str) -> tuple[list[int], int, list[str]]:
        arguments = [sys.executable, "-c", ASK, str(long), str(home.root), SYSTEM, prompt]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
        ids, cached, said = json.loads(done.stdout)
        return ids, cached, said

    assert run("hello") == (list(expected("hello")), 0, [])
    ids, cached, said = run("and what is water")
    assert (ids, cached) == (list(expected("and what is water")), 0)
    assert len(said) == 1
    assert "tokens that two conversations shared" in said[0]
    ids, cached, said = run("three people")
    assert ids == list(expected("three people"))
    assert cached >= LEAST_TOKENS
    assert said == []


def test_one_conversation_keeps_nothing_however_often_it_is_asked(long: Path, home: Home) -> None:
    with loaded(long, home) as engine, engine.session(system=SYSTEM) as session:
        for prompt in ("hello", "and more", "and water"):
            answer(session.generate(prompt, max_tokens=4))
            assert engine.keep_prefixes() == ()
        first = [*session.messages[:2]]
        for _ in range(2):  # its first prompt is asked again
            answer(session.generate(messages=first, max_tokens=4))
            engine.keep_prefixes()
    assert len(read_beginnings(beginnings_path(home)).all) <= 2


def test_short_beginnings_and_other_owners_share_nothing(long: Path, home: Home) -> None:
    short = SYSTEM[:4000]
    with loaded(long, home) as engine:
        for prompt in ("hello", "and what is water"):
            assert asked(engine, prompt, short).stats.prompt_tokens < LEAST_TOKENS
        assert not home.prefixes.exists()
        asked(engine, "hello", owner="one")
        asked(engine, "and what is water", owner="two")
        assert stored_prefixes(home) == []
        asked(engine, "three people", owner="two")
        assert len(stored_prefixes(home)) == 1
        assert asked(engine, "two people", owner="one").stats.cached_tokens == 0
        assert asked(engine, "two people", owner="two").stats.cached_tokens > 0


def test_only_the_user_can_read_what_is_kept_and_no_name_tells_whose_it_is(long: Path, home: Home) -> None:
    with loaded(long, home) as engine:
        for prompt in ("hello", "and what is water"):
            asked(engine, prompt, owner="secret-api-key")
    if os.name != "nt":
        assert stat.S_IMODE(home.prefixes.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.prefixes.iterdir()} == {0o600}
    assert all(b"secret-api-key" not in path.read_bytes() for path in home.prefixes.iterdir())
    assert b"people" not in beginnings_path(home).read_bytes()


def test_nothing_is_kept_unless_the_profile_says_so(long: Path, home: Home) -> None:
    for setting in ("auto", False):
        with loaded(long, home, prefixes=setting) as engine:
            for prompt in ("hello", "and what is water"):
                asked(engine, prompt)
            assert engine.pair.prefixes is None
    assert not home.prefixes.exists()


def test_plain_text_outside_of_a_conversation_reads_a_prefix_and_keeps_none(long: Path, home: Home) -> None:
    with loaded(long, home) as engine:
        for prompt in (f"{SYSTEM} hello", f"{SYSTEM} and what is water"):
            with engine.session() as session:
                answer(session.generate(prompt, raw=True, max_tokens=4))
                assert engine.keep_prefixes() == ()
    assert stored_prefixes(home) == []


# ----------------------------------------------------------------------------------------------------- what damages


def _cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def _emptied(content: bytearray) -> None:
    content.clear()


def _grown(content: bytearray) -> None:
    content += b"more"


def _flipped(at: float) -> Callable[[bytearray], None]:
    def flip(content: bytearray) -> None:
        content[int(at * (len(content) - 1))] ^= 1

    return flip


@pytest.mark.parametrize(
    "damage", [_cut, _emptied, _grown, *(_flipped(at) for at in (0, 0.001, 0.01, 0.4, 0.99999, 1))]
)
def test_a_damaged_prefix_is_removed_and_the_answer_is_right(
    long: Path, kept: Home, expected: Callable[[str], tuple[int, ...]], damage: Callable[[bytearray], None]
) -> None:
    path = the_prefix(kept)
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with loaded(long, kept) as engine:
        with engine.session(system=SYSTEM) as session:
            done = answer(session.generate("three people", max_tokens=12))
            assert (done.token_ids, done.stats.cached_tokens) == (expected("three people"), 0)
            assert not path.exists()
            said = engine.keep_prefixes()
        assert len([each for each in said if "is read again" in each]) == 1
        assert asked(engine, "two people").stats.cached_tokens > 0, "it was kept again"


@pytest.mark.parametrize(
    ("place", "name"),
    [(session_file.SessionFile, "_read_header"), (session_file.SessionFile, "_read"), (provenance, "read_bounded")],
)
def test_a_prefix_that_cannot_be_read_now_is_kept(
    long: Path, kept: Home, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    def fails(*_arguments: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    path = the_prefix(kept)
    with loaded(long, kept) as engine:
        with monkeypatch.context() as patch, engine.session(system=SYSTEM) as session:
            patch.setattr(place, name, fails)
            assert answer(session.generate("three people", max_tokens=1)).stats.cached_tokens == 0
        assert path.exists()
        assert asked(engine, "two people").stats.cached_tokens > 0


def test_a_prefix_under_another_name_or_of_another_home_is_not_used(
    long: Path, kept: Home, tmp_path: Path, expected: Callable[[str], tuple[int, ...]]
) -> None:
    path = the_prefix(kept)
    with loaded(long, kept) as engine:
        key = engine.pair.prefixes._key("", "")  # type: ignore[union-attr]
        assert key is not None
        with engine.session(system=SYSTEM) as session:
            answer(session.generate("three people", max_tokens=1))
            other = as_tokens([*session._conversation.history[:2200]])
        path.replace(prefix_path(kept, key, other))
        done = asked(engine, "three people")
        assert (done.token_ids, done.stats.cached_tokens) == (expected("three people"), 0)
    kept.secret.write_bytes(bytes(32))
    with loaded(long, kept) as engine:
        assert asked(engine, "three people").stats.cached_tokens == 0


def test_another_build_owner_or_model_finds_nothing(kept: Home, long: Path) -> None:
    with loaded(long, kept) as engine, engine.session(system=SYSTEM) as session:
        answer(session.generate("three people", max_tokens=1))
        tokens, facts, target = session._conversation.history, engine.pair.target.facts, session._savable
        assert target is not None
        target.rewind(0)
        for changed in ({"build": "another"}, {"kv_type": "q8_0"}, {"sha256": "other"}, {"sha256": None}):
            prefixes = Prefixes(kept, replace(facts, **changed))  # type: ignore[arg-type]
            assert prefixes.fill("", tokens, target) == 0
            prefixes.close()
        prefixes = Prefixes(kept, facts)
        assert prefixes.fill("someone", tokens, target) == 0
        assert prefixes.fill("", tokens, target) >= LEAST_TOKENS
        prefixes.close()


def test_a_cancelled_answer_leaves_a_session_that_answers(
    long: Path, kept: Home, expected: Callable[[str], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part = NativeSequence._restore
    with loaded(long, kept) as engine, engine.session(system=SYSTEM) as session:

        def cancelled(self: NativeSequence, parts: Iterator[bytes], length: int) -> None:
            next(iter(parts))
            session.cancel()
            write_part(self, parts, length)

        monkeypatch.setattr(NativeSequence, "_restore", cancelled)
        done = answer(session.generate("three people", max_tokens=12))
        assert (done.finish_reason, done.token_ids) == ("cancelled", ())
        monkeypatch.setattr(NativeSequence, "_restore", write_part)
        done = answer(session.generate("three people", max_tokens=12))
        assert done.token_ids == expected("three people")
        assert done.stats.cached_tokens >= LEAST_TOKENS
    assert the_prefix(kept).exists()


# ----------------------------------------------------------------------------------- when and whether it is written


def test_a_request_ends_the_writing_and_the_next_pause_begins_again(
    long: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, part = threading.Event(), NativeSequence.read_part

    def read_part(self: NativeSequence, number: int, length: int) -> bytes:
        if number == 1:
            stop.set()
        return part(self, number, length)

    with loaded(long, home) as engine:
        asked(engine, "hello")
        with engine.session(system=SYSTEM) as session:
            answer(session.generate("and what is water", max_tokens=2))
            monkeypatch.setattr(NativeSequence, "read_part", read_part)
            assert engine.keep_prefixes(stop) == ()
            assert [path.name for path in home.prefixes.iterdir()] == ["beginnings.json"]
            monkeypatch.setattr(NativeSequence, "read_part", part)
            assert engine.keep_prefixes(stop) == (), "it is still set"
            with session.generate("and more", max_tokens=2) as generation:
                next(generation)
                assert engine.keep_prefixes() == (), "never during an answer"
            assert len(engine.keep_prefixes()) == 1
    assert len(stored_prefixes(home)) == 1


def test_without_a_session_that_has_it_nothing_is_written(long: Path, home: Home) -> None:
    with loaded(long, home) as engine:
        for prompt in ("hello", "and what is water"):
            with engine.session(system=SYSTEM) as session:
                answer(session.generate(prompt, max_tokens=2))
        assert engine.keep_prefixes() == ()
        assert stored_prefixes(home) == []
        asked(engine, "three people")
        assert len(stored_prefixes(home)) == 1


def test_a_full_disk_costs_the_prefix_and_one_sentence(
    long: Path, home: Home, expected: Callable[[str], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def full(*_arguments: Any, **_settings: Any) -> int:
        raise DiskSpaceError("the disk is full", needed_bytes=1, free_bytes=0)

    with loaded(long, home) as engine:
        asked(engine, "hello")
        monkeypatch.setattr(stored, "write_session_file", full)
        for prompt in ("and what is water", "three people"):
            with engine.session(system=SYSTEM) as session:
                done = answer(session.generate(prompt, max_tokens=12))
                assert done.token_ids == expected(prompt)
                said += engine.keep_prefixes()
        assert said == ["the beginning of two conversations is not kept: the disk is full"]
        monkeypatch.undo()
        asked(engine, "one of the people")
    assert len(stored_prefixes(home)) == 1


def test_beginnings_that_cannot_be_written_are_remembered_by_this_process(
    long: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with loaded(long, home) as engine:
        monkeypatch.setattr(keeping, "write_beginnings", full)
        with engine.session(system=SYSTEM) as session:
            answer(session.generate("hello", max_tokens=2))
            [sentence] = engine.keep_prefixes()
            assert "are not remembered: No space left on device" in sentence
        asked(engine, "and what is water")
    assert len(stored_prefixes(home)) == 1


def test_what_could_not_be_written_comes_later_to_what_other_processes_wrote(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: Any = SimpleNamespace(sha256="0" * 64, cache_class={})
    target: Any = SimpleNamespace(angles="")

    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def ask(prefixes: Prefixes, token: int) -> None:
        prefixes.answered("", [token] * (LEAST_TOKENS + 1), target)
        prefixes.remember()

    with closing(Prefixes(home, facts)) as one, closing(Prefixes(home, facts)) as other:
        with monkeypatch.context() as patch:
            patch.setattr(keeping, "write_beginnings", full)
            ask(one, 1)
        ask(other, 2)
        ask(one, 3)
    assert len(read_beginnings(beginnings_path(home)).all) == 3


def test_a_tenth_of_the_free_disk_is_the_bound(long: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "free_bytes", lambda _path: 10_000)
    assert room_bytes(home) == 1000
    with loaded(long, home) as engine:
        asked(engine, "hello")
        with engine.session(system=SYSTEM) as session:
            answer(session.generate("and what is water", max_tokens=2))
            [sentence] = engine.keep_prefixes()
    assert "too little of the disk is free" in sentence
    assert stored_prefixes(home) == []
    monkeypatch.setattr(stored, "free_bytes", lambda _path: 10**15)
    assert room_bytes(home) == stored.MOST_BYTES == 4 * 10**9


def test_the_oldest_make_room(long: Path, kept: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first, used = the_prefix(kept), the_prefix(kept).stat().st_size
    os.utime(first, (1, 1))
    with loaded(long, kept) as engine:
        asked(engine, "three people")
        assert first.stat().st_mtime > 1, "the last use counts"
        monkeypatch.setattr(stored, "MOST_BYTES", 2 * used)
        for number in range(2):
            os.utime(first, (1, 1))
            other = " ".join(random.Random(10 + number).choices(WORDS, k=2300))
            for prompt in ("hello", "and what is water"):
                asked(engine, prompt, other)
            assert len(stored_prefixes(kept)) == 2
        assert not first.exists()


def test_two_processes_on_one_home_write_one_prefix(long: Path, home: Home) -> None:
    with loaded(long, home) as one, loaded(long, home) as other:
        asked(one, "hello")
        with one.session(system=SYSTEM) as mine, other.session(system=SYSTEM) as yours:
            answer(mine.generate("and what is water", max_tokens=2))
            answer(yours.generate("three people", max_tokens=2))
            with ThreadPoolExecutor(2) as pool:
                said = [sentence for each in pool.map(Engine.keep_prefixes, (one, other)) for sentence in each]
        assert 1 <= len(said) <= 2
        assert len(stored_prefixes(home)) == 1
        assert asked(other, "two people").stats.cached_tokens >= LEAST_TOKENS


def test_clearing_removes_prefixes_of_one_model_or_all_and_what_is_remembered(kept: Home, home: Home) -> None:
    [prefix] = stored_prefixes(kept)
    assert clear_prefixes(kept, "another model's") == []
    assert beginnings_path(kept).exists()
    assert clear_prefixes(kept, model_of(prefix)[1]) == [prefix]
    assert beginnings_path(kept).exists()
    assert clear_prefixes(kept) == []
    assert list(kept.prefixes.iterdir()) == []
    assert clear_prefixes(Home(kept.root / "none")) == []


def test_a_home_without_a_secret_keeps_nothing(long: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "mac_in", lambda *_: NO_MAC)
    with loaded(long, home) as engine:
        for prompt in ("hello", "and what is water"):
            asked(engine, prompt)
    assert not home.prefixes.exists()


# ------------------------------------------------------------------------------------------------------- beginnings


def remembered(prompts: Sequence[Sequence[int]]) -> tuple[Beginnings, int]:
    known, shared = Beginnings(), 0
    for prompt in prompts:
        known, shared = known.with_prompt(KEY, as_tokens(prompt))
    return known, shared


@given(st.integers(0, 5000), st.integers(4, 5000), st.integers(1, 5000))
def test_the_shared_beginning_is_the_common_one_in_whole_blocks(common: int, rest: int, other: int) -> None:
    one, two = [*[7] * common, 1, *[8] * rest], [*[7] * common, 2, *[9] * other]
    _, shared = remembered([one, two])
    assert shared == (0 if common < LEAST_TOKENS else common - (common - LEAST_TOKENS) % BLOCK_TOKENS)
    assert one[:shared] == two[:shared]
    assert shared <= common_prefix(one, two)


@given(st.integers(0, 4), st.integers(0, 3000))
def test_a_longer_prompt_of_one_conversation_takes_the_place_of_the_shorter(added: int, more: int) -> None:
    first = [*[7] * 3000, *[1] * added]
    known, shared = remembered([first, [*[7] * 3000, *[2] * more]]) if more >= added else remembered([first, first])
    assert (len(known.all), shared) == (1, 0)


def test_the_last_conversations_are_remembered_and_each_key_its_own() -> None:
    known, _ = remembered([[number, *[7] * 2100] for number in range(MOST_BEGINNINGS + 5)])
    assert len(known.all) == MOST_BEGINNINGS
    prompt = as_tokens([MOST_BEGINNINGS, *[7] * 2090, *[3] * 20])
    assert known.with_prompt(b"another", prompt)[1] == 0
    assert known.with_prompt(KEY, prompt)[1] == LEAST_TOKENS + BLOCK_TOKENS


def test_a_damaged_record_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "beginnings.json"
    known, _ = remembered([[7] * 3000])
    write_beginnings(path, known)
    assert read_beginnings(path) == known
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for content in (b"", b"{", b'{"all": 3}', b'{"all": [{"key": "x"}]}', path.read_bytes()[:-40], b"\xff" * 100):
        path.write_bytes(content)
        assert read_beginnings(path) == Beginnings()
    odd = replace(known.all[0], blocks=known.all[0].blocks[:-3])
    write_beginnings(path, Beginnings((odd,)))
    assert read_beginnings(path).with_prompt(KEY, as_tokens([*[7] * 2990, *[1] * 50]))[1] >= LEAST_TOKENS


def test_no_prefix_is_longer_than_the_prompt_it_begins(kept: Home) -> None:
    assert longest_prefix(kept, KEY, np.zeros(0, dtype=np.int32)) is None
    assert beginning._ADDED_TOKENS == 4
    assert session_file.MOST_TOKENS >= LEAST_TOKENS
