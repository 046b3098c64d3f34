"""An HTTP server for one model, with OpenAI's interface. Needs the extra ``serve`` (starlette and uvicorn)."""
