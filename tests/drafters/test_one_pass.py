"""A one-pass drafter: the text and masks in one forward, a token for each row, and a cache without masks."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Purpose, Sampling, distribution, draw
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.drafters.one_pass import MOST_TOKENS, RowsWithout, mask_of
from edgespec.errors import ForwardError, RewindError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, Outcome
from edgespec.interfaces.drawing import INCREMENT, DrawRequest, Measure
from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.interfaces.rows import Rows
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.sequence import TrimmedRows
from tests.drafters.test_combination import Depths
from tests.drafters.test_model import GREEDY, PROMPT, check_synced, started
from tests.drafters.test_trees import Everything
from tests.support.fake_runtime import FakeModel, Faults
from tests.support.gates import Gate, Shape

MASK = 11
KEYED = Sampling(temperature=1.0, seed=3)
REJECTION = Sampling(temperature=1.0, seed=3, rule="rejection")
RULES = (GREEDY, KEYED, REJECTION)


def one_pass(**more: object) -> FakeModel:
    return FakeModel(**{"seed": 1, "mask_id": MASK, "bit_equal_by_construction": True, **more})  # type: ignore[arg-type]


def row(model: FakeModel, text: list[int], place: int) -> np.ndarray:
    """The scores of the token ``place`` places after the next one, by hand: after the text and ``place`` masks."""
    scores = model.scores([*text, *[MASK] * place]).copy()
    scores[MASK] = -np.inf
    return scores


def far_sighted(target: FakeModel) -> FakeModel:
    """A one-pass drafter that knows the target's greedy text: mask i stands for the target's own token."""

    def scores(prefix: tuple[int, ...]) -> list[float]:
        masks = next((n for n, token in enumerate(reversed(prefix)) if token != MASK), len(prefix))
        text = list(prefix[: len(prefix) - masks])
        for _ in range(masks):
            text.append(int(np.argmax(target.scores(text))))
        return [*target.scores(text).tolist(), 0.0]

    return FakeModel(MASK + 1, table=scores, mask_id=MASK)


# ------------------------------------------------------------------------------------------------- the chain


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_a_one_pass_chain_is_the_argmax_of_each_row_of_one_forward(depth: int) -> None:
    model = one_pass()
    state = started(model)
    proposal = state.propose(Context(PROMPT), depth)
    assert list(proposal.tokens) == [int(np.argmax(row(model, PROMPT, place))) for place in range(depth)]
    assert (proposal.forwards, proposal.drafted_by, proposal.draft_probs) == (1, "model", None)
    sequence = check_synced(state)
    assert sequence.log.fed == [(*PROMPT, *[MASK] * (depth - 1))]
    assert sequence.log.rows == [depth]
    assert sequence.tokens == PROMPT, "no mask stays in the cache"
    assert sequence.jobs == 1


def test_a_keyed_one_pass_chain_is_drawn_with_the_targets_noise() -> None:
    model = one_pass()
    proposal = started(model, KEYED).propose(Context(PROMPT), 4)
    wanted = [
        draw(distribution(row(model, PROMPT, place), KEYED), 3, len(PROMPT) + place, Purpose.TOKEN)
        for place in range(4)
    ]
    assert list(proposal.tokens) == wanted
    assert proposal.forwards == 1


def test_under_the_rejection_rule_a_one_pass_chain_carries_rows_that_no_draft_token_changed() -> None:
    for seed in range(5):
        model, sampling = one_pass(), replace(REJECTION, seed=seed)
        noise = (seed + len(PROMPT) * INCREMENT) % 2**64
        proposal = started(model, sampling).propose(Context(PROMPT), 4)
        assert proposal.draft_probs is not None
        assert len(proposal.draft_probs) == 4
        for place, carried in enumerate(proposal.draft_probs):
            own = distribution(row(model, PROMPT, place), sampling)
            assert carried is not None
            assert carried.ids.tolist() == own.ids.tolist()
            assert carried.probs.tolist() == own.probs.tolist()
            assert MASK not in carried.ids
            assert proposal.tokens[place] == draw(own, noise, len(PROMPT) + place, Purpose.DRAFT)


@pytest.mark.parametrize("sampling", RULES)
@given(data=st.data())
@settings(max_examples=40)
def test_a_one_pass_drafter_follows_every_change_of_the_text(sampling: Sampling, data: st.DataObject) -> None:
    model = one_pass()
    state = started(model, sampling)
    text = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=12))
    for _ in range(4):
        depth, limit = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 6))
        gate = Gate(lambda confidence, entropy: len(gate.asked) <= limit)  # noqa: B023
        proposal = state.propose(Context(list(text)), depth, gate)
        fresh = started(model, sampling).propose(Context(list(text)), depth)
        assert proposal.tokens == fresh.tokens[: min(depth, limit)], "as with an empty cache"
        assert proposal.forwards == 1
        assert check_synced(state).tokens == text
        assert state.lag(Context([*text, *proposal.tokens, 3])) == len(proposal.tokens), "no draft token is known"
        kept = data.draw(st.integers(0, len(proposal.tokens)))
        text = [*text, *proposal.tokens[:kept], data.draw(st.integers(0, 10))]
        text = text[: data.draw(st.integers(1, len(text)))]


def test_a_round_of_a_one_pass_drafter_does_not_count_as_catching_up() -> None:
    state, text = started(one_pass()), list(PROMPT)
    assert state.propose(Context(list(text)), 4).sync_s > 0, "the prompt was read"
    for _ in range(3):
        proposal = state.propose(Context(list(text)), 4)
        text += [*proposal.tokens, 7]  # all accepted, and a bonus
        assert state.propose(Context(list(text)), 4).sync_s == 0.0
    assert state.propose(Context([*text, *[5] * 6]), 4).sync_s > 0


def test_hindsight_and_tokens_come_from_the_same_forward() -> None:
    model = one_pass()
    context = Context(list(PROMPT))
    context.hindsight = 3
    proposal = started(model).propose(context, 3)
    assert list(proposal.tokens) == [int(np.argmax(row(model, PROMPT, place))) for place in range(3)]
    known = [int(np.argmax(row(model, PROMPT[:end], 0))) == PROMPT[end] for end in range(2, 5)]
    assert list(proposal.hindsight) == known
    assert model.sequences[0].log.rows == [3 + 3]


def test_a_gate_ends_a_one_pass_chain_and_is_asked_for_no_further_forward() -> None:
    gate = Gate(lambda confidence, entropy: len(gate.asked) < 3, forwards=0)
    model = one_pass()
    proposal = started(model).propose(Context(PROMPT), 6, gate)
    assert len(proposal.tokens) == len(proposal.confidences) == 2
    assert gate.forwards == 0, "goes_on was not asked"
    assert model.sequences[0].log.widths == [len(PROMPT) + 5]


def test_each_row_of_a_one_pass_chain_has_alternatives_without_the_mask() -> None:
    model = one_pass(table=lambda prefix: [float(token) for token in range(12)])  # the mask scores highest
    context = Context(PROMPT, wants_tree=True)
    proposal = started(model).propose(context, 3, Shape())
    assert proposal.tokens == (10, 10, 10)
    assert [[token for token, _ in others] for others in proposal.alternatives] == [[9, 8, 7]] * 3


def test_a_one_pass_chain_ends_after_a_stop_token_and_at_the_end_of_the_context() -> None:
    model = one_pass()
    free = started(model).propose(Context(PROMPT), 8).tokens
    place = next(i for i, token in enumerate(free) if i > 0 and token not in free[:i])
    state = started(model, stop_ids=frozenset({free[place]}))
    assert state.propose(Context(PROMPT), 8).tokens == free[: place + 1]
    assert check_synced(state).tokens == PROMPT
    full = started(model, context_length=len(PROMPT) + 1)
    assert full.propose(Context(PROMPT), 8).tokens == free[:2]
    assert full.propose(Context([*PROMPT, 1, 2]), 8) is NOTHING
    assert len(started(model).propose(Context(PROMPT), MOST_TOKENS + 9).tokens) == MOST_TOKENS


def test_a_one_pass_drafter_gets_no_guesses_and_another_model_no_masks() -> None:
    text = [1, 2, 1, 2, 1, 2, 1]
    state = started(one_pass(order=1))
    state.propose(Context(text), 4)
    assert state._index is None
    ordinary = FakeModel(seed=1)
    started(ordinary).propose(Context(PROMPT), 3)
    assert ordinary.sequences[0].log.widths == [len(PROMPT), 1, 1]


@pytest.mark.parametrize("call", range(1, 5))
def test_a_failed_forward_of_a_one_pass_drafter_leaves_the_cache_consistent(call: int) -> None:
    model = one_pass(faults=Faults(raise_at=call))
    state, text = started(model), [3, 4, 3]
    for _ in range(4):
        with contextlib.suppress(ForwardError):
            text += state.propose(Context(list(text)), 4).tokens[:2]
        check_synced(state)
    assert state.propose(Context(list(text)), 4).tokens == started(one_pass()).propose(Context(text), 4).tokens


def test_a_cache_that_cannot_drop_masks_is_refused_in_one_sentence() -> None:
    facts = one_pass().facts
    assert mask_of(facts) == MASK
    assert mask_of(replace(facts, mask_id=None, can_rewind=False)) is None
    with pytest.raises(RewindError, match="cannot drop the mask tokens"):
        mask_of(replace(facts, can_rewind=False))
    state = CombinationState([("model", started(one_pass(faults=Faults(refuse_rewind_at=99))))], FixedDepth(4))
    assert state.propose(Context(PROMPT), 4).tokens == ()
    assert "cannot drop the mask tokens" in state.failures["model"]


# ------------------------------------------------------------------------------------------ rows without the mask


def test_the_mask_is_removed_from_argmax_draws_scores_and_copies() -> None:
    scores = np.array([[0.0, 5.0, 4.0], [6.0, 5.0, -1.0]], dtype=np.float32)
    rows = RowsWithout(Rows(2, scores.__getitem__), 1)
    assert rows.argmax().tolist() == [2, 0]
    assert rows.logits(0).tolist() == [0.0, -math.inf, 4.0]
    ids, own = rows.scored(1)
    assert (ids, own.tolist()) == (None, [6.0, -math.inf, -1.0])
    request = DrawRequest(wanted=3, measure=Measure.MASS)
    assert rows.draw(0, request).tokens == (2, 0)
    assert sum(rows.draw(0, request).odds) == pytest.approx(1.0), "the odds of the others"
    assert rows.draw(0, DrawRequest()).tokens == (2,)
    assert rows.draw(1, DrawRequest()).tokens == (0,)
    assert rows.first(1).argmax().tolist() == [0, 0]
    assert rows.copy().logits(0).tolist() == [0.0, -math.inf, 4.0]
    assert scores[0, 1] == 5.0, "the runtime's scores are not touched"


def test_a_mask_beyond_the_targets_vocabulary_changes_nothing() -> None:
    scores = np.array([[0.0, 5.0, 9.0]], dtype=np.float32)
    rows = RowsWithout(Rows(1, scores.__getitem__).first(2), 2)
    assert rows.argmax_row(0) == 1
    assert rows.logits(0).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("mask", [7, 5])
def test_a_trimmed_head_may_score_the_mask_or_lack_it(mask: int) -> None:
    scores = np.array([[1.0, 9.0, 2.0]], dtype=np.float32)
    rows = RowsWithout(TrimmedRows(Rows(1, scores.__getitem__), np.array([3, 7, 8]), 10), mask)
    assert rows.argmax_row(0) == (8 if mask == 7 else 7)
    ids, own = rows.scored(0)
    assert ids is not None
    assert own.tolist() == ([1.0, -math.inf, 2.0] if mask == 7 else [1.0, 9.0, 2.0])
    assert rows.draw(0, DrawRequest(wanted=2)).tokens == ((8, 3) if mask == 7 else (7, 8))


def test_rows_without_a_mask_end_with_their_last_use() -> None:
    gc.collect()
    gc.disable()
    try:
        inner = Rows(1, np.zeros((1, 3), dtype=np.float32).__getitem__)
        known = weakref.ref(inner)
        rows = RowsWithout(inner, 1)
        rows.logits(0)
        del inner, rows
        assert known() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ in the loop


def decoded(
    target: FakeModel, state: ModelDraftState | None, sampling: Sampling
) -> tuple[list[int], list[RoundRecord]]:
    history, records = [3, 1], []
    limits = LoopLimits(max_tokens=40, depth_cap=5, vocabulary_size=target.vocabulary_size)
    parts = [] if state is None else [("model", state)]
    policy = FixedDepth(5)
    combined = CombinationState(parts, policy)
    for step in DecodeLoop(target.open(256), combined, policy, Chooser(sampling), history, limits).steps():
        if step.record is not None:
            records.append(step.record)
    assert not combined.failures
    return history, records


@pytest.mark.parametrize("sampling", [GREEDY, KEYED, Sampling(temperature=0.7, seed=9, repeat_penalty=1.2)])
@pytest.mark.parametrize("can_branch", [False, True])
def test_with_a_one_pass_drafter_the_text_is_plain_decodings(sampling: Sampling, can_branch: bool) -> None:
    target = FakeModel(MASK, seed=4, can_branch=can_branch)
    plain, _ = decoded(target, None, sampling)
    for drafter in (far_sighted(target), one_pass(seed=4)):
        request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=MASK, context_length=256)
        text, records = decoded(target, ModelDrafter(lambda own=drafter: own).start(request), sampling)  # type: ignore[misc]
        assert text == plain
        assert {record.draft_forwards for record in records if record.proposed} == {1}


def test_a_far_sighted_drafter_has_all_its_tokens_accepted() -> None:
    target = FakeModel(MASK, seed=4)
    request = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=MASK, context_length=256)
    drafter = far_sighted(target)
    _, records = decoded(target, ModelDrafter(lambda: drafter).start(request), GREEDY)
    assert all(record.accepted == record.proposed for record in records)
    assert [record.emitted for record in records[:-1]] == [6] * (len(records) - 1)
    assert len(drafter.sequences[0].log.widths) == len(records), "one forward a round"


class Chains(Depths):
    """Allows seven nodes, and a chain of ``chain`` tokens."""

    def __init__(self, chain: int | None) -> None:
        super().__init__(None, model=7)
        self.chain = chain

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        self.gate = Everything()
        return replace(super().allow(source, lag, unread), chain=self.chain)


@pytest.mark.parametrize(("chain", "drafted"), [(3, 3), (9, 7), (None, 7)])
def test_the_policys_chain_limits_the_forward_and_leaves_the_tree_its_nodes(chain: int | None, drafted: int) -> None:
    model = one_pass()
    state = CombinationState([("model", started(model))], Chains(chain))
    proposal = state.propose(Context(list(PROMPT), wants_tree=True), 7)
    assert model.sequences[0].log.rows == [drafted]
    assert len(proposal.tokens) == 7, "alternatives take the other places"
    assert Allowance(4).chain is None


def test_observing_changes_nothing() -> None:
    state = started(one_pass())
    proposal = state.propose(Context(PROMPT), 3)
    state.observe(Outcome(proposal=proposal, evaluated=3, accepted=1, committed=proposal.tokens[:1]))
    assert check_synced(state).tokens == PROMPT
