"""GEMMs of cuBLASLt by an algorithm that the caller chooses. They are called through ctypes, because torch offers no
choice.

The algorithm that torch takes depends on the number of tokens and on the library's version. A fixed one gives the same
bits at every start.

Names and numbers are those of cublasLt.h (CUDA 12 and 13). A row-major matrix here is column-major there: Y^T (O, M)
= W (O, I) X^T (I, M), with the weight transposed.

Shape suffixes: M tokens, I input features, O output features.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

WORKSPACE_BYTES = 64 * 2**20
_MAX_ALGORITHMS = 32
_ALIGNMENT = 256  # bytes
_COMPUTE_32F, _R_32F = 68, 0
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA, _OP_T = 3, 1
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEMES, _NO_REDUCTION = 1, 3, 0
_CONFIG_SPLITS, _CONFIG_REDUCTION = 2, 3


class Algorithm(ctypes.Structure):
    """The type cublasLtMatmulHeuristicResult_t. Its first 64 bytes are the algorithm."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLt:
    """The library, and a workspace for launches in order on one stream at a time. `dtype` is bfloat16 or float16.
    `unsplit`: use only algorithms that add the input features in one part.

    It raises OSError if the library is missing, and RuntimeError if it refuses a call.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, unsplit: bool = False) -> None:
        self._lib = _load()
        self.device = device
        self.dtype = dtype
        self._known_layouts: dict[tuple[int, int, int], tuple[c_void_p, c_void_p, c_void_p]] = {}
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        _check(self._lib.cublasLtCreate(byref(self._handle)))
        self._desc = c_void_p()
        _check(self._lib.cublasLtMatmulDescCreate(byref(self._desc), _COMPUTE_32F, _R_32F))
        _check(self._lib.cublasLtMatmulDescSetAttribute(self._desc, _DESC_TRANSA, byref(c_int(_OP_T)), 4))
        self._preference = c_void_p()
        _check(self._lib.cublasLtMatmulPreferenceCreate(byref(self._preference)))
        self._prefer(_PREF_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES))
        self._unsplit = unsplit
        if unsplit:
            self._prefer(_PREF_REDUCTION_SCHEMES, c_uint32(_NO_REDUCTION))

    def _prefer(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.sizeof(value)
        _check(self._lib.cublasLtMatmulPreferenceSetAttribute(self._preference, attribute, byref(value), size))

    def algorithms(self, num_tokens: int, num_out: int, num_in: int) -> list[Algorithm]:
        """List the algorithms that the library's heuristic proposes, the best first. The same library and GPU give the
        same list."""
        weight, x, y = self._layouts(num_tokens, num_out, num_in)
        found, count = (Algorithm * _MAX_ALGORITHMS)(), c_int()
        _check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._desc, weight, x, y, y, self._preference, _MAX_ALGORITHMS, found, byref(count)
            )
        )
        usable = [found[i] for i in range(count.value) if found[i].state == 0]
        return [one for one in usable if self._is_unsplit(one)] if self._unsplit else usable

    def multiply(
        self, algorithm: Algorithm, x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor | None = None
    ) -> Tensor:
        """Return x W^T + residual, (M, O), by one of the `algorithms` for this size. The sum is written over the
        residual, and rounded once."""
        (num_tokens, num_in), num_out = x_MI.shape, weight_OI.shape[0]
        y_MO = x_MI.new_empty((num_tokens, num_out)) if residual_MO is None else residual_MO
        assert all(t.is_contiguous() for t in (x_MI, weight_OI, y_MO)), (x_MI.stride(), weight_OI.stride())
        # The heuristic's default; views of other tensors may have less.
        assert all(t.data_ptr() % _ALIGNMENT == 0 for t in (x_MI, weight_OI, y_MO)), "addresses are not aligned"
        weight, x, y = self._layouts(num_tokens, num_out, num_in)
        _check(
            self._lib.cublasLtMatmul(
                self._handle,
                self._desc,
                byref(_ONE),
                weight_OI.data_ptr(),
                weight,
                x_MI.data_ptr(),
                x,
                byref(_ZERO if residual_MO is None else _ONE),
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
        return y_MO

    def _is_unsplit(self, algorithm: Algorithm) -> bool:
        return (self._config(algorithm, _CONFIG_SPLITS), self._config(algorithm, _CONFIG_REDUCTION)) == (1, 0)

    def _config(self, algorithm: Algorithm, attribute: int) -> int:
        value, written = c_uint32(), c_size_t()
        _check(
            self._lib.cublasLtMatmulAlgoConfigGetAttribute(
                byref(algorithm.algo), attribute, byref(value), ctypes.sizeof(value), byref(written)
            )
        )
        return value.value

    def _layouts(self, num_tokens: int, num_out: int, num_in: int) -> tuple[c_void_p, c_void_p, c_void_p]:
        """Return the layouts of the weight, x and y. They are made once for each size, and have a few bytes each."""
        size = num_tokens, num_out, num_in
        if size not in self._known_layouts:
            made = []
            for lines, columns in ((num_in, num_out), (num_in, num_tokens), (num_out, num_tokens)):
                layout = c_void_p()
                _check(self._lib.cublasLtMatrixLayoutCreate(byref(layout), _DTYPES[self.dtype], lines, columns, lines))
                made.append(layout)
            self._known_layouts[size] = made[0], made[1], made[2]
        return self._known_layouts[size]


_ONE, _ZERO = c_float(1.0), c_float(0.0)


def library_version() -> int:
    """Return the version of the library that torch has loaded. It raises OSError if the library is missing."""
    return int(_load().cublasLtGetVersion())


def _load() -> ctypes.CDLL:
    """Return the library that torch has loaded, by its file name."""
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
    lib.cublasLtMatmulAlgoConfigGetAttribute.argtypes = [handle, c_int, c_void_p, c_size_t, POINTER(c_size_t)]
    lib.cublasLtMatmul.argtypes = [handle] * 14 + [c_size_t, c_void_p]
    return lib


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
