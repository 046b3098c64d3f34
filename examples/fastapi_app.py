"""A web application of your own with FastAPI: one page with a stop button. Leaving the page ends the answer.

python examples/fastapi_app.py [MODEL]; for OpenAI's interface use `edgespec serve` instead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, StreamingResponse

from edgespec import EdgespecError, Engine

PAGE = """<!doctype html><title>edgespec</title>
<form><input size=60 autofocus> <button>Ask</button> <button type=button id=end>Stop</button></form>
<pre style="white-space: pre-wrap"></pre>
<script>
const [form, input, answer, end] = ["form", "input", "pre", "#end"].map((each) => document.querySelector(each));
let running = new AbortController();
end.onclick = () => running.abort();
form.onsubmit = async (event) => {
  event.preventDefault(); running.abort(); running = new AbortController(); answer.textContent = "";
  try {
    const reply = await fetch("/ask", {method: "POST", body: input.value, signal: running.signal});
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; !(part = await reader.read()).done;) answer.textContent += part.value;
  } catch (error) { answer.textContent += " [stopped]"; }
};
</script>"""


def make_app(engine: Engine) -> FastAPI:
    """The application: ``/`` is the page, ``/ask`` streams an answer as text."""
    app = FastAPI()
    # Pages of other sites may point a name of theirs at this machine; their requests have that name as Host.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @app.post("/ask")
    async def ask(request: Request) -> StreamingResponse:
        prompt = (await request.body()).decode("utf-8", "replace")
        return StreamingResponse(answer(engine, prompt), media_type="text/plain; charset=utf-8")

    return app


async def answer(engine: Engine, prompt: str) -> AsyncIterator[str]:
    """The text of one answer. A closed connection cancels this, and so the answer."""
    session = None
    try:
        session = await asyncio.to_thread(engine.session)
        generation = await asyncio.to_thread(session.generate, prompt, max_tokens=400)
        async for piece in generation.atexts():
            yield piece
    except EdgespecError as error:
        yield error.message
    finally:
        if session is not None:
            await asyncio.to_thread(session.close)


def main() -> None:
    """Load the model and serve the page on port 8000 of this machine."""
    import uvicorn

    with Engine.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", download=True) as engine:
        uvicorn.run(make_app(engine), host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
