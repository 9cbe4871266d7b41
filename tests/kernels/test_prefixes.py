"""Attention that reads shared prefixes once, against the reference that reads each sequence's own pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.prefix_groups import Group, GroupLimits, GroupTable
from specbatch.kernels import torch as reference
from tests.kernels.batches import (
    CUDA,
    DEVICE,
    DTYPES,
    FP8,
    close,
    paged_batch,
    random,
    random_cache,
    tree_batch,
)
from tests.kernels.operations import Ops
from tests.marks import slow_on_cpu

pytestmark = [pytest.mark.gpu] if CUDA else []

TREE = [-1, 0, 0, 1, 3]
GROUPS = [Group([4, 0, 2], 128), Group([1, 5], 64)]  # and sequence 3 alone
STARTS = [128, 70, 150, 200, 191, 64]  # sequences 0 and 5 have no token of their own before the new ones


def grouped(batch: PagedBatch, groups: list[Group], table: GroupTable | None = None) -> PagedBatch:
    """The batch with groups whose sequences have the pages of the first of them."""
    pages = batch.page_table_BP.clone()
    for group in groups:
        shared = group.tokens // batch.page_size
        pages[group.members, :shared] = pages[group.members[0], :shared].clone()
    size = len(batch.starts_B)
    table = table or GroupTable(size + 2, GroupLimits(), DEVICE)
    table.write(groups, lambda packed: torch.from_numpy(packed).to(DEVICE))
    return replace(batch, page_table_BP=pages, groups=table.of_batch(size))


def batch_of(kind: str, page: int) -> PagedBatch:
    if kind == "tree":
        return tree_batch(len(TREE), TREE, STARTS, page)
    return paged_batch(STARTS, {"plain": [1] * 6, "chain": [4] * 6, "uneven": [1, 4, 2, 3, 4, 1]}[kind], page)


def attend(ops: Ops, q: Tensor, kv: Tensor, batch: PagedBatch, parts: int, splits: int) -> Tensor:
    workspace = ops.raw.Workspace(DEVICE, 16384, q.shape[2])
    prefix = ops.raw.attend_prefixes(q, kv, batch, 0.125, parts)
    out: Tensor = ops.raw.attend(q, kv, batch, 0.125, None, splits, workspace, prefix=prefix)
    return out


def check(
    ops: Ops, batch: PagedBatch, heads: tuple[int, int, int], dtype: torch.dtype, parts: int, splits: int
) -> None:
    q = random(batch.slots_T.shape[0], heads[0], heads[2], dtype=dtype)
    kv = random_cache(batch, heads[1], heads[2], dtype)
    expected = reference.attend(q, kv, batch, 0.125)
    close(attend(ops, q, kv, batch, parts, splits), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "page", "heads", "parts", "splits"),
    [
        ("plain", 16, (4, 2, 64), 1, 1),
        ("chain", 64, (8, 2, 16), 2, 2),
        ("tree", 16, (4, 2, 32), 4, 1),
        ("uneven", 8, (7, 1, 16), 2, 4),
        slow_on_cpu("tree", 64, (8, 2, 128), 2, 4),
        slow_on_cpu("chain", 32, (4, 4, 80), 8, 1),
        slow_on_cpu("plain", 1, (6, 2, 128), 2, 8),
    ],
)
def test_shared_prefixes(
    ops: Ops, kind: str, page: int, heads: tuple[int, int, int], parts: int, splits: int, dtype: torch.dtype
) -> None:
    check(ops, grouped(batch_of(kind, page), GROUPS), heads, dtype, parts, splits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_change_in_place(ops: Ops, dtype: torch.dtype) -> None:
    """As under a captured graph: one table, whose groups dissolve, and others form. A table of other pages shows that
    the old groups are not read any more."""
    table = GroupTable(6, GroupLimits(), DEVICE)
    for groups in (GROUPS, [], [Group([0, 1, 2, 3, 4, 5], 64)]):
        check(ops, grouped(batch_of("plain", 16), groups, table), (4, 2, 16), dtype, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_is_read_from_the_first_sequence(ops: Ops, dtype: torch.dtype) -> None:
    """The pages of the other sequences are not looked at as far as they are shared: they hold NaN here."""
    whole = grouped(batch_of("tree", 16), GROUPS)
    q = random(whole.slots_T.shape[0], 4, 16, dtype=dtype)
    kv = random_cache(whole, 2, 16, dtype)
    pages = whole.page_table_BP.clone()
    for group in GROUPS:
        pages[group.members[1:], : group.tokens // 16] = kv.shape[2] // 16 - 1
    kv[0, :, -16:] = torch.nan
    expected = reference.attend(q, kv, whole, 0.125)
    close(attend(ops, q, kv, replace(whole, page_table_BP=pages), 2, 2), expected, dtype)


def test_a_spoilt_prefix_spoils_its_group_alone(ops: Ops) -> None:
    batch = grouped(batch_of("plain", 16), GROUPS)
    q, kv = random(6, 4, 16, dtype=torch.float32), random_cache(batch, 2, 16, torch.float32)
    kv[0, :, int(batch.page_table_BP[4, 1]) * 16 + 3] = torch.nan
    out = attend(ops, q, kv, batch, 2, 1)
    assert out.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True, False]
    assert out[[1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_cache(ops: Ops, dtype: torch.dtype) -> None:
    batch = grouped(batch_of("chain", 16), GROUPS)
    q, kv = random(24, 4, 16, dtype=dtype), random_cache(batch, 2, 16, dtype).to(FP8)
    close(attend(ops, q, kv, batch, 2, 2), reference.attend(q, kv, batch, 0.125), dtype)


def test_long_sequences_are_split_too(ops: Ops) -> None:
    """Of sequences with a prefix and without one."""
    batch = grouped(batch_of("chain", 16), GROUPS)
    listed = reference.long_sequences(batch.starts_B, batch.query_starts, 152, 3)
    q, kv = random(24, 4, 16, dtype=torch.float32), random_cache(batch, 2, 16, torch.float32)
    prefix, workspace = ops.raw.attend_prefixes(q, kv, batch, 0.125, 2), ops.raw.Workspace(DEVICE, 16384, 16)
    out = ops.raw.attend(q, kv, batch, 0.125, None, 4, workspace, listed, prefix=prefix)
    close(out, reference.attend(q, kv, batch, 0.125), torch.float32)
