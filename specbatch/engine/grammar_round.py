"""The draft trees of one round under the grammars of its requests.

After drafting, the trees come to the host: forbidden nodes leave them, forced ones are added (`grammar.grow`). While
the target runs over what is left, the masks of the nodes are computed; acceptance reads them from the table of rules.
So a round has three parts, which the host joins: draft, forward, accept.

Shape suffixes: B requests, C of them with a grammar, N nodes, D drafts of a chain, S request indices, W words of a
mask.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.rule_table import RuleTable
from specbatch.counts import GrammarCounts
from specbatch.draft.host import HostTrees, ancestry
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.engine.grammar import GrammarState, GrammarTree, fill_masks, grow
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Transfers


class GrammarRound:
    """`sequences`: of the batch, without its padding. `fixed_shapes`: of the round. Trees keep the size of `method`
    then, else they have as many nodes as they need."""

    def __init__(
        self,
        sequences: Seq[Sequence],
        method: DraftMethod,
        rules: RuleTable,
        transfers: Transfers,
        *,
        fixed_shapes: bool,
    ) -> None:
        self._sequences = sequences
        self._method = method
        self._rules = rules
        self._transfers = transfers
        self._fixed_shapes = fixed_shapes
        self._trees: list[tuple[Sequence, GrammarTree]] = []  # of requests with a grammar
        self.counts = GrammarCounts()

    def of_padding(self) -> GrammarRound:
        """Of a batch that is all padding."""
        return GrammarRound([], self._method, self._rules, self._transfers, fixed_shapes=self._fixed_shapes)

    def reshape(self, trees: DraftTrees) -> DraftTrees:
        """The trees to verify. The host waits for the drafts."""
        is_chain, tokens = trees.parents_BN is None, trees.tokens_BN.tolist()
        counts = [len(line) for line in tokens] if trees.num_nodes_B is None else trees.num_nodes_B.tolist()
        chains = [list(range(-1, count - 1)) for count in counts]
        parents = chains if trees.parents_BN is None else trees.parents_BN.tolist()
        began = time.perf_counter()
        grown = []
        for i, (line, count) in enumerate(zip(tokens, counts, strict=True)):
            seq = self._sequences[i] if i < len(self._sequences) else None
            grown.append(self._grow(seq, line[:count], parents[i][:count]))
        self.counts.tree_seconds += time.perf_counter() - began
        is_drawn = trees.probs_BDW is not None
        lines = [tree.tokens + (tree.forbidden if is_drawn else []) for tree in grown]
        width = trees.tokens_BN.shape[1] if self._fixed_shapes else max(map(len, lines))
        host = HostTrees(
            _padded(lines, width, 0),
            np.array([len(tree.tokens) for tree in grown], dtype=np.int64),
            None if is_chain else _padded([tree.parents for tree in grown], width, -2),
        )
        upload = self._transfers.upload
        made = DraftTrees(upload(host.tokens_BN), upload(host.num_nodes_B), max_path=width)
        if is_drawn:
            num_drafts = np.array([len(line) - 1 for line in lines], dtype=np.int64)
            probs = self._probs(trees.probs_BDW, grown, lines, width - 1)
            return dataclasses.replace(made, probs_BDW=probs, num_drafts_B=upload(num_drafts))
        if is_chain:
            return made
        parents_BN, depths_BN, mask_BNW = ancestry(host, -(-width // 32))
        max_path = self._method.max_path if self._fixed_shapes else int(depths_BN.max()) + 1
        return dataclasses.replace(
            made,
            parents_BN=upload(parents_BN[:, :, 0]),
            depths_BN=upload(depths_BN[:, :, 0]),
            mask_BNW=upload(mask_BNW),
            max_path=max_path,
        )

    def _grow(self, seq: Sequence | None, tokens: list[int], parents: list[int]) -> GrammarTree:
        if seq is None or seq.grammar is None:
            return GrammarTree(tokens, parents, list(range(len(tokens))), [], [])
        room = seq.max_length - len(seq.tokens)  # tokens after the root that count
        max_depth = min(room, self._method.max_path - 1) if self._fixed_shapes else room
        max_nodes = self._method.num_nodes + (0 if self._fixed_shapes else min(seq.num_forced_room, room))
        tree = grow(seq.grammar, tokens, parents, max_nodes, max_depth)
        self.counts.forced += len(tree.drafts) - 1 - tree.num_drafts
        self.counts.forbidden += len(tokens) - 1 - tree.num_drafts
        self._trees.append((seq, tree))
        return tree

    def _probs(
        self, probs_BDW: Tensor | None, grown: Seq[GrammarTree], lines: Seq[list[int]], num_drafts: int
    ) -> Tensor:
        """What the drafts of the new chains were drawn from: nothing for forced ones, which are accepted without a
        draw. Drafts of the old chain come first in the new one, the one that is forbidden last."""
        assert probs_BDW is not None
        drawn = [tree.num_drafts + (len(line) > len(tree.tokens)) for tree, line in zip(grown, lines, strict=True)]
        drawn_B = self._transfers.upload(np.array(drawn, dtype=np.int64))
        kept_BDW = torch.nn.functional.pad(probs_BDW, (0, 0, 0, max(0, num_drafts - probs_BDW.shape[1])))
        index = torch.arange(num_drafts, device=kept_BDW.device)
        return torch.where((index < drawn_B[:, None])[:, :, None], kept_BDW[:, :num_drafts], 0.0)

    def write_masks(self) -> None:
        """Compute what may come after each node, and write it to the table."""
        table_SNW = self._rules.node_masks_SNW
        assert table_SNW is not None
        began = time.perf_counter()
        width = max(len(tree.tokens) for _, tree in self._trees)
        masks_CNW = np.full((len(self._trees), width, table_SNW.shape[2]), -1, dtype=np.int32)
        fill_masks([(seq.grammar, tree) for seq, tree in self._trees if seq.grammar is not None])
        for masks_NW, (_, tree) in zip(masks_CNW, self._trees, strict=True):
            for line_W, mask_W in zip(masks_NW, tree.masks, strict=False):
                assert mask_W is not None
                line_W[:] = mask_W
            self.counts.masks += len(tree.masks)
        self.counts.mask_seconds += time.perf_counter() - began
        write_node_masks(self._rules, [seq for seq, _ in self._trees], masks_CNW, self._transfers)


class Grammars:
    """The grammars of an engine's requests. `num_nodes`: of the largest tree. `fixed_shapes`: of its rounds."""

    def __init__(self, table: TableWriter, transfers: Transfers, num_nodes: int, fixed_shapes: bool) -> None:
        self._table = table
        self._transfers = transfers
        self._num_nodes = num_nodes
        self._fixed_shapes = fixed_shapes

    def of_round(self, sequences: Seq[Sequence], method: DraftMethod) -> GrammarRound | None:
        """None: no request of the batch has a grammar."""
        if all(seq.grammar is None for seq in sequences):
            return None
        for seq in sequences:
            if seq.grammar is not None:
                seq.grammar.follow(seq.generated)
        rules = self._table.node_masks(self._num_nodes)
        return GrammarRound(sequences, method, rules, self._transfers, fixed_shapes=self._fixed_shapes)

    def write_first_masks(self, ready: Seq[Sequence]) -> None:
        """Of the first tokens of prompts that end."""
        if first := [seq for seq in ready if seq.grammar is not None]:
            masks_C1W = np.stack(GrammarState.masks([seq.grammar for seq in first if seq.grammar is not None]))[:, None]
            write_node_masks(self._table.node_masks(self._num_nodes), first, masks_C1W, self._transfers)


def write_node_masks(rules: RuleTable, sequences: Seq[Sequence], masks_CNW: np.ndarray, transfers: Transfers) -> None:
    """The masks of the first N nodes of these requests' trees."""
    table_SNW = rules.node_masks_SNW
    assert table_SNW is not None
    assert masks_CNW.shape[1] <= table_SNW.shape[1], "no room for masks of that number of nodes"
    req_idx = transfers.upload(np.array([seq.req_idx for seq in sequences], dtype=np.int64))
    table_SNW[:, : masks_CNW.shape[1]].index_copy_(0, req_idx, transfers.upload(masks_CNW))


def _padded(lines: Seq[list[int]], width: int, fill: int) -> np.ndarray:
    """(B, width) int64."""
    found = np.full((len(lines), width), fill, dtype=np.int64)
    for row, line in zip(found, lines, strict=True):
        row[: len(line)] = line
    return found
