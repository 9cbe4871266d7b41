# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The largest logit of each *group* of a row (Triton). Later kernels look for tokens only in the groups that can have
them.

A group is 512 bytes of logits: one load of a warp, of 16 bytes for each thread. So threads of two warps do not have to
meet. A program has 16 groups. Groups do not depend on the number of rows, so neither do results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.launch import launch

TILE = 16  # groups of a program
NO_ID = tl.constexpr(0x7FFFFFFF)


class Groups(NamedTuple):
    """The groups of R rows. `num_chunks`: the number of programs for a row."""

    peaks_RG: Tensor
    size: int
    num_chunks: int

    @property
    def number(self) -> int:
        return self.peaks_RG.shape[1]

    @property
    def padded(self) -> int:
        """The number of groups of a row, rounded up to a power of two."""
        return triton.next_power_of_2(self.number)


@triton.jit
def tile_of(num_chunks, TILE: tl.constexpr):
    """Return the row of this program and its groups. Programs that run at the same time read memory in order."""
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    return row, chunk * TILE + tl.arange(0, TILE)


@triton.jit
def ids_of(groups, GROUP: tl.constexpr):
    """Return the ids of the tokens of some groups, (groups, GROUP)."""
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _max_of_groups(
    logits_ptr, peak_ptr, stride, vocab, num_groups, num_chunks, GROUP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    # Per logit this has a conversion and two comparisons. With more work, such as a search for the index, it would take
    # longer than the memory does.
    row, groups = tile_of(num_chunks, TILE)
    ids = ids_of(groups, GROUP)
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(peak_ptr.dtype.element_ty)
    x = tl.minimum(x, float("inf"))  # the smaller of NaN and +inf is +inf
    tl.store(peak_ptr + row * num_groups + groups, tl.max(x, 1), mask=groups < num_groups)


def max_of_groups(logits_RV: Tensor) -> Groups:
    """Compute the largest logit of each group. A NaN counts as +inf."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    size = 512 // logits_RV.element_size()
    count = triton.cdiv(vocab, size)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    groups = Groups(torch.empty((rows, count), dtype=wide, device=logits_RV.device), size, triton.cdiv(count, TILE))
    launch(
        _max_of_groups, (rows * groups.num_chunks,),
        logits_RV, groups.peaks_RG, logits_RV.stride(0), vocab, count, groups.num_chunks, GROUP=size, TILE=TILE,
    )  # fmt: skip
    return groups


@triton.jit
def first_of_peak(row_ptr, peaks, vocab, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the largest logit of a row, its lowest id, the group of that, and the ids and the logits of this group."""
    groups = tl.arange(0, GROUPS)
    peak = tl.max(peaks)
    group = tl.min(tl.where(peaks == peak, groups, NO_ID))
    ids = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(peaks.dtype)
    return peak, tl.min(tl.where(x == peak, ids, NO_ID)), group, ids, x
