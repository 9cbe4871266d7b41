"""What `test_compile_ahead.py` runs in a process of its own: `python -m tests.kernels.compiled_ahead CHECK`."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime._async_compile import active_mode

from specbatch import kernels
from specbatch.kernels import triton as triton_ops
from specbatch.kernels.triton.compile_ahead import Share, compile_ahead
from specbatch.kernels.triton.mixture.sorting import sorted_blocks
from specbatch.kernels.triton.parts.launch import launch
from specbatch.kernels.triton.skinny import ops
from specbatch.kernels.triton.skinny.tile import GemmTile
from tests.kernels.fake_gpu import FakeGpu

PLAIN = GemmTile("dot", 16, 32, 64, num_stages=2, num_warps=2, splits=2, fuse_norm=False)
HOPPER = GemmTile("dot", 8, 32, 64, num_stages=2, num_warps=4, tma=True, fuse_norm=False, pdl=True)


@triton.jit
def _add(x_ptr, number, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x_ptr + index, tl.load(x_ptr + index) + number)


@triton.jit
def _broken(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "only one element")


def gemms(gpu: FakeGpu) -> None:
    """Real calls of the same shapes find all kernels compiled, and launch them."""
    weight, norm = torch.randn(64, 128).bfloat16(), torch.ones(128).bfloat16()

    def run() -> None:
        x, one = torch.zeros(12, 128).bfloat16(), torch.zeros(1, 128).bfloat16()
        ops.linear(x, weight, None, torch.zeros(12, 64).bfloat16(), PLAIN)
        ops.norm_gated_linear(x[:8], norm, 1e-5, weight, HOPPER)
        ops.norm_linear(one, norm, 1e-5, weight)

    assert compile_ahead(run, 2) == (5, 0)
    assert not gpu.launched
    expected = ["_rms_norm", "combine_kernel", "dot_kernel", "dot_kernel", "fma_kernel"]
    assert sorted(gpu.compiled) == expected, gpu.compiled
    run()
    assert sorted(gpu.launched) == expected, gpu.launched
    assert len(gpu.compiled) == 5, gpu.compiled


def shares(gpu: FakeGpu) -> None:
    """A rank compiles its share, waits for the others, and compiles what they have not. If its function raises, the
    others do not wait for ever."""
    met: list[int] = []
    share = Share(1, 2, lambda: met.append(len(gpu.compiled)))

    def numbers() -> None:
        for block in (8, 16, 32, 64, 128, 256):
            launch(_add, (1,), torch.zeros(256), 1, BLOCK=block)

    assert compile_ahead(numbers, 2, share) == (6, 0)
    assert len(met) == 1
    assert 0 < met[0] < 6, "both ranks have some"
    numbers()
    assert (len(gpu.launched), len(gpu.compiled)) == (6, 6)
    assert "wrong" in _error(lambda: compile_ahead(lambda: _raise("wrong"), 2, share))
    assert len(met) == 2
    keys = [f"key {i}" for i in range(100)]
    assert all(sum(Share(rank, 3, list).has(key) for rank in range(3)) == 1 for key in keys)


def _raise(text: str) -> None:
    raise ValueError(text)


def specialised(gpu: FakeGpu) -> None:
    """By the alignment of addresses and by numbers, as the real calls are."""

    def run() -> None:
        x = torch.zeros(256)
        for first, number in ((0, 16), (4, 16), (1, 16), (0, 1), (0, 3)):
            launch(_add, (1,), x[first:], number, BLOCK=64)

    assert compile_ahead(run, 2) == (4, 0)  # 4 floats are 16 bytes
    run()
    assert (len(gpu.launched), len(gpu.compiled)) == (5, 4)


def failures(gpu: FakeGpu) -> None:
    """They leave no threads, and what was compiled before them stays."""

    def broken() -> None:
        launch(_broken, (1,), torch.zeros(64), BLOCK=64)
        launch(_add, (1,), torch.zeros(64), 1, BLOCK=64)

    def reads() -> None:
        launch(_add, (1,), torch.zeros(128), 1, BLOCK=128)
        print(int(torch.zeros(1).cumsum(0) > 0))

    def asks() -> None:
        print(torch.zeros(1).data_ptr())

    assert compile_ahead(broken, 2) == (1, 1)
    assert "only one element" in _error(broken)
    assert _error(lambda: compile_ahead(reads, 2))
    assert "data pointer" in _error(lambda: compile_ahead(asks, 2))
    assert (gpu.launched, gpu.compiled) == ([], ["_add", "_add"])
    assert threading.active_count() == 1
    assert active_mode.get() is None
    assert type(torch.zeros(1)) is torch.Tensor


def sorting(gpu: FakeGpu) -> None:
    """Choices of mixtures, by few and by many experts, with and without dependent launch. Other numbers of choices need
    no other kernels."""

    def run() -> None:
        for num_experts in (1, 64, 512):
            for num_choices in (131_072, 20_001, 600_000):
                for pdl in (False, True):
                    experts = torch.zeros(num_choices, 1, dtype=torch.int32)
                    sorted_blocks(experts, 0, num_experts, 128, pdl)

    assert compile_ahead(run, 2) == (12, 0)
    assert sorted(gpu.compiled) == ["count_kernel"] * 6 + ["place_kernel"] * 6, gpu.compiled


def rounds(gpu: FakeGpu) -> None:
    """Of an engine, with real weights. The reference kernels are replaced by Triton's."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.draft.shape import DraftShape
    from specbatch.setup.compile_ahead import compile_kernels

    _follow_cuda()
    for method, shape in (
        ("none", None),
        ("eagle3", DraftShape(2, 2, 4)),
        ("draft_model", DraftShape(2, 1, 3)),
        ("block", DraftShape(5, 1, 6)),
        ("suffix", DraftShape(3, 1, 4)),
        ("hybrid", DraftShape(3, 1, 4)),
    ):
        parts, before = _parts(method, shape), len(gpu.compiled)
        embedding = parts.target.embedding_VE.clone()
        note = compile_kernels(parts, 4, 64, 100, method)
        assert "kernels compiled ahead" in note, note
        least = 1 if method == "hybrid" else 9  # most of its kernels are those of a head and of suffix
        assert len(gpu.compiled) - before == int(note.split()[1]) >= least, note
        assert not gpu.launched
        assert "engine: 0 kernels compiled ahead" in compile_kernels(parts, 4, 64, 100, f"{method}, another run")
        assert compile_kernels(parts, 4, 64, 100, method) == "engine: kernels were compiled by an earlier start"
        assert torch.equal(parts.target.embedding_VE, embedding)
        assert _compiled_for_prompts(parts) == 0, gpu.compiled
        made = parts.make(4, 100, 64)
        tensors = [parts.target.embedding_VE, *(cache.all_layers for cache in made.caches)]
        assert all(type(tensor) is torch.Tensor for tensor in tensors), "fake ones are left"


