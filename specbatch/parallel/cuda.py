"""A group of processes of one host with a GPU each.

Everything is launched on the caller's stream, so that a CUDA graph holds it together with the work before and after.
Memory that other ranks read is allocated, and its address is sent to them, before the first graph is captured, because
a graph holds the address. If two passes run at the same time (`models/stages.py`), each has an inbox, a mailbox and a
buffer, because an operation signals by words in them.

One-shot sums are a kernel of this project (`kernels/triton/ranks/one_shot.py`), and so are the sums of tensors that
copy engines brought (`copies.py`). Torch computes two-shot sums (`torch.ops.symm_mem`), and NCCL all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specbatch.kernels.trace_marks import marked
from specbatch.parallel.algorithms import (
    ALIGNMENT,
    MAILBOX_BYTES,
    Algorithm,
    algorithm_for,
    buffer_bytes,
    exchange_for,
    inbox_capacity,
    limits_for,
)
from specbatch.parallel.copies import WORDS_BYTES, DispatchBuffer, Mailbox, beginning, has_stream_operations
from specbatch.parallel.exchanges import ExchangeStore
from specbatch.parallel.group import Group, Norm, in_order
from specbatch.parallel.multicast import disable_multicast

if TYPE_CHECKING:
    from specbatch.kernels.triton.ranks.one_shot import Inbox  # needs Triton

M = TypeVar("M", bound=Mailbox)

_FIRST_CONTACT = timedelta(minutes=5)  # the longest wait until all ranks have started
_ALONE = -1  # the number of a pass while no other pass runs


class Collectives(Protocol):
    """Operations of all ranks, launched on the current stream. No two operations may use the same buffer, inbox or
    mailbox at the same time."""

    def new_buffer(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 buffer that the other ranks can read. All ranks call it in the same order."""
        ...

    def new_inbox(self, capacity: int) -> Inbox:
        """Allocate an inbox for tensors of up to `capacity` bytes. All ranks call it in the same order."""
        ...

    def can_copy(self) -> bool:
        """Return whether this rank's driver has the operations that mailboxes need. All ranks call it."""
        ...

    def new_mailbox(self, num_bytes: int) -> Mailbox:
        """Allocate a mailbox of `num_bytes` bytes. All ranks call it in the same order."""
        ...

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        """Write the sum, with the residual added, to `out`. `is_alone`: no other sum runs at the same time."""
        ...

    def can_norm(self, x_TE: Tensor) -> bool:
        """Return whether `sum_norm` supports lines of this size."""
        ...

    def sum_norm(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm, inbox: Inbox, *, two_shot: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what `one_shot` with `is_alone` writes, and its norm. `two_shot`: the ranks add the rows in turn."""
        ...

    def new_dispatch_buffer(self, num_bytes: int) -> DispatchBuffer:
        """Allocate a buffer of `num_bytes` bytes. All ranks call it in the same order."""
        ...

    def copied(self, x: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        """Do the same as `one_shot`, with a residual that all ranks have. With more than two ranks, the number of
        elements is a multiple of theirs."""
        ...

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None: ...

    def nccl(self, x: Tensor, out: Tensor) -> None: ...

    def gather(self, x: Tensor, parts: Tensor) -> None:
        """Write the x of each rank to `parts`, (size, *x.shape)."""
        ...

    def one_shot_gather(self, x: Tensor, parts: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        """Do the same as `gather`. The rows of `parts` need not follow each other."""
        ...

    def copied_gather(self, x: Tensor, parts: Tensor, mailbox: Mailbox) -> None:
        """Do the same as `one_shot_gather`."""
        ...

    def exchange(self, parts: Tensor, received: Tensor) -> None:
        """Send each rank its part of `parts` (size, ...), and write what each rank sends to `received`."""
        ...

    def add_parts(self, parts: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write the sum of `parts` (size, ...), in order, with the residual added, to `out`. No other rank takes
        part."""
        ...

    def one_shot_scatter(
        self, parts: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool
    ) -> None:
        """Write the sum of each rank's part for this one, with the residual added, to `out`. The rows of `parts` need
        not follow each other."""
        ...

    def copied_scatter(self, parts: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        """Do the same as `one_shot_scatter`."""
        ...

    def close(self) -> None: ...


class CudaGroup(Group):
    """The ranks of a host with a GPU each. `fixed_order`: sums of all sizes are added in the order of ranks, for
    engine.deterministic. `two_passes`: two forward passes can run at the same time. `dispatch_bytes`: the most that a
    rank dispatches in one of two passes without another copy. `host`: the same ranks without their GPUs, for `agree`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        collectives: Collectives,
        *,
        fixed_order: bool,
        two_passes: bool = False,
        dispatch_bytes: int = 0,
        host: Group | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._collectives, self._fixed_order, self._host = collectives, fixed_order, host
        alone, of_two = (limits_for(size, two_passes=two) for two in (False, True))
        copies = two_passes and of_two is not None and of_two.copied > 0
        if of_two is not None and copies and not self.least(int(collectives.can_copy())):
            copies, of_two = False, of_two._replace(copied=0)
        # The index is the number of the pass; the last limits are for a pass that is alone (-1).
        self._limits = (of_two, of_two, alone) if two_passes else (alone,) * 3
        capacity, num_bytes, passes = inbox_capacity(size), buffer_bytes(alone), range(1 + two_passes)
        self._inboxes = [collectives.new_inbox(capacity) for _ in passes] if capacity else []
        self._buffers = [collectives.new_buffer(num_bytes) for _ in passes] if num_bytes else []
        self._mailboxes = [collectives.new_mailbox(MAILBOX_BYTES) for _ in passes] if copies else []
        has_dispatches = copies and dispatch_bytes > 0
        self._dispatches = [collectives.new_dispatch_buffer(size * dispatch_bytes) for _ in passes if has_dispatches]
        self._unread: dict[int, DispatchBuffer] = {}  # The key is a pass, whose buffer holds tokens that it may read.
        self._pass, self._is_closed = _ALONE, False

    @property
    def can_copy(self) -> bool:
        """Return whether two passes at the same time exchange large tensors by copy engines."""
        return bool(self._mailboxes)

    @contextlib.contextmanager
    def one_of_two_passes(self, number: int) -> Iterator[None]:
        before, self._pass = self._pass, number
        try:
            yield
        finally:
            self._pass = before

    @property
    def _memory(self) -> int:
        """The number of the inbox, mailbox and buffer for this pass. A pass that is alone uses those of pass 0, because
        both are launched on one stream."""
        return max(self._pass, 0)

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        parts = x.new_empty((self.size, *x.shape))
        if x.numel():
            with marked("communication"):
                self._collectives.gather(x.contiguous(), parts)
        return lambda: parts

    def dispatch_place(self, like: Tensor) -> Tensor | None:
        buffer = self._dispatch_buffer(like)
        return None if buffer is None else buffer.own_place(like)

    def _dispatch_buffer(self, x: Tensor) -> DispatchBuffer | None:
        """Return the buffer for the tokens x of this pass; None: they are gathered in a new tensor."""
        if self._pass == _ALONE or not self._dispatches:
            return None
        buffer = self._dispatches[self._pass]
        is_copied = exchange_for(x.nbytes, x.dtype, self._limits[self._pass]) == "copied"
        return buffer if is_copied and x.nbytes <= buffer.capacity else None

    def start_dispatch(self, x: Tensor) -> Callable[[], Tensor]:
        if (buffer := self._dispatch_buffer(x)) is not None:
            with marked("communication"):
                received = buffer.gather(_aligned(x)).view(self.size, *x.shape)
            self._unread[self._pass] = buffer
            return lambda: received
        parts = x.new_empty((self.size, *x.shape))
        if x.numel():
            with marked("communication"):
                self.gathered(_aligned(x), parts, exchange_for(x.nbytes, x.dtype, self._limits[self._pass]))
        return lambda: parts

    def start_scatter_sum(self, parts: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        if (buffer := self._unread.pop(self._pass, None)) is not None:
            buffer.release()
        parts = _aligned(parts)
        out = torch.empty_like(parts[0])
        if parts.numel():
            with marked("communication"):
                algorithm = exchange_for(out.nbytes, out.dtype, self._limits[self._pass])
                self.scattered(parts, residual, out, algorithm)
        elif residual is not None:
            out.copy_(residual)
        return lambda: out

    def agree(self, values: Sequence[int]) -> list[list[int]]:
        assert self._host is not None, "the hosts of these ranks are not connected"
        if _is_fake(torch.empty(0)):
            return [list(values)] * self.size
        return self._host.agree(values)

    def gathered(self, x: Tensor, parts: Tensor, algorithm: Algorithm) -> None:
        """Write the x of each rank to `parts`, (size, *x.shape), by one of the algorithms."""
        run = self._collectives
        if algorithm == "one_shot":
            inbox = self._inboxes[self._memory]
            for piece, _, own in _pieces_of_parts(parts.view(self.size, -1), None, x.view(-1), inbox.capacity):
                run.one_shot_gather(own, piece, inbox, is_alone=self._pass == _ALONE)
        elif algorithm == "copied":
            mailbox = self._mailboxes[self._memory]
            for piece, _, own in _pieces_of_parts(parts.view(self.size, -1), None, x.view(-1), mailbox.capacity):
                run.copied_gather(own, piece, mailbox)
        else:
            run.gather(x, parts)

    def scattered(self, parts: Tensor, residual: Tensor | None, out: Tensor, algorithm: Algorithm) -> None:
        """Write the sum over ranks of their part for this one to `out`, by one of the algorithms."""
        run, flat, parts = self._collectives, out.view(-1), parts.view(self.size, -1)
        rest = None if residual is None else residual.contiguous().view(-1)
        if algorithm == "one_shot":
            inbox = self._inboxes[self._memory]
            for piece, more, added in _pieces_of_parts(parts, rest, flat, inbox.capacity):
                run.one_shot_scatter(piece, more, added, inbox, is_alone=self._pass == _ALONE)
        elif algorithm == "copied":
            mailbox = self._mailboxes[self._memory]
            for piece, more, added in _pieces_of_parts(parts, rest, flat, mailbox.capacity):
                run.copied_scatter(piece, more, added, mailbox)
        else:
            received = torch.empty_like(parts)
            run.exchange(parts, received)
            run.add_parts(received, rest, flat)

    def start_sum(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        return self._start_sum(x, residual, in_place=False)

    def _start_sum(self, x: Tensor, residual: Tensor | None, *, in_place: bool) -> Callable[[], Tensor]:
        algorithm = algorithm_for(x.nbytes, x.dtype, self._limits[self._pass], fixed_order=self._fixed_order)
        fuses = algorithm in ("one_shot", "copied") and residual is not None and residual.dtype == x.dtype
        with marked("communication"):
            total = self.added(x, algorithm, residual if fuses else None, in_place=in_place) if x.numel() else x
        return lambda: total if residual is None or fuses else residual + total

    def start_normed_sum(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch a sum, and with it the norm if it is not large and no other sum can run at the same time. The kernel
        adds the squares of a line in another order than the norm's own kernel, so `fixed_order` uses the norm's own
        kernel for all sizes."""
        if self._pass != _ALONE or self._fixed_order or not self._norms(x_TE, residual_TE, norm):
            total = self._start_sum(x_TE, residual_TE, in_place=True)
            return lambda: (total(), None)
        x_TE, residual_TE = x_TE.contiguous(), residual_TE.contiguous()
        two_shot = self._alone_algorithm(x_TE) == "two_shot"
        with marked("communication"):
            both = self._collectives.sum_norm(x_TE, residual_TE, norm, self._inboxes[0], two_shot=two_shot)
        return lambda: both

    def _norms(self, x_TE: Tensor, residual_TE: Tensor, norm: Norm) -> bool:
        if self._alone_algorithm(x_TE) not in ("one_shot", "two_shot"):
            return False
        fits = 0 < x_TE.nbytes <= self._inboxes[0].capacity and x_TE.storage_offset() * x_TE.itemsize % ALIGNMENT == 0
        return fits and residual_TE.dtype == norm.weight.dtype == x_TE.dtype and self._collectives.can_norm(x_TE)

    def _alone_algorithm(self, x: Tensor) -> Algorithm:
        return algorithm_for(x.nbytes, x.dtype, self._limits[_ALONE], fixed_order=False)

    def added(
        self, x: Tensor, algorithm: Algorithm, residual: Tensor | None = None, *, in_place: bool = False
    ) -> Tensor:
        """Return the sum by one of the algorithms, in new memory. `residual`: a tensor to add to a one-shot or copied
        sum. `in_place`: NCCL may write the sum to x, so that a large tensor is not copied first."""
        if algorithm == "gather":
            wide = torch.promote_types(x.dtype, torch.float32)  # so that it is rounded once, as a one-shot sum is
            return in_order(self.gather(x).to(wide)).to(x.dtype)
        x, run = _aligned(x), self._collectives
        out = x if in_place and algorithm == "nccl" else torch.empty_like(x)
        if algorithm == "one_shot":
            inbox = self._inboxes[self._memory]
            for piece, added, part in _pieces(x, residual, out, inbox.capacity):
                run.one_shot(piece, added, part, inbox, is_alone=self._pass == _ALONE)
        elif algorithm == "copied":
            mailbox = self._mailboxes[self._memory]
            # Two ranks send all of a piece; more send each other rank its part, and then their part of the sum.
            capacity = mailbox.capacity * (1 if self.size == 2 else self.size)
            for piece, added, part in _pieces(x, residual, out, capacity):
                run.copied(piece, added, part, mailbox)
        elif algorithm == "nccl":
            run.nccl(x, out)
        else:
            run.two_shot(x, out, self._buffers[self._memory])
        return out

    def close(self) -> None:
        """Close the group. No graph may still hold one of its operations, because NCCL would wait for the graph's
        end."""
        if not self._is_closed:
            self._is_closed = True
            self._collectives.close()
            self._inboxes.clear()  # operations that used the memory have ended now
            self._mailboxes.clear()
            self._dispatches.clear()
            self._unread.clear()
            self._buffers.clear()


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it, as a contiguous tensor whose address is aligned."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.itemsize % ALIGNMENT else x


def _pieces(
    x: Tensor, residual: Tensor | None, out: Tensor, num_bytes: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Divide all three tensors into pieces of at most `num_bytes` bytes."""
    if x.nbytes <= num_bytes:
        yield x, residual if residual is None else residual.contiguous(), out
        return
    count = num_bytes // x.itemsize
    xs, outs = x.view(-1).split(count), out.view(-1).split(count)
    residuals = [None] * len(xs) if residual is None else residual.contiguous().view(-1).split(count)
    yield from zip(xs, residuals, outs, strict=True)


def _pieces_of_parts(
    parts_GC: Tensor, residual_C: Tensor | None, own_C: Tensor, num_bytes: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Divide the elements of all three tensors into pieces of at most `num_bytes` bytes of each GPU."""
    count = num_bytes // own_C.itemsize
    if len(own_C) <= count:
        yield parts_GC, residual_C, own_C
        return
    for start in range(0, len(own_C), count):
        piece = slice(start, start + count)
        yield parts_GC[:, piece], None if residual_C is None else residual_C[piece], own_C[piece]


class TorchCollectives:
    """The operations by torch, NCCL and this project's kernels. `meeting`: a file that does not exist yet, by which the
    processes find each other. It raises RuntimeError if one of them does not come.

    The process group is registered under a name, because torch's kernels look it up by name. It is not the default one
    of `torch.distributed`, because each engine of a process has a group."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        # Triton is imported here, because it need not be installed on hosts without CUDA.
        from specbatch.kernels.triton.ranks import one_shot, peer_add

        disable_multicast()
        self._kernel, self._add_parts, self._add_received = one_shot, peer_add.add_parts, peer_add.add_received
        torch.cuda.set_device(device)
        self._rank, self._size, self._device, self._name = rank, size, device, f"specbatch {meeting}"
        c10d: Any = torch._C._distributed_c10d
        self._symmetric: Any = c10d._SymmetricMemory
        store = dist.FileStore(meeting, size)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FIRST_CONTACT
        self._nccl: Any = c10d.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        self._exchanges = ExchangeStore(store)  # kept, because torch holds no reference to its Python object
        self._processes = named_group(self._name, self._exchanges, rank, size, device, self._nccl)
        self._meet()  # the first operation connects the ranks, which is not possible during a capture

    def _meet(self) -> None:
        """Wait for all ranks."""
        one = torch.ones(1, device=self._device)
        self.nccl(one, one)
        assert one.item() == self._size, "the ranks do not add up"

    def new_buffer(self, num_bytes: int) -> Tensor:
        return self._shared(num_bytes)[0]

    def _shared(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Allocate memory that all ranks can address. Return it with torch's handle, which has its addresses on all
        ranks."""
        # `symmetric_memory.empty` is not used: buffers of its pool can share the words by which operations signal.
        buffer: Tensor = self._symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device, self._name)
        return buffer, self._symmetric.rendezvous(buffer, self._name)

    def new_inbox(self, capacity: int) -> Inbox:
        memory, shared = self._shared(self._kernel.inbox_bytes(capacity, self._size))
        memory.zero_()
        counts_K = torch.zeros(self._kernel.num_blocks(capacity), dtype=torch.int32, device=self._device)
        self._meet()  # so no rank writes into memory that is not zeroed yet
        addresses_G = torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=self._device)
        return self._kernel.Inbox(memory, addresses_G, counts_K, self._rank, capacity)

    def can_copy(self) -> bool:
        memories = self._memories(WORDS_BYTES)
        memories[self._rank].zero_()
        self._meet()
        found = has_stream_operations(memories, self._rank)
        self._meet()  # so no rank writes into memory that is not there any more
        return found

    def new_mailbox(self, num_bytes: int) -> Mailbox:
        return self._new_box(Mailbox, num_bytes)

    def new_dispatch_buffer(self, num_bytes: int) -> DispatchBuffer:
        return self._new_box(DispatchBuffer, num_bytes)

    def _new_box(self, kind: type[M], num_bytes: int) -> M:
        box = kind(self._memories(num_bytes + WORDS_BYTES), self._rank)
        box.reset()
        self._meet()
        return box

    def _memories(self, num_bytes: int) -> list[Tensor]:
        """Allocate memory that all ranks can address. Return that of each rank."""
        memory, shared = self._shared(num_bytes)
        others = range(self._size)
        return [memory if i == self._rank else shared.get_buffer(i, memory.shape, torch.uint8) for i in others]

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        self._kernel.one_shot_sum(x, residual, out, inbox, is_alone=is_alone)

    def can_norm(self, x_TE: Tensor) -> bool:
        return self._kernel.has_whole_blocks(x_TE)

    def sum_norm(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm, inbox: Inbox, *, two_shot: bool
    ) -> tuple[Tensor, Tensor]:
        total_TE, normed_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
        run = self._kernel.sum_norm
        run(x_TE, residual_TE, norm.weight, norm.eps, inbox, total_TE, normed_TE, two_shot=two_shot)
        return total_TE, normed_TE

    def copied(self, x: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        if self._size == 2:
            self._add_received(mailbox.exchange((x, x)), x, self._rank, residual, out)
            mailbox.release()
            return
        parts, sums = (tensor.view(self._size, -1) for tensor in (x, out))
        own = None if residual is None else residual.view(self._size, -1)[self._rank]
        self.copied_scatter(parts, own, sums[self._rank], mailbox)
        self._copied_to_others(sums[self._rank], sums, mailbox)

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None:
        if _is_fake(x):
            return
        torch.ops.symm_mem.two_shot_all_reduce_out(beginning(buffer, x).copy_(x), "sum", self._name, out)

    def nccl(self, x: Tensor, out: Tensor) -> None:
        if _is_fake(x):
            return
        if out is not x:
            out.copy_(x)
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, False  # not async, so it runs on the current stream
        _wait(self._nccl.allreduce([out], options))

    def gather(self, x: Tensor, parts: Tensor) -> None:
        if _is_fake(x):
            return
        options: Any = torch._C._distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self._nccl._allgather_base(parts.view(-1), x.view(-1), options))

    def one_shot_gather(self, x: Tensor, parts: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        self._kernel.one_shot_gather(x, parts, inbox, is_alone=is_alone)

    def one_shot_scatter(
        self, parts: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool
    ) -> None:
        self._kernel.one_shot_scatter(parts, residual, out, inbox, is_alone=is_alone)

    def copied_gather(self, x: Tensor, parts: Tensor, mailbox: Mailbox) -> None:
        parts[self._rank].copy_(x.view(-1))
        self._copied_to_others(x, parts, mailbox)

    def _copied_to_others(self, x: Tensor, parts: Tensor, mailbox: Mailbox) -> None:
        """Write the x of each other rank to `parts`."""
        received = mailbox.exchange([x] * self._size)
        if self._rank > 0:
            parts[: self._rank].copy_(received[: self._rank])
        if self._rank < self._size - 1:
            parts[self._rank + 1 :].copy_(received[self._rank :])
        mailbox.release()

    def copied_scatter(self, parts: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        received = mailbox.exchange(parts.unbind())
        self._add_received(received, parts[self._rank], self._rank, residual, out)
        mailbox.release()

    def exchange(self, parts: Tensor, received: Tensor) -> None:
        if _is_fake(parts):
            return
        options: Any = torch._C._distributed_c10d.AllToAllOptions()
        options.asyncOp = False
        _wait(self._nccl.alltoall_base(received.view(-1), parts.view(-1), [], [], options))

    def add_parts(self, parts: Tensor, residual: Tensor | None, out: Tensor) -> None:
        self._add_parts(parts, residual, out)

    def close(self) -> None:
        """Close the group without waiting for other ranks, which may have ended already."""
        c10d: Any = torch._C._distributed_c10d
        c10d._unregister_process_group(self._name)
        self._nccl.abort()


def named_group(
    name: str, store: dist.Store, rank: int, size: int, device: torch.device, backend: Any
) -> dist.ProcessGroup:
    """Register a process group that torch's kernels find by `name`. They get from it the store by which ranks exchange
    the handles of their buffers."""
    c10d: Any = torch._C._distributed_c10d
    store, kind = dist.PrefixStore("symmetric", store), dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(store, rank, size)
    backend_type = kind.NCCL if device.type == "cuda" else kind.GLOO
    group._register_backend(device, backend_type, backend)
    group._set_default_backend(backend_type)
    group._set_group_name(name)
    group._set_group_desc(name)
    c10d._register_process_group(name, group)
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)  # older versions of torch look this up
    found: dist.ProcessGroup = group
    return found


def _is_fake(x: Tensor) -> bool:
    """Return whether the tensor is from a run that only compiles kernels, which sends nothing."""
    return isinstance(x, FakeTensor)


def _wait(work: Any) -> None:
    """Wait for an operation on the current stream. It is None, or the stream waits for it and the host does not."""
    if work is not None:
        work.wait()
