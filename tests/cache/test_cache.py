"""Page accounting under random operations: pool and prefix index against a plain model, the engine against itself."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specbatch.cache import prefix as prefix_module
from specbatch.cache.pages import KVCache, PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.draft.shape import DraftShape
from specbatch.engine.scheduler import Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams
from tests.tiny_models import CPU, tiny_engine

FAST = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
# Few tokens, so that prefixes meet often.
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Paths(RuleBasedStateMachine):
    """`PrefixIndex` over `PagePool`; the model files each page under all tokens that lead to it."""

    @initialize(num_pages=st.integers(4, 16), page_size=st.integers(1, 3), lookahead=st.integers(0, 1))
    def build(self, num_pages: int, page_size: int, lookahead: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.index = PrefixIndex(self.pool, lookahead)
        self.lookahead = lookahead
        self.owners: list[tuple[list[int], list[int]]] = []  # (tokens, pages) of sequences
        self.filed: dict[tuple[int, ...], int] = {}  # tokens up to the end of a page (and lookahead) -> page
        self.used: dict[tuple[int, ...], int] = {}  # -> time of the last use
        self.time = 0

    def key(self, tokens: list[int], number: int) -> tuple[int, ...] | None:
        end = (number + 1) * self.pool.page_size + self.lookahead
        return tuple(tokens[:end]) if end <= len(tokens) else None

    def touch(self, key: tuple[int, ...]) -> None:
        self.used[key] = self.time

    @rule(tokens=TEXTS, short=st.integers(0, 3))
    def match_and_allocate(self, tokens: list[int], short: int) -> None:
        """What admission does: take what is cached, allocate the rest, or give everything back."""
        self.time += 1
        limit = max(0, len(tokens) - short)
        expected = []
        for number in range(limit // self.pool.page_size):
            key = self.key(tokens, number)
            if key is None or key not in self.filed:
                break
            self.touch(key)
            expected.append(self.filed[key])
        pages = self.index.match(tokens, limit)
        assert pages == expected
        missing = self.pool.pages_for(len(tokens)) - len(pages)
        if missing > self.pool.num_free:
            self.pool.release(pages)
            return
        fresh = self.pool.allocate(missing)
        assert not set(fresh) & set(pages)
        self.owners.append((tokens, pages + fresh))

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def insert(self, which: int, share: float) -> None:
        tokens, pages = self.owners[which % len(self.owners)]
        computed = round(share * len(tokens))
        self.time += 1
        for number in range(computed // self.pool.page_size):
            key = self.key(tokens, number)
            if key is None or self.filed.setdefault(key, pages[number]) != pages[number]:
                break
            self.touch(key)
        self.index.insert(tokens, pages, computed)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        _, pages = self.owners.pop(which % len(self.owners))
        self.pool.release(pages)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def hold_twice(self, which: int) -> None:
        """Pages may be shared without the index knowing them."""
        tokens, pages = self.owners[which % len(self.owners)]
        self.pool.retain(pages)
        self.owners.append((tokens, pages))

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def forget(self, which: int, share: float) -> None:
        """The first page of its own, and all that is filed below it by whomever."""
        tokens, pages = self.owners[which % len(self.owners)]
        cached = round(share * len(pages)) * self.pool.page_size
        self.index.forget(tokens, pages, cached)
        for number, page in enumerate(pages):
            key = self.key(tokens, number)
            if key is None or self.filed.get(key) != page:
                return
            if number * self.pool.page_size >= cached:
                self.filed = {k: p for k, p in self.filed.items() if k[: len(key)] != key}
                self.used = {k: t for k, t in self.used.items() if k in self.filed}
                return

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        """Least recently used leaves first; never a page in use, never one with children."""
        in_use = self.in_use()
        expected = 0
        while expected < count:
            parents = {self.parent(key) for key in self.filed}
            leaves = [key for key, page in self.filed.items() if page not in in_use and key not in parents]
            if not leaves:
                break
            # One use touches a single path, and of a path one page is a leaf: no two leaves are equally old.
            assert len({self.used[key] for key in leaves}) == len(leaves)
            oldest = min(leaves, key=self.used.__getitem__)
            del self.filed[oldest]
            del self.used[oldest]
            expected += 1
        assert self.index.evict(count) == expected
        assert expected == count or self.index.num_evictable() == 0
        assert set(self.index.pages()) == set(self.filed.values())

    def in_use(self) -> set[int]:
        return {page for _, pages in self.owners for page in pages}

    def parent(self, key: tuple[int, ...]) -> tuple[int, ...]:
        return key[: len(key) - self.pool.page_size]

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.index.check_integrity()
        assert Counter(self.index.pages()) == Counter(self.filed.values())
        assert len(self.index) == len(self.filed)
        self.pool.check_integrity([pages for _, pages in self.owners] + [self.index.pages()])
        in_use = self.in_use()
        assert self.pool.num_free == self.pool.num_pages - len(in_use | set(self.filed.values()))
        assert self.index.num_evictable() == sum(page not in in_use for page in self.filed.values())


TestPaths = Paths.TestCase
TestPaths.settings = FAST


def test_lookahead_separates_rows_that_differ_behind_the_page() -> None:
    for lookahead, expected in ((0, 2), (1, 1)):
        pool = PagePool(8, 2)
        index = PrefixIndex(pool, lookahead)
        pages = pool.allocate(3)
        index.insert([1, 2, 3, 4, 5], pages, 5)
        assert index.match([1, 2, 3, 4, 6], 4) == pages[:expected]


def test_what_was_computed_from_forgotten_pages_is_not_filed() -> None:
    """A sequence that shares pages of another, which fails afterwards, does not bring them back."""
    pool = PagePool(8, 2)
    index = PrefixIndex(pool)
    failed, other = [1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9, 9]
    own = pool.allocate(3)
    index.insert(failed, own, 4)
    pages = index.match(other, 6) + pool.allocate(2)
    assert pages[:2] == own[:2]
    index.forget(failed, own, 0)
    assert len(index) == 0
    index.insert(other, pages, 6, num_cached=4)
    assert len(index) == 0
    index.insert(other, pages, 6, num_cached=0)
    assert len(index) == 3


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pool = PagePool(6, 2)
    index = PrefixIndex(pool)
    texts = [[1, 1, 2, 2], [3, 3], [4, 4]]
    held = []
    for tokens in texts:
        pages = pool.allocate(len(tokens) // 2)
        index.insert(tokens, pages, len(tokens))
        held.append(pages)
        pool.release(pages)
    pool.release(index.match(texts[0], 4))  # the oldest is looked up again
    assert [index.num_cached(tokens, 4) for tokens in (texts[0], texts[1], [1, 1, 3, 3], [5])] == [4, 2, 2, 0]
    assert index.num_cached(texts[0], 3) == 2
    in_use = index.match(texts[2], 2)
    assert index.num_evictable() == 3
    for expected in ([*held[0], *held[2]], [held[0][0], *held[2]], held[2], held[2]):
        index.evict(1)
        assert sorted(index.pages()) == sorted(expected)
    pool.release(in_use)
    assert index.evict(5) == 1
    assert pool.num_free == 6


def test_eviction_of_the_last_page_leaves_those_of_others() -> None:
    pool = PagePool(2, 2)
    index = PrefixIndex(pool)
    pages = pool.allocate(2)
    index.insert([1, 1], pages, 2)
    pool.release(pages[:1])
    assert [index.evict(1), index.evict(1)] == [1, 0]
    index.check_integrity()
    pool.check_integrity([pages[1:]])


def lines_of_1000_admissions(num_pages: int) -> int:
    """Lines of the prefix index that run while 1000 requests of 10 pages come and go, in a cache full of old ones."""
    pool = PagePool(num_pages, 2)
    index = PrefixIndex(pool)
    scheduler = Scheduler(pool, index, 1, lambda seq: None, max_batch_size=4, prefill_chunk_tokens=64)
    for number in range(num_pages // 10):
        pages = pool.allocate(10)
        index.insert([-1 - number, *range(19)], pages, 20)
        pool.release(pages)
    assert (pool.num_free, index.num_evictable()) == (0, num_pages)
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == prefix_module.__file__ else None

    def admissions() -> None:
        for number in range(1000):
            prompt = (number // 2, *range(19))  # each comes twice
            request = Request(number, prompt, SamplingParams(max_tokens=4), RngKey(0, number, 0))
            scheduler.waiting.append(Sequence(request, list(prompt), 24))
            (span,) = scheduler.plan_prefill()
            assert span.num_cached == 18 * (number % 2)
            span.seq.num_computed_tokens = span.end
            scheduler.share(span.seq)
            assert not scheduler.would_preempt()
            scheduler.plan_round()
            if len(scheduler.running) == 4:
                scheduler.finish(scheduler.running[0])

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        admissions()
    finally:
        sys.settrace(tracer)
    scheduler.check_integrity()
    return lines


def test_work_does_not_grow_with_the_cache() -> None:
    small, large = lines_of_1000_admissions(2_000), lines_of_1000_admissions(20_000)
    assert large < 1.1 * small
    assert large < 1000 * 20_000 / 20  # of one walk over all pages for each admission


def test_integrity_checks_notice_damage() -> None:
    pool = PagePool(4, 2)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    for holders in ([], [pages[:1]], [pages, pages[:1]], [[*pages, 3]]):
        with pytest.raises(AssertionError):
            pool.check_integrity(holders)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages[:1])
    with pytest.raises(AssertionError):
        pool.retain([0])
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError):
            PagePool(*sizes)


PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *tail] for tail in ([3], [4, 4, 4], [5, 6, 7, 8, 9, 10, 11], [12])] + [
    [2],
    [3, 4],
]
METHODS: dict[str, tuple[str, DraftShape | None]] = {
    "none": ("none", None),
    "ngram": ("ngram", DraftShape(3, 1, 4)),
    "draft_model": ("draft_model", DraftShape(2, 1, 3)),
    "eagle-tree": ("eagle", DraftShape(2, 2, 4)),
}
LENGTHS = (1, 2, 9, 24)


def params_of(length: int, sampled: bool) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0.9 if sampled else 0.0, seed=3)


@cache
def reference(method: str, prompt: int, length: int, sampled: bool) -> Completion:
    """The request alone, in a large engine without a prefix cache."""
    name, shape = METHODS[method]
    engine = tiny_engine(name, shape, num_pages=64, max_batch_size=1, prefix_cache=False, hidden=16, eos=(0,))
    engine.submit(Request(0, PROMPTS[prompt], params_of(length, sampled), RngKey(3, prompt, 0)))
    while True:
        for completion in engine.step():
            return completion


class Jobs(RuleBasedStateMachine):
    """Requests come at any time into an engine whose cache holds hardly more than one of them."""

    engine: Any

    @initialize(
        method=st.sampled_from(sorted(METHODS)),
        spare=st.integers(0, 4),
        batch=st.integers(1, 4),
        chunk=st.sampled_from([1, 3, 8, 32]),
        prefix=st.booleans(),
        page_size=st.sampled_from([1, 2, 4]),
    )
    def build(self, method: str, spare: int, batch: int, chunk: int, prefix: bool, page_size: int) -> None:
        name, shape = METHODS[method]
        longest = max(map(len, PROMPTS)) + max(LENGTHS) + 5
        self.method = method
        self.engine = tiny_engine(
            name,
            shape,
            num_pages=longest // page_size + 1 + spare,
            page_size=page_size,
            max_batch_size=batch,
            prefill_chunk_tokens=chunk,
            prefix_cache=prefix,
            hidden=16,
            eos=(0,),
        )
        self.submitted: dict[int, tuple[int, int, bool]] = {}

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), length=st.sampled_from(LENGTHS), sampled=st.booleans())
    def submit(self, prompt: int, length: int, sampled: bool) -> None:
        assume(len(self.submitted) < 12)
        number = len(self.submitted)
        self.submitted[number] = prompt, length, sampled
        self.engine.submit(Request(number, PROMPTS[prompt], params_of(length, sampled), RngKey(3, prompt, 0)))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for completion in self.engine.step():
                self.check(completion)
            self.engine.check_integrity()

    def check(self, completion: Completion) -> None:
        expected = reference(self.method, *self.submitted[completion.request_id])
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason
        assert completion.speculation == expected.speculation, "the counts depend on scheduling"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not (self.engine.num_running or self.engine.num_waiting):
                break
            self.step(1)
        assert self.engine.num_running + self.engine.num_waiting == 0, "the engine makes no progress"
        pool = self.engine._scheduler._pool
        index = self.engine._scheduler._prefix
        assert pool.num_free + (len(index) if index is not None else 0) == pool.num_pages, "pages leaked"


TestJobs = Jobs.TestCase
TestJobs.settings = settings(FAST, max_examples=8, stateful_step_count=12)


@pytest.mark.parametrize("method", ["draft_model", "eagle-tree"])
def test_pages_of_a_row_that_ended_at_its_first_token(method: str) -> None:
    """Its prompt is shared with later rows; the draft's half of those pages must have been filled too."""
    name, shape = METHODS[method]
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    found = []
    for prefix in (True, False):
        engine = tiny_engine(name, shape, prefix_cache=prefix, max_batch_size=1)
        for number, (tokens, length) in enumerate([(prompt, 1), ([*prompt, 3, 4], 24)]):
            engine.submit(Request(number, tokens, SamplingParams(max_tokens=length), RngKey(0, number, 0)))
        done: list[Completion] = []
        while len(done) < 2:
            done += engine.step()
        assert done[0].finish_reason == FinishReason.LENGTH
        assert not prefix or engine.stats.cached_prompt_tokens > 0
        found.append(done[1].speculation)
    assert found[0] == found[1]


