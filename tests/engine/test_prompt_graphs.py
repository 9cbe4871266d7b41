"""Chunks of whole prompts, padded to few shapes: on a CPU run as they are, on a GPU graphs. Texts are the oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.attention.triton import PagedAttention
from specbatch.draft import NoDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.prefill.graphs import PromptGraphs
from specbatch.engine.prefill.packing import ChunkShape, PromptChunk, PromptPacker, TokenFields
from specbatch.engine.round import Round, Wanted
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Transfers
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.graphs import assert_close_logprobs, copy_into
from tests.tiny_models import CPU, random_prompts, round_of, run, tiny_device_engine, tiny_oracle

CASES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 4, 8)),
    ("eagle", DraftShape(3, 1, 4)),
    ("eagle3", DraftShape(4, 3, 12)),
]
GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01)
CUDA = torch.device("cuda")
SETTINGS: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,)}


def many_prompts() -> list[list[int]]:
    """Some share a prefix, two are longer than a chunk."""
    return random_prompts(10, shared=10) + random_prompts(2, seed=3, longest=1, shared=70)


def shapes_used(monkeypatch: pytest.MonkeyPatch) -> list[ChunkShape | None]:
    """Of every chunk from now on, the shape that it is padded to."""
    used: list[ChunkShape | None] = []
    shape_of = PromptGraphs.shape_of

    def noted(graphs: PromptGraphs, packed: Any) -> ChunkShape | None:
        used.append(shape_of(graphs, packed))
        return used[-1]

    monkeypatch.setattr(PromptGraphs, "shape_of", noted)
    return used


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_texts_are_the_same(
    method: str, shape: DraftShape | None, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share a prefix, some found in the cache; some longer than a chunk, and so in pieces."""
    prompts, settings = many_prompts(), SETTINGS
    expected = run(tiny_oracle(method, shape, **settings), prompts, params)
    used = shapes_used(monkeypatch)
    engine = tiny_device_engine(method, shape, **settings, prefill_chunk_tokens=64, graph_tokens=128)
    actual = run(engine, prompts, params)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert [c.speculation for c in actual] == [c.speculation for c in expected]
    padded = {one for one in used if one is not None}
    assert len(padded) > 1
    assert None in used, "a piece of a prompt is not padded"
    assert engine.stats.cached_prompt_tokens > 0
    assert {one.num_sequences for one in padded} <= {1, 4, 8}
    state = round_of(engine).state
    assert bool(state.ints_SF[state.padding, 3]), "padding is done"


