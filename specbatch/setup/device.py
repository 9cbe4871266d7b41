"""Decides the device and the dtype of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.config import DtypeName
from specbatch.errors import ConfigError
from specbatch.setup.nvidia import Driver, find_driver, hidden_gpus, why_unused

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
_AMPERE = (8, 0)  # the first with bfloat16 in its tensor cores


def resolve_device(name: str, notes: list[str], driver: Callable[[], Driver | None] = find_driver) -> torch.device:
    """Warns of a GPU that `auto` cannot use. `driver`: for tests.

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
    """`capability_of`: for tests. Raises ConfigError for bfloat16 on a GPU that has none."""
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
