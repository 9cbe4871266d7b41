"""`speculation.method: suffix` in jobs: the corpus file, its mistakes, grammars, several completions and resume."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.draft.earlier_results import read_texts
from specbatch.errors import ConfigError
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.setup.speculation import resolve_speculation, with_sizes_of_batches

TINY = ["model.target=random:tiny", "engine.device=cpu", "engine.max_batch_size=3", "sampling.max_tokens=16"]
HEAD = "speculation.draft=random:eagle3"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
ROWS: list[dict[str, Any]] = [
    *({"prompt": f"question {i % 3}: abcabc"} for i in range(6)),
    {"prompt": "three", "n": 3, "temperature": 0.8},
    {"prompt": "stop", "stop": ["a", "e"]},
    *({"prompt": "json", "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},) * 3,
]


def generate(folder: Path, name: str, *options: str, rows: Sequence[dict[str, Any]] = ROWS) -> Result:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", str(folder / "rows.jsonl"), "-o", str(folder / name), "--overwrite"]
    for option in (*TINY, *options):
        command += ["--set", option]
    return CliRunner().invoke(app, command)


def answers(path: Path) -> list[dict[str, Any]]:
    """Return the result lines without the counts of speculation."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if key != "speculation"}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return [plain(json.loads(line)) for line in path.read_text().splitlines()]


def sources(path: Path) -> dict[str, dict[str, int]]:
    stats = json.loads(path.with_name(path.name.replace(".jsonl", ".stats.json")).read_text())
    found: dict[str, dict[str, int]] = stats["session"]["drafts_by_source"]
    return found


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_jobs_have_the_answers_of_plain_decoding(tmp_path: Path, tiny_model: Path, deterministic: str) -> None:
    mode = [f"engine.deterministic={deterministic}", f"model.target={tiny_model}"]
    for name, options in {
        "plain": ["speculation.method=none"],
        "suffix": ["speculation.method=suffix"],
        "again": ["speculation.method=suffix", f"speculation.corpus={tmp_path / 'suffix.jsonl'}"],
    }.items():
        result = generate(tmp_path, f"{name}.jsonl", *mode, *options)
        assert result.exit_code == 0, result.output
    plain, suffix, again = (tmp_path / f"{name}.jsonl" for name in ("plain", "suffix", "again"))
    assert answers(suffix) == answers(plain) == answers(again)
    assert sources(suffix)["job"]["accepted"] > 0
    assert sources(again)["corpus"]["accepted"] > 0
    assert sources(plain) is None


def test_a_corpus_may_differ_when_a_job_goes_on(tmp_path: Path) -> None:
    """Texts do not depend on it, so it is no part of the job."""
    assert generate(tmp_path, "first.jsonl", "speculation.method=suffix").exit_code == 0
    command = ["generate", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "first.jsonl")]
    for option in (
        *TINY, "speculation.method=suffix", "speculation.suffix.corpus_tokens=4096",
        f"speculation.corpus={tmp_path / 'first.jsonl'}",
    ):  # fmt: skip
        command += ["--set", option]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


NATIVE = {"id": 1, "text": "one", "finish_reason": "stop"}
FAILED = {"id": 2, "text": None, "finish_reason": "error", "error": {"type": "x", "message": "y"}}
SEVERAL = {"text": "a", "finish_reason": "length", "choices": [{**NATIVE, "text": "a"}, {**NATIVE, "text": "b"}]}
CHAT = {"error": None, "response": {"body": {"choices": [
    {"message": {"content": "hi", "reasoning_content": "hm"}, "finish_reason": "length"},
    {"message": {"content": None}, "finish_reason": "tool_calls"},
]}}}  # fmt: skip
COMPLETION = {"error": None, "response": {"body": {"choices": [{"text": "t", "finish_reason": "stop"}]}}}


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_texts_of_a_result_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    content = lines(NATIVE, FAILED, SEVERAL, CHAT, COMPLETION, {"response": None, "error": {"code": "x"}}) + b"\n"
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    texts = [("one", True), ("a", True), ("b", True), ("hm", False), ("hi", False), ("t", True)]
    assert read_texts(file, 1000) == texts
    assert read_texts(file, 0) == texts[-1:], "of a long file the last texts are kept"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lines(NATIVE) + b"{", "line 2 of .* is not a result line"),
        (lines({"prompt": "an input"}), "line 1 of .* is not a result line"),
        (lines([1]), "line 1 of .* is not a result line"),
        (lines({**NATIVE, "text": 5}), "line 1 of .* is not a result line"),
        (lines(NATIVE, {"response": {"body": {}}}), "line 2 of .* is not a result line"),
        (b"PAR1\xff\xfe", "line 1 of .* is not a result line"),
    ],
)
def test_bad_lines_are_found_before_a_model_is_opened(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    options = ["model.target=no/such/model", "speculation.method=suffix", f"speculation.corpus={file}"]
    with pytest.raises(ConfigError, match=problem):
        resolve(load_config(None, options))


def test_a_damaged_or_missing_file(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(lines(NATIVE))[:-9])
    with pytest.raises(ConfigError, match=r"r\.jsonl\.gz cannot be read"):
        read_texts(tmp_path / "r.jsonl.gz", 1000)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="does not exist, or is no file"):
            load_config(None, ["speculation.method=suffix", f"speculation.corpus={path}"])


