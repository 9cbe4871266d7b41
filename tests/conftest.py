"""Settings that must be made before anything else.

Triton kernels run in its interpreter where there is no GPU; it must be told before triton is imported. Two processes
run the tests, with one thread each for torch: two threads each would fight over two cores.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
