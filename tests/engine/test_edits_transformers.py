"""Rules of requests against transformers' own logits processors, token for token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.processors import BadWords, processors_of

MODELS = Path(os.environ.get("SPECBATCH_TEST_MODELS", Path.home() / ".cache" / "specbatch-dev"))
TIE = 1e-3  # a margin in float32 below which two implementations may differ
# Made of the output without rules, so that they matter: sampling options, bad words.
Rule = Callable[[list[int]], tuple[dict[str, Any], BadWords]]
RULES: dict[str, Rule] = {
    "repetition": lambda plain: ({"repetition_penalty": 1.4}, ()),
    "presence": lambda plain: ({"presence_penalty": 2.0}, ()),
    "frequency": lambda plain: ({"frequency_penalty": 1.5}, ()),
    "bias": lambda plain: ({"logit_bias": {plain[0]: -8.0, plain[2]: 3.0, plain[1] + 1: 5.0}}, ()),
    "allowed": lambda plain: ({"allowed_token_ids": tuple(range(plain[1] % 2, 264, 2))}, ()),
    "bad words": lambda plain: ({}, ((plain[0],), tuple(plain[1:3]), tuple(plain[2:5]))),
    "min_tokens": lambda plain: ({"stop_token_ids": tuple(plain[1:4]), "min_tokens": 7}, ()),
    "all": lambda plain: (
        {
            "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 4,
            "logit_bias": {plain[0]: -2.0, plain[3]: 2.0}, "stop_token_ids": (plain[1],),
        },
        (tuple(plain[1:3]),),
    ),
}  # fmt: skip


def run(engine: Any, wanted: list[tuple[list[int], SamplingParams, BadWords]]) -> list[Completion]:
    for i, (prompt, params, bad_words) in enumerate(wanted):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0), bad_words=bad_words))
    done: dict[int, Completion] = {}
    while len(done) < len(wanted):
        done |= {completion.request_id: completion for completion in engine.step()}
    return [done[i] for i in range(len(wanted))]


def compare(folder: Path, texts: list[str], max_tokens: int, **speculation: Any) -> None:
    """Every rule over every prompt."""
    engine_options = EngineSection(device="cpu", kv_cache_tokens=2048)
    resolved = resolve(
        Config(ModelSection(str(folder), "float32"), SpeculationSection(**speculation), engine=engine_options)
    )
    engine = build_engine(resolved)
    prompts = [resolved.tokenizer(text)["input_ids"] for text in texts]
    plain = run(engine, [(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), ()) for prompt in prompts])
    wanted = []
    for rule in RULES.values():
        for prompt, completion in zip(prompts, plain, strict=True):
            options, bad_words = rule(completion.token_ids)
            wanted.append((prompt, SamplingParams(max_tokens=max_tokens, **options), bad_words))
    found = run(engine, wanted)
    changed = [completion.token_ids != plain[i % len(prompts)].token_ids for i, completion in enumerate(found)]
    for i, name in enumerate(RULES):
        assert any(changed[i * len(prompts) : (i + 1) * len(prompts)]), f"{name} changes nothing"
    assert speculation["method"] == "none" or engine.stats.speculation.accepted > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos = tuple(engine.limits.eos_token_ids)
    for (prompt, params, bad_words), completion in zip(wanted, found, strict=True):
        usual = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=[*eos, *params.stop_token_ids], pad_token_id=0
        )
        processors = processors_of(params, bad_words, eos, len(prompt), engine.limits.vocab_size)
        output = model.generate(torch.tensor([prompt]), generation_config=usual, logits_processor=processors)
        expected = output[0, len(prompt) :].tolist()
        assert completion.token_ids == expected or completion.margin.value < TIE


def test_tiny_model(tiny_model: Path) -> None:
    compare(tiny_model, ["abcabcab", "Hello, world"], 8, method="ngram", num_draft_tokens=4)


TOPICS = ["rivers", "gold", "bread", "whales", "the moon", "chess", "Rome", "tea", "glass", "bees"]
QUESTIONS = ["Tell me about {}.", "What are {}?", "Write a list about {}: 1.", "Why do people like {}?", "{}, {}, {},"]


@pytest.mark.slow
def test_smollm2_on_50_rows() -> None:
    folder = MODELS / "smollm2-135m-hf"
    if not folder.exists():
        pytest.skip(f"{folder} is not there (SPECBATCH_TEST_MODELS)")
    texts = [question.replace("{}", topic) for question in QUESTIONS for topic in TOPICS]
    compare(folder, texts, 16, method="ngram")
