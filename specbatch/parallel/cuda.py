"""A group of processes of one host with a GPU each.

Everything is launched on the caller's stream, so that a CUDA graph holds it together with what comes before and after.
Memory that the others read is allocated, and made known to them, before the first graph is captured: a graph holds its
address. Two passes at the same time (`models/stages.py`) have an inbox, a mailbox and a buffer each: an operation
signals by words that belong to them.

One-shot sums are a kernel of this project (`kernels/triton/ranks/one_shot.py`), as are the sums of what
copy engines brought (`copies.py`). Two-shot sums are torch's (`torch.ops.symm_mem`), and the rest is NCCL's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specbatch.kernels.trace_marks import marked
from specbatch.parallel.algorithms import (
    ALIGNMENT,
    MAILBOX,
    Algorithm,
    algorithm_for,
    buffer_bytes,
    inbox_capacity,
    limits_for,
)
from specbatch.parallel.copies import WORDS_BYTES, Mailbox, beginning, has_stream_operations
from specbatch.parallel.exchanges import ExchangeStore
from specbatch.parallel.group import Group, Norm, in_order
from specbatch.parallel.multicast import disable_multicast

if TYPE_CHECKING:
    from specbatch.kernels.triton.ranks.one_shot import Inbox  # needs Triton

_FIRST_CONTACT = timedelta(minutes=5)  # until all ranks have started
_ALONE = -1  # the number of a pass at whose time there is no other


class Collectives(Protocol):
    """Operations of all ranks, launched on the current stream. `buffer`: uint8, one of `new_buffer`, which no other
    operation uses at the same time."""

    def new_buffer(self, num_bytes: int) -> Tensor:
        """That the other ranks can read. All ranks call it in the same order."""
        ...

    def new_inbox(self, capacity: int) -> Inbox:
        """Of tensors of up to `capacity` bytes. All ranks call it in the same order."""
        ...

    def can_copy(self) -> bool:
        """Whether this rank's driver has what mailboxes need."""
        ...

    def new_mailbox(self, capacity: int) -> Mailbox:
        """As `new_inbox`, of two ranks."""
        ...

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        """The sum, and the residual to it. `inbox`: one of `new_inbox`, as for a buffer. `is_alone`: no other sum runs
        at the same time."""
        ...

    def can_norm(self, x_TE: Tensor) -> bool:
        """Whether `one_shot_norm` takes rows of this size."""
        ...

    def one_shot_norm(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm, out_TE: Tensor, normed_TE: Tensor, inbox: Inbox
    ) -> None:
        """`one_shot` of a sum that is alone, and the norm of the result."""
        ...

    def copied(self, x: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        """The same as `one_shot`, of two ranks."""
        ...

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None: ...

    def nccl(self, x: Tensor, out: Tensor) -> None: ...

    def gather(self, x: Tensor, parts: Tensor) -> None:
        """`parts`: (size, *x.shape)."""
        ...

    def close(self) -> None: ...


class CudaGroup(Group):
    """`fixed_order`: sums are added in the order of ranks whatever their size, for engine.deterministic. `two_passes`:
    there can be two at the same time."""

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
        alone, of_two = (limits_for(size, two_passes=two) for two in (False, True))
        copies = two_passes and of_two is not None and of_two.copied > 0
        if of_two is not None and copies and not self.least(int(collectives.can_copy())):
            copies, of_two = False, of_two._replace(copied=0)
        self._limits = (of_two, of_two, alone) if two_passes else (alone,) * 3  # by the pass; the last: it is alone
        capacity, num_bytes, passes = inbox_capacity(alone), buffer_bytes(alone), range(1 + two_passes)
        self._inboxes = [collectives.new_inbox(capacity) for _ in passes] if capacity else []
        self._buffers = [collectives.new_buffer(num_bytes) for _ in passes] if num_bytes else []
        self._mailboxes = [collectives.new_mailbox(MAILBOX) for _ in passes] if copies else []
        self._pass, self._is_closed = _ALONE, False

    @contextlib.contextmanager
    def one_of_two_passes(self, number: int) -> Iterator[None]:
        before, self._pass = self._pass, number
        try:
            yield
        finally:
            self._pass = before

    @property
    def _memory(self) -> int:
        """Which memory the pass has. One that is alone has the first's: they are launched on one stream."""
        return max(self._pass, 0)

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        parts = x.new_empty((self.size, *x.shape))
        if x.numel():
            with marked("communication"):
                self._collectives.gather(x.contiguous(), parts)
        return lambda: parts

    def start_sum(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        algorithm = algorithm_for(x.nbytes, x.dtype, self._limits[self._pass], fixed_order=self._fixed_order)
        fuses = algorithm in ("one_shot", "copied") and residual is not None and residual.dtype == x.dtype
        with marked("communication"):
            total = self.added(x, algorithm, residual if fuses else None) if x.numel() else x
        return lambda: total if residual is None or fuses else residual + total

    def start_normed_sum(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """The norm comes with one-shot sums of one piece, if no other sum runs at the same time. Its sum over a row is
        added in another order than by the norm's own kernel, so `fixed_order` has that kernel for all sizes."""
        if self._pass != _ALONE or self._fixed_order or not self._norms(x_TE, residual_TE, norm):
            return super().start_normed_sum(x_TE, residual_TE, norm)
        x_TE, residual_TE = x_TE.contiguous(), residual_TE.contiguous()
        total_TE, normed_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
        with marked("communication"):
            self._collectives.one_shot_norm(x_TE, residual_TE, norm, total_TE, normed_TE, self._inboxes[0])
        return lambda: (total_TE, normed_TE)

    def _norms(self, x_TE: Tensor, residual_TE: Tensor, norm: Norm) -> bool:
        if algorithm_for(x_TE.nbytes, x_TE.dtype, self._limits[_ALONE], fixed_order=False) != "one_shot":
            return False
        fits = 0 < x_TE.nbytes <= self._inboxes[0].capacity and x_TE.storage_offset() * x_TE.itemsize % ALIGNMENT == 0
        return fits and residual_TE.dtype == norm.weight.dtype == x_TE.dtype and self._collectives.can_norm(x_TE)

    def added(self, x: Tensor, algorithm: Algorithm, residual: Tensor | None = None) -> Tensor:
        """The sum by one of the algorithms, in memory of its own. `residual`: to add to a one-shot or copied sum."""
        if algorithm == "gather":
            wide = torch.promote_types(x.dtype, torch.float32)  # rounded once, as by a one-shot sum
            return in_order(self.gather(x).to(wide)).to(x.dtype)
        x, run = x.contiguous(), self._collectives
        if x.storage_offset() * x.itemsize % ALIGNMENT:
            x = x.clone()
        out = torch.empty_like(x)
        if algorithm == "one_shot":
            inbox = self._inboxes[self._memory]
            for piece, added, part in _pieces(x, residual, out, inbox.capacity):
                run.one_shot(piece, added, part, inbox, is_alone=self._pass == _ALONE)
        elif algorithm == "copied":
            mailbox = self._mailboxes[self._memory]
            for piece, added, part in _pieces(x, residual, out, mailbox.capacity):
                run.copied(piece, added, part, mailbox)
        elif algorithm == "nccl":
            run.nccl(x, out)
        else:
            run.two_shot(x, out, self._buffers[self._memory])
        return out

    def close(self) -> None:
        """No graph may hold an operation any more: NCCL would wait for its end."""
        if not self._is_closed:
            self._is_closed = True
            self._collectives.close()
            self._inboxes.clear()  # after operations that still used them have been ended
            self._mailboxes.clear()
            self._buffers.clear()


def _pieces(
    x: Tensor, residual: Tensor | None, out: Tensor, num_bytes: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Of all three, of at most `num_bytes`."""
    if x.nbytes <= num_bytes:
        yield x, residual if residual is None else residual.contiguous(), out
        return
    count = num_bytes // x.itemsize
    xs, outs = x.view(-1).split(count), out.view(-1).split(count)
    residuals = [None] * len(xs) if residual is None else residual.contiguous().view(-1).split(count)
    yield from zip(xs, residuals, outs, strict=True)


class TorchCollectives:
    """`meeting`: a file that does not exist yet, by which the processes find each other. Raises RuntimeError if one of
    them does not come.

    The process group is registered under a name, for torch's kernels look it up there, but it is not the default one of
    `torch.distributed`: several engines of a process have one each."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        # Triton need not exist where CUDA does not.
        from specbatch.kernels.triton.ranks import one_shot, peer_add

        disable_multicast()
        self._kernel, self._add_received = one_shot, peer_add.add_received
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

    def _shared(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Memory, and what is known of it on all ranks."""
        # Not `symmetric_memory.empty`: buffers of its pool can share the words by which operations signal.
        buffer: Tensor = self._symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device, self._name)
        return buffer, self._symmetric.rendezvous(buffer, self._name)

    def new_inbox(self, capacity: int) -> Inbox:
        memory, shared = self._shared(self._kernel.inbox_bytes(capacity, self._size))
        memory.zero_()
        counts_K = torch.zeros(self._kernel.num_blocks(capacity), dtype=torch.int32, device=self._device)
        self._meet()  # nobody writes into memory that is not zeroed yet
        addresses_G = torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=self._device)
        return self._kernel.Inbox(memory, addresses_G, counts_K, self._rank, capacity)

    def can_copy(self) -> bool:
        return has_stream_operations(self._device)

    def new_mailbox(self, capacity: int) -> Mailbox:
        memory, shared = self._shared(capacity + WORDS_BYTES)
        mailbox = Mailbox(memory, shared.get_buffer(1 - self._rank, (capacity + WORDS_BYTES,), torch.uint8))
        mailbox.reset()
        self._meet()
        return mailbox

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Inbox, *, is_alone: bool) -> None:
        self._kernel.one_shot_sum(x, residual, out, inbox, is_alone=is_alone)

    def can_norm(self, x_TE: Tensor) -> bool:
        return self._kernel.has_whole_blocks(x_TE)

    def one_shot_norm(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm, out_TE: Tensor, normed_TE: Tensor, inbox: Inbox
    ) -> None:
        self._kernel.one_shot_norm(x_TE, residual_TE, norm.weight, norm.eps, inbox, out_TE, normed_TE)

    def copied(self, x: Tensor, residual: Tensor | None, out: Tensor, mailbox: Mailbox) -> None:
        mailbox.send(x)
        self._add_received(x, mailbox.receive(x), residual, out)
        mailbox.release()

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


def _wait(work: Any) -> None:
    """What runs on the current stream gives nothing to wait for, or something that is waited for by the stream."""
    if work is not None:
        work.wait()