def budgets(gpu: FakeGpu) -> None:
    """Rounds that verify some of the nodes."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.draft.shape import DraftShape
    from specbatch.engine.verify_budget import VerifyBudget
    from specbatch.setup.compile_ahead import compile_kernels

    _follow_cuda()
    for name in ("draft_model", "hybrid"):
        parts = replace(_parts(name, DraftShape(3, 1, 4)), budget=VerifyBudget(None))
        for method in parts.methods.items:
            method.scored = True
        note = compile_kernels(parts, 4, 64, 100, f"a budget with {name}")
        assert "kernels compiled ahead" in note, note
        assert "failed" not in note, note
        assert not gpu.launched
    assert {"_share_budget", "_pack_nodes", "_join_chains"} <= set(gpu.compiled), gpu.compiled
    assert gpu.compiled.count("_accept_chain") >= 2, "chains as a whole, and with nodes left out"


def _compiled_for_prompts(parts: Any) -> int:
    """Of one prompt in a chunk, of lengths that the start does not compute."""
    from specbatch.engine.round import Round
    from specbatch.setup.trial import trial_prompt

    num_ends: list[int] = []
    prefill = Round.prefill

    def counted(round_: Round, chunk: Any, *args: Any, **rest: Any) -> Any:
        num_ends.append(len(chunk.ready_R))
        return prefill(round_, chunk, *args, **rest)

    def run() -> None:
        for num_tokens in (50, 24):
            trial_prompt(parts.make(4, 100, 112).items.items[0], num_tokens, 1)

    Round.prefill = counted  # type: ignore[method-assign]
    count = compile_ahead(run, 2)[0]
    Round.prefill = prefill  # type: ignore[method-assign]
    assert num_ends == [1, 1]
    return count


def ranks(gpu: FakeGpu) -> None:
    """Rounds of a rank: nothing is sent, and the other rank is not there."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.kernels.triton.ranks import one_shot
    from specbatch.models.linears.sharded import GatheredLinear
    from specbatch.parallel.cuda import CudaGroup, TorchCollectives
    from specbatch.setup import compile_ahead
    from specbatch.setup.compile_ahead import compile_kernels

    class Alone(TorchCollectives):
        def __init__(self) -> None:
            self._kernel = one_shot

        def new_inbox(self, capacity: int) -> one_shot.Inbox:
            counts_K = torch.zeros(one_shot.num_blocks(capacity), dtype=torch.int32)
            return one_shot.Inbox(
                torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), counts_K, 1, capacity
            )

    found: list[int] = []
    best = GatheredLinear.best

    def counted(head: GatheredLinear, x_TI: torch.Tensor, ops: Any) -> Any:
        found.append(len(x_TI))
        return best(head, x_TI, ops)

    GatheredLinear.best = counted  # type: ignore[method-assign]
    _follow_cuda()
    group = CudaGroup(1, 2, torch.device("cpu"), Alone(), fixed_order=False)
    group.least = lambda value: value  # type: ignore[method-assign]
    parts = _parts("none", None, group, hidden=2048, num_layers=4)
    note = compile_kernels(parts, 4, 64, 100, "a rank")
    assert "kernels compiled ahead" in note, note
    assert not gpu.launched
    assert {"_one_shot", "_sum_norm"} <= set(gpu.compiled), gpu.compiled
    assert {1, 2, 4} <= set(found), "rounds exchanged no best tokens"
    assert "by an earlier start" in compile_kernels(parts, 4, 64, 100, "a rank")
    group.least = lambda value: 0  # type: ignore[method-assign]
    assert "engine: 0 kernels" in compile_kernels(parts, 4, 64, 100, "a rank"), "another rank has to compile"
    compile_ahead.outlined = lambda decoder: decoder
    assert "engine: 0 kernels" in compile_kernels(parts, 4, 64, 100, "all layers"), "layers left out have others"


