"""Plots: what to draw in a square of 1000 by 1000 that the page stretches to its width, and where its labels are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MAX_BINS = 36
_TAIL = 0.99  # share of the rows that the bins before the last one hold

Labels = Sequence[tuple[float, str]]  # positions in 0 .. 1, from below or from the left, and words


@dataclass(frozen=True)
class Bar:
    label: str  # below it; "": none
    value: float
    tip: str
    cells: Sequence[str]  # its row in the table of the plot


@dataclass(frozen=True)
class Plot:
    """A drawing with its labels. `name`: for readers who do not see it. `columns`, `rows`: the same as a table."""

    name: str
    x_title: str
    x: Labels
    y: Labels
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[tuple[str, float, float]] = ()  # tip, left side, height
    bar_width: float = 0.0
    path: str = ""  # a line
    dots: Sequence[tuple[str, float, float]] = ()  # tip, x, y from above


def ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """`low`, and round numbers to at least `high`: at most about `most`. `whole`: of things that are counted."""
    step = _round_step(max(high - low, 1e-9) / most)
    if whole:
        step = max(1, 2 * step if step == 2.5 else step)
    high = max(high, low + step)
    first, last = math.floor(low / step + 1e-9) + 1, math.ceil(high / step - 1e-9)
    return [low, *(i * step for i in range(first, last + 1) if i * step - low > step / 3)]


def _round_step(least: float) -> float:
    """The next number of 1, 2, 2.5, 5, 10, 20, 25 ..."""
    power: float = 10 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= least * 0.999)


def number(value: float) -> str:
    """Short: 1,250; 12k; 3M. The ends of a narrow bar far from 0 differ, too."""
    if abs(value) >= 1e12:
        return f"{value:.12g}"
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.12g}{unit}"
    return f"{value:,.12g}"


def percent(value: float) -> str:
    return f"{100 * value:.10g}%"


def bars(given: Sequence[Bar], x_title: str, name: str, columns: Sequence[str], *, share: bool = False) -> Plot:
    """`columns`: names of the bars' cells. `share`: values are shares of 1, shown as percentages."""
    marks = ticks(0, 1 if share else max((bar.value for bar in given), default=1), 4, whole=not share)
    width = 1000 / max(len(given), 1)
    return Plot(
        name,
        x_title,
        x=[((i + 0.5) / len(given), bar.label) for i, bar in enumerate(given) if bar.label],
        y=[(mark / marks[-1], percent(mark) if share else number(mark)) for mark in marks],
        columns=columns,
        rows=[bar.cells for bar in given],
        bars=[(bar.tip, i * width, 1000 * bar.value / marks[-1]) for i, bar in enumerate(given)],
        bar_width=width,
    )


