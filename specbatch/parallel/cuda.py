"""A group of processes of one host with a GPU each.

Everything is launched on the caller's stream, so that a CUDA graph holds it together with what comes before and after.
Memory that the others read is allocated, and made known to them, before the first graph is captured: a graph holds its
address. Two passes at the same time (`models/stages.py`) have an inbox and a buffer each: an operation signals by words
that belong to them.

One-shot sums are a kernel of this project (`kernels/triton/one_shot.py`), two-shot sums are torch's
(`torch.ops.symm_mem`), and the rest is NCCL's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specbatch.marks import marked
from specbatch.parallel.algorithms import ALIGNMENT, Algorithm, algorithm_for, buffer_bytes, inbox_capacity, limits_for
from specbatch.parallel.exchanges import ExchangeStore
from specbatch.parallel.group import Group, in_order
from specbatch.parallel.multicast import disable_multicast

if TYPE_CHECKING:
    from specbatch.kernels.triton.one_shot import Inbox  # needs Triton

_FIRST_CONTACT = timedelta(minutes=5)  # until all ranks have started


class Collectives(Protocol):
    """Operations of all ranks, launched on the current stream. `buffer`: uint8, one of `new_buffer`, which no other
    operation uses at the same time."""

    def new_buffer(self, num_bytes: int) -> Tensor:
        """That the other ranks can read. All ranks call it in the same order."""
        ...

    def new_inbox(self, capacity: int, *, is_alone: bool) -> Inbox:
        """Of tensors of up to `capacity` bytes. All ranks call it in the same order. `is_alone`: see `Inbox`."""
        ...

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox) -> None:
        """The sum, and the residual to it. `inbox`: one of `new_inbox`, as for a buffer."""
        ...

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None: ...

    def nccl(self, x: Tensor, out: Tensor) -> None: ...

    def gather(self, x: Tensor, parts: Tensor) -> None:
        """`parts`: (size, *x.shape)."""
        ...

    def close(self) -> None: ...


class CudaGroup(Group):
    """`fixed_order`: sums are added in the order of ranks whatever their size, for engine.deterministic. `two_passes`:
    they may run at the same time."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        collectives: Collectives,
        *,
        fixed_order: bool,
        two_passes: bool = False,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._collectives, self._fixed_order = collectives, fixed_order
        self._limits = limits_for(size, two_passes=two_passes)
        capacity, num_bytes, passes = inbox_capacity(self._limits), buffer_bytes(self._limits), range(1 + two_passes)
        is_alone = not two_passes
        self._inboxes = [collectives.new_inbox(capacity, is_alone=is_alone) for _ in passes] if capacity else []
        self._buffers = [collectives.new_buffer(num_bytes) for _ in passes] if num_bytes else []
        self._pass, self._is_closed = 0, False

    @contextlib.contextmanager
    def _in_pass(self, number: int) -> Iterator[None]:
        before, self._pass = self._pass, number
        try:
            yield
        finally:
            self._pass = before

    def second_pass(self) -> AbstractContextManager[object]:
        return self._in_pass(1)

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        parts = x.new_empty((self.size, *x.shape))
        if x.numel():
            with marked("communication"):
                self._collectives.gather(x.contiguous(), parts)
        return lambda: parts

    def start_sum(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        algorithm = algorithm_for(x.nbytes, x.dtype, self._limits, fixed_order=self._fixed_order)
        fuses = algorithm == "one_shot" and residual is not None and residual.dtype == x.dtype
        with marked("communication"):
            total = self.added(x, algorithm, residual if fuses else None) if x.numel() else x
        return lambda: total if residual is None or fuses else residual + total

    def added(self, x: Tensor, algorithm: Algorithm, residual: Tensor | None = None) -> Tensor:
        """The sum by one of the algorithms, in memory of its own. `residual`: to add to a one-shot sum."""
        if algorithm == "gather":
            wide = torch.promote_types(x.dtype, torch.float32)  # rounded once, as by a one-shot sum
            return in_order(self.gather(x).to(wide)).to(x.dtype)
        x, run = x.contiguous(), self._collectives
        if x.storage_offset() * x.itemsize % ALIGNMENT:
            x = x.clone()
        out = torch.empty_like(x)
        if algorithm == "one_shot":
            self._add_in_inbox(x, residual, out)
        elif algorithm == "nccl":
            run.nccl(x, out)
        else:
            run.two_shot(x, out, self._buffers[self._pass])
        return out

    def _add_in_inbox(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """In pieces, where it is large."""
        inbox = self._inboxes[self._pass]
        count = inbox.capacity // x.itemsize
        xs, outs = x.view(-1).split(count), out.view(-1).split(count)
        residuals = [None] * len(xs) if residual is None else residual.contiguous().view(-1).split(count)
        for piece, added, part in zip(xs, residuals, outs, strict=True):
            self._collectives.one_shot(piece, added, part, inbox)

    def close(self) -> None:
        """No graph may hold an operation any more: NCCL would wait for its end."""
        if not self._is_closed:
            self._is_closed = True
            self._collectives.close()
            self._inboxes.clear()  # after operations that still used them have been ended
            self._buffers.clear()


class TorchCollectives:
    """`meeting`: a file that does not exist yet, by which the processes find each other. Raises RuntimeError if one of
    them does not come.

    The process group is registered under a name, for torch's kernels look it up there, but it is not the default one of
    `torch.distributed`: several engines of a process have one each."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        from specbatch.kernels.triton import one_shot  # Triton need not exist where CUDA does not

        disable_multicast()
        self._kernel = one_shot
        torch.cuda.set_device(device)
        self._rank, self._size, self._device, self._name = rank, size, device, f"specbatch {meeting}"
        c10d: Any = torch._C._distributed_c10d
        self._symmetric: Any = c10d._SymmetricMemory
        store = dist.FileStore(meeting, size)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FIRST_CONTACT
        self._nccl: Any = c10d.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        self._exchanges = ExchangeStore(store)  # kept: torch holds no reference to the part of it that is Python
        self._processes = named_group(self._name, self._exchanges, rank, size, device, self._nccl)
        self._meet()  # the first operation connects the ranks, which a capture could not

    def _meet(self) -> None:
        """Wait for all ranks."""
        one = torch.ones(1, device=self._device)
        self.nccl(one, one)
        assert one.item() == self._size, "the ranks do not add up"

    def new_buffer(self, num_bytes: int) -> Tensor:
        return self._shared(num_bytes)[0]

    def _shared(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """Memory, and its addresses on all ranks."""
        # Not `symmetric_memory.empty`: buffers of its pool can share the words by which operations signal.
        buffer: Tensor = self._symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device, self._name)
        return buffer, self._symmetric.rendezvous(buffer, self._name).buffer_ptrs

    def new_inbox(self, capacity: int, *, is_alone: bool) -> Inbox:
        memory, addresses = self._shared(self._kernel.inbox_bytes(capacity, self._size))
        memory.zero_()
        counts_K = torch.zeros(self._kernel.num_blocks(capacity), dtype=torch.int32, device=self._device)
        self._meet()  # nobody writes into memory that is not zeroed yet
        addresses_G = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        return self._kernel.Inbox(memory, addresses_G, counts_K, self._rank, capacity, is_alone)

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox) -> None:
        self._kernel.one_shot_sum(x, residual, out, inbox)

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None:
        if _is_fake(x):
            return
        torch.ops.symm_mem.two_shot_all_reduce_out(_as(x, buffer).copy_(x), "sum", self._name, out)

    def nccl(self, x: Tensor, out: Tensor) -> None:
        if _is_fake(x):
            return
        if out is not x:
            out.copy_(x)
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, False  # not async: on the current stream
        _wait(self._nccl.allreduce([out], options))

    def gather(self, x: Tensor, parts: Tensor) -> None:
        if _is_fake(x):
            return
        options: Any = torch._C._distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self._nccl._allgather_base(parts.view(-1), x.view(-1), options))

    def close(self) -> None:
        """Other ranks may have ended already, so that nothing waits for them."""
        c10d: Any = torch._C._distributed_c10d
        c10d._unregister_process_group(self._name)
        self._nccl.abort()


def named_group(
    name: str, store: dist.Store, rank: int, size: int, device: torch.device, backend: Any
) -> dist.ProcessGroup:
    """A process group that torch's kernels find by `name`: they get the store from it by which ranks exchange the
    handles of their buffers."""
    c10d: Any = torch._C._distributed_c10d
    store, kind = dist.PrefixStore("symmetric", store), dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(store, rank, size)
    backend_type = kind.NCCL if device.type == "cuda" else kind.GLOO
    group._register_backend(device, backend_type, backend)
    group._set_default_backend(backend_type)
    group._set_group_name(name)
    group._set_group_desc(name)
    c10d._register_process_group(name, group)
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)  # what older versions look up
    found: dist.ProcessGroup = group
    return found


def _is_fake(x: Tensor) -> bool:
    """Of a run that only compiles kernels: it sends nothing."""
    return isinstance(x, FakeTensor)


def _as(x: Tensor, buffer: Tensor) -> Tensor:
    """The beginning of the buffer, of the shape and dtype of x."""
    return buffer[: x.nbytes].view(x.dtype).view(x.shape)


def _wait(work: Any) -> None:
    """What runs on the current stream gives nothing to wait for, or something that is waited for by the stream."""
    if work is not None:
        work.wait()
