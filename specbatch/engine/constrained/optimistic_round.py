"""Rounds of plain decoding in fixed shapes, in which the target's choices are taken before grammars have checked them.

So the device never waits for the host. Where only one token may come, the host knows it while the target runs, and that
token replaces the choice. What else the target chooses is checked one round later, when it is read. A token that the
grammar refuses is dropped: the request's line on the device is set back, the round that had begun with the token counts
for nothing, and the next one has the mask of that place. Texts and margins are those of checked rounds.

After a token that is forced, others often are: they are the drafts of the next round.

Shape suffixes: B requests, N nodes of a chain, D = N - 1 drafts.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from specbatch.draft.method import DraftTrees
from specbatch.engine.constrained.mask_table import WantedMasks
from specbatch.engine.constrained.round import GrammarRound, is_checked, is_followed, nodes_that_go_on
from specbatch.engine.constrained.state import FREE, GrammarState, Plan
from specbatch.engine.constrained.tree import GrammarTree
from specbatch.engine.sequence import Sequence


class UncheckedRound(GrammarRound):
    """The methods of a `GrammarRound`. Nothing waits for the target in `check`. `num_greedy`: requests that may have
    begun it with a token that is refused; `num_going_back`: those that have, for which it counts for nothing."""

    num_greedy = num_going_back = 0

    def reshape(self, trees: DraftTrees) -> DraftTrees:
        """Chains of the roots, which the device knows, and of what is forced after them."""
        num_nodes = self.method.num_nodes
        self._drafts = [self._planned(seq)[: num_nodes - 1] for seq in self._sequences]
        if num_nodes == 1:
            return trees
        self.counts.forced += sum(map(len, self._drafts))
        batch = len(trees.tokens_BN)
        drafts_BD, num_nodes_B = np.zeros((batch, num_nodes - 1), dtype=np.int64), np.ones(batch, dtype=np.int64)
        for i, drafts in enumerate(self._drafts):
            drafts_BD[i, : len(drafts)] = drafts
            num_nodes_B[i] += len(drafts)
        upload = self._transfers.upload
        tokens_BN = torch.cat((trees.tokens_BN[:, :1], upload(drafts_BD)), dim=1)
        return DraftTrees(tokens_BN, upload(num_nodes_B), max_path=num_nodes)

    def _planned(self, seq: Sequence) -> list[int]:
        """The drafts of a request, if its last round went as it was planned, whether it is read or not."""
        plan = None if seq.host_grammar is None or seq.is_finished else seq.host_grammar.plan
        if plan is None or len(seq.tokens) != plan.num_tokens - (plan.num_new if seq.rounds_in_flight else 0):
            return []
        return plan.drafts[: max(0, seq.max_length - plan.num_tokens)]

    def look_ahead(self, choice_BN: torch.Tensor | None) -> None:
        """While the target runs: read and check the round before, write what the host knows of this one."""
        self._follow()
        greedy = [seq for seq in self._sequences if is_checked(seq, all_masks=False) and not seq.is_finished]
        self.num_greedy, self.num_going_back = len(greedy), sum(seq.goes_back for seq in greedy)
        began = time.perf_counter()
        wanted: list[WantedMasks] = []
        forced_BN = np.full((len(self._sequences), self.method.num_nodes), FREE, dtype=np.int64)
        for seq, drafts, forced_N in zip(self._sequences, self._drafts, forced_BN, strict=True):
            state = seq.host_grammar
            if state is None or not is_followed(seq):
                continue
            tree = GrammarTree.of([seq.tokens[-1], *drafts], None)
            state.plan, state.is_unchecked = None, False
            if not is_checked(seq, all_masks=False):
                nodes = nodes_that_go_on(state, tree)
            elif state.was_refused:
                nodes, state.was_refused = [0], False
                self.counts.refused += 1
            else:
                nodes, state.is_unchecked = self._look_along(seq, state, tree, forced_N), True
            if nodes:
                wanted.append(WantedMasks(seq.req_idx, state, tree, nodes))
        self.counts.masks += self._masks.write(wanted)
        self._masks.write_forced([seq.req_idx for seq in self._sequences], forced_BN)
        self.counts.mask_seconds += time.perf_counter() - began

    def _look_along(self, seq: Sequence, state: GrammarState, tree: GrammarTree, forced_N: np.ndarray) -> list[int]:
        """Find the nodes after which only one token may come, and plan the next round, if the tokens of this one are
        known. Returns the nodes whose masks have to be computed."""
        odd, tokens, is_sure, num_entered = [], tree.tokens, True, 0
        after: list[int] = []
        for node, token in enumerate(tokens):
            if node and not state.enter(token):  # its mask lets nothing come
                odd.append(node)
                is_sure = False
                break
            num_entered += node > 0
            is_last = node + 1 == len(tokens)
            only, after = state.only_tokens(self.method.num_nodes if is_last else 1)
            if only >= 0:
                tree.forced[node] = forced_N[node] = only
            elif only != FREE:
                odd.append(node)
            is_sure &= only >= 0 and (is_last or only == tokens[node + 1])
        state.back(num_entered)
        if is_sure:
            state.plan = Plan(len(seq.tokens) + len(tokens), len(tokens), after)
        return odd

    def check(self) -> None:
        """There is nothing to wait for."""
