"""The fields of OpenAI's chat completions and completions, and those that vLLM, llama.cpp and Ollama add to them.

Most of them mean the same in the Responses API, whose own are in responses.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import BIASES, MOST_BIASED
from edgespec.errors import InvalidRequestError
from edgespec.server.errors import ApiError, sentence, unsupported
from edgespec.server.fields.field import (
    FLAG,
    HOW_LONG,
    LENGTH,
    LESS,
    MOST_STOPS,
    MOST_WHOLE,
    NO,
    OBJECTS,
    ONE,
    SEEDS,
    STOPS,
    SWITCHED,
    TEXT,
    WHETHER,
    YES,
    ZERO,
    Field,
    Own,
    drawing,
    ignored,
    named,
    read_effort,
    read_seed,
    read_stops,
    refused,
    temperature,
    whole,
)
from edgespec.server.forms import (
    MEMBERS,
    RESPONSE_FORMAT,
    SCHEMA,
    TEXT as FORM_TEXT,
    asked,
    ollama_format,
    response_format,
    structured_outputs,
)
from edgespec.server.json_schema import Schema, fits, wanted
from edgespec.server.messages import MESSAGES, read_messages
from edgespec.text.conversation.thinking import SWITCH
from edgespec.text.conversation.variables import DOCUMENTS, check_variables

# Answers to one prompt, and to one request, which has as many prompts: LangChain sends 20 at a time.
MOST_CHOICES, MOST_ANSWERS = 16, 32
# A context of 128 000 tokens has room for short ones.
MOST_DOCUMENTS = 1000

CHAT, COMPLETION, RESPONSES, INFILL = ("chat",), ("completion",), ("responses",), ("infill",)
CHATS, TEXTS = CHAT + RESPONSES, COMPLETION + INFILL
BOTH, ALL = CHAT + TEXTS, CHATS + TEXTS
_NOT_INFILL = CHATS + COMPLETION


_WORDS: Schema = {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MOST_STOPS}
_CHOICES: Schema = {"type": ["array", "null"], "items": {"type": "string"}}
_PROMPT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_WHOLE}, "minItems": 1}
_SEVERAL: Schema = {"type": "array", "items": {"anyOf": [_PROMPT, _IDS]}, "minItems": 1}
_PROMPTS: Schema = {"anyOf": [_PROMPT, _IDS, _SEVERAL]}
CHOICE: Schema = {"anyOf": [{"enum": [None, "auto", "none", "required", "any"]}, {"type": "object"}]}
_TOP = whole(0, MOST_TOP)
_TOKENS: Schema = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": MOST_WHOLE},
    "maxItems": MOST_BIASED,
}
_BIAS: Schema = {"type": "number", "minimum": BIASES.least, "maximum": BIASES.most}
_BIAS_OR_BAN: Schema = {"anyOf": [_BIAS, {"const": False}]}
_OBJECT: Schema = {"type": ["object", "null"], "maxProperties": MOST_BIASED}
# llama.cpp's other form: tokens with their biases.
_PAIRS: Schema = {"type": "array", "maxItems": MOST_BIASED}
_PAIR: Schema = {"type": "array", "items": {"type": ["number", "boolean"]}, "minItems": 2, "maxItems": 2}
_BIASES: Schema = {
    "anyOf": [
        {**_OBJECT, "patternProperties": {"^[0-9]{1,9}$": _BIAS_OR_BAN}, "additionalProperties": False},
        {**_PAIRS, "items": _PAIR},
    ]
}
_ID = whole(0, 10**9 - 1)
_VARIABLES: Schema = {"type": ["object", "null"]}
_EFFORT: Schema = {"anyOf": [FLAG, TEXT]}
_DOCUMENTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_DOCUMENTS}
_CHAIN: Schema = {"anyOf": [TEXT, _WORDS]}
_THINKING: Schema = {"enum": [None, *SWITCHED, "adaptive", "auto"]}

# llama.cpp's ways to draw: the letter and the name of each, and what switches off those that there are here.
_SAMPLERS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("e", "penalties", {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}),
    ("k", "top_k", {"top_k": 0}),
    ("p", "top_p", {"top_p": 1.0}),
    ("m", "min_p", {"min_p": 0.0}),
    ("t", "temperature", {"temperature": 1.0}),
    # The fields of these are refused unless they are off.
    ("d", "dry", {}),
    ("s", "top_n_sigma", {}),
    ("y", "typ_p", {}),
    ("f", "tfs_z", {}),
    ("x", "xtc", {}),
    ("a", "adaptive_p", {}),
)
# Further names that llama.cpp and its clients have for them.
_SAME_SAMPLER = {"temp": "temperature", "typical_p": "typ_p", "typical": "typ_p"}


def _top(given: float) -> int | None:
    return None if given is False else int(given)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each a text or tokens. Raises ApiError."""
    several = isinstance(given, list) and not isinstance(given[0], int | float)
    if several and len(given) > MOST_ANSWERS:
        message = f"there are {len(given)} prompts; at most {MOST_ANSWERS} prompts in one request are allowed"
        raise ApiError(message, param="prompt")
    return tuple(each if isinstance(each, str) else tuple(map(int, each)) for each in (given if several else [given]))


