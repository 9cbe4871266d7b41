"""A check of `speculation.verify_budget`: the speed of chains that share a budget against every chain as a whole.

    python scripts/check/check_budget.py gsm8k_test.jsonl --rows 64,512 --whole 2,3,4,6 --shared 6:auto,8:auto,6:2
    python scripts/check/check_budget.py gsm8k_test.jsonl --trace trace.npz --set model.target=random:llama-3-8b

One engine runs all variants: `plain`, chains of N nodes of which all are verified (`--whole`), and N:BUDGET
(`--shared`). For each number of rows, that many requests run at a time, `--turns` times as many in all, with limits
from half of `--max-tokens` to one and a half times as many. A line of JSON for each: output tokens a second, with
prompts and in rounds alone, milliseconds of a round, nodes and tokens of a request's round, and the number of texts
that differ from those of `plain` (in bfloat16 some do, by rounding). `ratio` and `decode_ratio`: these speeds against
the best of `plain` and `--whole` for this number of rows.

`--trace FILE`: for models without real weights. Drafts are accepted as in a trace that `specbatch tune` has left of a
model with real weights: for `ngram` by the texts of the trace, for a draft network by its chains and their
probabilities. Each request follows the positions of one traced row. What is computed is the same as always.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.config_load import load_config
from specbatch.counts import EngineStats
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.ngram import RowIndex, continuation
from specbatch.draft.none import NoDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.acceptance import Acceptance
from specbatch.engine.round import GREEDY
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.results.stats import commit, device_name, versions
from specbatch.setup.build import build, measure_budget
from specbatch.setup.resolve import resolve
from specbatch.tune.session import Session
from specbatch.tune.trace import Positions, Trace, leading, stacked, true_tokens
from specbatch.types import Completion, Request, RngKey, SamplingParams

Line = dict[str, Any]
Texts = dict[int, dict[int, list[int]]]  # the tokens of each request of `plain`, by number of rows
Plans = tuple[Tensor, Tensor, Tensor, Tensor]  # see `read_plans`
_DEPTH = 16  # drafts of a traced row's position that are known


class Planned(DraftMethod):
    """Drafts as `method` does, and then takes scores, and the number of right drafts, from a trace. `scores_PD` and
    `right_P` are those of the positions of all traced rows, and row r has those from firsts[r] on."""

    def __init__(
        self, method: DraftMethod, scores_PD: Tensor, right_P: Tensor, firsts_R: Tensor, counts_R: Tensor, prompt: int
    ) -> None:
        self._method, self._prompt = method, prompt
        self._scores_PD, self._right_P, self._firsts_R, self._counts_R = scores_PD, right_P, firsts_R, counts_R
        self.num_nodes, self.max_path, self.num_lookahead = method.num_nodes, method.max_path, method.num_lookahead
        self.net, self.num_reusable, self.reads_tokens = method.net, method.num_reusable, method.reads_tokens
        self.scored = method.scored
        self.right_B: Tensor | None = None  # right drafts in the last round

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        trees = self._method.draft(view, table, sampled)
        row_B = view.field(Field.STREAM) % len(self._firsts_R)
        index_B = (view.length_B - self._prompt).clamp(min=0) % self._counts_R[row_B]
        at_B = self._firsts_R[row_B] + index_B
        self.right_B = self._right_P[at_B]
        scores_BD = self._scores_PD[at_B, : self.num_nodes - 1]
        scores_BN = torch.cat((torch.zeros_like(scores_BD[:, :1]), scores_BD), dim=1) if self.scored else None
        return replace(trees, num_nodes_B=None, scores_BN=scores_BN)


def accept_as_planned(self: Acceptance, view: BatchView, trees: DraftTrees, simulate: float) -> tuple[None, Tensor]:
    """Take the place of `Acceptance._simulated`."""
    method = Variant.running
    if not isinstance(method, Planned) or method.right_B is None:
        return None, torch.ones_like(view.length_B)
    num_nodes = trees.tokens_BN.shape[1]
    most = torch.full_like(view.length_B, num_nodes) if trees.num_nodes_B is None else trees.num_nodes_B
    return None, torch.minimum(method.right_B + 1, most)


class Variant:
    """A draft method and a budget. `running`: the method of the rounds that are captured or run now."""

    running: DraftMethod | None = None

    def __init__(self, num_nodes: int, budget: str | None) -> None:
        self.num_nodes, self.budget = num_nodes, budget
        self.name = "plain" if num_nodes == 1 else f"{num_nodes} nodes" + (f", shared {budget}" if budget else "")

    def use(self, session: Session, plans: Plans | None, prompt: int, token_bytes: int) -> str:
        """Draft so from now on; return the note on thresholds."""
        engine, budget = session.engine, None
        if self.num_nodes == 1:
            method: DraftMethod = NoDraft()
        else:
            steps = self.num_nodes - 1
            method = session.make(DraftShape(steps, 1, self.num_nodes))
            method.scored = self.budget is not None
            if plans is not None:
                method = Planned(method, *plans, prompt)
        if self.budget is not None:
            budget = VerifyBudget(None if self.budget == "auto" else float(self.budget))
        Variant.running = method
        fixed = budget is not None and not budget.changes
        engine.executor.budget = budget if fixed else None
        is_auto = budget is not None and not fixed  # needs the times of rounds of all sizes
        engine.set_methods(ByBatch.always(method), "round" if session.on_cuda else "none", ahead=is_auto)
        if budget is None or fixed or not session.on_cuda:
            return ""
        return measure_budget(engine.executor, budget, GREEDY, token_bytes, None)


def main() -> None:
    args = parse_arguments()
    sets = [*args.set, *(["speculation.simulate_acceptance=1"] if args.trace else [])]
    wholes, shared = [int(n) for n in args.whole.split(",")], [pair.split(":") for pair in args.shared.split(",")]
    variants = [Variant(1, None), *(Variant(n, None) for n in wholes), *(Variant(int(n), b) for n, b in shared)]
    most, rows = max(v.num_nodes for v in variants), [int(n) for n in args.rows.split(",")]
    sets += [f"speculation.num_draft_tokens={most}", "speculation.verify_budget=auto", "engine.prefix_cache=false"]
    config = load_config(None, ["speculation.method=ngram", f"engine.max_batch_size={max(rows)}", *sets])
    run = resolve(config)
    run = replace(run, engine=replace(run.engine, graphs="none")) if run.on_cuda else run
    built = build(run)
    session = Session(built.engine, built.method, built.parts, "round" if run.on_cuda else "none")
    prompts = read_prompts(args, run.tokenizer)
    plans = None
    if args.trace:
        Acceptance._simulated = accept_as_planned  # type: ignore[assignment,method-assign]
        plans = read_plans(args.trace, session.parts.ngram_match, session.parts.net is not None, built.engine.device)
        prompts = [(prompt * args.prompt_tokens)[: args.prompt_tokens] for prompt in prompts]
    lines, texts = [], Texts()
    for variant in variants:
        note = variant.use(session, plans, args.prompt_tokens, run.rows.token_bytes)
        for count in rows:
            if time.perf_counter() - _STARTED > args.time_limit:
                break
            line = {"variant": variant.name, "rows": count, **measure(session, prompts, count, args, texts)}
            lines.append(line | {"note": note})
            whole = [one for one in lines if one["rows"] == count and "shared" not in one["variant"]]
            line["ratio"] = round(line["tok_s"] / max(one["tok_s"] for one in whole), 3)
            line["decode_ratio"] = round(line["decode_tok_s"] / max(one["decode_tok_s"] for one in whole), 3)
            print(json.dumps(line), note if count == rows[0] else "", flush=True)
    facts = {"commit": commit(), "device": device_name(run.config.engine.device), "versions": versions()}
    if args.output:
        args.output.write_text(json.dumps(facts | {"arguments": vars(args), "lines": lines}, indent=1, default=str))


def measure(
    session: Session,
    prompts: list[list[int]],
    count: int,
    args: argparse.Namespace,
    texts: dict[int, dict[int, list[int]]],
) -> dict[str, Any]:
    """Run `count` requests at a time, twice: the first time graphs are captured."""
    engine, total = session.engine, args.turns * count
    for _ in range(2):
        requests = [Request(i, prompts[i % len(prompts)], params_of(i, args), RngKey(0, i, 0)) for i in range(total)]
        done: dict[int, Completion] = {}
        before, began = figures(engine.stats), time.perf_counter()
        submitted = 0
        while len(done) < total:
            while submitted < total and submitted - len(done) < count:
                engine.submit(requests[submitted])
                submitted += 1
            done |= {c.request_id: c for c in engine.step()}
        seconds = time.perf_counter() - began
    rounds, decode, prefill, tokens = (now - then for now, then in zip(figures(engine.stats), before, strict=True))
    counts = [completion.speculation for completion in done.values()]
    row_rounds = sum(c.rounds for c in counts)
    found = {i: completion.token_ids for i, completion in done.items()}
    expected = texts.setdefault(count, found)
    return {
        "tok_s": round(tokens / seconds, 1),
        "decode_tok_s": round(tokens / decode, 1),
        "seconds": round(seconds, 3),
        "prefill_seconds": round(prefill, 3),
        "ms_per_round": round(1e3 * decode / max(1, rounds), 3),
        "rounds": rounds,
        "nodes": round(1 + sum(c.drafted for c in counts) / max(1, row_rounds), 2),
        "tokens": round(sum(c.committed for c in counts) / max(1, row_rounds), 3),
        "differ": sum(found[i] != expected[i] for i in found.keys() & expected.keys()),
    }


def params_of(number: int, args: argparse.Namespace) -> SamplingParams:
    """Return the parameters of a request. Limits differ, so that requests do not all end in the same round."""
    limit = round(args.max_tokens * random.Random(number).uniform(0.5, 1.5))
    return SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=bool(args.trace))


def figures(stats: EngineStats) -> tuple[int, float, float, int]:
    return stats.rounds, stats.decode_seconds, stats.prefill_seconds, stats.generated_tokens


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    found = []
    for line in args.input.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row.get("prompt") or row.get("question")
        if tokenizer.chat_template and not args.trace:
            messages = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            found.append(tokenizer(ids, add_special_tokens=False)["input_ids"])
        else:
            found.append(tokenizer(text)["input_ids"])
    return found


def read_plans(path: Path, match: tuple[int, int], has_network: bool, device: torch.device) -> Plans:
    """Return scores (P, D), right drafts (P,), and the first position and number of positions of each row."""
    trace = Trace.load(path)
    positions = Positions.of(trace)
    if has_network:
        scores_PD, right_P = (
            chain_scores(trace),
            leading(stacked(trace, "chain_PS", trace.depth) == true_tokens(trace, positions, trace.depth)),
        )
    else:
        scores_PD, right_P = ngram_scores(trace, positions, match)
    used = [r for r, count in enumerate(positions.num_committed_R.tolist()) if count > 16]
    firsts, counts = positions.first_R[used], positions.num_committed_R[used]
    return (
        torch.from_numpy(scores_PD.astype(np.float32)).to(device),
        torch.from_numpy(right_P.astype(np.int64)).to(device),
        torch.from_numpy(firsts).to(device),
        torch.from_numpy(counts).to(device),
    )


def ngram_scores(trace: Trace, positions: Positions, match: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    scores, right = np.full((positions.count, _DEPTH), -np.inf), np.zeros(positions.count)
    depths = np.arange(1, _DEPTH + 1)
    for row, first in zip(trace.rows, positions.first_R.tolist(), strict=True):
        tokens, index = row.tokens.tolist(), RowIndex([], *match)
        for i in range(row.num_output - 1):
            end = row.num_prompt + i + 1
            size, text, start = index.find(tokens[:end])
            if not size:
                continue
            drafts = np.array(continuation(text, start, _DEPTH))
            true = np.full(_DEPTH, -1)
            true[: len(tokens[end : end + _DEPTH])] = tokens[end : end + _DEPTH]
            right[first + i] = np.cumprod(drafts == true).sum()
            scores[first + i] = 1.4 * np.log(size / (size + depths))  # as in `match_scores`
    return scores, right


def chain_scores(trace: Trace) -> np.ndarray:
    """Return the cumulative scores of greedy chains, which are the best branches of the traced trees. Where a beam has
    dropped the chain, each further draft has a seventh of the probability."""
    k, depth = trace.topk, trace.depth
    num_candidates = k + (depth - 1) * k * k
    tree_PC, parents_PC = (stacked(trace, name, num_candidates) for name in ("scores_PC", "parents_PC"))
    count = len(tree_PC)
    scores, at, is_known = np.zeros((count, depth)), np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.bool_)
    scores[:, 0] = tree_PC[:, 0]
    for step in range(1, depth):
        first = k + (step - 1) * k * k
        is_child = parents_PC[:, first : first + k * k] == at[:, None]
        is_known &= is_child.any(axis=1)
        at = first + is_child.argmax(axis=1)
        scores[:, step] = np.where(is_known, tree_PC[np.arange(count), at], scores[:, step - 1] - 2.0)
    return scores


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="rows with a `prompt` or a `question`")
    parser.add_argument("--rows", default="64,128,256", help="requests at a time")
    parser.add_argument("--whole", default="2,3,4,6", help="nodes of chains that are verified as a whole")
    parser.add_argument("--shared", default="6:auto", help="nodes of chains and their budget")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="with --trace")
    parser.add_argument("--set", action="append", default=[], help="an option, as in the tool")
    parser.add_argument("--time-limit", type=float, default=600.0, help="no measurement begins after these seconds")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


_STARTED = time.perf_counter()

if __name__ == "__main__":
    main()
