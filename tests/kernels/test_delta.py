"""The gated delta rule: the reference kernels against the recurrence written down plainly, in float64, and Triton's
kernels against the reference kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from specbatch.batch import PagedBatch, StateSpans
from specbatch.cache.states import StateCache, StateSizes
from specbatch.kernels import torch as reference
from specbatch.kernels.delta import DeltaWeights, LayerStates
from specbatch.kernels.torch.delta import delta_chunks
from tests.kernels.batches import CUDA, DEVICE

CPU = torch.device("cpu")
KEY_HEADS, HEADS, K, V, CONV = 2, 4, 16, 20, 4  # a head's values fill two parts and half of another
CHANNELS = 2 * KEY_HEADS * K + HEADS * V
NUM_LINES, MAX_NODES = 6, 3
SIZES = StateSizes(1, HEADS, V, K, CHANNELS, CONV, MAX_NODES)
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32, torch.float16]


class Inputs(NamedTuple):
    """Projections of T tokens."""

    qkv_TC: Tensor
    gates_T2H: Tensor

    def part(self, index: Tensor | slice) -> Inputs:
        return Inputs(self.qkv_TC[index], self.gates_T2H[index])


def make_inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """The two are columns of one tensor, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(num_tokens, CHANNELS + 7 + 2 * HEADS, generator=generator, dtype=torch.float64).to(dtype)
    return Inputs(both[:, :CHANNELS], both[:, CHANNELS + 7 :])


def make_weights(dtype: torch.dtype = torch.float64, device: str | torch.device = CPU) -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    conv, decay, bias = normal(CHANNELS, CONV) / 2, -normal(HEADS).exp() / 4, normal(HEADS)
    return DeltaWeights(conv.to(device, dtype), decay.to(device, wide), bias.to(device, wide), KEY_HEADS)


def make_states(dtype: torch.dtype = torch.float64, device: str | torch.device = CPU) -> LayerStates:
    return StateCache(SIZES, NUM_LINES - 3, 2, dtype, torch.device(device)).layer(0)


def make_batch(
    lines: list[int],
    starts: list[int],
    counts: list[int],
    *,
    is_prompt: bool,
    dead: int | None = None,
    checkpoints: list[tuple[int, int]] | None = None,
    device: str | torch.device = CPU,
) -> PagedBatch:
    """`dead`: the sequence that is done. `checkpoints`: (tokens, line) of each sequence, or (-1, -1)."""
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    slots = F.pad(torch.arange(int(ends[-1])), (0, 2), value=-1)
    if dead is not None:
        slots[ends[dead] : ends[dead + 1]] = -1
    at, line = (None, None) if checkpoints is None else torch.tensor(checkpoints).T.contiguous().to(device)
    return PagedBatch(
        slots.to(device),
        slots.to(device),
        torch.zeros(len(lines), 1, dtype=torch.int32, device=device),
        1,
        torch.tensor(starts, dtype=torch.int32, device=device),
        ends.to(device),
        max(counts),
        states=StateSpans(torch.tensor(lines, device=device), is_prompt, at, line),
    )