def experts(gpu: FakeGpu) -> None:
    """Rounds and prompts of a rank that has whole experts, and with requests of its own."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.kernels.triton.ranks import one_shot, peer_add
    from specbatch.models.config import MoeConfig
    from specbatch.models.weight_loader import WeightLoader
    from specbatch.parallel.cuda import CudaGroup, TorchCollectives
    from specbatch.setup.compile_ahead import compile_kernels

    class Alone(TorchCollectives):
        def __init__(self) -> None:
            self._kernel, self._add_parts = one_shot, peer_add.add_parts

        def new_inbox(self, capacity: int) -> one_shot.Inbox:
            counts_K = torch.zeros(one_shot.num_blocks(capacity), dtype=torch.int32)
            return one_shot.Inbox(
                torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), counts_K, 1, capacity
            )

    WeightLoader.experts = WeightLoader.stacked_experts  # type: ignore[assignment, method-assign]
    _follow_cuda()
    moe = MoeConfig(8, 2, 64, norm_topk_prob=True, layers=(True,) * 4, shared_size=64)
    for division in ("experts", "requests"):
        group = CudaGroup(1, 2, torch.device("cpu"), Alone(), fixed_order=False)
        group._host = group  # type: ignore[assignment]
        group.least = lambda value: value  # type: ignore[method-assign]
        del gpu.compiled[:]
        parts = _parts("none", None, group, hidden=512, num_layers=4, division=division, moe=moe)
        note = compile_kernels(parts, 32, 64, 100, division)
        assert "kernels compiled ahead" in note, note
        assert "failed" not in note, note
        assert {"_one_shot", "sort_kernel", "expert_gemm"} <= set(gpu.compiled), gpu.compiled
        assert gpu.compiled.count("_one_shot") >= 2, "sums with and without a residual, or gathers and scatters"


def drafters(gpu: FakeGpu) -> None:
    """Rounds of all heads that draft a block in one pass: none reads what only the GPU has."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.draft.shape import DraftShape
    from specbatch.engine.verify_budget import VerifyBudget
    from specbatch.setup.compile_ahead import compile_kernels
    from tests.draft.test_block import CONFIDENCE, TRAITS

    _follow_cuda()
    chain, tree = DraftShape(5, 1, 6), DraftShape(3, 2, 5)
    heads = [(name, traits) for name, traits in TRAITS.items() if "decoder" not in traits]
    cases = [("block", f"{name}, {shape}", shape, traits) for name, traits in heads for shape in (chain, tree)]
    cases += [("block", name, chain, traits) for name, traits in CONFIDENCE.items()]
    cases += [("peagle", str(shape), shape, {}) for shape in (chain, tree)]
    for method, name, shape, traits in cases:
        parts = _parts(method, shape, **traits)
        if "confidence_size" in traits:
            parts = replace(parts, budget=VerifyBudget(1.5))
            for one in parts.methods.items:
                one.scored = True
        del gpu.launched[:]  # P-EAGLE projects its learned feature when it is loaded
        note = compile_kernels(parts, 4, 64, 100, f"{method}, {name}")
        assert "kernels compiled ahead" in note, f"{name}: {note}"
        assert "failed" not in note, f"{name}: {note}"
        assert not gpu.launched, f"{name}: {gpu.launched}"


