"""The library's matrix products, with the algorithm that is fastest here: measured once, remembered in a file.

cuBLAS picks an algorithm by a model of the GPU, and often not the fastest: on an H200 the best of the few that its
heuristic names saves 6% of a Llama-3-8B layer's products at 256 and at 8192 rows, nothing at 512 and 1024, and about 1%
of a whole job. What was chosen is kept by GPU and library version, so that another start multiplies with the same
algorithms, and gives the same bits.

Shape suffixes: M rows, I input features, O output features.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.cublaslt import Algorithm, CublasLt
from specbatch.kernels.linear_config import is_skinny

_ROTATION_BYTES = 200e6  # of the weights that one measurement goes through: more than any L2 holds
_FINALISTS = 5
_SPELL_SECONDS = 4e-3  # of one measurement of a finalist
# Prompts multiply for so long without a break that the GPU's power is the limit, which takes a while to show.
_LONG_ROWS, _LONG_SPELL_SECONDS = 4096, 60e-3
_LEAST_GAIN = 1.015  # what is less is noise
_TORCH = -1  # stands for torch's own choice
_ALIGNMENT = 256  # bytes; cuBLASLt's default

Shape = tuple[int, int]  # (O, I)


class Product:
    """x W^T for one size, by one algorithm."""

    def __init__(self, library: CublasLt, num_rows: int, shape: Shape, algorithm: Algorithm) -> None:
        self._library = library
        self._algorithm = algorithm
        self._size = num_rows, shape[0]
        self._layouts = library.layouts(num_rows, *shape)

    def __call__(self, x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """(M, O). A residual is overwritten by the sum, which is rounded once."""
        assert x_MI.is_contiguous(), x_MI.stride()
        assert x_MI.data_ptr() % _ALIGNMENT == 0, "the heuristic counts on more than this view has"
        assert residual_MO is None or residual_MO.is_contiguous(), residual_MO.stride()
        y_MO = x_MI.new_empty(self._size) if residual_MO is None else residual_MO
        self._library.launch(self._layouts, self._algorithm, x_MI, weight_OI, y_MO, residual_MO is not None)
        return y_MO


def choose_products(
    sizes: Mapping[Shape, Iterable[int]],
    library: CublasLt,
    path: Path,
    show: Callable[[str], None],
) -> dict[Shape, dict[int, Product]]:
    """The products that are faster than torch's, by shape and number of rows, of all in `sizes`. What `path` does not
    know is measured, and written there."""
    known = _read(path)
    chosen: dict[Shape, dict[int, Product]] = {shape: {} for shape in sizes}
    for number, shape in enumerate(chosen):
        wanted = sorted(set(sizes[shape]), reverse=True)
        names = {m: f"{library.dtype} {m} {shape[0]} {shape[1]}" for m in wanted}
        # Few rows have kernels of their own.
        large = [m for m in wanted if not is_skinny(m, *shape, library.dtype, library.is_hopper)]
        missing = [m for m in large if names[m] not in known]
        if missing:
            show(f"measuring products: {number + 1} of {len(chosen)}")
            known |= {names[m]: index for m, index in _measure(library, shape, missing).items()}
            _write(path, _read(path) | known)
        for m in large:
            index = known.get(names[m], _TORCH)
            algorithms = library.algorithms(m, *shape) if index != _TORCH else []
            if index < len(algorithms) and index != _TORCH:
                chosen[shape][m] = Product(library, m, shape, algorithms[index])
    return chosen


def _measure(library: CublasLt, shape: Shape, rows: Iterable[int]) -> dict[int, int]:
    """By number of rows: the number of the best algorithm in the library's list, or `_TORCH`. Sizes for which there is
    no memory are left out: torch's own will do, and where there is more room, they are made up for."""
    best: dict[int, int] = {}
    for num_rows in rows:
        try:
            best[num_rows] = _best(library, shape, num_rows)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
    return best


def _best(library: CublasLt, shape: Shape, num_rows: int) -> int:
    num_out, num_in = shape
    copies = max(1, math.ceil(_ROTATION_BYTES / (num_out * num_in * library.dtype.itemsize)))
    options = {"device": library.device, "dtype": library.dtype}
    weights = [torch.randn(shape, **options).mul_(num_in**-0.5) for _ in range(copies)]  # type: ignore[call-overload]
    x = torch.randn(num_rows, num_in, **options)  # type: ignore[call-overload]
    expected = F.linear(x, weights[0])
    candidates: dict[int, Callable[[Tensor, Tensor], Tensor]] = {_TORCH: F.linear}
    for index, algorithm in enumerate(library.algorithms(num_rows, *shape)):
        product = Product(library, num_rows, shape, algorithm)
        try:
            y = product(x, weights[0])
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:  # refused
            continue
        if float((y - expected).norm() / expected.norm()) < 1e-2:
            candidates[index] = product
    return _fastest(x, weights, candidates)


def _fastest(x: Tensor, weights: list[Tensor], candidates: Mapping[int, Callable[[Tensor, Tensor], Tensor]]) -> int:
    # One stream and one pool for all: they run in turn, and a stream of its own would cost a workspace each.
    stream, pool = torch.cuda.Stream(x.device), torch.cuda.graph_pool_handle()
    replays = {name: _captured(x, weights, function, stream, pool) for name, function in candidates.items()}
    first = {name: _seconds(replay, 1) for name, replay in replays.items()}
    finalists = sorted((name for name in first if name != _TORCH), key=first.__getitem__)[:_FINALISTS]
    times: dict[int, list[float]] = {name: [] for name in (_TORCH, *finalists)}
    spell = _SPELL_SECONDS if x.shape[0] < _LONG_ROWS else _LONG_SPELL_SECONDS
    for _ in range(3):  # in turn, since the clock falls as the GPU warms up
        for name in times:
            times[name].append(_seconds(replays[name], max(1, round(spell / first[name]))))
    medians = {name: sorted(values)[1] for name, values in times.items()}
    winner = min(medians, key=medians.__getitem__)
    return winner if medians[_TORCH] > _LEAST_GAIN * medians[winner] else _TORCH


def _captured(
    x: Tensor,
    weights: list[Tensor],
    function: Callable[[Tensor, Tensor], Tensor],
    stream: torch.cuda.Stream,
    pool: Any,  # a handle, opaque
) -> torch.cuda.CUDAGraph:
    """A graph of one product with each weight: launching by the host would be what is measured."""
    torch.cuda.synchronize(x.device)
    graph = torch.cuda.CUDAGraph()
    # Not `torch.cuda.graph`: it collects garbage each time, and there are hundreds of these.
    with torch.cuda.stream(stream):
        function(x, weights[0])
        graph.capture_begin(pool=pool)
        try:
            for weight in weights:
                function(x, weight)
        finally:  # a capture left open would break everything behind it
            graph.capture_end()
    graph.replay()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Of one replay."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(count):
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / count


def _read(path: Path) -> dict[str, int]:
    """What is known; nothing where the file is missing or broken."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict) or not all(type(value) is int for value in known.values()):
        return {}
    return known


def _write(path: Path, known: Mapping[str, int]) -> None:
    """By renaming, so that another process reads the old file or the new one. A folder that cannot be written to costs
    the next start a measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=0, sort_keys=True), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        pass
