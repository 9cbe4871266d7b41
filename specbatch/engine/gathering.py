"""How many free places short prompts wait for, so that launching their chunk is worth it.

A chunk costs the same for one short prompt as for many: the host's launches, or as a graph (`prompt_graphs`) a round's
time and the packing. Rows that wait cost the rounds they are missing from. With B places of which rows leave after R
rounds on average, gathering g of them costs g / (2 B) of the rounds' worth and saves launches: the time for a row,
R / (B - g / 2) + C / g rounds where a chunk costs C, is least at about g = B sqrt(2 C / R).

Everything is counted in rounds and worked out from the model's size, not timed: two runs admit the same rows at the
same rounds, and write the same texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of a prompt chunk and of a round, seen on an H200: launching a layer's kernels (SmolLM2-135M: 9.6 ms for 30 layers),
# the least that a captured layer takes, bytes of weights and bfloat16 operations in a millisecond; rounds of many rows
# take half as long again. Packing a chunk that is a graph: on the host.
_LAUNCH_MS, _LAYER_MS = 0.32, 0.02
_BYTES_PER_MS, _FLOPS_PER_MS = 4.2e9, 6e11
_MANY_ROWS = 1.5
_PACK_MS = 0.5
_MEAN_OVER = 256  # rows that have ended


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Of a chunk of short prompts, in addition to computing them."""

    rounds: float  # that take as long
    tokens: int  # of prompts, whose computing takes as long: with more the GPU does not idle
    graph_tokens: int = 0  # up to which chunks are padded, to be graphs

    @staticmethod
    def of_model(num_layers: int, num_parameters: int, prefill_chunk_tokens: int, graphs: bool) -> ChunkCost:
        """`num_parameters`: of the linear layers; `graphs`: chunks may be graphs, which those are that compute no
        longer than launching them would take. A quarter of a chunk is enough to wait for in any case."""
        launch_ms = num_layers * _LAUNCH_MS
        round_ms = _MANY_ROWS * (num_layers * _LAYER_MS + 2 * num_parameters / _BYTES_PER_MS)
        flops = 2 * num_parameters / _FLOPS_PER_MS
        graph_tokens = min(int(launch_ms / flops), prefill_chunk_tokens) if graphs else 0
        enough = prefill_chunk_tokens // 4
        chunk_ms = round_ms + _PACK_MS if graph_tokens > enough else launch_ms
        tokens = min(prefill_chunk_tokens, max(enough, round(chunk_ms / flops)))
        return ChunkCost(chunk_ms / round_ms, tokens, graph_tokens)

    def places(self, max_batch_size: int, mean_rounds: float) -> int:
        """To gather, where rows run for `mean_rounds`; a quarter of all at most."""
        best = max_batch_size * math.sqrt(2 * self.rounds / max(1.0, mean_rounds))
        return max(1, min(round(best), max_batch_size // 4))


class RoundsOfRows:
    """The mean number of rounds of the rows that ended last."""

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0

    def add(self, rounds: int) -> None:
        self._count = min(self._count + 1, _MEAN_OVER)
        self.mean += (rounds - self.mean) / self._count
