"""scripts/check/check_vllm.py and check_estimate.py: what they make of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("scripts")


def test_speed_of_so_many_rows_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import check_vllm

    ids, output, most = tmp_path / "ids.json", tmp_path / "speed.json", list[int]()
    rows = [{"file": name, "prompt": [1]} for name in ["gsm8k_test"] * 20 + ["mt_bench"] * 300]
    ids.write_text(json.dumps({"rows": rows, "stop": [2]}))

    def runs(args: Any) -> Any:
        most.append(args.max_batch_size)
        return len

    monkeypatch.setattr(check_vllm, "_runs_in_ours", runs)
    argv = ["check_vllm.py", "speed", str(ids), "--engine", "ours", "--model", "m", "-o", str(output), "--batches"]
    monkeypatch.setattr(sys, "argv", [*argv, "1,20"])
    check_vllm.main()
    found = json.loads(output.read_text())
    assert {name: found[name] for name in found if name != "tok_s"} == {"engine": "ours", "head": None}
    assert {batch: len(speeds) for batch, speeds in found["tok_s"].items()} == {"1": 2, "20": 2}
    assert most == [128]
    monkeypatch.setattr(sys, "argv", [*argv, "1,200"])
    with pytest.raises(SystemExit, match="20 GSM8K rows, too few for 200"):
        check_vllm.main()


ESTIMATE = {"seconds": {"expected": 11.0, "low": 10.0, "high": 12.0, "load": 1.0}, "completion_tokens": {}, "trial": {}}
STATS = {"session": {"seconds": {"total": 10.0, "load": 2.0}}, "tokens": {"completion": 5}, "device": "cpu"}


@pytest.mark.parametrize(("code", "stdout"), [(1, ""), (1, "{"), (2, json.dumps(ESTIMATE))])
def test_an_estimate_that_fails_does_not_end_the_check(
    code: int, stdout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of its stderr is reported, and the other jobs run: of these, the last writes no statistics."""
    import check_estimate

    ran: list[str] = []

    def run(arguments: list[str], **_: Any) -> Any:
        kind, path = arguments[3], Path(arguments[4])
        ran.append(kind)
        if len(ran) == 1:
            return SimpleNamespace(returncode=code, stdout=stdout, stderr="no such model")
        if kind == "generate" and ran.count("generate") == 1:
            path.with_name("results.stats.json").write_text(json.dumps(STATS))
        return SimpleNamespace(returncode=0, stdout=json.dumps(ESTIMATE), stderr="the disk is full")

    monkeypatch.setattr(check_estimate.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["check_estimate.py", "--jobs", "plain,drafts,single", "--warm"])
    with pytest.raises(SystemExit, match="1"):
        check_estimate.main()
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["failed"] == f"exit code {code}: no such model"
    assert (second["error"], second["run_error"]) == (0.1, 0.25)
    assert third["failed"] == "exit code 0: the disk is full"
    assert ran == ["estimate", *["estimate", "estimate", "generate"] * 2]
