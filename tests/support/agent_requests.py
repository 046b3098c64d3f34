"""Requests of the size and shape of coding agents' first ones. Their texts are generated: words that say nothing.

Measured in November 2026 from Claude Code 2.1.197 with Qwen's vocabulary: 18 905 tokens, of which 24 tools have
15 686, the system text 1 495 and the messages 1 542; 76 kB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

TOKENS, TOOLS = 18_905, 24
# Common words: nearly each is one token of a large vocabulary.
_TEXT = (
    "the file that you read first is often the one which says how all others are used so open it before any change "
    "and write down what it needs then run a small test in the same folder to see whether the new part works with "
    "every old one when a line fails look for its name in the list above do not guess but ask for more text if some "
    "of it was cut"
)
_WORDS = _TEXT.split()


def prose(words: int, start: int = 0) -> str:
    """Sentences of this many words, the same for the same start."""
    own = list(islice(cycle(_WORDS), start % len(_WORDS), start % len(_WORDS) + words))
    sentences = (" ".join(own[at : at + 12]) for at in range(0, len(own), 12))
    return " ".join(f"{each.capitalize()}." for each in sentences)


def _tools(count: int, words: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        properties = {
            name: {"type": kind, "description": prose(words // 20, number + at)}
            for at, (name, kind) in enumerate(
                (("file_path", "string"), ("limit", "number"), ("replace_all", "boolean"), ("command", "string"))
            )
        }
        yield {
            "name": f"Tool{number}" if number else "Read",
            "description": prose(words, 7 * number),
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": properties,
                "required": ["file_path"],
                "additionalProperties": False,
            },
        }


def claude_code(asked: str, share: float = 1.0) -> dict[str, Any]:
    """The first request of a conversation. ``share`` makes its texts shorter, and its tools fewer."""

    def words(count: int) -> int:
        return max(1, round(count * share))

    kept = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.197.1a2; cc_entrypoint=cli; cch=0f1e2;",
            },
            {"type": "text", "text": prose(10), **kept},
            {"type": "text", "text": prose(words(1300), 3), **kept},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"<system-reminder>\n{prose(words(1200), 5)}\n</system-reminder>"}
                ],
            },
            {"role": "system", "content": prose(words(120), 11)},
            {"role": "user", "content": [{"type": "text", "text": asked, **kept}]},
        ],
        "tools": list(_tools(words(TOOLS), words(420))),
        "metadata": {"user_id": "0" * 64},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }


def with_result(body: dict[str, Any], call: dict[str, Any], text: str, *, is_error: bool = False) -> dict[str, Any]:
    """The request behind a call: the assistant's block, and its result."""
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": text, "is_error": is_error}
    answered = {**result, "cache_control": {"type": "ephemeral"}}
    turn = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answered]}]
    return {**body, "messages": [*body["messages"], *turn]}
