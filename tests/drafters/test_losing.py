"""A model drafter whose process loads, is lost, restarts or is given up during an answer."""

from __future__ import annotations

import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.combination import Combination
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.drafters.trimmed import TrimmedHeadDrafter
from edgespec.errors import CancelledError, ClosedError, WorkerLostError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest
from edgespec.interfaces.model import LoadsInBackground
from edgespec.interfaces.rows import Rows
from edgespec.planning.depth.base import FixedDepth
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults

PROMPT = [3, 1, 4, 1, 5]
LOST = "the worker process of fake is lost: it was ended by SIGKILL"
REQUEST = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=12, context_length=128)


def lost_at(forward: int | None) -> FakeModel:
    """A model whose process ends in that forward (from 1) of a sequence."""
    return FakeModel(seed=1, faults=Faults(raise_at=forward, error=lambda: WorkerLostError(LOST)))


class Process:
    """A model that a test makes available or unavailable. ``opened`` counts the sequences requested."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.waits_because: str | None = None
        self.off: str | None = None
        self.lost_while_opening = False
        self.opened = 0

    @property
    def facts(self) -> object:
        return self.model.facts

    def load(self) -> None:
        """Do nothing: the test makes the model available."""

    def wait(self, timeout_s: float | None = None) -> bool:
        raise AssertionError("a round never waits")

    def open(self, context_length: int) -> FakeSequence:
        self.opened += 1
        assert self.waits_because is None
        if self.lost_while_opening:
            self.waits_because = "it comes back"
            raise WorkerLostError(LOST)
        if self.off is not None:
            raise WorkerLostError(self.off)
        return self.model.open(context_length)

    def close(self) -> None:
        self.model.close()


def started(process: Process) -> ModelDraftState:
    assert isinstance(process, LoadsInBackground)
    return ModelDrafter(lambda: process).start(REQUEST)


def drafted(state: ModelDraftState, tokens: list[int] = PROMPT, depth: int = 3) -> tuple[int, ...]:
    return state.propose(Context(tokens), depth).tokens


EXPECTED = started(Process(FakeModel(seed=1))).propose(Context(PROMPT), 3).tokens


def test_while_the_drafter_loads_rounds_do_not_wait_and_have_no_proposals() -> None:
    process = Process(FakeModel(seed=1))
    process.waits_because = "fake is still loading"
    state = started(process)
    for _ in range(3):
        assert state.propose(Context(PROMPT), 3) is NOTHING
        assert state.silent_because == "fake is still loading"
    assert process.opened == 0
    process.waits_because = None
    assert drafted(state) == EXPECTED
    assert state.silent_because is None


def test_a_drafter_that_has_loaded_is_no_longer_reported_as_loading() -> None:
    process = ToBeLoaded(FakeModel(seed=1))
    state = started(process)
    assert state.silent_because is None, "no proposal was requested"
    state.load()
    assert state.silent_because == "fake is still loading"
    process.waits_because = None
    assert state.silent_because is None, "also if the policy lets it draft nothing"


@pytest.mark.parametrize("forward", [1, 2, 3])
def test_losing_the_drafters_process_in_any_forward_does_not_end_the_answer(forward: int) -> None:
    process = Process(lost_at(forward))
    state = started(process)
    assert state.propose(Context(PROMPT), 3) is NOTHING
    assert state.silent_because == LOST
    assert [sequence.closed for sequence in process.model.sequences] == [True]
    assert state.lag(Context(PROMPT)) == len(PROMPT) - 1, "everything must be read again"
    process.waits_because = f"{LOST}; it is being started again"
    for _ in range(3):
        assert state.propose(Context(PROMPT), 3) is NOTHING
        assert state.silent_because == process.waits_because
    assert process.opened == 1
    process.waits_because, process.model = None, FakeModel(seed=1)
    assert drafted(state) == EXPECTED
    assert state.silent_because is None
    assert drafted(state, [*PROMPT, *EXPECTED[:2]], 1) == EXPECTED[2:]
    assert process.opened == 2


def test_a_drafter_whose_process_is_given_up_is_reported_once_and_stays_off() -> None:
    process = Process(lost_at(2))
    combined = Combination([ModelDrafter(lambda: process)], FixedDepth(3)).start(REQUEST)
    assert combined.propose(Context(PROMPT), 3) is NOTHING
    assert (combined.failures, combined.silences) == ({}, {"model": LOST})
    process.off = "fake is off: its worker process was lost twice"
    for _ in range(3):
        assert combined.propose(Context(PROMPT), 3) is NOTHING
    assert combined.failures == {"model": process.off}
    assert process.opened == 2


def test_a_process_lost_while_opening_a_sequence_is_waited_for() -> None:
    process = Process(FakeModel(seed=1))
    process.lost_while_opening = True
    state = started(process)
    assert state.propose(Context(PROMPT), 3) is NOTHING
    assert state.silent_because == "it comes back"
    process.lost_while_opening, process.waits_because = False, None
    assert drafted(state) == EXPECTED


def test_a_drafter_model_that_stays_lost_raises_at_the_next_proposal() -> None:
    model = lost_at(1)
    state = ModelDrafter(lambda: model).start(REQUEST)
    assert state.propose(Context(PROMPT), 3) is NOTHING

    def gone(_context_length: int) -> FakeSequence:
        raise WorkerLostError(LOST)

    model.open = gone  # type: ignore[method-assign]
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        state.propose(Context(PROMPT), 3)


def test_a_cancel_reaches_a_restarted_process() -> None:
    process = Process(lost_at(1))
    state = started(process)
    state.cancel()
    state.reset_cancel()
    drafted(state)
    process.waits_because, process.model = "it comes back", FakeModel(seed=1)
    drafted(state)
    state.cancel()
    process.waits_because = None
    with pytest.raises(CancelledError):
        drafted(state)
    state.reset_cancel()
    assert drafted(state) == EXPECTED
    state.close()
    assert process.model.sequences[-1].closed


def test_a_trimmed_drafter_reports_that_its_process_is_loading() -> None:
    process = Process(FakeModel(seed=1))
    process.waits_because = "fake is still loading"
    state = TrimmedHeadDrafter(ModelDrafter(lambda: process), None, range(12)).start(REQUEST)
    assert state.propose(Context(PROMPT), 3) is NOTHING
    assert state.silent_because == "fake is still loading"
    process.waits_because = None
    assert state.propose(Context(PROMPT), 3).tokens == EXPECTED
    assert state.silent_because is None


def test_a_whole_row_is_read_from_the_worker_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = started(Process(FakeModel(seed=1)))
    monkeypatch.setattr(Rows, "logits", lambda *_arguments: pytest.fail("a row was read"))
    assert drafted(state) == EXPECTED


# ---------------------------------------------------------------------------------------- loaded when asked to


OTHER_TEXT = Context([9] * 64)  # one window


class ToBeLoaded(Process):
    """A model that is available some rounds after its load was requested."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.waits_because = "fake is not loaded"
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        if self.waits_because == "fake is not loaded":
            self.waits_because = "fake is still loading"


