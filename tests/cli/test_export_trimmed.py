"""``edgespec export --trim-vocab``: which rows are kept, by what they are ranked, and how many pay."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.export.trim import choose_rows
from edgespec.export.trim.vocabtrim import coverage
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.token_rows import always_kept, kept_ids
from edgespec.files.progress import Job
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.placement.prepared import PreparedModel
from edgespec.runtimes.runtime import LoadedModel
from tests.support.command_line import InProcess
from tests.support.exporting import (
    ANSWER_TOKENS,
    AUTO,
    GGUF,
    PROMPTS,
    export_trimmed,
    left_behind,
    succeeded,
    vocabulary_size,
)
from tests.support.tiny_models import TinyModels

pytestmark = pytest.mark.usefixtures("few_prompts")


# ----------------------------------------------------------------------------------------------- trimmed drafters


def test_rows_are_ranked_by_what_the_target_writes(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    options = ("--trim-vocab", "400", "--target", tiny.target)
    found = export_trimmed(here, tiny.drafter, tmp_path / "out", *options)
    ids = set(read_artefact(tmp_path / "out").ids.tolist())
    (cache,) = (here.home / "emissions").iterdir()
    answers = json.loads(cache.read_text())["answers"]
    assert [answer["prompt"] for answer in answers] == [prompt.id for prompt in PROMPTS]
    assert {len(answer["token_ids"]) for answer in answers} == {ANSWER_TOKENS}
    # All that was written fits into the rows that are free; nothing else has a count.
    ranking = [token for place, answer in enumerate(answers) if place % 3 != 2 for token in answer["token_ids"]]
    held_out = [token for answer in answers[2::3] for token in answer["token_ids"]]
    assert {*ranking, *held_out} <= ids
    # The third held out judges what the others would have chosen alone.
    header = read_header(tiny.drafter)
    judged = kept_ids(Counter(ranking), 400, always_kept(header), vocabulary_size=header.vocabulary_size)
    trim = found["manifest"]["trim"]
    assert trim["coverage_held_out"] == pytest.approx(coverage(Counter(held_out), judged))
    assert trim["coverage_held_out"] < 1
    assert trim["ranked_by"] == "target's answers to 6 prompts"
    assert trim["forward_s"] is None
    assert found["trim"] == {"kept": 400, "of": vocabulary_size(tiny.drafter), **trim}
    assert found["bytes_per_token"]["after"] < found["bytes_per_token"]["before"]


def test_counted_answers_are_greedy_and_plain(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    export_trimmed(here, tiny.drafter, tmp_path / "out", "--trim-vocab", "300", "--target", tiny.target)
    (cache,) = (here.home / "emissions").iterdir()
    for answer, prompt in list(zip(json.loads(cache.read_text())["answers"], PROMPTS, strict=True))[::3]:
        options = ("--target", tiny.target, "--depth", "0", "--max-tokens", str(ANSWER_TOKENS), "--json")
        spoken = succeeded(here("generate", prompt.prompt, *options)).json
        assert answer["token_ids"] == spoken["token_ids"]
        assert answer["text"] == spoken["text"]


def test_a_target_without_chat_template_continues_the_prompts(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    options = ("--trim-vocab", "300", "--target", tiny.without_template)
    found = export_trimmed(here, tiny.drafter, tmp_path / "out", *options)
    assert found["trim"]["ranked_by"] == "without-template's answers to 6 prompts"


def test_counted_answers_are_generated_once_and_reused(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--trim-vocab", "300", "--target", tiny.target)
    first = export_trimmed(here, tiny.drafter, tmp_path / "a", *options)
    (cache,) = (here.home / "emissions").iterdir()
    whole = cache.read_bytes()
    asked: list[object] = []
    real = choose_rows.Engine.load

    def opening(*arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(choose_rows.Engine, "load", opening)
    second = export_trimmed(here, tiny.drafter, tmp_path / "b", *options)
    assert not asked
    assert first["manifest"]["files"] == second["manifest"]["files"]
    cache.write_bytes(whole[:-100])
    export_trimmed(here, tiny.drafter, tmp_path / "b", *options)
    assert len(asked) == 1
    assert cache.read_bytes() == whole
    monkeypatch.setattr(choose_rows, "TOKENS_PER_PROMPT", 5)
    export_trimmed(here, tiny.drafter, tmp_path / "b", *options)
    assert len(asked) == 2


def test_an_interrupted_export_resumes_counting_answers(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--trim-vocab", "300", "--target", tiny.target)
    whole = export_trimmed(here, tiny.drafter, tmp_path / "a", *options)
    (cache,) = (here.home / "emissions").iterdir()
    answers = cache.read_bytes()
    cache.unlink()
    saved: list[int] = []
    save = choose_rows.save_answers

    def saving(folder: Any, key: Any, emissions: Any) -> None:
        save(folder, key, emissions)
        saved.append(len(emissions))
        if saved == [1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(choose_rows, "save_answers", saving)
    assert here("export", tiny.drafter, *GGUF, "-o", tmp_path / "b", *options).code == 130
    again = export_trimmed(here, tiny.drafter, tmp_path / "b", *options)
    assert saved == [1, 2, 3, 4, 5, 6]
    assert cache.read_bytes() == answers
    assert again["manifest"]["files"] == whole["manifest"]["files"]


def test_answers_are_counted_even_if_they_cannot_be_stored(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    here.home.mkdir()
    (here.home / "emissions").write_text("a file")
    options = ("--trim-vocab", "300", "--target", tiny.target)
    result = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options))
    assert "its answers could not be stored" in result.err


def test_rows_are_ranked_by_the_profiles_target_by_default(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_TARGET", str(tiny.ending))
    found = export_trimmed(here, tiny.drafter, tmp_path / "out", "--trim-vocab", "300")
    assert found["trim"]["ranked_by"].startswith("ending's answers")


def test_answers_of_a_target_with_another_vocabulary_are_tokenised_again(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    stranger = tiny.stranger
    found = export_trimmed(here, stranger, tmp_path / "out", "--trim-vocab", "264", "--target", tiny.target)
    artefact = read_artefact(tmp_path / "out")
    assert len(artefact.ids) == 264
    assert int(artefact.ids[-1]) < vocabulary_size(stranger)
    assert 0 < found["trim"]["coverage_held_out"] <= 1


def test_trim_from_ranks_rows_without_a_target(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("no target is needed")

    monkeypatch.setattr(choose_rows.Engine, "load", never)
    other = tmp_path / "other.txt"
    other.write_text("naïve café straße\n" * 200)
    options = ("--trim-vocab", "290", "--trim-from", text)
    alone = export_trimmed(here, tiny.drafter, tmp_path / "a", *options)
    both = export_trimmed(here, tiny.drafter, tmp_path / "b", *options, "--trim-from", other)
    assert alone["trim"]["ranked_by"] == "the text of text.txt"
    assert both["trim"]["ranked_by"] == "the text of text.txt, other.txt"
    first, second = read_artefact(tmp_path / "a").ids, read_artefact(tmp_path / "b").ids
    assert not np.array_equal(first, second)
    assert alone["trim"]["coverage_held_out"] > 0.5


def test_trim_from_and_a_named_target_are_both_counted(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path
) -> None:
    options = ("--trim-vocab", "300", "--trim-from", text, "--target", tiny.target)
    found = export_trimmed(here, tiny.drafter, tmp_path / "out", *options)
    assert found["trim"]["ranked_by"] == "the text of text.txt and target's answers to 6 prompts"


def test_a_text_too_short_for_held_out_tokens_has_no_coverage(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello water")
    options = ("--trim-from", short)
    found = export_trimmed(here, tiny.drafter, tmp_path / "out", "--trim-vocab", "300", *options)
    assert found["trim"]["coverage_held_out"] is None
    told = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", "--trim-vocab", "300", *options))
    assert re.search(r"^head +300 of \d+ rows$", told.out, re.MULTILINE)


def test_more_rows_than_the_vocabulary_has_keep_all_rows(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    size = vocabulary_size(tiny.drafter)
    for rows in (size, 10**9):
        result = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", "--trim-vocab", str(rows)))
        assert f"{rows} rows were requested and the vocabulary has {size}: all rows are kept" in result.out
        assert left_behind(tmp_path / "out") == ["manifest.json", "model.gguf"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["trim"]["coverage_held_out"] is None


def test_an_exported_trimmed_drafter_works(
    tiny: TinyModels, here: InProcess, loaded_drafter: None, tmp_path: Path, text: Path
) -> None:
    export_trimmed(here, tiny.drafter, tmp_path / "out", "--trim-vocab", "500", "--trim-from", text)
    options = ("--target", tiny.target, "--max-tokens", "20", "--json")
    alone = succeeded(here("generate", "hello", *options, "--draft", "none")).json
    drafted = succeeded(here("generate", "hello", *options, "--draft", tmp_path / "out", "--depth", "2")).json
    assert drafted["token_ids"] == alone["token_ids"]
    if drafted["plan"]["depth_cap"] > 0:
        assert drafted["stats"]["proposed"] > 0


# -------------------------------------------------------------------------------------------------- measured


def test_trim_auto_measures_the_cost_of_rows_and_removes_its_copies(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, sizes: tuple[int, ...]
) -> None:
    result = succeeded(
        here("export", tiny.drafter, *GGUF, "-o", tmp_path / "x" / "out", *AUTO, "--trim-from", text, "--json")
    )
    found = result.json
    trim, size = found["trim"], vocabulary_size(tiny.drafter)
    assert set(trim["forward_s"]) == {str(size // 2), str(size)}
    assert all(seconds > 0 for seconds in trim["forward_s"].values())
    assert trim["kept"] in (*sizes, size)
    assert trim["size_reasons"]
    assert left_behind(tmp_path / "x") == ["out"]
    if trim["kept"] < size:
        assert len(read_artefact(tmp_path / "x" / "out").ids) == trim["kept"]


@pytest.mark.parametrize(("times_s", "trims"), [((0.002, 0.010), True), ((0.010, 0.010), False)])
def test_trim_auto_chooses_by_measured_times_and_not_by_bytes(
    tiny: TinyModels,
    here: InProcess,
    tmp_path: Path,
    text: Path,
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    times_s: tuple[float, float],
    trims: bool,
) -> None:
    def measured(*_: Any, **__: Any) -> tuple[float, float, float | None]:
        return *times_s, 0.8

    monkeypatch.setattr(choose_rows, "_measure", measured)
    options = (*AUTO, "--trim-from", text)
    result = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options))
    size = vocabulary_size(tiny.drafter)
    assert f"{1000 * times_s[0]:.2f} ms a draft token with {size // 2} rows in llama.cpp" in result.out
    assert ("a forward in llama.cpp takes" in result.out) == trims
    assert re.search(r"^because +(\d+ of \d+ rows hold|all \d+ rows are kept)", result.out, re.MULTILINE)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["kind"] == "trimmed-drafter") == trims
    assert (manifest.get("kept") in sizes) == trims
    assert manifest["trim"]["coverage_held_out"] >= 0.9


def test_trim_auto_times_the_drafter_in_its_final_quantisation(
    tiny: TinyModels,
    here: InProcess,
    tmp_path: Path,
    text: Path,
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Path] = []
    types: list[set[str]] = []
    real = PreparedModel.load

    def opening(model: PreparedModel, _job: Job) -> LoadedModel:
        opened.append(model.file.path)
        types.append({tensor.type_name for tensor in model.file.header.tensors})
        return real(model)

    monkeypatch.setattr(PreparedModel, "load", opening)
    options = (*AUTO, "--trim-from", text)
    export_trimmed(here, tiny.drafter, tmp_path / "out", *options)
    assert opened[1] == tiny.drafter
    export_trimmed(here, tiny.drafter, tmp_path / "out", *options, "--quant", "q4_0")
    assert ["Q4_0" in each for each in types[:4]] == [False, False, True, True]
    perplexity = [tiny.drafter, tmp_path / "out" / "model.gguf"]
    assert opened[4:] in ([], perplexity), "a model that is better left whole is measured before and after"
    assert not any(path.exists() for path in opened[:4] if path != tiny.drafter)
    assert left_behind(tmp_path) == ["out"]


def test_trim_auto_asks_for_llama_cpp_before_it_counts_answers(
    tiny: TinyModels, here: InProcess, tmp_path: Path, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise RuntimeUnavailableError("llama.cpp is not installed", hint="install it")

    monkeypatch.setattr(choose_rows, "load", missing)
    monkeypatch.setattr(choose_rows, "_count", lambda *_: pytest.fail("answers were counted first"))
    result = here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *AUTO, "--trim-for", tiny.target)
    result.failed_well("llama.cpp is not installed")


def test_trim_auto_keeps_a_small_vocabulary_whole_without_measuring(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    result = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *AUTO))
    assert "a trimmed head is not faster for a vocabulary of only" in result.out
    assert left_behind(tmp_path / "out") == ["manifest.json", "model.gguf"]


def test_trim_auto_with_too_little_text_is_an_error(
    tiny: TinyModels, here: InProcess, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    (tmp_path / "short.txt").write_text("hello water")
    result = here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *AUTO, "--trim-from", tmp_path / "short.txt")
    result.failed_well("too short", code=2)
    assert "--trim-vocab" in result.hint
    assert not (tmp_path / "out").exists()
