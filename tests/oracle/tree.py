"""The draft trees of the oracle, and the choice of nodes to verify (EAGLE-2, Li et al. 2024).

Shape suffixes: B sequences, N nodes, C candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The drafts of B sequences. Rows are padded to the longest; only the first `num_nodes[b]` nodes of row b count."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64; -1 for the root
    num_nodes: list[int]
    is_chain: bool
    # The distributions (num_nodes[b] - 1, V) from which the drafts of sequence b were drawn, if they are a sampled
    # chain. None for a sequence whose drafts are compared with the target's own tokens.
    draft_probs: list[Tensor | None]

    def depths(self, b: int) -> list[int]:
        """Return the depth of each node of sequence `b`. The root has 0."""
        depths = [0]
        for parent in self.parents_BN[b, 1 : self.num_nodes[b]].tolist():
            depths.append(depths[parent] + 1)
        return depths

    def mask(self, b: int) -> Tensor | None:
        """Return (n, n) bool: the nodes that a node sees, its ancestors and itself. Return None for a chain
        (causal)."""
        if self.is_chain:
            return None
        n = self.num_nodes[b]
        mask = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents_BN[b, 1:n].tolist(), start=1):
            mask[node] |= mask[parent]
        return mask

    @staticmethod
    def chain(tokens: list[list[int]], draft_probs: list[Tensor | None] | None = None) -> DraftTree:
        """Make chains, which can have different lengths. `tokens[b]` starts with the root."""
        width = max(len(t) for t in tokens)
        padded = torch.tensor([t + [0] * (width - len(t)) for t in tokens])
        parents = torch.arange(-1, width - 1).expand(len(tokens), -1)
        return DraftTree(padded, parents, [len(t) for t in tokens], True, draft_probs or [None] * len(tokens))


def select_nodes(
    root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int
) -> DraftTree:
    """Keep the root and the num_draft_tokens - 1 candidates with the highest cumulative scores.

    `parents_BC` is the parent of a candidate, -1 for the root. It has a smaller index. A child has at most the score of
    its parent, and of equal ones the earlier one is kept, so the parent of a kept candidate is kept.
    """
    num_rows, keep = tokens_BC.shape[0], num_draft_tokens - 1
    chosen = torch.sort(scores_BC, dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
    tokens = torch.cat((root_B[:, None], tokens_BC.gather(1, chosen)), dim=1)
    parents = torch.searchsorted(chosen, parents_BC.gather(1, chosen)) + 1
    parents = torch.where(parents_BC.gather(1, chosen) < 0, 0, parents)
    parents = torch.cat((torch.full((num_rows, 1), -1, dtype=torch.int64, device=parents.device), parents), dim=1)
    return DraftTree(tokens, parents, [num_draft_tokens] * num_rows, False, [None] * num_rows)
