"""Conversations in the form that a template can show: each template is tried, none is known by its name."""

from __future__ import annotations

import json
import sys
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import TemplateError
from edgespec.text.conversation.conversation import PromptFormat
from edgespec.text.conversation.messages import read_conversation
from edgespec.text.conversation.model_template import ModelTemplate, ModelTemplates
from edgespec.text.conversation.shapes import Shapes
from edgespec.text.tokenizers.tokenizer import Tokenizer

Message = dict[str, Any]

BODY = """{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}>{% endfor %}
{%- if m.role == 'tool' %} ({{ m.name }} {{ m.tool_call_id }}){% endif %}

{% endfor %}"""
RAISE = "{{ raise_exception('no') }}"


def guard(condition: str) -> str:
    """A template that refuses conversations in which one message fulfils the condition."""
    return f"{{% for m in messages %}}{{% if {condition} %}}{RAISE}{{% endif %}}{{% endfor %}}{BODY}"


ALTERNATES = (
    "{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    f"{{% if (m.role == 'user') != ns.user %}}{RAISE}{{% endif %}}{{% set ns.user = not ns.user %}}{{% endif %}}"
    "{% endfor %}"
)
ONE_OF_BOTH = BODY.replace("{{ m.content or '' }}", "{% if not m.tool_calls %}{{ m.content or '' }}{% endif %}")

# As Gemma 4's: the results follow their calls, and the text of the calls' message both.
RESULTS_FIRST = """{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]
{%- for c in m.tool_calls or [] %} <{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}>
{%- for r in messages if r.role == 'tool' and r.tool_call_id == c.id %} {{ r.content }}{% endfor %}
{%- endfor %} {{ m.content }}
{% endif %}{% endfor %}"""

# As Gemma 4's first template, which takes results as responses of the message with their calls.
RESPONDS = BODY.replace(
    "{%- if m.role == 'tool' %}",
    "{%- for r in m.tool_responses or [] %} {{ r.name }}: {{ r.response }}{% endfor %}{%- if m.role == 'tool' %}",
)


def user(content: str = "hello") -> Message:
    return {"role": "user", "content": content}


