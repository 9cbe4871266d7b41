"""Traces of tiny engines: what their drafts would have been, recorded along the texts that they write."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from specbatch.draft.shape import DraftShape
from specbatch.oracle.neural import NeuralProposer
from specbatch.tune.host import TracingProposer
from specbatch.tune.session import Record
from specbatch.tune.trace import RowTrace, Trace
from specbatch.types import SamplingParams
from tests.tiny_models import run, tiny_engine


def trace_rows(
    method: str, prompts: Seq[list[int]], params: SamplingParams, topk: int, depth: int, **options: object
) -> Trace:
    """Trace prompts through a tiny engine with the draft of `method`; `topk` 1 records chains alone."""
    wide = DraftShape(depth, topk, depth + 1)
    engine = tiny_engine(method, wide, num_pages=512, **options)  # type: ignore[arg-type]
    proposer = engine._proposer
    assert isinstance(proposer, NeuralProposer)
    rounds: dict[tuple[int, int], list[np.ndarray]] = {}  # by prompt and the index of the root in the tokens

    def record(found: Record | None) -> None:
        assert found is not None
        for stream, root, *columns in zip(*found, strict=True):
            rounds[int(stream), int(root)] = columns if topk > 1 else columns[:1]

    engine._proposer = TracingProposer(proposer, record)
    rows = []
    for i, completion in enumerate(run(engine, list(prompts), params)):
        tokens = np.array(list(prompts[i]) + completion.token_ids, dtype=np.int32)
        own = {root - len(prompts[i]): columns for (stream, root), columns in rounds.items() if stream == i}
        rows.append(RowTrace(len(prompts[i]), tokens, *_columns(own, len(completion.token_ids))))  # type: ignore[arg-type]
    return Trace(tuple(rows), topk, depth, params.temperature > 0)


def _columns(rounds: dict[int, list[np.ndarray]], num_output: int) -> list[np.ndarray]:
    """Of a row's rounds by position, one array for each thing recorded; -1 where there was no round."""
    if not rounds:
        return []
    columns = [np.full((num_output, len(part)), -1, dtype=part.dtype) for part in next(iter(rounds.values()))]
    for position, parts in rounds.items():
        for column, part in zip(columns, parts, strict=True):
            column[position] = part
    return columns
