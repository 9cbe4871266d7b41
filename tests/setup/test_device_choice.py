"""Which device and dtype a run gets, and that a GPU which cannot be used does not pass in silence."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.job.terminal import print_notes
from specbatch.setup.device import Driver, find_driver, resolve_device, resolve_dtype, why_unused
from specbatch.setup.resolve import resolve

CUDA = torch.device("cuda")
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:42:15 UTC 2024\nGCC version: 12.3.0\n"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.fixture(autouse=True)
def _visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi


def machine(root: Path, *, version: str | None = "535.104.05", device: bool = True) -> Path:
    (root / "dev").mkdir()
    if device:
        (root / "dev/nvidia0").touch()
    if version is not None:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(MODULE.format(version))
    return root


def test_the_driver_is_found(tmp_path: Path) -> None:
    assert find_driver(machine(tmp_path)) == Driver("535.104.05", True)


def test_a_container_that_was_given_no_gpu(tmp_path: Path) -> None:
    assert find_driver(machine(tmp_path, device=False)) == Driver("535.104.05", False)


def test_a_device_of_unknown_driver(tmp_path: Path) -> None:
    assert find_driver(machine(tmp_path, version=None)) == Driver(None, True)


def test_a_machine_without_gpu(tmp_path: Path) -> None:
    assert find_driver(machine(tmp_path, version=None, device=False)) is None


def test_the_open_kernel_module(tmp_path: Path) -> None:
    root = machine(tmp_path)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\n"
    (root / "proc/driver/nvidia/version").write_text(line)
    assert find_driver(root) == Driver("580.65.06", True)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 570.86.10", Driver("570.86.10", True)),
        ("echo No devices were found; exit 6", None),
        ("exit 9", None),
    ],
)
def test_nvidia_smi_is_asked(
    script: str, found: Driver | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_driver(machine(tmp_path, version=None, device=False)) == found


@pytest.mark.parametrize(
    ("driver", "version", "cuda", "words"),
    [
        (Driver("580.65.06", True), "2.11.0+cpu", None, ("built for CPUs", "580.65.06", "2.11.0+cpu", "cu130")),
        (Driver("535.104.05", True), "2.11.0+cpu", None, ("built for CPUs", "cu126")),
        (
            Driver("535.104.05", True),
            "2.11.0+cu130",
            "13.0",
            ("too old", "535.104.05", "13.0", "580 or later", "cu126"),
        ),
        (Driver("470.10", True), "2.11.0+cu126", "12.6", ("too old", "525 or later")),
        (Driver("580.65.06", False), "2.11.0+cu130", "13.0", ("no GPU is visible", "--gpus all")),
        (Driver(None, True), "2.11.0+cu130", "13.0", ("driver unknown", "torch.cuda.init()")),
        (Driver("580.65.06", True), "2.11.0+cu130", "13.0", ("cannot use it", "torch.cuda.init()")),
    ],
)
def test_the_mend_fits_the_cause(driver: Driver, version: str, cuda: str | None, words: tuple[str, ...]) -> None:
    text = why_unused(driver, version, cuda)
    assert all(word in text for word in words), text


@without_cuda
def test_a_gpu_that_stays_unused_is_warned_of() -> None:
    notes: list[str] = []
    assert resolve_device("auto", notes, lambda: Driver("535.104.05", True)) == torch.device("cpu")
    assert notes[0] == "engine.device: cpu (no CUDA device is there)"
    assert notes[1].startswith("warning: ")
    assert all(word in notes[1] for word in ("535.104.05", torch.__version__, "CPU"))


@without_cuda
def test_nothing_is_warned_of_without_a_gpu_or_by_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    resolve_device("auto", notes, lambda: None)
    resolve_device("cpu", notes, lambda: Driver("535.104.05", True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolve_device("auto", notes, lambda: Driver("535.104.05", True))
    assert not any(note.startswith("warning") for note in notes)
    assert notes[-1] == "engine.device: cpu (CUDA_VISIBLE_DEVICES hides the GPUs)"


@without_cuda
def test_a_gpu_that_is_asked_for_in_vain() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda", [], lambda: Driver("450.1", True))
    assert "450.1" in str(caught.value.hint)
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda", [], lambda: None)
    assert caught.value.hint == "use engine.device: cpu"


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_stand_out_on_a_terminal(terminal: bool) -> None:
    out = io.StringIO()
    colours = "standard" if terminal else None
    console = Console(
        file=out, force_terminal=terminal, color_system=colours, no_color=False, highlight=False
    )  # as that of stderr
    print_notes(["engine.device: [cpu]", "warning: slow"], console)
    plain, warning = out.getvalue().splitlines()
    assert plain == "engine.device: [cpu]"
    assert warning == ("\x1b[1;33mwarning: slow\x1b[0m" if terminal else "warning: slow")


@pytest.mark.parametrize("name", ["cpu:7", "cpu:1", "cpu:99999999999999999999", "mps", "tpu", "", "cuda:-1", "cpu:x"])
def test_devices_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name, [], lambda: None)


def test_a_device_that_is_none_exits_with_2() -> None:
    done = CliRunner().invoke(app, ["config", "--set", "engine.device=cpu:7", "--set", "model.target=random:tiny"])
    assert done.exit_code == 2
    assert "cpu:7" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_cpu_is_the_cpu() -> None:
    assert resolve(load_config(None, ["engine.device=cpu:0", "model.target=random:tiny"])).config.engine.device == "cpu"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_cards_before_ampere_compute_in_float16(capability: tuple[int, int]) -> None:
    notes: list[str] = []
    assert resolve_dtype("auto", CUDA, notes, lambda device: capability) == torch.float16
    assert notes[0].startswith(f"model.dtype: float16 (this GPU, of compute capability {capability[0]}.{capability[1]}")
    assert resolve_dtype("float32", CUDA, notes, lambda device: capability) == torch.float32
    with pytest.raises(ConfigError, match=r"bfloat16 needs .* 8\.0") as caught:
        resolve_dtype("bfloat16", CUDA, notes, lambda device: capability)
    assert "float16" in str(caught.value.hint)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_later_cards_compute_in_bfloat16(capability: tuple[int, int]) -> None:
    notes: list[str] = []
    assert resolve_dtype("auto", CUDA, notes, lambda device: capability) == torch.bfloat16
    assert notes == ["model.dtype: bfloat16 (the default on cuda)"]
    assert resolve_dtype("bfloat16", CUDA, notes, lambda device: capability) == torch.bfloat16
