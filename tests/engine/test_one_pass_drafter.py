"""A one-pass drafter in an engine: the target's text, one forward a round, its calibration and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Round
from edgespec.engine.pair.calibration_report import calibration_report
from edgespec.files.gguf.records import MASK_TOKEN_KEY
from edgespec.files.home import Home
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.interfaces.model import Model
from edgespec.interfaces.policy import RoundRecord
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native.model import NativeSettings
from tests.support.loading import load_model, load_native
from tests.support.processor import processor_runtimes
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_models import TinyModels, invent_measurements, read_all, require_speculation
from tests.support.trimmed_folder import write_trimmed_folder

MASK = 17
SAMPLINGS = {
    "greedy": Sampling(),
    "keyed": Sampling(temperature=0.8, seed=4, top_k=40),
    "penalised": Sampling(temperature=0.7, seed=5, repeat_penalty=1.2, top_p=0.9),
}


@pytest.fixture(scope="module")
def one_pass(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny drafter with a mask token: right about the next token as often, by chance about the others."""
    path = tmp_path_factory.mktemp("one-pass") / "one-pass.gguf"
    return rewrite_gguf(tiny.drafter, path, keys={MASK_TOKEN_KEY: MASK})


def trimmed(path: Path) -> Path:
    """The same drafter with three of four rows of its head: the mask has none."""
    assert MASK % 4 == 1
    return write_trimmed_folder(path, path.with_name("trimmed"), [token for token in range(640) if token % 4 != 1])


@pytest.fixture(scope="module", params=[*processor_runtimes(), "trimmed"])
def engine(request: pytest.FixtureRequest, tiny: TinyModels, one_pass: Path) -> Iterator[Engine]:
    """Drafts five tokens a round, regardless of cost."""
    kind = request.param
    path = trimmed(one_pass) if kind == "trimmed" else one_pass
    runtime = "auto" if kind == "trimmed" else kind
    with tiny.load(draft=str(path), draft_runtime=runtime, lookup=False, depth=5) as engine:
        require_speculation(engine, 5)
        yield engine


def say(
    engine: Engine, sampling: Sampling, depth: int | None = None, tokens: int = 60
) -> tuple[Done, list[RoundRecord]]:
    with engine.session() as session:
        events, done = read_all(session.generate("hello world", max_tokens=tokens, sampling=sampling, depth=depth))
    return done, [event.record for event in events if isinstance(event, Round)]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_with_a_one_pass_drafter_the_text_is_the_targets_in_one_forward_a_round(
    engine: Engine, sampling: Sampling
) -> None:
    plain, _ = say(engine, sampling, depth=0)
    drafted, rounds = say(engine, sampling)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0
    assert MASK not in drafted.token_ids
    assert {record.draft_forwards for record in rounds if record.source == "model"} == {1}
    assert max(record.depth for record in rounds) == 5


def test_a_one_pass_drafters_plan_says_so(engine: Engine) -> None:
    assert engine.pair.pool.drafter_model().facts.mask_id == MASK
    assert "the drafter drafts all tokens in one forward" in engine.plan.reasons


def test_under_the_rejection_rule_a_one_pass_drafters_tokens_are_accepted(engine: Engine) -> None:
    drafted, rounds = say(engine, Sampling(temperature=0.8, seed=4, rule="rejection"))
    assert len(drafted.token_ids) == 60
    assert drafted.stats.accepted > 0
    assert drafted.stats.invalid_proposals == 0
    assert {record.draft_forwards for record in rounds if record.source == "model"} == {1}


def loaded(path: Path, runtime: str) -> Model:
    if runtime == "native":
        return load_native(path, NativeSettings(threads=1))
    return load_model(path, LlamaSettings(threads=1))


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_the_chain_is_the_argmax_of_rows_computed_one_forward_at_a_time(one_pass: Path, runtime: str) -> None:
    text, model = [1, 280, 290, 300, 310], loaded(one_pass, runtime)
    request = DraftRequest(
        chooser=Chooser(Sampling()), vocabulary_size=model.facts.vocabulary_size, context_length=64
    )
    state = ModelDrafter(lambda: model).start(request)
    for extra in ([], [305, 306]):
        proposal = state.propose(Context([*text, *extra]), 6)
        wanted = []
        for place in range(6):
            sequence = model.open(64)
            row = sequence.forward([*text, *extra, *[MASK] * place], 1).logits(0)
            row[MASK] = -np.inf
            wanted.append(int(np.argmax(row)))
            sequence.close()
        assert list(proposal.tokens) == wanted
        assert proposal.forwards == 1
    state.close()
    model.close()


def test_with_the_default_policy_the_text_is_the_targets(one_pass: Path, tiny: TinyModels) -> None:
    with tiny.load_speculating(draft=str(one_pass), lookup=False) as engine:
        plain, _ = say(engine, Sampling(), depth=0, tokens=120)
        drafted, rounds = say(engine, Sampling(), tokens=120)
        assert drafted.token_ids == plain.token_ids
        # A reading that took too long drafts nothing, and in real time a tiny drafter soon stops.
        assert {record.draft_forwards for record in rounds} <= {0, 1}
        assert engine.plan.mode == "serial"


def test_an_unmeasured_one_pass_drafter_is_not_priced_and_the_plan_says_so(
    tiny: TinyModels, one_pass: Path, home: Home
) -> None:
    with tiny.load(draft=str(one_pass), lookup=False, store_home=home) as engine:
        assert "model" not in engine.pair.costs().drafts
        assert engine.plan.mode == "plain"
        invent_measurements(engine)
        cost = engine.pair.costs().drafts["model"]
        assert cost.one_pass is not None
        assert cost.token_s == 0.0
        assert engine.plan.mode == "serial"
        assert "the drafter drafts all tokens in one forward" in engine.plan.reasons


@pytest.mark.slow
def test_calibration_times_the_forward_of_a_one_pass_drafter(tiny: TinyModels, one_pass: Path, home: Home) -> None:
    with tiny.load(draft=str(one_pass), lookup=False, calibrate=True, store_home=home, context=256) as engine:
        assert not engine.unmeasured
        times = engine.pair.measurements.drafter_times()
        assert times is not None
        assert times.widths == tuple(range(1, 13))
        cost = engine.pair.costs().drafts["model"]
        assert cost.one_pass == times.curves.curves[0]
        report = calibration_report(engine.pair, None)
        assert report.extra["drafting"]["token_s"] is None
        assert report.extra["drafting"]["one_pass"] is True
        assert any("ms for 8 tokens in one forward of one-pass" in line for line in report.lines)


@pytest.mark.slow
def test_a_one_pass_drafter_drafts_in_a_separate_process(tiny: TinyModels, one_pass: Path) -> None:
    with tiny.load(draft=str(one_pass), lookup=False, depth=4, draft_isolation="process") as engine:
        require_speculation(engine, 4)
        model = engine.pair.pool.drafter_model()
        assert model.wait(60.0)
        plain, _ = say(engine, Sampling(), depth=0)
        drafted, rounds = say(engine, Sampling())
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.accepted > 0
        assert {record.draft_forwards for record in rounds if record.source == "model"} == {1}
