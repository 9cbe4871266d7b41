# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The launch of kernels, or their compilation without a launch.

Programmatic dependent launch (Hopper): a kernel starts while the one before it drains. Such a kernel must call
`await_former` before it reads what another kernel wrote, or writes what another may still read. Its work before the
call (addresses, weights) overlaps. A chain stays in order: a kernel is complete only after its wait, so a wait for the
last one is a wait for all.
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
    """Let the next kernel start, which will wait for this one, and wait for the kernel before this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def has_dependent_launch(device_index: int) -> bool:
    """Return whether the GPU is NVIDIA's and has compute capability 9 or later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)


def dependent_launch(tensor: torch.Tensor) -> bool:
    """Return whether kernels over `tensor` have programmatic dependent launch: not in Triton's interpreter, nor on
    older GPUs."""
    return tensor.is_cuda and has_dependent_launch(tensor.get_device())


def launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}  # the interpreter does not have this option


def launch(kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch `kernel[grid](*args, **options)`. Over fake tensors, which have no memory, the kernel is only compiled."""
    if FakeTensor not in map(type, args):
        kernel[grid](*args, **options)
        return
    kernel.warmup(*(_Address(arg) if type(arg) is FakeTensor else arg for arg in args), grid=grid, **options)


class _Address:
    """The attributes of a tensor that Triton reads: its dtype, and its address for the alignment. Here a tensor's
    memory begins at address 0."""

    def __init__(self, fake: FakeTensor) -> None:
        self.dtype, self._offset = fake.dtype, int(fake.storage_offset()) * fake.element_size()

    def data_ptr(self) -> int:
        return self._offset
