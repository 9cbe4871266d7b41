"""The engine against the oracle on the built-in model, on a CPU in float32: tokens, counts and log-probabilities, bit
for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.setup.build import build
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.oracle.build import build_oracle

TARGET = "builtin:smollm2-135m-instruct"
EAGLE3 = {"method": "eagle3", "draft": f"{TARGET}-eagle3"}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "draft model": {"method": "draft_model", "draft": TARGET},
    "eagle3 chain": EAGLE3,
    "eagle3 tree": EAGLE3 | {"num_steps": 3, "topk": 4, "num_draft_tokens": 8},
}
GREEDY = SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=1)
QUESTIONS = ["What is the capital of France?", "Count: one, two, one, two, one,", "Why is the sky blue?"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits(method: str) -> None:
    engine = EngineSection(device="cpu", max_batch_size=3, kv_cache_tokens=1024, prefill_chunk_tokens=16)
    config = Config(model=ModelSection(target=TARGET), speculation=SpeculationSection(**METHODS[method]), engine=engine)
    resolved = resolve(config)
    requests = [
        Request(6 * turn + i, resolved.tokenizer(question)["input_ids"], params, RngKey(1, i, 0))
        for turn, params in enumerate((GREEDY, SAMPLED))
        for i, question in enumerate(QUESTIONS)
    ]
    found = []
    for one in (build_oracle(resolved), build(resolved).engine):
        for request in requests:
            one.submit(request)
        done: dict[int, Any] = {}
        while len(done) < len(requests):
            done |= {completion.request_id: completion for completion in one.step()}
        found.append(done)
    assert found[0] == found[1]
    assert method == "none" or sum(c.speculation.accepted for c in found[1].values()) > 0
