"""The JSON Schemas describe what is really written, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from jsonschema import Draft202012Validator

from specbatch.config import Config
from specbatch.config_load import config_to_dict, packaged_configs
from specbatch.counts import SpeculationCounts
from specbatch.files.jsonl import encode_line
from specbatch.files.result_files import result_rows, write_lines
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import Choice, result_line
from specbatch.results.schema import schemas
from specbatch.rows.row import Row
from specbatch.text.chat_output import ToolCall
from specbatch.text.token_pieces import TokenPieces
from specbatch.types import FinishReason, Margin
from tests.job.shards import Shards, native, openai

SCHEMAS = schemas()


def errors(name: str, value: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMAS[name]).iter_errors(value)]


@pytest.mark.parametrize("name", ["config", "result", "stats"])
def test_the_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])


def test_results_and_statistics_of_jobs_and_merged_shards(tmp_path: Path) -> None:
    run = Shards(tmp_path)
    run.write(native(40) + openai(20))
    run()
    assert not [message for row in run.results() for message in errors("result", row)]
    assert not errors("stats", run.stats())
    assert run.stats()["schema_version"] == SCHEMA_VERSION == SCHEMAS["schema_version"]
    run.output.unlink()
    run.compute(2)
    run.merge(*run.paths(), overwrite=True)
    assert not errors("stats", run.stats())
    assert run.stats()["shards"]


@pytest.mark.parametrize("api", [None, "chat", "completions"])
def test_every_field_of_a_line_is_declared_in_its_order(tmp_path: Path, api: Any) -> None:
    """With all that a row can ask for. A table must give the line back, the order of its fields included."""
    scores = TokenLogprobs.of([TokenLogprob(65, -0.5, ((65, -0.5),))])
    calls = [ToolCall("weather", "{}")]
    choice = Choice("a", [65], FinishReason.TOOL_CALLS, scores, SpeculationCounts(), "thought", calls)
    row = Row(3, id="x", metadata={"k": [1]}, api=api, token_ids=[1, 2])
    given: dict[str, Any] = {
        "model": "m",
        "simulated": True,
        "margin": Margin(0.5, 0),
        "prompt_logprobs": scores,
    }
    if api is None:
        given["choice_scores"] = [{"text": "a", "logprob": -0.5, "num_tokens": 1}]
    pieces = TokenPieces(lambda ids: "".join(map(chr, ids)), chr)
    line = json.loads(encode_line(result_line(row, [choice, choice], LogprobJson(pieces), **given)))
    assert not errors("result", line)
    write_lines(tmp_path / "a.parquet", [encode_line(line)], ".parquet")
    (back,) = result_rows(tmp_path / "a.parquet")
    assert json.dumps(back) == json.dumps(line)
    assert pq.read_table(tmp_path / "a.parquet")["other"].to_pylist() == [None]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    run = Shards(tmp_path)
    run.write(native(3))
    run()
    good = next(row for row in run.results() if row["finish_reason"] != "error")
    for wrong in ({"index": "1"}, {"usage": {}}, {"new": 1}, {"finish_reason": "eos"}):
        assert errors("result", {**good, **wrong})
    stats = run.stats()
    assert errors("stats", {**stats, "more": 1})
    assert errors("stats", {name: value for name, value in stats.items() if name != "rows"})


def test_every_packaged_configuration_is_valid() -> None:
    for name, path in packaged_configs().items():
        assert not errors("config", yaml.safe_load(path.read_text(encoding="utf-8"))), name
    assert not errors("config", json.loads(json.dumps(config_to_dict(Config()))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling": {"temperature": -1}},
        {"sampling": {"top_p": 0}},
        {"sampling": {"seed": 2**63}},
        {"speculation": {"method": "magic"}},
        {"speculation": {"schedule": [{"num_steps": 1}]}},
        {"engine": {"max_batch_size": 0}},
        {"engine": {"prefix_cache": "yes"}},
        {"modle": {}},
        {"data": {"promt_column": "x"}},
    ],
)
def test_wrong_configurations_are_found(wrong: dict[str, Any]) -> None:
    assert errors("config", wrong)
