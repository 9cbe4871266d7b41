"""A group of processes of one host, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specbatch.kernels.trace_marks import marked
from specbatch.parallel.group import Group

_FIRST_CONTACT = timedelta(minutes=5)  # the longest wait until all ranks have started
_LOOPBACK = "127.0.0.1"


class GlooGroup(Group):
    """A group that communicates by Gloo over the loopback interface, which no other host can reach. `meeting`: a file
    that does not exist yet, by which the processes find each other. It raises RuntimeError if one of them does not
    come."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank, self.size = rank, size
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _FIRST_CONTACT
        self._store = dist.FileStore(meeting, size)
        self._processes = gloo(self._store, rank, size, options)
        self._processes.barrier().wait()

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype)
        under_way = self._processes._allgather_base(parts.view(-1), x.view(-1)) if x.numel() else None

        def gathered() -> Tensor:
            if under_way is not None:
                with marked("wait for ranks"):  # the part of communication that compute does not hide
                    under_way.wait()
            return parts

        return gathered
