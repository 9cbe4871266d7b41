"""Builds the oracle of a resolved run, with weights of its own."""

from __future__ import annotations

from specbatch.cache.pages import PagePool
from specbatch.setup.build import read_models
from specbatch.setup.resolve import ResolvedRun
from tests.oracle.engine import OracleEngine
from tests.oracle.factory import proposer_of


def build_oracle(run: ResolvedRun) -> OracleEngine:
    """`run` is on a CPU."""
    parts, rounds = read_models(run)
    target, num_slots = rounds.target, run.cache.num_pages * run.engine.page_size
    if parts.net is not None:
        parts.net.cache.resize(num_slots)
    speculation = run.config.speculation
    return OracleEngine(
        target,
        proposer_of(
            speculation.method, run.speculation.schedule, parts, target.config.vocab_size, run.engine.page_size
        ),
        target.new_cache(num_slots, run.kv_dtype),
        PagePool(run.cache.num_pages, run.engine.page_size),
        max_length=run.cache.capacity,
        longest_row=run.cache.longest_row,
        max_batch_size=run.engine.max_batch_size,
        prefill_chunk_tokens=run.engine.prefill_chunk_tokens,
        prefix_cache=run.config.engine.prefix_cache,
        eos_token_ids=rounds.eos_token_ids,
    )
