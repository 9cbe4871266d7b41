"""NVLink multicast stays off. A program that is killed during such an operation can leave the switch in a state in
which the GPUs of a host cannot be used until a reset. And ranks are killed when their job is killed."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def disable_multicast(environment: MutableMapping[str, str] = os.environ) -> None:
    """Switch multicast off in NCCL, torch and NVSHMEM, which read these variables when they are first used. Processes
    that this one starts inherit them. Another value is overwritten, because nothing here uses multicast."""
    environment.update(_OFF)
