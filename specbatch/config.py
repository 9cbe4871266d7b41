"""The configuration: a frozen, strict schema read once from YAML and `--set a.b=c`. Descriptions are part of it:
`scripts/write_options.py` makes docs/options.md and the commented default.yaml from them.

Only `cli`, `job`, `evals`, `tune` and `setup/resolve.py` import this module; below them, constructors take plain
values.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from specbatch.errors import FieldError, shown
from specbatch.strict.option import AT_LEAST_0, AT_LEAST_1, SEED, Range, option, required
from specbatch.strict.reader import SWITCHES, Reader, described, join, options_of
from specbatch.types import SamplingParams

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64", "fp8_e4m3"]
AttentionName = Literal["torch", "triton", "flashinfer"]
ABOVE_0 = Range("> 0", lambda v: v > 0)
_STEPS = Range(">= 0 (0 = plain decoding)", lambda v: v >= 0)


@dataclass(frozen=True)
class ModelSection:
    """The model that answers."""

    target: str = option(
        "builtin:smollm2-135m-instruct",
        "A folder in Hugging Face format, a hub id (`org/name`), a `.gguf` file, or `builtin:NAME` "
        "(`specbatch models list`). For measurements without files: `random:NAME`, random weights of a known geometry, "
        "such as `random:llama-3-8b`.",
    )
    dtype: DtypeName = option(
        "auto",
        "In which numbers the model computes. `auto`: float32 on CPU, bfloat16 on CUDA, float16 on GPUs before Ampere.",
    )
    backend: Literal["auto", "native", "transformers"] = option(
        "auto",
        "Whose code computes the target and a draft model. `native`: that of specbatch, for the families of "
        "docs/models.md. `transformers`: the modelling code of transformers with the attention and the cache of "
        "specbatch, for most other decoders. `auto`: native if the family is. The first lines say which it is.",
    )
    quantization: Literal["auto", "none", "fp8", "int4"] = option(
        "auto",
        "`auto`: as the checkpoint is. `none`: quantised weights are dequantised when they are loaded. `fp8` and "
        "`int4`: quantise the linear layers of a checkpoint that is not quantised. Layers in FP8 need CUDA from Ada "
        "on, or run on a CPU, which emulates them. Weights in whole numbers (AWQ, GPTQ, GGUF) stay packed on CUDA with "
        "`int4`, or if they would take more than half of the free memory; otherwise they are dequantised when they are "
        "loaded, because from 64 rows on that is faster. Texts differ from those of `none`.",
    )
    adapter: str | None = option(
        None,
        "A LoRA adapter, named like `target`: a folder that peft wrote. It is merged into the target's weights while "
        "they are loaded.",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "`auto`: sampling options that are left out are those of the model's `generation_config.json`, if it has them. "
        "`none`: they have the defaults below. End-of-sequence tokens are read from it in both cases.",
    )
    max_model_len: int | None = option(
        None,
        "Tokens of the longest row, prompt and output. null: the length that the model was made for. Models with "
        "LongRoPE (Phi-3, Phi-4-mini) compute with other frequencies if this is above their original length.",
        AT_LEAST_1,
    )


# Keys of a generation_config.json -> the options of `sampling` that they are defaults of.
OF_GENERATION_CONFIG: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}


@dataclass(frozen=True)
class NgramSection:
    """The method `ngram`: it finds the last tokens earlier in the text, and proposes what followed them."""

    min_match: int = option(
        2,
        "Shortest run of last tokens to find. `suffix` and `hybrid` read it for the row's own text: at most 12 then.",
        AT_LEAST_1,
    )
    max_match: int = option(5, "Longest run of last tokens to find.", AT_LEAST_1)


@dataclass(frozen=True)
class SuffixSection:
    """The methods `suffix` and `hybrid`: they propose what followed the last tokens in any output of the job."""

    corpus_tokens: int = option(
        1 << 22,
        "Size of the store of outputs, in tokens. New outputs take the room of old ones. 1,000,000 tokens take 32 to "
        "64 MB of the device's memory.",
        Range(">= 1024 and <= 1073741824", lambda v: 1024 <= v <= 1 << 30),
    )
    min_probability: float = option(
        0.3,
        "CPU: a draft ends where the estimated probability that all of it is right is below this. A large batch gains "
        "by a higher value.",
        Range("> 0 and < 1", lambda v: 0 < v < 1),
    )


@dataclass(frozen=True)
class ScheduleSection:
    """The draft shape of batches of up to `max_batch` requests; `num_steps` 0 is plain decoding."""

    max_batch: int = required("For batches of up to this number of requests.", AT_LEAST_1)
    num_steps: int | None = option(None, "As `speculation.num_steps`; 0: plain decoding.", _STEPS)
    topk: int = option(1, "As `speculation.topk`.", AT_LEAST_1)
    num_draft_tokens: int | None = option(None, "As `speculation.num_draft_tokens`.", AT_LEAST_1)


def read_budget(reader: Reader, value: Any, path: str) -> float | str:
    """Read `auto`, `none` or a number of at least 1. It raises FieldError for other values."""
    if value in ("auto", "none"):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise FieldError("invalid_value", f"{path} must be auto, none, a number >= 1 or null, not {shown(value)}")
    return float(value)


MethodName = Literal[
    "auto", "none", "ngram", "suffix", "hybrid", "draft_model", "eagle", "eagle3", "peagle", "block", "mtp"
]


@dataclass(frozen=True)
class SpeculationSection:
    """The drafting of tokens. It changes the speed, not the output."""

    method: MethodName = option(
        "auto",
        "`none`: plain decoding. `ngram`: drafts come from the row's own text, and from its `prediction`. "
        "`suffix`: they come from the outputs of the job's other rows, too. `hybrid`: in each round of a row, those of "
        "`suffix` or of an EAGLE-3 head, whichever is expected to be accepted further. `draft_model`: a smaller model "
        "with the same tokenizer. `eagle`, `eagle3`, `peagle`: a head that was trained for the target. `block`: a "
        "drafter that was trained for the target and drafts a block at once (DFlash, DSpark and others). `mtp`: the "
        "layer for multi-token prediction in the checkpoint of a hybrid (Qwen3.5). `auto`: if heads for the target "
        "come with specbatch (the built-in target), `block` on CUDA, and `eagle3` on a CPU and with `engine.attention: "
        "flashinfer`; else `mtp` if its checkpoint has such a layer, else `ngram`; also `ngram` if most of the first "
        "rows of a file have a `prediction`.",
    )
    draft: str | None = option(
        None,
        "The draft model or head, named like `model.target`. `draft_model`, `eagle`, `eagle3`, `peagle` and `block` "
        "need it; so does `hybrid` if no head for the target comes with specbatch.",
    )
    aux_layers: tuple[int, ...] | None = option(
        None,
        "`eagle3`, `peagle`, `hybrid`: the layers of the target, mostly three, counted from 0, whose inputs the head "
        "reads, such as [2, 16, 29]. null: those that the head's `config.json` names, else [2, L / 2, L - 3] of L "
        "layers.",
    )
    num_steps: int | None = option(
        None,
        "Depth of drafting. null: decided together with `num_draft_tokens` (neural methods: 3, `peagle`: 7, `mtp`: 1, "
        "`block`: the whole block, with the built-in drafter 5, or its `schedule`).",
        AT_LEAST_1,
    )
    topk: int = option(1, "Branches kept at each draft step. 1 drafts a chain, more a tree.", AT_LEAST_1)
    num_draft_tokens: int | None = option(
        None,
        "Nodes that a round verifies, with the root (the last committed token). "
        "null: decided (`ngram`: 6, chain: num_steps + 1, tree: 8, with `block` num_steps + 1 if that is more; "
        "`suffix` and `hybrid`: 32, and on CUDA up to 32, fewer for large batches). With `suffix` and `hybrid` on CUDA "
        "it is the most: the acceptance of the last rounds decides.",
        AT_LEAST_1,
    )
    schedule: tuple[ScheduleSection, ...] | None = option(
        None,
        "The three options above by batch size; `specbatch tune` writes it. A list of {max_batch, num_steps, topk, "
        "num_draft_tokens} by rising max_batch. `num_steps: 0` is plain decoding. The last entry is for larger "
        "batches, too. null: one shape for all; on CUDA the built-in block drafter has a schedule with trees, if the "
        "three options, `verify_budget` and `simulate_acceptance` are left out.",
    )
    verify_budget: float | Literal["auto", "none"] | None = option(
        None,
        "Nodes that a round verifies for each request, on average, with the root; 1 or more. Chains share them by the "
        "estimated probabilities of their drafts: a request without a likely draft verifies its root alone. A block "
        "drafter with a confidence head estimates them by it. Such as 2 with `ngram`. `auto`: measured on CUDA, by the "
        "times of rounds and the drafts that come up; on a CPU as none. none: every request verifies its whole chain. "
        "Rounds with grammars or token rules do so anyway. null: auto with `suffix` and `hybrid`, else none.",
        read=read_budget,
    )
    simulate_acceptance: float | None = option(
        None,
        "For measurements on CUDA only: commit this many tokens per round on average (1 to num_steps + 1), whatever "
        "the drafts are. The texts are not answers then. null: off.",
        AT_LEAST_1,
    )
    ngram: NgramSection = field(default_factory=NgramSection)
    suffix: SuffixSection = field(default_factory=SuffixSection)
    corpus: str | None = option(
        None,
        "`suffix`, `hybrid`: an earlier result file (.jsonl or .jsonl.gz), whose texts are searched from the start, "
        "such as that of the same prompts for another model. null: there is none.",
    )


def read_switch(reader: Reader, value: Any, path: str) -> str:
    """Read `off` and `on`, which YAML reads as false and true, or `auto`. It raises FieldError for other values."""
    value = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    if value not in ("off", "on", "auto"):
        raise FieldError("invalid_value", f"{path} must be off, on or auto, not {shown(value)}")
    return str(value)


@dataclass(frozen=True)
class EngineSection:
    """The device, and how the model runs on it."""

    device: str = option("auto", "`auto`, `cpu`, `cuda`, `cuda:1` ...")
    attention: Literal["auto", AttentionName] = option(
        "auto",
        "How attention is computed. `auto`: triton on CUDA, torch on CPU. flashinfer is a separate package "
        "(`pip install 'specbatch[gpu]'`), for bfloat16 and float16, heads of 64, 128 or 256, and no sliding windows.",
    )
    cuda_graphs: Literal["auto", "round", "none"] = option(
        "auto",
        "`round`: a round is one CUDA graph. `none`: no graphs. "
        "`auto`: `round` with `engine.attention` triton or flashinfer, else `none`. Prompts: `prefill.graphs`.",
    )
    compile: Literal["off", "auto"] = option(
        "off",
        "`auto`: the pieces of `prefill.graphs: piecewise` and `both` are compiled by torch's Inductor, which fuses "
        "operations. Not compiled are layers with quantised weights, with experts, with LayerNorms or without a gate "
        "in the MLP, and those of Gemma, OLMo and GLM-4. `off`: specbatch's own kernels. On a CPU, with other "
        "`prefill.graphs` and with `engine.deterministic`, `auto` is an error.",
    )
    max_batch_size: int | None = option(
        None,
        "Most requests that run together. null: 16 on CPU; 256 on CUDA, with `engine.attention: triton` up to 1024 "
        "(2048 for models of at most a billion parameters) if the KV cache is large enough, fewer if memory is short.",
        AT_LEAST_1,
    )
    page_size: int | None = option(None, "Tokens in a page of the KV cache. null: 16 on CPU, 64 on CUDA.", AT_LEAST_1)
    kv_dtype: KVDtypeName = option(
        "auto",
        "The type of cached keys and values. `auto`: that of the model. `fp8_e4m3` (on a CPU, and on CUDA from Ada on) "
        "takes one byte a value: room for more requests, but some texts differ. The scales of a checkpoint are used.",
    )
    kv_cache_tokens: int | None = option(
        None,
        "Size of the KV cache in tokens. A row that it cannot hold is an error. null: from `memory_fraction`.",
        AT_LEAST_1,
    )
    memory_fraction: float | None = option(
        None,
        "CPU: the share of the free memory for the KV cache; null: 0.5. CUDA: the share of the GPU's free memory for "
        "weights, graphs, working memory and KV cache together; null: 0.9.",
        Range("> 0 and <= 1", lambda v: 0 < v <= 1),
    )
    prefix_cache: bool = option(
        True, "Compute the beginning that several prompts share (few-shot examples, system prompts) once."
    )
    cascade_attention: Literal["off", "on", "auto"] = option(
        "auto",
        "`on`: several requests share a cached beginning, and a round reads it once, not once for each of them. It "
        "needs `engine.attention: triton` and `engine.prefix_cache`, and runs neither with `engine.deterministic` nor "
        "with `engine.two_batch_overlap: on`. Layers with a sliding window do not share. `auto`: on where "
        "the first rows begin alike and a model of costs says that reading once is faster; off on a CPU, and where the "
        "input cannot be read twice.",
        read=read_switch,
    )
    prefill_chunk_tokens: int | None = option(
        None,
        "Most prompt tokens computed in one pass. null: 512 on CPU; 8192 on CUDA, or 32768 on each rank with "
        "`engine.dp_attention`; fewer if memory is short.",
        AT_LEAST_1,
    )
    tensor_parallel: int = option(
        1,
        "Processes that compute the target together. Each has a part of its weights and KV cache. On "
        "CUDA: GPUs of one host that NVLink connects.",
        AT_LEAST_1,
    )
    expert_parallel: Literal["off", "on", "auto"] = option(
        "auto",
        "With `engine.tensor_parallel` and a mixture of experts. `on`: each rank has some of the experts as a whole. "
        "`off`: each rank has a part of every expert. `auto`: on for large batches on CUDA, with "
        "`engine.dp_attention`; else off.",
        read=read_switch,
    )
    dp_attention: Literal["off", "on", "auto"] = option(
        "auto",
        "With `engine.expert_parallel`. `on`: each rank has requests of its own, up to `engine.max_batch_size`, and "
        "computes all of the model for them but the experts, for which tokens travel between ranks. `off`: each rank "
        "has some of the heads, for all requests. `auto`: as `engine.expert_parallel: auto` decides.",
        read=read_switch,
    )
    two_batch_overlap: Literal["off", "on", "auto"] = option(
        "auto",
        "`on`: a round of at least 16 requests, or a prompt chunk of at least 256 tokens (2,048 on CUDA), is computed "
        "as two halves at the same time, so that one computes while the other waits for memory or for another process. "
        "On CUDA it needs `engine.attention: triton`, and does not run with `engine.deterministic`. `auto`: it is "
        "measured at the start, and is on where it gains: with `engine.tensor_parallel` of 2 or 4, for prompts and for "
        "rounds of at least 512 tokens, or with experts for full chunks of prompts and `engine.dp_attention` only; on "
        "one GPU, for models below 1 GB with at most 64 rows at once; with ranks on a CPU, for all sizes. Else it is "
        "off.",
        read=read_switch,
    )
    deterministic: bool = option(
        False,
        "A row's tokens depend on the row only: not on the rows that run with it, and not on the draft method. This "
        "holds for sampled rows, too; their chains are accepted less often. Rounds of rows with grammars wait for the "
        "host. It runs on CUDA in bfloat16 or float16, "
        "with `engine.attention: triton` and without `kv_dtype: fp8_e4m3`, and on a CPU in float32. The kind of "
        "processor or GPU, the versions of torch and triton, and on a CPU the number of threads are part of the job: a "
        "resume with others is refused.",
    )
    seed: int = option(0, "Seeds all sampling. Each row draws from its own stream of random numbers.", SEED)
    # Number of tokens with which prompts begin alike, as the job has counted them; None: not counted.
    shared_tokens: int | None = field(default=None, metadata={"in_file": False})

    @property
    def rows_at_once(self) -> int:
        """Return how many requests run together on all ranks, if `resolve` has decided the options."""
        assert self.max_batch_size is not None, "resolve() decides it"
        return self.max_batch_size * (self.tensor_parallel if self.dp_attention == "on" else 1)


@dataclass(frozen=True)
class PrefillSection:
    """The computation of prompts. It changes the speed; texts can differ by rounding."""

    graphs: Literal["off", "whole", "piecewise", "both", "auto"] = option(
        "auto",
        "CUDA graphs of prompts, for chunks that a GPU computes in less time than launching them takes. `whole`: a "
        "chunk of short prompts is one graph; it needs `engine.cuda_graphs: round` and `engine.attention: triton`. "
        "`piecewise`: of any chunk, the parts between two attentions are a graph each. `both`: whole where the chunk "
        "allows it, else piecewise. `off`: kernels are launched one by one. `auto`: `both` where it is possible, else "
        "`off`.",
    )


def read_variables(reader: Reader, value: Any, path: str) -> Mapping[str, Any]:
    """Read the variables of a chat template. It raises FieldError."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise FieldError("invalid_type", f"{path} must be a mapping of names to values, not {described(value)}")
    for name, item in value.items():
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise FieldError("invalid_type", f"{join(path, name)} is a value that JSON does not have") from exc
        if isinstance(item, str) and item.lower() in SWITCHES:  # a template takes each text for true
            hint = f"write {str(SWITCHES[item.lower()]).lower()}; a row's chat_template_kwargs can hold the text"
            raise FieldError("invalid_value", f"{join(path, name)} is the text {shown(item)}", hint)
    return value


