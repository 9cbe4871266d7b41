"""Pictures of what tuning found. matplotlib is imported when the first is drawn: nothing else needs it."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel
from specbatch.tune.replay import Replay
from specbatch.tune.report import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


@dataclass(frozen=True, slots=True)
class Caption:
    """The text of every plot."""

    models: str  # target and draft
    device: str

    def draw(self, figure: Figure, title: str, shapes: bool) -> None:
        """Draw the title and the caption. `shapes`: the plot shows shapes of a draft network, which the caption
        explains."""
        made_by = textwrap.fill(f"{self.models}, on {self.device}", width=int(11 * figure.get_figwidth()))
        figure.suptitle(f"{title}\n{made_by}", fontsize="medium")
        if shapes:
            figure.supxlabel("2/1/3: num_steps 2, topk 1, num_draft_tokens 3", fontsize="x-small", color="0.4")


def plot_acceptance(
    replays: Sequence[Replay], shares_SK: NDArray[np.float64] | None, caption: Caption, path: Path
) -> None:
    """Left: the most tokens per round by num_steps for each topk (n-grams: by num_draft_tokens for each range of match
    lengths). Right: of `Replayer.rank_shares`, how often the true token is which of the draft's choices. Raises
    TuningError where matplotlib is missing."""
    figure = _figure(12 if shares_SK is not None else 6)
    axes = figure.subplots(1, 2 if shares_SK is not None else 1, squeeze=False)[0]
    best: dict[str, dict[int, float]] = defaultdict(dict)
    for replay in replays:
        shape = replay.shape
        if shape.ngram_match is None:
            series, x = f"topk {shape.topk}", shape.num_steps
        else:
            series, x = "match {}-{}".format(*shape.ngram_match), shape.num_draft_tokens
        best[series][x] = max(best[series].get(x, 0.0), replay.tokens_per_round)
    for series, points in best.items():
        xs = sorted(points)
        axes[0].plot(xs, [points[x] for x in xs], marker="o", markersize=3, label=series)
    neural = any(replay.shape.ngram_match is None for replay in replays)
    axes[0].set(xlabel="num_steps" if neural else "num_draft_tokens", ylabel="tokens per round (largest tree)")
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    if shares_SK is not None:
        depths, floor = np.arange(1, len(shares_SK) + 1), np.zeros(len(shares_SK))
        for rank in range(shares_SK.shape[1] - 1):
            axes[1].bar(depths, shares_SK[:, rank], bottom=floor, label=f"{rank + 1}", width=0.8)
            floor += shares_SK[:, rank]
        axes[1].set(
            xlabel="depth of the draft", ylabel="share, where all drafts before it are true", ylim=(0, 1), xticks=depths
        )
        axes[1].legend(title="the true token is the\ndraft's choice number", fontsize="small")
    caption.draw(figure, "Tokens that a round commits, by draft shape", shapes=False)
    _save(figure, path)


def plot_throughput(
    replays: Sequence[Replay],
    costs: CostModel,
    batches: Sequence[int],
    shapes: Sequence[DraftShape],
    caption: Caption,
    path: Path,
) -> None:
    """Plot tokens per second over batch size, for some shapes with their 90% intervals, and for plain decoding. It
    raises TuningError if matplotlib is missing."""
    figure = _figure(8)
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axes = figure.subplots()
    xs = np.array(batches)
    by_shape = {replay.shape: replay for replay in replays}
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
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))  # it may not reach from one power of ten to the next
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.7g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    caption.draw(
        figure,
        "Predicted speed by the number of running requests",
        shapes=any(shape.ngram_match is None for shape in shapes),
    )
    _save(figure, path)


def plot_comparisons(comparisons: Sequence[Comparison], caption: Caption, path: Path) -> None:
    """Predicted against measured tokens per second. Raises TuningError where matplotlib is missing."""
    figure = _figure(6)
    axes = figure.subplots()
    for c in comparisons:
        error = np.maximum([[c.measured - c.low], [c.high - c.measured]], 0.0)
        axes.errorbar(c.measured, c.predicted, xerr=error, fmt="o", markersize=4, label=c.what)
    values = [v for c in comparisons for v in (c.predicted, c.measured)]
    ends = [0.9 * min(values), 1.1 * max(values)]
    axes.plot(ends, ends, color="0.5", linewidth=1, zorder=0)
    axes.legend(fontsize="x-small")  # a schedule's name is long
    axes.set(xlabel="measured, tokens per second", ylabel="predicted, tokens per second")
    axes.grid(alpha=0.3)
    caption.draw(figure, "Predicted and measured speed", shapes=any("/" in c.what for c in comparisons))
    _save(figure, path)


def _ticks(batches: Sequence[int]) -> tuple[list[int], list[str]]:
    """Choose the batch sizes that are far enough apart on a logarithmic axis, and return them with their labels."""
    shown: list[int] = []
    for batch in batches:
        if not shown or batch >= 1.4 * shown[-1]:
            shown.append(batch)
    return shown, [str(batch) for batch in shown]


def _figure(width: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TuningError("matplotlib is not installed", hint="pip install 'specbatch[plots]'") from error
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI)
