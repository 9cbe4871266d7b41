"""How large batches, chunks and caches are, on a card that is made up: its memory, and what a trial takes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from specbatch.cache.pages import KVCache, PagePool
from specbatch.draft.ngram import HostNgramDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine import trial
from specbatch.engine.engine import Engine
from specbatch.engine.executor import RoundExecutor
from specbatch.engine.memory import Rows, plan_cache, sizes_to_try
from specbatch.engine.round_parts import RoundParts
from specbatch.engine.sizing import CardBudget, measured
from specbatch.engine.trial import Trials
from specbatch.errors import ModelError
from specbatch.types import SamplingParams
from tests.tiny_models import (
    CPU,
    paged_of,
    random_prompts,
    run,
    tiny_config,
    tiny_decoder,
    tiny_engine,
    tiny_oracle,
)

SHAPE = DraftShape(3, 1, 4)
MAX_LENGTH = 512  # of the model
TOKEN_BYTES = 2 * 3 * 2 * 8 * 8  # of the tiny model in float64


def build(monkeypatch: pytest.MonkeyPatch, free: int, working: Any, rule_bytes: int = 0) -> tuple[Engine, list[str]]:
    """`working`: bytes that a trial takes, by batch and chunk; None: more than there is. `rule_bytes`: of tables."""

    class Measured(Trials):
        def run(self, max_batch_size: int, prefill_chunk_tokens: int) -> trial.Trial:
            taken = working(max_batch_size, prefill_chunk_tokens)
            if taken is None:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            monkeypatch.setattr(trial, "_peak", lambda device, function: (function(), taken)[1])
            found = super().run(max_batch_size, prefill_chunk_tokens)
            assert found.rule_bytes > max_batch_size * 48_000, "more than all of a card that is made up"
            assert found.rounds.items.items[0].state.rule_bytes == 0
            return replace(found, rule_bytes=0)

    resize = KVCache.resize  # numpy has no views of nothing
    monkeypatch.setattr(KVCache, "resize", lambda cache, num_slots: resize(cache, max(4, num_slots)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    target = tiny_decoder(tiny_config(3), torch.float64, attention=paged_of, num_positions=MAX_LENGTH + 128)
    methods: ByBatch[Any] = ByBatch.always(HostNgramDraft(SHAPE, 1, 3))
    parts = RoundParts(target, methods, torch.float64, 4, (), fixed_shapes=True)
    rows = Rows(TOKEN_BYTES, 4, SHAPE.num_draft_tokens, MAX_LENGTH, 64, spare_pages=1)
    bound, sizes = plan_cache(free, rows), sizes_to_try(64, 1024, open_batch=True, open_chunk=True)
    notes: list[str] = []
    trials = Measured(parts, bound.capacity, "none", whole_prompts=False)
    sized = measured(trials, CardBudget(free, bound, rows, None, 0.9, sizes), notes.append)
    engine = Engine(
        RoundExecutor(sized.rounds.items, sized.max_batch_size, CPU, "none"),
        PagePool(sized.plan.num_pages, 4),
        CPU,
        vocab_size=target.config.vocab_size,
        max_length=sized.plan.capacity,
        longest_row=sized.plan.longest_row,
        max_batch_size=sized.max_batch_size,
        prefill_chunk_tokens=sized.prefill_chunk_tokens,
        prefix_cache=True,
        eos_token_ids=(),
        chunk_cost=sized.chunk_cost,
    )
    return engine, notes


def test_a_roomy_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial runs rounds that change logits, too: a penalty in mid-job makes no batch smaller."""
    edited, run_round = [], trial.trial_round

    def trial_round(round_: Any, *given: Any) -> None:
        edited.append(round_.state.rules is not None)
        run_round(round_, *given)

    monkeypatch.setattr(trial, "trial_round", trial_round)
    engine, said = build(monkeypatch, 1 << 30, lambda batch, chunk: 1000)
    assert engine.limits.max_prompt_tokens + 1 == MAX_LENGTH
    assert not any("longest row" in line or "max_batch_size" in line for line in said)
    prompts, params = random_prompts(5), SamplingParams(max_tokens=12)
    expected = run(tiny_oracle("ngram", SHAPE, num_pages=256, num_layers=3), prompts, params)
    assert [c.token_ids for c in run(engine, prompts, params)] == [c.token_ids for c in expected]
    assert edited
    assert all(edited)


def test_a_card_that_holds_short_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trial takes is not known before: the row becomes shorter, not the start an error."""
    free = 450 * TOKEN_BYTES
    engine, said = build(monkeypatch, free, lambda batch, chunk: 100 * TOKEN_BYTES)
    assert engine.limits.max_prompt_tokens + 1 == 256
    assert engine.limit_length(280) == 280, "a resumed job may have had a little more"
    assert any(line.startswith("longest row: 256 tokens") for line in said)


def test_batches_and_chunks_that_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 700 * TOKEN_BYTES
    engine, said = build(monkeypatch, free, lambda batch, chunk: None if batch > 16 else 10 * TOKEN_BYTES)
    assert engine._max_batch_size == 16
    assert any(line.startswith("engine.max_batch_size: 16, engine.prefill_chunk_tokens: 512") for line in said)


def test_the_cache_leaves_room_for_rules() -> None:
    free, rows = 700 * TOKEN_BYTES, Rows(TOKEN_BYTES, 4, 4, MAX_LENGTH, 16)
    budget = CardBudget(free, plan_cache(free, rows), rows, None, 0.9, [(16, 512)])
    plain = trial.Trial(16, 512, cast(Any, None), cast(Any, None), eager_bytes=0, graph_bytes=0, rule_bytes=0)
    with_rules = replace(plain, rule_bytes=200 * TOKEN_BYTES)
    pages = [budget.cache_beside(one, 100 * TOKEN_BYTES).num_pages for one in (plain, with_rules)]
    assert pages[0] - pages[1] == 200 // 4


def test_what_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="does not hold one round"):
        build(monkeypatch, 1 << 20, lambda batch, chunk: None)
    with pytest.raises(ModelError, match="leaves a KV cache of 0 tokens"):
        build(monkeypatch, 450 * TOKEN_BYTES, lambda batch, chunk: 450 * TOKEN_BYTES)


def test_a_resumed_job_whose_rows_the_cache_does_not_hold() -> None:
    """More than the first run allowed is no matter: that is what this one allows, too."""
    engine = tiny_engine("none", num_pages=16)  # of 4 tokens
    here = engine.limit_length(None)
    assert engine.limit_length(20) == 20
    assert engine.limits.max_prompt_tokens == 19
    [done] = run(engine, [list(range(1, 11))], SamplingParams(max_tokens=30))
    assert len(done.token_ids) == 10, "prompt and output together"
    with pytest.raises(ModelError, match=f"allowed rows of {here + 1} tokens, and the KV cache of this one") as caught:
        engine.limit_length(here + 1)
    assert "--overwrite" in (caught.value.hint or "")
    assert engine.limits.max_prompt_tokens == 19, "as it was"
    assert engine.limit_length(None) == here
