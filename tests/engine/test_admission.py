"""When waiting requests are computed: not one by one, where that would cost a chunk for each."""

from __future__ import annotations

import pytest

from specbatch.cache.pages import PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.engine.prefill.admission_batching import ChunkCost, RoundsOfRows
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.models.pass_weights import PassWeights
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_oracle


def scheduler_with(num_running: int, waiting: list[int], min_free_requests: int) -> Scheduler:
    """16 places, chunks of 64 tokens, `num_running` computed requests, and prompts of these lengths waiting."""
    scheduler = Scheduler(PagePool(512, 4), None, 1, lambda seq: None, 16, 64, min_free_requests, min_prefill_tokens=16)
    for number, length in enumerate([3] * num_running + waiting):
        if number == num_running:
            compute(scheduler)
        prompt = [1] * length
        wait(scheduler, number, prompt)
    if not waiting:
        compute(scheduler)
    assert len(scheduler.running) == num_running
    return scheduler


def wait(scheduler: Scheduler, number: int, prompt: list[int]) -> Sequence:
    request = Request(number, tuple(prompt), SamplingParams(max_tokens=4), RngKey(0, number, 0))
    scheduler.waiting.append(Sequence(request, prompt, len(prompt) + 4))
    return scheduler.waiting[-1]


def compute_shared(scheduler: Scheduler) -> list[PrefillSpan]:
    """The next chunk, its pages offered to others."""
    spans = scheduler.plan_prefill()
    for span in spans:
        span.seq.num_computed_tokens = span.end
        scheduler.share(span.seq)
    return spans


def compute(scheduler: Scheduler) -> None:
    while spans := scheduler.plan_prefill():
        for span in spans:
            span.seq.num_computed_tokens = span.end


@pytest.mark.parametrize(
    ("num_running", "waiting", "min_free_requests", "planned"),
    [
        (15, [3] * 20, 1, 1),  # no gathering: whoever fits
        (15, [3] * 20, 4, 0),
        (13, [3] * 20, 4, 0),
        (12, [3] * 20, 4, 4),
        (0, [3] * 20, 4, 16),
        (14, [3, 3], 4, 2),  # the end of the file: nobody else will come
        (13, [3, 3], 4, 2),
        (15, [3, 3], 4, 0),
        (15, [16, 3, 3, 3, 3], 4, 1),  # 16 tokens: long enough for itself
        (15, [15, 3, 3, 3, 3], 4, 0),
        (14, [15, 3, 3, 3, 3], 4, 2),
        (16, [3] * 20, 4, 0),
    ],
)
def test_places_are_gathered(num_running: int, waiting: list[int], min_free_requests: int, planned: int) -> None:
    scheduler = scheduler_with(num_running, waiting, min_free_requests)
    assert len(scheduler.plan_prefill()) == planned


def test_what_waits_joins_a_chunk_that_is_computed_anyway() -> None:
    """A prompt of 100 tokens goes on behind its first chunk, and brings the next one along."""
    scheduler = scheduler_with(14, [100, 3, 3, 3, 3, 3], 4)
    (first,) = scheduler.plan_prefill()
    first.seq.num_computed_tokens = first.end
    second = scheduler.plan_prefill()
    assert [(span.start, span.end) for span in second] == [(64, 100), (0, 3)]


def test_everybody_gets_through() -> None:
    """Rows end one by one, and the last ones are not left waiting."""
    scheduler = scheduler_with(0, [1] * 50, 8)
    chunks = []
    while scheduler.running or scheduler.waiting:
        if spans := scheduler.plan_prefill():
            chunks.append(len(spans))
            for span in spans:
                span.seq.num_computed_tokens = span.end
        scheduler.finish(scheduler.running[0])
    assert sum(chunks) == 50
    assert chunks[:4] == [16, 8, 8, 8]


