"""A new source of guesses is one class, and one more drafter where the drafters are named."""

from __future__ import annotations

from edgespec import Done, Round
from edgespec.decoding.sampling import Sampling
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftRequest, DraftState, Outcome, Proposal
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve
from edgespec.planning.depth.control import DepthControl
from tests.support.tiny_models import FORWARD_S, TinyModels

PROMPT = "Say something."
FLAT = Curve(widths=(1, 8), forward_s=(FORWARD_S, FORWARD_S))
CHEAP = Costs(curves=ContextCurves(contexts=(0,), curves=(FLAT,)))


class Remembering(DraftState):
    """Guesses that the text continues as a known answer did. The class is both drafter and state."""

    kind = "remembering"
    free = True

    def __init__(self, known: list[int], confidence: float) -> None:
        self.known, self.confidence = known, confidence
        self.told: list[int] = []

    def start(self, request: DraftRequest) -> Remembering:
        return self

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        place = len(context.tokens)
        guesses = tuple(self.known[place : place + depth])
        sure = (self.confidence,) * len(guesses)
        return Proposal(tokens=guesses, drafted_by=self.kind, confidences=sure) if guesses else NOTHING

    def observe(self, outcome: Outcome) -> None:
        self.told.append(outcome.accepted)


def test_an_unknown_source_drafts_from_the_first_round_is_learned_from_and_changes_no_text(tiny: TinyModels) -> None:
    with tiny.load_speculating(runtime="native") as engine:
        request = engine.pair.prompts.request_tokens(PROMPT)
        with engine.session() as session:
            *_, plain = session.generate(PROMPT, max_tokens=60, sampling=Sampling(), depth=0)
        assert isinstance(plain, Done)
        for known, kept in (([*request, *plain.token_ids], True), ([*request, *([7] * 60)], False)):
            source, policy = Remembering(known, 0.5), DepthControl(CHEAP, 7)
            added = Speculation(drafters=(source, *engine.drafters), policy=policy, depth_cap=7)
            with engine.session(_speculation=added) as session:
                events = list(session.generate(PROMPT, max_tokens=60, sampling=Sampling()))
            done = events[-1]
            assert isinstance(done, Done)
            assert done.token_ids == plain.token_ids
            rounds = [event.record for event in events if isinstance(event, Round)]
            own = [record for record in rounds if record.source == source.kind]
            assert own[0] is rounds[0]
            assert (sum(record.accepted for record in own) > 20) == kept
            assert (len(own) < len(rounds) / 2) != kept, "guesses that are never right are soon left out"
            assert len(source.told) == len(own)
            rate = policy.priors()[source.kind].by_confidence[5]
            assert rate is not None
            assert (rate > 0.5) == kept
