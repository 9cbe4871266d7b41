"""A batch of texts for an EAGLE-3 head: which chains learn at which step, and from which position of the target.

Shape suffixes: B sequences, L padded length, R rows to learn, Q rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.train.eagle.unroll import StepRows
from specbatch.train.examples import Example, padded_length
from specbatch.train.learner import moved


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences, and the rows that learn from them. All tensors are made on the CPU."""

    tokens_BL: Tensor
    target_rows_Q: Tensor  # the rows of (B * L) at which the target predicts
    steps: list[StepRows]

    @property
    def rows(self) -> list[Tensor]:
        return [step.rows_R for step in self.steps]

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`, without waiting for it."""
        steps = [StepRows(moved(s.rows_R, device), moved(s.target_R, device)) for s in self.steps]
        return Batch(moved(self.tokens_BL, device), moved(self.target_rows_Q, device), steps)


def collate(examples: Sequence[Example], num_steps: int) -> Batch:
    """Pad the examples to a batch, and number the rows that learn. A chain whose tokens are past the end at a step is
    left out of that step."""
    length = padded_length(max(len(e.tokens) for e in examples))
    tokens_BL = torch.zeros(len(examples), length, dtype=torch.int64)
    wanted: list[Tensor] = []
    rows: list[list[Tensor]] = [[] for _ in range(num_steps)]
    targets: list[list[Tensor]] = [[] for _ in range(num_steps)]
    num_wanted = 0
    for b, e in enumerate(examples):
        tokens_BL[b, : len(e.tokens)] = torch.tensor(e.tokens)
        # Position p of the target predicts token p + 1; wanted are predictions of answer tokens but the first, which no
        # chain drafts. Chain t at step j is taught by position t + 1 + j.
        wanted.append(b * length + torch.arange(e.prompt_length, len(e.tokens) - 1))
        for j in range(min(num_steps, e.num_chains)):
            count = e.num_chains - j
            rows[j].append(b * length + e.prompt_length - 1 + torch.arange(count))
            targets[j].append(num_wanted + j + torch.arange(count))
        num_wanted += e.num_chains
    none = torch.zeros(0, dtype=torch.int64)
    steps = [StepRows(torch.cat([none, *r]), torch.cat([none, *t])) for r, t in zip(rows, targets, strict=True)]
    return Batch(tokens_BL, torch.cat(wanted), steps)
