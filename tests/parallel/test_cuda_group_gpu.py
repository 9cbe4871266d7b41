"""The ranks of GPUs, on one GPU and on two."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.config_load import load_config
from specbatch.draft.shape import DraftShape
from specbatch.grammar.compiler import GrammarCompiler, MatcherSpec
from specbatch.grammar.constraint import Constraint
from specbatch.kernels import ops_for
from specbatch.models.layers import RMSNorm
from specbatch.models.linears import sharded
from specbatch.models.linears.linear import Linear
from specbatch.parallel import algorithms
from specbatch.parallel.cuda import CudaGroup, TorchCollectives
from specbatch.parallel.group import in_order
from specbatch.parallel.shares import even_shares
from specbatch.setup.build import build_engine
from specbatch.setup.ranks.ranked_engine import RankedEngine, build_ranked
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import random_prompts, run, tiny_device_engine

CHAIN = DraftShape(3, 1, 4)
_EXPERTS = "model.target=random:tiny-experts"
_DIVISIONS = (
    ["engine.expert_parallel=off"],
    ["engine.expert_parallel=on", "engine.dp_attention=off"],
    ["engine.expert_parallel=on", "engine.dp_attention=on"],
)
_DRAFT_MODEL = ["speculation.method=draft_model", "speculation.draft=random:tiny-experts"]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")


def one_gpu(folder: Path) -> TorchCollectives:
    return TorchCollectives(0, 1, str(folder / "meeting"), torch.device("cuda", 0))


def graph_of(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def replays_follow_the_input(function: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype, count: int) -> None:
    """Of a sum of equal tensors: what is replayed reads what the input holds then."""
    x = torch.zeros(count, dtype=dtype, device="cuda")
    graph, out = graph_of(lambda: function(x))
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), torch.full((count,), value * size, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nccl_alone_on_one_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    run_ = one_gpu(tmp_path)
    x = torch.randn(4096, 8, device="cuda").to(dtype)
    out, parts = torch.empty_like(x), x.new_empty((1, *x.shape))
    run_.nccl(x, out)
    run_.gather(x, parts)
    assert torch.equal(out, x)
    assert torch.equal(parts[0], x)

    def added(y: Tensor) -> Tensor:
        total = torch.empty_like(y)
        run_.nccl(y, total)
        return total

    replays_follow_the_input(added, 1, dtype, 1024)
    run_.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_that_others_read_alone_on_one_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    group = CudaGroup(0, 1, torch.device("cuda", 0), one_gpu(tmp_path), fixed_order=False)
    for shape in ((8,), (3, 576), (1, 4096), (64, 2048), (9, 1 << 20)):  # the last in pieces
        x, residual = torch.randn((2, *shape), device="cuda").to(dtype)
        assert torch.equal(group.added(x, "one_shot"), x)
        assert torch.equal(group.added(x, "one_shot", residual), residual + x)
    _a_sum_and_its_norm(group, (64, 4096), dtype)
    replays_follow_the_input(lambda x: group.added(x, "one_shot"), 1, dtype, 4096)
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("lanes", "hidden"), [(None, 32), (1, 32), (None, 1024)])  # the last: norms come with sums
def test_an_engine_of_one_rank_on_a_gpu(
    tmp_path: Path, lanes: int | None, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rounds as graphs, with the sums of a group and its exchanges of best tokens in them."""
    monkeypatch.setattr(sharded, "_GATHERED_BYTES", 0)
    device = torch.device("cuda", 0)
    options: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "dtype": torch.float32, "device": device}
    options |= {"hidden": hidden, "scale": 0.25 if hidden == 32 else 0.04}
    prompts, alone = random_prompts(12, shared=10), tiny_device_engine("ngram", CHAIN, graphs="round", **options)
    group = CudaGroup(0, 1, device, one_gpu(tmp_path), fixed_order=False, two_passes=lanes is not None)
    engine = tiny_device_engine("ngram", CHAIN, graphs="round", group=group, min_lane=lanes, **options)
    for temperature in (0.8, 0.0):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
        found, expected = (run(one, prompts, params) for one in (engine, alone))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        # A lane's GEMMs have other sizes.
        margins = [[c.margin.value for c in some if c.margin is not None] for some in (found, expected)]
        assert margins[0] == pytest.approx(margins[1], abs=1e-4)
    del engine
    gc.collect()  # its graphs
    group.close()


