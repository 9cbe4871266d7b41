"""The configuration: a frozen, strict schema read once from YAML and `--set a.b=c`.

Only `cli`, `pipeline`, `evals` and `engine/resolve.py` import this module; below them, constructors take plain values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from specbatch.errors import shown
from specbatch.types import SamplingParams

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64", "fp8_e4m3"]


@dataclass(frozen=True)
class ModelSection:
    target: str = "builtin:smollm2-135m-instruct"  # directory, hub id, .gguf file or builtin:NAME
    dtype: DtypeName = "auto"  # auto: float32 on CPU


@dataclass(frozen=True)
class NgramSection:
    min_match: int = 2  # shortest suffix to look up, tokens
    max_match: int = 5  # longest suffix to look up, tokens


@dataclass(frozen=True)
class ScheduleSection:
    max_batch: int  # for so many running rows at most
    num_steps: int | None = None  # 0: plain decoding
    topk: int = 1
    num_draft_tokens: int | None = None


@dataclass(frozen=True)
class SpeculationSection:
    method: Literal["auto", "none", "ngram", "draft_model", "eagle", "eagle3"] = "auto"
    draft: str | None = None  # like model.target; needed by draft_model, eagle and eagle3
    aux_layers: tuple[int, ...] | None = None  # eagle3: the target's layers whose inputs the head reads; None: decided
    num_steps: int | None = None  # depth of drafting; None: decided with num_draft_tokens
    topk: int = 1  # branches kept at each step; 1 = chain
    num_draft_tokens: int | None = None  # nodes verified in a round, root included
    schedule: tuple[ScheduleSection, ...] | None = None  # the three above by the number of running rows
    simulate_acceptance: float | None = None  # for measurements: tokens committed in a round on average; None: off
    ngram: NgramSection = field(default_factory=NgramSection)


@dataclass(frozen=True)
class EngineSection:
    device: str = "auto"
    attention: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    cuda_graphs: Literal["auto", "round", "phases", "none"] = "auto"
    tuned_products: bool = False  # CUDA: the library's fastest matrix products, measured at the first start
    max_batch_size: int | None = None  # None: decided by the device, like the others here
    page_size: int | None = None  # tokens in a KV page
    kv_dtype: KVDtypeName = "auto"  # of cached keys and values; auto: the model's
    kv_cache_tokens: int | None = None  # None: from memory_fraction
    memory_fraction: float | None = None  # CPU: of the free memory, for the KV cache; CUDA: of all, for everything
    prefix_cache: bool = True
    prefill_chunk_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class DataSection:
    prompt_template: str | None = None  # "Q: {question}\nA:", filled from the row's columns
    prompt_column: str | None = None  # the column that holds the prompt, where it is not `prompt`
    split: str = "train"  # of a hub data set
    subset: str | None = None  # of a hub data set
    chat_template: str | None = None  # a Jinja template (or the path of one) instead of the model's own
    system_prompt: str | None = None  # put before `messages` without a system message, and before prompts run as chat
    prompts_as_chat: bool | None = None  # run {"prompt": ...} as one user message; None: where there is a chat template


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    engine: EngineSection = field(default_factory=EngineSection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    data: DataSection = field(default_factory=DataSection)


class FieldProblem(ValueError):
    """A sampling field has a wrong type (`invalid_type`) or a value out of range (`invalid_value`)."""

    def __init__(self, type: Literal["invalid_type", "invalid_value"], message: str) -> None:
        super().__init__(message)
        self.type = type
        self.message = message


_INT32_MAX = 2**31 - 1  # lengths and counts live in int32 buffers on the device
# Legal ranges of the numeric sampling fields: (type, test, the range in words).
_SAMPLING_RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (int, lambda v: 1 <= v <= _INT32_MAX, ">= 1"),
    "temperature": (float, lambda v: 0 <= v <= 1e4, ">= 0 (0 = greedy)"),
    "top_p": (float, lambda v: 0 < v <= 1, "> 0 and <= 1 (1 = off)"),
    "top_k": (int, lambda v: 0 <= v <= _INT32_MAX, ">= 0 (0 = off)"),
    "min_p": (float, lambda v: 0 <= v <= 1, ">= 0 and <= 1 (0 = off)"),
    "seed": (int, lambda v: 0 <= v < 2**63, ">= 0 and < 2^63"),
    "logprobs": (int, lambda v: 0 <= v <= 20, ">= 0 and <= 20"),
    "n": (int, lambda v: 1 <= v <= 1024, ">= 1 and <= 1024"),
}


def sampling_value(name: str, value: Any) -> Any:
    """`value` as SamplingParams holds it under `name`; one rule for the config and for the overrides of a row.

    Raises FieldProblem. bool is no integer here, and NaN and infinities are out of every range.
    """
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise FieldProblem("invalid_type", f"stop must be text or a list of texts, not {shown(value)}")
        if "" in texts:
            raise FieldProblem("invalid_value", "stop must not hold an empty text, which would match everywhere")
        return tuple(texts)
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple) or not all(type(t) is int for t in value):
            raise FieldProblem("invalid_type", f"stop_token_ids must be a list of integers, not {shown(value)}")
        if any(not 0 <= t <= _INT32_MAX for t in value):
            raise FieldProblem("invalid_value", "stop_token_ids must hold token ids >= 0")
        return tuple(value)
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise FieldProblem("invalid_type", f"ignore_eos must be true or false, not {shown(value)}")
        return value
    kind, legal, words = _SAMPLING_RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else int):
        wanted = "a number" if kind is float else "an integer"
        raise FieldProblem("invalid_type", f"{name} must be {wanted} {words}, not {shown(value)}")
    if (isinstance(value, float) and not math.isfinite(value)) or not legal(value):
        raise FieldProblem("invalid_value", f"{name} must be {words}, not {shown(value)}")
    return kind(value)
