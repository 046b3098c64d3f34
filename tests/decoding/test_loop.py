"""The serial loop on a runtime without weights: plain decoding's text with any drafter, and after any failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest

from edgespec.decoding.round_base import DecodeStats, LoopLimits, Step
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.lookup import LookupDrafter
from edgespec.errors import (
    CancelledError,
    DownloadError,
    EdgespecError,
    ForwardError,
    NonFiniteLogitsError,
    PromptTooLongError,
    RewindError,
)
from edgespec.interfaces.drafting import DraftRequest, DraftState
from edgespec.interfaces.model import ALONE, Company
from edgespec.interfaces.policy import RoundRecord
from edgespec.interfaces.rows import LogitsArray
from edgespec.planning.depth.base import FixedDepth
from tests.support import scripted_drafters as scripted
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults

VOCABULARY_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling()
KEYED = Sampling(temperature=1.0, top_p=0.95, seed=5)
PENALISED = Sampling(temperature=0.8, repeat_penalty=1.3, frequency_penalty=0.1, seed=6)
REJECTION = Sampling(temperature=1.0, rule="rejection", seed=7)
TEXT_RULES = {"greedy": GREEDY, "keyed": KEYED, "penalised": PENALISED}
TOKENS = 20


@dataclass
class Answer:
    """One answer, or the part of it before an error."""

    history: list[int]
    sequence: FakeSequence
    tokens: list[int] = field(default_factory=list)
    guessed_by: list[str | None] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)
    finish: str | None = None

    def take(self, steps: Iterator[Step]) -> Answer:
        for step in steps:
            self.tokens += step.tokens
            self.guessed_by += step.guessed_by
            guesses = 0 if step.record is None else step.record.accepted
            assert [each is not None for each in step.guessed_by] == [at < guesses for at in range(len(step.tokens))]
            if step.record is not None:
                self.records.append(step.record)
            self.finish = step.finish
            assert self.sequence.tokens == self.history[:-1], "the cache holds all but the last committed token"
        return self


def start(model: FakeModel, prompt: list[int], context_length: int = 100) -> Answer:
    return Answer(list(prompt), model.open(context_length))


def loop(
    answer: Answer,
    sampling: Sampling = GREEDY,
    drafter: DraftState | None = None,
    depth: int = 0,
    max_tokens: int | None = TOKENS,
    stop_ids: frozenset[int] = frozenset(),
) -> DecodeLoop:
    limits = LoopLimits(max_tokens=max_tokens, depth_cap=depth, vocabulary_size=VOCABULARY_SIZE, stop_ids=stop_ids)
    drafter = drafter or scripted.empty()
    return DecodeLoop(answer.sequence, drafter, FixedDepth(depth), Chooser(sampling), answer.history, limits)


def answer_to(
    sampling: Sampling = GREEDY,
    drafter: DraftState | None = None,
    depth: int = 0,
    *,
    model: FakeModel | None = None,
    prompt: list[int] = PROMPT,
    context_length: int = 100,
    max_tokens: int | None = TOKENS,
    stop_ids: frozenset[int] = frozenset(),
) -> Answer:
    own = start(model or FakeModel(), prompt, context_length)
    return own.take(loop(own, sampling, drafter, depth, max_tokens, stop_ids).steps())


PLAIN = {name: answer_to(sampling, max_tokens=60).tokens for name, sampling in TEXT_RULES.items()}
KNOWN = {name: PROMPT + tokens for name, tokens in PLAIN.items()}

DRAFTERS: dict[str, Callable[[list[int]], DraftState]] = {
    "oracle": scripted.oracle,
    "worst": lambda known: scripted.worst(known, VOCABULARY_SIZE),
    "often right": lambda known: scripted.often_right(known, VOCABULARY_SIZE),
    "random": lambda known: scripted.random_tokens(VOCABULARY_SIZE),
    "stuttering": scripted.stuttering,
    "too long": scripted.too_long,
    "empty": lambda known: scripted.empty(),
    "stop id inside": lambda known: scripted.eos_inside(known, stop_id=0),
    "wrong lengths": lambda known: scripted.WrongLengths(lambda tokens, depth: known[len(tokens) :][:depth]),
    **{
        f"invalid: {name}": (lambda known, make=make: scripted.Invalid(known, make))
        for name, make in scripted.INVALID_TOKENS.items()
    },
}


def check_statistics(answer: Answer, stop_ids: frozenset[int] = frozenset()) -> None:
    """The identities between rounds, tokens and the forwards of the target."""
    stats = DecodeStats(emitted_tokens=len(answer.tokens))
    for record in answer.records:
        stats.add_round(record)
        assert record.width == record.proposed + 1
        assert 0 <= record.accepted <= record.evaluated <= record.proposed
        assert record.evaluated <= record.accepted + 1
        assert record.round_s == pytest.approx(record.draft_s + record.verify_s)
    stopped_inside = [record for record in answer.records if record.emitted == record.accepted]
    assert all(record.emitted == record.accepted + 1 for record in answer.records if record not in stopped_inside)
    if stopped_inside:
        assert stopped_inside == [answer.records[-1]]
        assert answer.tokens[-1] in stop_ids
    assert len(answer.tokens) == 1 + sum(record.emitted for record in answer.records)
    assert len(answer.tokens) == 1 + stats.accepted + stats.rounds - len(stopped_inside)
    assert stats.evaluated <= stats.proposed
    assert sum(stats.accepted_lengths.values()) == sum(record.proposed > 0 for record in answer.records)
    assert sum(n * count for n, count in stats.accepted_lengths.items()) == stats.accepted
    log, widths = answer.sequence.log, [record.width for record in answer.records]
    prefill = len(log.widths) - len(widths)
    assert log.rows == [*[0] * (prefill - 1), 1, *widths], "the prefill scores only its last token"
    assert log.widths[prefill - 1 :] == [1, *widths], "and scores it at width 1"


# ------------------------------------------------------------------------------------------------ same text


def test_plain_texts_of_different_settings_differ() -> None:
    assert len({tuple(tokens) for tokens in PLAIN.values()}) == len(PLAIN)
    for tokens in PLAIN.values():
        assert len(tokens) == 60
        assert len(set(tokens)) > 6


def test_plain_greedy_decoding_emits_the_models_argmax() -> None:
    model, history = FakeModel(), list(PROMPT)
    for token in PLAIN["greedy"]:
        assert token == int(np.argmax(model.scores(history)))
        history.append(token)


@pytest.mark.slow
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_serial_drafting_leaves_plain_decodings_text_unchanged(drafter: str, rule: str) -> None:
    for depth in range(9):
        state = DRAFTERS[drafter](KNOWN[rule])
        answer = answer_to(TEXT_RULES[rule], state, depth)
        assert answer.tokens == PLAIN[rule][:TOKENS], f"depth {depth}"
        assert answer.finish == "length"
        assert answer.history == PROMPT + answer.tokens
        check_statistics(answer)
        assert max(answer.sequence.log.widths[2:]) <= depth + 1


def test_each_step_names_the_drafter_of_each_accepted_token() -> None:
    """The drafter is right k times, then wrong: k guesses a round, then one token of the target."""
    known, kind = KNOWN["greedy"], scripted.KIND
    for right in range(5):

        def script(tokens: list[int], depth: int, right: int = right) -> list[int]:
            said = known[len(tokens) :][:depth]
            return [token if at < right else (token + 1) % VOCABULARY_SIZE for at, token in enumerate(said)]

        answer = answer_to(GREEDY, scripted.Scripted(script), 4, max_tokens=1 + 3 * (right + 1))
        assert answer.guessed_by == [None, *[*[kind] * right, None] * 3]


def test_each_accepted_token_has_the_source_named_in_the_proposal() -> None:
    known = KNOWN["greedy"]
    named = answer_to(GREEDY, scripted.Named(known, ("copy", "model", "copy"), drafted_by="copy"), 3, max_tokens=9)
    assert named.guessed_by == [None, *["copy", "model", "copy", None] * 2]
    spent = answer_to(GREEDY, scripted.Named(known, (), drafted_by="model"), 3, max_tokens=5)
    assert spent.guessed_by == [None, "model", "model", "model", None]
    unnamed = answer_to(GREEDY, scripted.Named(known, ()), 3, max_tokens=5)
    assert unnamed.guessed_by == [None, "unknown", "unknown", "unknown", None]


def test_the_fields_of_statistics_can_be_copied_and_written_as_json() -> None:
    answer = answer_to(GREEDY, scripted.Named(KNOWN["greedy"], (), drafted_by="model"), 3, max_tokens=9)
    stats = DecodeStats()
    for record in answer.records:
        stats.add_round(record)
    assert DecodeStats(**asdict(stats)) == stats
    found = json.loads(json.dumps(asdict(stats)))
    assert (found["accepted_lengths"], found["rounds_by_source"]) == ({"3": 2}, {"model": 2})


def test_an_accepted_end_of_sequence_counts_as_a_guess() -> None:
    stop = PLAIN["greedy"][4]
    answer = answer_to(GREEDY, scripted.oracle(KNOWN["greedy"]), 6, stop_ids=frozenset({stop}))
    end = PLAIN["greedy"].index(stop)
    assert answer.tokens == PLAIN["greedy"][: end + 1]
    assert answer.guessed_by == [None, *[scripted.KIND] * end]


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_the_accepted_share_matches_the_drafters_error_rate(rule: str) -> None:
    sampling, known = TEXT_RULES[rule], KNOWN[rule]
    right = answer_to(sampling, scripted.oracle(known), 4, max_tokens=21)
    assert [(r.proposed, r.evaluated, r.accepted, r.emitted) for r in right.records] == [(4, 4, 4, 5)] * 4
    wrong = answer_to(sampling, scripted.worst(known, VOCABULARY_SIZE), 4, max_tokens=8)
    assert [(r.proposed, r.evaluated, r.accepted, r.emitted) for r in wrong.records] == [
        *[(4, 1, 0, 1)] * 3,
        (3, 1, 0, 1),
        (2, 1, 0, 1),
        (1, 1, 0, 1),
        (0, 0, 0, 1),
    ]
    deaf = answer_to(sampling, scripted.too_long(known, extra=7), 4, max_tokens=60)
    assert [(r.proposed, r.invalid) for r in deaf.records[:3]] == [(4, 7)] * 3


@pytest.mark.parametrize("name", scripted.INVALID_TOKENS)
def test_an_invalid_proposed_token_is_cut_off_and_counted(name: str) -> None:
    make = scripted.INVALID_TOKENS[name]
    answer = answer_to(GREEDY, scripted.Invalid(KNOWN["greedy"], make), 4, max_tokens=21)
    assert [(r.proposed, r.invalid) for r in answer.records[:3]] == [(1, 3)] * 3


@pytest.mark.parametrize("name", scripted.INVALID_PROBS)
def test_an_invalid_distribution_is_cut_off_only_under_the_rejection_rule(name: str) -> None:
    make = scripted.INVALID_PROBS[name]
    state = scripted.Invalid([0] * 200, make)
    answer = answer_to(REJECTION, state, 4, max_tokens=21)
    assert len(answer.tokens) == 21
    check_statistics(answer)
    assert [(r.proposed, r.invalid) for r in answer.records[:3]] == [(1, 3)] * 3
    ignored = answer_to(KEYED, scripted.Invalid([0] * 200, make), 4, max_tokens=21)
    assert ignored.tokens == PLAIN["keyed"][:21]
    assert [(r.proposed, r.invalid) for r in ignored.records[:3]] == [(4, 0)] * 3


def test_a_proposal_with_too_few_distributions_is_discarded() -> None:
    state = scripted.WrongLengths(lambda tokens, depth: [0] * depth)
    answer = answer_to(REJECTION, state, 3, max_tokens=12)
    assert [(r.proposed, r.invalid) for r in answer.records[:3]] == [(0, 3)] * 3


def test_copies_of_repeating_text_are_accepted_and_leave_the_text_unchanged() -> None:
    plain = answer_to(model=FakeModel(order=2), max_tokens=60)
    request = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=VOCABULARY_SIZE, context_length=100)
    answer = answer_to(GREEDY, LookupDrafter().start(request), 5, model=FakeModel(order=2), max_tokens=60)
    assert answer.tokens == plain.tokens
    check_statistics(answer)
    assert sum(r.accepted for r in answer.records) > 20


def test_drafting_changes_the_text_if_rows_depend_on_the_width() -> None:
    """If rows depend on the width, drafting changes the text, so the equality tests above can fail."""
    changed = 0
    for seed in range(5):
        plain = answer_to(model=FakeModel(seed=seed, width_noise=0.5), max_tokens=60)
        known = PROMPT + plain.tokens
        drafted = answer_to(
            GREEDY, scripted.oracle(known), 4, model=FakeModel(seed=seed, width_noise=0.5), max_tokens=60
        )
        check_statistics(drafted)
        changed += drafted.tokens != plain.tokens
    assert changed > 0


# ------------------------------------------------------------------------------------- budget and context


@pytest.mark.parametrize("drafter", ["oracle", "worst", "too long", "random"])
@pytest.mark.parametrize("room", range(10))
def test_an_answer_ends_exactly_at_the_context_length(room: int, drafter: str) -> None:
    for depth in (0, 1, 3, 8):
        for max_tokens in (None, room + 5):
            own = start(FakeModel(), PROMPT, len(PROMPT) + room)
            decoding = loop(own, GREEDY, DRAFTERS[drafter](KNOWN["greedy"]), depth, max_tokens)
            if room == 0:
                with pytest.raises(PromptTooLongError):
                    own.take(decoding.steps())
                assert own.history == PROMPT
                continue
            own.take(decoding.steps())
            assert own.tokens == PLAIN["greedy"][:room]
            assert own.finish == "length"
            check_statistics(own)


@pytest.mark.parametrize("max_tokens", range(1, 6))
@pytest.mark.parametrize("drafter", ["oracle", "worst", "too long", "stuttering"])
def test_an_answer_has_at_most_max_tokens(max_tokens: int, drafter: str) -> None:
    for depth in range(9):
        answer = answer_to(GREEDY, DRAFTERS[drafter](KNOWN["greedy"]), depth, max_tokens=max_tokens)
        assert answer.tokens == PLAIN["greedy"][:max_tokens]
        assert answer.finish == "length"
        check_statistics(answer)


def test_the_requested_depth_never_exceeds_the_remaining_tokens() -> None:
    for context_length, max_tokens, depth in itertools.product((20, 25, 100), (1, 2, 7, 12, None), (1, 3, 8)):
        state = scripted.often_right(KNOWN["greedy"], VOCABULARY_SIZE)
        answer = answer_to(GREEDY, state, depth, context_length=context_length, max_tokens=max_tokens or 30)
        for length, asked in state.asked:
            left = (max_tokens or 30) - (length - len(PROMPT)) - 1
            assert 1 <= asked <= min(depth, left, context_length - length - 1)
        check_statistics(answer)


# --------------------------------------------------------------------------------------------------- stops


@pytest.mark.slow
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("drafter", ["oracle", "worst", "often right", "too long", "empty"])
def test_a_stop_token_ends_the_serial_answer_at_any_place(drafter: str, rule: str) -> None:
    plain = PLAIN[rule]
    firsts = [(place, token) for place, token in enumerate(plain[:40]) if token not in plain[:place]]
    assert len(firsts) > 6
    for place, stop_id in firsts:
        for depth in (0, 1, 2, 5, 8):
            stop_ids = frozenset({stop_id})
            state = DRAFTERS[drafter](KNOWN[rule])
            answer = answer_to(TEXT_RULES[rule], state, depth, max_tokens=50, stop_ids=stop_ids)
            assert answer.tokens == plain[: place + 1], "the stop itself is emitted, nothing after it"
            assert answer.finish == "stop"
            check_statistics(answer, stop_ids)


def test_an_accepted_stop_token_is_emitted_and_ends_verification() -> None:
    plain = PLAIN["greedy"]
    place = next(i for i, token in enumerate(plain) if 2 <= i <= 6 and token not in plain[:i])
    stop_ids = frozenset({plain[place]})
    answer = answer_to(GREEDY, scripted.oracle(KNOWN["greedy"]), 8, stop_ids=stop_ids)
    (record,) = answer.records
    # What was drafted behind the stop is not verified: it would only widen the forward.
    assert (record.proposed, record.evaluated, record.accepted, record.emitted) == (place, place, place, place)
    assert answer.sequence.tokens == answer.history[:-1]


def test_a_rejected_stop_token_does_not_end_the_answer() -> None:
    unused = next(i for i in range(VOCABULARY_SIZE) if i not in PLAIN["greedy"][:6])
    state = scripted.eos_inside(KNOWN["greedy"], unused)
    answer = answer_to(GREEDY, state, 4, max_tokens=6, stop_ids=frozenset({unused}))
    assert answer.tokens == PLAIN["greedy"][:6]
    assert answer.finish == "length"


def test_a_stop_token_at_max_tokens_finishes_with_stop() -> None:
    plain = PLAIN["greedy"]
    place = next(i for i, token in enumerate(plain) if i > 1 and token not in plain[:i])
    for depth in (0, 8):
        answer = answer_to(
            GREEDY, scripted.oracle(KNOWN["greedy"]), depth, max_tokens=place + 1, stop_ids=frozenset({plain[place]})
        )
        assert (answer.tokens, answer.finish) == (plain[: place + 1], "stop")


# -------------------------------------------------------------------------------------- cancel and failures


def continue_answer(own: Answer, sampling: Sampling, drafter: DraftState, depth: int, total: int) -> None:
    own.sequence.reset_cancel()
    emitted = len(own.history) - len(PROMPT)
    own.take(loop(own, sampling, drafter, depth, total - emitted).steps())


def check_rolled_back(own: Answer) -> None:
    """The history ends at the last emitted token and the cache holds a prefix of the history."""
    assert own.history == PROMPT + own.tokens
    assert own.sequence.tokens == own.history[: own.sequence.length]
    assert own.sequence.length in ({len(own.history) - 1} if own.tokens else {0, len(PROMPT) - 1, len(PROMPT)})


@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_after_a_cancel_at_any_forward_decoding_resumes_with_the_same_text(depth: int, rule: str) -> None:
    sampling, known = TEXT_RULES[rule], KNOWN[rule]
    forwards = len(answer_to(sampling, scripted.often_right(known, VOCABULARY_SIZE), depth).sequence.log.widths)
    assert forwards > 3
    for call in range(1, forwards + 1):
        own = start(FakeModel(faults=Faults(cancel_at=call)), PROMPT)
        state = scripted.often_right(known, VOCABULARY_SIZE)
        with pytest.raises(CancelledError):
            own.take(loop(own, sampling, state, depth).steps())
        check_rolled_back(own)
        with pytest.raises(CancelledError):
            own.take(loop(own, sampling, state, depth).steps())  # until reset, every forward is cancelled
        check_rolled_back(own)
        continue_answer(own, sampling, state, depth, TOKENS)
        assert own.tokens == PLAIN[rule][:TOKENS]


@pytest.mark.parametrize("depth", [0, 4])
def test_a_cancel_between_rounds_leaves_history_and_cache_consistent(depth: int) -> None:
    for rounds in range(1, 8):
        for cancels in (True, False):
            own = start(FakeModel(), PROMPT)
            state = scripted.often_right(KNOWN["keyed"], VOCABULARY_SIZE)
            steps = loop(own, KEYED, state, depth).steps()
            own.take(itertools.islice(steps, rounds))
            if cancels:
                own.sequence.cancel()
                with pytest.raises(CancelledError):
                    next(steps)
            else:
                steps.close()
            check_rolled_back(own)
            continue_answer(own, KEYED, state, depth, TOKENS)
            assert own.tokens == PLAIN["keyed"][:TOKENS]


@pytest.mark.parametrize("error", [ForwardError("broken", code=-3), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_failure_at_any_forward_rolls_back_to_the_last_committed_token(depth: int, error: BaseException) -> None:
    known = KNOWN["keyed"]
    forwards = len(answer_to(KEYED, scripted.often_right(known, VOCABULARY_SIZE), depth).sequence.log.widths)
    for call in range(1, forwards + 1):
        own = start(FakeModel(faults=Faults(raise_at=call, error=lambda: error)), PROMPT)
        state = scripted.often_right(known, VOCABULARY_SIZE)
        with pytest.raises(type(error)) as caught:
            own.take(loop(own, KEYED, state, depth).steps())
        assert caught.value is error
        check_rolled_back(own)
        continue_answer(own, KEYED, state, depth, TOKENS)
        assert own.tokens == PLAIN["keyed"][:TOKENS]


@pytest.mark.parametrize("sampling", [GREEDY, KEYED, REJECTION])
@pytest.mark.parametrize("call", range(2, 6))  # the first forward scores nothing
def test_logits_that_are_not_finite_raise_an_error(call: int, sampling: Sampling) -> None:
    own = start(FakeModel(faults=Faults(nan_at=call)), PROMPT)
    state = scripted.random_tokens(VOCABULARY_SIZE)
    with pytest.raises(NonFiniteLogitsError):
        own.take(loop(own, sampling, state, 3).steps())
    check_rolled_back(own)
    continue_answer(own, sampling, state, 3, TOKENS)
    assert len(own.tokens) == TOKENS
    if sampling is GREEDY:
        assert own.tokens == PLAIN["greedy"][:TOKENS]


def test_a_failed_rewind_is_raised() -> None:
    rewinds = len(answer_to(KEYED, scripted.worst(KNOWN["keyed"], VOCABULARY_SIZE), 3).sequence.log.rewinds)
    for call in range(1, rewinds + 1):
        own = start(FakeModel(faults=Faults(refuse_rewind_at=call)), PROMPT)
        state = scripted.worst(KNOWN["keyed"], VOCABULARY_SIZE)
        with pytest.raises(RewindError):
            own.take(loop(own, KEYED, state, 3).steps())
        check_rolled_back(own)  # the second rewind, while the error is raised, succeeds
        continue_answer(own, KEYED, state, 3, TOKENS)
        assert own.tokens == PLAIN["keyed"][:TOKENS]


def test_a_cache_that_cannot_rewind_raises_the_first_error_and_keeps_the_history() -> None:
    own = start(FakeModel(), PROMPT)
    steps = loop(own, KEYED, scripted.worst(KNOWN["keyed"], VOCABULARY_SIZE), 3).steps()
    own.take(itertools.islice(steps, 3))
    attempts = []

    def refuse(length: int) -> None:
        attempts.append(length)
        raise RewindError(f"attempt {len(attempts)}")

    own.sequence.rewind = refuse  # type: ignore[method-assign]
    with pytest.raises(RewindError, match="attempt 1"):
        next(steps)
    assert len(attempts) == 2
    assert own.history == PROMPT + PLAIN["keyed"][:3]


@pytest.mark.parametrize("error", [CancelledError("stop"), DownloadError("not for this target")])
def test_an_error_of_a_single_drafter_ends_the_round_and_rolls_back(error: EdgespecError) -> None:
    own = start(FakeModel(), PROMPT)
    with pytest.raises(type(error)):
        own.take(loop(own, KEYED, scripted.Raising(error, at=3), 3).steps())
    check_rolled_back(own)
    assert len(own.tokens) > 1
    continue_answer(own, KEYED, scripted.empty(), 3, TOKENS)
    assert own.tokens == PLAIN["keyed"][:TOKENS]


# ------------------------------------------------------------------------- what drafter and policy receive


def test_drafter_and_policy_receive_each_rounds_outcome() -> None:
    class Recording(FixedDepth):
        def __init__(self) -> None:
            super().__init__(4)
            self.records: list[RoundRecord] = []

        def record(self, record: RoundRecord) -> None:
            self.records.append(record)

    policy, state = Recording(), scripted.stuttering(KNOWN["greedy"])
    own = start(FakeModel(), PROMPT)
    ticks = itertools.count()
    decoding = DecodeLoop(
        own.sequence,
        state,
        policy,
        Chooser(GREEDY),
        own.history,
        LoopLimits(max_tokens=TOKENS, depth_cap=4, vocabulary_size=VOCABULARY_SIZE),
        clock=lambda: float(next(ticks)),
    )
    own.take(decoding.steps())
    assert policy.records == own.records
    assert {(r.draft_s, r.verify_s, r.round_s) for r in own.records} == {(1.0, 1.0, 2.0)}
    assert own.records[0].source == scripted.KIND
    drafted = [record for record in own.records if record.proposed]
    assert len(drafted) < len(own.records), "an empty proposal teaches the drafter nothing"
    assert [(o.evaluated, o.accepted, len(o.committed)) for o in state.outcomes] == [
        (r.evaluated, r.accepted, r.emitted) for r in drafted
    ]
    assert own.records[1].source == scripted.KIND, "the drafter that spent the time, even for an empty proposal"


def test_a_cached_prefix_of_the_prompt_is_not_fed_again() -> None:
    own = start(FakeModel(), PROMPT)
    own.sequence.forward(PROMPT[:3], 0)
    own.take(loop(own).steps())
    assert own.sequence.log.fed[1:3] == [tuple(PROMPT[3:-1]), (PROMPT[-1],)]
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    whole = start(FakeModel(), PROMPT)
    whole.sequence.forward(PROMPT, 0)
    whole.take(loop(whole).steps())
    assert whole.sequence.log.fed[1] == (PROMPT[-1],), "its scores are needed"
    assert whole.tokens == PLAIN["greedy"][:TOKENS]


def test_without_a_token_to_emit_the_prompt_is_read_up_to_its_last_token() -> None:
    own = start(FakeModel(), PROMPT)
    own.take(loop(own, drafter=scripted.oracle(KNOWN["greedy"]), depth=3, max_tokens=0).steps())
    assert (own.tokens, own.finish, own.history) == ([], None, PROMPT)
    assert own.sequence.log.fed == [tuple(PROMPT[:-1])]
    own.take(loop(own).steps())
    assert own.sequence.log.fed[1] == (PROMPT[-1],)
    assert own.tokens == PLAIN["greedy"][:TOKENS]


# ------------------------------------------------------------------------------ where widths were not compared


class UnlikeBeyond(FakeModel):
    """A model whose rows are bit-equal at every width up to 40 tokens of context, and not beyond."""

    def scores_at_width(self, prefix: Sequence[int], rows: int) -> LogitsArray:
        self.width_noise = 3.0 if len(prefix) > 40 else 0.0
        return super().scores_at_width(prefix, rows)


def limited(exact_length: int | None, depth: int = 3) -> Answer:
    known = PROMPT + answer_to(model=UnlikeBeyond(), max_tokens=60).tokens
    own = start(UnlikeBeyond(), PROMPT)
    limits = LoopLimits(max_tokens=60, depth_cap=depth, vocabulary_size=VOCABULARY_SIZE, exact_length=exact_length)
    drafter = scripted.often_right(known, VOCABULARY_SIZE)
    decoding = DecodeLoop(own.sequence, drafter, FixedDepth(depth), Chooser(GREEDY), own.history, limits)
    return own.take(decoding.steps())


def test_serial_drafting_stops_at_the_longest_compared_context() -> None:
    plain = answer_to(model=UnlikeBeyond(), max_tokens=60).tokens
    within = limited(40)
    assert within.tokens == plain
    ends = [record.context_length + record.width - 1 for record in within.records if record.width > 1]
    assert 36 < max(ends) <= 40, "it drafts up to the limit"
    assert limited(None).tokens != plain, "the model must depend on the width beyond the limit"


# ------------------------------------------------------------------------------------------------- other answers


def test_a_rounds_record_says_which_other_answers_its_forward_computed() -> None:
    class InCompany(FakeSequence):
        @property
        def company(self) -> Company:
            return Company(answers=self.length % 3, rows=2 * (self.length % 3))

        waited_s = 0.0

    model = FakeModel(VOCABULARY_SIZE)
    answer = Answer(list(PROMPT), InCompany(model, 100))
    answer.take(loop(answer).steps())
    found = [record.company.answers for record in answer.records]
    # the forward of a round at n tokens of text fills the cache to n
    assert found == [record.context_length % 3 for record in answer.records]
    assert {0, 1, 2} == set(found)
    assert all(record.company == ALONE for record in answer_to().records)


def test_no_time_of_a_round_has_its_wait_for_other_answers_but_the_rounds_own() -> None:
    class Waiting(FakeSequence):
        company, waited_s = ALONE, 0.25

    answer = Answer(list(PROMPT), Waiting(FakeModel(VOCABULARY_SIZE), 100))
    answer.take(loop(answer).steps())
    for record in answer.records:
        assert record.waited_s == 0.25
        assert record.draft_s + record.verify_s + 0.25 == pytest.approx(record.round_s)
        assert record.own_s == pytest.approx(record.round_s - 0.25)
    plain = answer_to().records
    assert {(record.waited_s, record.own_s - record.round_s) for record in plain} == {(0.0, 0.0)}


def test_a_rounds_record_says_how_many_experts_its_forward_read() -> None:
    class OfExperts(FakeSequence):
        @property
        def experts_read(self) -> int:
            return 10 * self.length

    model = FakeModel(VOCABULARY_SIZE)
    answer = Answer(list(PROMPT), OfExperts(model, 100))
    answer.take(loop(answer).steps())
    # the forward of a round at n tokens of text fills the cache to n, and a wrong guess is dropped after the record
    assert all(record.experts >= 10 * record.context_length for record in answer.records)
    assert {record.experts for record in answer_to().records} == {0}
