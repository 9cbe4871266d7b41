"""The sizes and traits of a decoder, and the tensors that they imply.

Files of the folder `families/` read them from a Hugging Face `config.json`, `formats/gguf_config.py` from a GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specbatch.cache.states import StateSizes
from specbatch.errors import ModelError
from specbatch.kernels.activations import Activation
from specbatch.kernels.delta import CHUNK
from specbatch.kernels.experts import Routing, Scoring
from specbatch.models.rope import NO_ROPE, RopeConfig

BackendName = Literal["auto", "native", "transformers"]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # names of an MLP's layers
# Norms of a layer besides those of heads, in the names of Hugging Face checkpoints.
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts that layers have in place of one MLP (Shazeer et al. 2017). A router chooses `top_k`
    experts for each token, and their outputs are added with the router's scores as weights. `Routing` says how the
    traits of the router work together."""

    num_experts: int
    top_k: int  # experts of a token
    expert_size: int  # inner features of an expert
    norm_topk_prob: bool  # the weights of the chosen experts are divided by their sum
    layers: tuple[bool, ...]  # True: the layer has experts; False: one MLP
    shared_size: int = 0  # inner features of the expert that every token takes; 0: none
    shared_gate: bool = True  # a gate weights the output of that expert
    shared_name: str = "shared_expert"  # name of that expert in the block
    scoring: Scoring = "softmax"
    num_groups: int = 1  # the experts are divided into groups of equal sizes, in the order of their numbers
    topk_groups: int = 1  # groups from which a token's experts come
    scale: float = 1.0  # factor of the weights
    router: str = "gate"  # name of the router in the block
    router_bias: bool = False
    wide_router: bool = False  # the router's logits are computed in float32, whatever the model computes in
    # Name in the block of the correction that is added to scores for the choice alone; None: there is none.
    correction_bias: str | None = None
    block: str = "mlp"  # name of the module in a layer
    projections: tuple[str, str, str] = PROJECTIONS  # names in an expert
    expert_bias: bool = False  # the projections of experts have biases
    is_interleaved: bool = False  # files have the experts of a layer in one tensor, see `formats/gpt_oss_experts.py`
    # Names in the block of the tensors of all experts in files, see `formats/stacked_experts.py`.
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k, self.norm_topk_prob, self.scoring, self.num_groups, self.topk_groups, self.scale)

    def experts(self, block: str) -> list[str]:
        """Return the beginnings of the experts' names. `block`: the module's name with a dot."""
        return [f"{block}experts.{number}" for number in range(self.num_experts)]


@dataclass(frozen=True)
class DeltaConfig:
    """The layers of a hybrid that have a Gated DeltaNet (Yang et al. 2024) in place of attention."""

    layers: tuple[bool, ...]  # True: the layer has a Gated DeltaNet; False: attention
    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads; each of these serves as many consecutive value heads
    key_dim: int  # dimensions of a key head
    value_dim: int
    conv_size: int  # inputs of the short convolution: those of a token and of the ones before it

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.keys_size + self.values_size

    @property
    def parts(self) -> dict[str, int]:
        """Return the projections of a layer's input, in the order in which they are computed, with their outputs."""
        return {
            "in_proj_q": self.keys_size,
            "in_proj_k": self.keys_size,
            "in_proj_v": self.values_size,
            "in_proj_z": self.values_size,
            "in_proj_b": self.num_value_heads,
            "in_proj_a": self.num_value_heads,
        }

    @property
    def matrix_bytes(self) -> int:
        """The bytes of the matrices of a request's state, without the inputs that are kept: a round reads and writes
        them."""
        return 4 * sum(self.layers) * self.num_value_heads * self.key_dim * self.value_dim

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of what a layer computes of a token on CUDA: projections, convolution, the systems of
        prompts (float32), outputs and their gated norm. `itemsize`: bytes of a number of the model's dtype."""
        numbers = sum(self.parts.values()) + self.conv_channels + 2 * self.values_size
        return numbers * itemsize + self.num_value_heads * 2 * CHUNK * 4

    def state_sizes(self, max_nodes: int) -> StateSizes:
        """Return the sizes of the states. `max_nodes`: the most nodes of a round's chain."""
        return StateSizes(
            sum(self.layers),
            self.num_value_heads,
            self.value_dim,
            self.key_dim,
            self.conv_channels,
            self.conv_size,
            max_nodes,
        )

    def tensors(self, prefix: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a layer's tensors. `prefix`: the module's name with a dot."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{name}.weight": (size, hidden_size) for name, size in self.parts.items()
        }
        return shapes | {
            f"{prefix}conv1d.weight": (self.conv_channels, 1, self.conv_size),
            f"{prefix}dt_bias": (self.num_value_heads,),
            f"{prefix}A_log": (self.num_value_heads,),
            f"{prefix}norm.weight": (self.value_dim,),
            f"{prefix}out_proj.weight": (hidden_size, self.values_size),
        }


