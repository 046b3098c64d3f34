"""``/v1/messages/count_tokens``: how many tokens a conversation's prompt would have."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.server.faces.messages import COUNT, MESSAGES
from edgespec.server.keeper import LoadedEngine
from edgespec.server.schema import Request
from edgespec.server.service import Read, Service
from edgespec.text.request_budget import RequestBudget


def routes(service: Service) -> list[Route]:
    """The route that counts tokens."""

    async def count(read: Read[Request]) -> Response:
        keeper = service.check_model(read.asked.model, any_model=MESSAGES.any_model).keeper
        tokens = await service.count(read, keeper, lambda loaded: prompt_ids(loaded, read.asked, read.budget.left_s))
        return JSONResponse({"input_tokens": len(tokens)})

    return [Route(COUNT, service.endpoint(MESSAGES.read, count), methods=["POST"])]


def prompt_ids(loaded: LoadedEngine, request: Request, seconds: float) -> list[int]:
    """The tokens of a conversation's prompt, which may be longer than the context: the body's size is bounded."""
    return loaded.engine.pair.prompt_ids(
        request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        template_variables=request.template_variables,
        budget=RequestBudget(seconds=seconds),
    )
