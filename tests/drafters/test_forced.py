"""The guesses of tokens that the form of an answer forces, with and without a drafting model."""

from __future__ import annotations

import json

import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.combination import Combination
from edgespec.drafters.forced import ForcedDrafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, DraftState, DraftTree
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_bans import RULES, serial
from tests.decoding.test_forms import chooser, plain
from tests.decoding.test_loop import PROMPT, VOCABULARY_SIZE
from tests.support.forms import RandomForm
from tests.support.gates import at_least
from tests.support.tiny_models import TinyModels, answer

ONE = RandomForm(VOCABULARY_SIZE, share=0.0)  # each text has one token that may follow
FEW = RandomForm(VOCABULARY_SIZE, share=0.1)


def started(own: Chooser) -> DraftState:
    request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    return ForcedDrafter().start(request)


def test_forced_tokens_are_proposed_as_far_as_the_depth_and_the_gate_allow() -> None:
    state, context = started(chooser(Sampling(), ONE)), Context(list(PROMPT))
    assert state.free
    proposal = state.propose(context, 3)
    assert len(proposal.tokens) == len(proposal.confidences) == 3
    assert ONE.cursor().allows(proposal.tokens) == 3
    assert set(proposal.sources) == {"forced"}
    assert state.propose(context, 0).tokens == ()
    assert state.propose(context, 3, at_least(0.999)).tokens == ()
    assert state.propose(context, 3, at_least(0.9)).tokens == proposal.tokens


def test_forced_tokens_become_a_chain_of_the_tree() -> None:
    state, tree = started(chooser(Sampling(), ONE)), DraftTree(most_nodes=8, most_depth=3)
    state.grow(Context(list(PROMPT)), tree, 0, float)
    assert tree.parents == [-1, 0, 1]
    assert ONE.cursor().allows(tree.tokens) == 3
    assert set(tree.sources) == {"forced"}


def test_where_nothing_is_forced_and_without_a_form_there_are_no_guesses() -> None:
    for own in (Chooser(Sampling()), chooser(Sampling(), RandomForm(VOCABULARY_SIZE, share=1.0))):
        state, tree = started(own), DraftTree()
        assert state.propose(Context(list(PROMPT)), 4) == NOTHING
        state.grow(Context(list(PROMPT)), tree, 0, float)
        assert len(tree) == 0


@pytest.mark.parametrize("rule", RULES)
def test_forced_guesses_change_no_token(rule: str) -> None:
    sampling = RULES[rule]
    for form in (ONE, FEW):
        expected = serial(sampling, started(chooser(sampling, ONE)), 0, chooser(sampling, form))
        for drafters in ([ForcedDrafter()], [LookupDrafter(), ForcedDrafter()]):
            own = chooser(sampling, form)
            depth = FixedDepth(3).answer(prompt_tokens=len(PROMPT), most=99, sampled=not sampling.greedy)
            request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
            assert serial(sampling, Combination(drafters, depth).start(request), 3, own) == expected
    assert plain(sampling)


SCHEMA = {
    "type": "object",
    "properties": {"temperature in the morning": {"type": "boolean"}, "temperature at night": {"type": "boolean"}},
    "required": ["temperature in the morning", "temperature at night"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("options", [{}, {"draft": "none"}], ids=["drafting model", "copies alone"])
def test_an_answer_with_a_form_takes_fewer_forwards_and_has_the_same_text(
    tiny: TinyModels, options: dict[str, str]
) -> None:
    found = []
    with tiny.load_speculating(**options) as engine:
        for depth in (0, None):
            with engine.session() as session:
                found.append(answer(session.generate("hello", schema=SCHEMA, max_tokens=200, depth=depth)))
    assert found[0].token_ids == found[1].token_ids
    assert len(json.loads(found[0].text)) == 2
    assert found[1].stats.rounds_by_source.get("forced", 0) > 0
    assert found[1].stats.accepted > len(found[1].token_ids) // 3


def test_forced_tokens_are_a_source_where_anything_drafts(tiny: TinyModels) -> None:
    for draft in (str(tiny.drafter), "none"):
        with tiny.load(draft=draft) as engine:
            assert "forced" in [drafter.kind for drafter in engine.pair.speculation().drafters]
    with tiny.load(draft="none", lookup=False) as engine:
        assert not engine.pair.speculation().drafters
