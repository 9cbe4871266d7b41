"""The hook of rounds with grammars: it changes the draft trees, and writes masks.

After drafting, the trees come to the host: forbidden nodes leave them, forced ones are added (`tree.grow`). The
target runs over what is left, and its own choices come to the host: of greedy requests, nodes at which the grammar
refuses the choice get a mask (`check.py`). The masks of sampled requests are computed while the target runs.
Acceptance reads them from the table of rules. So a round has three parts, which the host joins: draft, forward, accept.

A round is left open while its target runs: the host does what comes between two rounds, and closes it when it is about
to launch the next. The tokens of a closed round are read while the next one's drafts are computed; in plain decoding,
where the host changes no tree, while its target runs.

Shape suffixes: B requests, N nodes, D drafts of a chain, W words of a mask.
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

from specbatch.counts import EngineStats, GrammarCounts
from specbatch.draft.host import HostTrees, ancestry
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.engine.constrained.check import find_forced, refused_nodes
from specbatch.engine.constrained.mask_table import NodeMasks, WantedMasks
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.constrained.tree import GrammarTree, grow
from specbatch.engine.round import RoundHook
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Download, Transfers

_Tree = tuple[int, GrammarState, GrammarTree]  # a request with a grammar: its index, state and tree


class GrammarRound(RoundHook):
    """The hook of a round of a batch with grammars. `sequences`: the requests of the batch, without its padding.
    `read`: reads the results that were launched before this round; requests may be finished after it. `fixed_shapes`:
    the round has fixed shapes. Then trees keep the size of `method`; otherwise they have as many nodes as they need.
    `all_masks`: compute the masks of all nodes, whatever the target chooses. `on_record`: called when the round is
    launched."""

    takes_part = True
    method: DraftMethod

    def __init__(
        self,
        sequences: Seq[Sequence],
        method: DraftMethod,
        masks: NodeMasks,
        transfers: Transfers,
        read: Callable[[], object],
        *,
        fixed_shapes: bool,
        all_masks: bool = False,
        on_record: Callable[[GrammarRound], None] = lambda round_: None,
    ) -> None:
        self._sequences = sequences
        self._on_record = on_record
        self._read = read
        self.method = method
        self._masks = masks
        self._transfers = transfers
        self._fixed_shapes = fixed_shapes
        self._all_masks = all_masks
        self._trees: list[_Tree] = []
        self._to_check: tuple[Download, list[_Tree]] | None = None
        self.counts = GrammarCounts()

    @property
    def num_requests(self) -> int:
        """Those that have a grammar and go on."""
        return sum(seq.grammar is not None and not seq.is_finished for seq in self._sequences)

    def of_padding(self) -> GrammarRound:
        """Make the same kind of round for a batch that is all padding."""
        nothing = functools.partial(list[None])
        fixed = self._fixed_shapes
        return type(self)([], self.method, self._masks, self._transfers, nothing, fixed_shapes=fixed)

    def record(self, stats: EngineStats) -> None:
        stats.grammar.add(self.counts)
        self._on_record(self)

    def reshape(self, trees: DraftTrees) -> DraftTrees:
        """Return the trees to verify. The host waits for the drafts, unless no other tree is possible."""
        if self._fixed_shapes and self.method.num_nodes == 1:
            return trees
        is_chain, is_drawn = trees.parents_BN is None, trees.probs_BDW is not None
        drafted = self._drafted(trees)
        began = time.perf_counter()
        grown = [self._grow(i, tokens, parents, is_drawn) for i, (tokens, parents) in enumerate(drafted)]
        self.counts.tree_seconds += time.perf_counter() - began
        lines = [tree.tokens + (tree.forbidden if is_drawn else []) for tree in grown]
        # Rejection sampling needs room for a draft, also where no chain has one.
        width = trees.tokens_BN.shape[1] if self._fixed_shapes else max(1 + is_drawn, *map(len, lines))
        host = HostTrees(
            _padded(lines, width, 0),
            np.array([len(tree.tokens) for tree in grown], dtype=np.int64),
            None if is_chain else _padded([tree.parents for tree in grown], width, -2),
        )
        upload = self._transfers.upload
        made = DraftTrees(upload(host.tokens_BN), upload(host.num_nodes_B), max_path=width)
        if is_drawn:
            num_drafts = np.array([len(line) - 1 for line in lines], dtype=np.int64)
            probs = self._probs(trees.probs_BDW, grown, lines)
            num_drafts_B = upload(num_drafts)
            return dataclasses.replace(made, probs_BDW=probs, is_given_B=trees.is_given_B, num_drafts_B=num_drafts_B)
        if is_chain:
            return made
        parents_BN, depths_BN, mask_BNW = ancestry(host, -(-width // 32))
        max_path = self.method.max_path if self._fixed_shapes else int(depths_BN.max()) + 1
        return dataclasses.replace(
            made,
            parents_BN=upload(parents_BN[:, :, 0]),
            depths_BN=upload(depths_BN[:, :, 0]),
            mask_BNW=upload(mask_BNW),
            max_path=max_path,
        )

    def _drafted(self, trees: DraftTrees) -> list[tuple[list[int], list[int] | None]]:
        """Tokens and parents (None: of a chain) of each tree."""

        def download(tensor: Tensor | None) -> Download | None:
            return None if tensor is None else self._transfers.download(tensor)

        drafts, counts, links = map(download, (trees.tokens_BN, trees.num_nodes_B, trees.parents_BN))
        self._follow()  # meanwhile
        assert drafts is not None
        tokens = drafts.wait().tolist()
        sizes = [len(line) for line in tokens] if counts is None else counts.wait().tolist()
        parents = [None] * len(tokens) if links is None else links.wait().tolist()
        return [
            (line[:size], None if above is None else above[:size])
            for line, size, above in zip(tokens, sizes, parents, strict=True)
        ]

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
        if seq is None or seq.grammar is None or not is_followed(seq):
            return GrammarTree.of(tokens, parents)
        room = seq.max_length - len(seq.tokens)  # tokens after the root that count
        max_depth = min(room, self.method.max_path - 1) if self._fixed_shapes else room
        max_nodes = self.method.num_nodes + (0 if self._fixed_shapes else min(seq.num_forced_room, room))
        # Where drafts are drawn, a forced token has no probability: it has to be accepted without a draw.
        tree = grow(seq.grammar, tokens, parents, max_nodes, max_depth, all_sure=is_drawn)
        self.counts.forced += len(tree.drafts) - 1 - tree.num_drafts
        self.counts.forbidden += len(tokens) - 1 - tree.num_drafts
        self._trees.append((index, seq.grammar, tree))
        return tree

    def _probs(self, probs_BDW: Tensor | None, grown: Seq[GrammarTree], lines: Seq[list[int]]) -> Tensor:
        """Return the distributions that the drafts of the new chains were drawn from. Forced drafts have zeros, as they
        are accepted without a draw. Drafts of the old chain come first in the new one, the forbidden draft last."""
        assert probs_BDW is not None
        drawn = [tree.num_drafts + (len(line) > len(tree.tokens)) for tree, line in zip(grown, lines, strict=True)]
        drawn_B = self._transfers.upload(np.array(drawn, dtype=np.int64))
        index = torch.arange(probs_BDW.shape[1], device=probs_BDW.device)
        return torch.where((index < drawn_B[:, None])[:, :, None], probs_BDW, 0.0)

    def look_ahead(self, choice_BN: Tensor | None) -> None:
        """While the target computes `choice_BN`, which greedy requests choose without masks: write the masks of sampled
        requests to the table, and find out what else the check needs."""
        assert choice_BN is not None
        choices = self._transfers.download(choice_BN) if any(map(self._is_checked, self._sequences)) else None
        if self._fixed_shapes and self.method.num_nodes == 1:
            self._follow()
            for i, seq in enumerate(self._sequences):
                if seq.grammar is not None and is_followed(seq):
                    self._trees.append((i, seq.grammar, GrammarTree.of(seq.tokens[-1:], None)))
        began = time.perf_counter()
        checked = [one for one in self._trees if self._is_checked(self._sequences[one[0]])]
        others = [one for one in self._trees if not self._is_checked(self._sequences[one[0]])]
        self.counts.masks += self._masks.write(
            [
                WantedMasks(self._sequences[i].req_idx, state, tree, nodes_that_go_on(state, tree))
                for i, state, tree in others
            ]
        )
        if choices is not None:
            self._to_check = choices, checked
            for _, state, tree in checked:
                if choices.is_there:
                    break
                find_forced(state, tree)
        self.counts.mask_seconds += time.perf_counter() - began

    def check(self) -> None:
        """Write masks where a grammar refuses what the target has chosen. The device waits for this."""
        if self._to_check is None:
            return
        choices, trees = self._to_check
        rows = choices.wait().tolist()
        began = time.perf_counter()
        wanted = []
        for i, state, tree in trees:
            if nodes := refused_nodes(state, tree, rows[i]):
                wanted.append(WantedMasks(self._sequences[i].req_idx, state, tree, nodes))
                self.counts.refused += len(nodes)
        self.counts.masks += self._masks.write(wanted)
        self.counts.check_seconds += time.perf_counter() - began

    def _is_checked(self, seq: Sequence) -> bool:
        return is_checked(seq, all_masks=self._all_masks)


def is_followed(seq: Sequence) -> bool:
    """Return whether the result of a round counts for a request: it is not finished, and its grammar follows its
    tokens."""
    return not (seq.is_finished or seq.grammar is None or seq.grammar.failure is not None)


def is_checked(seq: Sequence, *, all_masks: bool) -> bool:
    """Return whether the request gets masks only at nodes where its grammar refuses the target's choice."""
    return seq.grammar is not None and seq.request.params.temperature == 0 and not all_masks


def nodes_that_go_on(state: GrammarState, tree: GrammarTree) -> list[int]:
    """Return the nodes after which the request continues. Tokens after the other nodes do not count."""
    return [node for node, token in enumerate(tree.tokens) if not node or not state.is_end(token)]


def _padded(lines: Seq[list[int]], width: int, fill: int) -> np.ndarray:
    """(B, width) int64."""
    found = np.full((len(lines), width), fill, dtype=np.int64)
    for row, line in zip(found, lines, strict=True):
        row[: len(line)] = line
    return found
