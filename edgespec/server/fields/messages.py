"""The fields of Anthropic's messages."""

from __future__ import annotations

from functools import partial

from edgespec.server.blocks import MESSAGES, read_blocks, read_system, read_tool_choice
from edgespec.server.fields.field import (
    FLAG,
    MOST_STOPS,
    MOST_WHOLE,
    OBJECTS,
    SWITCHED,
    TEXT,
    WHETHER,
    Field,
    drawing,
    ignored,
    read_stops,
    refused,
    temperature,
    whole,
)
from edgespec.server.forms import OUTPUT_FORMAT, output_format
from edgespec.server.json_schema import Schema

API = ("messages",)

_BLOCKS: Schema = {"type": "array", "items": {"type": "object"}}
_SYSTEM: Schema = {"anyOf": [TEXT, _BLOCKS]}
_STOPS: Schema = {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MOST_STOPS}
_CHOICE: Schema = {
    "type": ["object", "null"],
    "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}},
}
_THINKING: Schema = {"enum": [None, *SWITCHED, "adaptive", "between_tools"]}
_DISPLAY: Schema = {"enum": [None, "summarized", "omitted"]}
_EFFORT: Schema = {"enum": [None, "low", "medium", "high", "xhigh", "max"]}
# Templates know three.
_HIGH = {"xhigh": "high", "max": "high"}
_STRUCTURED = "as in [Structured answers](structured.md#over-http)"

_OBEYED = (
    Field("model", TEXT, "any name, while one model is served", API),
    Field(
        "messages",
        {},
        "the conversation, as in [Agents](agents.md#messages)",
        API,
        read_blocks,
        shown=MESSAGES,
        required=True,
    ),
    Field("system", _SYSTEM, "the system text, as text or as blocks", API, read_system),
    Field(
        "max_tokens",
        whole(0, MOST_WHOLE),
        "the most tokens of an answer; 0 reads the prompt alone; without it, the rest of the context",
        API,
        int,
    ),
    temperature(apis=API),
    drawing("top_p", apis=API),
    drawing("top_k", apis=API),
    Field("stop_sequences", _STOPS, "texts before which the answer ends", API, read_stops, "stop", texts=True),
    Field("stream", FLAG, "events in place of one answer", API),
    Field(
        "tools",
        OBJECTS,
        "functions that the model may call; other types are left out, with a warning",
        API,
        tuple,
        texts=True,
    ),
    Field("tool_choice", _CHOICE, "whether the model may call them, or must", API, read_tool_choice, texts=True),
    Field(
        "tool_choice.disable_parallel_tool_use",
        FLAG,
        "whether an answer has its first call only",
        API,
        lambda given: not given,
        "parallel_tool_calls",
    ),
    Field(
        "thinking.type",
        _THINKING,
        WHETHER,
        API,
        lambda given: {"enable_thinking": SWITCHED[given]} if given in SWITCHED else None,
        "template_variables",
    ),
    Field(
        "thinking.display",
        _DISPLAY,
        "whether the answer shows the thinking",
        API,
        lambda given: given == "omitted",
        "hide_thinking",
    ),
    Field(
        "output_config.effort",
        _EFFORT,
        "how long the model may think first, where its template reads that",
        API,
        lambda given: {"reasoning_effort": _HIGH.get(given, given)},
        "template_variables",
    ),
    Field("output_config.format", OUTPUT_FORMAT, _STRUCTURED, API, output_format, "form"),
    Field("output_format", OUTPUT_FORMAT, _STRUCTURED, API, output_format, "form"),
)

_refused = partial(refused, apis=API)
_ignored = partial(ignored, apis=API)

_REFUSED = (
    *_refused("container mcp_servers", "a service of Anthropic"),
    *_refused("compaction", "a summary in place of an answer"),
    *_refused("thread", "a conversation that the server keeps"),
)

_IGNORED = (
    *_ignored("metadata user_profile_id workspace_id billing_policy fallback_credit_token", "who asks, and who pays"),
    *_ignored("betas diagnostics", "news about the service"),
    *_ignored("service_tier speed inference_geo fallbacks", "other machines, models and prices"),
    *_ignored("cache_control", "speed: what is kept"),
    *_ignored("context_management", "a full context: nothing of a prompt is dropped"),
    *_ignored("thinking.budget_tokens", "a length of thinking, which `max_tokens` limits"),
)

FIELDS = (*_REFUSED, *_OBEYED, *_IGNORED)
