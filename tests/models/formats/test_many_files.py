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
from specbatch.models.formats.stacked_experts import unstacked
from specbatch.models.formats.tensor_files import TensorSource, open_tensors
from specbatch.models.weight_loader import WeightLoader
from tests.tiny_models import CPU, attention_of, tiny_config

NUM_SHARDS = 8
CONFIG = tiny_config(
    4, hidden=256, moe=MoeConfig(16, 2, 512, norm_topk_prob=True, layers=(True,) * 4), model_type="qwen3_moe"
)


def mapped_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files in this process's memory."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            counts = f"{folder}/" in line
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the experts of a layer in one tensor of gate and up, and one of down."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{kind}_proj.weight"] for expert in range(16)])
            for kind in ("gate", "up", "down")
        )
        found |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    return dict(sorted(found.items()))


def write_sharded(folder: Path, *, is_stacked: bool = False) -> dict[str, Tensor]:
    """Write a model in bfloat16. Return its tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in expected_tensors(CONFIG).items()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in (stacked(tensors) if is_stacked else tensors).items():
        if sum(one.nbytes for one in shards[-1].values()) > total / NUM_SHARDS:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert total > 4 * max(sizes)
    return tensors


class Watched:
    """Loads tensors, and records the largest number of bytes of files in memory."""

    def __init__(self, source: TensorSource, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.peak = self._count = 0

    def load(self, name: str) -> Tensor:
        tensor = self.source.load(name)
        tensor.view(torch.uint8).sum()  # reads it
        self._count += 1
        if self._count % 8 == 0:  # it takes milliseconds
            self.peak = max(self.peak, mapped_bytes(self.folder))
        return tensor


@pytest.mark.parametrize("is_stacked", [False, True], ids=["one tensor an expert", "stacked"])
def test_a_model_of_many_files_is_read_two_files_at_a_time(tmp_path: Path, is_stacked: bool) -> None:
    """A file stays in memory as long as it is open. Layers begin in one file and end in the next one."""
    tensors = write_sharded(tmp_path, is_stacked=is_stacked)
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    source = unstacked(open_tensors(tmp_path), CONFIG)
    watched = Watched(source, tmp_path)
    decoder = Decoder(CONFIG, WeightLoader(watched, torch.float32, CPU), attention_of(CONFIG, CPU), 64)
    assert largest < watched.peak < 2.1 * largest
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
