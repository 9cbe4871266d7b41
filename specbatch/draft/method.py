"""The interface between draft methods and the engine.

A draft method gives a round its draft trees: on the device from tensors (`DraftMethod.draft`), or on the host from the
sequences' tokens (`host.HostDraftMethod`). `draft.METHODS` names all of them.

Shape suffixes: B requests, N tree nodes, M longest path, D = N - 1 drafts, W draft vocabulary or words of a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specbatch.batch import Candidates, Committed
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import EngineStats
from specbatch.draft.calibration import Judged
from specbatch.draft.network import DraftNet


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """One draft tree of N nodes for each request, the root first. A chain has no parents, depths and mask."""

    tokens_BN: Tensor  # int64
    num_nodes_B: Tensor | None = None  # int64, where trees have different sizes; None: all have N nodes
    parents_BN: Tensor | None = None  # int64; -1: the root; -2: past num_nodes
    depths_BN: Tensor | None = None  # int64; 0: the root, and nodes past num_nodes
    mask_BNW: Tensor | None = None  # int32 words: which nodes a node sees, see `kernels.torch.tree.select_nodes`
    # The nodes of the longest path, if a grammar has changed the trees. None: the method's `max_path`.
    max_path: int | None = None
    # The distributions that a chain's drafts were drawn from, for rejection sampling; there may be fewer of them than
    # drafts, see `kernels.torch.acceptance.accept_chain`. None: a draft is accepted if the target itself draws the same
    # token.
    probs_BDW: Tensor | None = None
    # bool, the chains in `probs_BDW` whose drafts were not drawn: each is accepted with the target's probability of it.
    # None: all were drawn.
    is_given_B: Tensor | None = None
    # int64, the number of drafts of each chain in `probs_BDW`. A grammar forbids a draft past `num_nodes_B`: it is
    # rejected without being verified. None: each chain has D drafts.
    num_drafts_B: Tensor | None = None
    # float32, the logarithm of the estimated probability that each node is accepted, by which chains share a budget; it
    # does not rise along a chain. With `probs_BDW` it reads nothing that is drawn at the node or later. None: there
    # is no estimate.
    scores_BN: Tensor | None = None
    # int64, the number of nodes of each chain that are verified, and their sum, if the round has a budget. They may be
    # more than its nodes, because fixed shapes have a fixed sum.
    num_verified_B: Tensor | None = None
    num_verified: int | None = None
    # The chains from which these were chosen. None: there was no choice, or nothing is learnt from it.
    judged: Judged | None = None
    # int32, the state of each node in the automaton of its request, see `GrammarBuffers`. None: no request has one.
    states_BN: Tensor | None = None


class DraftMethod(ABC):
    """A draft method for the rounds of one draft shape.

    Its attributes do not change, because CUDA graphs are captured with them."""

    num_nodes: int  # N
    max_path: int  # M: nodes of the longest path, the root included
    num_lookahead: int  # slots past the committed ones that a round may write, see `shape.num_lookahead`
    net: DraftNet | None = None  # the draft network, whose cache follows the committed tokens; None: there is none
    # The number of accepted drafts, from the first one on, that draft-extend can skip: drafting has already computed
    # the same entries of the network's cache.
    num_reusable = 0
    reads_tokens = False  # True: `draft` reads `RequestTable.tokens_SL`
    scored = False  # True: `draft` returns `scores_BN`
    has_drafts = True  # False: trees have the root alone
    sizes: tuple[int, ...] = ()  # numbers of nodes that `narrowed` can make, and N itself; empty: there is only N
    num_host_columns = 0  # columns of `RequestTable.host_trees_SZ`, for trees that the host uploads

    def narrowed(self, num_nodes: int) -> DraftMethod:
        """Return the same method for rounds of fewer nodes, one of `sizes`."""
        raise NotImplementedError

    def with_room(self, batch_size: int) -> DraftMethod:
        """Return the draft method for batches with grammars where shapes are fixed. Its trees have room for tokens that
        a grammar forces. `batch_size`: the requests of a batch, padding included."""
        return self

    @abstractmethod
    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        """Return the draft trees of one batch. Shapes are fixed and the host reads no tensor, so that a CUDA graph can
        hold this. `sampled`: some request may have a positive temperature."""

    def candidates(self, view: BatchView, table: RequestTable) -> Candidates:
        """Draft the candidates of the method's trees, of which `draft` takes the most likely ones."""
        raise NotImplementedError

    def follow(  # noqa: B027
        self, view: BatchView, table: RequestTable, trees: DraftTrees, committed: Committed, eos_K: Tensor
    ) -> None:
        """Follow what a round committed of `trees`: `table` has it, and `view` is as it was before. `eos_K`: tokens
        that end a text. Like `draft`, a CUDA graph can hold this."""

    def record(self, stats: EngineStats) -> None:  # noqa: B027  # most methods have none
        """Write the method's own counts to `stats`. The engine is idle, so this may wait for the device."""
