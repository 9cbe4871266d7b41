"""The heads of block drafters: from the hidden states and logits of a block to the logits of each draft.

A head may let a draft depend on the ones before it. Then the drafts of a block are chosen one after the other, which
costs little, because the backbone has already run.

Shape suffixes: B requests, K positions of the block, S drafts, E hidden size, W draft vocabulary, V vocabulary of the
target, R rank, C candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.models.blocks.config import DominoConfig, HeadConfig, MarkovConfig, RefinerConfig, SelectorConfig
from specbatch.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class BlockOutput:
    """The result of a pass over blocks. Drafts are those of the positions from `first` on."""

    hidden_BKE: Tensor
    logits_SBW: Tensor  # without the head's part
    first: int
    root_B: Tensor  # int64
    before_B: Tensor | None  # int64, the token before the root; None: the head does not read it
    target_ids_W: Tensor | None  # the target token of each draft token; None: the same vocabulary

    def hidden(self, draft: int) -> Tensor:
        """Return the hidden states (B, E) of a draft's position."""
        return self.hidden_BKE[:, self.first + draft]


# Given the number of a draft, and the token before it (B,), return the draft's logits (B, W).
Steps = Callable[[int, Tensor], Tensor]


class BlockHead(ABC):
    """A head of a block drafter."""

    is_sequential = True  # False: the logits of a draft do not depend on the drafts that were drawn before it
    reads_before = False  # True: it reads the token before the root

    @abstractmethod
    def steps(self, block: BlockOutput) -> Steps:
        """Return the function that gives the logits of one draft after the other."""


class NoHead(BlockHead):
    """DFlash: each draft is chosen alone."""

    is_sequential = False

    def steps(self, block: BlockOutput) -> Steps:
        return lambda draft, before_B: block.logits_SBW[draft]


class MarkovHead(BlockHead):
    """DSpark's head, see `MarkovConfig`."""

    def __init__(self, config: MarkovConfig, weights: WeightLoader) -> None:
        name = "markov_head."
        self._config = config
        self._first_VR = weights.tensor(f"{name}markov_w1.weight")
        self._second = weights.linear(f"{name}markov_w2")
        self._gate = weights.linear(f"{name}gate_proj", has_bias=True) if config.kind == "gated" else None
        self._joint = weights.linear(f"{name}joint_proj", has_bias=True) if config.kind == "rnn" else None

    def steps(self, block: BlockOutput) -> Steps:
        state_BR = self._first_VR.new_zeros(len(block.root_B), self._config.rank)

        def step(draft: int, before_B: Tensor) -> Tensor:
            nonlocal state_BR
            latent_BR = self._first_VR[before_B]
            if self._gate is not None:
                latent_BR = latent_BR * torch.sigmoid(self._gate(torch.cat((block.hidden(draft), latent_BR), dim=-1)))
            if self._joint is not None:
                joint = self._joint(torch.cat((state_BR, latent_BR, block.hidden(draft)), dim=-1))
                gate_BR, new_BR, out_BR = joint.chunk(3, dim=-1)
                gate_BR = torch.sigmoid(gate_BR)
                state_BR = gate_BR * state_BR + (1 - gate_BR) * torch.tanh(new_BR)
                latent_BR = torch.tanh(out_BR)
            return block.logits_SBW[draft] + self._second(latent_BR)

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

        def step(draft: int, before_B: Tensor) -> Tensor:
            ids_BC = ids_SBC[draft]
            context_BR = self._before_VR[before_B] * self._projection(block.hidden(draft))
            scores_BC = values_SBC[draft] + (self._after_VR[ids_BC] @ context_BR[:, :, None])[:, :, 0]
            logits_BW = torch.full_like(block.logits_SBW[draft], -torch.inf)
            return logits_BW.scatter_(1, ids_BC, scores_BC)

        return step


class DominoHead(BlockHead):
    """Domino's head, see `DominoConfig`. `embedded`: the function from tokens to embeddings."""

    def __init__(self, config: DominoConfig, weights: WeightLoader, embedded: Callable[[Tensor], Tensor]) -> None:
        self._config, self._embedded = config, embedded
        self._of_input = weights.new_linear(weights.tensor("prefix_gru.weight_ih_l0"))
        self._of_state = weights.new_linear(weights.tensor("prefix_gru.weight_hh_l0"))
        self._down, self._up = weights.linear("embed_proj.0"), weights.linear("embed_proj.2")

    def steps(self, block: BlockOutput) -> Steps:
        state_BR = block.hidden_BKE.new_zeros(len(block.root_B), self._config.state_size)

        def step(draft: int, before_B: Tensor) -> Tensor:
            nonlocal state_BR
            state_BR = self._next(self._embedded(before_B), state_BR)
            logits_BW = block.logits_SBW[draft]
            if block.first + draft < self._config.first:
                return logits_BW
            inner = self._down(torch.cat((block.hidden(draft), state_BR), dim=-1))
            return logits_BW + self._up(F.silu(inner))

        return step

    def _next(self, x_BE: Tensor, state_BR: Tensor) -> Tensor:
        """Return the state of the GRU (Cho et al. 2014, in torch's form) after a token."""
        reset, update, new = self._of_input(x_BE).chunk(3, dim=-1)
        reset_of_state, update_of_state, new_of_state = self._of_state(state_BR).chunk(3, dim=-1)
        update = torch.sigmoid(update + update_of_state)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_of_state) * new_of_state)
        return (1 - update) * candidate + update * state_BR


class RefinerHead(BlockHead):
    """XPress's head, see `RefinerConfig`."""

    is_sequential = False
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
        return lambda draft, before_B: logits_SBW[draft]

    def _bias(self, fixed: Tensor, before_BK: Tensor, first: int, num_drafts: int) -> Tensor:
        x_BKR = self._apply("in_proj", torch.cat((fixed, self._embedding_VR[before_BK]), dim=-1))
        x_BKR = x_BKR + torch.einsum("rkj,bjr->bkr", self._mix_RKK, x_BKR)
        x_SBR = x_BKR[:, first : first + num_drafts].transpose(0, 1)
        inner = F.silu(self._apply("mlp_gate", x_SBR)) * self._apply("mlp_up", x_SBR)
        return self._apply("readout", x_SBR + self._apply("mlp_down", inner))

    def _apply(self, name: str, x: Tensor) -> Tensor:
        return self._linears[name](x.flatten(0, 1)).unflatten(0, x.shape[:2])


def head_of(config: HeadConfig | None, weights: WeightLoader, embedded: Callable[[Tensor], Tensor]) -> BlockHead:
    """Make the head that `config` describes."""
    if config is None:
        return NoHead()
    if isinstance(config, MarkovConfig):
        return MarkovHead(config, weights)
    if isinstance(config, SelectorConfig):
        return SelectorHead(config, weights)
    if isinstance(config, DominoConfig):
        return DominoHead(config, weights, embedded)
    return RefinerHead(config, weights)
