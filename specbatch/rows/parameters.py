"""Parameters of other engines that are not implemented here: refused if they would change the output.

The names are those of OpenAI's chat completions and completions, of vLLM (SamplingParams and its extra request fields),
SGLang (sampling_params and request fields), TensorRT-LLM (SamplingParams), Text Generation Inference, and transformers
(GenerationConfig). Parameters that change no output are left out: users, priorities, caching, streaming intervals.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specbatch.errors import RowError
from specbatch.rows.chat_fields import CHAT_FIELDS
from specbatch.types import SamplingParams

SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__)
# Other engines' names for a sampling field of the same meaning.
ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
}
SAMPLING_NAMES = {**{name: name for name in SAMPLING_FIELDS}, **ALIASES}  # -> the field

# (values that change nothing, names). null changes nothing in every case. A type means all of its values: engines that
# have the parameter do not take them, so they are data that happens to have this name.
_BY_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        """
        exponential_decay_length_penalty repetition_detection embedding_bias dola_layers watermarking_config
        custom_logit_processor forced_bos_token_id forced_eos_token_id trace_decode_token_ids
        top_h top_p_min top_p_reset_ids sampling_seed beam_width_array
        max_length max_output_tokens max_time eos_token_id end_id truncate_prompt_tokens
        json_schema ebnf structural_tag structured_outputs
        guided_decoding guided_json guided_regex guided_choice guided_grammar
        web_search_options enable_thinking thinking_budget max_thinking_tokens verbosity
        system chat_template input_ids input_embeds prompt_embeds image_data video_data audio_data multi_modal_data
        mm_processor_kwargs lora_path lora_id lora_name lora_request adapter_id adapter_path
        prompt_logprob_token_ids logprob_token_ids
        """,
    ),
    ((), "add_special_tokens"),  # true for text and false for chats: no value is neutral for both
    (
        (0,),
        """
        diversity_penalty beam_search_diversity_rate penalty_alpha
        no_repeat_ngram_size encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
        min_length top_logprobs top_logprobs_num top_n_tokens
        """,
    ),
    (
        (1,),
        """
        encoder_repetition_penalty guidance_scale typical_p top_p_decay
        num_beams num_beam_groups beam_width best_of num_return_sequences
        """,
    ),
    ((0, 1), "length_penalty"),
    ((-1,), "thinking_token_budget"),
    (
        (False,),
        """
        remove_invalid_values renormalize_logits watermark watermarking apply_batched_logits_processor token_healing
        use_beam_search require_reasoning
        echo continue_final_message stream
        return_logprob flat_logprobs return_tokens_as_token_ids return_token_ids return_prompt_token_ids
        return_prompt_text return_full_text return_hidden_states return_entropy
        return_context_logits return_generation_logits
        output_scores output_logits output_attentions output_hidden_states
        """,
    ),
    (
        (True,),
        "include_reasoning add_generation_prompt detokenize skip_special_tokens exclude_input_from_output",
    ),
    (
        ([],),
        """
        logits_processor logits_processors logit_processors bad_words_ids bad_token_ids
        suppress_tokens begin_suppress_tokens force_words_ids stop_sequences stop_strings
        functions token_ids_logprob additional_model_outputs
        """,
    ),
    (
        ({},),
        "custom_params extra_args vllm_xargs sampling_params session_params",
    ),
    (({}, []), "sequence_bias"),
    (([], "", bool), "bad"),
    (([], ""), "stop_regex"),
    (("",), "suffix"),
    ((str, bool), "truncate"),
    ((str,), "reasoning"),
    (
        ([], {}, "", False),
        "lora loras adapter adapters image images image_url image_urls video videos video_url audio audios audio_url",
    ),
    (([], str), "documents"),
    ((["text"],), "modalities"),
    (("none", "auto"), "function_call"),
)
UNSUPPORTED = {name: values for values, names in _BY_NEUTRAL_VALUES for name in names.split()}
_INSTEAD = {
    "sampling_seed": "seed",
    "sampling_params": "these fields of the row itself",
    "num_return_sequences": "n",
    "max_length": "max_tokens, which does not count the prompt",
    "max_output_tokens": "max_tokens",
    "eos_token_id": "stop_token_ids",
    "end_id": "stop_token_ids",
    "bad_words_ids": "bad_words, texts",
    "min_length": "min_tokens, which does not count the prompt",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "top_logprobs": "logprobs, a number",
    "top_logprobs_num": "logprobs, a number",
    "top_n_tokens": "logprobs, a number",
    "return_logprob": "logprobs, a number",
    "json_schema": "response_format",
    "ebnf": "grammar",
    "structural_tag": "grammar",
    "structured_outputs": "response_format, regex, choice or grammar",
    "guided_decoding": "response_format, regex, choice or grammar",
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "system": "messages, or data.system_prompt of the configuration",
    "input_ids": "prompt_token_ids",
    "chat_template": "data.chat_template of the configuration",
    "enable_thinking": "chat_template_kwargs: {enable_thinking: ...}",
    "reasoning": "reasoning_effort",
    "functions": "tools",
    "function_call": "tool_choice",
}
PROMPTS = ("prompt", "messages", "prompt_token_ids")
KNOWN_NAMES = (*SAMPLING_NAMES, *CHAT_FIELDS, *UNSUPPORTED, "do_sample", *PROMPTS)
MAX_NAME_CHARS = 60  # characters of a name that are compared and shown
_MIN_SIMILARITY = 0.82  # difflib's ratio: `temprature` and `topk` are similar to a parameter, `topic` is not


def refuse_unsupported(row: Mapping[str, Any], params: SamplingParams, as_data: str) -> None:
    """Raises RowError for a parameter that would change the output and is not implemented. `params`: the row's.
    `as_data`: what to do with a field that is only data."""
    given = row.keys() & UNSUPPORTED.keys()
    # The order of a set differs from process to process, and errors are bytes of the file.
    for name in sorted(given):
        value = row[name]
        if value is not None and not _is_one_of(value, UNSUPPORTED[name]):
            instead = f"use {_INSTEAD[name]}; " if name in _INSTEAD else ""
            raise RowError("unsupported_parameter", f"{name} is not supported; {instead}if it is only data, {as_data}")
    sample = row.get("do_sample")
    if sample is not None and sample is not (params.temperature > 0):
        raise RowError("unsupported_parameter", "do_sample is not supported; use temperature, where 0 is greedy")


def meant_by(name: str, known: Iterable[str] = KNOWN_NAMES) -> str | None:
    """The known parameter that `name` is probably a misspelling of, or None."""
    plain = name[:MAX_NAME_CHARS].lower().replace("-", "_")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=_MIN_SIMILARITY)
    return near[0] if near else None


def bare_name(model: str) -> str:
    """A model's name without its origin: org/Name, ./Name.gguf and builtin:name are equal."""
    return model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].lower().removesuffix(".gguf")


def shown_name(name: str) -> str:
    """The name of a field, safe to print: names come from the input."""
    name = name[:MAX_NAME_CHARS]
    return name if name.isprintable() else repr(name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: False == 0, but a bool is not a penalty.
    return any(
        type(value) is v if isinstance(v, type) else value == v and isinstance(value, bool) == isinstance(v, bool)
        for v in neutral
    )
