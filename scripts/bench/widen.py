"""Writes a larger model that computes what a small Llama computes, with the costs of its own size.

    python scripts/bench/widen.py builtin:smollm2-135m-instruct wide --shape 8b
    python scripts/bench/bench_drafts.py --target wide/target --head wide/head --batch 64

Which drafts are accepted depends on the texts, and random weights write none that repeat. So methods of speculation are
compared with a model whose texts are real, and whose rounds take as long as those of a large model.

`OUT/target` is the model, with its tokenizer. `OUT/head` is its EAGLE-3 head, widened in the same way: the one that
comes with specbatch, or `--head`.

The first `h` of `H` numbers of the residual are those of the small model, and the others are 0:

- A norm divides by the root of a mean over H numbers instead of h. So its weight is multiplied by sqrt(h / H), and
  `rms_norm_eps` by h / H. The rounding is the same where H is 4, 16, ... times h.
- Heads and neurons are added. What they read is random, and `o_proj` and `down_proj` multiply their outputs by 0.
- So do all outputs of the layers that are added at the end.

Zeros take as long to multiply as other numbers, but less power: a GPU that is limited by its power can be a little
faster than with a trained model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specbatch.models.catalog import builtin_head
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.download import resolve_model
from specbatch.models.eagle_config import expected_eagle_tensors
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from specbatch.models.formats.eagle_files import LAYER_IDS, open_eagle_head
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.formats.tokenizer import load_tokenizer

_READ = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")  # layers whose added outputs are random
_STD = 0.02
_BLOCK = 1 << 20  # random numbers, which are repeated
_THREADS = 4  # files that are made at once, of about 0.4 GB each


@dataclass(frozen=True)
class Shape:
    """The sizes of the larger model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Read a name of SHAPES, or three numbers, such as 2304x5632x30. Raise ValueError if it is neither."""
        return SHAPES[text] if text in SHAPES else Shape(*map(int, text.split("x", 2)))

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the description of `config` in this shape. Raise ValueError if it does not contain the model."""
        ratio = config.num_heads // config.num_kv_heads
        num_kv_heads = self.hidden_size // config.head_dim // ratio
        wide = replace(
            config,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=ratio * num_kv_heads,
            num_kv_heads=num_kv_heads,
            rms_norm_eps=config.rms_norm_eps * config.hidden_size / self.hidden_size,
            sliding_windows=(None,) * self.num_layers,
        )
        names = ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads")
        for name in names:
            if getattr(wide, name) < getattr(config, name):
                raise ValueError(f"{name} is {getattr(wide, name)}, and the model has {getattr(config, name)}")
        return wide


# About 3.4, 6.2 and 15.8 GB of SmolLM2-135M in bfloat16. 2,304 is 4 times its hidden size.
SHAPES = {"1.7b": Shape(2304, 5632, 30), "3b": Shape(2304, 9984, 36), "8b": Shape(2304, 26112, 40)}


