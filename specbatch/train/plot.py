"""The course of a training as a picture: loss, and the share of right drafts by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def plot(records: Sequence[dict[str, Any]], path: Path, title: str, say: Callable[[str], None]) -> bool:
    """Write a PNG of the metrics' records. If matplotlib is missing, report it and return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say(f"no {path.name}: matplotlib is not installed (pip install 'specbatch[plots]')")
        return False
    trained = [r for r in records if "loss" in r]
    validated = [r for r in records if "validation" in r]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in trained], [r["loss"] for r in trained], color="0.6", linewidth=1, label="training")
    steps = [r["step"] for r in validated]
    left.plot(steps, [r["validation"]["loss"] for r in validated], marker="o", markersize=3, label="validation")
    left.set(xlabel="optimiser step", ylabel="cross entropy, nats (weighted mean of draft steps)")
    left.legend()
    for j in range(len(validated[-1]["validation"]["accuracy"])):
        shares = [r["validation"]["accuracy"][j] for r in validated]
        right.plot(steps, shares, marker="o", markersize=3, label=f"step {j + 1}")
    right.set(xlabel="optimiser step", ylabel="validation: share of drafts that are right", ylim=(0, 1))
    right.legend(title="draft step", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
