"""A model of many files takes little more memory than its own while it is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specbatch.models.config import MoeConfig, expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.formats.tensor_files import SafetensorsSource, open_tensors
from specbatch.models.weight_loader import WeightLoader
from tests.tiny_models import CPU, attention_of, tiny_config

SHARD_BYTES, NUM_SHARDS = 12 << 20, 8
CONFIG = tiny_config(
    4, hidden=512, moe=MoeConfig(16, 2, 512, norm_topk_prob=True, layers=(True,) * 4), model_type="qwen3_moe"
)


def mapped_bytes() -> int:
    """Return the bytes of files in this process's memory."""
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def write_sharded(folder: Path) -> dict[str, Tensor]:
    """Write a model in bfloat16. Return its tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in expected_tensors(CONFIG).items()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(one.nbytes for one in shards[-1].values()) > total / NUM_SHARDS:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert total / len(shards) > SHARD_BYTES
    return tensors


class Watched:
    """Loads tensors, and records the largest number of bytes of files in memory."""

    def __init__(self, source: SafetensorsSource) -> None:
        self.source, self.began = source, mapped_bytes()
        self.peak = 0

    def load(self, name: str) -> Tensor:
        tensor = self.source.load(name)
        tensor.view(torch.uint8).sum()  # reads it
        self.peak = max(self.peak, mapped_bytes() - self.began)
        return tensor


def test_a_model_of_many_files_is_read_two_files_at_a_time(tmp_path: Path) -> None:
    """A file stays in memory as long as it is open. Layers begin in one file and end in the next one."""
    tensors = write_sharded(tmp_path)
    source = open_tensors(tmp_path)
    assert isinstance(source, SafetensorsSource)
    watched = Watched(source)
    decoder = Decoder(CONFIG, WeightLoader(watched, torch.float32, CPU), attention_of(CONFIG, CPU), 64)
    assert watched.peak < 2.5 * 1.2 * SHARD_BYTES
    assert len(decoder.layers) == 4
    for name in ("model.layers.3.mlp.experts.15.down_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(source.load(name), tensors[name]), "a file that was closed is opened again"


def test_tensors_of_a_file_that_was_closed_stay(tmp_path: Path) -> None:
    tensors = write_sharded(tmp_path)
    source = open_tensors(tmp_path)
    kept = {name: source.load(name) for name in tensors}
    source.close()
    assert all(torch.equal(kept[name], tensors[name]) for name in tensors)
    with pytest.raises(KeyError):
        source.load("model.norm.weight")
