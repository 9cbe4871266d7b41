"""scripts/bench/bench.py: the rows that every engine runs, the floor, comparison, and a whole run on the CPU."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from specbatch.config_load import load_config
from specbatch.setup import memory
from specbatch.setup.resolve import ResolvedRun, resolve

TINY = ["--target", "random:tiny", "--set", "engine.device=cpu", "--set", "model.dtype=float64"]
TINY += ["--set", "engine.kv_cache_tokens=4096"]


pytestmark = pytest.mark.usefixtures("scripts")


@pytest.mark.parametrize(
    ("name", "tokens_in", "tokens_out", "digest"),
    [
        ("mixed-1k-512", 510038, 267643, "201b9f8d048a55e6"),
        ("short-in-long-out", 65858, 399900, "53fcae6279df7e15"),
    ],
)
def test_file_jobs_are_the_agreed_rows(name: str, tokens_in: int, tokens_out: int, digest: str) -> None:
    """Digests of the rows that the other engines' script makes."""
    from bench_work import file_rows

    rows = file_rows(name, 128256)
    assert (len(rows.prompts), rows.tokens_in, rows.tokens_out) == (512, tokens_in, tokens_out)
    assert hashlib.sha256(json.dumps([rows.prompts, rows.lengths]).encode()).hexdigest()[:16] == digest
    small = file_rows(name, 512)
    assert small.lengths == rows.lengths
    assert [len(p) for p in small.prompts] == [len(p) for p in rows.prompts]
    assert max(map(max, small.prompts)) < 512


def test_uniform_rows_are_the_agreed_ones() -> None:
    from bench_work import UniformRows

    rows = UniformRows(1000, 512, 128256)
    first = rows.draw(2)
    assert first.prompts[0][:4] == [111680, 51494, 100346, 117686]
    assert first.lengths == [512, 512]
    assert rows.draw(1).prompts[0] not in first.prompts
    assert rows.draw(1, tokens_out=1).lengths == [1]


@cache
def resolved(target: str, *sets: str) -> ResolvedRun:
    options = [f"model.target={target}", "model.dtype=bfloat16", "engine.device=cpu", "engine.kv_cache_tokens=4096"]
    return resolve(load_config(None, [*options, *sets]))


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shapes of large models be resolved on a machine with little free memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=90 << 30, total=90 << 30))
    monkeypatch.setattr(memory, "_container_limit", lambda: 90 << 30)


def test_the_floor_counts_what_a_round_reads() -> None:
    """Llama-3-8B: 15.0 GB of target weights, 0.85 GB for draft-extend (with fc), 0.75 GB for a further draft pass."""
    from bench_floor import DeviceRates, prefill_floor, round_floor, round_passes

    run = resolved("random:llama-3-8b", "speculation.method=eagle3", "speculation.draft=random:eagle3-32k")
    assert [round(2 * p.weights.total / 1e9, 2) for p in round_passes(run, 2.5)] == [15.01, 0.85, 0.75, 0.75]
    rates = DeviceRates(3.85e12, 780e12)
    assert 4.50e-3 < round_floor(run, rates, batch=1, context=0, committed=2.5) < 4.52e-3
    # 128 KiB of keys and values a token in the target, 4 KiB for each of three draft passes.
    more = round_floor(run, rates, 16, 1000, 2.5) - round_floor(run, rates, 16, 0, 2.5)
    assert more == pytest.approx(16 * 1000 * (131072 + 3 * 4096) / 3.85e12)
    rounded = replace(run, kv_dtype=torch.float8_e4m3fn)
    less = round_floor(rounded, rates, 16, 1000, 2.5) - round_floor(rounded, rates, 16, 0, 2.5)
    assert less == pytest.approx(more / 2)
    # On two ranks: half of the target and of the head's layer, all of its LM head (0.26 GB) in each of three passes.
    ranks = replace(run, config=replace(run.config, engine=replace(run.config.engine, tensor_parallel=2)))
    halves = (15.01 + 0.85 + 2 * 0.75 + 3 * 0.262) / 2
    assert round_floor(ranks, rates, 1, 0, 2.5) == pytest.approx(1e9 * halves / 3.85e12, rel=2e-3)
    assert round_floor(ranks, rates, 16, 1000, 2.5) - round_floor(ranks, rates, 16, 0, 2.5) == pytest.approx(more / 2)
    # At large batches the products are what counts: 4 nodes of 15 GFLOP each.
    assert 4 * 15e9 * 2000 / 780e12 < round_floor(run, rates, 2000, 0, 2.5) < 4 * 17e9 * 2000 / 780e12
    plain = resolved("random:llama-3-8b", "speculation.method=none")
    assert 4.6 < prefill_floor(plain, rates, [1000] * 256) < 4.7
    assert prefill_floor(run, rates, [1000] * 256) > prefill_floor(plain, rates, [1000] * 256)