def said(content: str = "", *calls: str, **more: Any) -> Message:
    called = [{"id": own, "function": {"name": "f", "arguments": json.dumps({"x": own})}} for own in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": called} if calls else {}), **more}


def result(own: str = "a", content: str = "found") -> Message:
    return {"role": "tool", "tool_call_id": own, "content": content}


SYSTEM = {"role": "system", "content": "be kind"}


def shown(source: str, *messages: Message) -> list[str]:
    """The lines of the prompt."""
    template = ModelTemplate(source, dict)
    text = template.render({"messages": template.shaped(read_conversation(messages), tools=False)})
    return text.strip().split("\n")


@pytest.mark.parametrize(
    ("source", "messages", "lines"),
    [
        (BODY, [SYSTEM, user()], ["[system] be kind", "[user] hello"]),
        (BODY, [said(), user()], ["[user] ", "[assistant] ", "[user] hello"]),
        # no place for a system message: refused, or left out
        (guard("m.role == 'system'"), [SYSTEM, user()], ["[user] be kind", "", "hello"]),
        (BODY.replace("messages", "messages | rejectattr('role', 'equalto', 'system')"), [SYSTEM, user()], [
            "[user] be kind", "", "hello"
        ]),
        (guard("m.role == 'system'"), [{**SYSTEM, "content": ""}, user()], ["[user] hello"]),
        # ids
        (BODY, [said("", "call_1|fc_1"), result("call_1|fc_1")], [
            '[assistant] <f {"x": "call_1|fc_1"} call_1|fc_1>', "[tool] found (f call_1|fc_1)"
        ]),
        # texts and several calls in one message
        (BODY, [said("so", "a", "b")], ['[assistant] so<f {"x": "a"} a><f {"x": "b"} b>']),
        (ONE_OF_BOTH, [said("so", "a")], ["[assistant] so", '[assistant] <f {"x": "a"} a>']),
        (guard("(m.tool_calls or []) | length > 1"), [said("so", "a", "b")], [
            '[assistant] so<f {"x": "a"} a>', '[assistant] <f {"x": "b"} b>'
        ]),
        (guard("(m.tool_calls or []) | length > 1").replace(BODY, ONE_OF_BOTH), [said("so", "a", "b")], [
            "[assistant] so", '[assistant] <f {"x": "a"} a>', '[assistant] <f {"x": "b"} b>'
        ]),
        (ALTERNATES + ONE_OF_BOTH, [user(), said("so", "a"), result(), said("it"), user("and")], [
            "[user] hello", "[assistant] so", "[user] ", '[assistant] <f {"x": "a"} a>', "[tool] found (f a)",
            "[assistant] it", "[user] and",
        ]),
        # a text behind the results of its calls
        (RESULTS_FIRST, [said("so", "a"), result()], ["[assistant] so", '[assistant] <f {"x": "a"} a> found']),
        # the user speaks after a result, or after a call without one
        (ALTERNATES + BODY, [user(), said("", "a"), result(), user("and")], [
            "[user] hello", '[assistant] <f {"x": "a"} a>', "[tool] found (f a)", "[assistant] ", "[user] and"
        ]),
        (ALTERNATES + BODY, [user(), said("", "a"), user("and")], [
            "[user] hello", '[assistant] <f {"x": "a"} a>', "[assistant] ", "[user] and"
        ]),
        # an answer without text
        (guard("m.role == 'assistant' and not m.content"), [user(), said(), user("and")], [
            "[user] hello", "[assistant]  ", "[user] and"
        ]),
        # results without a call
        (BODY, [user(), result()], ["[user] hello", "[tool] found (unknown a)"]),
        (guard("m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"), [user(), result(), user("and")], [
            "[user] hello", "", "found", "", "and"
        ]),
        # arguments as text, and no content next to calls
        (BODY.replace("arguments | tojson", "arguments + ''"), [said("", "a")], ['[assistant] <f {"x": "a"} a>']),
        (BODY.replace("m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])"), [said("", "a")], [
            '[assistant] <f {"x": "a"} a>'
        ]),
    ],
)  # fmt: skip
def test_a_conversation_has_the_form_that_the_template_shows(
    source: str, messages: list[Message], lines: list[str]
) -> None:
    first = [user("begin")] if "tool_calls" in messages[0] else []
    assert shown(source, *first, *messages)[len(first) :] == lines


def test_a_template_that_takes_no_plain_message_is_not_tried_further() -> None:
    needs = guard("not variable") + "{{ variable }}"
    template = ModelTemplate(needs, dict)
    sent = read_conversation([SYSTEM, user(), said("so", "a"), result()])
    shaped = template.shaped(sent, tools=False)
    assert [each["role"] for each in shaped] == ["system", "user", "assistant", "tool"]
    assert "be kind" in template.render({"messages": shaped, "variable": "x"})


# SmolVLM's and LLaVA's templates without pictures, and one that takes the system's text alone as a text.
IN_PARTS = {
    "SmolVLM": "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "LLaVA": "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "mixed": "{% for m in messages %}[{{ m.role }}] "
    "{{ m.content if m.role == 'system' else m.content[0]['text'] }}\n{% endfor %}",
    "results": BODY.replace("m.content or ''", "m.content[0].text if m.role == 'tool' else m.content"),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_contents_are_typed_parts_where_the_template_shows_no_texts(name: str) -> None:
    template = ModelTemplate(IN_PARTS[name], dict)
    sent = [SYSTEM, user("word 1"), said("word 2"), user("word 3")]
    if name == "results":
        sent += [said("", "a"), result("a", "word 4")]
    shaped = template.shaped(read_conversation([*sent, said("word 5 and")]), tools=False)
    prompt = template.render({"messages": shaped})
    texts = [each["content"] for each in sent if each["content"]]
    assert [prompt.count(text) for text in texts] == [1] * len(texts)
    assert "'text'" not in prompt
    begun = template.continued({"messages": shaped})
    assert begun is not None
    assert begun.endswith("word 5 and")


def read(source: str, *messages: Message, **variables: Any) -> str:
    """The prompt, of which only the template decides."""
    tokenizer = cast(Tokenizer, SimpleNamespace(template_tokens={}))
    return PromptFormat("tiny", tokenizer, source, None).read(messages, variables=variables)


def test_a_template_that_writes_the_same_for_any_message_is_refused() -> None:
    for variables in ({}, {"enable_thinking": False, "thinking": False}):
        with pytest.raises(TemplateError, match="does not show the messages"):
            read("{% for m in messages %}[{{ m.role }}]{{ m.content.words }}{% endfor %}", user(), **variables)


@pytest.mark.parametrize(
    ("source", "variables", "prompt"),
    [
        ("{% if task == 'a' %}T: {{ messages[-1].content }}{% endif %}Q", {"task": "a"}, "T: askQ"),
        ("Q{% if documents %}{{ documents[0].text }}{% endif %}", {"documents": [{"text": "d"}]}, "Qd"),
        ("{{ messages[-1].content | length }}", {}, "3"),
        ("{{ messages[-1].content | upper }}", {}, "ASK"),
        ("Q{% if messages | length > 2 %}{{ messages[2].content }}{% endif %}", {}, "Qask"),
    ],
)
def test_a_template_that_shows_this_conversation_is_not_refused(
    source: str, variables: dict[str, Any], prompt: str
) -> None:
    assert read(source, user("begin"), said("x"), user("ask"), **variables) == prompt


def test_ids_are_nine_letters_and_digits_where_the_template_insists_on_them() -> None:
    nine = guard(
        "m.tool_calls and m.tool_calls[0].id | length != 9 or m.role == 'tool' and m.tool_call_id | length != 9"
    )
    kept = shown(nine, user(), said("", "call00007"), result("call00007"))
    assert kept[1:] == ['[assistant] <f {"x": "call00007"} call00007>', "[tool] found (f call00007)"]
    _, call, found = shown(nine, user(), said("", "call_1|fc_1"), result("call_1|fc_1"))
    own = call.rpartition(" ")[2].rstrip(">")
    assert len(own) == 9
    assert own.isalnum()
    assert found == f"[tool] found (f {own})"


def test_ids_name_their_function_where_the_template_shows_no_other_name() -> None:
    """As Kimi K2's does."""
    no_names = BODY.replace("{{ c.function.name }} ", "").replace("{{ m.name }} ", "")
    sent = [user(), said("", "x", "y"), result("x"), result("y"), said("", "x"), result("x"), result("other")]
    assert shown(no_names, *sent)[1:] == [
        '[assistant] <{"x": "x"} functions.f:0><{"x": "y"} functions.f:1>',
        "[tool] found (functions.f:0)",
        "[tool] found (functions.f:1)",
        '[assistant] <{"x": "x"} functions.f:2>',
        "[tool] found (functions.f:2)",
        "[tool] found (other)",
    ]


def test_results_are_responses_of_their_calls_where_the_template_takes_them_there() -> None:
    """As Gemma 4's first template does, which writes the role ``tool`` as a speaker's text."""
    found = [result("a", '{"t": 21}'), result("b", "[1]"), result("lone", '{"t": NaN}')]
    assert shown(RESPONDS, user(), said("", "a", "b"), *found, said("so"), result("late"))[1:] == [
        '[assistant] <f {"x": "a"} a><f {"x": "b"} b> f: {\'t\': 21} f: [1] unknown: {"t": NaN}',
        "[assistant] so",
        "[tool] found (unknown late)",
    ]
    for text in ('{"t": "cut \\ud83d"}', json.dumps({"t": [0] * 8192})):
        assert f"f: {text}" in shown(RESPONDS, user(), said("", "a"), result("a", text))[1], "half a pair, or long"
    korean = shown(RESPONDS, user(), said("", "a"), result("a", '{"t": "\\ud55c \\ud83d\\ude00"}'))[1]
    assert "{'t': '한 😀'}" in korean
    numbers = '{"t": [1.5, 1e-07, -2, 20000000000000000000]}'
    assert (
        "f: {'t': [1.5, 1e-07, -2, 20000000000000000000]}"
        in shown(RESPONDS, user(), said("", "a"), result("a", numbers))[1]
    )
    for altered in ("3.10", "1E5", "52.5200081234567890123", '1, "t": 2', '[{"a": 1, "a": 1}]', "1e999"):
        text = f'{{"t": {altered}}}'
        assert f"f: {text}" in shown(RESPONDS, user(), said("", "a"), result("a", text))[1], (
            "a value would be altered"
        )
    some = json.dumps({"t": [0] * 3000})
    _, first, second = shown(RESPONDS, user(), said("", "a"), result("a", some), said("", "b"), result("b", some))
    assert ("{'t': [0, 0" in first, "{'t'" in second) == (True, False), "together they are long"
    whole = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    assert '"role": "tool"' in shown(whole, user(), said("", "a"), result())[-1]


def test_responses_of_one_message_are_put_together_in_linear_work() -> None:
    template = ModelTemplate(RESPONDS, dict)
    sent = read_conversation([user(), said("", "a"), *(result() for _ in range(100))])
    lists = list[list[Any]]()  # kept, so that none gets the place of another
    written = 0

    def trace(frame: FrameType, _event: str, _value: object) -> Any:
        nonlocal written
        if frame.f_code is Shapes._as_given.__code__:
            for message in frame.f_locals.get("own", ())[-1:]:
                own = message.get("tool_responses")
                if own is not None and not any(own is each for each in lists):
                    lists.append(own)
                    written += len(own)
        return trace

    template.shaped(sent, tools=False)  # what is tried once is not counted
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        template.shaped(sent, tools=False)
    finally:
        sys.settrace(before)
    assert len(lists[-1]) == 100
    assert written <= 100


@pytest.mark.parametrize("odd", ["<|im_end|>", "a b", "é" * 300])
def test_ids_and_names_of_any_characters_are_shown_as_they_are(odd: str) -> None:
    call = {"id": odd, "function": {"name": odd, "arguments": "{}"}}
    _, called, found = shown(BODY, user(), {**said(), "tool_calls": [call]}, result(odd))
    assert (called, found) == (f"[assistant] <{odd} {{}} {odd}>", f"[tool] found ({odd} {odd})")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "tool_plan"])
