"""The result of tuning as a configuration to run with, as JSON and as tables."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from rich.table import Table

from specbatch.draft.schedule import Schedule, label, shapes_of
from specbatch.draft.shape import DraftShape
from specbatch.tune.costs import CostModel
from specbatch.tune.replay import Replay
from specbatch.tune.search import Plan, SearchResult, ShapeSpeed


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and live runs, all in the same unit."""

    what: str
    predicted: float
    measured: float
    low: float  # ends of the interval of the live runs
    high: float

    @property
    def percent(self) -> float:
        """Predicted against measured."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def with_schedule(config: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """A copy of a configuration (as `config_to_dict` makes it) that runs `schedule`. One of plain decoding alone is
    `method: none`."""
    tuned = copy.deepcopy(dict(config))
    section = dict(tuned.get("speculation") or {})
    section |= {"num_steps": None, "topk": 1, "num_draft_tokens": None, "schedule": None}
    if not (shapes := shapes_of(schedule)):
        section |= {"method": "none", "draft": None}
    else:
        section["schedule"] = [_entry(*entry) for entry in schedule.entries]
        matches = {shape.ngram_match for shape in shapes}
        assert len(matches) == 1, f"one range of match lengths for all entries, not {matches}"
        if (match := shapes[0].ngram_match) is not None:
            section["ngram"] = {**(section.get("ngram") or {}), "min_match": match[0], "max_match": match[1]}
    tuned["speculation"] = section
    return tuned


def _entry(max_batch: int, shape: DraftShape | None) -> dict[str, int]:
    return {"max_batch": max_batch} | ({"num_steps": 0} if shape is None else _numbers(shape))


def _numbers(shape: DraftShape) -> dict[str, int]:
    if shape.ngram_match is not None:
        return {"num_draft_tokens": shape.num_draft_tokens}
    return {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens}


def tuned_yaml(
    config: Mapping[str, Any], schedule: Schedule | None, *, header: Sequence[str] = (), comments: Sequence[str] = ()
) -> str:
    """The text of `with_schedule`; without a schedule, of the configuration as it is.

    `header`: lines of a comment on top. `comments`: one for each entry of the schedule."""
    tuned = dict(config) if schedule is None else with_schedule(config, schedule)
    lines = [f"# {line}".rstrip() for line in header]
    for name, section in tuned.items():
        entries = None
        if name == "speculation":
            section = dict(section)
            entries = section.pop("schedule")
        lines += ["", *_dumped({name: section})] if lines else _dumped({name: section})
        if name == "speculation":
            lines += ["  schedule: null"] if entries is None else ["  schedule:"]
            for i, entry in enumerate(entries or ()):
                comment = f"  # {comments[i]}" if i < len(comments) and comments[i] else ""
                inside = ", ".join(f"{key}: {value}" for key, value in entry.items())
                lines.append(f"    - {{{inside}}}{comment}")
    return "\n".join(lines) + "\n"


def _dumped(value: Any) -> list[str]:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n").split("\n")


def evidence(result: SearchResult) -> tuple[list[str], list[str]]:
    """Header and comments for `tuned_yaml`, from the predictions."""
    best, plain = result.best.prediction, result.plain.prediction
    header = [
        f"Predicted for {best.num_rows} rows: {duration(best.seconds)}"
        f" (prefill {duration(best.prefill_seconds)}, steady {duration(best.steady_seconds)},"
        f" drain {duration(best.drain_seconds)}), {best.tokens_per_second:,.0f} tok/s.",
        f"Plain decoding: {duration(plain.seconds)}.",
    ]
    if result.fixed:
        fixed = result.fixed[0]
        header.append(f"Best single shape, {fixed.schedule.name}: {duration(fixed.prediction.seconds)}.")
    if not result.pays:
        header.append("Speculation does not pay on this file: nothing is predicted to be faster than plain decoding.")
    return header, [_comment(speed) for speed in result.entries]


def _comment(speed: ShapeSpeed) -> str:
    text = f"{speed.tokens_per_second:,.0f} tok/s at {speed.batch}, {speed.round_ms:.2f} ms a round"
    if speed.shape is None:
        return text
    return f"{text}, {speed.tokens_per_round:.2f} tokens a round ({speed.low:.2f}-{speed.high:.2f})"


def duration(seconds: float) -> str:
    """Format a duration for people: 12.3 s, 2 min 5 s, 3 h 10 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def json_report(
    result: SearchResult,
    costs: CostModel,
    replays: Sequence[Replay],
    comparisons: Sequence[Comparison] = (),
) -> dict[str, Any]:
    """Everything that can be put into a JSON file."""
    report = {
        "pays": result.pays,
        "best": _plan(result.best),
        "fixed": [_plan(plan) for plan in result.fixed],
        "plain": _plan(result.plain),
        "entries": [_speed(speed) for speed in result.entries],
        "by_batch": [
            {"batch": r.batch, "ranked": [_speed(one) for one in r.ranked], "plain": _speed(r.plain)}
            for r in result.rankings
        ],
        "dropped": [{"candidate": _shape(d.shape), "reason": d.reason} for d in result.dropped],
        "num_candidates": result.num_shapes,
        "costs": [_fields(r, "percent") for r in costs.residuals],
        "graph_sizes": costs.graph_sizes,
        "replays": [_replay(replay) for replay in replays],
        "live": [_fields(c, "percent") for c in comparisons],
    }
    plain: dict[str, Any] = jsonable(report)
    return plain


