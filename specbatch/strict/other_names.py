"""Names that options have in other tools, for hints: somebody who types one of them means an option here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# vLLM, SGLang, transformers, llama.cpp and OpenAI's API -> the option here.
_OTHER_NAMES = {
    "batch_size": "engine.max_batch_size",
    "max_num_seqs": "engine.max_batch_size",
    "max_running_requests": "engine.max_batch_size",
    "tensor_parallel_size": "engine.tensor_parallel",
    "tp": "engine.tensor_parallel",
    "tp_size": "engine.tensor_parallel",
    "gpu_memory_utilization": "engine.memory_fraction",
    "mem_fraction_static": "engine.memory_fraction",
    "max_num_batched_tokens": "engine.prefill_chunk_tokens",
    "chunked_prefill_size": "engine.prefill_chunk_tokens",
    "context_length": "model.max_model_len",
    "kv_cache_dtype": "engine.kv_dtype",
    "enable_prefix_caching": "engine.prefix_cache",
    "enforce_eager": "engine.cuda_graphs",
    "attention_backend": "engine.attention",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_tokens": "sampling.max_tokens",
    "num_predict": "sampling.max_tokens",
    "temp": "sampling.temperature",
    "repeat_penalty": "sampling.repetition_penalty",
    "stop_sequences": "sampling.stop",
    "json_schema": "sampling.response_format",
    "schema": "sampling.response_format",
    "guided_json": "sampling.response_format",
    "guided_regex": "sampling.regex",
    "guided_choice": "sampling.choice",
    "choices": "sampling.choice",
    "system": "data.system_prompt",
    "template": "data.prompt_template",
    "prompt": "data.prompt_template",
    "column": "data.prompt_column",
    "speculative_model": "speculation.draft",
    "draft_model": "speculation.draft",
    "num_speculative_tokens": "speculation.num_steps",
    "torch_dtype": "model.dtype",
    "lora": "model.adapter",
    "num_workers": "cluster.workers",
}


def option_meant(name: str, paths: Iterable[str], similarity: float = 0.75) -> str | None:
    """Return the path of the option that an unknown name means: that of another tool, or the one whose last part is
    the name or is like it. `paths`: of all options. `similarity`: from 0 to 1, the same name."""
    name = name.replace("-", "_").lower()
    last = {path.rpartition(".")[2]: path for path in reversed(list(paths))}  # The first of two sections has it.
    if (other := _OTHER_NAMES.get(name)) in last.values() and name not in last:
        return other
    near = difflib.get_close_matches(name, last, n=1, cutoff=similarity)
    return last[near[0]] if near else None
