"""The log of predictions, and what is counted in it: on the tiny pair, and on answers made up by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import draft_counts, draft_models, draft_rounds
from edgespec.bench.draft_log import MOST_PREDICTIONS, best_of, predictions, write_draft_log
from edgespec.bench.suite import Prompt
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequestError
from edgespec.interfaces.drafting import DraftTree
from tests.support.fake_runtime import FakeModel
from tests.support.tiny_models import TinyModels

PROMPTS = [
    Prompt(id="water", category="qa", prompt="what is water"),
    Prompt(id="copies", category="edit", prompt="the water the water is the water", max_tokens=3),
]


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load_speculating() as engine:
        yield engine


def logged(engine: Engine, path: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    fractions = list(write_draft_log(engine, PROMPTS, path, **options))
    assert fractions == [0.5, 1.0]
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return header, lines


def test_a_log_holds_the_best_predictions_of_target_and_drafter_at_each_token(engine: Engine, tmp_path: Path) -> None:
    header, lines = logged(engine, tmp_path / "log.jsonl", max_tokens=6)
    assert header["predictions"] == MOST_PREDICTIONS
    assert (header["answers"], [line["id"] for line in lines]) == (2, ["water", "copies"])
    assert header["drafter"] is not None
    assert len(lines[1]["token_ids"]) <= 3, "the prompt's own limit"
    for line in lines:
        assert line["prompt_tokens"] == engine.pair.prompts.request_tokens(
            next(prompt.prompt for prompt in PROMPTS if prompt.id == line["id"])
        )
        for model in ("target", "drafter"):
            assert len(line[model]) == len(line["token_ids"]), model
            for place in line[model]:
                odds = [own for _, own in place]
                assert len(place) == MOST_PREDICTIONS
                assert odds == sorted(odds, reverse=True)
                assert 0.0 < sum(odds) <= 1.0 + 1e-5
        # The answer is greedy: each token is the target's best prediction in its place.
        assert [place[0][0] for place in line["target"]] == line["token_ids"]


def test_a_sampled_log_holds_the_answer_of_its_seed(engine: Engine, tmp_path: Path) -> None:
    sampling = Sampling(temperature=2.0, seed=5)
    _, lines = logged(engine, tmp_path / "log.jsonl", max_tokens=6, sampling=sampling)
    with engine.session() as session:
        answer = list(session.generate(PROMPTS[0].prompt, max_tokens=6, sampling=sampling))[-1]
    assert lines[0]["token_ids"] == list(answer.token_ids)  # type: ignore[union-attr]


def test_a_target_without_a_drafter_is_logged_alone(tiny: TinyModels, tmp_path: Path) -> None:
    with Engine.load(str(tiny.target), draft="none", store_home=tiny.home) as alone:
        header, lines = logged(alone, tmp_path / "log.jsonl")
    assert header["drafter"] is None
    assert [line["drafter"] for line in lines] == [None, None]
    assert max(len(line["token_ids"]) for line in lines) <= 96, "the default length"


def test_a_log_that_cannot_be_written_is_one_sentence(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        list(write_draft_log(engine, PROMPTS, tmp_path))


def test_the_best_predictions_are_sorted_and_ties_go_to_the_lowest_id() -> None:
    row = np.array([0.0, 2.0, -np.inf, 2.0, 1.0, 0.0], dtype=np.float32)
    assert [token for token, _ in best_of(row)] == [1, 3, 4, 0]
    assert [token for token, _ in best_of(row[:3])] == [1, 0], "tokens that were not scored are left out"
    total = sum(np.exp([0.0, 2.0, 2.0, 1.0, 0.0]))
    assert [odds for _, odds in best_of(row, 2)] == pytest.approx([np.exp(2) / total] * 2, abs=1e-6)


def test_predictions_of_a_text_do_not_depend_on_where_the_prompt_ends() -> None:
    model = FakeModel(seed=3)
    text = [number % model.vocabulary_size for number in range(90)]
    assert predictions(model, text[:1], text[1:])[-5:] == predictions(model, text[:-5], text[-5:])
    assert predictions(model, text, []) == []


# --------------------------------------------------------------------------------------- what is counted


def line(prompt: list[int], answer: list[int], drafter: list[int] | None = None) -> dict[str, Any]:
    """A logged answer whose target was sure of itself, with a drafter that said those tokens."""
    return {
        "id": "made-up",
        "category": "chat",
        "prompt_tokens": prompt,
        "token_ids": answer,
        "target": [[[token, 0.9], [token + 1, 0.1]] for token in answer],
        "drafter": None if drafter is None else [[[token, 0.8], [token + 1, 0.1]] for token in drafter],
    }


def test_copies_need_three_tokens_and_take_the_latest_of_the_longest_matches() -> None:
    found = list(draft_counts.places(line([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 7])))
    assert [place.copied for place in found] == [4, 9, 1]
    assert [place.matched for place in found] == [3, 4, 5]
    assert draft_counts.counts(found)["copies"] == {"of": 3, "right": 0.6667, "answered": 1.0}
    short = list(draft_counts.places(line([2, 3, 4, 2, 3], [4])))
    assert (short[0].copied, short[0].suffix) == (None, 4)


def test_a_suffix_takes_the_most_frequent_token_after_the_longest_match() -> None:
    [place] = draft_counts.places(line([5, 1, 6, 5, 2, 8, 5, 2, 7, 5], [2]))
    assert (place.suffix, place.matched) == (2, 1)


def test_recycled_are_the_targets_own_predictions_after_the_same_two_tokens() -> None:
    found = list(draft_counts.places(line([1, 2], [3, 1, 2, 3, 2])))
    assert [place.recycled_length for place in found] == [0, 0, 0, 2, 2]
    assert found[3].recycled[0] == (3, 0.9)
    counted = draft_counts.counts(found)
    assert counted["recycled"]["2"] == {"of": 2, "right": 0.5}


def test_guesses_for_the_drafter_are_counted_against_the_drafters_token() -> None:
    found = list(draft_counts.places(line([1, 2, 3, 1, 2], [3, 1], drafter=[3, 9])))
    counted = draft_counts.counts(found)
    assert counted["drafter"]["choices_right"] == [0.5, 0.0, 0.0, 0.0]
    assert counted["for_the_drafter"]["guesses_right"]["1"] == 0.5


def test_a_re_ranking_learns_from_the_text_what_the_drafter_gets_wrong() -> None:
    # The text repeats itself, and the drafter's second choice is right: 2 where it says 1.
    lines = [line([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 3, drafter=[0, 1, 2, 3] * 3) for _ in range(4)]
    found = draft_counts.reranked(lines)
    assert (found["before"], found["after"]) == (0.0, 1.0)


def test_a_re_ranking_of_one_answer_has_no_other_to_be_judged_by() -> None:
    with pytest.raises(ValueError, match="at least two"):
        draft_counts.reranked([line([1, 2], [3, 1], drafter=[3, 9])])


# -------------------------------------------------------------------------------------------- simulated rounds


def twice(eight_rows: float) -> Callable[[int], float]:
    return lambda rows: 1 + (eight_rows - 1) * (rows - 1) / 7


@pytest.mark.parametrize("variant", ["chain-1", "chain-2", "chain-3", "tree", "tree+recycled"])
def test_simulated_rounds_save_time_where_the_answer_repeats_the_text_and_none_elsewhere(variant: str) -> None:
    repeated = line([*range(10, 40)], [*range(10, 40)])
    assert draft_rounds.steps(repeated, variant, twice(1.4)) < 12, "at most eight tokens a round, in 1.4 steps"
    fresh = line([*range(10, 40)], [*range(50, 80)])
    assert draft_rounds.steps(fresh, variant, twice(1.4)) == 29, "plain"


def test_short_matches_and_recycled_predictions_are_guessed_by_the_variants_that_have_them() -> None:
    short = line([1, 2, 9, 3, 2], [2, 9, 4, 2, 9, 5, 2, 9, 6, 2, 9, 7])
    spent = {name: draft_rounds.steps(short, name, twice(1.1)) for name in ("chain-1", "chain-3")}
    assert spent["chain-1"] < spent["chain-3"] == 11
    tree = DraftTree()
    tree.add(-1, 5, 0.8, "lookup")
    draft_rounds.recycle(tree, [1, 2], {(1, 2): [(6, 0.5)], (5,): [(7, 1.0)]})
    assert list(zip(tree.tokens, tree.parents, tree.odds, strict=True)) == [
        (5, -1, 0.8),
        (6, -1, pytest.approx(0.5 * 0.5 * 0.2)),
        (7, 0, 0.5),
    ]


def test_accepted_guesses_are_those_on_the_answers_path() -> None:
    tree = DraftTree()
    for parent, token in ((-1, 1), (-1, 2), (1, 3), (2, 4)):
        tree.add(parent, token, 0.5, "lookup")
    assert draft_rounds.accepted(tree, (0, 1, 2, 3), [2, 3, 4, 5]) == 3
    assert draft_rounds.accepted(tree, (0, 1, 2), [2, 3, 4, 5]) == 2
    assert draft_rounds.accepted(tree, (0, 1, 2, 3), [2]) == 1
    assert draft_rounds.accepted(tree, (), [1]) == 0


def answers(*right: bool, places: int = 60) -> list[dict[str, Any]]:
    """One log: answers of new tokens, in each of which the drafter is sure, and always right or always wrong."""
    lines = []
    for number, hits in enumerate(right):
        ids = list(range(1000 * number + 1, 1000 * number + 1 + places))
        drafted = [[[token if hits else -token, 0.9]] for token in ids]
        lines.append({"category": f"c{number}", "prompt_tokens": [0], "token_ids": ids, "drafter": drafted})
    return lines


def test_a_drafting_model_is_chosen_for_each_answer_by_what_it_would_have_guessed() -> None:
    machine = draft_models.Machine(tuple(1.0 + 0.01 * rows for rows in range(8)), (0.1, 0.1))
    found = draft_models.compared([answers(True, False), answers(False, True)], machine)
    speed = {name: own["speed"] for name, own in found.items()}
    assert min(speed[name] for name in ("best_answer", "recent", "hindsight")) > 1.1 * max(speed["A"], speed["B"])
    assert speed["best_answer"] > 2.0 * speed["hindsight"], "14 tokens are lost, and then a pause"
    assert found["A"]["by_category"]["c0"] > 2.5 > 1.05 > found["A"]["by_category"]["c1"] > 0.9
    same = draft_models.compared([answers(True), answers(True)], machine)
    assert len({own["speed"] for own in same.values()}) == 1


def test_the_better_model_counts_its_price() -> None:
    machine = draft_models.Machine((1.0,) * 8, (0.3, 0.1))
    assert [machine.better(rates) for rates in ((0.7, 0.7), (0.9, 0.2))] == [1, 0]
