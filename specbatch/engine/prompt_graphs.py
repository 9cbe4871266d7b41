"""Launches prompt chunks: short ones, of whole prompts, padded to one of few shapes and replayed as a graph, the others
kernel by kernel.

Launching a chunk takes the host 0.3 ms a layer, whatever is in it, and meanwhile no round runs. Up to as many tokens as
a GPU computes in that time (`ChunkCost.graph_tokens`) padding costs nothing that launching would not. A shape's graph
is captured when the first chunk of it comes up: a job has few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbatch.engine.executor import GraphMode
from specbatch.engine.prompts import ChunkShape, HostArrays, PackedPrompts, PromptPacker
from specbatch.engine.round import Logprobs, Round
from specbatch.engine.transfers import Transfers
from specbatch.graphs.runner import GraphRunner
from specbatch.kernels.out_of_memory import is_out_of_memory

# Up to three quarters of the rows may be padding: few shapes count for more. Of a row alone only the last layer and the
# head are computed.
_ROWS_STEP = 4
_FEWEST_TOKENS = 64
_SHORT_QUERIES = 256  # attention has a program for every 64 (query, head) pairs of each row: most of them idle


class PromptGraphs:
    """`most_tokens` of a padded chunk; 0: none are. On a CPU, for tests, chunks are padded and nothing is captured."""

    def __init__(
        self, packer: PromptPacker, transfers: Transfers, device: torch.device, max_batch_size: int, most_tokens: int
    ) -> None:
        self._packer = packer
        self._transfers = transfers
        self._max_batch_size = max_batch_size
        self._most_tokens = most_tokens
        self._uncaptured: set[tuple[Any, ...]] = set()  # for want of memory
        self._buffers: dict[ChunkShape, tuple[Tensor, Tensor]] = {}
        self._runner = GraphRunner(device) if device.type == "cuda" else None

    def run(
        self, round_: Round, packed: PackedPrompts, sampled: bool, logprobs: bool, mode: GraphMode
    ) -> tuple[Tensor, Logprobs | None]:
        """As `Round.prefill`, but behind the tokens of the prompts that end here there may be others. `mode`: of the
        rounds; prompts are graphs with whole rounds only. The output is valid until the next chunk."""
        may_pad = not logprobs and (mode == "round" or self._runner is None)
        shape = self._shape(packed) if may_pad else None
        key = (shape, sampled, round_.method.net is not None)
        if shape is not None and key not in self._uncaptured:
            try:
                return self._padded(round_, packed, shape, key), None
            except Exception as error:
                # As it is, the chunk takes less.
                if not is_out_of_memory(error) or self._runner is None or key in self._runner:
                    raise
                self._uncaptured.add(key)
        arrays = packed.arrays()
        longs, ints = self._transfers.upload(arrays.longs), self._transfers.upload(arrays.ints)
        chunk = self._packer.chunk(arrays, longs, ints, round_.state.page_table_SP, packed.max_queries)
        return round_.prefill(chunk, sampled, logprobs)

    def release_graphs(self) -> None:
        """Give the memory of all graphs back. Nothing may be in flight."""
        if self._runner is not None:
            self._runner = GraphRunner(self._runner.device)
            self._buffers.clear()

    def _padded(self, round_: Round, packed: PackedPrompts, shape: ChunkShape, key: tuple[Any, ...]) -> Tensor:
        table, upload, sampled = round_.state.page_table_SP, self._transfers.upload, key[1]
        arrays = packed.padded(shape, round_.state.padding)
        if shape not in self._buffers:
            self._buffers[shape] = upload(arrays.longs), upload(arrays.ints)
        longs, ints = self._buffers[shape]

        def prefill() -> Tensor:
            chunk = self._packer.chunk(arrays, longs, ints, table, shape.queries)
            return round_.prefill(chunk, sampled)[0]

        if self._runner is not None and key not in self._runner:
            # Over no prompt: what is captured is run, and must write to nobody's slots.
            self._fill(shape, self._packer.pack([]).padded(shape, round_.state.padding))
            self._runner.capture(key, prefill)
        self._fill(shape, arrays)
        return prefill() if self._runner is None else self._runner.replay(key)

    def _shape(self, packed: PackedPrompts) -> ChunkShape | None:
        """The smallest that holds these, if one does."""
        if not packed.all_end:
            return None
        tokens = max(_FEWEST_TOKENS, 1 << packed.num_tokens.bit_length())  # more than there are
        rows = 1
        while rows < len(packed.rows):
            rows *= _ROWS_STEP
        queries = _SHORT_QUERIES if rows > 1 and packed.max_queries <= _SHORT_QUERIES < tokens else tokens
        return ChunkShape(tokens, min(rows, self._max_batch_size), queries) if tokens <= self._most_tokens else None

    def _fill(self, shape: ChunkShape, arrays: HostArrays) -> None:
        longs, ints = self._buffers[shape]
        longs.copy_(self._transfers.upload(arrays.longs))
        ints.copy_(self._transfers.upload(arrays.ints))