def test_a_page_computed_twice_does_not_block_the_cache() -> None:
    """The shorter prompt ends with its page, so that its sampled token says what the page is called: the other request
    computes the same page, and later needs the whole cache for itself."""
    shape = DraftShape(2, 2, 4)
    prompt, short = [5, 6, 7, 8], SamplingParams(max_tokens=1)
    engine = tiny_engine("eagle", shape, max_batch_size=1)
    engine.submit(Request(0, prompt, short, RngKey(0, 0, 0)))
    (first,) = engine.step()
    engine = tiny_engine("eagle", shape, num_pages=8, max_batch_size=2)
    engine.submit(Request(0, prompt, short, RngKey(0, 0, 0)))
    longer = [*prompt, *first.token_ids, 1, 2, 3, 4]
    engine.submit(Request(1, longer, SamplingParams(max_tokens=200), RngKey(0, 1, 0)))
    done: list[Completion] = []
    while len(done) < 2:
        done += engine.step()
        engine.check_integrity()
    assert len(done[1].token_ids) > 8


def test_write_and_move() -> None:
    """Slots of all layers and both halves move together; source and target may overlap in any way."""
    generator = torch.Generator().manual_seed(0)
    kv = KVCache(3, 12, 2, 4, torch.float32, CPU)
    written = torch.zeros(3, 2, 12, 2, 4)
    for layer in range(3):
        slots = torch.randperm(12, generator=generator)[:9]
        k, v = torch.randn(2, 9, 2, 4, generator=generator)
        kv.write(layer, slots, k, v)
        written[layer, 0, slots], written[layer, 1, slots] = k, v

    def check() -> None:
        for layer in range(3):
            assert torch.equal(kv.layer(layer), written[layer].transpose(1, 2))

    check()
    for source, target in [([3, 5, 8], [2, 3, 5]), ([0, 1, 2], [1, 2, 0]), ([4], [4]), ([1, 2, 3], [2, 3, 4])]:
        kv.move(torch.tensor(source), torch.tensor(target))
        written[:, :, target] = written[:, :, source].clone()
        check()


def test_large_healthy_keys_of_float16_do_not_count_as_nan() -> None:
    """Their sum is beyond float16, none of them is."""
    cache = KVCache(1, 64, 2, 8, torch.float16, CPU)
    keys = torch.full((64, 2, 8), 200.0, dtype=torch.float16)
    cache.write(0, torch.arange(64), keys, keys)
    assert not cache.may_hold_nan
    keys[3, 1, 2] = torch.inf
    cache.write(0, torch.arange(64), keys, keys)
    assert cache.may_hold_nan


def test_bytes_per_slot() -> None:
    kv = KVCache(3, 10, 2, 4, torch.bfloat16, CPU)
    assert kv._kv.numel() * kv._kv.element_size() == 10 * KVCache.bytes_per_slot(3, 2, 4, torch.bfloat16)
