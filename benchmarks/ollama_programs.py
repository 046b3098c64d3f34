"""Do programs for Ollama work unchanged with `edgespec serve`? langchain-ollama and llm, from the package index.

    python -m benchmarks.ollama_programs [--model MODEL]

Makes a virtual environment with the programs, and serves the model. Each program then runs as a process, with the
address in OLLAMA_HOST as users set it. It lists the models, asks a question whole and streamed, and for JSON by a
schema; langchain also hands over a tool's result. The texts must be those of /v1/chat/completions. Prints one JSON
object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
import venv
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.processes import serving

PROGRAMS = ("langchain-ollama>=1.1", "llm>=0.36", "llm-ollama>=0.19")
QUESTION = "Name three sorting algorithms."
TOKENS = 24
# One of two values, so that every model keeps to the schema within a few tokens.
SCHEMA = {"type": "object", "properties": {"size": {"enum": ["low", "high"]}}, "required": ["size"]}

LANGCHAIN = """
import json, sys
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

name, question, tokens, schema = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
model = ChatOllama(model=name, temperature=0, num_predict=tokens, num_ctx=100_000, validate_model_on_init=True)

@tool
def weather(city: str) -> str:
    "The weather in a city."
    return "cold"

form = {"title": "size", "description": "a size", **schema}
call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1"}
asked, called = HumanMessage("What is the weather in Oslo?"), AIMessage("", tool_calls=[call])
turn = [asked, called, ToolMessage("-3", tool_call_id="call_1")]
whole = model.invoke(question)
print(json.dumps({
    "whole": whole.content,
    "streamed": "".join(chunk.content for chunk in model.stream(question)),
    "tokens": whole.usage_metadata["output_tokens"],
    "size": model.with_structured_output(form, method="json_schema").invoke("How large is a whale?")["size"],
    "after_a_tool": bool(model.bind_tools([weather]).invoke(turn).content),
}))
"""


def reply(url: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as response:
        found: dict[str, Any] = json.load(response)
    return found


def run(folder: Path, url: str, *command: str) -> str:
    """The stdout of a program of the environment. Raises RuntimeError with its errors."""
    places = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "OLLAMA_HOST": url}
    program = str(folder / "bin" / command[0])
    done = subprocess.run([program, *command[1:]], env=places, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def report(folder: Path, url: str, model: str) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": TOKENS}
    expected = reply(url, "/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
    langchain = json.loads(
        run(folder, url, "python", "-c", LANGCHAIN, model, QUESTION, str(TOKENS), json.dumps(SCHEMA))
    )
    llm = (
        "llm",
        "prompt",
        "-m",
        f"ollama/{model}:latest",
        "-o",
        "temperature",
        "0",
        "-o",
        "num_predict",
        str(TOKENS),
    )
    form = json.loads(run(folder, url, *llm, "--schema", json.dumps(SCHEMA), "How large is a whale?"))
    holds = {
        "langchain whole": langchain["whole"] == expected,
        "langchain streamed": langchain["streamed"] == expected,
        "langchain counts": langchain["tokens"] == TOKENS,
        "langchain schema": langchain["size"] in ("low", "high"),
        "langchain tool": langchain["after_a_tool"],
        "llm lists": f"{model}:latest" in run(folder, url, "llm", "models", "list"),
        "llm streamed": run(folder, url, *llm, QUESTION).strip() == expected.strip(),
        "llm whole": run(folder, url, *llm, "--no-stream", QUESTION).strip() == expected.strip(),
        "llm schema": form["size"] in ("low", "high"),
    }
    return {"model": model, "programs": list(PROGRAMS), "holds": holds}


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="edgespec programs ") as place:
        folder = Path(place)
        venv.create(folder, with_pip=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PROGRAMS]
        subprocess.run(install, check=True, stdout=sys.stderr)
        with serving(folder, given.model) as (url, _):
            print(json.dumps(report(folder, url, given.model)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
