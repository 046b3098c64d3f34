"""An engine with a history and learned text: the same answers, kept safely, and off unless named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Done, Notice, Sampling
from edgespec.drafters.stored import DATASTORE, HISTORY
from edgespec.engine.engine import Engine
from edgespec.engine.learned import answers as kept_answers, learner as text_learner
from edgespec.engine.learned.answers import MOST_TOKENS, KeptAnswers, answers_path
from edgespec.engine.learned.learner import TextLearner
from edgespec.engine.learned.texts import learned_path
from edgespec.errors import InvalidRequestError
from edgespec.files.disk import free_bytes
from edgespec.files.gguf.vocabulary import vocabulary_digest
from edgespec.files.home import Home
from edgespec.files.model_file import read_model_file
from edgespec.files.stored_text import StoredText, Text
from edgespec.planning.cost.curve import FREE
from edgespec.text.tokenizers.choice import open_tokenizer
from tests.support.tiny_models import TinyModels, invent_measurements

PROMPT = "Say something."
VOCABULARY, SIZE = bytes(range(32)), 1000


def answers_of(kept: KeptAnswers) -> list[list[int]]:
    return [] if kept.text is None else [text.tokens.tolist() for text in kept.text.all_texts()]


def wait(kept: KeptAnswers) -> None:
    """Wait until the answers so far are written. The thread is private, and without this a test would poll files."""
    assert kept._pool is not None
    kept._pool.submit(int).result()


def in_file(home: Home, size: int = SIZE) -> list[list[int]]:
    stored = StoredText.open(answers_path(home, VOCABULARY), VOCABULARY, size)
    return [text.tokens.tolist() for text in stored.all_texts()]


def keep(home: Home, *answers: Sequence[int], most_tokens: int = MOST_TOKENS) -> None:
    kept = KeptAnswers(home, VOCABULARY, SIZE, most_tokens=most_tokens)
    for answer in answers:
        kept.add(answer)
    kept.close()


# -------------------------------------------------------------------------------------- the kept answers


def test_answers_are_kept_in_order_and_the_oldest_make_room(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    keep(home, [1, 2, 3], [], [4, 5], [-1, SIZE, 6, 2**40])
    assert in_file(home) == [[1, 2, 3], [4, 5], [6]]
    keep(home, [7] * 5, most_tokens=11)
    assert in_file(home) == [[4, 5], [6], [7] * 5]
    keep(home, [8] * 50, most_tokens=11)
    assert in_file(home) == [[8] * 10]
    if sys.platform != "win32":
        assert answers_path(home, VOCABULARY).stat().st_mode & 0o777 == 0o600


def test_a_history_beyond_the_limit_is_set_aside_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    keep(home, [1, 2, 3], [4, 5])
    monkeypatch.setattr(kept_answers, "MOST_TOKENS", 6)
    kept = KeptAnswers(home, VOCABULARY, SIZE, most_tokens=5)
    assert kept.text is None
    assert "it holds 7 tokens, and at most 6 are stored" in (kept.take_notice() or "")
    kept.add([6])
    kept.close()
    assert in_file(home) == [[6]]


def test_nothing_is_kept_after_closing_and_closing_twice_is_fine(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    kept = KeptAnswers(home, VOCABULARY, SIZE)
    kept.close()
    kept.add([1, 2])
    kept.close()
    assert not answers_path(home, VOCABULARY).exists()
    assert kept.take_notice() is None


def test_answers_that_come_while_one_is_written_are_written_together_and_few_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, written = Home(tmp_path / "home"), list[int]()
    save = StoredText.save

    def counted(text: StoredText, path: Path) -> None:
        written.append(len(text.all_texts()))
        save(text, path)

    monkeypatch.setattr(StoredText, "save", counted)
    kept = KeptAnswers(home, VOCABULARY, SIZE, most_tokens=10)
    with kept_answers.answers_lock(home):
        kept.add([0])
        while kept._waiting:  # private: the thread takes the first answer, and waits for the lock
            pass
        for number in range(1, 100):
            kept.add([number])
        assert len(kept._waiting) == 5, "an answer of one token counts as two"
    kept.close()
    assert written == [1, 5]
    assert in_file(home) == [[95], [96], [97], [98], [99]]


def test_two_histories_share_one_file_and_a_removed_file_is_written_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    one, two = (KeptAnswers(home, VOCABULARY, SIZE) for _ in range(2))
    for number, kept in enumerate((one, two, two, one)):
        kept.add([number])
        wait(kept)
        if number == 1:
            assert answers_of(two) == [[0], [1]]
    two.close()
    assert answers_of(one) == [[0], [1], [2], [3]]
    answers_path(home, VOCABULARY).unlink()
    one.add([9])
    one.close()
    assert in_file(home) == [[9]]


def test_processes_that_add_at_the_same_time_lose_no_answer(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    code = (
        "import sys; from pathlib import Path; from edgespec.files.home import Home\n"
        "from edgespec.engine.learned.answers import KeptAnswers\n"
        "kept = KeptAnswers(Home(Path(sys.argv[1])), bytes(range(32)), 1000)\n"
        "for place in range(15): kept.add([int(sys.argv[2]) + place])\n"
        "kept.close()"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(home.root), str(100 * number)]) for number in (1, 2, 3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    kept = in_file(home)
    assert sorted(kept) == [[100 * number + place] for number in (1, 2, 3) for place in range(15)]
    for number in (1, 2, 3):
        own = [tokens for tokens in kept if tokens[0] // 100 == number]
        assert own == sorted(own)


def test_a_full_disk_stops_only_the_growth_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    keep(home, [1, 2])
    kept = KeptAnswers(home, VOCABULARY, SIZE)
    with monkeypatch.context() as patch:

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fsync", full)
        kept.add([3, 4])
        wait(kept)
        assert answers_of(kept) == [[1, 2], [3, 4]]
    assert in_file(home) == [[1, 2]]
    assert [path.name for path in home.answers.iterdir()] == [answers_path(home, VOCABULARY).name]
    kept.add([5])
    kept.close()
    assert in_file(home) == [[1, 2], [3, 4], [5]]
    assert free_bytes(tmp_path) > 0


def test_a_home_that_cannot_be_written_keeps_answers_in_memory(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    kept = KeptAnswers(Home(tmp_path / "home"), VOCABULARY, SIZE)
    kept.add([1, 2])
    kept.close()
    assert answers_of(kept) == [[1, 2]]


@pytest.mark.parametrize(("refusals", "kept_in_file"), [(1, [[1, 2], [3], [4]]), (99, [[1, 2]])])
def test_a_history_that_cannot_be_opened_is_read_again_with_the_next_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, kept_in_file: list[list[int]]
) -> None:
    home, opened, refused = Home(tmp_path / "home"), StoredText.open, list[int]()
    keep(home, [1, 2])

    def refusing(*arguments: Any, **settings: Any) -> StoredText:
        if len(refused) < refusals:
            refused.append(1)
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(StoredText, "open", refusing)
        kept = KeptAnswers(home, VOCABULARY, SIZE)
        assert "cannot be read" in (kept.take_notice() or "")
        for answer in ([3], [4]):
            kept.add(answer)
            wait(kept)
        kept.close()
    assert kept.take_notice() is None
    assert in_file(home) == kept_in_file
    assert answers_of(kept)[-2:] == [[3], [4]]


def test_a_folder_in_place_of_the_file_is_left_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    path = answers_path(home, VOCABULARY)
    (path / "precious").mkdir(parents=True)
    keep(home, [1, 2])
    assert (path / "precious").is_dir()


@pytest.mark.parametrize("place", [3, 20, 61, 70, 90])
def test_a_damaged_file_is_set_aside_with_one_sentence_and_a_new_one_begins(tmp_path: Path, place: int) -> None:
    home = Home(tmp_path / "home")
    keep(home, [1, 2, 3], [4, 5])
    path = answers_path(home, VOCABULARY)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x7F
    path.write_bytes(data)
    kept = KeptAnswers(home, VOCABULARY, SIZE)
    kept.add([6])
    kept.close()
    said = kept.take_notice()
    if said is None:  # only the index was damaged, which is made again
        assert place >= 72
        assert in_file(home)[-1] == [6]
        return
    assert "the history of answers is damaged" in said
    assert kept.take_notice() is None
    assert in_file(home) == [[6]]
    assert path.with_name(f"{path.name}.damaged").read_bytes() == bytes(data)


# --------------------------------------------------------------------------------------------- the engine


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def load(tiny: TinyModels, home: Home, **overrides: object) -> Engine:
    engine = tiny.load(store_home=home, draft="none", runtime="native", **overrides)
    invent_measurements(engine)
    return engine


def answer(engine: Engine, prompt: str = PROMPT, sampling: Sampling | None = None, depth: int | None = None) -> Done:
    with engine.session() as session:
        *_, done = session.generate(prompt, max_tokens=48, sampling=sampling, depth=depth)
    assert isinstance(done, Done)
    return done


def test_neither_is_used_or_made_unless_named(tiny: TinyModels, home: Home) -> None:
    with load(tiny, home) as engine:
        answer(engine)
        assert [drafter.kind for drafter in engine.drafters] == ["lookup"]
        assert engine.pair.answers is None
    assert not home.answers.exists()
    assert not home.learned.exists()


def test_lookup_false_switches_both_off(tiny: TinyModels, home: Home) -> None:
    home.create(home.learned)
    with load(tiny, home, history=True, learned=True, lookup=False) as engine:
        assert engine.drafters == ()
        assert engine.pair.answers is None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)])
def test_an_answer_is_guessed_from_the_history_and_stays_the_same(
    tiny: TinyModels, home: Home, sampling: Sampling
) -> None:
    with load(tiny, home) as engine:
        plain = answer(engine, sampling=sampling, depth=0)
    with load(tiny, home, history=True) as engine:
        assert engine.pair.costs().drafts[HISTORY] == FREE
        first = answer(engine, sampling=sampling, depth=4)
        assert HISTORY not in first.stats.rounds_by_source
    with load(tiny, home, history=True) as engine:
        again = answer(engine, sampling=sampling, depth=4)
        priced = answer(engine, sampling=sampling)
        assert not any(name.startswith(HISTORY) for name in engine.pair.measurements.priors)
    assert again.token_ids == first.token_ids == plain.token_ids == priced.token_ids
    assert again.stats.rounds_by_source.get(HISTORY, 0) > 0
    assert again.stats.rounds < first.stats.rounds
    assert priced.speculation_off is None
    with load(tiny, home, history=True) as engine:
        known = engine.pair.measurements.priors
        assert any(name.startswith(HISTORY) for name in known), "its odds are remembered as those of other sources"


def test_what_is_kept_are_the_answers_only(tiny: TinyModels, home: Home) -> None:
    with load(tiny, home, history=True) as engine:
        done = [answer(engine), answer(engine, depth=0)]
        header = engine.pair.target.header
    path = answers_path(home, vocabulary_digest(header))
    stored = StoredText.open(path, vocabulary_digest(header), header.vocabulary_size)
    assert [tuple(text.tokens.tolist()) for text in stored.all_texts()] == [each.token_ids for each in done]


def test_under_rejection_a_given_seed_silences_the_history(tiny: TinyModels, home: Home) -> None:
    drawn = Sampling(temperature=0.2, top_k=1, rule="rejection")
    given = Sampling(temperature=0.2, top_k=1, rule="rejection", seed=1)
    with load(tiny, home, history=True) as engine:
        answer(engine, sampling=drawn, depth=4)
    with load(tiny, home, history=True) as engine:
        assert HISTORY not in answer(engine, sampling=given, depth=4).stats.rounds_by_source
        assert answer(engine, sampling=drawn, depth=4).stats.rounds_by_source.get(HISTORY, 0) > 0


def test_a_damaged_history_gives_one_notice_and_the_same_answer(tiny: TinyModels, home: Home) -> None:
    with load(tiny, home, history=True) as engine:
        plain = answer(engine)
        path = answers_path(home, vocabulary_digest(engine.pair.target.header))
    path.write_bytes(b"nonsense")
    with load(tiny, home, history=True) as engine, engine.session() as session:
        for number in range(2):
            events = list(session.generate(PROMPT, max_tokens=48))
            said = [event for event in events if isinstance(event, Notice) and "is damaged" in event.text]
            assert len(said) == (number == 0)
            session.clear()
            done = events[-1]
            assert isinstance(done, Done)
            assert done.token_ids == plain.token_ids


# ------------------------------------------------------------------------------------------- learned text


def learner(tiny: TinyModels, home: Home, **options: int) -> TextLearner:
    return TextLearner(home, read_model_file(tiny.target), **options)


def learn(learner: TextLearner, tiny: TinyModels, *paths: Path) -> object:
    steps = learner.learn(paths, open_tokenizer(tiny.target))
    while True:
        try:
            assert 0.0 <= next(steps) < 1.0
        except StopIteration as end:
            return end.value


def test_a_folder_that_macos_finds_by_other_names_is_learned_once(
    tiny: TinyModels, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [unicodedata.normalize(form, "Café") for form in ("NFC", "NFD")] + ["café"]
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)  # on macOS itself, one folder
        (tmp_path / name / "a.md").write_text("hello")
    monkeypatch.setattr(sys, "platform", "darwin")
    learned = learner(tiny, home)
    for name in names:
        learn(learned, tiny, tmp_path / name)
    assert len(learned.known().names) == 1
    learn(learned, tiny, *[tmp_path / name for name in names])
    assert len(learned.known().names) == 1
    assert learned.forget([tmp_path / "CAFÉ"]).removed_files == 1


def test_learned_text_is_guessed_and_changes_no_answer(tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    with load(tiny, home) as engine:
        plain = answer(engine, depth=0)
        vocabulary = vocabulary_digest(engine.pair.target.header)
        size = engine.pair.target.header.vocabulary_size
    # The text of an answer need not encode to the answer's tokens, so the tokens themselves are put into the index.
    tokens = np.array(plain.token_ids, dtype=np.uint32)
    home.create(home.learned)
    StoredText.of(vocabulary, size, [Text(tokens, str(tmp_path / "a"))]).save(learned_path(home, vocabulary))
    with load(tiny, home, learned=True) as engine:
        done = answer(engine, depth=4)
    assert done.token_ids == plain.token_ids
    assert done.stats.rounds_by_source.get(DATASTORE, 0) > 0
    with load(tiny, home) as engine:
        assert DATASTORE not in answer(engine, depth=4).stats.rounds_by_source
    learned_path(home, vocabulary).write_bytes(b"nonsense")
    with load(tiny, home, learned=True) as engine, engine.session() as session:
        events = list(session.generate(PROMPT, max_tokens=4))
        assert any(isinstance(event, Notice) and "`edgespec memory learn`" in event.text for event in events)


def test_files_and_folders_are_learned_and_learning_again_replaces(
    tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    for name in ("a.txt", "b/c.md", ".git/d.txt", ".hidden", "node_modules/e.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"one two three {name}")
    (folder / "binary").write_bytes(b"a\0b")
    (folder / "latin1").write_bytes(b"caf\xe9")
    (folder / "huge").write_bytes(b"a" * 2_000_001)
    (folder / "empty").write_bytes(b"")
    (folder / "bom").write_bytes(b"\xef\xbb\xbfone two")
    if sys.platform != "win32":
        os.mkfifo(folder / "pipe")
        (folder / "link").symlink_to(folder / "a.txt")
        (folder / "loop").symlink_to(folder)
    own = learner(tiny, home)
    done = learn(own, tiny, folder)
    assert [Path(name).name for name in done.names] == ["a.txt", "bom", "c.md"]  # type: ignore[attr-defined]
    unreadable = {"unreadable": 1} if sys.platform != "win32" else {}
    assert dict(done.skipped) == {"binary": 2, "too_large": 1, **unreadable}  # type: ignore[attr-defined]
    assert own.known().names == done.names  # type: ignore[attr-defined]
    before = own.known()
    learn(own, tiny, folder, folder / "a.txt")
    assert own.known() == before
    (folder / "a.txt").unlink()
    learn(own, tiny, folder / "a.txt")  # gone, so its text goes too
    assert [Path(name).name for name in own.known().names] == ["bom", "c.md"]
    learn(own, tiny, folder / ".git" / "d.txt")  # named itself
    assert len(own.known().names) == 3
    assert own.forget([folder / "b"]).removed_files == 1
    assert own.forget([folder]).names == ()
    assert not own.known().path.exists()


def test_a_path_that_never_was_is_refused(tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="there is nothing at"):
        learn(learner(tiny, home), tiny, tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="is not a path"):
        learn(learner(tiny, home), tiny, Path("a\0b"))
    assert not home.root.exists()


def test_a_full_index_leaves_out_what_does_not_fit(tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("one two three four five")
    tokens = len(open_tokenizer(tiny.target).encode("one two three four five"))
    own = learner(tiny, home, most_tokens=2 * tokens + 2)
    done = learn(own, tiny, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert len(done.names) == 2  # type: ignore[attr-defined]
    assert dict(done.skipped) == {"no_room": 1}  # type: ignore[attr-defined]
    assert dict(learn(own, tiny, tmp_path / "c").skipped) == {"no_room": 1}  # type: ignore[attr-defined]
    assert len(own.known().names) == 2


def test_a_damaged_index_is_set_aside_and_learned_again(tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two three")
    own = learner(tiny, home)
    learn(own, tiny, tmp_path / "a")
    path = own.known().path
    path.write_bytes(path.read_bytes()[:-1])
    known = own.known()
    assert known.names == ()
    assert known.notice is not None
    assert "is damaged" in known.notice
    assert len(learn(own, tiny, tmp_path / "a").names) == 1  # type: ignore[attr-defined]


def test_an_index_beyond_the_limit_is_set_aside_unread(
    tiny: TinyModels, tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("one two three")
    own = learner(tiny, home)
    learn(own, tiny, tmp_path / "a")
    monkeypatch.setattr(text_learner, "MOST_TOKENS", 1)
    known = learner(tiny, home, most_tokens=1).known()
    assert known.names == ()
    assert "and at most 1 are stored" in (known.notice or "")


def test_two_vocabularies_have_two_files(tiny: TinyModels) -> None:
    one, two = read_model_file(tiny.target), read_model_file(tiny.stranger)
    assert vocabulary_digest(one.header) == vocabulary_digest(read_model_file(tiny.drafter).header)
    assert vocabulary_digest(one.header) != vocabulary_digest(two.header)
    assert kept_answers.MOST_TOKENS == 2**18
