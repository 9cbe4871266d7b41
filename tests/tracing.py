"""Traces of tiny engines, which record the drafts for each position of the texts that they write, and replays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from specbatch.draft import DraftParts
from specbatch.draft.shape import DraftShape
from specbatch.kernels import ops_for
from specbatch.tune.replay import Replay, Replayer
from specbatch.tune.session import Session
from specbatch.tune.trace import Trace
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import tiny_engine


def replayed(replayer: Replayer, shape: DraftShape) -> Replay:
    (found,) = replayer.replay_all([shape])
    return found


def trace_rows(
    method: str, prompts: Seq[list[int]], params: SamplingParams, topk: int, depth: int, **options: Any
) -> Trace:
    """Trace prompts through a tiny engine with the draft of `method`; `topk` 1: trees are chains."""
    engine = tiny_engine(method, DraftShape(depth, topk, depth + 1), num_pages=512, prefix_cache=False, **options)
    net = engine.executor.rounds.items[0].method.net
    assert net is not None
    parts = DraftParts(engine.device, ops_for(engine.device, net.cache.all_layers.dtype), net, (1, 3))
    requests = [Request(i, prompt, params, RngKey(params.seed or 0, i, 0)) for i, prompt in enumerate(prompts)]
    return Session(engine, method, parts, "none").trace(requests, topk, depth)
