"""scripts/bench/trace_timeline.py: what a picture of a trace says, for made-up traces and a recorded one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_ranks import Forked

pytestmark = pytest.mark.usefixtures("scripts")


def event(category: str, name: str, start: float, duration: float, stream: int = 7) -> dict[str, Any]:
    where = {"stream": stream} if category == "kernel" else {}
    return {"ph": "X", "cat": category, "name": name, "ts": 1e6 + start, "dur": duration, "tid": 1, "args": where}


def written(tmp_path: Path, *events: dict[str, Any]) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "x"}, *events]}).encode()))
    return path


def test_two_streams_of_a_gpu(tmp_path: Path) -> None:
    """Communication takes 40 us, of which 30 are under the other stream's GEMM."""
    from trace_timeline import between, describe, draw, line_times, read_trace

    trace = written(
        tmp_path,
        event("kernel", "nvjet_tst_128x8", 0, 50),
        event("kernel", "one_shot_all_reduce_kernel<bf16>", 50, 40),
        event("kernel", "sm90_xmma_gemm", 60, 30, stream=20),
        event("kernel", "paged_attend_kernel", 90, 10, stream=20),
        event("user_annotation", "specbatch lane 1", 0, 5),
        event("cpu_op", "aten::mm", 0, 5),
        event("gpu_user_annotation", "specbatch target", 0, 100),
    )
    spans = read_trace(trace)
    assert [(s.line, s.kind, s.start, s.end) for s in spans if s.line.startswith("stream")] == [
        ("stream 7", "GEMM", 0, 50),
        ("stream 7", "communication", 50, 90),
        ("stream 20", "GEMM", 60, 90),
        ("stream 20", "attention", 90, 100),
    ]
    times = line_times(between(spans, 0, None))
    assert list(times) == ["phases", "stream 20", "stream 7"], "what is launched on the host is left out"
    assert vars_of(times["stream 7"]) == (90, 10, 40, 30)
    assert describe("stream 7", times["stream 7"]) == (
        "stream 7: busy 0.09 ms, idle 10%, communication 0.04 ms, 75% of it hidden"
    )
    pytest.importorskip("matplotlib")
    draw(spans, times, tmp_path / "rounds.png", "made up")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def vars_of(times: Any) -> tuple[float, ...]:
    return (times.busy, times.idle, times.communication, times.hidden)


def test_lanes_of_a_cpu(tmp_path: Path) -> None:
    from trace_timeline import between, line_times, read_trace

    trace = written(
        tmp_path,
        event("user_annotation", "specbatch target", 0, 4000),
        event("user_annotation", "specbatch lane 1", 0, 1000),
        event("user_annotation", "specbatch lane 2", 1000, 3000),
        event("user_annotation", "specbatch wait for ranks", 1500, 500),
        event("user_annotation", "ProfilerStep#1", 0, 9000),
    )
    spans = between(read_trace(trace), 0.5, 2.5)
    assert {(s.line, s.kind, s.start, s.end) for s in spans} == {
        ("phases", "target", 500, 3000),
        ("lane 1", "compute", 500, 1000),
        ("lane 2", "compute", 1000, 3000),
        ("lane 2", "wait for ranks", 1500, 2000),
    }
    assert vars_of(line_times(spans)["lane 1"]) == (500, 2000, 0, 0)
    assert line_times(spans)["lane 2"].waits == 500


def test_a_trace_without_names_is_an_error(tmp_path: Path) -> None:
    from trace_timeline import read_trace

    with pytest.raises(SystemExit, match="neither kernels nor parts"):
        read_trace(written(tmp_path, event("cpu_op", "aten::mm", 0, 5)))


@pytest.mark.slow
def test_names_are_in_traces_of_the_profiler_alone() -> None:
    import torch

    from specbatch.kernels.trace_marks import marked

    with marked("target"):
        torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace, marked("target"):
        torch.ones(1)
    assert "specbatch target" in {one.name for one in trace.events()}


@pytest.mark.slow
def test_two_lanes_of_two_ranks(tmp_path: Path) -> None:
    """The trace is one of experts that tokens travel to. A lane's line has what it computes, and where it waits for
    the other rank."""
    from profile_round import profile_rounds
    from trace_timeline import WAIT, between, line_times, read_trace

    from specbatch.config_load import load_config
    from specbatch.setup.ranks.ranked_engine import build_ranked
    from specbatch.setup.resolve import resolve

    sets = ["model.target=random:tiny-experts", "engine.device=cpu", "engine.kv_cache_tokens=8192"]
    sets += ["speculation.method=none", "engine.prefix_cache=false", "engine.two_batch_overlap=on"]
    sets += ["engine.tensor_parallel=2", "engine.expert_parallel=on", "engine.dp_attention=on"]
    engine = build_ranked(resolve(load_config(None, sets)), start=Forked)
    rounds, prompts = tmp_path / "rounds.json", tmp_path / "prompts.json"
    try:
        profile_rounds(engine, 64, 2, rounds, prompts, 16)
    finally:
        engine.close()
    for trace in (rounds, prompts):
        spans = between(read_trace(trace), 0, None)
        times = line_times(spans)
        assert {"phases", "lane 1", "lane 2"} <= set(times), trace.name
        assert all(times[lane].busy > times[lane].waits > 0 for lane in ("lane 1", "lane 2")), trace.name
        assert any(span.kind == WAIT and span.line == "lane 2" for span in spans), trace.name
