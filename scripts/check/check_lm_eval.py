"""A check of `specbatch eval gsm8k` against lm-evaluation-harness: the same prompts to the byte, and the same score for
each row.

    python scripts/check/check_lm_eval.py MODEL --out DIR [--rows 200] [--minutes 25] [--data FOLDER] [--set a.b=c ...]

Needs lm-eval, too (`pip install lm-eval accelerate`; tested with 0.4.13). MODEL is a folder in Hugging Face
format. Both run greedily in float32, lm-eval with its `hf` model, --batch-size rows at once (more than one are padded,
which rounds differently); on a CPU, OMP_NUM_THREADS says how many cores they take. lm-eval answers rows until --rows or
--minutes is reached, then specbatch answers the same ones. Both keep what they have: the same command goes on.

Where two texts differ, the margin between specbatch's two most probable tokens at the first difference says whether
rounding can explain it. Exit code 1: a prompt differs, or a score differs without a tie (margin below --tie nats).
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[2] / "specbatch" / "evals" / "data"
FILTERS = ("strict-match", "flexible-extract")


def lm_eval_task() -> Any:
    """Return lm-eval's gsm8k task, with our copy of the rows (its own come from the hub) and the seeds of its command
    line."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text(encoding="utf-8"))
    files = {split: str(DATA / f"gsm8k_{split}.jsonl.gz") for split in ("train", "test")}
    config.pop("tag")
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return task


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run_lm_eval(model: str, out: Path, rows: int, minutes: float, device: str, batch_size: int) -> list[dict[str, Any]]:
    """Run lm-eval. Return one line for each row: prompt, text, and each filter's value and score."""
    from lm_eval.models.huggingface import HFLM

    task = lm_eval_task()
    task.build_all_requests(limit=rows)
    done = read_lines(out)
    lm = None
    began = time.perf_counter()
    with out.open("a", encoding="utf-8") as file:
        for first in range(len(done), len(task.instances), batch_size):
            if time.perf_counter() - began > 60 * minutes:
                break
            if lm is None:
                lm = HFLM(pretrained=model, dtype="float32", device=device, batch_size=batch_size)
            started = time.perf_counter()
            group = task.instances[first : first + batch_size]
            # The group is copied, because generate_until adds the end-of-text token to the stop strings.
            texts = lm.generate_until(copy.deepcopy(group), disable_tqdm=True)
            for index, (instance, text) in enumerate(zip(group, texts, strict=True), start=first):
                line = {"index": index, "prompt": instance.args[0], "text": text}
                instance.resps = [text]
                for chain in task._filters:
                    chain.apply([instance])
                    value = instance.filtered_resps[chain.name]
                    score = task.process_results(instance.doc, [value])["exact_match"]
                    line[chain.name] = [value, int(score)]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                done.append(line)
            file.flush()
            print(f"lm-eval: {len(done)} rows, {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return done


def run_specbatch(model: str, folder: Path, rows: int, device: str, sets: list[str]) -> list[dict[str, Any]]:
    """Run specbatch. Return the lines of samples.jsonl, with the tokens and margins of answers.jsonl."""
    options = [f"model.target={model}", "model.dtype=float32", f"engine.device={device}", "sampling.logprobs=2", *sets]
    command = [sys.executable, "-m", "specbatch", "eval", "gsm8k", "--limit", str(rows), "-o", str(folder)]
    for option in options:
        command += ["--set", option]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True)
    samples = read_lines(folder / "samples.jsonl")
    for sample, answer in zip(samples, read_lines(folder / "gsm8k" / "answers.jsonl"), strict=True):
        sample["logprobs"] = answer["logprobs"]
    return samples


def first_difference(ours: dict[str, Any], theirs: str) -> tuple[int, float]:
    """Return the first token where our text differs from theirs, and the margin there in nats between the two most
    probable tokens."""
    text, last = "", len(ours["logprobs"]) - 1  # last: the token if ours is the beginning of theirs
    for i, token in enumerate(ours["logprobs"]):
        text += token["token"]
        if not theirs.startswith(text.rstrip("\ufffd")):
            last = i
            break
    top = ours["logprobs"][last]["top"]
    return last, top[0]["logprob"] - top[1]["logprob"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=1e9, help="of lm-eval")
    parser.add_argument("--device", default="cpu", help="of both")
    parser.add_argument("--batch-size", type=int, default=1, help="of lm-eval")
    parser.add_argument("--tie", type=float, default=0.001, help="nats")
    parser.add_argument("--set", action="append", default=[], help="of specbatch")
    parser.add_argument("--lm-eval-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "lm_eval.jsonl"
    theirs = run_lm_eval(options.model, kept, options.rows, options.minutes, options.device, options.batch_size)
    if options.lm_eval_only:
        return 0
    folder = options.out / f"specbatch-{len(theirs)}"
    ours = run_specbatch(options.model, folder, len(theirs), options.device, options.set)

    prompts = texts = 0
    scores = dict.fromkeys(FILTERS, 0)
    right = {name: [0, 0] for name in FILTERS}
    unexplained = []
    for mine, other in zip(ours, theirs, strict=True):
        prompts += mine["prompt"] == other["prompt"]
        texts += mine["text"] == other["text"]
        for name in FILTERS:
            score = int(mine["filters"][name]["correct"])
            right[name][0] += score
            right[name][1] += other[name][1]
            scores[name] += score == other[name][1]
        if mine["text"] != other["text"]:
            token, margin = first_difference(mine, other["text"])
            same = all(int(mine["filters"][name]["correct"]) == other[name][1] for name in FILTERS)
            print(f"row {mine['index']}: texts part at token {token}, margin {margin:.2g} nats, scores equal: {same}")
            if not same and margin > options.tie:
                unexplained.append(mine["index"])
    n = len(theirs)
    print(f"prompts byte-identical: {prompts} of {n}; texts equal: {texts} of {n}")
    for name in FILTERS:
        print(f"{name}: {scores[name]} of {n} rows equal; right: {right[name][0]} specbatch, {right[name][1]} lm-eval")
    if unexplained:
        print(f"scores differ without a tie in rows {unexplained}")
    return int(bool(unexplained) or prompts < n)


if __name__ == "__main__":
    sys.exit(main())
