"""Several completions of a greedy row: one is computed, the others are copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbatch.rows.row import Row
from specbatch.tune.sample import sample_rows
from specbatch.types import EngineLimits, SamplingParams
from tests.job.test_generate import CONFIG, Run

GREEDY = replace(CONFIG, sampling=SamplingParams(temperature=0.0))


def test_one_completion_is_computed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    rows = [{"prompt": f"p{i}", "n": 3, "seed": 5, "logprobs": 1} for i in range(5)]
    run.write([*rows, {"prompt": "q", "n": 3, "temperature": 0.5}])
    assert run(GREEDY) == 0
    *greedy, sampled = run.results()
    for row in greedy:
        assert [choice["index"] for choice in row["choices"]] == [0, 1, 2]
        first, *copies = row["choices"]
        for copy in copies:
            same = ("text", "finish_reason", "usage", "logprobs")
            assert {k: copy[k] for k in same} == {k: first[k] for k in same}
            assert (copy["speculation"]["rounds"], copy["speculation"]["accept_histogram"]) == (0, [])
        assert row["usage"]["completion_tokens"] == 3 * first["usage"]["completion_tokens"]
        assert row["speculation"] == first["speculation"]
    assert len({choice["text"] for choice in sampled["choices"]}) == 3
    stats = run.stats()
    computed = sum(row["choices"][0]["usage"]["completion_tokens"] for row in greedy)
    computed += sampled["usage"]["completion_tokens"]
    assert stats["session"]["output_tokens"] == computed
    assert stats["tokens"]["completion"] == sum(row["usage"]["completion_tokens"] for row in run.results())
    assert stats["speculation"]["rounds"] == run.engines[0].stats.speculation.rounds


def test_batch_lines_have_their_copies(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(
        [{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 2, "logprobs": 0}}]
    )
    assert run(GREEDY) == 0
    body = run.results()[0]["response"]["body"]
    first, copy = body["choices"]
    assert {**first, "index": 1} == copy
    assert body["usage"]["completion_tokens"] == 2 * run.engines[0].stats.generated_tokens


@pytest.mark.parametrize(("temperature", "completions"), [(0.0, 8), (1.0, 24)])
def test_tune_counts_what_is_computed(temperature: float, completions: int) -> None:
    params = SamplingParams(temperature=temperature, n=3)
    source = SimpleNamespace(name="x", rows=lambda: range(8))
    parser = SimpleNamespace(parse=lambda raw: Row(raw, content="x", params=params))
    texts = SimpleNamespace(
        encode=lambda prompt, limits: [1], stop_check=lambda params: None, bad_words=lambda params, limits: ()
    )
    sample = sample_rows(source, parser, texts, EngineLimits(10, 10), 8, 0)  # type: ignore[arg-type]
    assert (sample.num_rows, len(sample.prompt_tokens)) == (completions, completions)