def _a_sum_and_its_norm(group: CudaGroup, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """In a graph, between sums of other sizes, which share its memory."""
    norm = RMSNorm(torch.linspace(-1, 2, shape[1], device="cuda", dtype=dtype), 1e-5)
    x_TE, few = torch.zeros(shape, dtype=dtype, device="cuda"), torch.zeros(3 * shape[1] // 4, device="cuda")
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(group.size)]
    residual_TE = torch.linspace(0, 1, shape[1], device="cuda").to(dtype).expand(shape).contiguous()

    def both() -> Tensor:
        found = group.start_normed_sum(x_TE, residual_TE, norm)()
        assert found[1] is not None, "it does not come with the sum"
        return torch.stack(found)

    graph, out = graph_of(lambda: (group.sum(few), both(), group.sum(few), both())[-1])
    for turn in range(1, 20):
        expected = sum(part.float() * turn for part in parts).to(dtype)  # type: ignore[union-attr]
        x_TE.copy_(parts[group.rank] * turn)
        total = residual_TE + expected.to("cuda") if turn in (1, 2, 4, 8, 16) else None  # factors that are exact
        if (turn + group.rank) % 5 == 0:
            torch.cuda._sleep(300_000)
        for found in (graph.replay() or out, both()):
            torch.cuda.synchronize()
            assert total is None or torch.equal(found[0], total), (shape, dtype, turn)
            torch.testing.assert_close(found[1], norm(found[0]), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


def _two_gpus(rank: int, meeting: str) -> None:
    """A process of one of two GPUs."""
    device = torch.device("cuda", rank)
    group = CudaGroup(rank, 2, device, TorchCollectives(rank, 2, meeting, device), fixed_order=False)
    for dtype in (torch.bfloat16, torch.float32):
        for count in (8, 8 * 577, 1 << 18, (1 << 20) + 8, 9 << 20):  # the last in pieces
            both = [torch.randn(count, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2)]
            x, expected = both[rank].to(device), both[0] + both[1]
            for algorithm in ("one_shot", "nccl", "gather"):
                found = group.added(x, algorithm)  # type: ignore[arg-type]
                assert torch.equal(found.cpu(), expected), (dtype, count, algorithm)
            found = group.added(x, "one_shot", residual := torch.randn_like(x))
            assert torch.equal(found, residual + expected.to(device)), (dtype, count)
        for algorithm in ("one_shot", "nccl", "gather"):
            replays_follow_the_input(lambda x, a=algorithm: group.added(x, a), 2, dtype, 4096)  # type: ignore
    _many_sizes(group, device)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 8192), (64, 8192), (300, 2048), (256, 8192)):
            _a_sum_and_its_norm(group, shape, dtype)
    two = CudaGroup(
        rank,
        2,
        device,
        TorchCollectives(rank, 2, f"{meeting} two", device),
        fixed_order=False,
        two_passes=True,
        dispatch_bytes=1 << 20,
    )
    _many_sizes(two, device)
    _two_streams(two, device)
    _copies(two, device)
    _exchanges(group, device)
    _exchanges(two, device)
    _dispatches(two, device)
    _best_tokens(group, device)
    assert group.least(7 - rank) == 6
    assert group.of_first([float(rank)]) == [0.0]
    torch.cuda.synchronize()
    group.close()
    two.close()


def _best_tokens(group: CudaGroup, device: torch.device) -> None:
    """Of logits that two ranks have, in a graph: what one process finds."""
    for dtype in (torch.bfloat16, torch.float32):
        logits_TV = torch.randint(-9, 9, (300, 101), generator=torch.Generator().manual_seed(7)).to(dtype)
        logits_TV[7, 3], logits_TV[8, 70], logits_TV[9, :51] = torch.nan, torch.inf, -torch.inf
        expected = ops_for(torch.device("cpu"), torch.float32).argmax_and_margin(logits_TV, NO_TOKEN)
        own = even_shares(101, 2)[group.rank]
        part_TV = logits_TV[:, own.start : own.stop].to(device)
        head = sharded.GatheredLinear(
            cast(Linear, lambda x_TI, part=part_TV: part), group, sharded.VocabShare(own, 51), 101
        )
        x_TI, ops = torch.zeros(300, 8, device=device, dtype=dtype), ops_for(device, dtype)
        graph, found = graph_of(lambda run=head, x=x_TI, ops=ops: torch.stack(run.best(x, ops)))  # type: ignore[misc]
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found[0].long().cpu(), expected[0]), dtype
        assert torch.equal(found[1].float().cpu(), expected[1]), dtype


