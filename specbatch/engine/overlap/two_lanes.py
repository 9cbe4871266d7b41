"""The target's forward pass over a batch, or over a prompt chunk, that is divided into two lanes (`lanes.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.engine.prefill.packing import ChunkCut, PromptChunk
from specbatch.models.decoder import Decoder
from specbatch.models.stages import FIRST, SECOND, Turn, TwoPasses, turns_over_one_sequence

Lane = tuple[Tensor, PagedBatch, Turn, LogitsIndices | None]
Output = tuple[Tensor, list[Tensor]]  # see `Decoder.forward`


@dataclass(frozen=True)
class TwoLanes:
    """`min_prompt_lane`: least tokens of a lane of a prompt chunk."""

    target: Decoder
    cache: KVCache
    passes: TwoPasses
    min_prompt_lane: int

    def forward(
        self,
        tokens_T: Tensor,
        layout: PagedBatch,
        aux_layers: Sequence[int],
        lane: int,
        num_tokens: int,
        *,
        is_even: bool,
    ) -> Output:
        """Run the target's forward pass in two lanes. The first lane has `lane` requests with `num_tokens` tokens.
        `is_even`: see `Decoder.forward`."""
        first, second = layout.divided(lane, num_tokens)
        one, other = tokens_T[:num_tokens], tokens_T[num_tokens:]
        return self._run((one, first, FIRST, None), (other, second, SECOND, None), aux_layers, is_even=is_even)

    def prefill(
        self, chunk: PromptChunk, cut: ChunkCut, aux_layers: Sequence[int], logits_indices: LogitsIndices | None
    ) -> Output:
        first, second = chunk.layout.divided(cut.num_sequences, cut.num_tokens, cut.in_next)
        turns = turns_over_one_sequence(self.target.device) if cut.in_next else (FIRST, SECOND)
        selected = (None, None) if logits_indices is None else logits_indices.divided(cut.num_selected, cut.num_tokens)
        one, other = chunk.tokens_T[: cut.num_tokens], chunk.tokens_T[cut.num_tokens :]
        return self._run(
            (one, first, turns[0], selected[0]), (other, second.copied(), turns[1], selected[1]), aux_layers
        )

    def _run(self, first: Lane, second: Lane, aux_layers: Sequence[int], *, is_even: bool = False) -> Output:
        one, other = (
            self.target.stages(tokens, batch, self.cache, aux_layers, indices, turn=turn, is_even=is_even)
            for tokens, batch, turn, indices in (first, second)
        )
        (hidden, aux), (other_hidden, other_aux) = self.passes.run(one, other)
        return torch.cat((hidden, other_hidden)), [torch.cat(pair) for pair in zip(aux, other_aux, strict=True)]
