"""Whole tool turns of Codex and opencode in requests of their shape. The model's own words are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.test_tools import TEMPLATE
from tests.support.agent_requests import codex, opencode, opencode_title, with_output
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

ASKED, FOUND = "What is in notes.txt?", "Process exited with code 0\nOutput:\nbuy milk\n"
# Of their real size the requests have thirty thousand tokens of the tiny model's vocabulary.
SHARE = 0.1


@pytest.fixture(scope="module")
def agents(tiny: TinyModels) -> Iterator[Running]:
    path = tiny.with_template("agents", TEMPLATE, context_length=16_384)
    with running(lambda: tiny.load(path, draft="none", depth=0, context=16_384)) as found:
        yield found


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a streamed reply's events."""
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    data = (line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: "))
    return [json.loads(each) for each in data if each != "[DONE]"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_codex_has_a_command_run_and_an_agent_spawned(agents: Running, says: list[str]) -> None:
    body = codex(ASKED, SHARE)
    says += ["Let me look.\n", call("exec_command", cmd="cat notes.txt"), call("multi_agent_v1__wait_agent", ids="a")]
    first = events(agents, "/v1/responses", body)[-1]["response"]
    assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
    command, agent = first["output"][1:]
    assert (command["name"], json.loads(command["arguments"])) == ("exec_command", {"cmd": "cat notes.txt"})
    assert (agent["namespace"], agent["name"]) == ("multi_agent_v1", "wait_agent")
    assert first["tools"] == body["tools"]
    assert first["edgespec"]["warnings"] == ["tools of the type web_search are left out: only functions are called"]
    says += ["Buy ", "milk."]
    second = events(agents, "/v1/responses", with_output(body, first["output"], FOUND))[-1]["response"]
    assert second["output"][0]["content"][0]["text"] == "Buy milk."
    asked = first["usage"]["input_tokens"]
    assert asked > 3000
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= asked
    assert not agents.lines[-1].kept_in_part, "of schemas all is kept"


def test_opencode_gets_a_title_and_has_a_command_run(agents: Running, says: list[str]) -> None:
    says += ["Notes"]
    title = events(agents, "/v1/chat/completions", opencode_title(ASKED) | {"model": "tiny"})
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in title if each["choices"]) == "Notes"
    body = opencode(ASKED, SHARE) | {"model": "tiny"}
    says += ["Let me look.\n", call("bash", command="cat notes.txt", description="Reads the notes")]
    first = events(agents, "/v1/chat/completions", body)
    (found,) = [
        each for chunk in first for choice in chunk["choices"] for each in choice["delta"].get("tool_calls", ())
    ]
    assert json.loads(found["function"]["arguments"])["command"] == "cat notes.txt"
    assert [choice["finish_reason"] for chunk in first for choice in chunk["choices"]][-1] == "tool_calls"
    said = {"role": "assistant", "content": "", "tool_calls": [{k: v for k, v in found.items() if k != "index"}]}
    result = {"role": "tool", "tool_call_id": found["id"], "content": "buy milk\n"}
    says += ["Buy ", "milk."]
    second = events(agents, "/v1/chat/completions", {**body, "messages": [*body["messages"], said, result]})
    text = "".join(choice["delta"].get("content", "") for chunk in second for choice in chunk["choices"])
    assert text == "Buy milk."
    usage = second[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first[-1]["usage"]["prompt_tokens"] > 2000