def _many_sizes(group: CudaGroup, device: torch.device) -> None:
    """One sum after the other, in an order of sizes that differs from graph to graph: a rank that is ahead must not
    write over what the other one still reads."""
    sizes = [8, 4096, 64 * 4096, 8, 2048, 1 << 20, 16, 512 * 4096, 4104]
    graphs = []
    for first in range(len(sizes)):
        xs = [torch.zeros(count, device=device) for count in sizes[first:] + sizes[:first]]
        graphs.append((xs, graph_of(lambda xs=xs: torch.cat([group.sum(x) for x in xs]))))  # type: ignore[misc]
    for value in range(1, 40):
        outs = []
        for xs, (graph, out) in graphs:
            for i, x in enumerate(xs):
                x.fill_(value * (i + 1) * (1 + group.rank))
            if (value + group.rank) % 5 == 0:
                torch.cuda._sleep(200_000 * group.rank)
            graph.replay()
            outs.append((xs, out.clone()))
        for xs, out in outs:
            expected = torch.cat([torch.full_like(x, value * (i + 1) * 3.0) for i, x in enumerate(xs)])
            assert torch.equal(out, expected), value


def _two_streams(group: CudaGroup, device: torch.device) -> None:
    """Sums of two passes in one graph, at the same time."""
    side, xs = torch.cuda.Stream(device), [torch.zeros(8192, device=device) for _ in range(2)]

    def both() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            first = group.sum(xs[0])
            with torch.cuda.stream(side), group.one_of_two_passes(1):
                second = group.sum(xs[1])
        torch.cuda.current_stream().wait_stream(side)
        return torch.stack((first, second))

    graph, out = graph_of(both)
    for value in (1.0, 2.0):
        xs[0].fill_(value)
        xs[1].fill_(10 * value)
        graph.replay()
        torch.cuda.synchronize()
        assert (out[0, 0].item(), out[1, -1].item()) == (2 * value, 20 * value)


