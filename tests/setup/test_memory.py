"""How large the cache and the rows are, on cards of all sizes, and what is said where memory does not suffice."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.errors import ConfigError
from specbatch.models.config import ModelConfig, MoeConfig, expected_tensors
from specbatch.models.linears.sharded import local_config
from specbatch.models.random_weights import geometries
from specbatch.setup.cache import CacheRequest, cards_for, default_batch_size, resolve_cache
from specbatch.setup.memory import (
    ENOUGH_ROW,
    GIB,
    CachedModel,
    CachePlan,
    Rows,
    available_memory,
    bytes_for_cache,
    estimated_working_bytes,
    first_that_fits,
    given_cache,
    plan_cache,
    sizes_to_try,
)
from specbatch.setup.resolve import resolve
from tests.tiny_models import CPU, tiny_config

BF16 = torch.bfloat16
USUAL = sizes_to_try(256, 8192, open_batch=True, open_chunk=True)


def sized(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, positions: int) -> ModelConfig:
    return tiny_config(
        layers, hidden, vocab, intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads, head_dim=128,
        max_position_embeddings=positions,
    )  # fmt: skip


LLAMA = dataclasses.replace(geometries()["llama-3-8b"], max_position_embeddings=131072)  # Llama-3.1-8B
MODELS = {
    "llama-3.1-8b": LLAMA,
    "qwen3-14b": sized(151936, 5120, 17408, 40, 40, 8, 40960),
    "qwen2.5-32b": sized(152064, 5120, 27648, 64, 40, 8, 32768),
    "llama-3.2-1b": geometries()["llama-3.2-1b"],
    "smollm2-135m": geometries()["smollm2-135m"],
}


def start(model: ModelConfig, free_gib: float, nodes: int = 1) -> tuple[CachePlan, tuple[int, int]] | None:
    """What a default start decides on a card with so much memory free: the builder's own functions, over estimates of
    what it would measure."""
    cached = CachedModel.whole(model, packs=False)
    rows = Rows(cached.bytes_per_token(BF16), 64, nodes, model.max_position_embeddings, 256, spare_pages=1)
    weights, available = 2 * cached.num_parameters(), int(free_gib * GIB)

    def attempt(batch: int, chunk: int) -> tuple[CachePlan, tuple[int, int]] | None:
        working = estimated_working_bytes(model, batch, nodes, chunk, 2)
        if weights + working > available:
            return None  # as a trial that runs out of memory
        return plan_cache(bytes_for_cache(available, 0.9, weights, working), rows), (batch, chunk)

    return first_that_fits(USUAL, min(ENOUGH_ROW, model.max_position_embeddings), attempt)


@pytest.mark.parametrize(
    ("name", "free_gib", "nodes", "max_tokens", "batch"),
    [
        ("llama-3.1-8b", 139.0, 1, 256, 768),
        ("llama-3.1-8b", 139.0, 1, 1024, 512),
        ("llama-3.1-8b", 139.0, 4, 256, 512),
        ("llama-3.1-8b", 139.0, 60, 256, 256),  # as many tokens in a round as a GPU computes at once
        ("llama-3.1-8b", 139.0, 1, 65536, 256),  # rows that may be long
        ("llama-3.1-8b", 78.7, 1, 256, 256),
        ("llama-3.1-8b", 23.2, 1, 256, 256),
        ("smollm2-135m", 139.0, 1, 256, 2048),  # a small model
        ("smollm2-135m", 139.0, 8, 256, 1536),
        ("smollm2-135m", 23.2, 4, 256, 768),
        ("smollm2-135m", 3.0, 1, 256, 256),
    ],
)
def test_as_many_rows_run_at_once_as_the_cache_of_a_gpu_holds(
    name: str, free_gib: float, nodes: int, max_tokens: int, batch: int
) -> None:
    wanted = cache_request(MODELS[name], (nodes, 8192))
    assert default_batch_size(wanted, int(free_gib * GIB), max_tokens) == batch
    # A cache that the user has set counts as it is.
    largest, most_tokens = (2048, 12288) if name == "smollm2-135m" else (1024, 4096)
    for tokens, given_batch in ((10**9, min(largest, most_tokens // nodes)), (10_000, 256)):
        given = default_batch_size(dataclasses.replace(wanted, given_tokens=tokens), 0, min(max_tokens, 1024))
        assert given == max(256, given_batch)


def test_rounds_that_choose_their_nodes_have_as_many_rows_as_rounds_of_few_nodes() -> None:
    nodes = ByBatch((256, 512, 1024, 2048), (32, 16, 8, 4))
    for name, batch in (("smollm2-135m", 2048), ("llama-3.1-8b", 512)):
        wanted = dataclasses.replace(cache_request(MODELS[name], (32, 8192)), nodes=nodes, chooses_nodes=True)
        assert default_batch_size(wanted, 139 * GIB, 256) == batch


@pytest.mark.parametrize(("nodes", "batch"), [((10, 4), 2048), ((10, 6), 2048), ((4, 10), 1024), ((10, 10), 1024)])
def test_of_a_schedule_the_nodes_of_a_large_batch_count(nodes: tuple[int, int], batch: int) -> None:
    request = cache_request(MODELS["smollm2-135m"], (max(nodes), 8192))
    wanted = dataclasses.replace(request, nodes=ByBatch((8, 64), nodes))
    assert default_batch_size(wanted, 139 * GIB, 256) == batch


def test_a_cpu_runs_16_rows_at_once_however_large_its_memory() -> None:
    assert default_batch_size(cache_request(MODELS["smollm2-135m"], None), 1000 * GIB, 256) == 16


@pytest.mark.parametrize(("name", "cards"), [("llama-3-70b", 2), ("llama-3-8b", 1)])
def test_a_model_that_one_gpu_does_not_hold_names_how_many_do(
    name: str, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, free = cache_request(geometries()[name], (1, 8192)), 139 * GIB
    assert cards_for(wanted, free) == cards
    assert cards_for(wanted, 5 * GIB) == (None if cards == 2 else 8)
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: free)
    if cards == 1:
        assert resolve_cache(wanted, []).capacity == 8192
        return
    with pytest.raises(ConfigError, match=r"weights take 131\.4 GiB, a token 320 KiB") as error:
        resolve_cache(wanted, [])
    assert "2 GPUs like this one hold it: set engine.tensor_parallel to 2" in str(error.value.hint)


@pytest.mark.parametrize(("device", "share"), [("cuda", 1), ("cpu", 2)])
def test_what_a_rank_may_take(device: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CUDA have a GPU each. Those of a CPU share its memory."""
    model = local_config(geometries()["llama-3-70b"], 0, 2)
    wanted = dataclasses.replace(cache_request(model, (1, 2048)), device=torch.device(device), num_ranks=2)
    assert 60 * GIB < wanted.weights < 70 * GIB
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: share * 78 * GIB)
    resolve_cache(wanted, notes := [])
    assert "78.0 GiB are free" in notes[-1]
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: share * 39 * GIB)
    with pytest.raises(ConfigError) as error:
        resolve_cache(wanted, [])
    assert "8 GPUs like this one hold it" in str(error.value.hint)


