"""Opens the directory of an EAGLE head. Each key of its config.json is applied, or refused by name. Its tensors get the
names of `expected_eagle_tensors`, for files of any author.

Three kinds of files are in use: those of the authors (`midlayer.*`), of NVIDIA ModelOpt (`eagle_config`) and of vLLM's
speculators (`layers.0.*`, sizes under `transformer_layer_config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.checks import first_names, flag, mapping, shown, whole_number
from specbatch.models.config import ModelConfig
from specbatch.models.config_keys import check_keys
from specbatch.models.eagle_config import EagleConfig, EagleKind, eagle_config, layer_prefix, target_ids_of
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.checkpoint import Checkpoint, check_no_adapter
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.formats.tensor_files import (
    SafetensorsSource,
    TensorSource,
    TorchBinSource,
    is_stored_rotary,
    open_tensors,
)
from specbatch.models.linears.quantization import parse_quantization

_FILE = "config.json of the draft head"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_RESIDUAL, _DRAFT_SIZE = "norm_before_residual", "draft_vocab_size"
# Keys that change what is computed, of all heads, of EAGLE-1/2 and of EAGLE-3, with the one value that is supported.
_FIXED: Mapping[str, Any] = {"logit_scale": 1, "is_neox_style": True}
_FIXED_EAGLE: Mapping[str, Any] = {"num_hidden_layers": 1}
_FIXED_EAGLE3: Mapping[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
# Parts of the names of keys that can change what a head computes. A note names such a key if it is none of the above.
_MEANINGFUL = ("aux", "norm", "residual", "layer_ids", "draft", "eagle", "dflash", "mask_token", "ptd_token")
_MASK_TOKEN = ("mask_token_id", "pard_token", "ptd_token_id")  # names of P-EAGLE's mask token
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
_OTHER_HEAD = "use another head for this target, or speculation.method ngram, which needs none"
_HARMLESS = ("rms_norm_eps", "eagle_config", "has_lm_head", "parallel_draft_heads_num_layers")


@dataclass(frozen=True)
class EagleCheckpoint:
    """A validated EAGLE head."""

    config: EagleConfig
    tensors: TensorSource
    may_be_outputs: bool = False  # aux_layers are those of config.json, which other engines read as outputs
    notes: tuple[str, ...] = ()  # notes on how its config.json was read


def open_eagle_head(
    path: Path,
    kind: EagleKind,
    target: Checkpoint,
    aux_layers: tuple[int, ...] | None = None,
    *,
    parallel: bool = False,
) -> EagleCheckpoint:
    """Open and validate a head's directory (config.json and weights). `aux_layers`: instead of those of the file.
    `parallel`: a P-EAGLE head, whose kind is eagle3.

    Raises ModelError.
    """
    check_no_adapter(path)
    config_file = path / "config.json"
    if not is_there(config_file):
        raise ModelError(
            f"{path} has no config.json", hint="a draft head is a directory with config.json and its weights"
        )
    raw = _HeadJson(read_json(config_file), kind, parallel=parallel)
    modelopt_file = path / "hf_quant_config.json"
    raw.check_supported(target.config, read_json(modelopt_file) if is_there(modelopt_file) else None)
    config = parse_hf_config(raw.sizes)
    raw.check_window(config)
    notes: list[str] = []
    if names := raw.ignored():
        ignored = first_names(names, limit=20)
        notes.append(f"speculation.draft: its config.json has keys that specbatch ignores: {ignored}")
    file_layers = raw.layer_ids() if aux_layers is None and kind == "eagle3" else None
    layers = file_layers if aux_layers is None else aux_layers
    traits = raw.traits(notes, config.vocab_size)
    draft_vocab_size = raw.draft_vocab_size() or config.vocab_size
    files = open_tensors(path)
    _check_types(files)
    tensors = _HeadTensors(files, kind, config, draft_vocab_size, target)
    if parallel != ("mask_hidden" in tensors.shapes()):
        instead = "speculation.method: eagle3" if parallel else "speculation.method: peagle"
        raise ModelError(
            f"the draft head {'has no' if parallel else 'has a'} tensor mask_hidden, by which P-EAGLE drafts",
            hint=f"set {instead}",
        )
    head = eagle_config(kind, config, draft_vocab_size, tensors.shapes(), target.config, layers, **traits)
    if head.has_vocab_map:  # small; refused before weights are read
        target_ids_of(tensors.load("d2t"), tensors.load("t2d"), config.vocab_size)
    if kind == "eagle3" and not tensors.has_own_lm_head:
        notes.append("speculation.draft: it has no LM head, so the target's is used")
    may_be_outputs = file_layers is not None and file_layers[-1] < target.config.num_layers
    if layers is not None:
        why = "as configured" if file_layers is None else f"vLLM's reading of {LAYER_IDS}"
        if may_be_outputs:
            why += f"; SGLang reads outputs, which would be {next_layers(layers)} here"
        notes.append(f"speculation.aux_layers: inputs of layers {', '.join(map(str, layers))} ({why})")
    return EagleCheckpoint(head, tensors, may_be_outputs, tuple(notes))


def _check_types(files: SafetensorsSource | TorchBinSource) -> None:
    """Raises ModelError for numbers in FP8: without their scales they are other weights."""
    if fp8 := [f"{name} is {dtype}" for name, dtype in files.dtypes.items() if dtype.startswith("float8")]:
        files.close()
        raise ModelError(
            f"the draft head has {len(fp8)} tensors in FP8, which is not supported: {first_names(fp8)}",
            hint=_OTHER_HEAD,
        )


def next_layers(layers: tuple[int, ...]) -> list[int]:
    """The layers whose inputs are the outputs of these."""
    return [layer + 1 for layer in layers]


class _HeadJson:
    """A head's config.json. Keys that concern the whole head are at its top, or in `eagle_config`."""

    def __init__(self, raw: dict[str, Any], kind: EagleKind, *, parallel: bool = False) -> None:
        self._kind, self._parallel = kind, parallel
        self._parts: dict[str, Mapping[str, Any]] = {"": raw}
        for name in ("eagle_config", "transformer_layer_config"):
            part = raw.get(name)
            self._parts[f"{name}."] = {} if part is None else mapping(part, f"{_FILE}: {name}")
        self.sizes = dict(self._parts["transformer_layer_config."] or raw)
        self._is_speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw

    def check_supported(self, target: ModelConfig, modelopt: Mapping[str, Any] | None) -> None:
        """Raises ModelError for a value that is not supported. `modelopt`: the head's `hf_quant_config.json`."""
        for part in self._parts.values():
            check_keys(part, read=())
            if parse_quantization(part, modelopt) is not None:
                raise ModelError("the draft head is quantised, which is not supported", hint=_OTHER_HEAD)
        kind = "peagle" if self._parallel else self._kind
        fixed = {**_FIXED, "target_hidden_size": target.hidden_size, "speculators_model_type": kind}
        fixed |= _FIXED_EAGLE3 if self._kind == "eagle3" else _FIXED_EAGLE
        wrong = [(n, v, one) for key, one in fixed.items() for n, v in self._found(key).items() if v != one]
        types = self._found("layer_types").items()
        wrong += [(name, value, "full_attention") for name, value in types if "sliding_attention" in str(value)]
        for name, value, one in wrong:
            raise ModelError(
                f"{_FILE} has {name}: {shown(value)}; only {shown(one)} is supported",
                hint=_OTHER_HEAD,
            )

    def check_window(self, config: ModelConfig) -> None:
        """Raise ModelError for a head with a sliding window. `config`: the config.json of its file. A window that is
        only a default of the family does not count."""
        window = config.sliding_windows[0]
        if self.sizes.get("sliding_window") is not None and (window or math.inf) < config.max_position_embeddings:
            raise ModelError(f"{_FILE} has sliding_window: {window}, which is not supported", hint=_OTHER_HEAD)

    def ignored(self) -> list[str]:
        """Unknown keys that can change what is computed."""
        known = {*_FIXED, *_FIXED_EAGLE3, *_HARMLESS, *_NORMS, LAYER_IDS, _RESIDUAL, _DRAFT_SIZE}
        known |= {*_MASK_TOKEN} if self._parallel else set()
        return [
            prefix + key
            for prefix, part in self._parts.items()
            for key, value in part.items()
            if key not in known and any(word in key for word in _MEANINGFUL) and value not in (None, False)
        ]

    def draft_vocab_size(self) -> int | None:
        size = self._one(_DRAFT_SIZE)
        return None if size is None else whole_number(size, f"{_FILE}: {_DRAFT_SIZE}")

    def layer_ids(self) -> tuple[int, ...] | None:
        """None where the file names none, which an empty list means too."""
        ids = self._one(LAYER_IDS, hint="set speculation.aux_layers")
        if ids is None:
            return None
        if not isinstance(ids, list):
            raise ModelError(f"{_FILE}: {LAYER_IDS} must be a list, not {shown(ids)}")
        return tuple(whole_number(layer, f"{_FILE}: an element of {LAYER_IDS}", at_least=0) for layer in ids)

    def traits(self, notes: list[str], vocab_size: int) -> dict[str, Any]:
        """Return the fields of `EagleConfig` that only the file says. Raise ModelError for values out of range."""
        if self._kind != "eagle3":
            return {}
        joined, each, output = (self._flag(key) for key in _NORMS)
        if joined and each:
            raise ModelError(f"{_FILE} has both norm_before_fc and fc_norm", hint=_OTHER_HEAD)
        traits: dict[str, Any] = {
            "norm_before_residual": self._norm_before_residual(notes),
            "input_norms": "joined" if joined else "each" if each else "none",
            "norm_output": output,
        }
        if self._parallel:
            found = [self._one(key) for key in _MASK_TOKEN if self._one(key) is not None]
            if not found or any(one != found[0] for one in found):
                raise ModelError(f"{_FILE} must have one mask_token_id, not {shown(found)}", hint=_OTHER_HEAD)
            mask = traits["mask_token_id"] = whole_number(found[0], f"{_FILE}: mask_token_id", at_least=0)
            if mask >= vocab_size:
                raise ModelError(
                    f"{_FILE}: mask_token_id is {mask}, and the vocabulary has {vocab_size} tokens", hint=_OTHER_HEAD
                )
        return traits

    def _flag(self, key: str) -> bool:
        value = self._one(key)
        return value is not None and flag(value, f"{_FILE}: {key}")

    def _norm_before_residual(self, notes: list[str]) -> bool:
        normed = self._one(_RESIDUAL)
        if normed is None and self._is_speculators:
            notes.append(f"speculation.draft: {_RESIDUAL} true (vLLM's reading of a speculators file without it)")
            return True
        return normed is not None and flag(normed, f"{_FILE}: {_RESIDUAL}")

    def _found(self, key: str) -> dict[str, Any]:
        """The values of a key by its full name, null and empty lists left out."""
        parts = self._parts.items()
        return {prefix + key: part[key] for prefix, part in parts if part.get(key) not in (None, [])}

    def _one(self, key: str, hint: str | None = None) -> Any:
        """Return the one value of a key, or None. `hint`: the hint of the error if there are several values."""
        found = self._found(key)
        values = list(found.values())
        if any(value != values[0] for value in values):
            names = ", ".join(f"{name} {shown(value)}" for name, value in found.items())
            raise ModelError(f"{_FILE} contradicts itself: {names}", hint=hint)
        return values[0] if values else None


