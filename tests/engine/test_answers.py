"""Answers: the content of the events, and the same text at every depth."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Reading, Round, Text
from edgespec.engine.session import Session
from tests.engine.answers import SAMPLED, Forward, plain_text
from tests.support.tiny_models import TinyModels, answer, read_all, require_speculation, shown

# -------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("depth", [0, 4, None])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_events_add_up_to_the_text_tokens_and_counters_of_done(
    session: Session, depth: int | None, sampling: Sampling
) -> None:
    events, done = read_all(session.generate("hello world", max_tokens=80, depth=depth, sampling=sampling))
    assert [event for event in events if isinstance(event, Done)] == [done]
    texts = [event for event in events if isinstance(event, Text)]
    rounds = [event.record for event in events if isinstance(event, Round)]
    readings = [event for event in events if isinstance(event, Reading)]
    assert readings == events[: len(readings)], "the prompt is read before all else"
    assert len(readings) + len(texts) + len(rounds) + 1 == len(events)
    assert isinstance(events[len(readings)], Text)  # the prefill's token belongs to no round
    assert shown(events) == done.text
    assert tuple(token.id for event in texts for token in event.tokens) == done.token_ids
    assert done.finish_reason == "length"
    assert done.stats.emitted_tokens == len(done.token_ids) == 80
    assert 1 + sum(record.emitted for record in rounds) == 80
    assert done.stats.rounds == len(rounds)
    assert done.stats.accepted == sum(record.accepted for record in rounds)
    assert all(record.accepted <= record.evaluated <= record.proposed == record.width - 1 for record in rounds)
    assert done.stats.ttft_s is not None
    assert done.stats.ttft_s > 0
    # Each Round event precedes its text, and the context grows by the emitted tokens.
    contexts = [record.context_length for record in rounds]
    prompt = done.stats.prompt_tokens
    grown = [prompt + 1 + sum(record.emitted for record in rounds[:count]) for count in range(len(rounds))]
    assert contexts == grown


def test_a_finished_generation_gives_no_further_event(session: Session) -> None:
    generation = session.generate("hello", max_tokens=3)
    answer(generation)
    assert list(generation) == []
    generation.close()
    generation.close()
    assert list(generation) == []


def test_decoding_starts_only_when_the_first_event_is_read(session: Session, forwards: list[Forward]) -> None:
    generation = session.generate("hello", max_tokens=3)
    assert forwards == []
    assert session.messages == ()
    answer(generation)
    assert forwards


def test_the_end_of_sequence_token_is_counted_and_not_shown(tiny: TinyModels) -> None:
    with tiny.load(tiny.ending, draft="none") as engine, engine.session() as session:
        for prompt in ("hello", "what is it", "two words", "water"):
            done = answer(session.generate(prompt, sampling=Sampling(temperature=1.0, seed=2), max_tokens=1500))
            if done.finish_reason == "stop":
                break
            session.clear()
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] in engine.tokenizer.stop_ids
        assert done.text == engine.tokenizer.detokenize(done.token_ids[:-1])
        assert "<|im_end|>" not in done.text
        # The template writes the end of the turn; the cache must not hold it twice.
        following = answer(session.generate("and then", max_tokens=10))
        assert following.stats.cached_tokens == done.stats.prompt_tokens + len(done.token_ids) - 1


# ------------------------------------------------------------------------------------------------------ equality


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(temperature=1.5, top_k=40, seed=5)])
def test_a_conversation_has_the_same_text_at_every_depth(engine: Engine, sampling: Sampling) -> None:
    require_speculation(engine)

    def talk(depth: int | None) -> list[tuple[int, ...]]:
        with engine.session(system="be brief") as session:
            return [
                answer(session.generate(prompt, max_tokens=60, depth=depth, sampling=sampling)).token_ids
                for prompt in ("hello world", "what is water", "你好 🙂")
            ]

    expected = talk(0)
    for depth in (1, 2, 5, engine.plan.depth_cap, 99, None):
        assert talk(depth) == expected, depth


def test_the_equality_tests_see_accepted_and_rejected_guesses(engine: Engine, session: Session) -> None:
    """Tokens are proposed; some are accepted and some rejected."""
    require_speculation(engine, 4)
    done = answer(session.generate("hello world", max_tokens=300, depth=4, sampling=SAMPLED))
    assert 0 < done.stats.accepted < done.stats.evaluated
    assert done.stats.rounds < 299
    assert done.stats.rounds_by_source.keys() == {"model"}


def test_lookup_and_model_drafter_together_keep_the_text(tiny: TinyModels) -> None:
    prompt = "the people use water and the people use words and the people"
    with tiny.load_speculating() as engine:
        require_speculation(engine)
        expected = plain_text(engine, prompt, max_tokens=150).token_ids
        for depth in (3, None):
            with engine.session() as session:
                assert answer(session.generate(prompt, max_tokens=150, depth=depth)).token_ids == expected


def test_only_a_drafter_that_shares_the_targets_noise_is_judged_in_hindsight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, told = type(engine.pair.policy), []
    answers = kind.answer

    def answer_of(policy: Any, **asked: Any) -> Any:
        told.append(asked.get("hindsight"))
        return answers(policy, **asked)

    monkeypatch.setattr(kind, "answer", answer_of)
    with engine.session() as session:
        for temperature, rule in ((0.0, "keyed"), (0.8, "keyed"), (0.0, "rejection"), (0.8, "rejection")):
            sampling = Sampling(temperature=temperature, rule=rule)  # type: ignore[arg-type]
            answer(session.generate("hello", max_tokens=2, sampling=sampling))
    assert [each for each in told if each is not None] == [True, True, True, False]


def test_the_rejection_rule_gives_max_tokens_and_is_repeatable_with_a_seed(engine: Engine) -> None:
    sampling = Sampling(temperature=0.8, seed=4, rule="rejection")
    answers = []
    for _ in range(2):
        with engine.session() as session:
            answers.append(answer(session.generate("hello", max_tokens=60, depth=4, sampling=sampling)))
    assert len(answers[0].token_ids) == 60
    assert answers[0].token_ids == answers[1].token_ids


def test_different_seeds_give_different_texts_and_a_seed_repeats_its_text(engine: Engine) -> None:
    texts = [
        plain_text(engine, "hi", max_tokens=30, sampling=Sampling(temperature=1, seed=s)).text for s in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_without_a_seed_each_answer_draws_one_and_reports_it(engine: Engine) -> None:
    unseeded = Sampling(temperature=1.0)
    found = [plain_text(engine, "hi", max_tokens=30, sampling=unseeded) for _ in range(3)]
    seeds = [done.sampling.seed for done in found]
    assert len(set(seeds)) == 3
    assert len({done.token_ids for done in found}) > 1
    for done, seed in zip(found, seeds, strict=True):
        assert seed is not None
        again = plain_text(engine, "hi", max_tokens=30, sampling=Sampling(temperature=1.0, seed=seed))
        assert again.token_ids == done.token_ids
    assert plain_text(engine, "hi", max_tokens=3).sampling.seed is None, "greedy answers need no seed"
    assert plain_text(engine, "hi", max_tokens=3, sampling=SAMPLED).sampling == SAMPLED


def test_the_sampling_of_one_answer_does_not_affect_the_next(session: Session) -> None:
    greedy = answer(session.generate("hello", max_tokens=20)).token_ids
    session.clear()
    answer(session.generate("hello", max_tokens=20, sampling=Sampling(temperature=2.0, seed=3)))
    session.clear()
    assert answer(session.generate("hello", max_tokens=20)).token_ids == greedy