def test_who_shares_a_page_comes_a_chunk_later_without_gathering_anew() -> None:
    """Twins in a file: the first of each pair are computed together, then the others, whose pages are hits."""
    pool = PagePool(512, 4)
    scheduler = Scheduler(
        pool, PrefixIndex(pool), 1, lambda seq: None, 16, 512, min_free_requests=8, min_prefill_tokens=512
    )
    for number in range(64):
        prompt = [number // 2] * 9
        wait(scheduler, number, prompt)
    chunks: list[list[tuple[int, int]]] = []
    rounds = 0
    while scheduler.running or scheduler.waiting:
        if spans := compute_shared(scheduler):
            chunks.append([(span.seq.request.request_id, span.num_cached) for span in spans])
            continue
        scheduler.finish(scheduler.running[0])
        rounds += 1
    assert chunks[0] == [(i, 0) for i in range(0, 16, 2)]
    assert chunks[1] == [(i, 8) for i in range(1, 16, 2)]
    assert [len(chunk) for chunk in chunks[2:]] == [4, 4] * 6
    assert sorted(row for chunk in chunks for row, _ in chunk) == list(range(64))
    assert rounds == 64
    scheduler.check_integrity()


def test_whom_two_chunks_pass_over_waits_for_places() -> None:
    """Only once are places not gathered anew."""
    pool = PagePool(512, 4)
    scheduler = Scheduler(
        pool, PrefixIndex(pool), 1, lambda seq: None, 16, 512, min_free_requests=4, min_prefill_tokens=512
    )
    prompts = [[30 + number] * 9 for number in range(12)]
    # Each can share one page more with the one before it. Others stand behind them, so that it is not the file's end.
    prompts += [[1] * 5, [1] * 4 + [2] * 5, [1] * 4 + [2] * 4 + [3] * 5, [1] * 4 + [2] * 4 + [3] * 4 + [4] * 5]
    prompts += [[60 + number] * 9 for number in range(4)]
    for number, prompt in enumerate(prompts):
        wait(scheduler, number, prompt)
        if number == 11:
            compute(scheduler)
    planned = []
    for _ in range(4):
        planned.append([span.seq.request.request_id for span in compute_shared(scheduler)])
    assert planned == [[12], [13], [], []]


def test_the_device_engine_gathers_by_how_long_its_rows_run() -> None:
    """Rows of 2, 3, 4 ... tokens end one by one: a sixteenth of the places at first, then by the rule."""
    engine = tiny_device_engine("none", None, max_batch_size=64, num_pages=1024, prefill_chunk_tokens=512)
    plan, chunks, gathered = engine._scheduler.plan_prefill, [], []

    def counted() -> list[PrefillSpan]:
        gathered.append(engine._scheduler.min_free_requests)
        spans = plan()
        chunks.extend([(gathered[-1], len(spans), len(engine._scheduler.waiting))] if spans else [])
        return spans

    engine._scheduler.plan_prefill = counted  # type: ignore[method-assign]
    for i in range(180):
        params = SamplingParams(max_tokens=2 + i % 64, ignore_eos=True)
        engine.submit(Request(i, [1 + i % 30, 2, 3], params, RngKey(0, i, 0)))
    finished = 0
    while finished < 180:
        finished += len(engine.step())
    assert chunks[0] == (4, 64, 116)
    assert all(wanted <= count <= wanted + 1 for wanted, count, left in chunks[1:] if left)  # two may end in one round
    assert sum(count for _, count, _ in chunks) == 180
    mean = sum(1 + i % 64 for i in range(180)) / 180  # the first token comes with the prompt
    assert engine._rounds_of_rows.mean == pytest.approx(mean)
    assert gathered[-1] == engine.chunk_cost.min_free_requests(64, mean) == 16


def test_the_mean_follows_what_ended_last() -> None:
    rounds = RoundsOfRows()
    for value in (4, 8):
        rounds.add(value)
    assert rounds.mean == 6
    for _ in range(3000):
        rounds.add(100)
    assert rounds.mean == pytest.approx(100, abs=0.1)
    rounds.add(356)
    assert rounds.mean == pytest.approx(101, abs=0.1), "one of the last 256"


@pytest.mark.parametrize(("cost", "rounds"), [(8.0, 60), (8.0, 512), (8.0, 4000), (1.2, 72), (0.5, 300)])
def test_the_rule_is_near_the_best(cost: float, rounds: float) -> None:
    """Return the cost of the rounds and launches of a row, by the rule of `admission_batching`."""

    def time_of_a_row(gathered: int) -> float:
        return rounds / (128 - gathered / 2) + cost / gathered

    chosen = ChunkCost(cost, 0).min_free_requests(128, rounds)
    assert time_of_a_row(chosen) <= 1.02 * min(time_of_a_row(g) for g in range(1, 33))


def test_bounds_of_what_is_gathered() -> None:
    """A place at least and a quarter of all at most; rows of no round (their first token is the last) as of one."""
    cost = ChunkCost(0.02, 0)
    assert [cost.min_free_requests(100, mean) for mean in (0.0, 0.5, 1.0, 4.0, 400.0, 1e9)] == [20, 20, 20, 10, 1, 1]
    assert [ChunkCost(8.0, 0).min_free_requests(size, 1.0) for size in (1, 2, 3, 4, 7, 8, 100)] == [
        1,
        1,
        1,
        1,
        1,
        2,
        25,
    ]


@pytest.mark.parametrize(("num_written", "planned"), [(13, 0), (14, 1)])
def test_what_was_preempted_counts_with_what_it_had_written(num_written: int, planned: int) -> None:
    scheduler = scheduler_with(15, [3, 3, 3, 3, 3], 4)
    assert not scheduler.plan_prefill()  # it has been counted with its prompt
    seq = scheduler.waiting.popleft()
    scheduler.running.append(seq)
    seq.tokens += [1] * num_written  # 15 or 16 to compute: the last one is the root
    scheduler._preempt(seq)
    assert len(scheduler.plan_prefill()) == planned


def test_what_is_cached_is_no_work() -> None:
    """Prompts of 19 tokens that begin with the same 16: but for the first, each is 3 tokens to compute, and they wait
    for places as prompts of 3 tokens do."""
    pool = PagePool(512, 4)
    scheduler = Scheduler(
        pool, PrefixIndex(pool), 1, lambda seq: None, 16, 64, min_free_requests=4, min_prefill_tokens=16
    )
    for number in range(40):
        prompt = [7] * 16 + [number] * 3
        wait(scheduler, number, prompt)
    chunks = []
    while len(chunks) < 5:
        if spans := compute_shared(scheduler):
            chunks.append((len(spans), len(scheduler.running)))
        else:
            scheduler.finish(scheduler.running[0])
    assert chunks == [(1, 1), (15, 16), (4, 16), (4, 16), (4, 16)]


@pytest.mark.parametrize(("length", "uncached"), [(1, 1), (4, 4), (8, 4), (9, 1), (11, 3), (20, 12)])
def test_the_last_token_of_a_cached_prompt_is_work(length: int, uncached: int) -> None:
    """Pages of 4 tokens, of which the first two are cached: who counts with fewer tokens than are computed would wait
    longer."""
    pool = PagePool(512, 4)
    prefix = PrefixIndex(pool)
    pages = pool.allocate(2)
    prefix.insert([7] * 8, pages, 8)
    pool.release(pages)
    scheduler = Scheduler(pool, prefix, 1, lambda seq: None, 16, 64)
    prompt = [7] * length
    assert scheduler._num_uncached(wait(scheduler, 0, prompt)) == uncached
    (span,) = scheduler.plan_prefill()
    assert span.end - span.start == uncached


def test_who_is_passed_over_is_counted_with_what_it_can_share() -> None:
    """Its figure was looked up before the page was computed that it waits for."""
    pool = PagePool(512, 4)
    scheduler = Scheduler(
        pool, PrefixIndex(pool), 1, lambda seq: None, 16, 512, min_free_requests=8, min_prefill_tokens=16
    )
    prompts = [[30 + number] * 3 for number in range(12)]
    prompts += [[1] * 17, [1] * 4 + [2] * 13, [1] * 4 + [2] * 4 + [3] * 9]
    prompts += [[60 + number] * 3 for number in range(8)]
    planned = []
    for number, prompt in enumerate(prompts):
        wait(scheduler, number, prompt)
        if number == 11:
            compute(scheduler)
    for _ in range(4):
        planned.append([span.seq.request.request_id for span in compute_shared(scheduler)])
    assert planned == [[12, 15], [13], [], []], "of the one that waits 9 tokens are to compute, not 17"


def test_a_waiting_request_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(512, 4)
    prefix = PrefixIndex(pool)
    scheduler = Scheduler(pool, prefix, 1, lambda seq: None, 2, 64, min_free_requests=2, min_prefill_tokens=1000)
    for number in range(6):
        prompt = [number] * 9
        wait(scheduler, number, prompt)
    compute(scheduler)
    scheduler.finish(scheduler.running[0])
    looked: list[int] = []
    monkeypatch.setattr(prefix, "num_cached", lambda tokens, most: looked.append(tokens[0]) or 0)
    for _ in range(5):
        assert not scheduler.plan_prefill()
    assert looked == [2]


def test_the_device_engine_knows_what_is_worth_a_chunk() -> None:
    """Prompts of 8 tokens, chunks of 32: with one place free, one is enough."""
    engine = tiny_device_engine(num_layers=1, max_batch_size=32, num_pages=1024, prefix_cache=False)
    for length in (8, 7):
        for i in range(80):
            params = SamplingParams(max_tokens=2 + i, ignore_eos=True)
            engine.submit(Request(i, [1 + i % 30] * length, params, RngKey(0, i, 0)))
        while engine.num_running < 32:
            engine.step()
        fewest = 32
        while engine.num_waiting > 8:
            engine.step()
            fewest = min(fewest, engine.num_running)
        assert fewest == (31 if length == 8 else 30)
        engine.abort_all()


# Layers and parameters of SmolLM2-135M, Qwen2.5-1.5B and Llama-3-8B.
SIZES = [(30, PassWeights(106_000_000)), (28, PassWeights(1_310_000_000)), (32, PassWeights(6_980_000_000))]


def test_graphs_of_prompts_leave_less_to_gather() -> None:
    small, middle, large = (ChunkCost.of_model(*model, 8192, graphs=True) for model in SIZES)
    assert (small.graph_tokens, middle.graph_tokens, large.graph_tokens) == (8192, 2051, 440)
    assert 2 > small.rounds > middle.rounds > 1
    assert (small.tokens, middle.tokens) == (4177, 2048)
    eager = ChunkCost.of_model(*SIZES[2], 8192, graphs=False)
    assert (large.rounds, large.tokens) == (eager.rounds, eager.tokens), "its chunks are longer than its graphs"


def test_small_models_gather_more() -> None:
    small, middle, large = (ChunkCost.of_model(*model, 8192, graphs=False) for model in SIZES)
    assert (small.graph_tokens, middle.graph_tokens, large.graph_tokens) == (0, 0, 0)
    assert (small.tokens, middle.tokens, large.tokens) == (8192, 2052, 2048)
    assert small.rounds > 7 > 6 > middle.rounds > 3 > 2 > large.rounds > 1
    assert [cost.min_free_requests(1, 50) for cost in (small, middle, large)] == [1, 1, 1]
    assert [cost.min_free_requests(256, 512) for cost in (small, middle, large)] == [50, 36, 21]


@pytest.mark.parametrize("shared", [0, 12])
def test_gathering_in_a_tight_cache_changes_no_text(shared: int) -> None:
    """Preempted rows and rows that wait for a page of another one are gathered too; all get through."""
    prompts = random_prompts(90, seed=2, longest=6, shared=shared)
    params = SamplingParams(max_tokens=12)
    expected = run(tiny_oracle("none", num_pages=256), prompts, params, check=False)
    engine = tiny_device_engine("none", None, max_batch_size=64, num_pages=110)
    actual = run(engine, prompts, params)
    assert engine.stats.preemptions > 0
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


def test_preemption_makes_room_only_for_those_that_go_on() -> None:
    """All need pages, and none is free. The youngest gives its own back for the oldest, and nobody does for it."""
    pool = PagePool(9, 4)
    scheduler = Scheduler(pool, None, 1, lambda seq: None, 16, 64)
    for number in range(3):
        wait(scheduler, number, [1] * 4)
    compute(scheduler)
    oldest, second, youngest = scheduler.running
    for seq in scheduler.running:
        seq.pages += pool.allocate(3 - len(seq.pages))
        seq.num_computed_tokens, seq.max_length = 12, 100
    youngest.num_in_flight = 16
    assert scheduler.would_preempt()
    assert scheduler.plan_round() == [oldest, second]
    assert scheduler.num_preemptions == 1
    assert [len(seq.pages) for seq in (oldest, second, youngest)] == [4, 4, 0]
    scheduler.check_integrity()
