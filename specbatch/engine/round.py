"""The round: draft -> verify -> accept -> commit -> compact -> extend, for a batch of requests.

Tensors in, tensors out. On a GPU shapes are fixed and the host reads nothing, so all of it can be one CUDA graph. On a
CPU only the tokens that exist are computed. The tests compare both with an oracle that decides one sequence at a time.

Shape suffixes: B requests, N tree nodes, M longest path (root included), T packed tokens, E hidden size, V vocabulary,
W words of a mask or draft vocabulary, R selected tokens, Z columns of the round output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import (
    BROKEN,
    FREE,
    NO_TOKEN,
    Committed,
    Edits,
    Field,
    LogitsIndices,
    PackedNodes,
    PagedBatch,
)
from specbatch.cache.pages import KVCache
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.cache.states import StateCache
from specbatch.counts import EngineStats
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.engine.acceptance import Acceptance, Verified, of_nodes
from specbatch.engine.edits import edited_logits
from specbatch.engine.logprobs import LogprobLayout, Logprobs, with_logprobs
from specbatch.engine.overlap.two_lanes import TwoLanes
from specbatch.engine.prefill.models import EAGER, PromptTrunks
from specbatch.engine.prefill.packing import PromptChunk
from specbatch.kernels.trace_marks import marked
from specbatch.models.decoder import CausalModel, Trunk
from specbatch.models.routing_counter import RoutingCounter

# Up to this many rows a draft-extend only streams weights: computing the hidden states of all rows costs nothing.
_FREE_ROWS = 64
MAX_FORCED = 15  # nodes that a grammar may add to a tree without a fixed shape, in addition to its draft shape
_SCORED_ROWS = 32  # prompt tokens whose log-probabilities are computed at once


class Wanted(NamedTuple):
    """The needs of the requests of a round or a prefill chunk, taken together."""

    sampled: bool = False  # some request may have a positive temperature
    num_top: int | None = None  # log-probabilities with this number of most likely tokens; None: none
    edits: Edits = Edits.NONE  # the kinds of edits that the requests' rules make in logits

    def with_other(self, other: Wanted) -> Wanted:
        """Return the needs of these requests and others. Both must have `Edits.family`."""
        num_tops = [one.num_top for one in (self, other) if one.num_top is not None]
        edits = (self.edits | other.edits).family
        return Wanted(self.sampled or other.sampled, max(num_tops, default=None), edits)


GREEDY = Wanted()  # only the largest of the target's logits after each token is needed


class RoundKey(NamedTuple):
    """Everything that the CUDA graphs of a round depend on."""

    size: int  # size of the batch, padding included
    item: int  # item of the schedule
    wanted: Wanted = GREEDY
    lane: int = 0  # requests of the first lane, see `executor.PaddedSize`
    # Nodes of each tree, if they depend on more than the item: plain decoding may have room for forced tokens or not.
    num_nodes: int | None = None
    with_host: bool = False  # the host takes part
    num_verified: int | None = None  # nodes that are verified, if chains share a budget


class Launched(NamedTuple):
    """The result that a round or a prefill chunk leaves on the device for the host. It is valid until the next
    launch."""

    # int32: (B, Z) of a round, laid out as in `Output`. (R, 2) of a chunk: the token of each prompt that ends there and
    # the bits of its margin. The words of log-probabilities follow.
    output_BZ: Tensor
    logprobs: LogprobLayout | None
    max_path: int  # M: tokens that a request may get

    @staticmethod
    def of(output_BZ: Tensor, logprobs: Logprobs | None, max_path: int) -> Launched:
        layout = None if logprobs is None else LogprobLayout.of(logprobs)
        return Launched(with_logprobs(output_BZ, logprobs), layout, max_path)


class RoundHook:
    """The host's work between the parts of a round. Here it does nothing, so all parts are launched at once."""

    takes_part = False  # the host takes part: the rest of the round is launched when the next launch is prepared
    method: DraftMethod | None = None  # the draft method of the round; None: that of the schedule

    def reshape(self, trees: DraftTrees) -> DraftTrees:
        """Return the trees to verify in place of these drafts."""
        return trees

    def look_ahead(self, choice_BN: Tensor | None) -> None:
        """Prepare the check while the target computes `choice_BN`, its own token after each node."""

    def check(self) -> None:
        """Change the rules of acceptance by what the target chose. The device waits for this."""

    def record(self, stats: EngineStats) -> None:
        """Add the counts of a round that was launched."""

    def of_padding(self) -> RoundHook:
        """Make the same kind of hook for a batch that is all padding."""
        return self