@pytest.mark.parametrize(
    ("batch", "nodes", "gigabytes"),
    [
        (1, 1, 6.2),
        (16, 4, 61.1),
        (256, 1, 86.2),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in ((1, 2, 9.6), (1, 4, 15.8), (16, 1, 41.4), (64, 1, 66.0), (64, 4, 66.9))
        ),
    ],
)
def test_the_floor_counts_the_experts_that_tokens_choose(batch: int, nodes: int, gigabytes: float) -> None:
    """Qwen3-30B-A3B with 1,024 tokens of context, worked out by hand."""
    from bench_floor import DeviceRates, round_floor

    method = "none" if nodes == 1 else "ngram"
    run = resolved("random:qwen3-30b-a3b", f"speculation.method={method}", f"speculation.num_draft_tokens={nodes}")
    found = round_floor(run, DeviceRates(1e9, 1e18), batch, 1024, 1.0)
    assert found == pytest.approx(gigabytes, rel=0.01)
    # Large batches are bound by arithmetic: 3.0e9 weights a token without the embeddings, not 30e9.
    flops = round_floor(run, DeviceRates(1e18, 1e12), batch, 0, 1.0) / (batch * nodes)
    assert flops == pytest.approx(2 * 3.04e-3, rel=0.02)


@pytest.mark.parametrize(
    ("sets", "gigabytes"),
    [
        pytest.param(["speculation.method=ngram"], [15.01], marks=pytest.mark.wide),
        (["speculation.method=none"], [15.01]),
        # The head of an EAGLE-1 is the target's: 1.05 GB of it in every pass.
        (
            ["speculation.method=eagle", "speculation.draft=random:eagle", "speculation.num_steps=2"],
            [15.01, 1.55, 1.55],
        ),
        pytest.param(
            ["speculation.method=draft_model", "speculation.draft=random:llama-3.2-1b", "speculation.num_steps=2"],
            [15.01, 2.47, 2.47],
            marks=pytest.mark.wide,
        ),
        # A head of 4 layers: one pass over committed tokens, one over all mask tokens.
        pytest.param(
            ["speculation.method=peagle", "speculation.draft=random:peagle"],
            [15.01, 2.95, 2.85],
            marks=pytest.mark.wide,
        ),
        # 5 layers of 0.44 GB and the target's LM head for a block; fc, queries, keys and values for committed tokens.
        (["speculation.method=block", "speculation.draft=random:dflash"], [15.01, 3.23, 0.42]),
    ],
)
def test_passes_of_other_methods(sets: list[str], gigabytes: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is fixed, since two models that are only planned must not fail where others use the machine."""
    from bench_floor import round_passes

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30, total=64 << 30))
    found = [round(2 * p.weights.total / 1e9, 2) for p in round_passes(resolved("random:llama-3-8b", *sets), 2.0)]
    assert found == gigabytes


def test_methods() -> None:
    from bench import parse_method

    method = parse_method("eagle3:3/1/4@2.5")
    assert (method.steps, method.topk, method.tokens, method.acceptance) == (3, 1, 4, 2.5)
    assert method.draft == "random:eagle3-32k"
    speculation = load_config(None, method.sets()).speculation
    assert (speculation.method, speculation.num_steps, speculation.simulate_acceptance) == ("eagle3", 3, 2.5)
    assert parse_method("draft_model=random:llama-3.2-1b").draft == "random:llama-3.2-1b"
    assert load_config(None, parse_method("none").sets()).speculation.draft is None
    for wrong in ("eagle4", "eagle3:3", "none@", "eagle3:3/1/4@x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_method(wrong)


def test_figures_of_others(tmp_path: Path) -> None:
    from bench_compare import ratios, read_peer

    def peer(name: str, **content: Any) -> Any:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"engine": name, "k": 3, "acc": 2.5, **content}))
        return read_peer(path)

    rows = peer("vllm", rows=[{"concurrency": 4, "tok_s": 200.0}])
    jobs = peer("other", jobs={"mixed-1k-512": {"wall_s": 30.0}})
    assert rows.same_method(3, 1, 2.5)
    assert not rows.same_method(3, 1, None)
    assert not rows.same_method(0, 1, None)
    assert peer("plain", k=0, acc=1.0).same_method(0, 1, None)
    assert ratios([rows, jobs], "uniform", 4, tok_s=250.0, wall_s=1.0) == {"vllm": 1.25}
    assert ratios([rows, jobs], "uniform", 1, tok_s=250.0, wall_s=1.0) == {}
    assert ratios([rows, jobs], "mixed-1k-512", 512, tok_s=1.0, wall_s=20.0) == {"other": 1.5}
    better = peer("vllm", rows=[{"concurrency": 4, "tok_s": 500.0}])
    assert ratios([better, rows], "uniform", 4, tok_s=250.0, wall_s=1.0) == {"vllm": 0.5}
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="no figures"):
        read_peer(tmp_path / "x.json")


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import bench
    from bench_work import Rows

    monkeypatch.setattr(bench, "file_rows", lambda name, vocab_size: Rows([[1, 2, 3], [4] * 20], [5, 3]))
    monkeypatch.setattr(bench, "warm_up_rows", lambda vocab_size: Rows([[5]], [2]))
    monkeypatch.setattr(bench, "measure_device", lambda device: bench.DeviceRates(1e10, 1e11))
    alive: list[weakref.ref[Any]] = []
    build = bench.build_engine

    def build_one(run: ResolvedRun) -> Any:
        gc.collect()
        assert not any(ref() for ref in alive), "the engine of the method before is still there"
        engine = build(run)
        alive.append(weakref.ref(engine))
        if run.config.speculation.method == "eagle3":
            engine.start_seconds = {"weights": 0.25}
        return engine

    monkeypatch.setattr(bench, "build_engine", build_one)
    monkeypatch.setattr(bench, "Engine", object)
    phases_of = {"draft": 0.001, "verify": 0.002, "round": 0.0035}
    monkeypatch.setattr(bench, "time_phases", lambda engine, batch, context: phases_of | {"draft": 0.001 * batch})
    peer = {"engine": "vllm", "k": 0, "acc": 1.0, "rows": [{"concurrency": 2, "tok_s": 1.0}]}
    Path("vllm.json").write_text(json.dumps(peer))
    arguments = ["bench.py", *TINY, "--concurrency", "1,2", "--tokens", "12/4", "--max-running", "2", "-o", "out.json"]
    arguments += ["--workload", "uniform", "--workload", "mixed-1k-512", "--compare", "vllm.json", "--commit", "abc"]
    arguments += ["--compare", "missing.json"]
    arguments += ["--method", "none", "--method", "eagle3:2/1/3@2", "--method", "eagle3:2/2/4"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1, "a method that failed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WARNING: missing.json holds no figures")
    report = json.loads(Path("out.json").read_text())
    assert report["commit"] == "abc"
    plain, refused, tree = report["methods"]
    assert "needs engine.device cuda" in refused["error"]
    assert (plain["simulated"], refused["simulated"], plain["random_weights"]) == (False, True, True)
    assert plain["config"]["engine"]["max_batch_size"] == 2
    assert [(c["workload"], c["concurrency"]) for c in tree["cells"]] == [
        ("uniform", 1),
        ("uniform", 2),
        ("mixed-1k-512", 2),
    ]
    for entry in (plain, tree):
        one, two, job = entry["cells"]
        assert (one["out_tokens"], two["out_tokens"], job["out_tokens"]) == (4, 8, 8)
        assert (two["in_tokens"], job["in_tokens"]) == (24, 23)
        assert two["mean_batch"] <= 2
        for cell in entry["cells"]:
            assert cell["floor_ms"] > 0
            seconds = cell["out_tokens"] / cell["tok_s"]
            # Both figures are rounded. The error of the speed is large if the machine is busy.
            rounding = 0.001 + seconds * 0.05 / cell["tok_s"]
            assert cell["wall_s"] == pytest.approx(seconds, abs=rounding)
            assert "warning" not in cell
    assert plain["cells"][0]["rounds"] == 3
    assert list(plain["cells"][1]["ratios"]) == ["vllm"]
    assert "ratios" not in tree["cells"][1]
    assert tree["start_seconds"] == {"weights": 0.25}
    phases, cell = tree["cells"][1]["phases_ms"], tree["cells"][1]
    assert phases == {"draft": 0.002, "verify": 0.002, "round": 0.0035}
    assert cell["rest_ms"] == pytest.approx(cell["ms_per_round"] - 0.0035, abs=1e-3)
    assert sum(line.startswith(("uniform ", "mixed-1k-512 ")) for line in lines) == 6
    assert "engine ready after" in "\n".join(lines)
    last = json.loads(lines[-1])
    assert last["methods"]["none"]["cells"]["uniform 2"]["tok_s"] == plain["cells"][1]["tok_s"]
    assert "config" not in last["methods"]["none"]


def test_the_time_limit_skips_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench

    monkeypatch.setattr(bench, "build_engine", lambda run: pytest.fail("built"))
    run = bench.Bench(bench.parse_arguments([*TINY, "--method", "none", "--time-limit", "0"]))
    assert run.run() is False
    assert run.report["methods"][0]["skipped"] == "time limit"


def test_the_device_can_be_measured() -> None:
    from bench_floor import measure_device

    rates = measure_device(torch.device("cpu"))
    assert rates.copy_bytes_per_second > 1e8
    assert rates.matmul_flops_per_second > 1e8
