"""Models without files: random weights of a known geometry, for measurements (`random:NAME`).

What a model costs depends on its sizes alone, so its speed and memory can be measured without its weights. The
geometries are those of the `config.json` that each model was published with. Weights depend on the tensor's name, the
dtype and the kind of device, and on nothing else: two runs have the same ones.

Routers with random weights choose all experts about equally often, which those of trained models do not. So
`random:NAME?skew=S` gives each router a bias, in proportion to the logarithm of the experts' ranks (Zipf 1949).

Shape suffixes: W draft vocabulary, V vocabulary, X experts.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.models.blocks.config import (
    BlockConfig,
    ConvolutionConfig,
    DominoConfig,
    HeadConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
    expected_block_tensors,
)
from specbatch.models.catalog import RANDOM_PREFIX, random_name
from specbatch.models.config import BackendName, ModelConfig, expected_tensors
from specbatch.models.eagle_config import EagleConfig, EagleKind, eagle_config, expected_eagle_tensors, mtp_config
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint

RANDOM_WEIGHTS = "random weights"  # name in logs and results
_STANDARD_DEVIATION = 0.02  # the value that transformers initialises weights with
_MAX_SKEW, _SKEW_EXAMPLE = 100.0, "random:qwen3-30b-a3b?skew=1"
_SCALE = 120  # E8M0: 2^-7. With evenly distributed codes the standard deviation is 0.023.
REDUCED_DRAFT_VOCAB = 32000  # size of the published EAGLE-3 heads for Llama 3 and Qwen 3


def geometries() -> dict[str, ModelConfig]:
    """The known geometries by name."""
    return {name: parse_hf_config(raw) for name, raw in _published().items()}


def _published() -> dict[str, dict[str, Any]]:
    """The models' config.json files, by name."""
    llama3 = _family("llama", 128256, 1e-5, 500000.0, bos=128000, eos=128001)
    qwen2 = _family("qwen2", 151936, 1e-6, 1000000.0, bos=151643, eos=151643)
    qwen3 = _family("qwen3", 151936, 1e-6, 1000000.0, bos=151643, eos=151645)
    smollm2 = _family("llama", 49152, 1e-5, 100000.0, bos=0, eos=0)
    tiny = _family("llama", 512, 1e-5, 10000.0, bos=1, eos=0)
    llama32_rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tied = {"tie_word_embeddings": True}
    qwen35 = _family("qwen3_5_text", 248320, 1e-6, 10000000.0, bos=248044, eos=248044) | {"partial_rotary_factor": 0.25}
    return {
        # meta-llama/Meta-Llama-3-8B
        "llama-3-8b": llama3 | _sizes(4096, 14336, 32, 32, 8, 8192),
        # meta-llama/Llama-3.2-1B
        "llama-3.2-1b": llama3 | _sizes(2048, 8192, 16, 32, 8, 131072) | tied | {"rope_scaling": llama32_rope},
        # meta-llama/Meta-Llama-3-70B
        "llama-3-70b": llama3 | _sizes(8192, 28672, 80, 64, 8, 8192),
        # 8 of its 80 layers: the part of one GPU of eight, with the whole vocabulary
        "llama-3-70b-8l": llama3 | _sizes(8192, 28672, 8, 64, 8, 8192),
        # Qwen/Qwen3-8B
        "qwen3-8b": qwen3 | _sizes(4096, 12288, 36, 32, 8, 40960),
        # Qwen/Qwen3.5-4B and Qwen/Qwen3.5-9B, without their parts for images
        "qwen3.5-4b": qwen35 | _sizes(2560, 9216, 32, 16, 4, 262144) | tied | {"head_dim": 256},
        "qwen3.5-9b": qwen35 | _sizes(4096, 12288, 32, 16, 4, 262144) | {"head_dim": 256},
        # Qwen/Qwen3-30B-A3B
        "qwen3-30b-a3b": _family("qwen3_moe", 151936, 1e-6, 1000000.0, bos=151643, eos=151645)
        | _sizes(2048, 6144, 48, 32, 4, 40960)
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True},
        # allenai/OLMoE-1B-7B-0924
        "olmoe-1b-7b": _family("olmoe", 50304, 1e-5, 10000.0, bos=50279, eos=50279)
        | _sizes(2048, 1024, 16, 16, 16, 4096)
        | {"num_experts": 64, "num_experts_per_tok": 8},
        # zai-org/GLM-4.5-Air
        "glm-4.5-air": _family("glm4_moe", 151552, 1e-5, 1000000.0, bos=151329, eos=151329)
        | _sizes(4096, 10944, 46, 96, 8, 131072)
        | {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "moe_intermediate_size": 1408}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        # Qwen/Qwen2.5-7B
        "qwen2.5-7b": qwen2 | _sizes(3584, 18944, 28, 28, 4, 131072) | {"vocab_size": 152064},
        # Qwen/Qwen2.5-1.5B
        "qwen2.5-1.5b": qwen2 | _sizes(1536, 8960, 28, 12, 2, 131072) | tied,
        # HuggingFaceTB/SmolLM2-135M
        "smollm2-135m": smollm2 | _sizes(576, 1536, 30, 9, 3, 8192) | tied,
        # google/gemma-2-9b
        "gemma-2-9b": _gemma("gemma2", 256000, _sizes(3584, 14336, 42, 16, 8, 8192)) | {"sliding_window": 4096},
        # google/gemma-3-4b-pt, without its part for images
        "gemma-3-4b": _gemma("gemma3_text", 262208, _sizes(2560, 10240, 34, 8, 4, 131072))
        | {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        # allenai/OLMo-2-1124-7B
        "olmo-2-7b": _family("olmo2", 100352, 1e-6, 500000.0, bos=100257, eos=100257)
        | _sizes(4096, 11008, 32, 32, 32, 4096),
        # microsoft/Phi-4-mini-instruct, without the two sets of factors of its LongRoPE
        "phi-4-mini": _family("phi3", 200064, 1e-5, 10000.0, bos=199999, eos=199999)
        | _sizes(3072, 8192, 32, 24, 8, 131072)
        | tied
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144},
        # ibm-granite/granite-3.1-8b-base
        "granite-3-8b": _family("granite", 49155, 1e-5, 10000000.0, bos=0, eos=0)
        | _sizes(4096, 12800, 40, 32, 8, 131072)
        | tied
        | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
        | {"residual_multiplier": 0.22},
        # openai/gpt-oss-20b and gpt-oss-120b
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        # Not published models: small enough for tests, deep enough for an EAGLE-3 head.
        "tiny-experts": tiny
        | _sizes(64, 128, 8, 4, 2, 4096)
        | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "tiny-gpt-oss": _gpt_oss(8, 8)
        | _sizes(64, 32, 8, 4, 2, 4096)
        | {"vocab_size": 512, "eos_token_id": 0, "num_experts_per_tok": 2},
        "tiny-hybrid": tiny
        | _sizes(64, 128, 8, 4, 2, 4096)
        | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "tiny": tiny | _sizes(64, 128, 8, 4, 2, 4096),
    }


