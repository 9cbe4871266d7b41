"""Why torch does not use the NVIDIA GPU of a machine, and what helps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

# The oldest driver for each major version of CUDA (NVIDIA, minor version compatibility).
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
_PIP = "pip install --force-reinstall 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/"
_CUDA_12, _CUDA_13 = f"{_PIP}cu126", f"{_PIP}cu130"


@dataclass(frozen=True)
class Driver:
    """What is known of an NVIDIA driver without torch."""

    version: str | None  # such as "535.104.05"
    has_device: bool  # a GPU's device file is there: not so in a container that was given none

    @property
    def major(self) -> int | None:
        return int(self.version.split(".")[0]) if self.version else None


def hidden_gpus() -> bool:
    """Whether the user has hidden all GPUs from CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1", "none", "NoDevFiles")


def find_driver(root: Path = Path("/")) -> Driver | None:
    """None where the machine has no NVIDIA GPU, as far as files show. `root`: for tests."""
    device = (root / "dev/nvidia0").exists() or (root / "dev/dxg").exists()  # dxg: Windows' GPUs under WSL
    proc, program = root / "proc/driver/nvidia/version", shutil.which("nvidia-smi")
    if proc.is_file():
        text = proc.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
        return Driver(found[1] if found else None, device)
    if program is None:
        return Driver(None, True) if (root / "dev/nvidia0").exists() else None
    try:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return Driver(None, device)
    found = re.match(r"\d+(?:\.\d+)+", answer.stdout)
    # Without a GPU the program may be there and say so: images bring it along.
    return Driver(found[0], True) if found and answer.returncode == 0 else Driver(None, device) if device else None


def why_unused(driver: Driver, torch_version: str = torch.__version__, cuda: str | None = torch.version.cuda) -> str:
    """Why this torch does not use the GPU of that driver, and the mend: two or three sentences."""
    version, major = driver.version or "unknown", driver.major
    known = f"NVIDIA driver {version}, torch {torch_version}, CUDA {cuda or 'none'}"
    newest = _CUDA_12 if major is not None and major < _MIN_DRIVER[13] else _CUDA_13
    if cuda is None:
        return f"this torch is built for CPUs only ({known}). Install a CUDA build: {newest}"
    needed = _MIN_DRIVER.get(int(cuda.split(".")[0]))
    if major is not None and needed is not None and major < needed:
        other = f", or install a build for CUDA 12: {_CUDA_12}" if _MIN_DRIVER[12] <= major else ""
        return f"the driver is too old for this torch ({known}). Update the driver to {needed} or later{other}"
    if not driver.has_device:
        return f"no GPU is visible here ({known}). Start a container with its GPUs: docker run --gpus all"
    return f"torch cannot use it ({known}). To see why, run: python -c 'import torch; torch.cuda.init()'"
