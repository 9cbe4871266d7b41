"""configs/: one folder in a checkout and in an installed package, and recipes that load and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import specbatch
from specbatch.config_load import (
    configs_folder,
    default_config_text,
    find_config,
    load_config,
    packaged_configs,
    packaged_tasks,
)
from specbatch.errors import ConfigError
from specbatch.evals.load import load_task
from specbatch.setup.resolve import resolve
from tests import processes

ROOT = Path(specbatch.__file__).resolve().parent.parent
NEED_DOWNLOADS = {"llama-3.1-8b-eagle3", "llama-3.3-70b-two-gpus", "ngram-extraction", "qwen2.5-draft-model"}
ON_CPU = ["engine.device=cpu", "model.dtype=float32"]


def test_the_folder_holds_the_default_recipes_and_tasks() -> None:
    assert {"default", "plain", "builtin-cpu", "builtin-gpu", "builtin-gpu-tuned"} <= packaged_configs().keys()
    assert {"gsm8k", "gsm8k_chat", "humaneval", "mt_bench_speed"} <= packaged_tasks().keys()
    assert not list((ROOT / "specbatch").rglob("*.yaml")) or configs_folder() == ROOT / "specbatch" / "configs"


@pytest.mark.parametrize("name", packaged_configs())
def test_each_configuration_loads_strictly(name: str) -> None:
    path = packaged_configs()[name]
    config = load_config(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "it begins with what it is for"
    assert max(map(len, text.splitlines())) <= 120
    if name != "default":
        assert f"-c {name}" in text or f"-c configs/{name}.yaml" in text, "it says how it is run"
    assert config.speculation.schedule is None or config.speculation.num_steps is None


@pytest.mark.parametrize("name", sorted(packaged_configs().keys() - NEED_DOWNLOADS))
def test_each_configuration_that_needs_no_download_resolves(name: str) -> None:
    """With the GPU that it asks for, else on the CPU: models, draft shapes and schedule fit each other."""
    path = packaged_configs()[name]
    wants_gpu = load_config(path).engine.device == "cuda"
    sets = [] if not wants_gpu or torch.cuda.is_available() else [*ON_CPU, "speculation.simulate_acceptance=null"]
    if "llama-3-8b" in name and sets:  # its weights do not fit in the memory of every machine
        sets.append("model.target=random:tiny")
    config = resolve(load_config(path, sets)).config
    given = load_config(path).speculation
    if given.num_steps is not None:
        assert config.speculation.num_steps == given.num_steps
    if given.schedule is not None:
        assert config.speculation.schedule is not None
        assert [e.max_batch for e in config.speculation.schedule] == [e.max_batch for e in given.schedule]


@pytest.mark.parametrize("name", packaged_tasks())
def test_each_task_loads_strictly(name: str) -> None:
    assert load_task(packaged_tasks()[name]).name == name


def test_the_list_of_configurations_is_complete() -> None:
    text = (configs_folder() / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(.*?)\]\(\1\.yaml\)", text, flags=re.MULTILINE)
    assert set(re.findall(r"^\| \[(.*?)\]", text, flags=re.MULTILINE)) == packaged_configs().keys()


def test_a_file_wins_over_a_packaged_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("plain") == load_config(packaged_configs()["plain"])
    assert find_config(Path("plain")) == packaged_configs()["plain"]
    Path("plain").write_text("sampling: {max_tokens: 7}")
    assert load_config("plain").sampling.max_tokens == 7
    with pytest.raises(ConfigError) as caught:
        load_config("builtin-cup")
    assert caught.value.hint == "did you mean builtin-cpu?"
    with pytest.raises(ConfigError) as caught:
        load_config("zzz")
    assert all(name in (caught.value.hint or "") for name in packaged_configs())


def test_the_command_line_takes_a_packaged_name(tmp_path: Path) -> None:
    done = processes.run(tmp_path, "config", "-c", "plain", "--model", "random:tiny")
    assert done.returncode == 0, done.stderr
    assert "method: none" in done.stdout


def test_a_bare_checkout_finds_them(tmp_path: Path) -> None:
    """`python -m specbatch` in a clone that was not installed, from another folder."""
    if configs_folder() != ROOT / "configs":
        pytest.skip("no checkout")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "specbatch", clone / "specbatch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", clone / "configs")
    _uses_the_default(sys.executable, clone / "configs", tmp_path, str(clone))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installed_package_finds_them(tmp_path: Path, kind: str) -> None:
    """The wheel holds copies of configs/; an editable install reads the checkout's."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("no checkout")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", "build", "dist"))
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    (folder,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    # After its own packages those of the environment that runs the tests: pip, setuptools, PyYAML.
    (folder / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    target = ["-e", str(source)] if kind == "editable" else [str(source)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, *target], check=True, cwd=tmp_path, env=alone)
    if kind == "wheel":
        shutil.rmtree(source)
        assert sorted(p.name for p in (folder / "specbatch" / "configs").rglob("*.yaml")) == sorted(
            p.name for p in configs_folder().rglob("*.yaml")
        )
    found = source / "configs" if kind == "editable" else folder / "specbatch" / "configs"
    _uses_the_default(python, found, tmp_path, "")


def _uses_the_default(python: str, folder: Path, cwd: Path, path: str) -> None:
    code = "from specbatch.config_load import configs_folder as c; print(c())"
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == folder
    subprocess.run([python, "-m", "specbatch", "init", "mine.yaml"], cwd=cwd, env=env, capture_output=True, check=True)
    assert (cwd / "mine.yaml").read_text(encoding="utf-8") == default_config_text()
