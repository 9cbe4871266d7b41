"""Attention whose bits depend on a row alone, in Triton's interpreter without a GPU, for real with one.

The interpreter multiplies matrices with numpy: equal bits there prove which keys are read, in which order and under
which mask, and not what tensor cores do. The tests marked `gpu` prove that, at the sizes of real models.
"""

from __future__ import annotations

import random as python_random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specbatch.attention.invariant import InvariantAttention
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVScales
from specbatch.errors import ModelError
from specbatch.kernels import torch as reference
from specbatch.kernels.card_checks import CardChecks
from specbatch.kernels.triton.invariant_attention import attend
from specbatch.kernels.triton.parts import attention_splits
from specbatch.kernels.triton.parts.attention_splits import (
    MAX_SPLITS,
    WORKSPACE_ROWS,
    SplitPlan,
    bounds,
    invariant_tile,
    plan_splits,
    split_begin,
    splits_of,
    stored_rows,
)
from specbatch.kernels.triton.parts.attention_tile import Fp8Form
from specbatch.kernels.triton.tree_paths import tree_paths
from specbatch.kernels.triton.workspace import Workspace
from tests.kernels.batches import CUDA, DEVICE, FP8, close, paged_batch, random, random_cache, tree_batch
from tests.marks import slow_on_cpu

if CUDA:
    pytestmark = [pytest.mark.gpu]
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32]
# Splits of 64 keys for the interpreter, which is slow; blocks have 32 there.
BOUNDS = bounds() if CUDA else [*range(0, 64 * 63, 64), 2**31 - 1]
SPLIT = BOUNDS[1]


