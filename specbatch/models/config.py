"""The sizes and traits of a decoder, read from a Hugging Face `config.json` (for a GGUF: `formats/gguf_config.py`).

One decoder serves Llama, Mistral, Qwen2 and Qwen3; what differs between them are the traits of `ModelConfig`. Defaults
for keys that a config.json leaves out are those of transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbatch.errors import ModelError
from specbatch.models.checks import MAX_LAYERS, MAX_SIZE, flag, norm_eps, shown, whole_number
from specbatch.models.config_keys import check_keys
from specbatch.models.rope import RopeConfig, parse_rope

Activation = Literal["silu"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and traits of a decoder-only transformer with RMSNorm, RoPE and a gated MLP."""

    model_type: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int  # number of embeddings; the tokenizer can have fewer tokens
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # tokens of the longest sequence, what rope scaling adds included
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # o_proj has a bias
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on queries and keys, before RoPE
    sliding_windows: tuple[int | None, ...]  # per layer; w: position p sees (p - w, p]; None: all of [0, p]
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    attention_scale: float | None = None  # factor of queries times keys; None: head_dim ** -0.5
    activation: Activation = "silu"  # activation of the MLP's gate

    def checked(self, source: str) -> ModelConfig:
        """Itself. Raises ModelError, which begins with `source`, where sizes do not fit each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{source}: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"{source}: head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        return self


# Defaults of transformers' config classes where they differ between model types.
# head_dim None: hidden_size / num_heads; num_kv_heads None: num_heads.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_kv_heads": None, "head_dim": None, "max_position": 2048, "eos": 2},
    "mistral": {"num_kv_heads": 8, "head_dim": None, "max_position": 4096 * 32, "eos": 2},
    "qwen2": {"num_kv_heads": None, "head_dim": None, "max_position": 32768, "eos": None},
    "qwen3": {"num_kv_heads": None, "head_dim": 128, "max_position": 32768, "eos": None},
}
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}  # keys: names in config.json
SUPPORTED_MODEL_TYPES = tuple(_DEFAULTS)


def parse_hf_config(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` (and, for the end-of-sequence ids, a `generation_config.json`), both already parsed.

    Raises ModelError for model types, activations and rope types that the decoder does not have, for missing or
    inconsistent sizes, and for values of a wrong type or out of range. (How it is quantised: `quantization.py`.)
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        raise ModelError(
            f"model_type {shown(model_type)} is not supported",
            hint=f"supported model types: {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    check_keys(config)
    defaults = _DEFAULTS[model_type]
    hidden_act = config.get("hidden_act", "silu")
    if not isinstance(hidden_act, str) or hidden_act not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {shown(hidden_act)} is not supported", hint="supported activations: silu")
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers = _size(config, "num_hidden_layers", MAX_LAYERS)
    num_kv_heads = _optional_size(config, "num_key_value_heads") or defaults["num_kv_heads"] or num_heads
    head_dim = _optional_size(config, "head_dim")
    if head_dim is None and "head_dim" not in config:
        head_dim = defaults["head_dim"]
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    max_position = _optional_size(config, "max_position_embeddings") or defaults["max_position"]
    rope = parse_rope(config, max_position)
    attention_bias = _flag(config, "attention_bias") and model_type in ("llama", "qwen3")
    # As in transformers, generation_config.json replaces what config.json says.
    eos = _token_ids((generation_config or {}).get("eos_token_id"), "generation_config.json")
    eos = eos or _token_ids(config.get("eos_token_id", defaults["eos"]), "config.json")
    return ModelConfig(
        model_type=model_type,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=norm_eps(config.get("rms_norm_eps", 1e-6), "config.json: rms_norm_eps"),
        rope=rope,
        max_position_embeddings=rope.context_length(max_position, "config.json: max_position_embeddings"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias") and model_type == "llama",
        qk_norm=model_type == "qwen3",
        sliding_windows=_parse_windows(config, model_type, num_layers),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        activation=_ACTIVATIONS[hidden_act],
    ).checked("config.json")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (Hugging Face) tensor names and shapes of a checkpoint, in model order; linear weights (out, in)."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        shapes |= layer_tensors(c, f"model.layers.{layer}.")
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def layer_tensors(config: ModelConfig, prefix: str, input_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of one layer's tensors, as `expected_tensors` does for the model. `input_size`: the
    size of the attention's input; None: the hidden size."""
    c, q_size, kv_size = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    input_size = input_size or c.hidden_size
    linears = {
        "self_attn.q_proj": (q_size, input_size, c.qkv_bias),
        "self_attn.k_proj": (kv_size, input_size, c.qkv_bias),
        "self_attn.v_proj": (kv_size, input_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q_size, c.output_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}input_layernorm.weight": (c.hidden_size,)}
    for name, (size_out, size_in, has_bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (size_out, size_in)
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (size_out,)
    if c.qk_norm:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
    shapes[f"{prefix}post_attention_layernorm.weight"] = (c.hidden_size,)
    return shapes


def num_layer_weights(config: ModelConfig) -> int:
    """Elements of the matrices of all layers: each is read once for a forward pass."""
    return sum(math.prod(shape) for name, shape in expected_tensors(config).items() if name.endswith("_proj.weight"))


def _size(config: dict[str, Any], key: str, at_most: int = MAX_SIZE) -> int:
    value = _optional_size(config, key, at_most)
    if value is None:
        raise ModelError(f"config.json has no {key!r}")
    return value


def _optional_size(config: dict[str, Any], key: str, at_most: int = MAX_SIZE) -> int | None:
    value = config.get(key)
    return None if value is None else whole_number(value, f"config.json: {key}", at_most=at_most)


def _flag(config: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    return default if value is None else flag(value, f"config.json: {key}")


def _token_ids(value: object, file: str) -> list[int]:
    """`eos_token_id` may be absent, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    numbers = [whole_number(i, f"{file}: eos_token_id", at_least=-1) for i in ids]
    return [i for i in numbers if i >= 0]  # some configs write -1 for "none"


def _parse_windows(config: dict[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. `layer_types` decides where it is given, as in transformers, which reads a Mistral that
    has it as a Ministral."""
    types = _layer_types(config, num_layers)
    window = None if model_type == "llama" else _optional_size({"sliding_window": 4096} | config, "sliding_window")
    is_on = _flag(config, "use_sliding_window", default=model_type == "mistral")
    if not is_on and model_type == "mistral" and window is not None:
        raise ModelError(f"config.json: use_sliding_window is false, but sliding_window is {window}", hint=_WINDOW_HINT)
    if not is_on:
        window = None
    if types is None:
        first = 0
        if model_type != "mistral" and window is not None:
            first = whole_number(config.get("max_window_layers", 28), "config.json: max_window_layers", at_least=0)
        types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    if "sliding_attention" in types and window is None:
        why = "sliding_window is null" if is_on else "use_sliding_window is not true"
        why = "a llama model has no window" if model_type == "llama" else why
        raise ModelError(f"config.json: layer_types has sliding_attention, but {why}", hint=_WINDOW_HINT)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


_WINDOW_HINT = "make layer_types and the sliding window of config.json agree; see the model's page"
_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(config: dict[str, Any], num_layers: int) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types must be a list of {num_layers} layers, not {shown(types)}")
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise ModelError(
                f"config.json: layer type {shown(kind)} is not supported",
                hint=f"supported layer types: {', '.join(_LAYER_TYPES)}",
            )
    return types