def deterministic(gpu: FakeGpu) -> None:
    """Rounds and prompts of engine.deterministic, and its checks of the card. Large GEMMs are kernels of a library, so
    nothing is compiled for them."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from specbatch.attention.invariant import InvariantAttention
    from specbatch.models.linears import invariant
    from specbatch.models.weight_loader import WeightLoader
    from specbatch.setup.compile_ahead import compile_kernels
    from tests import tiny_models

    class Library:
        def algorithms(self, *size: int) -> list[None]:
            return [None]

        def multiply(self, algorithm: None, x_MI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
            return x_MI.new_zeros(len(x_MI), len(weight_OI))

    _follow_cuda()
    invariant.CublasLt = lambda *args, **rest: Library()  # type: ignore[assignment, misc]
    gemm = invariant.InvariantGemm(torch.device("cpu"), torch.bfloat16)

    def loader(*args: Any, **rest: Any) -> WeightLoader:
        return WeightLoader(*args, gemm=gemm, **rest)

    def attention(*sizes: Any) -> InvariantAttention:
        made = InvariantAttention(*sizes)
        made.check_later(gemm.checks)
        return made

    tiny_models.WeightLoader = loader  # type: ignore[assignment, misc]
    parts = replace(_parts("none", None, attention_class=attention), checks=gemm.checks)
    note = compile_kernels(parts, 4, 512, 600, "deterministic")
    assert "kernels compiled ahead" in note, note
    assert "failed" not in note, note
    assert not gpu.launched
    assert {"_attend", "dot_kernel", "_act_mul", "_tree_paths"} <= set(gpu.compiled), gpu.compiled
    count = len(gpu.compiled)
    gemm.checks.launch()
    assert len(gpu.launched) > 30
    assert len(gpu.compiled) == count, gpu.compiled[count:]


def failed_rounds(gpu: FakeGpu) -> None:
    """A start in which a kernel failed, for want of space on the disk for instance, leaves no sign for the next one."""
    kernels.importlib = SimpleNamespace(import_module=lambda name: triton_ops)  # type: ignore[attr-defined]
    from triton.runtime.cache import FileCacheManager

    from specbatch.setup.compile_ahead import compile_kernels

    def put(*args: Any, **rest: Any) -> str:
        raise OSError(28, "No space left on device")

    _follow_cuda()
    parts, kept = _parts("none", None), FileCacheManager.put
    FileCacheManager.put = put  # type: ignore[method-assign]
    assert "more failed" in compile_kernels(parts, 4, 64, 100, "a run")
    FileCacheManager.put = kept  # type: ignore[method-assign]
    note = compile_kernels(parts, 4, 64, 100, "a run")
    assert "kernels compiled ahead" in note, note
    assert "failed" not in note, note


def _follow_cuda() -> None:
    """Where a CPU has a way of its own."""
    from specbatch.cache.request_table import RequestTable
    from specbatch.models.decoder_layer import ForwardPass

    made_pass, made_table = ForwardPass.__init__, RequestTable.__init__

    def make_pass(step: Any, *args: Any, **rest: Any) -> None:
        made_pass(step, *args, **rest)
        step._angles = None  # they are computed in each layer

    def make_table(table: Any, *args: Any, **rest: Any) -> None:
        made_table(table, *args, **rest)
        table.floats_S3 = table.floats_S3.float()

    ForwardPass.__init__ = make_pass  # type: ignore[method-assign]
    RequestTable.__init__ = make_table  # type: ignore[method-assign]


def _parts(
    method: str,
    shape: Any,
    group: Any = None,
    hidden: int = 32,
    num_layers: int | None = None,
    division: Any = "tensors",
    moe: Any = None,
    attention_class: Any = None,
    **traits: Any,
) -> Any:
    from specbatch.attention.triton import PagedAttention
    from specbatch.draft import METHODS, DraftParts, make_method
    from specbatch.draft.schedule import ByBatch
    from specbatch.draft.suffix import SharedTexts
    from specbatch.setup.round_parts import RoundParts
    from tests.tiny_models import num_target_layers, tiny_config, tiny_decoder, tiny_draft_net

    def attention(config: Any, device: torch.device) -> Any:
        made = attention_class or PagedAttention
        return made(config.num_heads, config.num_kv_heads, config.head_dim, torch.bfloat16, device)

    config = tiny_config(num_layers or num_target_layers(method), hidden, head_dim=16, moe=moe)
    device = torch.device("cpu")
    target = tiny_decoder(
        config, torch.bfloat16, attention=attention, num_positions=160, group=group, division=division
    )
    net = None
    if METHODS[method].net is not None:
        net = tiny_draft_net(
            method,
            target,
            64,
            torch.bfloat16,
            draft_vocab=None,
            draft_seed=0,
            scale=0.25,
            attention=attention,
            **traits,
        )
    shared = SharedTexts(1024, [], device, triton_ops)
    made = make_method(method, shape, DraftParts(device, triton_ops, net, shared=shared))
    return RoundParts(target, ByBatch.always(made), torch.bfloat16, 16, (1,), fixed_shapes=True, group=group)


def _error(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{error} {error.__cause__}"
    return ""


if __name__ == "__main__":
    checks = (
        gemms,
        shares,
        specialised,
        failures,
        sorting,
        rounds,
        budgets,
        ranks,
        experts,
        drafters,
        deterministic,
        failed_rounds,
    )
    {check.__name__: check for check in checks}[sys.argv[1]](FakeGpu())
