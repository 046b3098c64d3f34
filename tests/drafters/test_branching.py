"""The model drafter's alternatives and branches, and its caches as the text takes one branch or another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Purpose, Sampling, distribution, draw, request_of
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.drafters.trimmed import TrimmedHeadDrafter
from edgespec.errors import CancelledError, ClosedError, EdgespecError, ForwardError, MemoryLimitError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, DraftState, Proposal
from edgespec.interfaces.drawing import penalised
from edgespec.interfaces.policy import Allowance
from edgespec.interfaces.rows import Distribution
from edgespec.planning.depth.base import FixedDepth
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults
from tests.support.gates import Gate
from tests.support.scripted_drafters import Raising, Scripted

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling()
REJECTION = Sampling(temperature=1.0, seed=3, rule="rejection")
REQUEST = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=12, context_length=64)


def started(model: FakeModel, sampling: Sampling = GREEDY, context_length: int = 64) -> ModelDraftState:
    request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=12, context_length=context_length)
    return ModelDrafter(lambda: model).start(request)


def likeliest(model: FakeModel, tokens: list[int], depth: int) -> list[int]:
    so_far = list(tokens)
    for _ in range(depth):
        so_far.append(int(model.scores(so_far).argmax()))
    return so_far[len(tokens) :]


def wanting(tokens: list[int], committed: int | None = None) -> Context:
    return Context(tokens, committed, wants_alternatives=1)


def seconds(proposal: Proposal) -> list[int]:
    assert all(len(others) == 1 for others in proposal.alternatives)
    return [others[0][0] for others in proposal.alternatives]


def without(own: Distribution, token: int) -> Distribution:
    return Distribution(own.ids[own.ids != token], own.probs[own.ids != token])


# --------------------------------------------------------------------------------------------------- alternatives


def test_alternatives_are_not_computed_unless_requested() -> None:
    state = started(FakeModel(seed=1))
    assert state.propose(Context(PROMPT), 3).alternatives == ()


@pytest.mark.parametrize("gate", [None, Gate()])
def test_the_greedy_alternative_is_the_second_best_score(gate: Gate | None) -> None:
    model = FakeModel(seed=1)
    proposal = started(model).propose(wanting(PROMPT), 3, gate)
    so_far = list(PROMPT)
    for token, other in zip(proposal.tokens, seconds(proposal), strict=True):
        best, second = model.scores(so_far).argsort()[::-1][:2].tolist()
        assert (token, other) == (best, second)
        so_far.append(token)
    assert proposal.cut(2).alternatives == proposal.alternatives[:2]


def test_with_shared_noise_the_alternative_is_the_next_draw_of_the_same_noise() -> None:
    model, sampling = FakeModel(seed=1, spread=2.0), Sampling(temperature=1.0, seed=3)
    proposal = started(model, sampling).propose(wanting(PROMPT), 8)
    so_far, differs = list(PROMPT), 0
    for token, other in zip(proposal.tokens, seconds(proposal), strict=True):
        rest = without(distribution(model.scores(so_far), sampling, so_far), token)
        assert other == draw(rest, 3, len(so_far), Purpose.TOKEN)
        differs += other != rest.ranked(1)[0][0]
        so_far.append(token)
    assert differs


def test_under_the_rejection_rule_the_alternative_is_the_likeliest_other_token() -> None:
    model = FakeModel(seed=1, spread=2.0)
    proposal = started(model, REJECTION).propose(wanting(PROMPT), 8)
    so_far = list(PROMPT)
    for token, other in zip(proposal.tokens, seconds(proposal), strict=True):
        rest = without(distribution(model.scores(so_far), REJECTION, so_far), token)
        assert other == rest.ranked(1)[0][0]
        so_far.append(token)


@pytest.mark.parametrize("rule", ["keyed", "rejection"])
def test_with_a_single_possible_token_there_is_no_alternative(rule: str) -> None:
    only = Sampling(temperature=1.0, top_k=1, rule=rule)  # type: ignore[arg-type]
    proposal = started(FakeModel(seed=1), only).propose(wanting(PROMPT), 3)
    assert proposal.alternatives == ((),) * 3


def test_with_penalties_the_greedy_alternative_is_second_by_penalised_score() -> None:
    model, options = FakeModel(seed=1), Sampling(repeat_penalty=1.2)
    proposal = started(model, options).propose(wanting(PROMPT), 3)
    so_far = list(PROMPT)
    for token, other in zip(proposal.tokens, seconds(proposal), strict=True):
        own = penalised(model.scores(so_far), request_of(options, so_far))
        assert [token, other] == np.argsort(-own, kind="stable")[:2].tolist()
        so_far.append(token)


# ------------------------------------------------------------------------------------------------------ a branch


@pytest.mark.parametrize("can_fork", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, REJECTION])
def test_a_branch_is_the_likeliest_continuation_of_its_alternative(sampling: Sampling, can_fork: bool) -> None:
    model = FakeModel(seed=1, can_fork=can_fork)
    state = started(model, sampling)
    assert state.drafts_branches
    assert state.branch(Context(PROMPT), 3) is NOTHING, "before the first chain there is nothing to branch from"
    state.propose(Context(PROMPT), 3)
    assert state.forks is can_fork
    other = [*PROMPT, 7]
    branch = state.branch(wanting(other, len(PROMPT)), 3, Gate())
    assert list(branch.tokens) == likeliest(model, other, 3)
    assert branch.draft_probs is None
    assert (branch.drafted_by, branch.forwards, len(branch.confidences)) == ("model", 3, 3)
    so_far = list(other)
    for token, second in zip(branch.tokens, seconds(branch), strict=True):
        assert second == int(model.scores(so_far).argsort()[-2])
        so_far.append(token)
    assert state.branch(Context(other, len(PROMPT)), 2, Gate(forwards=0)).tokens == branch.tokens[:1]
    assert state.branch(Context(other, len(PROMPT)), 0) is NOTHING


def test_a_branch_on_a_fork_leaves_the_chain_cached() -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model)
    chain = list(state.propose(Context(PROMPT), 3).tokens)
    state.branch(Context([*PROMPT, (chain[0] + 1) % 12], len(PROMPT)), 3)
    main, fork = model.sequences
    assert main.tokens == [*PROMPT, *chain[:2]]
    assert fork.tokens[: len(PROMPT)] == PROMPT
    assert fork.log.fed[0] == ((chain[0] + 1) % 12,), "the shared prefix is not read again"
    text = [*PROMPT, *chain, 2]
    state.propose(Context(text), 2)
    assert main.log.fed[-2] == (chain[-1], 2)
    assert fork.closed, "the text took the other course"


def test_drafting_continues_on_the_cache_of_the_branch_that_the_text_takes() -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model)
    chain = list(state.propose(Context(PROMPT), 3).tokens)
    others = [(chain[0] + 1) % 12, (chain[0] + 2) % 12]
    branches = [list(state.branch(Context([*PROMPT, other], len(PROMPT)), 3).tokens) for other in others]
    main, first, second = model.sequences
    assert state.lag(Context([*PROMPT, others[1], *branches[1]])) == 0
    text = [*PROMPT, others[1], *branches[1]]
    proposal = state.propose(Context(text, len(PROMPT) + 1), 2)
    assert list(proposal.tokens) == likeliest(model, text, 2)
    assert second.log.fed[-2] == (branches[1][-1],)
    assert (main.closed, first.closed, second.closed) == (True, True, False)


def test_an_empty_branch_closes_its_cache() -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model, context_length=len(PROMPT) + 3)
    state.propose(Context(PROMPT), 2)
    assert state.branch(Context([*PROMPT, 1, 2, 3, 4], len(PROMPT)), 3) is NOTHING
    assert [sequence.closed for sequence in model.sequences] == [False, True]


def test_without_forks_a_branch_rewinds_the_one_cache_and_the_chain_is_read_again() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    chain = list(state.propose(Context(PROMPT), 3).tokens)
    other = [*PROMPT, (chain[0] + 1) % 12]
    assert list(state.branch(Context(other, len(PROMPT)), 2).tokens) == likeliest(model, other, 2)
    (sequence,) = model.sequences
    text = [*PROMPT, *chain]
    assert list(state.propose(Context(text, len(PROMPT)), 2).tokens) == likeliest(model, text, 2)
    assert tuple(chain) in sequence.log.fed, "and reads its chain again"


def test_without_memory_for_a_second_cache_branches_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model)

    def full(_self: FakeSequence) -> FakeSequence:
        raise MemoryLimitError("full", needed_bytes=2, available_bytes=1)

    state.propose(Context(PROMPT), 2)
    monkeypatch.setattr(FakeSequence, "fork", full)
    assert state.branch(Context([*PROMPT, 7], len(PROMPT)), 3) is NOTHING
    assert not state.forks
    assert list(state.propose(Context(PROMPT), 2).tokens) == likeliest(model, PROMPT, 2)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_after_any_sequence_of_branches_each_chain_is_the_models_text(data: st.DataObject) -> None:
    model = FakeModel(4, seed=2, can_fork=data.draw(st.booleans()))
    request = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=4, context_length=40)
    state = ModelDrafter(lambda: model).start(request)
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    for _ in range(data.draw(st.integers(1, 5))):
        chain = list(state.propose(Context(tokens), data.draw(st.integers(1, 3))).tokens)
        assert chain == likeliest(model, tokens, len(chain))
        ways = [[*tokens, *chain]]
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, len(chain)))
            start = [*tokens, *chain[:place], data.draw(st.integers(0, 3))]
            branch = list(state.branch(Context(start, len(tokens)), data.draw(st.integers(1, 3))).tokens)
            assert branch == likeliest(model, start, len(branch))
            ways.append([*start, *branch])
        way = data.draw(st.sampled_from(ways))
        tokens = [*way[: data.draw(st.integers(len(tokens), len(way)))], data.draw(st.integers(0, 3))][:36]
        alive = [sequence for sequence in model.sequences if not sequence.closed]
        assert len(alive) == len(state._branches) + 1
        assert all(branch.sequence.tokens == branch.known for branch in state._branches)
    state.close()
    assert all(sequence.closed for sequence in model.sequences)


# --------------------------------------------------------------------------------------------- cancel and failures


@pytest.mark.parametrize("can_fork", [False, True])
def test_a_cancel_ends_the_branch_and_later_calls_until_reset(can_fork: bool) -> None:
    state = started(FakeModel(seed=1, can_fork=can_fork))
    state.propose(Context(PROMPT), 2)
    state.branch(Context([*PROMPT, 7], len(PROMPT)), 2)
    state.cancel()
    for use in (state.branch, state.propose):
        with pytest.raises(CancelledError):
            use(Context([*PROMPT, 8], len(PROMPT)), 2)
    state.reset_cancel()
    assert len(state.branch(Context([*PROMPT, 8], len(PROMPT)), 2).tokens) == 2
    assert len(state.propose(Context([*PROMPT, 7]), 2).tokens) == 2


def test_a_cancel_during_a_branch_also_ends_the_next_chain() -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model)
    state.propose(Context(PROMPT), 2)

    class Cancelling(Gate):
        def goes_on(self) -> bool:
            state.cancel()
            return True

    with pytest.raises(CancelledError):
        state.branch(Context([*PROMPT, 7], len(PROMPT)), 2, Cancelling())
    with pytest.raises(CancelledError):
        state.propose(Context(PROMPT), 2)
    state.reset_cancel()
    assert list(state.propose(Context(PROMPT), 2).tokens) == likeliest(model, PROMPT, 2)


@pytest.mark.parametrize("can_fork", [False, True])
@pytest.mark.parametrize("call", range(1, 6))
def test_drafting_with_branches_continues_after_a_failure_at_any_forward(call: int, can_fork: bool) -> None:
    model = FakeModel(seed=1, can_fork=can_fork, faults=Faults(raise_at=call))
    state = started(model)
    for use in (state.propose, state.branch, state.propose):
        tokens = [*PROMPT, 7] if use == state.branch else PROMPT
        for _ in range(2):
            try:
                found = list(use(Context(tokens, len(PROMPT)), 3).tokens)
            except ForwardError:
                continue
            assert found == likeliest(model, tokens, len(found))
    assert all(not branch.sequence.closed for branch in state._branches)


def test_a_closed_drafter_state_refuses_to_branch() -> None:
    model = FakeModel(seed=1, can_fork=True)
    state = started(model)
    state.propose(Context(PROMPT), 2)
    state.branch(Context([*PROMPT, 7], len(PROMPT)), 2)
    state.close()
    assert all(sequence.closed for sequence in model.sequences)
    with pytest.raises(ClosedError):
        state.branch(Context([*PROMPT, 7], len(PROMPT)), 2)


# -------------------------------------------------------------------------------------------------- in combinations


class Brancher(Scripted):
    """A drafter whose branches are ``token``, or raise."""

    forks = drafts_branches = True

    def __init__(self, token: int, error: EdgespecError | None = None) -> None:
        super().__init__(lambda tokens, depth: [token] * depth)
        self.error = error

    def branch(self, context: Context, depth: int, gate: object = None) -> Proposal:
        if self.error is not None:
            raise self.error
        return Proposal(tokens=tuple(self._script(context.tokens, depth)), drafted_by="b")


def combined(*parts: tuple[str, DraftState]) -> CombinationState:
    return CombinationState(parts, FixedDepth(4))


def test_a_combination_branches_with_its_first_capable_drafter() -> None:
    lookup = LookupDrafter().start(REQUEST)
    state = combined(("lookup", lookup), ("b", Brancher(5)), ("c", Brancher(6)))
    assert state.forks
    assert state.branch(Context(PROMPT), 3).tokens == (5, 5, 5)
    without = combined(("lookup", lookup))
    assert (without.forks, without.branch(Context(PROMPT), 3)) == (False, NOTHING)


def test_a_branch_is_drafted_without_asking_the_depth_policy() -> None:
    state = combined(("b", Brancher(5)))

    class Off(FixedDepth):
        def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
            raise AssertionError("the policy must not be asked")

    state.depth = Off(0)
    assert state.branch(Context(PROMPT), 3).tokens == (5, 5, 5)


def test_a_combination_turns_a_drafter_off_if_its_branch_fails() -> None:
    state = combined(("b", Brancher(5, ForwardError("the driver is gone"))), ("c", Brancher(6)))
    assert state.branch(Context(PROMPT), 2) is NOTHING
    assert state.failures == {"b": "the driver is gone"}
    assert state.branch(Context(PROMPT), 2).tokens == (6, 6)
    with pytest.raises(CancelledError):
        combined(("b", Brancher(5, CancelledError("stop")))).branch(Context(PROMPT), 2)


class Source:
    """A drafter with one prepared state."""

    kind = "model"

    def __init__(self, state: DraftState) -> None:
        self._state = state

    def start(self, request: DraftRequest) -> DraftState:
        return self._state

    def close(self) -> None: ...


@pytest.mark.parametrize("missing", [False, True])
def test_the_trimmed_or_whole_drafter_that_proposed_last_branches(missing: bool) -> None:
    drafter = TrimmedHeadDrafter(Source(Brancher(5)), Source(Brancher(6)), range(8))
    state = drafter.start(REQUEST)
    state.propose(Context([9 if missing else 1] * 64), 2)
    assert state.forks
    assert state.branch(Context(PROMPT), 2).tokens == ((6, 6) if missing else (5, 5))
    state.close()
    with pytest.raises(ClosedError):
        state.branch(Context(PROMPT), 2)


def test_a_whole_drafter_is_given_up_if_its_branch_fails() -> None:
    whole = Brancher(6, ForwardError("the driver is gone"))
    state = TrimmedHeadDrafter(Source(Brancher(5)), Source(whole), range(8)).start(REQUEST)
    state.propose(Context([9] * 64), 2)
    assert state.branch(Context(PROMPT), 2) is NOTHING
    assert (state.silent_because or "").endswith("failed: the driver is gone")
    trimmed = TrimmedHeadDrafter(Source(Brancher(5, ForwardError("gone too"))), None, range(8)).start(REQUEST)
    with pytest.raises(ForwardError):
        trimmed.branch(Context(PROMPT), 2)


@pytest.mark.parametrize("order", list(itertools.permutations(["cannot", "can"])))
def test_drafters_without_branch_support_return_empty_branches(order: tuple[str, ...]) -> None:
    plain = Raising(ForwardError("unused"), at=99)
    state = TrimmedHeadDrafter(Source(plain), None, range(8)).start(REQUEST)
    assert (state.forks, state.branch(Context(PROMPT), 2)) == (False, NOTHING)
    parts: dict[str, DraftState] = {"cannot": Scripted(lambda tokens, depth: [1]), "can": Brancher(5)}
    assert combined(*((kind, parts[kind]) for kind in order)).branch(Context(PROMPT), 1).tokens == (5,)
