"""The engine: a continuous batch, advanced by prompt chunks and speculative rounds.

A round is draft -> verify -> accept -> commit -> draft-extend.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache, PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.counts import EngineStats
from specbatch.engine.cpu_threads import ThreadGovernor
from specbatch.engine.engine import memory_shortage
from specbatch.engine.logprobs import ReadLogprobs
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.logprobs import TokenLogprobs
from specbatch.models.decoder import Decoder
from specbatch.types import Completion, EngineLimits, FinishReason, Request
from tests.oracle.proposer import Proposer, TargetOutput
from tests.oracle.rules import edited_logits, path_tokens
from tests.oracle.sampling import margin_of, token_logprob
from tests.oracle.spans import Span, batch_of
from tests.oracle.tree import DraftTree
from tests.oracle.verify import Accepted, sample_token, verify


class OracleEngine:
    """Runs requests to completion. See `types.BatchEngine` for what each method promises."""

    def __init__(
        self,
        target: Decoder,
        proposer: Proposer,
        cache: KVCache,
        pool: PagePool,
        *,
        max_length: int,
        longest_row: int | None = None,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        prefix_cache: bool,
        eos_token_ids: tuple[int, ...],
        threads: ThreadGovernor | None = None,
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._cache = cache
        self._page_size = pool.page_size
        self._eos = frozenset(eos_token_ids)
        self._threads = threads
        prefix = PrefixIndex(pool, proposer.prefix_lookahead) if prefix_cache else None
        self._scheduler = Scheduler(
            pool, prefix, proposer.num_lookahead, proposer.start, max_batch_size, prefill_chunk_tokens
        )
        self._max_length = max_length if longest_row is None else longest_row
        self.limits = EngineLimits(self._max_length - 1, target.config.vocab_size, eos_token_ids=eos_token_ids)
        self.stats = EngineStats()
        # The times of drafting, of the target and of draft-extend in the last round.
        self.phase_seconds = 0.0, 0.0, 0.0

    def set_methods(self, proposer: Proposer) -> None:
        """Draft with this proposer from now on, with the same draft network or none. The engine must be idle, and must
        be built for the widest proposer. The entries of its prefix cache are only valid for the network that computed
        them."""
        assert not self.num_running, "requests are running"
        assert not self.num_waiting, "requests are waiting"
        assert proposer.num_lookahead <= self._scheduler.num_lookahead, "wider than what the engine was built for"
        self._proposer = proposer

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def submit(self, request: Request) -> None:
        self._scheduler.waiting.append(Sequence.of(request, self.limits, self._max_length))

    def check_integrity(self) -> None:
        """Assert that every page is accounted for."""
        self._scheduler.check_integrity()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        if self._threads is not None:
            self._threads.update()
        try:
            finished = self._step()
        except Exception as error:
            if is_out_of_memory(error):  # it can come anywhere in the step, so the engine cannot go on
                raise memory_shortage(error, self.num_running) from error
            raise
        if self._threads is not None and not (self.num_running or self.num_waiting):
            self._threads.rest()
        return finished

    def _step(self) -> list[Completion]:
        began = time.perf_counter()
        spans = self._scheduler.plan_prefill()
        if spans:
            finished = self._prefill(spans)
            self.stats.prefill_seconds += time.perf_counter() - began
            return finished
        sequences = self._scheduler.plan_round()
        if not sequences:
            return []
        finished = self._round(sequences)
        self.stats.decode_seconds += time.perf_counter() - began
        return finished

    def _prefill(self, spans: list[PrefillSpan]) -> list[Completion]:
        tokens = [token for s in spans for token in s.seq.tokens[s.start : s.end]]
        layout = self._layout([Span(s.seq.pages, s.start, s.end - s.start) for s in spans])
        hidden, aux_hidden_states = self._target.forward(
            self._tensor(tokens), layout, self._cache, self._proposer.aux_layers
        )
        last_rows, row = [], -1
        for s in spans:
            row += s.end - s.start
            s.record(self.stats)
            if s.end == len(s.seq.tokens):
                last_rows.append(row)
        self._score(spans, hidden)
        first_logits = iter(self._target.logits(hidden[last_rows]) if last_rows else ())
        finished = []
        for s in spans:
            s.seq.num_computed_tokens = s.end
            if s.end == len(s.seq.tokens):
                logits = next(first_logits)
                edited = edited_logits(logits, s.seq, [], self._eos)
                token = sample_token(edited, s.seq, position=len(s.seq.tokens))
                reason = self._append(s.seq, [token], logits[None], edited[None])
                if reason is not None:
                    finished.append((s.seq, reason))
        # Draft-extend also runs for a request that ends with its first token: later rows may share its pages, which
        # hold the draft's entries, too. It does not run if a stop string removed that token.
        whole = {s.seq for s in spans if len(s.seq.tokens) > s.end}
        self._extend([(s.seq, s.start) for s in spans], hidden, aux_hidden_states, whole)
        for s in spans:
            if s.seq in whole or self._proposer.cache is None:
                self._scheduler.share(s.seq)
        return [self._complete(seq, reason) for seq, reason in finished]

    def _score(self, spans: list[PrefillSpan], hidden_TE: Tensor) -> None:
        """Compute the log-probabilities of prompt tokens, one after the other."""
        row = 0
        for s in spans:
            for index in range(s.start + 1, s.end + 1):
                if index in s.seq.scored_tokens:
                    logits = self._target.logits(hidden_TE[row : row + 1])[0]
                    top = s.seq.request.params.prompt_logprobs or 0
                    s.seq.prompt_logprobs[index] = token_logprob(logits, s.seq.tokens[index], top)
                row += 1

    def _round(self, sequences: list[Sequence]) -> list[Completion]:
        began = time.perf_counter()
        tree = self._proposer.propose(sequences)
        drafted = time.perf_counter()
        hidden, aux_hidden_states, logits = self._verify_forward(sequences, tree)
        verified = time.perf_counter()
        paths = [(seq, path) for b, seq in enumerate(sequences) for path in path_tokens(tree, b)]
        edited = torch.stack(
            [edited_logits(row, seq, path, self._eos) for row, (seq, path) in zip(logits, paths, strict=True)]
        )
        accepted = verify(sequences, tree, edited)
        self._compact(sequences, tree, accepted)

        finished, rows, starts, first = [], [], [], 0
        for b, (seq, kept) in enumerate(zip(sequences, accepted, strict=True)):
            path_rows = [first + node for node in kept.path]
            first += tree.num_nodes[b]
            rows += path_rows
            starts.append((seq, seq.num_computed_tokens))
            drafts = tree.tokens_BN[b, kept.path[1:]].tolist()
            before = len(seq.tokens)
            reason = self._append(seq, [*drafts, kept.next_token], logits[path_rows], edited[path_rows])
            committed = len(seq.tokens) - before
            seq.counts.record(
                drafted=tree.num_nodes[b] - 1,
                depth=max(tree.depths(b)),
                accepted=min(len(drafts), committed),
                committed=committed,
            )
            self.stats.broken_drafts += kept.num_broken
            seq.num_computed_tokens += len(kept.path)
            if reason is not None:
                finished.append((seq, reason))
        self.stats.rounds += 1
        going_on = set(sequences) - {seq for seq, _ in finished}
        committed_at = time.perf_counter()
        self._extend(starts, hidden[rows], [c[rows] for c in aux_hidden_states], going_on)
        self.phase_seconds = drafted - began, verified - drafted, time.perf_counter() - committed_at
        return [self._complete(seq, reason) for seq, reason in finished]

    def _verify_forward(self, sequences: list[Sequence], tree: DraftTree) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run the target over all real nodes. Node j of a tree is at slot num_computed_tokens + j, at position + its
        depth."""
        spans, tokens = [], []
        for b, seq in enumerate(sequences):
            n = tree.num_nodes[b]
            positions = None if tree.is_chain else [seq.num_computed_tokens + depth for depth in tree.depths(b)]
            spans.append(Span(seq.pages, seq.num_computed_tokens, n, positions, tree.mask(b)))
            tokens.append(tree.tokens_BN[b, :n])
        hidden, aux_hidden_states = self._target.forward(
            torch.cat(tokens).to(self._target.device), self._layout(spans), self._cache, self._proposer.aux_layers
        )
        return hidden, aux_hidden_states, self._target.logits(hidden)

    def _compact(self, sequences: list[Sequence], tree: DraftTree, accepted: list[Accepted]) -> None:
        """Make the target's keys and values of accepted paths contiguous. Those of a chain already are."""
        if tree.is_chain:
            return
        size = self._page_size
        source: list[int] = []
        target: list[int] = []
        for seq, kept in zip(sequences, accepted, strict=True):
            for depth, node in enumerate(kept.path):
                if node != depth:
                    for slots, i in (
                        (source, seq.num_computed_tokens + node),
                        (target, seq.num_computed_tokens + depth),
                    ):
                        slots.append(seq.pages[i // size] * size + i % size)
        if source:
            self._cache.move(self._tensor(source), self._tensor(target))

    def _append(self, seq: Sequence, tokens: list[int], logits_RV: Tensor, edited_RV: Tensor) -> FinishReason | None:
        """Append new tokens up to the end of the request. `edited_RV`: the logits from which each was drawn.
        `logits_RV`: the model's logits before the request's rules."""
        before = len(seq.tokens)
        reason = seq.append(tokens, self._eos)
        new = seq.tokens[before:]
        margins = [margin_of(logits, i) for i, logits in enumerate(edited_RV[: len(new)], before - seq.num_prompt)]
        seq.margin = min([seq.margin, *margins])
        self.stats.generated_tokens += len(new)
        params = seq.request.params
        if params.logprobs is not None and new:
            found = TokenLogprobs.of(
                token_logprob(logits, token, params.logprobs) for logits, token in zip(logits_RV, new, strict=False)
            )
            seq.logprobs += b"".join(ReadLogprobs(found.values[None], found.top_ids[None]).records(found.num_top))
        return reason

    def _complete(self, seq: Sequence, reason: FinishReason) -> Completion:
        seq.is_finished = True
        self._scheduler.finish(seq, failed=reason is FinishReason.ERROR)
        self.stats.preemptions = self._scheduler.num_preemptions
        self.stats.speculation.add(seq.counts)
        return seq.completion(reason)

    def _extend(
        self,
        starts: list[tuple[Sequence, int]],
        hidden_TE: Tensor,
        aux_hidden_states: list[Tensor],
        wanted: set[Sequence],
    ) -> None:
        """Run draft-extend over the tokens that each sequence committed since its start, for those in `wanted`."""
        keep: list[tuple[Sequence, int]] = []
        rows: list[int] = []
        row = 0
        for seq, start in starts:
            count = seq.num_computed_tokens - start
            if seq in wanted:
                keep.append((seq, start))
                rows += range(row, row + count)
            row += count
        if not keep:
            return
        if len(keep) < len(starts):
            hidden_TE, aux_hidden_states = hidden_TE[rows], [c[rows] for c in aux_hidden_states]
        self._proposer.extend(
            [seq for seq, _ in keep], TargetOutput([start for _, start in keep], hidden_TE, aux_hidden_states)
        )

    def _layout(self, spans: list[Span]) -> PagedBatch:
        return batch_of(spans, self._page_size, self._target.device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._target.device)
