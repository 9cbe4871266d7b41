"""A check of greedy output against transformers, and of all methods and schedules against each other, on real text.

    python scripts/check/check_transformers.py --hf DIR --data gsm8k_test.jsonl [--rows 50] [-o report.json]

DIR is a Hugging Face directory (float32 on CPU here). The draft model is the target cut to its first layers, the EAGLE
heads are random: the text must not depend on how good a draft is. Where the text differs from transformers', the report
names the row, the position and the margin between the two most likely tokens there; the exit code is 1 if any margin is
1e-4 or more, or if two of our own runs differ at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from prompts import question_prompts
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.models.eagle_config import EagleConfig, expected_eagle_tensors
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import BatchEngine, Completion, Request, RngKey, SamplingParams

TIE_MARGIN = 1e-4
IN_FULL = ("none", "ngram", "draft_model chain 2/1/3")  # these run all rows; the others run --few-rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-layers", type=int, default=8)
    parser.add_argument("--few-rows", type=int, default=20, help="rows of the runs that are not IN_FULL")
    parser.add_argument("--skip", action="append", default=[], help="a run to leave out; may be repeated")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    prompts = question_prompts(args.data, load_tokenizer(args.hf), args.rows)
    params = SamplingParams(max_tokens=args.max_tokens, logprobs=2)
    report: dict[str, Any] = {"rows": len(prompts), "max_tokens": args.max_tokens, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        configs = variants(args.hf, Path(folder), args.draft_layers)
        ours: dict[str, list[Completion]] = {}
        for name, config in configs.items():
            if name in args.skip:
                continue
            began = time.perf_counter()
            engine = build_engine(resolve(config))
            rows = len(prompts) if name in IN_FULL else args.few_rows
            ours[name] = run(engine, prompts[:rows], params)
            length, stats = engine.stats.speculation.acceptance_length, engine.stats
            report[name] = {
                "rows": rows,
                "seconds": round(time.perf_counter() - began, 1),
                "acceptance_length": round(length, 3) if length else None,
                "preemptions": stats.preemptions,
                "cached_prompt_tokens": stats.cached_prompt_tokens,
                "rows_with_other_tokens_than_none": sum(
                    a.token_ids != b.token_ids for a, b in zip(ours[name], ours["none"], strict=False)
                ),
                "rows_with_other_logprobs_than_none": sum(
                    a.logprobs != b.logprobs for a, b in zip(ours[name], ours["none"], strict=False)
                ),
            }
            print(name, json.dumps(report[name]), flush=True)
            if name == "none":
                report["transformers"] = compare(args.hf, prompts, args.max_tokens, ours["none"])
                print("transformers", json.dumps(report["transformers"]), flush=True)
    own_differences = sum(
        r["rows_with_other_tokens_than_none"] for r in report.values() if isinstance(r, dict) and "preemptions" in r
    )
    bad = [d for d in report["transformers"]["differences"] if d["margin"] >= TIE_MARGIN]
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{own_differences} differences between our runs, {len(bad)} unexplained differences from transformers")
    return 1 if bad or own_differences else 0


def variants(target: Path, folder: Path, draft_layers: int) -> dict[str, Config]:
    """Return one config for each method, shape and schedule to compare."""
    base = Config(
        model=ModelSection(target=str(target), dtype="float32"),
        speculation=SpeculationSection(method="none"),
        engine=EngineSection(kv_cache_tokens=16384),
    )
    draft = cut_model(target, folder / "draft", draft_layers)
    heads = {kind: random_head(target, folder / kind, kind) for kind in ("eagle", "eagle3")}
    chain = {"num_steps": 2}
    tree = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}
    speculations = {"none": SpeculationSection(method="none"), "ngram": SpeculationSection(method="ngram")}
    for method, path in (("draft_model", draft), ("eagle", heads["eagle"]), ("eagle3", heads["eagle3"])):
        for name, shape in (("chain 2/1/3", chain), ("tree 2/2/4", tree)):
            speculations[f"{method} {name}"] = SpeculationSection(method=method, draft=str(path), **shape)  # type: ignore[arg-type]
    configs = {name: replace(base, speculation=s) for name, s in speculations.items()}
    configs["ngram, batch 1"] = replace(configs["ngram"], engine=replace(base.engine, max_batch_size=1))
    configs["ngram, no prefix cache, chunks of 64"] = replace(
        configs["ngram"], engine=replace(base.engine, prefix_cache=False, prefill_chunk_tokens=64)
    )
    configs["draft_model tree 2/2/4, preempted"] = replace(
        configs["draft_model tree 2/2/4"], engine=replace(base.engine, kv_cache_tokens=1536)
    )
    return configs


def cut_model(target: Path, folder: Path, num_layers: int) -> Path:
    """Write the target without its upper layers, as a Hugging Face directory."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    checkpoint = open_checkpoint(target)
    layers = tuple(f"model.layers.{i}." for i in range(num_layers))
    names = [n for n in checkpoint.tensors.shapes() if not n.startswith("model.layers.") or n.startswith(layers)]
    save_file({name: checkpoint.tensors.load(name) for name in names}, folder / "model.safetensors")
    return folder


def random_head(target: Path, folder: Path, kind: str) -> Path:
    """Write an EAGLE head with random weights, in the public checkpoint format."""
    folder.mkdir()
    raw = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    width = 4096 if kind == "eagle3" else raw["vocab_size"]
    if kind == "eagle3":
        raw |= {"draft_vocab_size": width, "architectures": ["LlamaForCausalLMEagle3"]}
    config = parse_hf_config(raw)
    head = EagleConfig(kind, config, config.hidden_size, width, False, False, kind == "eagle3")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) * 0.02 for n, s in expected_eagle_tensors(head).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
    if kind == "eagle3":
        ids = torch.randperm(config.vocab_size, generator=generator)[:width].sort().values
        tensors["d2t"] = ids - torch.arange(width)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def run(engine: BatchEngine, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done |= {c.request_id: c for c in engine.step()}
    return [done[i] for i in range(len(prompts))]


def compare(folder: Path, prompts: list[list[int]], max_tokens: int, ours: list[Completion]) -> dict:
    """Compare transformers' greedy `generate`, in left-padded batches of 10, with our tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences, tokens, began = [], 0, time.perf_counter()
    for first in range(0, len(prompts), 10):
        batch = prompts[first : first + 10]
        width = max(map(len, batch))
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([[0] * (width - len(p)) + p for p in batch]),
                attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch]),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        for b in range(len(batch)):
            mine = ours[first + b].token_ids
            theirs = out.sequences[b, width:].tolist()[: len(mine)]
            tokens += len(mine)
            if theirs != mine:
                pairs = zip(theirs, mine, strict=False)
                at = next((i for i, (their, my) in enumerate(pairs) if their != my), len(theirs) - 1)
                top = out.logits[at][b].topk(2).values
                differences.append({"row": first + b, "position": at, "margin": float(top[0] - top[1])})
            elif len(mine) < min(max_tokens, len(out.logits)) and int(out.sequences[b, width + len(mine)]) != 0:
                differences.append({"row": first + b, "position": len(mine), "margin": 1.0})  # we stopped, they went on
    return {
        "rows_equal": len(prompts) - len(differences),
        "differences": differences,
        "tokens_per_second": round(tokens / (time.perf_counter() - began), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