def _family(model_type: str, vocab_size: int, eps: float, theta: float, *, bos: int, eos: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def _gemma(model_type: str, vocab_size: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return sizes | {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "eos_token_id": [1, 106],
    }


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return _sizes(2880, 2880, num_layers, 64, 8, 131072) | {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "head_dim": 64,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "eos_token_id": [200002, 199999, 200012],
    }


def _sizes(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, max_position: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_position,
    }


# EAGLE heads have the geometry of the target. (kind, whether the draft vocabulary is reduced)
_EAGLE_HEADS: Mapping[str, tuple[EagleKind, bool]] = {
    "eagle": ("eagle", False),
    "eagle3": ("eagle3", False),
    "eagle3-32k": ("eagle3", True),
    "peagle": ("eagle3", False),
}
_PARALLEL_LAYERS = 4  # layers of random:peagle


# Block drafters have 5 layers of the target's geometry and blocks of 16.
_BLOCK_DRAFTERS = ("dflash", "dflash2", "dspark", "domino", "lilicorr", "xpress")
_BLOCK_SIZE, _BLOCK_LAYERS, _BLOCK_RANK = 16, 5, 256


class RandomSource:
    """A checkpoint of random weights. A tensor is made on `device` in `dtype` when it is asked for, so that no copy
    follows.

    Matrices and biases are N(0, 0.02); norm weights N(1, 0.02). `fixed` holds tensors that are made otherwise
    (vocabulary maps, biases of routers), on the CPU. `is_packed`: experts can be in MXFP4, see `packed`.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        fixed: Mapping[str, Tensor] | None = None,
        *,
        is_packed: bool = False,
    ) -> None:
        self.is_packed = is_packed
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._fixed = fixed or {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        if name in self._fixed:
            return self._fixed[name]
        shape = self._shapes[name]
        mean, deviation = 1.0 if name.endswith("norm.weight") else 0.0, _STANDARD_DEVIATION
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(mean, deviation, generator=self._generator(name))

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a weight of an expert in MXFP4, see `PackedReader`: random numbers of about the same size
        as those of `load`, which are others."""
        num_outputs, num_inputs = self._shapes[name]
        values = torch.empty((num_outputs, num_inputs // 2), dtype=torch.uint8, device=self._device)
        scales = torch.full((num_outputs, num_inputs // MXFP4_GROUP), _SCALE, dtype=torch.uint8, device=self._device)
        return values.random_(0, 256, generator=self._generator(name)), scales

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(_seed(name))

    def close(self) -> None:
        """Nothing is open."""


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def random_config(ref: str) -> ModelConfig:
    """The geometry that `random:NAME` names. Raises ModelError with the nearest name, or all of them."""
    name, known = _name_and_options(ref)[0], geometries()
    if name in known:
        skew, config = router_skew(ref), known[name]
        if skew is None:
            return config
        if config.moe is None:
            raise ModelError(f"{ref}: {name} has no experts whose router could have a skew", hint="leave ?skew out")
        return replace(config, moe=replace(config.moe, router_bias=True))
    if name in _EAGLE_HEADS or name in _BLOCK_DRAFTERS:
        methods = "block" if name in _BLOCK_DRAFTERS else "eagle, eagle3 or peagle"
        raise ModelError(
            f"{ref} is a draft head, not a model", hint=f"set it as speculation.draft, with method {methods}"
        )
    raise _unknown(ref, known)


def open_random_model(ref: str, dtype: torch.dtype, device: torch.device, backend: BackendName = "auto") -> Checkpoint:
    """The model that `random:NAME` names; its weights are made in `dtype` on `device`, the same ones for each backend.
    Raises ModelError."""
    config, skew = random_config(ref), router_skew(ref)
    biases = {} if skew is None else _router_biases(config, skew)
    is_packed = config.model_type == "gpt_oss"  # as it was published
    source = RandomSource(expected_tensors(config), dtype, device, biases, is_packed=is_packed)
    if backend == "transformers":
        from specbatch.models.fallback import source as fallback  # its imports take a second

        raw = _published()[_name_and_options(ref)[0] or ""]
        theirs = fallback.RandomTransformersSource(raw, source)
        return Checkpoint(None, fallback.model_config(theirs, config.eos_token_ids), theirs, RANDOM_WEIGHTS)
    return Checkpoint(None, config, source, RANDOM_WEIGHTS)


def _name_and_options(ref: str) -> tuple[str | None, str]:
    name = random_name(ref)
    if name is None:
        return None, ""
    name, _, options = name.partition("?")
    return name, options


def router_skew(ref: str) -> float | None:
    """Return S of `random:NAME?skew=S`; None: the name has no options. Raise ModelError for other options."""
    options = _name_and_options(ref)[1]
    if not options:
        return None
    key, _, value = options.partition("=")
    try:
        skew = float(value)
    except ValueError:
        skew = math.nan
    if key != "skew" or not 0 <= skew <= _MAX_SKEW:
        raise ModelError(
            f"{ref}: the option is ?skew=S, with S from 0 to {_MAX_SKEW:g}", hint=f"for example {_SKEW_EXAMPLE}"
        )
    return skew


def _router_biases(config: ModelConfig, skew: float) -> dict[str, Tensor]:
    """Return the routers' biases by name: -skew * sigma * ln(rank). sigma: the standard deviation of a router's logits
    without a bias. The ranks of the experts are shuffled in each layer."""
    assert config.moe is not None, "the model has experts"
    sigma = _STANDARD_DEVIATION * config.hidden_size**0.5  # its input has a mean square of 1
    biases = {}
    for layer in (index for index, has_experts in enumerate(config.moe.layers) if has_experts):
        name = f"model.layers.{layer}.{config.moe.block}.{config.moe.router}.bias"
        rank_X = 1 + torch.randperm(config.moe.num_experts, generator=torch.Generator().manual_seed(_seed(name)))
        biases[name] = -skew * sigma * rank_X.log()
    return biases


def open_random_eagle_head(
    ref: str,
    kind: EagleKind,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    aux_layers: tuple[int, ...] | None = None,
    *,
    parallel: bool = False,
) -> EagleCheckpoint:
    """The EAGLE head with the target's geometry that `random:eagle`, `random:eagle3`, `random:eagle3-32k` or, if it is
    `parallel`, `random:peagle` names. `aux_layers`: of EAGLE-3, instead of the usual ones.

    The reduced vocabulary has 32000 tokens, or half of the target's where the target has at most 32000.
    Raises ModelError for other names, a head of another kind than the method's, or a target with too few layers.
    """
    name = random_name(ref)
    if name in geometries():
        raise ModelError(f"{ref} is a model, not a draft head", hint=f"draft heads: {_listed(_EAGLE_HEADS)}")
    if name is None or name not in _EAGLE_HEADS:
        raise _unknown(ref, _EAGLE_HEADS)
    is_reduced = _EAGLE_HEADS[name][1]
    methods = {head: "peagle" if head == "peagle" else other for head, (other, _) in _EAGLE_HEADS.items()}
    method = "peagle" if parallel else kind
    if methods[name] != method:
        fitting = _listed(head for head, other in methods.items() if other == method)
        raise ModelError(
            f"{ref} does not fit speculation.method {method}", hint=f"use {fitting}, or method {methods[name]}"
        )
    vocab_size = target.vocab_size
    draft_vocab_size = vocab_size
    if is_reduced:
        draft_vocab_size = REDUCED_DRAFT_VOCAB if vocab_size > REDUCED_DRAFT_VOCAB else vocab_size // 2
    count = _PARALLEL_LAYERS if parallel else 1
    layer = replace(target.as_head(), num_layers=count, sliding_windows=(None,) * count)
    mask_token_id = vocab_size - 1 if parallel else None
    shapes = expected_eagle_tensors(
        EagleConfig(
            kind,
            layer,
            feature_size=target.hidden_size,
            draft_vocab_size=draft_vocab_size,
            has_fc_bias=False,
            has_embedding=False,
            has_vocab_map=is_reduced,
            mask_token_id=mask_token_id,
        )
    )
    # The same checks as for a head with files: a target with too few layers is refused here.
    config = eagle_config(kind, layer, draft_vocab_size, shapes, target, aux_layers, mask_token_id=mask_token_id)
    maps = _vocab_maps(draft_vocab_size, vocab_size) if is_reduced else {}
    return EagleCheckpoint(config, RandomSource(shapes, dtype, device, maps))


def open_random_block_drafter(
    ref: str, target: ModelConfig, dtype: torch.dtype, device: torch.device
) -> BlockCheckpoint:
    """Return the block drafter with the target's geometry that `random:dflash` and others name. Raise ModelError for
    other names."""
    name = random_name(ref)
    if name in geometries():
        raise ModelError(f"{ref} is a model, not a drafter", hint=f"block drafters: {_listed(_BLOCK_DRAFTERS)}")
    if name is None or name not in _BLOCK_DRAFTERS:
        raise _unknown(ref, _BLOCK_DRAFTERS)
    layers, hidden = target.as_head(), target.hidden_size
    windows = (None,) * _BLOCK_LAYERS
    rank = min(_BLOCK_RANK, hidden)
    heads: dict[str, HeadConfig] = {
        "dflash2": SelectorConfig(rank, min(16, target.vocab_size)),
        "dspark": MarkovConfig(rank),
        "domino": DominoConfig(rank, rank, 1),
        "lilicorr": LatticeConfig(rank, 2, 4, 2 * rank, min(16, target.vocab_size), rank, 1e-4, 8.0, _BLOCK_SIZE),
        "xpress": RefinerConfig(rank, 2 * rank, 6, _BLOCK_SIZE),
    }
    last = max(1, target.num_layers - 2)  # the layers that z-lab's drafters read
    aux = sorted({2 + round(i * (last - 2) / (_BLOCK_LAYERS - 1)) for i in range(_BLOCK_LAYERS)} & set(range(last + 1)))
    block = BlockConfig(
        replace(layers, num_layers=_BLOCK_LAYERS, sliding_windows=windows, qk_norm=True),
        _BLOCK_SIZE,
        target.vocab_size - 1,
        tuple(aux) or (last,),
        hidden,
        target.vocab_size,
        first=0 if name == "dspark" else 1,
        head=heads.get(name),
        convolution=ConvolutionConfig(2, math.gcd(hidden, 16)) if name in ("dflash2", "lilicorr") else None,
    )
    return BlockCheckpoint(block, RandomSource(expected_block_tensors(block), dtype, device), name)


def open_random_mtp(target: ModelConfig, dtype: torch.dtype, device: torch.device) -> EagleCheckpoint:
    """Return the layer for multi-token prediction of a hybrid with random weights. Raise ModelError for other
    models."""
    if target.delta is None:
        raise ModelError(
            f"speculation.method mtp is for hybrids such as {RANDOM_PREFIX}qwen3.5-4b, and model.target is a "
            f"{target.model_type}",
            hint="use another speculation.method",
        )
    head = mtp_config(target)
    return EagleCheckpoint(head, RandomSource(expected_eagle_tensors(head), dtype, device))


def _vocab_maps(draft_vocab_size: int, vocab_size: int) -> dict[str, Tensor]:
    """d2t (W,) int64 offsets and t2d (V,) bool: the draft's tokens spread evenly over the target's."""
    draft_W = torch.arange(draft_vocab_size)
    target_W = draft_W * vocab_size // draft_vocab_size
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[target_W] = True
    return {"d2t": target_W - draft_W, "t2d": t2d_V}


def _unknown(ref: str, names: Iterable[str]) -> ModelError:
    near = difflib.get_close_matches(random_name(ref) or "", names, n=1, cutoff=0.4)
    hint = f"known: {_listed(names)}"
    if near:
        hint = f"did you mean {RANDOM_PREFIX}{near[0]}? {hint}"
    return ModelError(f"there is no {ref}", hint=hint)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(RANDOM_PREFIX + name for name in names)
