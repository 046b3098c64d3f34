"""A drafter with another vocabulary in an engine: the target's text, the plan, its room, and when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.bench.draft_log import predictions
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Round
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.errors import ContextFullError, InvalidRequestError
from edgespec.files.gguf.records import MASK_TOKEN_KEY
from edgespec.files.home import Home
from edgespec.planning.depth.price import RISK
from edgespec.runtimes.translated import TranslatedSequence
from tests.support.calibrating import shorten_calibration
from tests.support.foreign_vocabularies import as_byte_pairs, in_another_order
from tests.support.other_programs import User
from tests.support.processor import processor_runtimes
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import DRAFT_S, FORWARD_S, TinyModels, answer, read_all, require_speculation
from tests.support.trimmed_folder import write_trimmed_folder

SAMPLINGS = {
    "greedy": Sampling(),
    "keyed": Sampling(temperature=0.8, seed=4, top_k=40),
    "penalised": Sampling(temperature=0.7, seed=5, repeat_penalty=1.2, top_p=0.9),
    "greedy with penalties": Sampling(repeat_penalty=1.2),
}
FOREIGN: dict[str, Callable[[Path, Path], Path]] = {
    "another order": in_another_order,
    "fewer words": lambda source, path: in_another_order(source, path, keep=lambda text: len(text) < 5, renamed="@"),
    "byte pairs": as_byte_pairs,
}


@pytest.fixture(scope="module")
def foreign(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny drafter in three other vocabularies."""
    folder = tmp_path_factory.mktemp("foreign")
    return {kind: make(tiny.drafter, folder / f"{kind}.gguf") for kind, make in FOREIGN.items()}


def say(engine: Engine, sampling: Sampling, depth: int | None = None) -> tuple[tuple[int, ...], list[Round]]:
    with engine.session() as session:
        events, done = read_all(session.generate("hello world", max_tokens=60, sampling=sampling, depth=depth))
    assert done.stats.invalid_proposals == 0
    return done.token_ids, [event for event in events if isinstance(event, Round)]


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("runtime", processor_runtimes())
def test_the_text_is_the_targets(tiny: TinyModels, foreign: dict[str, Path], kind: str, runtime: str) -> None:
    with tiny.load(
        draft=str(foreign[kind]), draft_runtime=runtime, draft_weights="file", lookup=False, depth=4
    ) as engine:
        require_speculation(engine, 4)
        accepted = 0
        for sampling in SAMPLINGS.values():
            plain, _ = say(engine, sampling, depth=0)
            drafted, rounds = say(engine, sampling)
            assert drafted == plain
            accepted += sum(each.record.accepted for each in rounds)
        # Random weights guess by chance after a word in pieces that they do not know.
        assert accepted > (0 if kind == "fewer words" else 20)
        assert "drafter_translated" in {why.code for why in engine.plan.why}


def rounds_with(tiny: TinyModels, home: Home, draft: Path) -> list[tuple[int, int]]:
    """Depth and accepted guesses of each round, of all samplings."""
    # Nothing that was learned of one drafter alone: its times, its acceptance, which tokens it scores first.
    fixed: dict[str, object] = {"depth": 3, "depth_policy": "fixed", "mode": "serial", "draft_head": "whole"}
    with tiny.load(draft=str(draft), draft_weights="file", lookup=False, store_home=home, **fixed) as engine:
        require_speculation(engine, 3)
        engine.load_drafter()
        records = [each.record for sampling in SAMPLINGS.values() for each in say(engine, sampling)[1]]
    return [(record.depth, record.accepted) for record in records]


def test_in_another_order_it_guesses_what_it_guesses_in_the_targets(
    tiny: TinyModels, home: Home, foreign: dict[str, Path]
) -> None:
    one, other = (rounds_with(tiny, home, draft) for draft in (tiny.drafter, foreign["another order"]))
    assert one == other
    assert sum(accepted for _, accepted in one) > 0


def test_in_a_separate_process_it_is_translated_too(tiny: TinyModels, foreign: dict[str, Path]) -> None:
    path = str(foreign["byte pairs"])
    with tiny.load(draft=path, draft_isolation="process", lookup=False, depth=3) as engine:
        require_speculation(engine, 3)
        engine.load_drafter()
        plain, _ = say(engine, Sampling(), depth=0)
        drafted, rounds = say(engine, Sampling())
        assert drafted == plain
        assert sum(each.record.accepted for each in rounds) > 0


def test_under_the_rejection_rule_its_tokens_are_accepted(tiny: TinyModels, foreign: dict[str, Path]) -> None:
    with tiny.load(draft=str(foreign["fewer words"]), lookup=False, depth=3) as engine:
        require_speculation(engine, 3)
        text, rounds = say(engine, Sampling(temperature=0.8, seed=4, rule="rejection"))
        assert len(text) == 60
        assert sum(each.record.accepted for each in rounds) > 0


