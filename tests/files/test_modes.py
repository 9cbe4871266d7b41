"""Who can read the files of a job: those who could read the old ones, or those whom the umask allows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.files.paths import partial_path, stats_path_of
from specbatch.rows.shard import Shard
from tests.job.shards import Shards, native
from tests.job.test_changed_input import Meddling
from tests.job.test_generate import Run


class Modes:
    """A job in a folder, and the modes of its files, of temporary ones too, when they are replaced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = Run(folder)
        self.run.write(native(20))
        self.temporary: set[int] = set()
        replace, link = os.replace, os.link

        def watch(source: Path, target: Path) -> None:
            self.temporary.add(mode_of(source))
            replace(source, target)

        def watch_link(source: Path, target: Path) -> None:
            self.temporary.add(mode_of(source))
            link(source, target)

        monkeypatch.setattr("os.replace", watch)
        monkeypatch.setattr("os.link", watch_link)

    def files(self) -> set[int]:
        return {mode_of(self.run.output), mode_of(stats_path_of(self.run.output))}

    def watching(self) -> Meddling:
        """An engine that looks at the partial file."""
        return Meddling({2: lambda: self.temporary.add(mode_of(partial_path(self.run.output)))})


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modes]:
    before = os.umask(0o022)
    yield Modes(tmp_path, monkeypatch)
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_new_files_have_the_mode_of_the_umask(modes: Modes, umask: int) -> None:
    os.umask(umask)
    modes.run(engine=modes.watching())
    assert modes.files() == modes.temporary == {0o666 & ~umask}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_files_that_are_replaced_keep_their_mode(modes: Modes, mode: int) -> None:
    modes.run()
    for path in (modes.run.output, stats_path_of(modes.run.output)):
        path.chmod(mode)
    modes.temporary.clear()
    modes.run(overwrite=True, engine=modes.watching())
    modes.run(retry_errors=True)
    assert modes.files() == {mode}
    assert all(not found & ~mode for found in modes.temporary), "temporary files are not wider"


def test_new_statistics_have_the_mode_of_the_output(modes: Modes) -> None:
    modes.run()
    modes.run.output.chmod(0o600)
    stats_path_of(modes.run.output).unlink()
    modes.run(overwrite=True)
    assert modes.files() == {0o600}


def test_a_merged_file_keeps_its_mode(modes: Modes) -> None:
    shards = Shards(modes.run.folder)
    for number in range(2):
        shards(shard=Shard(number, 2))
    shards.merge()
    for path in (modes.run.output, stats_path_of(modes.run.output)):
        path.chmod(0o600)
    modes.temporary.clear()
    shards.merge(overwrite=True)
    assert modes.files() == modes.temporary == {0o600}
