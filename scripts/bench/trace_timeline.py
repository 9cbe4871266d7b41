"""A picture of a trace of scripts/bench/profile_round.py: phases, lanes, communication and idle time of some rounds.

    python scripts/bench/profile_round.py --batch 64 --trace trace.json --set engine.two_batch_overlap=on
    python scripts/bench/trace_timeline.py trace.json -o rounds.png --from-ms 2 --ms 10

A line for the phases of a round and one for each lane, as the engine has named them
(specbatch/kernels/trace_marks.py), and one for each stream of a GPU, with its kernels by kind. A CUDA graph that is
replayed has no names of phases and lanes: its lanes are its streams. Prints for each line how long it was busy and
idle, and how much of the communication ran while another line computed. On a CPU the communication is in threads
without names: there the time is shown in which a lane waits for it. Needs matplotlib: pip install 'specbatch[plots]'.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbatch.kernels.trace_marks import PREFIX

COMMUNICATION, COMPUTE = "communication", "compute"
WAIT = "wait for ranks"  # shown for a CPU, where the communication itself is in threads of the library
# The kinds of kernels, by a pattern of their names. The first match counts.
KINDS = {
    COMMUNICATION: r"nccl|all_?reduce|all_?gather|symm_mem|one_shot|memcpy ptop",
    "attention": r"atten|attend|flash|paged|prefix_parts",
    "GEMM": r"gemm|nvjet|cutlass|matmul|cublas|linear|sm90_xmma|splitk|dot_kernel|combine_kernel|fma_kernel",
    "copies": r"memcpy|memset",
}
PHASES = ("draft", "target", "accept", "extend", "prompts")
COLOURS = {
    "draft": "#8da0cb",
    "target": "#66c2a5",
    "accept": "#e5c494",
    "extend": "#a6d854",
    "prompts": "#b3b3b3",
    COMMUNICATION: "#d7301f",
    WAIT: "#fc8d59",
    "attention": "#3690c0",
    "GEMM": "#238b45",
    "copies": "#bdbdbd",
    COMPUTE: "#74a9cf",
    "other": "#969696",
}


@dataclass(frozen=True)
class Span:
    """A span of the trace. Times are microseconds since the trace began."""

    line: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """The times of one line, in microseconds."""

    busy: float
    idle: float
    communication: float
    hidden: float  # communication while another line computes
    waits: float  # waits for ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--from-ms", type=float, default=0.0)
    parser.add_argument("--ms", type=float, help="default: to the end")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    spans = between(read_trace(args.trace), args.from_ms, args.ms)
    times = line_times(spans)
    for line, one in times.items():
        print(describe(line, one))
    draw(spans, times, args.output, args.title or args.trace.name)


def read_trace(path: Path) -> list[Span]:
    """Read the spans of a Chrome trace, which may be compressed."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = []
    for event in json.loads(text)["traceEvents"]:
        if event.get("ph") != "X":
            continue
        span = _span(str(event.get("cat", "")), str(event["name"]), event.get("args", {}), event["tid"])
        if span is not None:
            found.append(replace(span, start=float(event["ts"]), end=float(event["ts"]) + float(event["dur"])))
    if not found:
        raise SystemExit(f"{path} has neither kernels nor parts that specbatch has named")
    on_gpu = any(span.line.startswith("stream") for span in found)
    # The host's spans are launches. The work of the GPU is in other spans.
    found = [span for span in found if not (on_gpu and span.line.startswith("host "))]
    found = [replace(span, line=span.line.removeprefix("host ")) for span in found]
    first = min(span.start for span in found)
    return sorted((replace(s, start=s.start - first, end=s.end - first) for s in found), key=lambda span: span.start)


def _span(category: str, name: str, args: dict[str, object], thread: object) -> Span | None:
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        lowered = (name if category == "kernel" else f"{category.removeprefix('gpu_')} {name}").lower()
        kind = next((kind for kind, words in KINDS.items() if re.search(words, lowered)), "other")
        return Span(f"stream {args.get('stream', thread)}", kind, 0, 0)
    if category not in ("user_annotation", "gpu_user_annotation") or not name.startswith(PREFIX):
        return None
    mark, side = name.removeprefix(PREFIX), "" if category.startswith("gpu") else "host "
    if mark in PHASES:
        return Span(f"{side}phases", mark, 0, 0)
    if mark in (COMMUNICATION, WAIT):
        return Span(f"{side}{mark}", mark, 0, 0)
    return Span(f"{side}{mark}", COMPUTE, 0, 0)


