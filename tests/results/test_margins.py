"""Margins of a job: in result lines with a certificate, and in the statistics whatever happened to the job."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.config import Config, OutputSection
from specbatch.results.margins import MarginTotals, of_digits, to_digits
from specbatch.results.results import ResultFile
from specbatch.rows.sources import RawRow
from specbatch.types import NO_MARGIN, Margin, SamplingParams
from tests.job.finished import finished
from tests.job.shards import Shards
from tests.job.test_generate import RAW, Run
from tests.stub_engine import EOS, StubEngine, stub_margin

GREEDY = Config(sampling=SamplingParams(), data=RAW)
CERTIFIED = replace(GREEDY, output=OutputSection(certificate=True))
ROWS: list[Any] = [{"prompt": f"p{i}", "id": f"r{i}", "n": 1 + i % 2} for i in range(60)]
ROWS[7:9] = [{"prompt": "sampled", "temperature": 1.0, "n": 3}, b"{broken"]
ROWS += [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "q"}} for i in range(3)]


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def expected_totals(certificates: list[tuple[int, Any, Margin]]) -> dict[str, Any]:
    """Of (index, id, margin), in plain Python."""
    found = [(margin.value, index, id, margin.position) for index, id, margin in certificates]
    decades: dict[str, int] = {}
    for value, *_ in sorted(found):
        name = "0" if value == 0 else f"1e{math.floor(math.log10(value))}"
        decades[name] = decades.get(name, 0) + 1
    value, index, id, position = min(found)
    smallest = {"id": id, "index": index, "margin": value, "position": position}
    return {"rows": len(found), "smallest": smallest, "rows_by_decade": decades}


def certificates_of(results: list[dict[str, Any]]) -> list[tuple[int, Any, Margin]]:
    found = []
    for index, line in enumerate(results):
        body = line if "response" not in line or line["response"] is None else line["response"]["body"]
        if "certificate" in body:
            found.append((index, line.get("custom_id", line["id"]), Margin(**_renamed(body["certificate"]))))
    return found


def _renamed(certificate: dict[str, Any]) -> dict[str, Any]:
    assert list(certificate) == ["margin", "position"]
    return {"value": certificate["margin"], "position": certificate["position"]}


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    (tmp_path / "whole").mkdir()
    run = Run(tmp_path / "whole")
    run.write(ROWS)
    run(CERTIFIED)
    return run


def test_greedy_rows_have_a_certificate(whole: Run) -> None:
    results = whole.results()
    found = certificates_of(results)
    assert [index for index, _, _ in found] == [index for index in range(len(ROWS)) if index not in (7, 8)]
    for index, _, margin in found[:-3]:
        assert margin == stub_margin([*results[index]["text"].encode(), EOS])
    assert whole.stats()["margins"] == expected_totals(found)
    assert {"0", "1e-3"} < set(whole.stats()["margins"]["rows_by_decade"]), "the stub has few margins"


def test_without_the_option_only_the_statistics_have_margins(whole: Run, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(ROWS)
    run(GREEDY)
    assert b"certificate" not in run.output.read_bytes()
    assert run.stats()["margins"] == whole.stats()["margins"]
    sampled = Run(tmp_path)
    sampled.write([{"prompt": "p", "temperature": 1.0}])
    sampled(GREEDY, overwrite=True)
    assert sampled.stats()["margins"] == {"rows": 0, "smallest": None, "rows_by_decade": {}}


@pytest.mark.parametrize("config", [GREEDY, CERTIFIED], ids=["plain", "certified"])
def test_a_job_that_crashes_has_the_same_margins(whole: Run, tmp_path: Path, config: Config) -> None:
    run = Run(tmp_path)
    run.write(ROWS)
    for fail_at in (3, 4, 5):
        with pytest.raises(RuntimeError):
            run(config, StubEngine(fail_at=fail_at))
    run(config)
    assert run.stats()["session"]["resumed_rows"] > 10
    assert run.stats()["margins"] == whole.stats()["margins"]
    assert (run.output.read_bytes() == whole.output.read_bytes()) == (config is CERTIFIED)


def test_a_row_that_is_computed_again_counts_once(tmp_path: Path) -> None:
    """As of an input that has changed: the result of the old row, with a smaller margin, is dropped."""
    rows = [RawRow(index, b"old %d" % index) for index in range(3)]
    for margin, changed in ((0.25, False), (0.5, True)):
        results = ResultFile(tmp_path / "o.jsonl", {}, overwrite=False)
        for row in [RawRow(1, b"new"), *rows[::2]] if changed else rows:
            if not results.is_done(row):
                line = {"id": None, "index": row.index, "error": {"type": "x"}}
                results.append(finished(row.index, row.digest(), line, Margin(margin - row.index / 16, 0)))
        if changed:
            results.finish()
        found = results.margins()
        results.close()
    assert found.decades == {"1e-1": 3}
    assert found.smallest == {"id": None, "index": 2, "margin": 0.125, "position": 0}


def test_merged_shards_have_the_margins_of_one_process(whole: Run, tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write(ROWS)
    shards.compute(4, config=CERTIFIED)
    shards.merge()
    assert shards.output.read_bytes() == whole.output.read_bytes()
    assert shards.stats()["margins"] == whole.stats()["margins"]


def test_totals_of_any_margins() -> None:
    rng = random.Random(0)
    values = [
        math.inf,
        0.0,
        float32(0.01),
        0.5,
        0.5,
        1.0,
        10.0,
        *(float32(10 ** rng.uniform(-8, 3)) for _ in range(500)),
    ]
    rng.shuffle(values)
    found = [(i, None, Margin(value, 3)) for i, value in enumerate(values) if value < math.inf]
    totals = MarginTotals()
    for part in np.array_split(np.array(values, np.float32), 5):
        totals.add(part)
    totals.smallest = expected_totals(found)["smallest"]
    assert totals.report() == expected_totals(found)
    assert list(totals.report()["rows_by_decade"])[:2] == ["0", "1e-8"]
    again = MarginTotals.of_report(json.loads(json.dumps(totals.report())))
    assert again == totals


@pytest.mark.parametrize("margin", [NO_MARGIN, Margin(0.0, 0), Margin(float32(1e-3), 2**31), Margin(2.0**-149, 7)])
def test_digits(margin: Margin) -> None:
    assert of_digits(to_digits(margin)) == margin


def test_a_finished_row_takes_its_margin_along() -> None:
    """From a worker's process to that of the job."""
    made = finished(3, 5, {"id": None, "index": 3, "error": {"type": "x"}}, Margin(0.5, 9))
    assert pickle.loads(pickle.dumps(made)).rows == made.rows
    assert made.rows[0].margin == Margin(0.5, 9)
