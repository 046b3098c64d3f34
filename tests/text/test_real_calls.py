"""Calls are read from what real models' templates write, with every kind of value, equal to what was called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from edgespec.errors import TemplateError
from edgespec.files.home import home
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.origin import OWN, SAID, origins_of
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation import call_formats
from edgespec.text.conversation.call_formats import FORMATS, CallFormat, call_format
from edgespec.text.conversation.conversation import PromptFormat
from edgespec.text.conversation.tool_calls import CallText
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.grammar.calls import call_form
from edgespec.text.tokenizers.tokenizer import Tokenizer
from tests.support.call_templates import CALL_TEMPLATES
from tests.support.llama_sources import IndexUnreachableError
from tests.support.real_templates import CHANGES_LISTS, real_templates

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# The templates of each format.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "QWEN_XML": ("Qwen3-Coder", "Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "StepFun3.5-Flash"),
    "SEED_OSS": ("ByteDance-Seed-OSS",),
    "MINIMAX": ("MiniMax-M2",),
    "DEEPSEEK_XML": ("deepseek-ai-DeepSeek-V3.2",),
    "DEEPSEEK_V4": ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    "DEEPSEEK": (
        "llama-cpp-deepseek-r1",
        "deepseek-ai-DeepSeek-V3.1",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    ),
    "KIMI": ("moonshotai-Kimi-K2", "Kimi-K2-Instruct", "Kimi-K2-Thinking"),
    "HARMONY": ("openai-gpt-oss-120b",),
    "SOLAR": ("upstage-Solar-Open-100B",),
    "HUNYUAN": ("tencent-Hy3",),
    "GLM": (
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Spark2.5",
        "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
    ),
    "MINICPM": ("openbmb-MiniCPM5-1B",),
    "FUNCTIONARY": ("meetkai-functionary-medium-v3.1",),
    "GEMMA": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    "MISTRAL_LISTED": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "MISTRAL": (
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "unsloth-mistral-Devstral-Small-2507",
    ),
    "FUNCTION_GEMMA": ("function gemma",),
    "OLMO": ("olmo",),
    "LFM2": ("LFM2.5-8B-A1B", "LFM2-8B-A1B", "LFM2.5-Instruct"),
    "COHERE": ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Cohere2MoE"),
    "GRANITE": ("ibm-granite-granite-3.3-2B-Instruct",),
    "LISTED": ("Apriel-1.6-15b-Thinker-fixed", "MiniMax-M1", "unsloth-Apriel-1.5"),
    "NEMOTRON": ("NVIDIA-Nemotron-Nano-v2",),
    "APERTUS": ("Apertus-8B-Instruct",),
    "GIGACHAT_3": ("GigaChat3-10B-A1.8B",),
    "GIGACHAT": ("GigaChat3.1-10B-A1.8B",),
    "HERMES": (
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Reka-Edge",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
    ),
    "LLAMA": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
    ),
}
# Templates with tools whose calls are not read.
UNREAD = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "Kimi-K3", "MiniMax-M3",
    "fireworks-ai-llama-3-firefunction-v2", "meetkai-functionary-medium-v3.2", "muse-glimmer",
}  # fmt: skip
# Templates with tools that have no place for calls.
NO_PLACE = {"ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct"}
# The other one writes calls only in a message without content.
NO_CALL = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B", *NO_PLACE}
# Templates that write one call only.
ONE_CALL = {
    *TEMPLATES["LLAMA"],
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "llama-cpp-deepseek-r1",
    "openai-gpt-oss-120b",
}

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any text"},
        "count": {"type": "integer", "description": "How many"},
        "share": {"type": "number", "description": "How much"},
        "really": {"type": "boolean", "description": "Or not"},
        "none": {"type": "integer", "nullable": True, "description": "Nothing"},
        "list": {"type": "array", "description": "Some"},
        "deep": {"type": "object", "description": "All", "additionalProperties": {"type": "string"}},
    },
    "required": ["text"],
}
TOOL = {"type": "function", "function": {"name": "tell", "description": "Tells it", "parameters": PARAMETERS}}

TEXTS = [
    "plain", "", "Zürich 日本 🙂 \u2028", "it's \"quoted\"", "a\nb\n\nc\td", " blanks \n", "<x> </y> &amp; <",
    '{"a": [', "12", "3.10", "true", "None", "[1, 2]", "a, b) c] d} e",
    "</tool_call> <tool_call> [TOOL_CALLS] <|im_end|> ```", "50 % of {{ x }} {% y %}", "C:\\dir",
]  # fmt: skip
VALUES: list[dict[str, Any]] = [
    *({"text": text} for text in TEXTS),
    {},
    {"text": "a", "count": -7, "share": 2.5, "really": False, "none": None},
    {"list": [1, "a", True, None, [], {"b": ['c\'s "d" \\ \n']}], "deep": {"a": {"b": {"c": [[1, 2.5]]}}, "e": None}},
    {"list": [], "deep": {}},
]


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    place = home()
    try:
        return real_templates(place.create(place.root / "test-data")) | CALL_TEMPLATES
    except IndexUnreachableError as error:
        pytest.skip(f"the templates cannot be fetched: {error}")


def written(template: ChatTemplate, calls: list[dict[str, Any]], content: str = "") -> str:
    """What the template writes for an assistant's message with these calls."""
    made = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": "tell", "arguments": call}}
        for at, call in enumerate(calls)
    ]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell!"}]
    plain, called = (
        template.render([*asked, message], add_generation_prompt=False, extra={"tools": [TOOL]})
        for message in (
            {"role": "assistant", "content": "NOTHING"},
            {"role": "assistant", "content": content, "tool_calls": made},
        )
    )
    same = next(at for at, (one, other) in enumerate(zip(plain, called, strict=False)) if one != other)
    while called[same - 1] not in ">\n":  # not within a mark
        same -= 1
    return called[same:]


