"""The gated delta rule token by token, in plain torch: see `kernels/delta.py`.

A token's output does not depend on what runs with it, or on where a prompt is cut: sums are over one dimension of one
token, each token is a step of its own, and of the functions of torch only `exp` and `log1p` are used, which compute all
elements of a tensor by one formula (`sigmoid` and `softplus` do not).

Shape suffixes: T packed tokens, B sequences, H value heads, V and K dimensions of value and key heads, C channels of
the convolution, W inputs of the convolution, R inputs that are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.kernels.delta import DeltaWeights, LayerStates

_L2_EPS = 1e-6


class _Steps(NamedTuple):
    """The effects of tokens on the state, and their queries."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_TH: Tensor
    rate_TH: Tensor

    def at(self, index: Tensor) -> _Steps:
        return _Steps(*(x[index] for x in self))


def delta_prompts(
    qkv_TC: Tensor, gates_T2H: Tensor, weights: DeltaWeights, states: LayerStates, batch: PagedBatch
) -> Tensor:
    """Move the states of prompts over pieces of them, and return the tokens' outputs (T, H, V). Tokens of no sequence
    get 0. Where a prompt has a checkpoint to make, its line is written. Tokens in slot -1 change no line."""
    spans = batch.states
    assert spans is not None
    lines_B, starts_B = spans.lines_B, batch.starts_B.long()
    firsts_B, counts_B = batch.query_starts[:-1].long(), batch.query_starts.diff().long()
    states_BHVK, inputs_BRC = states.states_SHVK[lines_B], states.inputs_SRC[lines_B]
    num_kept, num_before = inputs_BRC.shape[1], weights.conv_CW.shape[1] - 1
    # The inputs of each sequence, after those before it.
    before_W = torch.arange(-num_before, 0, device=qkv_TC.device)
    ends = (firsts_B + counts_B).tolist()
    mixed_TC = qkv_TC.new_zeros(qkv_TC.shape)
    for b, (first, end) in enumerate(zip(firsts_B.tolist(), ends, strict=True)):
        position_W = starts_B[b] + before_W
        kept_WC = torch.where((position_W >= 0)[:, None], inputs_BRC[b, position_W % num_kept], 0)
        mixed_TC[first:end] = _convolved(torch.cat((kept_WC, qkv_TC[first:end])), weights.conv_CW)
    steps = _steps(mixed_TC, gates_T2H, weights, states)
    out_THV = steps.v_THV.new_zeros(steps.v_THV.shape)
    checkpoint_at_B = starts_B.new_full(starts_B.shape, -1)
    if spans.checkpoint_at_B is not None:
        checkpoint_at_B = spans.checkpoint_at_B
    order_B = counts_B.argsort(descending=True, stable=True)  # so that those with a token t are the first ones
    states_BHVK, sorted_B = states_BHVK[order_B], counts_B[order_B]
    firsts_B, left_B = firsts_B[order_B], (checkpoint_at_B - starts_B)[order_B]
    scratch_BHVK = torch.empty_like(states_BHVK)
    for t in range(int(sorted_B.max()) if len(sorted_B) else 0):
        num_active = int((sorted_B > t).sum())
        index = firsts_B[:num_active] + t
        active, step, scratch = states_BHVK[:num_active], steps.at(index), scratch_BHVK[:num_active]
        _move(active, step, scratch)
        out_THV[index] = _read(active, step, scratch)
        for b in (left_B[:num_active] == t + 1).nonzero()[:, 0].tolist():
            assert spans.checkpoint_line_B is not None
            line = int(spans.checkpoint_line_B[order_B[b]])
            states.states_SHVK[line] = states_BHVK[b]
            states.lengths_SP[line] = int(starts_B[order_B[b]]) + t + 1
    states_BHVK = states_BHVK[order_B.argsort()]
    is_live_B = counts_B > 0
    is_live_B &= batch.slots_T[(firsts_B[order_B.argsort()]).clamp(max=len(qkv_TC) - 1)] >= 0
    for b in is_live_B.nonzero()[:, 0].tolist():
        first, end, start, line = int(batch.query_starts[b]), ends[b], int(starts_B[b]), int(lines_B[b])
        if (at := int(checkpoint_at_B[b])) > start and at <= start + end - first:
            assert spans.checkpoint_line_B is not None
            other = int(spans.checkpoint_line_B[b])
            states.inputs_SRC[other] = inputs_BRC[b]
            _keep(states.inputs_SRC[other], qkv_TC[first : first + at - start], start)
        states.states_SHVK[line], states.lengths_SP[line] = states_BHVK[b], start + end - first
        _keep(states.inputs_SRC[line], qkv_TC[first:end], start)
    return out_THV.to(qkv_TC.dtype)


