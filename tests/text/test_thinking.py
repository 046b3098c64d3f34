"""The marks of thinking in templates, prompts and whole texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.files.home import home
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation.thinking import SWITCH, has_switch, switched, thinking_marks
from tests.support.answer_pieces import QWEN
from tests.support.real_templates import real_templates


def test_thinking_opened_by_the_prompt_ends_at_the_closing_mark() -> None:
    assert QWEN.open_in("<|assistant|><think>\n")
    assert not QWEN.open_in("<|assistant|><think>\n\n</think>\n\n")
    assert not QWEN.open_in("what does <think> mean?<|assistant|>")


def test_the_answer_in_a_whole_text_is_what_follows_the_thinking() -> None:
    assert QWEN.answer_in("so</think>\n\nyes") == "yes"
    assert QWEN.answer_in("yes") == "yes"
    assert QWEN.answer_in("so</think>\n\n\u3000yes") == "\u3000yes"
    granite = replace(QWEN, around=("<response>", "</response>"))
    assert granite.answer_in("so</think><response>\nyes\n</response>\n") == "yes"
    assert granite.answer_in("<response>yes</response>") == "<response>yes</response>"


@pytest.mark.models
def test_thinking_marks_and_switch_are_found_in_real_templates() -> None:
    """Templates with thinking in text, and the switch that turns thinking off."""
    place = home()
    templates = real_templates(place.create(place.root / "test-data"))
    found = {name: thinking_marks(text) for name, text in templates.items()}
    for name in ("Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Qwen-QwQ-32B"):
        assert found[name] == QWEN, name
    assert thinking_marks(None) is None
    granite = found["ibm-granite-granite-3.3-2B-Instruct"]
    assert granite is not None
    assert granite.around == ("<response>", "</response>")
    openings = {
        "openai-gpt-oss-120b": "<|channel|>analysis<|message|>",
        "google-gemma-4-31B-it": "<|channel>thought",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|START_THINKING|>",
        "Cohere2MoE": "<|START_THINKING|>",
        "upstage-Solar-Open-100B": "<|think|>",
        "tencent-Hy3": "<think:opensource>",
        "ByteDance-Seed-OSS": "<seed:think>",
        "mistralai-Ministral-3-14B-Reasoning-2512": "[THINK]",
    }
    assert {name: marks.opening for name in openings if (marks := found[name])} == openings
    assert found["microsoft-Phi-3.5-mini-instruct"] is None, "its turns end with gpt-oss's closing mark"
    assert found["Qwen-Qwen2.5-7B-Instruct"] is None
    qwen3 = templates["Qwen-Qwen3-0.6B"]
    assert has_switch(qwen3)
    assert not has_switch(templates["Qwen-Qwen2.5-7B-Instruct"])
    assert not has_switch(None)
    for name in ("ibm-granite-granite-3.3-2B-Instruct", "deepseek-ai-DeepSeek-V3.1"):
        shown = ChatTemplate(templates[name], tokens={"bos_token": "", "eos_token": ""})
        user = [{"role": "user", "content": "hi"}]
        without, on, off = (
            shown.render(user, extra=each) for each in ({}, *map(switched, ({SWITCH: True}, {SWITCH: False})))
        )
        assert without == off != on, name
        assert has_switch(templates[name]), name
    assert not has_switch(templates["openai-gpt-oss-120b"]), "a message's thinking is none"
    template = ChatTemplate(qwen3, tokens={"bos_token": "", "eos_token": "<|im_end|>"})
    asked = [{"role": "user", "content": "hi"}]
    thinking, not_thinking = (template.render(asked, extra={SWITCH: think}) for think in (True, False))
    assert template.render(asked) == thinking
    assert not_thinking == thinking + "<think>\n\n</think>\n\n"
    assert not QWEN.open_in(thinking)
    assert not QWEN.open_in(not_thinking)
    qwq = ChatTemplate(templates["Qwen-QwQ-32B"], tokens={"bos_token": "", "eos_token": "<|im_end|>"})
    assert QWEN.open_in(qwq.render(asked, extra={SWITCH: True}))
    assert not QWEN.open_in(qwq.render(asked)), "by default the template leaves thinking out"
    r1 = ChatTemplate(
        templates["deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"], tokens={"bos_token": "", "eos_token": ""}
    )
    assert QWEN.open_in(r1.render(asked, extra={SWITCH: True})), "the template opens the thinking"
