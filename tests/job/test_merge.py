"""`specbatch merge`: the shards of a job become the file of one process, or an error says what is wrong."""

from __future__ import annotations

import io
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import InputError
from specbatch.files.jsonl import encode_line
from specbatch.files.paths import partial_path, sorted_path
from specbatch.job import merge
from specbatch.results.results import ResultFile, write_in_order
from specbatch.rows.shard import Shard
from tests.job.shards import Shards, native, openai

SUMS = ("rows", "tokens", "speculation")


@pytest.fixture
def run(tmp_path: Path) -> Shards:
    run = Shards(tmp_path)
    run.write([{"prompt": f"p{i}"} for i in range(20)])
    return run


@pytest.mark.parametrize(
    ("rows", "count", "options"),
    [
        (native(160), 16, {}),
        (native(160), 16, {"limit": 123}),
        (native(50), 1, {}),
        (openai(60), 7, {}),
        ([*native(40), *openai(40)], 3, {}),
        ([{"prompt": f"p{i}"} for i in range(5)], 16, {}),
        ([b"", b"", {"prompt": "p"}], 2, {}),
        ([], 3, {}),
    ],
    ids=["native", "limit", "one-shard", "openai", "mixed", "more-shards-than-rows", "blank", "empty"],
)
def test_merged_shards_are_the_file_of_one_process(
    run: Shards, rows: list[Any], count: int, options: dict[str, Any]
) -> None:
    run.write(rows)
    code = run(**options)
    one, stats = run.output.read_bytes(), run.stats()
    assert code == (1 if stats["rows"]["failed"] else 0)
    for path in run.folder.glob("d.results.*"):
        path.unlink()
    run.compute(count, **options)
    paths = run.paths()
    assert len(paths) == count
    random.Random(1).shuffle(paths)
    assert run.merge(*paths) == code
    assert run.output.read_bytes() == one
    merged = run.stats()
    assert {name: merged[name] for name in SUMS} == {name: stats[name] for name in SUMS}
    differ = {name for name in stats if name not in merged or merged[name] != stats[name]}
    assert differ - {"notes"} == {"session", "commit", "device", "longest_row"}, "each shard has its own"
    assert [entry["shard"] for entry in merged["shards"]] == [f"{i}/{count}" for i in range(count)]
    assert sum(entry["session"]["rows"] for entry in merged["shards"]) == stats["rows"]["total"]
    engines = len(run.engines)
    assert run(**options) == code
    assert "d.results.jsonl is finished already" in run.log
    assert len(run.engines) == engines
    assert not partial_path(run.output).exists()
    assert not sorted_path(run.output).exists()


def test_the_same_merge_again_does_nothing_until_a_shard_is_computed_again(run: Shards) -> None:
    run.compute(3)
    assert run.merge() == 0
    before = run.output.stat().st_mtime_ns
    assert run.merge() == 0
    assert "is finished already" in run.log
    assert run.output.stat().st_mtime_ns == before
    run.edit_stats(1, 3, lambda report: report["output_file"].update(sha256="0" * 64))
    assert "d.results.jsonl was merged before d.results.1-of-3.jsonl was computed again" in run.refused()
    run.compute(3, 1, overwrite=True)
    assert run.merge(overwrite=True) == 0
    run.output.write_bytes(run.output.read_bytes()[:-1])
    assert "d.results.jsonl was changed after it was finished: bytes" in run.refused()


def test_missing_and_unfinished_shards_are_named(run: Shards) -> None:
    run.compute(16, 0, 1, 2, 5, 9)
    (run.folder / "d.results.07-of-16.jsonl.partial").write_bytes(b'{"check":"')
    given = [path for path in run.paths() if "05" not in path.name]
    said = run.refused(*given)
    assert said.startswith("12 of 16 shards are missing: 3/16 (no d.results.03-of-16.jsonl), 4/16")
    assert "5/16 (d.results.05-of-16.jsonl exists: name it, too)" in said
    assert "7/16 (not finished: d.results.07-of-16.jsonl.partial exists)" in said
    assert "and 4 more" in said
    assert "specbatch generate d.jsonl --shard 3/16, with the options of the other shards" in said


