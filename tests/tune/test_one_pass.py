"""Tuning of methods whose drafts come from one pass of the draft network: block drafters and P-EAGLE heads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.draft import DraftMethod, DraftParts
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode
from specbatch.errors import ConfigError
from specbatch.kernels import ops_for
from specbatch.models.blocks.config import BlockConfig, MarkovConfig
from specbatch.setup.resolve import resolve
from specbatch.train.block.export import config_json
from specbatch.tune import command as command_module
from specbatch.tune import live as live_module
from specbatch.tune import timing
from specbatch.tune.command import _resolve_widest
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.profile import Limits
from specbatch.tune.replay import Replayer
from specbatch.tune.session import Session
from specbatch.tune.timing import time_batch
from specbatch.tune.trace import RowTrace, Trace
from specbatch.tune.tuner import SearchLimits
from specbatch.types import Request, RngKey, SamplingParams
from tests.block_reference import random_tensors, write_drafter
from tests.draft.test_block import TRAITS
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import BLOCK_SIZE, CPU, random_prompts, tiny_config, tiny_device_engine, tiny_engine
from tests.tune.test_session import CUDA, OPS, net_of

VOCAB = 7  # so that random drafts are often right
GREEDY, SAMPLED = SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.8, top_k=5, seed=5)
SETTINGS: dict[str, Any] = {"num_pages": 512, "prefix_cache": False, "vocab": VOCAB, "eos": (3,)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: ("block", traits) for name, traits in TRAITS.items()}
CASES["P-EAGLE"] = ("peagle", {"mask_token_id": VOCAB - 1})


def requests(params: SamplingParams) -> list[Request]:
    prompts = random_prompts(4, shared=9, longest=30, vocab=VOCAB)
    return [Request(i, prompt, params, RngKey(params.seed or 0, i, 0)) for i, prompt in enumerate(prompts)]


def depth_of(case: str) -> int:
    return BLOCK_SIZE - CASES[case][1].get("first", 1)


def session(case: str, *, on_device: bool = False, coupled: bool = False, topk: int = 1) -> Session:
    method, traits = CASES[case]
    make = tiny_device_engine if on_device else tiny_engine
    engine: Engine = make(method, whole(case, topk), **SETTINGS, **traits)
    return Session(engine, method, DraftParts(CPU, OPS, net_of(engine), (1, 3), coupled), "none")


def whole(case: str, topk: int = 1) -> DraftShape:
    return DraftShape(depth_of(case), topk, depth_of(case) + 1 if topk == 1 else 16)


@pytest.mark.parametrize(("params", "on_device"), [(GREEDY, False), (GREEDY, True), (SAMPLED, True)])
@pytest.mark.parametrize("case", CASES)
def test_every_number_of_steps_is_replayed_exactly(case: str, params: SamplingParams, on_device: bool) -> None:
    """The first drafts of a block are the drafts of shorter chains. Sampled chains are coupled here."""
    tuned, depth = session(case, on_device=on_device, coupled=params is SAMPLED), depth_of(case)
    trace = tuned.trace(requests(params), 1, depth)
    assert all(row.tokens_PC is None for row in trace.rows), "no tree is drafted"
    shapes = [DraftShape(steps, 1, steps + 1) for steps in range(1, depth + 1)]
    replayer = Replayer(trace)
    assert replayer.rank_shares() is None
    for shape, found in zip(shapes, replayer.replay_all(shapes), strict=True):
        tuned.use(ByBatch.always(shape))
        counts = [c.speculation for c in tuned.run(requests(params)).completions]
        assert found.rounds_R.tolist() == [c.rounds for c in counts]
        assert found.tokens_R.tolist() == [c.committed for c in counts]
        assert found.num_unknown == 0
        assert sum(c.accepted for c in counts) > 0, "nothing was accepted: this proves little"


TREES = [DraftShape(2, 2, 5), DraftShape(2, 3, 6), DraftShape(4, 2, 6), DraftShape(4, 3, 8)]


@pytest.mark.parametrize(
    ("params", "on_device"), [(GREEDY, False), pytest.param(SAMPLED, True, marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("case", CASES)
def test_trees_are_replayed_exactly(case: str, params: SamplingParams, on_device: bool) -> None:
    """Smaller ones are parts of the wide one, but for some rounds that are counted. Choices of nodes are not drawn."""
    tuned = session(case, on_device=on_device, topk=3)
    replayer = Replayer(tuned.trace(requests(params), 3, 4))
    shares = replayer.rank_shares()
    assert shares is not None
    assert shares[0, :3].sum() > 0.3
    for shape, found in zip(TREES, replayer.replay_all(TREES), strict=True):
        tuned.use(ByBatch.always(shape))
        counts = [c.speculation for c in tuned.run(requests(params)).completions]
        assert sum(c.accepted for c in counts) > 0, "nothing was accepted: this proves little"
        for rounds, unknown, live in zip(found.rounds_R, found.unknown_R, counts, strict=True):
            assert unknown or rounds == live.rounds
        assert found.tokens_R.tolist() == [c.committed for c in counts]
        if shape.topk == 3:
            assert found.num_unknown == 0


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("case", ["none", "domino", "refiner", "lattice", "P-EAGLE"])
def test_graphs_record_the_same(case: str, topk: int) -> None:
    """Graphs are captured when the first batch of a size comes up, in the middle of a run."""
    method, traits = CASES[case]
    expected = session(case, topk=topk).trace(requests(GREEDY), topk, depth_of(case))
    modes: list[GraphMode] = ["none", "round"]
    for graphs in modes:
        engine = tiny_device_engine(method, whole(case, topk), device=CUDA, **SETTINGS, **traits)
        parts = DraftParts(CUDA, ops_for(CUDA, torch.float64), net_of(engine), (1, 3))
        found = Session(engine, method, parts, graphs).trace(requests(GREEDY), topk, depth_of(case))
        assert (engine.executor.num_graphs > 0) == (graphs == "round")
        for mine, theirs in zip(expected.rows, found.rows, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert chains_of(mine) == chains_of(theirs)
            if mine.tokens_PC is not None and theirs.tokens_PC is not None:
                rounds = slice(0, mine.num_output - 1)
                assert mine.tokens_PC[rounds].tolist() == theirs.tokens_PC[rounds].tolist()


def chains_of(row: RowTrace) -> list[list[int]]:
    assert row.chain_PS is not None
    chains: list[list[int]] = row.chain_PS[: row.num_output - 1].tolist()  # the last token is the root of no round
    return chains


def test_a_trace_of_chains_is_read_from_its_file(tmp_path: Path) -> None:
    trace = session("markov").trace(requests(GREEDY)[:2], 1, BLOCK_SIZE - 1)
    trace.save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert (again.topk, again.depth) == (1, BLOCK_SIZE - 1)
    for mine, theirs in zip(trace.rows, again.rows, strict=True):
        assert chains_of(mine) == chains_of(theirs)
        assert theirs.tokens_PC is None


@pytest.mark.parametrize("case", ["markov", "P-EAGLE"])
def test_a_pass_is_timed_by_the_number_of_its_drafts(case: str) -> None:
    tuned, depth = session(case), depth_of(case)
    found = [m for batch in (1, 3) for m in time_batch(tuned, batch, 20, depth, 1, 512)]
    passes = {(m.batch, m.width) for m in found if m.kind == "draft_pass"}
    assert passes == {(batch, steps) for batch in (1, 3) for steps in {1, 2, depth // 2, depth}}
    assert not {"draft_start", "draft_step", "verify_tree"} & {m.kind for m in found}
    model = CostModel.fit(found)
    for batch, steps in ((1, 1), (2, 3), (3, depth)):
        assert 0 < model.round_ms(batch, DraftShape(steps, 1, steps + 1)) < 10_000


@pytest.mark.parametrize("case", ["domino", "P-EAGLE"])
def test_steps_of_trees_are_timed_after_the_pass(case: str) -> None:
    tuned, depth = session(case, topk=4), depth_of(case)
    found = [m for batch in (1, 3) for m in time_batch(tuned, batch, 20, depth, 4, 512)]
    widths = {kind: {m.width for m in found if m.kind == kind} for kind in ("draft_pass", "draft_start", "draft_step")}
    assert widths == {"draft_pass": {1, 2, depth // 2, depth}, "draft_start": {2, 4}, "draft_step": {2, 4}}
    model = CostModel.fit(found)
    for shape in (DraftShape(1, 4, 5), DraftShape(2, 3, 6), DraftShape(depth, 2, 7), DraftShape(depth, 1, depth + 1)):
        assert 0 < model.round_ms(2, shape) < 10_000


def test_the_cost_of_a_tree_has_one_pass_and_the_steps_after_it() -> None:
    kinds = {"verify": 10.0, "extend": 1.0, "plain": 9.0, "draft_pass": 3.0}
    found = [Measurement(kind, 1, 1, ms) for kind, ms in kinds.items()]
    found += [Measurement("draft_start", 1, 4, 4.0), Measurement("draft_step", 1, 4, 0.25)]
    model = CostModel.fit(found)
    times = [model.round_ms(1, shape) for shape in (DraftShape(5, 1, 6), DraftShape(1, 4, 5), DraftShape(7, 4, 10))]
    assert times == pytest.approx([14.0, 15.0, 16.5])


def test_later_steps_of_deep_trees_show_what_a_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, depth = session("domino", topk=4), depth_of("domino")

    def time_methods(engine: Any, methods: list[DraftMethod]) -> list[dict[str, float]]:
        drafts = [3.0 + 0.5 * getattr(method, "_shape", DraftShape(1, 1, 2)).num_steps for method in methods]
        return [{"draft": draft, "verify": 2.0, "extend": 1.0, "round": 3.0 + draft} for draft in drafts]

    monkeypatch.setattr(timing, "time_methods", time_methods)
    found = time_batch(tuned, 2, 20, depth, 4, 512)
    assert {m.milliseconds for m in found if m.kind == "draft_start"} == {3.5}
    assert {round(m.milliseconds, 6) for m in found if m.kind == "draft_step"} == {0.5}
    trees = [shape for shape in timing.probes(depth, 4, tree_depth=depth) if not shape.is_chain]
    assert {shape.num_steps for shape in trees} == {1, depth}


def test_the_cost_of_a_pass_is_not_one_for_each_step() -> None:
    kinds = {"verify": 10.0, "extend": 1.0, "plain": 9.0}
    fixed = [Measurement(kind, 1, 1, ms) for kind, ms in kinds.items()]
    model = CostModel.fit([*fixed, Measurement("draft_pass", 1, 1, 4.0), Measurement("draft_pass", 1, 15, 4.7)])
    times = [model.round_ms(1, DraftShape(steps, 1, steps + 1)) for steps in (1, 8, 15)]
    assert times == pytest.approx([15.0, 15.35, 15.7])


def test_a_round_writes_the_slots_of_a_whole_block() -> None:
    """This is so however few drafts it verifies. Rounds without drafts write none of them."""
    limits, short = Limits(4, 256, 32, draft_kv_offset=0, block_size=16), DraftShape(2, 1, 3)
    assert limits.lookahead(ByBatch.always(short)) == 16
    assert limits.lookahead(ByBatch.always(DraftShape(16, 1, 17))) == 17
    assert limits.lookahead_of(DraftShape(15, 4, 24)) == 24, "branches of its trees have no slots"
    assert limits.lookahead_of(None) == 1
    assert replace(limits, block_size=0).lookahead(ByBatch.always(short)) == 3


@pytest.mark.parametrize(
    ("method", "draft", "depth", "block_size"),
    [("block", "random:dflash", 15, 16), ("block", "random:dspark", 16, 16), ("peagle", "random:peagle", 15, 0)],
)
def test_drafts_are_as_deep_as_the_drafter_makes_them(method: str, draft: str, depth: int, block_size: int) -> None:
    sets = ["model.target=random:tiny", "engine.device=cpu", f"speculation.method={method}"]
    run, widest = _resolve_widest(load_config(None, [*sets, f"speculation.draft={draft}"]), resolve)
    assert (widest.depth, widest.topk, widest.nodes) == (depth, 4, 24)
    assert [shape.num_steps for shape in run.speculation.shapes] == [depth]
    assert run.speculation.block_size == block_size


@pytest.mark.parametrize(
    ("max_drafts", "on_cuda", "expected"),
    [(8, True, (8, 8, 64)), (8, False, (8, 4, 24)), (15, True, (15, 4, 64)), (63, False, (63, 2, 64)), (1, True, None)],
)
def test_deep_trees_are_narrow(max_drafts: int, on_cuda: bool, expected: tuple[int, int, int] | None) -> None:
    """A trace holds all candidates of each position."""
    limits = SearchLimits.of("block", on_cuda, max_drafts)
    assert (limits.depth, limits.topk, limits.nodes) == (expected or (1, 8, 64))
    assert DraftShape(limits.depth, limits.topk, 2).num_candidates <= 456


def test_drafts_of_many_requests_have_fewer_nodes() -> None:
    """The engine is built for them, and a round verifies a bounded number of tokens."""
    sets = ["model.target=random:tiny", "engine.device=cpu", "engine.max_batch_size=64", "speculation.method=block"]
    run, widest = _resolve_widest(load_config(None, [*sets, "speculation.draft=random:dflash"]), resolve)
    assert widest.verify_tokens == 512
    entries = [(bound, str(shape)) for bound, shape in run.speculation.schedule.entries]
    assert entries == [(21, "15/4/24"), (64, "15/4/8")]


def test_methods_with_chains_only_are_not_searched_for_trees() -> None:
    for on_cuda in (False, True):
        assert SearchLimits.of("mtp", on_cuda).topk == 1
        assert SearchLimits.of("eagle3", on_cuda).topk > 1


@pytest.mark.parametrize("method", ["suffix", "hybrid"])
def test_methods_that_learn_from_all_rows_are_refused(method: str) -> None:
    sets = ["model.target=random:smollm2-135m", "engine.device=cpu", f"speculation.method={method}"]
    if method == "hybrid":
        sets.append("speculation.draft=random:eagle3")
    with pytest.raises(ConfigError, match="depends on the outputs of all rows") as caught:
        _resolve_widest(load_config(None, sets), resolve)
    assert "leave speculation.num_draft_tokens" in (caught.value.hint or "")


BLOCK = 6


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target, and a block drafter that is often right.

    The target's next token mostly depends on the last one alone, because its layers change little. The drafter's Markov
    head has the target's embedding and LM head. Its backbone is random, and what it adds is noise.
    """
    target = write_checkpoint(folder / "target", num_hidden_layers=4, max_position_embeddings=2048)
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.03
    save_file(tensors, target / "model.safetensors")
    embedding_VE, lm_head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    vocab, hidden = embedding_VE.shape
    decoder = tiny_config(2, hidden, vocab, model_type="qwen3", qk_norm=True)
    block = BlockConfig(decoder, BLOCK, 1, (1, 2, 3), hidden, vocab, first=0, head=MarkovConfig(hidden))
    drafter = random_tensors(block)
    normed_VE = embedding_VE * embedding_VE.pow(2).mean(-1, keepdim=True).rsqrt()
    drafter["markov_head.markov_w1.weight"] = normed_VE * tensors["model.norm.weight"]
    drafter["markov_head.markov_w2.weight"] = lm_head
    drafter["norm.weight"] = torch.full((hidden,), 0.2)
    return target, write_drafter(folder / "drafter", drafter, config_json(block, str(target)))


