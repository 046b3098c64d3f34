"""Do real clients of OpenAI's interface work with `edgespec serve`, and does the server keep to its OpenAPI document?

    python -m benchmarks.server_clients [FOLDER]

Installs litellm, langchain-openai, llm and schemathesis into an environment in FOLDER (default: build/clients),
serves a small model, and runs each client as a process. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, serving

MODEL = "smollm2-135m"
PACKAGES = ("litellm", "langchain-openai", "llm", "schemathesis")
QUESTION = "Name a colour. One word."

LITELLM = """
import sys, litellm
about = dict(model="openai/default", api_base=sys.argv[1] + "/v1", api_key="none", max_tokens=12, temperature=0)
messages = [{"role": "user", "content": sys.argv[2]}]
whole = litellm.completion(messages=messages, **about).choices[0].message.content
parts = litellm.completion(messages=messages, stream=True, **about)
assert whole and whole == "".join(part.choices[0].delta.content or "" for part in parts), whole
print(whole)
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", model="default", max_tokens=12, temperature=0)
whole = model.invoke(sys.argv[2])
assert whole.usage_metadata["output_tokens"] > 0, whole
assert whole.content and whole.content == "".join(part.content for part in model.stream(sys.argv[2]))
print(whole.content)
"""
LLM_MODELS = """- model_id: served
  model_name: default
  api_base: {url}/v1
"""


def environment(folder: Path) -> Path:
    """The programs of an environment with the clients, made once."""
    programs = folder / "bin"
    if not (programs / "schemathesis").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([programs / "pip", "install", "-q", *PACKAGES], check=True, stdout=sys.stderr)
    return programs


def run(command: list[str | Path], **variables: str) -> dict[str, Any]:
    """Whether a process succeeded, and the end of what it printed."""
    own = {**os.environ, **variables, "PYTHONPATH": ""}
    done = subprocess.run(
        command,
        text=True,
        capture_output=True,
        env=own,
        cwd=tempfile.gettempdir(),  # schemathesis writes a cache
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    return {"code": done.returncode, "said": (done.stdout + done.stderr).strip()[-4000:]}


def measure(folder: Path) -> dict[str, Any]:
    """What each client got."""
    programs = environment(folder)
    python = programs / "python"
    with tempfile.TemporaryDirectory() as place, serving(Path(place), MODEL, "--context", "512") as (url, _):
        home = Path(place)
        (home / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=url))
        llm: list[str | Path] = [programs / "llm", "-m", "served", "--no-log", "-o", "max_tokens", "12", QUESTION]
        fuzz: list[str | Path] = [programs / "schemathesis", "run", f"{url}/openapi.json", "--max-examples", "15"]
        fuzz += ["--request-timeout", "60"]  # an answer may fill the context, and the machine may be busy
        clients = {
            "litellm": run([python, "-c", LITELLM, url, QUESTION]),
            "langchain": run([python, "-c", LANGCHAIN, url, QUESTION]),
            "llm": run(llm, LLM_USER_PATH=str(home), OPENAI_API_KEY="none"),
            # A schema cannot say in which order messages come, and that a text has no NUL.
            "schemathesis": run([*fuzz, "--exclude-checks", "positive_data_acceptance", "--seed", "1"]),
        }
    return {"clients": clients}


def main() -> None:
    """Print the report."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "clients", metavar="FOLDER")
    print(json.dumps(measure(parser.parse_args().folder), indent=1))


if __name__ == "__main__":
    main()
