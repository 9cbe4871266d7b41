"""cuBLASLt's matrix products with an algorithm of one's own choice, by ctypes: torch offers none.

Names and numbers are those of cublasLt.h (CUDA 12 and 13). Everything row-major here is column-major there: Y^T (O, M)
= W (O, I) X^T (I, M), the weight transposed.

Shape suffixes: M rows, I input features, O output features.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch
from torch import Tensor

from specbatch.kernels.shared_memory import like_hopper

WORKSPACE_BYTES = 64 * 2**20
_MOST_ALGORITHMS = 32
_COMPUTE_32F, _R_32F = 68, 0
DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA, _PREF_MAX_WORKSPACE_BYTES, _OP_T = 3, 1, 1


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first 64 bytes are the algorithm."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLt:
    """The library, and a workspace for launches in order on one stream at a time. `dtype` is bfloat16 or float16.

    Raises OSError where the library is not there, RuntimeError where it refuses.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._lib = _load()
        self.version = int(self._lib.cublasLtGetVersion())
        self.device = device
        self.dtype = dtype
        self.is_hopper = like_hopper(device)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        _check(self._lib.cublasLtCreate(byref(self._handle)))
        self._desc = c_void_p()
        _check(self._lib.cublasLtMatmulDescCreate(byref(self._desc), _COMPUTE_32F, _R_32F))
        _check(self._lib.cublasLtMatmulDescSetAttribute(self._desc, _DESC_TRANSA, byref(c_int(_OP_T)), 4))
        self._preference = c_void_p()
        _check(self._lib.cublasLtMatmulPreferenceCreate(byref(self._preference)))
        limit = c_uint64(WORKSPACE_BYTES)
        _check(
            self._lib.cublasLtMatmulPreferenceSetAttribute(
                self._preference, _PREF_MAX_WORKSPACE_BYTES, byref(limit), ctypes.sizeof(limit)
            )
        )

    def layouts(self, num_rows: int, num_out: int, num_in: int) -> tuple[c_void_p, c_void_p, c_void_p]:
        """Of the weight, x and y. They live as long as the process; each is a few bytes."""
        dtype = DTYPES[self.dtype]
        made = []
        for rows, columns in ((num_in, num_out), (num_in, num_rows), (num_out, num_rows)):
            layout = c_void_p()
            _check(self._lib.cublasLtMatrixLayoutCreate(byref(layout), dtype, rows, columns, rows))
            made.append(layout)
        return made[0], made[1], made[2]

    def algorithms(self, num_rows: int, num_out: int, num_in: int) -> list[Algorithm]:
        """What the library's heuristic proposes, its favourite first: the same list for the same library and GPU.
        (What it proposes for nearby numbers of rows is next to never faster.)"""
        weight, x, y = self.layouts(num_rows, num_out, num_in)
        found, count = (Algorithm * _MOST_ALGORITHMS)(), c_int()
        _check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._desc, weight, x, y, y, self._preference, _MOST_ALGORITHMS, found, byref(count)
            )
        )
        return [found[i] for i in range(count.value) if found[i].state == 0]

    def launch(
        self,
        layouts: tuple[c_void_p, c_void_p, c_void_p],
        algorithm: Algorithm,
        x_MI: Tensor,
        weight_OI: Tensor,
        y_MO: Tensor,
        accumulate: bool,
    ) -> None:
        """y = x W^T, or y += x W^T. All contiguous."""
        weight, x, y = layouts
        _check(
            self._lib.cublasLtMatmul(
                self._handle,
                self._desc,
                byref(_ONE),
                weight_OI.data_ptr(),
                weight,
                x_MI.data_ptr(),
                x,
                byref(_ONE if accumulate else _ZERO),
                y_MO.data_ptr(),
                y,
                y_MO.data_ptr(),
                y,
                byref(algorithm.algo),
                self._workspace.data_ptr(),
                WORKSPACE_BYTES,
                torch.cuda.current_stream(self.device).cuda_stream,
            )
        )


_ONE, _ZERO = c_float(1.0), c_float(0.0)


def _load() -> ctypes.CDLL:
    """The library that torch has loaded: the same file, by the same name."""
    major = (torch.version.cuda or "").split(".")[0]
    lib = ctypes.CDLL(f"libcublasLt.so.{major}")
    handle, out = c_void_p, POINTER(c_void_p)
    lib.cublasLtGetVersion.restype = c_size_t
    lib.cublasLtCreate.argtypes = [out]
    lib.cublasLtMatmulDescCreate.argtypes = [out, c_int, c_int]
    lib.cublasLtMatmulDescSetAttribute.argtypes = [handle, c_int, c_void_p, c_size_t]
    lib.cublasLtMatrixLayoutCreate.argtypes = [out, c_int, c_uint64, c_uint64, c_int64]
    lib.cublasLtMatmulPreferenceCreate.argtypes = [out]
    lib.cublasLtMatmulPreferenceSetAttribute.argtypes = [handle, c_int, c_void_p, c_size_t]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [handle] * 7 + [c_int, POINTER(Algorithm), POINTER(c_int)]
    lib.cublasLtMatmul.argtypes = [handle] * 14 + [c_size_t, c_void_p]
    return lib


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
