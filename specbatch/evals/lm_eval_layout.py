"""The results of an evaluation as lm-evaluation-harness writes them, for programs that read its files.

Files, as there: DIR/lm-eval/MODEL/results_TIME.json, and samples_TASK_TIME.jsonl with a line for each row and filter.
The layout is that of lm-eval 0.4.13. Hashes of rows, prompts and targets are made as there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import specbatch
from specbatch.evals.metrics import metric_name
from specbatch.evals.plan import Plan
from specbatch.evals.report import Measured
from specbatch.evals.score import RowScore, accuracy
from specbatch.files.jsonl import encode_line
from specbatch.files.local import write_whole


def write_lm_eval_files(
    folder: Path,
    plans: Sequence[Plan],
    runs: Mapping[str, Measured],
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
    arguments: Mapping[str, Any],
    now: datetime,
) -> None:
    """Write the files. `runs` and `answers`: the scores and the result lines of each task. `arguments`: those of the
    command."""
    config = runs[plans[0].task.name].stats["config"]
    model = str(config["model"]["target"])
    path = folder / "lm-eval" / re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model)
    time = now.isoformat().replace(":", "-")
    hashes = {}
    for plan in plans:
        name = plan.task.name
        lines = list(_samples(plan, runs[name], answers[name]))
        hashes[name] = _hash("".join(line[key] for line in lines for key in ("doc_hash", "prompt_hash", "target_hash")))
        write_whole(path / f"samples_{name}_{time}.jsonl", b"".join(map(encode_line, lines)))
    results = {
        "results": {plan.task.name: _figures(plan, runs[plan.task.name]) for plan in plans},
        "group_subtasks": {},
        "configs": {plan.task.name: _config(plan) for plan in plans},
        "versions": {plan.task.name: _version(plan) for plan in plans},
        "n-shot": {plan.task.name: plan.num_examples for plan in plans},
        "higher_is_better": {plan.task.name: dict.fromkeys(_metrics(plan), True) for plan in plans},
        "n-samples": {plan.task.name: {"original": len(plan.rows), "effective": len(plan.rows)} for plan in plans},
        "config": {
            "model": "specbatch",
            "model_args": {"model": model, "specbatch_version": specbatch.__version__},
            "batch_size": config["engine"]["max_batch_size"],
            "device": config["engine"]["device"],
            "limit": arguments["limit"],
            "gen_kwargs": {},
        },
        "date": now.timestamp(),
        "task_hashes": hashes,
        "model_source": "specbatch",
        "model_name": model,
        "model_name_sanitized": path.name,
    }
    write_whole(path / f"results_{time}.json", f"{json.dumps(results, indent=2, ensure_ascii=False)}\n".encode())


def _metrics(plan: Plan) -> list[str]:
    """Return the names of a task's metrics. Choices have one for each filter of ours."""
    filters = [one.name for one in plan.task.scored_filters]
    return filters if plan.choices is not None else [metric_name(plan.task.metric)] * bool(filters)


def _figures(plan: Plan, run: Measured) -> dict[str, Any]:
    """Return the figures of a task, with keys such as `exact_match,strict-match`."""
    name = plan.task.name
    figures: dict[str, Any] = {"name": name, "alias": name, "sample_len": len(plan.rows)}
    for one in plan.task.scored_filters:
        metric, by = (one.name, "none") if plan.choices is not None else (*_metrics(plan), one.name)
        found = accuracy(run.scores.of(one.name))
        figures[f"{metric},{by}"] = found.value
        figures[f"{metric}_stderr,{by}"] = "N/A" if found.standard_error is None else found.standard_error
    return figures


def _config(plan: Plan) -> dict[str, Any]:
    """Return the options of a task under lm-eval's names."""
    task, prompt = plan.task, plan.task.prompt
    choices = {} if prompt.choices is None else {"doc_to_choice": prompt.choices}
    return {
        "task": task.name,
        "dataset_path": plan.source,
        "test_split": task.data.split,
        "output_type": "generate_until" if plan.choices is None else "multiple_choice",
        "doc_to_text": prompt.question,
        "doc_to_target": prompt.answer,
        **choices,
        "description": prompt.description,
        "target_delimiter": prompt.answer_delimiter,
        "fewshot_delimiter": prompt.example_delimiter,
        "num_fewshot": plan.num_examples,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in _metrics(plan)],
        "generation_kwargs": _generation(plan),
        "filter_list": [{"name": one.name} for one in task.scored_filters],
        "repeats": plan.sampling.n,
        "metadata": {"version": _version(plan), "sha256": task.sha256},
    }


def _generation(plan: Plan) -> dict[str, Any]:
    sampling = plan.sampling
    return {
        "until": list(sampling.stop),
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "max_gen_toks": sampling.max_tokens,
    }


def _version(plan: Plan) -> float | str:
    with contextlib.suppress(ValueError):
        return float(plan.task.version)
    return plan.task.version


def _samples(plan: Plan, run: Measured, answers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a task. Rows that failed, and tasks without scores, have none."""
    for index, (row, answer, scores) in enumerate(zip(plan.rows, answers, run.scores.rows, strict=True)):
        if not scores:
            continue
        prompt = plan.prompts[index]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        target = plan.answers[index] if plan.answers is not None else ""
        line = {"doc_id": index, "doc": row, "target": target}
        hashes = {
            "doc_hash": _hash(json.dumps(row, indent=2, default=str, ensure_ascii=False)),
            "prompt_hash": _hash(text),
            "target_hash": _hash(target),
        }
        if plan.choices is not None:
            texts = [plan.choice_start + choice for choice in plan.choices[index]]
            found = [[str(score["logprob"])] for score in answer["choice_scores"]]
            yield {
                **line,
                "arguments": {f"gen_args_{i}": {"arg_0": text, "arg_1": choice} for i, choice in enumerate(texts)},
                "resps": [[one] for one in found],
                "filtered_resps": found,
                "filter": "none",
                "metrics": _metrics(plan),
                **hashes,
                **{name: one.correct for name, one in scores.items()},
            }
            continue
        arguments = {"gen_args_0": {"arg_0": text, "arg_1": _generation(plan)}}
        texts = [one["text"] for one in answer.get("choices", [answer])]
        for name, one in scores.items():
            yield {
                **line,
                "arguments": arguments,
                "resps": [texts],
                "filtered_resps": _values(one),
                "filter": name,
                "metrics": _metrics(plan),
                **hashes,
                _metrics(plan)[0]: one.correct,
            }


def _values(scores: RowScore) -> list[Any]:
    return scores.values if len(scores.values) == 1 else [scores.values]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
