"""Running a suite on the tiny pair: every arm emits plain decoding's tokens, and the counts follow the design."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from edgespec.bench import run as module
from edgespec.bench.arms import ARM_NAMES, Arm, open_arms, parse_arms
from edgespec.bench.run import Answer, RunSettings, run_passes
from edgespec.bench.statistics import abba, shuffled
from edgespec.bench.suite import Prompt
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import CancelledError, ClosedError, MemoryLimitError, PromptTooLongError
from tests.engine.answers import plain_text
from tests.support.bench_answers import require_depth
from tests.support.tiny_models import TinyModels, invent_measurements

CAP = 4
EVERY_ARM = (*ARM_NAMES, *(f"depth-{n}" for n in (0, 1, CAP)), "oracle-depth-3", "lookup-depth-3", "model-depth-2")


def prompt(name: str, text: str, category: str = "chat") -> Prompt:
    return Prompt(id=name, category=category, prompt=text)


PROMPTS = [
    prompt("greeting", "hello world"),
    prompt("water", "what is water", "qa"),
    prompt("copies", "the water the water is the water the water " * 2, "code-edit"),
]


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load_speculating() as engine:
        require_depth(engine, CAP)
        yield engine


@pytest.fixture
def opened(engine: Engine) -> Iterator[list[Arm]]:
    """The arms of most tests."""
    arms = open_arms(engine, ("plain", "planned", "oracle"), CAP)
    yield arms
    for arm in arms:
        arm.session.close()


def settings(**changes: object) -> RunSettings:
    return RunSettings(**{"passes": 1, "max_tokens": 8, **changes})  # type: ignore[arg-type]


def run_arms(
    engine: Engine, names: Sequence[str], prompts: Sequence[Prompt], how: RunSettings, cap: int = CAP
) -> list[Answer]:
    arms = open_arms(engine, names, cap)
    try:
        return run_passes(engine, arms, prompts, how)
    finally:
        for arm in arms:
            arm.session.close()


def by_arm(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        found[answer.arm].append(answer)
    return found


# ------------------------------------------------------------------------------------------- exactness


def check_identical(answers: Sequence[Answer]) -> None:
    found = by_arm(answers)
    assert set(found) == set(EVERY_ARM)
    assert [(a.arm, a.prompt_id) for a in answers if not a.identical] == []
    tokens = {(a.prompt_id, a.tokens) for a in answers}
    assert len(tokens) == len({a.prompt_id for a in answers}), "one length for each prompt"
    for name in ("oracle", "oracle-depth-3"):
        assert all(a.stats.accepted == a.stats.proposed for a in found[name]), name
        assert all(a.stats.proposed > 0 for a in found[name] if a.tokens > 2), name
        assert all(r.accepted == r.proposed for a in found[name] for r in a.rounds)
    assert all(a.stats.accepted == 0 for a in found["worst"])
    assert any(a.stats.proposed > 0 for a in found["worst"])
    for name in ("plain", "again", "loaded", "depth-0"):
        assert all(a.stats.proposed == 0 and len(a.rounds) == a.tokens - 1 for a in found[name]), name
    forced = [a for a in answers if a.arm != "planned"]  # the planned arm has the plan's own cap
    assert max(r.width for a in forced for r in a.rounds) == CAP + 1


@pytest.mark.slow
def test_every_arm_emits_plain_decodings_tokens(engine: Engine) -> None:
    answers = run_arms(engine, EVERY_ARM, PROMPTS, settings(max_tokens=30))
    check_identical(answers)
    assert {answer.tokens for answer in answers} == {30}
    found = by_arm(answers)
    for name in ("model-depth-2", "depth-4", "fixed"):
        stats = [answer.stats for answer in found[name]]
        assert 0 < sum(s.accepted for s in stats) < sum(s.proposed for s in stats), name
    assert all(record.width == 1 or record.source == "model" for a in found["model-depth-2"] for record in a.rounds)


@pytest.mark.slow
def test_answers_that_reach_the_end_token_are_identical(tiny: TinyModels) -> None:
    with tiny.load_speculating(tiny.ending) as engine:
        require_depth(engine, CAP)
        prompts = [prompt(str(number), text) for number, text in enumerate(("hello world", "water"))]
        answers = run_arms(engine, EVERY_ARM, prompts, settings(max_tokens=70))
        check_identical(answers)
        assert min(answer.tokens for answer in answers) < 70, "at least one ended by itself"
        for each in prompts:
            reference = plain_text(engine, each.prompt, max_tokens=70)
            assert {a.tokens for a in answers if a.prompt_id == each.id} == {reference.stats.emitted_tokens}


def test_answers_that_fill_the_context_are_identical(tiny: TinyModels) -> None:
    with tiny.load_speculating(context=128) as engine:
        require_depth(engine, CAP)
        base = len(engine.pair.prompts.request_tokens("water"))
        # Room for 1, 2 and 20 tokens.
        prompts = [prompt(str(room), "water" + " water" * (128 - base - room)) for room in (1, 2, 20)]
        answers = run_arms(engine, EVERY_ARM, prompts, settings(max_tokens=64))
        check_identical(answers)
        for answer in answers:
            assert answer.prompt_tokens == 128 - int(answer.prompt_id)
            assert answer.tokens == int(answer.prompt_id)
            assert (answer.tokens_per_s is None) == (answer.tokens == 1)


SAMPLINGS = (Sampling(temperature=0.7, top_p=0.95, seed=3), Sampling(temperature=1.0, top_k=40, min_p=0.05, seed=4))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_answers_share_the_seed_and_the_text(engine: Engine, sampling: Sampling) -> None:
    names = ("plain", "again", "planned", "oracle", "model-depth-2", "worst")
    answers = run_arms(engine, names, PROMPTS, settings(max_tokens=40, sampling=sampling))
    assert [(a.arm, a.prompt_id) for a in answers if not a.identical] == []
    found = by_arm(answers)
    assert all(a.stats.accepted == a.stats.proposed > 0 for a in found["oracle"])
    assert any(a.stats.proposed > 0 for a in found["model-depth-2"])


def test_answers_use_the_requested_sampling(engine: Engine, opened: list[Arm]) -> None:
    told = []
    for how in ({}, {"sampling": SAMPLINGS[0]}, {"sampling": Sampling(temperature=2.0, seed=9)}):
        done, _ = module._answer(opened[0], PROMPTS[0], settings(max_tokens=30, **how), raw=False, cold=False)
        told.append(done.token_ids)
    assert len(set(told)) == 3


def test_a_prompts_own_max_tokens_limits_its_answers(engine: Engine) -> None:
    prompts = [Prompt(id=str(most), category="qa", prompt="what is water", max_tokens=most) for most in (1, 5, 8, 99)]
    answers = run_arms(engine, ("plain", "planned"), prompts, settings(max_tokens=8, cold=True))
    assert {(a.prompt_id, a.tokens) for a in answers} == {("1", 1), ("5", 5), ("8", 8), ("99", 8)}
    assert all(a.request_s is not None and a.request_s > 0 for a in answers), "a limit of one token also holds"


def test_an_answer_that_differs_from_plain_is_marked(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._answer

    def altered(arm: Arm, *rest: object, **more: object) -> object:
        done, rounds = real(arm, *rest, **more)  # type: ignore[arg-type]
        if arm.name == "planned":
            done = dataclasses.replace(done, token_ids=(*done.token_ids[:-1], done.token_ids[-1] + 1))
        return done, rounds

    monkeypatch.setattr(module, "_answer", altered)
    answers = run_passes(engine, opened, PROMPTS[:1], settings())
    assert {answer.arm for answer in answers if not answer.identical} == {"planned"}
    assert {answer.arm for answer in answers if answer.identical} == {"plain", "oracle"}


# -------------------------------------------------------------------------------------- turns and pairs


def test_default_run_settings_are_three_warm_greedy_passes() -> None:
    assert RunSettings() == RunSettings(passes=3, max_tokens=96, cold=False, sampling=Sampling(), seed=0, rest_s=0.0)


def test_the_rest_before_each_counted_answer_is_applied(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append))
    run_passes(engine, opened, PROMPTS[:1], settings())
    assert slept == []
    run_passes(engine, opened, PROMPTS[:1], settings(rest_s=0.25))
    assert slept == [0.25] * 2 * len(opened)


def test_arms_run_in_abba_order_on_each_prompt(engine: Engine, opened: list[Arm]) -> None:
    names = [arm.name for arm in opened]
    for seed in (0, 5):
        answers = run_passes(engine, opened, PROMPTS, settings(passes=2, seed=seed))
        expected = [
            (each.id, name)
            for number in range(2)
            for place, each in enumerate(shuffled(PROMPTS, seed + number))
            for name in abba(names, 1, seed + number + place)
        ]
        assert [(answer.prompt_id, answer.arm) for answer in answers] == expected
        size = 2 * len(names)
        turns = [answers[at : at + size] for at in range(0, len(answers), size)]
        for place, turn in enumerate(turns):
            assert len({answer.prompt_id for answer in turn}) == 1
            own = [answer.arm for answer in turn]
            assert own == own[::-1], "a linear drift affects every arm equally"
            first_turn = 2 * (place // len(PROMPTS))
            assert [answer.turn for answer in turn] == [first_turn] * len(names) + [first_turn + 1] * len(names)


def test_each_pass_shuffles_the_prompts_differently(engine: Engine) -> None:
    prompts = [prompt(str(number), f"hello {number}") for number in range(8)]
    answers = run_arms(engine, ("plain",), prompts, settings(passes=2, max_tokens=2))
    order = [answer.prompt_id for answer in answers][::2]
    first, second = order[:8], order[8:]
    assert sorted(first) == sorted(second) == [each.id for each in prompts]
    assert first != second


def test_each_answer_has_one_partner_in_every_other_arm(engine: Engine, opened: list[Arm]) -> None:
    answers = run_passes(engine, opened, PROMPTS, settings(passes=2))
    answers += run_passes(engine, opened, PROMPTS, settings(passes=1), first_turn=4)
    keys = [(answer.arm, answer.prompt_id, answer.turn) for answer in answers]
    assert len(set(keys)) == len(keys) == 3 * len(PROMPTS) * 6
    for arm in ("plain", "planned", "oracle"):
        for each in PROMPTS:
            assert [turn for own, name, turn in keys if (own, name) == (arm, each.id)] == list(range(6))


def test_progress_is_reported_after_each_answer(engine: Engine, opened: list[Arm]) -> None:
    told: list[tuple[Answer, int, int]] = []
    answers = run_passes(engine, opened, PROMPTS[:2], settings(passes=2), on_answer=lambda *event: told.append(event))
    assert [answer for answer, _, _ in told] == answers
    assert [done for _, done, _ in told] == list(range(1, len(answers) + 1))
    assert {total for _, _, total in told} == {len(answers)} == {2 * 2 * 2 * 3}


def test_a_run_without_prompts_returns_no_answers(engine: Engine, opened: list[Arm]) -> None:
    assert run_passes(engine, opened, [], settings()) == []


# --------------------------------------------------------------------------------------------- counting


def test_an_answers_token_and_round_counts_agree_with_its_stats(engine: Engine, opened: list[Arm]) -> None:
    answers = run_passes(engine, opened, PROMPTS, settings(max_tokens=30))
    for answer in answers:
        original = next(each for each in PROMPTS if each.id == answer.prompt_id)
        tokens = engine.pair.prompts.request_tokens(original.prompt)
        assert answer.category == original.category
        assert answer.prompt_tokens == len(tokens)
        assert answer.tokens == answer.stats.emitted_tokens == 30
        assert sum(record.emitted for record in answer.rounds) == answer.tokens - 1, (
            "the prefill's token belongs to no round"
        )
        assert len(answer.rounds) == answer.stats.rounds
        assert answer.rounds[0].context_length == len(tokens) + 1
        assert answer.decode_s == answer.stats.decode_s
        assert answer.tokens_per_s == pytest.approx(29 / answer.decode_s)
        assert answer.tokens_per_s == answer.stats.decode_tokens_per_s


def made(**changes: object) -> Answer:
    fields: dict[str, object] = {
        "prompt_id": "p", "category": "c", "arm": "plain", "turn": 0, "prompt_tokens": 5, "tokens": 11,
        "decode_s": 2.0, "ttft_s": None, "identical": True, "rounds": (), "stats": DecodeStats(),
    }  # fmt: skip
    return Answer(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_decoding_speed_needs_two_tokens_and_some_time() -> None:
    assert made().tokens_per_s == 5.0
    assert made(tokens=1).tokens_per_s is None
    assert made(tokens=0).tokens_per_s is None
    assert made(decode_s=0.0).tokens_per_s is None


def test_request_time_runs_from_the_request_to_the_last_token() -> None:
    assert made(ttft_s=0.5).request_s == 2.5
    assert made(ttft_s=0.0).request_s == 2.0
    assert made().request_s is None


# --------------------------------------------------------------------------------------- warm and cold


def test_warm_prompts_are_cached_and_have_no_time_to_first_token(engine: Engine, opened: list[Arm]) -> None:
    for answer in run_passes(engine, opened, PROMPTS, settings()):
        assert (answer.ttft_s, answer.request_s) == (None, None)
        if answer.turn == 1 or answer.arm == "plain":  # the reference answer read the prompt for the plain arm
            assert answer.stats.cached_tokens == answer.prompt_tokens - 1


@pytest.mark.parametrize(("kept", "read"), [(len(PROMPTS), 1), (len(PROMPTS) - 1, 2)])
def test_few_prompts_are_read_once(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch, kept: int, read: int
) -> None:
    """More prompts are read again in each pass; in both cases every answer finds its prompt in the cache."""
    monkeypatch.setattr(module, "MOST_KEPT", kept)
    references = list[str]()
    real = module._answer

    def answered(arm: Arm, each: Prompt, how: RunSettings, **more: bool) -> object:
        if arm.name == "plain" and how.max_tokens == 1:  # what follows the reference answer
            references.append(each.id)
        return real(arm, each, how, **more)

    monkeypatch.setattr(module, "_answer", answered)
    answers = run_passes(engine, opened, PROMPTS, settings(passes=2))
    assert sorted(references) == sorted(each.id for each in PROMPTS for _ in range(read))
    assert all(answer.stats.cached_tokens == answer.prompt_tokens - 1 for answer in answers if answer.arm == "plain")
    assert [answer.identical for answer in answers] == [True] * len(answers)


def test_without_memory_for_more_sessions_prompts_are_read_again(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_session: Session) -> Session:
        raise MemoryLimitError("full", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(Session, "branch", full)
    answers = run_passes(engine, opened, PROMPTS, settings(passes=2))
    assert len(answers) == 2 * 2 * 3 * len(PROMPTS)
    assert all(answer.identical for answer in answers)


def test_cold_prompts_are_read_for_every_answer(engine: Engine) -> None:
    answers = run_arms(engine, ("plain", "planned", "model-depth-2"), PROMPTS, settings(cold=True))
    for answer in answers:
        assert answer.stats.cached_tokens == 0
        assert answer.ttft_s is not None
        assert answer.ttft_s == answer.stats.ttft_s > 0
        assert answer.request_s == answer.ttft_s + answer.decode_s
        assert answer.identical
        if answer.arm == "model-depth-2":  # its drafter has to read the whole prompt
            assert answer.rounds[0].sync_s > 0


def test_a_warm_run_keeps_the_drafters_cache(engine: Engine) -> None:
    answers = run_arms(engine, ("plain", "model-depth-2"), PROMPTS[:1], settings())
    first, second = by_arm(answers)["model-depth-2"]
    assert first.rounds[0].sync_s == second.rounds[0].sync_s == 0, "its cache had the prompt before the timed answers"


def test_a_cold_run_closes_the_drafters_cache(engine: Engine) -> None:
    arms = open_arms(engine, ("plain", "model-depth-2"), CAP)
    session = arms[1].session
    try:
        module._answer(arms[1], PROMPTS[0], settings(), raw=False, cold=False)
        drafts = session._drafts
        module._answer(arms[1], PROMPTS[0], settings(), raw=False, cold=False)
        assert session._drafts is drafts
        done, _ = module._answer(arms[1], PROMPTS[0], settings(), raw=False, cold=True)
        assert done.stats.cached_tokens == 0
        assert session._drafts is not drafts
        assert drafts._parts[0][1]._closed  # type: ignore[attr-defined]
    finally:
        for arm in arms:
            arm.session.close()


# ---------------------------------------------------------------------------------------- being stopped


def test_a_stop_ends_the_run_between_two_answers(engine: Engine, opened: list[Arm]) -> None:
    stop = threading.Event()
    told: list[Answer] = []

    def tell(answer: Answer, done: int, _total: int) -> None:
        told.append(answer)
        if done == 4:
            stop.set()

    with pytest.raises(CancelledError, match="interrupted"):
        run_passes(engine, opened, PROMPTS, settings(), on_answer=tell, stop=stop)
    assert len(told) == 4
    # The sessions are still usable.
    assert len(run_passes(engine, opened, PROMPTS[:1], settings(), stop=threading.Event())) == 6


def test_a_stop_before_the_run_measures_nothing(engine: Engine, opened: list[Arm]) -> None:
    stop = threading.Event()
    stop.set()
    told: list[object] = []
    with pytest.raises(CancelledError):
        run_passes(engine, opened, PROMPTS, settings(), on_answer=lambda *event: told.append(event), stop=stop)
    assert told == []


def test_closing_the_engine_closes_every_arm(tiny: TinyModels) -> None:
    stop = threading.Event()
    stop.set()
    with tiny.load_speculating() as engine:
        arms = open_arms(engine, parse_arms("planned,oracle"), 1)
        with pytest.raises(CancelledError):
            run_passes(engine, arms, PROMPTS, settings(), stop=stop)
    assert [arm.session.closed for arm in arms] == [True] * 3
    with pytest.raises(ClosedError):
        arms[0].session.generate("hello")


def test_a_prompt_longer_than_the_context_is_refused_before_decoding(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[None] = []
    monkeypatch.setattr(module, "_answer", lambda *_, **__: answered.append(None))
    with tiny.load(draft="none", lookup=False, context=128) as engine:
        arms = open_arms(engine, ("plain",), 0)
        prompts = [PROMPTS[0], prompt("endless", "water " * 300)]
        with pytest.raises(PromptTooLongError, match=r"the prompt endless has \d+ tokens.* holds 128") as caught:
            run_passes(engine, arms, prompts, settings())
    assert answered == []
    assert caught.value.hint is not None
    assert "--context" in caught.value.hint


@pytest.mark.parametrize(("names", "loads"), [(("plain", "planned"), True), (("plain",), False)])
def test_a_warm_run_loads_the_drafter_before_timing(
    tiny: TinyModels, names: Sequence[str], loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.load(native_sidecar=False) as engine:
        invent_measurements(engine)
        require_depth(engine, CAP)
        loaded_at: list[int] = []
        monkeypatch.setattr(Engine, "load_drafter", lambda _self: loaded_at.append(len(answers)))
        answers: list[object] = []
        arms = open_arms(engine, names, CAP)
        run_passes(engine, arms, PROMPTS[:1], settings(), on_answer=lambda answer, *_: answers.append(answer))
        assert loaded_at == ([0] if loads else [])


def test_a_cold_run_does_not_preload_the_drafter(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load_drafter", lambda _self: pytest.fail("a cold run must not load it"))
    run_passes(engine, opened, PROMPTS[:1], settings(cold=True))


def test_if_the_drafter_does_not_load_answers_are_plain(
    engine: Engine, opened: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: Engine) -> None:
        raise MemoryLimitError("too large", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(Engine, "load_drafter", fail)
    assert run_passes(engine, opened, PROMPTS[:1], settings())
