# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator,assignment,var-annotated"
"""The kernels of `ops.py`. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.launch import await_former


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _unit_rows(x):
    """Return rows divided by their lengths."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def node_conv_kernel(
    qkv, gates, mixed, factors, conv, inputs, kept_gates, decays, biases, lengths, lines, starts, query_starts, slots,
    stride_conv, stride_channel, stride_qkv, stride_gates,
    LENGTHS: tl.constexpr, H: tl.constexpr, H_POWER: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    NUM_KEPT: tl.constexpr, MAX_NODES: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the convolution and the factors of heads for nodes of the last round that are replayed, and for new ones.
    Keep what new ones put into the layer. Grid: (blocks of channels, 2 * MAX_NODES, B). Line MAX_NODES of `mixed` and
    `factors` is the first new node, and the replayed ones end before it."""
    row, b = tl.program_id(1), tl.program_id(2)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = channels < C
    weights = conv + channels * stride_channel
    await_former(PDL)
    # Reads that do not depend on each other come before the branches.
    line, start = tl.load(lines + b), tl.load(starts + b)
    first = tl.load(query_starts + b).to(tl.int64)
    count = tl.load(query_starts + b + 1).to(tl.int64) - first
    length = tl.load(lengths + line * LENGTHS)
    if tl.load(slots + first) < 0:
        return
    is_new = row >= MAX_NODES
    if is_new:
        if row - MAX_NODES >= count:
            return
    else:
        if MAX_NODES - row > start - length:
            return
    position = start + row - MAX_NODES
    kept = inputs + line * NUM_KEPT * C
    dtype = qkv.dtype.element_ty
    total = tl.zeros((BLOCK_C,), tl.float32)
    for w in tl.static_range(W):
        at = position - (W - 1) + w + 0 * channels  # as a row, for masks
        old = tl.load(kept + (at % NUM_KEPT) * C + channels, mask=ok & (at >= 0) & (at < start), other=0.0)
        fresh = tl.load(qkv + (first + at - start) * stride_qkv + channels, mask=ok & (at >= start), other=0.0)
        weight = tl.load(weights + w * stride_conv, mask=ok, other=0.0)
        total += (old.to(tl.float32) + fresh.to(tl.float32)) * weight.to(tl.float32)
    result = _silu(total.to(dtype).to(tl.float32))
    node = b.to(tl.int64) * 2 * MAX_NODES + row
    tl.store(mixed + node * C + channels, result, mask=ok)
    token, place = first + row - MAX_NODES, position % NUM_KEPT
    if is_new:  # no program of this launch reads these places
        own = tl.load(qkv + token * stride_qkv + channels, mask=ok)
        tl.store(kept + place * C + channels, own, mask=ok)
    if tl.program_id(0) == 0:
        heads = tl.arange(0, H_POWER)
        head_ok = heads < H
        new = head_ok & (row + 0 * heads >= MAX_NODES)  # as a row, for masks
        replayed = head_ok & (row + 0 * heads < MAX_NODES)
        kept_heads = kept_gates + (line * NUM_KEPT + place) * 2 * H + heads
        own_heads = gates + token * stride_gates + heads
        # A node has its gates in one of the two places.
        rate = tl.load(own_heads, mask=new, other=0.0) + tl.load(kept_heads, mask=replayed, other=0.0)
        gate = tl.load(own_heads + H, mask=new, other=0.0) + tl.load(kept_heads + H, mask=replayed, other=0.0)
        tl.store(kept_heads, rate, mask=new)
        tl.store(kept_heads + H, gate, mask=new)
        decay, bias = tl.load(decays + heads, mask=head_ok, other=0.0), tl.load(biases + heads, mask=head_ok, other=0.0)
        own_factors = factors + node * 2 * H + heads
        tl.store(own_factors, 1.0 / (1.0 + tl.exp(-rate.to(tl.float32))), mask=head_ok)
        tl.store(own_factors + H, tl.exp(decay * _softplus(gate.to(tl.float32) + bias)), mask=head_ok)


@triton.jit
def _read_node(
    mixed, factors, slot, keys, queries, values, key_ok, value_ok,
    H: tl.constexpr, C: tl.constexpr, MAX_NODES: tl.constexpr,
):  # fmt: skip
    """Return query, key, value, rate and decay of a node. Only new nodes, from slot MAX_NODES on, have a query."""
    mixed += slot * C
    factors += slot * 2 * H
    q = tl.load(mixed + queries, mask=key_ok & (slot >= MAX_NODES), other=0.0)
    k = tl.load(mixed + keys, mask=key_ok, other=0.0)
    return q, k, tl.load(mixed + values, mask=value_ok, other=0.0), tl.load(factors), tl.load(factors + H)


@triton.jit
def _moved(state, k, v, rate, decay):
    """Return a state that has moved over a node."""
    k = k.to(tl.float32)
    k = k * tl.rsqrt(tl.sum(tl.sum(k * k, 0), 0) + 1e-6)
    state = state * decay
    known = tl.sum(tl.sum(state * k[:, None, :], 0), 1)
    return state + ((v.to(tl.float32) - known) * rate)[None, :, None] * k[:, None, :]


@triton.jit
def round_kernel(
    mixed, factors, out, states, lengths, lines, starts, query_starts, slots,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_PARTS: tl.constexpr, K_PART: tl.constexpr,
    V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, C: tl.constexpr, MAX_NODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Replay accepted nodes and compute new ones, for a part of one head of one sequence. Grid: (PARTS, H, B). The
    state is read and written once, if there is something to replay.

    Nodes depend on each other, so that the next ones are read before a node is computed. The nodes of a sequence have
    fixed slots, which may hold nothing: the first ones are read before the program knows which of them count. A tile of
    the state has keys as K_PARTS x K_PART, so that a thread holds several dimensions of a key, and few numbers cross
    threads in a sum."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = part * PART + tl.arange(0, PART)
    value_ok = rows < V
    dims = tl.arange(0, K_PARTS)[:, None] * K_PART + tl.arange(0, K_PART)[None, :]
    key_ok = dims < K
    await_former(PDL)
    key_head = head // (H // KEY_HEADS)
    queries, keys = key_head * K + dims, (KEY_HEADS + key_head) * K + dims
    values = 2 * KEY_HEADS * K + head * V + rows
    node = b.to(tl.int64) * 2 * MAX_NODES
    mixed += node * C
    factors += node * 2 * H + head
    AHEAD: tl.constexpr = 4 if MAX_NODES <= 2 else 2  # more nodes would take registers that states need
    places = keys, queries, values, key_ok, value_ok
    nodes = ()
    for slot in tl.static_range(min(2 * MAX_NODES, AHEAD)):
        nodes += (_read_node(mixed, factors, slot, *places, H, C, MAX_NODES),)
    line = tl.load(lines + b)
    start = tl.load(starts + b)
    first = tl.load(query_starts + b).to(tl.int64)
    count = (tl.load(query_starts + b + 1).to(tl.int64) - first).to(tl.int32)
    length = lengths + (line * H + head) * PARTS + part
    covered = tl.load(length)
    tile = states + (line * H + head) * V * K + rows[None, :, None] * K + dims[:, None, :]
    tile_ok = value_ok[None, :, None] & key_ok[:, None, :]
    # The state is read before anything waits. States are larger than caches, and are not to push out the nodes.
    state = tl.load(tile, mask=tile_ok, other=0.0, eviction_policy="evict_first")
    if tl.load(slots + first) < 0:
        for t in range(count):
            tl.store(out + ((first + t) * H + head) * V + rows, tl.zeros((PART,), tl.float32), mask=value_ok)
        return
    pending = tl.minimum(tl.maximum(start - covered, 0), MAX_NODES)
    for slot in tl.static_range(MAX_NODES):
        q, k, v, rate, decay = nodes[slot]
        if slot + AHEAD < 2 * MAX_NODES:
            nodes += (_read_node(mixed, factors, slot + AHEAD, *places, H, C, MAX_NODES),)
        if slot >= MAX_NODES - pending:
            state = _moved(state, k, v, rate, decay)
    if pending > 0:
        tl.store(tile, state, mask=tile_ok, eviction_policy="evict_first")
        tl.store(length, start)
    for t in tl.static_range(MAX_NODES):
        q, k, v, rate, decay = nodes[MAX_NODES + t]
        if MAX_NODES + t + AHEAD < 2 * MAX_NODES:
            nodes += (_read_node(mixed, factors, MAX_NODES + t + AHEAD, *places, H, C, MAX_NODES),)
        if t < count:
            state = _moved(state, k, v, rate, decay)
            query = q.to(tl.float32)
            query = query * (tl.rsqrt(tl.sum(tl.sum(query * query, 0), 0) + 1e-6) * (K**-0.5))
            result = tl.sum(tl.sum(state * query[:, None, :], 0), 1)
            tl.store(out + ((first + t) * H + head) * V + rows, result, mask=value_ok)


@triton.jit
def _convolved(
    qkv, weights, inputs, tokens, channels, channel_ok, has_sequence, first, start, line, stride_conv, stride_qkv,
    C: tl.constexpr, W: tl.constexpr, NUM_KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    READS_KEPT: tl.constexpr,
):  # fmt: skip
    """Return the sums of the convolution. `READS_KEPT`: some tokens read inputs of an earlier piece."""
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for w in tl.static_range(W):
        token = tokens - (W - 1) + w
        is_new = (has_sequence & (token >= first))[:, None] & channel_ok[None, :]
        number = tl.load(qkv + token[:, None] * stride_qkv + channels[None, :], mask=is_new, other=0.0).to(tl.float32)
        if READS_KEPT:
            at = start + token - first
            is_old = (has_sequence & (token < first) & (at >= 0))[:, None] & channel_ok[None, :]
            place = (line * NUM_KEPT + at % NUM_KEPT) * C
            number += tl.load(inputs + place[:, None] + channels[None, :], mask=is_old, other=0.0).to(tl.float32)
        weight = tl.load(weights + w * stride_conv, mask=channel_ok, other=0.0).to(tl.float32)
        total += number * weight[None, :]
    return total


@triton.jit
def conv_kernel(
    qkv, mixed, conv, inputs, lines, starts, query_starts, sequences, stride_conv, stride_channel, stride_qkv,
    num_tokens, num_sequences,
    C: tl.constexpr, W: tl.constexpr, NUM_KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the convolution of a block of packed tokens of prompts, for a block of channels. Tokens of no sequence
    get 0. Grid: (blocks of tokens, blocks of channels)."""
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, channel_ok = tokens < num_tokens, channels < C
    sequence = tl.load(sequences + tokens, mask=is_token, other=num_sequences)
    has_sequence = is_token & (sequence < num_sequences)
    first = tl.load(query_starts + sequence, mask=has_sequence, other=0).to(tl.int64)
    start = tl.load(starts + sequence, mask=has_sequence, other=0).to(tl.int64)
    line = tl.load(lines + sequence, mask=has_sequence, other=0)
    weights = conv + channels * stride_channel
    if tl.max((has_sequence & (tokens - first < W - 1) & (start > 0)).to(tl.int32), 0) > 0:
        total = _convolved(
            qkv, weights, inputs, tokens, channels, channel_ok, has_sequence, first, start, line, stride_conv,
            stride_qkv, C, W, NUM_KEPT, BLOCK_T, BLOCK_C, True,
        )  # fmt: skip
    else:
        total = _convolved(
            qkv, weights, inputs, tokens, channels, channel_ok, has_sequence, first, start, line, stride_conv,
            stride_qkv, C, W, NUM_KEPT, BLOCK_T, BLOCK_C, False,
        )  # fmt: skip
    result = _silu(total.to(qkv.dtype.element_ty).to(tl.float32))
    ok = is_token[:, None] & channel_ok[None, :]
    tl.store(mixed + tokens[:, None] * C + channels[None, :], result, mask=ok)