@pytest.mark.parametrize(("method", "shape"), [("draft_model", DraftShape(3, 1, 4)), ("eagle3", DraftShape(3, 2, 6))])
def test_rows_that_are_computed_again(method: str, shape: DraftShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted row comes back with its root known: its chunk is padded, too."""
    prompts = random_prompts(12, seed=1, longest=12)
    params = SamplingParams(max_tokens=16)
    expected = run(tiny_oracle(method, shape, num_pages=256), prompts, params)
    used = shapes_used(monkeypatch)
    engine = tiny_device_engine(method, shape, num_pages=32, max_batch_size=8, graph_tokens=128)
    actual = run(engine, prompts, params)
    assert engine.stats.preemptions > 0
    assert any(used)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_a_chunk_of_nothing_touches_padding_alone(method: str) -> None:
    """That is what is run when a graph is captured, with other rows in the middle of their texts."""
    engine = tiny_device_engine(method, DraftShape(3, 1, 4), graph_tokens=128, num_pages=128)
    for i, prompt in enumerate(random_prompts(3)):
        engine.submit(Request(i, prompt, GREEDY, RngKey(0, i, 0)))
    for _ in range(4):
        engine.step()
    round_ = round_of(engine)
    state = round_.state
    kept = [state.ints_SF, state.features_SE, state.tokens_SL, state.page_table_SP]
    caches = [round_._cache, *([round_.method.net.cache] if round_.method.net is not None else [])]
    spare = caches[0].all_layers.shape[3] - 1  # of no page
    before = [part[:-1].clone() for part in kept] + [cache.all_layers[..., :spare, :].clone() for cache in caches]
    packer = engine._packer
    chunk_of_nothing(packer, round_, ChunkShape(64, 4, 64))
    after = [part[:-1] for part in kept] + [cache.all_layers[..., :spare, :] for cache in caches]
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine, theirs)
    assert bool(state.ints_SF[state.padding, 3])


@torch.inference_mode()
def chunk_of_nothing(packer: PromptPacker, round_: Round, shape: ChunkShape) -> None:
    arrays = packer.pack([]).padded(shape, round_.state.padding)
    buffer = Transfers(CPU).upload(arrays.buffer)
    for sampled in (False, True):
        round_.prefill(packer.chunk(arrays, buffer, round_.state.page_table_SP, shape.max_queries), Wanted(sampled))


@pytest.mark.parametrize(
    ("tokens", "num_sequences", "queries", "expected"),
    [
        (63, 1, 63, (64, 1, 64)),
        (64, 1, 64, (64, 1, 64)),
        (65, 1, 65, (128, 1, 128)),
        (64, 4, 16, (64, 4, 64)),
        (64, 3, 30, (128, 4, 128)),
        (900, 3, 256, (1024, 4, 256)),
        (900, 5, 257, (1024, 12, 1024)),
        (1023, 12, 100, (1024, 12, 256)),
        (200, 4, 60, (256, 4, 256)),
        (1024, 1, 1024, (1024, 1, 1024)),
        (1024, 2, 512, None),
    ],
)
def test_shapes(tokens: int, num_sequences: int, queries: int, expected: tuple[int, int, int] | None) -> None:
    """Sequences in steps of four, at most as many as a batch has; where some are padding, so is at least one token."""
    packed = PromptPacker(4, None).pack([])
    packed.target.tokens = [0] * tokens
    packed.target.max_queries = queries
    packed.req_idx = packed.ready = [0] * num_sequences
    graphs = PromptGraphs(PromptPacker(4, None), Transfers(CPU), CPU, 12, 1024)
    assert graphs.shape_of(packed) == expected
    # The draft network may have more: its own token of each prompt, or tokens that it has not computed yet.
    packed.target, packed.draft = packed.draft, packed.target
    assert graphs.shape_of(packed) == expected
    packed.ready = [0] * (num_sequences - 1)
    assert graphs.shape_of(packed) is None, "a prompt goes on"


class StandIn:
    """What a graph does that a function does not, on a CPU: all that Python knew at its capture stays as it was, and
    its output is overwritten by the next replay. Capturing must change nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._captured: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self.num_replays, self.seconds = 0, 0.0
        engine.executor.mode = "round"
        engine.prompts.runner = self  # type: ignore[assignment]

    def __contains__(self, key: Any) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, key: Any, function: Callable[[], Any]) -> None:
        assert key not in self._captured
        before = [part.clone() for part in live(self._engine)]
        self._captured[key] = function, function()
        for mine, theirs in zip(live(self._engine), before, strict=True):
            assert torch.equal(mine, theirs), "a capture wrote to somebody's slots"

    def replay(self, key: Any) -> Any:
        function, output = self._captured[key]
        self.num_replays += 1
        copy_into(output, function())
        return output


