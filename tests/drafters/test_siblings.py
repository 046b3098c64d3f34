"""What a model drafter puts forward beside its chain, and what is learned of it."""

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
    """Finds the first ``ranks[i]`` alternatives of place i worth it; remembers the odds it was told."""

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


def test_the_next_best_tokens_lie_beside_the_chain() -> None:
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


def test_the_odds_are_the_drafters_own() -> None:
    model, gate = FakeModel(seed=1), Evaluation()
    proposal = started(model).propose(wishing(), 2, gated(gate, 1))
    scores = model.scores(PROMPT)[:12].astype(np.float64)
    probs = np.exp(scores) / np.exp(scores).sum()
    for token, odds in proposal.alternatives[0]:
        assert odds == pytest.approx(probs[token], rel=1e-5)
    assert gate.told == [[[odds for _, odds in proposal.alternatives[0]]]]


def test_with_shared_noise_they_are_what_it_draws_next() -> None:
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
def test_nobody_who_did_not_ask_gets_any(rule: str) -> None:
    def alone(context: Context, gate: Gate | None) -> Proposal:
        return started(FakeModel(seed=1), RULES[rule]).propose(context, 4, gate)

    for context, gate in ((Context(PROMPT), Evaluation()), (wishing(), Gate()), (wishing(), None)):
        proposal = alone(context, gate)
        assert (proposal.parents, proposal.alternatives) == (None, ())
        assert len(proposal.tokens) == 4
    assert not Context(PROMPT).wants_siblings


def test_the_rejection_rule_has_no_use_for_them() -> None:
    gate = Evaluation()
    proposal = started(FakeModel(seed=1), RULES["rejection"]).propose(wishing(), 4, gate)
    assert (len(proposal.tokens), proposal.parents) == (4, None)
    assert proposal.draft_probs is not None
    assert gate.told == [[[], [], [], []]]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 9])
def test_all_together_are_no_more_than_allowed(depth: int) -> None:
    gate = gated(Evaluation(ranks=(3, 3)), 2)
    proposal = started(FakeModel(seed=1)).propose(wishing(), depth, gate)
    assert len(proposal.tokens) == min(depth, 8)
    assert len(gate.told) == (depth > 1), "a single token has no room beside it"


def test_a_stop_is_never_one() -> None:
    model = FakeModel(seed=1)
    second, third = ranked(model, PROMPT)[1:3]
    gate = Evaluation(ranks=(2,))
    proposal = started(model, stop_ids=frozenset({second})).propose(wishing(), 1, gate)
    assert proposal.tokens == (ranked(model, PROMPT)[0],), "no room"
    proposal = started(model, stop_ids=frozenset({second})).propose(wishing(), 3, gated(Evaluation(ranks=(2,)), 1))
    assert proposal.tokens == (ranked(model, PROMPT)[0], third)
    told = gated(Evaluation(ranks=(0,)), 1)
    started(model, stop_ids=frozenset({second})).propose(wishing(), 3, told)
    assert told.told[0][0][0] == 0.0, "its odds are nothing"


def test_ids_that_only_the_drafter_has_are_none() -> None:
    model = FakeModel(vocabulary_size=40, seed=1)
    proposal = started(model).propose(wishing(), 3, gated(Evaluation(ranks=(3,)), 1))
    assert all(token < 12 for token in proposal.tokens)
    assert len(proposal.tokens) == 3


def test_a_vocabulary_may_be_smaller_than_what_is_asked_for() -> None:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=2, context_length=64)
    state = ModelDrafter(lambda: FakeModel(vocabulary_size=2, seed=1)).start(request)
    proposal = state.propose(Context([1, 0, 1], wants_siblings=True), 5, gated(Evaluation(), 1))
    assert sorted(proposal.tokens) == [0, 1]


def test_what_a_trimmed_head_lacks_is_none() -> None:
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


def test_what_was_compared_tells_what_odds_are_worth() -> None:
    assert seen_alternatives(outcome((8, 5), 1)) == [([0.2, 0.1], [False, True])]
    assert seen_alternatives(outcome((1, 9, 4), 2)) == [([0.2, 0.1], [False, False]), ([0.3], [True])]
    assert seen_alternatives(outcome((1, 2, 3, 4), 3)) == [([0.2, 0.1], [False, False]), ([0.3], [False])]
    assert seen_alternatives(outcome((4,), 0)) == []
    bare = Outcome(proposal=Proposal(tokens=(1, 2)), evaluated=2, accepted=2, committed=(1, 2, 3))
    assert seen_alternatives(bare) == []


def test_the_policy_is_told() -> None:
    policy = Depths(None, model=5)
    state = CombinationState([("model", started(FakeModel(seed=1)))], policy)
    state.observe(outcome((1, 9, 4), 2))
    assert policy.siblings == [("model", [0.2, 0.1], [False, False]), ("model", [0.3], [True])]
    assert policy.learned == [("model", (0.5, 0.5), [True, True])]


def test_a_cut_proposal_keeps_what_belongs_to_its_tokens() -> None:
    proposal = outcome((1,), 1).proposal
    assert proposal.cut(1).alternatives == (((7, 0.2), (8, 0.1)),)
    assert Proposal().alternatives == ()
