"""The rejection rule end to end: the distribution of the emitted tokens, counted over thousands of answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling, distribution
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.model import ModelDrafter
from edgespec.files.token_map import TokenMap
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftRequest, DraftState, Proposal
from edgespec.interfaces.policy import DepthPolicy
from edgespec.planning.depth.base import ConfidenceGate, EntropyGate, FixedDepth
from edgespec.runtimes.translated import TranslatedModel
from tests.decoding.chi_square import chi_square, threshold
from tests.support import scripted_drafters as scripted
from tests.support.fake_runtime import FakeModel


class Dropping(scripted.Stochastic):
    """Drops a drawn token by its probability, which is biased and forbidden to drafters."""

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        assert proposal.draft_probs is not None
        for place, (token, own) in enumerate(zip(proposal.tokens, proposal.draft_probs, strict=True)):
            assert own is not None
            if own.probs[own.ids.tolist().index(token)] < 0.35:
                return proposal.cut(place)
        return proposal


SMALL = 3
ANSWERS = 2500
LAW_TOKENS = 4


def joint_law(target: FakeModel, sampling: Sampling, banned_early: int = 0) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_TOKENS):
        longer = {}
        for tokens, mass in law.items():
            context = [0, *tokens]
            banned = [0] if len(tokens) < banned_early else []
            own = distribution(target.scores(context), sampling, context, banned=banned)
            for token, prob in zip(own.ids.tolist(), own.probs.tolist(), strict=True):
                longer[(*tokens, token)] = mass * prob
        law = longer
    return law


def statistic(
    make: Callable[[Sampling], DraftState], options: dict[str, object], banned_early: int = 0
) -> tuple[float, float, int]:
    """Pearson's statistic of the loop's joint distribution, its threshold, and the number of accepted tokens.

    Token 0 is banned among the first ``banned_early`` tokens.
    """
    target = FakeModel(SMALL, seed=1, spread=2.0)
    law = joint_law(target, Sampling(**options), banned_early)  # type: ignore[arg-type]
    counts = dict.fromkeys(law, 0)
    accepted = 0
    for seed in range(ANSWERS):
        sampling = Sampling(**options, seed=seed)  # type: ignore[arg-type]
        history = [0]
        limits = LoopLimits(max_tokens=LAW_TOKENS, depth_cap=2, vocabulary_size=SMALL)
        chooser = Chooser(sampling)
        chooser.not_before = {0: float(banned_early)}
        decoding = DecodeLoop(target.open(32), make(sampling), FixedDepth(2), chooser, history, limits)
        for step in decoding.steps():
            accepted += step.record.accepted if step.record else 0
        counts[tuple(history[1:])] += 1  # a KeyError here is a token outside the target's support
        target.sequences.clear()
    # Outcomes too rare for the approximation are counted together.
    rare = [tokens for tokens, mass in law.items() if mass * ANSWERS < 8]
    common = [tokens for tokens in law if tokens not in rare]
    pooled = [(sum(counts[t] for t in rare), sum(law[t] for t in rare))] if rare else []
    pairs = [*((counts[t], law[t]) for t in common), *pooled]
    value = chi_square([count for count, _ in pairs], [mass for _, mass in pairs])
    return value, threshold(len(pairs) - 1), accepted


def drafting_model() -> FakeModel:
    return FakeModel(SMALL, seed=2, spread=2.0)


WHOLE: dict[str, object] = {"temperature": 1.0, "rule": "rejection"}
CUT: dict[str, object] = {"temperature": 1.0, "top_k": 2, "logit_bias": {1: -0.4}, "rule": "rejection"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [WHOLE, CUT], ids=["whole", "top_k and bias"])
def test_drawn_drafts_leave_the_texts_distribution_unchanged(options: dict[str, object]) -> None:
    model = drafting_model()
    value, limit, accepted = statistic(lambda sampling: scripted.Stochastic(model, sampling), options)
    assert value < limit
    assert accepted > ANSWERS / 2


@pytest.mark.slow
@pytest.mark.parametrize("bans", [False, True], ids=["drafts of banned tokens", "drafts without them"])
def test_a_ban_that_ends_leaves_the_distribution_of_the_rest_unchanged(bans: bool) -> None:
    drafter = ModelDrafter(drafting_model)

    def make(sampling: Sampling) -> DraftState:
        chooser = Chooser(sampling)
        chooser.not_before = {0: 3.0} if bans else {}
        return drafter.start(DraftRequest(chooser=chooser, vocabulary_size=SMALL, context_length=32))

    value, limit, accepted = statistic(make, WHOLE, banned_early=2)
    assert value < limit
    assert accepted > ANSWERS / 2


@pytest.mark.slow
def test_copied_drafts_leave_the_texts_distribution_unchanged() -> None:
    value, limit, accepted = statistic(lambda sampling: scripted.random_tokens(SMALL), WHOLE)
    assert value < limit
    assert accepted > ANSWERS / 4


@pytest.mark.slow
def test_a_one_pass_drafters_tokens_leave_the_texts_distribution_unchanged() -> None:
    """Its rows do not depend on drafted tokens, and none has the mask (id 2), which the target emits."""
    drafter = ModelDrafter(lambda: FakeModel(SMALL, seed=2, spread=2.0, mask_id=SMALL - 1))

    def make(sampling: Sampling) -> DraftState:
        return drafter.start(DraftRequest(chooser=Chooser(sampling), vocabulary_size=SMALL, context_length=32))

    value, limit, accepted = statistic(make, WHOLE)
    assert value < limit
    assert accepted > ANSWERS / 2


@pytest.mark.slow
def test_a_drafter_with_another_vocabulary_leaves_the_texts_distribution_unchanged() -> None:
    """It has two of the three tokens, in another order, and reads the third as two other tokens."""
    tokens = TokenMap(
        starts=np.array([0, 1, 3, 4], np.int32),
        pieces=np.array([3, 1, 2, 0], np.int32),
        tokens=np.array([0, 2]),
        rows=np.array([3, 0]),
        firsts=np.array([2, 1, -1, 0], np.int32),
        coverage=1.0,
    )
    drafter = ModelDrafter(lambda: TranslatedModel(FakeModel(4, seed=2, spread=2.0), tokens))

    def make(sampling: Sampling) -> DraftState:
        return drafter.start(DraftRequest(chooser=Chooser(sampling), vocabulary_size=SMALL, context_length=32))

    value, limit, accepted = statistic(make, WHOLE)
    assert value < limit
    assert accepted > ANSWERS / 2


def gated(policy: DepthPolicy) -> Callable[[Sampling], DraftState]:
    """A draft model behind the policy's gates, as a session combines them."""
    drafter = ModelDrafter(drafting_model)

    def make(sampling: Sampling) -> DraftState:
        request = DraftRequest(chooser=Chooser(sampling), vocabulary_size=SMALL, context_length=32)
        return CombinationState([("model", drafter.start(request))], policy)

    return make


