# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""How kernels are launched, or only compiled.

Programmatic dependent launch (Hopper): a kernel starts while the one before it drains. A kernel launched so must call
`await_former` before it reads what another kernel wrote, or writes what another may still read; everything before the
call (addresses, weights) overlaps. A chain stays in order: a kernel is complete only after its own wait, so waiting for
the last one is waiting for all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor


@triton.jit
def await_former(PDL: tl.constexpr):
    """Lets the next kernel start, which waits for this one in turn, and waits for the kernel before this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def has_dependent_launch(device_index: int) -> bool:
    """Compute capability 9 or later, on NVIDIA's."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)


def dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether kernels over `tensor` are launched so: not in Triton's interpreter, nor on older GPUs."""
    return tensor.is_cuda and has_dependent_launch(tensor.get_device())


def launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}  # the interpreter does not have the option


def launch(kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`. Over fake tensors, which have no memory, the kernel is only compiled."""
    if FakeTensor not in map(type, args):
        kernel[grid](*args, **options)
        return
    kernel.warmup(*(_Address(arg) if type(arg) is FakeTensor else arg for arg in args), grid=grid, **options)


class _Address:
    """What Triton asks of a tensor: its dtype and its address, for its alignment. Memory begins at address 0 here."""

    def __init__(self, fake: FakeTensor) -> None:
        self.dtype, self._offset = fake.dtype, int(fake.storage_offset()) * fake.element_size()

    def data_ptr(self) -> int:
        return self._offset
