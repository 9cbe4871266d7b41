"""The ranks of GPUs. On a CPU: threads in place of GPUs, and sums in torch in place of its kernels."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specbatch.config_load import load_config
from specbatch.counts import EngineStats
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, ModelError, SpecbatchError
from specbatch.kernels import ops_for
from specbatch.models.layers import RMSNorm
from specbatch.parallel import algorithms, cuda
from specbatch.parallel.algorithms import LIMITS, Limits, algorithm_for, buffer_bytes, inbox_capacity, limits_for
from specbatch.parallel.cuda import CudaGroup, named_group
from specbatch.parallel.group import Group, Norm, in_order
from specbatch.parallel.multicast import disable_multicast
from specbatch.setup.engine import resolve_prompt_graphs
from specbatch.setup.model import part_of_a_rank
from specbatch.setup.ranks.ranked_engine import OtherRanks, RankedEngine
from specbatch.types import SamplingParams
from tests.coins import plain_logits
from tests.engine.graphs import Replays
from tests.parallel.threads import ThreadGroup, on_ranks
from tests.tiny_models import CPU, random_prompts, run, tiny_config, tiny_decoder, tiny_device_engine, tiny_engine


class FakeCollectives:
    """Over ranks that are threads. `buffers`: the buffer of each sum that needs one."""

    def __init__(self, group: Group) -> None:
        self._group, self.calls, self.buffers = group, list[str](), list[int]()
        self.made: list[Tensor] = []

    def new_buffer(self, num_bytes: int) -> Tensor:
        self.made.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.made[-1]

    def new_inbox(self, capacity: int) -> Any:
        return SimpleNamespace(memory=self.new_buffer(capacity), capacity=capacity)

    new_mailbox = new_inbox

    def new_dispatch_buffer(self, num_bytes: int) -> Any:
        return FakeDispatches(self._group, self.calls, self.new_buffer(num_bytes))

    has_stream_operations = True

    def can_copy(self) -> bool:
        return self.has_stream_operations

    def one_shot(self, x: Tensor, residual: Tensor | None, out: Tensor, inbox: Any, *, is_alone: bool) -> None:
        total = self._in_buffer("one_shot" if is_alone else "one_shot of two", x, inbox.memory)
        out.copy_(total if residual is None else residual + total)

    def can_norm(self, x_TE: Tensor) -> bool:
        return x_TE.shape[1] % 8 == 0

    def sum_norm(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm, inbox: Any, *, two_shot: bool
    ) -> tuple[Tensor, Tensor]:
        assert x_TE.is_contiguous()
        assert residual_TE.is_contiguous()
        name = "two_shot norm" if two_shot else "one_shot norm"
        total_TE = residual_TE + self._in_buffer(name, x_TE, inbox.memory)
        return total_TE, ops_for(CPU, x_TE.dtype).rms_norm(total_TE, norm.weight, norm.eps)

    def copied(self, x: Tensor, residual: Tensor | None, out: Tensor, mailbox: Any) -> None:
        total = self._in_buffer("copied", x, mailbox.memory)
        out.copy_(total if residual is None else residual + total)

    def two_shot(self, x: Tensor, out: Tensor, buffer: Tensor) -> None:
        out.copy_(self._in_buffer("two_shot", x, buffer))

    def _in_buffer(self, name: str, x: Tensor, buffer: Tensor) -> Tensor:
        assert x.nbytes <= len(buffer), "it does not fit"
        self.calls.append(name)
        self.buffers.append(buffer.data_ptr())
        part = buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return self._group.sum(part.copy_(x).clone())

    def nccl(self, x: Tensor, out: Tensor) -> None:
        """In another order."""
        self.calls.append("nccl")
        out.copy_(self._group.gather(x).flip(0).sum(0))

    def gather(self, x: Tensor, parts: Tensor) -> None:
        self.calls.append("gather")
        parts.copy_(self._group.gather(x))

    def one_shot_gather(self, x: Tensor, parts: Tensor, inbox: Any, *, is_alone: bool) -> None:
        self._fits("one_shot gather" if is_alone else "one_shot gather of two", x, inbox)
        parts.copy_(self._group.gather(x))

    def copied_gather(self, x: Tensor, parts: Tensor, mailbox: Any) -> None:
        self._fits("copied gather", x, mailbox)
        parts.copy_(self._group.gather(x))

    def one_shot_scatter(
        self, parts: Tensor, residual: Tensor | None, out: Tensor, inbox: Any, *, is_alone: bool
    ) -> None:
        self._fits("one_shot scatter" if is_alone else "one_shot scatter of two", out, inbox)
        out.copy_(self._group.start_scatter_sum(parts, residual)())

    def copied_scatter(self, parts: Tensor, residual: Tensor | None, out: Tensor, mailbox: Any) -> None:
        self._fits("copied scatter", out, mailbox)
        out.copy_(self._group.start_scatter_sum(parts, residual)())

    def exchange(self, parts: Tensor, received: Tensor) -> None:
        self.calls.append("exchange")
        received.copy_(self._group.gather(parts)[:, self._group.rank])

    def add_parts(self, parts: Tensor, residual: Tensor | None, out: Tensor) -> None:
        total = in_order(parts)
        out.copy_(total if residual is None else residual + total)

    def _fits(self, name: str, x: Tensor, memory: Any) -> None:
        assert x.nbytes <= memory.capacity, "it does not fit"
        self.calls.append(name)

    def close(self) -> None:
        self.calls.append("close")


class FakeDispatches:
    """A dispatch buffer over ranks that are threads. It must be released before it is used again."""

    def __init__(self, group: Group, calls: list[str], memory: Tensor) -> None:
        self._group, self._calls, self._memory, self._is_held = group, calls, memory, False
        self.capacity = len(memory) // group.size

    def own_place(self, like: Tensor) -> Tensor:
        assert not self._is_held
        return self._memory[: like.nbytes].view(like.dtype).view(like.shape)

    def gather(self, x: Tensor) -> Tensor:
        assert not self._is_held
        self._is_held = True
        self._calls.append("gather in place" if x.data_ptr() == self._memory.data_ptr() else "gather in buffer")
        return self._group.gather(x).view(self._group.size, -1)

    def release(self) -> None:
        assert self._is_held
        self._is_held = False
        self._calls.append("release")


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize(
    ("size", "count", "dtype", "calls"),
    [
        (2, 1 << 10, torch.bfloat16, ("one_shot", "one_shot")),
        (2, 5 << 20, torch.float32, ("one_shot", "copied")),  # One pass has two pieces.
        (2, (1 << 10) + 1, torch.bfloat16, ("nccl", "nccl")),
        (2, 1 << 10, torch.float64, ("nccl", "nccl")),
        (4, 1 << 20, torch.float32, ("one_shot", "copied")),
        pytest.param(4, 5 << 20, torch.float32, ("nccl", "copied"), marks=pytest.mark.wide),
        (3, 1 << 10, torch.bfloat16, ("nccl", "nccl")),
    ],
)
def test_exchanges_of_all_sizes(
    size: int, count: int, dtype: torch.dtype, calls: tuple[str, str], two_passes: bool
) -> None:
    def work(group: Group) -> list[str]:
        ranks, fake = cuda_group(group, two_passes=two_passes)
        fake.calls.clear()  # the ranks have agreed on what they can do
        x = torch.full((count,), group.rank + 1.0, dtype=dtype)
        with ranks.one_of_two_passes(1) if two_passes else contextlib.nullcontext():
            assert torch.equal(ranks.start_dispatch(x)(), group.gather(x))
            parts = torch.stack([(1 + 2 * i) * x for i in range(size)])
            found = ranks.start_scatter_sum(parts, x)()
        assert torch.equal(found, x + sum(range(1, size + 1)) * (1 + 2 * group.rank))
        assert ranks.start_dispatch(x[:0])().shape == (size, 0)
        assert ranks.start_scatter_sum(parts[:, :0])().shape == (0,)
        return fake.calls

    wanted = calls[two_passes]
    ends = {"nccl": ["gather", "exchange"], "copied": ["copied gather", "copied scatter"]}
    suffix = " of two" if two_passes else ""
    expected = ends.get(wanted, [f"one_shot gather{suffix}", f"one_shot scatter{suffix}"])
    for found in on_ranks(size, work):
        assert list(dict.fromkeys(found)) == expected
        assert len(found) == (4 if (size, count) == (2, 5 << 20) and not two_passes else 2)


def test_tokens_travel_in_a_buffer_until_their_experts_are_added() -> None:
    """Each of two passes has a buffer, and a pass that is alone has none. A buffer has no place for small and for too
    large tensors."""
    small, fits, large = 1 << 10, 1 << 18, (1 << 18) + 4  # elements of 4 bytes

    def work(group: Group) -> list[str]:
        ranks, fake = cuda_group(group, two_passes=True, dispatch_bytes=4 * fits)
        fake.calls.clear()
        for count in (small, fits, large):
            assert ranks.dispatch_place(torch.zeros(count)) is None
        for number in (0, 1, 0):
            with ranks.one_of_two_passes(number):
                for count in (small, large):
                    assert ranks.dispatch_place(torch.zeros(count)) is None
                x = torch.full((fits // 8, 8), group.rank + 1.0 + number)
                place = ranks.dispatch_place(x)
                assert place is not None
                for tokens in (x, place.copy_(x)):
                    found = ranks.start_dispatch(tokens)()
                    assert torch.equal(found, group.gather(x))
                    summed = ranks.start_scatter_sum(2 * found, x)()
                    assert torch.equal(summed, (1 + 2 * group.size) * x)
        return fake.calls

    turn = ["gather in buffer", "release", "copied scatter", "gather in place", "release", "copied scatter"]
    assert on_ranks(2, work) == [3 * turn] * 2


def test_hosts_agree_without_their_gpus() -> None:
    def work(group: Group) -> list[list[int]]:
        return cuda_group(group, host=group)[0].agree([group.rank, 7])  # type: ignore[arg-type]

    assert on_ranks(2, work) == [[[0, 7], [1, 7]]] * 2


def cuda_group(group: Group, **traits: Any) -> tuple[CudaGroup, FakeCollectives]:
    fake = FakeCollectives(group)
    return CudaGroup(group.rank, group.size, CPU, fake, **{"fixed_order": False, **traits}), fake


@pytest.mark.parametrize("two_passes", [False, True])
def test_the_algorithm_follows_the_size(two_passes: bool) -> None:
    for size, found_limits in LIMITS.items():
        limits = limits_for(size, two_passes=two_passes)
        assert limits is not None
        assert (limits == found_limits) or two_passes
        assert 2 * size * inbox_capacity(size) <= 64 << 20, "the inbox of a GPU"
        assert min(limits.one_shot, limits.exchange, 16 << 20) <= inbox_capacity(size)
        has_two_shot = limits.one_shot < limits.two_shot
        assert buffer_bytes(limits) == (limits.two_shot if has_two_shot else 0)
        sizes = (
            16,
            limits.one_shot,
            *[limits.one_shot + 16, limits.two_shot] * has_two_shot,
            limits.two_shot + 16 * size,
        )
        for dtype in (torch.bfloat16, torch.float32):
            found = [algorithm_for(n, dtype, limits, fixed_order=False) for n in sizes]
            largest = "copied" if size > 1 and two_passes else "nccl"
            assert found == ["one_shot", "one_shot", *["two_shot", "two_shot"] * has_two_shot, largest]
            assert {algorithm_for(n, dtype, limits, fixed_order=True) for n in sizes} == {"one_shot"}
    two = LIMITS[2]
    for what in (
        (64, torch.float16, two),
        (64, torch.float64, two),
        (64, torch.bfloat16, None),
        (6, torch.bfloat16, two),
    ):
        assert algorithm_for(*what, fixed_order=False) == "nccl"
        assert algorithm_for(*what, fixed_order=True) == "gather"
    assert limits_for(3, two_passes=two_passes) is None
    assert buffer_bytes(None) == inbox_capacity(3) == 0


@pytest.mark.parametrize("fixed_order", [False, True])
def test_norms_that_come_with_sums(fixed_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that a one-shot sum adds in one piece, while no other sum runs."""
    monkeypatch.setattr(algorithms, "_LARGEST_PIECE", 1024)
    monkeypatch.setitem(LIMITS, 2, Limits(one_shot=2048, two_shot=2048, exchange=2048))

    def work(group: Group) -> None:
        mine, fake = cuda_group(group, fixed_order=fixed_order, two_passes=True)
        rng = torch.Generator().manual_seed(group.rank)

        def found(shape: tuple[int, int], *, weight: torch.dtype = torch.float32, **odd: bool) -> bool:
            x_TE, residual_TE = torch.randn((2, *shape), generator=rng)
            residual_TE = group.gather(residual_TE)[0]
            if odd.get("begins_anywhere"):
                x_TE = torch.cat((torch.zeros(1), x_TE.view(-1)))[1:].view(shape)
            if odd.get("has_gaps"):
                residual_TE = torch.cat((residual_TE, residual_TE), dim=1)[:, : shape[1]]
            if odd.get("has_wide_residual"):
                residual_TE = residual_TE.double()
            norm = RMSNorm(torch.linspace(-1, 2, shape[1], dtype=weight), 1e-5)
            expected = residual_TE + mine.sum(x_TE)
            total, normed = mine.start_normed_sum(x_TE, residual_TE, norm)()
            assert torch.equal(total, expected)
            assert normed is None or torch.equal(normed, norm(total))
            return normed is not None

        assert found((32, 8)) != fixed_order
        assert found((1, 16)) != fixed_order
        assert not found((33, 8)), "in two pieces"
        assert not found((65, 8)), "by another algorithm"
        assert not found((4, 12)), "the kernel does not take such rows"
        assert not found((4, 8), weight=torch.float64)
        assert not found((4, 8), has_wide_residual=True)
        assert not found((4, 8), begins_anywhere=True)
        assert found((4, 8), has_gaps=True) != fixed_order
        assert not found((0, 8))
        with mine.one_of_two_passes(0):
            assert not found((32, 8)), "another sum can run at the same time"
        assert ("one_shot norm" in fake.calls) != fixed_order

    on_ranks(2, work)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_all_sizes(size: int, fixed_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limits(one_shot=64, two_shot=256, exchange=64)
    monkeypatch.setattr(algorithms, "_LARGEST_PIECE", 64)
    if size in LIMITS:
        monkeypatch.setitem(LIMITS, size, limit)
    counts = [1, 4, limit.one_shot // 4, limit.two_shot // 4 - 4, limit.two_shot // 4 + 8]

    def work(group: Group) -> list[str]:
        mine, fake = cuda_group(group, fixed_order=fixed_order)
        for count in counts:
            x = torch.randn(count, generator=torch.Generator().manual_seed(group.rank)).view(-1, 1)
            before, total = x.clone(), mine.sum(x)
            expected = group.sum(x)
            assert torch.equal(x, before), "what is added stays as it is"
            assert total.shape == x.shape
            assert total.data_ptr() != x.data_ptr()
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
            assert not fixed_order or torch.equal(total, expected)
            assert torch.equal(mine.start_sum(x, before)(), before + total)
            assert mine.start_sum(x, before.double())().dtype == torch.float64, "as if it was added afterwards"
            assert torch.equal(x, before)
        assert mine.sum(torch.empty(0, 8)).shape == (0, 8)
        assert torch.equal(mine.gather(x), group.gather(x))
        assert mine.least(5 - group.rank) == 6 - size
        assert mine.of_first([1.5 + group.rank]) == [1.5]
        mine.close()
        return fake.calls

    (calls, *others) = on_ranks(size, work)
    assert all(calls == other for other in others)
    sums = calls[: calls.index("close") - 3]
    if size == 3:
        assert set(sums) == {"gather" if fixed_order else "nccl"}
    elif fixed_order:
        assert sums == ["gather"] * 3 + ["one_shot"] * (1 + 1 + 4 + 5) * 3, "large ones are added in pieces"
    else:
        assert [sums[i::3] for i in range(3)] == [["nccl", "one_shot", "one_shot", "two_shot", "nccl"]] * 3


def test_a_second_pass_has_a_buffer_of_its_own() -> None:
    def work(group: Group) -> list[int]:
        mine, fake = cuda_group(group, two_passes=True)
        first = mine.start_sum(torch.ones(8))
        with mine.one_of_two_passes(1):
            second = mine.start_sum(torch.full((8,), 2.0))
        mine.sum(torch.ones(4))
        assert (first()[0], second()[0]) == (2, 4)
        return fake.buffers

    for one, other, third in on_ranks(2, work):
        assert one == third != other


def test_only_passes_at_the_same_time_leave_large_sums_to_copy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_TWO_PASSES_ONE_SHOT", 64)
    monkeypatch.setattr(cuda, "MAILBOX_BYTES", 128)

    def work(group: Group) -> list[str]:
        mine, fake = cuda_group(group, two_passes=True)
        for number in (None, 0, 1):
            with contextlib.nullcontext() if number is None else mine.one_of_two_passes(number):
                for count in (16, 64):  # the larger one in two pieces
                    x = torch.arange(float(count)) + group.rank
                    assert torch.equal(mine.sum(x), 2 * torch.arange(float(count)) + 1)
                    assert torch.equal(mine.start_sum(x, x)(), x + mine.sum(x))
        return fake.calls

    for agreed, *calls in on_ranks(2, work):
        assert agreed == "gather", "whether both can copy"
        assert calls[:6] == ["one_shot"] * 6
        assert calls[6:] == (["one_shot of two"] * 3 + ["copied"] * 6) * 2


def test_without_operations_of_streams_sums_are_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, if one of them lacks them."""
    monkeypatch.setattr(algorithms, "_TWO_PASSES_ONE_SHOT", 64)

    def work(group: Group) -> list[str]:
        fake = FakeCollectives(group)
        fake.has_stream_operations = group.rank == 0
        mine = CudaGroup(group.rank, group.size, CPU, fake, fixed_order=False, two_passes=True)
        with mine.one_of_two_passes(1):
            assert torch.equal(mine.sum(torch.ones(64)), torch.full((64,), 2.0))
        return fake.calls

    assert on_ranks(2, work) == [["gather", "nccl"]] * 2


def test_a_part_of_a_tensor_that_is_not_aligned_is_copied() -> None:
    def work(group: Group) -> None:
        mine, fake = cuda_group(group)
        aligned = list[bool]()
        one_shot = fake.one_shot
        fake.one_shot = lambda x, *rest, **more: (  # type: ignore[method-assign]
            aligned.append(x.storage_offset() == 0),
            one_shot(x, *rest, **more),
        )
        assert torch.equal(mine.sum(torch.arange(9.0)[1:]), 2 * torch.arange(1.0, 9.0))
        assert aligned == [True]

    on_ranks(2, work)


@pytest.mark.parametrize(("method", "lanes"), [("none", None), ("none", 1), ("eagle3", None), ("draft_model", None)])
def test_an_engine_over_them(method: str, lanes: int | None) -> None:
    prompts, params = random_prompts(4, shared=9, longest=12), SamplingParams(max_tokens=8)
    shape = None if method == "none" else DraftShape(3, 2, 6)
    expected = run(tiny_engine(method, shape, num_pages=256), prompts, params)  # eagle3 has another target

    def work(group: Group) -> tuple[list[Any], FakeCollectives]:
        mine, fake = cuda_group(group, two_passes=lanes is not None)
        engine = tiny_engine(method, shape, num_pages=256, group=mine, min_lane=lanes, dtype=torch.float32)
        return run(engine, prompts, params), fake

    for found, fake in on_ranks(2, work):
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert len(set(fake.buffers)) == (1 if lanes is None else 2)
        assert "one_shot norm" in fake.calls


def test_an_engine_with_prompts_in_pieces_over_them() -> None:
    """The last layer follows the pieces, with the model's last norm."""
    prompts, params = random_prompts(6, shared=9, longest=30), SamplingParams(max_tokens=8)
    expected = run(tiny_engine(num_pages=256), prompts, params)

    def work(group: Group) -> tuple[list[Any], int]:
        mine, fake = cuda_group(group)
        options: dict[str, Any] = {"piece_sizes": [16, 32], "piece_runner": Replays(lambda key: False), "group": mine}
        engine = tiny_device_engine(num_pages=256, dtype=torch.float32, **options)
        return run(engine, prompts, params), fake.calls.count("one_shot norm")

    for found, _ in on_ranks(2, work):
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_a_norm_that_its_layer_computes_itself_comes_with_no_sum() -> None:
    """As of FP8 layers, which quantise in it."""

    def work(group: Group) -> list[tuple[int, int]]:
        counts = []
        for names in ((), ("_qkv",), ("_gated",), ("_qkv", "_gated")):
            mine, fake = cuda_group(group)
            decoder = tiny_decoder(tiny_config(num_layers=3), torch.float32, group=mine)
            for layer in decoder.layers:
                for part in (layer.attention, layer._mlp):
                    for name in names:
                        if hasattr(part, name):
                            getattr(part, name).takes_normed = False
            plain_logits(decoder, [3, 1, 4])
            counts.append((len(names), fake.calls.count("one_shot norm")))
        return counts

    assert on_ranks(2, work) == [[(0, 6), (1, 4), (1, 3), (2, 1)]] * 2


def test_each_norm_but_the_first_comes_with_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [3, 1, 4, 1, 5]
    expected = plain_logits(tiny_decoder(tiny_config(num_layers=3), torch.float32), tokens)
    counts: dict[int, int] = {}
    norm = RMSNorm.__call__

    def counted(self: RMSNorm, x: Tensor) -> Tensor:
        counts[threading.get_ident()] = counts.get(threading.get_ident(), 0) + 1
        return norm(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", counted)

    def work(group: Group) -> tuple[Tensor, int, int]:
        mine, fake = cuda_group(group)
        found = plain_logits(tiny_decoder(tiny_config(num_layers=3), torch.float32, group=mine), tokens)
        return found, fake.calls.count("one_shot norm"), counts[threading.get_ident()]

    for found, with_sums, others in on_ranks(2, work):
        torch.testing.assert_close(found, expected)
        assert (with_sums, others) == (6, 1)


def test_a_group_has_a_name_by_which_kernels_find_it(tmp_path: Path) -> None:
    """What torch's kernels ask: the group's store, rank and size."""
    store = dist.FileStore(str(tmp_path / "meeting"), 1)
    gloo: Any = dist.ProcessGroupGloo(store, 0, 1)
    c10d: Any = torch._C._distributed_c10d
    group = named_group("test group", store, 0, 1, CPU, gloo)
    found = c10d._resolve_process_group("test group")
    assert (found.rank(), found.size(), found.group_name) == (0, 1, "test group")
    assert found is not None
    assert not dist.is_initialized(), "it is not the default group"
    c10d._unregister_process_group("test group")
    del group


def test_torch_has_the_kernel_with_these_arguments() -> None:
    schema = torch.ops.symm_mem.two_shot_all_reduce_out.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name", "output"]


def test_multicast_stays_off() -> None:
    environment = {"NCCL_NVLS_ENABLE": "1", "HOME": "/"}
    disable_multicast(environment)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert environment["HOME"] == "/"


class FakeProcess:
    def __init__(self, connection: Connection) -> None:
        self.pid, self.was_killed = 1, False
        self.code: int | None = None
        self.connection = Connection(os.dup(connection.fileno()))
        self.connection.send(("started",))

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        self.was_killed = True


def test_a_rank_that_ends_ends_the_process_that_waits_for_it_on_a_gpu() -> None:
    """Not while it does something else, also if it has found the rank's end before."""
    started, ends = list[FakeProcess](), list[SpecbatchError]()

    def start(connection: Connection) -> FakeProcess:
        started.append(FakeProcess(connection))
        return started[-1]

    fake: Any = SimpleNamespace(on_cuda=True, config=load_config(None, ["engine.tensor_parallel=3"]))
    others = OtherRanks(fake, start, ends.append, stuck_seconds=0.1)
    folder = others.meeting.parent
    with others.shared():
        _until(lambda: bool(ends), 0.4)
    started[1].code = -9
    assert others.failure() is not None
    _until(lambda: bool(ends), 0.6)
    assert ends == [], "it was not stuck"
    with others.shared():
        _until(lambda: bool(ends), 5.0)
    assert [error.message for error in ends] == ["rank 2 of engine.tensor_parallel ended by signal 9"]
    assert all(process.was_killed for process in started)
    assert not folder.exists()
    others.close()


def test_a_message_that_nobody_reads_does_not_keep_the_process() -> None:
    """A rank that was killed may wait for its GPU with its connection open, which takes only so much."""
    started, ends = list[FakeProcess](), list[SpecbatchError]()

    def start(connection: Connection) -> FakeProcess:
        started.append(FakeProcess(connection))
        return started[-1]

    fake: Any = SimpleNamespace(on_cuda=True, config=load_config(None, ["engine.tensor_parallel=2"]))
    others = OtherRanks(fake, start, ends.append, stuck_seconds=0.1)
    group: Any = SimpleNamespace(device=CPU)
    engine = RankedEngine(SimpleNamespace(limit_length=lambda tokens: tokens), others, group)  # type: ignore[arg-type]
    started[0].code = -9

    def fill() -> None:
        with contextlib.suppress(OSError, ModelError):
            for _ in range(100):
                engine.limit_length([0] * 3000)  # type: ignore[arg-type]

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    _until(lambda: bool(ends), 5.0)
    assert [error.message for error in ends] == ["rank 1 of engine.tensor_parallel ended by signal 9"]
    started[0].connection.close()
    thread.join(5.0)
    assert not thread.is_alive()
    others.close()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_closed_gives_the_group_back(fails: bool) -> None:
    """After the last graph, and once. Not after a failed step, whose traceback can hold graphs."""

    def step() -> list[Any]:
        if fails:
            raise ModelError("no memory")
        return []

    run_: Any = SimpleNamespace(on_cuda=False, config=load_config(None, ["engine.tensor_parallel=2"]))
    others = OtherRanks(run_, FakeProcess)
    fake = FakeCollectives(ThreadGroup(0, 2, None))  # type: ignore[arg-type]
    group = CudaGroup(0, 2, CPU, fake, fixed_order=False)
    buffers = [weakref.ref(buffer) for buffer in fake.made]
    fake.made.clear()
    release = partial(fake.calls.append, "graphs")
    parts: Any = SimpleNamespace(release_graphs=release, step=step, stats=EngineStats())
    engine = RankedEngine(parts, others, group)
    with contextlib.suppress(ModelError):
        engine.step()
    for _ in range(2):
        engine.close()
    assert fake.calls.count("close") == (not fails)
    assert fake.calls[:2] == ([] if fails else ["graphs", "close"])
    assert all((buffer() is None) != fails for buffer in buffers)
    assert len(buffers) == 1
    assert not others.meeting.parent.exists()


def test_a_rank_gets_copies_of_tensors() -> None:
    """A process with another key could not read what is shared."""
    started = list[FakeProcess]()

    def start(connection: Connection) -> FakeProcess:
        started.append(FakeProcess(connection))
        return started[-1]

    config = load_config(None, ["engine.tensor_parallel=2"])
    fake: Any = SimpleNamespace(on_cuda=False, config=config, vocab_map=torch.arange(3))
    others = OtherRanks(fake, start)
    sent = started[0].connection.recv_bytes()
    others.close()
    assert b"storage_fd" not in sent
    assert pickle.loads(sent).run.vocab_map.tolist() == [0, 1, 2]


def test_all_ranks_import_their_modules_at_the_same_time() -> None:
    """A first message that a pipe does not hold keeps rank 0 until the rank reads it. Then the others must be running,
    or each would begin to import after the one before it."""
    started, were_running, are_running = list[FakeProcess](), list[bool](), threading.Event()

    def read(connection: Connection) -> None:
        were_running.append(are_running.wait(2.0))
        connection.recv_bytes()

    def start(connection: Connection) -> FakeProcess:
        started.append(FakeProcess(connection))
        threading.Thread(target=read, args=(started[-1].connection,), daemon=True).start()
        if len(started) == 3:
            are_running.set()
        return started[-1]

    config = load_config(None, ["engine.tensor_parallel=4"])
    fake: Any = SimpleNamespace(on_cuda=False, config=config, vocab_map=torch.arange(1 << 20))
    OtherRanks(fake, start).close()
    assert were_running == [True] * 3


def test_a_rank_that_cannot_end_counts_as_ended() -> None:
    """A process that was killed can wait for its GPU, which waits for this process's."""
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started, ends = list[FakeProcess](), list[SpecbatchError]()

    def start(connection: Connection) -> FakeProcess:
        started.append(FakeProcess(connection))
        started[-1].pid = killed.pid
        return started[-1]

    fake: Any = SimpleNamespace(on_cuda=True, config=load_config(None, ["engine.tensor_parallel=2"]))
    others = OtherRanks(fake, start, ends.append, stuck_seconds=0.1)
    with others.shared():
        _until(lambda: bool(ends), 0.6)
        assert ends == []
        killed.kill()  # nobody waits for it, so it stays
        _until(lambda: bool(ends), 5.0)
    assert [error.message for error in ends] == ["rank 1 of engine.tensor_parallel ended"]
    others.close()
    killed.communicate()


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def test_gpus_that_cannot_be_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, notes = torch.device("cuda"), list[str]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (1, 0))
    with pytest.raises(ConfigError, match="GPU 1 cannot read that of GPU 0"):
        part_of_a_rank(tiny_config(), 2, cuda, notes)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    part = part_of_a_rank(tiny_config(num_heads=4, num_kv_heads=2), 2, cuda, notes)
    assert (part.num_heads, part.num_kv_heads) == (2, 1)
    with pytest.raises(ConfigError, match="is cuda:1"):
        part_of_a_rank(tiny_config(), 2, torch.device("cuda:1"), notes)
    with pytest.raises(ConfigError, match="needs 3 GPUs, and 2"):
        part_of_a_rank(tiny_config(), 3, cuda, notes)
    assert notes == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    part_of_a_rank(tiny_config(num_heads=8, num_kv_heads=8), 8, cuda, notes)
    assert notes == ["engine.tensor_parallel: not all tests have run with 8 GPUs: check some rows"]
    section = load_config(None, ["engine.tensor_parallel=2"]).engine
    with pytest.raises(ConfigError, match="ranks would capture other sizes"):
        resolve_prompt_graphs("both", section, True, "triton", "round")
