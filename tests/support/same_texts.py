"""What is asked of a drafter that reads its target: no text depends on it, whatever a session does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from tests.support.tiny_models import answer

TOKENS = 90
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "cut": {"temperature": 1.1, "seed": 8, "top_k": 20, "repeat_penalty": 1.2},
}


class KeepsTexts:
    """What each such drafter has to do, for a module with fixtures ``engine`` and ``plain``."""

    least = 10  # guesses of an answer that are right

    @pytest.mark.parametrize("name", ASKED)
    @pytest.mark.parametrize("depth", [None, 1, 6])
    def test_the_text_is_plain_decodings(
        self, engine: Engine, plain: dict[str, tuple[int, ...]], name: str, depth: int | None
    ) -> None:
        with engine.session() as session:
            done = said(session, depth, **ASKED[name])
        assert done.token_ids == plain[name]
        assert done.stats.accepted > self.least

    def test_answers_at_a_time_have_the_same_texts(self, engine: Engine, plain: dict[str, tuple[int, ...]]) -> None:
        found = texts_at_a_time(engine)
        assert [ids for _, ids in found] == [plain[name] for name, _ in found]

    def test_branched_undone_and_saved_sessions_continue_like_plain_ones(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        (plain, none), (drafted, accepted) = (
            continued(engine, depth, tmp_path / f"{depth}.edgespec") for depth in (0, 5)
        )
        assert drafted == plain
        assert accepted > self.least >= none


def same_text_at_random(engine: Engine) -> bool:
    """Whether a drafter whose guesses are mostly wrong leaves an answer as it is, and drafts only where it may."""
    found = []
    for depth in (0, 4):
        with engine.session() as session:
            done = said(session, depth)
            assert (done.stats.proposed > 0) == (depth > 0)
            found.append(done.token_ids)
    return found[0] == found[1]


def said(session: Session, depth: int | None = None, prompt: str = "the people", **asked: Any) -> Done:
    return answer(session.generate(prompt, max_tokens=TOKENS, depth=depth, **asked))


def plain_texts(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The token ids of plain decoding, for each of ASKED."""
    found = {}
    for name, asked in ASKED.items():
        with engine.session() as session:
            found[name] = said(session, 0, **asked).token_ids
    return found


def texts_at_a_time(engine: Engine) -> list[tuple[str, tuple[int, ...]]]:
    """Each of ASKED twice, all in sessions that answer at the same time: its name and token ids."""

    def ask(name: str) -> tuple[str, tuple[int, ...]]:
        with engine.session() as session:
            return name, said(session, 4, **ASKED[name]).token_ids

    names = [*ASKED] * 2
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(ask, names))


def continued(engine: Engine, depth: int, path: Path) -> tuple[list[tuple[int, ...]], int]:
    """The token ids of a branch, behind an undone turn, and of the restored session; and what was accepted there."""
    with engine.session() as session:
        said(session, depth)
        with session.branch() as branch:
            found = [said(branch, depth, "other words").token_ids]
        said(session, depth, "some water")
        session.undo()
        found.append(said(session, depth, "many people").token_ids)
        session.save(path)
    with engine.restore(path) as restored:
        done = said(restored, depth, "and so on")
    return [*found, done.token_ids], done.stats.accepted