def test_a_shard_that_is_computed_again_at_this_moment_is_not_finished(run: Shards) -> None:
    run.compute(2)
    partial_path(run.paths()[1]).write_bytes(b'{"check":"')
    assert "d.results.1-of-2.jsonl is not finished\nrun the command of this shard again" in run.refused()
    assert "is not finished" in run.refused(partial_path(run.paths()[1]))


def test_the_hint_has_the_limit_and_standard_input(run: Shards) -> None:
    run.compute(3, 0, limit=7)
    assert "specbatch generate d.jsonl --limit 7 --shard 1/3" in run.refused()
    run.edit_stats(0, 3, lambda report: report["job"].update({"input.kind": "stdin"}))
    assert "specbatch generate - --limit 7 --shard 1/3" in run.refused()


def test_files_that_are_no_shards_are_named(run: Shards) -> None:
    run.compute(3)
    run()
    said = run.refused(*run.paths(), run.output)
    assert "d.results.jsonl is the result of a whole job, not of a shard\nleave it out" in said
    said = run.refused(*run.folder.glob("d.results.*-of-3.*"))
    assert "d.results.0-of-3.stats.json has statistics, not results; " in said
    assert "d.jsonl is not a shard: it has no d.stats.json" in run.refused(run.input)
    assert "no.*.jsonl does not exist" in run.refused(run.folder / "no.*.jsonl")
    assert "is not a file" in run.refused(run.folder)
    run.edit_stats(1, 3, lambda report: report.pop("output_file"))
    assert "d.results.1-of-3.stats.json is damaged, or of another version" in run.refused()


def test_a_shard_of_another_job_is_named_with_what_differs(run: Shards) -> None:
    run.compute(3)
    for edit, words in (
        (lambda report: report["job"].update({"sampling.temperature": 0.25}), "sampling.temperature: 1.0 -> 0.25"),
        (lambda report: report["job"].update({"input.sha256": "abc"}), "input.sha256: "),
        (lambda report: report["job"].update(limit=3), "limit: none -> 3"),
        (lambda report: report["job"].update(shard="0/4"), "number of shards: 3 -> 4"),
        (lambda report: report["job"].update({"model.target (files)": "x"}), "model.target (files): none -> x"),
        (lambda report: report["versions"].update(torch="0.1"), "version of torch: "),
    ):
        before = (run.folder / "d.results.0-of-3.stats.json").read_bytes()
        run.edit_stats(0, 3, edit)
        said = run.refused()
        assert said.startswith(f"not of the same job as d.results.1-of-3.jsonl: d.results.0-of-3.jsonl ({words}"), said
        again = "compute them again: specbatch generate d.jsonl --shard 0/3 --overwrite, with the options"
        assert ("specbatch merge data.results.*-of-3.jsonl" if "number" in words else again) in said
        (run.folder / "d.results.0-of-3.stats.json").write_bytes(before)
    assert run.merge() == 0


def test_weights_are_the_same_unless_their_hashes_differ(run: Shards) -> None:
    def weights(number: int, mtime: int, sha256: str | None) -> None:
        record = {"target/a.safetensors": {"mtime_ns": mtime, "sha256": sha256}}
        run.edit_stats(number, 3, lambda report: report.update(weights=record))

    run.compute(3)
    weights(0, 1, None)
    weights(1, 1, "a")
    weights(2, 2, "b")
    assert "(sha256 of target/a.safetensors: a -> b)" in run.refused()
    weights(2, 2, "a")
    assert run.merge() == 0
    assert "different copies of the models" in run.log
    assert run.stats()["weights"] == {"target/a.safetensors": {"mtime_ns": 1, "sha256": "a"}}
    weights(0, 1, "a")
    assert run.merge(overwrite=True) == 0
    assert "different copies" not in run.log