def live(engine: Engine) -> list[Tensor]:
    """What belongs to requests: not padding's slot, nor the spare slot of the caches."""
    round_ = round_of(engine)
    state = round_.state
    caches = [round_._cache, *([round_.method.net.cache] if round_.method.net is not None else [])]
    parts = [state.ints_SF, state.features_SE, state.tokens_SL, state.page_table_SP]
    return [*(part[:-1] for part in parts), *(cache.all_layers[..., :-1, :] for cache in caches)]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on a GPU leaves out what is beyond the bound of a row's tokens, and of tokens of no row it leaves what
    was in that memory; the reference kernel does neither."""
    make, attend = PromptPacker.chunk, PagedAttention.attend

    def garbage(backend: PagedAttention, plan: Any, *args: Any) -> Tensor:
        out = attend(backend, plan, *args)
        out[int(plan[0].query_starts[-1]) :] = torch.nan
        return out

    def checked(*args: Any) -> PromptChunk:
        chunk = make(*args)
        for layout in (chunk.layout, chunk.draft_layout):
            if layout is not None:
                counts = layout.query_starts.diff()
                assert int(counts.min()) >= 0
                assert int(counts.max()) <= layout.max_queries
        return chunk

    monkeypatch.setattr(PromptPacker, "chunk", checked)
    monkeypatch.setattr(PagedAttention, "attend", garbage)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_what_python_knew_at_a_capture_stays(method: str, shape: DraftShape | None) -> None:
    """Rows that sample and rows that do not, chunks of the same shape and of other contents."""
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,)}
    oracle = tiny_oracle(method, shape, **settings)
    engine = tiny_device_engine(method, shape, **settings, prefill_chunk_tokens=64, graph_tokens=128)
    runner = StandIn(engine)
    for seed, params in enumerate((GREEDY, SAMPLED, replace(GREEDY, logprobs=2))):
        params = replace(params, max_tokens=4)
        prompts = random_prompts(14, seed=seed, shared=10)
        actual, expected = run(engine, prompts, params), run(oracle, prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
        assert [c.speculation for c in actual] == [c.speculation for c in expected]
        assert_close_logprobs(actual, expected)
    assert runner.num_replays > len(runner) > 2
    assert {key[1].num_top for key in runner._captured} == {None, 5}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("method", "shape"), [CASES[2], CASES[4], CASES[5]])
def test_graphs_with_and_without_the_draft_network(method: str, shape: DraftShape) -> None:
    """Drafting differently changes what a chunk computes, and leaves its shape as it is."""
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "prefix_cache": False}
    prompts, params = random_prompts(5), SamplingParams(max_tokens=6)
    expected = run(tiny_oracle(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(method, shape, **settings, graph_tokens=128)
    method = round_of(engine).method
    runner = StandIn(engine)
    for drafts in (False, True, False, True):
        engine.set_methods(ByBatch.always(method if drafts else NoDraft()), "none")
        engine.executor.mode = "round"
        actual = run(engine, prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
        if drafts:
            assert [c.speculation for c in actual] == [c.speculation for c in expected]
    assert runner.num_replays > len(runner)


def test_other_modes_launch_prompts() -> None:
    engine = tiny_device_engine("none", None, graph_tokens=128)
    runner = StandIn(engine)
    engine.executor.mode = "none"
    run(engine, random_prompts(5), GREEDY)
    assert not len(runner)


@pytest.mark.parametrize("draft_kv_offset", [None, 0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_where_packed_tokens_lie(page_size: int, draft_kv_offset: int | None) -> None:
    """Pieces that begin and end anywhere in a page, with a draft side that lags: against one token at a time."""
    rng = random.Random(page_size)
    for _ in range(50):
        spans = [random_span(rng, slot, page_size, draft_kv_offset) for slot in range(rng.randint(1, 6))]
        expected = [one_by_one(spans, page_size, None)]
        if draft_kv_offset is not None:
            expected.append(one_by_one(spans, page_size, draft_kv_offset))
        packed = PromptPacker(page_size, draft_kv_offset).pack(spans)
        ended = [span for span in spans if span.end == span.seq.num_prefill_tokens]
        for side, (tokens, positions, slots, ends) in zip((packed.target, packed.draft), expected, strict=False):
            fields = TokenFields(*(list(part) for part in side.fields()))
            assert (fields.tokens_T, fields.positions_T, fields.slots_T) == (tokens, positions, slots)
            assert fields.logits_indices_R == [ends[i + 1] - 1 for i, span in enumerate(spans) if span in ended]
            assert fields.query_starts == ends
            assert side.max_queries == max(ends[i + 1] - ends[i] for i in range(len(spans)))
        assert packed.ready == [span.seq.req_idx for span in ended]
        assert packed.lengths == [span.end for span in ended]
        assert packed.all_end == (len(ended) == len(spans))
        assert [s.seq.num_draft_computed for s in spans] == [
            s.seq.num_draft_computed if draft_kv_offset is None else s.end + draft_kv_offset for s in spans
        ]


def random_span(rng: random.Random, slot: int, page_size: int, draft_kv_offset: int | None) -> PrefillSpan:
    """Of a new request, or of one that is computed again; `start` and the draft side anywhere."""
    num_prompt, num_more = rng.randint(1, 40), rng.choice([0, 0, 1, 5])
    tokens = [rng.randrange(1, 1000) for _ in range(num_prompt + num_more)]
    request = Request(slot, tokens[:num_prompt], GREEDY, RngKey(0, slot, 0))
    seq = Sequence(request, tokens, 100, req_idx=slot)
    start = rng.randrange(seq.num_prefill_tokens)
    end = rng.choice([seq.num_prefill_tokens, rng.randint(start + 1, seq.num_prefill_tokens)])
    seq.pages = rng.sample(range(500), (seq.num_prefill_tokens + 2) // page_size + 1)
    seq.num_draft_computed = rng.randint(0, start) if draft_kv_offset is not None else 0
    return PrefillSpan(seq, start, end, True, 0)


def one_by_one(
    spans: list[PrefillSpan], page_size: int, draft_kv_offset: int | None
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens, positions, slots and where each sequence's end; of the draft network unless `draft_kv_offset` is None."""
    tokens, positions, slots, ends = [], [], [], [0]
    for span in spans:
        seq = span.seq
        first, end, shift = (
            (span.start, span.end, 0)
            if draft_kv_offset is None
            else (seq.num_draft_computed, span.end + draft_kv_offset, 1 - draft_kv_offset)
        )
        for i in range(first, end):
            tokens.append(seq.tokens[i + shift] if i + shift < len(seq.tokens) else 0)
            positions.append(i)
            slots.append(seq.pages[i // page_size] * page_size + i % page_size)
        ends.append(len(tokens))
    return tokens, positions, slots, ends


def test_arrays_are_aligned() -> None:
    """At 16 bytes, padded or not: for another address Triton would compile its kernels anew, in the middle of a run."""
    packer = PromptPacker(4, 1)
    packed = packer.pack([random_span(random.Random(i), i, 4, 1) for i in range(3)])
    for arrays in (packed.arrays(), packer.pack([]).padded(ChunkShape(64, 7, 64), 9)):
        buffer = Transfers(CPU).upload(arrays.buffer)
        views = arrays.views(buffer).flat()
        assert all((part.data_ptr() - buffer.data_ptr()) % 16 == 0 for part in views)
        assert tuple(map(len, views)) == arrays.sizes


def test_arrays_come_back_by_name() -> None:
    """Padded and not: the device reads what the host wrote, then padding."""
    rng, spans = random.Random(0), []
    while len(spans) < 3:
        span = random_span(rng, 3 + len(spans), 4, 1)
        spans += [span] if span.end == span.seq.num_prefill_tokens else []
    packed = PromptPacker(4, 1).pack(spans)
    shape = ChunkShape(256, 4, 256)
    for arrays in (packed.arrays(), packed.padded(shape, 9)):
        views = arrays.views(torch.from_numpy(arrays.buffer))
        assert views.target.query_starts.dtype == views.draft.starts_B.dtype == torch.int32
        for view, values in zip(views.flat(), packed.fields().flat(), strict=True):
            assert view[: len(values)].tolist() == list(values)
    assert views.req_idx_B.tolist() == [3, 4, 5, 9]
    assert views.ready_index_R.tolist() == [0, 1, 2, 3]
    assert views.target.slots_T[packed.target.query_starts[-1] :].eq(-1).all()
    assert views.draft.query_starts[3:].eq(packed.draft.query_starts[-1]).all()
    assert views.draft.logits_indices_R[3] == shape.num_tokens - 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_graphs_give_the_same_texts(
    method: str, shape: DraftShape | None, params: SamplingParams, dtype: torch.dtype
) -> None:
    """Captured with other rows running; float64 with the reference kernels, float32 with Triton's."""
    prompts, settings = many_prompts(), SETTINGS | {"dtype": dtype}
    expected = run(tiny_oracle(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(
        method, shape, **settings, device=CUDA, graphs="round", prefill_chunk_tokens=64, graph_tokens=128
    )
    for _ in range(2):  # captured, then replayed
        actual = run(engine, prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert num_graphs(engine) > 1


@pytest.mark.gpu
def test_only_whole_rounds_have_graphs_of_prompts() -> None:
    prompts = random_prompts(5)
    engine = tiny_device_engine("none", None, device=CUDA, graphs="none", graph_tokens=128)
    run(engine, prompts, GREEDY)
    assert num_graphs(engine) == 0


def num_graphs(engine: Engine) -> int:
    runner = engine.prompts.runner
    assert runner is not None
    return len(runner)