class Kernel:
    """The kernel over the keys of one long sequence, cut into launches as a test wants it."""

    def __init__(self, total: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int = 16) -> None:
        self.whole = paged_batch([0], [total], page)
        self.q = random(total, heads, dim, dtype=dtype)
        self.kv = random_cache(self.whole, kv_heads, dim, dtype)
        self.heads, self.v_scale = (heads, kv_heads, dim), 1.0
        self.soft_cap: float | None = None
        self.sinks: Tensor | None = None
        self.fp8: Fp8Form = "widen"
        self.max_splits = sum(border < total for border in BOUNDS)

    def run(
        self,
        batch: PagedBatch,
        q: Tensor,
        parts: int = 1,
        window: int | None = None,
        listed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        dim = self.heads[2]
        splits = SplitPlan(parts, len(batch.starts_B) if listed is None else len(listed[1]), self.max_splits)
        workspace = Workspace(DEVICE, 1 << 14, dim)
        part, sums, counters = workspace.reserve(0, 1, 16, 16)
        part.fill_(float("nan"))  # what is not written must not be read
        sums.fill_(float("nan"))
        paths = None if batch.mask_TW is None else tree_paths(batch)
        table = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
        tile = invariant_tile(batch.max_queries * self.heads[0] // self.heads[1], dim, q.element_size())
        tile = replace(tile, fp8=self.fp8)
        given = listed, table, workspace, dim**-0.5, window, self.v_scale, self.soft_cap, self.sinks
        out = attend(tile, q, self.kv, batch, paths, splits, *given)
        assert not counters.any(), "the counters are ready for the next launch"
        return out

    def cut(self, *parts: tuple[int, int]) -> tuple[PagedBatch, Tensor]:
        """The tokens [start, end) of each part as the new tokens of a sequence, in one batch."""
        index = torch.cat([torch.arange(*part) for part in parts]).to(DEVICE)
        starts = torch.tensor([start for start, _ in parts], dtype=torch.int32, device=DEVICE)
        ends = torch.tensor([0, *(end - start for start, end in parts)]).cumsum(0)
        batch = PagedBatch(
            self.whole.slots_T[index],
            self.whole.positions_T[index],
            self.whole.page_table_BP.expand(len(parts), -1).contiguous(),
            self.whole.page_size,
            starts,
            ends.int().to(DEVICE),
            max(end - start for start, end in parts),
        )
        return batch, self.q[index].contiguous()

    def of(self, *parts: tuple[int, int], window: int | None = None) -> Tensor:
        return self.run(*self.cut(*parts), window=window)

    def check(self, found: Tensor, *parts: tuple[int, int], window: int | None = None) -> None:
        """Against the reference kernel."""
        batch, q = self.cut(*parts)
        traits = {"v_scale": self.v_scale, "soft_cap": self.soft_cap, "sinks_H": self.sinks}
        expected = reference.attend(q, self.kv, batch, self.heads[2] ** -0.5, window, **traits)
        close(found, expected, q.dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "window"),
    [
        (4, 1, 64, 16, None),
        (1, 1, 64, 64, 40),
        slow_on_cpu(8, 1, 128, 64, None),
        *(
            [
                (9, 3, 64, 16, None),
                (14, 2, 64, 1, None),
                (12, 2, 128, 64, None),
                pytest.param(32, 8, 128, 64, 100, marks=pytest.mark.gpu_memory(4)),
            ]
            if CUDA
            else []
        ),
    ],
)
def test_a_row_has_the_bits_of_every_launch(
    heads: int, kv_heads: int, dim: int, page: int, window: int | None, dtype: torch.dtype
) -> None:
    """Whole, in chunks, and with some queries, alone or among others, around the borders of blocks and splits."""
    total = 2 * SPLIT + 18
    kernel = Kernel(total, heads, kv_heads, dim, dtype, page)
    whole = kernel.of((0, total), window=window)
    kernel.check(whole, (0, total), window=window)
    for border in (37, SPLIT - 1) if CUDA else (SPLIT - 1,):
        chunks = kernel.of((0, border), window=window), kernel.of((border, total), window=window)
        assert same(torch.cat(chunks), whole)
    ends = [1, 32, 33, *(i * SPLIT + j for i in (1, 2) for j in (-1, 0, 1)), total]
    for count in (1, 2, 5, 16, 70) if CUDA else (1, 5):
        parts = [(max(0, end - count), end) for end in (ends if CUDA or count == 1 else ends[-2:])]
        expected = torch.cat([whole[start:end] for start, end in parts])
        assert same(kernel.of(*parts, window=window), expected), count
    for part in ((2 * SPLIT - 3, 2 * SPLIT + 2), (total - 1, total)):
        assert same(kernel.of(part, window=window), whole[slice(*part)]), part


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, slow_on_cpu(SPLIT + 50)])
def test_who_computes_the_splits_changes_no_bit(window: int | None, dtype: torch.dtype) -> None:
    total = 3 * SPLIT + 18
    kernel = Kernel(total, 4, 1, 64, dtype, 64)
    ends = [total, 4, SPLIT, SPLIT + 1, 2 * SPLIT + 7]
    parts = [(end - 1, end) for end in ends]
    expected = kernel.of(*parts, window=window)
    kernel.check(expected, *parts, window=window)
    batch, q = kernel.cut(*parts)
    for programs in (2, 4, 16) if CUDA else (2, 8):
        assert same(kernel.run(batch, q, programs, window), expected), programs
    for count in (1, 2, 4) if CUDA else (2,):
        listed = reference.long_sequences(batch.starts_B, batch.query_starts, 2 * SPLIT, count)
        assert same(kernel.run(batch, q, 4, window, listed), expected), count


def random_tree(rng: python_random.Random, nodes: int) -> list[int]:
    return [-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, nodes))]