def test_thinking_has_every_name_that_templates_use(name: str) -> None:
    thinks = BODY.replace("[{{ m.role }}]", "[{{ m.role }}]{% if m." + name + " %}({{ m." + name + " }}){% endif %}")
    assert shown(thinks, user(), said("x", reasoning="hm"), user())[1] == "[assistant](hm) x"


def test_thinking_next_to_calls_is_a_block_of_the_content_where_the_template_takes_it_there() -> None:
    """As Mistral's reasoning models do; others would print the list."""
    blocks = BODY.replace(
        "{{ m.content or '' }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for b in m.content or [] %}{{ '(' + b.thinking + ')' if b.type == 'thinking' else b.text }}{% endfor %}"
        "{% endif %}",
    )
    for text in ("so", ""):
        sent = [user(), said(text, "a", reasoning="hm"), result()]
        assert shown(blocks, *sent)[1] == f'[assistant] (hm){text}<f {{"x": "a"}} a>'
        assert shown(BODY, *sent)[1] == f'[assistant] {text}<f {{"x": "a"}} a>'


def test_thinking_and_text_next_to_calls_are_apart_where_the_template_takes_one_of_them() -> None:
    either = guard("m.tool_calls and m.content and m.thinking").replace(
        "[{{ m.role }}]", "[{{ m.role }}]{% if m.thinking %}({{ m.thinking }}){% endif %}"
    )
    lines = shown(either, user(), said("so", "a", reasoning="hm"), result())
    assert lines[1:3] == ["[assistant] so", '[assistant](hm) <f {"x": "a"} a>']


