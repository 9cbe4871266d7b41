"""The FlashInfer backend without FlashInfer: over a fake of its wrapper in torch that reads the same buffers.
`test_flashinfer.py` runs the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import specbatch.setup.engine as engine_settings
from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.cache.pages import KVScales
from specbatch.config import Config, EngineSection
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, ModelError
from specbatch.models.config import ModelConfig
from specbatch.setup.cache import check_flashinfer
from specbatch.setup.speculation import check_mask_size
from specbatch.types import SamplingParams
from tests import fake_flashinfer
from tests.marks import slow_on_cpu
from tests.tiny_models import random_prompts, run, tiny_config, tiny_device_engine

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("eagle", DraftShape(5, 4, 8)),
    ("eagle3", DraftShape(4, 4, 34)),  # masks of two words
    slow_on_cpu("eagle3", DraftShape(7, 10, 60)),
]


@pytest.mark.skipif(CUDA, reason="the fake reads device memory from the host")
@pytest.mark.parametrize(("method", "shape"), SHAPES)
def test_engine_over_the_fake_gives_the_same_tokens(
    method: str, shape: DraftShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: prompts in chunks, a batch that grows and shrinks, recomputed requests, every kind of round."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "made", 0)
    prompts = random_prompts(8, seed=1, longest=30, shared=6)
    num_pages = 40 if shape is not None and shape.topk > 1 else 24
    settings = {"num_pages": num_pages, "prefill_chunk_tokens": 17, "eos": (5,)}
    params = SamplingParams(max_tokens=16)
    expected = run(tiny_device_engine(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(method, shape, **settings, backend=FlashInferAttention)
    assert [c.token_ids for c in run(engine, prompts, params)] == [c.token_ids for c in expected]
    assert engine.stats.preemptions > 0
    assert fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made > 0, "something else computed it"


@pytest.mark.skipif(CUDA, reason="plans on the CPU")
def test_another_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing buffers under other names would have no effect."""

    class Renamed(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            del self._custom_mask_buf

    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Renamed)
    engine = tiny_device_engine(backend=FlashInferAttention)
    with pytest.raises(ModelError, match="keeps its buffers in another way"):
        run(engine, [[1, 2, 3]], SamplingParams(max_tokens=2))


def has_packages(*names: str) -> object:
    return lambda name: object() if name in names else None


@pytest.mark.parametrize(
    ("device", "dtype", "packages", "message", "hint"),
    [
        ("cuda", torch.bfloat16, ("triton",), "flashinfer-python, which is not installed", "specbatch[gpu]"),
        ("cuda", torch.bfloat16, ("flashinfer",), "needs the package triton", "torch"),
        ("cuda", torch.float32, ("triton", "flashinfer"), "bfloat16 or float16, not cuda and float32", "triton"),
        ("cpu", torch.bfloat16, ("triton", "flashinfer"), "needs a CUDA device", "torch"),
    ],
)
def test_what_flashinfer_needs(
    device: str, dtype: torch.dtype, packages: tuple[str, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_settings.importlib.util, "find_spec", has_packages(*packages))
    with pytest.raises(ConfigError, match=message) as error:
        engine_settings.resolve_engine(
            Config(engine=EngineSection(attention="flashinfer")), torch.device(device), dtype, []
        )
    assert hint in str(error.value.hint)


def test_flashinfer_runs_under_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings.importlib.util, "find_spec", has_packages("triton", "flashinfer"))
    device, notes = torch.device("cuda"), []
    settings = engine_settings.resolve_engine(
        Config(engine=EngineSection(attention="flashinfer")), device, torch.float16, notes
    )
    assert (settings.attention, settings.graphs) == ("flashinfer", "round")
    assert engine_settings.resolve_engine(Config(), device, torch.float16, notes).attention == "triton"


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "message"),
    [
        ({"head_dim": 80}, torch.bfloat16, "heads of 64, 128, 256, not 80"),
        ({"head_dim": 64, "sliding_windows": (None, 128)}, torch.bfloat16, "no sliding windows"),
        ({"head_dim": 64, "attention_soft_cap": 50.0}, torch.bfloat16, "no soft caps"),
        ({"head_dim": 64, "attention_sinks": True}, torch.bfloat16, "no attention sinks"),
        ({"head_dim": 64}, torch.float8_e4m3fn, "no fp8_e4m3 cache with heads of 64"),
        ({"head_dim": 128}, torch.float8_e4m3fn, None),
        ({"head_dim": 64}, torch.bfloat16, None),
    ],
)
def test_models_that_flashinfer_knows(changes: dict, kv_dtype: torch.dtype, message: str | None) -> None:
    config: ModelConfig = tiny_config(**changes)
    if message is None:
        check_flashinfer(config, kv_dtype)
        return
    with pytest.raises(ConfigError, match=message) as error:
        check_flashinfer(config, kv_dtype)
    assert "engine.attention: triton" in str(error.value.hint)


def test_no_scales_of_a_checkpoint() -> None:
    config, scales = tiny_config(head_dim=128), [KVScales(), KVScales(0.5, 1.0)]
    check_flashinfer(config, torch.float8_e4m3fn, scales[:1])
    check_flashinfer(config, torch.bfloat16, scales)
    with pytest.raises(ConfigError, match="flashinfer does not read an fp8_e4m3 cache with the scales"):
        check_flashinfer(config, torch.float8_e4m3fn, scales)


def test_the_package_is_optional() -> None:
    """Importing the backend must not import flashinfer, which CPU users do not have."""
    source = Path(engine_settings.__file__).parents[1] / "attention" / "flashinfer.py"
    assert not any(
        line.startswith(("import flashinfer", "from flashinfer")) for line in source.read_text().splitlines()
    )


def test_masks_of_more_than_two_gib_are_refused() -> None:
    check_mask_size(DraftShape(7, 1, 8), 1024, 2**20)  # chains have none
    check_mask_size(DraftShape(7, 10, 60), 256, 8192)
    with pytest.raises(ConfigError, match=r"at most 2 GiB.* take 2\.0"):
        check_mask_size(DraftShape(7, 10, 128), 1024, 131072)
