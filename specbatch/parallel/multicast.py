"""NVLink multicast stays off: a program that is killed in the middle of such an operation can leave the switch in a
state in which the GPUs of a host cannot be used until it is reset, and ranks are killed when a job is."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def disable_multicast(environment: MutableMapping[str, str] = os.environ) -> None:
    """In NCCL, in torch and in NVSHMEM, which read this when they are first used. Processes that this one starts
    inherit it. Another value is overwritten: nothing here uses multicast."""
    environment.update(_OFF)