def read(form: CallFormat, text: str, size: int) -> list[Any]:
    """The arguments of the calls in a text that comes in pieces of ``size`` characters."""
    parser, pieces = CallText(form, {"tell": PARAMETERS}, ids="abcdefg"), []
    for at in range(0, len(text), size):
        pieces += parser.feed(text[at : at + size])
    pieces += parser.flush()
    return [json.loads(piece.call.arguments) for piece in pieces if piece.call]


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(
        source, limits=TemplateLimits(deadline_s=60), tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


def test_every_real_template_has_the_format_of_its_model(templates: Mapping[str, str]) -> None:
    names = {name: form for name, form in vars(call_formats).items() if isinstance(form, CallFormat)}
    assert {name: names[name] for name in TEMPLATES} == names
    assert len(FORMATS) == len(names)
    expected = {template: names[name] for name, own in TEMPLATES.items() for template in own}
    assert {name: form for name, text in templates.items() if (form := call_format(text))} == expected
    assert {name for name, text in templates.items() if "tool_calls" in text} - set(expected) == UNREAD


@pytest.mark.parametrize("form", TEMPLATES)
def test_calls_are_read_as_the_real_templates_write_them(templates: Mapping[str, str], form: str) -> None:
    own = getattr(call_formats, form)
    for name in TEMPLATES[form]:
        template = compiled(templates[name])
        if name in CHANGES_LISTS:
            with pytest.raises(TemplateError):
                written(template, [{}])
            continue
        for values in VALUES:
            text = written(template, [values])
            expected = [] if name in NO_CALL else [values]
            assert read(own, text, len(text)) == expected, (name, text)
            assert read(own, text, 3) == expected, (name, text)


class Silent:
    """A tokenizer of which only two texts are asked."""

    template_tokens: ClassVar = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", sorted(NO_PLACE))
def test_where_a_template_has_no_place_for_calls_they_are_in_the_text(
    templates: Mapping[str, str], name: str
) -> None:
    source, tokenizer = templates[name], cast(Tokenizer, Silent())
    form = call_format(source)
    assert form is not None
    for values in VALUES:
        made = [
            {"id": f"call0000{at}", "type": "function", "function": {"name": "tell", "arguments": json.dumps(each)}}
            for at, each in enumerate([values, {"text": "b"}])
        ]
        prompt = PromptFormat(name, tokenizer, source, None).read(
            [
                {"role": "user", "content": "Tell!"},
                {"role": "assistant", "content": "Well.", "tool_calls": made},
                {"role": "tool", "tool_call_id": "call00000", "name": "tell", "content": "It is known."},
            ],
            [TOOL],
        )
        begin = prompt.index("Well.") + len("Well.")
        assert read(form, prompt[begin:], 3) == [values, {"text": "b"}]
        assert prompt.index("It is known.") > begin
        origins = origins_of(prompt)[begin:]
        assert origins.startswith(OWN * len(form.opening) + SAID), "marks may be control tokens, arguments may not"


@pytest.mark.parametrize("form", TEMPLATES)
def test_several_calls_are_read_as_the_real_templates_write_them(templates: Mapping[str, str], form: str) -> None:
    for name in set(TEMPLATES[form]) - NO_CALL - CHANGES_LISTS - ONE_CALL:
        text = written(compiled(templates[name]), [{"text": "a"}, {"text": "b"}], content="Well.")
        assert read(getattr(call_formats, form), text, 3) == [{"text": "a"}, {"text": "b"}], (name, text)


@pytest.mark.parametrize("form", ["HARMONY", "SOLAR"])
def test_a_forced_call_is_what_the_templates_with_marks_write(templates: Mapping[str, str], form: str) -> None:
    own = getattr(call_formats, form)
    use = ToolUse(tools=(TOOL,), format=own, marks={}, ids="abcdefg")
    grammar = LLMatcher.grammar_from_lark(call_form(use, ["tell"], several=False).text)
    for name in TEMPLATES[form]:
        text = written(compiled(templates[name]), [{"text": "a", "count": -7, "list": [1, "b"]}])
        text = text.removeprefix("assistant")
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        data = list(text.encode())
        assert matcher.try_consume_tokens(data) == len(data), (name, text, matcher.get_error())
        assert matcher.is_accepting(), (name, text)
