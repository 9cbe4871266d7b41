"""Tracing on the host's engine: drafts wide and deep in every round, records the candidates, and lets the round commit
the target's own token alone, so that every position of a text is the root of a round once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.pages import KVCache
from specbatch.speculation import neural
from specbatch.speculation.neural import DraftNet, NeuralProposer
from specbatch.speculation.proposer import TargetOutput
from specbatch.speculation.sequence import Sequence
from specbatch.speculation.tree import DraftShape, DraftTree, select_nodes
from specbatch.tuning.trace import RowTrace, Trace
from specbatch.types import SamplingParams
from tests.models import run, tiny_engine


class TracingProposer:
    """Proposes roots alone. `drafts[request id][p]` is what was drafted behind continuation token p: the chain (S,) and
    the candidates' tokens, scores and parents, (C,) each."""

    def __init__(self, net: DraftNet, topk: int, depth: int, vocab: int, page_size: int, device: torch.device) -> None:
        wide = DraftShape(depth, topk, 2)
        wide = DraftShape(depth, topk, wide.num_candidates + 1) if topk > 1 else DraftShape(depth, 1, depth + 1)
        self._wide = NeuralProposer(net, wide, vocab, page_size, device)
        self._chain = NeuralProposer(net, DraftShape(depth, 1, depth + 1), vocab, page_size, device)
        self._has_trees = topk > 1
        self.drafts: dict[int, dict[int, list[np.ndarray]]] = {}

    @property
    def num_lookahead(self) -> int:
        return max(self._wide.num_lookahead, self._chain.num_lookahead)

    @property
    def prefix_lookahead(self) -> int:
        return self._wide.prefix_lookahead

    @property
    def capture(self) -> tuple[int, ...]:
        return self._wide.capture

    @property
    def cache(self) -> KVCache | None:
        return self._wide.cache

    def start(self, seq: Sequence) -> None:
        self._wide.start(seq)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        self._wide.extend(sequences, output)

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        recorded: list[list[Tensor]] = [[] for _ in sequences]
        for found, chain in zip(recorded, self._chain.propose(sequences).tokens_BN, strict=True):
            found.append(chain[1:])

        def recording(
            root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int
        ) -> DraftTree:
            for b, found in enumerate(recorded):
                found += [tokens_BC[b], scores_BC[b], parents_BC[b]]
            return select_nodes(root_B, tokens_BC, scores_BC, parents_BC, num_draft_tokens)

        if self._has_trees:
            with mock.patch.object(neural, "select_nodes", recording):
                self._wide.propose(sequences)
        for seq, found in zip(sequences, recorded, strict=True):
            position = len(seq.tokens) - 1 - seq.num_prompt
            self.drafts.setdefault(seq.request.request_id, {})[position] = [part.cpu().numpy() for part in found]
        return DraftTree.chain([[seq.tokens[-1]] for seq in sequences])


def trace_rows(
    method: str, prompts: Seq[list[int]], params: SamplingParams, topk: int, depth: int, **options: object
) -> Trace:
    """Trace prompts through a tiny engine with the draft of `method`."""
    shape = DraftShape(depth, topk, 2 if topk > 1 else depth + 1)
    engine = tiny_engine(method, shape, num_pages=512, **options)  # type: ignore[arg-type]
    live = engine._proposer
    assert isinstance(live, NeuralProposer)
    tracer = TracingProposer(live._net, topk, depth, live._vocab_size, live._page_size, live._device)
    engine._proposer = tracer
    completions = run(engine, list(prompts), params)
    rows = [
        _row(prompt, completion.token_ids, tracer.drafts.get(completion.request_id, {}))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return Trace(tuple(rows), topk, depth, params.temperature > 0)


def _row(prompt: list[int], output: list[int], drafts: dict[int, list[np.ndarray]]) -> RowTrace:
    tokens = np.array(prompt + output, dtype=np.int32)
    columns: list[np.ndarray | None] = [None] * 4
    for i, dtype in enumerate((np.int32, np.int32, np.float32, np.int16)):
        sample = next(iter(drafts.values()), [])
        if i < len(sample):
            columns[i] = np.full((len(output), len(sample[i])), -1, dtype=dtype)
            for position, found in drafts.items():
                columns[i][position] = found[i]  # type: ignore[index]
    return RowTrace(len(prompt), tokens, *columns)  # type: ignore[arg-type]
