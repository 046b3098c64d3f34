"""Requests of the size and shape of coding agents' first ones. Their texts are generated: words that say nothing.

Recorded in November 2026 from the programs, and counted with Qwen's vocabulary: Claude Code 2.1.197 sends 18 905
tokens, of which 24 tools have 15 686, the system text 1 495 and the messages 1 542 (76 kB); Codex 0.171 sends 9 756
(40 kB), about half of them tools; opencode 1.18 sends 7 271 (30 kB), two thirds of them tools, and first 613 that ask
for a title.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

TOKENS = {"claude-code": 18_905, "codex": 9_756, "opencode": 7_271, "opencode-title": 613}
TOOLS = 24  # of Claude Code
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


# Parameters of Claude Code's Read, and those that stand for the other tools'.
_READ = (("file_path", "string"), ("offset", "number"), ("limit", "number"))
_OTHERS = (("file_path", "string"), ("limit", "number"), ("replace_all", "boolean"), ("command", "string"))


def _tools(count: int, words: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        properties = {
            name: {"type": kind, "description": prose(words // 20, number + at)}
            for at, (name, kind) in enumerate(_OTHERS if number else _READ)
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
        "tools": list(_tools(words(TOOLS), words(413))),
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


def _schema(names: str, words: int, start: int) -> dict[str, Any]:
    """The schema of an object with a text for each name; the first is required."""
    properties = {
        name: {"type": "string", "description": prose(words, start + at)} for at, name in enumerate(names.split())
    }
    required = names.split()[:1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# Names of Codex's functions and of their parameters, and the words that describe a function and each parameter.
_CODEX = (
    ("exec_command", "cmd justification login max_output_tokens prefix_rule sandbox_permissions tty workdir", 20, 34),
    ("write_stdin", "session_id chars max_output_tokens yield_time_ms", 12, 28),
    ("request_user_input", "questions", 24, 260),
    ("view_image", "path", 22, 26),
    ("get_goal", "", 24, 0),
    ("create_goal", "objective token_budget", 46, 30),
    ("update_goal", "status", 280, 90),
)
_CODEX_AGENTS = (
    ("close_agent", "id", 50, 24),
    ("resume_agent", "id", 16, 24),
    ("send_input", "id message items interrupt", 38, 70),
    ("spawn_agent", "message agent_type items model", 1180, 70),
    ("wait_agent", "ids timeout_ms", 42, 40),
)
# Names of opencode's functions.
_OPENCODE = (
    ("bash", "command timeout workdir description", 950, 26),
    ("edit", "filePath oldString newString replaceAll", 255, 22),
    ("glob", "pattern path", 96, 46),
    ("grep", "pattern path include", 134, 26),
    ("read", "filePath offset limit", 234, 40),
    ("skill", "name", 66, 34),
    ("task", "description prompt agent_type task_id command", 560, 24),
    ("todowrite", "todos", 408, 118),
    ("webfetch", "url format timeout", 148, 26),
    ("write", "content filePath", 112, 26),
)


def codex(asked: str, share: float = 1.0) -> dict[str, Any]:
    """The first request of a conversation to /v1/responses. ``share`` makes its texts shorter."""

    def words(count: int) -> int:
        return max(1, round(count * share))

    def function(name: str, names: str, about: int, each: int) -> dict[str, Any]:
        own = {"description": prose(words(about), len(name)), "parameters": _schema(names, words(each), about)}
        return {"type": "function", "name": name, "strict": False, **own}

    def message(role: str, *texts: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}

    functions = [function(*each) for each in _CODEX]
    agents = {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": prose(8),
        "tools": [function(*each) for each in _CODEX_AGENTS],
    }
    return {
        "model": "gpt-5.5-codex",
        "stream": True,
        "input": [
            message("developer", prose(words(3990), 2)),
            message("developer", prose(words(500), 4), prose(words(80), 9)),
            message("user", f"<environment_context>\n{prose(words(80), 6)}\n</environment_context>"),
            message("user", asked),
        ],
        "tools": [*functions[:4], agents, *functions[4:], {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0" * 36,
        "client_metadata": {"turn_id": "0" * 36, "sandbox": "none"},
    }


def with_output(body: dict[str, Any], items: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """The request to /v1/responses behind calls: the items of the answer, and a text as the result of each call."""
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": text} for each in calls]
    return {**body, "input": [*body["input"], *items, *results]}


def opencode(asked: str, share: float = 1.0) -> dict[str, Any]:
    """The first request of a conversation to /v1/chat/completions. ``share`` makes its texts shorter."""

    def words(count: int) -> int:
        return max(1, round(count * share))

    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": prose(words(about), len(name)),
                "parameters": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **_schema(names, words(each), about),
                },
            },
        }
        for name, names, about, each in _OPENCODE
    ]
    own = {"tools": tools, "tool_choice": "auto"}
    return {**_opencode(prose(words(1768), 1), {"role": "user", "content": f'"{asked}"'}), **own}


def opencode_title(asked: str) -> dict[str, Any]:
    """The request for a title, which opencode sends before the first one."""
    ask = {"role": "user", "content": "Generate a title for this conversation:\n"}
    return _opencode(prose(544, 3), ask, {"role": "user", "content": f'"{asked}"'})


def _opencode(system: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "edgespec",
        "max_tokens": 32_000,
        "messages": [{"role": "system", "content": system}, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
