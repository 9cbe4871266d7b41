"""What a decoder is: sizes and traits, read from a Hugging Face `config.json` (GGUF metadata: see `gguf.py`).

One decoder serves Llama, Mistral, Qwen2 and Qwen3; what differs between them are the traits of `ModelConfig`. Defaults
for keys that a config.json leaves out are those of transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specbatch.errors import ModelError

RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Frequencies are computed once and do not depend on the sequence length."""

    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3 and yarn, tokens
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from factor (and the mscales)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    frequency_divisors: tuple[float, ...] | None = None  # one for each frequency (`rope_freqs.weight` of a GGUF)

    def inverse_frequencies(self, head_dim: int) -> tuple[torch.Tensor, float]:
        """Returns (float32 CPU tensor of shape (head_dim // 2,) in radians per token, factor on cos and sin).

        The operations and their order are those of transformers' `ROPE_INIT_FUNCTIONS`: results agree bit for bit.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        powers = self.theta**exponents
        inverse = 1.0 / powers
        attention_factor = 1.0
        if self.scaling == "linear":
            inverse = inverse / self.factor
        elif self.scaling == "llama3":
            inverse = self._llama3(inverse)
        elif self.scaling == "yarn":
            inverse, attention_factor = self._yarn(powers, head_dim)
        if self.frequency_divisors is not None:
            divisors = torch.tensor(self.frequency_divisors, dtype=torch.float32)
            assert divisors.shape == inverse.shape, (divisors.shape, inverse.shape)
            inverse = inverse / divisors
        return inverse, attention_factor

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
        low_wavelength = self.original_max_position / self.low_freq_factor
        high_wavelength = self.original_max_position / self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        scaled = torch.where(wavelength > low_wavelength, inverse / self.factor, inverse)
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        between = ~(wavelength < high_wavelength) * ~(wavelength > low_wavelength)
        return torch.where(between, smoothed, scaled)

    def _yarn(self, powers: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
        """YaRN (Peng et al. 2023, arXiv:2309.00071), equations as in transformers."""

        def correction_dim(num_rotations: float) -> float:
            return (head_dim * math.log(self.original_max_position / (num_rotations * 2 * math.pi))) / (
                2 * math.log(self.theta)
            )

        low, high = correction_dim(self.beta_fast), correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # no division by zero
        ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        extrapolation = 1 - ramp
        inverse = 1.0 / (self.factor * powers) * (1 - extrapolation) + 1.0 / powers * extrapolation
        return inverse, self._yarn_attention_factor()

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(multiplier: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * multiplier * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return float(mscale(self.mscale) / mscale(self.mscale_all_dim))
        return mscale(1.0)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and traits of a decoder-only transformer with RMSNorm, RoPE and a gated SiLU MLP."""

    model_type: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of o_proj
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on queries and keys, before RoPE
    sliding_windows: tuple[int | None, ...]  # per layer; w: position p sees (p - w, p]; None: all of [0, p]
    eos_token_ids: tuple[int, ...]  # any of them ends a generation


# Defaults of transformers' config classes where they differ between model types.
# head_dim None: hidden_size / num_heads; num_kv_heads None: num_heads.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_kv_heads": None, "head_dim": None, "max_position": 2048, "eos": 2},
    "mistral": {"num_kv_heads": 8, "head_dim": None, "max_position": 4096 * 32, "eos": 2},
    "qwen2": {"num_kv_heads": None, "head_dim": None, "max_position": 32768, "eos": None},
    "qwen3": {"num_kv_heads": None, "head_dim": 128, "max_position": 32768, "eos": None},
}
SUPPORTED_MODEL_TYPES = tuple(_DEFAULTS)


def parse_hf_config(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` (and, for the end-of-sequence ids, a `generation_config.json`), both already parsed.

    Raises ModelError for model types, activations, rope types and quantisations that the decoder does not have, and for
    missing or inconsistent sizes.
    """
    try:
        return _parse(config, generation_config or {})
    except (TypeError, ValueError, AttributeError) as error:  # text where a number or a mapping belongs
        raise ModelError(f"config.json holds a value of a wrong type: {error}") from error


def _parse(config: dict[str, Any], generation_config: dict[str, Any]) -> ModelConfig:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        raise ModelError(
            f"model_type {model_type!r} is not supported",
            hint=f"supported model types: {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    defaults = _DEFAULTS[model_type]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported", hint="supported activations: silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"the checkpoint is quantised ({method}), which is not supported",
            hint="use the unquantised checkpoint, or a GGUF file",
        )
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers = _size(config, "num_hidden_layers")
    num_kv_heads = _optional_size(config, "num_key_value_heads") or defaults["num_kv_heads"] or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_dim = _optional_size(config, "head_dim")
    if head_dim is None and "head_dim" not in config:
        head_dim = defaults["head_dim"]
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    max_position = _optional_size(config, "max_position_embeddings") or defaults["max_position"]
    attention_bias = bool(config.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    eos = _token_ids(config.get("eos_token_id", defaults["eos"]))
    eos += _token_ids(generation_config.get("eos_token_id"))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        sliding_windows=_parse_windows(config, model_type, num_layers),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (Hugging Face) tensor names and shapes of a checkpoint, in model order; linear weights (out, in)."""
    c, q_size, kv_size = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    linears = {
        "self_attn.q_proj": (q_size, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv_size, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv_size, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q_size, c.output_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (c.hidden_size,)
        for name, (size_out, size_in, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (size_out, size_in)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (size_out,)
        if c.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (c.hidden_size,)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _size(config: dict[str, Any], key: str) -> int:
    value = _optional_size(config, key)
    if value is None:
        raise ModelError(f"config.json has no {key!r}")
    return value


def _optional_size(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _token_ids(value: object) -> list[int]:
    """`eos_token_id` may be absent, one id or a list of ids."""
    ids: list[int] = []
    for i in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(i, int):
            raise ModelError(f"config.json: token ids must be integers, not {value!r}")
        if i >= 0:  # some configs write -1 for "none"
            ids.append(i)
    return ids


def _parse_windows(config: dict[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "llama":
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)
    if model_type == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    first_sliding = config.get("max_window_layers", 28)
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if i >= first_sliding else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(
            f"config.json: layer type {unknown[0]!r} is not supported",
            hint="supported layer types: full_attention, sliding_attention",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _parse_rope(config: dict[str, Any], max_position: int) -> RopeConfig:
    """Reads transformers-5 `rope_parameters` as well as the older `rope_theta` with `rope_scaling`."""
    # `rope_scaling` wins where both are present, as in transformers.
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling: RopeScaling
    if kind == "default":
        scaling = "none"
    elif kind in ("linear", "llama3", "yarn"):
        scaling = kind
    else:
        raise ModelError(
            f"rope type {kind!r} is not supported", hint="supported rope types: default, linear, llama3, yarn"
        )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported", hint="only fully rotated heads are")
    if scaling == "none":
        return RopeConfig(theta=theta)
    original = int(
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_position
    )
    factor = parameters.get("factor")
    if factor is None and scaling == "yarn":
        factor = max_position / original
    required = {"factor": factor}
    if scaling == "llama3":
        required |= {key: parameters.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    missing = [key for key, value in required.items() if value is None]
    if missing:
        raise ModelError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=float(required["factor"]),  # type: ignore[arg-type]
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )
