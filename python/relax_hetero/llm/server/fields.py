"""Fields of requests that other servers support, and the neutral values that change nothing.

A request is refused if it has a field of `NEUTRAL_VALUES` that its endpoint does not support (see `CompletionBody` and
`ChatBody`), with a value other than null and its row's: ignoring it silently would give a wrong answer. Fields without
a row are ignored. The rows have the names of OpenAI, vLLM, SGLang, the server of llama.cpp, Ollama,
text-generation-inference and text-generation-webui.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .api_errors import ApiError


def _rows(*rows: tuple[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Neutral values by name; names in a row are separated by spaces."""
    return {name: neutral for names, neutral in rows for name in names.split()}


NEUTRAL_VALUES = _rows(
    # Structured outputs.
    ("grammar_string stop_regex", ("",)),
    ("guided_whitespace_pattern response_schema grammar_type structural_tag guideline", ()),
    ("format", ("", "text")),
    ("grammar_lazy", (False,)),
    ("grammar_triggers preserved_tokens", ([],)),
    ("modalities", (["text"],)),
    ("audio search_parameters web_search_options prompt_mode", ()),
    ("verbosity", ("medium",)),
    ("safe_prompt raw_output", (False,)),
    ("safety_model", ("",)),
    ("plugins transforms", ([],)),
    # Tools.
    ("tools functions", ([],)),
    ("tool_choice function_call", ("none",)),
    ("tool_prompt", ("",)),
    # Reasoning.
    ("enable_thinking think thinking reasoning reasoning_effort", ()),
    ("reasoning_budget thinking_budget thinking_budget_tokens max_thinking_tokens", (-1,)),
    ("reasoning_format", ("none", "auto")),
    ("include_reasoning separate_reasoning stream_reasoning", (True,)),
    ("thinking_forced_open", (False,)),
    # Prompts and templates.
    ("prompt suffix input_prefix input_suffix system system_prompt preamble negative_prompt", ("",)),
    ("prefix", ("", False)),
    ("messages documents context images input_extra", ([],)),
    ("instructions template chat_template instruction_template instruction_template_str", ("",)),
    ("chat_template_kwargs mm_processor_kwargs vllm_xargs extra_body options parameters sampling_params", ({},)),
    ("input inputs input_ids input_embeds prompt_embeds prompt_token_ids", ()),
    ("image_data video_data audio_data multi_modal_data multimodal_data", ([], {})),
    ("add_generation_prompt add_special_tokens add_bos_token", (True,)),
    ("continue_final_message continue_ raw token_healing", (False,)),
    ("truncate truncate_prompt_tokens prompt_truncate_len prompt_truncate_length num_ctx truncation_length", ()),
    ("truncation", ("disabled",)),
    ("context_length_exceeded_behavior", ("error",)),
    ("lora adapters", ([],)),
    ("lora_path lora_request adapter adapter_id", ("",)),
    # The end of a text.
    ("n_predict num_predict max_completion_tokens max_new_tokens max_length max_time", ()),
    ("min_new_tokens min_length n_indent", (0,)),
    ("t_max_predict_ms t_max_prompt_ms", (0, -1)),
    ("stop_sequences stop_strings stop_words", ([],)),
    ("include_stop_str_in_output no_stop_trim ban_eos_token", (False,)),
    # Allowed tokens.
    ("bad_words bad_words_ids banned_tokens logits_processors sequence_bias", ([],)),
    ("custom_token_bans", ("",)),
    ("allowed_token_ids custom_logit_processor custom_params force_words_ids", ()),
    # Sampling.
    ("repeat_penalty penalty_repeat encoder_repetition_penalty guidance_scale cfg_scale", (1,)),
    ("repeat_last_n", (64, -1)),
    ("repetition_penalty_range no_repeat_ngram_size penalty_alpha", (0,)),
    ("penalize_nl", (True,)),
    ("mirostat mirostat_mode", (0,)),
    ("mirostat_tau", (5,)),
    ("mirostat_eta", (0.1,)),
    ("dry_multiplier xtc_probability dynatemp_range top_a smoothing_factor epsilon_cutoff eta_cutoff min_keep", (0,)),
    ("dry_base", (1.75,)),
    ("dry_allowed_length", (2,)),
    ("dry_penalty_last_n", (-1,)),
    ("dry_sequence_breakers", (["\n", ":", '"', "*"],)),
    ("xtc_threshold", (0.1,)),
    ("dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve tfs tfs_z typical_p typical typ_p", (1,)),
    ("top_n_sigma nsigma", (-1, 0)),
    ("adaptive_target", (-1,)),
    ("adaptive_decay", (0.9,)),
    ("samplers sampler_seq sampler_order sampler_priority random_seed", ()),
    ("dynamic_temperature temperature_last watermark", (False,)),
    ("do_sample", (True,)),
    # Beam search and best-of.
    ("best_of num_return_sequences num_beams beam_width length_penalty", (1,)),
    ("use_beam_search early_stopping", (False,)),
    # Further content of an answer.
    ("echo return_full_text return_logprob return_tokens return_token_ids return_tokens_as_token_ids", (False,)),
    ("return_hidden_states return_routed_experts post_sampling_probs decoder_input_details details", (False,)),
    ("n_probs top_logprobs top_logprobs_num top_n_tokens echo_last", (0,)),
    ("logprob_start_len", (-1,)),
    ("prompt_logprobs token_ids_logprob logprob_token_ids", ()),
    ("response_fields", ([],)),
    ("skip_special_tokens detokenize", (True,)),
)