NO_HOOK = RoundHook()


class Round:
    """One round on the device. `simulate`: the mean number of tokens to commit in a round, whatever the target chooses;
    None: the real acceptance. `fixed_shapes`: shapes depend only on the number of requests, the host reads nothing, and
    a round may be a CUDA graph; False: only tokens that exist are computed. None: True on all devices but a CPU.
    `two_lanes`: the overlap of two lanes; None: rounds and prompt chunks have one lane. `reports_scores`: the output
    says how probable drafts were."""

    def __init__(
        self,
        target: CausalModel,
        cache: KVCache,
        method: DraftMethod,
        state: RequestTable,
        page_size: int,
        eos_token_ids: tuple[int, ...],
        ops: ModuleType,
        simulate: float | None = None,
        fixed_shapes: bool | None = None,
        two_lanes: TwoLanes | None = None,
        *,
        reports_scores: bool = False,
    ) -> None:
        self._reports_scores = reports_scores
        self.two_lanes = two_lanes
        self.state = state
        self._target = target
        self._cache = cache
        self.page_size = page_size
        self.eos_token_ids = eos_token_ids
        self._eos = torch.tensor(eos_token_ids or (-2,), device=target.device)
        self.ops = ops
        self.fixed_shapes = target.device.type != "cpu" if fixed_shapes is None else fixed_shapes
        self._acceptance = Acceptance(ops, not self.fixed_shapes, simulate)
        self._follow(method)

    def drafting(self, method: DraftMethod) -> Round:
        """This round with another draft method, of the same draft network or of none."""
        other = copy(self)
        other._follow(method)
        return other

    def with_two_lanes(self, two_lanes: TwoLanes | None) -> Round:
        other = copy(self)
        other.two_lanes = two_lanes
        return other

    def _follow(self, method: DraftMethod) -> None:
        self.method = method
        self._aux_layers = method.net.aux_layers if method.net is not None else ()
        self._reads_hidden = method.net is not None and method.net.reads_hidden

    @property
    def simulates(self) -> bool:
        return self._acceptance.simulate is not None

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def routing(self) -> RoutingCounter | None:
        """The counter of experts in rounds that have one lane; None: the target has no experts."""
        return self._target.routing

    @property
    def states(self) -> StateCache | None:
        """The states of a hybrid."""
        return self._cache.states

    @property
    def vocab_size(self) -> int:
        return self._target.config.vocab_size

    @property
    def num_positions(self) -> int:
        return self._target.num_positions

    def __call__(
        self, req_idx_B: Tensor, wanted: Wanted = GREEDY, lane: int = 0, num_verified: int | None = None
    ) -> Launched:
        """Run one round in which the host takes no part. See `begin`."""
        _, complete = self.begin(req_idx_B, wanted, lane, num_verified=num_verified)
        return complete()

    def begin(
        self,
        req_idx_B: Tensor,
        wanted: Wanted = GREEDY,
        lane: int = 0,
        hook: RoundHook = NO_HOOK,
        num_verified: int | None = None,
    ) -> tuple[int, Callable[[], Launched]]:
        """Run the first part of a round of the requests `req_idx_B` (int64; the index of padding may repeat): draft,
        and the target's forward pass. Return the number of tokens that a request may get, and what launches the rest.
        `lane`: the number of requests in the first of two lanes, which the target computes at the same time; 0: there
        is one lane. `num_verified`: the nodes that are verified, which chains share by their scores; None: all."""
        with marked("draft"):
            view, drafted = self.draft(req_idx_B, wanted.sampled)
        trees = self.follow(view, hook.reshape(drafted), wanted.edits)
        if num_verified is not None:
            trees = self.share_budget(view, trees, num_verified)
        with marked("target"):
            verified = self.forward(view, trees, lane, is_greedy=wanted == GREEDY)
            if hook.takes_part:
                verified = self.choose(view, trees, verified, wanted)
        hook.look_ahead(verified.choice_BN)

        def complete() -> Launched:
            hook.check()
            return self.finish(view, trees, verified, wanted)

        return self.max_path(trees), complete

    def finish(self, view: BatchView, trees: DraftTrees, verified: Verified, wanted: Wanted) -> Launched:
        """Run the steps after the target's forward pass: accept and extend."""
        with marked("accept"):
            verified = self.accept(view, trees, verified, wanted)
            assert verified.committed is not None
            self.method.follow(view, self.state, trees, verified.committed, self._eos)
            launched = self._launched(verified, wanted.num_top)
        with marked("extend"):
            self.extend(view, trees, verified)
        return launched

    def follow(self, view: BatchView, trees: DraftTrees, edits: Edits) -> DraftTrees:
        """Return the trees with the states of their nodes in the automata of grammars, and with forced tokens. Without
        fixed shapes, chains get up to MAX_FORCED nodes more. A node after which its request leaves the automaton is no
        part of its tree: the token can only be the last one of a round."""
        if not edits & Edits.GRAMMAR:
            return trees
        grammars, num_drafts = self.state.grammars, trees.tokens_BN.shape[1] - 1
        assert grammars is not None
        grows = not self.fixed_shapes and trees.parents_BN is None
        tokens_BN, before_B = trees.tokens_BN, trees.num_nodes_B
        if grows:
            tokens_BN = torch.nn.functional.pad(tokens_BN, (0, MAX_FORCED))
            before_B = torch.full_like(view.length_B, num_drafts + 1) if before_B is None else before_B
        tokens_BN, counts_B, states_BN = self.ops.follow_trees(
            tokens_BN, view.req_idx_B, grammars, before_B, trees.parents_BN
        )
        trees = replace(trees, tokens_BN=tokens_BN, num_nodes_B=counts_B, states_BN=states_BN)
        if tokens_BN.shape[1] > 1:
            trees = _without_leaving(trees, self._leaves(states_BN))
        counts_B = trees.num_nodes_B
        if grows:
            assert counts_B is not None
            assert before_B is not None
            room_B = torch.maximum(view.field(Field.LIMIT) - view.length_B, before_B)
            # Trees are as wide as the largest one, to which the host may have added nodes. A request has pages for
            # fewer.
            counts_B = torch.minimum(counts_B, torch.minimum(room_B, before_B + MAX_FORCED))
            width = max(num_drafts + 1, int(counts_B.max()))
            tokens_BN, states_BN = tokens_BN[:, :width], states_BN[:, :width]
            trees = replace(trees, tokens_BN=tokens_BN, num_nodes_B=counts_B, states_BN=states_BN, max_path=width)
        elif not self.fixed_shapes:
            trees = replace(trees, max_path=self.max_path(trees))
        if trees.probs_BDW is None or counts_B is None or before_B is None:
            return trees
        drawn_B = torch.full_like(counts_B, num_drafts) if trees.num_drafts_B is None else trees.num_drafts_B
        # A forbidden draft is rejected, without being verified.
        drawn_B = torch.where(counts_B < before_B, counts_B, drawn_B + counts_B - before_B)
        return replace(trees, num_drafts_B=drawn_B)

    def share_budget(self, view: BatchView, trees: DraftTrees, num_verified: int) -> DraftTrees:
        """Return the chains without the drafts that are not verified. This is exact for drafts that were drawn, too:
        whether a node is verified depends on its score and on higher ones, and so neither on its own token nor on
        those after it (`DraftTrees.scores_BN`)."""
        assert trees.scores_BN is not None, "the draft method gives scores"
        counts_B = self.ops.share_budget(trees.scores_BN, view.field(Field.DONE), num_verified)
        num_nodes_B = counts_B if trees.num_nodes_B is None else torch.minimum(counts_B, trees.num_nodes_B)
        return replace(
            trees,
            num_nodes_B=num_nodes_B,
            num_drafts_B=None if trees.probs_BDW is None else num_nodes_B - 1,
            num_verified_B=counts_B,
            num_verified=num_verified,
        )

    def _advance(self, view: BatchView, is_live_B: Tensor, states_BN: Tensor, tokens_BM: Tensor, *path: Tensor) -> None:
        """Advance the states of requests in their automata, see `advance_states`. Where acceptance is simulated, a
        forbidden token ends that."""
        grammars = self.state.grammars
        assert grammars is not None
        self.ops.advance_states(view.req_idx_B, is_live_B, states_BN, tokens_BM, self.state.ints_SF, grammars, *path)
        if self.simulates:
            grammars.states_S.masked_fill_(grammars.states_S == BROKEN, FREE)

    def max_path(self, trees: DraftTrees) -> int:
        """Tokens that a round may commit of a request."""
        return self.method.max_path if trees.max_path is None else trees.max_path

    def draft(self, req_idx_B: Tensor, sampled: bool) -> tuple[BatchView, DraftTrees]:
        view = BatchView.gather(self.state, req_idx_B, self.page_size, self.ops)
        return view, self.method.draft(view, self.state, sampled)

    def verify(self, view: BatchView, trees: DraftTrees) -> Verified:
        """Run the target's forward pass over all nodes, and accept, commit and compact, for greedy requests."""
        verified = self.forward(view, trees, is_greedy=True)
        return self.accept(view, trees, verified, GREEDY)

    def forward(self, view: BatchView, trees: DraftTrees, lane: int = 0, *, is_greedy: bool = False) -> Verified:
        """Run the target's forward pass over all nodes. `is_greedy`: only the best token after each is wanted."""
        batch, num_nodes = trees.tokens_BN.shape
        mask = None if trees.mask_BNW is None else trees.mask_BNW.view(batch * num_nodes, -1)
        layout = view.layout(num_nodes, depths_BQ=trees.depths_BN, mask_TW=mask)
        tokens_T = trees.tokens_BN.reshape(-1)
        index_BN = nodes_T = None
        if self.fixed_shapes and trees.num_verified_B is not None:
            packed = self.ops.pack_nodes(
                trees.num_verified_B, trees.tokens_BN, layout.slots_T, layout.positions_T, trees.num_verified
            )
            nodes_T, index_BN, tokens_T = packed.nodes_T, packed.index_BN, packed.tokens_T
            layout = _packed(layout, packed)
        if not self.fixed_shapes and trees.num_nodes_B is not None:
            layout, node_T = layout.part(torch.zeros_like(trees.num_nodes_B), trees.num_nodes_B)
            index_T = torch.zeros_like(tokens_T).index_copy_(0, node_T, torch.arange(len(node_T), device=node_T.device))
            index_BN = index_T.view(batch, num_nodes)
            tokens_T = tokens_T[node_T]
        if lane:
            end = lane * num_nodes if self.fixed_shapes else int(layout.query_starts[lane])
            assert self.two_lanes is not None, "the round was made for one lane"
            hidden, aux_hidden_states = self.two_lanes.forward(
                tokens_T, layout, self._aux_layers, lane, end, is_even=self.fixed_shapes
            )
        else:
            with nullcontext() if self.routing is None else self.routing.round(layout.slots_T):
                hidden, aux_hidden_states = self._target.forward(
                    tokens_T, layout, self._cache, self._aux_layers, is_even=self.fixed_shapes
                )
        best = self._target.best_tokens(hidden, self.ops) if is_greedy else None
        if best is None:
            return Verified(hidden, aux_hidden_states, index_BN, self._target.raw_logits(hidden), nodes_T)
        choice_BN, margin_BN = of_nodes(trees, best, index_BN)
        return Verified(hidden, aux_hidden_states, index_BN, None, choice_BN=choice_BN, margin_BN=margin_BN)

    def take_part(self) -> None:
        """Compute this rank's experts in a round or a prompt chunk of the other ranks."""
        self._target.take_part()

    def choose(self, view: BatchView, trees: DraftTrees, verified: Verified, wanted: Wanted) -> Verified:
        """Add the edited logits and greedy choices that grammars read. Masks set logits to -inf, so they commute with
        the other edits and can be applied last."""
        edits = wanted.edits & ~Edits.NODE_MASK
        assert verified.logits_TV is not None, "a grammar needs logits"
        edited = self._edited(view, trees, verified.logits_TV, edits, keep=wanted.num_top is not None)
        choice_BN, _ = self._acceptance.choose(view, trees, edited, verified.index_BN, sampled=False)
        return replace(verified, edited_TV=edited, choice_BN=choice_BN)

    def accept(self, view: BatchView, trees: DraftTrees, verified: Verified, wanted: Wanted) -> Verified:
        """Accept, commit, and make the accepted paths contiguous."""
        verified = self._decide(view, trees, verified, wanted)
        committed = self._commit(view, trees, verified)
        if trees.states_BN is not None:
            is_live_B = view.field(Field.DONE) == 0
            path = committed.path_BM, committed.num_path_B
            self._advance(view, is_live_B, trees.states_BN, committed.tokens_BM, *path)
        if trees.parents_BN is not None:  # a chain's path is contiguous
            paths = committed.path_BM.shape
            self.ops.move_slots(self._cache.all_layers, committed.source_T.view(paths), committed.target_T.view(paths))
        return replace(verified, committed=committed)

    def _decide(self, view: BatchView, trees: DraftTrees, verified: Verified, wanted: Wanted) -> Verified:
        """Decide which nodes are accepted."""
        logits, edited, edits = verified.logits_TV, verified.edited_TV, wanted.edits
        if edited is not None:
            edits &= Edits.NODE_MASK  # the others are made
        else:
            edited = logits
        if edited is not None:
            keep = wanted.num_top is not None and edited is logits
            edited = self._edited(view, trees, edited, edits, keep=keep)
        target_ids = None if self.method.net is None else self.method.net.target_ids
        decided = self._acceptance.decide(view, trees, verified, edited, target_ids, wanted.sampled)
        if trees.states_BN is None or decided.next_token_B is None or decided.num_path_B is None:
            return decided
        # A draft that was drawn has to be accepted or rejected. Where its request leaves the automaton after it, it is
        # the last token of the round.
        first_B = _first_leaving(self._leaves(trees.states_BN))
        is_cut_B = decided.num_path_B > first_B
        last_B = trees.tokens_BN.gather(1, first_B.clamp(max=trees.tokens_BN.shape[1] - 1)[:, None])[:, 0]
        return replace(
            decided,
            num_path_B=torch.minimum(decided.num_path_B, first_B),
            next_token_B=torch.where(is_cut_B, last_B, decided.next_token_B),
        )

    def _leaves(self, states_BN: Tensor) -> Tensor:
        """(B, N) bool: the request leaves its automaton after the node."""
        assert self.state.grammars is not None
        return self.state.grammars.leaves_Q[states_BN.long()]

    def _launched(self, verified: Verified, num_top: int | None) -> Launched:
        """Return what the host reads of the round."""
        committed = verified.committed
        assert committed is not None
        logprobs = self._logprobs(verified.logits_TV, verified.accept_index_T, committed.tokens_BM, num_top)
        return Launched.of(committed.output_BZ, logprobs, committed.path_BM.shape[1])

    def _logprobs(
        self, logits_TV: Tensor | None, index_T: Tensor, tokens_BM: Tensor, num_top: int | None
    ) -> Logprobs | None:
        """Return the log-probabilities of tokens (B, M). `index_T`: for each token, the row (B * M) of the raw logits
        that it was chosen from."""
        if num_top is None:
            return None
        assert logits_TV is not None, "log-probabilities need logits"
        values, top_ids = self.ops.logprobs(logits_TV, index_T, tokens_BM.reshape(-1), num_top)
        return Logprobs(*(part.unflatten(0, tokens_BM.shape) for part in (values, top_ids)))

    def _edited(self, view: BatchView, trees: DraftTrees, logits_TV: Tensor, edits: Edits, keep: bool) -> Tensor:
        return edited_logits(
            self.state,
            view,
            trees,
            logits_TV,
            edits,
            self.ops,
            fixed_shapes=self.fixed_shapes,
            keep=keep,
        )

    def _commit(self, view: BatchView, trees: DraftTrees, verified: Verified) -> Committed:
        """End-of-sequence and stop tokens are looked for before the length is. The host cuts what comes after them by
        the same rule; here it only matters which requests go on."""
        scores_BN = trees.scores_BN if self._reports_scores else None
        if scores_BN is not None and scores_BN.shape != trees.tokens_BN.shape:
            scores_BN = None  # a grammar has added nodes
        committed: Committed = self.ops.commit_round(
            self.state.ints_SF,
            self.state.tokens_SL,
            self.state.page_table_SP,
            view.req_idx_B,
            self.page_size,
            self._eos,
            self.max_path(trees),
            trees.tokens_BN,
            verified.choice_BN,
            parents_BN=trees.parents_BN,
            depths_BN=trees.depths_BN,
            num_nodes_B=trees.num_nodes_B,
            path_BN=verified.path_BN,
            num_path_B=verified.num_path_B,
            next_token_B=verified.next_token_B,
            num_broken_B=verified.num_broken_B,
            scores_BN=scores_BN,
            margin_BN=verified.margin_BN,
        )
        return committed

    def _ends(self, rows: BatchView, tokens_BM: Tensor, counted_BM: Tensor) -> Tensor:
        """(B,) bool: an end-of-sequence or stop token is among the counted ones."""
        ends = (tokens_BM[:, :, None] == self._eos).any(dim=2) & (rows.field(Field.IGNORE_EOS) == 0)[:, None]
        stops = (tokens_BM[:, :, None] == rows.ints_BF[:, None, Field.STOP :]).any(dim=2)
        return ((ends | stops) & counted_BM).any(dim=1)

    def _remember(self, req_idx_B: Tensor, index_BM: Tensor, tokens_BM: Tensor, kept_BM: Tensor) -> None:
        """Write tokens to the requests' histories. Those that are not kept go to padding's."""
        row = torch.where(kept_BM, req_idx_B[:, None], self.state.padding)
        index = index_BM.clamp(max=self.state.tokens_SL.shape[1] - 1)
        self.state.tokens_SL.index_put_((row, index), tokens_BM.int())

    def extend(self, view: BatchView, trees: DraftTrees, verified: Verified) -> None:
        """Draft-extend: the draft network follows what was committed, M tokens of each request, of which those past the
        accepted ones write nothing."""
        net = self.method.net
        if net is None:
            return
        committed, accept_index_T = verified.committed, verified.accept_index_T
        assert committed is not None
        batch, width = committed.path_BM.shape
        offset, num_path_B = net.draft_kv_offset, committed.num_path_B
        layout = view.layout(width, start=offset, position=offset, num_written_B=num_path_B)
        starts_B = layout.starts_B
        tokens_T = committed.tokens_BM.reshape(-1)
        if not self.fixed_shapes:
            # What a grammar has put in place of drafts was not computed in drafting.
            num_reusable = self.method.num_reusable if trees.max_path is None else 0
            layout, part_T = layout.part((num_path_B - 1).clamp(max=num_reusable), num_path_B)
            tokens_T, accept_index_T = tokens_T[part_T], accept_index_T[part_T]
            last_B = layout.query_starts[1:].long() - 1
        elif trees.num_verified_B is not None:  # more than what was verified is not accepted
            packed = self.ops.pack_nodes(
                trees.num_verified_B, committed.tokens_BM, layout.slots_T, layout.positions_T, trees.num_verified
            )
            tokens_T, accept_index_T = packed.tokens_T, accept_index_T[packed.nodes_T]
            layout = _packed(layout, packed)
            last_B = packed.query_starts[:-1].long() + num_path_B - 1
        else:
            last_B = torch.arange(0, batch * width, width, device=tokens_T.device) + num_path_B - 1
        hidden = verified.hidden_TE[accept_index_T] if self._reads_hidden else verified.hidden_TE
        features = net.features(hidden, [one[accept_index_T] for one in verified.aux_hidden_states])
        if self.fixed_shapes and len(tokens_T) <= _FREE_ROWS:
            hidden = net.forward(tokens_T, features, layout)[last_B]
        else:
            starts_R, groups = starts_B + num_path_B - 1, layout.groups
            logits_indices = LogitsIndices.of(layout, last_B, starts_R, view.page_table_BP, groups)
            hidden = net.forward(tokens_T, features, layout, logits_indices)
        self.state.features_SE.index_copy_(0, view.req_idx_B, hidden)

    def prefill(
        self, chunk: PromptChunk, wanted: Wanted = GREEDY, trunks: PromptTrunks = EAGER
    ) -> tuple[Launched, Logprobs | None]:
        """Compute pieces of prompts. Where a prompt ends, choose its first token and make its request index ready for
        rounds.

        Return the first tokens, and the log-probabilities (K, 1) of the chunk's `scored_K2`. A first token is NO_TOKEN
        if the target's logits are not finite: then the request is done, and the draft network reads token 0 in its
        place. `trunks`: the models that compute this chunk, and no round.
        """
        needs_all = self._reads_hidden or chunk.scored_K2 is not None
        logits_indices = None if needs_all else chunk.logits_indices
        if chunk.cut is not None:
            assert self.two_lanes is not None, "the round was made for one lane"
            hidden, aux_hidden_states = self.two_lanes.prefill(chunk, chunk.cut, self._aux_layers, logits_indices)
        else:
            hidden, aux_hidden_states = self._target.forward(
                chunk.tokens_T, chunk.layout, self._cache, self._aux_layers, logits_indices, trunks.target
            )
        scores = None if chunk.scored_K2 is None else self._scores(hidden, chunk.scored_K2, chunk.scored_num_top)
        if chunk.ready_R.shape[0] == 0:
            self._extend_prompt(chunk, chunk.ready_R, hidden, aux_hidden_states, trunks.draft)
            return Launched(chunk.ready_R[:, None].int().expand(-1, 2), None, 1), scores
        rows = BatchView.gather(self.state, chunk.ready_R, self.page_size, self.ops)
        logits = self._target.raw_logits(hidden[chunk.logits_indices.index_R] if logits_indices is None else hidden)
        grammars = self.state.grammars if wanted.edits & Edits.GRAMMAR else None
        states_R = None if grammars is None else grammars.states_S[chunk.ready_R]
        roots = DraftTrees(chunk.roots_R[:, None], states_BN=None if states_R is None else states_R[:, None])
        # The first token's position is the prompt's length: one past the position of its last token.
        rows.ints_BF[:, Field.LENGTH] = chunk.lengths_R - 1
        edited = self._edited(rows, roots, logits, wanted.edits, keep=wanted.num_top is not None)
        choice, margin = self._acceptance.choose(rows, roots, edited, None, wanted.sampled)
        is_new = chunk.roots_R < 0  # a request that is computed again has its root already
        reported = torch.where(is_new, choice[:, 0], chunk.roots_R)
        tokens = reported.clamp(min=0)
        limit = rows.field(Field.LIMIT)
        done = self._ends(rows, tokens[:, None], is_new[:, None]) | (chunk.lengths_R + 1 >= limit)
        if grammars is not None and states_R is not None:
            self._advance(rows, is_new, states_R[:, None], tokens[:, None])
            done |= self._leaves(grammars.states_S[chunk.ready_R])
        done |= reported == NO_TOKEN
        ints = rows.ints_BF.clone()
        ints[:, Field.LENGTH], ints[:, Field.ROOT], ints[:, Field.DONE] = chunk.lengths_R, tokens, done.long()
        self.state.ints_SF.index_copy_(0, chunk.ready_R, ints)
        if self.state.tokens_SL.shape[1]:
            everything = torch.ones_like(tokens, dtype=torch.bool)[:, None]
            self._remember(chunk.ready_R, chunk.lengths_R[:, None], tokens[:, None], everything)
        self._extend_prompt(chunk, tokens, hidden, aux_hidden_states, trunks.draft)
        output_R2 = torch.cat((reported[:, None].int(), margin.view(torch.int32)), dim=1)
        index_R = torch.arange(len(tokens), device=tokens.device)
        logprobs = self._logprobs(logits, index_R, tokens[:, None], wanted.num_top)
        return Launched.of(output_R2, logprobs, 1), scores

    def _scores(self, hidden_TE: Tensor, scored_K2: Tensor, num_top: int) -> Logprobs:
        """Return the log-probabilities of tokens after others. They are computed a few at a time, because the logits of
        a whole chunk would take too much memory."""
        parts = []
        for scored in scored_K2.split(_SCORED_ROWS):
            logits = self._target.raw_logits(hidden_TE[scored[:, 0]])
            index_R = torch.arange(len(scored), device=scored.device)
            parts.append(self.ops.logprobs(logits, index_R, scored[:, 1], num_top))
        return Logprobs(*(torch.cat(part)[:, None] for part in zip(*parts, strict=True)))

    def _extend_prompt(
        self, chunk: PromptChunk, first_R: Tensor, hidden_TE: Tensor, aux_hidden_states: list[Tensor],
        trunk: Trunk | None,
    ) -> None:  # fmt: skip
        net = self.method.net
        if net is None:
            return
        assert chunk.draft_layout is not None
        assert chunk.draft_selected is not None
        tokens = chunk.draft_tokens_T.index_copy(0, chunk.draft_selected.index_R, first_R)
        features = net.features(hidden_TE, aux_hidden_states)
        hidden = net.forward(tokens, features, chunk.draft_layout, chunk.draft_selected, trunk)
        self.state.features_SE.index_copy_(0, chunk.ready_R, hidden)


def _packed(layout: PagedBatch, packed: PackedNodes) -> PagedBatch:
    """Return the layout of packed nodes, of which the layout has all."""
    return replace(layout, slots_T=packed.slots_T, positions_T=packed.positions_T, query_starts=packed.query_starts)


def _without_leaving(trees: DraftTrees, leaves_BN: Tensor) -> DraftTrees:
    """Return the trees without the nodes after which requests leave their automata."""
    if trees.parents_BN is not None:
        is_cut_BN = leaves_BN.clone()
        is_cut_BN[:, 0] = False
        return replace(trees, parents_BN=torch.where(is_cut_BN, -2, trees.parents_BN))
    first_B, counts_B = _first_leaving(leaves_BN), trees.num_nodes_B
    return replace(trees, num_nodes_B=first_B if counts_B is None else torch.minimum(counts_B, first_B))


def _first_leaving(leaves_BN: Tensor) -> Tensor:
    """(B,) the first node of a chain after which the request leaves its automaton; N: there is none."""
    num_nodes = leaves_BN.shape[1]
    nodes = torch.arange(num_nodes, device=leaves_BN.device)
    return torch.where(leaves_BN & (nodes > 0), nodes, num_nodes).amin(dim=1)
