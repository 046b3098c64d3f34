"""The simulated clock compared with a closed form and with the real loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulated_requests import bounds, print_drawn
from edgespec.interfaces.policy import Allowance
from edgespec.planning.cost.curve import DraftCost, expected_tokens
from tests.support.drawn_requests import (
    LLAMA,
    NATIVE,
    Neighbour,
    Request,
    Scenario,
    World,
    believed,
    draw_request,
    draw_scenario,
    generator,
    prior_of,
)
from tests.support.request_bounds import serve_drawn
from tests.support.simulated_clock import (
    CAUSES,
    Always,
    Controlled,
    Plain,
    Process,
    plain_seconds,
    serve,
    serve_all,
)
from tests.support.simulated_loop import serve_by_loop


def all_right(tokens: int, prompt_tokens: int = 100, *, right: bool = True) -> Request:
    """An answer whose drafter is always right, or never."""
    places = tokens + 9
    return Request(
        kind="code",
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        sure=[0.5] * places,
        right=[right] * tokens + [False] * 9,
        unread=[1.0] * places,
        matched=[0] * places,
        copied=[False] * places,
        noise=[1.0],
    )


# ------------------------------------------------------------------------------------------------- a closed form


def test_plain_decoding_takes_the_prompt_and_a_forward_for_each_token() -> None:
    world, request = replace(NATIVE, attention_s=0.0), all_right(50)
    served = serve(world, Plain(), request)
    assert served.seconds == pytest.approx(99 * world.prompt_token_s + 50 * world.rows_s[0])
    assert served.plain_s == pytest.approx(served.seconds)
    assert (served.rounds, served.tokens_per_round, served.ratio) == (49, 1.0, pytest.approx(1.0))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_drafter_that_is_always_right_takes_the_time_of_the_formula(depth: int) -> None:
    world = replace(NATIVE, attention_s=0.0)
    rounds = 10
    tokens = 1 + rounds * (depth + 1)
    served = serve(world, Always(depth), all_right(tokens), Process(loaded=True))
    first_s = 100 * world.lag_token_s
    # After a fully accepted round the drafter has to read one token more.
    round_s = depth * world.draft_token_s + world.rows_s[depth]
    expected_s = 99 * world.prompt_token_s + world.rows_s[0] + first_s + rounds * round_s
    assert served.rounds == rounds
    assert served.seconds == pytest.approx(expected_s + (rounds - 1) * world.lag_token_s)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_tokens_a_round_equal_the_formula(rate: float) -> None:
    random = generator(7)
    request = replace(draw_request(random, "code", 10, 20_000), right=list(random.random(20_009) < rate))
    served = serve(NATIVE, Always(3), request)
    assert served.tokens_per_round == pytest.approx(expected_tokens([rate] * 3), rel=0.02)


def test_a_drafter_that_is_never_right_costs_its_drafting_and_wider_forwards() -> None:
    world = replace(NATIVE, attention_s=0.0)
    served = serve(world, Always(2), all_right(41, right=False), Process(loaded=True))
    lost_s = 40 * (2 * world.draft_token_s + world.rows_s[2] - world.rows_s[0])
    lost_s += 100 * world.lag_token_s
    assert served.seconds - served.plain_s == pytest.approx(lost_s)
    assert served.saved_s == pytest.approx(0.0)


def test_the_drafter_is_loaded_once_a_process() -> None:
    process = Process()
    first, second = (serve(NATIVE, Always(1), all_right(9), process) for _ in range(2))
    assert (first.spent["load"], second.spent["load"]) == (NATIVE.load_s, 0.0)
    scenario = Scenario(seed=1, world=NATIVE, costs=believed(NATIVE), process_requests=2, kinds=("code",))
    served = serve_all(scenario, Always(1), 5)
    loads = [one.spent["load"] > 0 for one in served if one.request.tokens > 2]
    assert sum(one.spent["load"] > 0 for one in served) <= 3
    assert any(loads)


def test_an_answer_may_end_in_the_middle_of_a_chain() -> None:
    for tokens in range(2, 12):
        served = serve(NATIVE, Always(7), all_right(tokens))
        assert served.depths[-1] <= 7
        assert served.tokens_at[-1] < tokens
        cut = serve(NATIVE, Always(7), replace(all_right(tokens), cut=True, max_tokens=tokens))
        assert cut.rounds == served.rounds


def test_a_drafter_with_a_window_reads_less_and_is_right_less_often() -> None:
    class Windowed(Always):
        def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
            return Allowance(self.depth, None, 32)

    request = draw_request(generator(3), "code", 4000, 400)
    whole, windowed = serve(NATIVE, Always(3), request), serve(NATIVE, Windowed(3), request)
    assert windowed.spent["reading"] < 0.2 * whole.spent["reading"]
    assert windowed.tokens_per_round < whole.tokens_per_round


def test_reading_that_takes_too_long_stops_and_resumes_later() -> None:
    class Impatient(Always):
        def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
            return Allowance(self.depth, None, None, 20 * NATIVE.lag_token_s)

    world = replace(NATIVE, attention_s=0.0)
    served = serve(world, Impatient(3), all_right(41), Process(loaded=True), keep=True)
    # 100 tokens in slices of 16, two at a time; text written in between is read as well.
    assert served.depths[:4] == [0, 0, 0, 3]
    assert [record.draft_forwards for record in served.records[:3]] == [0, 0, 0]
    assert served.records[0].sync_s == pytest.approx(32 * NATIVE.lag_token_s)
    assert served.spent["reading"] == pytest.approx((103 + served.rounds - 4) * NATIVE.lag_token_s, rel=0.01)


def test_a_busy_machine_slows_plain_and_drafted_rounds_equally() -> None:
    request = replace(all_right(100), neighbour=Neighbour(first=20, last=60, factor=2.0))
    quiet = plain_seconds(NATIVE, replace(request, neighbour=None))
    busy = plain_seconds(NATIVE, request)
    slow_s = sum(NATIVE.forward_s(1, 100 + place - 1) for place in range(20, 60))
    assert busy - quiet == pytest.approx(slow_s)
    assert serve(NATIVE, Plain(), request).seconds == pytest.approx(busy)


# ----------------------------------------------------------------------------------- conservation and determinism


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_the_simulated_time_add_up(seed: int) -> None:
    scenario = draw_scenario(seed)
    for served in serve_all(scenario, Controlled(scenario), 6):
        assert sum(served.spent.values()) == pytest.approx(served.seconds, rel=1e-9)
        lost_s = sum(served.spent[cause] for cause in CAUSES)
        assert served.seconds == pytest.approx(served.plain_s - served.saved_s + lost_s, rel=1e-9)
        assert served.saved_s >= -1e-9
        assert sum(1 for _ in served.depths) == len(served.tokens_at)


def test_plain_decoding_without_noise_takes_exactly_plain_time() -> None:
    for seed in range(20):
        scenario = draw_scenario(seed)
        for served in serve_all(scenario, Plain(), 3):
            assert abs(served.seconds - served.spent["noise"] - served.plain_s) <= 1e-9 * served.plain_s


def test_the_same_seed_gives_the_same_request_and_times() -> None:
    one, other = draw_scenario(5), draw_scenario(5)
    assert one == other
    assert list(one.requests(4)) == list(other.requests(4))
    assert one.request(3) == list(one.requests(4))[3]
    first, second = (serve_all(scenario, Controlled(scenario), 5) for scenario in (one, other))
    assert first == second
    assert draw_scenario(6) != one
    assert one.request(1) != one.request(2)


# -------------------------------------------------------------------------------------- simulated and real loop


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_simulated_loop_does_the_rounds_of_the_real_loop(seed: int) -> None:
    """Ten requests each: load, learned acceptance and times carry over from request to request."""
    scenario = draw_scenario(seed)
    world = scenario.world
    deciders = Controlled(scenario), Controlled(scenario)
    processes = Process(), Process()
    for request in scenario.requests(10):
        request = replace(request, prompt_tokens=min(request.prompt_tokens, 500))
        served = serve(world, deciders[0], request, processes[0], keep=True)
        records, course = serve_by_loop(world, deciders[1], request, processes[1])
        assert served.records == records
        assert served.seconds == course.clock.now_s
        assert served.spent == pytest.approx(course.clock.spent)


# ------------------------------------------------------------------------------------------ random machines and texts


def test_random_machines_and_texts_cover_the_required_range() -> None:
    scenarios = [draw_scenario(seed) for seed in range(300)]
    requests = [request for scenario in scenarios[:150] for request in scenario.requests(4)]
    assert max(request.prompt_tokens for request in requests) > 5000
    assert min(request.prompt_tokens for request in requests) < 5
    assert max(request.tokens for request in requests) > 1500
    assert min(request.tokens for request in requests) == 1
    loads = [scenario.world.load_s for scenario in scenarios]
    assert min(loads) == 0.0
    assert 3.0 < max(loads) <= 5.0
    assert {scenario.lengths for scenario in scenarios} == {"short", "long", "mixed", "bimodal", "similar", "cut"}
    assert any(request.neighbour is not None for request in requests)
    assert any(request.cut for request in requests)
    factors = [scenario.costs.drafts["model"].token_s / scenario.world.draft_token_s for scenario in scenarios]
    assert min(factors) < 0.75
    assert max(factors) > 1.25


def test_texts_have_the_acceptance_of_their_kind() -> None:
    random = generator(1)
    for kind, least, most in (("code", 0.8, 0.93), ("translation", 0.25, 0.45), ("foreign", 0.04, 0.16)):
        request = draw_request(random, kind, 10, 2000)
        assert least < sum(request.right) / 2000 < most
    copying = draw_request(random, "copying", 10, 2000)
    assert 0.3 < sum(matched > 3 for matched in copying.matched) / 2000 < 0.85


def test_simulated_calibration_is_exact_unless_an_error_is_added() -> None:
    for world in (NATIVE, LLAMA):
        costs = believed(world)
        assert costs.curves is not None
        assert costs.curves.at(96).seconds(4) == world.forward_s(4, 96)
        assert costs.drafts["model"] == DraftCost(token_s=world.draft_token_s, lag_token_s=world.lag_token_s)
    wrong = believed(NATIVE, generator(1), 0.3)
    assert wrong.curves is not None
    assert wrong.curves.at(96).seconds(4) != NATIVE.forward_s(4, 96)
    assert prior_of(0.9).by_position[0] == 0.9


def test_simulated_prompts_take_longer_the_longer_they_are() -> None:
    world: World = NATIVE
    assert world.prompt_s(0) == 0.0
    assert world.prompt_s(2000) > 2 * world.prompt_s(1000)
    assert (
        world.missed(0, 500) == 1.0 > world.missed(64, 500) > world.missed(256, 500) > world.missed(500, 500) == 0.0
    )


def test_few_requests_are_reported_without_the_kinds_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = serve_drawn(Controlled, 1, 0)
    assert drawn.of_kind.keys() - drawn.first.keys(), "no process begins with such a request"
    print_drawn(drawn)
    assert "| - |" in capsys.readouterr().out
    assert len(list(bounds(drawn, []))) == 1 + len(drawn.learned) == 2
