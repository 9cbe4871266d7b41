"""Decides the device and the dtype of a run, and says why torch does not use an NVIDIA GPU of the machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specbatch.config import DtypeName
from specbatch.errors import ConfigError

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
_AMPERE = (8, 0)  # the first with bfloat16 in its tensor cores
# The oldest driver for each major version of CUDA (NVIDIA, minor version compatibility).
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
_PIP = "pip install --force-reinstall 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/"
_CUDA_12, _CUDA_13 = f"{_PIP}cu126", f"{_PIP}cu130"


@dataclass(frozen=True)
class Driver:
    """The facts about an NVIDIA driver that are known without torch."""

    version: str | None  # such as "535.104.05"
    has_device: bool  # a GPU's device file is there: not so in a container that was given none

    @property
    def major(self) -> int | None:
        return int(self.version.split(".")[0]) if self.version else None


def hidden_gpus() -> bool:
    """Return whether the user has hidden all GPUs from CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1", "none", "NoDevFiles")


def find_driver(root: Path = Path("/")) -> Driver | None:
    """Find the NVIDIA driver; None: no file shows an NVIDIA GPU. `root`: the root of the file system, for tests."""
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
    """Explain in two or three sentences why this torch does not use the GPU of the driver, and what to do."""
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


def resolve_device(name: str, notes: list[str], driver: Callable[[], Driver | None] = find_driver) -> torch.device:
    """Return the device of `engine.device`. A note warns of a GPU that `auto` cannot use. `driver`: a substitute of
    `find_driver` for tests.

    Raises ConfigError for a device that is none or is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            notes.append("engine.device: cuda (a CUDA device is there)")
            return torch.device("cuda")
        hidden = hidden_gpus()
        why = "CUDA_VISIBLE_DEVICES hides the GPUs" if hidden else "no CUDA device is there"
        notes.append(f"engine.device: cpu ({why})")
        if not hidden and (found := driver()) is not None:
            notes.append(
                "warning: this run uses the CPU, many times slower than the machine's NVIDIA GPU: "
                f"{why_unused(found)}; or set engine.device: cpu, if that is what you want"
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ConfigError(f"engine.device: {name!r} is no device", hint="use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {name!r} is not supported", hint="use auto, cpu or cuda")
    if device.type == "cpu":
        if device.index not in (None, 0):
            raise ConfigError(f"engine.device is {name}, but all processors are one device", hint="use cpu")
        return torch.device("cpu")
    if (device.index or 0) >= torch.cuda.device_count() > 0:
        raise ConfigError(f"engine.device is {name}, but there are {torch.cuda.device_count()} CUDA devices")
    if not torch.cuda.is_available():
        found = driver()
        raise ConfigError(
            "engine.device is cuda, but torch sees no CUDA device",
            hint="use engine.device: cpu" if found is None else why_unused(found),
        )
    return device


def resolve_dtype(
    name: str,
    device: torch.device,
    notes: list[str],
    capability_of: Callable[[torch.device], tuple[int, int]] | None = None,
) -> torch.dtype:
    """Return the data type of `engine.dtype`. `capability_of`: the compute capability of a GPU, for tests. Raise
    ConfigError for bfloat16 on a GPU that does not have it."""
    capability = _AMPERE if device.type == "cpu" else (capability_of or torch.cuda.get_device_capability)(device)
    before_ampere, number = capability < _AMPERE, ".".join(map(str, capability))
    if name == "auto" and before_ampere:
        name = "float16"
        notes.append(
            f"model.dtype: float16 (this GPU, of compute capability {number}, has no bfloat16; numbers above 65,504 "
            "become infinite in float16, and a model that makes such needs model.dtype: float32)"
        )
    elif name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
        notes.append(f"model.dtype: {name} (the default on {device.type})")
    elif name == "bfloat16" and before_ampere:
        raise ConfigError(
            f"model.dtype: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or later, and {device} has {number}",
            hint="use model.dtype: auto (float16 there) or float32",
        )
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)