@triton.jit
def _head_gates(gates, decays, biases, tokens, has, stride_gates, head, H: tl.constexpr):
    """Return the rates of tokens, and the sums of the logarithms of their decays."""
    rate = tl.load(gates + tokens * stride_gates + head, mask=has, other=0.0).to(tl.float32)
    gate = tl.load(gates + tokens * stride_gates + H + head, mask=has, other=0.0).to(tl.float32)
    log_decay = tl.where(has, tl.load(decays + head) * _softplus(gate + tl.load(biases + head)), 0.0)
    return tl.where(has, 1.0 / (1.0 + tl.exp(-rate)), 0.0), tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)


@triton.jit
def system_kernel(
    mixed, gates, systems, decays, biases, starts, query_starts, sequences, checkpoint_at, stride_gates, num_tokens,
    num_sequences,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_POWER: tl.constexpr, C: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what chunks of prompts need besides states: the inverse of the triangular system that the values of its
    tokens solve, and the weights with which its queries read them. Grid: (blocks of packed tokens, H). A block has the
    chunks of several sequences where these meet, and of the parts before and after a checkpoint."""
    head = tl.program_id(1)
    steps = tl.arange(0, CHUNK)
    tokens = tl.program_id(0).to(tl.int64) * CHUNK + steps
    sequence = tl.load(sequences + tokens, mask=tokens < num_tokens, other=num_sequences)
    has = sequence < num_sequences
    chunk = 2 * sequence
    if HAS_CHECKPOINTS:
        at = tl.load(checkpoint_at + sequence, mask=has, other=0) - tl.load(starts + sequence, mask=has, other=0)
        chunk += (tokens - tl.load(query_starts + sequence, mask=has, other=0) >= at).to(tl.int32)
    dims = tl.arange(0, K_POWER)
    key_head, dim_ok = head // (H // KEY_HEADS), dims < K
    place = tokens[:, None] * C + key_head * K + dims[None, :]
    q = tl.load(mixed + place, mask=has[:, None] & dim_ok[None, :], other=0.0)
    k = tl.load(mixed + place + KEY_HEADS * K, mask=has[:, None] & dim_ok[None, :], other=0.0)
    q, k = _unit_rows(q.to(tl.float32)) * (K**-0.5), _unit_rows(k.to(tl.float32))
    rate, sums, _ = _head_gates(gates, decays, biases, tokens, has, stride_gates, head, H)
    other = tl.sum(tl.where(steps[:, None] == steps[None, :], chunk[:, None], 0), 0)  # as a column
    causal = (steps[:, None] >= steps[None, :]) & (chunk[:, None] == other[None, :])
    between = tl.where(causal, tl.exp(tl.where(causal, sums[:, None] - sums[None, :], 0.0)), 0.0)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rate[:, None]
    system = tl.where(steps[:, None] > steps[None, :], system, 0.0)
    inverse = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):  # forward substitution: line i depends on those before it
        row = tl.sum(tl.where(steps[:, None] == i, system, 0.0), 0)
        correction = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(steps[:, None] == i, inverse - correction[None, :], inverse)
    own = systems + (tokens[:, None] * H + head) * 2 * CHUNK + steps[None, :]
    tl.store(own, inverse, mask=has[:, None])
    weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(own + CHUNK, weights, mask=has[:, None])


@triton.jit
def prompt_kernel(
    mixed, gates, systems, out, decays, biases, states, lengths, lines, starts, query_starts, slots, checkpoint_at,
    checkpoint_lines, stride_gates,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_POWER: tl.constexpr, V: tl.constexpr,
    LENGTHS: tl.constexpr, LENGTHS_POWER: tl.constexpr, PART: tl.constexpr, C: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Move the state of a part of one head over a piece of a prompt, in chunks of tokens. Grid: (parts, H, B).

    Within a chunk, the values that tokens add to the state solve a triangular system, see `kernels/torch/delta.py`.
    Chunks end where a block of `system_kernel` does, at a checkpoint, and where the piece ends."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + b).to(tl.int64)
    count = tl.load(query_starts + b + 1).to(tl.int64) - first
    if count == 0:
        return
    line = tl.load(lines + b)
    start = tl.load(starts + b)
    rows = part * PART + tl.arange(0, PART)
    row_ok = rows < V
    key_head = head // (H // KEY_HEADS)
    dims = tl.arange(0, K_POWER)
    dim_ok = dims < K
    queries, keys = key_head * K + dims, (KEY_HEADS + key_head) * K + dims
    values = 2 * KEY_HEADS * K + head * V + rows
    place = head * V * K + rows[:, None] * K + dims[None, :]
    tile_ok = row_ok[:, None] & dim_ok[None, :]
    state = tl.load(states + line * H * V * K + place, mask=tile_ok, other=0.0)
    numbers = tl.arange(0, LENGTHS_POWER)
    length = head * LENGTHS + numbers
    length_ok = (numbers < LENGTHS) & (part + 0 * numbers == 0)  # one program writes all of a head
    cut = count
    if HAS_CHECKPOINTS:
        at = tl.load(checkpoint_at + b) - start
        if (at > 0) & (at <= count):
            cut = at
    steps = tl.arange(0, CHUNK)
    done = count * 0
    while done < count:
        block = (first + done) // CHUNK * CHUNK
        end = tl.minimum(block + CHUNK - first, tl.where(done < cut, cut, count))
        tokens = block + steps
        has = (tokens >= first + done) & (tokens < first + end)
        dims_ok, rows_ok = has[:, None] & dim_ok[None, :], has[:, None] & row_ok[None, :]
        q = tl.load(mixed + tokens[:, None] * C + queries[None, :], mask=dims_ok, other=0.0)
        k = tl.load(mixed + tokens[:, None] * C + keys[None, :], mask=dims_ok, other=0.0)
        v = tl.load(mixed + tokens[:, None] * C + values[None, :], mask=rows_ok, other=0.0)
        own = systems + (tokens[:, None] * H + head) * 2 * CHUNK + steps[None, :]
        inverse = tl.load(own, mask=has[:, None], other=0.0)
        weights = tl.load(own + CHUNK, mask=has[:, None], other=0.0)
        rate, sums, total = _head_gates(gates, decays, biases, tokens, has, stride_gates, head, H)
        q, k = _unit_rows(q.to(tl.float32)) * (K**-0.5), _unit_rows(k.to(tl.float32))
        before = tl.exp(sums)[:, None]
        wanted = rate[:, None] * (v.to(tl.float32) - before * tl.dot(k, tl.trans(state), input_precision=PRECISION))
        added = tl.dot(inverse, wanted, input_precision=PRECISION)
        result = before * tl.dot(q, tl.trans(state), input_precision=PRECISION)
        result += tl.dot(weights, added, input_precision=PRECISION)
        tl.store(out + (tokens[:, None] * H + head) * V + rows[None, :], result, mask=rows_ok)
        rest = added * tl.exp(total - sums)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(rest), k, input_precision=PRECISION)
        done = end
        if HAS_CHECKPOINTS:  # noqa: SIM102  (`at` is not there otherwise)
            if (done == at) & (at > 0):
                kept = tl.load(checkpoint_lines + b)
                tl.store(states + kept * H * V * K + place, state, mask=tile_ok)
                tl.store(lengths + kept * H * LENGTHS + length, start + done.to(tl.int32), mask=length_ok)
    if tl.load(slots + first) >= 0:
        tl.store(states + line * H * V * K + place, state, mask=tile_ok)
        tl.store(lengths + line * H * LENGTHS + length, start + count.to(tl.int32), mask=length_ok)


@triton.jit
def keep_kernel(
    qkv, inputs, lines, starts, query_starts, slots, checkpoint_at, checkpoint_lines, stride_qkv,
    C: tl.constexpr, NUM_KEPT: tl.constexpr, BLOCK_C: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """Keep the last inputs of a piece of a prompt, and those before its checkpoint. Grid: (B, NUM_KEPT, blocks of
    channels). It runs after the convolution, which reads the former ones."""
    b, row = tl.program_id(0), tl.program_id(1)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = channels < C
    first = tl.load(query_starts + b).to(tl.int64)
    count = tl.load(query_starts + b + 1).to(tl.int64) - first
    if count == 0:
        return
    if tl.load(slots + first) < 0:
        return
    start = tl.load(starts + b).to(tl.int64)
    place = inputs + (tl.load(lines + b) * NUM_KEPT + row) * C + channels
    old = tl.load(place, mask=ok, other=0.0)
    if HAS_CHECKPOINTS:
        at = tl.load(checkpoint_at + b)
        if (at > start) & (at <= start + count):
            token = at - 1 - (at - 1 - row + NUM_KEPT) % NUM_KEPT - start + 0 * channels  # as a row, for masks
            fresh = tl.load(qkv + (first + token) * stride_qkv + channels, mask=ok & (token >= 0), other=0.0)
            kept = inputs + (tl.load(checkpoint_lines + b) * NUM_KEPT + row) * C + channels
            tl.store(kept, tl.where(token >= 0, fresh, old), mask=ok)
    last = start + count - 1
    token = last - (last - row + NUM_KEPT) % NUM_KEPT - start + 0 * channels
    fresh = tl.load(qkv + (first + token) * stride_qkv + channels, mask=ok & (token >= 0), other=0.0)
    tl.store(place, tl.where(token >= 0, fresh, old), mask=ok)


@triton.jit
def norm_kernel(
    x, gate, weight, out, eps, stride_gate,
    H: tl.constexpr, V: tl.constexpr, V_POWER: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute rms_norm(x) * silu(gate) for some heads of a token. Grid: (T, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, V_POWER)
    ok = (heads < H)[:, None] & (dims < V)[None, :]
    offsets = heads[:, None] * V + dims[None, :]
    dtype = x.dtype.element_ty
    await_former(PDL)
    values = tl.load(x + token * H * V + offsets, mask=ok, other=0.0).to(tl.float32)
    normed = (values * tl.rsqrt(tl.sum(values * values, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    scale = tl.load(weight + dims, mask=dims < V, other=0.0).to(tl.float32)
    scaled = (normed * scale[None, :]).to(dtype).to(tl.float32)
    gates = tl.load(gate + token * stride_gate + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + token * H * V + offsets, scaled * _silu(gates), mask=ok)


@triton.jit
def gate_kernel(x, gate, out, stride_gate, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Multiply a part of a token's features by the sigmoid of its gates. Grid: (T, parts)."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = features < SIZE
    await_former(PDL)
    gates = tl.load(gate + token * stride_gate + features, mask=ok, other=0.0).to(tl.float32)
    values = tl.load(x + token * SIZE + features, mask=ok, other=0.0)
    factors = (1.0 / (1.0 + tl.exp(-gates))).to(values.dtype)
    tl.store(out + token * SIZE + features, values * factors, mask=ok)
