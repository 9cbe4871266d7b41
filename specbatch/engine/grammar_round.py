"""The draft trees of one round under the grammars of its requests.

After drafting, the trees come to the host: forbidden nodes leave them, forced ones are added (`grammar.grow`). While
the target runs over what is left, the masks of the nodes are computed; acceptance reads them from the table of rules.
So a round has three parts, which the host joins: draft, forward, accept.

The round before it may be under way when a round is launched. Its tokens are read while the drafts are computed; in
plain decoding, where the host changes no tree, while the target runs.

Shape suffixes: B requests, N nodes, K nodes of all trees, D drafts of a chain, S request indices, W words of a mask.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.rule_table import RuleTable
from specbatch.counts import GrammarCounts
from specbatch.draft.host import HostTrees, ancestry
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.engine.grammar import GrammarState, GrammarTree, grow, write_masks
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Download, Transfers


class GrammarRound:
    """`sequences`: of the batch, without its padding. `read`: reads what was launched before this round, after which
    requests may be finished. `fixed_shapes`: of the round. Trees keep the size of `method` then, else they have as many
    nodes as they need."""

    def __init__(
        self,
        sequences: Seq[Sequence],
        method: DraftMethod,
        rules: RuleTable,
        transfers: Transfers,
        read: Callable[[], object],
        *,
        fixed_shapes: bool,
    ) -> None:
        self._sequences = sequences
        self._read = read
        self._method = method
        self._rules = rules
        self._transfers = transfers
        self._fixed_shapes = fixed_shapes
        self._trees: list[tuple[int, GrammarState, GrammarTree]] = []  # of requests with a grammar: index, state, tree
        self.counts = GrammarCounts()

    def of_padding(self) -> GrammarRound:
        """Of a batch that is all padding."""
        nothing = functools.partial(list[None])
        return GrammarRound([], self._method, self._rules, self._transfers, nothing, fixed_shapes=self._fixed_shapes)

    def reshape(self, trees: DraftTrees) -> DraftTrees:
        """The trees to verify. The host waits for the drafts, unless no other tree is possible."""
        if self._fixed_shapes and self._method.num_nodes == 1:
            return trees
        is_chain = trees.parents_BN is None

        def download(tensor: Tensor | None) -> Download | None:
            return None if tensor is None else self._transfers.download(tensor)

        drafts, counts, links = map(download, (trees.tokens_BN, trees.num_nodes_B, trees.parents_BN))
        self._follow()  # meanwhile
        assert drafts is not None
        tokens = drafts.wait().tolist()
        sizes = [len(line) for line in tokens] if counts is None else counts.wait().tolist()
        parents = [None] * len(tokens) if links is None else links.wait().tolist()
        began = time.perf_counter()
        grown = []
        is_drawn = trees.probs_BDW is not None
        for i, (line, size, above) in enumerate(zip(tokens, sizes, parents, strict=True)):
            grown.append(self._grow(i, line[:size], None if above is None else above[:size], is_drawn))
        self.counts.tree_seconds += time.perf_counter() - began
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

    def _follow(self) -> None:
        """Go to the end of what is committed."""
        self._read()
        began = time.perf_counter()
        for seq in self._sequences:
            if seq.grammar is not None and not seq.is_finished:
                seq.grammar.follow(seq.tokens, seq.num_prompt)
        self.counts.advance_seconds += time.perf_counter() - began

    def _grow(self, index: int, tokens: list[int], parents: list[int] | None, is_drawn: bool) -> GrammarTree:
        seq = self._sequences[index] if index < len(self._sequences) else None
        if seq is None or seq.grammar is None or seq.is_finished:
            return GrammarTree.of(tokens, parents)
        room = seq.max_length - len(seq.tokens)  # tokens after the root that count
        max_depth = min(room, self._method.max_path - 1) if self._fixed_shapes else room
        max_nodes = self._method.num_nodes + (0 if self._fixed_shapes else min(seq.num_forced_room, room))
        # Where drafts are drawn, a forced token has no probability: it has to be accepted without a draw.
        tree = grow(seq.grammar, tokens, parents, max_nodes, max_depth, all_sure=is_drawn)
        self.counts.forced += len(tree.drafts) - 1 - tree.num_drafts
        self.counts.forbidden += len(tokens) - 1 - tree.num_drafts
        self._trees.append((index, seq.grammar, tree))
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
        if self._fixed_shapes and self._method.num_nodes == 1:
            self._follow()
            for i, seq in enumerate(self._sequences):
                if seq.grammar is not None and not seq.is_finished:
                    self._trees.append((i, seq.grammar, GrammarTree.of(seq.tokens[-1:], None)))
        began = time.perf_counter()
        grown = [(self._sequences[i].req_idx, state, tree) for i, state, tree in self._trees]
        self.counts.masks += write_node_masks(self._rules, grown, self._transfers)
        self.counts.mask_seconds += time.perf_counter() - began


class Grammars:
    """The grammars of an engine's requests. `num_nodes`: of the largest tree. `fixed_shapes`: of its rounds."""

    def __init__(self, table: TableWriter, transfers: Transfers, num_nodes: int, fixed_shapes: bool) -> None:
        self._table = table
        self._transfers = transfers
        self._num_nodes = num_nodes
        self._fixed_shapes = fixed_shapes

    def of_round(
        self, sequences: Seq[Sequence], method: DraftMethod, read: Callable[[], object]
    ) -> GrammarRound | None:
        """None: no request of the batch has a grammar. `read`: see `GrammarRound`."""
        if all(seq.grammar is None for seq in sequences):
            return None
        rules = self._table.node_masks(self._num_nodes)
        return GrammarRound(sequences, method, rules, self._transfers, read, fixed_shapes=self._fixed_shapes)

    def write_first_masks(self, ready: Seq[Sequence]) -> None:
        """Of the first tokens of prompts that end."""
        roots = [(seq.req_idx, seq.grammar, GrammarTree.of([0], None)) for seq in ready if seq.grammar is not None]
        if roots:
            write_node_masks(self._table.node_masks(self._num_nodes), roots, self._transfers)


def write_node_masks(rules: RuleTable, grown: Seq[tuple[int, GrammarState, GrammarTree]], transfers: Transfers) -> int:
    """The masks of these trees' nodes, by request index, with the state after the root. Returns their number."""
    table_SNW = rules.node_masks_SNW
    assert table_SNW is not None
    lines = [req_idx * table_SNW.shape[1] + node for req_idx, _, tree in grown for node in range(len(tree.tokens))]
    if not lines:
        return 0
    assert max(len(tree.tokens) for _, _, tree in grown) <= table_SNW.shape[1], "no room for masks of so large a tree"
    # A model has more tokens than its tokenizer, most often. Masks of the width that the matchers write need no copy.
    width = max(state.num_words for _, state, _ in grown)
    masks_KW = transfers.host_tensor((len(lines), width), torch.int32)
    write_masks([(state, tree) for _, state, tree in grown], masks_KW.numpy())
    index_K = transfers.upload(np.array(lines, dtype=np.int64))
    table_KW = table_SNW.flatten(0, 1)
    table_KW[:, :width].index_copy_(0, index_K, transfers.upload(masks_KW))
    if width < table_KW.shape[1]:
        table_KW[:, width:].index_fill_(0, index_K, 0)
    return len(lines)


def _padded(lines: Seq[list[int]], width: int, fill: int) -> np.ndarray:
    """(B, width) int64."""
    found = np.full((len(lines), width), fill, dtype=np.int64)
    for row, line in zip(found, lines, strict=True):
        row[: len(line)] = line
    return found