def test_a_text_that_outgrows_the_drafters_room_continues_without_it(
    tiny: TinyModels, foreign: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = TranslatedSequence.forward, []

    def forward(self: TranslatedSequence, tokens: list[int], rows: int) -> object:
        if self.length > 40:
            full.append(self.length)
            raise ContextFullError("no more room")
        return real(self, tokens, rows)

    monkeypatch.setattr(TranslatedSequence, "forward", forward)
    with tiny.load(draft=str(foreign["byte pairs"]), lookup=False, depth=3) as engine:
        require_speculation(engine, 3)
        plain, _ = say(engine, Sampling(), depth=0)
        with engine.session() as session:
            events, done = read_all(session.generate("hello world", max_tokens=60))
            assert session.speculation_off == "the text is longer than the context of byte pairs"
        assert done.token_ids == plain
        rounds = [event.record for event in events if isinstance(event, Round)]
        assert (rounds[-1].depth, bool(full)) == (0, True)
        lost = [each for each in rounds if each.source == "model" and not each.depth]
        assert len(lost) == len(full)
        assert all(each.sync_s > 0 for each in lost), "that time is counted"


@pytest.mark.parametrize("kind", FOREIGN)
def test_its_agreement_is_measured_in_the_targets_tokens(
    tiny: TinyModels, foreign: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shorten_calibration(monkeypatch)
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, source: source not in _self.priors)
    with tiny.load(draft=str(foreign[kind]), draft_weights="file", store_home=Home(tmp_path / "home")) as engine:
        assert engine.pair.measurements.unproven
        engine.calibrate()
        assert engine.pair.measurements.drafter_failure is None
        assert not engine.pair.measurements.unproven


def test_the_map_is_kept_with_the_prepared_weights(tiny: TinyModels, foreign: dict[str, Path], home: Home) -> None:
    with tiny.load(draft=str(foreign["byte pairs"]), store_home=home) as engine:
        drafter = engine.pair.pool.drafter
        assert drafter is not None
        assert drafter.file.prepared_folder is not None
        assert drafter.form.requantized, "however small it is"
        assert [path.suffix for path in drafter.file.prepared_folder.glob("tokens-*")] == [".map"]


def test_a_drafter_that_is_never_right_stops_and_says_why(tiny: TinyModels, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=91, quant="Q8_0", heads=2, kv_heads=1)
    wrong = in_another_order(other, tmp_path / "wrong.gguf")
    with tiny.load_speculating(draft=str(wrong), lookup=False) as engine, engine.session() as session:
        require_speculation(engine)
        plain = answer(session.generate("hello world", max_tokens=200, depth=0))
        session.clear()
        drafted = answer(session.generate("hello world", max_tokens=200))
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.accepted < 5
        assert drafted.stats.proposed * DRAFT_S < RISK * 200 * FORWARD_S, "what it may lose is a share of the answer"
        assert drafted.speculation_off_code == "not_paying_now"


# ------------------------------------------------------------------------------------------------ refused drafters


def test_a_vocabulary_that_shares_too_little_is_refused_in_words(tiny: TinyModels) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        tiny.load(draft=str(tiny.stranger), depth=3)
    assert "stranger has another vocabulary: " in refused.value.message
    assert refused.value.message.endswith("% of the tokens of a sample text, and can draft from 90% on")


def test_a_trimmed_or_one_pass_drafter_with_another_vocabulary_is_refused(
    tiny: TinyModels, foreign: dict[str, Path], tmp_path: Path
) -> None:
    path = foreign["another order"]
    trimmed = write_trimmed_folder(path, tmp_path / "trimmed", range(0, 600, 2))
    one_pass = rewrite_gguf(path, tmp_path / "one-pass.gguf", keys={MASK_TOKEN_KEY: 17})
    for draft, why in (
        (trimmed, "a drafter with a trimmed head needs the target's"),
        (one_pass, "a drafter that drafts all tokens in one forward needs the target's"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            tiny.load(draft=str(draft))
        assert refused.value.message.endswith(f"; {why}")


# -------------------------------------------------------------------------------------------------- found drafters


def test_a_drafter_with_another_vocabulary_is_found_and_its_note_is_kept(
    user: User, tiny: TinyModels, foreign: dict[str, Path], home: Home
) -> None:
    user.to_lm_studio("x/foreign.gguf", foreign["byte pairs"].read_bytes())
    for _ in range(2):
        with Engine.load(str(tiny.slow), threads=1, store_home=home) as engine:
            drafter = engine.pair.pool.drafter
            assert drafter is not None
            assert drafter.file.name == "foreign"
            assert drafter.file.token_map is not None
            assert engine.pair.request.drafters[0].translated == drafter.file.token_map.coverage
    assert '"translated": {"' in home.file_notes.read_text().replace("\n", "").replace("  ", "")


def test_of_equal_files_the_one_with_the_targets_vocabulary_drafts(
    user: User, tiny: TinyModels, foreign: dict[str, Path], home: Home
) -> None:
    user.to_lm_studio("x/foreign.gguf", foreign["another order"].read_bytes())
    user.to_lm_studio("x/own.gguf", tiny.drafter.read_bytes())
    with Engine.load(str(tiny.slow), threads=1, store_home=home) as engine:
        drafter = engine.pair.pool.drafter
        assert drafter is not None
        assert drafter.file.name == "own"
        (other,) = engine.considered_drafters
        assert other.verdict.code == "other_drafter"


def test_the_log_of_predictions_has_room_for_a_text_that_takes_more_of_its_tokens(
    tiny: TinyModels, foreign: dict[str, Path]
) -> None:
    with tiny.load(draft=str(foreign["fewer words"]), draft_weights="file") as engine:
        engine.load_drafter()
        text = engine.tokenizer.encode("the water is the water")
        drafter = engine.pair.pool.drafter_in_targets_tokens()
        with closing(drafter.open(len(text))) as sequence, pytest.raises(ContextFullError):
            sequence.forward(text, 0)
        assert len(predictions(drafter, text[:1], text[1:])) == len(text) - 1
