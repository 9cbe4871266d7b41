"""A batch of texts for a block drafter: blocks at random roots, and what each of their positions learns.

The texts are the *context*, T = B * L positions. Block n has the root at some position of a text, and sees the context
of this text before the root. Blocks of all texts are computed in one pass.

Shape suffixes: B sequences, L padded length, N blocks, K positions of a block, J drafts of a block, R drafts to learn,
Q rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbatch.models.blocks.config import BlockConfig
from specbatch.train.examples import Example, padded_length
from specbatch.train.learner import moved


@dataclass(frozen=True)
class BlockBatch:
    """Right-padded texts, and blocks in them. A block whose context ends at 0 is padding, and nothing learns from it.

    Drafts that learn are in the order of their steps: first all first drafts of blocks.
    """

    tokens_BL: Tensor
    num_context: int  # the context with padding: B * L or more
    starts_N: Tensor  # the context that a block sees begins here, and
    ends_N: Tensor  # ends before its root
    tokens_NK: Tensor
    before_NJ: Tensor  # the token before each draft
    drafts_R: Tensor  # rows of (N * J): the drafts that learn
    learn_R: Tensor  # rows of (N * K): the position that makes the draft
    target_rows_Q: Tensor  # rows of (B * L): the positions at which the target predicts
    target_R: Tensor  # rows of Q: the target's position that teaches the draft
    counts: list[int]  # the number of drafts that learn at each step
    chains_R: Tensor  # rows of (B * L), see `learner.py`

    @property
    def rows(self) -> list[Tensor]:
        return list(self.chains_R.split(self.counts))

    def to(self, device: torch.device) -> BlockBatch:
        """Return a copy on `device`, without waiting for it."""
        tensors: dict[str, Any] = {n: moved(x, device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def all_roots(examples: Sequence[Example]) -> Tensor:
    """Return the roots that learn, as pairs of a text and a position (N, 2): tokens of answers, and not their last."""
    pairs = [
        torch.stack((torch.full((e.num_chains,), b), torch.arange(e.prompt_length, e.prompt_length + e.num_chains)), 1)
        for b, e in enumerate(examples)
    ]
    return torch.cat(pairs)


def random_roots(examples: Sequence[Example], count: int, seed: int) -> Tensor:
    """Return `count` of all roots, or all if they are fewer, sorted: neighbours share the context that they see."""
    roots = all_roots(examples)
    order = torch.randperm(len(roots), generator=torch.Generator().manual_seed(seed))
    return roots[order[:count].sort().values]


def collate(
    examples: Sequence[Example], roots_N2: Tensor, block: BlockConfig, fixed: tuple[int, int] | None = None
) -> BlockBatch:
    """Pad the texts to a batch with a block at each root. `fixed`: the sizes of context and blocks, which are padded to
    them; None: no more than the texts and roots."""
    length = padded_length(max(len(e.tokens) for e in examples))
    num_rows = len(examples) * length
    tokens_BL = torch.zeros(len(examples), length, dtype=torch.int64)
    for b, e in enumerate(examples):
        tokens_BL[b, : len(e.tokens)] = torch.tensor(e.tokens)
    num_context, num_blocks = fixed or (num_rows, len(roots_N2))
    assert num_rows <= num_context, (num_rows, num_context)
    assert len(roots_N2) <= num_blocks, (len(roots_N2), num_blocks)

    text_N, root_N = roots_N2.unbind(1)
    starts_N = text_N * length
    ends_N = starts_N + root_N
    tokens_NK = torch.full((num_blocks, block.block_size), block.mask_token_id)
    flat = tokens_BL.view(-1)
    tokens_NK[: len(roots_N2), 0] = flat[ends_N]

    # Draft j of a block is the token j + 1 after its root.
    lengths_N = torch.tensor([len(e.tokens) for e in examples])[text_N]
    drafts_J = torch.arange(block.max_drafts)
    is_there_JN = root_N + 1 + drafts_J[:, None] < lengths_N
    step_R, block_R = is_there_JN.nonzero(as_tuple=True)
    # The row of the token before each draft: that at which the target predicts it.
    before_NJ = torch.zeros(num_blocks, block.max_drafts, dtype=torch.int64)
    before_NJ[: len(roots_N2)] = ends_N[:, None] + drafts_J
    target_rows_Q, target_R = before_NJ[block_R, step_R].unique(return_inverse=True)

    def padded(rows_N: Tensor) -> Tensor:
        return torch.cat((rows_N, rows_N.new_zeros(num_blocks - len(rows_N))))

    return BlockBatch(
        tokens_BL,
        num_context,
        padded(starts_N),
        padded(ends_N),
        tokens_NK,
        before_NJ=flat[before_NJ.clamp(max=num_rows - 1)],
        drafts_R=block_R * block.max_drafts + step_R,
        learn_R=block_R * block.block_size + block.first + step_R,
        target_rows_Q=target_rows_Q,
        target_R=target_R,
        counts=is_there_JN.sum(dim=1).tolist(),
        chains_R=ends_N[block_R] - 1,
    )
