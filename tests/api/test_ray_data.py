"""Ray Data, the real package: a model in an actor adds columns to batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch import LLM
from specbatch.ray_data import Generate

pytest.importorskip("ray", reason="Ray is not installed: pip install 'specbatch[ray]'")
import ray
import ray.data

# One process runs all tests that start a Ray.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCHEMA = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}}, "required": ["label"]}
ROWS = [{"prompt": f"p{i}", "number": i} for i in range(6)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("batch_format", ["pyarrow", "numpy", "pandas"])
def test_batches_get_columns(batch_format: str, tiny_model: Path) -> None:
    options: dict[str, Any] = {"model": str(tiny_model), "method": "none", "kv_cache_tokens": 1024}
    answered = ray.data.from_items(ROWS).map_batches(
        Generate,
        fn_constructor_kwargs={**options, "schema": SCHEMA, "max_tokens": 40},
        batch_format=batch_format,
        batch_size=3,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = sorted(answered.take_all(), key=lambda row: row["number"])
    with LLM(**options) as llm:
        results = llm.generate(ROWS, schema=SCHEMA, max_tokens=40)
    assert [row["text"] for row in found] == results.texts
    assert [row["label"] for row in found] == [parsed["label"] for parsed in results.parsed]
    assert {row["error"] for row in found} == {None}
