"""An EAGLE-3 head in training: batches, unrolled steps, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from specbatch.train.eagle.batch import Batch, collate
from specbatch.train.eagle.head import DraftHead
from specbatch.train.eagle.unroll import losses, step_weights, unroll
from specbatch.train.examples import Example
from specbatch.train.layers import rotary_tables
from specbatch.train.learner import Losses
from specbatch.train.target import FrozenTarget


class EagleLearner:
    """A `Learner` for chains of `num_steps` steps. `longest`: the length of the longest padded text. `make_target`:
    loads the frozen target."""

    def __init__(
        self,
        head: DraftHead,
        make_target: Callable[[], FrozenTarget],
        num_steps: int,
        longest: int,
        device: torch.device,
        *,
        compile_steps: bool = False,
    ) -> None:
        self.module = head
        self.weights = step_weights(num_steps)
        self._make_target, self._num_steps = make_target, num_steps
        self._tables = rotary_tables(head.config, longest + num_steps, device)
        self._unroll = torch.compile(unroll, dynamic=True) if compile_steps else unroll

    def settings(self) -> dict[str, Any]:
        return {"num_steps": self._num_steps}

    def load_target(self) -> None:
        self._target = self._make_target()

    def batch(self, examples: Sequence[Example], step: int) -> Batch:
        return collate(examples, self._num_steps)

    def whole(self, examples: Sequence[Example]) -> Iterator[Batch]:
        yield collate(examples, self._num_steps)

    def losses(self, batch: Batch) -> Losses:
        features_BLF, hidden_TE = self._target.features(batch.tokens_BL)
        target = self._target.rows(hidden_TE, batch.target_rows_Q)
        hidden = self._unroll(
            self.module, self._target.embedding_VE, batch.tokens_BL, features_BLF, self._tables, self._num_steps
        )
        return losses(self.module, hidden, batch.steps, target)
