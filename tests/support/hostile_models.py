"""Damaged model files: what of a file is damaged, and what is done with a model that is not refused."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from edgespec.errors import EdgespecError, InvalidRequestError, NonFiniteLogitsError
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.native.following import DraftingSequence
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_models import ASSISTANT, SHARING
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf

__all__ = ["DRAFTED", "DRAFTING", "KINDS", "RAN", "REFUSED", "DamagedModels", "use"]

REFUSED, RAN, DRAFTED = "refused", "ran", "drafted"
CONTEXT = 40

_DELTAS = {"deltas": (2, 1, 32, 4)}
_OWN = ("embed_tokens", "shared_head_norm", "shared_head_head")
KINDS: dict[str, dict[str, Any]] = {
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
    "qwen35": {"quant": "Q8_0", "layers": 3, **_DELTAS},
    "qwen35moe": {"quant": "Q4_0", **_DELTAS, "experts": (5, 2), "shared": 64},
    "qwen35 that drafts": {"architecture": "qwen35", "quant": "Q8_0", **_DELTAS, "drafting": _OWN},
    "qwen35moe that drafts": {
        "architecture": "qwen35moe",
        "quant": "Q8_0",
        **_DELTAS,
        "experts": (5, 2),
        "shared": 32,
        "drafting": (),
    },
    "gemma4": {"quant": "Q8_0", **SHARING},
    "gemma4 of experts": {**SHARING, "quant": "Q8_0", "layers": 3, "experts": (5, 2), "settings": {}},
    "gemma4-assistant": {"quant": "Q8_0", **ASSISTANT},
    "gemma3": {"quant": "Q8_0", "window": 7, "head_length": 48, "settings": {"attention.sliding_window_pattern": 2}},
}
DRAFTING = ("qwen35 that drafts", "qwen35moe that drafts", "gemma4-assistant")
_TARGETS: dict[str, dict[str, Any]] = {"gemma4-assistant": {"quant": "Q8_0", **SHARING, "width": 128}}

# At and around every limit of a check or a kernel.
_INTEGERS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 62, 64, 96, 255, 256, 257, 2**15, 2**24, 2**31 - 1, 2**31)
_WIDE = (*_INTEGERS, 2**32 - 1, 2**32, 2**32 + 1, 2**58, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1e-45, 1e-38, 1e-5, 0.5, 1.0, 1e10, 3e38, -1.0, math.inf, -math.inf, math.nan)
# The values of a key and their form in ``struct``, by the type of the key.
_VALUES: dict[gguf.GGUFValueType, tuple[tuple[Any, ...], str]] = {
    gguf.GGUFValueType.UINT32: (_INTEGERS, "I"),
    gguf.GGUFValueType.INT32: (_INTEGERS, "I"),
    gguf.GGUFValueType.BOOL: ((0, 1, 2, 255), "B"),
    gguf.GGUFValueType.FLOAT32: (_FLOATS, "f"),
}

Edit = Callable[[bytearray, random.Random], None]


def _editable(path: Path, architecture: str) -> list[Edit]:
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

    for name, key in reader.fields.items():
        if name.startswith(f"{architecture}."):
            letters(key.parts[1])
            if key.types[-1] in _VALUES:  # of an array the type of its elements
                for index in key.data:
                    numbers(key.parts[index], *_VALUES[key.types[-1]])
    for tensor in reader.tensors:
        _length, name_part, dimensions, shape, kind_part, offset = tensor.field.parts
        letters(name_part)
        numbers(dimensions, _INTEGERS, "I")
        numbers(shape, _WIDE, "Q")
        numbers(kind_part, tuple(range(45)), "I")
        numbers(offset, _WIDE, "Q")
        start, size = int(tensor.data_offset), int(tensor.n_bytes)

        def noise(data: bytearray, draw: random.Random, start: int = start, size: int = size) -> None:
            at, length = draw.randrange(size), draw.randint(1, 64)
            data[start + at : start + min(size, at + length)] = draw.randbytes(min(size - at, length))

        edits += [noise] * 2
    assert len(edits) > 100
    return edits


def _look(rows: Rows) -> None:
    """Scores may have any value."""
    try:
        rows.argmax()
    except NonFiniteLogitsError:
        rows.top_k(3)


def use(model: NativeModel) -> None:
    """A prompt, a tree and a kept path, up to the end of the context."""
    last = model.facts.vocabulary_size - 1
    with model.open(CONTEXT, keep_hidden=[-1, 0]) as sequence:
        _look(sequence.forward([last, *range(20)], 2))
        if model.facts.can_branch:
            _look(sequence.forward_tree([last] * 19, [-1, 0, 1, 0, *range(3, 18)]))
            sequence.keep([0, 3])
        else:  # a state: what the kernels can take back, and what is read again
            _look(sequence.forward([last] * 17, 17))
            sequence.rewind(25)
            sequence.rewind(3)
        sequence.hidden(0) if sequence._scored else None
        _look(sequence.forward([0], 1))
        with sequence.fork() as fork:
            _look(fork.forward([last] * (CONTEXT - fork.length), 1))


def _draft(drafting: NativeSequence, target: NativeSequence, last: int) -> None:
    """Chains of guesses behind a text, of which the target takes some back."""
    for length in (21, 17, CONTEXT - 1):
        target.rewind(min(length - 5, target.length))
        target.forward([last] * (length - target.length), 2)
        drafting.rewind(min(length, drafting.length))
        _look(drafting.forward([last] * (length + 1 - drafting.length), 1))
        for _ in range(min(4, CONTEXT - drafting.length)):
            _look(drafting.forward([last], 1))


def _attempt(path: Path, settings: NativeSettings, *, target: Path | None = None) -> str:
    """What becomes of a model: it is refused in one line, it runs, or it drafts too: for ``target`` or for itself."""
    with ExitStack() as stack:
        try:
            model = stack.enter_context(load_native(target or path, settings))
            drafter = None if target is None else stack.enter_context(load_native(path, settings))
        except EdgespecError as error:
            return _refused(error)
        use(model)
        layout = model._loaded().weights.layout
        assert "\n" not in (layout.no_drafting or "")
        if layout.drafting is not None:
            drafter = stack.enter_context(model.drafting_layer())
        if drafter is None:
            return RAN
        last = drafter.facts.vocabulary_size - 1
        with drafter.open(CONTEXT) as alone:  # as when it is timed
            _look(alone.forward([last, *range(10)], 3))
        sequence, drafting = (stack.enter_context(each.open(CONTEXT)) for each in (model, drafter))
        assert isinstance(drafting, DraftingSequence)
        try:
            drafting.follow(sequence.keep_features(), sequence)
        except InvalidRequestError as error:
            return _refused(error)
        _draft(drafting, sequence, last)
        return DRAFTED


def _refused(error: EdgespecError) -> str:
    assert error.message
    assert "\n" not in error.message
    return REFUSED


@dataclass
class DamagedModels:
    """Files of one kind with random damages, one after the other in ``folder``. Of two files, a target's and its
    drafter's, one is damaged."""

    kind: str
    folder: Path
    draw: random.Random
    paths: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        written = ((f"{self.kind}.gguf", KINDS[self.kind]), ("target.gguf", _TARGETS.get(self.kind)))
        for name, settings in written:
            if settings is not None:
                own = {"architecture": self.kind, **settings, "vocabulary": VOCABULARY[:20]}
                self.paths.append(write_tiny_gguf(self.folder / name, **own))
        self._good = [path.read_bytes() for path in self.paths]
        self._edits = [_editable(path, _architecture(path)) for path in self.paths]
        self._levels = require_native().levels

    def sound(self) -> str:
        """What becomes of the files without a damage."""
        return _attempt(self.paths[0], NativeSettings(), target=self._target(self.paths))

    def damaged(self) -> str:
        """What becomes of the next file."""
        which = 0 if self.draw.random() < 0.7 else len(self.paths) - 1
        data, paths = bytearray(self._good[which]), list(self.paths)
        for _ in range(self.draw.choice((1, 1, 2))):
            self.draw.choice(self._edits[which])(data, self.draw)
        paths[which] = self.folder / "bad.gguf"
        paths[which].write_bytes(data)
        settings = NativeSettings(threads=self.draw.randint(1, 2), level=self.draw.choice(self._levels))
        return _attempt(paths[0], settings, target=self._target(paths))

    @staticmethod
    def _target(paths: list[Path]) -> Path | None:
        return paths[1] if len(paths) > 1 else None


def _architecture(path: Path) -> str:
    return str(gguf.GGUFReader(str(path)).fields["general.architecture"].contents())
