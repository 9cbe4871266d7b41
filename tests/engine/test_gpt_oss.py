"""gpt-oss from files, against transformers: greedy texts of a small random model, with its experts in float32 and in
MXFP4."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.mxfp4_checkpoints import pack_experts
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import random_prompts, run_requests

VOCAB, NUM_ROWS, NUM_TOKENS = 288, 16, 16
PROMPTS = random_prompts(NUM_ROWS, vocab=VOCAB, longest=30, shared=20)
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
HEAD = {"method": "eagle3", "draft": "random:eagle3", "aux_layers": (0, 1, 3)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "ngram": {"method": "ngram", "num_steps": 3},
    "draft-model-chain": {"method": "draft_model", "draft": "dense", "num_steps": 2},
    "draft-model-tree": {"method": "draft_model", "draft": "float32", **TREE},
    "eagle3-chain": {**HEAD, "num_steps": 2},
    "eagle3-tree": {**HEAD, **TREE},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model in both layouts, and a dense draft model."""
    root = tmp_path_factory.mktemp("gpt-oss")
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=9,
        max_position_embeddings=256,
        rope_parameters=ROPE,
        initializer_range=0.3,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(root / "float32")
    byte_tokenizer(VOCAB, (0,)).save_pretrained(root / "float32")
    pack_experts(root / "float32", root / "mxfp4")
    write_checkpoint(root / "dense", vocab_size=VOCAB)
    return root


@cache
def texts_of_transformers(path: Path) -> list[list[int]]:
    """Return the tokens of greedy generation, the one that ends a text included."""
    packed = {"quantization_config": Mxfp4Config(dequantize=True)} if path.name == "mxfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **packed
    ).eval()
    texts = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=0
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("layout", ["float32", "mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(case: str, layout: str, folder: Path) -> None:
    given = dict(CASES[case])
    if "draft" in given and ":" not in given["draft"]:
        given["draft"] = str(folder / given["draft"])
    config = Config(
        model=ModelSection(target=str(folder / layout), dtype="float32"),
        speculation=SpeculationSection(**given),
        engine=EngineSection(device="cpu", kv_cache_tokens=4096, max_batch_size=8),
    )
    run = resolve(config)
    assert any("MXFP4" in note for note in run.notes) == (layout == "mxfp4")
    engine = build_engine(run)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    found = run_requests(engine, [Request(i, prompt, params, RngKey(0, i, 0)) for i, prompt in enumerate(PROMPTS)])
    assert [list(c.token_ids) for c in found] == texts_of_transformers(folder / layout)
    assert sum(c.speculation.accepted for c in found) > 0 or case != "draft-model-tree"
    assert engine.stats.cached_prompt_tokens > 0
