"""Decides the options of rows that depend on the model's files: sampling options that are left out, and whether prompts
run as chat.

The model's `generation_config.json` has defaults for some sampling options. It is read as transformers' `generate`
reads it, but for defaults that the file does not have (`top_k` 50 of transformers): those are of `sampling`. vLLM reads
the same keys, and no `do_sample`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from specbatch.config import OF_GENERATION_CONFIG, Config, DataSection, sampling_value
from specbatch.errors import ConfigError, FieldError, ModelError, shown
from specbatch.models.checks import first_names, flag, is_one_of
from specbatch.types import SamplingParams

if TYPE_CHECKING:  # commands find mistakes in their input before they import torch
    from specbatch.models.formats.checkpoint import Checkpoint

_FILE = "generation_config.json"
_HINT = "--set model.generation_config=none runs without the sampling options of the model"
# Read only where `do_sample` is true, with the values under which they do nothing.
_OF_SAMPLING: Mapping[str, tuple[Any, ...]] = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1, 50), "min_p": (0,)}
# Values under which other keys do nothing. null, false and what is empty do nothing in each case.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "max_length": (20,),  # transformers' default
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
}
# Names, versions, beams, caches, drafts, what else is returned: no text of one sequence depends on them.
_HARMLESS_NAMES = """
    do_sample eos_token_id bos_token_id pad_token_id decoder_start_token_id
    transformers_version _from_model_config _commit_hash trust_remote_code
    use_cache cache_implementation cache_config max_cache_len low_memory compile_config disable_compile
    prefill_chunk_size continuous_batching_config
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    early_stopping length_penalty renormalize_logits remove_invalid_values
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    use_mtp speculation_type
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


def resolve_sampling(config: Config, target: Checkpoint, notes: list[str]) -> SamplingParams:
    """The options of `sampling`. Those that were not given are the model's. A note names them, and another one what the
    model has and is not used. Raises ModelError for values that are wrong."""
    if config.model.generation_config == "none" or not target.generation_config:
        return config.sampling
    file = {key: value for key, value in target.generation_config.items() if not is_one_of(value, _EMPTY)}
    samples = flag(file.get("do_sample", False), f"{_FILE}: do_sample")
    usual = SamplingParams()
    given = config.given_sampling | {
        f.name for f in fields(usual) if getattr(config.sampling, f.name) != getattr(usual, f.name)
    }
    values: dict[str, Any] = {"temperature": 1.0} if samples and "temperature" not in given else {}
    unread, unsupported = [], []
    for key, value in file.items():
        name = OF_GENERATION_CONFIG.get(key)
        if key in _OF_SAMPLING and not samples:
            if not is_one_of(value, _OF_SAMPLING[key]):
                unread.append(f"{key} {shown(value)}")
        elif name is None:
            if key not in _HARMLESS and not is_one_of(value, _NEUTRAL.get(key, ())):
                unsupported.append(f"{key} {shown(value)}")
        elif name not in given:
            values[name] = _value(key, name, value)
    try:
        sampling = replace(config.sampling, **values)
    except FieldError as error:
        raise ModelError(f"{_FILE} of the model and the options do not fit: {error.message}", hint=_HINT) from error
    taken = [f"{name} {shown(value)}" for name, value in values.items() if value != getattr(usual, name)]
    if taken:
        notes.append(f"sampling: {', '.join(taken)} ({_FILE} of the model; model.generation_config: none turns it off)")
    if unread:
        notes.append(f"model.generation_config: not used, because do_sample is not true: {first_names(unread)}")
    if unsupported:
        notes.append(f"model.generation_config: not supported, so not used: {first_names(unsupported, limit=20)}")
    return sampling


def _value(key: str, name: str, value: Any) -> Any:
    """Return the value in the form that the `sampling` options have."""
    if key == "top_k" and value == -1:  # vLLM writes -1 for off.
        value = 0
    if isinstance(value, float) and value.is_integer() and isinstance(getattr(SamplingParams(), name), int):
        value = int(value)
    try:
        return sampling_value(name, value, f"{_FILE} of the model: {key}")
    except FieldError as error:
        raise ModelError(error.message, hint=_HINT) from error


def has_chat_template(data: DataSection, tokenizer: Any) -> bool:
    """Return whether chats can be written, with the configuration's template or with the model's own."""
    return bool(data.chat_template or getattr(tokenizer, "chat_template", None))


def runs_prompts_as_chat(data: DataSection, tokenizer: Any) -> bool:
    """Return data.prompts_as_chat. If it is not set, it is true if there is a chat template. Raise ConfigError if it is
    set and there is none."""
    has_template = has_chat_template(data, tokenizer)
    if data.prompts_as_chat and not has_template:
        raise ConfigError(
            "data.prompts_as_chat needs a chat template, and the model has none",
            "--set data.prompts_as_chat=false runs prompts as text to continue; or give data.chat_template",
        )
    return has_template if data.prompts_as_chat is None else data.prompts_as_chat


def note_on_prompts(as_chat: bool) -> str:
    """Says what was decided where data.prompts_as_chat was left open."""
    if as_chat:
        return "data.prompts_as_chat: true (the model has a chat template: a prompt is one user message)"
    return "data.prompts_as_chat: false (the model has no chat template: a prompt is text to continue)"
