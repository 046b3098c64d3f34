"""The offer of a drafter to fetch: chosen from facts, without fetching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import DrafterOffer, Engine, Sampling
from edgespec.engine.pair import drafter_offer as offers
from edgespec.engine.pair.drafter_offer import UNIVERSAL, best_offer, universal_offer
from edgespec.files.home import Home
from edgespec.interfaces.model import ModelFacts
from edgespec.store import families as table
from edgespec.store.families import Family, KnownDrafter, parse_families
from tests.support.other_programs import User
from tests.support.planning import model_facts
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, put_into_store

FACTS = model_facts(runtime="native", bytes_per_forward=2_500_000_000, weight_bytes=3_000_000_000)


def family(*drafters: KnownDrafter) -> Family:
    import re

    return Family(
        name="X",
        architectures=frozenset({"qwen3"}),
        pre=frozenset({"qwen2"}),
        vocabulary=(1, 10**6),
        called=re.compile("x"),
        drafters=drafters,
    )


def drafter(name: str, *, size: int | None = 400_000_000, draft_bytes: int = 200_000_000) -> KnownDrafter:
    return KnownDrafter(
        name=name,
        repo="org/repo",
        filename=f"{name}.gguf",
        licence="MIT",
        bytes=size,
        draft_bytes=draft_bytes,
        cache_bytes=10,
    )


def test_the_drafter_with_the_largest_expected_speedup_is_offered() -> None:
    asked: list[ModelFacts] = []

    def expected(facts: ModelFacts) -> float | None:
        asked.append(facts)
        return {"a": 1.2, "b": 1.4, "c": None}[facts.name]

    offer = best_offer(family(drafter("a"), drafter("b", draft_bytes=7), drafter("c")), FACTS, expected)
    assert offer == DrafterOffer(
        name="b",
        model="hf:org/repo/b.gguf",
        bytes=400_000_000,
        licence="MIT",
        expected_speedup=1.4,
        target="sha256:big",
    )
    assert asked[1] == replace(
        FACTS, name="b", sha256=None, weight_bytes=400_000_000, bytes_per_forward=7, kv_bytes_per_token=10
    )
    assert offer.as_json() == {
        "name": "b",
        "model": "hf:org/repo/b.gguf",
        "bytes": 400_000_000,
        "licence": "MIT",
        "expected_speedup": 1.4,
        "translated": False,
    }


def test_of_drafters_with_equal_gain_the_smaller_download_is_offered() -> None:
    found = best_offer(family(drafter("a"), drafter("b", size=1)), FACTS, lambda _facts: 1.5)
    assert found is not None
    assert found.name == "b"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, lambda _facts: 2.0),
        (family(), lambda _facts: 2.0),
        (family(drafter("a", size=None)), lambda _facts: 2.0),
        (family(drafter("a")), lambda _facts: None),
    ],
)
def test_no_drafter_is_offered_without_a_family_or_a_gain(
    known: Family | None, expected: Callable[[ModelFacts], float | None]
) -> None:
    assert best_offer(known, FACTS, expected) is None


def test_a_target_without_a_sibling_is_offered_the_universal_drafter_if_it_gains() -> None:
    asked: list[ModelFacts] = []

    def expected(facts: ModelFacts) -> float | None:
        asked.append(facts)
        return 1.6

    offer = universal_offer(FACTS, expected)
    assert offer is not None
    assert (offer.model, offer.licence, offer.translated) == (UNIVERSAL, "Apache-2.0", True)
    assert (offer.expected_speedup, offer.target, offer.as_json()["translated"]) == (1.6, "sha256:big", True)
    assert asked[0].bytes_per_forward < asked[0].weight_bytes == offer.bytes == 98_362_432
    assert universal_offer(FACTS, lambda _facts: None) is None


# ------------------------------------------------------------------------------------------------ with an engine


def families_with(draft_bytes: int, model: str = "hf:org/repo/x.gguf") -> tuple[Family, ...]:
    """The tiny models as a separate family."""
    repo, _, filename = model.removeprefix("hf:").rpartition("/")
    return parse_families(f"""
