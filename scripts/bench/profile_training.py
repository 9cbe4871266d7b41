"""Times steps of `specbatch train-draft`, and prints what they spend their time on.

    python scripts/bench/profile_training.py --kind block --blocks 8192 --draft-vocab 8192 --compile
    python scripts/bench/profile_training.py --kind block --head markov --no-profile --steps 20

Texts are random tokens, of lengths like those of answers. Options of `train-draft` that change a step have the same
names here. Prints a line of JSON: milliseconds of steps (the first ones, which compile, are left out), those of the
host until all is launched, memory, and how often the allocator asked the driver. Then the profiler's table of kernels,
of one step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch.profiler import ProfilerActivity, profile

from specbatch.config_load import load_config
from specbatch.models.eagle_config import EagleConfig
from specbatch.results.stats import commit, device_name
from specbatch.setup.resolve import resolve
from specbatch.train import command
from specbatch.train.examples import Example, batches, draft_vocabulary
from specbatch.train.start import TrainDraftOptions
from specbatch.train.trainer import Trainer, TrainSettings

_WARM = 4  # steps that are not timed
_SHORTEST, _LONGEST, _PROMPT = 96, 448, 60  # tokens of a text, and of its prompt
_NOT_HERE = {"data", "output", "held_out", "stages", "compile", "overwrite"}


def main() -> None:
    args = parse_arguments()
    names = {field.name for field in dataclasses.fields(TrainDraftOptions)}
    given = {name: value for name, value in vars(args).items() if name in names}
    options = TrainDraftOptions(data=(), output=Path("."), **given)
    run = resolve(load_config(None, [f"model.target={args.model}", *args.set]))
    batch_tokens = options.batch_tokens or (16384 if run.on_cuda else 1024)
    examples = texts(run.target.config.vocab_size, batch_tokens * (args.steps + _WARM + 2))
    described = command._description(options, run)
    ids_W, _ = draft_vocabulary(examples, described.draft_vocab_size, run.target.config.vocab_size)
    sizes = command._Sizes(batch_tokens, 512)
    if isinstance(described, EagleConfig):
        learner: Any = command._eagle_learner(options, described, run, ids_W, sizes)
    else:
        learner = command._block_learner(options, described, run, ids_W if described.has_vocab_map else None, sizes)
    settings = TrainSettings(1, None, 1e-4, 0.05, 0.0, batch_tokens, 0, options.optimizer_name)
    plan = batches([len(e.tokens) for e in examples], batch_tokens, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(settings, learner, examples, examples[:1], Path(folder), run.device, print)
        learner.load_target()
        chosen = [[examples[i] for i in indices] for indices in plan if len(indices) >= len(plan[0]) // 2]
        with trainer.host_threads():
            timed = [step(trainer, part) for part in chosen[: args.steps + _WARM]][_WARM:]
            line = {"commit": commit(), "device": device_name(str(run.device)), "options": given} | figures(timed)
            print(json.dumps(line, default=str), flush=True)
            if not args.no_profile:
                show(trainer, chosen[-1])


def texts(vocab_size: int, num_tokens: int) -> list[Example]:
    rng = random.Random(0)
    found: list[Example] = []
    while num_tokens > 0:
        length = rng.randint(_SHORTEST, _LONGEST)
        found.append(Example([rng.randrange(vocab_size) for _ in range(length)], _PROMPT, len(found), greedy=True))
        num_tokens -= length
    return found


def step(trainer: Trainer, examples: list[Example]) -> tuple[float, float]:
    """Return the milliseconds until a step is launched, and until it is done."""
    began = time.perf_counter()
    trainer._optimise(examples)
    launched = time.perf_counter()
    synchronize()
    return 1e3 * (launched - began), 1e3 * (time.perf_counter() - began)


def figures(timed: list[tuple[float, float]]) -> dict[str, Any]:
    host, whole = zip(*timed, strict=True)
    found: dict[str, Any] = {"ms": round(statistics.median(whole), 1), "all": [round(ms, 1) for ms in whole]}
    found["host_ms"] = round(statistics.median(host), 1)
    if torch.cuda.is_available():
        memory = torch.cuda.memory_stats()
        found["peak_gib"] = round(memory["allocated_bytes.all.peak"] / 2**30, 1)
        found["driver_allocations"] = memory["num_device_alloc"]
        found["driver_frees"] = memory["num_device_free"]
    return found


def show(trainer: Trainer, examples: list[Example]) -> None:
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as recorded:
        step(trainer, examples)
    by = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=80))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--compile", action="store_true")
    hints = get_type_hints(TrainDraftOptions)
    for field in dataclasses.fields(TrainDraftOptions):
        if field.name not in _NOT_HERE:
            kinds = [kind for kind in (int, float) if kind in (get_args(hints[field.name]) or (hints[field.name],))]
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=kinds[0] if kinds else str, default=field.default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