def delta_rounds(
    qkv_TC: Tensor, gates_T2H: Tensor, weights: DeltaWeights, states: LayerStates, batch: PagedBatch
) -> Tensor:
    """Replay the nodes of the last round that were accepted, which moves the states up to `batch.starts_B`. Then
    compute the outputs (T, H, V) of new nodes, which are chains, and keep their inputs. A sequence whose first node is
    in slot -1 changes nothing, and its outputs are 0."""
    spans = batch.states
    assert spans is not None
    assert batch.mask_TW is None, "states move along chains"
    lines_B, starts_B = spans.lines_B, batch.starts_B.long()
    firsts_B, counts_B = batch.query_starts[:-1].long(), batch.query_starts.diff().long()
    is_live_B = batch.slots_T[firsts_B] >= 0
    states_BHVK, lengths_B = states.states_SHVK[lines_B], states.lengths_SP[lines_B, 0].long()
    inputs_BRC, gates_BR2H = states.inputs_SRC[lines_B], states.gates_SR2H[lines_B]
    num_kept, num_before = inputs_BRC.shape[1], weights.conv_CW.shape[1] - 1
    max_nodes = (num_kept - num_before) // 2
    assert batch.max_queries <= max_nodes, f"{batch.max_queries} nodes, and room for {max_nodes}"
    pending_B = torch.where(is_live_B, (starts_B - lengths_B).clamp(0, max_nodes), 0)
    requests = torch.arange(len(lines_B), device=lines_B.device)
    for t in range(batch.max_queries):
        has_B = t < counts_B
        index_B = (firsts_B + t).clamp(max=len(qkv_TC) - 1)
        place = requests, (starts_B + t) % num_kept
        inputs_BRC[place] = torch.where(has_B[:, None], qkv_TC[index_B], inputs_BRC[place])
        gates_BR2H[place] = torch.where(has_B[:, None], gates_T2H[index_B], gates_BR2H[place])

    def steps_at(position_B: Tensor) -> _Steps:
        position_BW = position_B[:, None] + torch.arange(-num_before, 1, device=position_B.device)
        window_BWC = inputs_BRC[requests[:, None], position_BW % num_kept]
        window_BWC = torch.where((position_BW >= 0)[:, :, None], window_BWC, 0)
        mixed_BC = _convolved(window_BWC.transpose(0, 1), weights.conv_CW)[0]
        return _steps(mixed_BC, gates_BR2H[requests, position_B % num_kept], weights, states)

    base_B, scratch_BHVK = starts_B - pending_B, torch.empty_like(states_BHVK)
    for t in range(int(pending_B.max()) if len(pending_B) else 0):
        step, moves_B1 = steps_at(base_B + t), (t < pending_B)[:, None]
        decay, rate = torch.where(moves_B1, step.decay_TH, 1.0), torch.where(moves_B1, step.rate_TH, 0.0)
        _move(states_BHVK, step._replace(decay_TH=decay, rate_TH=rate), scratch_BHVK)  # others stay as they are
    for b in is_live_B.nonzero()[:, 0].tolist():
        line = int(lines_B[b])
        states.inputs_SRC[line].copy_(inputs_BRC[b])
        states.gates_SR2H[line].copy_(gates_BR2H[b])
        # Nothing is allocated between these two, so memory cannot run out there.
        states.states_SHVK[line].copy_(states_BHVK[b])
        states.lengths_SP[line].copy_(batch.starts_B[b])
    out_THV = states_BHVK.new_zeros(len(qkv_TC), weights.num_heads, states_BHVK.shape[2])
    for t in range(batch.max_queries):
        step = steps_at(starts_B + t)
        _move(states_BHVK, step, scratch_BHVK)
        out_BHV = _read(states_BHVK, step, scratch_BHVK)
        has = ((t < counts_B) & is_live_B).nonzero()[:, 0]
        out_THV[firsts_B[has] + t] = out_BHV[has]
    return out_THV.to(qkv_TC.dtype)


