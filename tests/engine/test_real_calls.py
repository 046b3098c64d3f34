"""A whole tool round with each real template: the model calls, the result goes back, and the model answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from edgespec.files.home import home
from edgespec.text.conversation import call_formats
from tests.support.call_samples import SAMPLES
from tests.support.call_templates import CALL_TEMPLATES
from tests.support.llama_sources import IndexUnreachableError
from tests.support.real_templates import CHANGES_LISTS, real_templates
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, read_all
from tests.text.test_real_calls import TEMPLATES

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# Their templates show no tools: the model cannot be given any.
NO_TOOLS = {
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}},
    "required": ["city"],
}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in Paris?"},
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    try:
        return real_templates(home().create(home().root / "test-data")) | CALL_TEMPLATES
    except IndexUnreachableError as error:
        pytest.skip(f"the templates cannot be fetched: {error}")


def answered(session: Session, messages: list[Any]) -> Done:
    return read_all(session.generate(messages=messages, tools=[TOOL], max_tokens=4))[1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_given_and_its_result_is_read(
    tiny: TinyModels, tmp_path: Path, templates: dict[str, str], name: str
) -> None:
    (sample,) = [text for form, text in SAMPLES.values() if form is getattr(call_formats, name)]
    for template in set(TEMPLATES[name]) - NO_TOOLS - CHANGES_LISTS:
        path = tmp_path / f"{template}.gguf"
        write_scripted_gguf(path, [sample, "<|im_end|>"], template=templates[template])
        with tiny.load(path, draft="none", context=16_384) as engine, engine.session() as session:
            done = answered(session, ASKED)
            (call,) = done.tool_calls
            read = call.name, json.loads(call.arguments), done.content
            assert read == ("weather", {"city": "Paris"}, ""), template
            result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
            again = answered(session, [*session.messages, result])
            assert len(again.tool_calls) == 1, template
            assert again.stats.prompt_tokens > done.stats.prompt_tokens


@pytest.mark.parametrize("template", sorted(NO_TOOLS))
def test_tools_are_refused_where_the_template_does_not_show_them(
    tiny: TinyModels, tmp_path: Path, templates: dict[str, str], template: str
) -> None:
    path = write_scripted_gguf(tmp_path / "no-tools.gguf", ["a", "<|im_end|>"], template=templates[template])
    with (
        tiny.load(path, draft="none") as engine,
        engine.session() as session,
        pytest.raises(InvalidRequestError, match="its chat template cannot show them"),
    ):
        answered(session, ASKED)
