"""The fields that programs' APIs for text have, by API here and program: their names, as facts.

Read in November 2026 of: the types of openai 3.57 and anthropic 2.14; vLLM's entrypoints/openai/chat_completion,
completion, responses and anthropic, each protocol.py; tools/server/server-schema.cpp and server-common.cpp of
llama.cpp; api/types.go, anthropic/anthropic.go and docs/api.md of Ollama, and the types of its client 0.6.3; a
request of Codex 0.171. A name with a dot is that of a member of an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPENAI = (
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream "
    "stream_options.include_obfuscation stream_options.include_usage temperature top_p user"
)
_VLLM = (
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty response_format seed stop stream "
    "stream_options.include_usage stream_options.continuous_usage_stats temperature top_p user use_beam_search "
    "top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens "
    "truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens "
    "structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids "
    "routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval echo guided_json "
    "guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern "
    "logits_processors early_stopping best_of"
)
_LLAMA = (
    "verbose timings_per_token stream stream_options.include_usage cache_prompt return_tokens return_progress "
    "sse_ping_interval n_predict max_completion_tokens max_tokens n_indent n_keep n_discard n_cmpl n "
    "n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability xtc_threshold "
    "typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty "
    "presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
    "mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs logprobs min_keep "
    "backend_sampling post_sampling_probs lora json_schema grammar grammar_lazy grammar_triggers grammar_type "
    "preserved_tokens chat_format reasoning_format generation_prompt parse_tool_calls chat_parser "
    "continue_final_message echo reasoning_control reasoning_budget_tokens reasoning_budget_start_tag "
    "reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message logit_bias ignore_eos stop "
    "samplers id_slot response_format system_prompt image_data penalize_nl tfs_z"
)
_LLAMA_CHAT = (
    "parallel_tool_calls add_generation_prompt chat_template_kwargs thinking_budget_tokens top_logprobs modalities "
    "reasoning_effort"
)
_OLLAMA = (
    "model stream format keep_alive options think truncate shift _debug_render_only logprobs top_logprobs "
    "options.num_keep options.seed options.num_predict options.top_k options.top_p options.min_p options.tfs_z "
    "options.typical_p options.repeat_last_n options.temperature options.repeat_penalty options.presence_penalty "
    "options.frequency_penalty options.mirostat options.mirostat_tau options.mirostat_eta "
    "options.penalize_newline options.stop options.numa options.num_ctx options.num_batch options.num_gpu "
    "options.main_gpu options.low_vram options.f16_kv options.logits_all options.vocab_only options.use_mmap "
    "options.use_mlock options.num_thread options.embedding_only"
)
_OLLAMA_GENERATE = f"{_OLLAMA} prompt suffix system template context raw images width height steps"
_OPENAI_RESPONSES = (
    "access_programs background background_options context_management conversation image include input "
    "instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls "
    "previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning.context reasoning.effort reasoning.generate_summary reasoning.mode reasoning.summary "
    "safety_identifier service_tier store stream stream_options.include_obfuscation temperature text.format "
    "text.verbosity tool_choice tools top_logprobs top_p truncation user"
)
_VLLM_RESPONSES = (
    "background include input instructions max_output_tokens max_tool_calls metadata model logit_bias "
    "parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text "
    "tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens "
    "include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt "
    "enable_response_messages previous_input_messages previous_response structured_outputs "
    "repetition_penalty seed stop ignore_eos vllm_xargs"
)
_OLLAMA_RESPONSES = (
    "model background conversation include input instructions max_output_tokens reasoning temperature text "
    "tool_choice tools top_p truncation stream"
)

_ANTHROPIC = (
    "model messages max_tokens system metadata stop_sequences stream temperature top_k top_p tools tool_choice "
    "thinking.type"
)

# A request of each API, with what it requires.
_HI = [{"role": "user", "content": "hi"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "chat": {"messages": _HI},
    "completion": {"prompt": "hi"},
    "infill": {"input_prefix": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": _HI},
    "ollama-chat": {"messages": _HI},
    "ollama-generate": {"prompt": "hi"},
}

API_FIELDS: Mapping[str, Mapping[str, list[str]]] = {
    "chat": {
        "OpenAI": (
            f"{_OPENAI} audio function_call functions max_completion_tokens messages metadata modalities moderation "
            "parallel_tool_calls prediction prompt_cache_key prompt_cache_options prompt_cache_retention "
            "reasoning_effort response_format safety_identifier service_tier store tool_choice tools top_logprobs "
            "verbosity web_search_options"
        ).split(),
        "vLLM": (
            f"{_VLLM} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort "
            "include_reasoning parallel_tool_calls add_generation_prompt continue_final_message chat_template "
            "chat_template_kwargs documents media_io_kwargs mm_processor_kwargs return_prompt_text"
        ).split(),
        "llama.cpp": (f"{_LLAMA} {_LLAMA_CHAT} messages tools tool_choice").split(),
        "Ollama": f"{_OLLAMA} messages tools reasoning_effort reasoning.effort".split(),
    },
    "completion": {
        "OpenAI": f"{_OPENAI} best_of echo prompt suffix".split(),
        "vLLM": f"{_VLLM} prompt suffix prompt_embeds".split(),
        "llama.cpp": f"{_LLAMA} prompt".split(),
        "Ollama": _OLLAMA_GENERATE.split(),
    },
    "infill": {
        "llama.cpp": f"{_LLAMA} prompt input_prefix input_suffix input_extra".split(),
        "llama.vim": ["t_max_prompt_ms"],
    },
    "responses": {
        "OpenAI": _OPENAI_RESPONSES.split(),
        "Codex": ["client_metadata"],
        "vLLM": _VLLM_RESPONSES.split(),
        "llama.cpp": f"{_LLAMA} {_LLAMA_CHAT} input instructions max_output_tokens tools tool_choice".split(),
        "Ollama": _OLLAMA_RESPONSES.split(),
    },
    "messages": {
        "Anthropic": (
            f"{_ANTHROPIC} cache_control container diagnostics inference_geo output_config.effort "
            "output_config.format service_tier speed thinking.budget_tokens thinking.display "
            "tool_choice.disable_parallel_tool_use user_profile_id workspace_id betas billing_policy "
            "compaction context_management fallback_credit_token fallbacks mcp_servers thread output_format"
        ).split(),
        "vLLM": _ANTHROPIC.split(),
        "Ollama": f"{_ANTHROPIC} output_config.effort".split(),
    },
    "ollama-chat": {"Ollama": f"{_OLLAMA} messages tools".split()},
    "ollama-generate": {"Ollama": _OLLAMA_GENERATE.split()},
}
# Clients send these to any server: fields of SGLang, koboldcpp, text-generation-webui and transformers, and settings
# of Qwen's and GLM's own servers.
OTHER_FIELDS = [
    *("top_a", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "no_repeat_ngram_size"),
    *("thinking.budget_tokens", "thinking_budget"),
    *("max_new_tokens", "max_length", "max_output_tokens", "min_new_tokens", "min_length", "regex", "ebnf"),
    *("grammar_string", "num_beams"),
    *("stopping_strings", "stop_regex", "ban_eos_token", "custom_token_bans", "negative_prompt", "guidance_scale"),
    *("mirostat_mode", "typical", "typ_p", "nsigma", "dynamic_temperature"),
]
