"""The description of a block drafter: its backbone, its head, and the tensors of its checkpoint.

All public block drafters have the backbone of DFlash (Chen et al. 2026): layers of Qwen3, whose keys and values of past
positions are computed from the target's hidden states. They differ in the head that turns the hidden states of a block
into tokens. `drafter.py` computes the backbone, `heads.py` the heads, `formats/block_files.py` opens files.

Shape suffixes: W draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specbatch.models.config import ModelConfig, layer_tensors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark: a bias of low rank that depends on the token before. `gated`: times a gate that reads the hidden state.
    `rnn`: a recurrent state of the block takes its place."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    name = "Markov"

    def tensors(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (vocab, self.rank),
            "markov_head.markov_w2.weight": (draft_vocab, self.rank),
        }
        if self.kind == "gated":
            shapes |= _linear("markov_head.gate_proj", self.rank, hidden + self.rank)
        if self.kind == "rnn":
            shapes |= _linear("markov_head.joint_proj", 3 * self.rank, 2 * self.rank + hidden)
        return shapes


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2: of the most likely `top_k` tokens, the one that fits the token before best."""

    rank: int
    top_k: int
    name = "selector"

    def tensors(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        return {
            "candidate_selector.predecessor_codebook": (vocab, self.rank),
            "candidate_selector.successor_codebook": (vocab, self.rank),
            "candidate_selector.hidden_projection.weight": (self.rank, hidden),
        }


@dataclass(frozen=True)
class DominoConfig:
    """Domino: a bias that depends on the state of a GRU over the block's tokens, from position `first` on."""

    embedding_size: int
    state_size: int
    first: int
    name = "Domino"

    def tensors(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        return {
            "prefix_gru.weight_ih_l0": (3 * self.state_size, hidden),
            "prefix_gru.weight_hh_l0": (3 * self.state_size, self.state_size),
            "embed_proj.0.weight": (self.embedding_size, hidden + self.state_size),
            "embed_proj.2.weight": (draft_vocab, self.embedding_size),
        }


@dataclass(frozen=True)
class RefinerConfig:
    """XPress: a bias that depends on all tokens before, in `num_passes` passes over the whole block. Each pass reads
    the tokens that the one before has chosen (Jacobi iteration)."""

    rank: int
    inner_size: int
    num_passes: int
    block_size: int
    name = "XPress"

    def tensors(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        r = self.rank
        sizes = {
            "token_embed": (vocab, r),
            "down_h": (r, hidden),
            "down_g": (r, hidden),
            "in_proj": (r, 3 * r),
            "mlp_gate": (self.inner_size, r),
            "mlp_up": (self.inner_size, r),
            "mlp_down": (r, self.inner_size),
            "readout": (draft_vocab, r),
        }
        shapes: dict[str, tuple[int, ...]] = {f"refiner_head.{name}.weight": size for name, size in sizes.items()}
        return shapes | {"refiner_head.mix_l": (r, self.block_size, self.block_size)}


@dataclass(frozen=True)
class LatticeConfig:
    """LiLiCorr: layers with attention over all candidates of a block give two vectors to each, one as predecessor and
    one as successor. The product of two vectors is the logit of a pair of neighbours."""

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    top_k: int
    factor_size: int
    vector_eps: float
    logit_scale: float
    block_size: int
    name = "LiLiCorr"

    def tensors(self, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
        p, own, heads = "lilicorr.", self.hidden_size, self.num_heads
        shapes: dict[str, tuple[int, ...]] = {
            f"{p}feature_mlp.0.weight": (NUM_FEATURES,),
            f"{p}feature_mlp.0.bias": (NUM_FEATURES,),
            f"{p}slot_embedding": (self.block_size - 1, own),
            f"{p}rank_embedding": (self.top_k, own),
            f"{p}relative_slot_bias": (heads, 2 * self.block_size - 1),
            f"{p}same_slot_bias": (heads,),
            f"{p}output_norm.weight": (own,),
            f"{p}anchor_norm.weight": (own,),
        }
        linears = {
            "feature_mlp.1": (own, NUM_FEATURES),
            "feature_mlp.3": (own, own),
            "pass_hidden_proj": (own, hidden),
            "context_proj": (own, hidden),
            "factor_input_proj": (own, 3 * own),
            **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (self.factor_size, own)),
        }
        if own != hidden:
            linears["token_proj"] = (own, hidden)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes |= {f"{p}{prefix}{name}_norm.weight": (own,) for name in ("attn", "mlp")}
            shapes[f"{p}{prefix}attn.in_proj_weight"] = (3 * own, own)
            shapes[f"{p}{prefix}attn.in_proj_bias"] = (3 * own,)
            linears |= {
                f"{prefix}attn.out_proj": (own, own),
                f"{prefix}mlp.0": (self.inner_size, own),
                f"{prefix}mlp.2": (own, self.inner_size),
            }
        for name, (outputs, inputs) in linears.items():
            shapes |= _linear(f"{p}{name}", outputs, inputs)
        return shapes


HeadConfig = MarkovConfig | SelectorConfig | DominoConfig | RefinerConfig | LatticeConfig
NUM_FEATURES = 5  # numbers that say how likely a candidate of LiLiCorr is


@dataclass(frozen=True)
class ConvolutionConfig:
    """DFlash2: convolutions over the positions of a block, before and after attention and MLP of each layer. Their
    kernels are sums of a fixed one and one that the hidden state gives to each group of features."""

    num_taps: int
    group_size: int

    def tensors(self, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        outputs = 2 * self.num_taps * (hidden // self.group_size)
        shapes: dict[str, tuple[int, ...]] = {}
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"{prefix}{part}.base_kernel"] = (2, self.num_taps, hidden)
            shapes[f"{prefix}{part}.kernel_projection.weight"] = (outputs, hidden)
        return shapes


@dataclass(frozen=True)
class BlockConfig:
    """`decoder` describes the layers of the backbone. A block has `block_size` tokens: the root, and mask tokens."""

    decoder: ModelConfig
    block_size: int
    mask_token_id: int
    aux_layers: tuple[int, ...]  # the target's layers, from 0, whose inputs it reads; see `EagleConfig.aux_layers`
    feature_size: int  # the width of one target feature
    draft_vocab_size: int
    first: int = 1  # the first position of a block that drafts: 0, the root, or 1, the first mask
    head: HeadConfig | None = None  # None: each position drafts without the others (DFlash)
    convolution: ConvolutionConfig | None = None
    causal_layers: tuple[bool, ...] = ()  # True: a position of the block does not see later ones; empty: all False
    has_embedding: bool = False  # own embeddings; False: the target's
    has_lm_head: bool = False  # an LM head of its own; False: the target's
    has_vocab_map: bool = False  # d2t: a reduced vocabulary
    has_mask_embedding: bool = False  # the mask token has a vector of its own
    confidence_size: int = 0  # inputs of the confidence head; 0: there is none
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None

    @property
    def max_drafts(self) -> int:
        """Return the number of tokens that a block drafts."""
        return self.block_size - self.first

    @property
    def head_name(self) -> str:
        return "no head" if self.head is None else f"{self.head.name} head"

    def is_causal(self, layer: int) -> bool:
        return bool(self.causal_layers) and self.causal_layers[layer]


def expected_block_tensors(block: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a block drafter's checkpoint."""
    c = block.decoder
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, len(block.aux_layers) * block.feature_size),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for layer in range(c.num_layers):
        shapes |= layer_tensors(c, f"layers.{layer}.")
        if block.convolution is not None:
            shapes |= block.convolution.tensors(f"layers.{layer}.", c.hidden_size)
    if block.has_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, c.hidden_size)
    if block.has_lm_head:
        shapes["lm_head.weight"] = (block.draft_vocab_size, c.hidden_size)
    if block.has_vocab_map:
        shapes |= {"d2t": (block.draft_vocab_size,), "t2d": (c.vocab_size,)}
    if block.has_mask_embedding:
        shapes["mask_embedding"] = (c.hidden_size,)
    if block.head is not None:
        shapes |= block.head.tensors(c.hidden_size, c.vocab_size, block.draft_vocab_size)
    if block.confidence_size:
        shapes |= _linear("confidence_head.proj", 1, block.confidence_size)
    return shapes


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