def _day(path: str, value: str) -> None:
    with contextlib.suppress(ValueError):
        if date.fromisoformat(value).isoformat() == value:
            return
    raise FieldError("invalid_value", f"{path} must be a day such as 2026-11-23, not {shown(value)}")


@dataclass(frozen=True)
class DataSection:
    """The conversion of rows to prompts."""

    prompt_template: str | None = option(
        None,
        'Makes the prompt from the row\'s fields, by Jinja: "Q: {{ question }}\\nA:", "{{ subject or \'-\' }}". Short: '
        '"Q: {question}\\nA:"; {turns[0]} is an item of a list or object. '
        "`@PATH`, and a name that ends with `.txt`, `.jinja` or `.j2`, is read from that file.",
    )
    prompt_column: str | None = option(None, "The field that holds the prompt, if it is not `prompt`.")
    id_column: str | None = option(None, "The field that holds a row's id, if it is not `id`.")
    split: str = option("train", "The split of a hub data set.")
    subset: str | None = option(None, "The subset of a hub data set.")
    chat_template: str | None = option(
        None, "A Jinja chat template, or the path of one (also `@PATH`). It replaces the model's own template."
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Variables of the chat template, such as {enable_thinking: false}. A row's `chat_template_kwargs` has "
        "precedence, name by name.",
        read=read_variables,
    )
    chat_template_date: str | None = option(
        None,
        "The day that a chat template prints as the current one (`strftime_now`), such as 2026-11-23. null: the day on "
        "which the job first started. Shards that start on different days need the same one.",
        _day,
    )
    separate_reasoning: bool | None = option(
        None,
        "true: `<think>...</think>` at the beginning of a chat's answer, or the channel `analysis` of gpt-oss, becomes "
        "`reasoning_content`. false: it stays in `text`. null: true if the chat template has one of them.",
    )
    system_prompt: str | None = option(
        None,
        "A system message for rows that have none: `messages` without one, and prompts that run as chat. The chat "
        "template must write it.",
    )
    prompts_as_chat: bool | None = option(
        None,
        "true: run `prompt` as one user message through the chat template. false: as text to continue. "
        "null: true if the model has a chat template.",
    )
    plan_rows: int = option(
        65536,
        "Rows that are read ahead to decide in which order rows start: those whose prompts begin alike together, and "
        "at the end of the input those with the highest `max_tokens` first. Results are written in input order. "
        "0: rows start in input order, as those of standard input always do.",
        AT_LEAST_0,
    )


