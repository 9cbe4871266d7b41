"""engine.deterministic: the same rows under other batches, chunks, graphs and draft methods, compared bit for bit.

    python scripts/check/check_deterministic.py --target random:qwen2.5-1.5b -o deterministic.json     # a GPU
    python scripts/check/check_deterministic.py --target random:tiny --rows 12 --repeats 20            # a CPU

Rows are token ids from a generator with a seed: greedy and sampled ones, short and long, some with a common beginning.
Texts, tokens, log-probabilities and usage must be equal; the field `speculation` is left out, for it says how the
tokens were drafted. One prompt is repeated among other rows, after beginnings of several lengths that it shares with
others: each gives one output. With random weights many logits are close, so that a wrong bit soon shows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbatch import LLM
from specbatch.job.stats import commit, versions

PREFIXES = (1, 511, 2048, 4097)
_IDS = 500  # token ids are below, so that each model has them


def variants(target: str, draft: str | None) -> dict[str, dict[str, Any]]:
    """What must not matter, by name; the first is the one that the others are compared with."""
    found: dict[str, dict[str, Any]] = {
        "plain": {"method": "none", "max_batch_size": 64},
        "plain, 7 rows, chunks of 200": {"method": "none", "max_batch_size": 7, "prefill_chunk_tokens": 200},
        "plain, no prefix cache, no graphs": {"method": "none", "prefix_cache": False, "cuda_graphs": "none"},
        "ngram": {"method": "ngram", "max_batch_size": 33},
        "draft model": {"method": "draft_model", "draft": target, "num_steps": 4, "max_batch_size": 50},
    }
    if draft is not None:
        found["head"] = {"method": "eagle3", "draft": draft, "num_steps": 3, "max_batch_size": 64}
        found["head, 5 steps, 20 rows"] = {"method": "eagle3", "draft": draft, "num_steps": 5, "max_batch_size": 20}
    return found


def make_rows(count: int, repeats: int, longest: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    common = [rng.randrange(_IDS) for _ in range(longest)]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        ids = common[: rng.choice((0, 16, 40))] + [rng.randrange(_IDS) for _ in range(rng.randint(1, 300))]
        row = {"id": f"row {i}", "prompt_token_ids": ids, "max_tokens": rng.randint(1, 120), "logprobs": i % 3}
        rows.append(row | ({"temperature": 0.9, "top_p": 0.95} if i % 2 else {}))
    for length in (n for n in PREFIXES if n <= longest):
        for greedy in (True, False):
            sampling = {} if greedy else {"temperature": 1.0, "seed": 7}
            one = {"id": f"prefix {length} {greedy}", "prompt_token_ids": common[:length], "max_tokens": 40} | sampling
            rows += [one] * repeats
    rng.shuffle(rows)
    return rows


def compare(results: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> int:
    """How many rows differ."""
    return sum(_content(one) != _content(other) for one, other in zip(results, expected, strict=True))


def _content(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "speculation"}


def outputs_of_repeats(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Different outputs of each repeated row."""
    found: dict[str, set[str]] = {}
    for result in results:
        if str(result["id"]).startswith("prefix"):
            found.setdefault(result["id"], set()).add(json.dumps({**_content(result), "index": 0}))
    return {name: len(texts) for name, texts in sorted(found.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:qwen2.5-1.5b")
    parser.add_argument("--draft", help="an EAGLE-3 head")
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=50, help="of each repeated row")
    parser.add_argument("--longest", type=int, default=4097, help="tokens of the longest repeated row")
    parser.add_argument("--fast", action="store_true", help="without engine.deterministic: how many rows differ then")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    rows = make_rows(args.rows, args.repeats, args.longest)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "versions": versions(),
        "rows": len(rows),
    }
    expected: list[dict[str, Any]] = []
    failed = False
    for name, options in variants(args.target, args.draft).items():
        began = time.perf_counter()
        with LLM(args.target, deterministic=not args.fast, **options) as llm:
            results = list(llm.generate(rows))
            length = llm.stats.speculation.acceptance_length
        differ = compare(results, expected or results)
        expected = expected or results
        repeats = outputs_of_repeats(results)
        seconds = round(time.perf_counter() - began, 1)
        found = {
            "rows_that_differ": differ,
            "outputs_of_repeats": repeats,
            "acceptance_length": length,
            "seconds": seconds,
        }
        report[name] = found
        print(json.dumps({name: found}), flush=True)
        failed |= not args.fast and (differ > 0 or any(count > 1 for count in repeats.values()))
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    print("deterministic: FAILED" if failed else "deterministic: ok")
    return failed


if __name__ == "__main__":
    sys.exit(main())
