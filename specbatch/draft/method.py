"""What a draft method is to the engine.

A draft method gives a round its draft trees: on the device from tensors (`DraftMethod.draft`), or on the host from the
sequences' tokens (`host.HostDraftMethod`). `draft.METHODS` names all of them.

Shape suffixes: B requests, N tree nodes, M longest path, D = N - 1 drafts, W draft vocabulary or words of a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.network import DraftNet


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """One draft tree of N nodes for each request, the root first. A chain has no parents, depths and mask."""

    tokens_BN: Tensor  # int64
    num_nodes_B: Tensor | None = None  # int64, where trees have different sizes; None: all have N nodes
    parents_BN: Tensor | None = None  # int64; -1: the root; -2: past num_nodes
    depths_BN: Tensor | None = None  # int64; 0: the root, and nodes past num_nodes
    mask_BNW: Tensor | None = None  # int32 words: which nodes a node sees, see `kernels.torch.tree.select_nodes`
    max_path: int | None = None  # nodes of the longest path, of trees that are no longer the method's own; None: its
    # What a chain's drafts were drawn from, for rejection sampling. None: a draft is accepted if it is the token that
    # the target itself draws.
    probs_BDW: Tensor | None = None
    # int64, with `probs_BDW`: drafts of each chain. One past `num_nodes_B` is forbidden to the target: it is rejected
    # without being verified. None: all of `probs_BDW`.
    num_drafts_B: Tensor | None = None


class DraftMethod(ABC):
    """How the rounds of one draft shape draft. Its attributes do not change: CUDA graphs are captured with them."""

    num_nodes: int  # N
    max_path: int  # M: nodes of the longest path, the root included
    num_lookahead: int  # slots past the committed ones that a round may write, see `shape.num_lookahead`
    net: DraftNet | None = None  # the draft network, which follows what is committed; None: there is none
    # Of the accepted drafts, the first N whose entries in the network's cache were computed in drafting: draft-extend
    # would compute the same.
    num_reusable = 0
    reads_tokens = False  # whether `draft` reads `RequestTable.tokens_SL`
    has_drafts = True  # else trees have the root alone
    num_host_columns = 0  # of `RequestTable.host_trees_SZ`, for trees that the host uploads

    def with_room(self, batch_size: int) -> DraftMethod:
        """What drafts where shapes are fixed and rows have grammars: its trees have room for forced tokens. Batches of
        this size, padding included."""
        return self

    @abstractmethod
    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        """The trees of one batch, from tensors, with fixed shapes and without reading anything on the host: a CUDA
        graph may hold it. `sampled`: some request may have a positive temperature."""
