"""Pictures of what tuning found. matplotlib is imported when the first is drawn: nothing else needs it."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel
from specbatch.tune.replay import Replay
from specbatch.tune.report import Comparison

_DPI = 120


@contextmanager
def _axes(title: str, caption: str, path: Path, width: float, *, columns: int = 1, shapes: bool) -> Iterator[Any]:
    """Give axes to draw on, and write them to `path`. `caption`: the models and the device. `shapes`: the plot shows
    shapes of a draft network, which are explained. Raises TuningError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TuningError("matplotlib is not installed", hint="pip install 'specbatch[plots]'") from error
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(1, columns, squeeze=False)[0]
    made_by = textwrap.fill(caption, width=int(11 * width))
    figure.suptitle(f"{title}\n{made_by}", fontsize="medium")
    if shapes:
        figure.supxlabel("2/1/3: num_steps 2, topk 1, num_draft_tokens 3", fontsize="x-small", color="0.4")
    figure.savefig(path, dpi=_DPI)


def plot_acceptance(replays: Sequence[Replay], shares_SK: NDArray[np.float64] | None, caption: str, path: Path) -> None:
    """Left: the most tokens per round by num_steps for each topk (n-grams: by num_draft_tokens for each range of match
    lengths). Right: of `Replayer.rank_shares`, how often the true token is which of the draft's choices."""
    best: dict[str, dict[int, float]] = defaultdict(dict)
    for replay in replays:
        shape = replay.shape
        if shape.ngram_match is None:
            series, x = f"topk {shape.topk}", shape.num_steps
        else:
            series, x = "match {}-{}".format(*shape.ngram_match), shape.num_draft_tokens
        best[series][x] = max(best[series].get(x, 0.0), replay.tokens_per_round)
    neural = any(replay.shape.ngram_match is None for replay in replays)
    title, columns = "Tokens that a round commits, by draft shape", 1 if shares_SK is None else 2
    with _axes(title, caption, path, 6 * columns, columns=columns, shapes=False) as axes:
        for series, points in best.items():
            xs = sorted(points)
            axes[0].plot(xs, [points[x] for x in xs], marker="o", markersize=3, label=series)
        axes[0].set(xlabel="num_steps" if neural else "num_draft_tokens", ylabel="tokens per round (largest tree)")
        axes[0].grid(alpha=0.3)
        axes[0].legend(fontsize="small")
        if shares_SK is None:
            return
        depths, floor = np.arange(1, len(shares_SK) + 1), np.zeros(len(shares_SK))
        for rank in range(shares_SK.shape[1] - 1):
            axes[1].bar(depths, shares_SK[:, rank], bottom=floor, label=f"{rank + 1}", width=0.8)
            floor += shares_SK[:, rank]
        axes[1].set(
            xlabel="depth of the draft", ylabel="share, where all drafts before it are true", ylim=(0, 1), xticks=depths
        )
        axes[1].legend(title="the true token is the\ndraft's choice number", fontsize="small")


def plot_throughput(
    replays: Sequence[Replay],
    costs: CostModel,
    batches: Sequence[int],
    shapes: Sequence[DraftShape],
    caption: str,
    path: Path,
) -> None:
    """Tokens per second over batch size of some shapes, with their 90% intervals, and of plain decoding."""
    xs, by_shape = np.array(batches), {replay.shape: replay for replay in replays}
    neural = any(shape.ngram_match is None for shape in shapes)
    with _axes("Predicted speed by the number of running requests", caption, path, 8, shapes=neural) as (axes,):
        from matplotlib.ticker import LogLocator, StrMethodFormatter

        for shape in dict.fromkeys(shapes):
            per_token = 1e3 * xs / np.array([costs.round_ms(int(b), shape) for b in xs])
            replay = by_shape[shape]
            low, high = replay.interval
            (line,) = axes.plot(xs, per_token * replay.tokens_per_round, marker="o", markersize=3, label=str(shape))
            axes.fill_between(xs, per_token * low, per_token * high, color=line.get_color(), alpha=0.15, linewidth=0)
        plain = [1e3 * b / costs.plain_ms(b) for b in batches]
        axes.plot(xs, plain, color="black", linestyle="--", marker="o", markersize=3, label="plain")
        axes.set(xlabel="running requests", ylabel="tokens per second", xscale="log", yscale="log")
        axes.set_xticks(*_ticks(batches), fontsize="small")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))  # one power of ten may be on no axis
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.7g}"))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


def plot_comparisons(comparisons: Sequence[Comparison], caption: str, path: Path) -> None:
    """Predicted against measured tokens per second."""
    shapes = any("/" in c.what for c in comparisons)
    with _axes("Predicted and measured speed", caption, path, 6, shapes=shapes) as (axes,):
        for c in comparisons:
            error = np.maximum([[c.measured - c.low], [c.high - c.measured]], 0.0)
            axes.errorbar(c.measured, c.predicted, xerr=error, fmt="o", markersize=4, label=c.what)
        values = [v for c in comparisons for v in (c.predicted, c.measured)]
        ends = [0.9 * min(values), 1.1 * max(values)]
        axes.plot(ends, ends, color="0.5", linewidth=1, zorder=0)
        axes.legend(fontsize="x-small")  # a schedule's name is long
        axes.set(xlabel="measured, tokens per second", ylabel="predicted, tokens per second")
        axes.grid(alpha=0.3)


def _ticks(batches: Sequence[int]) -> tuple[list[int], list[str]]:
    """Those far enough apart on a logarithmic axis."""
    shown: list[int] = []
    for batch in batches:
        if not shown or batch >= 1.4 * shown[-1]:
            shown.append(batch)
    return shown, [str(batch) for batch in shown]
