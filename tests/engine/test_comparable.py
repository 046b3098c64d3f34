"""Files to compare with the target: found if they have its vocabulary, loaded if they all fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.bench.comparable import find_comparable
from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.errors import ClosedError, InvalidRequestError, MemoryLimitError, ModelFileError
from edgespec.files.model_file import LocatedModel
from edgespec.placement.memory import memory_needed
from edgespec.placement.prepared import PreparedModel
from edgespec.runtimes.runtime import LoadedModel
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.processor import processor_runtimes
from tests.support.tiny_models import TinyModels, answer
from tests.support.trimmed_folder import write_trimmed_folder

KEPT = [token for token in range(640) if token % 4]


@pytest.fixture
def find(tiny: TinyModels) -> Callable[..., tuple[LocatedModel, ...]]:
    locator = Locator(store=Store(tiny.home))
    return lambda *others: find_comparable(str(tiny.target), [str(other) for other in others], locator)


def load(tiny: TinyModels, **overrides: object) -> Engine:
    return tiny.load(**{"draft": "none", "lookup": False, **overrides})  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- finding files


def test_files_to_compare_are_found_in_the_given_order(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]]
) -> None:
    assert find() == ()
    assert [each.name for each in find(tiny.drafter, tiny.target, tiny.ending)] == ["drafter", "target", "ending"]


def test_a_trimmed_drafter_has_the_vocabulary_of_its_source(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]], tmp_path: Path
) -> None:
    (found,) = find(write_trimmed_folder(tiny.drafter, tmp_path / "small", KEPT))
    assert found.drafts_only


def test_a_file_to_compare_may_name_its_runtime(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]]
) -> None:
    found = find(tiny.drafter, f"llama:{tiny.target}", f"native:{tiny.drafter}")
    assert [each.runtime for each in found] == ["auto", "llama", "native"]
    assert [each.name for each in found] == ["drafter", "target", "drafter"]
    with pytest.raises(ModelFileError):
        find(f"onnx:{tiny.target}")  # not a known prefix: a file of that name


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_file_to_compare_is_loaded_in_its_own_runtime_not_the_targets(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]], runtime: str
) -> None:
    for own in processor_runtimes():
        with load(tiny, runtime=own) as engine:
            (model,) = engine.pair.load_comparable(find(f"{runtime}:{tiny.target}"))
            assert (engine.plan.target.runtime, model.facts.runtime) == (own, runtime)


def test_a_file_with_another_vocabulary_raises_a_readable_error(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        find(tiny.drafter, tiny.stranger)
    assert caught.value.message.startswith("stranger has another vocabulary than target (they differ at token ")
    assert "ONNX" in str(caught.value.hint)


def test_a_missing_file_to_compare_is_named_in_the_error(find: Callable[..., tuple[LocatedModel, ...]]) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        find("./nowhere.gguf")


# ------------------------------------------------------------------------------------------------- loading files


def test_models_to_compare_decode_and_are_closed_with_the_engine(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]]
) -> None:
    with load(tiny) as engine:
        assert engine.pair.load_comparable(()) == ()
        first, second = engine.pair.load_comparable(find(tiny.target, tiny.drafter))
        assert (first.facts.name, second.facts.name) == ("target", "drafter")
        assert first.settings.threads == engine.pair.target.settings.threads
        told = []
        for target in (None, first):
            speculation = Speculation(drafters=(), policy=engine.pair.policy, depth_cap=0, target=target)
            with engine.session(_speculation=speculation) as session:
                told.append(answer(session.generate("hello", max_tokens=12)).token_ids)
        assert told[0] == told[1], "the same file gives the same text"
    for model in (first, second):
        with pytest.raises(ClosedError):
            model.open(16)
    with pytest.raises(ClosedError):
        engine.pair.load_comparable(find(tiny.target))


@pytest.mark.usefixtures("llama_repacks")
def test_for_prompts_a_file_is_loaded_again_in_its_fastest_prompt_setting(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]], tmp_path: Path
) -> None:
    located = find(f"llama:{tiny.target}", f"llama:{write_trimmed_folder(tiny.target, tmp_path / 'small', KEPT)}")
    with load(tiny) as engine:
        assert len(engine.pair.load_comparable(located)) == 2
        first, trimmed, other = engine.pair.load_comparable(located, for_prompts=True)
        assert (first.facts.name, trimmed.facts.name, other.facts.name) == ("target", "small", "target")
        assert first.facts.settings | {"repack": False} == other.facts.settings != first.facts.settings
        if "native" in processor_runtimes():
            assert len(engine.pair.load_comparable(find(f"native:{tiny.target}"), for_prompts=True)) == 1


def needed(engine: Engine, located: LocatedModel) -> tuple[int, int]:
    """Bytes of a model with two caches, and of the engine's target with one."""
    settings, context = engine.pair.target.settings, engine.plan.context_length
    once = memory_needed(located, settings, context)
    return 2 * once.total_bytes - once.weights_bytes, once.total_bytes


def test_files_that_do_not_all_fit_are_refused_before_any_is_loaded(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    located = find(tiny.target)[0]
    with load(tiny) as engine:
        twice, own = needed(engine, located)
    opened: list[str] = []
    load_it = PreparedModel.load

    def count(each: PreparedModel) -> LoadedModel:
        opened.append(each.file.name)
        return load_it(each)

    with load(tiny, limits=Limits(max_memory_bytes=own + 2 * twice)) as engine:
        monkeypatch.setattr(PreparedModel, "load", count)
        with pytest.raises(MemoryLimitError, match="target needs about"):
            engine.pair.load_comparable([located] * 3)
        assert opened == []
        assert len(engine.pair.load_comparable([located] * 2)) == 2
        assert opened == ["target"] * 2
        with pytest.raises(MemoryLimitError):
            engine.pair.load_comparable([located])
        session = engine.session()
        with pytest.raises(MemoryLimitError, match="another session"):
            engine.session()  # no memory remains
        session.close()


def test_files_of_which_one_cannot_be_loaded_take_no_memory_and_none_stays_loaded(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_it = list[LoadedModel](), PreparedModel.load

    def fails(each: PreparedModel) -> LoadedModel:
        if loaded:
            raise ModelFileError(each.file.name, "it is damaged")
        loaded.append(load_it(each))
        return loaded[0]

    with load(tiny) as engine:
        before = engine.memory
        monkeypatch.setattr(PreparedModel, "load", fails)
        with pytest.raises(ModelFileError):
            engine.pair.load_comparable(find(tiny.target, tiny.drafter))
        assert engine.memory == before
        with pytest.raises(ClosedError):
            loaded[0].open(16)


def test_files_to_compare_leave_the_drafters_memory_free(
    tiny: TinyModels, find: Callable[..., tuple[LocatedModel, ...]]
) -> None:
    located = find(tiny.target)[0]
    with tiny.load() as engine:
        twice, own = needed(engine, located)
    limits = Limits(max_memory_bytes=own + own + twice // 2)
    with load(tiny, limits=limits) as alone:
        alone.pair.load_comparable([located])
    with tiny.load(limits=limits) as engine, pytest.raises(MemoryLimitError):
        engine.pair.load_comparable([located])