@pytest.mark.wide
def test_a_block_drafter_is_tuned_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuned configuration runs, and its rounds commit the tokens that were predicted."""
    target, drafter = write_pair(tmp_path)
    rows, output, results = tmp_path / "rows.jsonl", tmp_path / "tuned.yaml", tmp_path / "out.jsonl"
    lines = [{"prompt": f"Row {i} " + "xyz"[: i % 4], "max_tokens": 16 + 2 * i, "temperature": 0} for i in range(8)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(live_module, "MAX_TRIALS", 2)
    # Times of so small a model are noise. The best plan with drafts wins, whatever they are.
    monkeypatch.setattr(command_module, "winner", lambda plans, live, seconds: plans[0])
    sets = [f"model.target={target}", "engine.device=cpu", "engine.max_batch_size=4", "engine.prefix_cache=false"]
    sets += ["speculation.method=block", f"speculation.draft={drafter}"]
    options = [part for one in sets for part in ("--set", one)]

    def run(*args: str | Path) -> str:
        found = CliRunner().invoke(app, [*map(str, args)])
        assert found.exit_code == 0, found.output
        return found.output

    run("tune", rows, "-o", output, "--rows", "8", "--budget", "30s", *options)
    report = json.loads(output.with_suffix(".report.json").read_text())
    keys = "num_steps", "topk", "num_draft_tokens"
    replays = {tuple(one["candidate"][key] for key in keys): one["tokens_per_round"] for one in report["replays"]}
    assert sorted(shape for shape in replays if shape[1] == 1) == [(n, 1, n + 1) for n in range(1, BLOCK + 1)]
    assert {topk for _, topk, _ in replays} == {1, 2, 3, 4}
    assert replays[1, 1, 2] > 1.3
    assert replays[BLOCK, 1, BLOCK + 1] > replays[1, 1, 2] + 0.2
    assert replays[BLOCK, 4, 24] > replays[BLOCK, 1, BLOCK + 1]
    parts = {"draft_pass", "draft_start", "draft_step", "verify", "verify_tree", "extend", "plain"}
    assert parts <= {one["kind"] for one in report["costs"]}
    assert report["plain"]["seconds"] > 0
    for one in report["live_runs"][:-1]:
        assert one["tokens_per_round"] > 1.2
    assert report["live_runs"][-1]["tokens_per_round"] == 1, "plain decoding is compared"
    config = load_config(output)
    assert (config.speculation.method, config.speculation.draft) == ("block", str(drafter))
    schedule = config.speculation.schedule
    assert schedule
    run("generate", rows, "-c", output, "-o", results)
    tuned = acceptance_length(results)
    of_entries = [replays[one.num_steps, one.topk, one.num_draft_tokens] for one in schedule if one.num_steps]
    assert min(of_entries) - 1e-4 <= tuned <= max(of_entries) + 1e-4
    # One shape for all batches: the same rows, so the same number to the last digit.
    no_schedule = ["--set", "speculation.schedule=null"]
    for shape in ((3, 1, 4), (BLOCK, 4, 24)):
        sizes = zip(keys, shape, strict=True)
        options = [part for key, size in sizes for part in ("--set", f"speculation.{key}={size}")]
        run("generate", rows, "-c", output, "-o", tmp_path / f"{shape[1]}.jsonl", *no_schedule, *options)
        assert acceptance_length(tmp_path / f"{shape[1]}.jsonl") == pytest.approx(replays[shape], abs=1e-3)
    plain = tmp_path / "plain.jsonl"
    run("generate", rows, "-c", output, "-o", plain, "--set", "speculation.method=none", *no_schedule)
    assert texts(results) == texts(plain)


def acceptance_length(results: Path) -> float:
    found: float = json.loads(results.with_suffix(".stats.json").read_text())["speculation"]["acceptance_length"]
    return found


def texts(results: Path) -> list[str]:
    return [json.loads(line)["text"] for line in results.read_text().splitlines()]
