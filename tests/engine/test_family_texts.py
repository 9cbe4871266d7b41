"""Families that no other test runs from files: greedy texts of small random models are those of transformers, with each
kind of draft. Windows bind, and prompts share a beginning."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.errors import ConfigError
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.test_parity import WIDE_CONFIGS
from tests.tiny_models import random_prompts, run_requests

VOCAB, NUM_ROWS, NUM_TOKENS = 288, 6, 16
PROMPTS = [*random_prompts(NUM_ROWS - 2, vocab=VOCAB, longest=30, shared=20), [5, 6, 7, 8, 9] * 8, [3] * 25]
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
HEAD = {"method": "eagle3", "draft": "random:eagle3", "aux_layers": (0, 1, 2)}
CASES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_steps": 3},
    "draft-model-chain": {"method": "draft_model", "num_steps": 2},
    "draft-model-tree": {"method": "draft_model", **TREE},
    "eagle3-tree": {**HEAD, **TREE},
}


@cache
def texts_of_transformers(path: Path) -> list[list[int]]:
    """Return the tokens of greedy generation, the one that ends a text included."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    texts = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=0
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def write_model(config: PreTrainedConfig, path: Path) -> Path:
    """Write a random model. Norms are not 1 and biases not 0, which would hide mistakes."""
    config = deepcopy(config)
    config.vocab_size, config.eos_token_id = VOCAB, 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    byte_tokenizer(VOCAB, (0,)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def check_texts(path: Path, max_model_len: int | None = None, **speculation: Any) -> list[str]:
    """Compare texts with those of transformers. Return the run's notes."""
    if speculation["method"] == "draft_model":
        speculation["draft"] = str(path)
    run = resolve(
        Config(
            model=ModelSection(target=str(path), dtype="float32", max_model_len=max_model_len),
            speculation=SpeculationSection(**speculation),
            engine=EngineSection(device="cpu", kv_cache_tokens=4096, max_batch_size=4),
        )
    )
    engine = build_engine(run)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    found = run_requests(engine, [Request(i, prompt, params, RngKey(0, i, 0)) for i, prompt in enumerate(PROMPTS)])
    assert [list(c.token_ids) for c in found] == texts_of_transformers(path)
    assert sum(c.speculation.accepted for c in found) > 0 or speculation["method"] != "draft_model"
    assert engine.stats.cached_prompt_tokens > 0
    return run.notes


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WIDE_CONFIGS)
def test_texts_are_those_of_transformers(name: str, case: str, folder: Path) -> None:
    path = folder / name
    if not path.exists():
        write_model(WIDE_CONFIGS[name], path)
    check_texts(path, 128 if name.startswith("phi3") else None, **CASES[case])


@pytest.mark.parametrize(
    ("original", "max_model_len", "which"),
    [(16, None, "long"), (128, 128, "short"), pytest.param(16, 100, "long", marks=pytest.mark.wide)],
)
def test_longrope_has_the_frequencies_of_the_longest_row(
    original: int, max_model_len: int | None, which: str, tmp_path: Path
) -> None:
    """Rows of 20 to 66 tokens: transformers computes all with the frequencies for long rows, or all with the others."""
    config = deepcopy(WIDE_CONFIGS["phi3-window"])
    config.original_max_position_embeddings = original
    config.rope_parameters["original_max_position_embeddings"] = original
    notes = check_texts(write_model(config, tmp_path), max_model_len, **CASES["ngram"])
    assert any(f"LongRoPE has its frequencies for {which} rows" in note for note in notes)


def test_rows_cannot_be_longer_than_the_model_allows(tmp_path: Path) -> None:
    path = write_model(WIDE_CONFIGS["phi3"], tmp_path)
    with pytest.raises(ConfigError, match="max_model_len: 257 is more than the 256 tokens of phi3"):
        resolve(Config(model=ModelSection(target=str(path), max_model_len=257), engine=EngineSection(device="cpu")))
    run = resolve(Config(model=ModelSection(target=str(path), max_model_len=40), engine=EngineSection(device="cpu")))
    assert run.cache.capacity == 40
