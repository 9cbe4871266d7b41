"""The heads of block drafters: from the hidden states and logits of a block to the logits of each draft.

A head may let a draft depend on the ones before it. Then the drafts of a block are chosen one after the other, which
costs little, because the backbone has already run.

Shape suffixes: B requests, K positions of the block, S drafts, T branches of all requests (one of each in a chain, the
same number of each in a tree), E hidden size, W draft vocabulary, V vocabulary of the target, R rank, C candidates, F
inputs of a layer, X outputs of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.matrix import Matrix
from specbatch.models.blocks.config import (
    BlockConfig,
    DominoConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
)
from specbatch.models.linears.linear import Linear
from specbatch.models.linears.packed import is_packable
from specbatch.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class BlockOutput:
    """The result of a pass over blocks. Drafts are those of the positions from `first` on."""

    hidden_BKE: Tensor
    logits_SBW: Tensor  # without the head's part
    first: int
    root_B: Tensor  # int64
    before_B: Tensor | None  # int64, the token before the root; None: the head does not read it
    feature_BE: Tensor | None  # the feature of the position before the root; None: the head does not read it
    target_ids_W: Tensor | None  # the target token of each draft token; None: the same vocabulary

    def hidden(self, draft: int) -> Tensor:
        """Return the hidden states (B, E) of a draft's position."""
        return self.hidden_BKE[:, self.first + draft]


def _of_branches(x_BX: Tensor, before_T: Tensor) -> Tensor:
    """Repeat the rows of requests for their branches, of which `before_T` has one element each."""
    count = len(before_T) // len(x_BX)
    return x_BX if count == 1 else x_BX.repeat_interleave(count, dim=0)


class Steps(Protocol):
    """The function that gives the logits of one draft after the other."""

    def __call__(self, draft: int, before_T: Tensor, parents_T: Tensor | None = None) -> Tensor:
        """Return the logits (T, W) of draft number `draft`, or (B, W) where they do not depend on the branch.
        `before_T`: the token before it in each branch. `parents_T`: the branch of the call before that each one
        continues; None: the same one."""
        ...


def _continued(state_TR: Tensor, parents_T: Tensor | None) -> Tensor:
    """Return the states of the branches that continue the branches `parents_T`."""
    return state_TR if parents_T is None else state_TR[parents_T]


def _of_candidates(block: BlockOutput, ids_TC: Tensor, scores_TC: Tensor) -> Tensor:
    """Return logits (T, W) that are -inf for all tokens but the candidates."""
    logits_TW = block.logits_SBW.new_full((len(ids_TC), block.logits_SBW.shape[-1]), -torch.inf)
    return logits_TW.scatter_(1, ids_TC, scores_TC.to(logits_TW.dtype))


class BlockHead(ABC):
    """A head of a block drafter."""

    reads_before = False  # True: it reads the token before the root
    reads_feature = False  # True: it reads the feature of the position before the root
    reads_all = False  # True: it needs the logits of all positions, also if fewer drafts are wanted

    @abstractmethod
    def steps(self, block: BlockOutput) -> Steps:
        """Return the function that gives the logits of one draft after the other."""


class NoHead(BlockHead):
    """DFlash: each draft is chosen alone."""

    def steps(self, block: BlockOutput) -> Steps:
        return lambda draft, before_T, parents_T=None: block.logits_SBW[draft]


