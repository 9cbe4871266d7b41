"""Decides how large batches, prompt chunks and caches are, and makes the rounds for them.

On a CPU the cache was planned before the weights were read (`resolve.py`). On a GPU a trial measures what rounds and
prompts take, and the cache gets what is left.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from specbatch.engine.engine import EngineSizes
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.errors import ModelError
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.parallel.group import Group
from specbatch.setup.cache import row_notes
from specbatch.setup.memory import (
    ENOUGH_ROW,
    GIB,
    CachePlan,
    Rows,
    bytes_for_cache,
    first_that_fits,
    given_cache,
    plan_cache,
)
from specbatch.setup.round_parts import RoundParts, Rounds
from specbatch.setup.trial import Trial, TrialRunner


@dataclass(frozen=True, slots=True)
class Sized:
    """Rounds with their caches, for these sizes."""

    rounds: Rounds
    plan: CachePlan
    max_batch_size: int
    prefill_chunk_tokens: int
    chunk_cost: ChunkCost | None = None  # None: short prompts are not held
    in_pieces: bool = False  # prompts have room for graphs of their pieces
    graph_bytes: int = 0  # reserved
    bytes: dict[str, int] | None = None  # bytes of the device that were measured and reserved

    def engine_sizes(self, page_size: int) -> EngineSizes:
        plan = self.plan
        sizes = self.max_batch_size, self.prefill_chunk_tokens
        return EngineSizes(plan.num_pages, page_size, plan.capacity, *sizes, plan.longest_row)


def planned(parts: RoundParts, plan: CachePlan, max_batch_size: int, prefill_chunk_tokens: int) -> Sized:
    """Return the sizes of a CPU's engine, as they were planned."""
    num_slots = (plan.num_pages + 1) * parts.page_size
    rounds = parts.make(max_batch_size, plan.capacity, num_slots)
    return Sized(rounds, plan, max_batch_size, prefill_chunk_tokens)


@dataclass(frozen=True, slots=True)
class CardBudget:
    """The limits by which a GPU's memory is divided. `available`: the bytes that were free before the weights were
    read. `bound`: the plan whose capacity no row exceeds. `kv_cache_tokens` None: the cache gets what `memory_fraction`
    of the available bytes leaves after everything else. `sizes`: batch sizes and prompt chunks; the first that leaves
    room for rows is taken."""

    available: int
    bound: CachePlan
    rows: Rows
    kv_cache_tokens: int | None
    memory_fraction: float
    sizes: Seq[tuple[int, int]]
    group: Group | None = None  # ranks, whose caches have the same pages

    def cache_beside(self, trial: Trial, in_use: int) -> CachePlan:
        """`in_use`: bytes that the run uses after the trial."""
        if self.kv_cache_tokens is not None:
            return given_cache(self.kv_cache_tokens, self.rows)
        num_bytes = bytes_for_cache(self.available, self.memory_fraction, in_use, trial.reserved)
        if self.group is not None:
            num_bytes = self.group.least(num_bytes)
        return plan_cache(num_bytes, replace(self.rows, max_batch_size=trial.max_batch_size), most=self.bound.capacity)

    def best(self, trial: Trial, in_use: int) -> tuple[CachePlan, Trial]:
        """The cache, and the trial as it is, or without pieces of prompts: these save a little time, so they are given
        up where rows would be shorter with them, or where they do not fit next to a cache that the user has set."""
        plan, without = self.cache_beside(trial, in_use), replace(trial, piece_bytes=None)
        if trial.piece_bytes is None:
            return plan, trial
        larger = self.cache_beside(without, in_use)
        given = (self.kv_cache_tokens or 0) * self.rows.token_bytes
        if larger.longest_row > plan.longest_row or in_use + given + trial.reserved > self.available:
            return larger, without
        return plan, trial

    @property
    def enough(self) -> int:
        """Tokens of a row, for which batches and chunks need not be smaller."""
        return min(ENOUGH_ROW, self.bound.longest_row) if self.kv_cache_tokens is None else 0