def delta_chunks(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    rate_TH: Tensor,
    state_HVK: Tensor,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs (T, H, V) of the tokens of one sequence and the state after them in chunks of tokens, each
    with a few GEMMs (Yang et al. 2024). q and k are as the rule multiplies them. A decay is the logarithm g. Within a
    chunk, the values that tokens add to the state solve a triangular system: each is corrected by those before it."""
    outputs = []
    for first in range(0, len(q_THK), chunk):
        part = slice(first, first + chunk)
        q, k, v = (x[part].transpose(0, 1) for x in (q_THK, k_THK, v_THV))
        sums = decay_TH[part].cumsum(0).T  # (H, T): the decay from the chunk's beginning to each token
        rate = rate_TH[part].T[:, :, None]
        size = q.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        between = torch.where(causal, sums[:, :, None] - sums[:, None, :], -torch.inf).exp()
        system = (rate * k @ k.transpose(1, 2) * between).tril(-1)
        right = rate * (v - sums.exp()[:, :, None] * (k @ state_HVK.transpose(1, 2)))
        added = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        read = sums.exp()[:, :, None] * (q @ state_HVK.transpose(1, 2))
        outputs.append((read + (q @ k.transpose(1, 2) * between) @ added).transpose(0, 1))
        rest = (sums[:, -1:] - sums).exp()[:, :, None]
        state_HVK = sums[:, -1].exp()[:, None, None] * state_HVK + (rest * added).transpose(1, 2) @ k
    return torch.cat(outputs) if outputs else v_THV.new_zeros(v_THV.shape), state_HVK


def gated_norm(x_THV: Tensor, gate_TZ: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate) for each head, (T, Z). The norm is rounded, then scaled by the weight."""
    wide = torch.promote_types(x_THV.dtype, torch.float32)
    x, gate = x_THV.to(wide), gate_TZ.to(wide).view(x_THV.shape)
    normed = (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)).to(x_THV.dtype)
    return ((weight_V * normed).to(wide) * _silu(gate)).to(x_THV.dtype).flatten(1)


def sigmoid_mul(x_THD: Tensor, gate_TZ: Tensor) -> Tensor:
    """Return x * sigmoid(gate). The sigmoid is rounded to the dtype of x."""
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    return x_THD * _sigmoid(gate_TZ.to(wide)).to(x_THD.dtype).view(x_THD.shape)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _convolved(inputs: Tensor, conv_CW: Tensor) -> Tensor:
    """Return silu of the causal convolution over the first dimension. The result is as much shorter as the convolution
    has earlier inputs."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    size = conv_CW.shape[1]
    length = len(inputs) - size + 1
    total = inputs[:length].to(wide) * conv_CW[:, 0].to(wide)
    for w in range(1, size):
        total = total + inputs[w : w + length].to(wide) * conv_CW[:, w].to(wide)
    return _silu(total.to(inputs.dtype).to(wide)).to(inputs.dtype)


def _steps(mixed_TC: Tensor, gates_T2H: Tensor, weights: DeltaWeights, states: LayerStates) -> _Steps:
    """Divide the convolution's output, norm queries and keys, and compute decays (as factors) and rates."""
    _, num_heads, value_dim, key_dim = states.states_SHVK.shape
    wide, keys = states.states_SHVK.dtype, weights.num_key_heads * key_dim
    q, k, v = mixed_TC.to(wide).split((keys, keys, num_heads * value_dim), dim=1)
    q, k = (_unit(x.reshape(len(x), weights.num_key_heads, key_dim)) for x in (q, k))
    group = num_heads // weights.num_key_heads
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * key_dim**-0.5, k))
    rate, decay = gates_T2H.to(wide).split(num_heads, dim=1)
    decay = decay + weights.bias_H
    softplus = decay.clamp(min=0) + torch.log1p(torch.exp(-decay.abs()))
    return _Steps(q, k, v.reshape(len(v), num_heads, value_dim), torch.exp(weights.decay_H * softplus), _sigmoid(rate))


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _move(states_BHVK: Tensor, step: _Steps, scratch_BHVK: Tensor) -> None:
    """Move the states (in place) over one token each. `scratch_BHVK` is as large: large tensors take long to make."""
    k = step.k_THK[:, :, None, :]
    states_BHVK *= step.decay_TH[:, :, None, None]
    known_BHV = torch.mul(states_BHVK, k, out=scratch_BHVK).sum(-1)
    delta_BHV = (step.v_THV - known_BHV) * step.rate_TH[:, :, None]
    states_BHVK += torch.mul(delta_BHV[..., None], k, out=scratch_BHVK)


def _read(states_BHVK: Tensor, step: _Steps, scratch_BHVK: Tensor) -> Tensor:
    """Return the outputs (B, H, V) of the tokens that the states have moved over."""
    return torch.mul(states_BHVK, step.q_THK[:, :, None, :], out=scratch_BHVK).sum(-1)


def _keep(inputs_RC: Tensor, new_NC: Tensor, start: int) -> None:
    """Write the inputs of the tokens from position `start` on to their places, the last R of them."""
    num_kept, count = len(inputs_RC), len(new_NC)
    first = max(0, count - num_kept)
    place = (start + torch.arange(first, count, device=new_NC.device)) % num_kept
    inputs_RC[place] = new_NC[first:]
