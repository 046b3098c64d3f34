"""The page at ``/``: one file for browsers, with a policy that lets only its own script and style run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

# What the root answers to everything else. Ollama's clients look whether a server is Ollama's, and Claude Code asks
# for its head before its first request.
RUNNING = "Ollama is running"

_FILE = Path(__file__).with_name("page.html")


def policy(page: str) -> str:
    """The Content-Security-Policy of a page: its script and its style by their hashes, this server, nothing else.

    No text can become markup (trusted types), and no other page can show it in a frame. Images in the page itself
    are its icon.
    """
    allowed = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _hash(page: str, element: str) -> str:
    """The hash of the page's only element of this name, as a policy has it."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def wants_page(accept: str, agent: str) -> bool:
    """Whether a client with this ``Accept`` and ``User-Agent`` is a browser that opens the address.

    Java's programs ask for ``text/html`` too unless they say otherwise.
    """
    if not agent.startswith("Mozilla/"):
        return False
    kinds = (each.partition(";") for each in accept.lower().split(","))
    return any(kind.strip() == "text/html" and rest.replace(" ", "") != "q=0" for kind, _, rest in kinds)


def root_route() -> Route:
    """The route of ``/``."""
    page = _FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(page),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Vary": "Accept, User-Agent",
    }

    async def root(request: HttpRequest) -> Response:
        if wants_page(request.headers.get("accept", ""), request.headers.get("user-agent", "")):
            return Response(page, media_type="text/html", headers=headers)
        return PlainTextResponse(RUNNING, headers={"Vary": headers["Vary"]})

    return Route("/", root)
