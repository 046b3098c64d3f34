"""A load asks once for each file: its header, layout, memory, places, and its settings in each place. It enters few
of the package's files.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import edgespec
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.placement.candidates import target_places, with_drafter
from edgespec.placement.memory import memory_needed
from edgespec.runtimes.native.layout import _Reader
from edgespec.runtimes.table import RUNTIMES
from tests.support.tiny_models import TinyModels

PACKAGE = str(Path(edgespec.__file__).parent)
# 83 on a machine without a GPU, and a few for those with one.
MOST_FILES = 85

# Questions about a file, and where the function that answers each has the file's path.
QUESTIONS: dict[str, tuple[CodeType, Callable[[Mapping[str, Any]], Path]]] = {
    "header": (read_header.__code__, lambda own: own["path"]),
    "layout": (_Reader.layout.__code__, lambda own: own["self"]._header.path),
    "memory": (memory_needed.__code__, lambda own: own["file"].path),
    "target's places": (target_places.__code__, lambda own: own["target"].path),
    "drafter's places": (with_drafter.__code__, lambda own: own["drafter"].path),
}


@contextmanager
def profiled(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Calls ``look`` at each call of a function during the block, on every thread that begins in it."""
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def asked() -> Iterator[Counter[tuple[str, str]]]:
    """How often each question is asked about each file during the block, on every thread."""
    found: Counter[tuple[str, str]] = Counter()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            for question, (code, path) in QUESTIONS.items():
                if frame.f_code is code:
                    found[question, path(frame.f_locals).stem] += 1

    with profiled(look):
        yield found


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
def test_loading_an_engine_asks_each_question_once_about_each_file(
    tiny: TinyModels, home: Home, settings_chosen: Counter[tuple[Any, ...]], runtime: str
) -> None:
    with asked() as counted, tiny.load(store_home=home, runtime=runtime, draft_runtime=runtime) as engine:
        assert engine.pair.pool.drafter is not None
        engine.pair.pool.drafter_model()
    of_both = ["header", "memory", *(["layout"] if runtime == "auto" else [])]
    files = {(question, file) for question in of_both for file in ("target", "drafter")}
    assert counted == dict.fromkeys([*files, ("target's places", "target"), ("drafter's places", "drafter")], 1)
    assert {name for name, *_ in settings_chosen} == {"target", "drafter"}
    assert set(settings_chosen.values()) == {1}, settings_chosen


def test_a_drafter_in_a_worker_process_has_its_header_read_once(
    tiny: TinyModels, home: Home, settings_chosen: Counter[tuple[Any, ...]]
) -> None:
    with asked() as counted, tiny.load(store_home=home, draft_isolation="process"):
        assert (counted["header", "target"], counted["header", "drafter"]) == (1, 1)
    assert set(settings_chosen.values()) == {1}, settings_chosen


def test_a_load_enters_few_files(tiny: TinyModels, home: Home) -> None:
    tiny.load(store_home=home).close()  # imports, and the weights that a first load lays out
    entered: set[str] = set()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename)

    with profiled(look), tiny.load(store_home=home) as engine:
        assert engine.pair.pool.drafter is not None
    assert 40 < len(entered) <= MOST_FILES, sorted(entered)
