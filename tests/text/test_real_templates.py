"""Real models' chat templates give the same text as in plain jinja, for every supported conversation."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import pytest

from edgespec.errors import TemplateError
from edgespec.files.home import home
from edgespec.text.chat_template import sandbox
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.origin import SAID, origins_of
from edgespec.text.chat_template.template import ABSENT, ChatTemplate
from edgespec.text.conversation.call_formats import call_format
from edgespec.text.conversation.messages import read_conversation
from edgespec.text.conversation.model_template import ModelTemplate
from edgespec.text.conversation.prompt_format import encode
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from edgespec.text.tokenizers.tokenizer import ControlToken
from tests.support.llama_sources import IndexUnreachableError
from tests.support.real_templates import CHANGES_LISTS, real_templates, reference
from tests.support.vocabularies import real_vocabularies

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

FEWEST_TEMPLATES = 50
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# No deadline: a busy machine must not change the result.
LIMITS = TemplateLimits(deadline_s=60)

Message = dict[str, Any]


class Noon(datetime):
    """A fixed clock, so that both sides print the same date."""

    @classmethod
    def now(cls, tz: Any = None) -> Noon:
        return cls(2025, 3, 9, 12, 34, 56, tzinfo=tz)


def said(*pairs: tuple[str, str | None]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in pairs]


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a <city> & "its" days',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Such as Zürich"},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
}
EITHER = copy.deepcopy(WEATHER)
EITHER["function"]["parameters"]["properties"]["when"] = {"oneOf": [{"type": "string"}, {"type": "integer"}]}


def called(*arguments: Any, content: str | None = "", **more: Any) -> Message:
    """The assistant calls ``get_weather`` once with each of ``arguments``."""
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": "get_weather", "arguments": one}}
        for at, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def answered(at: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{at}", "name": "get_weather", "content": content}


ASKED = said(("system", "Be brief."), ("user", "Weather?"))
CALLED = [*ASKED, called({"city": "Zürich", "days": [1, 2], "unit": None}), answered(0, '{"t": 21}')]
GONE_ON = [*CALLED, *said(("assistant", "21 degrees."), ("user", "Thanks."))]

CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "user": (said(("user", "Hi!")), {}),
    "system and user": (said(("system", "Be brief."), ("user", " Hi! \n")), {}),
    "several turns": (
        said(("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " d\n"), ("user", "e")),
        {},
    ),
    "many turns": (said(*((("user", "assistant")[at % 2], f"turn {at}") for at in range(201))), {}),
    "unicode": (
        said(
            ("system", 'Привет "quote" \\ \' \x07'),
            ("user", "日本語 🙂 e\u0301 \u2028x</s><|im_end|> {{ 1 }} {% x %}"),
            ("assistant", "ß ŉ <b>&amp;</b>"),
            ("user", "İ"),
        ),
        {},
    ),
    "long text": (
        said(
            ("user", "word " * 20_000),
            ("assistant", "日本 " * 20_000),
            ("user", "\n".join(str(number) for number in range(5000))),
        ),
        {},
    ),
    "empty system": (said(("system", ""), ("user", "x")), {}),
    "empty user": (said(("user", "")), {}),
    "no messages": ([], {}),
    "assistant last": (said(("user", "a"), ("assistant", "b")), {}),
    "assistant first": (said(("assistant", "b"), ("user", "a")), {}),
    "user twice": (said(("user", "a"), ("user", "b")), {}),
    "system late": (said(("user", "a"), ("system", "b"), ("user", "c")), {}),
    "developer": (said(("developer", "Be brief."), ("user", "a")), {}),
    "unknown role": (said(("oracle", "a")), {}),
    "no content": ([{"role": "user"}], {}),
    "null content": (said(("user", "a"), ("assistant", None), ("user", "b")), {}),
    "text in parts": ([{"role": "user", "content": [{"type": "text", "text": one} for one in ("a", " b")]}], {}),
    "picture": ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}], {}),
    "thoughts in the text": (
        said(("user", "a"), ("assistant", "<think>\nwhy\n</think>\n\nb"), ("user", "c")),
        {},
    ),
    "thoughts": (
        [*said(("user", "a")), {"role": "assistant", "content": "b", "reasoning_content": "r"}, *said(("user", "c"))],
        {},
    ),
    "thoughts before a call": (
        [*ASKED, called({"city": "x"}, reasoning_content="hm", thinking="hm"), answered(0, "1")],
        {"tools": [WEATHER]},
    ),
    "documents": (said(("user", "x")), {"documents": [{"title": "T", "text": "body"}]}),
    "tools": (ASKED, {"tools": [WEATHER]}),
    "two tools": (said(("user", "Weather?")), {"tools": [WEATHER, NOW]}),
    "tools of either type": (ASKED, {"tools": [EITHER]}),
    "tools none": (ASKED, {"tools": None, "documents": None}),
    "call": (CALLED, {"tools": [WEATHER]}),
    "call and answer": (GONE_ON, {"tools": [WEATHER]}),
    "call without tools": (GONE_ON, {}),
    "call with arguments as text": ([*ASKED, called('{"city": "x"}'), answered(0, "1")], {"tools": [WEATHER]}),
    "two calls": (
        [*ASKED, called({"city": "x"}, {"city": "y"}, content=None), answered(0, "1"), answered(1, "2")],
        {"tools": [WEATHER]},
    ),
    "thinking on": (said(("system", "s"), ("user", "a")), {"enable_thinking": True, "thinking": True}),
    "thinking off": (said(("system", "s"), ("user", "a")), {"enable_thinking": False, "thinking": False}),
    # Firefunction requires these values.
    "functions": (said(("user", "Hi!")), {"functions": "[]", "datetime": "noon"}),
    "effort low": (said(("user", "a")), {"reasoning_effort": "low"}),
    "effort medium": (said(("user", "a")), {"reasoning_effort": "medium"}),
    "effort high": (said(("user", "a")), {"reasoning_effort": "high"}),
}

# Accepted differences by template and conversation, with reasons. An entry without a difference must be removed.
WITH_TOOLS = (
    "thoughts before a call", "tools", "two tools", "tools of either type", "call", "call and answer",
    "call with arguments as text", "two calls",
)  # fmt: skip
DIFFERENCES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "meetkai-functionary-medium-v3.1": (
        WITH_TOOLS,
        "another text",
        "it marks words as safe, and jinja then escapes the tool that it adds to them as HTML (&lt;). Here, as in "
        "llama.cpp, nothing is escaped: no model was taught tools in HTML",
    ),
    "llama-cpp-deepseek-r1": (
        WITH_TOOLS,
        "rendered",
        "jinja's map gives a generator, which its tojson cannot print. Here, as in llama.cpp, for which the template "
        "was written, map gives a list",
    ),
}


@dataclass(frozen=True)
class Pair:
    """One template in our sandbox and in plain jinja."""

    ours: ChatTemplate | TemplateError
    plain: jinja2.Template | jinja2.TemplateError


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    place = home()
    try:
        templates = real_templates(place.create(place.root / "test-data"))
    except IndexUnreachableError as error:
        pytest.skip(f"the templates cannot be fetched: {error}")
    return {name: pair(source) for name, source in templates.items()}


def pair(source: str) -> Pair:
    ours: ChatTemplate | TemplateError
    plain: jinja2.Template | jinja2.TemplateError
    try:
        ours = ChatTemplate(source, limits=LIMITS, tokens=TOKENS)
    except TemplateError as error:
        ours = error
    try:
        plain = reference(Noon.now()).from_string(source)
    except jinja2.TemplateError as error:
        plain = error
    return Pair(ours, plain)


def difference(both: Pair, messages: list[Message], add_generation_prompt: bool, extra: dict[str, Any]) -> str | None:
    """The difference between our rendering and plain jinja's, or None."""
    ours: str | TemplateError
    plain: str | Exception
    try:
        if isinstance(both.ours, TemplateError):
            raise both.ours
        ours = both.ours.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)
    except TemplateError as error:
        ours = error
    try:
        if isinstance(both.plain, jinja2.TemplateError):
            raise both.plain
        variables = {
            **ABSENT,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            **TOKENS,
            **extra,
        }
        plain = both.plain.render(copy.deepcopy(variables))
    except Exception as error:  # jinja's errors, and any error that Python raises inside a template
        plain = error
    if isinstance(plain, str):
        if isinstance(ours, str):
            return None if ours == plain else "another text"
        return "refused"
    if isinstance(ours, str):
        return "rendered"
    # Only raise_exception raises the base class, with the template's own words.
    return None if type(plain) is not jinja2.TemplateError or ours.message == str(plain) else "another message"


