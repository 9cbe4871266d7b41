"""Blocks of choices: the choices of one expert, in the order of their numbers, `block_m` to a block.

Shape suffixes as in `ops.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specbatch.kernels.triton.mixture.kernel import count_kernel, place_kernel, sort_kernel
from specbatch.kernels.triton.parts.launch import launch, launch_options

# In one launch, the program of each expert reads all choices twice. In two launches, each program reads one slice of
# them. On an H200, 65,536 and 131,072 choices of 64 experts take 74 and 146 us in one launch, and 18 and 29 us in two.
# For 128 experts it is 104 and 205 us, and 34 and 59 us. 16,384 choices take 20 and 27 us in one launch.
MAX_SORTED_AT_ONCE = 16_384
_CHUNK = 4096  # choices that one launch sorts at a time
_STEP = 256  # choices that a program counts at a time; a slice has a multiple of them
_MAX_SLICES = 256  # Each program reads the counts of all slices.
_MATRIX = 8192  # elements of a matrix with a row for each choice and a column for each expert


def sorted_blocks(experts_TK: Tensor, first: int, num_experts: int, block_m: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """Sort the choices of the experts from `first` on. Return the expert of each block, counted from `first` on, and
    the numbers of the block's choices. See `sort_kernel`."""
    made = empty_blocks(experts_TK, num_experts, block_m)
    sort = sort_at_once if experts_TK.numel() <= MAX_SORTED_AT_ONCE else sort_in_slices
    sort(experts_TK, *made, first, num_experts, pdl)
    return made


def empty_blocks(experts_TK: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised blocks: their experts (B,) and their choices (B, block_m). They are as many as any routing
    needs: each expert can have one block that is not full."""
    num_choices, device = experts_TK.numel(), experts_TK.device
    count = min(num_choices, num_experts + num_choices // block_m)
    experts_B = torch.empty(count, dtype=torch.int32, device=device)
    return experts_B, torch.empty((count, block_m), dtype=torch.int32, device=device)


def sort_at_once(
    experts_TK: Tensor, experts_B: Tensor, members_BM: Tensor, first: int, num_experts: int, pdl: bool
) -> None:
    """Write the blocks in one launch."""
    num_choices = experts_TK.numel()
    launch(
        sort_kernel, (num_experts,),
        experts_TK, experts_B, members_BM, num_choices, len(experts_B),
        FIRST=first, X_POWER=triton.next_power_of_2(num_experts), BLOCK_M=members_BM.shape[1],
        CHUNK=min(_CHUNK, max(64, triton.next_power_of_2(num_choices))), PDL=pdl,
        num_warps=4 if num_choices <= _CHUNK else 8, **launch_options(pdl),
    )  # fmt: skip


def sort_in_slices(
    experts_TK: Tensor,
    experts_B: Tensor,
    members_BM: Tensor,
    first: int,
    num_experts: int,
    pdl: bool,
    max_slices: int = _MAX_SLICES,
) -> None:
    """Write the same blocks in two launches."""
    num_choices, power = experts_TK.numel(), triton.next_power_of_2(num_experts)
    size = _STEP * triton.cdiv(num_choices, _STEP * max_slices)
    num_slices = triton.cdiv(num_choices, size)
    counts = torch.empty((num_slices, power), dtype=torch.int32, device=experts_TK.device)
    launch(
        count_kernel, (num_slices,),
        experts_TK, counts, num_choices, size,
        FIRST=first, HELD=num_experts, X_POWER=power, STEP=_STEP, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    launch(
        place_kernel, (num_slices,),
        experts_TK, counts, experts_B, members_BM, num_choices, len(experts_B), size,
        FIRST=first, HELD=num_experts, X_POWER=power, BLOCK_M=members_BM.shape[1], STEP=_STEP,
        ROWS=min(_STEP, max(16, _MATRIX // power)), PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
