"""Calls that an answer must have, or begins: valid in the model's own format, the same with and without drafting."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair import loaded_pair
from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.grammar.calls import begun_form
from edgespec.text.grammar.compiled import Forms
from edgespec.text.grammar.form import Form
from tests.engine.test_tools import TEMPLATE, tool
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, answer

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS: Any = [tool(parameters=WEATHER), tool("clock", parameters={"type": "object", "properties": {}})]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(tiny.with_template("tools", TEMPLATE), draft=str(tiny.drafter), depth=3) as engine:
        yield engine


def ask(engine: Engine, **settings: Any) -> Done:
    with engine.session() as session:
        return answer(session.generate("hello", **{"tools": TOOLS, "max_tokens": 200, **settings}))


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_a_named_tool_is_called_once_with_valid_arguments_and_drafting_changes_no_token(
    engine: Engine, sampling: Sampling | None
) -> None:
    found = [ask(engine, tool_choice=NAMED, sampling=sampling, depth=depth) for depth in (0, None)]
    for done in found:
        (call,) = done.tool_calls
        own = json.loads(call.arguments)
        assert call.name == "weather"
        assert own.pop("city") in ("Oslo", "Rome")
        assert own.pop("days", 1) in range(1, 10)
        assert not own
        assert not done.content
        assert done.finish_reason == "stop"
    assert found[0].token_ids == found[1].token_ids


def test_a_required_call_is_one_of_the_tools(engine: Engine) -> None:
    for seed in range(4):
        done = ask(engine, tool_choice="required", sampling=Sampling(temperature=2.0, seed=seed))
        assert done.tool_calls
        assert {call.name for call in done.tool_calls} <= {"weather", "clock"}


def test_with_tools_and_a_schema_the_answer_is_a_call_or_json(engine: Engine) -> None:
    kinds = set()
    for seed in range(12):
        sampling = Sampling(temperature=3.0, seed=seed)
        done = ask(engine, schema={"enum": ["<done>", "<end>"]}, sampling=sampling)
        kinds.add(bool(done.tool_calls))
        assert done.tool_calls or json.loads(done.content) in ("<done>", "<end>")
    assert kinds == {True, False}
    done = ask(engine, schema={"enum": [7]}, tool_choice="none")
    assert done.content == "7"


def test_a_forced_call_excludes_other_forms(engine: Engine) -> None:
    for form, said in (({"schema": {}}, "has no other form"), ({"regex": "a"}, "has no other form")):
        with pytest.raises(InvalidRequestError, match=said):
            ask(engine, tool_choice="required", **form)
    with pytest.raises(InvalidRequestError, match="cannot be bound to a regex"):
        ask(engine, regex="a")


def test_arguments_that_cannot_be_followed_are_refused(engine: Engine) -> None:
    strict = tool(parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(InvalidRequestError, match="a call of these tools cannot be followed") as raised:
        ask(engine, tools=[strict], tool_choice="required")
    assert raised.value.param == "tools"


# What a model writes that begins a call of no valid city, and without a bound form would end it.
WRONG = (
    "<tool_call>",
    '{"name": "weather", "arguments": {"city": "',
    "Berlin",
    '"',
    "}}",
    "</tool_call>",
    "<|im_end|>",
)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Iterator[Engine]:
    path = write_scripted_gguf(tmp_path_factory.mktemp("wrong") / "model.gguf", WRONG, template=TEMPLATE)
    with tiny.load(path, draft=str(path), depth=3) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, top_p=0.95, seed=4)], ids=["greedy", "sampled"])
def test_a_call_that_an_answer_begins_ends_as_a_valid_one_and_drafting_changes_no_token(
    wrong: Engine, sampling: Sampling | None
) -> None:
    found = [ask(wrong, sampling=sampling, depth=depth) for depth in (0, None)]
    assert found[0].token_ids == found[1].token_ids
    call, *_ = found[0].tool_calls
    own = json.loads(call.arguments)
    assert call.name == "weather"
    assert own.pop("city") in ("Oslo", "Rome")
    assert own.pop("days", 1) in range(1, 10)
    assert not own


def test_without_llguidance_a_call_that_begins_is_not_bound(wrong: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(wrong.pair, "forms", Forms(wrong.tokenizer, wrong.pair.vocabulary_size))
    done = ask(wrong)
    assert done.text == "".join(WRONG[:-1])
    assert json.loads(done.tool_calls[0].arguments) == {"city": "Berlin"}


@pytest.mark.parametrize("too_large", [False, True])
def test_the_form_of_begun_calls_is_written_once_for_all_cursors_of_an_answer(
    wrong: Engine, monkeypatch: pytest.MonkeyPatch, too_large: bool
) -> None:
    written = list[bool]()

    def counted(use: ToolUse, *, bare: bool) -> Form:
        written.append(bare)
        if too_large:
            raise InvalidRequestError("too large")
        return begun_form(use, bare=bare)

    monkeypatch.setattr(loaded_pair, "begun_form", counted)
    use = wrong.pair.prompts.tool_use(TOOLS)
    assert use is not None
    calls = wrong.pair.begun_calls(use, None, "")
    assert [calls.begin(False) is None for _ in range(3)] == [too_large] * 3
    assert written == [False]


def test_an_answer_without_a_call_is_that_of_no_form(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ask(engine, max_tokens=60)
    monkeypatch.setattr(engine.pair, "begun_calls", lambda use, thinking, owner: None)
    assert ask(engine, max_tokens=60).token_ids == own.token_ids


# -------------------------------------------------------------------- models that write marks around their answers

CHANNELS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% for call in m.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}"
    "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
    "<|start|>model{# <|channel|>analysis<|message|> #}"
)
CONTENTS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>"
    "{% for call in m.tool_calls or [] %}<|tool_call:begin|>{{ call.id }}{% endfor %}{% endfor %}"
    "<|begin|>model{# <|think|> #}"
)
# Each thinks, and would then answer in words. No prompt ends with a token of a script.
MARKED = {
    "gpt-oss": (
        CHANNELS,
        ("<|channel|>analysis<|message|>", "so", "<|end|>", "<|start|>", "assistant", "<|channel|>final<|message|>"),
        {},
    ),
    "Solar Open": (
        CONTENTS,
        ("<|think|>", "so", "<|end|>", "<|begin|>", "assistant", "<|content|>"),
        dict.fromkeys(("<|think|>", "<|end|>", "<|begin|>", "<|content|>"), 3),
    ),
}


@pytest.fixture(scope="module", params=MARKED)
def marked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels
) -> Iterator[Engine]:
    template, script, kinds = MARKED[request.param]
    marks = ("<|calls|>", "<|call|>", "<|flush|>", "<|return|>")  # with these the vocabulary does not end at <|end|>
    path = tmp_path_factory.mktemp("marked") / "model.gguf"
    own = (*script, "Yes", *marks, "<|im_end|>")
    write_scripted_gguf(path, own, template=template, kinds={**kinds, **dict.fromkeys(marks, 3)})
    with tiny.load(path, draft=str(path), depth=3) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, top_p=0.95, seed=4)], ids=["greedy", "sampled"])
def test_behind_the_thinking_of_a_model_with_marks_comes_a_forced_call(
    marked: Engine, sampling: Sampling | None
) -> None:
    for choice in (NAMED, "required"):
        found = [ask(marked, tool_choice=choice, sampling=sampling, depth=depth) for depth in (0, None)]
        assert found[0].token_ids == found[1].token_ids
        call, *_ = found[0].tool_calls
        assert call.name == "weather" or choice == "required"
        assert json.loads(call.arguments).get("city") in ("Oslo", "Rome", None)
        assert (found[0].reasoning, found[0].content) == ("so", "")
        assert found[0].finish_reason == "stop"


def test_behind_the_thinking_of_a_model_with_marks_comes_json_in_its_answer(marked: Engine) -> None:
    for more in ({"tools": None}, {}):
        found = [ask(marked, schema={"enum": ["<done>", 7]}, depth=depth, **more) for depth in (0, None)]
        assert found[0].token_ids == found[1].token_ids
        done = found[0]
        assert done.reasoning == "so"
        assert done.tool_calls or json.loads(done.content) in ("<done>", 7)


def test_a_form_continues_an_answer_that_is_begun(marked: Engine) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "So "}]
    with marked.session() as session:
        done = answer(session.generate(messages=asked, choice=["it is", "not"], max_tokens=20))
    assert done.text in ("it is", "not")
