"""What changes the logits of running requests, in device memory: a line for each request index, and one for padding.

It is made when the first request with such rules is admitted. A line without rules changes nothing.

Shape suffixes: S request indices (the last is padding's), N tree nodes, W words of a mask, K entries, C bad words,
M tokens of a bad word before its last.
"""

from __future__ import annotations

import torch

MAX_BIASES = 1024  # of a request
# Bad words of several tokens of a request, and the tokens of one. Those of one token are in the mask.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 16
# In place of a token that comes before a bad word's last one.
ANY_TOKEN, NO_TEXT, NEVER = -1, -2, -3  # any; what the prompt is read as; a word that is none


class RuleTable:
    """The buffers. They are made once; captured graphs hold their addresses."""

    def __init__(self, num_lines: int, vocab_size: int, floats: torch.dtype, device: torch.device) -> None:
        num_words = -(-vocab_size // 32)
        self.edits_S = torch.zeros(num_lines, dtype=torch.int64, device=device)  # `Edits` of each line
        self.num_prompt_S = torch.zeros(num_lines, dtype=torch.int64, device=device)  # tokens
        self.min_tokens_S = torch.zeros(num_lines, dtype=torch.int64, device=device)
        self.penalties_S3 = torch.zeros(num_lines, 3, dtype=floats, device=device)  # repetition, frequency, presence
        # Bit t % 32 of word t // 32: token t is allowed. Of each line one mask for outputs of fewer than min_tokens
        # tokens, one for longer ones.
        self.masks_S2W = torch.zeros(num_lines, 2, num_words, dtype=torch.int32, device=device)
        self.bias_ids_SK = torch.zeros(num_lines, MAX_BIASES, dtype=torch.int64, device=device)
        self.biases_SK = torch.zeros(num_lines, MAX_BIASES, dtype=floats, device=device)
        self.bad_ends_SC = torch.zeros(num_lines, MAX_BAD_WORDS, dtype=torch.int64, device=device)
        # The tokens before a bad word's last one, the nearest first.
        self.bad_starts_SCM = torch.zeros(
            num_lines, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1, dtype=torch.int64, device=device
        )
        # As masks_S2W, of each node of the next round's trees; of a prompt's first token in node 0. The host fills the
        # lines whose `Edits` have NODE_MASK between drafting and verifying.
        self.node_masks_SNW: torch.Tensor | None = None
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
        """Make room for masks of trees of `num_nodes` nodes, which allow everything. Graphs that were captured before
        do not read them."""
        if self.node_masks_SNW is None:
            lines, _, num_words = self.masks_S2W.shape
            self.node_masks_SNW = torch.full(
                (lines, num_nodes, num_words), -1, dtype=torch.int32, device=self.masks_S2W.device
            )


def _fill(buffer: torch.Tensor, lines: torch.Tensor | slice, value: int) -> None:
    """`buffer[lines] = value` copies the value to the device first and waits for that, if `lines` is a tensor."""
    if isinstance(lines, slice):
        buffer[lines] = value
    else:
        buffer.index_fill_(0, lines, value)
