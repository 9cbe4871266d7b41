"""Weights in whole numbers on CUDA, where they stay packed, against the dequantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import LlamaConfig

from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.weight_loader import WeightLoader
from tests.coins import plain_logits
from tests.integer_checkpoints import FORMATS, integer_checkpoint
from tests.models.formats import test_gguf as gguf
from tests.models.formats.test_gguf_integers import MIXED
from tests.models.test_quantization import texts
from tests.tiny_models import attention_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = {"hidden_size": 320, "intermediate_size": 448, "num_attention_heads": 5, "num_key_value_heads": 5}


@pytest.mark.parametrize("section", FORMATS.values(), ids=FORMATS)
def test_logits_are_those_of_the_dequantised_model(section: dict[str, Any], tmp_path: Path) -> None:
    """One token, a few and many are computed. Dequantised weights are rounded, packed ones are not."""
    integer_checkpoint(tmp_path, section, **SIZES)
    check_logits(tmp_path)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_logits_of_gguf_files_that_mix_types(kind: Q, tmp_path: Path) -> None:
    """Most layers are in this type. 13 tokens are multiplied by the direct kernel, too."""
    config = LlamaConfig(**gguf.SIZES)
    gguf.write(tmp_path / "m.gguf", config, gguf.state_of(config), kind, kinds=MIXED)
    check_logits(tmp_path / "m.gguf")


def check_logits(path: Path) -> None:
    found = open_checkpoint(path)
    assert found.quantization is not None
    for dtype, largest in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        decoders = [
            Decoder(
                found.config,
                WeightLoader(found.tensors, dtype, CUDA, quantization=quantization),
                attention_of(found.config, CUDA),
                128,
            )
            for quantization in (found.quantization, found.quantization.dequantised())
        ]
        for num_tokens in (1, 7, 13, 100):
            with torch.inference_mode():
                kept, plain = (plain_logits(one, [3 + i % 37 for i in range(num_tokens)]).float() for one in decoders)
            assert float((kept - plain).norm() / plain.norm()) < largest, (dtype, num_tokens)


@pytest.mark.parametrize("graphs", ["none", "round"])
def test_speculation_in_graphs(graphs: str, tmp_path: Path) -> None:
    """Sums of many and of few tokens differ in a last bit, so not all texts are equal; a deterministic run dequantises
    the weights."""
    integer_checkpoint(tmp_path, FORMATS["awq"], **SIZES)
    sets = ["engine.device=cuda", "model.dtype=bfloat16", f"engine.cuda_graphs={graphs}"]
    plain = texts(tmp_path, *sets, "speculation.method=none")
    drafted = texts(tmp_path, *sets, "speculation.method=ngram")
    equal = sum(next((k for k in range(14) if a[k] != b[k]), 14) for a, b in zip(plain, drafted, strict=True))
    assert equal >= 8
    sets.append("engine.deterministic=true")
    assert texts(tmp_path, *sets, "speculation.method=none") == texts(tmp_path, *sets, "speculation.method=ngram")
