"""Launches prompt chunks. A short chunk of whole prompts is padded to one of few shapes and replayed as a graph; other
chunks are computed in pieces (`models.py`), or launched kernel by kernel.

Launching a chunk takes the host 0.3 ms a layer, whatever is in it, and meanwhile no round runs. So a chunk can have as
much padding as a GPU computes in that time (`ChunkCost.graph_tokens`) without a loss. A job has few shapes. Without
pieces, a shape's graph is captured when the first chunk of it comes. With pieces, it is captured after `CAPTURE_AFTER`
chunks of the shape: on an H200 a capture takes 60 to 80 ms, and the graph saves 1 to 3 ms of a chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbatch.engine.executor import GraphMode
from specbatch.engine.logprobs import Logprobs, num_top_of
from specbatch.engine.prefill.models import EAGER, PromptTrunks
from specbatch.engine.prefill.packing import ChunkArrays, ChunkShape, PackedPrompts, PromptPacker
from specbatch.engine.round import Launched, Round, Wanted
from specbatch.engine.transfers import Transfers
from specbatch.graphs.runner import GraphRunner
from specbatch.kernels.out_of_memory import is_out_of_memory

# Numbers of sequences are powers of this, so up to three quarters of them are padding: few shapes are worth more. Of a
# sequence that is padding, only the last layer and the head are computed.
_SEQUENCES_STEP = 4
_MIN_TOKENS = 64
# Attention has a program for every 64 (query, head) pairs that a sequence of the shape can have. If no prompt is longer
# than this, the shape has no more, or most programs would idle.
_SHORT_QUERIES = 256
CAPTURE_AFTER = 24  # chunks of a shape that are computed in pieces


class PromptGraphs:
    """The launcher of prompt chunks. `max_tokens`: the largest padded chunk; 0: no chunk is padded. On a CPU, for
    tests, chunks are padded and nothing is captured. `trunks`: the models that compute the other chunks. `shrinks`: a
    chunk whose graph does not fit into memory runs without one."""

    def __init__(
        self,
        packer: PromptPacker,
        transfers: Transfers,
        device: torch.device,
        max_batch_size: int,
        max_tokens: int,
        trunks: PromptTrunks = EAGER,
        *,
        shrinks: bool = True,
    ) -> None:
        self._packer = packer
        self._shrinks = shrinks
        self._transfers = transfers
        self._max_batch_size = max_batch_size
        self._max_tokens = max_tokens
        self._trunks = trunks
        self._came: Counter[tuple[Any, ...]] = Counter()  # chunks for each graph
        self._uncaptured: set[tuple[Any, ...]] = set()  # keys whose graphs did not fit into memory
        self._buffers: dict[ChunkShape, Tensor] = {}  # buffers that the graphs read
        self.runner = GraphRunner(device) if device.type == "cuda" else None

    def run(
        self,
        round_: Round,
        packed: PackedPrompts,
        wanted: Wanted,
        mode: GraphMode,
        has_lanes: bool = True,
    ) -> tuple[Launched, Logprobs | None]:
        """Compute a chunk as `Round.prefill` does; but more tokens can follow those of the prompts that end here.
        `mode`: the graph mode of rounds; prompts are graphs only if whole rounds are. `has_lanes`: a chunk that is no
        graph may have two lanes. The output is valid until the next chunk."""
        may_pad = not packed.scored and (mode == "round" or self.runner is None)
        shape = self.shape_of(packed) if may_pad else None
        key = (shape, wanted, round_.method.net is not None)
        self._came[key] += 1
        pays = self._trunks is EAGER or self._came[key] > CAPTURE_AFTER
        if shape is not None and pays and key not in self._uncaptured:
            try:
                return self._padded(round_, packed, shape, key)
            except Exception as error:
                # Without padding the chunk takes less memory.
                known = self.runner is None or key in self.runner
                if known or not self._shrinks or not is_out_of_memory(error):
                    raise
                self._uncaptured.add(key)
        arrays = packed.arrays()
        buffer = self._transfers.upload(arrays.buffer)
        chunk = self._packer.chunk(arrays, buffer, round_.state.page_table_SP, packed.max_queries)
        if packed.scored:
            scored = np.array([(one.row, one.seq.tokens[one.position]) for one in packed.scored], dtype=np.int64)
            scored_num_top = num_top_of(one.seq.request.params.prompt_logprobs for one in packed.scored) or 0
            chunk = replace(chunk, scored_K2=self._transfers.upload(scored), scored_num_top=scored_num_top)
        if round_.two_lanes is not None and has_lanes:
            chunk = replace(chunk, cut=packed.cut(round_.two_lanes.min_prompt_lane))
        return round_.prefill(chunk, wanted, self._trunks)

    def shape_of(self, packed: PackedPrompts) -> ChunkShape | None:
        """The smallest shape that holds these, if one does."""
        if not packed.all_end:
            return None
        count = 1
        while count < len(packed.req_idx):
            count *= _SEQUENCES_STEP
        count = min(count, self._max_batch_size)
        needed = packed.num_tokens + (count > len(packed.req_idx))  # padded sequences need a token
        tokens = max(_MIN_TOKENS, 1 << (needed - 1).bit_length())
        if tokens > self._max_tokens:
            return None
        is_short = count > 1 and packed.max_queries <= _SHORT_QUERIES < tokens
        return ChunkShape(tokens, count, _SHORT_QUERIES if is_short else tokens)

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back. Nothing may be in flight. Returns whether there were graphs."""
        had_graphs = bool(self.runner) or self._trunks is not EAGER
        if self.runner is not None:
            self.runner = GraphRunner(self.runner.device)
            self._buffers.clear()
        self._trunks = EAGER
        return had_graphs

    def _padded(
        self, round_: Round, packed: PackedPrompts, shape: ChunkShape, key: tuple[Any, ...]
    ) -> tuple[Launched, Logprobs | None]:
        _, wanted, _ = key
        padding = round_.state.padding
        arrays = packed.padded(shape, padding)
        if shape not in self._buffers:
            self._buffers[shape] = self._transfers.upload(arrays.buffer)

        def prefill() -> tuple[Launched, Logprobs | None]:
            chunk = self._packer.chunk(arrays, self._buffers[shape], round_.state.page_table_SP, shape.max_queries)
            return round_.prefill(chunk, wanted)

        if self.runner is not None and key not in self.runner:
            # The chunk has no prompt: a capture runs it, and it must write to no request.
            self._fill(shape, self._packer.pack([]).padded(shape, padding))
            self.runner.capture(key, prefill)
        self._fill(shape, arrays)
        return prefill() if self.runner is None else self.runner.replay(key)

    def _fill(self, shape: ChunkShape, arrays: ChunkArrays) -> None:
        self._buffers[shape].copy_(self._transfers.upload(arrays.buffer))
