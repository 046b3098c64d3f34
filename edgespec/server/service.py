"""What the routes of a server share, and what a log shows of a request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Generic, TypeAlias, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.engine.events import Done, Reading
from edgespec.server.bodies import BodyReader
from edgespec.server.errors import ApiError, GoneError
from edgespec.server.keeper import LoadedEngine, ModelKeeper
from edgespec.server.kept_items import KeptItems
from edgespec.server.keystrokes import Keystrokes
from edgespec.server.metrics import Metrics
from edgespec.server.queue import RequestQueue
from edgespec.server.schema import Request
from edgespec.server.security import Access
from edgespec.server.streaming import Receive, while_connected
from edgespec.server.threads import take_error
from edgespec.text.request_budget import RequestBudget

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Endpoint: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]

# The longest answers of thinking models on a slow machine take half an hour.
LONGEST_REQUEST_S = 3600.0


def client_address(scope: Scope) -> str:
    """The client's address; ? if it is not known. A socket of both families has IPv4 addresses inside IPv6's."""
    client = scope.get("client")
    return "?" if client is None else str(client[0]).removeprefix("::ffff:")


class Left(Response):
    """No response: the client has left. An exception would become one on its way out."""

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        scope["edgespec.error"] = "the client left"


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """A request whose body was read: who asks, for what, the bytes, and what the whole request may take.

    ``size`` is the body's, with the items that it names. ``receive`` tells when its client leaves.
    """

    owner: str
    asked: T
    size: int
    budget: RequestBudget
    receive: Receive


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One request as a log shows it: nothing of its content. ``status`` 0: the client left before an answer.

    ``kept_in_part``: not all of its schema's keywords. ``reading`` is how much of its prompt was read, before the
    first token as of the last part's beginning; None if all of it was in the cache. ``begun``: tokens of answers.
    """

    client: str
    method: str
    path: str
    status: int
    seconds: float
    answers: tuple[Done, ...] = ()
    error: str | None = None
    kept_in_part: bool = False
    reading: Reading | None = None
    begun: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that is served. ``names``: its own name first, then others that clients may use for it."""

    keeper: ModelKeeper
    names: tuple[str, ...]

    def is_named(self, name: str) -> bool:
        """Whether clients may use the name, in any of its spellings."""
        return any(spelled(name) in map(spelled, self.names) for spelled in _SPELLINGS)


def _bare(name: str) -> str:
    return name.lower().removesuffix(":latest")


# What makes no difference in a name, where no other model has the name itself: capital letters and ``:latest``, and
# then the colon of Ollama's names, which Continue writes before the size.
_SPELLINGS: tuple[Callable[[str], str], ...] = (str, _bare, lambda name: _bare(name).replace(":", "-"))


@dataclass(slots=True, kw_only=True)
class Service:
    """What the routes share, and the model that a request is for: ``keeper`` and ``names`` are those of a Served.

    ``others`` are the server's further models. ``counts`` is the queue of requests that cut or join texts: one after
    another, as other threads wait while native code reads a long text. ``items`` are those of each owner, so of each
    key. ``reading`` gives what hears how much is read of the prompt of a request, which it gets as client, method and
    path.
    """

    keeper: ModelKeeper
    names: tuple[str, ...]
    others: tuple[Served, ...] = ()
    access: Access = field(default_factory=Access)
    queue: RequestQueue = field(default_factory=RequestQueue)
    counts: RequestQueue = field(default_factory=lambda: RequestQueue(1))
    keystrokes: Keystrokes = field(default_factory=Keystrokes)
    bodies: BodyReader = field(default_factory=BodyReader)
    items: defaultdict[str, KeptItems] = field(default_factory=lambda: defaultdict(KeptItems))
    metrics: Metrics = field(default_factory=Metrics)
    log: Callable[[RequestLine], None] = lambda line: None
    reading: Callable[[str], Callable[[Reading], None]] = lambda request: lambda event: None
    content: Callable[[Request, list[Done]], None] | None = None
    connections: Callable[[], int] = lambda: 0

    @property
    def models(self) -> tuple[Served, ...]:
        """Every model that is served, this one first."""
        return (Served(keeper=self.keeper, names=self.names), *self.others)

    @property
    def context_length(self) -> int:
        """The longest context of a model, which bounds a body before its model is known."""
        return max(each.keeper.context_length for each in self.models)

    def endpoint(
        self,
        read: Callable[[Mapping[str, Any]], T],
        reply: Callable[[Read[T]], Awaitable[Response]],
        *,
        names_items: bool = False,
    ) -> Endpoint:
        """A route with a body: checks the key, reads the body with ``read``, and responds with ``reply``.

        With ``names_items`` the body may name kept items, which ``read`` gets in their places.
        """

        async def found(request: HttpRequest) -> Response:
            owner = self.access.owner(request.headers)
            budget = RequestBudget(self.context_length, LONGEST_REQUEST_S)
            try:
                items = self.items[owner] if names_items else None
                threads, waits_as = self.keeper.threads, self.waits_as(owner)
                asked, size = await self.bodies.read(request, read, budget, threads, items, waits_as)
                return await reply(Read(owner, asked, size, budget, request.receive))
            except GoneError:
                return Left()

        return found

    def waits_as(self, owner: str) -> str | None:
        """Whose request it is for a queue: None where all clients are one owner."""
        return owner if len(self.access.keys) > 1 else None

    async def count(self, read: Read[Any], keeper: ModelKeeper, work: Callable[[LoadedEngine], T]) -> T:
        """What ``work``, which cuts or joins texts for a request, finds with the loaded model.

        Raises GoneError if the client leaves, and what the queue, loading and ``work`` raise.
        """

        async def counted() -> T:
            async with keeper.use(read.owner) as loaded, self.counts.turn(read.size, self.waits_as(read.owner)):
                working = asyncio.ensure_future(keeper.threads.run(lambda: work(loaded)))
                working.add_done_callback(take_error)
                try:
                    return await asyncio.shield(working)
                finally:
                    await asyncio.wait([working])  # also for a client that left: its thread is not free before

        return await while_connected(read.receive, counted())

    def check_model(self, name: str | None, *, any_model: bool = False) -> Service:
        """The service of the model with this name. No name means the only one; with ``any_model`` every name does.

        Raises ApiError with status 404 for a model that is not served, and for no name among several models.
        """
        models = self.models
        if len(models) == 1 and (any_model or not name):
            return self
        for spelled, each in product(_SPELLINGS, models):  # one may be called as another without tag
            if name and spelled(name) in map(spelled, each.names):
                others = tuple(other for other in models if other is not each)
                return replace(self, keeper=each.keeper, names=each.names, others=others)
        served = "the served model is" if len(models) == 1 else "the served models are"
        served += f" {', '.join(repr(each.names[0]) for each in models)}"
        message = f"the model {name[:64]!r} is not served here; {served}" if name else f"name a model; {served}"
        raise ApiError(message, status=404, param="model", code="model_not_found")
