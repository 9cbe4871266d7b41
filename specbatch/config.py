"""The configuration: a frozen, strict schema read once from YAML and `--set a.b=c`.

Only `cli`, `pipeline`, `evals` and `engine/build.py` import this module; below them, constructors take plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specbatch.types import SamplingParams


@dataclass(frozen=True)
class ModelSection:
    target: str = "builtin:smollm2-135m-instruct"  # directory, hub id, .gguf file or builtin:NAME
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"  # auto: float32 on CPU


@dataclass(frozen=True)
class NgramSection:
    min_match: int = 2  # shortest suffix to look up, tokens
    max_match: int = 5  # longest suffix to look up, tokens


@dataclass(frozen=True)
class SpeculationSection:
    method: Literal["none", "ngram", "draft_model", "eagle", "eagle3"] = "ngram"
    draft: str | None = None  # like model.target; needed by draft_model, eagle and eagle3
    num_steps: int | None = None  # depth of drafting; None: decided with num_draft_tokens
    topk: int = 1  # branches kept at each step; 1 = chain
    num_draft_tokens: int | None = None  # nodes verified in a round, root included
    ngram: NgramSection = field(default_factory=NgramSection)


@dataclass(frozen=True)
class EngineSection:
    device: str = "auto"
    attention: Literal["auto", "torch"] = "auto"
    max_batch_size: int = 16
    page_size: int = 16  # tokens in a KV page
    kv_cache_tokens: int | None = None  # None: from memory_fraction
    memory_fraction: float = 0.5  # of the free memory, for the KV cache, where kv_cache_tokens is not given
    prefix_cache: bool = True
    prefill_chunk_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class DataSection:
    prompt_template: str | None = None  # "Q: {question}\nA:", filled from the row's columns
    prompt_column: str | None = None  # the column that holds the prompt, where it is not `prompt`
    split: str = "train"  # of a hub data set
    subset: str | None = None  # of a hub data set
    chat_template: str | None = None  # a Jinja template (or the path of one) instead of the model's own
    system_prompt: str | None = None  # put before `messages` that have no system message, and before prompts run as chat
    prompts_as_chat: bool = False  # run {"prompt": ...} as one user message through the chat template


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    engine: EngineSection = field(default_factory=EngineSection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    data: DataSection = field(default_factory=DataSection)
