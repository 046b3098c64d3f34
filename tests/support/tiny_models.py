"""A folder of tiny models shared by the tests of engine, session and command line."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgespec.calibration.kinds import TIMES, WIDTHS
from edgespec.calibration.timing import ModelTimes
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Event, Text
from edgespec.errors import EdgespecError
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.runtimes.background import BackgroundModel
from edgespec.store.manifest import Manifest, write_manifest
from edgespec.store.store import folder_key
from tests.support.tiny_gguf import FILL_IN, VOCABULARY, similar_drafter, write_tiny_gguf

# Narrow heads force an F16 cache, whose attention is not bit-equal across widths; these shapes keep every width.
SHAPE = {"quant": "Q8_0", "heads": 2, "kv_heads": 1}


@dataclass(frozen=True)
class TinyModels:
    """Paths of models that are written on first use. ``home`` keeps their measurements."""

    folder: Path
    home: Home
    _made: dict[str, Path] = field(default_factory=dict)

    def _make(self, name: str, **settings: object) -> Path:
        if name not in self._made:
            shape = {**SHAPE, **settings}
            self._made[name] = write_tiny_gguf(self.folder / f"{name}.gguf", **shape)  # type: ignore[arg-type]
        return self._made[name]

    @property
    def target(self) -> Path:
        """Never ends an answer by itself."""
        return self._make("target", seed=3)

    @property
    def drafter(self) -> Path:
        """Often agrees with ``target``."""
        if "drafter" not in self._made:
            self._made["drafter"] = similar_drafter(self.target, self.folder / "drafter.gguf", 0.2)
        return self._made["drafter"]

    @property
    def ending(self) -> Path:
        """Ends its answers after a varying number of tokens."""
        return self._make("ending", seed=7, end_scale=1.5)

    @property
    def stranger(self) -> Path:
        """Has another vocabulary."""
        return self._make("stranger", vocabulary=("▁", "a", "b", "▁a", "▁b", "ab", "▁ab"))

    @property
    def filling(self) -> Path:
        """Has the tokens around a hole, with Qwen2.5-Coder's texts."""
        return self._make("filling", seed=3, vocabulary=(*VOCABULARY, *FILL_IN))

    @property
    def slow_filling(self) -> Path:
        """``filling``, whose thousand tokens of prompt take about a second."""
        shape = {"heads": 8, "kv_heads": 4, "width": 512, "layers": 6}
        return self._make("slow-filling", seed=3, vocabulary=(*VOCABULARY, *FILL_IN), **shape)

    @property
    def without_template(self) -> Path:
        return self._make("without-template", chat_template=None)

    @property
    def slow(self) -> Path:
        """A thousand tokens of prompt take about a second."""
        return self._make("slow", heads=8, kv_heads=4, width=512, layers=6, context_length=16384)

    def with_template(self, name: str, template: str | list[dict[str, str]], **settings: object) -> Path:
        return self._make(name, chat_template=template, **settings)

    def broken_inside(self) -> Path:
        """A file with a valid header whose weights llama.cpp refuses: one announced layer is missing."""
        path = self.folder / "broken-inside.gguf"
        data = bytearray(self.target.read_bytes())
        key = b"llama.block_count"
        at = data.index(key) + len(key) + 4  # after the value's type
        assert data[at] == 2
        data[at] = 3
        path.write_bytes(data)
        return path

    def load(self, target: Path | None = None, **overrides: object) -> Engine:
        """An engine on one thread, by default with the pair of ``target`` and ``drafter``.

        A drafter that must draft at any cost is in memory already, unless it runs in a separate process.
        """
        chosen = {"draft": str(self.drafter), "threads": 1, "store_home": self.home, **overrides}
        engine = Engine.load(str(target or self.target), **chosen)  # type: ignore[arg-type]
        if isinstance(chosen.get("depth"), int) and chosen.get("draft_isolation") != "process":
            with suppress(EdgespecError):
                load_drafter(engine)
        return engine

    def load_speculating(self, target: Path | None = None, **overrides: object) -> Engine:
        """``load`` on a machine where drafting is faster, whatever the real times of tiny models.

        The drafter is in memory already, unless it runs in a separate process.
        """
        engine = self.load(target, **overrides)
        invent_measurements(engine)
        if overrides.get("draft_isolation") != "process":
            load_drafter(engine)
        return engine


# Invented: a target with equal times at every width, and a drafter ten times as fast.
FORWARD_S, DRAFT_S = 0.01, 0.001


def invented_times(forward_s: float, widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> ModelTimes:
    """A flat curve, in calibration's form."""
    return ModelTimes(
        contexts=(2048,),
        widths=widths,
        forward_s=((forward_s,) * len(widths),),
        prompt_token_s=forward_s / 10,
        repetitions=5,
    )


def invent_measurements(engine: Engine, forward_s: float = FORWARD_S, draft_s: float = DRAFT_S) -> None:
    """Store invented times and let the engine plan with them; missing width classes are really probed."""
    knowledge = engine.pair.measurements
    store = knowledge.store
    if knowledge.widths() is None and engine.pair.can_rewind:
        probe = probe_widths(engine.pair.target, context_length=engine.plan.context_length)
        store.save(WIDTHS, probe, knowledge.target)
    store.save(TIMES, invented_times(forward_s), knowledge.target)
    if knowledge.drafter is not None:
        store.save(TIMES, invented_times(draft_s), knowledge.drafter)
    engine.pair.replan()


def load_drafter(engine: Engine) -> BackgroundModel | None:
    """The loaded drafter, after waiting for it; None without one."""
    if engine.pair.pool.drafter is None:
        return None
    model = engine.pair.pool.drafter_model()
    assert model.wait(60.0)
    return model


def put_into_store(home: Home, name: str, content: bytes) -> Path:
    """Store ``content`` as the model called ``name``, as a finished download would."""
    folder = home.models / folder_key(name)
    folder.mkdir(parents=True)
    path = folder / "model.gguf"
    path.write_bytes(content)
    manifest = Manifest(
        name=name,
        kind="model",
        source="test",
        revision=None,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        licence=None,
        mtime_ns=path.stat().st_mtime_ns,
        how_made="written by a test",
        path=path.name,
    )
    write_manifest(folder, manifest)
    return path


def require_speculation(engine: Engine, depth: int = 1) -> None:
    """Skip if llama.cpp's kernels allow no speculation, so that nothing can be compared."""
    if engine.plan.depth_cap < depth:
        widths = engine.plan.numeric_class.widths
        pytest.skip(f"needs drafts of {depth} tokens; on this machine only widths {widths} are bit-equal")


def read_all(generation: Generation) -> tuple[list[Event], Done]:
    events = list(generation)
    done = events[-1]
    assert isinstance(done, Done)
    return events, done


def answer(generation: Generation) -> Done:
    return read_all(generation)[1]


def shown(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def context_of(path: Path) -> int:
    length = read_header(path).context_length
    assert length is not None
    return length
