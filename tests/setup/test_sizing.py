"""How large batches, chunks and caches are, on a card that is made up: its memory, and what a trial takes of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from specbatch.cache.pages import KVCache
from specbatch.draft.ngram import HostNgramDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.executor import RoundExecutor
from specbatch.engine.prefill.models import EAGER, PromptPieces, piecewise_trunks
from specbatch.errors import ModelError
from specbatch.setup import trial
from specbatch.setup.memory import Rows, plan_cache, sizes_to_try
from specbatch.setup.round_parts import RoundParts, Rounds
from specbatch.setup.sizing import CardBudget, Sized, measured
from specbatch.setup.trial import TrialRunner
from specbatch.types import SamplingParams
from tests.engine.graphs import Replays, Shortage
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
TOKEN_BYTES = 2 * 1 * 2 * 8 * 8  # the tiny model keeps these bytes for a token in float64


class Card:
    """One that is made up. `working`: bytes that a trial takes, by batch and chunk; None: more than there is. `pieces`:
    bytes that graphs of pieces of prompts take; negative: more than there is; None: prompts are not in pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, working: Any, pieces: int | None = None) -> None:
        self._monkeypatch, self._free, self._working, self._pieces = monkeypatch, free, working, pieces
        self.notes: list[str] = []
        self.made: list[weakref.ref[Any]] = []  # caches, and runners of graphs

    def size(self, kv_cache_tokens: int | None = None) -> tuple[RoundParts, Sized]:
        card, monkeypatch, free = self, self._monkeypatch, self._free

        class Measured(TrialRunner):
            def run(self, max_batch_size: int, prefill_chunk_tokens: int) -> trial.Trial:
                taken = card._working(max_batch_size, prefill_chunk_tokens)

                def peak(device: torch.device, function: Any) -> int:
                    function()
                    if taken is None:
                        error = torch.OutOfMemoryError("CUDA out of memory.")  # this frame is part of a cycle
                        raise error
                    return cast(int, taken)

                monkeypatch.setattr(trial, "_peak", peak)
                found = super().run(max_batch_size, prefill_chunk_tokens)
                assert found.rule_bytes > max_batch_size * 48_000, "more than all of a card that is made up"
                assert found.rounds.items.items[0].state.rule_bytes == 0
                return replace(found, rule_bytes=0)

        class Parts(RoundParts):
            def make(self, max_batch_size: int, max_length: int, num_slots: int) -> Rounds:
                rounds = super().make(max_batch_size, max_length, num_slots)
                card.made.append(weakref.ref(rounds.caches[0]))
                return rounds

        def new_runner(device: torch.device) -> Any:
            assert card._pieces is not None
            size = card._pieces
            runner: Any = Replays(lambda key: size < 0)
            runner.bytes = runner.pool_bytes = max(0, size) * 2 // 5  # twice, and a quarter more, are reserved
            card.made.append(weakref.ref(runner))
            return runner

        resize = KVCache.resize  # numpy has no views of nothing
        monkeypatch.setattr(KVCache, "resize", lambda cache, num_slots: resize(cache, max(4, num_slots)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        target = tiny_decoder(tiny_config(1), torch.float64, attention=paged_of, num_positions=MAX_LENGTH + 128)
        methods: ByBatch[Any] = ByBatch.always(HostNgramDraft(SHAPE, 1, 3))
        parts = Parts(target, methods, torch.float64, 4, (), fixed_shapes=True)
        rows = Rows(TOKEN_BYTES, 4, SHAPE.num_draft_tokens, MAX_LENGTH, 64, spare_pages=1)
        bound, sizes = plan_cache(free, rows), sizes_to_try(64, 1024, open_batch=True, open_chunk=True)
        pieces = None if self._pieces is None else PromptPieces.of_models(target, None, compiled=False)
        trials = Measured(parts, bound.capacity, "none", False, pieces, new_runner=new_runner)
        return parts, measured(trials, CardBudget(free, bound, rows, kv_cache_tokens, 0.9, sizes), self.notes.append)


def build(monkeypatch: pytest.MonkeyPatch, free: int, working: Any) -> tuple[Engine, list[str]]:
    """See `Card`."""
    card = Card(monkeypatch, free, working)
    _, sized = card.size()
    engine = Engine(
        RoundExecutor(sized.rounds.items, sized.max_batch_size, CPU, "none"),
        sized.engine_sizes(4),
        prefix_cache=True,
        chunk_cost=sized.chunk_cost,
    )
    return engine, card.notes


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
    expected = run(tiny_oracle("ngram", SHAPE, num_pages=256, num_layers=1), prompts, params)
    assert [c.token_ids for c in run(engine, prompts, params)] == [c.token_ids for c in expected]
    assert edited
    assert all(edited)


@pytest.mark.wide
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


@pytest.mark.wide
def test_what_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="does not hold one round"):
        build(monkeypatch, 1 << 20, lambda batch, chunk: None)
    with pytest.raises(ModelError, match="leaves a KV cache of 0 tokens"):
        build(monkeypatch, 450 * TOKEN_BYTES, lambda batch, chunk: 450 * TOKEN_BYTES)


@pytest.mark.parametrize(
    ("free", "pieces", "kv_cache_tokens", "in_pieces"),
    [
        (700, 10, None, True),
        (700, 50, None, False),  # rows would have fewer tokens than 512
        (480, 50, None, True),  # 256 either way
        (700, 100, 500, True),
        (700, 150, 500, False),
        (700, None, None, False),
    ],
)
def test_pieces_of_prompts_are_given_up_first(
    free: int, pieces: int | None, kv_cache_tokens: int | None, in_pieces: bool
) -> None:
    """No row, batch or chunk is smaller because of them."""
    rows = Rows(TOKEN_BYTES, 4, 4, MAX_LENGTH, 16)
    available = free * TOKEN_BYTES
    budget = CardBudget(available, plan_cache(available, rows), rows, kv_cache_tokens, 0.9, [(16, 512)])
    without = trial.Trial(16, 512, cast(Any, None), cast(Any, None), eager_bytes=0, graph_bytes=0, rule_bytes=0)
    given = replace(without, piece_bytes=None if pieces is None else pieces * TOKEN_BYTES)
    plan, taken = budget.best(given, 100 * TOKEN_BYTES)
    assert (taken.piece_bytes is not None) == in_pieces
    assert plan.longest_row == budget.cache_beside(without, 100 * TOKEN_BYTES).longest_row


def test_pieces_that_do_not_fit_while_a_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 1 << 30, lambda batch, chunk: None if batch > 16 else 1000, pieces=-1)
    _, sized = card.size()
    assert not sized.in_pieces
    assert sized.max_batch_size == 16
    assert any(line.startswith("prefill.graphs: no graphs of pieces") for line in card.notes)