def test_what_can_differ_from_one_process_is_said(run: Shards) -> None:
    run.compute(2)
    assert run.merge() == 0
    assert "warning" not in run.log
    run.edit_stats(1, 2, lambda report: report.update(device="cuda (A)", commit="abc", longest_row=77))
    for number in (0, 1):
        run.edit_stats(
            number, 2, lambda report: report["notes"].extend(["a decision", f"{len(report['device'])} rows"])
        )
        # As earlier versions wrote it of long standard input.
        run.edit_stats(number, 2, lambda report: report["job"].update({"input.head_is_all": False}))
        run.edit_stats(number, 2, lambda report: report["job"].pop("input.sha256"))
    assert run.merge(overwrite=True) == 0
    warnings = [line for line in run.log.splitlines() if line.startswith("warning: ")]
    words = ("different devices", "different commits", "77 tokens in one shard and 401", "standard input was long")
    for warning, word in zip(warnings, words, strict=True):
        assert word in warning
    assert run.stats()["notes"] == ["a decision", *warnings]
    assert run.merge() == 0
    assert "is finished already" in run.log
    assert [entry["notes"][0] for entry in run.stats()["shards"]] == ["a decision"] * 2


def test_a_shard_is_given_once(run: Shards) -> None:
    run.compute(2)
    first, second = run.paths()
    assert f"shard 0/2 is given twice: {first.name} and {first.name}" in run.refused(first, second, first)


@pytest.mark.parametrize("damage", ["cut", "byte", "line", "order", "foreign"])
def test_a_shard_that_was_changed_is_found_and_nothing_is_left(run: Shards, damage: str) -> None:
    run.compute(2)
    path = run.paths()[1]
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "cut":
        lines.pop()
    elif damage == "byte":
        lines[3] = lines[3].replace(b'"text": "', b'"texT": "')
    elif damage == "line":
        lines[3] = b"x" * (len(lines[3]) - 1) + b"\n"
    elif damage == "order":
        lines[3:5] = lines[4:2:-1]
    else:
        lines[3] = lines[3].replace(b'"index": 7', b'"index": 8')
    assert b"".join(lines) != path.read_bytes()
    path.write_bytes(b"".join(lines))
    said = run.refused()
    assert said.startswith("d.results.1-of-2.jsonl was changed after it was finished: ")
    found = {"cut": "bytes: ", "byte": "sha256: ", "line": "line 4 is ", "order": "line 5 is ", "foreign": "line 4 is "}
    assert found[damage] in said
    assert "d.jsonl --shard 1/2 --overwrite, with the options of the other shards" in said
    run.compute(2, 1, overwrite=True)
    assert run.merge() == 0


