# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""One-shot sums over the GPUs of one host (Triton): each GPU writes its tensor into the inboxes of all others, and adds
the tensors that came into its own inbox.

The tensor is divided into blocks. A program writes one block to each other GPU and then its flag, waits for the same
block of the others, and adds in the order of GPUs. So a sum is one launch, and data crosses NVLink once.

A flag holds the number of the sum, which each block counts separately. An inbox has two halves, which sums use in turn:
a GPU writes into a half again only in the next sum but one, and it cannot end the sum between them before each other
GPU has begun that one. Then the others have read the half. So no GPU waits at the end. For that, the blocks of a group
have one size in bytes for all tensors.

Two other exchanges are the same kernel. A gather writes the tensors of all GPUs one after the other, and adds nothing.
A scatter sends another part of a tensor to each GPU, so each has the sum of one part.

A program that waits occupies its multiprocessor. Two sums at the same time, in two lanes, must not block the programs
for which the other GPU waits. Then a few programs take turns with the blocks, and the next kernel starts when all parts
have come. A sum that is alone has a program for each block, and the next kernel starts at once, to read its weights.

A sum can also compute the norm of its result. In rounds tensors are small, and a separate kernel for the norm takes
most of its time to start. (FlashInfer and TensorRT-LLM fuse the two as well.) Then a program adds a whole row, which is
one or several blocks, and waits for one flag: that of the first block. That is enough, because a program of any sum
begins after the kernel before it has ended. So a GPU whose flag has come has read all blocks of its former sum.

With more than two GPUs, each would get many bytes. Then the GPUs add the rows in turn (two-shot): a row is sent to one
of them, which adds it and sends the sum to all. It raises its flag after those of all others have come. So here, too, a
GPU cannot end a sum before each other GPU has begun it.

Shape suffixes: G GPUs, K blocks, T tokens (rows), E hidden size (elements of a row).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.elementwise import scaled_norm
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

BLOCK_BYTES = 4096
_FEW = 32  # programs of a sum that is not alone, so that most multiprocessors run neither of the two


class Inbox(NamedTuple):
    """An inbox of one GPU. `memory`: uint8 of `inbox_bytes`, which the other GPUs can write; all zeros at first.
    `addresses_G`: int64, the addresses of the memory of each GPU, as this one sees it. `counts_K`: int32, the numbers
    of the last sum of each block; all zeros at first."""

    memory: Tensor
    addresses_G: Tensor
    counts_K: Tensor
    rank: int
    capacity: int  # the bytes of the largest tensor

    @property
    def size(self) -> int:
        return len(self.addresses_G)


