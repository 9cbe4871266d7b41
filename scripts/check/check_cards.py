"""A check of GPU memory on cards of several sizes: the memory reserved against the memory used.

    python scripts/check/check_cards.py [--cards 24 40 80] [--models llama-3-8b ...] [--rows 512]

A smaller card is this one with the rest of its memory taken: the engine starts as it would there. Random weights of
known geometries, with each of the methods: plain decoding, and trees of 60 nodes with 256 rows. Rows run to their end,
some of them with log-probabilities, some sampled (whose graphs are captured in mid-run). Prints a line of JSON for each
start; exit code 1 if one failed, ran out of memory while rows ran, or used more than was reserved.
Needs a GPU. About a minute for each start.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch

from specbatch.config_load import load_config
from specbatch.errors import SpecbatchError
from specbatch.setup.build import build_engine
from specbatch.setup.memory import GIB
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams

METHODS = {
    "none": ["speculation.method=none"],
    "eagle3, 60 nodes": [
        "speculation.method=eagle3",
        "speculation.draft=random:eagle3",
        "speculation.num_steps=5",
        "speculation.topk=8",
        "speculation.num_draft_tokens=60",
    ],
}
_USABLE = 0.965  # the free share of a card's nominal size: a 24 GB card has 23.2 GiB free
PROMPT_TOKENS = 200


def check(model: str, method: str, card: float | None, num_rows: int) -> dict[str, Any]:
    """Run one start and its rows with `card` GiB free; None: all free memory."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    taken = 0 if card is None else max(0, free - int(card * GIB))
    ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")
    found: dict[str, Any] = {"model": model, "method": method, "card_gib": round((free - taken) / GIB, 1)}
    try:
        run = resolve(load_config(None, [f"model.target=random:{model}", "engine.device=cuda", *METHODS[method]]))
        engine: Any = build_engine(run)
        found |= {name: round(value / GIB, 2) for name, value in engine.start_bytes.items()}
        found |= {
            "longest_row": engine.limits.max_prompt_tokens + 1,
            "cache_tokens": engine.num_pages * engine.page_size,
        }
        found["notes"] = [note for note in run.notes if note.startswith(("engine.", "longest row"))]
        before = torch.cuda.mem_get_info()[0]
        found["free_after_start"] = round(before / GIB, 2)
        found |= run_rows(engine, num_rows)
        found["ok"] = found["memory_shortages"] == 0 and found["grew"] <= found["graphs_reserved"] + found["eager"]
    except SpecbatchError as error:
        found |= {"error": error.message, "hint": error.hint, "ok": False}
    del ballast
    return found


def run_rows(engine: Any, num_rows: int) -> dict[str, Any]:
    """Run the rows. `grew` in the result: the GiB used in addition to those after the start, graphs that were captured
    during the run included."""
    before, least = torch.cuda.mem_get_info()[0], torch.cuda.mem_get_info()[0]
    for i in range(num_rows):
        sampled, logprobs = i >= num_rows // 2, 2 if i % 64 == 5 else None
        params = SamplingParams(
            max_tokens=64 + i % 64, temperature=0.8 if sampled else 0.0, ignore_eos=True, logprobs=logprobs
        )
        prompt = [(i * 7919 + j * 104729) % engine.limits.vocab_size for j in range(1 + i % PROMPT_TOKENS)]
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    finished = 0
    while finished < num_rows:
        finished += len(engine.step())
        least = min(least, torch.cuda.mem_get_info()[0])
    return {"memory_shortages": engine.stats.memory_shortages, "grew": round((before - least) / GIB, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=float, nargs="*", default=[24, 40, 80, 141], help="GB; 0: as it is")
    parser.add_argument("--models", nargs="*", default=["llama-3-8b", "qwen3-8b", "llama-3.2-1b"])
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    ok = True
    for card in args.cards:
        for model in args.models:
            for method in args.methods:
                found = check(model, method, card * _USABLE or None, args.rows)
                print(json.dumps(found), flush=True)
                ok &= found["ok"]
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