@pytest.mark.wide
def test_a_trial_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that breaks off, whose error keeps its frames in a cycle. The next one has all of the memory."""
    alive: list[int] = []

    def working(batch: int, chunk: int) -> int | None:
        alive.append(sum(ref() is not None for ref in card.made))
        return None if batch > 16 else 10 * TOKEN_BYTES

    card = Card(monkeypatch, 700 * TOKEN_BYTES, working, pieces=50 * TOKEN_BYTES)
    gc.collect()
    gc.disable()  # what is given back does not depend on when it runs
    try:
        _, sized = card.size()
    finally:
        gc.enable()
    assert alive == [0, 0, 0]
    assert [ref() for ref in card.made if ref() is not None] == [sized.rounds.caches[0]]
    assert len(card.made) == 4, "three trials, of which the last one came to the pieces"
    assert sized.in_pieces
    assert card.notes


def test_no_room_for_what_pieces_read() -> None:
    """Neither for their buffers nor for a graph of any size: prompts are computed without."""
    target = tiny_decoder(tiny_config(3), torch.float64, attention=paged_of)
    pieces = PromptPieces.of_models(target, None, compiled=False)
    cache = target.new_cache(64, torch.float64)
    runner = Replays(lambda key: True)
    assert piecewise_trunks(pieces, cache, None, [16, 32], runner) is EAGER
    assert len(runner) == 0
    with Shortage({1}):
        assert piecewise_trunks(pieces, cache, None, [16, 32], Replays(lambda key: False)) is EAGER


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
