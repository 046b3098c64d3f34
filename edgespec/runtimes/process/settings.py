"""How a model gets a process of its own."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from edgespec.interfaces.model import ModelFacts
from edgespec.runtimes.background import RESTART_AFTER_S, BackgroundModel
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.model import StartingWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How an application wants worker processes started and given up on.

    ``command`` starts one that calls ``edgespec.runtimes.process.worker.main``. None starts this interpreter; a
    frozen application has none that could be started, and needs a command of its own. ``environment`` is added to the
    environment of the process, and to nobody else's.
    """

    command: abc.Sequence[str] | None = None
    environment: abc.Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    restart_after_s: float = RESTART_AFTER_S


def run_in_process(
    facts: ModelFacts, request: LoadRequest, settings: WorkerSettings, check: abc.Callable[[], object] = lambda: None
) -> BackgroundModel:
    """The model of ``request``, which will have these facts, in a process of its own that ``load`` starts.

    ``check`` is called before each start, and may raise.
    """
    request = replace(request, path=request.path.absolute())  # a restart may come in another working directory

    def start() -> StartingWorker:
        check()
        return StartingWorker(
            request, command=settings.command, environment=settings.environment, deadlines=settings.deadlines
        )

    return BackgroundModel(
        facts,
        start,
        restarts=1,
        restart_after_s=settings.restart_after_s,
        where=" in a process of its own",
    )
