"""The checks of `engine.deterministic`: a row's tokens must not depend on the rows that are computed together with
it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping

import torch

from specbatch.engine.cpu_threads import limit_threads
from specbatch.errors import ConfigError
from specbatch.kernels.cublaslt import library_version
from specbatch.models.linears.packed import is_packable
from specbatch.setup.device import DTYPE_NAMES

# Each changes which instructions oneDNN or MKL uses, or their precision.
_CPU_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


def check_deterministic(device: torch.device, dtype: torch.dtype, attention: str) -> None:
    """Raises ConfigError for what is not invariant."""
    if device.type != "cuda":
        _check_cpu(dtype)
        return
    if attention != "triton":
        raise ConfigError(
            f"engine.deterministic needs engine.attention triton on CUDA, not {attention}: sums depend on the batch",
            hint="leave engine.attention out (and install triton, if it is missing)",
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"engine.deterministic needs bfloat16 or float16 on CUDA, not {DTYPE_NAMES[dtype]}: tensor cores add in a "
            "fixed order, and other GEMMs do not",
            hint="leave model.dtype out",
        )


def _check_cpu(dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        raise ConfigError(
            f"engine.deterministic needs float32 on a CPU, not {DTYPE_NAMES[dtype]}", hint="leave model.dtype out"
        )
    if not is_packable(torch.empty(0, dtype=dtype)):
        raise ConfigError(
            "engine.deterministic needs oneDNN on a CPU, and this torch has none",
            hint="install torch from PyPI, or leave engine.deterministic out",
        )


def check_kv_dtype(device: torch.device, kv_dtype: torch.dtype) -> None:
    """Raises ConfigError for a KV cache whose attention is not invariant."""
    if device.type == "cuda" and kv_dtype == torch.float8_e4m3fn:
        raise ConfigError(
            "engine.deterministic does not run with an FP8 KV cache on CUDA: equal bits were not shown there",
            hint="leave engine.kv_dtype out",
        )


def bits_depend_on(device: torch.device, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what the bits of a deterministic run depend on, in addition to its configuration, model files and device.
    Raise ConfigError if cuBLASLt is missing."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        return found | {"triton": importlib.metadata.version("triton"), "cuBLASLt": str(_cublaslt_version())}
    limit_threads()  # The engine limits the threads in the same way when it is built.
    # Processors of one name can differ in these: a virtual machine can hide some.
    found |= {"threads": str(torch.get_num_threads()), "instructions": torch.backends.cpu.get_cpu_capability()}
    return found | {name: environment[name] for name in _CPU_VARIABLES if environment.get(name)}


def _cublaslt_version() -> int:
    try:
        return library_version()
    except OSError as error:
        raise ConfigError(
            f"engine.deterministic needs cuBLASLt on CUDA, and this torch has none: {error}",
            hint="install torch from PyPI, or leave engine.deterministic out",
        ) from error
