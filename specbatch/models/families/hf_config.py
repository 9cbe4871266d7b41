"""Typed access to a Hugging Face `config.json`. Its errors name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.errors import ModelError
from specbatch.kernels.activations import Activation
from specbatch.models.checks import MAX_LAYERS, MAX_SIZE, flag, mapping, norm_eps, number, shown, whole_number
from specbatch.models.config import ModelConfig, MoeConfig
from specbatch.models.rope import RopeConfig, parse_rope

MAX_EXPERTS = 10_000
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # names of the number of layers that predict further tokens
WINDOW_HINT = "make layer_types and the sliding window of config.json agree; see the model's page"
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers
# Our name of an activation, by its names in config.json.
_ACTIVATIONS: Mapping[str, Activation] = {
    **{"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"},
    **{"gelu": "gelu", "relu": "relu", "relu2": "relu2"},
}
PLAIN_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish")  # without a gate


class HfConfig:
    """A `config.json` and, for the end-of-sequence ids, a `generation_config.json`, both already parsed."""

    def __init__(self, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> None:
        self.raw, self.generation = raw, generation or {}
        self.model_type: str = raw["model_type"]

    def size(self, key: str, at_most: int = MAX_SIZE) -> int:
        value = self.optional_size(key, at_most)
        if value is None:
            raise ModelError(f"config.json has no {key!r}")
        return value

    def optional_size(self, key: str, at_most: int = MAX_SIZE) -> int | None:
        value = self.raw.get(key)
        return None if value is None else whole_number(value, f"config.json: {key}", at_most=at_most)

    def count(self, key: str, default: int) -> int:
        """Return a number of layers or experts, which can be 0. `default`: the number of a file that has none."""
        value = self.raw.get(key)
        return default if value is None else whole_number(value, f"config.json: {key}", at_least=0, at_most=MAX_EXPERTS)

    def num_mtp_layers(self, default: int) -> int:
        return self.count(MTP_KEYS[0], self.count(MTP_KEYS[1], default))

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return a number, or None for null. `default`: the value of a key that is not there."""
        value = self.raw.get(key, default)
        return None if value is None else number(value, f"config.json: {key}")

    def positive_number(self, key: str, default: float | None = None) -> float | None:
        value = self.optional_number(key, default)
        if value is not None and value <= 0:
            raise ModelError(f"config.json: {key} is {value:g}; it must be above 0")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw.get(key)
        return default if value is None else flag(value, f"config.json: {key}")

    def experts(
        self,
        count_keys: tuple[str, ...],
        expert_size: int,
        layers: tuple[bool, ...],
        *,
        norm_topk_prob: bool,
        **traits: Any,
    ) -> MoeConfig:
        """Read a mixture of experts. `count_keys`: the names that the number of experts has in files. `traits`: further
        fields of `MoeConfig`."""
        key = next((key for key in count_keys if self.raw.get(key) is not None), count_keys[0])
        num_experts, top_k = self.size(key, MAX_EXPERTS), self.size("num_experts_per_tok", MAX_EXPERTS)
        if top_k > num_experts:
            raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than {key} {num_experts}")
        return MoeConfig(num_experts, top_k, expert_size, norm_topk_prob, layers, **traits)

    def sparse_layers(self, key: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return which layers have experts: those of the type "sparse". `default`: the layers of a file without
        types."""
        kinds = self.raw.get(key)
        if kinds is None:
            return default
        known = ("dense", "sparse")
        if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in known for kind in kinds):
            raise ModelError(
                f"config.json: {key} must be a list of {len(default)} times 'dense' or 'sparse', not {shown(kinds)}"
            )
        return tuple(kind == "sparse" for kind in kinds)

    def num_layers(self) -> int:
        return self.size("num_hidden_layers", MAX_LAYERS)

    def activation(self, *keys: str, only: Sequence[str], default: str = "silu") -> Activation:
        """Return the activation that the first of these keys names. `only`: the names that the family may have."""
        found: object = next((self.raw[key] for key in keys if self.raw.get(key) is not None), default)
        if not isinstance(found, str) or found not in only:
            raise ModelError(f"{keys[0]} {shown(found)} is not supported", hint=f"supported: {', '.join(only)}")
        return _ACTIVATIONS[found]

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return `layer_types`, checked; None: there are none."""
        types = self.raw.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelError(f"config.json: layer_types must be a list of {num_layers} layers, not {shown(types)}")
        for kind in types:
            if kind not in (FULL, SLIDING):
                raise ModelError(
                    f"config.json: layer type {shown(kind)} is not supported",
                    hint=f"supported layer types: {FULL}, {SLIDING}",
                )
        return types

    def windows(self, num_layers: int, window: int | None, why_none: str, first: int = 0) -> tuple[int | None, ...]:
        """Return the sliding window of each layer.

        `layer_types` decides where it is given, as in transformers; otherwise the layers from `first` on have it.
        `why_none`: the reason why `window` is None, for the error if a layer type asks for one.
        """
        types = self.layer_types(num_layers)
        if types is None:
            types = [FULL if window is None or i < first else SLIDING for i in range(num_layers)]
        return windows_of(types, window, why_none)

    def windows_but_each(self, period: int, default: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer. Without `layer_types`, each `period`-th layer sees all tokens.
        `default`: the window of a file that has none."""
        window = self.optional_size("sliding_window") if "sliding_window" in self.raw else default
        num_layers = self.num_layers()
        types = [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
        return windows_of(self.layer_types(num_layers) or types, window, "sliding_window is null")

    def ropes(self, max_position: int, theta: object, window_theta: object) -> tuple[RopeConfig, RopeConfig]:
        """Return the rotary embeddings of layers without and with a window: `rope_parameters` of transformers 5, by
        layer type, and `rope_scaling` for layers without one. `theta` and `window_theta`: those of types without."""
        by_type = self._object("rope_parameters")
        if others := by_type.keys() - {FULL, SLIDING}:
            raise ModelError(
                f"config.json: rope_parameters has {shown(min(others))}, which is no layer type",
                hint=f"write the parameters into {FULL} and {SLIDING} of rope_parameters",
            )
        full, window = (mapping(by_type.get(kind) or {}, f"config.json: {kind}") for kind in (FULL, SLIDING))
        # transformers does not read the original length outside of the parameters of a layer type.
        outside = "original_max_position_embeddings"
        shared = {key: value for key, value in self.raw.items() if not key.startswith("rope_") and key != outside}

        def parsed(parameters: Mapping[str, Any]) -> RopeConfig:
            return parse_rope({**shared, "rope_parameters": parameters}, max_position)

        scaling = self._object("rope_scaling")
        return parsed({"rope_theta": theta, **full, **scaling}), parsed({"rope_theta": window_theta, **window})

    def _object(self, key: str) -> Mapping[str, Any]:
        return mapping(self.raw.get(key) or {}, f"config.json: {key}")

    def one_window(self, num_layers: int, window: int | None) -> tuple[int | None, ...]:
        """Return the windows of a family whose layers all have the same one: its class in transformers does not read
        `layer_types`. Raise ModelError if the file has other types."""
        kind = FULL if window is None else SLIDING
        if any(found != kind for found in self.layer_types(num_layers) or ()):
            raise ModelError(
                f"config.json: layer_types is not {kind} for each layer, and sliding_window sets all layers of a "
                f"{self.model_type} model to that",
                hint=WINDOW_HINT,
            )
        return (window,) * num_layers

    def model_config(
        self,
        windows: tuple[int | None, ...],
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        max_position: int,
        eos: int | list[int] | None = None,
        eps: float = 1e-6,
        eps_key: str = "rms_norm_eps",
        theta: float = 10000.0,
        partial: float | None = None,
        intermediate_size: int | None = None,
        rope: RopeConfig | None = None,
        tied: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        activation: Activation = "silu",
        **traits: Any,
    ) -> ModelConfig:
        """Read what all families have. The first group of arguments are defaults of transformers' config class for keys
        that are not there (None: the number of heads; hidden_size / heads; no end of a sequence; whole heads rotate; it
        must be there). `rope`: the rotary embedding if the family reads it itself. `traits`: further fields of
        `ModelConfig`."""
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_attention_heads")
        if "head_dim" in self.raw:
            head_dim = self.optional_size("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ModelError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
            head_dim = hidden_size // num_heads
        max_position = self.optional_size("max_position_embeddings") or max_position
        rope = rope or parse_rope(self.raw, max_position, theta, partial)
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size or self.size("intermediate_size"),
            num_layers=len(windows),
            num_heads=num_heads,
            num_kv_heads=self.optional_size("num_key_value_heads") or num_kv_heads or num_heads,
            head_dim=head_dim,
            rms_norm_eps=norm_eps(self.raw.get(eps_key, eps), f"config.json: {eps_key}"),
            rope=rope,
            max_position_embeddings=rope.context_length(max_position, "config.json: max_position_embeddings"),
            tie_word_embeddings=self.flag("tie_word_embeddings", default=tied),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sliding_windows=windows,
            eos_token_ids=eos_token_ids(self.raw, self.generation, eos),
            activation=activation,
            **traits,
        ).checked("config.json")


def renamed_keys(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with our names of keys. `names`: ours by those of the file. Raise ModelError if a file has
    both names with different values."""
    renamed = dict(raw)
    for key, ours in names.items():
        value = renamed.pop(key, None)
        if value is None:
            continue
        if renamed.get(ours) not in (None, value):
            raise ModelError(f"config.json: {key} is {shown(value)}, but {ours} is {shown(renamed[ours])}")
        renamed[ours] = value
    return renamed


def windows_of(types: Sequence[str], window: int | None, why_none: str) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by its type. `why_none`: see `HfConfig.windows`."""
    if SLIDING in types and window is None:
        raise ModelError(f"config.json: layer_types, or its default, has {SLIDING}, but {why_none}", hint=WINDOW_HINT)
    return tuple(window if kind == SLIDING else None for kind in types)


def eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], default: int | list[int] | None = None
) -> tuple[int, ...]:
    """Return the end-of-sequence ids. As in transformers, generation_config.json replaces what config.json says.
    `default`: the ids of a config.json that has no such key."""
    ids = _token_ids(generation.get("eos_token_id"), "generation_config.json")
    ids = ids or _token_ids(raw.get("eos_token_id", default), "config.json")
    return tuple(dict.fromkeys(ids))


def _token_ids(value: object, file: str) -> list[int]:
    """Return `eos_token_id`, which may be absent, one id or a list of ids, as a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    numbers = [whole_number(i, f"{file}: eos_token_id", at_least=-1) for i in ids]
    return [i for i in numbers if i >= 0]  # some configs write -1 for "none"