@dataclass(frozen=True, slots=True)
class _Measured:
    """A trial, and the bytes of the device that are in use after it and were not before the weights were read; torch
    has allocated `by_torch` of them here. Other programs may have taken some of the rest."""

    trial: Trial
    in_use: int
    by_torch: int


def measured(trials: TrialRunner, budget: CardBudget, note: Callable[[str], None]) -> Sized:
    """Return the sizes of a GPU's engine, by trial runs. `note` gets one line for each decision. Raise ModelError, with
    numbers, if the memory does not suffice."""

    def attempt(batch: int, chunk: int) -> tuple[CachePlan, _Measured] | None:
        try:
            trial = trials.run(batch, chunk)
        except Exception as error:
            # Other ranks would wait for what this one has left out.
            if budget.group is not None or not is_out_of_memory(error):
                raise
            trial = None
        gc.collect()  # rounds of what did not fit, with caches and graphs, may be in cycles
        torch.cuda.empty_cache()
        if trial is None:
            return None
        in_use = max(0, budget.available - torch.cuda.mem_get_info(trials.parts.device)[0])
        plan, trial = budget.best(trial, in_use)
        return plan, _Measured(trial, in_use, torch.cuda.memory_reserved(trials.parts.device))

    found = first_that_fits(budget.sizes, budget.enough, attempt)
    if found is None or found[0].longest_row < 2:
        raise _too_small(budget, found)
    (plan, taken), rows = found, budget.rows
    trial, num_tokens = taken.trial, plan.num_pages * rows.page_size
    note(
        f"engine.kv_cache_tokens: {num_tokens} ({plan.gib(rows):.1f} GiB; {budget.available / GIB:.1f} GiB were free, "
        f"{taken.in_use / GIB:.1f} GiB are in use, {trial.reserved / GIB:.1f} GiB reserved for rounds and prompts, "
        f"memory_fraction {budget.memory_fraction})"
    )
    batch, chunk = trial.max_batch_size, trial.prefill_chunk_tokens
    if (batch, chunk) != budget.sizes[0]:
        note(
            f"engine.max_batch_size: {batch}, engine.prefill_chunk_tokens: {chunk} (with the usual "
            f"{budget.sizes[0][0]} and {budget.sizes[0][1]} no row of {budget.enough} tokens fits into memory)"
        )
    for line in row_notes(plan, rows):
        note(line)
    trial.rounds.resize_caches(num_tokens + rows.page_size)
    taken_bytes = {
        "available": budget.available,
        "weights": taken.in_use,
        "by_torch": taken.by_torch,
        "cache": num_tokens * rows.token_bytes,
        "eager": trial.eager_bytes,
        "graphs_reserved": trial.graph_bytes,
        "rules_reserved": trial.rule_bytes,
        "pieces_reserved": trial.piece_bytes or 0,
    }
    in_pieces = trial.piece_bytes is not None
    if trials.pieces is not None and not in_pieces:
        note("prefill.graphs: no graphs of pieces, for lack of memory; these prompts are computed kernel by kernel")
    return Sized(trial.rounds, plan, batch, chunk, trial.chunk_cost, in_pieces, trial.graph_bytes, taken_bytes)


def _too_small(budget: CardBudget, found: tuple[CachePlan, _Measured] | None) -> ModelError:
    batch, chunk = budget.sizes[-1]
    where = f"with engine.max_batch_size {batch} and engine.prefill_chunk_tokens {chunk}"
    hint = "lower these, raise engine.memory_fraction, free memory, or use a smaller model"
    if found is None:
        return ModelError(f"the GPU's memory does not hold one round and one prompt chunk {where}", hint=hint)
    plan, taken = found
    return ModelError(
        f"the GPU's memory leaves a KV cache of {plan.num_pages * budget.rows.page_size} tokens {where}: "
        f"{budget.available / GIB:.1f} GiB were free, {taken.in_use / GIB:.1f} GiB are in use (torch has allocated "
        f"{taken.by_torch / GIB:.1f} here), and rounds and prompts need {taken.trial.reserved / GIB:.1f} GiB",
        hint=hint,
    )
