"""Chat templates in the style of well-known models, and their limits and errors."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from edgespec.errors import CancelledError, InvalidRequestError, TemplateError
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.request_budget import RequestBudget

USER = {"role": "user", "content": "Hi!"}
ASSISTANT = {"role": "assistant", "content": " Hello. "}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "日本語 🙂"}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}{{ '<|im_start|>system
You are a small model.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls|length != 1 %}
        {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{- bos_token }}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ["user", "assistant"] %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if message == users[-1] and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] | trim + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}<start_of_image>{%- else -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}"""

THINKING = """{%- macro turn(role, text) %}<|{{ role }}|>{{ text }}<|end|>{% endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.last = messages|length - 1 - loop.index0 %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- turn(message.role, text=content) }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think>\\n' if enable_thinking | default(true) }}{% endif %}"""


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options)


def test_a_chatml_template_renders_roles_and_the_generation_prompt() -> None:
    chat = template(CHATML)
    expected = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n Hello. <|im_end|>\n"
    assert chat.render([USER, ASSISTANT], add_generation_prompt=False) == expected
    assert chat.render([USER, ASSISTANT]) == expected + "<|im_start|>assistant\n"


def test_smollm2s_template_adds_a_system_turn_only_without_a_system_message() -> None:
    chat = template(SMOLLM2)
    turn = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render([USER]) == "<|im_start|>system\nYou are a small model.<|im_end|>\n" + turn
    assert chat.render([SYSTEM, USER]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + turn


def test_qwens_template_renders_tools_and_tool_calls() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}
    call = {"function": {"name": "add", "arguments": {"x": 1, "y": [2.5, None, True]}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        AGAIN,
    ]
    assert template(QWEN).render(messages, extra={"tools": [tool]}) == (
        "<|im_start|>system\nYou are helpful.\n\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "a < b & \'c\' é"}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"x": 1, "y": [2.5, null, true]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n日本語 🙂<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwens_template_renders_a_system_message_without_tools() -> None:
    assert template(QWEN).render([SYSTEM, USER], extra={"tools": None}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama3s_template_renders_the_date_and_the_roles() -> None:
    expected = (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: {}\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    chat = template(LLAMA3)
    days = [datetime.now()]
    rendered = chat.render([SYSTEM, USER, ASSISTANT])
    days.append(datetime.now())  # midnight may have passed
    assert rendered in [expected.format(day.strftime("%d %b %Y")) for day in days]
    assert chat.render([SYSTEM, USER, ASSISTANT], extra={"date_string": "today"}) == expected.format("today")


def test_an_error_raised_by_a_template_keeps_the_templates_words() -> None:
    with pytest.raises(TemplateError) as caught:
        template(LLAMA3).render([{"role": "assistant", "tool_calls": [{}, {}]}])
    assert str(caught.value) == "This model only supports single tool-calls at once!"
    assert caught.value.hint


def test_mistrals_template_moves_the_system_message_to_the_last_user_turn() -> None:
    assert template(MISTRAL).render([SYSTEM, USER, ASSISTANT, AGAIN]) == (
        "<s>[INST] Hi![/INST] Hello.</s>[INST] Be brief.\n\n日本語 🙂[/INST]"
    )
    with pytest.raises(TemplateError, match=r"^Conversation roles must alternate user/assistant"):
        template(MISTRAL).render([USER, USER])


def test_gemmas_template_renders_content_parts() -> None:
    parts = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What? "}]}
    assert template(GEMMA).render([SYSTEM, USER, ASSISTANT, parts]) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\n<start_of_image>What?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_template_can_cut_thinking_from_earlier_turns() -> None:
    thought = {"role": "assistant", "content": "<think>hm</think>\n\nyes"}
    assert template(THINKING).render([USER, thought, AGAIN]) == (
        "<|user|>Hi!<|end|><|assistant|>yes<|end|><|user|>日本語 🙂<|end|><|assistant|><think>\n"
    )
    assert template(THINKING).render([USER], extra={"enable_thinking": False}) == "<|user|>Hi!<|end|><|assistant|>"


def test_tools_and_documents_are_none_where_a_request_has_none() -> None:
    asked = template("{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ other is defined }}")
    assert asked.render([]) == "True True True False"
    assert asked.render([], extra={"tools": []}) == "False True True False"
    assert asked.render([], absent={}) == "False False False False"


def test_template_errors_name_the_line() -> None:
    with pytest.raises(TemplateError, match=r"syntax error on line 3: .*nosuchtag"):
        template("a\n\n{% nosuchtag %}")
    with pytest.raises(TemplateError, match=r"failed on line 2: 'nothing' is undefined$"):
        template("a\n{{ nothing.more }}\n").render([])
    with pytest.raises(TemplateError, match=r"failed on line 2: it computes text \+ none"):
        template("{% macro m(x) %}\n{{ 'a' + x }}\n{% endmacro %}\n{{ m(none) }}").render([])
    with pytest.raises(
        TemplateError, match=r"failed on line 1: it calls 'strip' with arguments that it does not take$"
    ):
        template("{{ 'x'.strip(1, 2, 3) }}").render([])


def test_the_caller_can_set_template_limits() -> None:
    with pytest.raises(TemplateError, match="longer than the 3 bytes"):
        template("éé", limits=TemplateLimits(source_bytes=3))
    with pytest.raises(TemplateError, match="it takes more than the 5 steps"):
        template("{% for m in range(9) %}{{ m }}{% endfor %}", limits=TemplateLimits(steps=5)).render([])
    assert TemplateLimits() == template("x").limits


def test_a_conversation_of_2000_messages_stays_within_the_limits() -> None:
    """The limits grow with the caller's messages: a template may copy the messages several times."""
    messages = [USER if i % 2 == 0 else {"role": "assistant", "content": "word " * 200} for i in range(2000)]
    for source in (CHATML, QWEN, LLAMA3, MISTRAL, GEMMA, THINKING):
        assert len(template(source).render(messages)) > 1_000_000


def test_one_large_message_stays_within_the_limits() -> None:
    text = "日本" * 500_000
    assert text in template(GEMMA).render([{"role": "user", "content": text}])


def test_a_template_may_build_a_list_message_by_message() -> None:
    source = "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] %}{% endfor %}"
    assert template(source + "{{ ns.kept | length }}").render([USER] * 1500) == "1500"


def test_a_templates_sha256_is_that_of_its_source() -> None:
    assert template("é").sha256 == hashlib.sha256("é".encode()).hexdigest()


def test_messages_and_extra_values_that_templates_cannot_print_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bytes"):
        template("x").render([{"role": "user", "content": b"x"}])
    with pytest.raises(InvalidRequestError, match="a key that is not text"):
        template("x").render([], extra={"tools": {1: 2}})
    with pytest.raises(InvalidRequestError, match="messages must be a list of mappings"):
        template("x").render(["hello"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="variable messages cannot be set"):
        template("x").render([], extra={"messages": []})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="nests more than"):
        template("x").render([], extra={"tools": endless})


def test_jinja2_is_imported_only_when_the_first_template_is_compiled() -> None:
    code = (
        "import sys, edgespec.text.chat_template.template as t\n"
        "import edgespec.engine.answer, edgespec.text.tokenizers.tokenizer\n"
        "assert 'jinja2' not in sys.modules\n"
        "t.ChatTemplate('x', tokens={'bos_token': '', 'eos_token': ''})\n"
        "assert 'jinja2' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class _CancelledLater(RequestBudget):
    """A request that is cancelled when it is asked for the tenth time."""

    asked = 0

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        self.asked += 1
        return self.asked > 10

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        """It is cancelled by asking."""


def test_a_rendering_ends_where_it_asks_after_its_request_was_cancelled() -> None:
    budget = _CancelledLater()
    long = template("{% for m in range(9999) %}{{ m }}{% endfor %}")
    with pytest.raises(CancelledError) as found:
        long.render([], budget=budget)
    assert budget.asked == 12, "it asks once more to say so"
    assert found.value.__cause__ is None


def test_a_rendering_counts_the_characters_of_its_messages() -> None:
    budget = RequestBudget(100)
    budget.read(127 * 262_400)
    message = {"role": "user", "content": "x" * 150_000}
    template("x").render([message], budget=budget)
    with pytest.raises(InvalidRequestError, match="too much work"):
        template("x").render([message], budget=budget)