class MarkovHead(BlockHead):
    """DSpark's head, see `MarkovConfig`."""

    def __init__(self, config: MarkovConfig, weights: WeightLoader) -> None:
        name = "markov_head."
        self._config = config
        self.first_VR = weights.tensor(f"{name}markov_w1.weight")
        self._second = weights.linear(f"{name}markov_w2")
        self._gate = weights.linear(f"{name}gate_proj", has_bias=True) if config.kind == "gated" else None
        self._joint = weights.linear(f"{name}joint_proj", has_bias=True) if config.kind == "rnn" else None

    def steps(self, block: BlockOutput) -> Steps:
        state_TR = self.first_VR.new_zeros(len(block.root_B), self._config.rank)

        def step(draft: int, before_T: Tensor, parents_T: Tensor | None = None) -> Tensor:
            nonlocal state_TR
            latent_TR, hidden_TE = self.first_VR[before_T], _of_branches(block.hidden(draft), before_T)
            if self._gate is not None:
                latent_TR = latent_TR * torch.sigmoid(self._gate(torch.cat((hidden_TE, latent_TR), dim=-1)))
            if self._joint is not None:
                state_TR = _continued(state_TR, parents_T)
                joint = self._joint(torch.cat((state_TR, latent_TR, hidden_TE), dim=-1))
                gate_TR, new_TR, out_TR = joint.chunk(3, dim=-1)
                gate_TR = torch.sigmoid(gate_TR)
                state_TR = gate_TR * state_TR + (1 - gate_TR) * torch.tanh(new_TR)
                latent_TR = torch.tanh(out_TR)
            return _of_branches(block.logits_SBW[draft], before_T) + self._second(latent_TR)

        return step


class ConfidenceHead:
    """DSpark's estimate of the probability that a draft is accepted, if those before it are: a linear layer over the
    hidden state and, in most files, the Markov head's vector of the token before. `tokens_VR`: these vectors; None: the
    layer does not read them. It computes in float32 at least."""

    def __init__(self, weights: WeightLoader, tokens_VR: Tensor | None) -> None:
        name = "confidence_head.proj"
        weight_F, self._bias_1 = weights.wide(f"{name}.weight")[0], weights.wide(f"{name}.bias")
        rank = 0 if tokens_VR is None else tokens_VR.shape[1]
        self._of_hidden_E, self._of_token_R = weight_F.split((len(weight_F) - rank, rank))
        self._tokens_VR = tokens_VR

    def steps(self, block: BlockOutput) -> Callable[[int, Tensor], Tensor]:
        """Return the function that gives the logarithm of the probability (B,) of one draft after the other, from its
        number and the token before it. It does not depend on the draft itself."""
        dtype = self._bias_1.dtype
        logits_BK = block.hidden_BKE.to(dtype) @ self._of_hidden_E + self._bias_1

        def step(draft: int, before_B: Tensor) -> Tensor:
            logit_B = logits_BK[:, block.first + draft]
            if self._tokens_VR is not None:
                logit_B = logit_B + self._tokens_VR[before_B].to(dtype) @ self._of_token_R
            return F.logsigmoid(logit_B)

        return step


class SelectorHead(BlockHead):
    """DFlash2's head, see `SelectorConfig`. All tokens but the candidates have the logit -inf."""

    def __init__(self, config: SelectorConfig, weights: WeightLoader) -> None:
        name = "candidate_selector."
        self._top_k = config.top_k
        self._before_VR = weights.tensor(f"{name}predecessor_codebook")
        self._after_VR = weights.tensor(f"{name}successor_codebook")
        self._projection = weights.linear(f"{name}hidden_projection")

    def steps(self, block: BlockOutput) -> Steps:
        values_SBC, ids_SBC = block.logits_SBW.topk(self._top_k, dim=-1)

        def step(draft: int, before_T: Tensor, parents_T: Tensor | None = None) -> Tensor:
            ids_TC = _of_branches(ids_SBC[draft], before_T)
            context_TR = self._before_VR[before_T] * _of_branches(self._projection(block.hidden(draft)), before_T)
            scores_TC = (self._after_VR[ids_TC] @ context_TR[:, :, None])[:, :, 0]
            return _of_candidates(block, ids_TC, _of_branches(values_SBC[draft], before_T) + scores_TC)

        return step


def _matrix(weights: WeightLoader, weight_OI: Tensor) -> Matrix:
    return weights.new_linear(weight_OI) if is_packable(weight_OI) else weight_OI


