"""Parameters of requests that other engines know and this one does not: refused where they would change the output.

The names are those of OpenAI's chat completions and completions, of vLLM (SamplingParams and its extra request fields),
SGLang (sampling_params and request fields), TensorRT-LLM (SamplingParams), Text Generation Inference, and transformers
(GenerationConfig). Not among them is what changes no output here: who asks, priorities, caching, streaming intervals.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specbatch.errors import RowError
from specbatch.types import SamplingParams

SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__)
# Other engines' names for a sampling field of the same meaning.
ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
SAMPLING_NAMES = {**{name: name for name in SAMPLING_FIELDS}, **ALIASES}  # -> the field

_NEVER: tuple[Any, ...] = ()  # no value is neutral
# Name -> the values that change nothing; null is one of them in every case. A type means all of its values: that
# engine would not take them, so they are data that happens to have this name.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # penalties, and other changes to the logits
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (0, 1),
    "diversity_penalty": (0,),
    "beam_search_diversity_rate": (0,),
    "exponential_decay_length_penalty": _NEVER,
    "repetition_detection": _NEVER,
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    "embedding_bias": _NEVER,
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": _NEVER,
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "watermark": (False,),
    "watermarking": (False,),
    "watermarking_config": _NEVER,
    "logits_processor": ([],),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "custom_logit_processor": _NEVER,
    "custom_params": ({},),
    "apply_batched_logits_processor": (False,),
    "extra_args": ({},),
    "vllm_xargs": ({},),
    # which tokens may come, and which come for certain
    "allowed_token_ids": _NEVER,
    "bad": ([], "", bool),
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "bad_token_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": _NEVER,
    "forced_eos_token_id": _NEVER,
    "trace_decode_token_ids": _NEVER,
    "token_healing": (False,),
    # sampling and search
    "typical_p": (1,),
    "top_h": _NEVER,
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_p_min": _NEVER,
    "top_p_reset_ids": _NEVER,
    "top_p_decay": (1,),
    "sampling_seed": _NEVER,
    "sampling_params": ({},),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "beam_width": (1,),
    "beam_width_array": _NEVER,
    "use_beam_search": (False,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    # lengths and ends
    "max_length": _NEVER,
    "max_output_tokens": _NEVER,
    "max_time": _NEVER,
    "min_length": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "eos_token_id": _NEVER,
    "end_id": _NEVER,
    "stop_sequences": ([],),
    "stop_strings": ([],),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "truncate": (str, bool),
    "truncate_prompt_tokens": _NEVER,
    # structured output
    "response_format": ({"type": "text"},),
    "json_schema": _NEVER,
    "regex": _NEVER,
    "ebnf": _NEVER,
    "grammar": (str,),
    "structural_tag": _NEVER,
    "structured_outputs": _NEVER,
    "guided_decoding": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    # tools, thinking, and what a model writes like
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": _NEVER,
    "reasoning": (str,),
    "reasoning_effort": _NEVER,
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "require_reasoning": (False,),
    "enable_thinking": _NEVER,
    "thinking_budget": _NEVER,
    "thinking_token_budget": (-1,),
    "max_thinking_tokens": _NEVER,
    "verbosity": _NEVER,
    "modalities": (["text"],),
    "audio": (str,),
    # the prompt
    "system": _NEVER,
    "suffix": ("",),
    "echo": (False,),
    "documents": ([], str),
    "chat_template": _NEVER,
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": _NEVER,  # true for text and false for chats: no value is neutral for both
    "input_ids": _NEVER,
    "input_embeds": _NEVER,
    "prompt_embeds": _NEVER,
    "image_data": _NEVER,
    "video_data": _NEVER,
    "audio_data": _NEVER,
    "multi_modal_data": _NEVER,
    "session_params": ({},),
    # the model
    "lora_path": _NEVER,
    "lora_id": _NEVER,
    "lora_name": _NEVER,
    "lora_request": _NEVER,
    "adapter_id": _NEVER,
    # what is returned
    "stream": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "top_logprobs": (0,),
    "top_logprobs_num": (0,),
    "top_n_tokens": (0,),
    "return_logprob": (False,),
    "prompt_logprobs": _NEVER,
    "prompt_logprob_token_ids": _NEVER,
    "logprob_token_ids": _NEVER,
    "token_ids_logprob": ([],),
    "flat_logprobs": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "exclude_input_from_output": (True,),
    "additional_model_outputs": ([],),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
_INSTEAD = {
    "sampling_seed": "seed",
    "sampling_params": "these fields in the row itself",
    "num_return_sequences": "n",
    "max_length": "max_tokens, which does not count the prompt",
    "max_output_tokens": "max_tokens",
    "eos_token_id": "stop_token_ids",
    "end_id": "stop_token_ids",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "top_logprobs": "logprobs, a number",
    "top_logprobs_num": "logprobs, a number",
    "top_n_tokens": "logprobs, a number",
    "return_logprob": "logprobs, a number",
    "system": "messages, or data.system_prompt of the configuration",
    "input_ids": "prompt_token_ids",
    "chat_template": "data.chat_template of the configuration",
    "chat_template_kwargs": "a chat template that says it (data.chat_template)",
    "enable_thinking": "a chat template that says it (data.chat_template)",
}
PROMPTS = ("prompt", "messages", "prompt_token_ids")
KNOWN_NAMES = (*SAMPLING_NAMES, *UNSUPPORTED, "do_sample", *PROMPTS)
LONGEST_NAME = 60  # characters of a name that are looked at and shown
_NEAR = 0.82  # difflib's ratio: `temprature` and `topk` are near, `prompt_id` and `topic` are not


def refuse_unsupported(row: Mapping[str, Any], params: SamplingParams, as_data: str) -> None:
    """Raises RowError for a parameter that would change the output and that is not implemented. `params`: the row's;
    `as_data`: what to do with a field that is only data."""
    given = row.keys() & UNSUPPORTED.keys()
    for name in sorted(given):  # a set's order differs from process to process, and error rows are bytes of the file
        value = row[name]
        if value is not None and not _is_one_of(value, UNSUPPORTED[name]):
            instead = f"use {_INSTEAD[name]}; " if name in _INSTEAD else ""
            raise RowError("unsupported_parameter", f"{name} is not supported; {instead}if it is only data, {as_data}")
    sample = row.get("do_sample")
    if sample is not None and sample is not (params.temperature > 0):
        raise RowError("unsupported_parameter", "do_sample is not supported; temperature decides, and 0 is greedy")


def meant_by(name: str, known: Iterable[str] = KNOWN_NAMES) -> str | None:
    """The known parameter that `name` is probably a slip of the pen for; None where there is none."""
    plain = name[:LONGEST_NAME].lower().replace("-", "_")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=_NEAR)
    return near[0] if near else None


def shown_name(name: str) -> str:
    """The name of a field, as it may be printed: names come from the input."""
    name = name[:LONGEST_NAME]
    return name if name.isprintable() else repr(name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # Strict about type, for False == 0 and a bool is no penalty.
    return any(
        type(value) is v if isinstance(v, type) else value == v and isinstance(value, bool) == isinstance(v, bool)
        for v in neutral
    )
