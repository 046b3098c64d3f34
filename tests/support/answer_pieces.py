"""The pieces of an answer whose text comes in given chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from edgespec.text.conversation.answer_parts import AnswerParts, AnswerText
from edgespec.text.conversation.call_formats import CallFormat
from edgespec.text.conversation.pieces import Piece
from edgespec.text.conversation.thinking import ThinkingMarks, ThinkingText
from edgespec.text.conversation.tool_use import ToolUse

QWEN = ThinkingMarks("<think>", "</think>")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "now"))


class _Chunks:
    """Instead of AnswerText: token ``n`` is chunk ``n``."""

    def __init__(self, chunks: Sequence[str]) -> None:
        self._chunks = chunks

    def feed(self, token: int, held: int = 0) -> tuple[str, bool]:
        assert held == 0
        return self._chunks[token], False

    def flush(self, *, cut: bool) -> str:
        return ""


def use_of(form: CallFormat | None, tools: tuple[dict[str, Any], ...] = TOOLS) -> ToolUse | None:
    return None if form is None else ToolUse(tools=tools, format=form, marks={}, ids="abcdefg")


def pieces_of(
    chunks: Sequence[str],
    *,
    marks: ThinkingMarks | None = QWEN,
    inside: bool = False,
    begun: str = "",
    form: CallFormat | None = None,
) -> list[Piece]:
    """What the chunks say, behind what is ``begun``.

    ``inside``: the prompt opened the thinking; ``form``: of calls, if there are tools.
    """
    thinking = None if marks is None else ThinkingText(marks, inside=inside, begun=begun)
    parts = AnswerParts(cast(AnswerText, _Chunks(chunks)), thinking=thinking, tools=use_of(form))
    return [piece for token in range(len(chunks)) for piece in parts.feed(token)[0]] + parts.flush()