class _HeadTensors:
    """The tensors of a head's files under the names of `expected_eagle_tensors`. Tensors that a file may leave out are
    made: t2d from d2t, and for a reduced vocabulary the LM head from the target's."""

    def __init__(
        self, files: TensorSource, kind: EagleKind, config: ModelConfig, draft_vocab_size: int, target: Checkpoint
    ) -> None:
        self._files = files
        self._target = target
        self._vocab_size = config.vocab_size
        self._names: dict[str, str] = {}
        for name in files.shapes():
            if is_stored_rotary(name):
                continue
            if name.startswith("verifier_"):  # copies of the target's norm and LM head, from training
                continue
            own = name.removeprefix("model.")
            if own.startswith("layers.0."):
                own = layer_prefix(kind) + own.removeprefix("layers.0.")
            if own in self._names:
                raise ModelError(f"the draft head has {self._names[own]} and {name}, which are the same tensor")
            self._names[own] = name
        self._shapes = {own: tuple(files.shapes()[name]) for own, name in self._names.items()}
        if kind == "eagle3" and "d2t" in self._shapes:
            self._shapes.setdefault("t2d", (self._vocab_size,))
            self._shapes.setdefault("lm_head.weight", (draft_vocab_size, config.hidden_size))
        if "mask_hidden" in self._shapes:  # (1, 1, N) in some files
            self._shapes["mask_hidden"] = (math.prod(self._shapes["mask_hidden"]),)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def has_own_lm_head(self) -> bool:
        return "lm_head.weight" in self._names

    def load(self, name: str) -> Tensor:
        if name in self._names:
            return self._files.load(self._names[name]).view(self._shapes[name])
        if name not in self._shapes:
            raise KeyError(name)
        d2t = self._files.load("d2t").to(torch.int64)
        ids = d2t + torch.arange(d2t.shape[0])
        if name == "t2d":
            return torch.isin(torch.arange(self._vocab_size), ids)
        weight_VE = self._target.tensors.load(self._target.config.lm_head_name)
        return weight_VE[ids.to(weight_VE.device)]

    def close(self) -> None:
        self._files.close()
