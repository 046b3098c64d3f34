"""What could be fetched as a drafter: decided from facts, with nothing fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import DrafterOffer, Engine, Sampling
from edgespec.engine.drafter_offer import best_offer
from edgespec.files.home import Home
from edgespec.interfaces.model import ModelFacts
from edgespec.store import families as table
from edgespec.store.families import Family, KnownDrafter, parse_families
from tests.support.other_programs import User
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, put_into_store

FACTS = ModelFacts(
    name="big",
    sha256="sha256:b",
    architecture="qwen3",
    runtime="native",
    build="1",
    device="cpu",
    threads=2,
    vocabulary_size=151936,
    trained_context_length=4096,
    weight_bytes=3_000_000_000,
    bytes_per_forward=2_500_000_000,
    kv_bytes_per_token=100_000,
    kv_type="f16",
)


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


def test_the_drafter_that_gains_most_is_offered() -> None:
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
        target="sha256:b",
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
    }


def test_of_equal_gains_the_smaller_download() -> None:
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
def test_nothing_is_offered_where_nothing_is_known_or_gains(
    known: Family | None, expected: Callable[[ModelFacts], float | None]
) -> None:
    assert best_offer(known, FACTS, expected) is None


# ------------------------------------------------------------------------------------------------ an engine


def families_with(draft_bytes: int, model: str = "hf:org/repo/x.gguf") -> tuple[Family, ...]:
    """The tiny models as a family of their own."""
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
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    user = User(tmp_path / "user")
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    return user


@pytest.fixture
def tiny_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "families", lambda: families_with(100))


def load(target: Path, home: Home, **overrides: object) -> Engine:
    settings = {"threads": 1, "store_home": home, "runtime": "native", **overrides}
    return Engine.load(str(target), **settings)  # type: ignore[arg-type]


def test_an_engine_says_what_it_would_fetch(user: User, tiny_family: None, tiny: TinyModels, home: Home) -> None:
    with load(tiny.slow, home) as engine:
        if engine.target_model.facts.settings.get("level") == "portable":
            pytest.skip("no times are expected of portable kernels")
        offer = engine.drafter_offer
        assert offer is not None
        assert (offer.name, offer.model, offer.bytes) == ("Tiny 1M", "hf:org/repo/x.gguf", 1000)
        assert offer.expected_speedup > 1.02
        assert offer.target == engine.target_model.facts.sha256
    assert not home.models.exists(), "nothing was fetched"


@pytest.mark.parametrize("overrides", [{"draft": "none"}, {"depth": 0}, {"lookup": False, "draft": "none"}])
def test_nothing_is_offered_to_who_wants_none(
    user: User, tiny_family: None, tiny: TinyModels, home: Home, overrides: dict[str, object]
) -> None:
    with load(tiny.slow, home, **overrides) as engine:
        assert engine.drafter_offer is None


def test_nothing_is_offered_beside_a_drafter(user: User, tiny_family: None, tiny: TinyModels, home: Home) -> None:
    with load(tiny.slow, home, draft=str(tiny.drafter)) as engine:
        assert engine.drafter_offer is None
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home) as engine:
        assert engine.drafter_offer is None


def test_one_that_is_too_large_is_not_offered(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "families", lambda: families_with(10**9))
    with load(tiny.slow, home) as engine:
        assert engine.drafter_offer is None


def test_one_without_room_is_not_offered(user: User, tiny_family: None, tiny: TinyModels, home: Home) -> None:
    from edgespec import Limits

    with load(tiny.slow, home) as engine:
        needed = engine.pair.session_memory.total_bytes
    with load(tiny.slow, home, limits=Limits(max_memory_bytes=needed + 1_000_000)) as engine:
        assert engine.drafter_offer is None


def test_one_that_was_fetched_and_does_not_draft_is_not_offered_again(
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


def test_answers_are_drawn_as_the_family_says_where_the_file_says_nothing(
    user: User, tiny_family: None, tiny: TinyModels, home: Home
) -> None:
    with load(tiny.target, home) as engine:
        assert engine.file_sampling == Sampling(temperature=0.5, top_k=7, min_p=0.1)


def test_a_file_that_says_something_has_the_word(
    user: User, tiny_family: None, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    key = b"general.sampling.temp"
    stand_in = "z" * (len(key) - len("llama."))
    own = write_tiny_gguf(tmp_path / "tiny-own.gguf", quant="Q8_0", settings={stand_in: 0.25})
    own.write_bytes(own.read_bytes().replace(f"llama.{stand_in}".encode(), key))
    with load(own, home) as engine:
        assert engine.file_sampling == Sampling(temperature=0.25)


def test_a_model_of_no_family_is_greedy(user: User, tiny: TinyModels, home: Home) -> None:
    with load(tiny.target, home) as engine:
        assert engine.file_sampling == Sampling()
