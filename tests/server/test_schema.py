"""Bodies of requests: what is read, and what is refused with which error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.decoding.sampling import MOST_BIASED
from edgespec.server.errors import ApiError
from edgespec.server.faces.openai import read_chat, read_completion
from edgespec.server.faces.responses import read_responses
from edgespec.server.fields.field import MOST_STOPS
from edgespec.server.fields.openai import MOST_ANSWERS, MOST_CHOICES, MOST_DOCUMENTS
from edgespec.server.fields.table import FIELDS
from edgespec.server.schema import Request
from edgespec.server.strict_json import MOST_NESTING, parse_body
from edgespec.text.conversation.hole import Hole
from edgespec.text.conversation.tools import MOST_TOOLS
from edgespec.text.request_budget import RequestBudget

HI = [{"role": "user", "content": "hi"}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def refused(read: Any, *arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(*arguments)
    assert found.value.message
    return found.value


def result(read: Any, *arguments: Any) -> Any:
    """What was read, or the error of a refusal."""
    try:
        return read(*arguments)
    except ApiError as error:
        return error


def parse(raw: bytes, budget: RequestBudget | None = None) -> dict[str, Any]:
    return parse_body(raw, budget or RequestBudget(4096))


def test_a_chat_without_fields_uses_the_defaults() -> None:
    assert read_chat({"messages": HI}) == Request(messages=({"role": "user", "content": "hi"},))
    found = Request()
    assert (found.choices, found.stream, found.include_usage, found.echo) == (1, False, False, False)
    assert (found.seed, found.stop, found.max_tokens, found.prompt) == (None, (), None, None)
    assert (dict(found.sampling), dict(found.template_variables)) == ({}, {})


def test_every_field_of_a_chat_is_read() -> None:
    body = {
        "messages": HI,
        "model": "tiny",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
        "stop": ["a", "b"],
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "today"},
    }
    found = read_chat(body)
    assert found.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repeat_penalty": 1.1,
    }
    assert (found.seed, found.stop, found.max_tokens, found.choices) == (7, ("a", "b"), 6, 2)
    assert (found.stream, found.include_usage, found.model) == (True, True, "tiny")
    assert found.template_variables == {"enable_thinking": False, "date_string": "today"}
    assert read_chat({"messages": HI, "stop": "x"}).stop == ("x",)


def test_minus_one_means_a_random_seed_and_no_limit() -> None:
    found = read_chat({"messages": HI, "seed": -1, "max_tokens": -1})
    assert (found.seed, found.max_tokens) == (None, None)
    assert read_chat({"messages": HI, "seed": 7.0}).seed == 7
    assert read_chat({"messages": HI, "seed": -2}).seed == 2**64 - 2
    assert read_chat({"messages": HI, "top_k": -1}).sampling == {"top_k": 0}
    assert read_completion({"prompt": "x", "logprobs": False}).logprobs is None
    assert refused(read_completion, {"prompt": "x", "logprobs": True}).param == "logprobs"


@pytest.mark.parametrize(
    "ignored",
    [
        {"user": "someone", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": None, "logit_bias": {}, "logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "functions": None},
        {"something_new": [1, 2, 3]},
        {"prediction": {"type": "content", "content": "x"}, "safety_identifier": "x", "prompt_cache_key": "x"},
        {"keep_alive": "5m", "cache_prompt": False, "options": {"num_ctx": 4096, "num_thread": 8, "unknown": 1}},
        {
            "typical_p": 1.0,
            "mirostat": 0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0,
            "top_a": 0,
        },
        {"mirostat_tau": 5.0, "dry_base": 1.75, "xtc_threshold": 0.1, "options": {"tfs_z": 1.0, "mirostat": 0}},
        {"use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "echo": False, "best_of": 1},
        {"add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True},
        {"stop_token_ids": [], "ignore_eos": False, "bad_words": [], "min_tokens": None, "options": None},
        {
            "grammar": "",
            "json_schema": False,
            "format": "",
            "structured_outputs": {"regex": None},
            "guided_choice": [],
        },
        {"parallel_tool_calls": True, "reasoning_format": "auto", "response_fields": [""], "verbosity": "low"},
        dict.fromkeys(("temperature", "stop", "n", "seed", "stream", "stream_options", "max_tokens", "model")),
    ],
)
def test_fields_without_meaning_for_the_answer_are_ignored(ignored: dict[str, Any]) -> None:
    assert read_chat({"messages": HI, **ignored}) == read_chat({"messages": HI})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("grammar_lazy", True),
        ("grammar_triggers", [{"type": 1, "value": "x"}]),
        ("guided_whitespace_pattern", "x"),
        ("typical_p", 0.1),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("top_a", 0.2),
        ("include_stop_str_in_output", True),
        ("use_beam_search", True),
        ("allowed_token_ids", [1]),
        ("skip_special_tokens", False),
        ("truncate_prompt_tokens", 100),
        ("prompt_logprobs", 0),
        ("echo", True),
        ("function_call", {"name": "f"}),
        ("web_search_options", {"search_context_size": "low"}),
        ("samplers", ["top_k", "infill"]),
        ("samplers", "kpi"),
        ("samplers", ["k"]),
        ("mirostat_mode", 2),
        ("typical", 0.9),
        ("typ_p", 0.9),
        ("nsigma", 1.5),
        ("dynamic_temperature", True),
        ("guidance_scale", 1.5),
        ("guidance_scale", 2),
        ("num_beams", 4),
        ("custom_token_bans", "5,6"),
        ("stop_regex", "a+"),
        ("thinking_token_budget", 100),
        ("thinking_budget", 100),
        ("chat_template", "x"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(field: str, value: Any) -> None:
    error = refused(read_chat, {"messages": HI, field: value})
    assert (error.param, error.code, error.status) == (field, "unsupported_parameter", 400)


def test_a_refusal_says_what_is_supported() -> None:
    said = refused(read_chat, {"messages": HI, "mirostat": 2}).message
    assert said == "mirostat 2 is not supported, only 0 (another way to draw tokens)"
    said = refused(read_chat, {"messages": HI, "functions": [3]}).message
    assert said == "functions [3] is not supported (`tools`, by their old name)"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "warm"),
        ("temperature", True),
        ("top_k", 10**400),
        ("repeat_penalty", 1e-300),
        ("seed", 1.5),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("n", 0),
        ("n", MOST_CHOICES + 1),
        ("stop", 3),
        ("stop", False),
        ("stop", {}),
        ("stop", ["a", 3]),
        ("stop", ["a"] * (MOST_STOPS + 1)),
        ("tools", [{}] * (MOST_TOOLS + 1)),
        ("logit_bias", dict.fromkeys(map(str, range(MOST_BIASED + 1)), 1)),
        ("stop", "a\0"),
        ("stream", "yes"),
        ("stream_options", []),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "many"),
        ("model", 3),
        ("chat_template_kwargs", "x"),
        ("temperature", -1),
        ("temperature", 2.1),
        ("repeat_last_n", -2),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("logit_bias", {"5": 101}),
        ("repetition_penalty", 11),
        ("n_predict", -2),
        ("samplers", {"top_k": 40}),
    ],
)
def test_a_field_of_the_wrong_type_or_size_is_named(field: str, value: Any) -> None:
    error = refused(read_chat, {"messages": HI, field: value})
    assert error.param == field
    assert field in error.message


def test_fields_of_other_servers_mean_the_same_here() -> None:
    assert read_chat({"messages": HI, "repeat_last_n": 64.0}).sampling == {"repeat_last_n": 64}
    both = read_chat({"messages": HI, "repeat_last_n": 64, "options": {"repeat_last_n": 0}})
    assert both.sampling == {"repeat_last_n": 0}
    assert read_chat({"messages": HI, "n_predict": 5}).max_tokens == 5
    assert read_chat({"messages": HI, "n_predict": 5, "max_tokens": 6}).max_tokens == 6
    assert read_chat({"messages": HI, "n_predict": 0}).max_tokens == 0, "the prompt is read for later"
    assert read_completion({"prompt": "x", "n_predict": -1}).max_tokens is None
    assert read_completion({"prompt": "x", "max_tokens": 0}).max_tokens == 0
    assert read_chat({"messages": HI, "top_k": 40.0}).sampling == {"top_k": 40}
    assert read_chat({"messages": HI, "top_k": -1}).sampling == {"top_k": 0}
    assert 0 < read_chat({"messages": HI, "top_p": 0}).sampling["top_p"] < 1e-6
    for name in ("max_new_tokens", "max_output_tokens"):
        assert (
            read_chat({"messages": HI, name: 5}).max_tokens
            == read_completion({"prompt": "x", name: 5}).max_tokens
            == 5
        )
        assert read_chat({"messages": HI, name: 5, "max_tokens": 6}).max_tokens == 6
    assert read_chat({"messages": HI, "min_new_tokens": 5}).min_tokens == 5
    assert read_chat({"messages": HI, "min_new_tokens": 0, "min_tokens": 6}).min_tokens == 6
    assert read_chat({"messages": HI, "stopping_strings": ["a"]}).stop == ("a",)
    assert read_chat({"messages": HI, "stopping_strings": ["a"], "stop": "b"}).stop == ("b",)
    for empty in ([], ""):
        assert read_chat({"messages": HI, "stopping_strings": ["a"], "stop": empty}).stop == ("a",)
    assert read_chat({"messages": HI, "ban_eos_token": True}).ignore_eos
    for name, kind, text in (
        ("regex", "regex", "[0-9]+"),
        ("ebnf", "grammar", 'root ::= "a"'),
        ("grammar_string", "grammar", 'root ::= "a"'),
    ):
        found = read_chat({"messages": HI, name: text}).form
        assert found is not None
        assert (found.form.kind, found.field) == (kind, name)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"max_tokens": 100}, {"max_new_tokens": 0}),
        ({"max_tokens": 100}, {"max_output_tokens": 0}),
        ({"max_tokens": 100}, {"max_new_tokens": "100"}),
        ({"stop": ["a"]}, {"stopping_strings": ["b"] * (MOST_STOPS + 1)}),
    ],
)
def test_a_later_name_of_what_an_earlier_one_sets_is_not_read(first: dict[str, Any], later: dict[str, Any]) -> None:
    assert read_chat({"messages": HI, **first, **later}) == read_chat({"messages": HI, **first})
    assert refused(read_chat, {"messages": HI, **later}).param in later


def test_the_name_of_responses_comes_before_those_of_other_servers() -> None:
    assert read_responses({"input": "hi", "max_output_tokens": 5, "max_new_tokens": 9}).max_tokens == 5
    assert read_responses({"input": "hi", "max_new_tokens": 9}).max_tokens == 9


# What SillyTavern sends to any server where nothing is switched on.
NEUTRAL = {
    "mirostat_mode": 0, "typical": 1, "typical_p": 1, "typ_p": 1, "nsigma": 0, "dynamic_temperature": False,
    "guidance_scale": 1, "negative_prompt": "rude", "custom_token_bans": "", "stop_regex": "", "ban_eos_token": False,
    "num_beams": 1, "grammar_string": "", "stopping_strings": [], "min_length": 9, "max_length": 5,
}  # fmt: skip


def test_settings_of_other_programs_that_are_off_change_nothing() -> None:
    plain = read_chat({"messages": HI})
    assert read_chat({"messages": HI, **NEUTRAL}) == plain


def test_ways_to_draw_that_samplers_leaves_out_are_off() -> None:
    given = {"temperature": 0.1, "min_p": 0.1, "top_p": 0.5, "options": {"top_k": 9}, "presence_penalty": 1}
    no_penalties = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    of_llama_vim = {"temperature": 0.1, "min_p": 0.1, "top_p": 1, "top_k": 0, **no_penalties}
    for named in (["min_p", "temperature"], "mt"):
        assert read_chat({"messages": HI, **given, "samplers": named}).sampling == of_llama_vim
    for without in ([], "", "dyxsa"):
        unscaled = {"temperature": 1, "min_p": 0, "top_p": 1, "top_k": 0, **no_penalties}
        assert read_completion({"prompt": "x", **given, "samplers": without}).sampling == unscaled
    as_given = read_chat({"messages": HI, **given}).sampling
    names = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    by_other_names = ["penalties", "dry", "top_k", "typical_p", "typical", "tfs_z", "top_p", "min_p", "temp"]
    for every in ("edkypmxt", "edkfypmxt", names, by_other_names, False, 0, {}, None):
        assert read_chat({"messages": HI, **given, "samplers": every}).sampling == as_given


def test_the_options_of_ollama_are_those_of_a_request_and_come_first() -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ["x"],
    }
    found = read_chat({"messages": HI, "options": options, "max_tokens": 9, "temperature": 1.0, "stop": "y"})
    assert (found.max_tokens, found.seed, found.stop) == (5, 7, ("x",))
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    assert found.sampling == {name: options[name] for name in names}
    assert read_completion({"prompt": "x", "options": {"num_predict": -1}, "max_tokens": 9}).max_tokens is None
    error = refused(read_chat, {"messages": HI, "options": {"mirostat": 2}})
    assert (error.param, error.code) == ("mirostat", "unsupported_parameter")
    assert refused(read_chat, {"messages": HI, "options": "x"}).param == "options"


def test_the_ends_of_an_answer_are_read() -> None:
    body = {"stop_token_ids": [3, 5.0], "ignore_eos": True, "min_tokens": 4, "bad_words": ["a", ""]}
    found = read_chat({"messages": HI, **body})
    assert (found.stop_token_ids, found.ignore_eos, found.min_tokens, found.bad_words) == ((3, 5), True, 4, ("a",))
    plain = read_chat({"messages": HI})
    assert (plain.stop_token_ids, plain.ignore_eos, plain.min_tokens, plain.bad_words) == ((), False, None, ())
    assert plain.parallel_tool_calls is True
    assert read_chat({"messages": HI, "parallel_tool_calls": False}).parallel_tool_calls is False
    assert read_chat({"messages": HI, "n_cmpl": 2}).choices == 2


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"chat_template_kwargs": {"a": [1, None, {"b": True}]}}, {"a": [1, None, {"b": True}]}),
        ({"chat_template_kwargs": None, "think": None, "documents": None, "reasoning_effort": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"think": True}, {"enable_thinking": True}),
        ({"think": False}, {"enable_thinking": False}),
        ({"think": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none", "think": "high"},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
def test_fields_about_the_template_are_its_variables(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    assert read_chat({"messages": HI, **fields}).template_variables == variables


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"a": "x" * 2**20}),
        ("chat_template_kwargs", {"a": "\0"}),
        ("chat_template_kwargs", ["a"]),
        ("reasoning_effort", 3),
        ("think", 3),
        ("documents", ["a text"]),
        ("documents", [{}] * (MOST_DOCUMENTS + 1)),
    ],
)
def test_variables_that_cannot_be_set_are_refused_by_the_fields_name(field: str, value: Any) -> None:
    assert refused(read_chat, {"messages": HI, field: value}).param == field


def test_a_completion_reads_its_prompts() -> None:
    found = read_completion({"prompt": ["Once"], "echo": True, "best_of": 1, "suffix": ""})
    assert (found.prompt, found.echo, found.is_chat, found.suffix) == ("Once", True, False, None)
    for several, prompts in (
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [4]], ("a", (4,))),
    ):
        found = read_completion({"prompt": several, "n": 2})
        assert [found.of(index).prompt for index in range(found.answers)] == [each for each in prompts for _ in "ab"]
    for wrong in (None, 3, [], "", "a\0b", [""], [[]], [1, "a"], [[1], 2], [-1], [1.5], [True], {}):
        assert refused(read_completion, {"prompt": wrong}).param == "prompt"
    needs = "prompt must be text or a list of at least 1, not"
    assert refused(read_completion, {}).message == f"{needs} null"
    assert refused(read_completion, {"prompt": []}).message == f"{needs} []"
    assert read_completion({"prompt": ["a"] * MOST_ANSWERS}).answers == MOST_ANSWERS
    error = refused(read_completion, {"prompt": ["a"] * (MOST_ANSWERS + 1)})
    assert error.param == "prompt"
    assert "at most 32 prompts in one request" in error.message
    assert "at most 32" in refused(read_completion, {"prompt": ["a"] * 17, "n": 2}).message
    assert refused(read_completion, {"prompt": "a", "best_of": 2}).code == "unsupported_parameter"
    assert refused(read_completion, {"prompt": "a", "best_of": 3, "n": 2}).param == "best_of"
    assert "only 1, true or `n` (" in refused(read_completion, {"prompt": "a", "best_of": 3}).message
    for name in ("n", "n_cmpl"):
        assert read_completion({"prompt": "a", "best_of": 2, name: 2}).choices == 2
    for field, value in (("echo", True), ("suffix", "end")):
        error = refused(read_completion, {"prompt": [1, 2], field: value})
        assert (error.param, error.code) == (field, "unsupported_parameter")
    assert read_completion({"prompt": "a", "suffix": "b"}).hole == Hole("a", "b")
    assert read_completion({"prompt": "", "suffix": "b"}).hole == Hole("", "b")
    for empty in ({"prompt": ""}, {"prompt": ["a", ""]}, {"prompt": "", "suffix": ""}):
        error = refused(read_completion, empty)
        assert (error.param, error.code) == ("prompt", None)
        assert "the prompt is empty" in error.message


def test_log_probabilities_and_bias_are_read() -> None:
    assert read_chat({"messages": HI}).logprobs is None
    assert read_chat({"messages": HI, "logprobs": True}).logprobs == 0
    assert read_chat({"messages": HI, "logprobs": True, "top_logprobs": 20}).logprobs == 20
    assert read_completion({"prompt": "x", "logprobs": 0}).logprobs == 0
    bias = {"5": -100, "17": 2.5}
    assert read_chat({"messages": HI, "logit_bias": bias}).sampling == {"logit_bias": {5: -100, 17: 2.5}}
    assert read_chat({"messages": HI, "logit_bias": {"5": False}}).sampling == {"logit_bias": {5: -100}}
    pairs = [[5, False], [17, 2.5], [17, 3]]
    assert read_chat({"messages": HI, "logit_bias": pairs}).sampling == {"logit_bias": {5: -100, 17: 3}}
    assert read_chat({"messages": HI, "logit_bias": []}).sampling == {}
    assert refused(read_chat, {"messages": HI, "logit_bias": [["Hello", 1]]}).code == "unsupported_parameter"
    for wrong in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}):
        assert refused(read_chat, {"messages": HI, **wrong}).param in wrong
    wrong_pairs = ([1], [[1]], [[1, 2, 3]], [[-1, 2]], [[1.5, 2]], [[1, True]], [[1, 101]], [[True, 1]], [[1, "x"]])
    for wrong in ({"word": 1}, {"-1": 1}, {"1": "x"}, {"1": True}, {"1" * 50: 1}, *wrong_pairs):
        assert refused(read_chat, {"messages": HI, "logit_bias": wrong}).param == "logit_bias"
    pairs_of = (
        "logit_bias has pairs of a whole number from 0 to 999999999 and a number from -100 to 100 or false, not"
    )
    for odd, words in (
        ({"5": -101}, f'{pairs_of} {{"5": -101}}'),
        ({"1": "-100"}, f'{pairs_of} {{"1": "-100"}}'),
        ({"-1": 1}, f'{pairs_of} {{"-1": 1}}'),
        ({"1234567890": 1}, f'{pairs_of} {{"1234567890": 1}}'),
        ([5, -1], f"{pairs_of} 5"),
        ([[None, 1]], f"{pairs_of} [null, 1]"),
        ({"Hello": 1}, "a bias of a text is not supported"),
    ):
        assert refused(read_chat, {"messages": HI, "logit_bias": odd}).message.startswith(words)
    assert refused(read_completion, {"prompt": "x", "echo": True, "logprobs": 1}).param == "echo"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"3",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * (MOST_NESTING + 1) + b"]" * (MOST_NESTING + 1) + b"}",
        b'{"a": ' + b"[" * 100_000,
        b'{"a": "' + b'\\"' * 100_000,
    ],
)
def test_what_is_not_strict_json_is_refused(raw: bytes) -> None:
    assert refused(parse, raw).code == "invalid_json"


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=5), own, max_size=3),
    max_leaves=5,
)


def names_and_values(value: Any) -> int:
    """An object or list counts as four."""
    if isinstance(value, dict):
        return 4 + len(value) + sum(map(names_and_values, value.values()))
    return 4 + sum(map(names_and_values, value)) if isinstance(value, list) else 1


@given(st.dictionaries(st.text(max_size=5), _values), st.sampled_from([None, 1, "\t"]))
def test_every_name_and_value_of_a_body_is_counted(body: dict[str, Any], indent: int | str | None) -> None:
    raw = json.dumps(body, indent=indent, allow_nan=False).encode()
    budget = RequestBudget(4096)
    budget.values = names_and_values(body)
    assert parse(raw, budget) == body
    budget.values -= 1
    assert f"more than {budget.values} names and values, the most for a context of 4096 tokens" in str(
        refused(parse, raw, budget)
    )


def test_brackets_inside_texts_do_not_nest() -> None:
    text = '[{"' * 1000 + "\\"
    assert parse(json.dumps({"a": text, "b": [[]]}).encode()) == {"a": text, "b": [[]]}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda own: st.lists(own), max_leaves=8))
def test_every_json_value_in_a_body_is_read_unchanged(value: Any) -> None:
    assert parse(json.dumps({"value": value}).encode()) == {"value": value}


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_an_api_error(raw: bytes) -> None:
    assert type(result(parse, raw)) in (dict, ApiError)


_names = st.sampled_from([field.name.partition(".")[0] for field in FIELDS])


@given(st.dictionaries(_names, _values))
def test_any_object_gives_a_request_or_an_api_error(body: dict[str, Any]) -> None:
    for read, filled in ((read_chat, {"messages": HI}), (read_completion, {"prompt": "x"})):
        for one in (body, {**body, **filled}):
            assert type(result(read, one)) in (Request, ApiError)


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (r'{"a": "log \ud83d"}', {"a": "log \ufffd"}),
        (
            r'{"a": ["\ude00x", {"\uD83D": 1.5}], "b": 123456789012345678901}',
            {"a": ["\ufffdx", {"\ufffd": 1.5}], "b": 123456789012345678901},
        ),
        (r'{"a": "\ud83d\ud83d\ude00\ude00"}', {"a": "\ufffd\N{GRINNING FACE}\ufffd"}),
        (r'{"a": "\\ud83d"}', {"a": r"\ud83d"}),
    ],
)
def test_half_of_an_emoji_is_read_as_the_replacement_character(raw: str, read: object) -> None:
    assert parse(raw.encode()) == read


def test_names_that_differ_in_halves_of_emojis_are_the_same_name() -> None:
    assert "twice" in refused(parse, rb'{"\ud83d": 1, "\ud83e": 2}').message


def test_a_byte_order_mark_before_a_body_is_skipped() -> None:
    assert parse(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}
