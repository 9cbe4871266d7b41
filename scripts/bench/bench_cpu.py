"""A benchmark on a CPU against transformers: same weights, same threads, same dtype (float32), one process.

    python scripts/bench/bench_cpu.py plain --target DIR --data gsm8k_test.jsonl      # batch 1 and 8, plain and n-gram
    python scripts/bench/bench_cpu.py pair --target DIR --draft DIR --data gsm8k_test.jsonl # acceptance lengths
    python scripts/bench/bench_cpu.py assisted --target DIR --draft DIR --data ... --rows 1 # speed at batch 1

Prints one JSON line a measurement. `plain` generates exactly --max-tokens tokens a row (end of sequence is ignored), so
that the batch stays full; the others let rows end.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1] / "check"))
from prompts import question_prompts

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import BatchEngine, Request, RngKey, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "pair", "assisted"])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    show(what="machine", processor=platform.processor(), threads=torch.get_num_threads(), torch=torch.__version__)
    prompts = question_prompts(args.data, load_tokenizer(args.target), None if args.what == "plain" else args.rows)
    if args.what == "plain":
        plain(args.target, prompts, args.max_tokens)
    elif args.what == "pair":
        pair(args.target, args.draft, prompts, args.max_tokens)
    else:
        assisted(args.target, args.draft, prompts, args.max_tokens)


def plain(target: Path, prompts: list[list[int]], max_tokens: int) -> None:
    """Measure output tokens per second of full batches, prefill included."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for batch in (1, 8):
        for method in ("none", "ngram"):
            config = config_for(target, SpeculationSection(method=method), batch)
            engine = build_engine(resolve(config))
            generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4))
            show(engine="specbatch", method=method, batch=batch, **generate(engine, prompts[:batch], params))
    model = load_reference(target)
    for batch in (1, 8):
        ids, mask = left_padded(prompts[:batch])
        reference(model, ids, mask, 4)
        seconds = reference(model, ids, mask, max_tokens)[1]
        show(
            engine="transformers", method="none", batch=batch, tokens_per_second=round(batch * max_tokens / seconds, 1)
        )


def pair(target: Path, draft: Path, prompts: list[list[int]], max_tokens: int) -> None:
    """Measure the acceptance length of the draft model for three chains."""
    params = SamplingParams(max_tokens=max_tokens)
    base = SpeculationSection(method="draft_model", draft=str(draft))
    for num_draft_tokens in (4, 5, 9):
        speculation = replace(base, num_steps=num_draft_tokens - 1, num_draft_tokens=num_draft_tokens)
        engine = build_engine(resolve(config_for(target, speculation, len(prompts))))
        show(
            engine="specbatch",
            method="draft_model",
            num_draft_tokens=num_draft_tokens,
            batch=len(prompts),
            **generate(engine, prompts, params),
        )
        del engine


def assisted(target: Path, draft: Path, prompts: list[list[int]], max_tokens: int) -> None:
    """Measure the speed at batch 1: plain, n-gram and draft model, and transformers' plain and assisted generation."""
    params = SamplingParams(max_tokens=max_tokens)
    base = SpeculationSection(method="draft_model", draft=str(draft))
    for speculation in (
        SpeculationSection(method="none"),
        SpeculationSection(method="ngram"),
        replace(base, num_steps=4),
    ):
        engine = build_engine(resolve(config_for(target, speculation, 1)))
        show(engine="specbatch", method=speculation.method, batch=1, **generate(engine, prompts, params))
        del engine
    model = load_reference(target)
    for name, assistant in (("none", None), ("assisted", load_reference(draft))):
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            ids, mask = left_padded([prompt])
            new, took = reference(model, ids, mask, max_tokens, assistant, exact=False)
            tokens, seconds = tokens + new, seconds + took
        show(engine="transformers", method=name, batch=1, tokens_per_second=round(tokens / seconds, 2))


def config_for(target: Path, speculation: SpeculationSection, batch: int) -> Config:
    return Config(
        model=ModelSection(target=str(target), dtype="float32"),
        speculation=speculation,
        engine=EngineSection(max_batch_size=batch, kv_cache_tokens=16384),
    )


def generate(engine: BatchEngine, prompts: list[list[int]], params: SamplingParams) -> dict[str, float | None]:
    before = engine.stats.generated_tokens
    began, left = time.perf_counter(), len(prompts)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    while left:
        left -= len(engine.step())
    seconds = time.perf_counter() - began
    length = engine.stats.speculation.acceptance_length
    tokens = engine.stats.generated_tokens - before
    return {
        "tokens_per_second": round(tokens / seconds, 2),
        "acceptance_length": round(length, 3) if length else None,
        "decode_ms_per_round": round(engine.stats.decode_seconds / engine.stats.rounds * 1e3, 1),
    }


def load_reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def reference(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    max_tokens: int,
    assistant: PreTrainedModel | None = None,
    exact: bool = True,
) -> tuple[int, float]:
    """Run transformers' greedy generate. Return the number of new tokens, and the seconds."""
    options = {"min_new_tokens": max_tokens} if exact else {}
    with torch.inference_mode():
        began = time.perf_counter()
        out: torch.Tensor = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            assistant_model=assistant,
            **options,
        )
        return out.shape[1] - ids.shape[1], time.perf_counter() - began


def show(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