def _biases(given: Mapping[str, float] | list[list[Any]]) -> dict[int, float] | None:
    """False bans a token, as in llama.cpp. Raises ApiError."""
    pairs: list[Any] = given if isinstance(given, list) else [[_id_in(token), bias] for token, bias in given.items()]
    members = given if isinstance(given, list) else ({token: bias} for token, bias in given.items())
    for member, pair in zip(members, pairs, strict=True):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if is_pair and isinstance(pair[0], str):
            raise unsupported("logit_bias", "a bias of a text")
        if not is_pair or pair[0] is None or not fits(_ID, pair[0]) or not fits(_BIAS_OR_BAN, pair[1]):
            allowed = f"{wanted(_ID)} and {wanted(_BIAS_OR_BAN)}"
            raise ApiError(f"logit_bias has pairs of {allowed}, not {json.dumps(member)[:40]}", param="logit_bias")
    return {int(token): BIASES.least if bias is False else bias for token, bias in pairs} or None


def _id_in(name: str) -> int | str:
    """The number that names an object's member; the name if it is none."""
    return int(name) if re.fullmatch("-?[0-9]{1,40}", name) else name


def _unnamed(given: Any) -> dict[str, float] | None:
    """The fields of Sampling that a list of names, or a text of letters, leaves out: each is off. Raises ApiError."""
    if not isinstance(given, str | list):
        return None
    known = {letter if isinstance(given, str) else name: fields for letter, name, fields in _SAMPLERS}
    named = {_SAME_SAMPLER.get(each, each) for each in given}
    if unknown := named - known.keys():
        raise unsupported("samplers", f"the sampler {min(unknown)[:32]!r}")
    return {field: off for each, fields in known.items() if each not in named for field, off in fields.items()}


def _think(given: bool | str) -> dict[str, Any] | None:
    """Ollama's field: a level switches thinking on too, as many templates have a switch and no levels."""
    if isinstance(given, str):
        return {SWITCH: True, **read_effort(given)} if given else None
    return {SWITCH: given}


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return check_variables(given)
    except InvalidRequestError as error:
        raise ApiError(sentence(error), param="chat_template_kwargs") from None


def _tokens(given: list[float]) -> tuple[int, ...]:
    return tuple(map(int, given))


_refused = partial(refused, apis=ALL)
_ignored = partial(ignored, apis=ALL)


def _length(name: str, apis: tuple[str, ...]) -> Field:
    meaning = "the most tokens of an answer; without it, or with -1, the rest of the context"
    schema = {"anyOf": [{"const": -1}, {**LENGTH, "maximum": MOST_WHOLE}]}
    shown = {"anyOf": [{"type": "null"}, {"const": -1}, LENGTH]}
    return Field(name, schema, meaning, apis, int, "max_tokens", shown)


def _length_or_none(name: str, apis: tuple[str, ...]) -> Field:
    of = "an answer" if apis == ALL else "a completion"
    meaning = f"the most tokens of {of}; 0 reads the prompt alone, -1 is the rest of the context"
    return Field(name, whole(-1, MOST_WHOLE), meaning, apis, int, "max_tokens")


def _variable(name: str, schema: Schema, meaning: str, own: Own) -> Field:
    return Field(name, schema, meaning, CHATS, own, "template_variables", texts=True)


def _drawing(name: str, others: str = "") -> list[Field]:
    return named(f"options.{name} {others}", drawing(name, apis=ALL))


