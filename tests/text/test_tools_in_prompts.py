"""Tools and calls as single families' templates take them, each cut down to what is particular in it."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.conversation import PromptFormat
from edgespec.text.conversation.messages import read_conversation
from edgespec.text.conversation.model_template import ModelTemplate
from edgespec.text.conversation.tools import check_tools
from edgespec.text.tokenizers.gguf import GgufTokenizer

PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
USER = {"role": "user", "content": "hello"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "found"}


def tool(parameters: Any = PARAMETERS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}


def called(*calls: tuple[str, str], content: str = "", **more: Any) -> dict[str, Any]:
    """The assistant calls ``f``; each call is an id and its arguments."""
    own = [{"id": given, "function": {"name": "f", "arguments": arguments}} for given, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": own, **more}


def prompt(source: str, tokenizer: GgufTokenizer, *messages: Any, tools: Any = ()) -> str:
    own = PromptFormat("tiny", tokenizer, source, None)
    given = check_tools(tools)
    own.tool_use(given)
    return str(own.read(read_conversation(messages), given))


# SmolLM3's first template. It has no place for calls.
SMOLLM3 = """{%- if xml_tools or python_tools -%}In <tools></tools>: {% for tool in xml_tools[:] %}{{ tool | tojson }}{% endfor %}
Return <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>
{% endif %}{%- for message in messages -%}[{{ message.role }}] {{ message.content }}
{% endfor %}"""  # noqa: E501


def test_tools_have_every_name_that_templates_read(tokenizer: GgufTokenizer) -> None:
    assert '"name": "f"' in prompt(SMOLLM3, tokenizer, USER, tools=[tool()])
    assert "<tools>" not in prompt(SMOLLM3, tokenizer, USER)


def test_a_variable_of_the_request_stays_beside_its_tools() -> None:
    template = ModelTemplate("{{ xml_tools }} {{ tools }}", dict)
    assert template.render({"messages": [], "tools": ["a"]}) == "['a'] ['a']"
    assert template.render({"messages": [], "tools": ["a"], "xml_tools": ["b"]}) == "['b'] ['a']"
    assert template.render({"messages": [], "tools": ["a"], "xml_tools": []}) == "['a'] ['a']"


def test_tools_are_refused_where_a_template_only_speaks_of_them(tokenizer: GgufTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="its chat template cannot show them"):
        prompt(SMOLLM3.replace("xml_tools", "others"), tokenizer, USER, tools=[tool()])


def test_each_call_in_a_text_has_marks_as_the_model_writes_it(tokenizer: GgufTokenizer) -> None:
    calls = called(("a", '{"x": "ä"}'), ("b", "{}"), content="So.")
    shown = prompt(SMOLLM3, tokenizer, USER, calls, RESULT)
    assert shown.split("[assistant] ")[1] == (
        'So.<tool_call>\n{"name": "f", "arguments": {"x": "ä"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n[tool] found\n'
    )


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": None}])
def test_a_tool_without_properties_has_none_where_the_template_walks_through_them(
    parameters: Any, tokenizer: GgufTokenizer
) -> None:
    """As Seed-OSS' does."""
    walks = (
        "{% for tool in tools %}{% for name, own in tool.function.parameters.properties.items() %}"
        '{{ name }}{% endfor %}<tool_call>{"name":{% endfor %}{{ messages[0].content }}'
    )
    assert prompt(walks, tokenizer, USER, tools=[tool(parameters)]) == '<tool_call>{"name":hello'
