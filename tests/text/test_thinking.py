"""Separating thinking from the answer, in whole texts and in texts that arrive in chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgespec.files.home import home
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation.thinking import (
    SWITCH,
    ThinkingMarks,
    ThinkingText,
    has_switch,
    split_thinking,
    thinking_marks,
)
from tests.support.real_templates import real_templates

QWEN = ThinkingMarks("<think>", "</think>")
MARKS = st.sampled_from(["<think>", "</think>", "<thi", "</", "<", ">", "\n", "word", " "])


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ThinkingText(QWEN, inside=inside)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    assert "".join(text for text, _ in parts) == "".join(pieces)
    thinking = [text for text, thinks in parts if thinks]
    return "".join(thinking), "".join(text for text, thinks in parts if not thinks)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nso\n</think>\n\nyes", "<think>\nso\n</think>", "\n\nyes"),
        ("\n <think>so</think>yes", "\n <think>so</think>", "yes"),
        ("no thought", "", "no thought"),
        ("say <think> like this </think>", "", "say <think> like this </think>"),
        ("<think>cut off", "<think>cut off", ""),
        ("<think></think><think>again</think>", "<think></think>", "<think>again</think>"),
        ("<thinking> is another word", "", "<thinking> is another word"),
        ("<thi", "", "<thi"),
        ("<think>a </thin b", "<think>a </thin b", ""),
    ],
)
def test_thinking_and_answer_of_a_whole_text_are_separated(text: str, thought: str, answer: str) -> None:
    assert split([text]) == split(list(text)) == (thought, answer)


@given(st.lists(MARKS, max_size=12), st.booleans())
def test_chunking_does_not_change_what_counts_as_thinking(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    assert split(pieces, inside=inside) == split([text], inside=inside) == split(list(text), inside=inside)


def test_thinking_opened_by_the_prompt_ends_at_the_closing_mark() -> None:
    assert QWEN.open_in("<|assistant|><think>\n")
    assert not QWEN.open_in("<|assistant|><think>\n\n</think>\n\n")
    assert not QWEN.open_in("what does <think> mean?<|assistant|>")
    assert split(["so", "</think>yes"], inside=True) == ("so</think>", "yes")


def test_split_thinking_returns_thinking_and_answer() -> None:
    assert split_thinking("<think>\nso\n</think>\n\nyes", ThinkingText(QWEN)) == ("so", "yes")
    assert split_thinking("so</think> yes", ThinkingText(QWEN, inside=True)) == ("so", "yes")
    assert split_thinking("yes", ThinkingText(QWEN)) == (None, "yes")
    assert split_thinking("<think>so</think>", None) == (None, "<think>so</think>")
    assert QWEN.answer_in("so</think>\n\nyes") == "yes"
    assert QWEN.answer_in("yes") == "yes"


@pytest.mark.models
def test_thinking_marks_and_switch_are_found_in_real_templates() -> None:
    """Templates with thinking in text, and the switch that turns thinking off."""
    place = home()
    templates = real_templates(place.create(place.root / "test-data"))
    found = {name: thinking_marks(text) for name, text in templates.items()}
    for name in ("Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Qwen-QwQ-32B"):
        assert found[name] == QWEN, name
    assert thinking_marks(None) is None
    assert found["Qwen-Qwen2.5-7B-Instruct"] is None
    qwen3 = templates["Qwen-Qwen3-0.6B"]
    assert has_switch(qwen3)
    assert not has_switch(templates["Qwen-Qwen2.5-7B-Instruct"])
    assert not has_switch(None)
    template = ChatTemplate(qwen3, bos_token="", eos_token="<|im_end|>")
    asked = [{"role": "user", "content": "hi"}]
    thinking, not_thinking = (template.render(asked, extra={SWITCH: think}) for think in (True, False))
    assert template.render(asked) == thinking
    assert not_thinking == thinking + "<think>\n\n</think>\n\n"
    assert not QWEN.open_in(thinking)
    assert not QWEN.open_in(not_thinking)
    qwq = ChatTemplate(templates["Qwen-QwQ-32B"], bos_token="", eos_token="<|im_end|>")
    assert QWEN.open_in(qwq.render(asked, extra={SWITCH: True}))
    assert not QWEN.open_in(qwq.render(asked)), "by default the template leaves thinking out"
    r1 = ChatTemplate(templates["deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"], bos_token="", eos_token="")
    assert QWEN.open_in(r1.render(asked, extra={SWITCH: True})), "the template opens the thinking"
