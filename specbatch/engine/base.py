"""The parts that all engines share: the queue before the scheduler, the counters, and the end of a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specbatch.counts import EngineStats
from specbatch.engine.append import new_sequence
from specbatch.engine.logprobs import read_records
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.errors import NOT_FINITE, NOT_FINITE_HINT, MemoryShortage, ModelError
from specbatch.logprobs import TokenLogprobs
from specbatch.types import NO_MARGIN, Completion, EngineLimits, FinishReason, Request


def check_finite(completions: Iterable[Completion]) -> None:
    """Raises ModelError if one of them is an error: for measurements, which no row's error may hide in."""
    if any(completion.finish_reason is FinishReason.ERROR for completion in completions):
        raise ModelError(NOT_FINITE, hint=NOT_FINITE_HINT)


class EngineBase:
    """The parts of `types.BatchEngine` that do not compute. `capacity`: the longest sequence (prompt and output) that
    the model and the cache can hold. `longest_row`: the longest sequence that a new job allows; None: it is
    `capacity`."""

    max_forced = 0  # nodes that a grammar may add to a draft tree
    chunk_cost: ChunkCost | None = None  # the cost by which short prompts are held back; None: they are not
    waited_seconds = 0.0  # the time that the host waited for the device; the rest of the time is the host's own

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        capacity: int,
        longest_row: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._scheduler = scheduler
        self._capacity = capacity
        self._longest_row = capacity if longest_row is None else longest_row
        self._stats = EngineStats()
        self.limits = EngineLimits(0, vocab_size, eos_token_ids=eos_token_ids)
        self.limit_length(None)

    @property
    def stats(self) -> EngineStats:
        self._stats.preemptions = self._scheduler.num_preemptions
        self._stats.device_wait_seconds = self.waited_seconds
        return self._stats

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_pages(self) -> int:
        """The number of pages of the KV cache."""
        return self._scheduler.num_pages

    @property
    def page_size(self) -> int:
        return self._scheduler.page_size

    @property
    def num_lookahead(self) -> int:
        """Slots past the committed ones that a round may write."""
        return self._scheduler.num_lookahead

    @property
    def is_prefilled(self) -> bool:
        """Return whether the prompts of all running requests are computed."""
        return all(seq.prefill_done for seq in self._scheduler.running)

    def tokens_so_far(self) -> dict[int, int]:
        begun = [*self._scheduler.running, *(seq for seq in self._scheduler.waiting if seq.was_admitted)]
        return {seq.request.request_id: len(seq.tokens) - seq.num_prompt for seq in begun}

    def limit_length(self, tokens: int | None) -> int:
        tokens = self._longest_row if tokens is None else tokens
        if tokens > self._capacity:
            raise ModelError(
                f"the first run of this job allowed rows of {tokens} tokens, and the KV cache of this one holds "
                f"{self._capacity}",
                hint="go on where as much memory is free, lower engine.max_batch_size or engine.prefill_chunk_tokens, "
                "or start again with --overwrite",
            )
        self._max_length = tokens
        self.limits = replace(self.limits, max_prompt_tokens=tokens - 1)
        return tokens

    def submit(self, request: Request) -> None:
        seq = new_sequence(request, self.limits, self._max_length)
        seq.num_forced_room = self.max_forced if seq.grammar is not None else 0
        self._scheduler.waiting.append(seq)

    def close(self) -> None:
        """Nothing is shared with other processes."""

    def abort_all(self) -> None:
        """Drop all requests unfinished: for measurements, and for who gives up."""
        for seq in list(self._scheduler.running):
            seq.is_finished = True
            self._scheduler.finish(seq)
        self._scheduler.waiting.clear()

    def _shortage(self, error: Exception) -> MemoryShortage:
        where = "GPU's" if isinstance(error, RuntimeError) and "CUDA" in str(error) else "machine's"
        return MemoryShortage(
            f"the {where} memory ran out while {self.num_running} rows ran: {str(error).split('. ', 1)[0].strip()}",
            hint="finished rows are kept: free memory, or lower engine.max_batch_size, engine.prefill_chunk_tokens or "
            "engine.memory_fraction, and run the same command again to go on",
        )

    def check_integrity(self) -> None:
        """Assert that every page is accounted for. For tests, between steps."""
        self._scheduler.check_integrity()

    def _count_prefill(self, span: PrefillSpan) -> None:
        self._stats.prefill_tokens += span.end - span.start
        if span.is_new:
            self._stats.prompt_tokens += span.seq.num_prompt
            self._stats.cached_prompt_tokens += span.num_cached

    def _complete(self, seq: Sequence, reason: FinishReason) -> Completion:
        seq.is_finished = True
        self._scheduler.finish(seq, failed=reason is FinishReason.ERROR)
        self._stats.speculation.add(seq.counts)
        params = seq.request.params
        tokens, logprobs = list(seq.generated), None
        if params.logprobs is not None:
            logprobs = read_records(tokens, seq.logprobs)
        margin = seq.margin if params.temperature == 0 else NO_MARGIN
        scored = None
        if params.prompt_logprobs is not None:
            scored = TokenLogprobs.of(seq.prompt_logprobs[i] for i in seq.scored_tokens)
        problem, failed = None, reason is FinishReason.ERROR
        if failed and seq.grammar is not None:
            problem = seq.grammar.failure_after(seq.tokens, seq.num_prompt)
        failed = failed and problem is None and _leaves_none(seq)
        incomplete = False
        if reason is FinishReason.LENGTH and seq.grammar is not None:
            incomplete = not seq.grammar.may_end_after(seq.tokens, seq.num_prompt)
        return Completion(
            seq.request.request_id,
            tokens,
            reason,
            logprobs,
            seq.counts,
            margin,
            prompt_logprobs=scored,
            incomplete=incomplete,
            grammar_error=problem,
            no_token_left=failed,
        )


def _leaves_none(seq: Sequence) -> bool:
    """Return whether the rules and the grammar of a request forbid all tokens after its output."""
    if seq.rules is None:
        return False
    allowed_W = seq.rules.allowed(seq.generated)
    if seq.grammar is not None:
        seq.grammar.follow(seq.tokens, seq.num_prompt)
        mask_W = seq.grammar.mask()  # a model can have more tokens than its tokenizer
        allowed_W = allowed_W[: len(mask_W)] & mask_W
    return not allowed_W.any()
