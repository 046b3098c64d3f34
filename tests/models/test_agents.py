"""The generated requests of agents are as long as those that were recorded from the programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.server.faces.table import FACES
from tests.support.agent_requests import TOKENS, claude_code, codex, opencode, opencode_title

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

READ = {face.name: face.read for face in FACES}
REQUESTS: Mapping[str, tuple[str, Any]] = {
    "claude-code": ("messages", claude_code),
    "codex": ("responses", codex),
    "opencode": ("chat", opencode),
    "opencode-title": ("chat", opencode_title),
}


@pytest.mark.parametrize("agent", TOKENS)
def test_a_generated_request_has_the_tokens_of_the_recorded_one(pair: Engine, agent: str) -> None:
    api, body = REQUESTS[agent]
    request = READ[api](body("What is in notes.txt?"))
    found = pair.prompt_tokens(request.messages, tools=request.tools, tool_choice=request.tool_choice)
    assert found == pytest.approx(TOKENS[agent], rel=0.01)
