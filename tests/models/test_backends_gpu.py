"""Small models of transformers on CUDA, by native code and by transformers' own: texts are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from specbatch.config_load import load_config
from specbatch.engine.engine import Engine
from specbatch.errors import SpecbatchError
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import SamplingParams
from tests.models.fallback.variants import EQUAL, VOCAB, write_model
from tests.tiny_models import run

pytestmark = pytest.mark.gpu
PROMPTS = [[97, 98, 99] * 5, [5, 6, 7, 8, 9] * 4, [120], [40 + i % 17 for i in range(60)], [97, 98, 99] * 5 + [9]]
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
OPTIONS = ["engine.page_size=4", "engine.max_batch_size=3", "engine.prefill_chunk_tokens=16", "model.dtype=float32"]
OPTIONS += ["engine.kv_cache_tokens=1024", "speculation.method=ngram"]


def _run(folder: Path, backend: str, device: str) -> tuple[list[list[int]], int]:
    options = [f"model.target={folder}", f"model.backend={backend}", f"engine.device={device}", *OPTIONS]
    engine = build_engine(resolve(load_config(None, options)))
    assert isinstance(engine, Engine)
    completions = run(engine, PROMPTS, GREEDY)
    return [one.token_ids for one in completions], sum(one.speculation.accepted for one in completions)


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("name", EQUAL)
def test_texts_equal_those_of_the_cpu(name: str, backend: str, tmp_path: Path) -> None:
    if EQUAL[name][0] not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    folder = write_model(tmp_path / "model", *EQUAL[name])
    byte_tokenizer(VOCAB, (0,)).save_pretrained(folder)
    try:
        expected, _ = _run(folder, backend, "cpu")
    except SpecbatchError as error:
        pytest.skip(f"not on a CPU: {error}")
    found, accepted = _run(folder, backend, "cuda")
    assert found == expected
    assert accepted > 0
