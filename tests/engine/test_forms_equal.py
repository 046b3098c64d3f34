"""Twelve schemas, in every way to draft and to draw: the token ids are those of plain decoding with the form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmarks.random_schemas import schema
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.planning.depth.base import FixedDepth
from edgespec.text.grammar.form import form_of
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

SCHEMAS = [schema(number) for number in (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17)]
SAMPLINGS = {
    "greedy": None,
    "temperature": Sampling(temperature=1.0, seed=3),
    "truncated": Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=4),
    "penalised": Sampling(temperature=0.9, min_p=0.02, repeat_penalty=1.2, seed=5),
}
TOKENS = 60
Case = tuple[int, str]
CASES: list[Case] = list(itertools.product(range(len(SCHEMAS)), SAMPLINGS))


@contextmanager
def loaded(tiny: TinyModels, **settings: object) -> Iterator[Engine]:
    with tiny.load(draft=settings.pop("draft", str(tiny.drafter)), runtime="native", depth=3, **settings) as engine:
        yield engine


def ask(engine: Engine, case: Case, depth: int | None = None, speculation: Speculation | None = None) -> Done:
    own, sampling = SCHEMAS[case[0]], SAMPLINGS[case[1]]
    with engine.session(_speculation=speculation) as session:
        return answer(session.generate("hello", schema=own, sampling=sampling, max_tokens=TOKENS, depth=depth))


@pytest.fixture(scope="module")
def plain(tiny: TinyModels) -> dict[Case, tuple[int, ...]]:
    require_native()
    with loaded(tiny, draft="none") as engine:
        return {case: ask(engine, case, depth=0).token_ids for case in CASES}


def chains(engine: Engine) -> Speculation:
    drafters = engine.pair.drafters
    return Speculation(drafters=drafters, policy=FixedDepth(3), depth_cap=3, trees=False)


WAYS: dict[str, Callable[[TinyModels], tuple[dict[str, object], bool]]] = {
    "model": lambda tiny: ({"draft_runtime": "native", "lookup": False}, False),
    "copies": lambda tiny: ({"draft": "none"}, False),
    "chains": lambda tiny: ({"draft_runtime": "native"}, True),
    "pipelined": lambda tiny: ({"draft_runtime": "native", "mode": "pipelined"}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_twelve_schemas_have_the_ids_of_plain_decoding(
    tiny: TinyModels, plain: dict[Case, tuple[int, ...]], way: str
) -> None:
    settings, without_trees = WAYS[way](tiny)
    with loaded(tiny, **settings) as engine:
        speculation = chains(engine) if without_trees else None
        found = {case: ask(engine, case, speculation=speculation) for case in CASES}
    assert {case: done.token_ids for case, done in found.items()} == plain
    assert sum(done.stats.accepted for done in found.values()) > len(SCHEMAS)


@pytest.mark.slow
def test_twelve_schemas_have_the_ids_of_plain_decoding_with_trees(
    tiny: TinyModels, plain: dict[Case, tuple[int, ...]]
) -> None:
    require_native()
    with tiny.load_speculating(runtime="native", draft_runtime="native") as engine:
        found = {case: ask(engine, case) for case in CASES}
    assert {case: done.token_ids for case, done in found.items()} == plain
    assert sum(done.stats.proposed for done in found.values()) > len(SCHEMAS)
    # Few guesses are wrong: those of forced tokens are right.
    assert any(done.stats.proposed > done.stats.accepted for done in found.values())


@pytest.mark.slow
def test_twelve_schemas_have_the_ids_of_plain_decoding_in_batches_of_four(
    tiny: TinyModels, plain: dict[Case, tuple[int, ...]]
) -> None:
    with loaded(tiny, draft_runtime="native") as engine, ThreadPoolExecutor(4) as threads:
        found = dict(zip(CASES, threads.map(lambda case: ask(engine, case).token_ids, CASES), strict=True))
    assert found == plain


@pytest.mark.slow
def test_under_rejection_drafted_answers_keep_their_schemas(tiny: TinyModels) -> None:
    """Their law is that of tests/decoding/test_forms.py; here are real schemas and a real drafter."""
    require_native()
    sampling = Sampling(temperature=1.0, rule="rejection", seed=6)
    accepted = 0
    with loaded(tiny, draft_runtime="native") as engine:
        for own in SCHEMAS:
            with engine.session() as session:
                done = answer(session.generate("hello", schema=own, sampling=sampling, max_tokens=TOKENS))
            accepted += done.stats.accepted
            form = form_of(own)
            assert form is not None
            cursor = engine.pair.forms.compiled(form).cursor()
            assert cursor.allows(done.token_ids) == len(done.token_ids)
    assert accepted > len(SCHEMAS)
