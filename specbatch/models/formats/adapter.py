"""A LoRA adapter (Hu et al. 2021) in the format of peft, merged into the weights of its base model as they are loaded.

A folder has `adapter_config.json` and `adapter_model.safetensors` or `adapter_model.bin`. For a layer with weight
W (O, I) it has A (r, I) and B (O, r), and the merged weight is W + s B A. The scale s is lora_alpha / r, and
lora_alpha / sqrt(r) with `use_rslora`.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbatch.errors import ModelError
from specbatch.models.checks import first_names, flag, number, shown, whole_number
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.formats.tensor_files import SafetensorsSource, TensorSource, TorchBinSource
from specbatch.models.linears.layer_quantization import check_pattern

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_APPLIED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
# Keys of training, and keys that name the layers: those of the files are adapted.
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library", "revision", "task_type"),
        *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "peft_version", "runtime_config", "megatron_core", "eva_config", "qalora_group_size"),
        *("ensure_weight_tying", "corda_config", "lora_ga_config"),
    }
)
# Ways to begin that leave the base model as it is. The others (PiSSA, OLoRA, CorDA, LoftQ) change it.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_TYPES = ("float32", "float16", "bfloat16", "float64")
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer. `down`, `up`: the names of A and B in the file."""

    down: str
    up: str
    scale: float


class AdaptedTensors:
    """The tensors of a base model with an adapter merged into them. `linear`: the layers that the model computes.

    The product and the sum are computed in float32; the result is rounded once, to the type of the weight. It raises
    ModelError if the adapter has a layer that the model does not have, or of another shape.
    """

    def __init__(
        self, base: TensorSource, adapter: TensorSource, layers: Mapping[str, LayerAdapter], linear: Collection[str]
    ) -> None:
        self._base, self._adapter, self._layers = base, adapter, layers
        shapes, parts = base.shapes(), adapter.shapes()
        unknown = sorted(set(layers).difference(linear))
        if unknown:
            raise ModelError(
                f"the adapter has {len(unknown)} linear layers that the model does not have: {first_names(unknown)}",
                hint="it belongs to another base model, or the model divides these layers, or its embeddings are tied, "
                "so that it has no lm_head",
            )
        for layer, found in layers.items():
            weight, down, up = shapes[f"{layer}.weight"], parts[found.down], parts[found.up]
            if (up[0], down[1]) != weight:
                raise ModelError(
                    f"the adapter's {layer} is for a weight of {(up[0], down[1])}, and the model's is {weight}",
                    hint="it belongs to another base model",
                )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._base.shapes()

    def load(self, name: str) -> torch.Tensor:
        weight_OI = self._base.load(name)
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or (found := self._layers.get(layer)) is None:
            return weight_OI
        down, up = (self._adapter.load(part).to(weight_OI.device, torch.float32) for part in (found.down, found.up))
        return torch.addmm(weight_OI.float(), up, down, alpha=found.scale).to(weight_OI.dtype)

    def close(self) -> None:
        self._base.close()
        self._adapter.close()


def merged_with_adapter(base: TensorSource, path: Path, linear: Collection[str]) -> AdaptedTensors:
    """Return the tensors of a model with the adapter of a folder merged into them. The adapter's files are opened, but
    not read. `linear`: the linear layers that the model computes. It raises ModelError for adapters of another kind,
    and for keys and tensors that would have to be applied and are not."""
    config = read_config(path)
    file = next((path / name for name in WEIGHT_FILES if is_there(path / name)), None)
    if file is None:
        raise ModelError(f"{path} has neither {' nor '.join(WEIGHT_FILES)}")
    tensors = (SafetensorsSource if file.suffix == ".safetensors" else TorchBinSource)([file])
    try:
        wrong = sorted(name for name, dtype in tensors.dtypes.items() if dtype not in _TYPES)
        if wrong:
            raise ModelError(f"{file.name} has tensors of other types than {', '.join(_TYPES)}: {first_names(wrong)}")
        return AdaptedTensors(base, tensors, layers_of(config, tensors.shapes(), file), linear)
    except ModelError as error:
        tensors.close()
        raise ModelError(f"{path}: {error.message}", hint=error.hint) from error


def read_config(path: Path) -> dict[str, Any]:
    """Read and check `adapter_config.json` of a folder. It raises ModelError."""
    if not path.is_dir() or not is_there(path / CONFIG_FILE):
        raise ModelError(f"{path} is no adapter: it has no {CONFIG_FILE}", hint="model.adapter is a folder of peft")
    config = read_json(path / CONFIG_FILE)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{path} is an adapter of the kind {shown(kind)}; only LORA is merged", hint=_MERGE)
    others = {key: value for key, value in config.items() if key not in _APPLIED | _HARMLESS and value}
    changes_nothing = (("init_lora_weights", _STARTS), ("bias", ("none",)))
    for key, values in changes_nothing:
        if others.get(key) in values:
            others.pop(key, None)
    if others:
        key, value = next(iter(others.items()))
        raise ModelError(f"{path / CONFIG_FILE}: {key} is {shown(value)}, which is not supported", hint=_MERGE)
    return config


_MERGE = "merge it into its base model (merge_and_unload of peft) and use the merged model"


def layers_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], file: Path) -> dict[str, LayerAdapter]:
    """Return the adapters of a file by the names of their layers. `shapes`: those of the file's tensors."""
    names: dict[str, dict[str, str]] = {}
    others = []
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None or len(shapes[name]) != 2 or match["part"] in names.get(match["layer"], ()):
            others.append(name)  # the last ones are a second adapter of a layer, under another form of its name
        else:
            names.setdefault(match["layer"], {})[match["part"]] = name
    others += [next(iter(parts.values())) for parts in names.values() if len(parts) != 2]
    if others:
        raise ModelError(f"{file.name} has tensors that cannot be merged: {first_names(sorted(others))}", hint=_MERGE)
    if not names:
        raise ModelError(f"{file.name} has no adapted layer")
    found = {}
    is_rslora = flag(config.get("use_rslora") or False, f"{CONFIG_FILE}: use_rslora")
    for layer, parts in names.items():
        rank = whole_number(_of_layer(config, "rank_pattern", layer, config.get("r")), f"r of {layer}")
        alpha = number(_of_layer(config, "alpha_pattern", layer, config.get("lora_alpha")), f"lora_alpha of {layer}")
        if not shapes[parts["A"]][0] == shapes[parts["B"]][1] == rank:
            raise ModelError(
                f"{layer} has a rank of {shapes[parts['A']][0]} and {shapes[parts['B']][1]} in {file.name}, and of "
                f"{rank} in {CONFIG_FILE}"
            )
        found[layer] = LayerAdapter(parts["A"], parts["B"], alpha / (rank**0.5 if is_rslora else rank))
    return found


def _of_layer(config: Mapping[str, Any], key: str, layer: str, default: object) -> object:
    """Return the value of a layer: that of the first pattern which its name ends with, else `default`."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{CONFIG_FILE}: {key} must map names to numbers, not {shown(patterns)}")
    for pattern in patterns:
        check_pattern(pattern, f"{CONFIG_FILE}: {key}")
    return next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", layer)), default)