def _form(name: str, schema: Schema, own: Own) -> Field:
    return Field(name, schema, "as in [Structured answers](structured.md#over-http)", ALL, own, sets="form")


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
        _PROMPTS,
        "the text that the answer continues, or its tokens, or several of these",
        COMPLETION,
        _prompts,
        sets="prompts",
        shown={"anyOf": [_PROMPT, _IDS, {**_SEVERAL, "maxItems": MOST_ANSWERS}]},
        required=True,
        texts=True,
    ),
    Field(
        "suffix",
        TEXT,
        "text behind the answer, which fills the hole, as in [Editors](editors.md)",
        COMPLETION,
        lambda given: given or None,
        texts=True,
    ),
    Field("continue_final_message", FLAG, "whether the last message is the assistant's, which is continued", CHATS),
    Field("add_generation_prompt", FLAG, "whether the last message is another's", CHATS),
    _length("options.num_predict", ALL),
    _length("max_completion_tokens", CHATS),
    _length("max_tokens", CHATS),
    _length("max_output_tokens", CHAT),
    _length("max_new_tokens", CHAT),
    _length_or_none("max_tokens", TEXTS),
    _length_or_none("max_completion_tokens", TEXTS),
    _length_or_none("max_output_tokens", TEXTS),
    _length_or_none("max_new_tokens", TEXTS),
    _length_or_none("n_predict", ALL),
    _variable(
        "chat_template_kwargs",
        _VARIABLES,
        "variables of the model's template, as in [Messages](serve.md#messages)",
        _variables,
    ),
    *named("reasoning.effort", _variable("reasoning_effort", TEXT, HOW_LONG, read_effort)),
    # The names of Qwen's, DeepSeek's and GLM's own servers.
    _variable("enable_thinking", FLAG, WHETHER, lambda given: {SWITCH: given}),
    _variable(
        "thinking.type", _THINKING, WHETHER, lambda given: {SWITCH: SWITCHED[given]} if given in SWITCHED else None
    ),
    _variable("think", _EFFORT, HOW_LONG, _think),
    _variable(
        "documents",
        _DOCUMENTS,
        "texts to answer from, where the template reads them",
        lambda given: {DOCUMENTS: given},
    ),
    Field("logprobs", FLAG, "log-probabilities of the answer's tokens", CHAT),
    Field("top_logprobs", _TOP, "how many of the likeliest tokens come with each", CHATS, int),
    Field(
        "logprobs",
        {"anyOf": [{"const": False}, _TOP]},
        "log-probabilities, with this many of the likeliest tokens each, and that of the answer's own",
        COMPLETION,
        _top,
    ),
    Field("echo", FLAG, "whether the answer begins with the prompt", COMPLETION),
    Field(
        "edgespec.heal",
        FLAG,
        "whether a token inside which the prompt ends is completed, as in [Completions](serve.md#completions)",
        COMPLETION,
        sets="heal",
    ),
    Field(
        "tools", OBJECTS, "functions that the model may call, as in [Tools](serve.md#tools)", CHAT, tuple, texts=True
    ),
    Field("tool_choice", CHOICE, "whether the model may call them, or must, or may call some", CHAT, texts=True),
    Field("parallel_tool_calls", FLAG, "whether an answer may have several calls, or the first only", CHATS),
    _form("response_format", RESPONSE_FORMAT, response_format),
    *(_form(name, SCHEMA, asked("schema", name)) for name in ("json_schema", "guided_json")),
    _form("format", SCHEMA, ollama_format),
    _form("structured_outputs", MEMBERS, structured_outputs),
    *(
        _form(name, FORM_TEXT, asked("grammar", name))
        for name in ("grammar", "guided_grammar", "ebnf", "grammar_string")
    ),
    *(_form(name, FORM_TEXT, asked("regex", name)) for name in ("guided_regex", "regex")),
    _form("guided_choice", _CHOICES, asked("choice", "guided_choice")),
    Field("model", TEXT, "the served model, by one of its names", ALL),
    replace(drawing("temperature", apis=ALL), name="options.temperature"),
    temperature(apis=CHATS + COMPLETION),
    *_drawing("top_p"),
    *_drawing("min_p"),
    *_drawing("presence_penalty"),
    *_drawing("frequency_penalty"),
    *_drawing("repeat_penalty", others="repetition_penalty"),
    *_drawing("top_k"),
    Field(
        "samplers",
        {"anyOf": [_CHAIN, {"enum": [False, 0, {}]}]},
        "llama.cpp's names of ways to draw, as a list, or their letters, as a text: others are off; the order is "
        "that of [Sampling](sampling.md)",
        _NOT_INFILL,
        _unnamed,
        shown=_CHAIN,
    ),
    *named(
        "options.repeat_last_n",
        Field(
            "repeat_last_n",
            whole(-1, MOST_WHOLE),
            "the last tokens of the text that penalties look at: 0 for none, -1 for all",
            ALL,
            int,
            sets="sampling.repeat_last_n",
        ),
    ),
    Field(
        "logit_bias",
        {"anyOf": [_OBJECT, _PAIRS]},  # members are read by _biases, which names them
        "numbers that are added to the scores of tokens, by id or in pairs with it; -100, or false, bans one",
        ALL,
        _biases,
        sets="sampling.logit_bias",
        shown=_BIASES,
    ),
    Field("bad_words", _WORDS, "banned words of one token each", ALL, read_stops, texts=True),
    *named(
        "options.seed",
        Field(
            "seed",
            whole(-(SEEDS // 2), SEEDS - 1),
            "gives the same text again; with -1 one is drawn",
            ALL,
            read_seed,
        ),
    ),
    *named(
        "options.stop stop",
        Field("stopping_strings", STOPS, "texts before which the answer ends", ALL, read_stops, "stop", texts=True),
    ),
    Field("stop_token_ids", _TOKENS, "tokens before which the answer ends", ALL, _tokens),
    *named(
        "min_tokens",
        Field(
            "min_new_tokens",
            whole(0, MOST_WHOLE),
            "tokens of the answer before which nothing ends it",
            ALL,
            int,
            sets="min_tokens",
        ),
    ),
    *named(
        "ignore_eos", Field("ban_eos_token", FLAG, "whether the model cannot end the answer", ALL, sets="ignore_eos")
    ),
    *named(
        "n_cmpl",
        Field("n", whole(1, MOST_CHOICES), "how many answers", CHAT + COMPLETION, int, sets="choices"),
    ),
    Field("stream", FLAG, "events in place of one answer", ALL),
    Field("stream_options.include_usage", FLAG, "whether the last event has `usage`", BOTH),
    Field(
        "return_progress",
        FLAG,
        "whether events say how much of the prompt is read, as `prompt_progress`",
        BOTH,
        sets="show_progress",
    ),
    Field(
        "edgespec.tokens",
        FLAG,
        "whether events say who guessed, as in [Guesses](serve.md#guesses)",
        CHAT,
        sets="show_tokens",
    ),
)

_REFUSED = (
    *_refused("grammar_lazy", "a form that begins in the middle of the answer", NO),
    *_refused("grammar_triggers", "a form that begins in the middle of the answer"),
    *_refused("guided_whitespace_pattern", "other blanks in JSON"),
    *_refused("functions", "`tools`, by their old name", apis=CHATS),
    *_refused("function_call", "`tool_choice`, by its old name", {"enum": ["auto", "none"]}, apis=CHATS),
    *_refused("modalities", "other prompts or answers than text", {"enum": [["text"]]}),
    *_refused("audio images image_data width height steps", "other prompts or answers than text"),
    *_refused("web_search_options moderation", "a service of OpenAI"),
    *_refused("best_of", "the best of more answers than `n`", {"enum": [1, True], "description": "1, true or `n`"}),
    *_refused("use_beam_search early_stopping", "the best of several answers", NO),
    *_refused("length_penalty num_beams", "the best of several answers", ONE),
    *_refused("suffix", "text after the answer", {"enum": [""]}, apis=CHATS),
    *_refused("n_indent", "an answer of indented lines", ZERO, apis=_NOT_INFILL),
    *_refused(
        "typical_p options.typical_p typical typ_p tfs_z options.tfs_z guidance_scale",
        "another way to draw tokens",
        ONE,
    ),
    *_refused("dynamic_temperature", "another way to draw tokens", NO),
    *_refused(
        "mirostat mirostat_mode options.mirostat dry_multiplier xtc_probability dynatemp_range top_a epsilon_cutoff "
        "eta_cutoff smoothing_factor no_repeat_ngram_size",
        "another way to draw tokens",
        ZERO,
    ),
    *_refused("top_n_sigma nsigma adaptive_target", "another way to draw tokens", {"enum": [-1, 0]}),
    *_refused("min_keep", "another way to draw tokens", {"enum": [0, 1]}),
    *_refused("logits_processors vllm_xargs watermarking custom_token_bans", "another way to draw tokens"),
    *_refused("penalize_nl options.penalize_newline", "line breaks without penalty", YES),
    *_refused("allowed_token_ids", "an answer of some tokens only"),
    *_refused(
        "thinking_token_budget thinking_budget_tokens reasoning_budget_tokens thinking.budget_tokens thinking_budget",
        "a length of thinking",
        LESS,
    ),
    *_refused("reasoning_control", "a length of thinking", NO),
    *_refused("t_max_predict_ms", "an answer that ends by the clock", {"enum": [-1, 0]}, apis=_NOT_INFILL),
    *_refused("repetition_detection", "an answer that ends when it repeats itself"),
    *_refused("stop_regex", "an answer that ends where a pattern fits"),
    *_refused("lora", "an adapter"),
    *_refused(
        "system system_prompt template context chat_template prompt_embeds generation_prompt chat_format chat_parser",
        "a prompt of another form",
    ),
    *_refused("truncate_prompt_tokens", "a prompt of another form", NO),
    *_refused("add_special_tokens raw", "a chat's prompt of another form", NO, apis=CHATS),
    *_refused("add_special_tokens raw", "a completion's prompt of another form", YES, apis=TEXTS),
    *_refused("continue_final_message", "the rest of the last message", NO, apis=TEXTS),
    *_refused("echo", "an answer that begins with the last message", NO, apis=CHATS + INFILL),
    *_refused("include_stop_str_in_output", "an answer that shows its end", NO),
    *_refused("skip_special_tokens", "an answer that shows control tokens", YES),
    *_refused("include_reasoning", "an answer without its thinking", YES),
    *_refused("reasoning_format", "thinking as part of the answer", {"enum": ["auto", "deepseek"]}),
    *_refused("parse_tool_calls", "calls as part of the answer", YES),
    *_refused(
        "prompt_logprobs return_token_ids return_tokens_as_token_ids return_tokens return_prompt_text "
        "post_sampling_probs",
        "a reply of another form",
        NO,
    ),
    *_refused("n_probs", "a reply of another form", ZERO),
    *_refused("logprobs", "a reply of another form", {"enum": [False, 0]}, apis=INFILL),
    *_refused("n n_cmpl", "several answers", ONE, apis=INFILL),
    *_refused("top_logprobs", "a completion's `logprobs`, by another name", ZERO, apis=TEXTS),
    *_refused("logprob_token_ids _debug_render_only", "a reply of another form"),
    *_refused("kv_transfer_params ec_transfer_params", "caches of other machines"),
)

_IGNORED = (
    *_ignored("user metadata safety_identifier request_id session_id", "who asks, and records of it"),
    *_ignored("store", "who asks, and records of it", apis=BOTH),
    *_ignored("service_tier priority", "the order of requests: the first is answered first"),
    *_ignored(
        "prediction prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt cache_salt "
        "n_cache_reuse id_slot keep_alive",
        "speed: what is kept, and what is guessed",
    ),
    *_ignored(
        "backend_sampling options.num_batch options.num_gpu options.main_gpu options.num_thread options.numa "
        "options.low_vram options.f16_kv options.use_mmap options.use_mlock options.vocab_only options.logits_all "
        "options.embedding_only",
        "the machine, which the server knows",
    ),
    *_ignored(
        "options.num_ctx options.num_keep n_keep n_discard truncate shift truncation_side",
        "a full context: nothing of a prompt is dropped",
    ),
    *_ignored(
        "stream_interval sse_ping_interval timings_per_token verbose "
        "stream_options.include_obfuscation stream_options.continuous_usage_stats",
        "events between the pieces of an answer",
    ),
    *_ignored(
        "xtc_threshold dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "adaptive_decay mirostat_tau options.mirostat_tau mirostat_eta options.mirostat_eta "
        "negative_prompt grammar_type preserved_tokens guided_decoding_backend "
        "reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message "
        "spaces_between_special_tokens media_io_kwargs mm_processor_kwargs return_mm_kwargs",
        "settings of what is refused",
    ),
    *_ignored("verbosity", "a wish for longer or shorter answers"),
    *_ignored("max_length min_length", "lengths that count the prompt in some programs, and not in others"),
    *_ignored("response_fields", "parts of a reply: it has all of them, as llama.cpp's has", apis=_NOT_INFILL),
    *_ignored("return_progress", "events between the pieces of an answer", apis=RESPONSES),
    *_ignored("think parallel_tool_calls", "thinking and calls, which only chats have", apis=TEXTS),
    *_ignored("routed_experts_prompt_start return_token_offsets", "replies of other routes"),
)

FIELDS = (*_REFUSED, *_OBEYED, *_IGNORED)
