"""Drafting with a network, as a chain or as a dynamic tree, one decision after the other. The package `draft` does the
same in tensors.

Shape suffixes: B sequences, T packed tokens, K = topk, E hidden size, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.batch import Candidates
from specbatch.cache.pages import KVCache
from specbatch.draft.network import SteppedNet
from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.engine.sequence import Sequence
from specbatch.kernels.torch.sampling import argmax
from specbatch.kernels.torch.tree import unbroken_drafts
from tests.oracle.proposer import TargetOutput
from tests.oracle.rng import uniform
from tests.oracle.sampling import distribution, draw, is_broken
from tests.oracle.spans import Span, batch_of
from tests.oracle.tree import DraftTree, select_nodes


@dataclass(slots=True)
class _State:
    """The draft's state of a sequence. `logits` and `hidden` are those of the root, once everything is committed."""

    length: int  # valid slots in the draft's cache
    num_kept: int = 0  # slots after them that the last chain filled, valid as far as its tokens were accepted
    logits: Tensor | None = None  # (W,)
    hidden: Tensor | None = None  # (E,)


class NeuralProposer:
    """Chain or tree drafting with a `SteppedNet`."""

    def __init__(
        self,
        net: SteppedNet,
        shape: DraftShape,
        target_vocab_size: int,
        page_size: int,
        device: torch.device,
        coupled: bool = False,
    ) -> None:
        """`coupled`: sampled chains are drawn with the target's random numbers, and count as a deterministic choice."""
        self._net = net
        self._shape = shape
        self._vocab_size = target_vocab_size
        self._page_size = page_size
        self._device = device
        self._coupled = coupled

    @property
    def num_lookahead(self) -> int:
        return num_lookahead(self._shape, self._net.draft_kv_offset)

    @property
    def prefix_lookahead(self) -> int:
        return 1 - self._net.draft_kv_offset

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._net.aux_layers

    @property
    def cache(self) -> KVCache | None:
        return self._net.cache

    def start(self, seq: Sequence) -> None:
        seq.draft_state = _State(length=seq.num_computed_tokens)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        spans, tokens, last_rows, ready, row = [], [], [], [], 0
        for seq, start in zip(sequences, output.starts, strict=True):
            state: _State = seq.draft_state
            # A draft model's chain filled the slots of accepted drafts with the same values that draft-extend would
            # compute. EAGLE's were made from the draft's features, so they are computed again from the target's.
            state.length += min(state.num_kept, seq.num_computed_tokens - start - 1)
            state.num_kept = 0
            end = seq.num_computed_tokens + self._net.draft_kv_offset
            spans.append(Span(seq.pages, state.length, end - state.length))
            shift = 1 - self._net.draft_kv_offset
            tokens += seq.tokens[state.length + shift : end + shift]
            row += end - state.length
            state.length = end
            if seq.is_prefilled:
                ready.append(state)
                last_rows.append(row - 1)
        layout = batch_of(spans, self._page_size, self._device)
        features = self._net.features(output.hidden_TE, output.aux_hidden_states)
        hidden = self._net.forward(torch.tensor(tokens, device=self._device), features, layout)
        if ready:
            # Draft logits are computed for the selected rows only, because the vocabulary is the expensive part.
            logits_indices = hidden[last_rows]
            for state, logits, last in zip(ready, self._logits(logits_indices), logits_indices, strict=True):
                state.logits, state.hidden = logits, last

    def _logits(self, hidden_RE: Tensor) -> Tensor:
        logits_RW = self._net.raw_logits(hidden_RE)
        return logits_RW.to(torch.promote_types(logits_RW.dtype, torch.float32))

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        if self._shape.is_chain:
            return self.chain(sequences)
        candidates = self.candidates(sequences)
        root = torch.tensor([seq.tokens[-1] for seq in sequences], device=self._device)
        return select_nodes(
            root, candidates.tokens_BC, candidates.scores_BC, candidates.parents_BC, self._shape.num_draft_tokens
        )

    def _start(self, sequences: list[Sequence]) -> tuple[list[_State], Tensor, Tensor]:
        """Return the sequences' states, and their roots' draft logits (B, W) and hidden states (B, E)."""
        states: list[_State] = [seq.draft_state for seq in sequences]
        logits = torch.stack([s.logits for s in states if s.logits is not None])
        hidden = torch.stack([s.hidden for s in states if s.hidden is not None])
        assert len(logits) == len(hidden) == len(states), "a sequence drafts before its draft-extend"
        return states, logits, hidden

    def chain(self, sequences: list[Sequence], *, greedy: bool = False) -> DraftTree:
        """Draft a chain of num_steps tokens for each sequence; topk is not read. Drafts are drawn if the request
        samples, unless `greedy`."""
        states, logits_BW, hidden_BE = self._start(sequences)
        chains = [[seq.tokens[-1]] for seq in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        for step in range(self._shape.num_steps):
            if step > 0:
                spans = [Span(seq.pages, s.length + step - 1, 1) for seq, s in zip(sequences, states, strict=True)]
                layout = batch_of(spans, self._page_size, self._device)
                hidden_BE = self._net.forward(
                    torch.tensor([c[-1] for c in chains], device=self._device), hidden_BE, layout
                )
                logits_BW = self._logits(hidden_BE)
            best = self._to_target(argmax(logits_BW)).tolist()
            for b, seq in enumerate(sequences):
                if greedy or seq.request.params.temperature == 0:
                    chains[b].append(best[b])
                    continue
                q = self._widen(distribution(logits_BW[b], seq.request.params))
                position = seq.num_computed_tokens + step + 1
                # For NaN, `best` is the first draft token. Any token is right, because it is rejected.
                is_drawn = not is_broken(q)
                u = uniform(seq.request.rng, position, Draw.SAMPLE if self._coupled else Draw.DRAFT)
                chains[b].append(draw(q, u) if is_drawn else best[b])
                if not self._coupled:
                    probs[b].append(q)
        if self._net.draft_kv_offset:
            for state in states:
                state.num_kept = self._shape.num_steps - 1
        return DraftTree.chain(chains, [torch.stack(p) if p else None for p in probs])

    def candidates(self, sequences: list[Sequence]) -> Candidates:
        """Draft the candidates: topk drafts after the root, and at every later step topk after each of the best topk
        branches."""
        states, logits_BW, hidden_BE = self._start(sequences)
        batch, k, device = len(sequences), self._shape.topk, self._device
        rows = torch.arange(batch, device=device)[:, None]
        scores_BK, ids = unbroken_drafts(*torch.log_softmax(logits_BW, dim=-1).topk(k, dim=-1))
        beam_BK = self._to_target(ids)
        tokens, scores, parents = [beam_BK], [scores_BK], [torch.full_like(beam_BK, -1)]
        beam_index_BK = torch.arange(k, device=device).expand(batch, k)  # indices of the beam's candidates
        features = hidden_BE[:, None].expand(-1, k, -1)
        own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
        seen = own  # (B, K, slots drafted so far): ancestors and itself
        for step in range(1, self._shape.num_steps):
            spans = [
                Span(seq.pages, s.length + (step - 1) * k, k, positions=[s.length + step - 1] * k, mask=seen[b])
                for b, (seq, s) in enumerate(zip(sequences, states, strict=True))
            ]
            layout = batch_of(spans, self._page_size, device)
            out = self._net.forward(beam_BK.reshape(-1), features.reshape(batch * k, -1), layout)
            step_scores, ids = unbroken_drafts(*torch.log_softmax(self._logits(out), dim=-1).topk(k, dim=-1))
            candidate_scores = (scores_BK[:, :, None] + step_scores.view(batch, k, k)).view(batch, k * k)
            candidate_tokens = self._to_target(ids).view(batch, k * k)
            first = sum(t.shape[1] for t in tokens)
            tokens.append(candidate_tokens)
            scores.append(candidate_scores)
            parents.append(beam_index_BK.repeat_interleave(k, dim=1))
            # The next step branches from the best k of the k * k children.
            chosen = torch.sort(candidate_scores, dim=1, descending=True, stable=True).indices[:, :k]
            scores_BK, beam_BK = candidate_scores.gather(1, chosen), candidate_tokens.gather(1, chosen)
            beam_index_BK = first + chosen
            parent = chosen // k
            features = out.view(batch, k, -1)[rows, parent]
            seen = torch.cat((seen[rows, parent], own), dim=2)
        return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def _to_target(self, ids: Tensor) -> Tensor:
        return ids if self._net.target_ids is None else self._net.target_ids[ids]

    def _widen(self, q_W: Tensor) -> Tensor:
        """Return a distribution over draft tokens as one over the target's vocabulary (V,). It is NaN if the given one
        is."""
        if self._net.target_ids is None and q_W.shape[0] == self._vocab_size:
            return q_W
        ids = (
            self._net.target_ids if self._net.target_ids is not None else torch.arange(q_W.shape[0], device=q_W.device)
        )
        elsewhere = torch.nan if is_broken(q_W) else 0.0
        return torch.full((self._vocab_size,), elsewhere, dtype=q_W.dtype, device=q_W.device).index_copy_(0, ids, q_W)
