"""The fields of Ollama's chat and generate. OpenAI's table has those that clients also send to OpenAI's APIs."""

from __future__ import annotations

from dataclasses import replace

from edgespec.server.fields import openai
from edgespec.server.fields.field import FLAG, MOST_WHOLE, TEXT, Field, Treatment, ignored, refused, whole
from edgespec.server.keep_alive import KEEP_ALIVE, kept_alive_s
from edgespec.server.messages import OLLAMA_MESSAGES, read_ollama_messages

CHAT, GENERATE = ("ollama-chat",), ("ollama-generate",)
BOTH = CHAT + GENERATE

_OPTIONS = "options."


def _as_openai(name: str, apis: tuple[str, ...] = BOTH) -> Field:
    """The field that means the same in OpenAI's chats."""
    (field,) = (each for each in openai.FIELDS if each.name == name and openai.CHAT[0] in each.apis)
    return replace(field, apis=apis)


def _as_text(name: str) -> Field:
    """The field that means the same in OpenAI's completions."""
    (field,) = (each for each in openai.FIELDS if each.name == name and openai.COMPLETION[0] in each.apis)
    return replace(field, apis=GENERATE)


def _options(treatment: Treatment) -> list[Field]:
    known = [each.name for each in openai.FIELDS if each.name.startswith(_OPTIONS) and each.treatment is treatment]
    return [_num_predict() if name == "options.num_predict" else _as_openai(name) for name in known]


def _num_predict() -> Field:
    """Ollama obeys numbers above 0 alone."""
    return replace(
        _as_openai("options.num_predict"),
        schema=whole(-MOST_WHOLE, MOST_WHOLE),
        meaning="the most tokens of an answer; without it, or below 1, the rest of the context",
        own=lambda given: int(given) if given > 0 else -1,
        shown=True,
    )


_OBEYED = (
    Field(
        "messages",
        {},
        "the conversation, as in [Ollama's clients](ollama-clients.md#messages); without it a model is loaded",
        CHAT,
        read_ollama_messages,
        shown=OLLAMA_MESSAGES,
    ),
    Field(
        "prompt",
        TEXT,
        "the user's message, with `raw` the text that the answer continues; without it a model is loaded",
        GENERATE,
        texts=True,
    ),
    Field("system", TEXT, "the system message before the prompt", GENERATE, texts=True),
    _as_text("suffix"),
    Field("raw", FLAG, "whether the prompt goes to the model without a template", GENERATE),
    _as_text("edgespec.heal"),
    _as_openai("tools", CHAT),
    *map(_as_openai, ("think", "format", "logprobs", "top_logprobs")),
    *_options(Treatment.OBEYED),
    _as_openai("model"),
    Field("stream", FLAG, "lines in place of one object; true if absent", BOTH),
    Field(
        "keep_alive",
        KEEP_ALIVE,
        'for how long the model stays loaded: seconds, or a text such as "5m"; below 0 always',
        BOTH,
        kept_alive_s,
        "keep_alive_s",
    ),
)

_REFUSED = (
    *refused("images width height steps", "other prompts or answers than text", apis=GENERATE),
    *refused("template context", "a prompt of another form", apis=GENERATE),
    *_options(Treatment.REFUSED),
    *refused("_debug_render_only", "a reply of another form", apis=BOTH),
)

_IGNORED = (
    *_options(Treatment.IGNORED),
    *ignored("truncate shift", "a full context: nothing of a prompt is dropped", apis=BOTH),
)

FIELDS = (*_REFUSED, *_OBEYED, *_IGNORED)