NEUTRAL_STREAM_VALUES = _rows(("continuous_usage_stats", (False,)))  # fields of ``stream_options``

NEUTRAL_MESSAGE_VALUES = _rows(
    ("name function_call audio", ("",)), ("tool_calls images videos", ([],)), ("prefix partial continue", (False,))
)
"""Fields of messages; fields that the template uses are not refused."""

_SUGGESTIONS = {
    **dict.fromkeys(("n_predict", "num_predict", "max_completion_tokens", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat"), "repetition_penalty"),
    **dict.fromkeys(("system", "system_prompt", "preamble", "instructions"), "a message of the role system"),
    **dict.fromkeys(
        ("enable_thinking", "think", "thinking", "reasoning", "reasoning_effort"),
        "chat_template_kwargs, where the model's template knows such a switch",
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("grammar_string", "response_schema", "format"), "response_format or structured_outputs"),
    "functions": "tools",
    "function_call": "tool_choice",
    "prompt_logprobs": "echo and logprobs",
    "random_seed": "seed",
    "num_ctx": "the server's option --context",
    "do_sample": "temperature: 0",
    "n_probs": "logprobs",
    "return_logprob": "logprobs",
    "top_logprobs": "logprobs",
}


def is_neutral(name: str, value: Any, rows: Mapping[str, tuple[Any, ...]]) -> bool:
    """True if a field with this value changes nothing."""
    return value is None or name not in rows or value in rows[name]


def refuse_unsupported_fields(fields: Mapping[str, Any], rows: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise ApiError for the first unsupported field that does not have a neutral value.

    `fields`: fields that the endpoint does not support; `rows`: neutral values by field, such as `NEUTRAL_VALUES`;
    `prefix`: prefix of the names in errors, such as ``stream_options.``.
    """
    for name, value in fields.items():
        if not is_neutral(name, value, rows):
            neutral = "".join(f" or {json.dumps(each)}" for each in rows[name])
            suggestion = f"; use {_SUGGESTIONS[name]}" if name in _SUGGESTIONS else ""
            problem = f"found {json.dumps(value):.80}, which this server does not support"
            raise ApiError(400, f"{prefix}{name}: {problem}, expected null{neutral}{suggestion}", prefix + name)
