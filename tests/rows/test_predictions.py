"""Predictions of OpenAI Batch lines: n-gram drafts come from them, and no text depends on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specbatch.cli import app
from specbatch.draft import METHODS, DraftParts, MethodEntry
from specbatch.draft.ngram import NgramDraft
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.types import Completion, EngineLimits, Request, RngKey, SamplingParams
from tests.processes import run
from tests.tiny_models import random_prompts, run_requests, tiny_device_engine, tiny_engine

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
CHAIN = DraftShape(4, 1, 5)
PROMPTS = random_prompts(6, shared=3, longest=12)
CODE = """def total(prices, discount):
    result = 0
    for price in prices:
        result += price * (1 - discount)
    return round(result, 2)
"""


def requests(params: SamplingParams, predictions: list[list[int]]) -> list[Request]:
    return [
        Request(i, prompt, params, RngKey(7, i, 0), predicted_token_ids=predictions[i])
        for i, prompt in enumerate(PROMPTS)
    ]


def length_of(found: list[Completion]) -> float:
    rounds = sum(one.speculation.rounds for one in found)
    return sum(len(one.token_ids) for one in found) / rounds


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device ngram` is the method that drafts from tensors, as on a GPU."""

    def on_device(shape: DraftShape, parts: DraftParts) -> NgramDraft:
        return NgramDraft(shape, *parts.ngram_match, parts.ops)

    monkeypatch.setitem(METHODS, "device ngram", MethodEntry(on_device))


def ngram_engine(on_device: bool, **settings: Any) -> Any:
    if on_device:
        return tiny_device_engine("device ngram", CHAIN, num_pages=256, **settings)
    return tiny_engine("ngram", CHAIN, num_pages=256, **settings)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_texts_do_not_depend_on_predictions(on_device: bool, params: SamplingParams) -> None:
    plain = run_requests(tiny_engine("none", num_pages=256), requests(params, [[]] * 6))
    texts = [one.token_ids for one in plain]
    wrong = [[(token + 1) % 31 for token in text] for text in texts]
    half = [text[:10] + other[10:14] + text[14:] for text, other in zip(texts, wrong, strict=True)]
    lengths = {}
    for name, predictions in {"none": [[]] * 6, "right": texts, "wrong": wrong, "half": half}.items():
        found = run_requests(ngram_engine(on_device), requests(params, predictions))
        assert [one.token_ids for one in found] == texts, name
        lengths[name] = length_of(found)
    assert lengths["right"] > 4.5  # nearly all drafts of all rounds, from the first one on
    assert lengths["right"] > lengths["half"] > lengths["none"]


def test_host_and_device_draft_the_same_from_predictions() -> None:
    predictions = [
        one.token_ids for one in run_requests(tiny_engine("none", num_pages=256), requests(GREEDY, [[]] * 6))
    ]
    predictions = [text[:5] + text[7:] for text in predictions]
    found = [
        run_requests(ngram_engine(on_device, max_batch_size=2), requests(GREEDY, predictions))
        for on_device in (False, True)
    ]
    assert [one.speculation for one in found[0]] == [one.speculation for one in found[1]]


def test_a_request_without_a_prediction_does_not_see_that_of_an_earlier_one() -> None:
    """They have the same request index on the device."""
    plain = [one.token_ids for one in run_requests(tiny_engine("none", num_pages=256), requests(GREEDY, [[]] * 6))]
    expected, found = (
        run_requests(
            ngram_engine(True, max_batch_size=1),
            [
                replace(one, predicted_token_ids=()) if one.request_id % 2 else one
                for one in requests(GREEDY, predicted)
            ],
        )
        for predicted in ([[]] * 6, [plain[1], [], plain[3], [], plain[5], []])
    )
    assert [one.speculation for one in found[1::2]] == [one.speculation for one in expected[1::2]]


def test_a_long_prediction_is_cut() -> None:
    limits = EngineLimits(100, 50)
    request = Request(0, [1, 2, 3], GREEDY, RngKey(0, 0, 0), predicted_token_ids=[4] * 300)
    assert Sequence.of(request, limits, 101).predicted == [1, 2, 3, *[4] * 98]
    assert len(Sequence.of(replace(request, predicted_token_ids=[4] * 10**5), limits, 10**6).predicted) == 8192


def batch_line(i: int, prediction: Any = None) -> dict[str, Any]:
    content = f"Rename `discount` to `rebate` in this function. Write the function only.\n{CODE}\nNumber {i}."
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_completion_tokens": 40}
    if prediction is not None:
        body["prediction"] = {"type": "content", "content": prediction}
    return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def generate(folder: Path, name: str, rows: list[Any], *options: str) -> tuple[Result, list[dict[str, Any]], Any]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ["engine.device=cpu", "engine.kv_cache_tokens=2048", *options]
    command = ["generate", str(path), "--overwrite"]
    result = CliRunner().invoke(app, [*command, *(part for item in sets for part in ("--set", item))])
    assert result.exit_code == 0, result.output
    lines = (folder / f"{name}.results.jsonl").read_text().splitlines()
    stats = json.loads((folder / f"{name}.results.stats.json").read_text())
    return result, [json.loads(line) for line in lines], stats


def answers(lines: list[dict[str, Any]]) -> list[str]:
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]


def test_shards_have_the_method_of_the_whole_file(tmp_path: Path) -> None:
    """Only the rows of shard 0 have predictions, which are half of all rows. So `auto` is not n-grams in any shard."""
    rows = [batch_line(i, CODE if i % 2 == 0 else None) for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for shard in ("0/2", "1/2"):
        assert run(tmp_path, "generate", "rows.jsonl", "--shard", shard).returncode == 0
    shards = [f"rows.results.{i}-of-2.jsonl" for i in range(2)]
    result = run(tmp_path, "merge", *shards, "-o", "all.jsonl")
    assert result.returncode == 0, result.stderr


@pytest.mark.wide
def test_an_edit_task_with_the_built_in_model(tmp_path: Path) -> None:
    """The prediction is what the model writes, but for a few words, as it is after an edit of its answer."""
    ngram = ["speculation.method=ngram"]
    _, lines, before = generate(tmp_path, "plain", [batch_line(i) for i in range(3)], *ngram)
    predictions: list[Any] = [text.replace("price", "cost", 1) for text in answers(lines)]
    predictions[1] = [{"type": "text", "text": part} for part in (predictions[1][:9], predictions[1][9:])]
    rows = [batch_line(i, prediction) for i, prediction in enumerate(predictions)]
    result, found, after = generate(tmp_path, "predicted", rows, *ngram)
    assert answers(found) == answers(lines)
    lengths = [stats["speculation"]["acceptance_length"] for stats in (before, after)]
    assert lengths[1] > 1.3 * lengths[0], lengths
    assert "prediction" not in result.stderr

    # `auto` takes n-grams instead of the built-in head, if most rows predict their answers.
    result, found, stats = generate(tmp_path, "auto", rows)
    assert "speculation.method: ngram (most of the first rows have a `prediction`)" in result.stderr
    assert stats["config"]["speculation"]["method"] == "ngram"
    assert answers(found) == answers(lines)
    result, found, stats = generate(tmp_path, "few", [rows[0], batch_line(1), batch_line(2)])
    assert stats["config"]["speculation"]["method"] == "eagle3"
    assert answers(found) == answers(lines)
    unused = "`prediction` was not used, because only the methods ngram, suffix and hybrid draft from it: 1 row"
    assert result.stderr.count("prediction") == 1
    assert unused in " ".join(result.stderr.split())
