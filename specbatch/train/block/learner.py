"""A block drafter in training: blocks at random roots of the texts, one pass over all of them, losses.

Shape suffixes: T context, F features, N blocks, K positions of a block, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.train.block.attention import TILE, flex_attention_of, masked_attention
from specbatch.train.block.batch import BlockBatch, all_roots, collate, random_roots
from specbatch.train.block.drafter import Tables, TrainedBlocks
from specbatch.train.block.losses import LossSettings, loss_of_logits, losses
from specbatch.train.examples import Example
from specbatch.train.layers import rotary_tables
from specbatch.train.learner import Losses
from specbatch.train.target import FrozenTarget

_MIN_FLEX_HEAD = 16  # the fewest dimensions of a head that FlexAttention computes on CUDA


class BlockLearner:
    """A `Learner` with `num_blocks` blocks a step, rounded up to a multiple of TILE. `batch_tokens`: the most tokens of
    a batch. `longest`: the length of the longest padded text. `make_target`: loads the frozen target.

    On CUDA all batches have the same sizes, for which attention is compiled once.
    """

    def __init__(
        self,
        drafter: TrainedBlocks,
        make_target: Callable[[], FrozenTarget],
        loss: LossSettings,
        num_blocks: int,
        batch_tokens: int,
        longest: int,
        seed: int,
        device: torch.device,
        *,
        compile_loss: bool = False,
    ) -> None:
        block = drafter.block
        self.module = drafter
        self.weights = loss.weights(block.max_drafts)
        self.make_target, self._loss, self._seed = make_target, loss, seed
        # With a multiple of TILE blocks, their positions fill whole tiles whatever the size of a block is.
        self._num_blocks = _rounded(num_blocks)
        self._uses_flex = device.type == "cuda" and block.decoder.head_dim >= _MIN_FLEX_HEAD
        self._fixed = (_rounded(max(batch_tokens, longest)), self._num_blocks) if self._uses_flex else None
        self._compare = torch.compile(loss_of_logits, dynamic=True) if compile_loss else loss_of_logits
        self._tables = rotary_tables(block.decoder, longest + block.block_size, device)

    def settings(self) -> dict[str, Any]:
        block = self.module.block
        return {
            "block_size": block.block_size,
            "num_layers": block.decoder.num_layers,
            "intermediate_size": block.decoder.intermediate_size,
            "kv_heads": block.decoder.num_kv_heads,
            "features": list(block.aux_layers),
            "head": repr(block.head),
            "draft_vocab_size": block.draft_vocab_size,
            "blocks": self._num_blocks,
            **dataclasses.asdict(self._loss),
        }

    def load_target(self) -> None:
        self._target = self.make_target()

    def batch(self, examples: Sequence[Example], step: int) -> BlockBatch:
        roots = random_roots(examples, self._num_blocks, (self._seed << 32) + step)
        return collate(examples, roots, self.module.block, self._fixed)

    def whole(self, examples: Sequence[Example]) -> Iterator[BlockBatch]:
        for roots in all_roots(examples).split(self._num_blocks):
            yield collate(examples, roots, self.module.block, self._fixed)

    def losses(self, batch: BlockBatch) -> Losses:
        features_BLF, target_TE = self._target.features(batch.tokens_BL)
        hidden_QE = self.hidden_states(batch, features_BLF.flatten(0, 1))
        right = self._target.rows(target_TE, batch.target_rows_Q)
        return losses(self.module, hidden_QE, batch, self._target, right, self._loss, self._compare)

    def hidden_states(self, batch: BlockBatch, features_TF: Tensor) -> Tensor:
        """Compute the hidden states (N * K, E) of the blocks of a batch, after the final norm."""
        features_TF = F.pad(features_TF, (0, 0, 0, batch.num_context - len(features_TF)))
        # A position of the context is its distance from the begin of its text, whatever text is there.
        context_T = torch.arange(batch.num_context, device=features_TF.device) % batch.tokens_BL.shape[1]
        in_block_K = torch.arange(batch.tokens_NK.shape[1], device=features_TF.device)
        blocks_Q = ((batch.ends_N - batch.starts_N)[:, None] + in_block_K).flatten()
        embedded_QE = F.embedding(batch.tokens_NK.flatten(), self._target.embedding_VE)
        attend = flex_attention_of(batch) if self._uses_flex else masked_attention(batch)
        hidden_QE: Tensor = self.module(
            embedded_QE, features_TF, self._tables_at(blocks_Q), self._tables_at(context_T), attend
        )
        return hidden_QE

    def _tables_at(self, positions: Tensor) -> Tables:
        cos, sin = self._tables
        return cos[positions], sin[positions]


def _rounded(count: int) -> int:
    """Return the least multiple of TILE that is `count` or more."""
    return max(-(-count // TILE), 1) * TILE
