"""Acceptance: which nodes of the draft trees the target keeps, and the token after them.

On a GPU everything is computed for every node, in fixed shapes. On a CPU a distribution over a large vocabulary costs
as much as some layers: there only nodes that are reached are sampled. The decisions are the same.

Shape suffixes: B requests, N nodes, D = N - 1 drafts of a chain, M longest path, T computed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN, Committed
from specbatch.cache.request_table import BatchView
from specbatch.draft.method import DraftTrees
from specbatch.draft.rng import Draw
from specbatch.kernels.torch.acceptance import widen


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's answer to the draft trees of a round, on the device. It is filled in three steps: the output for the
    T computed nodes, the nodes that are accepted, and what was committed. `commit_round` walks along the target's
    choices, or is given the length of the path, and in a tree the path itself."""

    hidden_TE: Tensor
    aux_hidden_states: list[Tensor]
    index_BN: Tensor | None  # int64, the index of each node's computed token; None: all B * N nodes are computed
    logits_TV: Tensor | None  # None: only the best tokens are wanted, and ranks find these without the logits
    nodes_T: Tensor | None = None  # int64, the node of each computed token, if the round has a budget and fixed shapes
    edited_TV: Tensor | None = None  # with grammars: the logits under all rules but the masks of nodes
    choice_BN: Tensor | None = None  # int64, the target's own token after each node
    margin_BN: Tensor | None = None  # float32, the margin of the target's logits after each node
    path_BN: Tensor | None = None  # int64; None: the path follows the choices, or the draft tree is a chain
    num_path_B: Tensor | None = None
    next_token_B: Tensor | None = None
    num_broken_B: Tensor | None = None
    committed: Committed | None = None

    @property
    def accept_index_T(self) -> Tensor:
        """(B * M) int64: the index of the computed token of each node of the path."""
        assert self.committed is not None
        index_T = self.committed.accept_index_T
        return index_T if self.index_BN is None else self.index_BN.view(-1)[index_T]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The rule by which draft tokens are accepted. `lazy`: a node is sampled only when the accepted path reaches it,
    for which the host reads the path. `simulate`: the mean number of tokens to commit in a round, whatever the target
    chooses; None: the real acceptance."""

    ops: ModuleType
    lazy: bool
    simulate: float | None = None

    def decide(
        self,
        view: BatchView,
        trees: DraftTrees,
        verified: Verified,
        logits_TV: Tensor | None,
        target_ids: Tensor | None,
        sampled: bool,
    ) -> Verified:
        """Decide which nodes are accepted. `logits_TV`: the logits under all rules; None: all requests are greedy, and
        the choices are known. `target_ids`: the target's token id of each draft vocabulary id; None: the vocabularies
        are the same. `sampled`: some request may have a positive temperature."""
        if logits_TV is None:
            found = verified
        elif sampled and trees.probs_BDW is not None:
            found = self._accept_drawn(view, trees, verified, logits_TV, target_ids)
        else:
            choice_BN, margin_BN = self.choose(view, trees, logits_TV, verified.index_BN, sampled, verified.nodes_T)
            found = replace(verified, choice_BN=choice_BN, margin_BN=margin_BN)
        if self.simulate is None:
            return found
        path_BN, num_path_B = self._simulated(view, trees, self.simulate)
        return replace(found, path_BN=path_BN, num_path_B=num_path_B)

    def choose(
        self,
        view: BatchView,
        trees: DraftTrees,
        logits_TV: Tensor,
        index_BN: Tensor | None,
        sampled: bool,
        nodes_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(B, N) the target's own token after each node; NO_TOKEN where its logits are not finite. (B, N) float32, the
        margins of the logits, see `kernels.torch.sampling.argmax_and_margin`."""
        best = self.ops.argmax_and_margin(logits_TV, NO_TOKEN)
        best_BN, margin_BN = of_nodes(trees, best, index_BN)
        return self._draw(view, trees, logits_TV, index_BN, nodes_T) if sampled else best_BN, margin_BN

    def _draw(
        self, view: BatchView, trees: DraftTrees, logits_TV: Tensor, index_BN: Tensor | None, nodes_T: Tensor | None
    ) -> Tensor:
        """Choose as `choose` does, where some request may have a positive temperature."""
        num_nodes = trees.tokens_BN.shape[1]
        depth = torch.arange(num_nodes, device=logits_TV.device) if trees.depths_BN is None else trees.depths_BN
        position_BN = view.length_B[:, None] + depth + 1
        u_BN = self.ops.uniform(*(values[:, None] for values in view.rng), position_BN, Draw.SAMPLE)
        if self.lazy:
            if index_BN is None:
                index_BN = torch.arange(trees.tokens_BN.numel()).view(trees.tokens_BN.shape)
            return self._choose_on_path(view, trees, logits_TV, index_BN, u_BN)
        u_T = u_BN.reshape(-1)
        u_T = u_T if nodes_T is None else u_T[nodes_T]
        chosen_T: Tensor = self.ops.sample(logits_TV, *_of_tokens(view.sampling, num_nodes, nodes_T), u_T)
        return chosen_T.view(trees.tokens_BN.shape) if index_BN is None else chosen_T[index_BN]

    def _choose_on_path(
        self, view: BatchView, trees: DraftTrees, logits_TV: Tensor, index_BN: Tensor, u_BN: Tensor
    ) -> Tensor:
        """Choose as `choose` does, but only on the accepted path: other nodes get NO_TOKEN."""
        choice_BN = torch.full_like(trees.tokens_BN, NO_TOKEN)
        parents_BN = _chain_parents(trees) if trees.parents_BN is None else trees.parents_BN
        request = torch.arange(len(choice_BN))
        node = torch.zeros_like(request)
        while len(request):
            params = (values[request] for values in view.sampling)
            token = self.ops.sample(logits_TV[index_BN[request, node]], *params, u_BN[request, node])
            choice_BN[request, node] = token
            is_next = (parents_BN[request] == node[:, None]) & (trees.tokens_BN[request] == token[:, None])
            has_next, node = is_next.any(dim=1), is_next.int().argmax(dim=1)
            request, node = request[has_next], node[has_next]
        return choice_BN

    def _accept_drawn(
        self,
        view: BatchView,
        trees: DraftTrees,
        verified: Verified,
        logits_TV: Tensor,
        target_ids: Tensor | None,
    ) -> Verified:
        """Decide for chains whose drafts were drawn from the distributions `probs_BDW`."""
        assert trees.probs_BDW is not None
        batch, num_nodes = trees.tokens_BN.shape
        index_BN = verified.index_BN
        _, margin_T = self.ops.argmax_and_margin(logits_TV)
        position_BN = view.length_B[:, None] + torch.arange(1, num_nodes + 1, device=logits_TV.device)
        rng = tuple(values[:, None] for values in view.rng)
        accept_BN, residual_BN, sample_BN = (
            self.ops.uniform(*rng, position_BN, draw) for draw in (Draw.ACCEPT, Draw.RESIDUAL, Draw.SAMPLE)
        )
        drafts_BD, q_BDW, num_drafts_B = trees.tokens_BN[:, 1:], trees.probs_BDW, trees.num_drafts_B
        if num_drafts_B is None:
            num_drafts_B = torch.full_like(view.length_B, num_nodes - 1)
        if self.lazy:
            q_BDW, target_ids = widen(q_BDW, target_ids, logits_TV.shape[1]), None
            if index_BN is None:
                index_BN = torch.arange(batch * num_nodes).view(batch, num_nodes)
            p_BNV = self._distributions_on_path(
                view, trees, drafts_BD, num_drafts_B, q_BDW, logits_TV, index_BN, accept_BN
            )
        else:
            p_BNV = self.ops.distribution(logits_TV, *_of_tokens(view.sampling, num_nodes, verified.nodes_T))
            p_BNV = p_BNV.view(batch, num_nodes, -1) if index_BN is None else p_BNV
        num_path_B, next_token_B, num_broken_B = self.ops.accept_chain(
            drafts_BD,
            q_BDW,
            target_ids,
            p_BNV,
            num_drafts_B,
            view.sampling[0],
            accept_BN[:, :-1],
            residual_BN[:, :-1],
            sample_BN,
            None if self.lazy else index_BN,
            trees.is_given_B,
        )
        return replace(
            verified,
            choice_BN=None,
            num_path_B=num_path_B,
            next_token_B=next_token_B,
            num_broken_B=num_broken_B,
            margin_BN=margin_T.view(batch, num_nodes) if index_BN is None else margin_T[index_BN],
        )

    def _distributions_on_path(
        self,
        view: BatchView,
        trees: DraftTrees,
        drafts_BD: Tensor,
        num_drafts_B: Tensor,
        q_BDV: Tensor,
        logits_TV: Tensor,
        index_BN: Tensor,
        u_accept_BN: Tensor,
    ) -> Tensor:
        """(B, N, V) the target's distributions at the nodes up to the first draft that is rejected; 0 at the others,
        which `accept_chain` does not come to."""
        p_BNV = torch.zeros((*index_BN.shape, logits_TV.shape[1]), dtype=torch.float64)
        request = torch.arange(len(drafts_BD))
        is_sure_B = view.sampling[0] == 0
        if trees.is_given_B is not None:
            is_sure_B = is_sure_B | trees.is_given_B
        for node in range(index_BN.shape[1]):
            logits = logits_TV[index_BN[request, node]]
            p = self.ops.distribution(logits, *(values[request] for values in view.sampling))
            p_BNV[request, node] = p
            has_next = node < num_drafts_B[request]
            request, p = request[has_next], p[has_next]
            if not len(request):
                break
            draft = drafts_BD[request, node][:, None]
            q = torch.zeros_like(p[:, 0])  # past the drawn drafts
            if node < q_BDV.shape[1]:
                q = q_BDV[request, node].gather(1, draft)[:, 0]
            q = torch.where(is_sure_B[request], 1.0, q)
            request = request[u_accept_BN[request, node] * q < p.gather(1, draft)[:, 0]]
            if not len(request):
                break
        return p_BNV

    def _simulated(self, view: BatchView, trees: DraftTrees, simulate: float) -> tuple[Tensor | None, Tensor]:
        """A path of random length with the wanted mean: along the chain (no path then), or down to a tree's first node
        of that depth."""
        num_nodes = trees.tokens_BN.shape[1]
        u = self.ops.uniform(*view.rng, view.length_B, Draw.ACCEPT)
        whole = int(simulate)
        wanted = torch.where(u < simulate - whole, whole + 1, whole)
        if trees.parents_BN is None:
            return None, torch.clamp(wanted, max=num_nodes if trees.num_nodes_B is None else trees.num_nodes_B)
        nodes = torch.arange(num_nodes, device=u.device)
        assert trees.depths_BN is not None
        assert trees.mask_BNW is not None
        num_path = torch.minimum(wanted, trees.depths_BN.amax(dim=1) + 1)
        end = (trees.depths_BN == (num_path - 1)[:, None]).int().argmax(dim=1)
        words = trees.mask_BNW.gather(1, end[:, None, None].expand(-1, 1, trees.mask_BNW.shape[2]))[:, 0]
        on_path = (words[:, nodes >> 5] >> (nodes & 31)) & 1
        path = torch.where(on_path.bool(), nodes, num_nodes).sort(dim=1).values
        return torch.where(path < num_nodes, path, 0), num_path


def of_nodes(trees: DraftTrees, computed: tuple[Tensor, Tensor], index_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (B, N), for each node, what was computed for T tokens. `index_BN`: see `Verified`."""
    first, second = (x.view(trees.tokens_BN.shape) if index_BN is None else x[index_BN] for x in computed)
    return first, second


def _of_tokens(values_B: Iterable[Tensor], num_nodes: int, nodes_T: Tensor | None) -> list[Tensor]:
    """Return values of requests for each computed token (T,). `nodes_T`: see `Verified`."""
    if nodes_T is None:
        return [values.repeat_interleave(num_nodes) for values in values_B]
    return [values[nodes_T // num_nodes] for values in values_B]


def _chain_parents(trees: DraftTrees) -> Tensor:
    """(B, N) of chains, as of trees: -1 at the root, -2 past the last node."""
    batch, num_nodes = trees.tokens_BN.shape
    nodes = torch.arange(num_nodes)
    parents = (nodes - 1).expand(batch, -1)
    return parents if trees.num_nodes_B is None else torch.where(nodes < trees.num_nodes_B[:, None], parents, -2)
