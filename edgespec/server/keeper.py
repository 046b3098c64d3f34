"""The model of the server: loaded in the background, freed when idle, loaded on demand, calibrated when idle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from edgespec.engine.engine import Engine
from edgespec.errors import CancelledError, ClosedError, EdgespecError, ModelFileError, WorkerLostError
from edgespec.files.model_file import LocatedModel
from edgespec.planning.choice.plan import Plan
from edgespec.server.forms import FormCompiler
from edgespec.server.keep_alive import Stays
from edgespec.server.memory_waits import MemoryWaits
from edgespec.server.pool import SessionPool
from edgespec.server.room import GivenUpError, Room
from edgespec.server.security import EVERYBODY
from edgespec.server.threads import Threads, take_error

State = Literal["loading", "ready", "unloaded", "failed"]

# Ollama's time: a person who reads an answer comes back earlier.
KEEP_ALIVE_S = 300.0

# For how long a load that failed is the model's state. The next request tries again whatever the state, but behind a
# proxy none comes while the server says that it cannot answer.
FAILED_S = 30.0

# Time without a request after which prefixes are written and the machine is measured; a program asks again earlier.
CALIBRATE_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model, the conversations kept for it, the threads for what takes long, and those for forms.

    One request at a time opens a session (``taking``), in the order in which they came.
    """

    engine: Engine
    pool: SessionPool
    threads: Threads
    forms: FormCompiler
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    memory: MemoryWaits = field(default_factory=MemoryWaits)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the keepers of one server share: memory and threads. Raises MemoryLimitError if a thread cannot start."""

    room: Room = field(default_factory=Room)
    threads: Threads = field(default_factory=Threads)
    forms: FormCompiler = field(default_factory=FormCompiler)

    def leave(self, keeper: ModelKeeper) -> None:
        """A keeper has closed. With the last one the threads end."""
        if self.room.leave(keeper):
            self.threads.close()
            self.forms.close()


class ModelKeeper:
    """Loads and frees one model. All methods belong to one event loop."""

    def __init__(
        self,
        load: Callable[[], Engine],
        keep_alive_s: float | None = KEEP_ALIVE_S,
        context_length: int = 4096,
        tell: Callable[[str], None] = lambda sentence: None,
        shared: Shared | None = None,
        locate: Callable[[], LocatedModel] | None = None,
    ) -> None:
        """``load`` is called on a thread. ``keep_alive_s`` None keeps the model for as long as the server runs.

        ``context_length`` is the longest that the model may be loaded with. ``tell`` gets what a log should say.
        ``shared``: with the keepers of the server's other models; None: there are none. ``locate`` finds the
        model's file before it is loaded, on a thread; None: only loading does, which may fetch it. Raises
        MemoryLimitError if the server's threads cannot be started.
        """
        self._common = Shared() if shared is None else shared
        self._common.room.join(self)
        self._idle_since: float | None = None  # by the event loop's clock, while the model is loaded
        self._load = load
        self.locate = locate
        self._usual_s = keep_alive_s
        self._stays = Stays(keep_alive_s, 0.0)  # of the loaded model, by the event loop's clock
        self._tell = tell
        self._context_length = context_length
        self._loading: asyncio.Task[LoadedEngine] | None = None
        self._loaded: LoadedEngine | None = None
        self._users = set[object]()
        self._idle: asyncio.Task[None] | None = None
        self._freeing: asyncio.Future[None] | None = None
        self._prepared = Future[None]()  # the vocabulary for forms, which takes a processor for a second
        self._stop_measuring = threading.Event()
        self._closed = False
        self.on_load: Callable[[Engine], None] = lambda engine: None  # gets each engine, on a thread
        self._last_plan: Plan | None = None  # of the model that was freed last
        self.error: EdgespecError | None = None  # of the last attempt to load
        self._failed_at = -math.inf  # by the event loop's clock
        self.loads = 0

    @property
    def threads(self) -> Threads:
        """The threads of the server."""
        return self._common.threads

    @property
    def loading(self) -> bool:
        """See Occupant."""
        return self._loading is not None

    @property
    def in_use(self) -> bool:
        """See Occupant."""
        return self._loaded is not None and bool(self._users)

    @property
    def wanted(self) -> bool:
        """See Occupant."""
        return bool(self._users)

    @property
    def idle_since(self) -> float | None:
        """See Occupant. A model that is being freed comes first."""
        if self._freeing is not None and not self._freeing.done():
            return -math.inf
        return None if self._loaded is None or self._users else self._idle_since

    async def free(self) -> None:
        """Free the model if no request uses it, and wait until it is freed."""
        if self._loaded is not None and not self._users:
            self.stop_measuring()
            if self._idle is not None:
                self._idle.cancel()
            self._drop(self._loaded)
        if self._freeing is not None:
            await asyncio.wait([self._freeing])

    def stop_measuring(self) -> None:
        """See Occupant."""
        self._stop_measuring.set()

    @property
    def state(self) -> State:
        if self._loaded is not None:
            return "ready"
        if self._loading is not None:
            return "loading"
        return "failed" if self.error is not None and _now() < self._failed_at + FAILED_S else "unloaded"

    @property
    def engine(self) -> Engine | None:
        """The engine, while it is loaded."""
        return None if self._loaded is None else self._loaded.engine

    @property
    def plan(self) -> Plan | None:
        """The plan of the loaded model, or the last one that it had; None before the first load."""
        return self._last_plan if self.engine is None else self.engine.plan

    @property
    def context_length(self) -> int:
        """That of the loaded model, in tokens; the longest it may have while none is loaded."""
        return self._context_length if self.engine is None else self.engine.plan.context_length

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the loaded model is freed if no request comes; None if it is kept."""
        left = self._stays.until - _now()
        return None if math.isinf(left) else max(0.0, left)

    def keep(self, seconds: float, owner: str = EVERYBODY) -> None:
        """For how long the loaded model stays behind the last request of ``owner``; infinite: always.

        With 0 it is freed as soon as no request uses it, unless it stays for the requests of another. One that is
        being loaded is loaded first. A model that is loaded again stays for the usual time.
        """
        if self._loaded is not None or self._loading is not None:
            self._stays.ask(owner, seconds, _now())
        if self._loaded is not None and not self._users:
            self._stop_measuring.set()
            self._wait_idle()

    @property
    def kept_sessions(self) -> int:
        return 0 if self._loaded is None else len(self._loaded.pool)

    def start(self) -> asyncio.Task[LoadedEngine]:
        """Begin to load, without waiting. Returns the loading in progress if there is one."""
        if self._closed:
            raise ClosedError("this server is shutting down")
        if self._loading is None:
            self._stays = Stays(self._usual_s, _now())
            self._loading = asyncio.create_task(self._load_now())
            self._loading.add_done_callback(take_error)
        return self._loading

    async def _load_now(self) -> LoadedEngine:
        try:
            async with self._common.room.loading(self):
                if self._freeing is not None:  # memory for both may be missing
                    await asyncio.wait([self._freeing])
                engine = await self.threads.run(self._load_and_tell, late=lambda engine: engine.close())
        except CancelledError:  # it was given up, and has not failed
            raise
        except EdgespecError as error:
            self._failed(error)
            raise
        except Exception as error:
            failure = EdgespecError(f"the model cannot be loaded: {type(error).__name__}: {error}")
            self._failed(failure)
            raise failure from error
        finally:
            self._loading = None
        self.error, self.loads = None, self.loads + 1
        self._idle_since = self._stays.loaded = _now()
        self._loaded = LoadedEngine(engine, SessionPool(engine), self.threads, self._common.forms)
        self._prepared = self._common.forms.prepare(engine)
        self._wait_idle()
        return self._loaded

    def _load_and_tell(self) -> Engine:
        """On a thread: ``on_load`` may compile the templates of the model, which takes long."""
        engine = self._load()
        try:
            self.on_load(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _failed(self, error: EdgespecError) -> None:
        self.error, self._failed_at = error, _now()

    @asynccontextmanager
    async def use(self, owner: str = EVERYBODY) -> AsyncIterator[LoadedEngine]:
        """The model for one request of ``owner``, loaded first if it has to be. Raises what loading raises."""
        await self._common.room.enter(self)
        user = object()
        self._users.add(user)
        self._stop_measuring.set()
        if self._idle is not None:
            self._idle.cancel()
        try:
            while (loaded := self._loaded) is None:
                with contextlib.suppress(GivenUpError):  # before this request came, which is waited for next time
                    await self._shared(self.start())
            self._stays.use(owner, _now())
            try:
                yield loaded
            except (ClosedError, ModelFileError, WorkerLostError):
                self._drop(loaded)  # its process is gone, or its file has changed; the next request loads it again
                raise
        finally:
            self._users.remove(user)
            self._stays.use(owner, _now())
            if not self._users:
                self._idle_since = _now()
                self._common.room.left()
            self._wait_idle()

    async def _shared(self, loading: asyncio.Task[LoadedEngine]) -> LoadedEngine:
        try:  # other requests wait for the same loading
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if loading.cancelled() and task is not None and not task.cancelling():
                raise ClosedError("this server is shutting down") from None
            raise

    def stop_loading(self) -> None:
        """End a loading in progress: its requests get ClosedError. Its thread frees what it loads."""
        if self._loading is not None:
            self._loading.cancel()

    def _wait_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if not self._users and self._loaded is not None and not self._closed:
            self._idle = asyncio.create_task(self._be_idle(self._loaded, self._stays.until))

    async def _be_idle(self, loaded: LoadedEngine, until: float) -> None:
        """Keep what conversations shared, measure the machine, then free the model at that time."""
        left = until - _now()
        await asyncio.sleep(max(0.0, min(CALIBRATE_AFTER_S, left)))
        self._stop_measuring = stop = threading.Event()
        with contextlib.suppress(Exception):  # a measurement; the model is freed all the same
            await asyncio.wait([asyncio.wrap_future(self._prepared)])
            async with self._common.room.measuring(self) as alone:
                if alone:
                    for sentence in await self.threads.run(lambda: loaded.engine.keep_prefixes(stop)):
                        self._tell(sentence)
                if alone and loaded.engine.can_calibrate and left > 0:
                    await self.threads.run(lambda: loaded.engine.calibrate_for(stop=stop))
        if math.isinf(until):
            return
        await asyncio.sleep(max(0.0, until - _now()))
        self._drop(loaded)

    def _drop(self, loaded: LoadedEngine) -> None:
        """Free a model; requests that come now load it again afterwards."""
        if self._loaded is loaded:
            self._last_plan, self._loaded = loaded.engine.plan, None
            self._freeing = asyncio.ensure_future(self.threads.run(lambda: _free(loaded)))
            self._freeing.add_done_callback(take_error)

    async def close(self) -> None:
        """Free the model. A loading in progress is left to its thread, which frees what it loads."""
        self._closed = True
        self._stop_measuring.set()
        for task in (self._idle, self._loading):
            if task is not None:
                task.cancel()
        if self._loaded is not None:
            self._drop(self._loaded)
        if self._freeing is not None:
            await asyncio.wait([self._freeing])
        self._common.leave(self)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _free(loaded: LoadedEngine) -> None:
    loaded.pool.close()
    loaded.engine.close()