def on_path(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path, node = [node, *path], parents[node]
    return path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "dim"), [(8, 4, 1, 64), slow_on_cpu(40, 8, 1, 64), slow_on_cpu(60, 2, 2, 128)]
)
def test_a_node_has_the_bits_of_plain_decoding(
    nodes: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """The same keys, values and queries as a tree with siblings between them, and as a chain."""
    rng = python_random.Random(nodes)
    parents = random_tree(rng, nodes)
    starts = [0, 30, SPLIT - 4, SPLIT - 1, SPLIT, 2 * SPLIT - 1]
    if not CUDA:
        starts = starts[1:4] if nodes == 8 else starts[2:3]
    batch = tree_batch(nodes, parents, starts, 16)
    kernel = Kernel(2 * SPLIT + nodes, heads, kv_heads, dim, dtype)
    q = random(nodes * len(starts), heads, dim, dtype=dtype, seed=1)
    kernel.kv = random_cache(batch, kv_heads, dim, dtype)
    found = kernel.run(batch, q)
    close(found, reference.attend(q, kernel.kv, batch, dim**-0.5, None), dtype)
    assert same(kernel.run(batch, q, parts=2), found)
    leaves = [node for node in range(nodes) if node not in parents]
    for leaf in leaves if CUDA else rng.sample(leaves, 2):
        path = on_path(parents, leaf)
        # Compaction: the path's keys and values move to where plain decoding has them.
        moved = kernel.kv.clone()
        for b in range(len(starts)):
            slots = batch.slots_T[b * nodes : (b + 1) * nodes]
            moved[:, :, slots[: len(path)]] = kernel.kv[:, :, slots[torch.tensor(path)]]
        tokens = torch.tensor([b * nodes + node for b in range(len(starts)) for node in path], device=DEVICE)
        counts = torch.arange(len(starts) + 1, dtype=torch.int32, device=DEVICE) * len(path)
        chain = replace(batch, query_starts=counts, max_queries=len(path), mask_TW=None, mask_starts_B=None)
        before, kernel.kv = kernel.kv, moved
        assert same(kernel.run(chain, q[tokens].contiguous()), found[tokens]), path
        kernel.kv = before


def test_paths_of_trees() -> None:
    parents = random_tree(python_random.Random(0), 40)
    batch = tree_batch(40, parents, [5, 0], 16)
    limits, leaves, paths = (x.tolist() for x in tree_paths(batch))
    for b, start in enumerate([5, 0]):
        for node in range(40):
            t, path = b * 40 + node, on_path(parents, node)
            assert limits[t] == start + len(path)
            assert paths[t][: len(path)] == path
            assert leaves[t] not in parents
            assert node in on_path(parents, leaves[t])


def test_a_step_of_a_draft_tree() -> None:
    """Branches that see some slots of earlier steps: each is its own leaf."""
    batch = replace(
        paged_batch([12, 37], [2, 2], 16),
        mask_TW=torch.tensor([0b01000101, 0b10010010] * 2, dtype=torch.int32, device=DEVICE)[:, None],
        mask_starts_B=torch.tensor([6, 31], dtype=torch.int32, device=DEVICE),
    )
    kernel = Kernel(50, 4, 2, 64, DTYPES[0])
    q = random(4, 4, 64, dtype=DTYPES[0])
    kernel.kv = random_cache(batch, 2, 64, DTYPES[0])
    close(kernel.run(batch, q), reference.attend(q, kernel.kv, batch, 0.125, None), DTYPES[0])
    assert tree_paths(batch).leaves_T.tolist() == [0, 1, 0, 1]


def test_bits_do_not_depend_on_hidden_keys() -> None:
    """Not on the keys of other branches or after the end, also if they are not finite."""
    batch = tree_batch(4, [-1, 0, 0, 1], [5, 21], 16)
    kernel = Kernel(40, 4, 2, 64, DTYPES[0])
    q, kv = random(8, 4, 64, dtype=DTYPES[0]), random_cache(batch, 2, 64, DTYPES[0])
    kernel.kv = kv
    expected = kernel.run(batch, q)
    kernel.kv = kv.clone()
    used = {int(batch.page_table_BP[b, i // 16]) * 16 + i % 16 for b, n in enumerate((9, 25)) for i in range(n)}
    hidden = [slot for slot in range(kv.shape[2]) if slot not in used]
    kernel.kv[0, :, [*hidden, int(batch.slots_T[2])]] = float("nan")
    found = kernel.run(batch, q)
    assert found[2].isnan().all()
    others = [0, 1, *range(3, 8)]
    assert same(found[others], expected[others])


def test_split_borders() -> None:
    """Multiples of every tile's keys, rising, and few; a function of the number alone."""
    borders = bounds()
    assert borders == sorted(set(borders))
    assert len(borders) == MAX_SPLITS + 1 == 128
    assert all(border % 256 == 0 for border in borders[:-1])
    assert borders[:11] == [0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560]
    assert [splits_of(n) for n in (1, 256, 257, 2048, 2049, 131_072, 131_073)] == [1, 1, 2, 8, 9, 56, 57]
    assert all(split_begin(i + 1) - split_begin(i) <= max(256, split_begin(i) // 8) for i in range(40))


@pytest.mark.parametrize("max_keys", [200, 4096, 140_000])
def test_the_workspace_holds_every_launch(max_keys: int) -> None:
    for num_seqs in (1, 2, 3, 8, 31, 64, 256, 1000):
        for kv_heads in (1, 2, 8):
            for num_rows in (1, 4, 7, 16, 40, 64, 65, 240, 8192):
                tile = invariant_tile(num_rows, 128, 2)
                plan = plan_splits(num_seqs, kv_heads, num_rows, max_keys, tile)
                tiles = plan.num_seqs * kv_heads * -(-num_rows // tile.block_m)
                assert plan.max_splits == splits_of(max_keys)
                assert 1 <= plan.num_seqs <= num_seqs
                assert plan.parts == 1 or tiles * plan.max_splits * stored_rows(num_rows, tile) <= WORKSPACE_ROWS
                assert plan.parts == 1 or tiles * plan.parts <= 512
    tile = invariant_tile(4, 128, 2)
    assert plan_splits(1, 8, 4, 4096, tile) == SplitPlan(16, 1, 16)
    assert plan_splits(256, 8, 4, 4096, tile) == SplitPlan(1, 256, 16)
    assert plan_splits(256, 8, 4, 140_000, tile) == SplitPlan(8, 8, 57)


def test_the_backend_takes_the_same_bits_from_all_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence, several, and one long sequence among many."""
    monkeypatch.setattr(attention_splits, "LONG_TOKENS", 400)
    kernel = Kernel(530, 2, 2, 64, DTYPES[0], 64)
    backend = InvariantAttention(2, 2, 64, DTYPES[0], DEVICE)

    class Cache:
        def layer(self, layer: int) -> Tensor:
            return kernel.kv

        def scales(self, layer: int) -> KVScales:
            return KVScales()

    def of(*parts: tuple[int, int]) -> tuple[Tensor, Any]:
        batch, q = kernel.cut(*parts)
        plan = backend.plan(batch)
        return backend.attend(plan, q, Cache(), 0, None), plan  # type: ignore[arg-type]

    parts = [(529, 530), *[(8, 9)] * 3, (499, 500)]
    alone, (*_, splits, listed) = of(parts[0])
    assert splits.parts == 4
    assert listed is None
    monkeypatch.setattr(attention_splits, "_MAX_PROGRAMS", 16)
    many, (*_, splits, listed) = of(*parts)
    assert splits.parts == 8
    assert listed[1].tolist() == [0]
    monkeypatch.setattr(attention_splits, "_MAX_PROGRAMS", 8)
    others, (*_, splits, listed) = of(*parts)
    assert (splits.parts, listed) == (1, None)
    assert same(many, others)
    assert same(many[:1], alone)


@pytest.mark.parametrize("form", ["widen", "half"] if CUDA else ["half"])
@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float16])
def test_keys_in_fp8(form: Fp8Form, dtype: torch.dtype) -> None:
    total = 300 if CUDA else 36
    kernel = Kernel(total, 4, 2, 64, dtype)
    kernel.kv, kernel.fp8, kernel.v_scale = kernel.kv.to(FP8), form, 0.3
    whole = kernel.of((0, total))
    kernel.check(whole, (0, total))
    for start, end in ((total - 1, total), (total - 10, total - 5), *([(i, i + 5) for i in range(0, 290, 9)] * CUDA)):
        assert same(kernel.of((start, end)), whole[start:end]), start


@pytest.mark.skipif(not CUDA, reason="8 s in the interpreter")
def test_the_check_at_load_finds_a_card_whose_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, checks = InvariantAttention(1, 1, 64, DTYPES[0], DEVICE), CardChecks()
    backend.check_later(checks)
    checks.run()
    backend.check_later(checks)
    attend = backend._attend
    monkeypatch.setattr(backend, "_attend", lambda tile, q, *rest: attend(tile, q, *rest) + len(q))
    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.zeros(shape, device=DEVICE))
    with pytest.raises(ModelError, match="attention of one token differs"):
        checks.run()
