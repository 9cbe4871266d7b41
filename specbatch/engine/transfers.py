"""Copies between host and device, for which no call waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.out_of_memory import is_out_of_memory


class Transfers:
    """Copies between host and device. On CUDA they use pinned memory, whose allocator reuses a block only when its
    copies are done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor on the host. Its upload needs no additional copy."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)

    def upload(self, array: np.ndarray | Tensor) -> Tensor:
        """A copy on the device, ordered before what is launched next. A tensor is one of `host_tensor`, which must not
        change any more."""
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        if not self._is_cuda:
            return tensor.clone()
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        """Start a copy to the host, ordered after what was launched last."""
        if not self._is_cuda:
            return Download(tensor.clone(), None)
        try:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Download(tensor.cpu(), None)  # slower, but what was launched is not lost
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Download(host, event)


class Download:
    """A copy under way."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._event = event

    @property
    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        array: np.ndarray = self._host.numpy()
        return array
