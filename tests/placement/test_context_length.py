"""How long a context is if no profile says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.pair.load import Limits
from edgespec.files.home import Home
from edgespec.interfaces.model import HOST
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placements, _placement
from edgespec.placement.context_length import (
    LEAST_TOKENS,
    MOST_TOKENS,
    SHARE,
    STEP_TOKENS,
    choose_context,
    least_context,
    unchanged_context,
)
from edgespec.placement.memory import in_steps
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.planning.choice.options import HEADROOM_BYTES, Footprint
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels

PROFILE = load_profile("default", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
Prepare = Callable[[Path], PreparedModel]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    def prepared(path: Path) -> PreparedModel:
        located = Locator(store=Store(Home(tmp_path / "home"))).locate(str(path))
        return Preparation(replace(PROFILE, runtime="native"), 1, LEAST_TOKENS).target(located)

    return prepared


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for longer texts than are chosen."""
    folder = tmp_path_factory.mktemp("long")
    return write_tiny_gguf(folder / "long.gguf", quant="Q8_0", heads=2, kv_heads=1, context_length=4 * MOST_TOKENS)


def allowed_for(models: list[PreparedModel], tokens: int) -> int:
    """The least memory in which a quarter of what the weights leave holds that number of tokens."""
    taken = sum(each.memory.weights_bytes + each.memory.buffers_bytes for each in models)
    cache = sum(replace(each, context_length=tokens).memory.cache_bytes for each in models)
    return taken + round(cache / SHARE)


def test_the_numbers_are_those_that_the_documentation_names() -> None:
    assert (MOST_TOKENS, LEAST_TOKENS, STEP_TOKENS, SHARE) == (32_768, 4_096, 4_096, 0.25)


def test_the_context_is_the_longest_whose_cache_is_a_quarter_of_what_the_weights_leave(
    prepare: Prepare, long: Path
) -> None:
    target = prepare(long)
    trained = target.file.header.context_length
    for models in ([target], [target, target]):  # a drafter's cache counts too
        for tokens in range(2 * STEP_TOKENS, MOST_TOKENS + 1, STEP_TOKENS):
            allowed = allowed_for(models, tokens)
            assert choose_context(trained, models, Placements(), allowed).tokens == tokens
            assert choose_context(trained, models, Placements(), allowed - 8).tokens == tokens - STEP_TOKENS
    whole = choose_context(trained, [target], Placements(), 1 << 40)
    assert whole.tokens == MOST_TOKENS
    assert whole.why is not None
    assert "the most that is chosen of the 131072 that the model was trained for" in whole.why.text


def test_a_small_memory_gets_the_least_and_the_reason_has_the_numbers(prepare: Prepare, long: Path) -> None:
    target = prepare(long)
    for allowed in (0, allowed_for([target], LEAST_TOKENS)):
        found = choose_context(4 * MOST_TOKENS, [target], Placements(), allowed)
        assert found.tokens == LEAST_TOKENS
        assert found.why is not None
        assert found.why.code == "context_chosen"
        assert "4096 tokens, the least that is chosen: their cache takes 0.00 GiB of" in found.why.text
    some = choose_context(4 * MOST_TOKENS, [target], Placements(), allowed_for([target], 3 * STEP_TOKENS))
    assert some.why is not None
    assert "of which a conversation may take a quarter" in some.why.text


def test_a_model_trained_for_less_gets_all_of_it(prepare: Prepare, long: Path) -> None:
    target = prepare(long)
    for trained in (300, LEAST_TOKENS, 10_000, MOST_TOKENS):
        found = choose_context(trained, [target], Placements(), 1 << 40)
        assert found.tokens == trained
        assert found.why is not None
        assert "all that the model was trained for" in found.why.text
    assert choose_context(10_000, [target], Placements(), allowed_for([target], 8192)).tokens == 8192
    assert choose_context(0, [target], Placements(), 1 << 40).tokens == LEAST_TOKENS  # the file does not say it