schema_version = 1
[[families]]
name = "Tiny"
architectures = ["llama"]
pre = ["default"]
vocabulary = [1, 100000]
called = 'tiny'
sampling = {{ temperature = 0.5, top_k = 7, min_p = 0.1 }}
[[families.drafters]]
name = "Tiny 1M"
repo = "{repo}"
filename = "{filename}"
licence = "MIT"
bytes = 1000
draft_bytes = {draft_bytes}
cache_bytes = 1
""")


@pytest.fixture
def tiny_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "families", lambda: families_with(100))


def load(target: Path, home: Home, **overrides: object) -> Engine:
    settings = {"threads": 1, "store_home": home, "runtime": "native", **overrides}
    return Engine.load(str(target), **settings)  # type: ignore[arg-type]


def test_an_engine_offers_its_familys_drafter_without_fetching_it(
    user: User, tiny_family: None, tiny: TinyModels, home: Home
) -> None:
    with load(tiny.slow, home) as engine:
        if engine.pair.target.facts.settings.get("level") == "portable":
            pytest.skip("no times are expected of portable kernels")
        offer = engine.drafter_offer
        assert offer is not None
        assert (offer.name, offer.model, offer.bytes) == ("Tiny 1M", "hf:org/repo/x.gguf", 1000)
        assert offer.expected_speedup > 1.02
        assert offer.target == engine.pair.target.facts.sha256
    assert not home.models.exists(), "no file was fetched"


@pytest.mark.parametrize("overrides", [{"draft": "none"}, {"depth": 0}, {"lookup": False, "draft": "none"}])
def test_no_drafter_is_offered_if_the_caller_disables_drafting(
    user: User, tiny_family: None, tiny: TinyModels, home: Home, overrides: dict[str, object]
) -> None:
    with load(tiny.slow, home, **overrides) as engine:
        assert engine.drafter_offer is None


@pytest.mark.parametrize(("sibling", "offered"), [(100, "hf:org/repo/x.gguf"), (10**9, UNIVERSAL)])
def test_the_universal_drafter_is_offered_where_no_sibling_gains(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch, sibling: int, offered: str
) -> None:
    monkeypatch.setattr(table, "families", lambda: families_with(sibling))
    monkeypatch.setattr(offers, "_UNIVERSAL_READS", 100)
    with load(tiny.slow, home) as engine:
        if engine.pair.target.facts.settings.get("level") == "portable":
            pytest.skip("no times are expected of portable kernels")
        offer = engine.drafter_offer
        assert offer is not None
        assert (offer.model, offer.translated) == (offered, offered == UNIVERSAL)
    assert not home.models.exists(), "no file was fetched"


def test_no_drafter_is_offered_if_there_is_one(user: User, tiny_family: None, tiny: TinyModels, home: Home) -> None:
    with load(tiny.slow, home, draft=str(tiny.drafter)) as engine:
        assert engine.drafter_offer is None
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home) as engine:
        assert engine.drafter_offer is None


def test_a_drafter_too_large_to_gain_is_not_offered(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "families", lambda: families_with(10**9))
    with load(tiny.slow, home) as engine:
        assert engine.drafter_offer is None


def test_a_drafter_without_room_in_memory_is_not_offered(
    user: User, tiny_family: None, tiny: TinyModels, home: Home
) -> None:
    from edgespec import Limits

    with load(tiny.slow, home) as engine:
        needed = engine.pair.pool.target_memory.total_bytes
    with load(tiny.slow, home, limits=Limits(max_memory_bytes=needed + 1_000_000)) as engine:
        assert engine.drafter_offer is None


def test_a_fetched_drafter_that_does_not_draft_is_not_offered_again(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "smollm2-135m"
    monkeypatch.setattr(table, "families", lambda: families_with(100))
    monkeypatch.setattr(KnownDrafter, "model", property(lambda _self: name))
    with load(tiny.slow, home) as engine:
        assert engine.considered_drafters == ()
    put_into_store(home, name, tiny.stranger.read_bytes())
    with load(tiny.slow, home) as engine:
        assert [one.what for one in engine.considered_drafters] == [name]
        assert engine.drafter_offer is None


# ------------------------------------------------------------------------------------------------ sampling


def test_sampling_comes_from_the_family_if_the_file_states_none(
    user: User, tiny_family: None, tiny: TinyModels, home: Home
) -> None:
    with load(tiny.target, home) as engine:
        assert engine.file_sampling == Sampling(temperature=0.5, top_k=7, min_p=0.1)


def test_sampling_stated_in_the_file_overrides_the_family(
    user: User, tiny_family: None, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    key = b"general.sampling.temp"
    stand_in = "z" * (len(key) - len("llama."))
    own = write_tiny_gguf(tmp_path / "tiny-own.gguf", quant="Q8_0", settings={stand_in: 0.25})
    own.write_bytes(own.read_bytes().replace(f"llama.{stand_in}".encode(), key))
    with load(own, home) as engine:
        assert engine.file_sampling == Sampling(temperature=0.25)


def test_sampling_of_a_model_without_a_family_is_greedy(user: User, tiny: TinyModels, home: Home) -> None:
    with load(tiny.target, home) as engine:
        assert engine.file_sampling == Sampling()