def histogram(
    counts: Counter[int],
    x_title: str,
    name: str,
    unit: str = "tokens",
    things: str = "rows",
    step_of: Callable[[int], int] = lambda value: 1,
) -> Plot:
    """Draw a histogram of whole numbers. The last bar holds the longest 1%, if these go far beyond the others.
    `things`: what is counted, and has a number of `unit`. `step_of`: the power of 10 of which a number is a multiple,
    because it was rounded down; no bar ends within such a step."""
    total = counts.total()
    low, high = min(counts), max(counts)
    below, bound = 0, low
    for value in sorted(counts):
        below += counts[value]
        bound = value
        if below >= _TAIL * total:
            break
    has_tail = high > low + 1.5 * (bound - low + 1)
    end = bound if has_tail else high
    width = max(1, math.ceil(_round_step((end - low + 1) / min(_MAX_BINS, 6 + total // 4))))
    width = math.ceil(width / step_of(end)) * step_of(end)
    low -= low % width
    num = (end - low) // width + 1
    rows = [0] * (num + has_tail)
    for value, count in counts.items():
        rows[min((value - low) // width, len(rows) - 1)] += count
    found = []
    every = math.ceil(num / 4)
    for i, count in enumerate(rows):
        begin = low + i * width
        is_tail = has_tail and i == num
        span = f"{begin:,} and more" if is_tail else f"{begin:,}" + f" to {begin + width - 1:,}" * (width > 1)
        label = f"{number(begin)}+" if is_tail else number(begin) if i % every == 0 and i <= num - every / 2 else ""
        found.append(Bar(label, count, f"{span} {unit}: {count:,} {things}", (span, f"{count:,}")))
    return bars(found, x_title, name, (unit, things))


def number_histogram(counts: Sequence[tuple[float, float]], name: str, things: str) -> Plot:
    """Draw a histogram of numbers, of which each has a count. If a few are far from all others, the first and the last
    bar hold these."""
    given = sorted(counts)
    total, below = sum(count for _, count in given), 0.0
    low, high = given[0][0], given[-1][0]
    inner = []
    for value, count in given:
        if below + count > (1 - _TAIL) / 2 * total and below < (1 + _TAIL) / 2 * total:
            inner.append(value)
        below += count
    start, end = (inner[0], inner[-1]) if high - low > 2 * (inner[-1] - inner[0]) > 0 else (low, high)
    width = _round_step(max(end - start, abs(end) * 1e-9, 1e-300) / 20)
    if all(value.is_integer() for value, _ in given):
        width = max(1.0, 2 * width if width == 2.5 else width)
    first = math.floor(start / width + 1e-9)
    num = max(1, math.floor(end / width + 1e-9) - first + 1)
    heights = [0.0] * num
    for value, count in given:
        heights[min(max(math.floor(value / width + 1e-9) - first, 0), num - 1)] += count
    every = math.ceil(num / 4)
    found = []
    for i, count in enumerate(heights):
        begin, stop = (first + i) * width, (first + i + 1) * width
        span = f"{number(begin)} to below {number(stop)}"
        if i == 0 and low < begin:
            span = f"below {number(stop)}"
        elif i == num - 1 and high >= stop:
            span = f"{number(begin)} and more"
        label = number(begin) if i % every == 0 else ""
        found.append(Bar(label, count, f"{span}: {count:,.0f} {things}", (span, f"{count:,.0f}")))
    return bars(found, name, f"values of {name}", ("value", things))


def line(
    points: Sequence[tuple[float, float | None]],
    x_range: tuple[float, float],
    floor: float,
    x_title: str,
    name: str,
) -> Plot:
    """A line through (x, y); y None interrupts it. `floor`: the lowest y of the axis."""
    marks = ticks(floor, max([*(y for _, y in points if y is not None), floor + 1e-9]), 4)
    low, width = x_range[0], x_range[1] - x_range[0] or 1
    parts, drawing = [], False
    for x, y in points:
        if y is not None:
            at = f"{1000 * (x - low) / width:.1f} {1000 * (1 - _height(y, marks)):.1f}"
            parts.append(f"L{at}" if drawing else f"M{at}h0.01")  # a single point is visible, too
        drawing = y is not None
    x_labels = [((mark - low) / width, number(mark)) for mark in ticks(*x_range, whole=True) if mark <= x_range[1]]
    rows = [(f"{x:,.0f}", "" if y is None else f"{y:,.2f}") for x, y in points]
    return Plot(name, x_title, x_labels, _heights(marks), (x_title, name), rows, path="".join(parts))


def scatter(points: Sequence[tuple[float, float, str]], floor: float, x_title: str, name: str) -> Plot:
    """(x, y, tip) as dots, with x from 0."""
    x_marks = ticks(0, max((x for x, _, _ in points), default=1), whole=True)
    y_marks = ticks(floor, max([y for _, y, _ in points] + [floor + 1e-9]), 4)
    dots = [(tip, 1000 * x / x_marks[-1], 1000 * (1 - _height(y, y_marks))) for x, y, tip in points]
    x = [(mark / x_marks[-1], number(mark)) for mark in x_marks]
    return Plot(name, x_title, x, _heights(y_marks), (x_title, "dots", "mean"), _groups(points), dots=dots)


def _groups(points: Sequence[tuple[float, float, str]]) -> list[tuple[str, str, str]]:
    """Return up to ten equally large groups of points by x, each with its number of points and its mean y."""
    ordered = sorted(points)
    size = math.ceil(len(ordered) / 10) or 1
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return [
        (
            f"{group[0][0]:,.0f} to {group[-1][0]:,.0f}",
            f"{len(group):,}",
            f"{sum(y for _, y, _ in group) / len(group):,.2f}",
        )
        for group in groups
    ]


def _height(value: float, marks: Sequence[float]) -> float:
    """Return where a value is between the lowest mark, 0, and the highest, 1."""
    return (value - marks[0]) / (marks[-1] - marks[0])


def _heights(marks: Sequence[float]) -> Labels:
    return [(_height(mark, marks), number(mark)) for mark in marks]
