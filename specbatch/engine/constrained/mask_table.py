"""The masks of draft trees' nodes in the table of rules."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.rule_table import RuleTable
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.constrained.tree import GrammarTree, write_masks
from specbatch.engine.transfers import Transfers


class WantedMasks(NamedTuple):
    """The masks to compute for nodes of the tree of one request, see `tree.write_masks`."""

    req_idx: int
    state: GrammarState
    tree: GrammarTree
    nodes: Seq[int]


class NodeMasks:
    """A launch that reads masks first removes those of the one before it. So the table allows everything but for what
    this launch has written, to whatever requests its lines belonged before, and however that launch ended."""

    def __init__(self, rules: RuleTable, transfers: Transfers) -> None:
        self.rules = rules
        self._transfers = transfers
        self._written: list[Tensor] = []  # indices of masks, on the device

    def clear(self) -> None:
        while self._written:
            self._masks_KW.index_fill_(0, self._written[-1], -1)
            self._written.pop()  # The indices are removed last, because a launch may run out of memory.

    def write(self, wanted: Seq[WantedMasks]) -> int:
        """Returns the number of masks that were computed."""
        table_KW, num_nodes = self._masks_KW, self._num_nodes
        lines = [one.req_idx * num_nodes + node for one in wanted for node in one.nodes]
        if not lines:
            return 0
        assert max(max(one.nodes, default=0) for one in wanted) < num_nodes, "no room for masks of so large a tree"
        # A model has more tokens than its tokenizer, most often. Masks of the width that the matchers write need no
        # copy.
        width = max(one.state.num_words for one in wanted)
        masks_KW = self._transfers.host_tensor((len(lines), width), torch.int32)
        num_computed = write_masks([(one.state, one.tree, one.nodes) for one in wanted], masks_KW.numpy())
        index_K = self._transfers.upload(np.array(lines, dtype=np.int64))
        self._written.append(index_K)
        table_KW[:, :width].index_copy_(0, index_K, self._transfers.upload(masks_KW))
        if width < table_KW.shape[1]:
            table_KW[:, width:].index_fill_(0, index_K, 0)
        return num_computed

    @property
    def _masks_KW(self) -> Tensor:
        assert self.rules.node_masks_SNW is not None
        return self.rules.node_masks_SNW.flatten(0, 1)

    @property
    def _num_nodes(self) -> int:
        assert self.rules.node_masks_SNW is not None
        return self.rules.node_masks_SNW.shape[1]