def cache_request(model: ModelConfig, measured: tuple[int, int] | None) -> CacheRequest:
    cached = CachedModel.whole(model, packs=False)
    rows = Rows(cached.bytes_per_token(BF16), 64, 1, model.max_position_embeddings, 256, spare_pages=1)
    return CacheRequest([cached], rows, BF16, CPU, None, 0.9, measured)


@pytest.mark.parametrize(
    ("name", "free_gib", "longest"),
    [
        ("llama-3.1-8b", 23.2, 32768),  # of 24 GB, and so on
        ("llama-3.1-8b", 39.2, 131072),
        ("llama-3.1-8b", 78.7, 131072),
        ("llama-3.1-8b", 139.0, 131072),
        ("llama-3.1-8b", 24.0, 32768),  # an H200 that others use
        ("llama-3.1-8b", 50.0, 131072),
        ("qwen3-14b", 39.2, 32768),
        ("qwen2.5-32b", 78.7, 16384),
        ("qwen2.5-32b", 139.0, 32768),
        ("llama-3.2-1b", 15.5, 131072),
        ("smollm2-135m", 15.5, 8192),
        ("smollm2-135m", 3.0, 8192),
    ],
)
def test_default_starts(name: str, free_gib: float, longest: int) -> None:
    found = start(MODELS[name], free_gib)
    assert found is not None
    plan, size = found
    assert plan.longest_row == longest
    assert plan.capacity >= longest
    assert size == (256, 8192)


