"""Least squares under order constraints, on a line and on a grid.

Shape suffixes: B batch sizes, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence nearest to `values` in weighted least squares: pool adjacent violators (Barlow et
    al. 1972)."""
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] >= mean:
            last, last_total = means.pop(), sums.pop()
            mean = (last * last_total + mean * total) / (last_total + total)
            total, count = total + last_total, count + counts.pop()
        means.append(mean)
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(means), counts)


def monotone_grid(values_BW: Floats, weights_BW: Floats, max_rounds: int = 500) -> Floats:
    """The grid nearest to `values_BW` that does not fall along either axis: isotonic regressions of the rows and of the
    columns by turns, each told what the other took away (Dykstra's algorithm; Dykstra & Robertson 1982)."""
    fitted = values_BW.astype(np.float64)
    by_rows, by_columns = np.zeros_like(fitted), np.zeros_like(fitted)
    tolerance = 1e-9 * max(1e-300, float(np.abs(values_BW).max()))
    for _ in range(max_rounds):
        before = fitted
        wanted = fitted + by_rows
        fitted = np.stack([isotonic(v, w) for v, w in zip(wanted, weights_BW, strict=True)])
        by_rows = wanted - fitted
        wanted = fitted + by_columns
        fitted = np.stack([isotonic(v, w) for v, w in zip(wanted.T, weights_BW.T, strict=True)]).T
        by_columns = wanted - fitted
        if np.abs(fitted - before).max() <= tolerance:
            break
    # What is left of rounding, and of an iteration cut short.
    running: Floats = np.maximum.accumulate(np.maximum.accumulate(fitted, axis=0), axis=1)
    return running


def filled(values_BW: Floats, batches: Sequence[int], widths: Sequence[int]) -> Floats:
    """The grid with its NaN cells filled in, those beside known ones first: each the mean of what its row and its
    column say by a straight line between the known cells around it, or through the last two."""
    grid = values_BW.copy()
    across, down = np.array(widths, dtype=np.float64), np.array(batches, dtype=np.float64)
    while np.isnan(grid).any():
        guesses = np.stack(
            [
                np.stack([_guess(line, across) for line in grid]),
                np.stack([_guess(line, down) for line in grid.T], axis=1),
            ]
        )
        known = ~np.isnan(guesses)
        reached = known.any(axis=0) & np.isnan(grid)
        assert reached.any(), "a grid without a single known cell"
        sums = np.where(known, guesses, 0.0).sum(axis=0)
        grid = np.where(reached, sums / np.maximum(known.sum(axis=0), 1), grid)
    return grid


def _guess(line: Floats, places: Floats) -> Floats:
    """The cells of a line that are between known ones, or next to one; NaN elsewhere."""
    guess = np.full(len(line), np.nan)
    known = np.flatnonzero(~np.isnan(line))
    if not len(known):
        return guess
    first, last = int(known[0]), int(known[-1])
    guess[first : last + 1] = np.interp(places[first : last + 1], places[known], line[known])
    for edge, inner, beyond in ((first, known[:2], first - 1), (last, known[-2:], last + 1)):
        if 0 <= beyond < len(line):
            rise = line[inner[-1]] - line[inner[0]]
            slope = rise / (places[inner[-1]] - places[inner[0]]) if len(inner) == 2 else 0.0
            guess[beyond] = max(line[edge] + slope * (places[beyond] - places[edge]), 0.0)
    return guess
