"""Hostile files: each is refused with a message, or its forwards run; otherwise this process crashes."""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.errors import EdgespecError, ModelFileError, NonFiniteLogitsError
from edgespec.files.gguf.header import read_header
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.weights import NativeWeights
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_models import SHARING
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf
from tests.support.trimmed_folder import edit_manifest, record_file, write_trimmed_folder

require_native()

MUTATIONS = 150  # of each architecture
CONTEXT = 40
MODELS: dict[Any, dict[str, Any]] = {
    "llama": {"quant": "Q4_1", "rope_factors": True, "width": 96, "heads": 2, "kv_heads": 1},
    "qwen2": {"quant": "IQ3_XXS", "width": 256, "heads": 8, "kv_heads": 2, "tied": True},
    "qwen3": {"quant": "F16", "head_length": 32, "settings": {"rope.scaling.factor": 2.0}},
    "qwen3moe": {"quant": "Q4_0", "head_length": 32, "experts": (5, 2)},
    "gpt-oss": {
        "quant": "MXFP4",
        "head_length": 32,
        "experts": (5, 4),
        "window": 9,
        "settings": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    },
    "qwen35": {"quant": "Q8_0", "layers": 3, "deltas": (2, 1, 32, 4)},
    "gemma4": {"quant": "Q8_0", **{key: value for key, value in SHARING.items() if key != "architecture"}},
    "gemma3": {"quant": "Q8_0", "window": 7, "head_length": 48, "settings": {"attention.sliding_window_pattern": 2}},
}
# At and around every limit of a check or a kernel.
INTEGERS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 62, 64, 96, 255, 256, 257, 2**15, 2**24, 2**31 - 1, 2**31)
WIDE = (*INTEGERS, 2**32 - 1, 2**32, 2**32 + 1, 2**58, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1e-45, 1e-38, 1e-5, 0.5, 1.0, 1e10, 3e38, -1.0, math.inf, -math.inf, math.nan)

Edit = Callable[[bytearray, random.Random], None]


def editable(path: Path, architecture: str) -> list[Edit]:
    """Every number of the header that the layout uses, the names of its keys and tensors, and the weights."""
    reader = gguf.GGUFReader(str(path))
    base: int = reader.data.ctypes.data
    edits: list[Edit] = []

    def place(part: Any) -> int:
        address: int = part.ctypes.data
        return address - base

    def numbers(part: Any, values: tuple[Any, ...], kind: str) -> None:
        size, start = struct.calcsize(kind), place(part)
        for at in range(start, start + part.nbytes, size):

            def put(data: bytearray, draw: random.Random, at: int = at) -> None:
                old = struct.unpack_from(f"<{kind}", data, at)[0]
                near = () if kind == "f" else (old + 1, old - 1, old * 2, old // 2, old + 32, old + 2**32)
                limit = 1 << 8 * size
                new = draw.choice((*values, *near))
                struct.pack_into(f"<{kind}", data, at, new if kind == "f" else new % limit)

            edits.append(put)

    def letters(part: Any) -> None:
        start, length = place(part), part.nbytes

        def put(data: bytearray, draw: random.Random) -> None:
            data[start + draw.randrange(length)] ^= 1

        edits.append(put)

    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}."):
            letters(field.parts[1])
            kind = field.types[0]
            if kind in (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32):
                is_float = kind == gguf.GGUFValueType.FLOAT32
                numbers(field.parts[-1], FLOATS if is_float else INTEGERS, "f" if is_float else "I")
    for tensor in reader.tensors:
        _length, name_part, dimensions, shape, kind_part, offset = tensor.field.parts
        letters(name_part)
        numbers(dimensions, INTEGERS, "I")
        numbers(shape, WIDE, "Q")
        numbers(kind_part, tuple(range(45)), "I")
        numbers(offset, WIDE, "Q")
        start, size = int(tensor.data_offset), int(tensor.n_bytes)

        def noise(data: bytearray, draw: random.Random, start: int = start, size: int = size) -> None:
            at, length = draw.randrange(size), draw.randint(1, 64)
            data[start + at : start + min(size, at + length)] = draw.randbytes(min(size - at, length))

        edits += [noise] * 2
    assert len(edits) > 100
    return edits


def use(model: NativeModel) -> None:
    """A prompt, a tree and a kept path, up to the end of the context; scores may have any value."""

    def look(rows: Rows) -> None:
        try:
            rows.argmax()
        except NonFiniteLogitsError:
            rows.top_k(3)

    last = model.facts.vocabulary_size - 1
    with model.open(CONTEXT, keep_hidden=[-1, 0]) as sequence:
        look(sequence.forward([last, *range(20)], 2))
        if model.facts.can_branch:
            look(sequence.forward_tree([last] * 19, [-1, 0, 1, 0, *range(3, 18)]))
            sequence.keep([0, 3])
        else:  # a state: what the kernels can take back, and what is read again
            look(sequence.forward([last] * 17, 17))
            sequence.rewind(25)
            sequence.rewind(3)
        sequence.hidden(0) if sequence._scored else None
        look(sequence.forward([0], 1))
        with sequence.fork() as fork:
            look(fork.forward([last] * (CONTEXT - fork.length), 1))


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
@pytest.mark.parametrize("architecture", MODELS)
def test_mutated_headers_and_weights_are_refused_or_run_safely(tmp_path: Path, architecture: Any) -> None:
    path = write_tiny_gguf(
        tmp_path / "good.gguf", architecture=architecture, vocabulary=VOCABULARY[:20], **MODELS[architecture]
    )
    good, edits, draw = path.read_bytes(), editable(path, architecture), random.Random(architecture)
    levels, found = require_native().levels, {True: 0, False: 0}
    assert accepted(lambda: load_native(path, NativeSettings()))
    bad = tmp_path / "bad.gguf"
    for number in range(MUTATIONS):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 2))):
            draw.choice(edits)(data, draw)
        bad.write_bytes(data)
        settings = NativeSettings(threads=1 + number % 2, level=draw.choice(levels))
        found[accepted(lambda settings=settings: load_native(bad, settings))] += 1  # type: ignore[misc]
    assert min(found.values()) > MUTATIONS // 10, found


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
