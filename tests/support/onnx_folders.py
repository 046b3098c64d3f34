"""Tiny ONNX models with each form of cache, and sessions that a test may act on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from edgespec.export.provenance import Provenance
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence
from edgespec.runtimes.onnx.session import OnnxSettings
from tests.support.loading import load_onnx
from tests.support.tiny_gguf import Quant, write_tiny_gguf
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model
from tests.support.whole_onnx import LONGEST, write_folder, write_whole_onnx

LONG = 8192  # the longest context that the contract opens with a graph of fixed shapes
SHORT = 64

Form = Literal["shared", "rows", "whole"]


@dataclass(frozen=True)
class Folders:
    """Exported tiny models below ``folder``, written on first use."""

    folder: Path

    def of(self, form: Form, *, short: bool = False) -> Path:
        """A model with that form of cache, with a long or with a ``short`` context."""
        if form == "shared":
            return self.shared(context_length=SHORT if short else LONGEST)
        if form == "rows":
            return self.rows(static_cache=LEAST_STATIC_CACHE if short else LONG)
        return self.whole(context_length=SHORT if short else LONGEST)

    def shared(self, quant: Quant = "Q4_0", kept: int | None = None, context_length: int = LONGEST) -> Path:
        """The cache is one buffer. ``kept`` rows of the head; None: all, without a list."""
        folder = self.folder / f"{quant}-{kept}-{context_length}"
        if not folder.exists():
            source = self.source(quant, context_length)
            rows = None if kept is None else np.array(some_ids(kept), dtype=np.int32)
            export_onnx(source, folder, Provenance(name="tiny"), kept=rows)
        return folder

    def source(self, quant: Quant = "Q4_0", context_length: int = LONGEST) -> Path:
        path = self.folder / f"{quant}-{context_length}.gguf"
        return path if path.exists() else write_tiny_gguf(path, quant=quant, width=128, context_length=context_length)

    def rows(
        self,
        architecture: str = "qwen2",
        quant: str = "Q4_0",
        static_cache: int | None = LEAST_STATIC_CACHE,
        kept: int | None = None,
    ) -> Path:
        """Fixed shapes: each run returns the cache's new rows. Without ``static_cache`` an ordinary graph."""
        folder = self.folder / f"{architecture}-{quant}-{static_cache}-{kept}"
        if not folder.exists():
            source = self.rows_source(architecture, quant)
            rows = None if kept is None else np.arange(0, VOCABULARY_SIZE, kept, dtype=np.int32)
            export_onnx(source, folder, Provenance(name="tiny"), static_cache=static_cache, kept=rows)
        return folder

    def rows_source(self, architecture: str, quant: str) -> Path:
        path = self.folder / f"{architecture}-{quant}.gguf"
        return path if path.exists() else write_tiny_model(path, architecture, quant=quant, context_length=LONG)

    def whole(self, head: str = "plain", context_length: int = LONGEST) -> Path:
        """Each run takes and returns the whole cache."""
        folder = self.folder / f"{head}-{context_length}"
        if not folder.exists():
            write_whole_onnx(self.whole_source(context_length), folder, self.folder, head=head)
        return folder

    def whole_source(self, context_length: int = LONGEST) -> Path:
        source = self.folder / f"source-{context_length}"
        return source if source.exists() else write_folder(source, context_length=context_length)


def some_ids(count: int) -> list[int]:
    # Every tiny model has at least this many tokens; which tokens are kept does not matter.
    return sorted(random.Random(5).sample(range(600), count))


def load_folder(folder: Path, settings: OnnxSettings | None = None) -> OnnxModel:
    return load_onnx(folder, settings or OnnxSettings())


class WatchedSession:
    """A session that lets a test act before each run; otherwise the real session."""

    def __init__(self, session: Any, before: Callable[[], None]) -> None:
        self.session, self._before = session, before
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, *arguments: Any) -> None:
        self.runs += 1
        self._before()
        self.session.run_with_iobinding(*arguments)


def watch(sequence: OnnxSequence, before: Callable[[], None] = lambda: None) -> list[WatchedSession]:
    """Watch the sequence's sessions; with fixed shapes that of one token and that of many."""
    native: Any = sequence._native  # no public attribute has the session
    if not hasattr(native, "_step"):
        watched = WatchedSession(native._weights.session, before)
        native._weights = replace(native._weights, session=watched)
        return [watched]
    sessions = [WatchedSession(each._session, before) for each in (native._step, native._piece)]
    native._step._session, native._piece._session = sessions
    return sessions


def unwatch(sequence: OnnxSequence) -> None:
    native: Any = sequence._native
    if not hasattr(native, "_step"):
        native._weights = replace(native._weights, session=native._weights.session.session)
        return
    for each in (native._step, native._piece):
        each._session = each._session.session
