"""Do coding agents run a whole tool turn with `edgespec serve`?

    python -m benchmarks.agents [--only AGENT ...] [--programs FOLDER]

Claude Code, Codex and opencode come from npm into FOLDER, acceptance/agents by default, unless they are there. Each
has a new home, the settings that docs/guide/agents.md shows, and a server of a tiny model whose words are scripted:
asked what is in a file, it calls the program's tool, and says what was found once the result is in the conversation.
Needs node, npm and the network for the first run. Prints one JSON object: for each program whether it said what is in
the file, and its requests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from tests.engine.test_tools import TEMPLATE
from tests.support.http_server import running
from tests.support.pages import fenced
from tests.support.scripted_answers import scripted
from tests.support.tiny_gguf import write_tiny_gguf

PAGE, ADDRESS = "docs/guide/agents.md", "http://127.0.0.1:8471"
FILE, WORD = "secret.txt", "marigold"
QUESTION = f"Which word is in the file {FILE}?"
LONGEST_S = 240.0
# Claude Code's prompt of 76 kB has sixty thousand tokens of the tiny model's vocabulary.
CONTEXT = 98_304


@dataclass(frozen=True)
class Agent:
    """A program: its package, the script that completes its installation, how it is asked, and what it calls.

    ``settings`` writes its files below a home and a project, given the server's address, and returns what its
    environment has.
    """

    package: str
    program: str
    arguments: tuple[str, ...]
    call: Mapping[str, Any]
    settings: Callable[[str, Path, Path], dict[str, str]]
    completed_by: str | None = None


def _block(language: str, word: str, url: str) -> str:
    """The page's block with the word, for a server at this address. Raises ValueError if there are others."""
    (found,) = (text for text in fenced(PAGE, language) if word in text)
    return found.replace(ADDRESS, url)


def _claude(url: str, home: Path, project: Path) -> dict[str, str]:
    (home / ".claude").mkdir()
    (home / ".claude" / "settings.json").write_text(_block("json", "ANTHROPIC_BASE_URL", url), encoding="utf-8")
    return {"DISABLE_AUTOUPDATER": "1"}


def _codex(url: str, home: Path, project: Path) -> dict[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(_block("ini", "model_provider", url), encoding="utf-8")
    return {}


def _opencode(url: str, home: Path, project: Path) -> dict[str, str]:
    (project / "opencode.json").write_text(_block("json", "opencode.ai", url), encoding="utf-8")
    return {}


AGENTS: Mapping[str, Agent] = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code@2.1.197",
        "claude",
        ("--print", QUESTION, "--allowedTools", "Bash"),
        {"name": "Bash", "arguments": {"command": f"cat {FILE}", "description": "Reads the file"}},
        _claude,
        "@anthropic-ai/claude-code/install.cjs",
    ),
    "codex": Agent(
        "@openai/codex@0.171.0",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION),
        {"name": "exec_command", "arguments": {"cmd": f"cat {FILE}"}},
        _codex,
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        "opencode",
        ("run", QUESTION),
        {"name": "bash", "arguments": {"command": f"cat {FILE}", "description": "Reads the file"}},
        _opencode,
        "opencode-ai/postinstall.mjs",
    ),
}


def installed(agent: Agent, folder: Path) -> Path:
    """The program, from npm unless the folder has it. Raises RuntimeError without npm or the network."""
    own = folder / agent.package.replace("/", "-").lstrip("@")
    program = own / "node_modules" / ".bin" / agent.program
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("npm is not installed; the agents are programs of its registry")
        own.mkdir(parents=True, exist_ok=True)
        _run(own, npm, "install", "--prefix", str(own), "--ignore-scripts", "--no-audit", "--no-fund", agent.package)
        if agent.completed_by is not None:
            _run(own, "node", str(own / "node_modules" / agent.completed_by))
    return program


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stderr[-1000:]}")


def turn_of(name: str, programs: Path) -> dict[str, Any]:
    """One program's turn."""
    agent, started = AGENTS[name], time.monotonic()
    program = installed(agent, programs)
    with tempfile.TemporaryDirectory(prefix="edgespec-agent-") as place:
        work = Path(place)
        home, project = work / "home", work / "project"
        home.mkdir()
        project.mkdir()
        (project / FILE).write_text(f"{WORD}\n", encoding="utf-8")
        with scripted(_script(agent)), running(lambda: _engine(work)) as server:
            server.wait_until(lambda: server.service.keeper.state == "ready")
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.settings(server.url, home, project)}
            said, status = _asked([str(program), *agent.arguments], project, environment)
            requests = [
                f"{line.method} {line.path} {line.status} {line.error or ''}".strip() for line in server.lines
            ]
    holds = f"The word is {WORD}." in said
    return {
        "package": agent.package,
        "said": holds,
        "status": status,
        "requests": requests,
        "seconds": round(time.monotonic() - started, 1),
        **({} if holds else {"output": said[-2000:]}),
    }


def _engine(work: Path) -> Engine:
    shape: dict[str, Any] = {"quant": "Q8_0", "heads": 2, "kv_heads": 1}
    model = write_tiny_gguf(work / "tiny.gguf", chat_template=TEMPLATE, context_length=CONTEXT, **shape)
    return Engine.load(str(model), draft="none", context=CONTEXT, store_home=Home(work / "edgespec"))


def _script(agent: Agent) -> Callable[[str, bool], list[str]]:
    call = f"<tool_call>\n{json.dumps(agent.call)}\n</tool_call>"

    def script(prompt: str, with_tools: bool) -> list[str]:
        if WORD in prompt:
            return ["The word ", f"is {WORD}."]
        return ["Let me look.\n", call] if with_tools else ["A word in a file"]

    return script


def _asked(command: list[str], project: Path, environment: Mapping[str, str]) -> tuple[str, int | None]:
    """What the program said, and its exit status; None if it took too long."""
    settings: dict[str, Any] = {"cwd": project, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    try:
        done = subprocess.run(command, capture_output=True, timeout=LONGEST_S, check=False, **settings)
    except subprocess.TimeoutExpired as expired:
        return str(expired.output), None
    return done.stdout + done.stderr, done.returncode


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(AGENTS), help="this program (repeatable)")
    parser.add_argument("--programs", type=Path, default=ROOT / "acceptance" / "agents", help="where they are kept")
    given = parser.parse_args()
    try:
        report: dict[str, Any] = {"agents": {name: turn_of(name, given.programs) for name in given.only or AGENTS}}
    except RuntimeError as error:
        report = {"error": {"message": str(error)}}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
