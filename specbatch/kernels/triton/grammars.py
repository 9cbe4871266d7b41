# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Grammars on the device (Triton): automata follow the nodes of draft trees, and forbid tokens.

A mask that is not kept is computed where it is applied: a program walks the bytes of its tokens. One of the rows that
need such a mask also keeps it, for the launches after this one.

Shape suffixes as in `kernels/torch/grammars.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import BROKEN, DEAD, FREE, MAX_STOP_IDS, Field, GrammarBuffers
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

_TOKENS = 1024  # tokens of one program
_ROWS = 128  # rows of one program
_FREE: tl.constexpr = tl.constexpr(FREE)
_DEAD: tl.constexpr = tl.constexpr(DEAD)
_BROKEN: tl.constexpr = tl.constexpr(BROKEN)
_READ: tl.constexpr = tl.constexpr(1 << 30)  # the claim of a row that reads a mask: nobody replaces it


@triton.jit
def _after(state, automaton, token, next_ptr, classes_ptr, starts_ptr, bytes_ptr, num_tokens, num_classes):
    """Return the state after a token."""
    before = state
    is_token = (token >= 0) & (token < num_tokens)
    start = tl.load(starts_ptr + token, mask=is_token, other=0)
    end = tl.load(starts_ptr + token + 1, mask=is_token, other=0)
    for at in range(start, end):
        byte = tl.load(bytes_ptr + at).to(tl.int32)
        kind = tl.load(classes_ptr + automaton * 256 + byte).to(tl.int32)
        state = tl.load(next_ptr + state.to(tl.int64) * num_classes + kind)
    return tl.where((start == end) & (before != _FREE), _DEAD, state)


@triton.jit
def _follow_trees(
    tokens_ptr, new_tokens_ptr, counts_ptr, new_counts_ptr, parents_ptr, states_ptr, lines_ptr, next_ptr, forced_ptr,
    classes_ptr, starts_ptr, bytes_ptr, request_states_ptr, automata_ptr, num_nodes, num_tokens, num_classes,
    IS_CHAIN: tl.constexpr, HAS_COUNTS: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    request = tl.program_id(0).to(tl.int64)
    line = tl.load(lines_ptr + request)
    automaton, first = tl.load(automata_ptr + line), request * num_nodes
    nodes = tl.arange(0, NODES)
    tokens = tl.load(tokens_ptr + first + nodes, mask=nodes < num_nodes, other=0)
    parents = nodes.to(tl.int64) - 1
    if not IS_CHAIN:
        parents = tl.load(parents_ptr + first + nodes, mask=nodes < num_nodes, other=-2)
    root = tl.load(request_states_ptr + line)
    states = tl.where(nodes == 0, root, _FREE)
    count = num_nodes
    if HAS_COUNTS:
        count = tl.load(counts_ptr + request).to(tl.int32)
    if root != _FREE:
        for node in range(1, num_nodes):
            parent = tl.sum(tl.where(nodes == node, parents, 0))
            token = tl.sum(tl.where(nodes == node, tokens, 0))
            is_first = tl.sum(((nodes < node) & (parents == parent)).to(tl.int32)) == 0
            before = tl.sum(tl.where(nodes == parent, states, 0))
            forced = tl.load(forced_ptr + before)
            takes = (parent >= 0) & (forced >= 0) & is_first
            if not IS_CHAIN:
                takes = takes & (tl.sum(((parents == parent) & (tokens == forced)).to(tl.int32)) == 0)
            is_real = parent >= 0
            if IS_CHAIN and HAS_COUNTS:
                count += (takes & (count == node)).to(tl.int32)
                is_real = is_real & (node < count)
            token = tl.where(takes, forced.to(tl.int64), token)
            tokens = tl.where(nodes == node, token, tokens)
            if is_real:
                state = _after(
                    before, automaton, token, next_ptr, classes_ptr, starts_ptr, bytes_ptr, num_tokens, num_classes
                )
                states = tl.where(nodes == node, state, states)
                if IS_CHAIN and HAS_COUNTS:
                    count = tl.where(state == _DEAD, node, count)
    tl.store(new_tokens_ptr + first + nodes, tokens, mask=nodes < num_nodes)
    tl.store(states_ptr + first + nodes, states, mask=nodes < num_nodes)
    if HAS_COUNTS:
        tl.store(new_counts_ptr + request, count.to(tl.int64))


def follow_trees(
    tokens_BN: Tensor,
    req_idx_B: Tensor,
    grammars: GrammarBuffers,
    num_nodes_B: Tensor | None = None,
    parents_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `kernels/torch/grammars.py`."""
    batch, num_nodes = tokens_BN.shape
    tokens_BN = tokens_BN.contiguous()
    new_tokens_BN = torch.empty_like(tokens_BN)
    states_BN = torch.empty((batch, num_nodes), dtype=torch.int32, device=tokens_BN.device)
    counts_B = None if num_nodes_B is None else torch.empty_like(num_nodes_B)
    pdl = dependent_launch(tokens_BN)
    launch(
        _follow_trees, (batch,),
        tokens_BN, new_tokens_BN, tokens_BN if num_nodes_B is None else num_nodes_B,
        tokens_BN if counts_B is None else counts_B, tokens_BN if parents_BN is None else parents_BN.contiguous(),
        states_BN, req_idx_B, *_tables(grammars), grammars.states_S, grammars.automata_S, num_nodes,
        len(grammars.starts_V) - 1, grammars.next_QK.shape[1],
        IS_CHAIN=parents_BN is None, HAS_COUNTS=num_nodes_B is not None,
        NODES=max(2, triton.next_power_of_2(num_nodes)), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return new_tokens_BN, counts_B, states_BN


def _tables(grammars: GrammarBuffers) -> tuple[Tensor, ...]:
    return grammars.next_QK, grammars.forced_Q, grammars.classes_GB, grammars.starts_V, grammars.bytes_F


@triton.jit
def _advance_states(
    lines_ptr, live_ptr, states_ptr, tokens_ptr, path_ptr, num_path_ptr, next_ptr, classes_ptr, starts_ptr, bytes_ptr,
    request_states_ptr, automata_ptr, leaves_ptr, ints_ptr, num_nodes, max_path, num_tokens, num_classes, num_fields,
    HAS_PATH: tl.constexpr, DONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    request = tl.program_id(0).to(tl.int64)
    line, first, node = tl.load(lines_ptr + request), request * max_path, request * num_nodes
    if HAS_PATH:
        first += tl.load(num_path_ptr + request) - 1
        node += tl.load(path_ptr + first)
    before = tl.load(states_ptr + node)
    is_live = tl.load(live_ptr + request).to(tl.int32) != 0
    if is_live & (before != _FREE):
        automaton, token = tl.load(automata_ptr + line), tl.load(tokens_ptr + first)
        state = _after(before, automaton, token, next_ptr, classes_ptr, starts_ptr, bytes_ptr, num_tokens, num_classes)
        tl.store(request_states_ptr + line, tl.where(state == _DEAD, _BROKEN, state))
        leaves = tl.load(leaves_ptr + state) != 0
        tl.store(ints_ptr + line.to(tl.int64) * num_fields + DONE, leaves.to(tl.int64), mask=leaves)


def advance_states(
    req_idx_B: Tensor,
    is_live_B: Tensor,
    states_BN: Tensor,
    tokens_BM: Tensor,
    ints_SF: Tensor,
    grammars: GrammarBuffers,
    path_BM: Tensor | None = None,
    num_path_B: Tensor | None = None,
) -> None:
    """See `kernels/torch/grammars.py`."""
    pdl = dependent_launch(tokens_BM)
    launch(
        _advance_states, (len(req_idx_B),),
        req_idx_B, is_live_B.contiguous(), states_BN.contiguous(), tokens_BM.contiguous().long(),
        req_idx_B if path_BM is None else path_BM.contiguous(),
        req_idx_B if num_path_B is None else num_path_B.contiguous(), grammars.next_QK, grammars.classes_GB,
        grammars.starts_V, grammars.bytes_F, grammars.states_S, grammars.automata_S, grammars.leaves_Q, ints_SF,
        states_BN.shape[1], tokens_BM.shape[1], len(grammars.starts_V) - 1, grammars.next_QK.shape[1],
        ints_SF.shape[1], HAS_PATH=path_BM is not None, DONE=int(Field.DONE), PDL=pdl, num_warps=1,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _claim(
    states_ptr, owners_ptr, claims_ptr, forced_ptr, leaves_ptr, num_rows, num_masks, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Let each row that needs a mask claim its place, and each row that reads one keep others from its place."""
    await_former(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    state = tl.load(states_ptr + row, mask=row < num_rows, other=_FREE)
    needs = (state > _DEAD) & (tl.load(forced_ptr + state) < 0) & (tl.load(leaves_ptr + state) == 0)
    place = state % num_masks
    owner = tl.load(owners_ptr + place, mask=needs, other=-1)
    tl.atomic_max(claims_ptr + place, tl.where(owner == state, _READ, row), mask=needs)


@triton.jit
def _forbid_by_states(
    x_ptr, states_ptr, lines_ptr, ints_ptr, eos_ptr, next_ptr, forced_ptr, classes_ptr, starts_ptr, bytes_ptr,
    accepts_ptr, leaves_ptr, automata_ptr, masks_ptr, owners_ptr, claims_ptr, vocab, stride, num_fields, num_eos,
    num_tokens, num_classes, num_masks, num_words,
    STOP: tl.constexpr, NUM_STOPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    row = tl.program_id(1).to(tl.int64)
    state = tl.load(states_ptr + row)
    if (state <= _DEAD) | (tl.load(leaves_ptr + state) != 0):
        return
    line = tl.load(lines_ptr + row)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    forced = tl.load(forced_ptr + state)
    is_legal = token == forced
    if forced < 0:
        place = (state % num_masks).to(tl.int64)
        if tl.load(owners_ptr + place) == state:
            word = tl.load(masks_ptr + place * num_words + token // 32, mask=real, other=0)
            is_legal = ((word >> (token & 31)) & 1) != 0
        else:
            automaton = tl.load(automata_ptr + line)
            is_token = token < num_tokens
            start = tl.load(starts_ptr + token, mask=is_token, other=0)
            end = tl.load(starts_ptr + token + 1, mask=is_token, other=0)
            found = tl.where(end > start, state, _DEAD)
            most = tl.max(end - start)
            i = 0
            while i < most:
                continues = (found > _DEAD) & (start + i < end)
                byte = tl.load(bytes_ptr + start + i, mask=continues, other=0).to(tl.int32)
                kind = tl.load(classes_ptr + automaton * 256 + byte, mask=continues, other=0).to(tl.int32)
                after = tl.load(next_ptr + found.to(tl.int64) * num_classes + kind, mask=continues, other=0)
                found = tl.where(continues, after, found)
                i += 1
                if tl.max(((found > _DEAD) & (start + i < end)).to(tl.int32)) == 0:
                    i = most
            is_legal = found > _DEAD
            if tl.load(claims_ptr + place) == row:
                bits = is_legal.to(tl.int32) << (token & 31)
                words = tl.sum(tl.reshape(bits, (BLOCK // 32, 32)), axis=1)
                index = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
                tl.store(masks_ptr + place * num_words + index, words, mask=index < num_words)
    if tl.load(accepts_ptr + state) != 0:
        for i in range(0, num_eos):
            is_legal = is_legal | (token == tl.load(eos_ptr + i))
        for i in range(0, NUM_STOPS):
            is_legal = is_legal | (token == tl.load(ints_ptr + line * num_fields + STOP + i))
    never = tl.full((BLOCK,), float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * stride + token, never, mask=real & (is_legal == 0))


@triton.jit
def _keep(states_ptr, owners_ptr, claims_ptr, num_rows, num_masks, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Let the masks that rows have written belong to their states."""
    await_former(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    state = tl.load(states_ptr + row, mask=row < num_rows, other=_FREE)
    place = state % num_masks
    has_written = (state > _DEAD) & (tl.load(claims_ptr + place) == row)
    tl.store(owners_ptr + place, state, mask=has_written)


def forbid_by_states(
    logits_TV: Tensor, states_T: Tensor, req_idx_T: Tensor, ints_SF: Tensor, grammars: GrammarBuffers
) -> None:
    """See `kernels/torch/grammars.py`."""
    num_rows, vocab = logits_TV.shape
    assert logits_TV.stride(1) == 1
    states_T = states_T.contiguous()
    num_masks, num_words = grammars.masks_CW.shape
    claims_C = torch.full_like(grammars.owners_C, -1)
    pdl = dependent_launch(logits_TV)
    options = {"PDL": pdl, **launch_options(pdl)}
    grid = (triton.cdiv(num_rows, _ROWS),)
    launch(
        _claim, grid, states_T, grammars.owners_C, claims_C, grammars.forced_Q, grammars.leaves_Q, num_rows, num_masks,
        ROWS=_ROWS, **options,
    )  # fmt: skip
    launch(
        _forbid_by_states, (triton.cdiv(vocab, _TOKENS), num_rows),
        logits_TV, states_T, req_idx_T.contiguous(), ints_SF, grammars.eos_K, *_tables(grammars), grammars.accepts_Q,
        grammars.leaves_Q, grammars.automata_S, grammars.masks_CW, grammars.owners_C, claims_C, vocab,
        logits_TV.stride(0), ints_SF.shape[1], len(grammars.eos_K), len(grammars.starts_V) - 1,
        grammars.next_QK.shape[1], num_masks, num_words, STOP=int(Field.STOP), NUM_STOPS=MAX_STOP_IDS, BLOCK=_TOKENS,
        **options,
    )  # fmt: skip
    launch(_keep, grid, states_T, grammars.owners_C, claims_C, num_rows, num_masks, ROWS=_ROWS, **options)