def _fields(value: Any, *properties: str, without: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass, and some of its properties."""
    names = [field.name for field in dataclasses.fields(value) if field.name != without]
    return {name: getattr(value, name) for name in (*names, *properties)}


def _shape(shape: DraftShape | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    match = {} if shape.ngram_match is None else dict(zip(("min_match", "max_match"), shape.ngram_match, strict=True))
    return {"label": label(shape), **_numbers(shape), **match}


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": [{"max_batch": bound, "candidate": _shape(shape)} for bound, shape in plan.schedule.entries],
        **_fields(plan.prediction, "seconds", "tokens_per_second", "mean_batch", without="tokens_by_batch"),
    }


def _speed(speed: ShapeSpeed) -> dict[str, Any]:
    return {"candidate": _shape(speed.shape), **_fields(speed, "tokens_per_second", without="shape")}


def _replay(replay: Replay) -> dict[str, Any]:
    low, high = replay.interval
    return {
        "candidate": _shape(replay.shape),
        "tokens": int(replay.tokens_R.sum()),
        "low": low,
        "high": high,
        **{name: getattr(replay, name) for name in ("rounds", "tokens_per_round", "accepted_at", "unknown_share")},
    }


def jsonable(value: Any) -> Any:
    """Arrays and tuples as JSON has them; what is no finite number as null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def costs_table(costs: CostModel) -> Table:
    """Every measurement, a line for each part and batch size, and by how much the fit differs where it does."""
    table = _table("Costs", "part", "batch", "milliseconds by width, and by how much the fit differs")
    table.columns[-1].justify = "left"
    lines: dict[tuple[str, int], list[str]] = {}
    for r in costs.residuals:
        # No spaces: lines break between widths.
        differs = f"({r.percent:+.1f}%)" if abs(r.percent) >= 0.1 else ""
        if not r.measured_ms and r.fitted_ms >= 0.0005:  # no percentage of that
            differs = f"(fitted:{r.fitted_ms:.3f})"
        lines.setdefault((r.kind, r.batch), []).append(f"{r.width}:{r.measured_ms:.3f}{differs}")
    for (kind, batch), cells in lines.items():
        table.add_row(kind, str(batch), "  ".join(cells))
    return table


def rankings_table(result: SearchResult) -> Table:
    """The best draft shape at each batch size, and plain decoding."""
    table = _table(
        "Best by batch size", "batch", "best", "tokens/round", "90%", "ms/round", "tok/s", "plain tok/s", "gain"
    )
    for ranking in result.rankings:
        best, plain = ranking.ranked[0], ranking.plain
        gain = best.tokens_per_second / plain.tokens_per_second
        table.add_row(
            str(ranking.batch), label(best.shape), f"{best.tokens_per_round:.2f}", f"{best.low:.2f}-{best.high:.2f}",
            f"{best.round_ms:.2f}", f"{best.tokens_per_second:,.0f}", f"{plain.tokens_per_second:,.0f}", f"{gain:.2f}x",
        )  # fmt: skip
    return table


def plans_table(result: SearchResult) -> Table:
    """Predicted times of the file: the schedule, the best single shapes, plain decoding."""
    table = _table("Predicted for the file", "", "total", "prefill", "steady", "drain", "tok/s")
    for name, plan in [("best", result.best), *(("single", one) for one in result.fixed), ("plain", result.plain)]:
        p = plan.prediction
        parts = (p.seconds, p.prefill_seconds, p.steady_seconds, p.drain_seconds)
        table.add_row(f"{name}: {plan.schedule.name}", *map(duration, parts), f"{p.tokens_per_second:,.0f}")
    return table


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """Predicted and measured."""
    table = _table("Predicted and live", "", "predicted", "measured", "interval", "difference")
    for c in comparisons:
        interval = f"{c.low:,.1f}-{c.high:,.1f}"
        table.add_row(c.what, f"{c.predicted:,.1f}", f"{c.measured:,.1f}", interval, f"{c.percent:+.1f}%")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
