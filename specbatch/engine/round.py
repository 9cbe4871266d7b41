"""The round on the device: draft -> verify -> accept -> commit -> draft-extend, for a batch of slots.

Tensors in, tensors out, with fixed shapes; nothing is read by the host, so all of it can be one CUDA graph. The rules
are those of `engine.Engine`, the oracle.

Shape suffixes: B rows, N tree nodes, M longest path (root counted), T packed tokens, E hidden size, V vocabulary, W
words of a mask or draft vocabulary, R selected rows, Z report columns.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN, Committed, Field, LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import TargetOutput
from specbatch.draft.rng import Draw
from specbatch.models.decoder import Decoder

MAX_TOP_LOGPROBS = 20
_LOGPROB_ROWS = 32  # rows of a batch whose log-probabilities are computed at once
# Up to so many rows a draft-extend only streams weights, and computing the hidden states of all of them costs nothing.
_FREE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens of a report: each token's own, and the most likely ones behind it."""

    chosen: Tensor  # (B, M) float32
    top_values: Tensor  # (B, M, 20) float32
    top_ids: Tensor  # (B, M, 20) int64


@dataclass(frozen=True, slots=True)
class Verified:
    """What draft-extend needs of a verification."""

    rows: BatchView
    committed: Committed
    hidden_TE: Tensor
    aux_hidden_states: list[Tensor]
    logprobs: Logprobs | None


