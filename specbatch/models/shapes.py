"""Models without files: random weights of a known geometry, for measurements (`shape:NAME`).

What a model costs depends on its sizes alone, so speed and memory of a model can be measured without its weights. The
geometries are those of the `config.json` that each model was published with. Weights depend on the tensor's name, the
dtype and the kind of device, and on nothing else: two runs have the same ones.

Shape suffixes: W draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.catalog import SHAPE_PREFIX
from specbatch.models.config import ModelConfig, expected_tensors, parse_hf_config
from specbatch.models.eagle_head import EagleConfig, EagleKind, HeadTraits, eagle_config
from specbatch.models.eagle_head import expected_tensors as head_tensors
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import HeadCheckpoint

RANDOM_WEIGHTS = "random weights"  # what descriptions say
REDUCED_DRAFT_VOCAB = 32000  # of EAGLE-3 heads as they are published for Llama 3 and Qwen 3

_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_LLAMA32_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shapes() -> dict[str, ModelConfig]:
    """The known geometries by name."""
    return {name: parse_hf_config(raw) for name, raw in _published().items()}


def _published() -> dict[str, dict[str, Any]]:
    """What the models' config.json say, by name."""
    return {
        # meta-llama/Meta-Llama-3-8B
        "llama-3-8b": _LLAMA3 | _sizes(4096, 14336, 32, 32, 8, 8192),
        # meta-llama/Llama-3.2-1B
        "llama-3.2-1b": _LLAMA3
        | _sizes(2048, 8192, 16, 32, 8, 131072)
        | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": _LLAMA32_ROPE},
        # meta-llama/Meta-Llama-3-70B, 8 of its 80 layers: what one GPU of eight would hold, and the whole vocabulary
        "llama-3-70b-8l": _LLAMA3 | _sizes(8192, 28672, 8, 64, 8, 8192),
        # Qwen/Qwen3-8B
        "qwen3-8b": {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "torch_dtype": "bfloat16",
        }
        | _sizes(4096, 12288, 36, 32, 8, 40960)
        | {"head_dim": 128},
        # Qwen/Qwen2.5-7B
        "qwen2.5-7b": {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "torch_dtype": "bfloat16",
        }
        | _sizes(3584, 18944, 28, 28, 4, 131072),
        # Qwen/Qwen2.5-1.5B
        "qwen2.5-1.5b": {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "torch_dtype": "bfloat16",
        }
        | _sizes(1536, 8960, 28, 12, 2, 131072),
        # HuggingFaceTB/SmolLM2-135M
        "smollm2-135m": {
            "model_type": "llama",
            "vocab_size": 49152,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
        | _sizes(576, 1536, 30, 9, 3, 8192),
        # Nobody's: small enough for tests, deep enough for an EAGLE-3 head.
        "tiny": {"model_type": "llama", "vocab_size": 512, "rms_norm_eps": 1e-5, "eos_token_id": 0, "bos_token_id": 1}
        | _sizes(64, 128, 8, 4, 2, 4096),
    }


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


# Draft heads: the geometry is the target's. (kind, whether the draft vocabulary is reduced)
_HEADS: Mapping[str, tuple[EagleKind, bool]] = {
    "eagle": ("eagle", False),
    "eagle3": ("eagle3", False),
    "eagle3-32k": ("eagle3", True),
}


class RandomSource:
    """A checkpoint of random weights. A tensor is made on `device` in `dtype` when it is asked for, so that no copy
    follows.

    Matrices and biases are N(0, 0.02), the scale that transformers initialises with; norm weights N(1, 0.02). `fixed`
    holds tensors that are not random (vocabulary maps), on the CPU.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
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
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(mean, 0.02, generator=generator)

    def close(self) -> None:
        """Nothing is open."""


def shape_config(ref: str) -> ModelConfig:
    """The geometry that `shape:NAME` names. Raises ModelError with the nearest name, or all of them."""
    name = ref.removeprefix(SHAPE_PREFIX)
    known = shapes()
    if name in known:
        return known[name]
    if name in _HEADS:
        raise ModelError(
            f"{ref} is a draft head, not a model", hint="set it as speculation.draft, with method eagle or eagle3"
        )
    raise _unknown(ref, list(known))


def open_shape(ref: str, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """The model that `shape:NAME` names, its weights to be made in `dtype` on `device`. Raises ModelError."""
    config = shape_config(ref)
    return Checkpoint(None, config, RandomSource(expected_tensors(config), dtype, device), RANDOM_WEIGHTS)


def open_shape_head(
    ref: str,
    kind: EagleKind,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    aux_layers: tuple[int, ...] | None = None,
) -> HeadCheckpoint:
    """The head of the target's geometry that `shape:eagle`, `shape:eagle3` or `shape:eagle3-32k` names.
    `aux_layers`: of EAGLE-3, instead of the usual ones.

    The reduced vocabulary has 32000 tokens, or half the target's where that has no more than 32000.
    Raises ModelError for other names, a head of another kind than the method's, or a target without room for it.
    """
    name = ref.removeprefix(SHAPE_PREFIX)
    if name in shapes():
        raise ModelError(f"{ref} is a model, not a draft head", hint=f"draft heads: {_listed(_HEADS)}")
    if name not in _HEADS:
        raise _unknown(ref, list(_HEADS))
    named_kind, reduced = _HEADS[name]
    if named_kind != kind:
        fitting = _listed([head for head, (other, _) in _HEADS.items() if other == kind])
        raise ModelError(f"{ref} does not fit speculation.method {kind}", hint=f"use {fitting}, or method {named_kind}")
    vocab_size = target.vocab_size
    width = vocab_size
    if reduced:
        width = REDUCED_DRAFT_VOCAB if vocab_size > REDUCED_DRAFT_VOCAB else vocab_size // 2
    head = EagleConfig(
        kind,
        dataclasses.replace(
            target, num_layers=1, sliding_windows=(None,), qk_norm=False, qkv_bias=False, output_bias=False
        ),
        feature_size=target.hidden_size,
        draft_vocab_size=width,
        has_fc_bias=False,
        has_embedding=False,
        has_vocab_map=reduced,
    )
    tensor_shapes = head_tensors(head)
    # The same checks as for a head with files: a target that is too shallow is refused there.
    checked = eagle_config(kind, head.decoder, width, tensor_shapes, target, HeadTraits(aux_layers))
    maps = _vocab_maps(width, vocab_size) if reduced else {}
    return HeadCheckpoint(checked, RandomSource(tensor_shapes, dtype, device, maps))


def _vocab_maps(draft_vocab_size: int, vocab_size: int) -> dict[str, Tensor]:
    """d2t (W,) int64 offsets and t2d (V,) bool: the draft's tokens spread evenly over the target's."""
    draft_W = torch.arange(draft_vocab_size)
    target_W = draft_W * vocab_size // draft_vocab_size
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[target_W] = True
    return {"d2t": target_W - draft_W, "t2d": t2d_V}


def _unknown(ref: str, names: list[str]) -> ModelError:
    near = difflib.get_close_matches(ref.removeprefix(SHAPE_PREFIX), names, n=1, cutoff=0.4)
    hint = f"known: {_listed(names)}"
    if near:
        hint = f"did you mean {SHAPE_PREFIX}{near[0]}? {hint}"
    return ModelError(f"there is no shape {ref.removeprefix(SHAPE_PREFIX)!r}", hint=hint)


def _listed(names: Any) -> str:
    return ", ".join(SHAPE_PREFIX + name for name in names)