class Widening:
    """Makes the tensors of a larger model. `source`: those of the model, whose hidden size is `hidden_size`."""

    def __init__(self, source: TensorSource, hidden_size: int, wide_size: int, dtype: torch.dtype) -> None:
        self._source, self._hidden, self._dtype = source, hidden_size, dtype
        self._known = source.shapes()
        self._norm_scale = math.sqrt(hidden_size / wide_size)
        self._numbers = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * _STD).to(dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of the larger model, which has this shape there."""
        old = self._source.load(name) if name in self._known else None
        if "norm" in name:
            wide = torch.ones(shape, dtype=torch.float32)
            if old is not None:
                wide[: len(old)] = old
            return (wide * self._norm_scale).to(self._dtype)
        if old is not None and len(shape) == 1:  # the maps between vocabularies
            return old
        reads, is_fc = name.split(".")[-2] in _READ, name == "fc.weight"
        wide = self._random(shape) if reads else torch.zeros(shape, dtype=self._dtype)
        if old is not None:
            # A head's layer reads two vectors of the hidden size, and its fc three.
            num_inputs = old.shape[1] // self._hidden if reads or is_fc else 1
            old = old.view(len(old), num_inputs, -1)
            wide.view(len(wide), num_inputs, -1)[: len(old), :, : old.shape[2]] = old
        return wide

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        return self._numbers.repeat(-(-count // _BLOCK))[:count].view(shape)


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def config_json(wide: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": wide.vocab_size,
        "hidden_size": wide.hidden_size,
        "intermediate_size": wide.intermediate_size,
        "num_hidden_layers": wide.num_layers,
        "num_attention_heads": wide.num_heads,
        "num_key_value_heads": wide.num_kv_heads,
        "head_dim": wide.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": wide.rms_norm_eps,
        "rope_theta": wide.rope.theta,
        "max_position_embeddings": wide.max_position_embeddings,
        "tie_word_embeddings": wide.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": list(wide.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def check_plain(config: ModelConfig) -> None:
    """Raise ValueError if a model has what is not widened."""
    names = expected_tensors(replace(config, num_layers=1, sliding_windows=(None,)))
    if config.model_type != "llama" or config.rope.scaling != "none" or any(".bias" in name for name in names):
        raise ValueError("only a Llama without biases and without scaled positions is widened")


def widen_target(target: Checkpoint, shape: Shape, folder: Path, dtype: torch.dtype) -> int:
    """Write the larger model. Return the number of its parameters. Raise ValueError if it is not possible."""
    check_plain(target.config)
    wide = shape.of(target.config)
    widening = Widening(target.tensors, target.config.hidden_size, wide.hidden_size, dtype)
    files: dict[str, list[str]] = {}  # one file for each layer, and one for all else
    shapes = expected_tensors(wide)
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else "other"
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    folder.mkdir(parents=True, exist_ok=True)

    def write(file: str) -> None:
        save_file({name: widening.tensor(name, shapes[name]) for name in files[file]}, folder / file, {"format": "pt"})

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, files))
    count = sum(map(math.prod, shapes.values()))
    index = {name: file for file, names in files.items() for name in names}
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": count * dtype.itemsize}, "weight_map": index},
    )
    write_json(folder / "config.json", config_json(wide, dtype))
    return count


def widen_head(path: Path, target: Checkpoint, shape: Shape, folder: Path, dtype: torch.dtype) -> int:
    """Write the larger EAGLE-3 head, whose layer is as wide as the target's. Return the number of its parameters. Raise
    ValueError if it is not possible."""
    head = open_eagle_head(path, "eagle3", target)
    config = head.config
    check_plain(config.decoder)
    if config.input_norms != "none" or config.decoder.num_layers != 1 or config.has_fc_bias:
        raise ValueError("only an EAGLE-3 head of one layer, without norms and a bias of its fc, is widened")
    wide = replace(shape, num_layers=1).of(config.decoder)
    shapes = expected_eagle_tensors(replace(config, decoder=wide, feature_size=wide.hidden_size))
    widening = Widening(head.tensors, target.config.hidden_size, wide.hidden_size, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: widening.tensor(name, size) for name, size in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
    own |= {"norm_before_residual": config.norm_before_residual, LAYER_IDS: list(config.aux_layers)}
    write_json(folder / "config.json", config_json(wide, dtype) | own)
    return sum(map(math.prod, shapes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Llama: builtin:NAME, a folder or a .gguf file")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--head", help="its EAGLE-3 head; default: the one that comes with specbatch, if there is one")
    parser.add_argument(
        "--shape",
        type=Shape.parse,
        default=SHAPES["8b"],
        help=f"{', '.join(SHAPES)} (the default is 8b), or HIDDENxINTERMEDIATExLAYERS",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    dtype, path = getattr(torch, args.dtype), resolve_model(args.model)
    target, head = open_checkpoint(path), args.head or builtin_head(args.model, "eagle3")
    try:
        count = widen_target(target, args.shape, args.out / "target", dtype)
        print(f"{args.out / 'target'}: {count / 1e9:.2f} billion parameters, {count * dtype.itemsize / 1e9:.1f} GB")
        load_tokenizer(path).save_pretrained(args.out / "target")
        if head is not None:
            count = widen_head(resolve_model(head), target, args.shape, args.out / "head", dtype)
            print(f"{args.out / 'head'}: {count / 1e9:.2f} billion parameters, {count * dtype.itemsize / 1e9:.1f} GB")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
