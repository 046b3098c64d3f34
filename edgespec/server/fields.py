"""The fields of a request, each once: what it may be, what it sets, and what becomes of those that are not obeyed.

``FIELDS`` has every field of OpenAI's chat completions and completions, and those that vLLM, llama.cpp's server and
Ollama add. A field that changes the answer is obeyed, or refused by name unless its value changes nothing. The
parser, the OpenAPI document and the tables of docs/guide/fields.md are made of it. Fields that none of these programs
has are ignored: clients send many, and a refusal would stop clients that work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import BIASES, MOST_BIASED, RANGES
from edgespec.errors import InvalidRequestError
from edgespec.files.checked import Range
from edgespec.server.errors import ApiError, sentence
from edgespec.server.forms import (
    MEMBERS,
    RESPONSE_FORMAT,
    SCHEMA,
    TEXT,
    asked,
    ollama_format,
    response_format,
    structured_outputs,
)
from edgespec.server.json_schema import Schema, fits, wanted
from edgespec.server.messages import MESSAGES, read_messages
from edgespec.server.strict_json import check_texts
from edgespec.text.conversation.thinking import SWITCH
from edgespec.text.conversation.tools import MOST_TOOLS
from edgespec.text.conversation.variables import DOCUMENTS, check_variables

# OpenAI allows 4; editors' lists for some programming languages have 19.
MOST_STOPS = 32
# Answers to one request. They are decoded one after another.
MOST_CHOICES = 16
# A context of 128 000 tokens has room for short ones.
MOST_DOCUMENTS = 1000
# The share of the likeliest token is larger in any vocabulary.
_LEAST_TOP_P = 1e-9
# A smaller divisor makes scores infinite.
_LEAST_REPEAT_PENALTY = 0.01
_SEEDS = 2**64
_MOST_WHOLE = 2**31 - 1


class Treatment(Enum):
    """What becomes of a field. A refused one may have the values of its schema, which change nothing."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    IGNORED = "ignored"


CHAT, COMPLETION = ("chat",), ("completion",)
_Own: TypeAlias = Callable[[Any], Any]


def _same(given: Any) -> Any:
    return given