@dataclass(frozen=True)
class QueryGrowth:
    """The factor of queries that grows with their position p: 1 + beta * log(1 + floor(p / period)) (Llama 4)."""

    beta: float
    period: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and traits of a decoder-only transformer."""

    model_type: str  # a key of `families.registry.FAMILIES`
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
    qk_norm: bool  # RMSNorm on queries and keys, before RoPE
    sliding_windows: tuple[int | None, ...]  # per layer; w: position p sees (p - w, p]; None: all of [0, p]
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    attention_scale: float | None = None  # factor of queries times keys; None: head_dim ** -0.5
    activation: Activation = "silu"  # activation of the MLP's gate, or of the inner features of one without a gate
    gated_mlp: bool = True  # False: the MLP has two layers, up_proj and down_proj
    window_rope: RopeConfig | None = None  # rope of the layers with a sliding window; None: `rope`
    nope_layers: tuple[bool, ...] = ()  # True: queries and keys of the layer do not rotate; empty: those of no layer
    is_interleaved: bool = False  # files rotate neighbouring dimensions together, see `formats/arranged.py`
    query_growth: QueryGrowth | None = None
    learned_positions: int = 0  # rows of the table of vectors that are added to embeddings, by position; 0: none
    attention_soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    attention_sinks: bool = False  # each query head has a score that takes part in the softmax and has no value
    logits_soft_cap: float | None = None  # the same of logits
    logits_scale: float = 1.0  # factor of logits
    lm_head_bias: bool = False
    embedding_scale: float | None = None  # factor of the embeddings that enter the first layer
    wide_embedding_scale: bool = False  # True: the factor is not rounded to the dtype of the model
    # Factor of the outputs of attention and MLP before they are added to the residual. The decoder computes with
    # residuals that are divided by it, which norms do not change. Families divide `embedding_scale` by it, and
    # they divide `rms_norm_eps` by its square.
    residual_scale: float = 1.0
    norms: tuple[str, ...] = PRE_NORMS  # names of a layer's norms
    norm_offset: float = 0.0  # is added to the weights of all norms
    layer_norms: bool = False  # norms also subtract the mean (LayerNorm); False: RMSNorm
    norm_bias: bool = False  # LayerNorms have biases
    is_parallel: bool = False  # attention and MLP of a layer read the same residual
    wide_norms: bool = False  # norms are rounded after their weight scales them; False: before, too
    qk_norm_whole: bool = False  # the norms of queries and keys are over all heads of a token; False: over each head
    qk_norm_last: bool = False  # the norms of queries and keys are after RoPE
    num_mtp_layers: int = 0  # layers after the last one that predict further tokens; they are not loaded
    moe: MoeConfig | None = None  # None: no layer has experts
    delta: DeltaConfig | None = None  # None: all layers have attention
    gated_attention: bool = False  # the output of attention is multiplied by the sigmoid of a gate
    # Names and shapes of the tensors of a model that transformers computes, which has none of the traits of layers
    # above; None: the traits say what tensors there are.
    tensors: tuple[tuple[str, tuple[int, ...]], ...] | None = None

    @property
    def lm_head_name(self) -> str:
        """Return the name of the tensor that the LM head multiplies with."""
        return "model.embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    @property
    def is_native(self) -> bool:
        """Return whether a family computes the model. Otherwise transformers does."""
        return self.tensors is None

    def has_delta(self, layer: int) -> bool:
        """Return whether the layer has a Gated DeltaNet in place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values, in the order of the KV cache."""
        return tuple(layer for layer in range(self.num_layers) if not self.has_delta(layer))

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        if self.nope_layers and self.nope_layers[layer]:
            return NO_ROPE
        return self.rope if self.window_rope is None or self.sliding_windows[layer] is None else self.window_rope

    def for_rows(self, max_tokens: int | None) -> ModelConfig:
        """Return the configuration for rows of up to this number of tokens; None: as many as the model allows."""
        length = min(max_tokens or self.max_position_embeddings, self.max_position_embeddings)
        window_rope = None if self.window_rope is None else self.window_rope.for_rows(length)
        return replace(self, rope=self.rope.for_rows(length), window_rope=window_rope, max_position_embeddings=length)

    def as_head(self, *, qkv_bias: bool = False, output_bias: bool = False) -> ModelConfig:
        """Return the configuration of a draft head's one layer. It has the sizes, the activation (if a gate can have
        it) and the rotary embedding of this one, and no other trait, whatever the family is."""
        return replace(
            self,
            num_layers=1,
            sliding_windows=(None,),
            qk_norm=False,
            qk_norm_whole=False,
            qk_norm_last=False,
            num_mtp_layers=0,
            mlp_bias=False,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            attention_scale=None,
            window_rope=None,
            attention_soft_cap=None,
            attention_sinks=False,
            activation=self.activation if self.activation in ("silu", "gelu_tanh") else "silu",
            gated_mlp=True,
            nope_layers=(),
            is_interleaved=False,
            query_growth=None,
            learned_positions=0,
            logits_soft_cap=None,
            logits_scale=1.0,
            lm_head_bias=False,
            embedding_scale=None,
            wide_embedding_scale=False,
            rms_norm_eps=self.rms_norm_eps * self.residual_scale**2,
            residual_scale=1.0,
            norms=PRE_NORMS,
            norm_offset=0.0,
            layer_norms=False,
            norm_bias=False,
            is_parallel=False,
            wide_norms=False,
            moe=None,
            delta=None,
            gated_attention=False,
            tensors=None,
        )

    def checked(self, source: str) -> ModelConfig:
        """Return the same configuration. Raise ModelError, which begins with `source`, if sizes do not fit each
        other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{source}: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"{source}: head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        for layer in range(self.num_layers):
            rope = self.rope_of(layer)
            if (turned := rope.rotary_dim(self.head_dim)) % 2 or not turned:
                raise ModelError(f"{source}: {turned} dimensions of a head rotate; rotary embeddings need pairs")
            divisors = (rope.frequency_divisors or (), rope.long_divisors) if rope.scaling == "longrope" else ()
            if any(len(some) != turned // 2 for some in divisors):
                raise ModelError(f"{source}: short_factor and long_factor must have {turned // 2} numbers each")
        return self


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (Hugging Face) tensor names and shapes of a checkpoint, in model order; linear weights (out, in)."""
    c = config
    if c.tensors is not None:
        return dict(c.tensors)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    if c.learned_positions:
        shapes["model.embed_positions.weight"] = (c.learned_positions, c.hidden_size)
    for layer in range(c.num_layers):
        has_experts = c.moe is not None and c.moe.layers[layer]
        shapes |= layer_tensors(c, f"model.layers.{layer}.", has_experts=has_experts, has_delta=c.has_delta(layer))
    shapes |= _norm_tensors(c, "model.norm")
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    if c.lm_head_bias:
        shapes["lm_head.bias"] = (c.vocab_size,)
    return shapes


def _norm_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def layer_tensors(
    config: ModelConfig,
    prefix: str,
    input_size: int | None = None,
    *,
    has_experts: bool = False,
    has_delta: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of one layer's tensors, as `expected_tensors` does for the model. `input_size`: the
    size of the attention's input; None: the hidden size."""
    c, q_size, kv_size = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    input_size = input_size or c.hidden_size
    linears: Linears = {}
    if not has_delta:
        linears = {
            "self_attn.q_proj": (q_size, input_size, c.qkv_bias),
            "self_attn.k_proj": (kv_size, input_size, c.qkv_bias),
            "self_attn.v_proj": (kv_size, input_size, c.qkv_bias),
            "self_attn.o_proj": (c.hidden_size, q_size, c.output_bias),
        }
        if c.gated_attention:
            linears["self_attn.gate_proj"] = (q_size, input_size, c.qkv_bias)
    other: dict[str, tuple[int, ...]] = {}
    if has_experts:
        assert c.moe is not None
        linears |= _expert_linears(c.moe, c.hidden_size)
        if c.moe.correction_bias is not None:
            other[f"{prefix}{c.moe.block}.{c.moe.correction_bias}"] = (c.moe.num_experts,)
    else:
        linears |= _mlp_linears("mlp", c.hidden_size, c.intermediate_size, has_bias=c.mlp_bias)
        if not c.gated_mlp:
            del linears["mlp.gate_proj"]
    shapes = _norm_tensors(c, f"{prefix}{c.norms[0]}")
    if has_delta:
        assert c.delta is not None
        shapes |= c.delta.tensors(f"{prefix}linear_attn.", c.hidden_size)
    for name, (size_out, size_in, has_bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (size_out, size_in)
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (size_out,)
    if c.attention_sinks and not has_delta:
        shapes[f"{prefix}self_attn.sinks"] = (c.num_heads,)
    if c.qk_norm and not has_delta:
        sizes = {"q": q_size, "k": kv_size} if c.qk_norm_whole else dict.fromkeys("qk", c.head_dim)
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (size,) for name, size in sizes.items()}
    for name in c.norms[1:]:
        other |= _norm_tensors(c, f"{prefix}{name}")
    return shapes | other


Linears = dict[str, tuple[int, int, bool]]  # (outputs, inputs, whether it has a bias) by name


def _mlp_linears(
    block: str, hidden_size: int, inner_size: int, names: tuple[str, str, str] = PROJECTIONS, *, has_bias: bool = False
) -> Linears:
    gate, up, down = (f"{block}.{name}" for name in names)
    return {
        gate: (inner_size, hidden_size, has_bias),
        up: (inner_size, hidden_size, has_bias),
        down: (hidden_size, inner_size, has_bias),
    }


def _expert_linears(moe: MoeConfig, hidden_size: int) -> Linears:
    linears: Linears = {f"{moe.block}.{moe.router}": (moe.num_experts, hidden_size, moe.router_bias)}
    for name in moe.experts(f"{moe.block}."):
        linears |= _mlp_linears(name, hidden_size, moe.expert_size, moe.projections, has_bias=moe.expert_bias)
    if moe.shared_size:
        linears |= _mlp_linears(f"{moe.block}.{moe.shared_name}", hidden_size, moe.shared_size)
        if moe.shared_gate:
            linears[f"{moe.block}.{moe.shared_name}_gate"] = (1, hidden_size, False)
    return linears
