"""Resume never mixes two models, and a finished output is the one that was written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specbatch.config_load import load_config
from specbatch.errors import InputError
from specbatch.files.paths import partial_path
from specbatch.results.fingerprint import ModelFiles, differences, job_fingerprint
from specbatch.results.results import ResultFile
from specbatch.rows.sources import RawRow
from tests.job.finished import finished
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine

MIB = 1 << 20
LAYERS, LAYER = 32, MIB  # of the model below: each with two small matrices that a LoRA merge would change
ROW = RawRow(0, b"{}")


def test_a_file_from_before_an_option_existed_ran_with_its_default() -> None:
    old = {"engine.seed": 0, "limit": None}
    assert differences(old, {**old, "engine.tensor_parallel": 1, "engine.deterministic": False}) == []
    assert differences(old, {**old, "engine.tensor_parallel": 2}) == ["engine.tensor_parallel: 1 -> 2"]
    assert differences(old, {**old, "shard": "1/2"}) == ["shard: none -> 1/2"], "no option"


def test_a_job_of_a_version_without_the_option_backend_was_native() -> None:
    old = job_fingerprint(load_config(None, ["model.backend=native"]), {}, None)
    assert "model.backend" not in old
    other = job_fingerprint(load_config(None, ["model.backend=transformers"]), {}, None)
    assert differences(old, other) == ["model.backend: auto -> transformers"]


def test_workers_are_no_part_of_a_job() -> None:
    many = load_config(None, ["cluster.workers=8", "cluster.resources={a100: 1}", "cluster.max_deaths=1"])
    assert job_fingerprint(many, {}, None) == job_fingerprint(load_config(), {}, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "U8", "shape": [LAYERS * LAYER], "data_offsets": [0, LAYERS * LAYER]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for layer in range(LAYERS):
            file.write(bytes([layer]) * LAYER)
    (folder / "config.json").write_text("{}")
    return folder


def write_at(file: Path, offset: int, data: bytes, *, keep_time: bool = False) -> None:
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
    changed = stat.st_mtime_ns if keep_time else stat.st_mtime_ns + 10**9
    os.utime(file, ns=(stat.st_atime_ns, changed))


def digest(folder: Path) -> str:
    return ModelFiles({"model.target": folder}).digests["model.target"]


def test_a_merged_lora_is_another_model_even_with_its_time_set_back(model: Path) -> None:
    """It changes a tenth of each layer, and neither end of the file."""
    before = digest(model)
    assert digest(model) == before
    weights = model / "model.safetensors"
    for layer in range(1, LAYERS - 1):
        write_at(weights, layer * LAYER + LAYER // 3, b"x" * (LAYER // 10), keep_time=True)
    assert digest(model) != before


def test_the_header_and_small_files_are_hashed_whole(model: Path) -> None:
    found = {digest(model)}
    write_at(model / "model.safetensors", 40, b"x", keep_time=True)
    found.add(digest(model))
    (model / "config.json").write_text('{"a": 1}')
    found.add(digest(model))
    (model / "merges.txt").write_text("a b")
    found.add(digest(model))
    assert len(found) == 4


def test_a_long_header_is_hashed_whole(model: Path) -> None:
    """It says where in the file each tensor is; of models with many tensors it is longer than a block."""
    weights = model / "model.safetensors"
    header = json.dumps({"w": "x" * 200_000}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(LAYERS * LAYER))
    before = digest(model)
    write_at(weights, 150_000, b"y", keep_time=True)
    assert digest(model) != before


def touch(weights: Path) -> None:
    write_at(weights, 0, b"")


def edit(weights: Path) -> None:
    """Between two of the blocks that are hashed at the start."""
    before = digest(weights.parent)
    write_at(weights, 5 * LAYER // 2 + 100_000, b"x")
    assert digest(weights.parent) == before


@pytest.mark.parametrize(
    ("change", "hashed", "named"),
    [
        (touch, True, None),
        (edit, True, "model.target/model.safetensors: written"),
        # The first session was too short to hash the whole file.
        (touch, False, "model.target/model.safetensors: written"),
        (edit, False, "model.target/model.safetensors: written"),
    ],
)
def test_weights_with_another_time(
    tmp_path: Path, model: Path, change: Callable[[Path], None], hashed: bool, named: str | None
) -> None:
    output = tmp_path / "o.jsonl"
    logged: list[str] = []

    def session() -> tuple[ResultFile, ModelFiles]:
        models = ModelFiles({"model.target": model}, logged.append)
        return ResultFile(output, dict(models.digests), models, overwrite=False), models

    results, models = session()
    if hashed:
        thread = models.hash_later(after_seconds=0)
        assert thread is not None
        thread.join()
    results.append(finished(0, ROW.digest(), {"index": 0, "error": {"type": "x"}}))
    results.close()
    session()[0].close()  # an unchanged model is read no further
    assert not logged

    change(model / "model.safetensors")
    content = partial_path(output).read_bytes()
    if named is not None:
        with pytest.raises(InputError, match=named) as caught:
            session()
        assert "--overwrite" in (caught.value.hint or "")
        assert partial_path(output).read_bytes() == content
        return
    for _ in range(2):
        results, models = session()
        assert results.is_done(ROW)
        assert models.hash_later() is None  # the hash is known already
        results.close()
    assert len(logged) == 1  # the new time was written down, too
    assert "it is read whole" in logged[0]


def test_weights_are_known_of_a_job_that_was_killed_at_once(tmp_path: Path, model: Path) -> None:
    """Before anything else has written them down."""

    def session() -> ResultFile:
        models = ModelFiles({"model.target": model})
        return ResultFile(tmp_path / "o.jsonl", dict(models.digests), models, overwrite=False)

    results = session()
    results.append(finished(0, ROW.digest(), {"index": 0, "error": {"type": "x"}}))
    results._file.close()  # as the end of a process does
    edit(model / "model.safetensors")
    with pytest.raises(InputError, match="written"):
        session()


def test_a_file_that_changes_while_it_is_hashed_is_not_known(model: Path) -> None:
    models = ModelFiles({"model.target": model})
    touch(model / "model.safetensors")
    thread = models.hash_later(after_seconds=0)
    assert thread is not None
    thread.join()
    assert [entry["sha256"] for entry in models.record().values()] == [None]


def test_hashing_ends_with_the_job(model: Path) -> None:
    models = ModelFiles({"model.target": model})
    thread = models.hash_later()
    assert thread is not None
    models.close()
    thread.join(10)
    assert not thread.is_alive()


def test_the_command_refuses_a_model_that_changed_between_sessions_and_while_it_was_loaded(
    tmp_path: Path, model: Path
) -> None:
    run = Run(tmp_path)
    run.models = {"model.target": model}
    run.write([{"prompt": f"p{i}"} for i in range(30)])
    weights = model / "model.safetensors"
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=4))
    edit(weights)
    with pytest.raises(InputError, match=r"different job: model\.target/model\.safetensors: written 20"):
        run()
    assert run(overwrite=True) == 0
    assert run() == 0
    before = weights.stat().st_mtime_ns
    edit(weights)
    with pytest.raises(InputError, match=r"result of a different job: model\.target/model\.safetensors: written"):
        run()
    os.utime(weights, ns=(before, before))
    assert run() == 0

    run.on_build = lambda: touch(weights)
    with pytest.raises(InputError, match="changed while it was loaded"):
        run(overwrite=True)


def test_16_gb_are_identified_in_seconds(tmp_path: Path) -> None:
    """Sparse, so that it costs no disk: the number of bytes that are read is what counts."""
    for number in range(4):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write((2).to_bytes(8, "little") + b"{}")
            file.truncate(4 << 30)
    began = time.perf_counter()
    digest(tmp_path)
    assert time.perf_counter() - began < 10  # about 0.05 where nothing else runs


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda text: b"", r"bytes: \d+ -> 0"),
        (lambda text: text[: text.index(b"\n") + 1], "rows: 5 -> 1"),
        (lambda text: text.replace(b'"index": 3', b'"index": 9'), "sha256: "),
    ],
)
def test_a_finished_output_that_was_edited_or_emptied(
    tmp_path: Path, edit: Callable[[bytes], bytes], named: str
) -> None:
    run = Run(tmp_path)
    run.write([{"prompt": f"p{i}"} for i in range(5)])
    assert run() == 0
    whole = run.output.read_bytes()
    run.output.write_bytes(edit(whole))
    with pytest.raises(InputError, match="was changed after it was finished: .*" + named) as caught:
        run()
    assert "--overwrite" in (caught.value.hint or "")
    assert run(overwrite=True) == 0
    assert run.output.read_bytes() == whole
    # Statistics of older versions tell only the number of rows.
    path = run.folder / "d.results.stats.json"
    stats = run.stats()
    del stats["output_file"]
    path.write_text(json.dumps(stats))
    assert run() == 0
    run.output.write_bytes(b"")
    with pytest.raises(InputError, match="rows: 5 -> 0"):
        run()