def test_tools_and_documents_are_none_unless_the_template_walks_through_them() -> None:
    asks = "{{ tools is none }} {{ documents is none }} {{ messages[0].content }}"
    assert shown(asks, user()) == ["True True hello"]
    walks = "{% for tool in tools %}{{ tool }}{% endfor %}{{ tools is defined }} {{ messages[0].content }}"
    assert shown(walks, user()) == ["False hello"]


TEMPLATES = [
    BODY, ONE_OF_BOTH, ALTERNATES + BODY, ALTERNATES + ONE_OF_BOTH, guard("m.role == 'system'"),
    guard("(m.tool_calls or []) | length > 1"), guard("m.role == 'assistant' and not m.content and not m.tool_calls"),
    guard("m.role == 'tool' and messages[loop.index0 - 1].role not in ('tool', 'assistant')"),
]  # fmt: skip


@given(
    st.sampled_from(TEMPLATES),
    st.lists(
        st.sampled_from(["system", "user", "said", "silent", "call", "both", "two", "result", "lone"]), max_size=8
    ),
)
def test_every_text_of_any_conversation_is_in_the_prompt(source: str, kinds: list[str]) -> None:
    sent, texts = list[Message](), list[str]()
    for at, kind in enumerate([*kinds, "user"]):
        own, other, text = f"call{at}", f"more{at}", f"text{at}."
        sent.append(
            {
                "system": {"role": "system", "content": text},
                "user": user(text),
                "said": said(text),
                "silent": said(),
                "call": said("", own),
                "both": said(text, own),
                "two": said(text, own, other),
                "result": result(f"call{at - 1}", text),
                "lone": result("lone", text),
            }[kind]
        )
        texts += [text] * (kind not in ("silent", "call")) + [own] * (kind in ("call", "both", "two"))
        texts += [other] * (kind == "two")
    prompt = "\n".join(shown(source, *sent))
    assert [text for text in texts if text not in prompt] == []