def _nothing(given: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the bodies of ``apis``. A name with a dot is that of a member of an object.

    ``schema`` is what it may be; values outside an ``enum`` ask for what is not supported. ``own`` is what a value
    means here, None if nothing. ``sets`` names what it becomes, by default the field's own name: a field of Request,
    or behind ``sampling.`` one of Sampling. Of several fields that set the same, the first of the table counts, of
    template variables for each name; forms of the answer must be equal.
    Absent and null mean the default of what is set. ``shown`` is another schema for the OpenAPI document, or False if
    that leaves the field out. With ``texts`` the field's texts reach the model.
    """

    name: str
    schema: Schema
    meaning: str
    apis: tuple[str, ...] = CHAT + COMPLETION
    own: _Own = _same
    sets: str = ""
    shown: Schema | bool = True
    treatment: Treatment = Treatment.OBEYED
    required: bool = False
    texts: bool = False

    def read(self, body: Mapping[str, Any]) -> Any:
        """What the field of this body means, None if nothing. Raises ApiError."""
        *objects, name = self.name.split(".")
        for each in objects:
            body = {} if (inner := body.get(each)) is None else inner
            if not isinstance(body, Mapping):
                raise ApiError(f"{each} must be an object, not {_told(body)}", param=each)
        given = body.get(name)
        if given is None and not self.required:
            return None
        if self.texts:
            given = check_texts(given, name)
        if not fits(self.schema, given):
            raise self._refusal(name, given)
        return self.own(given)

    def _refusal(self, name: str, given: Any) -> ApiError:
        if self.treatment is Treatment.REFUSED or "enum" in self.schema:
            only = "" if self.schema is _EMPTY else f", only {wanted(self.schema)}"
            message = f"{name} {_told(given)} is not supported{only} ({self.meaning})"
            return ApiError(message, param=name, code="unsupported_parameter")
        return ApiError(f"{name} must be {wanted(self.schema)}, not {_told(given)}", param=name)


def _told(given: Any) -> str:
    return json.dumps(given)[:40]


# ------------------------------------------------------------------------------------------- schemas and own values


def _number(allowed: Range, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": allowed.least, "maximum": allowed.most}


def _whole(least: int, most: int) -> Schema:
    return _number(Range(least, most), "integer")


_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"]}
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}, "maxItems": MOST_STOPS}
_STOPS: Schema = {"oneOf": [{"type": "null"}, {"type": "string"}, _TEXTS]}
_OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_TOOLS}
_WORDS: Schema = {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MOST_STOPS}
_CHOICES: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
_PROMPT: Schema = {"type": "string", "minLength": 1}
_CHOICE: Schema = {"anyOf": [{"enum": [None, "auto", "none", "required"]}, {"type": "object"}]}
_LENGTH: Schema = {"type": "integer", "minimum": 1}
_TOP = _whole(0, MOST_TOP)
_TOKENS: Schema = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": _MOST_WHOLE},
    "maxItems": MOST_BIASED,
}
_BIAS: Schema = {"type": "number", "minimum": BIASES.least, "maximum": BIASES.most}
_BIASES: Schema = {
    "type": ["object", "null"],
    "patternProperties": {"^[0-9]{1,9}$": {"anyOf": [_BIAS, {"const": False}]}},
    "additionalProperties": False,
    "maxProperties": MOST_BIASED,
}
_REPEAT = _number(replace(RANGES["repeat_penalty"], least=_LEAST_REPEAT_PENALTY, above=False))
_EMPTY: Schema = {"enum": [False, 0, "", [], {}]}
_VARIABLES: Schema = {"type": ["object", "null"]}
_EFFORT: Schema = {"anyOf": [_FLAG, _TEXT]}
_DOCUMENTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_DOCUMENTS}
_SWITCHED = {"enabled": True, "disabled": False}
_THINKING: Schema = {"enum": [None, *_SWITCHED, "adaptive", "auto"]}
_WHETHER = "whether the model may think first, where its template has a switch"
_HOW_LONG = 'how long the model may think first, where its template reads that; "none" and false mean not at all'
# Values at which a field of a refused kind changes nothing.
_NO: Schema = {"enum": [False]}
_YES: Schema = {"enum": [True]}
_ZERO: Schema = {"enum": [0]}
_ONE: Schema = {"enum": [1]}
_LESS: Schema = {"enum": [-1]}


def _seed(given: float) -> int | None:
    """-1 means none, as in llama.cpp. Other negative ones are those of OpenAI's 64-bit integers."""
    return None if given == -1 else int(given) % _SEEDS


def _top(given: float) -> int | None:
    return None if given is False else int(given)


def _stops(given: str | list[str]) -> tuple[str, ...]:
    return tuple(filter(None, [given] if isinstance(given, str) else given))


def _biases(given: Mapping[str, float]) -> dict[int, float] | None:
    """False bans a token, as in llama.cpp."""
    return {int(token): BIASES.least if bias is False else bias for token, bias in given.items()} or None


def _effort(given: str) -> dict[str, Any]:
    return {"reasoning_effort": given, **({SWITCH: False} if given == "none" else {})}


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return check_variables(given)
    except InvalidRequestError as error:
        raise ApiError(sentence(error), param="chat_template_kwargs") from None


def _tokens(given: list[float]) -> tuple[int, ...]:
    return tuple(map(int, given))


# -------------------------------------------------------------------------------------------------------- the table


def _refused(
    names: str, meaning: str, unless: Schema = _EMPTY, apis: tuple[str, ...] = CHAT + COMPLETION
) -> list[Field]:
    """Fields that ask for the same, which is not supported."""
    return [
        Field(name, unless, meaning, apis, _nothing, shown=False, treatment=Treatment.REFUSED)
        for name in names.split()
    ]


def _ignored(names: str, about: str, apis: tuple[str, ...] = CHAT + COMPLETION) -> list[Field]:
    """Fields that no answer depends on."""
    return [
        Field(name, {}, about, apis, _nothing, shown=False, treatment=Treatment.IGNORED) for name in names.split()
    ]


def _named(names: str, field: Field) -> list[Field]:
    """The field, behind those that mean the same in other servers."""
    return [*(replace(field, name=name) for name in names.split()), field]


def _length(name: str, apis: tuple[str, ...] = CHAT + COMPLETION) -> Field:
    meaning = "the most tokens of an answer; without it, or with -1, the rest of the context"
    schema = {"anyOf": [{"const": -1}, {**_LENGTH, "maximum": _MOST_WHOLE}]}
    shown = {"anyOf": [{"type": "null"}, {"const": -1}, _LENGTH]}
    return Field(name, schema, meaning, apis, int, "max_tokens", shown)


def _variable(name: str, schema: Schema, meaning: str, own: _Own) -> Field:
    return Field(name, schema, meaning, CHAT, own, "template_variables", texts=True)


def _drawing(name: str, schema: Schema, own: _Own = _same, others: str = "") -> list[Field]:
    field = Field(name, schema, "as in [Sampling](sampling.md)", own=own, sets=f"sampling.{name}")
    return _named(f"options.{name} {others}", field)


def _form(name: str, schema: Schema, own: _Own) -> Field:
    return Field(name, schema, "as in [Structured answers](structured.md#over-http)", own=own, sets="form")


_OBEYED = (
    Field(
        "messages",
        {},
        "the conversation, as in [Messages](serve.md#messages)",
        CHAT,
        read_messages,
        shown=MESSAGES,
        required=True,
    ),
    Field(
        "prompt",
        {"anyOf": [_PROMPT, {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": 1}]},
        "the text that the answer continues",
        COMPLETION,
        lambda given: given if isinstance(given, str) else given[0],
        shown=_PROMPT,
        required=True,
        texts=True,
    ),
    _length("options.num_predict"),
    _length("max_completion_tokens", CHAT),
    _length("max_tokens"),
    _length("max_completion_tokens", COMPLETION),
    _length("n_predict"),
    _variable(
        "chat_template_kwargs",
        _VARIABLES,
        "variables of the model's template, as in [Messages](serve.md#messages)",
        _variables,
    ),
    *_named("reasoning.effort", _variable("reasoning_effort", _TEXT, _HOW_LONG, _effort)),
    # The names of Qwen's, DeepSeek's and GLM's own servers.
    _variable("enable_thinking", _FLAG, _WHETHER, lambda given: {SWITCH: given}),
    _variable(
        "thinking.type", _THINKING, _WHETHER, lambda given: {SWITCH: _SWITCHED[given]} if given in _SWITCHED else None
    ),
    _variable(
        "think", _EFFORT, _HOW_LONG, lambda given: _effort(given) if isinstance(given, str) else {SWITCH: given}
    ),
    _variable(
        "documents",
        _DOCUMENTS,
        "texts to answer from, where the template reads them",
        lambda given: {DOCUMENTS: given},
    ),
    Field("logprobs", _FLAG, "log-probabilities of the answer's tokens", CHAT),
    Field("top_logprobs", _TOP, "how many of the likeliest tokens come with each", CHAT, int),
    Field(
        "logprobs",
        {"anyOf": [{"const": False}, _TOP]},
        "log-probabilities, with this many of the likeliest tokens each",
        COMPLETION,
        _top,
    ),
    Field("echo", _FLAG, "whether the answer begins with the prompt", COMPLETION),
    Field(
        "tools", _OBJECTS, "functions that the model may call, as in [Tools](serve.md#tools)", CHAT, tuple, texts=True
    ),
    Field("tool_choice", _CHOICE, "whether the model may call them, or must", CHAT, texts=True),
    Field("parallel_tool_calls", _FLAG, "whether an answer may have several calls, or the first only", CHAT),
    _form("response_format", RESPONSE_FORMAT, response_format),
    *(_form(name, SCHEMA, asked("schema", name)) for name in ("json_schema", "guided_json")),
    _form("format", SCHEMA, ollama_format),
    _form("structured_outputs", MEMBERS, structured_outputs),
    *(_form(name, TEXT, asked("grammar", name)) for name in ("grammar", "guided_grammar")),
    _form("guided_regex", TEXT, asked("regex", "guided_regex")),
    _form("guided_choice", _CHOICES, asked("choice", "guided_choice")),
    Field("model", _TEXT, "the served model, by one of its names"),
    *_drawing("temperature", _number(RANGES["temperature"])),
    # OpenAI allows 0: the likeliest token.
    *_drawing("top_p", _number(replace(RANGES["top_p"], above=False)), lambda given: given or _LEAST_TOP_P),
    *_drawing("min_p", _number(RANGES["min_p"])),
    *_drawing("presence_penalty", _number(RANGES["presence_penalty"])),
    *_drawing("frequency_penalty", _number(RANGES["frequency_penalty"])),
    *_drawing("repeat_penalty", _REPEAT, others="repetition_penalty"),
    *_drawing("top_k", _whole(-1, _MOST_WHOLE), lambda given: max(int(given), 0)),  # -1 is vLLM's number for all
    Field(
        "logit_bias",
        _BIASES,
        "numbers that are added to the scores of tokens; -100, or false, bans one",
        own=_biases,
        sets="sampling.logit_bias",
    ),
    Field("bad_words", _WORDS, "banned words of one token each", own=_stops, texts=True),
    *_named(
        "options.seed",
        Field(
            "seed", _whole(-(_SEEDS // 2), _SEEDS - 1), "gives the same text again; with -1 one is drawn", own=_seed
        ),
    ),
    *_named("options.stop", Field("stop", _STOPS, "texts before which the answer ends", own=_stops, texts=True)),
    Field("stop_token_ids", _TOKENS, "tokens before which the answer ends", own=_tokens),
    Field("min_tokens", _whole(0, _MOST_WHOLE), "tokens of the answer before which nothing ends it", own=int),
    Field("ignore_eos", _FLAG, "whether the model cannot end the answer"),
    *_named(
        "n_cmpl", Field("n", _whole(1, MOST_CHOICES), "how many answers, one after another", own=int, sets="choices")
    ),
    Field("stream", _FLAG, "events in place of one answer"),
    Field("stream_options.include_usage", _FLAG, "whether the last event has `usage`"),
)

_REFUSED = (
    *_refused("grammar_lazy", "a form that begins in the middle of the answer", _NO),
    *_refused("grammar_triggers", "a form that begins in the middle of the answer"),
    *_refused("guided_whitespace_pattern", "other blanks in JSON"),
    *_refused("functions", "`tools`, by their old name", apis=CHAT),
    *_refused("function_call", "`tool_choice`, by its old name", {"enum": ["auto", "none"]}, CHAT),
    *_refused("modalities", "other prompts or answers than text", {"enum": [["text"]]}),
    *_refused("audio images image_data width height steps", "other prompts or answers than text"),
    *_refused("web_search_options moderation", "a service of OpenAI"),
    *_refused("verbosity", "longer or shorter answers", {"enum": ["medium"]}),
    *_refused("best_of", "the best of several answers", {"enum": [1, True]}),
    *_refused("use_beam_search early_stopping", "the best of several answers", _NO),
    *_refused("length_penalty", "the best of several answers", _ONE),
    *_refused("suffix", "text after the answer", {"enum": [""]}),
    *_refused("n_indent", "an answer of indented lines", _ZERO),
    *_refused("typical_p options.typical_p tfs_z options.tfs_z", "another way to draw tokens", _ONE),
    *_refused(
        "mirostat options.mirostat dry_multiplier xtc_probability dynatemp_range top_a epsilon_cutoff eta_cutoff "
        "smoothing_factor no_repeat_ngram_size",
        "another way to draw tokens",
        _ZERO,
    ),
    *_refused("top_n_sigma adaptive_target", "another way to draw tokens", {"enum": [-1, 0]}),
    *_refused("min_keep", "another way to draw tokens", {"enum": [0, 1]}),
    *_refused("samplers logits_processors vllm_xargs watermarking", "another way to draw tokens"),
    *_refused("repeat_last_n options.repeat_last_n", "penalties of the last tokens only", {"enum": [-1]}),
    *_refused("penalize_nl options.penalize_newline", "line breaks without penalty", _YES),
    *_refused("allowed_token_ids", "an answer of some tokens only"),
    *_refused(
        "thinking_token_budget thinking_budget_tokens reasoning_budget_tokens thinking.budget_tokens thinking_budget",
        "a length of thinking",
        _LESS,
    ),
    *_refused("reasoning_control", "a length of thinking", _NO),
    *_refused("t_max_predict_ms", "an answer that ends by the clock", {"enum": [-1, 0]}),
    *_refused("repetition_detection", "an answer that ends when it repeats itself"),
    *_refused("lora", "an adapter"),
    *_refused(
        "system system_prompt template context chat_template prompt_embeds generation_prompt chat_format chat_parser",
        "a prompt of another form",
    ),
    *_refused("truncate_prompt_tokens", "a prompt of another form", _NO),
    *_refused("add_special_tokens raw", "a chat's prompt of another form", _NO, CHAT),
    *_refused("add_generation_prompt", "a chat's prompt of another form", _YES, CHAT),
    *_refused("add_special_tokens raw", "a completion's prompt of another form", _YES, COMPLETION),
    *_refused("continue_final_message", "the rest of the last message", _NO),
    *_refused("echo", "an answer that begins with the last message", _NO, CHAT),
    *_refused("include_stop_str_in_output", "an answer that shows its end", _NO),
    *_refused("skip_special_tokens", "an answer that shows control tokens", _YES),
    *_refused("include_reasoning", "an answer without its thinking", _YES),
    *_refused("reasoning_format", "thinking as part of the answer", {"enum": ["auto", "deepseek"]}),
    *_refused("parse_tool_calls", "calls as part of the answer", _YES),
    *_refused(
        "prompt_logprobs return_token_ids return_tokens_as_token_ids return_tokens return_prompt_text "
        "post_sampling_probs",
        "a reply of another form",
        _NO,
    ),
    *_refused("n_probs", "a reply of another form", _ZERO),
    *_refused("top_logprobs", "a completion's `logprobs`, by another name", _ZERO, COMPLETION),
    *_refused("logprob_token_ids response_fields _debug_render_only", "a reply of another form"),
    *_refused("kv_transfer_params ec_transfer_params", "caches of other machines"),
)

_IGNORED = (
    *_ignored("user metadata store safety_identifier request_id session_id", "who asks, and records of it"),
    *_ignored("service_tier priority", "the order of requests: the first is answered first"),
    *_ignored(
        "prediction prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt cache_salt "
        "n_cache_reuse id_slot keep_alive",
        "speed: what is kept, and what is guessed",
    ),
    *_ignored(
        "backend_sampling options.num_batch options.num_gpu options.main_gpu options.num_thread options.numa "
        "options.low_vram options.f16_kv options.use_mmap options.use_mlock options.vocab_only options.logits_all",
        "the machine, which the server knows",
    ),
    *_ignored(
        "options.num_ctx options.num_keep n_keep n_discard truncate shift truncation_side",
        "a full context: nothing of a prompt is dropped",
    ),
    *_ignored(
        "stream_interval sse_ping_interval return_progress timings_per_token verbose "
        "stream_options.include_obfuscation stream_options.continuous_usage_stats",
        "events between the pieces of an answer",
    ),
    *_ignored(
        "xtc_threshold dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "adaptive_decay mirostat_tau options.mirostat_tau mirostat_eta options.mirostat_eta "
        "grammar_type preserved_tokens guided_decoding_backend "
        "reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message "
        "spaces_between_special_tokens media_io_kwargs mm_processor_kwargs return_mm_kwargs",
        "settings of what is refused",
    ),
    *_ignored("think parallel_tool_calls", "thinking and calls, which only chats have", COMPLETION),
    *_ignored("routed_experts_prompt_start return_token_offsets", "replies of other routes"),
)

FIELDS = (*_REFUSED, *_OBEYED, *_IGNORED)


def fields_for(api: str) -> list[Field]:
    """The fields of the bodies of ``api``."""
    return [field for field in FIELDS if api in field.apis]


def read_fields(api: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields of a body set, and ``sampling`` with the arguments of Sampling. Raises ApiError."""
    found, sampling = dict[str, Any](), dict[str, Any]()
    for field in fields_for(api):
        if (value := field.read(body)) is not None:
            group, _, name = (field.sets or field.name).rpartition(".")
            into = sampling if group == "sampling" else found
            before = into.setdefault(name, value)
            if name == "template_variables":
                into[name] = {**value, **before}
            elif name == "form" and before != value:
                message = f"{before.field} and {field.name} name two forms, and an answer has one"
                raise ApiError(message, param=field.name)
    return {**found, "sampling": sampling}


def body_schema(api: str) -> Schema:
    """The JSON schema of the bodies of ``api`` in the OpenAPI document."""
    found = dict[str, Any]()
    for field in fields_for(api):
        if shown := field.schema if field.shown is True else field.shown:
            outer, _, name = field.name.rpartition(".")
            inside = found.setdefault(outer, {"type": ["object", "null"], "properties": {}}) if outer else None
            (found if inside is None else inside["properties"])[name] = shown
    return {
        "type": "object",
        "properties": found,
        "required": [each.name for each in fields_for(api) if each.required],
    }