class DominoHead(BlockHead):
    """Domino's head, see `DominoConfig`. `embedded`: the function from tokens to embeddings.

    A round runs it once for each draft, so it is arranged for few kernels: the part of the logits that reads the hidden
    states is computed for all drafts at once.
    """

    def __init__(self, config: DominoConfig, weights: WeightLoader, embedded: Callable[[Tensor], Tensor]) -> None:
        self._config, self._embedded, self._ops = config, embedded, weights.ops
        down = weights.tensor("embed_proj.0.weight")
        of_hidden, of_state = down.split((down.shape[1] - config.state_size, config.state_size), dim=1)
        self._of_hidden = weights.new_linear(of_hidden.contiguous())
        matrices = (weights.tensor(f"prefix_gru.weight_{name}_l0") for name in ("ih", "hh"))
        up_WX = weights.tensor("embed_proj.2.weight")
        self._gru: list[Matrix] = [_matrix(weights, one) for one in matrices]
        self._bottleneck: list[Matrix] = [_matrix(weights, one) for one in (of_state.contiguous(), up_WX)]

    def steps(self, block: BlockOutput) -> Steps:
        first, hidden_BKE = block.first, block.hidden_BKE
        inner_BKX = self._of_hidden(hidden_BKE.flatten(0, 1)).unflatten(0, hidden_BKE.shape[:2])
        state_TR: Tensor | None = None

        def step(draft: int, before_T: Tensor, parents_T: Tensor | None = None) -> Tensor:
            nonlocal state_TR
            state_TR = self._ops.gru_step(self._embedded(before_T), state_TR, parents_T, *self._gru)
            if first + draft < self._config.first:
                return block.logits_SBW[draft]
            inner_BX = inner_BKX[:, first + draft]
            logits_TW: Tensor = self._ops.add_bottleneck(block.logits_SBW[draft], inner_BX, state_TR, *self._bottleneck)
            return logits_TW

        return step


class RefinerHead(BlockHead):
    """XPress's head, see `RefinerConfig`."""

    reads_before = True

    def __init__(self, config: RefinerConfig, weights: WeightLoader) -> None:
        name = "refiner_head."
        self._config = config
        self._embedding_VR = weights.tensor(f"{name}token_embed.weight")
        linears = "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout"
        self._linears = {linear: weights.linear(f"{name}{linear}") for linear in linears}
        self._mix_RKK = weights.tensor(f"{name}mix_l").tril()

    def steps(self, block: BlockOutput) -> Steps:
        hidden_BKE, first = block.hidden_BKE, block.first
        mean_BKE = hidden_BKE.mean(dim=1, keepdim=True).expand_as(hidden_BKE)
        fixed = torch.cat((self._apply("down_h", hidden_BKE), self._apply("down_g", mean_BKE)), dim=-1)
        logits_SBW = block.logits_SBW
        size, num_drafts = hidden_BKE.shape[1], len(logits_SBW)
        # The tokens before each position. With `first` 1 these are the token before the root, the root, and the drafts.
        assert block.before_B is not None
        known = [block.root_B] if first == 0 else [block.before_B, block.root_B]
        for _ in range(self._config.num_passes):
            chosen_SB = logits_SBW.argmax(dim=-1)
            if block.target_ids_W is not None:
                chosen_SB = block.target_ids_W[chosen_SB]
            before_BK = torch.cat((torch.stack(known), chosen_SB))[:size].transpose(0, 1)
            if before_BK.shape[1] < size:  # positions after the last draft, which it does not see
                before_BK = F.pad(before_BK, (0, size - before_BK.shape[1]))
            logits_SBW = block.logits_SBW + self._bias(fixed, before_BK, first, num_drafts)
        return lambda draft, before_T, parents_T=None: logits_SBW[draft]

    def _bias(self, fixed: Tensor, before_BK: Tensor, first: int, num_drafts: int) -> Tensor:
        x_BKR = self._apply("in_proj", torch.cat((fixed, self._embedding_VR[before_BK]), dim=-1))
        x_BKR = x_BKR + torch.einsum("rkj,bjr->bkr", self._mix_RKK, x_BKR)
        x_SBR = x_BKR[:, first : first + num_drafts].transpose(0, 1)
        inner = F.silu(self._apply("mlp_gate", x_SBR)) * self._apply("mlp_up", x_SBR)
        return self._apply("readout", x_SBR + self._apply("mlp_down", inner))

    def _apply(self, name: str, x: Tensor) -> Tensor:
        return self._linears[name](x.flatten(0, 1)).unflatten(0, x.shape[:2])