@pytest.mark.parametrize("method", ["auto", "ngram", "none"])
def test_other_methods_have_no_corpus(tmp_path: Path, method: str) -> None:
    (tmp_path / "r.jsonl").write_bytes(lines(NATIVE))
    options = [f"speculation.method={method}", f"speculation.corpus={tmp_path / 'r.jsonl'}", TINY[0]]
    with pytest.raises(ConfigError, match=r"searched by speculation.method suffix and hybrid only"):
        resolve(load_config(None, options))


def test_the_default_draft_has_31_tokens() -> None:
    run = resolve(load_config(None, [*TINY, "speculation.method=suffix"]))
    assert run.speculation.shapes[0].num_draft_tokens == 32
    with pytest.raises(ConfigError, match="topk must be 1 for suffix"):
        resolve(load_config(None, [*TINY, "speculation.method=suffix", "speculation.topk=2"]))


@pytest.mark.wide
def test_hybrids_have_the_answers_of_plain_decoding(tmp_path: Path) -> None:
    hybrid = ["model.target=random:tiny-hybrid"]
    for name in ("none", "suffix"):
        result = generate(tmp_path, f"{name}.jsonl", *hybrid, f"speculation.method={name}")
        assert result.exit_code == 0, result.output
    assert answers(tmp_path / "suffix.jsonl") == answers(tmp_path / "none.jsonl")
    assert sources(tmp_path / "suffix.jsonl")["job"]["accepted"] > 0


def test_a_gpu_has_fewer_nodes_for_more_rows() -> None:
    section = load_config(None, ["speculation.method=suffix"]).speculation
    decided = resolve_speculation(section, "random:tiny", [])
    of_gpu = with_sizes_of_batches(decided, section)
    assert str(of_gpu.schedule) == "<=256: 31/1/32, <=512: 15/1/16, <=1024: 7/1/8, <=2048: 3/1/4"
    assert resolve_speculation(of_gpu.section, "random:tiny", []).schedule == of_gpu.schedule, "it can be given"
    for option in ("num_steps=7", "num_draft_tokens=8", "schedule=[{max_batch: 8, num_steps: 3}]"):
        given = load_config(None, ["speculation.method=suffix", f"speculation.{option}"]).speculation
        decided = resolve_speculation(given, "random:tiny", [])
        assert with_sizes_of_batches(decided, given) == decided
    plain = load_config(None, ["speculation.method=ngram"]).speculation
    decided = resolve_speculation(plain, "random:tiny", [])
    assert with_sizes_of_batches(decided, plain) == decided


def test_hybrid_needs_a_head() -> None:
    run = resolve(load_config(None, ["engine.device=cpu", "speculation.method=hybrid"]))
    assert run.speculation.section.draft == "builtin:smollm2-135m-instruct-eagle3"
    with pytest.raises(ConfigError, match=r"method hybrid needs speculation\.draft"):
        resolve(load_config(None, [*TINY, "speculation.method=hybrid"]))


def test_sampled_texts_of_hybrid_depend_on_other_rows_unless_they_are_deterministic() -> None:
    for deterministic in (False, True):
        options = ["speculation.method=hybrid", f"engine.deterministic={str(deterministic).lower()}"]
        notes = resolve(load_config(None, ["engine.device=cpu", *options])).notes
        assert any("their texts depend on the other requests" in note for note in notes) != deterministic


@pytest.mark.wide
def test_jobs_with_hybrid_drafts_have_the_answers_of_plain_decoding(tmp_path: Path) -> None:
    for name, options in {
        "none": ["speculation.method=none"],
        "hybrid": ["speculation.method=hybrid", "speculation.draft=random:eagle3"],
    }.items():
        result = generate(tmp_path, f"{name}.jsonl", *options)
        assert result.exit_code == 0, result.output
    assert answers(tmp_path / "hybrid.jsonl") == answers(tmp_path / "none.jsonl")
    found = sources(tmp_path / "hybrid.jsonl")
    assert found["job"]["accepted"] > 0
    # The probabilities of a random head are small, so its drafts are seldom chosen.
    assert found.get("network", {"drafted": 0})["drafted"] < found["job"]["drafted"]


@pytest.mark.parametrize("method", [["speculation.method=suffix"], ["speculation.method=hybrid", HEAD]])
def test_the_shortest_match_is_one_that_can_be_found(method: list[str]) -> None:
    resolve(load_config(None, [*TINY, *method, *(f"speculation.ngram.{name}_match=12" for name in ("min", "max"))]))
    with pytest.raises(ConfigError, match=r"min_match is 13, .* finds runs of at most 12 tokens"):
        resolve(load_config(None, [*TINY, *method, *(f"speculation.ngram.{name}_match=13" for name in ("min", "max"))]))


def test_a_corpus_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.setup.build.available_memory", lambda device: 1 << 30)
    run = resolve(
        load_config(None, [*TINY, "speculation.method=suffix", "speculation.suffix.corpus_tokens=1000000000"])
    )
    with pytest.raises(ConfigError, match=r"corpus_tokens: 1,000,000,000 tokens take 32\.0 GiB, and 1\.0 GiB are free"):
        build_engine(run)
