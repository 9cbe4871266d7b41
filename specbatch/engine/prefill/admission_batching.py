"""The number of request indices that must be free before short prompts are computed.

A chunk costs the same for one short prompt as for many: the host's launches, or as a graph (`graphs.py`) the time
of a round and of the packing. If requests wait until g indices are free, there are fewer chunks, but rounds run with
fewer requests: of B indices, g / 2 are free on average. Where a request runs for R rounds and a chunk takes as long as
C rounds, a request takes R / (B - g / 2) + C / g rounds of time. That is least at about g = B sqrt(2 C / R).

All of this is counted in rounds and follows from the model's size. Nothing is timed, so two runs admit the same
requests at the same rounds, and write the same texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specbatch.models.pass_weights import PassWeights

# Measured on an H200: launching the kernels of a layer of a prompt chunk (SmolLM2-135M: 9.6 ms for 30 layers), the
# shortest time of a captured layer, bytes of weights that are read and bfloat16 operations in a millisecond.
_LAUNCH_MS, _LAYER_MS = 0.32, 0.02
_BYTES_PER_MS, _FLOPS_PER_MS = 4.2e9, 6e11
_MANY_REQUESTS = 1.5  # a round of many requests takes that many times as long as one of few
_PACK_MS = 0.5  # time on the host for packing a chunk that is a graph
_MEAN_OVER = 256  # number of ended requests that the mean covers


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """The cost of a chunk of short prompts, in addition to computing them."""

    rounds: float  # rounds that take as long
    tokens: int  # prompt tokens whose computing takes as long: with more of them the GPU does not idle
    graph_tokens: int = 0  # largest padded size of a chunk that is a graph; 0: chunks are not graphs

    @staticmethod
    def of_model(num_layers: int, weights: PassWeights, prefill_chunk_tokens: int, graphs: bool) -> ChunkCost:
        """Compute the cost for a model. `weights`: those of its layers; a round of many requests reads all experts.
        `graphs`: chunks may be graphs. These are the chunks that a GPU computes in less time than the host takes to
        launch them. `tokens` is at least a quarter of the largest chunk."""
        launch_ms = num_layers * _LAUNCH_MS
        round_ms = _MANY_REQUESTS * (num_layers * _LAYER_MS + 2 * weights.total / _BYTES_PER_MS)
        flops = 2 * weights.active / _FLOPS_PER_MS
        graph_tokens = min(int(launch_ms / flops), prefill_chunk_tokens) if graphs else 0
        enough = prefill_chunk_tokens // 4
        chunk_ms = round_ms + _PACK_MS if graph_tokens > enough else launch_ms
        tokens = min(prefill_chunk_tokens, max(enough, round(chunk_ms / flops)))
        return ChunkCost(chunk_ms / round_ms, tokens, graph_tokens)

    def min_free_requests(self, max_batch_size: int, mean_rounds: float) -> int:
        """See `Scheduler`. Requests run for `mean_rounds`. At most a quarter of all."""
        best = max_batch_size * math.sqrt(2 * self.rounds / max(1.0, mean_rounds))
        return max(1, min(round(best), max_batch_size // 4))


class RoundsOfRows:
    """The mean number of rounds of the requests that ended last."""

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0

    def add(self, rounds: int) -> None:
        self._count = min(self._count + 1, _MEAN_OVER)
        self.mean += (rounds - self.mean) / self._count