def num_blocks(capacity: int) -> int:
    return -(-capacity // BLOCK_BYTES)


def inbox_bytes(capacity: int, size: int) -> int:
    """Return the bytes of an inbox for tensors of up to `capacity` bytes from each of `size` GPUs, and for their
    flags."""
    return 2 * size * num_blocks(capacity) * (BLOCK_BYTES + 4)


@triton.jit
def _raise_flags(addresses_ptr, at, number, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write the number to the flag of this GPU in all other inboxes, at once: one after the other, each would wait
    until the one before it has arrived. `at`: bytes from the beginning of an inbox."""
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE)
    peers_G = tl.arange(0, PADDED)
    others_G = (peers_G != RANK) & (peers_G < SIZE)
    flags_G = (tl.load(addresses_ptr + peers_G, mask=others_G, other=0) + at).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags_G, tl.zeros((PADDED,), tl.int32) + number, mask=others_G, sem="release", scope="sys")


@triton.jit
def _await_flags(address, stride, number, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until the flags of all other GPUs in this inbox have the number. `address`: that of the first one. `stride`:
    bytes from the flag of a GPU to that of the next."""
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE)
    peers_G = tl.arange(0, PADDED)
    others_G = (peers_G != RANK) & (peers_G < SIZE)
    flags_G = (address + stride * peers_G).to(tl.pointer_type(tl.int32))
    missing = SIZE - 1
    while missing > 0:
        found_G = tl.atomic_add(flags_G, tl.zeros((PADDED,), tl.int32), mask=others_G, sem="acquire", scope="sys")
        missing = tl.sum((others_G & (found_G != number)).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _one_shot(
    x_ptr, residual_ptr, out_ptr, addresses_ptr, counts_ptr, count, stride,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Exchange tensors of `count` elements. `stride`: elements from the part of one GPU to that of the next. The parts
    are in `out_ptr` if it GATHERS, and in `x_ptr` if it SCATTERS."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    flags: tl.constexpr = 2 * SIZE * NUM_BLOCKS * BLOCK_BYTES  # where they begin
    if ALONE:
        await_former(PDL)
    elif PDL:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(count, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        ok = at < count
        number = tl.load(counts_ptr + block) + 1
        half = ((number & 1) * SIZE).to(tl.int64)
        x = tl.load(x_ptr + at, mask=ok, other=0.0)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                if SCATTERS:
                    x = tl.load(x_ptr + peer * stride + at, mask=ok, other=0.0)
                start = tl.load(addresses_ptr + peer) + (half + RANK) * NUM_BLOCKS * BLOCK_BYTES
                tl.store(tl.multiple_of(start.to(tl.pointer_type(dtype)), 16) + at, x, mask=ok)
        tl.debug_barrier()  # all of the block is written
        _raise_flags(addresses_ptr, flags + 4 * ((half + RANK) * NUM_BLOCKS + block), number, RANK, SIZE)
    own = tl.load(addresses_ptr + RANK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        ok = at < count
        number = tl.load(counts_ptr + block) + 1
        half = ((number & 1) * SIZE).to(tl.int64)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        _await_flags(own + flags + 4 * (half * NUM_BLOCKS + block), 4 * NUM_BLOCKS, number, RANK, SIZE)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                part = tl.load(x_ptr + (RANK * stride if SCATTERS else 0) + at, mask=ok, other=0.0)
            else:
                start = own + (half + peer) * NUM_BLOCKS * BLOCK_BYTES
                # Not from the cache of this multiprocessor, which does not see what other GPUs write.
                part = tl.load(
                    tl.multiple_of(start.to(tl.pointer_type(dtype)), 16) + at, mask=ok, other=0.0, cache_modifier=".cg"
                )
            if GATHERS:
                tl.store(out_ptr + peer * stride + at, part, mask=ok)
            else:
                total += part.to(tl.float32)
        if not GATHERS:
            y = total.to(dtype)
            if HAS_RESIDUAL:
                y = (tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
            tl.store(out_ptr + at, y, mask=ok)
        tl.store(counts_ptr + block, number)
    if PDL and not ALONE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _sum_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, normed_ptr, addresses_ptr, counts_ptr, eps,
    TWO_SHOT: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add one row of (ROW_BLOCKS, BLOCK) elements, and compute its norm. TWO_SHOT: one GPU adds it for all."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    flags: tl.constexpr = 2 * SIZE * NUM_BLOCKS * BLOCK_BYTES  # where they begin
    first = tl.program_id(0) * ROW_BLOCKS
    blocks = tl.arange(0, ROW_BLOCKS)
    in_row = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = first * BLOCK + in_row
    weight = tl.load(weight_ptr + in_row)
    await_former(PDL)
    # Each block counts separately. The flag has the number of the first one.
    numbers = tl.load(counts_ptr + first + blocks) + 1
    halves = ((numbers & 1) * SIZE).to(tl.int64)[:, None]
    number = tl.load(counts_ptr + first) + 1
    half = ((number & 1) * SIZE).to(tl.int64)
    own = tl.load(addresses_ptr + RANK)
    x = tl.load(x_ptr + at)
    owner = tl.program_id(0) % SIZE
    if TWO_SHOT and owner != RANK:
        to = tl.load(addresses_ptr + owner)
        tl.store(_part(to, halves + RANK, NUM_BLOCKS, BLOCK_BYTES, dtype) + at, x)
        tl.debug_barrier()  # all of the row is written
        sent = (to + flags + 4 * ((half + RANK) * NUM_BLOCKS + first)).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(sent, number, sem="release", scope="sys")
        added = (own + flags + 4 * ((half + owner) * NUM_BLOCKS + first)).to(tl.pointer_type(tl.int32))
        while tl.atomic_add(added, 0, sem="acquire", scope="sys") != number:
            pass
        tl.debug_barrier()
        y = tl.load(_part(own, halves + owner, NUM_BLOCKS, BLOCK_BYTES, dtype) + at, cache_modifier=".cg")
    else:
        flag = flags + 4 * ((half + RANK) * NUM_BLOCKS + first)
        if not TWO_SHOT:
            _send_row(x, at, halves, flag, number, addresses_ptr, RANK, SIZE, NUM_BLOCKS, BLOCK_BYTES)
        residual = tl.load(residual_ptr + at).to(tl.float32)
        _await_flags(own + flags + 4 * (half * NUM_BLOCKS + first), 4 * NUM_BLOCKS, number, RANK, SIZE)
        total = tl.zeros((ROW_BLOCKS, BLOCK), dtype=tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                total += x.to(tl.float32)
            else:
                # Not from the cache of this multiprocessor, which does not see what other GPUs write.
                part = tl.load(_part(own, halves + peer, NUM_BLOCKS, BLOCK_BYTES, dtype) + at, cache_modifier=".cg")
                total += part.to(tl.float32)
        y = (residual + total.to(dtype).to(tl.float32)).to(dtype)
        if TWO_SHOT:
            # This GPU has sent nothing else of this row, so its places in the inboxes of the others are free.
            _send_row(y, at, halves, flag, number, addresses_ptr, RANK, SIZE, NUM_BLOCKS, BLOCK_BYTES)
    tl.store(out_ptr + at, y)
    y = y.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(y * y, 1), 0) / (ROW_BLOCKS * BLOCK) + eps)
    tl.store(normed_ptr + at, scaled_norm(y * scale, weight, dtype))
    tl.store(counts_ptr + first + blocks, numbers)


@triton.jit
def _send_row(
    row, at, halves, flag, number, addresses_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Write a row to the inboxes of all other GPUs, and then its flag, which is `flag` bytes from their beginnings."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            to = tl.load(addresses_ptr + peer)
            tl.store(_part(to, halves + RANK, NUM_BLOCKS, BLOCK_BYTES, row.dtype) + at, row)
    tl.debug_barrier()  # all of the row is written
    _raise_flags(addresses_ptr, flag, number, RANK, SIZE)


@triton.jit
def _part(address, places, NUM_BLOCKS: tl.constexpr, BLOCK_BYTES: tl.constexpr, dtype: tl.constexpr):
    """Return pointers to the tensors in an inbox that begin at these places."""
    start = address + places * NUM_BLOCKS * BLOCK_BYTES
    return tl.multiple_of(start.to(tl.pointer_type(dtype)), (16, 16))


def has_whole_blocks(x_TE: Tensor) -> bool:
    """Return whether `sum_norm` supports the tensor: the number of blocks of a row must be a power of two."""
    blocks, rest = divmod(x_TE.shape[-1] * x_TE.itemsize, BLOCK_BYTES)
    return rest == 0 and blocks.bit_count() == 1


def sum_norm(
    x_TE: Tensor,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    inbox: Inbox,
    out_TE: Tensor,
    normed_TE: Tensor,
    *,
    two_shot: bool = False,
) -> None:
    """Write to `out_TE` the result of `one_shot_sum` for a sum that is alone, and to `normed_TE` its `rms_norm`, whose
    last bits can differ, because squares are added in another order. Rows are as `has_whole_blocks` requires.
    `two_shot`: the GPUs add the rows in turn, and send each other the sums. The bits are the same."""
    tensors = (x_TE, residual_TE, out_TE, normed_TE)
    assert all(tensor.is_contiguous() for tensor in (*tensors, weight_E))
    assert all((tensor.shape, tensor.dtype) == (x_TE.shape, x_TE.dtype) for tensor in tensors)
    assert x_TE.nbytes <= inbox.capacity, (x_TE.nbytes, inbox.capacity)
    assert has_whole_blocks(x_TE), x_TE.shape
    pdl, block = dependent_launch(x_TE), BLOCK_BYTES // x_TE.itemsize
    launch(
        _sum_norm, (len(x_TE),),
        x_TE, residual_TE, weight_E, out_TE, normed_TE, inbox.addresses_G, inbox.counts_K, eps,
        TWO_SHOT=two_shot, RANK=inbox.rank, SIZE=inbox.size, NUM_BLOCKS=num_blocks(inbox.capacity),
        ROW_BLOCKS=x_TE.shape[1] // block, BLOCK=block, BLOCK_BYTES=BLOCK_BYTES, PDL=pdl, num_warps=8,
        **launch_options(pdl),
    )  # fmt: skip


def one_shot_sum(x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool = True) -> None:
    """Write to `out` the sum of each GPU's x, added in float32 and rounded to its dtype, + residual, rounded again. The
    tensors are contiguous and have one shape, bfloat16 or float32, and at most `inbox.capacity` bytes. `is_alone`: no
    other sum runs at the same time."""
    tensors = (x, out) if residual is None else (x, out, residual)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert all((tensor.shape, tensor.dtype) == (x.shape, x.dtype) for tensor in tensors)
    _exchange(x, residual, out, inbox, x.numel(), 0, is_alone=is_alone)


def one_shot_gather(x: Tensor, parts_GC: Tensor, inbox: Inbox, *, is_alone: bool = True) -> None:
    """Write each GPU's x (C,) to a row of `parts_GC`. The rows have the dtype of x, and need not follow each other."""
    assert x.is_contiguous()
    assert (parts_GC.shape, parts_GC.stride(1), parts_GC.dtype) == ((inbox.size, len(x)), 1, x.dtype)
    _exchange(x, None, parts_GC, inbox, len(x), parts_GC.stride(0), is_alone=is_alone, gathers=True)


def one_shot_scatter(
    parts_GC: Tensor, residual_C: Tensor | None, out_C: Tensor, inbox: Inbox, *, is_alone: bool = True
) -> None:
    """Write to `out_C` the sum of each GPU's row for this one, rounded as in `one_shot_sum`, with the residual."""
    assert all(x is None or (x.is_contiguous() and x.dtype == parts_GC.dtype) for x in (residual_C, out_C))
    assert (parts_GC.shape, parts_GC.stride(1)) == ((inbox.size, len(out_C)), 1)
    stride = parts_GC.stride(0)
    _exchange(parts_GC, residual_C, out_C, inbox, len(out_C), stride, is_alone=is_alone, scatters=True)


def _exchange(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    inbox: Inbox,
    count: int,
    stride: int,
    *,
    is_alone: bool,
    gathers: bool = False,
    scatters: bool = False,
) -> None:
    assert count * x.itemsize <= inbox.capacity, (count, x.dtype, inbox.capacity)
    block = BLOCK_BYTES // x.itemsize
    programs = triton.cdiv(count, block)
    pdl = dependent_launch(x)
    launch(
        _one_shot, (programs if is_alone else min(programs, _FEW),),
        x, residual, out, inbox.addresses_G, inbox.counts_K, count, stride,
        GATHERS=gathers, SCATTERS=scatters, RANK=inbox.rank, SIZE=inbox.size,
        NUM_BLOCKS=num_blocks(inbox.capacity), BLOCK=block, BLOCK_BYTES=BLOCK_BYTES,
        HAS_RESIDUAL=residual is not None, PDL=pdl, ALONE=is_alone, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