def plain(inputs: Inputs, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Compute the outputs (T, H, V) of one sequence token by token, and the state after it, from the formula."""
    padded = F.pad(inputs.qkv_TC, (0, 0, CONV - 1, 0))
    state = torch.zeros(HEADS, V, K, dtype=inputs.qkv_TC.dtype)
    outputs = []
    for t, gates in enumerate(inputs.gates_T2H):
        mixed = F.silu((padded[t : t + CONV].T * weights.conv_CW).sum(1))
        q, k, v = mixed.split((KEY_HEADS * K, KEY_HEADS * K, HEADS * V))
        q, k = (x.view(KEY_HEADS, K).repeat_interleave(HEADS // KEY_HEADS, 0) for x in (q, k))
        q, k = (x / (x.pow(2).sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        rate, decay = gates.sigmoid()[:HEADS], torch.exp(weights.decay_H * F.softplus(gates[HEADS:] + weights.bias_H))
        state = state * decay[:, None, None]
        error = v.view(HEADS, V) - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", rate, error, k)
        outputs.append(torch.einsum("hvk,hk->hv", state, q) / K**0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [2, 17, 11], [16, 14]])
def test_prompts_are_the_recurrence(pieces: list[int]) -> None:
    inputs, weights, states = make_inputs(30, seed=2), make_weights(), make_states()
    expected, state = plain(inputs, weights)
    start, found = 0, []
    for size in pieces:
        batch = make_batch([1], [start], [size], is_prompt=True)
        found.append(reference.delta_prompts(*inputs.part(slice(start, start + size)), weights, states, batch))
        start += size
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(states.states_SHVK[1], state, atol=1e-12, rtol=1e-9)
    assert (states.lengths_SP[1] == 30).all()
    assert not states.states_SHVK[[0, 2, 3, 4, 5]].any()


def test_rounds_replay_what_was_accepted() -> None:
    """Some nodes are refused, from none to all but the root, and their places are taken by others."""
    right, wrong = make_inputs(40, seed=3), make_inputs(40, seed=4)
    weights, states = make_weights(), make_states()
    expected, _ = plain(right, weights)
    reference.delta_prompts(*right.part(slice(5)), weights, states, make_batch([2], [0], [5], is_prompt=True))
    length = 5
    for accepted in (1, 3, 2, 1, 1, 3, 3, 2):
        nodes = Inputs(*(x.clone() for x in right.part(slice(length, length + MAX_NODES))))
        for mine, other in zip(nodes, wrong.part(slice(length, length + MAX_NODES)), strict=True):
            mine[accepted:] = other[accepted:]
        batch = make_batch([2], [length], [MAX_NODES], is_prompt=False)
        found = reference.delta_rounds(*nodes, weights, states, batch)
        torch.testing.assert_close(found[:accepted], expected[length : length + accepted], atol=1e-12, rtol=1e-9)
        assert not torch.allclose(found[accepted:], expected[length + accepted : length + MAX_NODES], atol=1e-3) or (
            accepted == MAX_NODES
        )
        length += accepted


def test_a_pass_that_is_run_again_changes_nothing() -> None:
    """A round whose memory ran out is launched again from where it began."""
    inputs, weights, states = make_inputs(9, seed=5), make_weights(), make_states()
    expected, _ = plain(inputs, weights)
    reference.delta_prompts(*inputs.part(slice(4)), weights, states, make_batch([0], [0], [4], is_prompt=True))
    for start in (4, 4, 6, 6):
        batch = make_batch([0], [start], [3], is_prompt=False)
        found = reference.delta_rounds(*inputs.part(slice(start, start + 3)), weights, states, batch)
        torch.testing.assert_close(found, expected[start : start + 3], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 63, 200])
def test_chunks_are_the_recurrence(chunk: int, num_tokens: int) -> None:
    """Chunks in float32 are within 1e-4 of the recurrence in float64, also where keys are alike and nothing decays."""
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, HEADS, size, generator=generator).double() for size in (K, K, V))
    k[num_tokens // 2 :] = k[num_tokens // 2] + 0.01 * k[num_tokens // 2 :]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    decay = -(torch.rand(num_tokens, HEADS, generator=generator).double() ** 8)
    rate = torch.rand(num_tokens, HEADS, generator=generator).double()
    before = torch.randn(HEADS, V, K, generator=generator).double()
    state, expected = before.clone(), []
    for t in range(num_tokens):
        state = state * decay[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", rate[t], error, k[t])
        expected.append(torch.einsum("hvk,hk->hv", state, q[t]))
    narrow = (x.float() for x in (q, k, v, decay, rate, before))
    found, after = delta_chunks(*narrow, chunk)
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-4, rtol=0)
    torch.testing.assert_close(after.double(), state, atol=1e-4, rtol=0)


def triton_ops() -> ModuleType:
    pytest.importorskip("triton")
    from specbatch.kernels.triton.delta import ops

    return ops


def on(device: str, states: LayerStates) -> LayerStates:
    return LayerStates(*(x.clone().to(device) for x in states))


def assert_same_states(found: LayerStates, expected: LayerStates, tolerance: float) -> None:
    for name, mine, other in zip(found._fields, found, expected, strict=True):
        mine, other = mine.cpu().double(), other.double()
        # The scratch of padding's line is never read.
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_in_triton(dtype: torch.dtype) -> None:
    ops, tolerance = triton_ops(), 1e-4 if dtype == torch.float32 else 3e-2
    weights, expected_states = make_weights(dtype), make_states(dtype)
    states = on(DEVICE, expected_states)
    own = make_weights(dtype, DEVICE)
    cases = [
        # (lines, starts, counts, checkpoints)
        ([0, 1, 2], [0, 0, 0], [21, 1, 40], [(16, 4), (-1, -1), (33, 5)]),
        ([0, 2, 3], [21, 40, 0], [3, 18, 0], [(-1, -1), (-1, -1), (-1, -1)]),
        ([0, 2], [24, 58], [2, 17], [(25, 5), (75, 4)]),
        ([1], [1], [8], None),
    ]
    for seed, (lines, starts, counts, checkpoints) in enumerate(cases):
        inputs = make_inputs(sum(counts) + 2, seed, dtype)  # the last two tokens are padding
        batches = [
            make_batch(lines, starts, counts, is_prompt=True, checkpoints=checkpoints, device=d) for d in (CPU, DEVICE)
        ]
        expected = reference.delta_prompts(*inputs, weights, expected_states, batches[0])
        found = ops.delta_prompts(*(x.to(DEVICE) for x in inputs), own, states, batches[1])
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
        assert_same_states(states, expected_states, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_in_triton(dtype: torch.dtype) -> None:
    ops, tolerance = triton_ops(), 1e-4 if dtype == torch.float32 else 3e-2
    weights, expected_states = make_weights(dtype), make_states(dtype)
    own = make_weights(dtype, DEVICE)
    inputs = make_inputs(22, 9, dtype)
    start = make_batch([0, 1, 2], [0, 0, 0], [2, 9, 11], is_prompt=True)
    reference.delta_prompts(*inputs, weights, expected_states, start)
    states = on(DEVICE, expected_states)
    lengths = [2, 9, 11]
    for seed, (num_nodes, accepted) in enumerate([(3, (1, 3, 2)), (3, (3, 1, 1)), (1, (1, 1, 1)), (2, (2, 2, 1))]):
        nodes = make_inputs(4 * num_nodes, 20 + seed, dtype)
        # The last sequence is padding.
        arguments = [0, 1, 2, 3], [*lengths, 0], [num_nodes] * 4
        batches = [make_batch(*arguments, is_prompt=False, dead=3, device=d) for d in (CPU, DEVICE)]
        expected = reference.delta_rounds(*nodes, weights, expected_states, batches[0])
        found = ops.delta_rounds(*(x.to(DEVICE) for x in nodes), own, states, batches[1])
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
        assert_same_states(states, expected_states, tolerance)
        lengths = [length + count for length, count in zip(lengths, accepted, strict=True)]


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 6])
def test_slots_that_hold_nothing_are_not_used(max_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are read before the program knows that they hold nothing. Memory that no kernel has written is NaN
    here."""
    ops, dtype, tolerance = triton_ops(), torch.float32, 1e-4
    weights, own = make_weights(dtype), make_weights(dtype, DEVICE)
    sizes = replace(SIZES, max_nodes=max_nodes)
    expected_states = StateCache(sizes, NUM_LINES - 3, 2, dtype, CPU).layer(0)
    for generator, part in enumerate(expected_states[:3]):
        part.normal_(generator=torch.Generator().manual_seed(generator))
    states = on(DEVICE, expected_states)
    # No node, some and all of them are replayed. The third sequence has one new node, and the last one is padding.
    starts, counts = [0, max_nodes // 2, max_nodes, 3], [max_nodes, max_nodes, 1, 1]
    nodes = make_inputs(sum(counts), 5, dtype)
    batches = [make_batch([0, 1, 2, 3], starts, counts, is_prompt=False, dead=3, device=d) for d in (CPU, DEVICE)]
    expected = reference.delta_rounds(*nodes, weights, expected_states, batches[0])
    empty = Tensor.new_empty

    def filled(tensor: Tensor, *size: Any, **options: Any) -> Tensor:
        found = empty(tensor, *size, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(Tensor, "new_empty", filled)
    found = ops.delta_rounds(*(x.to(DEVICE) for x in nodes), own, states, batches[1])
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert_same_states(states, expected_states, tolerance)


def test_other_tiles_in_triton() -> None:
    """Prompts may have other parts than rounds, whose parts are those of the lengths."""
    ops, dtype, tolerance = triton_ops(), torch.float32, 1e-4
    weights, own, expected_states = make_weights(dtype), make_weights(dtype, DEVICE), make_states(dtype)
    lengths_SP = torch.zeros(NUM_LINES, 2 * HEADS, dtype=torch.int32)  # two parts of 32 in place of six of 8
    states = on(DEVICE, expected_states._replace(lengths_SP=lengths_SP))
    prompts, nodes = make_inputs(22, 9, dtype), make_inputs(4, 10, dtype)
    # The second sequence begins within a block of 16 tokens, and has a checkpoint there.
    layouts = [
        make_batch([0, 1], [0, 0], [5, 17], is_prompt=True, checkpoints=[(-1, -1), (7, 4)], device=d)
        for d in (CPU, DEVICE)
    ]
    expected = reference.delta_prompts(*prompts, weights, expected_states, layouts[0])
    arguments = *(x.to(DEVICE) for x in prompts), own, states, layouts[1]
    found = ops.delta_prompts(*arguments, ops.PromptTiles(part=64, warps=2, chunk=32))
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    layouts = [make_batch([0, 1], [5, 17], [2, 2], is_prompt=False, device=d) for d in (CPU, DEVICE)]
    expected = reference.delta_rounds(*nodes, weights, expected_states, layouts[0])
    found = ops.delta_rounds(*(x.to(DEVICE) for x in nodes), own, states, layouts[1], ops.RoundTiles(warps=4))
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert states.lengths_SP[[0, 1, 4]].tolist() == [[n] * 2 * HEADS for n in (5, 17, 7)]
    assert_same_states(states._replace(lengths_SP=expected_states.lengths_SP), expected_states, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_in_triton(dtype: torch.dtype) -> None:
    ops, generator = triton_ops(), torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, V, generator=generator).to(dtype)
    gate = torch.randn(3, 5 * V + 9, generator=generator).to(dtype)[:, 4:-5]
    weight = torch.randn(V, generator=generator).to(dtype)
    expected = reference.gated_norm(x, gate, weight, 1e-5)
    found = ops.gated_norm(x.to(DEVICE), gate.to(DEVICE), weight.to(DEVICE), 1e-5)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_attention_in_triton(dtype: torch.dtype) -> None:
    ops, generator = triton_ops(), torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator).to(dtype)
    gate = torch.randn(3, 70, generator=generator).to(dtype)[:, 4:44]
    found = ops.sigmoid_mul(x.to(DEVICE), gate.to(DEVICE))
    torch.testing.assert_close(found.cpu(), reference.sigmoid_mul(x, gate), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(reference.sigmoid_mul(x, gate), x * gate.sigmoid().view(x.shape), atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_graph_of_a_round_replays(num_nodes: int) -> None:
    """A captured round reads lengths and lines on the device: it is replayed with others."""
    ops, dtype = triton_ops(), torch.bfloat16
    weights, eager, graphed = make_weights(dtype, "cuda"), make_states(dtype, "cuda"), make_states(dtype, "cuda")
    batch = make_batch([0, 1], [0, 0], [num_nodes] * 2, is_prompt=False, device="cuda")
    inputs = Inputs(*(x.cuda() for x in make_inputs(2 * num_nodes, 1, dtype)))
    ops.delta_rounds(*inputs, weights, graphed, batch)  # compiled before the capture
    for tensor in graphed:
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.delta_rounds(*inputs, weights, graphed, batch)
    for tensor in graphed:
        tensor.zero_()
    for step in range(5):
        starts = torch.tensor([step, 2 * step if num_nodes > 1 else step], dtype=torch.int32, device="cuda")
        batch.starts_B.copy_(starts)
        for mine, other in zip(inputs, make_inputs(2 * num_nodes, 30 + step, dtype), strict=True):
            mine.copy_(other)
        expected = ops.delta_rounds(*inputs, weights, eager, batch)
        graph.replay()
        assert torch.equal(out, expected)
        assert all(map(torch.equal, eager, graphed))
