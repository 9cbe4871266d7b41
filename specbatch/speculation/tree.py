"""Draft trees: their legal shapes, their form, and the choice of nodes to verify (EAGLE-2, Li et al. 2024).

Node 0 is the *root*: the last sampled token, whose key and value are not in the cache yet. A parent comes before its
children. A chain is a tree in which every node's parent is the node before it.

Shape suffixes: B sequences, N nodes, C candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftShape:
    """(num_steps, topk, num_draft_tokens): depth of drafting, branches kept at each step, nodes verified (root
    included)."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """Nodes that drafting scores: topk at the first step, topk for each of topk branches at every later one."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    def check(self) -> None:
        """Raises ConfigError naming the parameter that is out of its legal range."""
        if self.num_steps < 1 or self.topk < 1:
            raise ConfigError(
                f"speculation.num_steps and speculation.topk must be at least 1, got {self.num_steps} and {self.topk}"
            )
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError(
                f"speculation.num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} for a chain (topk: 1),"
                f" got {self.num_draft_tokens}",
                hint="leave num_draft_tokens out, or raise topk to draft a tree",
            )
        if not 2 <= self.num_draft_tokens <= self.num_candidates + 1:
            raise ConfigError(
                f"speculation.num_draft_tokens must be between 2 and {self.num_candidates + 1}"
                f" for num_steps {self.num_steps} and topk {self.topk}, got {self.num_draft_tokens}",
                hint="a tree has the root and topk + (num_steps - 1) * topk^2 candidates",
            )


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The drafts of B sequences. Rows are padded to the longest; only the first `num_nodes[b]` nodes of row b count."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64; -1 for the root
    num_nodes: list[int]
    is_chain: bool
    # Chains of a sampling draft: for sequence b the distributions (num_nodes[b] - 1, V) its drafts were drawn from.
    # None for a sequence whose drafts are a deterministic choice.
    draft_probs: list[Tensor | None]

    def depths(self, b: int) -> list[int]:
        """Depth of each node of sequence `b`; the root's is 0."""
        depths = [0]
        for parent in self.parents_BN[b, 1 : self.num_nodes[b]].tolist():
            depths.append(depths[parent] + 1)
        return depths

    def mask(self, b: int) -> Tensor | None:
        """(n, n) bool: which nodes a node sees, its ancestors and itself; None for a chain (causal)."""
        if self.is_chain:
            return None
        n = self.num_nodes[b]
        mask = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents_BN[b, 1:n].tolist(), start=1):
            mask[node] |= mask[parent]
        return mask

    @staticmethod
    def chain(tokens: list[list[int]], draft_probs: list[Tensor | None] | None = None) -> DraftTree:
        """Chains of possibly different lengths; `tokens[b]` starts with the root."""
        width = max(len(t) for t in tokens)
        padded = torch.tensor([t + [0] * (width - len(t)) for t in tokens])
        parents = torch.arange(-1, width - 1).expand(len(tokens), -1)
        return DraftTree(padded, parents, [len(t) for t in tokens], True, draft_probs or [None] * len(tokens))


def select_nodes(
    root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int
) -> DraftTree:
    """Keep the root and the num_draft_tokens - 1 candidates of the highest cumulative score.

    `parents_BC` is the candidate that a candidate hangs on, -1 for the root; it has a smaller index. A child scores
    at most what its parent does, and of equals the earlier one is kept, so the parent of a kept candidate is kept.
    """
    num_rows, keep = tokens_BC.shape[0], num_draft_tokens - 1
    chosen = torch.sort(scores_BC, dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
    tokens = torch.cat((root_B[:, None], tokens_BC.gather(1, chosen)), dim=1)
    parents = torch.searchsorted(chosen, parents_BC.gather(1, chosen)) + 1
    parents = torch.where(parents_BC.gather(1, chosen) < 0, 0, parents)
    parents = torch.cat((torch.full((num_rows, 1), -1, dtype=torch.int64, device=parents.device), parents), dim=1)
    return DraftTree(tokens, parents, [num_draft_tokens] * num_rows, False, [None] * num_rows)
