"""The rules of running requests, in device memory. They are made when the first request with rules is admitted."""

from __future__ import annotations

import dataclasses

import torch

from specbatch.batch import NEVER, RuleBuffers

MAX_BIASES = 1024  # the most biases of a request
# The most bad words of several tokens of a request, and the most tokens of one. Those of one token are in the mask.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 16


class RuleTable(RuleBuffers):
    """The buffers. They are made once; captured graphs hold their addresses."""

    def __init__(self, num_lines: int, vocab_size: int, floats: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_lines, *shape, dtype=dtype, device=device)

        super().__init__(
            edits_S=zeros(),
            num_prompt_S=zeros(),
            min_tokens_S=zeros(),
            penalties_S3=zeros(3, dtype=floats),
            masks_S2W=zeros(2, -(-vocab_size // 32), dtype=torch.int32),
            bias_ids_SK=zeros(MAX_BIASES),
            biases_SK=zeros(MAX_BIASES, dtype=floats),
            bad_ends_SC=zeros(MAX_BAD_WORDS),
            bad_starts_SCM=zeros(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1),
            node_masks_SNW=None,
        )
        self.clear(slice(None))

    def clear(self, lines: torch.Tensor | slice) -> None:
        """Remove the rules of these lines (int64 indices)."""
        for buffer in (self.edits_S, self.num_prompt_S, self.min_tokens_S, self.biases_SK, self.penalties_S3):
            _fill(buffer, lines, 0)
        _fill(self.penalties_S3[:, 0], lines, 1)
        _fill(self.masks_S2W, lines, -1)
        _fill(self.bad_starts_SCM, lines, NEVER)
        if self.node_masks_SNW is not None:
            _fill(self.node_masks_SNW, lines, -1)

    def add_node_masks(self, num_nodes: int) -> None:
        """Make room for the masks of trees of `num_nodes` nodes. They allow everything at first. Graphs that were
        captured before do not read them."""
        if self.node_masks_SNW is None:
            lines, _, num_words = self.masks_S2W.shape
            self.node_masks_SNW = torch.full(
                (lines, num_nodes, num_words), -1, dtype=torch.int32, device=self.masks_S2W.device
            )

    @property
    def num_bytes(self) -> int:
        buffers = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)


def _fill(buffer: torch.Tensor, lines: torch.Tensor | slice, value: int) -> None:
    """Write `value` to these lines. If `lines` is a tensor, `buffer[lines] = value` would copy the value to the device
    and wait for the copy."""
    if isinstance(lines, slice):
        buffer[lines] = value
    else:
        buffer.index_fill_(0, lines, value)
