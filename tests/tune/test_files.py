"""What tune writes replaces no file of somebody else; found before anything is traced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbatch.config import Config
from specbatch.errors import InputError
from specbatch.tune.start import (
    COSTS,
    IDENTITY,
    TuneOptions,
    cache_folder,
    open_input,
    plot_paths,
    report_path,
    tuned_files,
)

TUNED = "# Written by `specbatch tune`.\nmodel: {}\n"
REPORT = '{"verdict": "", "made_by": {}}'
KNOWN = '{"kinds": [], "widest": {}}'


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    return Path("tuned.yaml")


def opened(output: Path, data: str = "rows.jsonl", config_file: Path | None = None) -> Path:
    return open_input(TuneOptions(data, output, None, 60.0, config_file), Config()).output


def test_a_first_and_a_second_tuning(output: Path) -> None:
    assert opened(output) == output
    output.write_text(TUNED)
    report_path(output).write_text(REPORT)
    cache_folder(output).mkdir()
    (cache_folder(output) / IDENTITY).write_text(KNOWN)
    for path in (*plot_paths(output), cache_folder(output) / COSTS):
        path.write_bytes(b"\x89PNG")
    assert {file.path for file in tuned_files(output) if file.path.exists()} >= {output, *plot_paths(output)}
    assert opened(output) == output


@pytest.mark.parametrize(
    "path",
    [
        "tuned.yaml",
        "tuned.report.json",
        "tuned.throughput.png",
        f"tuned.measured/{IDENTITY}",
        f"tuned.measured/{COSTS}",
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_files_of_others(output: Path, path: str, link: bool) -> None:
    Path("other").write_text("precious: 1\n")
    cache_folder(output).mkdir()
    if link:
        Path(path).symlink_to(Path("other").absolute())
    else:
        Path(path).write_text("precious: 1\n")
    with pytest.raises(InputError, match=r"was not written by specbatch|is a link"):
        opened(output)
    assert Path(path).read_text() == Path("other").read_text() == "precious: 1\n"


def test_the_configuration_and_the_input_are_kept(output: Path) -> None:
    output.write_text(TUNED)
    with pytest.raises(InputError, match=r"tuned\.yaml is the configuration"):
        opened(output, config_file=output)
    Path("specbatch.yaml").write_text(TUNED)
    with pytest.raises(InputError, match=r"specbatch\.yaml is the configuration"):
        opened(Path("specbatch.yaml"))
    report_path(output).write_text('{"prompt": "a"}\n' * 4)
    with pytest.raises(InputError, match=r"tuned\.report\.json is the input"):
        opened(output, data="tuned.report.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("-", "no .yaml file"),
        ("tuned.json", "no .yaml file"),
        ("no/tuned.yaml", "does not exist"),
        ("folder.yaml", "is a folder"),
        ("pipe.yaml", "is a pipe"),
        ("s3://x/tuned.yaml", "s3: is not supported"),
        ("x" * 245 + ".yaml", "File name too long"),
    ],
)
def test_impossible_outputs(output: Path, name: str, message: str) -> None:
    Path("folder.yaml").mkdir()
    os.mkfifo("pipe.yaml")
    with pytest.raises(InputError) as caught:
        opened(Path(name))
    assert message in caught.value.message


def test_measurements_that_are_no_folder(output: Path) -> None:
    cache_folder(output).write_text("precious")
    with pytest.raises(InputError, match="Not a directory"):
        opened(output)


def test_a_linked_output_is_written_where_it_points_to(output: Path, tmp_path: Path) -> None:
    Path("far").mkdir()
    output.symlink_to("far/best.yaml")
    assert opened(output) == tmp_path.resolve() / "far" / "best.yaml"
