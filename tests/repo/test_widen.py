"""scripts/bench/widen.py: the larger model computes what the small one does, and so does its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from specbatch.models.formats.eagle_files import open_eagle_head
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from tests.eagle_reference import VOCAB, head_tensors, random_target, write_head
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, attention_of

pytestmark = pytest.mark.usefixtures("scripts")


def logits_of(target: Checkpoint, head_path: Path) -> tuple[Tensor, Tensor]:
    """Return the logits of a target and of its head after each token of a text."""
    tokens = torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    layout = batch_of([Span([0, 1], 0, len(tokens))], 16, CPU)
    decoder = build_decoder(target.config, target.tensors, 64, torch.float64, CPU)
    opened = open_eagle_head(head_path, "eagle3", target)
    loader = WeightLoader(opened.tensors, torch.float64, CPU)
    head = EagleHead(opened.config, loader, decoder, attention_of(opened.config.decoder), 64)
    with torch.inference_mode():
        hidden, aux = decoder.forward(tokens, layout, decoder.new_cache(32, torch.float64), head.aux_layers)
        features = head.features(hidden, aux)
        drafted = head.forward(tokens.roll(-1), features, layout, head.new_cache(32, torch.float64))
        return decoder.raw_logits(hidden), head.raw_logits(drafted)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_wide_model_computes_the_same(tmp_path: Path, is_tied: bool) -> None:
    import widen

    small = random_target(tmp_path / "small", tie_word_embeddings=is_tied, rms_norm_eps=0.1)
    head = write_head(tmp_path / "head", head_tensors("eagle3", 23), 23, rms_norm_eps=0.1)
    shape = widen.Shape.parse("64x72x10")
    count = widen.widen_target(small, shape, tmp_path / "wide", torch.float32)
    widen.widen_head(head, small, shape, tmp_path / "wide-head", torch.float32)
    wide = open_checkpoint(tmp_path / "wide")
    sizes = wide.config.hidden_size, wide.config.intermediate_size, wide.config.num_layers, wide.config.num_kv_heads
    assert sizes == (64, 72, 10, 4)
    stored = [wide.tensors.load(name) for name in wide.tensors.shapes()]
    assert count == sum(tensor.numel() for tensor in stored)
    added = wide.tensors.load("model.layers.9.self_attn.q_proj.weight")
    assert bool(added.all()), "what added heads read is random"
    for found, expected in zip(logits_of(wide, tmp_path / "wide-head"), logits_of(small, head), strict=True):
        assert float(expected.std()) > 0.1
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("16x72x8", {}, "hidden_size is 16, and the model has 32"),
        ("64x72x7", {}, "num_layers is 7, and the model has 8"),
        ("64x72x8", {"attention_bias": True}, "only a Llama without biases"),
    ],
)
def test_what_cannot_be_widened_is_refused(tmp_path: Path, shape: str, changes: dict[str, Any], message: str) -> None:
    import widen

    small = random_target(tmp_path / "small", **changes)
    with pytest.raises(ValueError, match=message):
        widen.widen_target(small, widen.Shape.parse(shape), tmp_path / "wide", torch.float32)


def test_files_have_other_numbers_of_requests() -> None:
    import bench_drafts

    assert bench_drafts.sizes_of("extract,gsm8k:512") == {"extract": 0, "gsm8k": 512}
