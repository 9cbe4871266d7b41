"""A corpus of tokens that many rows share, and the search for what may come next. It is a table on the device, see
`kernels/corpus.py`: rounds search it and add their tokens, and the host reads nothing.

Shape suffixes: B requests, L tokens, S request indices, H words.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from specbatch.kernels.corpus import SIZES, word_estimates

_TOKENS_AT_ONCE = 1 << 16  # tokens of a file that are added at once, with those that pad short texts


def num_words_of(max_tokens: int) -> int:
    """Return the number of words of a corpus, a power of two. A word has 8 bytes."""
    return 1 << (len(SIZES) * max_tokens - 1).bit_length()


class Corpus:
    """A corpus with room for about `max_tokens` tokens."""

    def __init__(self, max_tokens: int, device: torch.device, ops: ModuleType) -> None:
        num_words = num_words_of(max_tokens)
        # The word after the table is written for what changes nothing.
        self.words_H = torch.zeros(num_words + 1, dtype=torch.int64, device=device)
        self._estimates_OS = word_estimates(device)
        self._ops = ops

    def add(
        self,
        tokens_SL: Tensor,
        req_idx_B: Tensor,
        starts_B: Tensor,
        counts_B: Tensor,
        max_new: int,
        eos_K: Tensor,
        *,
        is_loaded: bool = False,
    ) -> None:
        """Add new tokens of the lines `req_idx_B`, see `corpus_updates` of the kernels. The result does not depend on
        the order of requests, so that all ranks have the same corpus."""
        places, words = self._ops.corpus_updates(
            self.words_H, tokens_SL, req_idx_B, starts_B, counts_B, max_new, eos_K, is_loaded
        )
        self.words_H.index_fill_(0, places, 0)
        self.words_H.scatter_reduce_(0, places, words, "amax")

    def load(self, texts: Sequence[list[int]]) -> None:
        """Add the texts of a file, the newest last."""
        device, no_token = self.words_H.device, torch.zeros(0, dtype=torch.int64, device=self.words_H.device)
        longest = max(map(len, texts), default=0)
        if not longest:
            return
        count = max(1, _TOKENS_AT_ONCE // longest)
        for first in range(0, len(texts), count):
            part = [torch.tensor(text, dtype=torch.int32) for text in texts[first : first + count]]
            lengths = torch.tensor([len(text) for text in part], device=device)
            tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
            lines = torch.arange(len(part), device=device)
            self.add(tokens, lines, torch.zeros_like(lines), lengths, tokens.shape[1], no_token, is_loaded=True)

    def search(
        self,
        tokens_SL: Tensor,
        req_idx_B: Tensor,
        lengths_B: Tensor,
        limit_B: Tensor,
        least: float,
        num_drafts: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft for the lines `req_idx_B`, see `corpus_drafts` of the kernels."""
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self._ops.corpus_drafts(
            self.words_H, self._estimates_OS, tokens_SL, req_idx_B, lengths_B, limit_B, least, num_drafts
        )
        return found