@pytest.mark.parametrize("free_gib", [15.6, 23.2, 31.0, 39.2, 47.0, 78.7, 94.0, 139.0])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("nodes", [1, 8, 60])
def test_a_start_fails_only_where_next_to_nothing_is_left(name: str, free_gib: float, nodes: int) -> None:
    """16 to 141 GB. Whatever comes out is a cache that holds its longest row, and lies within the memory."""
    model = MODELS[name]
    found = start(model, free_gib, nodes)
    cached = CachedModel.whole(model, packs=False)
    left = 0.9 * free_gib * GIB - 2 * cached.num_parameters()
    if found is None or found[0].longest_row < 2:
        batch, chunk = USUAL[-1]
        assert left < estimated_working_bytes(model, batch, nodes, chunk, 2) + 128 * cached.bytes_per_token(BF16)
        return
    plan, (batch, chunk) = found
    token_bytes = cached.bytes_per_token(BF16)
    assert plan.longest_row + nodes <= plan.num_pages * 64
    working = estimated_working_bytes(model, batch, nodes, chunk, 2)
    assert (plan.num_pages + 1) * 64 * token_bytes + working <= left
    longest = plan.longest_row
    assert longest == model.max_position_embeddings or longest & (longest - 1) == 0


def test_batches_and_chunks_are_halved_where_no_row_fits() -> None:
    """60-node trees of 256 rows take more than the weights leave of 24 GB."""
    found = start(LLAMA, 23.2, nodes=60)
    assert found is not None
    plan, (batch, chunk) = found
    assert (batch, chunk) == (64, 2048)
    assert plan.longest_row >= ENOUGH_ROW


def test_a_smaller_size_that_fails_does_not_cost_the_larger_one_that_worked() -> None:
    """Memory that somebody else takes meanwhile, say."""
    short = CachePlan(8, 100, 64)
    found = first_that_fits([(4, 64), (2, 64)], 4096, lambda batch, chunk: (short, batch) if batch == 4 else None)
    assert found == (short, 4)
    assert first_that_fits([(4, 64), (2, 64)], 4096, lambda batch, chunk: None) is None


def test_what_the_user_has_set_is_not_halved() -> None:
    assert sizes_to_try(256, 8192, open_batch=False, open_chunk=False) == [(256, 8192)]
    assert sizes_to_try(64, 1024, open_batch=False, open_chunk=True) == [(64, 1024), (64, 512)]
    assert sizes_to_try(40, 512, open_batch=True, open_chunk=True) == [(40, 512), (20, 512), (16, 512)]
    assert sizes_to_try(4, 100, open_batch=True, open_chunk=True) == [(4, 100)]


def test_a_row_is_a_power_of_two_where_the_cache_limits_it() -> None:
    rows = Rows(token_bytes=10, page_size=16, lookahead=5, max_positions=1000, max_batch_size=2)
    assert plan_cache(160 * 40, rows) == CachePlan(40, 635, 512)
    assert plan_cache(160 * 32, rows) == CachePlan(32, 507, 256), "512 less the lookahead"
    assert plan_cache(160 * 63, rows) == CachePlan(63, 1000, 1000), "the model's own"
    assert plan_cache(160 * 10**6, rows).num_pages == 2 * 63, "more is never used"
    assert plan_cache(160 * 40, rows, most=500) == CachePlan(40, 500, 256), "what buffers were made for"
    assert plan_cache(159, rows) == CachePlan(0, 0, 0)
    assert given_cache(640, rows) == CachePlan(40, 635, 635), "what the user has set is used whole"


def test_a_share_of_what_is_free() -> None:
    """Others' memory does not count as this run's."""
    assert bytes_for_cache(available=1000, fraction=0.9, weights=300, reserved=100) == 500
    assert bytes_for_cache(available=1000, fraction=0.3, weights=300, reserved=100) == 0


