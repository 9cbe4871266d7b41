"""Drafts that the host makes from the sequences' tokens, and uploads with the batch.

Shape suffixes: B requests, N tree nodes, W words of a mask, Z columns of the uploaded table.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.shape import DraftShape
from specbatch.kernels.corpus import MATCH_POWER


class HostSequence(Protocol):
    """The attributes of a sequence that a host draft may read (`engine.sequence.Sequence`)."""

    # Prompt and output; the last token is the root. Tokens are only appended: a preemption keeps them.
    tokens: list[int]
    predicted: list[int]  # a text that the output may be like, with the prompt's end before it; empty: there is none
    max_length: int  # the maximum length of `tokens`: a draft past it cannot be accepted
    draft_state: Any  # data of the draft method, None at first; all draft shapes of a schedule share it


@dataclass(frozen=True, slots=True)
class HostTrees:
    """One draft tree for each of B sequences, padded to N nodes. Node 0 is the root, whose token is not read; a parent
    comes before its children, and siblings hold different tokens."""

    tokens_BN: NDArray[np.int64]  # ids of the target's vocabulary
    num_nodes_B: NDArray[np.int64]  # 1 .. N
    parents_BN: NDArray[np.int64] | None = None  # None: chains
    # Of chains: the number of tokens before the drafts that are the same where they come from, see `match_scores`.
    # None: it is not known, and counts as 1.
    matched_B: NDArray[np.int64] | None = None

    @staticmethod
    def chains(drafts: Sequence[Sequence[int]], matched: Sequence[int] | None = None) -> HostTrees:
        """Make chains. `drafts`: for each sequence, the tokens after its root, in order; there may be none. `matched`:
        see the field."""
        num_nodes = np.array([1 + len(one) for one in drafts], dtype=np.int64)
        tokens = np.zeros((len(drafts), int(num_nodes.max(initial=1))), dtype=np.int64)
        for line, one in zip(tokens, drafts, strict=True):
            line[1 : 1 + len(one)] = one
        return HostTrees(tokens, num_nodes, matched_B=None if matched is None else np.array(matched, dtype=np.int64))


class HostDraftMethod(DraftMethod):
    """A draft method on the host. The engine reads every result before it launches the next round, so `host_draft`
    sees all tokens. The drafts are deterministic, so the output is that of plain decoding: with chains or trees,
    greedy or sampled."""

    def __init__(self, shape: DraftShape) -> None:
        self.num_nodes = self.num_lookahead = shape.num_draft_tokens
        self.max_path = min(shape.num_steps + 1, shape.num_draft_tokens)
        self._is_chain = shape.is_chain
        self._num_words = -(-self.num_nodes // 32)
        self._num_columns = 1 if self._is_chain else 3 + self._num_words  # columns of one node
        self.num_host_columns = 2 + self.num_nodes * self._num_columns

    @abstractmethod
    def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
        """Return trees of at most `num_nodes` nodes, with at most `max_path` nodes on a path. Where topk is 1, they are
        chains, without `parents_BN`."""

    def pack(self, trees: HostTrees) -> NDArray[np.int32]:
        """Return the table (B, Z) that `draft` reads: the number of nodes and of matched tokens, then for each node its
        token, and in trees its parent, depth and mask words."""
        batch, width = trees.tokens_BN.shape
        counts = trees.num_nodes_B
        assert width <= self.num_nodes, f"{width} nodes, and the draft shape has {self.num_nodes}"
        assert ((counts >= 1) & (counts <= width)).all(), "a tree has its root, and no more nodes than tokens"
        columns = [trees.tokens_BN[:, :, None]]
        if self._is_chain:
            assert trees.parents_BN is None, "a tree, and topk is 1"
        else:
            columns += ancestry(trees, self._num_words)
            assert columns[2].max(initial=0) < self.max_path, f"a path has at most {self.max_path} nodes"
        nodes = np.zeros((batch, self.num_nodes, self._num_columns), dtype=np.int32)
        nodes[:, :width] = np.concatenate(columns, axis=2)
        matched = np.ones_like(counts) if trees.matched_B is None else trees.matched_B
        heads = np.stack((counts, matched), axis=1).astype(np.int32)
        return np.concatenate((heads, nodes.reshape(batch, -1)), axis=1)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        """Return the trees that were uploaded (`pack`)."""
        lines_BZ = table.host_trees_SZ[view.req_idx_B, : self.num_host_columns]
        num_nodes_B = lines_BZ[:, 0].long().clamp(min=1)  # 0: padding, which has no tree
        nodes = lines_BZ[:, 2:].reshape(-1, self.num_nodes, self._num_columns)
        tokens_BN = nodes[:, :, 0].long()
        tokens_BN[:, 0] = view.field(Field.ROOT)
        if self._is_chain:
            scores_BN = match_scores(lines_BZ[:, 1], num_nodes_B, self.num_nodes) if self.scored else None
            return DraftTrees(tokens_BN, num_nodes_B, scores_BN=scores_BN)
        is_node = torch.arange(self.num_nodes, device=nodes.device) < num_nodes_B[:, None]
        parents_BN = torch.where(is_node, nodes[:, :, 1].long(), -2)
        return DraftTrees(tokens_BN, num_nodes_B, parents_BN, nodes[:, :, 2].long(), nodes[:, :, 3:].contiguous())


def match_scores(matched_B: torch.Tensor, num_nodes_B: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Return the scores of chains that continue an earlier text (`DraftTrees.scores_BN`): the probabilities of
    `match_estimates`. Nodes past a chain's end come last."""
    nodes = torch.arange(num_nodes, device=matched_B.device)
    matched_B1 = matched_B[:, None].clamp(min=1).float()
    scores_BN = MATCH_POWER * torch.log(matched_B1 / (matched_B1 + nodes))
    return torch.where(nodes < num_nodes_B[:, None], scores_BN, -torch.inf)


def ancestry(trees: HostTrees, num_words: int) -> list[np.ndarray]:
    """Return parents (B, N, 1), depths (B, N, 1) and mask words (B, N, W). A node past the tree's end sees only
    itself."""
    batch, width = trees.tokens_BN.shape
    lines, nodes = np.arange(batch), np.arange(width)
    parents_BN = np.broadcast_to(nodes - 1, (batch, width)) if trees.parents_BN is None else trees.parents_BN
    is_node = nodes < trees.num_nodes_B[:, None]
    drafts = is_node & (nodes > 0)
    assert (((parents_BN >= 0) & (parents_BN < nodes)) | ~drafts).all(), "a parent comes before its children"
    child = np.sort(np.where(drafts, trees.tokens_BN * width + parents_BN, -1 - nodes), axis=1)
    assert (child[:, 1:] != child[:, :-1]).all(), "siblings hold different tokens"
    depths = np.zeros((batch, width), dtype=np.int64)
    mask = np.zeros((batch, width, num_words), dtype=np.uint32)
    mask[:, nodes, nodes >> 5] = np.uint32(1) << (nodes & 31).astype(np.uint32)
    for node in range(1, width):
        parent = np.where(drafts[:, node], parents_BN[:, node], 0)
        depths[:, node] = np.where(drafts[:, node], depths[lines, parent] + 1, 0)
        mask[:, node] |= np.where(drafts[:, node, None], mask[lines, parent], 0)
    return [parents_BN[:, :, None], depths[:, :, None], mask.view(np.int32)]