class Round:
    """`simulate`: tokens per round to commit on average, whatever the target says; None: the real acceptance."""

    def __init__(
        self,
        target: Decoder,
        cache: KVCache,
        method: DraftMethod,
        state: RequestTable,
        page_size: int,
        eos_token_ids: tuple[int, ...],
        ops: ModuleType,
        simulate: float | None = None,
    ) -> None:
        self.state = state
        self._target = target
        self._cache = cache
        self._page_size = page_size
        self._eos = torch.tensor(eos_token_ids or (-2,), device=target.device)
        self._ops = ops
        self._simulate = simulate
        self._follow(method)

    def drafting(self, method: DraftMethod) -> Round:
        """This round with another draft method, of the same draft network or of none."""
        other = copy(self)
        other._follow(method)
        return other

    def _follow(self, method: DraftMethod) -> None:
        self.method = method
        self._aux_layers = method.net.aux_layers if method.net is not None else ()
        self._reads_hidden = method.net is not None and method.net.reads_hidden

    @property
    def num_positions(self) -> int:
        return self._target.num_positions

    def __call__(self, req_idx_B: Tensor, sampled: bool, logprobs: bool = False) -> Verified:
        """One round of the requests `req_idx_B` (int64; padding's index may repeat). `sampled`: some request may have a
        positive temperature."""
        rows, draft = self.draft(req_idx_B, sampled)
        verified = self.verify(rows, draft, sampled, logprobs)
        self.extend(verified)
        return verified

    def draft(self, req_idx_B: Tensor, sampled: bool) -> tuple[BatchView, DraftTrees]:
        rows = BatchView.gather(self.state, req_idx_B, self._page_size, self._ops)
        return rows, self.method.draft(rows, self.state, sampled)

    def verify(self, rows: BatchView, draft: DraftTrees, sampled: bool, logprobs: bool = False) -> Verified:
        """The target's forward pass over all nodes, acceptance, and the commit of what was accepted."""
        batch, num_nodes = draft.tokens_BN.shape
        mask = None if draft.mask_BNW is None else draft.mask_BNW.view(batch * num_nodes, -1)
        layout = rows.layout(num_nodes, depths_BQ=draft.depths_BN, mask_TW=mask)
        hidden, aux_hidden_states = self._target.forward(
            draft.tokens_BN.reshape(-1), layout, self._cache, self._aux_layers
        )
        logits = self._target.raw_logits(hidden)
        committed = self._accept_and_commit(rows, draft, logits, sampled)
        if draft.parents_BN is not None:  # a chain's path is contiguous as it is
            paths = committed.path_BM.shape
            self._ops.move_slots(self._cache.all_layers, committed.source_T.view(paths), committed.target_T.view(paths))
        chosen = None
        if logprobs:
            width = committed.path_BM.shape[1]
            chosen = logprobs_of(logits[committed.accept_index_T].view(batch, width, -1), committed.tokens_BM)
        return Verified(rows, committed, hidden, aux_hidden_states, chosen)

    def _accept_and_commit(self, rows: BatchView, draft: DraftTrees, logits_TV: Tensor, sampled: bool) -> Committed:
        """End-of-sequence and stop tokens are looked for before the length is. What lies behind them is cut by the
        host, which decides the same way again; here it only matters who goes on."""
        choice = path = num_path = next_token = num_broken = None
        if sampled and draft.probs_BDW is not None:
            num_path, next_token, num_broken = self._accept_drawn(rows, draft, logits_TV)
        else:
            choice = self._choose(rows, draft, logits_TV, sampled).view(draft.tokens_BN.shape)
        if self._simulate is not None:
            path, num_path = self._simulated(rows, draft)
        committed: Committed = self._ops.commit_round(
            self.state.ints_SF,
            self.state.tokens_SL,
            self.state.page_table_SP,
            rows.req_idx_B,
            self._page_size,
            self._eos,
            min(self.method.max_path, draft.tokens_BN.shape[1]),  # trees of the host may be smaller
            draft.tokens_BN,
            choice,
            parents_BN=draft.parents_BN,
            depths_BN=draft.depths_BN,
            num_nodes_B=draft.num_nodes_B,
            path_BN=path,
            num_path_B=num_path,
            next_token_B=next_token,
            num_broken_B=num_broken,
        )
        return committed

    def _choose(self, rows: BatchView, draft: DraftTrees, logits_TV: Tensor, sampled: bool) -> Tensor:
        """(T,) the target's own token after each node; NO_TOKEN where its logits are not finite."""
        if not sampled:
            best: Tensor = self._ops.argmax(logits_TV, NO_TOKEN)
            return best
        num_nodes = draft.tokens_BN.shape[1]
        depth = torch.arange(num_nodes, device=logits_TV.device) if draft.depths_BN is None else draft.depths_BN
        position = (rows.length_B[:, None] + depth + 1).reshape(-1)
        u = self._ops.uniform(*(x.repeat_interleave(num_nodes) for x in rows.rng), position, Draw.SAMPLE)
        chosen: Tensor = self._ops.sample(logits_TV, *(x.repeat_interleave(num_nodes) for x in rows.sampling), u)
        return chosen

    def _accept_drawn(self, rows: BatchView, draft: DraftTrees, logits_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert draft.probs_BDW is not None
        assert self.method.net is not None
        batch, num_nodes = draft.tokens_BN.shape
        p = self._ops.distribution(logits_TV, *(x.repeat_interleave(num_nodes) for x in rows.sampling))
        position = rows.length_B[:, None] + torch.arange(1, num_nodes + 1, device=logits_TV.device)
        rng = tuple(x[:, None] for x in rows.rng)
        u = {
            purpose: self._ops.uniform(*rng, position, purpose) for purpose in (Draw.ACCEPT, Draw.RESIDUAL, Draw.SAMPLE)
        }
        num_drafts = torch.full_like(rows.length_B, num_nodes - 1)
        num_path, next_token, num_broken = self._ops.accept_chain(
            draft.tokens_BN[:, 1:],
            draft.probs_BDW,
            self.method.net.target_ids,
            p.view(batch, num_nodes, -1),
            num_drafts,
            rows.floats_B3[:, 0],
            u[Draw.ACCEPT][:, :-1],
            u[Draw.RESIDUAL][:, :-1],
            u[Draw.SAMPLE],
        )
        return num_path, next_token, num_broken

    def _simulated(self, rows: BatchView, draft: DraftTrees) -> tuple[Tensor | None, Tensor]:
        """A path of random length with the wanted mean: along the chain (no path then), or down to a tree's first node
        of that depth."""
        assert self._simulate is not None
        num_nodes = draft.tokens_BN.shape[1]
        u = self._ops.uniform(*rows.rng, rows.length_B, Draw.ACCEPT)
        whole = int(self._simulate)
        wanted = torch.where(u < self._simulate - whole, whole + 1, whole)
        if draft.parents_BN is None:
            return None, torch.clamp(wanted, max=num_nodes if draft.num_nodes_B is None else draft.num_nodes_B)
        nodes = torch.arange(num_nodes, device=u.device)
        assert draft.depths_BN is not None
        assert draft.mask_BNW is not None
        num_path = torch.minimum(wanted, draft.depths_BN.amax(dim=1) + 1)
        end = (draft.depths_BN == (num_path - 1)[:, None]).int().argmax(dim=1)
        words = draft.mask_BNW.gather(1, end[:, None, None].expand(-1, 1, draft.mask_BNW.shape[2]))[:, 0]
        on_path = (words[:, nodes >> 5] >> (nodes & 31)) & 1
        path = torch.where(on_path.bool(), nodes, num_nodes).sort(dim=1).values
        return torch.where(path < num_nodes, path, 0), num_path

    def _ends(self, rows: BatchView, tokens_BM: Tensor, counted_BM: Tensor) -> Tensor:
        """(B,) bool: an end-of-sequence or stop token is among the counted ones."""
        ends = (tokens_BM[:, :, None] == self._eos).any(dim=2) & (rows.field(Field.IGNORE_EOS) == 0)[:, None]
        stops = (tokens_BM[:, :, None] == rows.ints_BF[:, None, Field.STOP :]).any(dim=2)
        return ((ends | stops) & counted_BM).any(dim=1)

    def _remember(self, req_idx_B: Tensor, index_BM: Tensor, tokens_BM: Tensor, kept_BM: Tensor) -> None:
        """Write tokens to the slots' histories; what is not kept goes to padding's."""
        row = torch.where(kept_BM, req_idx_B[:, None], self.state.padding)
        index = index_BM.clamp(max=self.state.tokens_SL.shape[1] - 1)
        self.state.tokens_SL.index_put_((row, index), tokens_BM.int())

    def extend(self, verified: Verified) -> None:
        """Draft-extend: the draft network follows what was committed, M rows for each request, of which those past the
        accepted ones write nothing."""
        net = self.method.net
        if net is None:
            return
        rows, committed = verified.rows, verified.committed
        batch, width = committed.path_BM.shape
        layout = rows.layout(
            width, start=net.draft_kv_offset, position=net.draft_kv_offset, num_written_B=committed.num_path_B
        )
        picked = committed.accept_index_T
        hidden = verified.hidden_TE[picked] if self._reads_hidden else verified.hidden_TE
        features = net.features(TargetOutput([], hidden, [c[picked] for c in verified.aux_hidden_states]))
        tokens_T, last_B = committed.tokens_BM.reshape(-1), committed.num_path_B - 1
        req_idx_B = torch.arange(0, batch * width, width, device=last_B.device) + last_B
        if batch * width <= _FREE_ROWS:
            hidden = net.forward(tokens_T, features, layout)[req_idx_B]
        else:
            logits_indices = LogitsIndices.of(layout, req_idx_B, layout.starts_B + last_B, rows.page_table_BP)
            hidden = net.forward(tokens_T, features, layout, logits_indices)
        self.state.features_SE.index_copy_(0, rows.req_idx_B, hidden)

    def prefill(self, chunk: PromptChunk, sampled: bool, logprobs: bool = False) -> tuple[Tensor, Logprobs | None]:
        """Compute pieces of prompts; where a prompt ends, choose its first token and set its slot going.

        Returns the tokens (R, 1) int32 of the prompts that end here, with logprobs (R, 1) where asked. NO_TOKEN where
        the target's logits are not finite: then the slot is done, and what goes on to be computed sees token 0.
        """
        logits_indices = None if self._reads_hidden else chunk.logits_indices
        hidden, aux_hidden_states = self._target.forward(
            chunk.tokens_T, chunk.layout, self._cache, self._aux_layers, logits_indices
        )
        if chunk.ready_R.shape[0] == 0:
            self._extend_prompt(chunk, chunk.ready_R, hidden, aux_hidden_states)
            return chunk.ready_R[:, None].int(), None
        rows = BatchView.gather(self.state, chunk.ready_R, self._page_size, self._ops)
        logits = self._target.raw_logits(hidden[chunk.logits_indices.index_R] if logits_indices is None else hidden)
        draft = DraftTrees(chunk.roots_R[:, None])
        # The first token's position is the prompt's length: one past the position of its last token.
        rows.ints_BF[:, Field.LENGTH] = chunk.lengths_R - 1
        chosen = self._choose(rows, draft, logits, sampled)
        told = torch.where(chunk.roots_R < 0, chosen, chunk.roots_R)  # recomputed requests have theirs already
        tokens = told.clamp(min=0)
        limit = rows.field(Field.LIMIT)
        done = self._ends(rows, tokens[:, None], (chunk.roots_R < 0)[:, None]) | (chunk.lengths_R + 1 >= limit)
        done |= told == NO_TOKEN
        ints = rows.ints_BF.clone()
        ints[:, Field.LENGTH], ints[:, Field.ROOT], ints[:, Field.DONE] = chunk.lengths_R, tokens, done.long()
        self.state.ints_SF.index_copy_(0, chunk.ready_R, ints)
        if self.state.tokens_SL.shape[1]:
            everything = torch.ones_like(tokens, dtype=torch.bool)[:, None]
            self._remember(chunk.ready_R, chunk.lengths_R[:, None], tokens[:, None], everything)
        self._extend_prompt(chunk, tokens, hidden, aux_hidden_states)
        return told[:, None].int(), logprobs_of(logits[:, None], tokens[:, None]) if logprobs else None

    def _extend_prompt(
        self, chunk: PromptChunk, first_R: Tensor, hidden_TE: Tensor, aux_hidden_states: list[Tensor]
    ) -> None:
        net = self.method.net
        if net is None:
            return
        assert chunk.draft_layout is not None
        assert chunk.draft_selected is not None
        tokens = chunk.draft_tokens_T.index_copy(0, chunk.draft_selected.index_R, first_R)
        features = net.features(TargetOutput([], hidden_TE, aux_hidden_states))
        hidden = net.forward(tokens, features, chunk.draft_layout, chunk.draft_selected)
        self.state.features_SE.index_copy_(0, chunk.ready_R, hidden)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Pieces of prompts, packed. R of them end in this chunk."""

    tokens_T: Tensor
    layout: PagedBatch
    ready_R: Tensor  # int64, slots of the prompts that end here
    logits_indices: LogitsIndices  # their last tokens
    lengths_R: Tensor  # int64, committed once this is done
    roots_R: Tensor  # int64, the root of a request that is computed again; -1: to be chosen
    draft_tokens_T: Tensor  # what the draft network reads; the rows of roots yet to be chosen hold anything
    draft_layout: PagedBatch | None
    draft_selected: LogitsIndices | None


def logprobs_of(logits_BMV: Tensor, tokens_BM: Tensor) -> Logprobs:
    """Before temperature and filters, in float32; a few rows at a time, which bounds the memory."""
    parts = []
    for logits, tokens in zip(logits_BMV.split(_LOGPROB_ROWS), tokens_BM.split(_LOGPROB_ROWS), strict=True):
        values = torch.log_softmax(logits.float(), dim=-1)
        top, ids = values.topk(min(MAX_TOP_LOGPROBS, values.shape[-1]), dim=-1)
        parts.append((values.gather(2, tokens[:, :, None])[:, :, 0], top, ids))
    return Logprobs(*(torch.cat(part) for part in zip(*parts, strict=True)))
