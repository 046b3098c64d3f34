"""The siblings that a model drafter proposes for its chain, and what the policy learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.decoding.sampling import Chooser, Purpose, Sampling, draw
from edgespec.drafters.combination import CombinationState, seen_alternatives
from edgespec.drafters.model import MOST_ALTERNATIVES, ModelDrafter, ModelDraftState
from edgespec.interfaces.drafting import Context, DraftRequest, Outcome, Proposal, SiblingGate
from edgespec.interfaces.rows import Rows
from tests.drafters.test_combination import Depths
from tests.support.fake_runtime import FakeModel
from tests.support.gates import Gate

PROMPT = [3, 1, 4, 1, 5]
RULES = {
    "greedy": Sampling(),
    "keyed": Sampling(temperature=1.0, seed=3),
    "rejection": Sampling(temperature=1.0, seed=3, rule="rejection"),
}


@dataclass
class Evaluation(Gate):
    """Finds the first ``ranks[i]`` alternatives of place i worth verifying; records the odds it received."""

    ranks: Sequence[int] = (1,) * 9
    told: list[list[list[float]]] = field(default_factory=list)

    def siblings(self, odds: Sequence[Sequence[float]], most: int) -> list[tuple[int, int]]:
        self.told.append([list(place) for place in odds])
        every = [(i, j) for i, place in enumerate(odds) for j in range(min(self.ranks[i], len(place)))]
        return every[:most]


def started(
    model: FakeModel, sampling: Sampling = RULES["greedy"], stop_ids: frozenset[int] = frozenset()
) -> ModelDraftState:
    request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=12, context_length=64, stop_ids=stop_ids)
    return ModelDrafter(lambda: model).start(request)


def wishing(tokens: list[int] = PROMPT) -> Context:
    return Context(tokens, wants_siblings=True)


def ranked(model: FakeModel, tokens: list[int]) -> list[int]:
    return model.scores(tokens)[:12].argsort()[::-1].tolist()


def test_siblings_of_a_chain_are_the_next_best_tokens() -> None:
    model = FakeModel(seed=1)
    gate = Evaluation(ranks=(2, 0, 1))
    assert isinstance(gate, SiblingGate)
    proposal = started(model).propose(wishing(), 9, gated(gate, 3))
    chain = proposal.tokens[:3]
    at = [[*PROMPT, *chain[:place]] for place in range(3)]
    assert list(chain) == [ranked(model, tokens)[0] for tokens in at]
    assert proposal.tokens[3:] == (*ranked(model, at[0])[1:3], ranked(model, at[2])[1])
    assert proposal.parents == (-1, 0, 1, -1, -1, 1)
    assert proposal.sources == ("model",) * 6
    assert (proposal.forwards, proposal.draft_probs) == (3, None)
    assert len(proposal.confidences) == 3
    assert [len(place) for place in proposal.alternatives] == [MOST_ALTERNATIVES] * 3


def gated(gate: Evaluation, depth: int) -> Evaluation:
    gate.forwards = depth - 1
    return gate


def test_the_odds_of_siblings_are_the_drafters_probabilities() -> None:
    model, gate = FakeModel(seed=1), Evaluation()
    proposal = started(model).propose(wishing(), 2, gated(gate, 1))
    scores = model.scores(PROMPT)[:12].astype(np.float64)
    probs = np.exp(scores) / np.exp(scores).sum()
    for token, odds in proposal.alternatives[0]:
        assert odds == pytest.approx(probs[token], rel=1e-5)
    assert gate.told == [[[odds for _, odds in proposal.alternatives[0]]]]


def test_with_shared_noise_siblings_are_the_next_draws() -> None:
    model, sampling = FakeModel(seed=1, spread=1.0), RULES["keyed"]
    proposal = started(model, sampling).propose(wishing(), 3, gated(Evaluation(), 1))
    own = Chooser(sampling).distribution(Rows(1, lambda index: model.scores(PROMPT)[:12]), 0, PROMPT)
    drawn = []
    for _ in range(1 + MOST_ALTERNATIVES):
        drawn.append(draw(own, sampling.noise_seed, len(PROMPT), Purpose.TOKEN))
        rest = own.without(drawn[-1])
        assert rest is not None
        own = rest
    assert [proposal.tokens[0], *(token for token, _ in proposal.alternatives[0])] == drawn
    odds = [own for _, own in proposal.alternatives[0]]
    assert odds == sorted(odds, reverse=True)
    assert 0 < sum(odds) < 1
    assert proposal.tokens[1] == drawn[1]


@pytest.mark.parametrize("rule", RULES)
def test_siblings_are_proposed_only_on_request(rule: str) -> None:
    def alone(context: Context, gate: Gate | None) -> Proposal:
        return started(FakeModel(seed=1), RULES[rule]).propose(context, 4, gate)

    for context, gate in ((Context(PROMPT), Evaluation()), (wishing(), Gate()), (wishing(), None)):
        proposal = alone(context, gate)
        assert (proposal.parents, proposal.alternatives) == (None, ())
        assert len(proposal.tokens) == 4
    assert not Context(PROMPT).wants_siblings


def test_under_the_rejection_rule_no_siblings_are_proposed() -> None:
    gate = Evaluation()
    proposal = started(FakeModel(seed=1), RULES["rejection"]).propose(wishing(), 4, gate)
    assert (len(proposal.tokens), proposal.parents) == (4, None)
    assert proposal.draft_probs is not None
    assert gate.told == [[[], [], [], []]]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 9])
def test_chain_and_siblings_together_stay_within_the_depth(depth: int) -> None:
    gate = gated(Evaluation(ranks=(3, 3)), 2)
    proposal = started(FakeModel(seed=1)).propose(wishing(), depth, gate)
    assert len(proposal.tokens) == min(depth, 8)
    assert len(gate.told) == (depth > 1), "at depth 1 there is no room for siblings"


def test_a_stop_token_is_never_a_sibling() -> None:
    model = FakeModel(seed=1)
    second, third = ranked(model, PROMPT)[1:3]
    gate = Evaluation(ranks=(2,))
    proposal = started(model, stop_ids=frozenset({second})).propose(wishing(), 1, gate)
    assert proposal.tokens == (ranked(model, PROMPT)[0],), "no room"
    proposal = started(model, stop_ids=frozenset({second})).propose(wishing(), 3, gated(Evaluation(ranks=(2,)), 1))
    assert proposal.tokens == (ranked(model, PROMPT)[0], third)
    told = gated(Evaluation(ranks=(0,)), 1)
    started(model, stop_ids=frozenset({second})).propose(wishing(), 3, told)
    assert told.told[0][0][0] == 0.0, "a stop token's odds are zero"


def test_ids_outside_the_targets_vocabulary_are_never_siblings() -> None:
    model = FakeModel(vocabulary_size=40, seed=1)
    proposal = started(model).propose(wishing(), 3, gated(Evaluation(ranks=(3,)), 1))
    assert all(token < 12 for token in proposal.tokens)
    assert len(proposal.tokens) == 3


def test_a_small_vocabulary_gives_fewer_siblings_than_requested() -> None:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=2, context_length=64)
    state = ModelDrafter(lambda: FakeModel(vocabulary_size=2, seed=1)).start(request)
    proposal = state.propose(Context([1, 0, 1], wants_siblings=True), 5, gated(Evaluation(), 1))
    assert sorted(proposal.tokens) == [0, 1]


def test_tokens_outside_a_trimmed_head_are_never_siblings() -> None:
    lacking = [0.0, -np.inf, 1.0, -np.inf, *[-np.inf] * 8]
    model = FakeModel(table=lambda prefix: lacking)
    proposal = started(model).propose(wishing(), 5, gated(Evaluation(ranks=(3,)), 1))
    assert proposal.tokens == (2, 0)
    assert len(proposal.alternatives[0]) == 1


# ------------------------------------------------------------------------------------------------------- learning


def outcome(committed: tuple[int, ...], evaluated: int) -> Outcome:
    alternatives = (((7, 0.2), (8, 0.1)), ((9, 0.3),), ())
    proposal = Proposal(tokens=(1, 2, 3), drafted_by="model", confidences=(0.5,) * 3, alternatives=alternatives)
    return Outcome(proposal=proposal, evaluated=evaluated, accepted=evaluated, committed=committed)


def test_each_compared_place_shows_which_alternative_was_the_targets() -> None:
    assert seen_alternatives(outcome((8, 5), 1)) == [([0.2, 0.1], [False, True])]
    assert seen_alternatives(outcome((1, 9, 4), 2)) == [([0.2, 0.1], [False, False]), ([0.3], [True])]
    assert seen_alternatives(outcome((1, 2, 3, 4), 3)) == [([0.2, 0.1], [False, False]), ([0.3], [False])]
    assert seen_alternatives(outcome((4,), 0)) == []
    bare = Outcome(proposal=Proposal(tokens=(1, 2)), evaluated=2, accepted=2, committed=(1, 2, 3))
    assert seen_alternatives(bare) == []


def test_the_policy_receives_the_outcome_of_alternatives() -> None:
    policy = Depths(None, model=5)
    state = CombinationState([("model", started(FakeModel(seed=1)))], policy)
    state.observe(outcome((1, 9, 4), 2))
    assert policy.siblings == [("model", [0.2, 0.1], [False, False]), ("model", [0.3], [True])]
    assert policy.learned == [("model", (0.5, 0.5), [True, True])]


def test_a_cut_proposal_keeps_the_data_of_its_remaining_tokens() -> None:
    proposal = outcome((1,), 1).proposal
    assert proposal.cut(1).alternatives == (((7, 0.2), (8, 0.1)),)
    assert Proposal().alternatives == ()