def between(spans: Sequence[Span], from_ms: float, ms: float | None) -> list[Span]:
    """Cut the spans to these milliseconds. Spans within a lane move to the lane's line."""
    end = max(span.end for span in spans) if ms is None else 1e3 * (from_ms + ms)
    cut = [replace(span, start=max(span.start, 1e3 * from_ms), end=min(span.end, end)) for span in spans]
    return _on_lanes([span for span in cut if span.end > span.start])


def _on_lanes(spans: list[Span]) -> list[Span]:
    lanes = [span for span in spans if span.line.startswith("lane")]
    found = []
    for span in spans:
        lane = next((lane for lane in lanes if lane.start <= span.start and span.end <= lane.end), None)
        found.append(replace(span, line=lane.line) if span.line == span.kind and lane is not None else span)
    return found


def line_times(spans: Sequence[Span]) -> dict[str, Times]:
    """Return the times by line, in the order in which the lines are drawn."""
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    lines = sorted({span.line for span in spans}, key=lambda line: (line != "phases", line))
    busy = {line: merged(span for span in spans if span.line == line) for line in lines}
    talks = {line: merged(s for s in spans if s.line == line and s.kind == COMMUNICATION) for line in lines}
    found = {}
    for line in lines:
        others = [
            part
            for other in lines
            if other != line and "phases" not in (line, other)
            for part in without(busy[other], talks[other])
        ]
        hidden = length(talks[line]) - length(without(talks[line], sorted(others)))
        total = length(busy[line])
        waits = length(merged(span for span in spans if span.line == line and span.kind == WAIT))
        found[line] = Times(total, whole - total, length(talks[line]), hidden, waits)
    return found


Part = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Part]:
    """Return the times in which at least one of the spans runs."""
    found: list[Part] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(parts: Iterable[Part], removed: Sequence[Part]) -> list[Part]:
    found = list(parts)
    for start, end in removed:
        kept = []
        for first, last in found:
            if first < min(last, start):
                kept.append((first, min(last, start)))
            if max(first, end) < last:
                kept.append((max(first, end), last))
        found = kept
    return found


def length(parts: Iterable[Part]) -> float:
    return sum(end - start for start, end in parts)


def describe(line: str, times: Times) -> str:
    waits = f" ({times.waits / 1e3:.2f} of them waiting for ranks)" if times.waits else ""
    text = f"{line}: busy {times.busy / 1e3:.2f} ms{waits}, idle {times.idle / (times.busy + times.idle):.0%}"
    if times.communication:
        share = times.hidden / times.communication
        text += f", communication {times.communication / 1e3:.2f} ms, {share:.0%} of it hidden"
    return text


def draw(spans: Sequence[Span], times: dict[str, Times], output: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 1.6 + 0.75 * len(times)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = list(times)
    for y, line in enumerate(lines):
        axes.axhspan(y - 0.4, y + 0.4, color="#f7f7f7", zorder=0)
        kinds = {span.kind for span in spans if span.line == line}
        # A span within another one is drawn over it.
        for kind in sorted(kinds, key=lambda kind: (kind in (COMMUNICATION, WAIT), kind != COMPUTE)):
            parts = merged(span for span in spans if span.line == line and span.kind == kind)
            bars = [(start / 1e3, (end - start) / 1e3) for start, end in parts]
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=COLOURS[kind], zorder=2)
    axes.set_yticks(
        range(len(lines)), [describe(line, times[line]).replace(": ", "\n", 1) for line in lines], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(min(span.start for span in spans) / 1e3, max(span.end for span in spans) / 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in shown]
    handles.append(Patch(facecolor="#f7f7f7", edgecolor="#cccccc", label="idle"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(handles), frameon=False)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
