"""Plots as inline SVG. Shapes are drawn in a square of 1000 by 1000 that is stretched to the width of the page; labels
are HTML around it, so that they are readable at every width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specbatch.report.html import text

_MAX_BINS = 36
_TAIL = 0.99  # share of the rows that the bins before the last one hold


@dataclass(frozen=True)
class Bar:
    label: str  # below it; "": none
    value: float
    tip: str


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
    """Short: 1,250; 12k; 3M."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):g}{unit}"
    return f"{value:,.10g}"


def percent(value: float) -> str:
    return f"{100 * value:.10g}%"


def _plot(shapes: str, y: Sequence[tuple[float, str]], x: Sequence[tuple[float, str]], x_title: str, name: str) -> str:
    """`y`, `x`: positions of the labels in 0 .. 1, from below and from the left."""
    grid = "".join(f'<path class="grid" d="M0 {1000 * (1 - at):.1f}H1000"/>' for at, _ in y)
    y_labels = "".join(f'<span style="bottom:{100 * at:.2f}%">{text(label)}</span>' for at, label in y)
    x_labels = "".join(f'<span style="left:{100 * at:.2f}%">{text(label)}</span>' for at, label in x)
    return (
        f'<div class="plot"><div class="y">{y_labels}</div><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(name)}">{grid}{shapes}</svg><div class="x">{x_labels}</div>'
        f'<div class="axis">{text(x_title)}</div></div>'
    )


def bars(given: Sequence[Bar], x_title: str, name: str, *, share: bool = False) -> str:
    """Draw a bar chart. `share`: values are shares of 1, shown as percentages."""
    marks = ticks(0, 1 if share else max((bar.value for bar in given), default=1), 4, whole=not share)
    top = marks[-1]
    width = 1000 / max(len(given), 1)
    gap = min(width * 0.15, 12)
    shapes = []
    for i, bar in enumerate(given):
        height = 1000 * bar.value / top
        tip = f"<title>{text(bar.tip)}</title>"
        left, inner = i * width, width - gap
        shapes.append(
            f'<g>{tip}<rect class="hit" x="{left:.2f}" y="0" width="{width:.2f}" height="1000"/>'
            f'<rect class="bar" x="{left + gap / 2:.2f}" y="{1000 - height:.2f}" width="{inner:.2f}" '
            f'height="{height:.2f}"/></g>'
        )
    y = [(mark / top, percent(mark) if share else number(mark)) for mark in marks]
    x = [((i + 0.5) / len(given), bar.label) for i, bar in enumerate(given) if bar.label]
    return _plot("".join(shapes), y, x, x_title, name)


def histogram(counts: Counter[int], x_title: str, name: str) -> str:
    """Draw a histogram of whole numbers. The last bar holds the longest 1%, if these go far beyond the others."""
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
        found.append(Bar(label, count, f"{span} tokens: {count:,} rows"))
    return bars(found, x_title, name)


def line(
    points: Sequence[tuple[float, float | None]],
    x_range: tuple[float, float],
    floor: float,
    x_title: str,
    name: str,
    *,
    share: bool = False,
) -> str:
    """A line through (x, y); y None interrupts it. `floor`: the lowest y of the axis."""
    known = [y for _, y in points if y is not None]
    marks = ticks(floor, max([*known, floor + 1e-9]), 4)
    top = marks[-1]
    parts, drawing = [], False
    for x, y in points:
        if y is None:
            drawing = False
            continue
        at = (x - x_range[0]) / (x_range[1] - x_range[0] or 1)
        parts.append(f"{'L' if drawing else 'M'}{1000 * at:.1f} {1000 * (1 - (y - floor) / (top - floor)):.1f}")
        if not drawing:
            parts.append("h0.01")  # a single point is visible, too
        drawing = True
    y_labels = [((mark - floor) / (top - floor), percent(mark) if share else number(mark)) for mark in marks]
    return _plot(f'<path class="line" d="{"".join(parts)}"/>', y_labels, _x_labels(*x_range), x_title, name)


def scatter(points: Sequence[tuple[float, float, str]], floor: float, x_title: str, name: str) -> str:
    """Draw points (x, y, tip) as dots, with x from 0."""
    x_marks = ticks(0, max((x for x, _, _ in points), default=1), whole=True)
    y_marks = ticks(floor, max([y for _, y, _ in points] + [floor + 1e-9]), 4)
    right, top = x_marks[-1], y_marks[-1]
    dots = "".join(
        f'<path class="dot" d="M{1000 * x / right:.1f} {1000 * (1 - (y - floor) / (top - floor)):.1f}h0.01">'
        f"<title>{text(tip)}</title></path>"
        for x, y, tip in points
    )
    y_labels = [((mark - floor) / (top - floor), number(mark)) for mark in y_marks]
    return _plot(dots, y_labels, [(mark / right, number(mark)) for mark in x_marks], x_title, name)


def _x_labels(low: float, high: float) -> list[tuple[float, str]]:
    marks = [mark for mark in ticks(low, high, whole=True) if mark <= high]
    return [((mark - low) / (high - low or 1), number(mark)) for mark in marks]


def shares(parts: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: (name, value, value in words). Each is a share of the largest one."""
    most = max((value for _, value, _ in parts), default=0) or 1
    rows = "".join(
        f'<div class="label">{text(name)}</div>'
        f'<div class="track"><div style="width:{100 * value / most:.2f}%"></div></div>'
        f'<div class="amount">{text(words)}</div>'
        for name, value, words in parts
    )
    return f'<div class="shares">{rows}</div>'
