"""What the routes of a server share, and what a log shows of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgespec.engine.events import Done
from edgespec.server.bodies import BodyReader
from edgespec.server.errors import ApiError
from edgespec.server.keeper import ModelKeeper
from edgespec.server.metrics import Metrics
from edgespec.server.queue import RequestQueue
from edgespec.server.schema import Request
from edgespec.server.security import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One request as a log shows it: nothing of its content. ``status`` 0: the client left before an answer.

    ``kept_in_part``: not all of its schema's keywords.
    """

    client: str
    method: str
    path: str
    status: int
    seconds: float
    answers: tuple[Done, ...] = ()
    error: str | None = None
    kept_in_part: bool = False


@dataclass(slots=True, kw_only=True)
class Service:
    """What the routes share. ``names``: the model's own name first, then others that clients may use for it."""

    keeper: ModelKeeper
    names: tuple[str, ...]
    access: Access = field(default_factory=Access)
    queue: RequestQueue = field(default_factory=RequestQueue)
    bodies: BodyReader = field(default_factory=BodyReader)
    metrics: Metrics = field(default_factory=Metrics)
    log: Callable[[RequestLine], None] = lambda line: None
    content: Callable[[Request, list[Done]], None] | None = None
    connections: Callable[[], int] = lambda: 0

    def check_model(self, name: str | None, *, any_model: bool = False) -> None:
        """Raise ApiError with status 404 for a model that is not served. No name means the served one.

        With ``any_model`` every name does. Capital letters make no difference, and neither does Ollama's ``:latest``.
        """
        if name and not any_model and name.lower().removesuffix(":latest") not in map(str.lower, self.names):
            message = f"the model {name[:64]!r} is not served here; the served model is {self.names[0]!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
