"""The tree of a drafter's chain, its alternatives and copies of the text, and what the policy learns from it."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.decoding.sampling import Chooser, Purpose, Sampling, draw
from edgespec.drafters.combination import CombinationState, seen_alternatives
from edgespec.drafters.lookup import LookupDrafter, match_confidence
from edgespec.drafters.model import MOST_ALTERNATIVES, ModelDrafter, ModelDraftState
from edgespec.errors import ForwardError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import (
    NOTHING,
    Choice,
    DraftRequest,
    DraftState,
    DraftTree,
    Outcome,
    Proposal,
    values_trees,
)
from edgespec.interfaces.rows import Distribution, Rows
from tests.drafters.test_combination import Depths
from tests.support.fake_runtime import FakeModel
from tests.support.gates import Gate, Shape
from tests.support.scripted_drafters import Scripted

PROMPT = [3, 1, 4, 1, 5]
RULES = {
    "greedy": Sampling(),
    "keyed": Sampling(temperature=1.0, seed=3),
    "rejection": Sampling(temperature=1.0, seed=3, rule="rejection"),
}


def started(
    model: FakeModel, sampling: Sampling = RULES["greedy"], stop_ids: frozenset[int] = frozenset()
) -> ModelDraftState:
    request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=12, context_length=64, stop_ids=stop_ids)
    return ModelDrafter(lambda: model).start(request)


def proposed(state: DraftState, gate: Gate | None, depth: int, context: Context | None = None) -> Proposal:
    """The proposal of a combination with this drafter alone."""
    return CombinationState([("model", state)], Depths(gate, model=99)).propose(context or wishing(), depth)


def wishing(tokens: list[int] = PROMPT) -> Context:
    return Context(tokens, wants_tree=True)


def ranked(model: FakeModel, tokens: list[int]) -> list[int]:
    return model.scores(tokens)[:12].argsort()[::-1].tolist()


def gated(gate: Shape, depth: int) -> Shape:
    gate.forwards = depth - 1
    return gate


def test_alternatives_of_a_chain_are_the_next_best_tokens() -> None:
    model = FakeModel(seed=1)
    gate = Shape(ranks=(2, 0, 1))
    assert values_trees(gate)
    proposal = proposed(started(model), gated(gate, 3), 9)
    chain = proposal.tokens[:3]
    at = [[*PROMPT, *chain[:place]] for place in range(3)]
    assert list(chain) == [ranked(model, tokens)[0] for tokens in at]
    assert proposal.tokens[3:] == (*ranked(model, at[0])[1:3], ranked(model, at[2])[1])
    assert proposal.parents == (-1, 0, 1, -1, -1, 1)
    assert proposal.sources == ("model",) * 6
    assert (proposal.forwards, proposal.draft_probs) == (3, None)
    assert len(proposal.confidences) == 3
    assert [len(place) for place in proposal.alternatives] == [MOST_ALTERNATIVES] * 3


def test_the_odds_of_alternatives_are_the_drafters_probabilities() -> None:
    model, gate = FakeModel(seed=1), Shape()
    proposal = proposed(started(model), gated(gate, 1), 2)
    scores = model.scores(PROMPT)[:12].astype(np.float64)
    probs = np.exp(scores) / np.exp(scores).sum()
    for token, odds in proposal.alternatives[0]:
        assert odds == pytest.approx(probs[token], rel=1e-5)
    assert gate.trees[0].odds == [0.5, *(odds for _, odds in proposal.alternatives[0])]


def test_with_shared_noise_alternatives_are_the_next_draws() -> None:
    model, sampling = FakeModel(seed=1, spread=1.0), RULES["keyed"]
    proposal = proposed(started(model, sampling), gated(Shape(), 1), 3)
    own = Chooser(sampling).distribution(Rows(1, lambda index: model.scores(PROMPT)[:12]), 0, PROMPT)
    drawn = []
    for _ in range(1 + MOST_ALTERNATIVES):
        drawn.append(draw(own, sampling.noise_seed, len(PROMPT), Purpose.TOKEN))
        own = Distribution(own.ids[own.ids != drawn[-1]], own.probs[own.ids != drawn[-1]])
    assert [proposal.tokens[0], *(token for token, _ in proposal.alternatives[0])] == drawn
    odds = [own for _, own in proposal.alternatives[0]]
    assert odds == sorted(odds, reverse=True)
    assert 0 < sum(odds) < 1
    assert proposal.tokens[1] == drawn[1]


@pytest.mark.parametrize("rule", RULES)
def test_trees_are_proposed_only_on_request(rule: str) -> None:
    for context, gate in ((Context(PROMPT), Shape()), (wishing(), Gate()), (wishing(), None)):
        proposal = proposed(started(FakeModel(seed=1), RULES[rule]), gate, 4, context)
        assert (proposal.parents, proposal.alternatives) == (None, ())
        assert len(proposal.tokens) == 4
    assert not Context(PROMPT).wants_tree


def test_under_the_rejection_rule_a_proposal_is_a_chain() -> None:
    gate = Shape()
    proposal = proposed(started(FakeModel(seed=1), RULES["rejection"]), gate, 4)
    assert (len(proposal.tokens), proposal.parents) == (4, None)
    assert proposal.draft_probs is not None
    assert gate.trees == []


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 9])
def test_a_tree_stays_within_the_depth(depth: int) -> None:
    gate = gated(Shape(ranks=(3, 3)), 2)
    proposal = proposed(started(FakeModel(seed=1)), gate, depth)
    assert len(proposal.tokens) == min(depth, 8)
    assert bool(proposal.alternatives) == (depth > 1), "at depth 1 there is no room for alternatives"


def test_a_stop_token_is_never_an_alternative() -> None:
    model = FakeModel(seed=1)
    second, third, fourth = ranked(model, PROMPT)[1:4]
    state = started(model, stop_ids=frozenset({second}))
    proposal = proposed(state, gated(Shape(ranks=(2,)), 1), 3)
    assert proposal.tokens == (ranked(model, PROMPT)[0], third, fourth)


def test_ids_outside_the_targets_vocabulary_are_never_alternatives() -> None:
    model = FakeModel(vocabulary_size=40, seed=1)
    proposal = proposed(started(model), gated(Shape(ranks=(3,)), 1), 3)
    assert all(token < 12 for token in proposal.tokens)
    assert len(proposal.tokens) == 3


def test_a_small_vocabulary_gives_fewer_alternatives_than_requested() -> None:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=2, context_length=64)
    state = ModelDrafter(lambda: FakeModel(vocabulary_size=2, seed=1)).start(request)
    proposal = proposed(state, gated(Shape(), 1), 5, wishing([1, 0, 1]))
    assert sorted(proposal.tokens) == [0, 1]


def test_tokens_outside_a_trimmed_head_are_never_alternatives() -> None:
    lacking = [0.0, -np.inf, 1.0, -np.inf, *[-np.inf] * 8]
    model = FakeModel(table=lambda prefix: lacking)
    proposal = proposed(started(model), gated(Shape(ranks=(3,)), 1), 5)
    assert proposal.tokens == (2, 0)
    assert len(proposal.alternatives[0]) == 1


# --------------------------------------------------------------------------------------------------------- copies


class Everything(Shape):
    """Chooses every node, as far as there is room."""

    def choose(self, tree: DraftTree, most: int) -> Choice:
        self.trees.append(tree)
        return Choice(tuple(range(min(most, len(tree)))), 1.0)


class WithCopies(Depths):
    """Values a round with the model at ``usual`` tokens; copies are believed as they claim."""

    def __init__(self, usual: float, **depths: int) -> None:
        super().__init__(None, **depths)
        self.usual = usual
        self.gates: list[Everything] = []

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> object:  # type: ignore[override]
        self.gate = Everything()
        self.gates.append(self.gate)
        return super().allow(source, lag, unread)

    def prefers(self, source: str, free_gain: float) -> bool:
        return free_gain < self.usual


def model_and_copies(policy: WithCopies, *chain: int) -> tuple[CombinationState, Scripted]:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=12, context_length=64)

    class Chain(Scripted):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            self.gates[-1].believed += [0.5] * len(chain)  # type: ignore[union-attr]
            return Proposal(tokens=chain, sources=("model",) * len(chain), drafted_by="model", confidences=(0.9,) * 2)

    model = Chain(lambda tokens, depth: list(chain))
    parts: list[tuple[str, DraftState]] = [("lookup", LookupDrafter().start(request)), ("model", model)]
    return CombinationState(parts, policy), model


TEXT = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]  # 4, 5, 6 followed 1, 2, 3


def test_copies_that_gain_more_than_a_usual_round_are_verified_alone() -> None:
    policy = WithCopies(0.9, lookup=9, model=9)
    state, model = model_and_copies(policy, 4, 7)
    proposal = state.propose(Context(TEXT, wants_tree=True), 9)
    assert (proposal.drafted_by, proposal.tokens[:3], proposal.parents) == ("lookup", (4, 5, 6), None)
    assert (set(proposal.sources), model.asked) == ({"lookup"}, [])
    assert proposal.confidences == ()


def test_the_policy_hears_in_every_round_what_free_guesses_gain() -> None:
    class Hearing(WithCopies):
        heard: list[tuple[str, float]]

        def prefers(self, source: str, free_gain: float) -> bool:
            self.heard.append((source, free_gain))
            return super().prefers(source, free_gain)

    policy = Hearing(99.0, lookup=9, model=9)
    policy.heard = []
    state, _ = model_and_copies(policy, 4, 7)
    for tokens, wants_tree in (([4, 1, 2], True), (TEXT, True), (TEXT, False)):
        state.propose(Context(tokens, wants_tree=wants_tree), 9)
    assert policy.heard == [("model", 0.0), ("model", 1.0), ("model", 1.0)]


def test_other_copies_stand_beside_and_behind_the_drafters_chain() -> None:
    policy = WithCopies(1.1, lookup=9, model=9)
    state, _ = model_and_copies(policy, 4, 7)
    proposal = state.propose(Context(TEXT, wants_tree=True), 9)
    assert (proposal.drafted_by, proposal.tokens[:2], proposal.confidences) == ("model", (4, 7), (0.9, 0.9))
    assert proposal.tokens[2:4] == (5, 6), "the copy continues where the chain differs"
    assert proposal.parents is not None
    assert proposal.parents[:4] == (-1, 0, 0, 2)
    assert proposal.sources[:4] == ("model", "model", "lookup", "lookup")
    tree = policy.gates[1].trees[0]
    assert tree.odds[0] == 0.5, "the first token is the drafter's: the copy adds nothing that it leaves over"
    assert tree.odds[2] == pytest.approx(match_confidence(4) * 0.5), "the copy has what the drafter leaves over"
    assert tree.odds[3] == pytest.approx(match_confidence(5))


def test_a_copy_continues_behind_the_chains_end() -> None:
    state, _ = model_and_copies(WithCopies(1.1, lookup=9, model=9), 4, 5)
    proposal = state.propose(Context(TEXT, wants_tree=True), 4)
    assert (proposal.tokens, proposal.sources) == ((4, 5, 6, 9), ("model", "model", "lookup", "lookup"))
    assert proposal.parents is None, "a chain"


def test_copies_are_used_where_the_model_is_off() -> None:
    state, _ = model_and_copies(WithCopies(1.1, lookup=9, model=0), 4, 5)
    assert state.propose(Context(TEXT, wants_tree=True), 3).tokens == (4, 5, 6)
    state, _ = model_and_copies(WithCopies(1.1, lookup=0, model=0), 4, 5)
    assert state.propose(Context(TEXT, wants_tree=True), 3) is NOTHING


def test_without_a_tree_copies_are_chains_and_stay_apart_from_the_drafters() -> None:
    state, _ = model_and_copies(WithCopies(0.9, lookup=9, model=9), 4, 7)
    alone = state.propose(Context(TEXT), 9)
    assert (alone.tokens[:4], alone.parents, alone.drafted_by) == ((4, 5, 6, 9), None, "lookup")
    short = [4, 1, 2, 5, 9, 2]  # one token matches
    state, _ = model_and_copies(WithCopies(1.1, lookup=9, model=9), 4, 7)
    assert state.propose(Context(short), 9).tokens == (4, 7), "the drafter's chain, if the copy is rather wrong"
    state, _ = model_and_copies(WithCopies(0.0, lookup=9, model=9), 4, 7)
    assert state.propose(Context(short), 9).tokens[:2] == (5, 9)


@pytest.mark.parametrize("wants_tree", [True, False])
def test_copies_are_verified_if_the_drafter_took_time_and_has_no_guess(wants_tree: bool) -> None:
    state, model = model_and_copies(WithCopies(99.0, lookup=9, model=9))
    context = Context([4, 1, 2, 5, 9, 2], wants_tree=wants_tree)
    proposal = state.propose(context, 9)
    assert (len(model.asked), proposal.drafted_by, proposal.tokens[:2]) == (1, "model", (5, 9))
    assert set(proposal.sources) == {"lookup"}
    state.observe(Outcome(proposal=proposal, evaluated=2, accepted=1, committed=(5, 8)))


def test_a_copy_stands_behind_an_alternative_too() -> None:
    class Alternatives(WithCopies):
        pass

    state, model = model_and_copies(Alternatives(9.0, lookup=9, model=9), 8)
    model._proposal = lambda tokens, depth: (  # type: ignore[method-assign]
        model.gates[-1].believed.append(0.5)  # type: ignore[union-attr, func-returns-value]
        or Proposal(
            tokens=(8,), sources=("model",), drafted_by="model", confidences=(0.5,), alternatives=(((4, 0.3),),)
        )
    )
    proposal = state.propose(Context(TEXT, wants_tree=True), 4)
    assert (proposal.tokens[:3], proposal.parents) == ((8, 4, 5), (-1, -1, 1, 2))
    assert proposal.sources == ("model", "model", "lookup", "lookup")


def test_a_free_drafter_that_fails_while_a_chain_grows_loses_only_itself() -> None:
    state, _ = model_and_copies(WithCopies(99.0, lookup=9, model=9), 4, 7)

    def failing(*_: object) -> None:
        raise ForwardError("out of memory")

    state._growing["lookup"].grow = failing  # type: ignore[method-assign]
    assert state.propose(Context(TEXT, wants_tree=True), 9).tokens == (4, 7)
    assert state.failures == {"lookup": "out of memory"}


def test_without_a_value_copies_must_be_rather_right_than_wrong() -> None:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=12, context_length=64)
    state = CombinationState([("lookup", LookupDrafter().start(request))], Depths(None, lookup=2))
    assert match_confidence(2) < 0.5 < match_confidence(3)
    assert state.propose(Context([1, 2, 9, 1, 2], wants_tree=True), 5) is NOTHING
    assert state.propose(Context([1, 2, 3, 9, 1, 2, 3], wants_tree=True), 5).tokens == (9, 1)


def test_the_models_share_of_right_tokens_counts_none_of_the_copies() -> None:
    policy = WithCopies(1.1, lookup=9, model=9)
    state, _ = model_and_copies(policy, 4, 5)
    proposal = state.propose(Context(TEXT, wants_tree=True), 4)
    state.observe(Outcome(proposal=proposal, evaluated=4, accepted=3, committed=(4, 5, 6, 8)))
    assert policy.learned == [("model", (0.9, 0.9), [True, True])]


def test_an_alternative_chosen_without_its_chain_token_is_not_a_hit_of_the_chain() -> None:
    """Also of a drafter that reports no confidences; nor are copies in place of an empty chain."""

    class Others(Everything):
        def choose(self, tree: DraftTree, most: int) -> Choice:
            return Choice(tuple(node for node in range(len(tree)) if tree.tokens[node] != 8), 1.0)

    class Choosy(WithCopies):
        def allow(self, source: str, lag: int = 0, unread: int = 0) -> object:  # type: ignore[override]
            self.gate = Others()
            self.gates.append(self.gate)
            return Depths.allow(self, source, lag, unread)

    for chain, others in (((8,), (((4, 0.9),),)), ((6, 8), ((), ((4, 0.9),)))):
        policy = Choosy(9.0, model=9)
        model = Scripted(lambda tokens, depth: [])
        state = CombinationState([("model", model)], policy)

        def said(tokens: list[int], depth: int, chain: object = chain, others: object = others) -> Proposal:
            model.gates[-1].believed += [0.5] * len(chain)  # type: ignore[union-attr, arg-type]  # noqa: B023
            return Proposal(tokens=chain, sources=("model",) * 2, drafted_by="model", alternatives=others)  # type: ignore[arg-type]

        model._proposal = said  # type: ignore[method-assign]
        proposal = state.propose(Context(TEXT, wants_tree=True), 4)
        assert (proposal.tokens, proposal.parents) == ((*chain[:-1], 4), None)
        assert proposal.chain_length == len(chain) - 1
        accepted = len(proposal.tokens)
        state.observe(
            Outcome(proposal=proposal, evaluated=accepted, accepted=accepted, committed=(*proposal.tokens, 1))
        )
        assert policy.learned == [("model", (), [True] * (len(chain) - 1))]
    assert proposal.cut(1).chain_length == 1
    assert proposal.cut(0).chain_length == 0
    assert Proposal(tokens=(1, 2)).chain_length is None


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
    assert policy.alternatives == [("model", [0.2, 0.1], [False, False]), ("model", [0.3], [True])]
    assert policy.learned == [("model", (0.5, 0.5), [True, True])]


def test_a_cut_proposal_keeps_the_data_of_its_remaining_tokens() -> None:
    proposal = outcome((1,), 1).proposal
    assert proposal.cut(1).alternatives == (((7, 0.2), (8, 0.1)),)
    assert Proposal().alternatives == ()