@dataclass(frozen=True)
class OutputSection:
    """The content of result lines."""

    certificate: bool = option(
        False,
        "Adds `certificate` to the result of each greedy row: the smallest difference of the two largest logits for a "
        "token (`margin`), and which token this is (`position`). Rounding can change a row with a small margin.",
    )
    columns: Literal["results", "flat"] = option(
        "results",
        "The columns of a table. `results`: the fields of result lines, for parquet. `flat`: the input's own columns, "
        "a typed column for each property of the schema of `sampling.response_format`, then `text`, `finish_reason` "
        "and `error`; for parquet, and always for CSV and TSV. The output of data.csv is then data.results.parquet.",
    )


def _amounts(reader: Reader, value: Any, path: str) -> Mapping[str, float]:
    if not isinstance(value, dict):
        raise FieldError("invalid_type", f"{path} must be a mapping of names to amounts, not {described(value)}")
    for name, amount in value.items():
        if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 < amount < math.inf:
            raise FieldError("invalid_value", f"{join(path, str(name))} must be a number > 0, not {shown(amount)}")
    return {str(name): float(amount) for name, amount in value.items()}


@dataclass(frozen=True)
class ClusterSection:
    """The workers that share a job, and where they run. They change the speed, not the output."""

    workers: int | None = option(
        None,
        "Number of processes with an engine each, run by Ray (`pip install 'specbatch[ray]'`). null: this process runs "
        "the only engine, without Ray.",
        AT_LEAST_1,
    )
    address: str | None = option(
        None,
        "The Ray cluster: `auto` (the one that this host is part of), `HOST:PORT`, or `ray://HOST:PORT`. null: the "
        "workers run on this host, and nothing listens to the network.",
    )
    gpus_per_worker: float | None = option(
        None,
        "GPUs of a worker; 0.5: two workers share one. null: `engine.tensor_parallel`, which is 1 by default, if there "
        "are GPUs and `engine.device` allows them, else 0.",
        Range(">= 0", lambda v: v >= 0),
    )
    cpus_per_worker: int | None = option(
        None,
        "CPU cores that Ray reserves for a worker, and its number of threads. null: the workers of a host share its "
        "cores.",
        AT_LEAST_1,
    )
    max_deaths: int = option(5, "How often a worker is replaced after its process or its host has died.", AT_LEAST_0)
    stuck_seconds: float = option(300.0, "A worker that has not answered for this time is ended and replaced.", ABOVE_0)
    start_seconds: float = option(
        3600.0,
        "A worker that takes longer to describe the job (with its downloads) or to load the models is not used. That "
        "is an error, unless others run already.",
        ABOVE_0,
    )
    resources: Mapping[str, float] | None = option(
        None, "Other resources of the Ray cluster that a worker needs, such as {a100: 1}.", read=_amounts
    )


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    engine: EngineSection = field(default_factory=EngineSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    data: DataSection = field(default_factory=DataSection)
    output: OutputSection = field(default_factory=OutputSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    # The names of the sampling options that were given, including those with their default as value.
    given_sampling: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"in_file": False})


def sampling_value(name: str, value: Any, path: str | None = None) -> Any:
    """Return `value` as SamplingParams holds it under `name`. The config and the overrides of a row use this one rule.

    It raises FieldError, which names the value by `path`, else by `name`.
    """
    return Reader(SamplingParams).value(options_of(SamplingParams)[name], value, path or name)
