"""lm-evaluation-harness itself: its own task files run on specbatch, and `eval` writes the same layout.

Rows are local files, which a task file of the harness names in place of those of the hub (`include`).
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import specbatch
from specbatch.cli import app

pytestmark = pytest.mark.wide
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

ROOT = Path(specbatch.__file__).resolve().parent.parent
TASKS = Path(lm_eval.__file__).parent / "tasks"
MODEL = "builtin:smollm2-135m-instruct"
QUESTIONS = ["Water is", "The sky is blue, and grass is", "One, two, three,", "A cat is an"]
CHOICES = [["a liquid", "of iron"], ["green", "Tuesday"], ["four", "because"], ["animal", "hour ago"]]
ROWS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files that include the harness's own, and their rows."""
    folder = tmp_path_factory.mktemp("lm_eval")
    for split in ("train", "test"):
        packed = ROOT / "specbatch" / "evals" / "data" / f"gsm8k_{split}.jsonl.gz"
        rows = gzip.decompress(packed.read_bytes()).decode().splitlines()[:ROWS]
        (folder / f"gsm8k_{split}.jsonl").write_text("\n".join(rows) + "\n")
    with (folder / "arc.jsonl").open("w") as file:
        for i, (question, texts) in enumerate(zip(QUESTIONS, CHOICES, strict=True)):
            choices = {"text": texts[:: 1 if i % 2 else -1], "label": ["A", "B"]}
            row = {"id": str(i), "question": question, "choices": choices, "answerKey": "BA"[i % 2]}
            file.write(json.dumps(row) + "\n")
    tasks = folder / "tasks"
    tasks.mkdir()
    local = {"dataset_path": "json", "dataset_name": None}
    files = {split: str(folder / f"gsm8k_{split}.jsonl") for split in ("train", "test")}
    gsm8k = {"include": str(TASKS / "gsm8k/gsm8k.yaml"), "task": "gsm8k_local", "num_fewshot": 1}
    (tasks / "gsm8k.yaml").write_text(yaml.dump({**gsm8k, **local, "dataset_kwargs": {"data_files": files}}))
    arc = {"include": str(TASKS / "arc/arc_easy.yaml"), "task": "arc_local", **local}
    splits = {"training_split": None, "validation_split": None}
    files = {"test": str(folder / "arc.jsonl")}
    (tasks / "arc.yaml").write_text(yaml.dump({**arc, **splits, "dataset_kwargs": {"data_files": files}}))
    return folder


@pytest.fixture(scope="module")
def harness(folder: Path) -> Path:
    """The folder that the harness itself has written: both tasks on the built-in model, by its own command line."""
    command = [sys.executable, str(ROOT / "scripts" / "lm_eval_model.py"), "run", "--model", "specbatch"]
    command += ["--model_args", f"model={MODEL},kv_cache_tokens=4096,max_batch_size=8", "--device", "cpu"]
    command += ["--tasks", "gsm8k_local", "arc_local", "--include_path", str(folder / "tasks")]
    command += ["--output_path", str(folder / "out"), "--log_samples", "--gen_kwargs", "max_gen_toks=16"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder / "out" / "builtin__smollm2-135m-instruct"


def read(folder: Path, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results, and the samples of a task."""
    (results,) = folder.glob("results_*.json")
    (samples,) = folder.glob(f"samples_{task}_*.jsonl")
    return json.loads(results.read_text()), [json.loads(line) for line in samples.read_text().splitlines()]


def test_a_generation_task_of_the_harness(harness: Path) -> None:
    results, samples = read(harness, "gsm8k_local")
    figures = results["results"]["gsm8k_local"]
    assert results["n-samples"]["gsm8k_local"] == {"original": ROWS, "effective": ROWS}
    assert results["n-shot"]["gsm8k_local"] == 1
    assert {"exact_match,strict-match", "exact_match,flexible-extract"} <= set(figures)
    samples = [sample for sample in samples if sample["filter"] == "strict-match"]
    assert len(samples) == ROWS
    options = {"prompts_as_chat": False, "generation_config": "none", "kv_cache_tokens": 4096}
    with specbatch.LLM(MODEL, device="cpu", method="none", **options) as llm:
        for sample in samples:
            (arguments,) = sample["arguments"].values()
            settings = arguments["arg_1"]
            row = {"prompt": arguments["arg_0"], "stop": settings["until"], "max_tokens": settings["max_gen_toks"]}
            (result,) = llm.generate([row])
            assert sample["resps"] == [[result.text]]


def test_a_task_of_multiple_choice_of_the_harness(harness: Path) -> None:
    results, samples = read(harness, "arc_local")
    figures = results["results"]["arc_local"]
    assert figures["acc,none"] == 1.0, "a model of 135M knows these"
    assert len(samples) == len(QUESTIONS)
    assert all(float(logprob) < 0 for sample in samples for [[logprob, _]] in sample["resps"])


OURS: dict[str, Any] = {
    "name": "arc_ours",
    "version": 1,
    "data": {"file": "arc.jsonl"},
    "prompt": {
        "question": "Question: {{question}}\nAnswer:",
        "choices": "{{ choices.text | tojson }}",
        "answer": "{{ choices.label.index(answerKey) }}",
    },
    "metric": {"name": "multiple_choice"},
}


def test_eval_writes_the_layout_of_the_harness(folder: Path, harness: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same task in both: equal figures, and all keys that do not describe lm-eval itself."""
    (folder / "ours.yaml").write_text(yaml.dump(OURS))
    arguments = ["eval", "--task", str(folder / "ours.yaml"), "-o", str(folder / "ours")]
    for option in ("engine.device=cpu", "engine.kv_cache_tokens=4096", "engine.max_batch_size=8"):
        arguments += ["--set", option]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    theirs, their_samples = read(harness, "arc_local")
    ours, our_samples = read(folder / "ours" / "lm-eval" / harness.name, "arc_ours")
    for name in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples"):
        assert set(ours[name]) == {"arc_ours"}
    assert set(ours["results"]["arc_ours"]) == set(theirs["results"]["arc_local"])
    for key in ("acc,none", "acc_norm,none", "acc_stderr,none", "acc_norm_stderr,none", "sample_len"):
        assert ours["results"]["arc_ours"][key] == pytest.approx(theirs["results"]["arc_local"][key])
    assert ours["n-samples"]["arc_ours"] == theirs["n-samples"]["arc_local"]
    assert ours["higher_is_better"]["arc_ours"] == theirs["higher_is_better"]["arc_local"]
    assert set(ours["config"]) <= set(theirs["config"])
    assert set(ours) <= set(theirs)
    for one, other in zip(our_samples, their_samples, strict=True):
        assert set(one) == set(other)
        for key in ("doc_id", "doc", "target", "arguments", "filter", "metrics", "acc", "acc_norm"):
            assert one[key] == other[key], key
        for key in ("doc_hash", "prompt_hash", "target_hash"):
            assert one[key] == other[key], key
        ours_found, theirs_found = ([float(each[0]) for each in sample["filtered_resps"]] for sample in (one, other))
        assert ours_found == pytest.approx(theirs_found, abs=1e-3)
    assert ours["task_hashes"]["arc_ours"] == theirs["task_hashes"]["arc_local"]

    from lm_eval.utils import make_table

    assert "|arc_ours|" in make_table(ours).replace(" ", "")
