"""Who runs: admission, prompt chunks, pages for the next round, preemption. Pure Python over pages and token lists.

Prompts are computed before the next round, as soon as there is room for enough requests: a round of a fuller batch
costs little more. When pages run out, cached prefixes that no request uses are evicted first. Then the youngest request
gives all of its pages back and is computed again later; its tokens are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from specbatch.cache.pages import PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.counts import EngineStats
from specbatch.engine.sequence import Sequence

# The fewest pages that are evicted at once, so that there is room for the next few requests, too.
EVICT_PAGES = 64


class Checkpoint(NamedTuple):
    """A copy of a hybrid's state to make: after which tokens of the sequence, and its line."""

    num_tokens: int
    line: int


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A piece of a prompt to compute: tokens [start, end)."""

    seq: Sequence
    start: int
    end: int
    is_new: bool  # the sequence's first piece after its (first) admission
    num_cached: int  # tokens found in the prefix cache, for a first piece
    checkpoint: Checkpoint | None = None  # None: no state is kept

    def record(self, stats: EngineStats) -> None:
        """Add the span to the counts of computed and of cached tokens."""
        stats.prefill_tokens += self.end - self.start
        if self.is_new:
            stats.prompt_tokens += self.seq.num_prompt
            stats.cached_prompt_tokens += self.num_cached


class Scheduler:
    """Owns the page lists of all sequences. `running` is in order of admission.

    `num_lookahead`: slots past the committed ones that a round may write. `on_start` is called for each admission: the
    sequence's first `num_computed_tokens` tokens came from the prefix cache. Short prompts are held until
    `min_free_requests` request indices are free, or until those that find room have `min_prefill_tokens`: see
    `admission_batching`.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixIndex | None,
        num_lookahead: int,
        on_start: Callable[[Sequence], None],
        max_batch_size: int,
        prefill_chunk_tokens: int,
        min_free_requests: int = 1,
        min_prefill_tokens: int = 1,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefilling: list[Sequence] = []  # those of `running` whose prompts are not computed yet
        self.num_preemptions = 0
        self._pool = pool
        self._prefix = prefix
        self.num_lookahead = num_lookahead
        self._on_start = on_start
        self._max_batch_size = max_batch_size
        self._chunk_tokens = prefill_chunk_tokens
        assert 1 <= min_free_requests <= max_batch_size, f"{min_free_requests} request indices are never free"
        self.min_free_requests = min_free_requests
        self._min_prefill_tokens = min_prefill_tokens
        # The last chunk passed requests over, because they can share its pages. The next chunk takes them without a
        # look at `min_free_requests`, which was met already. Requests that this one passes over are held as others are.
        self._resume_deferred = False

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    def plan_prefill(self, *, now: bool = False) -> list[PrefillSpan]:
        """The next pieces of prompts, prefill_chunk_tokens in all at most; admits waiting requests into what is
        left. `now`: short prompts are not held."""
        budget = self._chunk_tokens
        plan: list[PrefillSpan] = []
        computing: set[int] = set()  # hashes of the pages that this chunk computes
        # Not all of `running`: this is called before every round.
        self._prefilling = [seq for seq in self._prefilling if not seq.prefill_done]
        for seq in self._prefilling:
            if budget:
                budget -= self._take(plan, seq, budget, is_new=False, num_cached=0)
                computing.update(self._prefix_paths(seq, plan[-1]))
        if budget and (now or plan or self._resume_deferred or self._should_prefill()):
            has_passed = self._take_waiting(plan, budget, computing)
            self._resume_deferred = has_passed and not self._resume_deferred
        return plan

    def _take_waiting(self, plan: list[PrefillSpan], budget: int, computing: set[int]) -> bool:
        """Admit the first waiting requests, as many as request indices are free, and plan their first pieces. Requests
        that could share a page which is being computed are passed over: the next chunk finds it in the cache. Returns
        whether there are any."""
        has_passed = False
        for seq in list(islice(self.waiting, self._max_batch_size - len(self.running))):
            if not budget:
                break
            if self._prefix is not None and self._shares_pending_page(seq, computing):
                has_passed = True
                seq.num_uncached = None  # it will be less
                continue
            if not self._admit(seq):
                break
            self.waiting.remove(seq)
            if self._prefix is not None and self._prefix.has_checkpoints:
                seq.num_shared = self._num_shared(seq)
            self.running.append(seq)
            self._prefilling.append(seq)
            cached = seq.num_computed_tokens
            budget -= self._take(plan, seq, budget, is_new=not seq.was_admitted, num_cached=cached)
            seq.was_admitted = True
            computing.update(self._prefix_paths(seq, plan[-1]))
        return has_passed

    def _should_prefill(self) -> bool:
        """Return whether to compute prompts now. Otherwise rounds run until more requests have ended."""
        free = self._max_batch_size - len(self.running)
        if free >= min(self.min_free_requests, len(self.waiting)):
            return True
        tokens = sum(self._num_uncached(seq) for seq in islice(self.waiting, free))
        return free > 0 and tokens >= self._min_prefill_tokens

    def _num_uncached(self, seq: Sequence) -> int:
        """Tokens of a waiting request that a chunk would compute. It is looked up once and kept, because every round
        reads it."""
        if seq.num_uncached is None:
            cached = self._prefix.num_cached(seq.tokens, seq.max_cached) if self._prefix is not None else 0
            seq.num_uncached = seq.num_prefill_tokens - cached
        return seq.num_uncached

    def _take(self, plan: list[PrefillSpan], seq: Sequence, budget: int, *, is_new: bool, num_cached: int) -> int:
        end = min(seq.num_prefill_tokens, seq.num_computed_tokens + budget)
        checkpoint = self._next_checkpoint(seq, seq.num_computed_tokens, end)
        plan.append(PrefillSpan(seq, seq.num_computed_tokens, end, is_new, num_cached, checkpoint))
        return end - seq.num_computed_tokens

    def _num_shared(self, seq: Sequence) -> int:
        """Return the tokens, in whole pages, that `seq` has in common with computed prompts or with the next waiting
        one: where others will need the state."""
        assert self._prefix is not None
        known = self._prefix.num_known(seq.tokens, seq.max_cached)
        if not self.waiting:
            return known
        other, number = self.waiting[0], 0
        num_pages = min(seq.max_cached, other.max_cached) // self._pool.page_size
        while number < num_pages and self._prefix.key(seq.tokens, number) == self._prefix.key(other.tokens, number):
            number += 1
        return max(known, number * self._pool.page_size)

    def _next_checkpoint(self, seq: Sequence, start: int, end: int) -> Checkpoint | None:
        """Choose after which tokens of a piece the state is kept: what the prompt shares with others, or all of its
        whole pages if it shares nothing. None: after none of them."""
        if self._prefix is None or not self._prefix.has_checkpoints:
            return None
        num_tokens = seq.num_shared or seq.max_cached // self._pool.page_size * self._pool.page_size
        if not start < num_tokens <= end or self._prefix.has_checkpoint(seq.tokens, num_tokens):
            return None
        line = self._prefix.take_checkpoint()
        return None if line is None else Checkpoint(num_tokens, line)

    def _prefix_paths(self, seq: Sequence, span: PrefillSpan) -> list[int]:
        """Return a key for each page that `span` fills: a hash over all tokens up to the page's end."""
        if self._prefix is None:
            return []
        size = self._pool.page_size
        hashes = self._page_hashes(seq.tokens, span.end // size)
        first = span.start // size
        return [hashes[n] for n in range(first, len(hashes)) if self._prefix.key(seq.tokens, n) is not None]

    def _page_hashes(self, tokens: list[int], num_pages: int) -> list[int]:
        """Return a hash for each of the first pages, over the tokens up to its end. If two collide, a request starts
        one chunk later."""
        size, hashes, last = self._pool.page_size, [], 0
        for number in range(num_pages):
            last = hash((last, *tokens[number * size : (number + 1) * size]))
            hashes.append(last)
        return hashes

    def _shares_pending_page(self, seq: Sequence, computing: set[int]) -> bool:
        """Return whether a page is being computed that the sequence could take from the cache."""
        if not computing:
            return False
        num_pages = seq.max_cached // self._pool.page_size
        return not computing.isdisjoint(self._page_hashes(seq.tokens, num_pages))

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and pages for its prompt and the first round, if there are
        enough."""
        cached = self._prefix.match(seq.tokens, seq.max_cached) if self._prefix is not None else []
        forced = min(seq.num_forced_room, seq.max_length - 1 - seq.num_prefill_tokens)
        wanted = self._pool.pages_for(seq.num_prefill_tokens + max(forced, 0) + self.num_lookahead) - len(cached)
        # A page for each running sequence stays free, or the newcomer would be preempted by the next round.
        if not self._make_room(wanted + len(self.running)):
            self._pool.release(cached)
            assert self.running, (
                f"a request of {len(seq.tokens)} tokens does not fit an idle cache of {self._pool.num_pages} pages"
            )
            return False
        seq.pages = cached + self._pool.allocate(wanted)
        seq.num_computed_tokens = len(cached) * self._pool.page_size
        seq.checkpoint = None if self._prefix is None else self._prefix.checkpoint_of(cached)
        # After a preemption, pages that it shares may be its own from before.
        seq.num_cached = min(seq.num_cached, seq.num_computed_tokens) if seq.was_admitted else seq.num_computed_tokens
        self._on_start(seq)
        return True

    def _make_room(self, num_pages: int) -> bool:
        missing = num_pages - self._pool.num_free
        if missing <= 0:
            return True
        if self._prefix is None or self._prefix.num_evictable() < missing:
            return False
        self._prefix.evict(max(missing, EVICT_PAGES))
        return self._pool.num_free >= num_pages

    def share(self, seq: Sequence, checkpoint: Checkpoint | None = None) -> None:
        """Offer a sequence's full pages to later rows. The target's and the draft's entries in them are complete.
        `checkpoint`: the state that was kept with them."""
        if self._prefix is not None:
            self._prefix.insert(seq.tokens, seq.pages, seq.num_computed_tokens, seq.num_cached)
            if checkpoint is not None:
                self._prefix.add_checkpoint(seq.tokens, *checkpoint)

    def _short_of_pages(self) -> list[tuple[Sequence, int]]:
        """Requests whose pages do not suffice for the next round, if each round under way commits as many tokens as it
        can; with the pages that are missing."""
        size, lookahead = self._pool.page_size, self.num_lookahead
        found = []
        # As `pages_for`, in no calls: this runs for every request before every round.
        for seq in self.running:
            room = len(seq.pages) * size - lookahead
            slots = seq.num_computed_tokens + seq.num_in_flight + seq.num_forced_room
            if slots > room and (slots := min(slots, seq.max_length - 1)) > room:
                found.append((seq, -(-(slots + lookahead) // size) - len(seq.pages)))
        return found

    def would_preempt(self) -> bool:
        """Return whether `plan_round` would have to take pages from a running request."""
        return not self._make_room(sum(missing for _, missing in self._short_of_pages()))

    def plan_round(self) -> list[Sequence]:
        """Sequences of the next round, each with pages for its tree and its drafts."""
        for seq, missing in self._short_of_pages():
            # Preemption takes requests from the end of those that run, and all their pages.
            while seq.pages and not self._make_room(missing):
                self._preempt(self.running[-1])
            if seq.pages:
                seq.pages += self._pool.allocate(missing)
        return list(self.running)

    def _preempt(self, seq: Sequence) -> None:
        assert len(self.running) > 1, "one request alone does not fit; the engine's limits are wrong"
        self._put_back(seq)

    def _put_back(self, seq: Sequence) -> None:
        self.restart(seq)
        self.num_preemptions += 1

    def restart(self, seq: Sequence) -> None:
        """Let a running request wait, to be admitted again."""
        self._release(seq)
        self.waiting.appendleft(seq)

    def give_up(self, spans: Seq[PrefillSpan], least: int) -> None:
        """Pieces of prompts were not computed, for want of memory: their requests wait again, in their order, and next
        time the chunk is half as long at most, `least` tokens or more."""
        for span in reversed(spans):
            if span.checkpoint is not None and self._prefix is not None:
                self._prefix.return_checkpoint(span.checkpoint.line)
            span.seq.was_admitted = not span.is_new
            self._put_back(span.seq)
        half = sum(span.end - span.start for span in spans) // 2
        self._chunk_tokens = min(self._chunk_tokens, max(least, half))
        self._min_prefill_tokens = min(self._min_prefill_tokens, self._chunk_tokens)

    def lower_batch(self, size: int) -> None:
        """Run at most `size` requests from now on: the youngest others wait again."""
        while len(self.running) > size:
            self._put_back(self.running[-1])
        self._max_batch_size = size
        self.min_free_requests = min(self.min_free_requests, size)

    def finish(self, seq: Sequence, failed: bool = False) -> None:
        """Remove a request that has ended. `failed`: its computed pages must not be shared any more."""
        if failed and self._prefix is not None:
            self._prefix.forget(seq.tokens, seq.pages, seq.num_cached)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if seq in self._prefilling:
            self._prefilling.remove(seq)
        self._pool.release(seq.pages)
        seq.pages = []
        seq.num_computed_tokens = 0
        seq.num_uncached = None

    def check_integrity(self) -> None:
        holders = [seq.pages for seq in self.running]
        if self._prefix is not None:
            self._prefix.check_integrity()
            holders.append(self._prefix.pages())
        self._pool.check_integrity(holders)
        assert all(not seq.pages for seq in self.waiting), "a waiting request holds pages"
