"""Traits of model families in kernels (soft caps, attention sinks, activations, norms with float32 weights), against
the reference kernels: in Triton's interpreter without a GPU, for real with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specbatch.attention.triton import PagedAttention
from specbatch.batch import PagedBatch
from specbatch.kernels import torch as reference
from specbatch.kernels import triton as kernels
from specbatch.kernels.activations import Activation
from specbatch.kernels.triton import attention
from specbatch.kernels.triton.skinny import ops as skinny
from specbatch.models.decoder import Decoder
from specbatch.models.weight_loader import WeightLoader
from tests.kernels.batches import CUDA, DEVICE, DTYPES, FP8, close, paged_batch, random, random_cache, tree_batch
from tests.kernels.test_gemm import TILES
from tests.kernels.test_invariant_attention import Kernel
from tests.kernels.test_prefixes import GROUPS, STARTS, grouped
from tests.marks import slow_on_cpu
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import RandomTensors, decoder_tensors, score_traits, target_config

pytestmark = [pytest.mark.gpu] if CUDA else []
CAP = 2.0


def batch_named(kind: str) -> PagedBatch:
    if kind == "tree":
        return tree_batch(5, [-1, 0, 0, 1, 3], [0, 31, 70], 16)
    return paged_batch([0, 33, 5], [70, 1, 40], 16) if kind == "prompts" else paged_batch([70, 0, 129], [1] * 3, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["decode", "tree", "prompts"])
@pytest.mark.parametrize(
    ("dim", "splits", "window", "fp8"), [(64, 4, None, False), slow_on_cpu(256, 1, 20, False), (80, 1, None, True)]
)
def test_scores_are_capped(kind: str, dim: int, splits: int, window: int | None, fp8: bool, dtype: torch.dtype) -> None:
    batch = batch_named(kind)
    q, kv = random(len(batch.slots_T), 4, dim, dtype=dtype) * 3, random_cache(batch, 2, dim, dtype)
    kv = kv.to(FP8) if fp8 else kv
    workspace = attention.Workspace(DEVICE, 16384, dim)
    arguments = q, kv, batch, dim**-0.5, window, splits, workspace
    found = kernels.attend(*arguments, soft_cap=CAP)
    close(found, reference.attend(*arguments, soft_cap=CAP), dtype)
    assert float((found - kernels.attend(*arguments)).abs().max()) > 0.05, "the cap does not bind"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_shared_prefixes_are_capped(dtype: torch.dtype) -> None:
    batch = grouped(paged_batch(STARTS, [4] * 6, 16), GROUPS)
    q, kv = random(24, 4, 64, dtype=dtype) * 3, random_cache(batch, 2, 64, dtype)
    workspace = attention.Workspace(DEVICE, 16384, 64)
    prefix = kernels.attend_prefixes(q, kv, batch, 0.125, 2, CAP)
    found = kernels.attend(q, kv, batch, 0.125, None, 1, workspace, prefix=prefix, soft_cap=CAP)
    close(found, reference.attend(q, kv, replace(batch, groups=None), 0.125, soft_cap=CAP), dtype)


def sinks_of(heads: int) -> Tensor:
    """Return sinks that take from almost nothing to almost all of the weights."""
    return torch.linspace(-4.0, 8.0, heads, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["decode", "tree", "prompts"])
@pytest.mark.parametrize(
    ("dim", "splits", "window", "fp8"), [(64, 4, None, False), slow_on_cpu(128, 1, 20, False), (80, 2, 20, True)]
)
def test_sinks(kind: str, dim: int, splits: int, window: int | None, fp8: bool, dtype: torch.dtype) -> None:
    batch = batch_named(kind)
    q, kv = random(len(batch.slots_T), 4, dim, dtype=dtype), random_cache(batch, 2, dim, dtype)
    kv = kv.to(FP8) if fp8 else kv
    arguments = q, kv, batch, dim**-0.5, window, splits, attention.Workspace(DEVICE, 16384, dim)
    found = kernels.attend(*arguments, sinks_H=sinks_of(4))
    close(found, reference.attend(*arguments, sinks_H=sinks_of(4)), dtype)
    assert float((found - kernels.attend(*arguments)).abs().max()) > 0.05, "the sinks change nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_of_listed_sequences(dtype: torch.dtype) -> None:
    """Only some sequences are split, and each has its sinks once."""
    batch = paged_batch([70, 0, 129], [1] * 3, 16)
    listed = reference.long_sequences(batch.starts_B, batch.query_starts, 100, 2)
    q, kv = random(3, 4, 64, dtype=dtype), random_cache(batch, 2, 64, dtype)
    arguments = q, kv, batch, 0.125, None, 4, attention.Workspace(DEVICE, 16384, 64), listed
    close(kernels.attend(*arguments, sinks_H=sinks_of(4)), reference.attend(*arguments, sinks_H=sinks_of(4)), dtype)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_with_shared_prefixes(dtype: torch.dtype, splits: int) -> None:
    batch = grouped(paged_batch(STARTS, [4] * 6, 16), GROUPS)
    q, kv = random(24, 4, 64, dtype=dtype), random_cache(batch, 2, 64, dtype)
    workspace, sinks = attention.Workspace(DEVICE, 16384, 64), sinks_of(4)
    expected = reference.attend(q, kv, replace(batch, groups=None), 0.125, sinks_H=sinks)
    for ops in (kernels, reference):
        prefix = ops.attend_prefixes(q, kv, batch, 0.125, 2)
        found = ops.attend(q, kv, batch, 0.125, None, splits, workspace, prefix=prefix, sinks_H=sinks)
        close(found, expected, dtype)


@pytest.mark.parametrize("window", [None, 40])
def test_bits_with_sinks_do_not_depend_on_the_cut(window: int | None) -> None:
    kernel = Kernel(140, 4, 2, 64, torch.bfloat16 if CUDA else torch.float32)
    kernel.sinks = sinks_of(4)
    whole = kernel.of((0, 140), window=window)
    assert torch.equal(kernel.of((130, 140), window=window), whole[130:])
    assert torch.equal(kernel.run(*kernel.cut((139, 140)), parts=2, window=window), whole[139:])
    kernel.check(whole, (0, 140), window=window)


def test_a_sink_is_a_key_without_a_value() -> None:
    """The reference against a softmax with one more score."""
    batch = paged_batch([0], [9], 16)
    q, kv = random(9, 4, 16, dtype=torch.float32), random_cache(batch, 4, 16, torch.float32)
    k, v = kv[:, :, batch.slots_T]
    scores = torch.einsum("thd,hsd->ths", q, k) * 0.25
    scores = scores.masked_fill(torch.ones(9, 9, device=DEVICE).triu(1).bool()[:, None], -torch.inf)
    weights = torch.softmax(torch.cat((scores, sinks_of(4).expand(9, 4)[..., None]), -1), -1)[..., :-1]
    close(reference.attend(q, kv, batch, 0.25, sinks_H=sinks_of(4)), torch.einsum("ths,hsd->thd", weights, v), q.dtype)


def test_capped_bits_do_not_depend_on_the_cut() -> None:
    kernel = Kernel(140, 4, 2, 64, torch.bfloat16 if CUDA else torch.float32)
    kernel.q, kernel.soft_cap = kernel.q * 3, CAP
    whole = kernel.of((0, 140))
    assert torch.equal(kernel.of((130, 140)), whole[130:])
    assert torch.equal(kernel.of((139, 140)), whole[139:])
    kernel.check(whole, (0, 140))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_capped(dtype: torch.dtype) -> None:
    logits = random(3, 1000, dtype=dtype) * 50
    close(kernels.soft_capped(logits.clone(), 30.0), reference.soft_capped(logits, 30.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 2560])
def test_norms_with_weights_in_float32(size: int, dtype: torch.dtype) -> None:
    """The wide weight is applied before the only rounding."""
    x, residual = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)
    weight, next_weight = (1 + random(size, dtype=torch.float32, seed=seed) for seed in (2, 3))
    close(normed := kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
    for ops in (kernels, reference):
        out = torch.empty_like(x)
        assert ops.rms_norm(x, weight, 1e-6, out) is out
        assert torch.equal(out, normed) or ops is reference
        close(out, normed, dtype)
    for after in (next_weight, None):
        found = kernels.add_normed(x, residual, weight, 1e-6, after)
        expected = reference.add_normed(x, residual, weight, 1e-6, after)
        close(found[0], expected[0], dtype)
        assert (found[1] is None) == (after is None)
        if found[1] is not None and expected[1] is not None:
            close(found[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "has_bias"), [(64, True), (576, False), (2560, True)])
def test_layer_norms(size: int, has_bias: bool, dtype: torch.dtype) -> None:
    """The mean is far from 0. The result is that of torch."""
    x, weight = random(5, size, dtype=dtype) + 3, 1 + random(size, dtype=dtype, seed=1)
    bias = random(size, dtype=dtype, seed=2) if has_bias else None
    found = kernels.layer_norm(x, weight, bias, 1e-5)
    close(found, reference.layer_norm(x, weight, bias, 1e-5), dtype)
    close(found, torch.nn.functional.layer_norm(x, (size,), weight, bias, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "is_wide"), [(4, 4, True), (6, 2, False)])
def test_norms_over_all_heads(heads: int, kv_heads: int, is_wide: bool, dtype: torch.dtype) -> None:
    """Queries and keys have the bits of the norm alone, and values are not touched."""
    sizes = heads * 64, kv_heads * 64
    qkv = random(5, sizes[0] + 2 * sizes[1], dtype=dtype)
    norms = [
        1 + random(size, dtype=torch.float32 if is_wide else dtype, seed=seed)
        for seed, size in enumerate(sizes, start=1)
    ]
    found = kernels.norm_whole_heads(qkv.clone(), *norms, 1e-6)
    close(found, reference.norm_whole_heads(qkv, *norms, 1e-6), dtype)
    parts = qkv.split((*sizes, sizes[1]), 1)
    alone = [kernels.rms_norm(part, norm, 1e-6) for part, norm in zip(parts[:2], norms, strict=True)]
    assert torch.equal(found, torch.cat((*alone, parts[2]), 1))


def test_a_wide_weight_saves_a_rounding() -> None:
    x, weight = random(64, 576, dtype=torch.bfloat16), 1 + random(576, dtype=torch.float32, seed=2)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
    wide = (reference.rms_norm(x, weight, 1e-6).double() - exact).abs().mean()
    narrow = (reference.rms_norm(x, weight.bfloat16(), 1e-6).double() - exact).abs().mean()
    assert wide < 0.7 * narrow


@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_have_norms_with_weights_in_float32(dtype: torch.dtype, norms_last: bool) -> None:
    heads, kv_heads, dim = 4, 2, 256
    qkv = random(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = random(9, dim, dtype=dtype, seed=1), random(9, dim, dtype=dtype, seed=2)
    positions, slots = torch.tensor([0, 4, 8], device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    norms = [1 + random(dim, dtype=torch.float32, seed=seed) for seed in (3, 4)]
    caches = [torch.zeros(2, kv_heads, 5, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    found, expected = (
        ops.rotary_write(qkv, heads, kv_heads, cos, sin, positions, slots, cache, *norms, 1e-6, norms_last=norms_last)
        for ops, cache in zip((kernels, reference), caches, strict=True)
    )
    close(found, expected, dtype)
    close(caches[0][:, :, :3], caches[1][:, :, :3], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu_tanh", "clamped_swiglu"])
def test_activations(name: Activation, dtype: torch.dtype) -> None:
    x = random(3, 2 * 1000, dtype=dtype) * 4
    close(kernels.act_mul(x, name), reference.act_mul(x, name), dtype)
    found = kernels.act_mul_quantised(x, None, False, name)
    expected = reference.act_mul_quantised(x, None, False, name)
    torch.testing.assert_close(found.scale_TG, expected.scale_TG, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_activations_without_a_gate(name: Activation, dtype: torch.dtype) -> None:
    x = random(3, 1000, dtype=dtype) * 4
    x[0, 0] = torch.nan
    found, expected = kernels.activated(x.clone(), name), reference.activated(x, name)
    assert bool(found[0, 0].isnan())
    close(found[1:], expected[1:], dtype)


def test_the_clamped_swiglu() -> None:
    """Results are those of transformers, and what is not a number stays so."""
    gate, up = random(7, 33, dtype=torch.float32) * 8, random(7, 33, dtype=torch.float32, seed=1) * 8
    gate[0, 0] = up[0, 1] = torch.nan
    g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (u + 1) * (g * torch.sigmoid(g * 1.702))
    for ops in (reference, kernels):
        found = ops.act_mul(torch.cat((gate, up), 1), "clamped_swiglu")
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("name", ["fma1", "dot8", "dot16-split"])
def test_activations_in_gemms(name: str, activation: Activation) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, weight = random(1, 64, dtype=dtype), random(48, 64, dtype=dtype, seed=1)
    norm = 1 + random(64, dtype=torch.float32, seed=2)
    tile = TILES[name]
    close(skinny.gated_linear(x, weight, activation, tile), reference.gated_linear(x, weight, activation), dtype)
    # The kernels would read a float32 weight of a norm as bfloat16: it is a step of its own.
    found = skinny.norm_gated_linear(x, norm, 1e-6, weight, activation, tile)
    close(found, reference.norm_gated_linear(x, norm, 1e-6, weight, activation), dtype)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss", "flex-olmo", "pre-norms", "cohere2", "gpt-neox"])
def test_a_model_is_that_of_the_cpu(family: str) -> None:
    """Logits of a prompt and of single tokens, float32."""
    config = target_config(family, 4, 32, 61)
    tokens = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(0))
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float64), (DEVICE, torch.float32)):
        weights = WeightLoader(RandomTensors(decoder_tensors(config), 0), dtype, device)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        backend = PagedAttention(*sizes, dtype, device, **score_traits(config))  # type: ignore[arg-type]
        decoder = Decoder(config, weights, backend, 64)
        cache = decoder.new_cache(64, dtype)
        logits = []
        for start, size in ((0, 25), *((i, 1) for i in range(25, 40))):
            batch = batch_of([Span(range(4), start, size)], 16, device)
            hidden, _ = decoder.forward(tokens[start : start + size].to(device), batch, cache)
            logits.append(decoder.logits(hidden).double().cpu())
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-3)