@functools.cache
def accepted_without_a_gate() -> int:
    return statistic(gated(FixedDepth(2)), WHOLE)[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [FixedDepth(2, gate=lambda: ConfidenceGate(0.45)), FixedDepth(2, gate=lambda: EntropyGate(1.01))],
    ids=["confidence", "entropy"],
)
def test_drafts_ended_by_a_gate_leave_the_texts_distribution_unchanged(policy: DepthPolicy) -> None:
    value, limit, accepted = statistic(gated(policy), WHOLE)
    assert value < limit
    assert ANSWERS / 8 < accepted < 0.95 * accepted_without_a_gate(), (
        "the gate stopped some drafts and let others through"
    )


@pytest.mark.slow
def test_the_chi_square_check_detects_a_biased_drafter() -> None:
    model = drafting_model()
    value, limit, _ = statistic(lambda sampling: Dropping(model, sampling), WHOLE)
    assert value > limit


class ByDiscardedDraw(DraftState):
    """Drafts in the round after a proposal only if the proposal's last token was 0."""

    def __init__(self, drafter: DraftState) -> None:
        self._drafter, self._last = drafter, 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        drafts, self._last = self._last == 0, 0
        if not drafts:
            return NOTHING
        proposal = self._drafter.propose(context, depth, gate)
        self._last = proposal.tokens[-1]
        return proposal


@pytest.mark.slow
def test_drafting_a_position_again_because_of_its_earlier_draft_leaves_the_distribution_unchanged() -> None:
    """The token after a rejected first draft: with the same noise at each draft its odds were 0.6 to 0.4."""
    even, uneven = [0.0, 0.0], [math.log(4.0), 0.0]
    target, drafting = (FakeModel(2, table=lambda _, own=scores: own) for scores in (even, uneven))  # type: ignore[misc]
    drafter, counts = ModelDrafter(lambda: drafting), [0, 0]
    for seed in range(150):
        chooser = Chooser(Sampling(temperature=1.0, rule="rejection", seed=seed))
        state = drafter.start(DraftRequest(chooser=chooser, vocabulary_size=2, context_length=64))
        limits = LoopLimits(max_tokens=48, depth_cap=2, vocabulary_size=2)
        rejected = False
        decoding = DecodeLoop(target.open(64), ByDiscardedDraw(state), FixedDepth(2), chooser, [0], limits)
        for step in decoding.steps():
            counts[step.tokens[0]] += rejected
            rejected = step.record is not None and step.record.proposed == 2 and step.record.accepted == 0
        target.sequences.clear()
    assert sum(counts) > 800
    assert chi_square(counts, [0.5, 0.5]) < threshold(1)