# ------------------------------------------------------------------------------------------------ several templates

TOOLS = '{{ tools }}<tool_call>{"name": ...}' + BODY
PLAIN = "{{ messages[0].content }}"
SOURCES = "{{ documents }}" + PLAIN


@pytest.mark.parametrize(
    ("default", "named", "needs", "chosen"),
    [
        (PLAIN, {}, {"tools": True, "documents": True}, PLAIN),
        (PLAIN, {"tool_use": TOOLS}, {}, PLAIN),
        (PLAIN, {"tool_use": TOOLS}, {"tools": True}, TOOLS),
        (PLAIN, {"tool_use": TOOLS}, {"calls": True}, TOOLS),
        (TOOLS + "default", {"tool_use": TOOLS}, {"tools": True}, TOOLS),
        (TOOLS + "default", {"tool_use": TOOLS}, {"calls": True}, TOOLS + "default"),
        (TOOLS, {"tool_use": PLAIN}, {"tools": True}, TOOLS),
        (PLAIN, {"other": TOOLS}, {"tools": True}, TOOLS),
        (PLAIN, {"tool_use": TOOLS, "rag": SOURCES}, {"documents": True}, SOURCES),
        (SOURCES + "default", {"rag": SOURCES}, {"documents": True}, SOURCES + "default"),
        (PLAIN, {"tool_use": TOOLS, "rag": SOURCES}, {"tools": True, "documents": True}, TOOLS),
        (
            PLAIN,
            {"tool_use": TOOLS, "all": "{{ documents }}" + TOOLS},
            {"tools": True, "documents": True},
            "{{ documents }}" + TOOLS,
        ),
        (None, {"tool_use": TOOLS}, {}, None),
    ],
)
def test_a_named_template_is_chosen_where_the_default_one_shows_less(
    default: str | None, named: dict[str, str], needs: dict[str, bool], chosen: str | None
) -> None:
    found = ModelTemplates(default, named, dict).chosen(**needs)
    assert (None if found is None else found.source) == chosen
