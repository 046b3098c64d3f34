"""Sessions of models that think, without thinking, and with earlier messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.engine.events import Done, Text
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, read_all

# Like Qwen3's template: earlier thinking is left out, and thinking can be turned off.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
# Like DeepSeek R1's template: it opens the thinking.
BEGINS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


@pytest.fixture
def thinks(tiny: TinyModels) -> Path:
    return tiny.with_template("thinks", THINKS)


def ask(session: Session, prompt: str) -> Done:
    return read_all(session.generate(prompt, max_tokens=6))[1]


def prompt_of(session: Session, prompt: str) -> str:
    return session._conversation.turn(prompt, 6, 4096, raw=False).text  # the prompt text is not public


def test_think_false_makes_the_template_leave_thinking_out(tiny: TinyModels, thinks: Path) -> None:
    with tiny.load(thinks, draft="none") as engine, engine.session() as one, engine.session(think=False) as two:
        assert engine.has_thinking_switch
        assert prompt_of(two, "hello") == prompt_of(one, "hello") + "<think>\n\n</think>\n\n"
        assert ask(two, "hello").stats.prompt_tokens > ask(one, "hello").stats.prompt_tokens
    with tiny.load(draft="none") as engine, engine.session(think=False) as one, engine.session() as two:
        assert not engine.has_thinking_switch
        assert prompt_of(one, "hello") == prompt_of(two, "hello")


def test_events_and_done_tell_thinking_from_the_answer(tiny: TinyModels, tmp_path: Path) -> None:
    script = ["<think>", "\nso", " far\n", "</think>\n\n", "Yes", ".", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "thinks.gguf", script, template=THINKS)
    with tiny.load(path, draft=str(path), depth=3) as engine, engine.session() as session:
        for depth in (0, 3):
            events, done = read_all(session.generate("hello", depth=depth))
            assert (done.reasoning, done.content, done.text) == ("so far", "Yes.", "".join(script[:-1]))
            texts = [event for event in events if isinstance(event, Text)]
            assert "".join(event.text for event in texts) == done.text
            assert "".join(event.reasoning for event in texts if event.reasoning is not None) == done.reasoning
            assert "".join(event.text for event in texts if event.reasoning is None) == done.content
            assert [token.id for event in texts for token in event.tokens] == list(done.token_ids)
            assert "".join(token.text for event in texts for token in event.tokens) == done.text
            assert done.stats.reasoning_tokens == done.stats.as_json()["reasoning_tokens"] == 4
        assert session.messages[-1]["content"] == done.text
        assert engine.ask("hello") == "Yes."
        _, raw = read_all(session.generate("hello", raw=True))
        assert (raw.reasoning, raw.content) == (None, raw.text)
        assert raw.stats.reasoning_tokens == 0
    assert (Text("a").reasoning, done_of(tiny).content) == (None, done_of(tiny).text)


def done_of(tiny: TinyModels) -> Done:
    with tiny.load(draft="none") as engine, engine.session() as session:
        return ask(session, "hello")


def test_a_template_may_open_the_thinking(tiny: TinyModels, tmp_path: Path) -> None:
    script = ["so", "</think>", "yes", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "begins.gguf", script, template=BEGINS)
    with tiny.load(path, draft="none") as engine, engine.session() as session:
        done = ask(session, "hello")
        assert (done.reasoning, done.content) == ("so", "yes")
        assert done.stats.reasoning_tokens == 2
    with tiny.load(tiny.with_template("begins", BEGINS), draft="none") as engine, engine.session() as session:
        done = ask(session, "hello")
        assert done.reasoning == done.text.strip(), "the model never ends its thinking"
        assert done.stats.reasoning_tokens == done.stats.emitted_tokens == 6


# Like gpt-oss's template: it refuses answers with marks, and takes thinking by another name.
CHANNELS = (
    "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('marks') }}{% endif %}"
    "<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
MARKS = ("<|START_THINKING|>", "<|END_THINKING|>")
CONTROLS = (
    "{% for m in messages %}{{ m.role }} {{ m.thinking or '' }} {{ m.content }}\n{% endfor %}"
    "{# <|START_THINKING|> <|END_THINKING|> #}"
)


@pytest.mark.parametrize(
    ("script", "template"),
    [
        (["<|channel|>analysis<|message|>", "so", "<|end|><|start|>assistant<|channel|>final<|message|>"], CHANNELS),
        ([MARKS[0], "so", MARKS[1]], CONTROLS),
    ],
)
def test_thinking_between_marks_that_messages_cannot_hold_is_reasoning_content_in_messages(
    tiny: TinyModels, tmp_path: Path, script: list[str], template: str
) -> None:
    script += ["Yes", ".", "<|im_end|>"]
    kinds = dict.fromkeys(MARKS, int(gguf.TokenType.CONTROL))
    path = write_scripted_gguf(tmp_path / "apart.gguf", script, template=template, kinds=kinds)
    with tiny.load(path, draft="none") as engine, engine.session() as session:
        done = read_all(session.generate("hello", max_tokens=9))[1]
        assert (done.reasoning, done.content, done.text) == ("so", "Yes.", "".join(script[:-1]))
        said = {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}
        assert session.messages[-1] == said
        assert "so" in prompt_of(session, "more")
        assert read_all(session.generate("more", max_tokens=9))[1].content == "Yes."
        plain = read_all(session.generate("hello", raw=True, max_tokens=9))[1]
        assert (plain.reasoning, plain.content) == (None, plain.text)


def test_tokens_of_text_events_have_the_characters_that_came_with_them(tiny: TinyModels) -> None:
    with tiny.load_speculating() as engine, engine.session() as session:
        events, done = read_all(session.generate("hello world", max_tokens=40, depth=4))
    texts = [event for event in events if isinstance(event, Text)]
    assert tuple(token.id for event in texts for token in event.tokens) == done.token_ids
    assert all("".join(token.text for token in event.tokens) == event.text for event in texts[:-1])
    assert texts[-1].text.startswith("".join(token.text for token in texts[-1].tokens))
    assert Text("a").tokens == ()


# ---------------------------------------------------------------------------------- earlier messages


def test_a_session_continues_a_conversation_given_as_messages(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine, engine.session(system="be kind") as one:
        ask(one, "hello")
        turns = one.messages[1:]
        expected = ask(one, "what is water")
        with engine.session(system="be kind", messages=turns) as other:
            assert other.messages[1:] == turns
            found = ask(other, "what is water")
            assert found.stats.prompt_tokens == expected.stats.prompt_tokens
            assert other.undo() == "what is water"
            assert other.undo() == "hello"
            assert other.undo() is None


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [{"role": "system", "content": "hi"}, {"role": "user", "content": "ho"}],
            "the earlier turns begin with a system message",
        ),
        ([{"role": "user", "content": "hi"}], "the conversation ends with a prompt"),
        ([{"role": "wizard", "content": "hi"}], "message 0 of the conversation has the unknown role 'wizard'"),
        ([{"role": "user", "content": None}, {"role": "assistant", "content": "ho"}], "message 0"),
        ([{}, {}], "message 0"),
        (["hello", "hi"], "message 0"),
    ],
)
def test_earlier_turns_that_no_conversation_has_are_refused(tiny: TinyModels, messages: list[Any], said: str) -> None:
    with tiny.load(draft="none") as engine, pytest.raises(InvalidRequestError, match=said):
        engine.session(messages=messages)
