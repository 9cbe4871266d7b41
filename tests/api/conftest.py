"""The stub engine for tests of the Python interface, and a small model with grammars."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch import LLM, startup
from tests.stub_engine import stub_modules


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(startup, "model_paths", lambda config: {})
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter


@pytest.fixture(scope="package")
def tiny(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), method="none", kv_cache_tokens=2048, max_batch_size=4) as made:
        yield made