def _exchanges(group: CudaGroup, device: torch.device) -> None:
    """Gathers, and scatters of sums, by each algorithm: launched, and in graphs between sums of other sizes."""
    algorithms_ = ("one_shot", "nccl", "copied") if group.can_copy else ("one_shot", "nccl")
    for dtype in (torch.bfloat16, torch.float32):
        for count in (8, 8 * 577, (1 << 20) + 8, 9 << 20):
            size = group.size
            of_ranks = [
                torch.randn(size, count, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(size)
            ]
            parts, residual = of_ranks[group.rank].to(device), torch.randn(count, device=device).to(dtype)
            total = in_order(torch.stack([part[group.rank].float() for part in of_ranks])).to(dtype)
            expected = residual + total.to(device)
            for algorithm in algorithms_:
                found, out = torch.empty_like(parts), torch.empty_like(residual)
                group.gathered(parts[0], found, algorithm)  # type: ignore[arg-type]
                assert torch.equal(found.cpu(), torch.stack([part[0] for part in of_ranks])), (count, algorithm)
                group.scattered(parts, residual, out, algorithm)  # type: ignore[arg-type]
                assert torch.equal(out, expected), (dtype, count, algorithm)
    few, x = torch.zeros(4096, device=device), torch.zeros(64, 2048, device=device)

    def layers() -> Tensor:
        for _ in range(5):
            group.sum(few)
            gathered = group.start_dispatch(x)()
            y = group.start_scatter_sum(2 * gathered)()
        return y

    graph, out = graph_of(layers)
    for value in range(1, 30):
        x.fill_(value * (1 + group.rank))
        if (value + group.rank) % 5 == 0:
            torch.cuda._sleep(300_000 * group.rank)
        for found in (graph.replay() or out, layers()):
            torch.cuda.synchronize()
            assert torch.equal(found, torch.full_like(found, 2.0 * group.size * value * (1 + group.rank))), value


def _dispatches(group: CudaGroup, device: torch.device) -> None:
    """Tokens travel from their places and come back, in two passes at the same time, launched and in graphs."""
    side, xs = torch.cuda.Stream(device), [torch.zeros(128, 2048, device=device) for _ in range(2)]

    def travelled(x: Tensor, turn: int) -> Tensor:
        place = group.dispatch_place(x)
        assert place is not None
        tokens = group.start_dispatch(place.copy_(x) if turn % 2 else x)()
        if turn % 3 == group.rank % 3:
            torch.cuda._sleep(50_000)
        return group.start_scatter_sum(tokens / group.size)()

    def both_passes() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        first, second = xs
        for turn in range(12):
            with group.one_of_two_passes(0):
                first = travelled(first, turn)
            with torch.cuda.stream(side), group.one_of_two_passes(1):
                second = travelled(second, turn)
        torch.cuda.current_stream().wait_stream(side)
        return torch.stack((first, second))

    graph, out = graph_of(both_passes)
    for value in range(1, 20):
        xs[0].fill_(value * (1 + group.rank))
        xs[1].fill_(-value * (1 + group.rank))
        for found in (graph.replay() or out, both_passes()):
            torch.cuda.synchronize()
            assert torch.equal(found, torch.stack(xs)), value


def _copies(group: CudaGroup, device: torch.device) -> None:
    """Of one stream, of two at the same time, launched and in graphs."""
    for dtype in (torch.bfloat16, torch.float32):
        for count in (8, 8 * 577, (1 << 20) + 8, (algorithms.MAILBOX_BYTES // dtype.itemsize) + 8):
            count *= group.size // 2
            of_ranks = [torch.randn(count, generator=torch.Generator().manual_seed(i)) for i in range(group.size)]
            total = in_order(torch.stack([x.to(dtype).float() for x in of_ranks]))
            x, expected = of_ranks[group.rank].to(device, dtype), total.to(device, dtype)
            residual = of_ranks[0].to(device, dtype)  # the ranks have the same one
            assert torch.equal(group.added(x, "copied"), expected), (dtype, count)
            assert torch.equal(group.added(x, "copied", residual), residual + expected), (dtype, count)
        replays_follow_the_input(lambda x: group.added(x, "copied"), group.size, dtype, 1 << 20)
    side = torch.cuda.Stream(device)
    xs = [torch.zeros(1 << 20, device=device) for _ in range(2)]

    def both_passes() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        first, second = xs
        for _ in range(20):
            with group.one_of_two_passes(0):
                first = group.added(first, "copied") / group.size
            with torch.cuda.stream(side), group.one_of_two_passes(1):
                second = group.added(second, "copied") / group.size
        torch.cuda.current_stream().wait_stream(side)
        return torch.stack((first, second))

    graph, out = graph_of(both_passes)
    for value in range(1, 30):
        for i, x in enumerate(xs):
            x.fill_(2 * value * (1 + 2 * i) * (1 + 3 * group.rank))
        if (value + group.rank) % 5 == 0:
            torch.cuda._sleep(500_000 * group.rank)
        mean = 2.0 + 3 * (group.size - 1)
        expected = torch.tensor([mean * value, 3 * mean * value], device=device)
        for found in (both_passes(), (graph.replay(), out)[1]):
            assert torch.equal(found, expected[:, None].expand_as(found)), value


@pytest.mark.gpu
@needs_two
def test_two_gpus_add_and_gather(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_two_gpus, (str(tmp_path / "meeting"),), nprocs=2)


def _four_gpus(rank: int, meeting: str) -> None:
    """A process of one of four GPUs."""
    device = torch.device("cuda", rank)
    group = CudaGroup(rank, 4, device, TorchCollectives(rank, 4, meeting, device), fixed_order=False)
    _exchanges(group, device)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 8192), (8, 8192), (17, 8192), (100, 8192)):  # the last ones in two steps
            _a_sum_and_its_norm(group, shape, dtype)
        for count in (8, 8 * 577, (1 << 20) + 8, 9 << 20):  # the last in pieces
            of_ranks = [torch.randn(count, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
            x, total = of_ranks[rank].to(device), in_order(torch.stack(of_ranks).float())
            for algorithm in ("one_shot", "gather"):
                assert torch.equal(group.added(x, algorithm).cpu(), total.to(dtype)), (dtype, count, algorithm)  # type: ignore[arg-type]
            for algorithm in (
                "nccl",
                algorithms.algorithm_for(x.nbytes, dtype, algorithms.LIMITS[4], fixed_order=False),
            ):
                found = group.added(x, algorithm).float().cpu()  # type: ignore[arg-type]
                torch.testing.assert_close(found, total, rtol=0.02, atol=0.05 if dtype == torch.bfloat16 else 1e-4)
    torch.cuda.synchronize()
    group.close()


def _four_gpus_in_two_passes(rank: int, meeting: str) -> None:
    """A process of one of four GPUs."""
    device = torch.device("cuda", rank)
    collectives = TorchCollectives(rank, 4, meeting, device)
    group = CudaGroup(rank, 4, device, collectives, fixed_order=False, two_passes=True, dispatch_bytes=1 << 20)
    _dispatches(group, device)
    _copies(group, device)
    _exchanges(group, device)
    torch.cuda.synchronize()
    group.close()


@pytest.mark.gpu
@needs_four
@pytest.mark.parametrize("process", [_four_gpus, _four_gpus_in_two_passes])
def test_four_gpus_add_and_exchange(tmp_path: Path, process: Callable[[int, str], None]) -> None:
    torch.multiprocessing.spawn(process, (str(tmp_path / "meeting"),), nprocs=4)


@pytest.fixture(scope="module")
def answers_of_one_gpu() -> list[list[int]]:
    return answers(_EXPERTS)


@pytest.mark.gpu
@needs_four
@pytest.mark.parametrize("division", _DIVISIONS, ids=str)
@pytest.mark.parametrize("more", [[], ["engine.two_batch_overlap=on"]], ids=str)
def test_four_gpus_with_experts_answer_as_one(
    division: list[str], more: list[str], answers_of_one_gpu: list[list[int]]
) -> None:
    assert answers("engine.tensor_parallel=4", *division, _EXPERTS, *more) == answers_of_one_gpu


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["engine.two_batch_overlap=on"],
        ["engine.cuda_graphs=none"],
        ["speculation.method=eagle3", "speculation.draft=random:eagle3"],  # the head is divided, too
        ["speculation.method=ngram", "model.target=WIDE"],  # norms come with sums
        *([_EXPERTS, *more] for more in _DIVISIONS),
        *([_EXPERTS, *more, "engine.two_batch_overlap=on"] for more in _DIVISIONS),
        *([_EXPERTS, *more, "engine.cuda_graphs=none"] for more in _DIVISIONS),
        *([_EXPERTS, *more, *_DRAFT_MODEL] for more in _DIVISIONS),
    ],
    ids=str,
)
def test_two_gpus_answer_as_one(sets: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 768, "head_dim": 64}
    wide = write_checkpoint(tmp_path / "wide", **sizes)
    sets = [one.replace("WIDE", str(wide)) for one in sets]
    of_ranks = [one for one in sets if "expert_parallel" in one or "dp_attention" in one]
    others = [one for one in sets if one not in of_ranks]
    # Twice: this process has shared memory before, the second rank's process has not.
    ranked = [answers("engine.tensor_parallel=2", *sets) for _ in range(2)]
    assert ranked == [answers(*others)] * 2


def answers(*sets: str) -> list[list[int]]:
    """Return the tokens of 40 rows, every third of which has a grammar."""
    prompts = random_prompts(40, shared=20, longest=90)
    common = ["model.target=random:tiny", "model.dtype=float32", "engine.device=cuda", "engine.max_batch_size=32"]
    resolved = resolve(load_config(None, [*common, "engine.kv_cache_tokens=65536", *sets]))
    engine = (build_ranked if resolved.config.engine.tensor_parallel > 1 else build_engine)(resolved)
    compiler = GrammarCompiler(resolved.tokenizer)
    for i, prompt in enumerate(prompts):
        spec = None if i % 3 else MatcherSpec(Constraint("regex", "regex", "(name: [0-9]{2}, ){1,3}"))
        matcher = None if spec is None else spec.make(compiler)
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=20), RngKey(0, i, 0), None, (), matcher, spec))
    done: dict[int, list[int]] = {}
    while len(done) < len(prompts):
        done |= {c.request_id: c.token_ids for c in engine.step()}
    if isinstance(engine, RankedEngine):
        engine.close()
    return [done[i] for i in range(len(prompts))]
