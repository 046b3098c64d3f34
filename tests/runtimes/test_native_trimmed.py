"""Trimmed drafters in our kernels: every token can be fed, kept tokens score as with the whole head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import InvalidRequestError, ModelFileError, RuntimeUnavailableError
from edgespec.export.gguf.files import export_trimmed
from edgespec.export.provenance import Provenance
from edgespec.files.trimmed_drafter import TrimmedDrafter, read_artefact
from edgespec.runtimes.native.layout import unsupported_reason
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.runtimes.contract import equal, ids, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.trimmed_folder import write_tied, write_trimmed_folder

require_native()

KEPT = [*range(40), *range(101, 160, 2), 250]


@pytest.fixture(scope="module", params=["own head", "tied"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    own = write_tiny_gguf(folder / "own.gguf", quant="Q4_0", width=128)
    return own if request.param == "own head" else write_tied(own, folder / "tied.gguf")


@pytest.fixture(scope="module")
def artefact(file: Path) -> TrimmedDrafter:
    return read_artefact(write_trimmed_folder(file, file.parent / "trimmed", KEPT))


def load(artefact: TrimmedDrafter) -> NativeModel:
    return load_native(artefact, NativeSettings(threads=2))


@pytest.fixture(scope="module")
def whole(file: Path) -> Iterator[NativeModel]:
    with load_native(file, NativeSettings()) as model:
        yield model


def test_kept_tokens_of_a_trimmed_head_have_the_whole_heads_scores(
    whole: NativeModel, artefact: TrimmedDrafter
) -> None:
    tokens = ids(40, whole)
    assert set(tokens) - set(KEPT), "tokens that the head lacks are fed as well"
    with load(artefact) as model, model.open(64) as sequence, whole.open(64) as reference:
        assert model.facts.vocabulary_size == whole.facts.vocabulary_size
        found, expected = logits(sequence.forward(tokens, 8)), logits(reference.forward(tokens, 8))
        gone = np.setdiff1d(np.arange(whole.facts.vocabulary_size), KEPT)
        for own, truth in zip(found, expected, strict=True):
            assert own[KEPT].tobytes() == truth[KEPT].tobytes()
            assert np.isneginf(own[gone]).all()


def test_a_trimmed_drafter_equals_the_whole_model_with_these_head_rows(
    whole: NativeModel, artefact: TrimmedDrafter
) -> None:
    tokens = ids(40, whole)
    with (
        load(artefact) as model,
        model.open(64) as sequence,
        whole.with_head_rows(np.array(KEPT)) as part,
        part.open(64) as other,
    ):
        mine, theirs = sequence.forward(tokens, 3), other.forward(tokens, 3)
        assert mine.argmax().tolist() == theirs.argmax().tolist()
        for own, expected in zip(mine.top_k(5), theirs.top_k(5), strict=True):
            assert own.tobytes() == expected.tobytes()
        assert equal(logits(mine), logits(theirs))


def test_a_trimmed_drafters_embedding_scale_comes_from_the_manifest(
    file: Path, tmp_path: Path, whole: NativeModel
) -> None:
    tokens = ids(20, whole)
    louder = read_artefact(write_trimmed_folder(file, tmp_path / "louder", KEPT, scale=2.0))
    plain = read_artefact(write_trimmed_folder(file, tmp_path / "plain", KEPT))
    rows = []
    for each in (louder, plain):
        with load(each) as model, model.open(32) as sequence:
            rows.append(sequence.forward(tokens, 1).logits(0)[KEPT])
    assert not np.array_equal(*rows)


@pytest.mark.parametrize("architecture", ["gemma3", "granite", "phi3"])
def test_embeddings_of_an_exported_drafter_are_scaled_once(tmp_path: Path, architecture: str) -> None:
    """The manifest has the scale only for architectures of which llama.cpp scales no given embeddings."""
    settings = {"embedding_scale": 12.0, "logit_scale": 2.0} if architecture == "granite" else {}
    source = write_tiny_gguf(tmp_path / "tiny.gguf", width=128, architecture=architecture, settings=settings)
    kept = np.array(KEPT, dtype=np.int32)
    export_trimmed(source, tmp_path / "out", Provenance(name="tiny"), kept=kept)
    with load(read_artefact(tmp_path / "out")) as model, load_native(source, NativeSettings()) as whole:
        tokens = ids(20, whole)
        with model.open(32) as sequence, whole.open(32) as other:
            mine, theirs = sequence.forward(tokens, 1).logits(0), other.forward(tokens, 1).logits(0)
            assert mine[KEPT].tobytes() == theirs[KEPT].tobytes()


def test_a_trimmed_head_cannot_be_trimmed_again(artefact: TrimmedDrafter) -> None:
    with load(artefact) as model, pytest.raises(InvalidRequestError, match="trimmed already"):
        model.with_head_rows(np.array([1, 2]))


def test_an_embedding_file_that_changed_is_refused(file: Path, tmp_path: Path) -> None:
    artefact = read_artefact(write_trimmed_folder(file, tmp_path / "cut", KEPT))
    table = artefact.embedding.path
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="changed"):
        load(artefact)


def test_a_trimmed_drafter_with_an_embedding_type_without_kernels_is_refused(artefact: TrimmedDrafter) -> None:
    strange = replace(artefact, embedding=replace(artefact.embedding, type_name="IQ2_S"))
    reason = unsupported_reason(strange.model_header, strange)
    assert reason == "it has no kernels for IQ2_S (embedding.bin)"
    with pytest.raises(RuntimeUnavailableError, match="IQ2_S"):
        load(strange)
