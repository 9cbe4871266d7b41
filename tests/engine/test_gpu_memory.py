"""A GPU whose memory is short: at the start, at a capture, in a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.draft.shape import DraftShape
from specbatch.engine.executor import GraphMode
from specbatch.setup.build import build_engine
from specbatch.setup.memory import GIB
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.gpu_memory import release
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_oracle

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TREES = ["speculation.method=eagle3", "speculation.draft=random:eagle3", "speculation.num_steps=5"]
TREES += ["speculation.topk=8", "speculation.num_draft_tokens=60"]


@pytest.fixture
def clean() -> Iterator[None]:
    release()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    release()


def shrink_card(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Leave this process as many bytes, whatever other processes take meanwhile. What the driver keeps for graphs is
    not counted: `scripts/check/check_cards.py` counts it, on a card that it has for itself."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device=None: (max(0, num_bytes - torch.cuda.memory_reserved(device)), num_bytes),
    )


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("card_gib", [pytest.param(gib, marks=pytest.mark.gpu_memory(gib + 1)) for gib in (23.2, 38.6)])
@pytest.mark.parametrize("sets", [["speculation.method=none"], TREES], ids=["plain", "60 nodes"])
def test_a_default_start_on_a_smaller_card(card_gib: float, sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_card(monkeypatch, int(card_gib * GIB))
    options = ["model.target=random:llama-3-8b", "engine.device=cuda", *sets]
    engine: Any = build_engine(resolve(load_config(None, options)))
    assert engine.limits.max_prompt_tokens + 1 >= 4096
    num_rows = 300
    for i in range(num_rows):
        params = SamplingParams(
            max_tokens=20, temperature=0.8 * (i >= 200), ignore_eos=True, logprobs=1 if i % 50 == 7 else None
        )
        engine.submit(Request(i, [1 + (i * 31 + j) % 1000 for j in range(50)], params, RngKey(0, i, 0)))
    finished = 0
    while finished < num_rows:
        finished += len(engine.step())
    assert engine.stats.memory_shortages == 0
    used = engine.executor.runner.bytes
    assert used <= engine.start_bytes["graphs_reserved"], "graphs that were captured in mid-run counted in"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_memory_that_runs_out_in_mid_run(graphs: GraphMode, temperature: float) -> None:
    """What two rows need is there, and what sixteen need is not: batches shrink, captures break off, graphs are given
    back, texts stay."""
    shape, vocab = DraftShape(5, 4, 8), 60001
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 16, "vocab": vocab, "prefill_chunk_tokens": 16}
    params = SamplingParams(max_tokens=12, temperature=temperature, logprobs=1 if graphs == "none" else None)
    prompts = random_prompts(17, vocab=vocab, longest=14)
    expected = run(tiny_oracle("draft_model", shape, **settings), prompts, params)
    engine = tiny_device_engine("draft_model", shape, **settings, device=CUDA, graphs=graphs)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(engine, prompts[:2], params)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    needed = torch.cuda.max_memory_reserved() if graphs == "none" else torch.cuda.memory_reserved() + (24 << 20)
    torch.cuda.set_per_process_memory_fraction(min(1.0, needed / total))
    done = run(engine, prompts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert [c.speculation for c in done] == [c.speculation for c in expected]
    executor = engine.executor
    assert engine.stats.memory_shortages > 0 or executor._uncaptured
