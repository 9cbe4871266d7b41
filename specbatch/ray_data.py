"""specbatch in Ray Data: a class for `Dataset.map_batches`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.api.batch_map import BatchMap
from specbatch.api.call import Schema
from specbatch.api.llm import LLM

if TYPE_CHECKING:
    import pyarrow as pa


class Generate:
    """A model in an actor of Ray Data, which adds the columns of answers to each batch (see `BatchMap`).

        ray.data.read_parquet("tickets").map_batches(
            Generate, fn_constructor_kwargs={"model": "org/model", "schema": Ticket, "max_tokens": 64},
            batch_format="pyarrow", batch_size=1000, num_gpus=1, compute=ray.data.ActorPoolStrategy(size=8),
        )

    Arguments are those of `LLM`. Rows of other actors and batches have other random numbers: each actor counts its
    rows from a random index. Rows with their own `seed` give the same samples in each run.
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        *,
        config: str | Path | None = None,
        schema: Schema | None = None,
        **options: Any,
    ) -> None:
        llm = LLM(model, draft, config=config, **options)
        self._map = BatchMap(llm, schema=schema, first_index=secrets.randbits(48))

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> pa.Table:
        return self._map(batch)