def test_the_corpus_has_enough_real_templates(pairs: dict[str, Pair]) -> None:
    assert len(pairs) >= FEWEST_TEMPLATES
    assert not set(DIFFERENCES) - set(pairs)


def test_every_real_template_renders_a_user_message(pairs: dict[str, Pair]) -> None:
    messages, extra = CONVERSATIONS["functions"]
    for name, both in pairs.items():
        assert isinstance(both.ours, ChatTemplate), name
        assert "Hi!" in both.ours.render(messages, extra=extra, absent={}), name  # one is for tools alone


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_real_templates_render_the_same_as_in_plain_jinja(
    pairs: dict[str, Pair], conversation: str, add_generation_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "datetime", Noon)
    messages, extra = CONVERSATIONS[conversation]
    found = {
        name: what
        for name, both in pairs.items()
        if (what := difference(both, messages, add_generation_prompt, extra)) is not None
    }
    assert found == {name: what for name, (where, what, _) in DIFFERENCES.items() if conversation in where}


def test_tools_calls_and_results_cannot_forge_a_control_token_in_the_real_templates(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text of a tool, of a call and of its result, keys too, with every name that the template writes."""
    monkeypatch.setattr(sandbox, "datetime", Noon)
    templates = real_templates(home().root / "test-data")
    tokenizer: Any = Named()
    tried = 0
    for name, both in pairs.items():
        if call_format(templates[name]) is None or name in CHANGES_LISTS:
            continue

        def read(text: str, both: Pair = both) -> list[int]:
            assert isinstance(both.ours, ChatTemplate)
            tool = copy.deepcopy(NOW)
            tool["function"] |= {"name": "get_weather", "description": f"x {text} y"}
            described = {"type": "string", "description": text, "enum": [text]}
            tool["function"]["parameters"]["properties"] = {"city": described, f"a {text} b": {"type": "string"}}
            messages = [*ASKED, called({"city": text, "more": {text: [text]}}), answered(0, text)]
            return encode(tokenizer, both.ours.render(messages, extra={"tools": [tool]}))

        harmless = [token for token in read("hello") if token >= 1000]
        names = sorted({text for text, number in tokenizer.numbers.items() if number in harmless})
        tried += bool(names)
        for forged in (" ".join(names), "\n".join([*names, "BANANA", *names])):
            assert [token for token in read(forged) if token >= 1000] == harmless, (name, forged)
    assert tried >= 20


NAMES = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|<\|[A-Z_]{1,40}\|>|</?s>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_[a-z]+>|</?[a-z]+:[a-z_]+>"
)


class Named:
    """Bytes, and a control token for each name of the form that models use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.marks: dict[int, ControlToken] = {}

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        ids, begin = list[int](), 0
        for name in NAMES.finditer(text) if special else ():
            ids += text[begin : name.start()].encode()
            ids.append(self.numbers.setdefault(name.group(), 1000 + len(self.numbers)))
            begin = name.end()
        return [*ids, *text[begin:].encode()]

    def control_token(self, token: int) -> ControlToken | None:
        return next((ControlToken(text=name) for name, own in self.numbers.items() if own == token), None)


def names_in(text: str) -> list[str]:
    return NAMES.findall(text)


def test_the_tokens_of_harmless_messages_are_those_of_the_whole_rendering(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every control token's name that a template writes is its own, however it puts the name together."""
    monkeypatch.setattr(sandbox, "datetime", Noon)
    tokenizer: Any = Named()
    tried = 0
    for name, both in pairs.items():
        assert isinstance(both.ours, ChatTemplate), name
        for conversation, (messages, extra) in CONVERSATIONS.items():
            if names_in(json.dumps([messages, extra], ensure_ascii=False)):
                continue
            try:
                rendering = both.ours.render(messages, extra=extra)
            except TemplateError:
                continue
            tried += bool(names_in(rendering))
            assert encode(tokenizer, rendering) == tokenizer.encode(str.__str__(rendering), special=True), (
                name,
                conversation,
            )
    assert tried >= 25 * FEWEST_TEMPLATES


@pytest.mark.parametrize(
    ("vocabulary", "template"),
    [
        ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
        ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
        ("gemma-4", "google-gemma-4-31B-it"),
    ],
)
def test_the_tokens_of_a_real_models_prompt_are_llama_cpps(
    pairs: dict[str, Pair], vocabulary: str, template: str
) -> None:
    path = real_vocabularies(home().root / "test-data")[vocabulary]
    ours, tried = pairs[template].ours, 0
    assert isinstance(ours, ChatTemplate)
    with closing(LlamaTokenizer(path)) as tokenizer:
        for messages, extra in (CONVERSATIONS[name] for name in ("several turns", "call and answer", "thoughts")):
            try:
                rendering = ours.render(messages, extra=extra)
            except TemplateError:
                continue
            whole = tokenizer.encode(str.__str__(rendering), special=True)
            assert encode(tokenizer, rendering) == whole
            assert len([token for token in whole if tokenizer.control_token(token)]) >= 5
            tried += 1
    assert tried >= 2


# What real templates remove from messages, or look for in them, besides the texts in their own source.
CUTS = ("/think", "/no_think", "<think>", "</think>", " ", "\n", "")


def cuts(source: str) -> list[str]:
    """The texts that the template gives to filters and methods, such as what it replaces and splits at."""
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", sandbox.GenerationTag]).parse(source)
    called = [node for kind in (jinja2.nodes.Call, jinja2.nodes.Filter) for node in tree.find_all(kind)]
    given = [argument for node in called for argument in node.args if isinstance(argument, jinja2.nodes.Const)]
    own = (argument.value for argument in given if isinstance(argument.value, str) and len(argument.value) <= 40)
    return list(dict.fromkeys([*CUTS, *own]))


def split_by(cut: str, name: str) -> Iterator[str]:
    """The name in forms that become the name where the cut is removed, or where case, blanks or ends change."""
    yield from (f"{name[:at]}{cut}{name[at:]}" for at in (1, 2, len(name) // 2, len(name) - 1))
    yield from (f"{cut}{form}{cut}" for form in (name, name.upper(), name.lower(), name.title(), f" {name}\n"))


def test_a_message_cannot_forge_a_control_token_in_any_real_template(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages spell each name that the template writes, split by each text that it removes or looks for."""
    monkeypatch.setattr(sandbox, "datetime", Noon)
    sources = real_templates(home().root / "test-data")
    tokenizer: Any = Named()
    extra = CONVERSATIONS["functions"][1]
    tried, spelled = 0, set[str]()
    for name, both in pairs.items():
        assert isinstance(both.ours, ChatTemplate), name

        def render(content: str, template: ChatTemplate = both.ours) -> str:
            thought = {"reasoning_content": f"r {content}", "thinking": content}
            answered = {**said(("assistant", content))[0], **thought}
            messages = [*said(("user", f"x {content} y")), answered, *said(("user", content))]
            try:
                return template.render([*said(("system", content)), *messages], extra=extra, absent={})
            except TemplateError:  # without a system message
                return template.render(messages, extra=extra, absent={})

        names = sorted({text for text in names_in(render("hello")) if text not in TOKENS.values()})
        for cut in cuts(sources[name]) if names else ():
            harmless, forged = (
                "\n".join(form for each in names for form in split_by(cut, change(each)))
                for change in (lambda each: "-" * len(each), str)
            )
            expected, rendering = render(harmless), render(forged)
            spelled.update([name] if len(names_in(rendering)) > len(names_in(expected)) else [])
            assert controls(tokenizer, rendering) == controls(tokenizer, expected), (name, cut)
            tried += 1
    assert tried >= 10 * FEWEST_TEMPLATES
    assert len(spelled) >= FEWEST_TEMPLATES


def controls(tokenizer: Any, rendering: str) -> list[int]:
    return [token for token in encode(tokenizer, rendering) if token >= 1000]


# -------------------------------------------------------------------------------- conversations as agents replay them

CITY = copy.deepcopy(NOW)
CITY["function"] |= {"name": "get_weather", "description": "The weather of a city"}
CITY["function"]["parameters"] |= {
    "properties": {"city": {"type": "string", "description": "Such as Zürich"}},
    "required": ["city"],
}


def say(number: int) -> dict[str, tuple[Message, list[str]]]:
    """Every kind of message, and the texts that its prompt must have."""
    text, first, second, found = (f"word {number}{letter}." for letter in "tcdf")

    def calling(*arguments: str, content: str = "", **more: Any) -> Message:
        calls = [
            {"id": f"call_{number}|{at}", "function": {"name": "get_weather", "arguments": {"city": one}}}
            for at, one in enumerate(arguments)
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls, **more}

    return {
        "user": ({"role": "user", "content": text}, [text]),
        "system": ({"role": "system", "content": text}, [text]),
        "answer": ({"role": "assistant", "content": text}, [text]),
        "silence": ({"role": "assistant", "content": ""}, []),
        "thoughts": ({"role": "assistant", "content": text, "reasoning_content": "hm"}, [text]),
        "call": (calling(first), [first]),
        "calls": (calling(first, second), [first, second]),
        "text and call": (calling(first, content=text), [text, first]),
        "text and calls": (calling(first, second, content=text), [text, first, second]),
        "thoughts and call": (calling(first, reasoning_content="hm"), [first]),
        "all": (calling(first, content=text, reasoning_content="hm"), [text, first]),
        "result": ({"role": "tool", "tool_call_id": f"call_{number - 1}|0", "content": found}, [found]),
        "other result": ({"role": "tool", "tool_call_id": "unknown", "content": found}, [found]),
    }


# The kinds of messages that need a template that can show calls.
OF_TOOLS = {*say(0)} - {"user", "system", "answer", "silence", "thoughts"}


@pytest.fixture(scope="module")
def templates(pairs: dict[str, Pair]) -> dict[str, ModelTemplate]:
    found = real_templates(home().root / "test-data")
    return {name: ModelTemplate(source, lambda: TOKENS) for name, source in found.items()}


def prompt_of(template: ModelTemplate, sent: list[Message], *, called: bool) -> str:
    shaped = template.shaped(read_conversation(sent), tools=called)
    tools = {"tools": [CITY]} if called else {}
    return template.render({"messages": shaped, **tools, **CONVERSATIONS["functions"][1]}, limits=LIMITS)


@pytest.mark.parametrize("first", say(0))
def test_every_pair_of_neighbours_is_in_the_prompt_of_every_real_template(
    templates: dict[str, ModelTemplate], first: str
) -> None:
    lost = []
    for name, template in templates.items():
        for second in say(0):
            called = bool({first, second} & OF_TOOLS)
            if called and ("tool_calls" not in template.source or name in CHANGES_LISTS):
                continue
            one, other = say(1)[first], say(2)[second]
            sent = [*said(("user", "begin")), one[0], other[0], *said(("user", "end"))]
            text = prompt_of(template, sent, called=called)
            lost += [(name, second, part) for part in ["begin", *one[1], *other[1], "end"] if part not in text]
    assert lost == []


def test_an_answer_continues_the_assistants_text_in_every_real_template(
    templates: dict[str, ModelTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt ends with the text as it is, blanks too, and no mark follows it. All before is there."""
    monkeypatch.setattr(sandbox, "datetime", Noon)
    for name, template in templates.items():
        for text in ("word 1. The answer is", " \n{", "a</s><|im_end|>b", "kestrel kestrel"):
            for more in ({}, {"reasoning_content": "hm"}):
                sent = said(("user", "word 7"), ("assistant", "word 8"), ("user", "word 9"))
                own = read_conversation([*sent, {"role": "assistant", "content": text, **more}])
                extra = CONVERSATIONS["functions"][1]  # variables that one of the templates needs
                values = {"messages": template.shaped(own, tools=False), **extra}
                prompt = template.continued(values)
                assert prompt is not None, name
                assert prompt.endswith(text), name
                assert origins_of(prompt[-len(text) :]) == SAID * len(text), name
                before = prompt[: -len(text)]
                assert 0 <= before.find("word 7") < before.find("word 8") < before.find("word 9"), name
                if text.startswith("word"):
                    assert template.render(values, begins_answer=False).startswith(prompt), name


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_real_templates_print_the_thinking_of_earlier_calls(templates: dict[str, ModelTemplate], name: str) -> None:
    printed = set()
    for model, template in templates.items():
        if "tool_calls" in template.source and model not in CHANGES_LISTS:
            called, _ = say(1)["call"]
            sent = [*said(("user", "Weather?")), {**called, name: "because"}, say(2)["result"][0]]
            if "because" in prompt_of(template, sent, called=True):
                printed.add(model)
    assert {"Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "LFM2.5-8B-A1B", "upstage-Solar-Open-100B"} < printed
    assert len(printed) >= 24


def test_real_templates_answer_to_the_variables_that_they_read(templates: dict[str, ModelTemplate]) -> None:
    values = {"thinking": True, "enable_thinking": False, "reasoning_effort": "low", "date_string": "1 May 2026"}
    asked = said(("user", "Hi!"))
    answering = set()
    for model, template in templates.items():
        if "firefunction" not in model:
            plain = template.render({"messages": asked}, limits=LIMITS)
            for name, value in values.items():
                changed = template.render({"messages": asked, name: value}, limits=LIMITS) != plain
                assert template.reads(name) or not changed
                answering |= {(model, name)} if changed else set()
    assert {("Qwen-Qwen3-0.6B", "enable_thinking"), ("openai-gpt-oss-120b", "reasoning_effort")} < answering
    assert len({model for model, _ in answering}) >= 13
