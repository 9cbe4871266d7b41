"""Acceptance in validation: the share of right drafts at each step, and the acceptance length of chains.

Shape suffixes: B sequences, L padded length, J steps, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specbatch.train.examples import Example
from specbatch.train.learner import LearnedBatch, Losses

CHAINS = (3, 5, 7)  # lengths of the chains that are simulated, and that of all steps


class Acceptance:
    """Sums over batches of held-out sequences."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Begin with nothing. `weights`: the share of each step in the loss."""
        num_steps = len(weights)
        self._weights = weights
        self._losses = [0.0] * num_steps
        self._hits, self._rows = [0] * num_steps, [0] * num_steps
        # Tokens and rounds by the length of chains, of greedy answers and of sampled ones.
        chains = sorted({min(steps, num_steps) for steps in CHAINS} | {num_steps})
        self._chains = {steps: [0, 0] for steps in chains}
        self._sampled = {steps: [0, 0] for steps in chains}

    def add(self, examples: Sequence[Example], parts: Iterable[tuple[LearnedBatch, Losses]]) -> None:
        """Add examples. `parts`: batches of them on the CPU, in which each chain is once, with their losses. Losses are
        weighted by chains."""
        hits_TJ = torch.zeros(0, len(self._losses), dtype=torch.bool)
        shape = (0, 0)
        for batch, found in parts:
            if not len(hits_TJ):
                shape = batch.tokens_BL.shape[0], batch.tokens_BL.shape[1]
                hits_TJ = torch.zeros(batch.tokens_BL.numel(), len(self._losses), dtype=torch.bool)
            for j, (loss, hit_R, rows_R) in enumerate(zip(found.steps, found.hits, batch.rows, strict=True)):
                hit_R = hit_R.cpu()
                hits_TJ[rows_R, j] = hit_R
                self._losses[j] += float(loss) * len(hit_R)
                self._hits[j] += int(hit_R.sum())
                self._rows[j] += len(hit_R)
        hits_BLJ = hits_TJ.view(*shape, -1)
        for b, example in enumerate(examples):
            sums = self._chains if example.greedy else self._sampled
            for steps, total in sums.items():
                rounds = count_rounds(hits_BLJ[b, :, :steps], example)
                total[0] += example.num_chains
                total[1] += rounds

    def summary(self) -> dict[str, Any]:
        """Return the figures. `accuracy[j]`: the share of rows whose step j is right, where earlier steps get the true
        tokens. `tokens_per_round`, by number of steps: the engine's acceptance length of greedy answers that are
        drafted as chains (of sampled answers, if none is greedy)."""
        losses = [loss / max(rows, 1) for loss, rows in zip(self._losses, self._rows, strict=True)]
        weights = self._weights
        chains = self._chains if any(rounds for _, rounds in self._chains.values()) else self._sampled
        return {
            "loss": round(sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights), 5),
            "losses": [round(x, 5) for x in losses],
            "accuracy": [round(h / max(r, 1), 5) for h, r in zip(self._hits, self._rows, strict=True)],
            "tokens_per_round": {str(s): round(t / max(r, 1), 4) for s, (t, r) in chains.items()},
        }


def count_rounds(hits_LJ: Tensor, example: Example) -> int:
    """Count the rounds that a chain of J steps takes for an answer after its first token, as the engine counts them.

    A round whose root is token t + 1 commits one token for each step of chain t up to the first wrong one, and one
    more.
    """
    accepted = hits_LJ.long().cumprod(dim=1).sum(dim=1).tolist()
    chain, rounds = example.prompt_length - 1, 0
    while chain < len(example.tokens) - 2:  # nothing follows the last token
        chain += accepted[chain] + 1
        rounds += 1
    return rounds
