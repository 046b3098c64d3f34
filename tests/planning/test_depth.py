"""When drafting is tried, kept and rested, from scripted round times."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from edgespec.decoding.contracts import RoundRecord
from edgespec.planning.depth import TIMING_PLAIN, FixedDepth, TrialPolicy


def round_of(
    source: str | None, round_s: float, *, emitted: int = 1, sync_s: float = 0.0, width: int | None = None
) -> RoundRecord:
    proposed = 0 if source is None else 4
    return RoundRecord(
        width=proposed + 1 if width is None else width,
        context_length=100,
        proposed=proposed if width is None else width - 1,
        evaluated=min(proposed, emitted),
        accepted=emitted - 1,
        invalid=0,
        emitted=emitted,
        source=source,
        draft_s=0.0,
        sync_s=sync_s,
        verify_s=round_s,
        round_s=round_s,
    )


def plain(policy: TrialPolicy, seconds: Iterable[float] = (1.0,) * 8) -> TrialPolicy:
    for one in seconds:
        policy.record(round_of(None, one))
    return policy


def trial(policy: TrialPolicy, speed: float, rounds: int = 4, source: str = "model") -> None:
    """Rounds of 2 tokens that run at ``speed`` times a plain round of one second."""
    for _ in range(rounds):
        retimed(policy, source)
        policy.record(round_of(source, 2 / speed, emitted=2))


def retimed(policy: TrialPolicy, source: str) -> TrialPolicy:
    """Serve the plain rounds that a kept source has to make room for now and then."""
    while policy.why_off(source) == TIMING_PLAIN:
        assert policy.depth(source) == 0
        policy.record(round_of(None, 1.0))
    return policy


def rest_length(policy: TrialPolicy, source: str = "model") -> int:
    """Plain tokens until ``source`` may draft again."""
    tokens = 0
    while policy.depth(source) == 0:
        policy.record(round_of(None, 1.0))
        tokens += 1
        assert tokens < 100_000
    return tokens


def rounds_until_off(policy: TrialPolicy, speed: float) -> int:
    rounds = 0
    while retimed(policy, "model").depth("model") > 0:
        trial(policy, speed, rounds=1)
        rounds += 1
        assert rounds < 1000
    return rounds


def test_the_first_eight_rounds_are_plain() -> None:
    policy = TrialPolicy(5, ["model"])
    for _ in range(8):
        assert policy.depth("model") == 0
        assert policy.why_off("model") == TIMING_PLAIN
        policy.record(round_of(None, 1.0))
    assert policy.depth("model") == 5


def test_an_unknown_source_never_drafts_and_is_ignored() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    assert policy.depth("lookup") == 0
    trial(policy, 0.1, source="lookup")
    assert policy.why_off("lookup") is None
    assert policy.depth("model") == 5
    assert policy.plain_tokens_per_s == pytest.approx(1.0), "its rounds were not plain ones"


def test_four_rounds_decide() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    trial(policy, 0.5, rounds=3)
    assert policy.depth("model") == 5
    trial(policy, 0.5, rounds=1)
    assert policy.depth("model") == 0
    assert policy.why_off("model") == "model drafting measured 0.50x plain"


@pytest.mark.parametrize("speed", [1.0, 1.01, 1.5, 3.0])
def test_what_is_not_slower_is_kept(speed: float) -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    trial(policy, speed, rounds=100)
    retimed(policy, "model")
    assert policy.depth("model") == 5
    assert policy.why_off("model") is None


def test_plain_is_timed_again_while_a_source_is_kept_later_each_time() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    waits = []
    for _ in range(3):
        tokens = 0
        while policy.why_off("model") is None:
            policy.record(round_of("model", 1.0, emitted=2))
            tokens += 2
        waits.append(tokens)
        assert policy.plain_tokens_per_s == pytest.approx(1.0), "the last measurement stands meanwhile"
        retimed(policy, "model")
    assert waits == [64 + 8, 256, 1024]  # kept after four rounds


def test_a_machine_that_got_faster_at_plain_decoding_turns_a_source_off() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    while policy.why_off("model") is None:
        policy.record(round_of("model", 1.5, emitted=2))  # 1.33x plain
    plain(policy, (0.5,) * 8)
    policy.record(round_of("model", 1.5, emitted=2))
    assert policy.depth("model") == 0
    assert policy.why_off("model") == "model drafting measured 0.67x plain"


@pytest.mark.parametrize("speed", [0.99, 0.5, 0.05])
def test_what_is_slower_rests_longer_each_time(speed: float) -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    rests = []
    for _ in range(4):
        trial(policy, speed)
        assert policy.why_off("model") is not None
        rests.append(rest_length(policy))
        assert policy.why_off("model") is None
    assert rests == [64, 256, 1024, 4096]


def test_a_rest_is_counted_in_tokens_of_any_source() -> None:
    policy = plain(TrialPolicy(5, ["model", "lookup"]))
    trial(policy, 0.5)
    trial(policy, 2.0, rounds=31, source="lookup")  # 62 tokens
    assert policy.depth("model") == 0
    policy.record(round_of("lookup", 1.0, emitted=2))
    assert policy.depth("model") == 5
    assert policy.depth("lookup") == 5


def test_success_shortens_the_next_rest() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    for wanted in (64, 256):
        trial(policy, 0.5)
        assert rest_length(policy) == wanted
    trial(policy, 2.0)
    rounds_until_off(policy, 0.2)
    assert rest_length(policy) == 64


def test_a_kept_source_that_becomes_slow_is_turned_off_within_its_window() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    trial(policy, 1.5, rounds=200)
    assert 2 <= rounds_until_off(policy, 0.5) <= 16


@pytest.mark.parametrize("stall_s", [8.0, 100.0, 1e6])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("speed", [1.05, 1.3, 2.0])
def test_a_single_stall_in_the_trial_flips_nothing(speed: float, place: int, stall_s: float) -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    for index in range(4):
        policy.record(round_of("model", stall_s if index == place else 2 / speed, emitted=2))
    assert policy.depth("model") == 5


@pytest.mark.parametrize("kept_for", [4, 16, 50])
@pytest.mark.parametrize("speed", [1.05, 1.3])
def test_a_single_stall_later_flips_nothing(speed: float, kept_for: int) -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    trial(policy, speed, rounds=kept_for)
    retimed(policy, "model").record(round_of("model", 1000.0, emitted=2))
    assert retimed(policy, "model").depth("model") == 5
    trial(policy, speed, rounds=30)
    assert retimed(policy, "model").depth("model") == 5


@pytest.mark.parametrize("place", range(8))
def test_a_single_stall_of_plain_rounds_flips_nothing(place: int) -> None:
    seconds = [1.0] * 8
    seconds[place] = 1000.0
    slower, faster = (plain(TrialPolicy(5, ["model"]), seconds) for _ in range(2))
    assert slower.plain_tokens_per_s == pytest.approx(1.0)
    trial(slower, 0.95)
    trial(faster, 1.05)
    assert (slower.depth("model"), faster.depth("model")) == (0, 5)


def test_many_long_rounds_are_no_stall() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    for seconds in (1.0, 100.0) * 8:
        policy.record(round_of("model", seconds, emitted=2))
        if policy.depth("model") == 0:
            break
    assert policy.depth("model") == 0


def test_catching_up_is_not_the_price_of_a_round() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    for sync_s in (50.0, 0.0, 5.0, 1.0):
        policy.record(round_of("model", 1.5 + sync_s, emitted=2, sync_s=sync_s))
    assert policy.depth("model") == 5


def test_time_spent_on_no_proposal_is_the_drafters() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    for _ in range(2):
        policy.record(round_of("model", 1.0, emitted=2))
        policy.record(round_of("model", 4.0, emitted=1, width=1))
    assert policy.depth("model") == 0
    assert policy.plain_tokens_per_s == pytest.approx(1.0)
    assert policy.why_off("model") == "model drafting measured 0.60x plain"


def test_sources_are_judged_one_by_one() -> None:
    policy = plain(TrialPolicy(5, ["model", "lookup"]))
    trial(policy, 0.5, source="model")
    trial(policy, 2.0, source="lookup")
    assert (policy.depth("model"), policy.depth("lookup")) == (0, 5)


def test_plain_rounds_that_become_faster_win() -> None:
    policy = plain(TrialPolicy(5, ["model"]))
    trial(policy, 1.5)
    plain(policy, [0.5] * 16)
    trial(policy, 1.5, rounds=1)
    assert policy.depth("model") == 0


def test_rounds_without_duration_are_skipped() -> None:
    policy = TrialPolicy(5, ["model"])
    plain(policy, [0.0, -1.0] * 20)
    assert policy.plain_tokens_per_s is None
    assert policy.depth("model") == 0
    plain(policy)
    for _ in range(20):
        policy.record(round_of("model", 1.0, emitted=2, sync_s=1.0))
    assert policy.depth("model") == 5


def test_threads_may_share_it() -> None:
    policy = TrialPolicy(5, ["model", "lookup"])
    errors: list[BaseException] = []
    begin = threading.Barrier(4)

    def work(source: str | None) -> None:
        try:
            begin.wait()
            for _ in range(500):
                policy.record(round_of(source, 1.0, emitted=1 if source is None else 2))
                assert policy.depth("model") in (0, 5)
                assert policy.plain_tokens_per_s in (None, pytest.approx(1.0))
                policy.why_off("lookup")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(source,)) for source in (None, None, "model", "lookup")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    retimed(policy, "model")
    assert (policy.depth("model"), policy.depth("lookup")) == (5, 5)


def test_fixed_depth() -> None:
    policy = FixedDepth(3)
    policy.record(round_of("model", 1000.0))
    assert (policy.depth("model"), policy.depth("anything")) == (3, 3)
    assert policy.why_off("model") is None
    assert FixedDepth(0).depth("model") == 0
    assert FixedDepth(0).why_off("model") == "depth 0 was asked for"
