"""Hostile files: each is refused with a message, or its forwards run; otherwise this process crashes."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.weights import NativeWeights
from tests.support.hostile_models import DRAFTED, DRAFTING, KINDS, RAN, REFUSED, DamagedModels, use
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf
from tests.support.trimmed_folder import edit_manifest, record_file, write_trimmed_folder

require_native()

MUTATIONS = 80  # of each kind


def accepted(load: Callable[[], NativeModel]) -> bool:
    try:
        model = load()
    except EdgespecError:
        return False
    with model:
        use(model)
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_headers_and_weights_are_refused_or_run_safely(tmp_path: Path, kind: str) -> None:
    files = DamagedModels(kind, tmp_path, random.Random(kind))
    assert files.sound() == (DRAFTED if kind in DRAFTING else RAN)
    found = Counter(files.damaged() for _ in range(MUTATIONS))
    assert min(found[REFUSED], found[RAN] + found[DRAFTED]) > MUTATIONS // 10, found
    assert found[DRAFTED] > MUTATIONS // 10 or kind not in DRAFTING, found


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_mutated_trimmed_folders_are_refused_or_run_safely(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf", vocabulary=VOCABULARY[:20], quant="Q4_0", width=128)
    draw, found = random.Random(3), {True: 0, False: 0}

    def edit(folder: Path) -> None:
        what = draw.randrange(5)
        if what == 0:
            key = draw.choice(("rows", "columns", "bytes", "scale", "type"))
            value: Any = draw.choice((0, 1, -1, 96, 256, 2**32, 2**63, 1e300, "F32", "Q4_K", "Q8_0", True, None, []))
            edit_manifest(folder, lambda manifest: manifest["embedding"].update({key: value}))
        elif what == 1:
            key = draw.choice(("kept", "vocabulary_size", "architecture", "embedding"))
            edit_manifest(folder, lambda manifest: manifest.update({key: draw.choice((0, 1, 2**40, "llama", {}))}))
        else:
            name = draw.choice(("drafter.gguf", "embedding.bin", "ids.npy", "tokenizer.gguf"))
            data = bytearray((folder / name).read_bytes())
            if draw.random() < 0.3:
                data = data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + bytes(draw.randrange(99))
            else:
                at = draw.randrange(len(data) if draw.random() < 0.7 else 200)
                data[at] = draw.randrange(256)
            (folder / name).write_bytes(data)
            if draw.random() < 0.7:  # and the manifest repeats the lie
                record_file(folder, name)

    def load(folder: Path) -> NativeModel:
        return load_native(read_artefact(folder), NativeSettings())

    for number in range(80):
        folder = write_trimmed_folder(source, tmp_path / str(number), range(0, 90, 2))
        edit(folder)
        found[accepted(lambda folder=folder: load(folder))] += 1  # type: ignore[misc]
    assert min(found.values()) > 8, found


def test_an_embedding_table_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf", vocabulary=VOCABULARY[:20])
    made = read_artefact(write_trimmed_folder(source, tmp_path / "trimmed", range(50)))
    fewer = replace(made, embedding=replace(made.embedding, rows=made.embedding.rows - 1))
    with pytest.raises(ModelFileError, match="rows for a vocabulary"):
        read_layout(made.model_header, fewer)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.freq_base", 5e-324), ("rope.scaling.factor", 1e-320), ("rope.freq_base", 1e-300)],
)
def test_rotary_frequencies_beyond_a_double_are_refused(tmp_path: Path, key: str, value: float) -> None:
    """GGUF metadata can hold doubles."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary=VOCABULARY[:20], head_length=64)
    header = read_header(path)
    changed = replace(header, metadata={**header.metadata, f"llama.{key}": value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if value == 1e-300:
            assert accepted(lambda: load_native(changed, NativeSettings()))
            return
        with pytest.raises(ModelFileError, match="no finite frequencies"):
            load_native(changed, NativeSettings())


def test_more_attention_heads_than_embedding_columns_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma3", layers=62, vocabulary=VOCABULARY[:20])
    header = read_header(path)
    changed = replace(header, metadata={**header.metadata, "gemma3.attention.head_count": 128})
    with pytest.raises(ModelFileError, match="128 attention heads cannot share 64 columns"):
        unsupported_reason(changed)


def test_head_counts_for_another_number_of_layers_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary=VOCABULARY[:20])
    header = read_header(path)
    changed = replace(header, metadata={**header.metadata, "llama.attention.head_count_kv": (2, 2, 2)})
    with pytest.raises(ModelFileError, match="head_count_kv for 3 layers"):
        read_layout(changed)


def test_an_exponent_that_means_nan_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary=VOCABULARY[:20], quant="MXFP4")
    tensor = next(each for each in read_header(path).tensors if each.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.offset + 17 * (2 * 5 + 1)] = 255  # the second block of row 5
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"row 5 of tensor blk.1.ffn_up.weight has a scale that is not finite"):
        load_native(path, NativeSettings())


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_0", "Q8_0", "MXFP4"])
def test_a_sidecar_with_tiles_of_partial_cache_lines_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: Any
) -> None:
    """Rows of an odd number of blocks: the last tile of a matrix begins within a cache line."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", vocabulary=VOCABULARY[:20], quant=quant, width=96, heads=2, kv_heads=1
    )
    sidecar, scores = tmp_path / "tiles", set()
    for _ in range(2):
        with (
            load_native(path, NativeSettings(), sha256="sha256:ab", sidecar=sidecar) as model,
            model.open(9) as cache,
        ):
            scores.add(cache.forward([1, 2], 1).logits(0).tobytes())
        monkeypatch.setattr(NativeWeights, "relay", None)  # the second load must not lay weights out
    assert len(scores) == 1
