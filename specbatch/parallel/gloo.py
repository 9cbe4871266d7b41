"""A group of processes of one host, without a GPU."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from specbatch.parallel.group import Group

_FIRST_CONTACT = timedelta(minutes=5)  # until all ranks have started
_LOOPBACK = "127.0.0.1"


class GlooGroup(Group):
    """By Gloo over the loopback interface, which no other host can reach. `meeting`: a file that does not exist yet, by which
    they find each other. Raises RuntimeError if one of them does not come."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _FIRST_CONTACT
        self._store = dist.FileStore(meeting, size)
        self._processes = dist.ProcessGroupGloo(self._store, rank, size, options)
        self._processes.barrier().wait()

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            self._processes._allgather_base(parts.view(-1), x.view(-1)).wait()
        return parts
