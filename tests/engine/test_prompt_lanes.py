"""Prompt chunks in two lanes: how they are divided, and that no bit depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.prefill.packing import ChunkCut, PromptPacker
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.sequence import Sequence
from specbatch.models.stages import turns_over_one_sequence
from specbatch.parallel.group import Group
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.parallel.threads import on_ranks
from tests.tiny_models import CPU, random_prompts, run, tiny_device_engine, tiny_engine

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 3, 8)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, top_k=30, seed=5, logprobs=2)


def batch_of(lengths: list[int]) -> PagedBatch:
    """Of sequences with as many new tokens; sequence i has 10 i slots before them. A page is a slot."""
    starts = [10 * i for i in range(len(lengths))]
    positions = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    slots = [
        1000 * seq + position for seq, position in zip(np.repeat(range(len(lengths)), lengths), positions, strict=True)
    ]
    table = 1000 * torch.arange(len(lengths))[:, None] + torch.arange(200)
    return PagedBatch(
        torch.tensor(slots), torch.tensor(positions), table.int(), 1, torch.tensor(starts).int(),
        torch.from_numpy(ends), max(lengths), host_query_starts=ends,
    )  # fmt: skip


def seen(batch: PagedBatch) -> list[tuple[int, int, int]]:
    """Of each token: its slot, its position, and the slot of the last key that it sees."""
    found = []
    assert batch.host_query_starts is not None
    assert batch.query_starts.tolist() == batch.host_query_starts.tolist()
    for b, (start, end) in enumerate(zip(batch.host_query_starts, batch.host_query_starts[1:], strict=False)):
        assert 0 <= end - start <= batch.max_queries
        for i in range(end - start):
            last = batch.page_table_BP[b, batch.starts_B[b] + i]
            found.append((int(batch.slots_T[start + i]), int(batch.positions_T[start + i]), int(last)))
    assert len(found) == len(batch.slots_T)
    return found


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.data())
@settings(max_examples=25, deadline=None)
def test_both_parts_see_what_the_whole_sees(lengths: list[int], data: st.DataObject) -> None:
    whole, total = batch_of(lengths), sum(lengths)
    num_tokens = data.draw(st.integers(1, total))
    ends = np.cumsum(lengths)
    num_seqs = int(np.searchsorted(ends, num_tokens, side="right"))
    cut = num_tokens - int(ends[num_seqs - 1] if num_seqs else 0)
    first, second = whole.divided(num_seqs, num_tokens, cut)
    assert len(first.slots_T) == num_tokens
    assert seen(first) + seen(second.copied()) == seen(whole)
    index_R = torch.from_numpy(ends - 1)
    selected = LogitsIndices.of(whole, index_R, whole.starts_B + torch.tensor(lengths) - 1, whole.page_table_BP)
    of_first, of_second = selected.divided(num_seqs, num_tokens)
    assert [*of_first.index_R.tolist(), *(of_second.index_R + num_tokens).tolist()] == index_R.tolist()
    assert seen(of_first.batch) + seen(of_second.batch) == seen(selected.batch)


def test_a_chunk_is_cut_in_the_middle() -> None:
    def spans(*lengths: tuple[int, int]) -> list[PrefillSpan]:
        found = []
        for i, (length, whole) in enumerate(lengths):
            seq = Sequence(Request(i, [1] * whole, SamplingParams(), RngKey(0, i, 0)), [1] * whole, 10**6)
            seq.req_idx, seq.pages = i, list(range(whole // 4 + 2))
            found.append(PrefillSpan(seq, 0, length, is_new=True, num_cached=0))
        return found

    pack = PromptPacker(4, None).pack
    assert pack(spans((10, 10), (20, 20))).cut(15) == ChunkCut(1, 15, 5, 1)
    assert pack(spans((10, 10), (20, 20))).cut(16) is None
    assert pack(spans((15, 15), (15, 15))).cut(1) == ChunkCut(1, 15, 0, 1), "none is cut"
    assert pack(spans((40, 99))).cut(1) == ChunkCut(0, 20, 20, 0)
    assert pack(spans((5, 5), (5, 5), (30, 30))).cut(20) == ChunkCut(2, 20, 10, 2)


def spied(engine: Engine) -> list[ChunkCut | None]:
    """How the chunks that it will compute are divided."""
    round_, found = engine.executor.rounds.items[0], list[ChunkCut | None]()
    prefill = round_.prefill

    def noted(chunk: Any, *rest: Any) -> Any:
        found.append(chunk.cut)
        return prefill(chunk, *rest)

    round_.prefill = noted  # type: ignore[method-assign]
    return found


def outputs(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.logprobs, c.prompt_logprobs, c.margin) for c in completions]


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=6),
    st.sampled_from([("none", None), ("draft_model", CHAIN), ("eagle3", TREE)]),
    st.integers(32, 90),
    st.booleans(),
)
@settings(max_examples=4, deadline=None)
def test_no_bit_depends_on_lanes(
    lengths: list[int], method: tuple[str, DraftShape | None], chunk: int, scored: bool
) -> None:
    prompts = [[(7 * i + 3 * j * j) % 50 + 6 for j in range(length)] for i, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=3, temperature=0.8, seed=5, logprobs=1, prompt_logprobs=1 if scored else None)

    def answers(min_lane: int | None) -> list[Any]:
        options: dict[str, Any] = {"dtype": torch.float32, "num_pages": 256, "max_batch_size": 6}
        return outputs(
            run(tiny_engine(*method, prefill_chunk_tokens=chunk, min_lane=min_lane, **options), prompts, params)
        )

    assert answers(1) == answers(None)


@pytest.mark.parametrize("kind", [tiny_engine, pytest.param(tiny_device_engine, marks=pytest.mark.slow)])
def test_lanes_run_and_cut_a_prompt(kind: Any) -> None:
    options: dict[str, Any] = {"num_pages": 256, "prefill_chunk_tokens": 64}
    prompts = [list(range(1, 60)), list(range(5, 30)), [3, 4]]
    expected = run(kind("eagle3", CHAIN, **options), prompts, SAMPLED)
    engine = kind("eagle3", CHAIN, min_lane=1, **options)
    cuts = spied(engine)
    assert [c.token_ids for c in run(engine, prompts, SAMPLED)] == [c.token_ids for c in expected]
    assert any(cut is not None and cut.in_next for cut in cuts)


def test_ranks_add_lanes_in_the_same_order() -> None:
    prompts = [list(range(1, 60)), list(range(5, 30))]

    def work(min_lane: int | None) -> list[Any]:
        def on_rank(group: Group) -> list[Any]:
            options: dict[str, Any] = {"num_pages": 256, "prefill_chunk_tokens": 64, "dtype": torch.float32}
            return outputs(run(tiny_engine("none", group=group, min_lane=min_lane, **options), prompts, SAMPLED))

        return on_ranks(2, on_rank)

    assert work(1) == work(None)


def test_a_lane_does_not_read_what_is_not_written() -> None:
    writer, reader = turns_over_one_sequence(CPU)
    assert (writer.is_second, reader.is_second) == (False, True)
    writer.wrote(0)
    reader.will_read(0)
    with pytest.raises(KeyError):
        reader.will_read(1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("method", "shape"), [("none", None), ("eagle3", TREE)])
def test_two_streams_of_one_prompt(method: str, shape: DraftShape | None, dtype: torch.dtype) -> None:
    """Many times: what the second stream reads too early would be wrong in some of them."""
    options: dict[str, Any] = {"num_pages": 2048, "max_batch_size": 24, "dtype": dtype, "device": torch.device("cuda")}
    options |= {"prefill_chunk_tokens": 1024, "prefix_cache": False}
    prompts = random_prompts(24, longest=140)
    expected = run(tiny_device_engine(method, shape, **options), prompts, SAMPLED)
    engine = tiny_device_engine(method, shape, min_lane=1, **options)
    cuts = spied(engine)
    for _ in range(5):
        assert [c.token_ids for c in run(engine, prompts, SAMPLED)] == [c.token_ids for c in expected]
    assert any(cut is not None and cut.in_next for cut in cuts)
