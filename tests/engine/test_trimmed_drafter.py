"""A drafter with a trimmed head: the target's text, with accepted guesses."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.load import Limits
from edgespec.errors import InvalidRequestError, MemoryLimitError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.placement.memory import estimate_memory
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.tiny_models import TinyModels, answer, require_speculation
from tests.support.trimmed_folder import edit_manifest, write_trimmed_folder

# The tokens of tiny.target's vocabulary in the trimmed head: three out of four.
KEPT = [token for token in range(640) if token % 4]
SAMPLINGS = {
    "greedy": Sampling(),
    "keyed": Sampling(temperature=0.8, seed=4, top_k=40),
    "penalised": Sampling(temperature=0.7, seed=5, repeat_penalty=1.2, top_p=0.9),
}


@pytest.fixture(scope="module")
def folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trimmed_folder(tiny.drafter, tmp_path_factory.mktemp("trimmed") / "small-drafter", KEPT)


@pytest.fixture(scope="module")
def engine(tiny: TinyModels, folder: Path) -> Iterator[Engine]:
    """Drafts three tokens a round with only the trimmed model, regardless of cost."""
    with tiny.load(draft=str(folder), lookup=False, depth=3) as engine:
        require_speculation(engine, 3)
        yield engine


def say(engine: Engine, prompt: str, sampling: Sampling, depth: int | None = None) -> Done:
    with engine.session() as session:
        return answer(session.generate(prompt, max_tokens=60, sampling=sampling, depth=depth))


def locate(text: Path, home: Home) -> LocatedModel:
    return Locator(store=Store(home)).locate(str(text))


# ------------------------------------------------------------------------------------------------- as a drafter


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("prompt", ["hello world", "über 你好 🙂"])
def test_with_a_trimmed_drafter_the_text_is_the_targets_and_guesses_are_accepted(
    engine: Engine, prompt: str, sampling: Sampling
) -> None:
    plain = say(engine, prompt, sampling, depth=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted = say(engine, prompt, sampling)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.rounds_by_source["model"] > 0
    assert drafted.stats.accepted > 0
    assert drafted.stats.rounds < len(plain.token_ids) - 1
    assert plain.stats.proposed == 0


def test_under_the_rejection_rule_tokens_outside_the_trimmed_head_are_emitted(engine: Engine) -> None:
    sampling = Sampling(temperature=0.8, seed=4, rule="rejection")
    first, second = say(engine, "hello", sampling), say(engine, "hello", sampling)
    assert len(first.token_ids) == 60
    assert first.token_ids == second.token_ids
    assert first.stats.accepted > 0
    # Corrections emit tokens without a row in the drafter's head.
    assert any(token not in KEPT for token in first.token_ids)


def test_a_trimmed_drafter_is_identified_by_its_folder_and_manifest(
    engine: Engine, folder: Path, tiny: TinyModels
) -> None:
    facts = engine.pair.pool.drafter_model().facts
    assert facts.name == "small-drafter"
    assert facts == engine.pair.measurements.drafter  # stored measurements are found again
    whole = read_header(tiny.drafter)
    assert facts.vocabulary_size == whole.vocabulary_size
    assert facts.bytes_per_forward < whole.bytes_per_forward


@pytest.mark.slow
def test_a_trimmed_drafter_can_be_calibrated(tiny: TinyModels, folder: Path, home: Home) -> None:
    with tiny.load(draft=str(folder), lookup=False, calibrate=True, store_home=home, context=256) as engine:
        assert not engine.unmeasured
        times = engine.pair.measurements.drafter_times()
        assert times is not None
        assert times.draft_cost.token_s > 0


def test_a_trimmed_drafter_with_another_vocabulary_is_not_used(tiny: TinyModels, tmp_path: Path) -> None:
    folder = write_trimmed_folder(tiny.stranger, tmp_path / "strange", range(200))
    with pytest.raises(InvalidRequestError, match="strange has another vocabulary"):
        tiny.load(draft=str(folder), lookup=False)


def test_a_trimmed_drafters_own_size_decides_whether_it_fits(tiny: TinyModels, folder: Path) -> None:
    target = tiny.target
    bits = KV_TYPES[LlamaSettings().kv_type][1]
    needed = estimate_memory(read_header(target), 2048, bits).total_bytes
    with pytest.raises(MemoryLimitError, match="small-drafter needs about"):
        tiny.load(draft=str(folder), limits=Limits(max_memory_bytes=needed + 1))
    with pytest.raises(MemoryLimitError):
        tiny.load(draft=str(folder), limits=Limits(max_memory_bytes=needed - 1))


def test_a_damaged_trimmed_folder_named_by_the_caller_is_an_error(
    tiny: TinyModels, folder: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    edit_manifest(damaged, lambda document: document.update(kept=3))
    with pytest.raises(ModelFileError, match="kept is 3") as raised:
        tiny.load(draft=str(damaged))
    assert raised.value.hint


# ------------------------------------------------------------------------------------------------- as a target


def test_a_trimmed_model_as_target_is_refused(tiny: TinyModels, folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="small-drafter has a trimmed output head") as raised:
        tiny.load(folder)
    assert "--draft" in (raised.value.hint or "")


def test_a_trimmed_folders_inner_file_alone_is_refused(tiny: TinyModels, folder: Path) -> None:
    with pytest.raises(ModelFileError, match="no vocabulary"):
        tiny.load(folder / "drafter.gguf")


# ---------------------------------------------------------------------------------------------------- locating


def test_a_trimmed_folder_is_accepted_as_a_model_argument(
    folder: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = locate(folder, home)
    assert located.artefact is not None
    assert (located.name, located.path, located.prepared_folder) == ("small-drafter", folder / "drafter.gguf", None)
    assert located.identity == located.artefact.identity
    assert located.header.vocabulary_size == located.artefact.embedding.rows
    monkeypatch.chdir(folder)
    assert locate(Path(), home).name == "small-drafter"


def test_folders_without_a_manifest_are_not_taken_for_trimmed_models(
    tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    shutil.copy(tiny.target, tmp_path / "model.gguf")
    assert locate(tmp_path, home).artefact is None
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "kind": "gguf"}')
    assert locate(tmp_path, home).name == "model"
    assert locate(tmp_path / "model.gguf", home).artefact is None
    shutil.copy(tiny.target, tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match="holds 2 models"):
        locate(tmp_path, home)


def test_a_trimmed_folder_without_its_manifest_is_refused_with_a_reason(
    folder: Path, home: Home, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "manifest.json").unlink()
    with pytest.raises(ModelFileError, match=r"manifest\.json: no such file"):
        locate(damaged, home)


def test_closing_the_engine_unmaps_the_trimmed_drafters_files(tiny: TinyModels, folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    with tiny.load(draft=str(own), depth=2, lookup=False) as engine:
        say(engine, "hello", Sampling())
        engine.pair.pool.drafter_model()
    del engine
    gc.collect()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what a process has mapped")
    assert str(own) not in maps.read_text(errors="replace")