def test_each_memory_is_looked_at_by_itself(prepare: Prepare, long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.runtimes.llama.runtime import LlamaRuntime

    monkeypatch.setattr(LlamaRuntime, "has_own_memory", lambda _self, device: device != HOST)
    on_card = replace(prepare(long), settings=LlamaSettings(device="CUDA0", gpu_layers=None, kv_type="f16"))
    weights = on_card.file.weight_bytes
    tokens = 2 * STEP_TOKENS
    cache = replace(on_card, settings=LlamaSettings(kv_type="f16"), context_length=tokens).memory.cache_bytes
    card = Placements(memory_bytes={"CUDA0": HEADROOM_BYTES + 2 * weights + 4 * cache})
    found = choose_context(4 * MOST_TOKENS, [on_card], card, 1 << 40)
    assert tokens <= found.tokens < MOST_TOKENS
    full = replace(card, memory_bytes={"CUDA0": weights})
    found = choose_context(4 * MOST_TOKENS, [on_card], full, 1 << 40)
    assert found.tokens == LEAST_TOKENS
    assert found.why is not None
    assert "of CUDA0 that the weights leave" in found.why.text


def test_a_number_is_obeyed_up_to_what_the_model_was_trained_for() -> None:
    assert least_context(300, 2048).tokens == 300
    assert least_context(300, 2048).why is None
    assert least_context(3000, 2048).tokens == 2048
    told = "the context holds 2048 tokens, all that the model was trained for: 3000 were asked for"
    assert least_context(3000, 2048).why == Reason("context_chosen", told)
    assert least_context(3000, 0).tokens == 3000
    assert least_context(None, 0).tokens == least_context(None, 100_000).tokens == LEAST_TOKENS
    assert least_context(None, 512).tokens == 512


def test_an_engine_says_what_was_chosen_and_its_sessions_have_it(tiny: TinyModels, long: Path) -> None:
    with tiny.load(long, draft="none", runtime="native") as engine:
        assert engine.profile.context == "auto"
        assert engine.plan.context_length == MOST_TOKENS
        assert sum(reason.code == "context_chosen" for reason in engine.plan.why) == 1
        allowed = engine.pair.pool.target_memory.weights_bytes + engine.pair.pool.target_memory.buffers_bytes
        with engine.session() as session:
            assert session._target.context_length == MOST_TOKENS  # the length of a cache is not public
    with tiny.load(long, draft="none", runtime="native", context=6000) as engine:
        assert engine.plan.context_length == 6000
        assert "context_chosen" not in [reason.code for reason in engine.plan.why]
    with tiny.load(
        long, draft="none", runtime="native", limits=Limits(max_memory_bytes=allowed + 4_000_000)
    ) as engine:
        assert engine.plan.context_length == LEAST_TOKENS


def test_a_model_with_long_factors_keeps_the_context_in_which_its_short_texts_stay_the_same(
    prepare: Prepare, tmp_path: Path
) -> None:
    path = write_tiny_gguf(
        tmp_path / "phi.gguf",
        architecture="phi3",
        context_length=4 * MOST_TOKENS,
        long_factors=True,
        settings={"rope.scaling.original_context_length": 8192, "rope.scaling.attn_factor": 1.2},
    )
    model = prepare(path)
    assert unchanged_context(model.file.header) == 8192
    plain = prepare(write_tiny_gguf(tmp_path / "plain.gguf", context_length=8192))
    assert unchanged_context(plain.file.header) is None
    found = choose_context(4 * MOST_TOKENS, [model], Placements(), 1 << 40, 8192)
    assert found.tokens == 8192
    assert found.why is not None
    assert "reads all positions otherwise" in found.why.text


def test_layers_with_a_window_count_what_they_keep(prepare: Prepare, tmp_path: Path) -> None:
    """In the estimate, in what a conversation takes, in the placement and in the context that is chosen."""
    shape: dict[str, Any] = {"architecture": "gemma3", "window": 40, "layers": 6, "context_length": MOST_TOKENS}
    target = prepare(write_tiny_gguf(tmp_path / "windowed.gguf", quant="Q8_0", **shape))
    facts, own = target.facts, target.facts.windowed
    assert 0 < own.bytes_per_token == facts.kv_bytes_per_token * 5 // 6
    here, whole = _placement(target, None), target.for_context(MOST_TOKENS).memory
    for tokens in (1024, own.positions, LEAST_TOKENS, MOST_TOKENS):
        assert target.for_context(tokens).memory.cache_bytes == facts.cache_bytes(tokens)
        assert whole.session_bytes(tokens) == facts.cache_bytes(in_steps(tokens)) + whole.buffers_bytes
        assert here.longer(tokens - LEAST_TOKENS) == _placement(replace(target, context_length=tokens), None)
        assert Footprint.whole(facts, tokens).device_bytes == facts.weight_bytes + facts.cache_bytes(tokens)
    allowed = allowed_for([target], 3 * STEP_TOKENS)
    assert choose_context(MOST_TOKENS, [target], Placements(), allowed).tokens == 3 * STEP_TOKENS
    without = target.memory.weights_bytes + target.memory.buffers_bytes
    assert allowed - without < 3 * STEP_TOKENS * facts.kv_bytes_per_token / SHARE / 2