class LatticeHead(BlockHead):
    """LiLiCorr's head, see `LatticeConfig`. All tokens but the candidates have the logit -inf. Shape suffixes: L = S *
    C candidates of a block, H heads, D head dimension, F size of the vectors."""

    reads_feature = True
    reads_all = True

    def __init__(
        self,
        config: LatticeConfig,
        weights: WeightLoader,
        embedded: Callable[[Tensor], Tensor],
        hidden_size: int,
        eps: float,
    ) -> None:
        self._config, self._embedded = config, embedded
        p = "lilicorr."

        def linear(name: str) -> Linear:
            return weights.linear(f"{p}{name}", has_bias=True)

        self._feature_norm = weights.tensor(f"{p}feature_mlp.0.weight"), weights.tensor(f"{p}feature_mlp.0.bias")
        self._feature_linears = linear("feature_mlp.1"), linear("feature_mlp.3")
        self._of_token = linear("token_proj") if config.hidden_size != hidden_size else None
        self._of_position, self._of_context = linear("pass_hidden_proj"), linear("context_proj")
        self._factors = linear("factor_input_proj")
        self._outgoing, self._incoming, self._of_root = map(linear, ("out_head", "in_head", "anchor_out_head"))
        self._output_norm, self._root_norm = (weights.norm(f"{p}{name}_norm", eps) for name in ("output", "anchor"))
        slots_SE, ranks_CE = weights.tensor(f"{p}slot_embedding"), weights.tensor(f"{p}rank_embedding")
        self._places_LE = (slots_SE[:, None] + ranks_CE).flatten(0, 1)
        self._layers = [_LatticeLayer(config, weights, f"{p}layers.{i}.", eps) for i in range(config.num_layers)]
        position_L = torch.arange(config.block_size - 1, device=weights.device).repeat_interleave(config.top_k)
        relative_LL = position_L[:, None] - position_L
        bias_HLL = weights.tensor(f"{p}relative_slot_bias")[:, relative_LL + config.block_size - 1]
        same_H = weights.tensor(f"{p}same_slot_bias")
        self._bias_HLL = bias_HLL + (relative_LL == 0) * same_H[:, None, None]

    def steps(self, block: BlockOutput) -> Steps:
        c, target_ids_W = self._config, block.target_ids_W
        values_SBC, ids_SBC = block.logits_SBW.log_softmax(dim=-1).topk(c.top_k, dim=-1)
        tokens_SBC = ids_SBC if target_ids_W is None else target_ids_W[ids_SBC]
        first_BC, pairs_BSCC = self._scores(block, values_SBC.transpose(0, 1), tokens_SBC.transpose(0, 1))

        def step(draft: int, before_T: Tensor, parents_T: Tensor | None = None) -> Tensor:
            ids_TC, scores_TC = _of_branches(ids_SBC[draft], before_T), _of_branches(first_BC, before_T)
            if draft:
                is_chosen_TC = _of_branches(tokens_SBC[draft - 1], before_T) == before_T[:, None]
                index = is_chosen_TC.int().argmax(dim=1)[:, None, None].expand(-1, 1, c.top_k)
                scores_TC = _of_branches(pairs_BSCC[:, draft - 1], before_T).gather(1, index)[:, 0]
            return _of_candidates(block, ids_TC, scores_TC)

        return step

    def _scores(self, block: BlockOutput, values_BSC: Tensor, tokens_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the candidates of the first position (B, C), and of those of each other one after each
        candidate before it (B, S - 1, C, C)."""
        c, size = self._config, values_BSC.shape
        embedded_TE = self._embedded(tokens_BSC.reshape(-1))
        x_TE = embedded_TE if self._of_token is None else self._of_token(embedded_TE)
        hidden_TE = block.hidden_BKE[:, block.first :].flatten(0, 1)
        x_TE = x_TE + self._of_position(hidden_TE).repeat_interleave(c.top_k, dim=0)
        x_TE = x_TE + self._of_likelihood(values_BSC)
        x_BLE = x_TE.view(size[0], -1, c.hidden_size) + self._places_LE
        for layer in self._layers:
            x_BLE = layer.forward(x_BLE, self._bias_HLL)
        assert block.feature_BE is not None
        x_TE, root_BE = self._output_norm(x_BLE.flatten(0, 1)), self._root_norm(self._of_context(block.feature_BE))
        root_TE = root_BE.repeat_interleave(x_BLE.shape[1], dim=0)
        factors_TE = F.silu(self._factors(torch.cat((x_TE, root_TE, x_TE * root_TE), dim=-1)))
        outgoing, incoming = (self._vectors(of, factors_TE).view(*size, -1) for of in (self._outgoing, self._incoming))
        first_BC = (self._vectors(self._of_root, root_BE)[:, None] * incoming[:, 0]).sum(-1)
        pairs_BSCC = outgoing[:, :-1] @ incoming[:, 1:].transpose(-1, -2)
        return first_BC * c.logit_scale, pairs_BSCC * c.logit_scale

    def _of_likelihood(self, values_BSC: Tensor) -> Tensor:
        """Return what the log-probabilities of candidates add to their inputs, (T, E)."""
        rank_C = torch.arange(self._config.top_k, device=values_BSC.device, dtype=values_BSC.dtype)
        parts = (
            values_BSC,
            values_BSC.exp(),
            values_BSC - values_BSC[..., :1],
            (rank_C / max(1, self._config.top_k - 1)).expand_as(values_BSC),
            (rank_C == 0).to(values_BSC.dtype).expand_as(values_BSC),
        )
        weight, bias = self._feature_norm
        features = F.layer_norm(torch.stack(parts, dim=-1).to(weight.dtype).flatten(0, 2), weight.shape, weight, bias)
        first, second = self._feature_linears
        return second(F.silu(first(features)))

    def _vectors(self, linear: Linear, x_TE: Tensor) -> Tensor:
        return F.normalize(linear(x_TE), dim=-1, eps=self._config.vector_eps)


class _LatticeLayer:
    """A layer of LiLiCorr: attention with biases by the distance of two positions, and an MLP without a gate."""

    def __init__(self, config: LatticeConfig, weights: WeightLoader, prefix: str, eps: float) -> None:
        self._num_heads = config.num_heads
        self._norms = [weights.norm(f"{prefix}{name}_norm", eps) for name in ("attn", "mlp")]
        qkv = weights.tensor(f"{prefix}attn.in_proj_weight"), weights.tensor(f"{prefix}attn.in_proj_bias")
        self._qkv = weights.new_linear(*qkv)
        self._out, self._up, self._down = (
            weights.linear(f"{prefix}{name}", has_bias=True) for name in ("attn.out_proj", "mlp.0", "mlp.2")
        )

    def forward(self, x_BLE: Tensor, bias_HLL: Tensor) -> Tensor:
        shape, x_TE = x_BLE.shape, x_BLE.flatten(0, 1)
        qkv = self._qkv(self._norms[0](x_TE)).view(*shape[:2], 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        attended_BHLD = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias_HLL[None])
        x_TE = x_TE + self._out(attended_BHLD.transpose(1, 2).reshape(x_TE.shape))
        return (x_TE + self._down(F.silu(self._up(self._norms[1](x_TE))))).view(shape)


def head_of(block: BlockConfig, weights: WeightLoader, embedded: Callable[[Tensor], Tensor]) -> BlockHead:
    """Make the head of a block drafter. `embedded`: the function from tokens to embeddings."""
    config = block.head
    if config is None:
        return NoHead()
    if isinstance(config, MarkovConfig):
        return MarkovHead(config, weights)
    if isinstance(config, SelectorConfig):
        return SelectorHead(config, weights)
    if isinstance(config, DominoConfig):
        return DominoHead(config, weights, embedded)
    if isinstance(config, RefinerConfig):
        return RefinerHead(config, weights)
    return LatticeHead(config, weights, embedded, block.decoder.hidden_size, block.decoder.rms_norm_eps)


def confidence_of(block: BlockConfig, weights: WeightLoader, head: BlockHead) -> ConfidenceHead | None:
    """Make the confidence head of a block drafter with this head; None: its file has none."""
    if not block.confidence_size:
        return None
    reads_token = block.confidence_size > block.decoder.hidden_size
    assert not reads_token or isinstance(head, MarkovHead), "the file gives the size"
    return ConfidenceHead(weights, head.first_VR if reads_token and isinstance(head, MarkovHead) else None)
