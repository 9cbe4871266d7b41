"""What engine.deterministic runs with, and what it makes part of a job."""

from __future__ import annotations

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.results.fingerprint import differences
from specbatch.setup.deterministic import bits_depend_on, check_deterministic, check_kv_dtype
from specbatch.setup.resolve import resolve
from tests.scaleout.simulation import description

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_what_runs_on_cuda() -> None:
    check_deterministic(CUDA, torch.bfloat16, "triton")
    check_deterministic(CUDA, torch.float16, "triton")
    check_kv_dtype(CUDA, torch.bfloat16)
    check_kv_dtype(CPU, torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="does not run with an FP8 KV cache"):
        check_kv_dtype(CUDA, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("device", "dtype", "attention", "message"),
    [
        (CUDA, torch.bfloat16, "flashinfer", "attention triton on CUDA, not flashinfer"),
        (CUDA, torch.bfloat16, "torch", "attention triton on CUDA, not torch"),
        (CUDA, torch.float32, "triton", "bfloat16 or float16 on CUDA, not float32"),
        (CPU, torch.bfloat16, "torch", "float32 on a CPU, not bfloat16"),
    ],
)
def test_what_is_not_invariant_is_refused_by_name(
    device: torch.device, dtype: torch.dtype, attention: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_deterministic(device, dtype, attention)


def test_a_torch_without_onednn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["engine.device=cpu", "model.target=random:tiny", "engine.deterministic=true"])
    resolve(config)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs oneDNN"):
        resolve(config)


def test_threads_and_versions_are_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["engine.device=cpu", "model.target=random:tiny"]
    plain = resolve(load_config(None, options))
    assert plain.bits_depend_on == {}
    run = resolve(load_config(None, [*options, "engine.deterministic=true"]))
    jobs = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        jobs.append(description(config=run.config, bits_depend_on=bits_depend_on(CPU, {})).fingerprint({}, None))
    assert differences(*jobs) == ["threads (engine.deterministic): 1 -> 3"]
    added = {name: value for name, value in jobs[0].items() if name.endswith(" (engine.deterministic)")}
    assert list(added.values()) == ["cpu (A)", torch.__version__, "1", torch.backends.cpu.get_cpu_capability()]
    assert run.bits_depend_on["torch"] == torch.__version__
    assert not added.keys() & description(config=plain.config).fingerprint({}, None).keys()


def test_instructions_are_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bits_depend_on(CPU, {})
    variables = {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "", "HOME": "/"}
    assert bits_depend_on(CPU, variables) == before | {"MKL_CBWR": "AVX2"}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert bits_depend_on(CPU, {}) == before | {"instructions": "OTHER"}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings the library along")
def test_a_torch_without_cublaslt_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="needs cuBLASLt on CUDA"):
        bits_depend_on(CUDA)


@pytest.mark.gpu
def test_the_library_of_gemms_is_part_of_the_job() -> None:
    assert int(bits_depend_on(CUDA)["cuBLASLt"]) > 120000
