"""The fields of OpenAI's Responses API that its chats do not have, or not in this form, and those that vLLM adds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgespec.server.fields.field import (
    FLAG,
    LENGTH,
    MOST_WHOLE,
    NO,
    OBJECTS,
    ONE,
    TEXT,
    Field,
    ignored,
    named,
    refused,
)
from edgespec.server.fields.openai import CHOICE, RESPONSES
from edgespec.server.forms import RESPONSE_FORMAT, text_format
from edgespec.server.items import read_items, read_tools
from edgespec.server.json_schema import Schema
from edgespec.server.messages import MOST_MESSAGES

_ITEMS: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "maxItems": MOST_MESSAGES}]
}
_INCLUDED: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
_MOST: Schema = {"anyOf": [{"type": "null"}, {**LENGTH, "maximum": MOST_WHOLE}]}
_LOGPROBS = "message.output_text.logprobs"
_AUTO: Schema = {"enum": ["auto"]}
_EARLIER = "an earlier response: none is kept, send the whole conversation"

_refused = partial(refused, apis=RESPONSES)
_ignored = partial(ignored, apis=RESPONSES)

FIELDS = (
    # Clients know OpenAI's code for a response that is not there, and send the whole conversation.
    *(replace(field, code="previous_response_not_found") for field in _refused("previous_response_id", _EARLIER)),
    *_refused("previous_response conversation prompt", "something stored: no response is kept"),
    *_refused("previous_input_messages", "a prompt of another form"),
    *_refused("background", "an answer that is fetched later", NO),
    *_refused("reasoning.mode", "another way to think", {"enum": ["standard"]}),
    *_refused("reasoning.context", "other earlier thinking than the template shows", _AUTO),
    *_refused("n n_cmpl", "several answers", ONE),
    *_refused("logprobs enable_response_messages", "a reply of another form", NO),
    Field(
        "input",
        _ITEMS,
        "the conversation, as in [Responses](agents.md#responses)",
        RESPONSES,
        read_items,
        "messages",
        required=True,
    ),
    Field("instructions", TEXT, "the system message, in front of the items", RESPONSES, texts=True),
    *named(
        "max_output_tokens",
        Field("max_new_tokens", _MOST, "the most tokens of an answer", RESPONSES, int, "max_tokens"),
    ),
    Field(
        "tools",
        OBJECTS,
        "functions, and namespaces with functions; tools of other types are left out with a warning",
        RESPONSES,
        read_tools,
        texts=True,
    ),
    Field("tool_choice", CHOICE, "whether the model may call them, or must, or may call some", RESPONSES, texts=True),
    Field(
        "text.format",
        RESPONSE_FORMAT,
        "as in [Structured answers](structured.md#over-http)",
        RESPONSES,
        text_format,
        "form",
    ),
    Field(
        "include",
        _INCLUDED,
        f'with "{_LOGPROBS}": log-probabilities of the text\'s tokens',
        RESPONSES,
        lambda given: _LOGPROBS in given or None,
    ),
    Field(
        "store",
        {},
        "if false, later requests may not name the answer's items by their ids",
        RESPONSES,
        lambda given: False if given is False else None,
        shown=FLAG,
    ),
    *_ignored("access_programs client_metadata", "who asks, and records of it"),
    *_ignored("reasoning.summary reasoning.generate_summary", "a summary of thinking: all of it is in the reply"),
    *_ignored("text.verbosity", "a wish for longer or shorter answers"),
    *_ignored("truncation context_management", "a full context: nothing of a prompt is dropped"),
    *_ignored("stream_options.include_usage", "the last event has `usage`"),
    *_ignored("background_options image max_tool_calls", "settings of what is refused or left out"),
)
