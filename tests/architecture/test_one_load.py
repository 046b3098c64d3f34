"""A load computes everything once: each header is read once, and settings are chosen once for each place."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.runtimes.table import RUNTIMES
from tests.support.tiny_models import TinyModels


@contextmanager
def headers_read() -> Iterator[Counter[Path]]:
    """How often each header is read during the block, under every name of the reader and on every thread."""
    found: Counter[Path] = Counter()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code is read_header.__code__:
            found[Path(frame.f_locals["path"]).resolve()] += 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
def settings_chosen(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, ...]]:
    """How often settings are computed for each file, runtime, device and number of layers."""
    found: Counter[tuple[Any, ...]] = Counter()

    def watch(kind: type[Any]) -> None:
        choose = kind.settings

        def watched(self: Any, file: Any, *, device: str, gpu_layers: int | None = None, **more: Any) -> Any:
            found[file.name, self.name, device, gpu_layers] += 1
            return choose(self, file, device=device, gpu_layers=gpu_layers, **more)

        monkeypatch.setattr(kind, "settings", watched)

    for runtime in RUNTIMES.values():
        watch(type(runtime))
    return found


@pytest.mark.parametrize("runtime", ["auto", "llama"])
def test_loading_an_engine_reads_each_header_and_computes_each_setting_once(
    tiny: TinyModels, home: Home, settings_chosen: Counter[tuple[Any, ...]], runtime: str
) -> None:
    models = {path.resolve(): 1 for path in (tiny.target, tiny.drafter)}
    with headers_read() as read, tiny.load(store_home=home, runtime=runtime, draft_runtime=runtime) as engine:
        assert engine.pair.pool.drafter is not None
        engine.pair.pool.drafter_model()
        assert read == models
    assert {name for name, *_ in settings_chosen} == {"target", "drafter"}
    assert set(settings_chosen.values()) == {1}, settings_chosen


def test_a_drafter_in_a_worker_process_has_its_header_read_once(
    tiny: TinyModels, home: Home, settings_chosen: Counter[tuple[Any, ...]]
) -> None:
    models = {path.resolve(): 1 for path in (tiny.target, tiny.drafter)}
    with headers_read() as read, tiny.load(store_home=home, draft_isolation="process"):
        assert read == models
    assert set(settings_chosen.values()) == {1}, settings_chosen
