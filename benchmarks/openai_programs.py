"""Do programs for OpenAI work unchanged with `edgespec serve`? openai-agents, instructor and pydantic-ai, from PyPI.

    python -m benchmarks.openai_programs [--model MODEL]

Makes a virtual environment with the programs, and serves the model. Each program then runs as a process, with the
Responses API and with chat completions: openai-agents asks whole and streamed, for an object of a class, and has a
function called; pydantic-ai and instructor ask for such objects in every way they know. Prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from benchmarks.processes import serving

PROGRAMS = ("openai-agents>=0.24", "instructor>=1.11", "pydantic-ai-slim[openai]>=1.0")

AGENTS = """
import asyncio, json, sys
from typing import Literal
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

class Size(BaseModel):
    size: Literal["low", "high"]

cities = []

@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    "The weather in a city."
    cities.append(city)
    return "cold"

async def main():
    holds, client = {}, AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    greedy = {"temperature": 0, "max_tokens": 64}
    for api, kind in (("responses", OpenAIResponsesModel), ("chat", OpenAIChatCompletionsModel)):
        model = kind(model="default", openai_client=client)
        plain = Agent(name="plain", model=model, model_settings=ModelSettings(**greedy))
        whole = await Runner.run(plain, "Name a colour.")
        stream = Runner.run_streamed(plain, "Name a colour.")
        kinds = [event.type async for event in stream.stream_events()]
        holds[f"{api} whole"] = bool(whole.final_output)
        holds[f"{api} streamed"] = stream.final_output == whole.final_output and "raw_response_event" in kinds
        formed = Agent(name="formed", model=model, output_type=Size, model_settings=ModelSettings(**greedy))
        sized = await Runner.run(formed, "How large is a whale?")
        holds[f"{api} class"] = sized.final_output.size in ("low", "high")
        must = ModelSettings(**greedy, tool_choice="required")
        calling = Agent(name="calling", model=model, tools=[weather], model_settings=must)
        answered = await Runner.run(calling, "What is the weather in Oslo?", max_turns=4)
        holds[f"{api} tool"] = bool(cities and answered.final_output is not None)
        cities.clear()
    print(json.dumps(holds))

set_tracing_disabled(True)
asyncio.run(main())
"""
INSTRUCTOR = """
import json, sys
from typing import Literal
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Size(BaseModel):
    size: Literal["low", "high"]

holds, client = {}, OpenAI(base_url=sys.argv[1], api_key="none")
ask = [{"role": "user", "content": "How large is a whale?"}]
for mode in ("TOOLS", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    own = instructor.from_openai(client, mode=instructor.Mode[mode])
    found = own.create(model="default", messages=ask, response_model=Size, temperature=0, max_retries=1)
    holds[mode.lower()] = found.size in ("low", "high")
print(json.dumps(holds))
"""
PYDANTIC_AI = """
import json, sys
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

class Size(BaseModel):
    size: Literal["low", "high"]

holds, provider = {}, OpenAIProvider(base_url=sys.argv[1], api_key="none")
for api, kind in (("responses", OpenAIResponsesModel), ("chat", OpenAIChatModel)):
    model = kind("default", provider=provider)
    greedy = {"temperature": 0, "max_tokens": 64}
    holds[f"{api} whole"] = bool(Agent(model, model_settings=greedy).run_sync("Name a colour.").output)
    for name, form in (("native", NativeOutput(Size)), ("tool", ToolOutput(Size))):
        answer = Agent(model, output_type=form, model_settings=greedy).run_sync("How large is a whale?")
        holds[f"{api} {name}"] = answer.output.size in ("low", "high")
print(json.dumps(holds))
"""
SCRIPTS = {"openai-agents": AGENTS, "instructor": INSTRUCTOR, "pydantic-ai": PYDANTIC_AI}


def outcome(python: Path, script: str, url: str) -> dict[str, bool]:
    """What holds for one program. Raises RuntimeError with its errors."""
    command = [str(python), "-c", script, f"{url}/v1"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=900, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, bool] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec programs ") as place:
        folder = Path(place)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "-q", *PROGRAMS]
        subprocess.run(install, check=True, stdout=sys.stderr)
        with serving(folder, given.model) as (url, _):
            found = {name: outcome(python, script, url) for name, script in SCRIPTS.items()}
    print(json.dumps({"model": given.model, "programs": list(PROGRAMS), "holds": found}))


if __name__ == "__main__":
    main()
