"""Sessions of models whose layers keep the last positions only: the same answers after any rewind or restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.runtimes.native import rewinds
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import similar_drafter, write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer

LONG = "the people of the water " * 40


@pytest.fixture(scope="module")
def engine(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Target and drafter have windows of 40 positions in five of six layers."""
    require_native()
    folder = tmp_path_factory.mktemp("windowed")
    target = write_tiny_gguf(
        folder / "target.gguf", architecture="gemma3", window=40, layers=6, head_length=64, quant="Q8_0", seed=3
    )
    drafter = similar_drafter(target, folder / "drafter.gguf", 0.1)
    with tiny.load_speculating(target, draft=str(drafter), runtime="native", draft_runtime="native") as engine:
        yield engine


class Said:
    """The answers of a session, and how many tokens of each prompt were cached."""

    def __init__(self, engine: Engine, folder: Path, depth: int | None) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.cached: list[int] = []
        self._depth = depth
        path = folder / "saved"
        with engine.session(system="be kind") as session:
            self.ask(session, LONG)
            self.ask(session, "and what is one")
            with session.branch() as branch:
                self.ask(branch, LONG)
                branch.undo()
                branch.undo()
                self.ask(branch, "two")  # further back than the last positions
            session.save(path)
            self.ask(session, LONG + "of one")
            with engine.restore(path) as restored:
                self.ask(restored, LONG + "of one")
            session.undo()
            session.undo()
            session.save(path)
            with engine.restore(path) as restored:
                self.ask(restored, "three")
            self.ask(session, "three")

    def ask(self, session: Session, prompt: str) -> None:
        done = answer(session.generate(prompt, max_tokens=24, depth=self._depth))
        self.tokens.append(done.token_ids)
        self.cached.append(done.stats.cached_tokens)


def test_a_session_says_the_same_as_with_caches_that_keep_everything(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Said(engine, tmp_path, 0)
    monkeypatch.setattr(rewinds, "KEPT_BACK", 80)
    monkeypatch.setattr(rewinds, "SAVED_BACK", 40)
    monkeypatch.setattr(rewinds, "_STEP", 16)
    drafting = Said(engine, tmp_path, None)
    assert drafting.tokens == plain.tokens
    assert all(plain.cached[1:])
    again = [index for index, count in enumerate(drafting.cached) if count == 0]
    assert again == [0, 3, 6, 7], "after far rewinds, and of a file without a cache, all is read again"


def test_a_beginning_is_kept_only_while_the_cache_has_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewinds, "KEPT_BACK", 80)
    monkeypatch.setattr(rewinds, "SAVED_BACK", 40)
    monkeypatch.setattr(rewinds, "_STEP", 16)
    with engine.session() as session:
        answer(session.generate(LONG, max_tokens=4))
        tokens = list(session._conversation.history)
        assert isinstance(session._target, NativeSequence)
        length = session._target.length
        owner = session._owner
        assert session.cache_sizes(owner, tokens[:length]) == session._target.part_sizes(length)
        assert session.cache_sizes(owner, tokens[: length - 200]) is None
