"""A check of what FP8 changes in a model: its distributions of the next token on real text, and the accuracy in tasks
of eval.

    python scripts/check/check_fp8.py --model HF_DIRECTORY --texts 200 \\
        --tasks gsm8k humaneval --set engine.max_batch_size=256 -o fp8.json                                   # a GPU
    python scripts/check/check_fp8.py --model HF_DIRECTORY --texts 4 --variants weights                       # a CPU

`weights`: FP8 weights and inputs (`model.quantization: fp8`); `kv`: an FP8 KV cache; `both`. Texts are solved questions
of GSM8K, given to both models as they are. `kl`: nats from the unquantised model's distribution to the variant's, the
mean over tokens, with the standard error over texts; `same_top`: the share of tokens where the most likely token is the
same; `loss`: nats a token of the text.

Tasks run by `specbatch eval`, in one process for each variant. `change`: of the accuracy, row by row, in points, with
its standard error. A change of more than 1.5 standard errors, or a task that fails, ends in exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specbatch
from specbatch.batch import PagedBatch
from specbatch.config_load import load_config
from specbatch.models.decoder import Decoder
from specbatch.results.stats import commit, device_name, versions
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve

VARIANTS = {
    "none": [],
    "weights": ["model.quantization=fp8"],
    "kv": ["engine.kv_dtype=fp8_e4m3"],
    "both": ["model.quantization=fp8", "engine.kv_dtype=fp8_e4m3"],
}
ALLOWED = 1.5  # standard errors


class Model:
    """A target that computes whole texts, one at a time."""

    def __init__(self, sets: Sequence[str], longest: int) -> None:
        small = ["speculation.method=none", "engine.max_batch_size=1", f"engine.kv_cache_tokens={2 * longest}"]
        run = resolve(load_config(None, [*sets, *small, "engine.cuda_graphs=none"]))
        engine: Any = build_engine(run)
        target: Decoder = engine.executor.rounds.items[0]._target
        self.target, self.tokenizer, self.page_size = target, run.tokenizer, engine.page_size
        self.device = target.device
        self.cache = target.new_cache(-(-longest // self.page_size) * self.page_size, run.kv_dtype)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Compute log-probabilities (T, V), float32."""
        count, device = len(tokens), self.device
        numbers = torch.arange(count, device=device)
        pages = torch.arange(-(-count // self.page_size), device=device, dtype=torch.int32)[None]
        ends = np.array([0, count], dtype=np.int32)
        batch = PagedBatch(
            numbers, numbers, pages, self.page_size, torch.zeros(1, dtype=torch.int32, device=device),
            torch.from_numpy(ends).to(device), count, host_query_starts=ends,
        )  # fmt: skip
        hidden, _ = self.target.forward(torch.tensor(tokens, device=device), batch, self.cache)
        return self.target.logits(hidden).log_softmax(-1)


def distributions(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    sets = [f"model.target={args.model}", *args.set]
    base = Model(sets, args.longest)
    texts = [base.tokenizer.encode(text)[: args.longest] for text in solved_questions(args.texts)]
    for name in args.variants:
        model = Model([*sets, *VARIANTS[name]], args.longest)
        kl, same, loss, base_loss = [], [], [], []
        for tokens in texts:
            ours, theirs = base.logprobs(tokens), model.logprobs(tokens)
            following = torch.tensor(tokens[1:], device=ours.device)[:, None]
            kl.append(float((ours.exp() * (ours - theirs)).sum(-1).mean()))
            same.append(float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))
            loss.append(-float(theirs[:-1].gather(1, following).mean()))
            base_loss.append(-float(ours[:-1].gather(1, following).mean()))
        yield name, {
            "kl": fmean(kl), "kl_standard_error": stdev(kl) / len(kl) ** 0.5, "same_top": fmean(same),
            "loss": fmean(loss), "loss_unquantised": fmean(base_loss), "texts": len(texts),
            "tokens": sum(map(len, texts)),
        }  # fmt: skip
        del model
        gc.collect()


def solved_questions(count: int) -> list[str]:
    with gzip.open(Path(specbatch.__file__).parent / "evals/data/gsm8k_test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:count]
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def accuracies(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each variant with its tasks: accuracy, acceptance length, and the change from the unquantised model."""
    scores: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(["none", *args.variants]):
            output = Path(folder, name)
            command = [sys.executable, "-m", "specbatch", "eval", *args.tasks]
            command += ["-o", str(output), "--model", str(args.model), "--allow-code-execution"]
            command += [] if args.limit is None else ["--limit", str(args.limit)]
            for option in (*args.set, *VARIANTS[name]):
                command += ["--set", option]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                yield name, {"error": f"exit code {done.returncode}: {done.stderr[-1000:]}"}
                continue
            tasks = json.loads((output / "results.json").read_text())["tasks"]
            scores[name] = scores_of(output / "samples.jsonl")
            found: dict[str, Any] = {
                task: {
                    key: result[key] for key in ("accuracy", "acceptance_length", "output_tokens_per_second", "seconds")
                }
                for task, result in tasks.items()
            }
            if name != "none" and "none" in scores:
                for task in tasks:
                    found[task]["change"] = changes(scores["none"], scores[name], f"{task} ")
            yield name, found


def scores_of(samples: Path) -> dict[str, list[float]]:
    """Return the scores of all rows by task and metric, in the order of the task."""
    found: dict[str, list[float]] = {}
    # splitlines() is not used: it also ends lines at U+2028, which answers can hold.
    for line in samples.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
        row = json.loads(line)
        for metric, answer in row["filters"].items():
            found.setdefault(f"{row['task']} {metric}", []).append(float(answer["correct"]))
    return found


def changes(
    before: dict[str, list[float]], after: dict[str, list[float]], prefix: str
) -> dict[str, dict[str, float | bool]]:
    report: dict[str, dict[str, float | bool]] = {}
    for name, scores in after.items():
        if name.startswith(prefix):
            points = [100 * (b - a) for a, b in zip(before[name], scores, strict=True)]
            error = stdev(points) / len(points) ** 0.5
            value = fmean(points)
            report[name.removeprefix(prefix)] = {
                "points": value, "standard_error": error, "is_small": abs(value) <= ALLOWED * error
            }  # fmt: skip
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--variants", nargs="+", choices=[n for n in VARIANTS if n != "none"], default=["weights", "kv", "both"]
    )
    parser.add_argument("--texts", type=int, default=200, help="0: no distributions")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--limit", type=int, help="rows of a task")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "command": " ".join(sys.argv), "commit": commit(), "device": device, "versions": versions(),
    }  # fmt: skip
    parts = {"distributions": distributions if args.texts else None, "tasks": accuracies if args.tasks else None}
    for part, measure in parts.items():
        if measure is None:
            continue
        for name, found in measure(args):
            report.setdefault(part, {})[name] = found
            print(json.dumps({part: {name: found}}), flush=True)
            if args.output is not None:  # written each time, so that a run that is cut off loses nothing
                args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        gc.collect()
    tasks = [task for variant in report.get("tasks", {}).values() for task in variant.values()]
    failed = any(isinstance(task, str) for task in tasks)
    changed = [c for t in tasks if isinstance(t, dict) for c in t.get("change", {}).values() if not c["is_small"]]
    return int(failed or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
