"""On CPU in float32 a row's result has the same bits however the batch is composed and the sequence is cut.

Resumed files equal uninterrupted ones byte for byte because of this. It rests on properties of oneDNN and the BLAS
that are checked here at the sizes of real models.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specbatch.attention.cpu import TorchAttention
from specbatch.cache.pages import KVCache
from specbatch.draft.shape import DraftShape
from specbatch.kernels import ops_for
from specbatch.kernels.activations import Activation
from specbatch.kernels.torch.attention import attend
from specbatch.kernels.torch.model import activated, gated
from specbatch.logprobs import TokenLogprobs
from specbatch.models.layers import LayerNorm, RMSNorm, Rotary
from specbatch.models.linears.packed import PackedActivatedLinear, PackedGatedLinear, PackedLinear
from specbatch.types import Margin, SamplingParams
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, random_prompts, run, tiny_engine

ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 257]


SIZES = [(16, 48), (32, 61), (576, 960), (576, 3072), (1536, 576), (896, 1152), (4864, 896), (1536, 2048)]
SIZES += [(8960, 1536)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [*((*size, False) for size in SIZES), *((*size, True) for size in SIZES[:4])]
)
def test_linear(inputs: int, outputs: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear(
        torch.randn(outputs, inputs, generator=generator) * 0.02,
        torch.randn(outputs, generator=generator) if bias else None,
    )
    x = torch.randn(360, inputs, generator=generator)
    whole = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows]), f"{rows} rows differ"
        assert torch.equal(linear(x[100 : 100 + rows]), whole[100 : 100 + rows]), f"{rows} rows at an offset differ"


def test_elementwise() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1152, generator=generator) * 3
    norm = RMSNorm(torch.randn(1152, generator=generator), 1e-5)
    layer_norm = LayerNorm(norm.weight, torch.randn(1152, generator=generator), 1e-5, ops_for(CPU, torch.float32))
    for rows in ROWS:
        assert torch.equal(norm(x[:rows]), norm(x)[:rows])
        assert torch.equal(layer_norm(x[:rows]), layer_norm(x)[:rows])
        assert torch.equal(layer_norm(x[7 : 7 + rows]), layer_norm(x)[7 : 7 + rows])
        assert torch.equal(torch.exp(x[7 : 7 + rows]), torch.exp(x)[7 : 7 + rows])  # merges of attention chunks
    rotary = Rotary(torch.rand(32, generator=generator), 1.0, 300, torch.float32, CPU)
    heads = x.view(300, 18, 64)
    whole = Rotary.apply(heads, *rotary.at(torch.arange(300)))
    for rows in ROWS:
        assert torch.equal(
            Rotary.apply(heads[9 : 9 + rows], *rotary.at(torch.arange(9, 9 + rows))), whole[9 : 9 + rows]
        )


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 48), (576, 1536)])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_linear_with_an_activation(inputs: int, outputs: int, activation: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    up, bias = torch.randn(outputs, inputs, generator=generator) * 0.02, torch.randn(outputs, generator=generator)
    linear = PackedActivatedLinear(up, bias, activation)
    x = torch.randn(400, inputs, generator=generator)
    whole = linear(x)
    torch.testing.assert_close(whole, activated(x @ up.T + bias, activation), atol=1e-5, rtol=1e-4)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[100 : 100 + rows]), whole[100 : 100 + rows])


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 48), (576, 1536), (896, 4864)])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_gated_linear(inputs: int, outputs: int, activation: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(outputs, inputs, generator=generator) * 0.02 for _ in range(2))
    linear = PackedGatedLinear(gate, up, None, activation)
    x = torch.randn(400, inputs, generator=generator)
    whole = linear(x)
    torch.testing.assert_close(whole, gated(x @ gate.T, x @ up.T, activation), atol=1e-5, rtol=1e-4)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[100 : 100 + rows]), whole[100 : 100 + rows])


@pytest.mark.parametrize(("inputs", "size", "inner", "width"), [(16, 5, 6, 33), (576, 256, 144, 8192)])
def test_the_head_of_a_block_drafter(inputs: int, size: int, inner: int, width: int) -> None:
    """The second sizes are those of the drafter that comes with specbatch."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3 * size, inputs), (3 * size, size), (inner, size), (width, inner)
    layers = [PackedLinear(torch.randn(shape, generator=generator) / shape[1] ** 0.5) for shape in shapes]
    x, state, of_hidden, logits = (torch.randn(40, n, generator=generator) for n in (inputs, size, inner, width))
    ops = ops_for(CPU, torch.float32)

    def step(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        new = ops.gru_step(x[rows], state[rows], None, *layers[:2])
        return new, ops.add_bottleneck(logits[rows], of_hidden[rows], new, *layers[2:])

    whole = step(slice(None))
    for count in [*range(1, 10), 15, 16, 17, 33]:
        for start in (0, 7):
            rows = slice(start, start + count)
            for found, expected in zip(step(rows), whole, strict=True):
                assert torch.equal(found, expected[rows]), f"{count} rows from {start} differ"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (9, 3, 64),
        (4, 4, 64),
        (14, 2, 64),
        (12, 2, 128),
        pytest.param(32, 8, 128, marks=pytest.mark.wide),
        (8, 1, 256),
        (5, 5, 80),
    ],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention(heads: int, kv_heads: int, dim: int, has_sinks: bool) -> None:
    """300 tokens in one piece, against pieces, a decode step, a batch with longer neighbours, and a tree with other
    branches."""
    sinks = torch.linspace(-4.0, 8.0, heads) if has_sinks else None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    page, pages = 16, [*range(19, 0, -1), *range(20, 60)]
    backend = TorchAttention(heads, kv_heads, dim, CPU)
    cache = KVCache(1, 60 * page, kv_heads, dim, torch.float32, CPU)
    other = list(range(20, 60))
    cache._kv[..., 20 * page :, :] = torch.randn(2, kv_heads, 40 * page, dim, generator=generator)
    whole_layout = batch_of([Span(pages, 0, 300)], page, CPU)
    cache.write(0, whole_layout.slots_T, k, v)
    whole = backend.attend(backend.plan(whole_layout), q, cache, 0, None, sinks)
    # The reference keeps keys and values for each query, so it computes some of the queries.
    some = [(0, 10), (123, 133), (290, 300)]
    layout = batch_of([Span(pages, a, b - a) for a, b in some], page, CPU)
    reference = attend(torch.cat([q[a:b] for a, b in some]), cache.layer(0), layout, dim**-0.5, sinks_H=sinks)
    torch.testing.assert_close(torch.cat([whole[a:b] for a, b in some]), reference, atol=1e-5, rtol=1e-4)

    def check(
        spans: list[Span], rows: list[tuple[int, int]], window: int | None = None, expected: torch.Tensor = whole
    ) -> None:
        """`rows[i]` = the tokens of the sequence that span i computes; spans of other sequences have none."""
        queries = [
            q[a:b] if b else torch.ones(span.num_tokens, heads, dim) for span, (a, b) in zip(spans, rows, strict=True)
        ]
        layout = batch_of(spans, page, CPU)
        out = backend.attend(backend.plan(layout), torch.cat(queries), cache, 0, window, sinks)
        first = 0
        for span, (a, b) in zip(spans, rows, strict=True):
            if b:
                assert torch.equal(out[first : first + span.num_tokens], expected[a:b]), f"tokens {a}..{b}"
            first += span.num_tokens

    for start, count in [
        (0, 1),
        (0, 5),
        (0, 128),
        (3, 140),
        (127, 1),
        (128, 1),
        (129, 3),
        (250, 50),
        (299, 1),
        (290, 8),
    ]:
        check([Span(pages, start, count)], [(start, start + count)])
        check(
            [Span(other, 500, 1), Span(pages, start, count), Span(other, 20, 30)],
            [(0, 0), (start, start + count), (0, 0)],
        )
    windowed = backend.attend(backend.plan(whole_layout), q, cache, 0, 50, sinks)
    assert not torch.allclose(windowed, whole)
    # A tree whose branch 0-2-5-6 is tokens 250..253, its nodes at slots that plain decoding would give to other tokens.
    tree = torch.eye(7).bool()
    for node, parent in enumerate([0, 0, 1, 1, 2, 5], start=1):
        tree[node] |= tree[parent]
    depths, branch = [0, 1, 1, 2, 2, 2, 3], [0, 2, 5, 6]
    layout = batch_of([Span(pages, 250, 7, [250 + d for d in depths], tree), Span(other, 100, 3)], page, CPU)
    saved = cache._kv.clone()
    rows = torch.full((7,), 0)
    rows[branch] = torch.arange(250, 254)
    cache.write(0, layout.slots_T[:7], k[rows], v[rows])
    for window, expected in ((None, whole), (50, windowed)):
        out = backend.attend(backend.plan(layout), torch.cat((q[rows], q[:3])), cache, 0, window, sinks)
        assert torch.equal(out[branch], expected[250:254])
    cache._kv.copy_(saved)

    for start, count in [(0, 40), (200, 100), (299, 1), (128, 5)]:
        check([Span(pages, start, count), Span(other, 400, 2)], [(start, start + count), (0, 0)], 50, windowed)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("none", None),
        ("ngram", DraftShape(3, 1, 4)),
        ("draft_model", DraftShape(5, 4, 8)),
        ("eagle", DraftShape(3, 1, 4)),
    ],
)
def test_engine_logprobs_and_margins_have_the_same_bits(method: str, shape: DraftShape | None) -> None:
    """Not only tokens are equal between plain and speculative decoding and between all schedules."""
    options: list[dict[str, Any]] = [
        {},
        {"max_batch_size": 1, "prefix_cache": False},
        {"max_batch_size": 6, "prefill_chunk_tokens": 3, "page_size": 16},
    ]
    for option in options:
        assert logprobs_of(method, shape, **option) == plain_logprobs(), option


Bits = list[tuple[TokenLogprobs | None, Margin]]


def logprobs_of(method: str, shape: DraftShape | None, **settings: Any) -> Bits:
    engine = tiny_engine(method, shape, dtype=torch.float32, **{"num_pages": 256, **settings})
    params = SamplingParams(max_tokens=10, logprobs=2)
    return [(c.logprobs, c.margin) for c in run(engine, random_prompts(6, shared=10), params)]


@cache
def plain_logprobs() -> Bits:
    return logprobs_of("none", None)