def test_inputs_are_never_written_over(run: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    run.compute(2)
    first, second = run.paths()
    link = run.folder / "link.jsonl"
    link.symlink_to(first)
    for output, words in (
        (first, "is shard 0/2"),
        (link, "is shard 0/2"),
        (run.folder / "d.results.1-of-2.stats.json", "results are JSON lines"),
        (run.folder / "d.results.1-of-2", "is the statistics of shard 1/2"),
        (run.input, "is the input"),
    ):
        assert words in run.refused(output=output, overwrite=True)
    monkeypatch.chdir(run.folder)
    run.edit_stats(0, 2, lambda report: report.update(input="elsewhere/d.jsonl"))
    assert "is the input of the shards" in run.refused(first, second, output=Path("d.jsonl"), overwrite=True)


def test_other_files_are_replaced_only_with_overwrite(run: Shards) -> None:
    run.compute(2)
    run.output.write_bytes(b"mine\n")
    assert "exists without d.results.stats.json" in run.refused()
    assert run.merge(overwrite=True) == 0
    assert run(limit=3, overwrite=True) == 0
    assert "is the result of a different job: limit: 3 -> none" in run.refused()


def test_an_unfinished_run_without_shards_is_not_dropped(run: Shards) -> None:
    run.compute(2)
    job = run.stats_of(0, 2)["job"]
    del job["shard"]
    unfinished = ResultFile(run.output, job, overwrite=False)
    assert "another process is writing d.results.jsonl" in run.refused()
    partial = partial_path(run.output).read_bytes() + b'{"check":"0000000000000000","damaged\n'
    unfinished.close()
    partial_path(run.output).write_bytes(partial)
    said = run.refused()
    assert "d.results.jsonl.partial is an unfinished run of the same job, without shards" in said
    assert "finish it: specbatch generate d.jsonl; or drop it: --overwrite" in said
    assert run.merge(overwrite=True) == 0
    assert not partial_path(run.output).exists()


def test_a_merge_that_was_killed_is_repeated(run: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    run.compute(2)
    assert run() == 0
    one = run.output.read_bytes()
    run.output.unlink()
    (run.folder / "d.results.stats.json").unlink()

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:  # after the file is in place, before its statistics are
        patched.setattr(merge, "write_report", kill)
        with pytest.raises(Killed):
            run.merge()
    job = run.stats_of(0, 2)["job"]
    del job["shard"]
    leftover = ResultFile(run.output, job, overwrite=False)  # as kill -9 leaves it: without rows
    content = partial_path(run.output).read_bytes()
    leftover.close()
    partial_path(run.output).write_bytes(content)
    sorted_path(run.output).write_bytes(b'{"id": ')
    assert run.merge() == 0
    assert run.output.read_bytes() == one
    assert not partial_path(run.output).exists()
    assert not sorted_path(run.output).exists()


def test_shards_of_several_folders_and_links_are_merged(run: Shards) -> None:
    run.compute(2)
    assert run() == 0
    one = run.output.read_bytes()
    first, second = run.paths()
    far = run.folder / "far"
    far.mkdir()
    for path in (second, second.with_name("d.results.1-of-2.stats.json")):
        path.rename(far / path.name)
    link = run.folder / "any.jsonl"
    link.symlink_to(far / second.name)
    output = run.folder / "all.jsonl"
    said = run.refused(first, far / second.name)
    assert said == "the names of the shards do not give one name for the merged file\n-o data.results.jsonl"
    assert run.merge(first, link, output=output) == 0
    assert output.read_bytes() == one


def test_memory_does_not_grow_with_the_rows(run: Shards) -> None:
    def peak(rows: int) -> int:
        for number in range(4):
            path = run.folder / f"d.results.{number}-of-4.jsonl"
            text = "x" * 900
            lines = (encode_line({"id": None, "index": index, "text": text}) for index in range(number, rows, 4))
            written = write_in_order(path, lines)
            run.edit_stats(number, 4, lambda report, written=written: report.update(output_file=written))
        tracemalloc.start()
        try:
            assert run.merge(overwrite=True) == 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    run.compute(4)
    small, large = peak(400), peak(8000)
    assert run.output.stat().st_size > 7_000_000
    assert large - small < 300_000


def test_shards_of_standard_input_with_different_ends(run: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings are the same, and all rows of one shard."""
    lines = [b'{"id": %d, "prompt": "%s"}\n' % (i, b"x" * 200) for i in range(1000)]
    other = [*lines[:990], b'{"prompt": "another"}\n', *lines[991:]]

    def compute(lines: list[bytes], number: int, **options: Any) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"".join(lines))))
        run(input="-", output=run.folder / f"d.results.{number}-of-2.jsonl", shard=Shard(number, 2), **options)

    compute(lines, 0)
    compute(other, 1)
    assert "not of the same job" in run.refused()
    assert "input.sha256: " in run.refused()
    with pytest.raises(InputError, match=r"different job: input\.size: .*; input\.sha256: "):
        compute(other, 0)
    compute(lines, 1, overwrite=True)
    assert run.merge() == 0
    assert "warning" not in run.log
    whole = run.output.read_bytes()
    assert [row["id"] for row in run.results()] == list(range(1000))
    compute(lines, 1)
    assert "finished already" in run.log
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"".join(lines))))
    assert run(input="-", output=run.folder / "one.jsonl") == 0
    assert (run.folder / "one.jsonl").read_bytes() == whole


def test_shards_of_the_same_first_rows_of_standard_input(run: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b'{"id": %d, "prompt": "%s"}\n' % (i, b"x" * 200) for i in range(1000)]
    for number in range(2):
        content = b"".join(lines if number else [*lines[:600], b'{"prompt": "after the limit"}\n'])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        output = run.folder / f"d.results.{number}-of-2.jsonl"
        run(input="-", output=output, shard=Shard(number, 2), limit=600)
    assert run.merge() == 0
    assert len(run.results()) == 600


def test_a_merge_whose_statistics_cannot_be_written_is_repeated(run: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    run.compute(2)

    def refuse(*_: object, **__: object) -> None:
        raise InputError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(merge, "write_report", refuse)
        with pytest.raises(InputError, match="no space left"):
            run.merge()
    assert run.merge() == 0
    assert not partial_path(run.output).exists()