def test_the_parameters_of_known_models() -> None:
    assert CachedModel.whole(LLAMA, packs=False).num_parameters() == pytest.approx(8.03e9, rel=0.001)
    tied = geometries()["smollm2-135m"]
    assert CachedModel.whole(tied, packs=False).num_parameters() == pytest.approx(134.5e6, rel=0.001)
    assert CachedModel.whole(tied, packs=True).num_parameters() == pytest.approx(162.8e6, rel=0.001)
    experts = geometries()["qwen3-30b-a3b"]
    assert CachedModel.whole(experts, packs=False).num_parameters() == pytest.approx(30.5e9, rel=0.002)
    olmoe, glm = (geometries()[name] for name in ("olmoe-1b-7b", "glm-4.5-air"))
    assert CachedModel.whole(olmoe, packs=False).num_parameters() == pytest.approx(6.92e9, rel=0.002)
    assert CachedModel.whole(glm, packs=False).num_parameters() == pytest.approx(106.85e9, rel=0.002)


def test_the_parameters_of_experts() -> None:
    """A shared expert counts, and a layer without experts has its MLP."""
    moe = MoeConfig(8, 2, 24, norm_topk_prob=True, layers=(True, False, True), shared_size=40)
    config = tiny_config(3, moe=moe)
    exact = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert CachedModel.whole(config, packs=False).num_parameters() == pytest.approx(exact, rel=0.02)


TINY = ["model.target=random:tiny", "engine.device=cpu", "speculation.method=none"]


@pytest.mark.parametrize("tokens", [10**12, 2 * 10**8])
def test_a_cache_that_memory_does_not_hold(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: 8 * GIB)
    with pytest.raises(ConfigError, match=f"engine.kv_cache_tokens: {tokens} tokens take") as caught:
        resolve(load_config(None, [*TINY, f"engine.kv_cache_tokens={tokens}"]))
    assert "leave engine.kv_cache_tokens out" in (caught.value.hint or "")


def test_weights_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: 1 << 16)
    with pytest.raises(ConfigError, match="the weights take"):
        resolve(load_config(None, TINY))


def test_rows_are_shorter_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.setup.cache.available_memory", lambda device: 4 << 20)
    run = resolve(load_config(None, TINY))
    longest = run.cache.longest_row
    assert longest < run.rows.max_positions
    assert longest & (longest - 1) == 0
    assert any(note.startswith(f"longest row: {longest} tokens") for note in run.notes)
    assert run.row_tokens is None, "memory decides it, not the user: the result file keeps it"


def test_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used = available_memory(CPU)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert available_memory(CPU) == 0 < used


@pytest.mark.parametrize(
    ("command", "tokens", "limit", "said"),
    [
        pytest.param("config", 10**12, None, "error: engine.kv_cache_tokens: ", marks=pytest.mark.slow),
        pytest.param("generate", 10**12, None, "error: engine.kv_cache_tokens: ", marks=pytest.mark.slow),
        # ulimit -v
        pytest.param("config", 2_000_000, 3 * GIB, "error: engine.kv_cache_tokens: ", marks=pytest.mark.slow),
        ("generate", 1000, GIB // 4, "error: memory ran out: "),  # not even the libraries can be loaded
    ],
)
def test_exit_code_and_hint(command: str, tokens: int, limit: int | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    sets = [part for one in [*TINY, f"engine.kv_cache_tokens={tokens}"] for part in ("--set", one)]
    arguments = [command, *(["d.jsonl"] if command == "generate" else []), *sets]

    def bound() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-m", "specbatch", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, preexec_fn=bound,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.jsonl"]


def test_the_working_memory_of_experts() -> None:
    """A token has the inner features of its own experts, and an output of each; not those of all experts."""
    moe = MoeConfig(128, 8, 768, norm_topk_prob=True, layers=(True,) * 3)
    sizes = (16, 4, 2048, 2)
    dense = tiny_config(3, hidden=2048, intermediate_size=6144)
    experts = tiny_config(3, hidden=2048, intermediate_size=99_999, moe=moe)
    more = estimated_working_bytes(experts, *sizes) - estimated_working_bytes(dense, *sizes)
    assert 2048 * 7 * 2048 * 2 <= more <= (2048 + 3 * 64) * 7 * 2048 * 2
    mixed = dataclasses.replace(moe, layers=(True, False, True))
    assert estimated_working_bytes(dataclasses.replace(experts, moe=mixed), *sizes) > 10 * more
