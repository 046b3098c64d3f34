"""How a model is run in a separate process."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from edgespec.files.checked import to_json
from edgespec.interfaces.model import ModelFacts
from edgespec.runtimes.background import RESTART_AFTER_S, BackgroundModel
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.frames import LoadRequest, read_facts
from edgespec.runtimes.process.link import WorkerLink
from edgespec.runtimes.process.model import WorkerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How an application starts worker processes, and when it gives up on them.

    ``command`` starts a process that calls ``edgespec.runtimes.process.worker.main``. None starts this interpreter; a
    frozen application has no interpreter to start, and must pass a command. ``environment`` is added to the
    environment of the process only.
    """

    command: abc.Sequence[str] | None = None
    environment: abc.Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    restart_after_s: float = RESTART_AFTER_S


class StartingWorker:
    """A process that loads a model."""

    def __init__(self, request: LoadRequest, settings: WorkerSettings) -> None:
        """Start the process. Raises RuntimeUnavailableError if no process can be started."""
        self._request = request
        self._link = WorkerLink(
            name=request.name or request.path.stem,
            command=settings.command,
            environment=settings.environment,
            deadlines=settings.deadlines,
        )

    def wait(self) -> WorkerModel:
        """The loaded model; called once. Raises what loading raises in this process, WorkerLostError, ClosedError."""
        link = self._link
        try:
            header = {"op": "load", "load": to_json(self._request)}
            _, answer = link.request(header, timeout_s=link.deadlines.load_s)
            with link.reading():
                facts = read_facts(answer.header.get("facts"))
        except BaseException:
            link.close()
            raise
        return WorkerModel(link, replace(facts, can_fork=False, can_branch=False))

    def close(self) -> None:
        """End the process, from any thread, without waiting: ``wait`` then raises ClosedError."""
        self._link.abandon()


def run_in_process(
    facts: ModelFacts, request: LoadRequest, settings: WorkerSettings, check: abc.Callable[[], object] = lambda: None
) -> BackgroundModel:
    """The model of ``request``, which will have these facts, in a separate process that ``load`` starts.

    ``check`` is called before each start, and may raise.
    """
    request = replace(request, path=request.path.absolute())  # the working directory may change before a restart

    def start() -> StartingWorker:
        check()
        return StartingWorker(request, settings)

    return BackgroundModel(
        facts,
        start,
        restarts=1,
        restart_after_s=settings.restart_after_s,
        where=" in a separate process",
    )