def test_a_drafter_loads_when_the_policy_allows_it_and_drafts_once_loaded() -> None:
    model, policy = ToBeLoaded(FakeModel(seed=1)), FixedDepth(0)
    combined = Combination([ModelDrafter(lambda: model)], policy).start(REQUEST)
    assert combined.propose(Context(PROMPT), 3) is NOTHING
    assert (model.loads, combined.silences) == (0, {}), "no load was requested"
    combined.depth = FixedDepth(3)
    for _ in range(3):
        assert combined.propose(Context(PROMPT), 3) is NOTHING
        assert combined.silences == {"model": "fake is still loading"}
    assert model.loads > 0
    assert model.opened == 0
    model.waits_because = None
    assert combined.propose(Context(PROMPT), 3).tokens == EXPECTED
    assert (combined.failures, combined.silences) == ({}, {})


def test_a_failed_load_is_reported_and_not_repeated() -> None:
    model = ToBeLoaded(FakeModel(seed=1))
    combined = Combination([ModelDrafter(lambda: model)], FixedDepth(3)).start(REQUEST)
    assert combined.propose(Context(PROMPT), 3) is NOTHING
    model.waits_because, model.off = None, "no memory for 1.00 GiB of weights"
    for _ in range(3):
        assert combined.propose(Context(PROMPT), 3) is NOTHING
    assert combined.failures == {"model": "no memory for 1.00 GiB of weights"}
    assert (model.loads, model.opened) == (1, 1)


def test_a_loaded_model_drafts_without_a_load_request() -> None:
    model = ToBeLoaded(FakeModel(seed=1))
    model.waits_because = None
    assert started(model).ready
    combined = Combination([ModelDrafter(lambda: model)], FixedDepth(3)).start(REQUEST)
    assert combined.propose(Context(PROMPT), 3).tokens == EXPECTED
    assert model.loads == 0


def test_the_whole_drafter_loads_when_the_trimmed_head_lacks_the_text() -> None:
    trimmed, whole = ToBeLoaded(FakeModel(seed=1)), ToBeLoaded(FakeModel(seed=1))
    drafter = TrimmedHeadDrafter(ModelDrafter(lambda: trimmed), ModelDrafter(lambda: whole), range(2))
    state = drafter.start(REQUEST)
    assert not state.ready
    state.load()
    assert (trimmed.loads, whole.loads) == (1, 0)
    assert state.silent_because == "fake is still loading"
    trimmed.waits_because = None
    assert state.ready
    state.lag(OTHER_TEXT)
    assert state.escaped
    assert not state.ready
    state.load()
    assert (trimmed.loads, whole.loads) == (1, 1)
    assert state.propose(OTHER_TEXT, 3) is NOTHING
    assert state.silent_because == "fake is still loading"
    whole.waits_because = None
    assert state.ready
    assert len(state.propose(OTHER_TEXT, 3).tokens) == 3
    assert (trimmed.opened, whole.opened) == (0, 1)


def test_a_whole_drafter_that_cannot_load_leaves_the_answer_without_guesses() -> None:
    trimmed = ToBeLoaded(FakeModel(seed=1))
    trimmed.waits_because = None

    def gone() -> FakeModel:
        raise ClosedError("this engine is gone")

    state = TrimmedHeadDrafter(ModelDrafter(lambda: trimmed), ModelDrafter(gone), range(2)).start(REQUEST)
    state.lag(OTHER_TEXT)
    assert state.escaped
    assert state.ready, "there is no drafter to wait for"
    assert state.propose(OTHER_TEXT, 3) is NOTHING
    assert (state.silent_because or "").endswith("the untrimmed drafter failed: this engine is gone")
