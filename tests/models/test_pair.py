"""A short test of the default pair: a new user's first steps, and the exactness behind them."""

from __future__ import annotations

import re

import pytest

from edgespec import Done, Engine, Sampling, Text
from edgespec.bench.equality import check_equality, spread
from edgespec.bench.suite import builtin_suite

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]


def test_the_plan_of_the_default_pair_says_what_each_drafter_gains(pair: Engine) -> None:
    plan = pair.plan
    assert plan.exactness == "W"
    # Measured on x86 with this kind of build: at least widths 1 to 3.
    assert plan.numeric_class.widths[:2] == (1, 2)
    assert pair.pair.depth_cap_allowed == len(plan.numeric_class.widths) - 1
    if pair.pair.measurements.costs().measured:
        assert plan.predicted_tokens_per_s is not None
    # The machine decides whether a drafter is faster; each has a reason with a number.
    ranking = pair.pair.ranking
    assert ranking is not None
    judged = [*ranking.candidates, *ranking.rejected]
    own = [each for each in judged if each.target == ranking.best.target and each.mode == "serial"]
    for kind in ("lookup", "model"):
        said = [each.verdict.text for each in own if each.drafter is not None and each.drafter.source == kind]
        assert said
        assert all(re.search(r"\d\.\d\dx", reason) for reason in said), said
    assert any(ranking.best.verdict.text in reason for reason in plan.reasons)
    if plan.mode == "plain":
        assert plan.depth_cap == 0
    else:
        assert plan.mode == "serial"
        assert plan.depth_cap == pair.pair.depth_cap_allowed


def test_measurements_are_kept_for_the_next_load(pair: Engine) -> None:
    assert not pair.unmeasured
    with Engine.load("qwen2.5-coder-1.5b", profile="laptop", draft="qwen2.5-coder-0.5b") as again:
        assert not again.unmeasured
        # Answers of other tests teach the acceptance, so the plans may predict different rates.
        assert again.plan.numeric_class == pair.plan.numeric_class
        kept, made = again.pair.measurements, pair.pair.measurements
        assert kept.target_times() is not None
        assert (kept.target_times(), kept.widths(), kept.store.plain_s(kept.target)) == (
            made.target_times(),
            made.widths(),
            made.store.plain_s(made.target),
        )


def test_speculation_emits_plain_decodings_tokens(pair: Engine) -> None:
    prompts = spread(builtin_suite("verify"), 3)[:2]  # a short one, and a long one whose answer copies from it
    report = check_equality(pair, prompts, max_tokens=24)
    assert report.divergences == ()
    assert report.identical == len(prompts)
    assert report.kept
    assert sum(result.accepted for result in report.results) > 0, "nothing was accepted: nothing was tested"
    assert any(result.prompt_tokens > 700 for result in report.results)


def test_two_chat_turns_reuse_the_cache_and_answer_sensibly(pair: Engine) -> None:
    with pair.session() as session:
        first = _answer(session.generate("What is the capital of France? One word.", max_tokens=8))
        assert "Paris" in first.text
        second = _answer(session.generate("And of Italy? One word.", max_tokens=8))
        assert "Rome" in second.text
        assert second.stats.cached_tokens >= first.stats.prompt_tokens


def test_a_seed_fixes_the_sampled_text_at_every_depth(pair: Engine) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
    with pair.session() as session:
        texts = set()
        for depth in (0, 1, None):
            session.clear()
            texts.add(
                _answer(session.generate("Name a bird.", max_tokens=12, sampling=sampling, depth=depth)).token_ids
            )
        assert len(texts) == 1


def test_a_drafter_with_another_vocabulary_leaves_the_text_as_it_is() -> None:
    for target in ("qwen2.5-coder-1.5b", "gemma3-270m"):
        with Engine.load(target, draft="smollm2-135m", lookup=False, depth=3, download=True) as engine:
            engine.load_drafter()
            raw, accepted = not engine.has_chat_template, 0
            for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=1)):
                texts = []
                for depth in (0, None):
                    with engine.session() as session:
                        asked = "The weather in London is"
                        events = session.generate(asked, max_tokens=32, sampling=sampling, depth=depth, raw=raw)
                        done = _answer(events)
                    texts.append(done.token_ids)
                    accepted += done.stats.accepted
                assert texts[0] == texts[1]
            assert accepted > 10


def _answer(events: object) -> Done:
    texts = []
    for event in events:  # type: ignore[attr-defined]
        if isinstance(event, Text):
            texts.append(event.text)
        elif isinstance(event, Done):
            assert event.text == "".join(texts)
            return event
    raise AssertionError("a generation ends with Done")
