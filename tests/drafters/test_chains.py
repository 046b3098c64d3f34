"""Several chains of a model drafter: what they are, what they cost, and what stays in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop, LoopLimits
from edgespec.drafters.chains import as_tree
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.errors import ForwardError
from edgespec.interfaces.drafting import Context, DraftRequest, Proposal
from edgespec.planning.chains import choose_chains
from edgespec.planning.cost.curve import Curve
from edgespec.planning.depth.base import FixedDepth
from tests.support.fake_runtime import FakeModel, Faults, noise_words
from tests.support.gates import at_least

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling()
RULES = {
    "greedy": GREEDY,
    "keyed": Sampling(temperature=1.0, seed=3),
    "rejection": Sampling(temperature=1.0, seed=3, rule="rejection"),
}


def started(
    model: FakeModel, sampling: Sampling = GREEDY, stop_ids: frozenset[int] = frozenset(), size: int = 12
) -> ModelDraftState:
    request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=size, context_length=64, stop_ids=stop_ids)
    return ModelDrafter(lambda: model).start(request)


def spread(chains: int, length: int) -> Callable[[Sequence[float]], tuple[int, int]]:
    return lambda odds: (chains, length)


def proposed(state: ModelDraftState, chains: int, length: int, depth: int = 12) -> Proposal:
    return state.propose(Context(PROMPT, spread=spread(chains, length)), depth)


def likeliest(model: FakeModel, tokens: list[int], depth: int) -> list[int]:
    so_far = list(tokens)
    for _ in range(depth):
        so_far.append(int(model.scores(so_far)[:12].argmax()))
    return so_far[len(tokens) :]


@pytest.mark.parametrize("can_branch", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_each_chain_begins_with_another_of_the_best_ids(rule: str, can_branch: bool) -> None:
    model = FakeModel(seed=1, can_branch=can_branch)
    proposal = proposed(started(model, RULES[rule]), 3, 4)
    firsts = model.scores(PROMPT).argsort()[::-1][:3].tolist()
    chains = [[first, *likeliest(model, [*PROMPT, first], 3)] for first in firsts]
    assert proposal.tokens == tuple(token for chain in chains for token in chain)
    assert proposal.parents == (-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10)
    assert proposal.draft_probs is None
    assert proposal.forwards == (4 if can_branch else 10), "one for the text, then one a place or one a token"
    assert (proposal.drafted_by, len(proposal.sources)) == ("model", 12)


def test_with_shared_noise_the_first_chain_is_the_one_that_would_have_been_alone() -> None:
    for can_branch in (False, True):
        alone = started(FakeModel(seed=1), RULES["keyed"]).propose(Context(PROMPT), 4)
        several = proposed(started(FakeModel(seed=1, can_branch=can_branch), RULES["keyed"]), 2, 4)
        assert several.tokens[:4] == alone.tokens
        assert several.tokens[4] != alone.tokens[0]


@pytest.mark.parametrize(("chains", "length"), [(1, 3), (0, 0), (1, 9), (-1, 3)])
def test_one_chain_is_a_chain_like_any_other(chains: int, length: int) -> None:
    alone = started(FakeModel(seed=1)).propose(Context(PROMPT), 4)
    one = proposed(started(FakeModel(seed=1)), chains, length, depth=4)
    assert replace(one, sync_s=0.0) == replace(alone, sync_s=0.0)


@pytest.mark.parametrize(("depth", "tokens"), [(12, 12), (11, 9), (3, 3), (2, 2)])
def test_all_chains_together_are_as_deep_as_they_may_be(depth: int, tokens: int) -> None:
    assert len(proposed(started(FakeModel(seed=1)), 3, 4, depth).tokens) == tokens


def test_the_odds_are_those_of_the_best_few() -> None:
    model, told = FakeModel(seed=1), list[list[float]]()

    def ask(odds: Sequence[float]) -> tuple[int, int]:
        told.append(list(odds))
        return 1, 1

    state = started(model)
    state.propose(Context(PROMPT, spread=ask), 12)
    state.propose(Context(PROMPT, spread=ask), 2)
    assert [len(odds) for odds in told] == [4, 2]
    assert told[0] == sorted(told[0], reverse=True)
    assert 0 < sum(told[0]) <= 1
    assert told[0][:2] == told[1]


def test_a_gate_that_stops_whoever_is_unsure_has_no_say_in_several_chains() -> None:
    state = started(FakeModel(seed=1, spread=0.5))
    gate = at_least(0.9)
    assert state.propose(Context(PROMPT), 4, gate).tokens == ()
    assert len(state.propose(Context(PROMPT, spread=spread(2, 2)), 4, gate).tokens) == 4


@pytest.mark.parametrize("can_branch", [False, True])
def test_a_chain_ends_after_a_stop(can_branch: bool) -> None:
    model = FakeModel(seed=1, can_branch=can_branch)
    first, second = model.scores(PROMPT).argsort()[::-1][:2].tolist()
    proposal = proposed(started(model, stop_ids=frozenset({first})), 2, 3)
    assert (proposal.tokens[:2], proposal.parents[:2] if proposal.parents else None) == ((first, second), (-1, -1))


@pytest.mark.parametrize("can_branch", [False, True])
def test_the_best_chain_stays_in_the_cache(can_branch: bool) -> None:
    model = FakeModel(seed=1, can_branch=can_branch)
    state = started(model)
    best = list(proposed(state, 3, 4).tokens[:4])
    (sequence,) = model.sequences
    assert sequence.tokens == state._known == [*PROMPT, *best[:3]]
    assert state.lag(Context([*PROMPT, *best])) == 0
    assert list(state.propose(Context([*PROMPT, *best]), 2).tokens) == likeliest(model, [*PROMPT, *best], 2)


@pytest.mark.parametrize("can_branch", [False, True])
def test_ids_that_only_the_drafter_has_begin_no_chain(can_branch: bool) -> None:
    model = FakeModel(20, seed=1, can_branch=can_branch)
    proposal = proposed(started(model), 4, 3)
    assert max(proposal.tokens) < 12
    for place, first in enumerate(proposal.tokens[::3]):
        assert list(proposal.tokens[3 * place : 3 * place + 3]) == [first, *likeliest(model, [*PROMPT, first], 2)]


@pytest.mark.parametrize("can_branch", [False, True])
@pytest.mark.parametrize("call", range(1, 6))
def test_after_a_failure_at_any_forward_it_goes_on(call: int, can_branch: bool) -> None:
    model = FakeModel(seed=1, can_branch=can_branch, faults=Faults(raise_at=call))
    state, whole = started(model), proposed(started(FakeModel(seed=1, can_branch=can_branch)), 2, 4)
    try:
        first = proposed(state, 2, 4)
    except ForwardError:
        assert model.sequences[0].tokens == state._known
        first = proposed(state, 2, 4)
    assert replace(first, sync_s=0.0) == replace(whole, sync_s=0.0)


def test_chains_as_a_tree() -> None:
    assert as_tree([]) == ((), ())
    assert as_tree([[7], [8, 9], [1, 2, 3]]) == ((7, 8, 9, 1, 2, 3), (-1, -1, 1, -1, 3, 4))


def test_where_rows_are_cheap_an_unsure_drafter_is_right_more_often() -> None:
    """The serial loop, the rule by measured times, and a drafter that now and then confuses its best two ids."""
    target, flat = FakeModel(can_branch=True, spread=2.0), Curve(widths=(1, 16), forward_s=(0.1, 0.1))
    steep = Curve(widths=(1, 2), forward_s=(0.1, 0.2))

    def confused(prefix: tuple[int, ...]) -> list[float]:
        row = target.scores(prefix).copy()
        best, second = row.argsort()[::-1][:2]
        if noise_words("confused", prefix, count=1)[0] < 0.4:
            row[second] = row[best] + 0.1
        else:
            row[best] += 5.0
        return [float(score) for score in row]

    def rounds(curve: Curve | None) -> tuple[list[int], int, set[bool]]:
        chooser, model, history = Chooser(GREEDY), FakeModel(table=confused), list(PROMPT)
        request = DraftRequest(chooser=chooser, vocabulary_size=12, context_length=100)
        drafter = Curve(widths=(1, 4), forward_s=(0.001, 0.001))
        sequence = target.open(100)

        def shape(odds: Sequence[float]) -> tuple[int, int]:
            assert curve is not None
            choice = choose_chains(curve, drafter, odds, (0.8,), 6)
            return choice.chains, choice.length

        loop = DecodeLoop(
            sequence,
            CombinationState([("model", ModelDrafter(lambda: model).start(request))], FixedDepth(6)),
            FixedDepth(6),
            chooser,
            history,
            LoopLimits(max_tokens=40, depth_cap=6, vocabulary_size=12),
            spread=None if curve is None else shape,
        )
        count = sum(1 for _ in loop.steps())
        wide = {parents.count(0) > 1 for parents in sequence.log.parents}
        return history[len(PROMPT) :], count, wide

    alone, spread_out, narrow = rounds(None), rounds(flat), rounds(steep)
    assert alone[0] == spread_out[0] == narrow[0]
    assert spread_out[1] < alone[1]
    assert True in spread_out[2]
    assert True not in narrow[2]
