# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Changes to the target's logits by the rules of requests (Triton), in at most five launches for all kinds of rules.
The programs of requests without such rules end at once.

Shape suffixes as in `kernels/torch/edits.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import ANY_TOKEN, NO_TEXT, Edits, RuleBuffers, TreeNodes
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

_TOKENS = 2048  # tokens of one program
_WORDS, _BIASES, _TEXT = 64, 256, 1024  # bad words, biases and tokens of a text of one program
_MASKED: tl.constexpr = tl.constexpr(int(Edits.MASK | Edits.NODE_MASK))
_BAD_WORDS: tl.constexpr = tl.constexpr(int(Edits.BAD_WORDS))
_VALUES: tl.constexpr = tl.constexpr(int(Edits.VALUES))
_ANY_TOKEN: tl.constexpr = tl.constexpr(ANY_TOKEN)
_NO_TEXT: tl.constexpr = tl.constexpr(NO_TEXT)
_IN_TEXT: tl.constexpr = tl.constexpr(1 << 30)  # a bit in the count of the output: the prompt has the token, too


@triton.jit
def _depth(depths_ptr, row, node, IS_CHAIN: tl.constexpr):
    return node if IS_CHAIN else tl.load(depths_ptr + row)


@triton.jit
def _sees(mask_ptr, row, node, other, words, IS_CHAIN: tl.constexpr):
    """Return whether `other` is on the path to a node."""
    on_path = other <= node
    if not IS_CHAIN:
        on_path = ((tl.load(mask_ptr + row * words + other // 32) >> (other & 31)) & 1) != 0
    return on_path


@triton.jit
def _forbid(
    x_ptr, lines_ptr, lengths_ptr, depths_ptr, edits_ptr, num_prompt_ptr, min_tokens_ptr, masks_ptr, node_masks_ptr,
    vocab, stride, num_words, num_nodes, table_nodes,
    IS_CHAIN: tl.constexpr, NODE_MASK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    row = tl.program_id(1).to(tl.int64)
    request, node = row // num_nodes, row % num_nodes
    line = tl.load(lines_ptr + request)
    if (tl.load(edits_ptr + line) & _MASKED) == 0:
        return
    depth = _depth(depths_ptr, row, node, IS_CHAIN)
    num_output = tl.load(lengths_ptr + request) + 1 + depth - tl.load(num_prompt_ptr + line)
    is_late = (num_output >= tl.load(min_tokens_ptr + line)).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    word = tl.load(masks_ptr + (line * 2 + is_late) * num_words + token // 32, mask=real, other=-1)
    if NODE_MASK:
        node_masks_ptr += (line * table_nodes + node) * num_words
        word &= tl.load(node_masks_ptr + token // 32, mask=real, other=-1)
    forbidden = real & (((word >> (token & 31)) & 1) == 0)
    never = tl.full((BLOCK,), float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * stride + token, never, mask=forbidden)


@triton.jit
def _forbid_bad_words(
    x_ptr, lines_ptr, lengths_ptr, tokens_ptr, depths_ptr, mask_ptr, edits_ptr, num_prompt_ptr, starts_ptr, ends_ptr,
    text_ptr, stride, mask_words, num_nodes, num_bad, num_back, text_width,
    IS_CHAIN: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    row = tl.program_id(1).to(tl.int64)
    request, node = row // num_nodes, row % num_nodes
    line = tl.load(lines_ptr + request)
    if (tl.load(edits_ptr + line) & _BAD_WORDS) == 0:
        return
    depth = _depth(depths_ptr, row, node, IS_CHAIN)
    length, num_prompt = tl.load(lengths_ptr + request), tl.load(num_prompt_ptr + line)
    others = tl.arange(0, NODES)
    is_node, first = others < num_nodes, request * num_nodes
    if IS_CHAIN:
        other_depths = others
        on_path = (others <= node) & (others > 0)
    else:
        other_depths = tl.load(depths_ptr + first + others, mask=is_node, other=0).to(tl.int32)
        bits = tl.load(mask_ptr + row * mask_words + others // 32, mask=is_node, other=0)
        on_path = (((bits >> (others & 31)) & 1) != 0) & (others > 0)
    drafts = tl.load(tokens_ptr + first + others, mask=is_node & on_path, other=0)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = word < num_bad
    hit = real
    starts_ptr += (line * num_bad + word) * num_back
    for back in range(0, num_back):
        here = depth - back
        drafted = tl.sum(tl.where(on_path & is_node & (other_depths == here), drafts, 0))
        index = length + here
        at = tl.minimum(tl.maximum(index, 0), text_width - 1)
        written = tl.load(text_ptr + line * text_width + at).to(tl.int64)
        written = tl.where(index >= num_prompt, written, _NO_TEXT)
        token = tl.where(here > 0, drafted, written)
        wanted = tl.load(starts_ptr + back, mask=real, other=_NO_TEXT)
        hit &= (wanted == token) | (wanted == _ANY_TOKEN)
    end = tl.load(ends_ptr + line * num_bad + word, mask=real, other=0)
    never = tl.full((BLOCK,), float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * stride + end, never, mask=hit)


@triton.jit
def _add_biases(
    x_ptr, lines_ptr, edits_ptr, ids_ptr, biases_ptr, stride, num_nodes, num_biases,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    row = tl.program_id(1).to(tl.int64)
    line = tl.load(lines_ptr + row // num_nodes)
    if (tl.load(edits_ptr + line) & _VALUES) == 0:
        return
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(biases_ptr + line * num_biases + entry, mask=entry < num_biases, other=0.0)
    given = bias != 0.0  # each token is given once
    token = tl.load(ids_ptr + line * num_biases + entry, mask=given, other=0)
    x = tl.load(x_ptr + row * stride + token, mask=given, other=0.0)
    tl.store(x_ptr + row * stride + token, x + bias, mask=given)


@triton.jit
def _is_penalised(edits_ptr, penalties_ptr, line):
    neutral = tl.load(penalties_ptr + line * 3) == 1.0
    neutral &= (tl.load(penalties_ptr + line * 3 + 1) == 0.0) & (tl.load(penalties_ptr + line * 3 + 2) == 0.0)
    return ((tl.load(edits_ptr + line) & _VALUES) != 0) & (neutral == 0)


@triton.jit
def _count_text(
    counts_ptr, lines_ptr, lengths_ptr, edits_ptr, penalties_ptr, num_prompt_ptr, text_ptr, vocab, text_width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    request = tl.program_id(1).to(tl.int64)
    line, length = tl.load(lines_ptr + request), tl.load(lengths_ptr + request)
    first = tl.program_id(0) * BLOCK
    if first > length:
        return
    if _is_penalised(edits_ptr, penalties_ptr, line) == 0:
        return
    position = first + tl.arange(0, BLOCK)
    is_text = (position <= length) & (position < text_width)
    token = tl.load(text_ptr + line * text_width + position, mask=is_text, other=-1)
    is_text &= (token >= 0) & (token < vocab)
    is_output = position >= tl.load(num_prompt_ptr + line)
    ones = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_add(counts_ptr + request * vocab + token, ones, mask=is_text & is_output)
    tl.atomic_or(counts_ptr + request * vocab + token, ones * _IN_TEXT, mask=is_text & (is_output == 0))


@triton.jit
def _penalise(
    x_ptr, counts_ptr, lines_ptr, tokens_ptr, mask_ptr, edits_ptr, penalties_ptr, vocab, stride, mask_words, num_nodes,
    IS_CHAIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    row = tl.program_id(1).to(tl.int64)
    request, node = row // num_nodes, row % num_nodes
    line = tl.load(lines_ptr + request)
    if _is_penalised(edits_ptr, penalties_ptr, line) == 0:
        return
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    count = tl.load(counts_ptr + request * vocab + token, mask=real, other=0)
    num_output, in_text = count & (_IN_TEXT - 1), count != 0
    for other in range(1, num_nodes):
        if _sees(mask_ptr, row, node, other, mask_words, IS_CHAIN):
            is_it = token == tl.load(tokens_ptr + request * num_nodes + other)
            num_output += is_it.to(tl.int32)
            in_text |= is_it
    changed = real & in_text
    x = tl.load(x_ptr + row * stride + token, mask=changed, other=0.0)
    repetition = tl.load(penalties_ptr + line * 3)
    frequency, presence = tl.load(penalties_ptr + line * 3 + 1), tl.load(penalties_ptr + line * 3 + 2)
    x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = x - frequency * num_output.to(tl.float32) - presence * (num_output > 0).to(tl.float32)
    tl.store(x_ptr + row * stride + token, x, mask=changed)


def edit_logits(logits_TV: Tensor, nodes: TreeNodes, rules: RuleBuffers, tokens_SL: Tensor, edits: Edits) -> None:
    """See `kernels/torch/edits.py`."""
    (batch, num_nodes), (rows, vocab) = nodes.tokens_BN.shape, logits_TV.shape
    assert rows == batch * num_nodes
    assert logits_TV.stride(1) == 1
    lines_B, length_B, tokens_BN = nodes.req_idx_B, nodes.length_B.contiguous(), nodes.tokens_BN.contiguous()
    is_chain = nodes.mask_BNW is None
    depths = tokens_BN if nodes.depths_BN is None else nodes.depths_BN.contiguous()
    mask = tokens_BN if nodes.mask_BNW is None else nodes.mask_BNW.contiguous()
    mask_words, stride, text_width = mask.shape[-1], logits_TV.stride(0), tokens_SL.shape[1]
    pdl = dependent_launch(logits_TV)
    options = {"PDL": pdl, **launch_options(pdl)}
    if edits & (Edits.MASK | Edits.NODE_MASK):
        with_nodes = bool(edits & Edits.NODE_MASK)
        node_masks = rules.node_masks_SNW if with_nodes else rules.masks_S2W
        assert node_masks is not None, "no room for masks of nodes"
        launch(
            _forbid, (triton.cdiv(vocab, _TOKENS), rows),
            logits_TV, lines_B, length_B, depths, rules.edits_S, rules.num_prompt_S, rules.min_tokens_S,
            rules.masks_S2W, node_masks, vocab, stride, rules.masks_S2W.shape[2], num_nodes, node_masks.shape[1],
            IS_CHAIN=is_chain, NODE_MASK=with_nodes, BLOCK=_TOKENS, **options,
        )  # fmt: skip
    if edits & Edits.BAD_WORDS:
        _, num_bad, num_back = rules.bad_starts_SCM.shape
        launch(
            _forbid_bad_words, (triton.cdiv(num_bad, _WORDS), rows),
            logits_TV, lines_B, length_B, tokens_BN, depths, mask, rules.edits_S, rules.num_prompt_S,
            rules.bad_starts_SCM, rules.bad_ends_SC, tokens_SL, stride, mask_words, num_nodes, num_bad, num_back,
            text_width, IS_CHAIN=is_chain, NODES=triton.next_power_of_2(num_nodes), BLOCK=_WORDS, **options,
        )  # fmt: skip
    if edits & Edits.VALUES:
        assert logits_TV.dtype == torch.float32
        num_biases = rules.biases_SK.shape[1]
        launch(
            _add_biases, (triton.cdiv(num_biases, _BIASES), rows),
            logits_TV, lines_B, rules.edits_S, rules.bias_ids_SK, rules.biases_SK, stride, num_nodes, num_biases,
            BLOCK=_BIASES, **options,
        )  # fmt: skip
        counts_BV = torch.zeros((batch, vocab), dtype=torch.int32, device=logits_TV.device)
        launch(
            _count_text, (triton.cdiv(text_width, _TEXT), batch),
            counts_BV, lines_B, length_B, rules.edits_S, rules.penalties_S3, rules.num_prompt_S, tokens_SL, vocab,
            text_width, BLOCK=_TEXT, **options,
        )  # fmt: skip
        launch(
            _penalise, (triton.cdiv(vocab, _TOKENS), rows),
            logits_TV, counts_BV, lines_B, tokens_BN, mask, rules.edits_S, rules.penalties_S3, vocab, stride,
            mask_words, num_nodes, IS_CHAIN=is_chain, BLOCK=_TOKENS, **options,
        )  # fmt: skip
