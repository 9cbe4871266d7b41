"""Opens the directory of a block drafter. Each key of its config.json is applied, refused by name, or named in a note.
Its tensors get the names of `expected_block_tensors`.

Files of four kinds are in use: those of z-lab and SpecForge (`dflash_config`), of DeepSpec (`Qwen3DSparkModel`, keys at
the top), and of vLLM's speculators (`speculators_model_type`, sizes under `transformer_layer_config`). The first two
number a target's layers by their outputs, speculators by their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.blocks.config import (
    BlockConfig,
    ConvolutionConfig,
    DominoConfig,
    HeadConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
    expected_block_tensors,
)
from specbatch.models.checks import first_names, flag, mapping, number, shown, tensor_problems, whole_number
from specbatch.models.config import ModelConfig
from specbatch.models.config_keys import unknown_keys
from specbatch.models.eagle_config import target_ids_of
from specbatch.models.families.hf_config import SLIDING, windows_of
from specbatch.models.families.registry import FAMILIES, parse_hf_config
from specbatch.models.formats.checkpoint import Checkpoint, check_no_adapter
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.formats.tensor_files import TensorSource, is_stored_rotary, open_tensors
from specbatch.models.linears.quantization import parse_quantization

_FILE = "config.json of the block drafter"
_OTHER = "use another drafter for this target, or speculation.method ngram, which needs none"
# The formats, by what names them: `speculators_model_type`, or an architecture of z-lab, SpecForge and DeepSpec.
_SPECULATORS = ("dflash", "dflash2", "dspark", "xpress")
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DominoDraftModel": "domino",
    "LiLiCorrDraftModel": "lilicorr",
}
_REFUSED = {
    "DSparkV41DraftModel": "DSpark for DeepSeek-V4",
    "XPressDraftModel": "XPress",
}
_READ = (
    *("block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "draft_vocab_size"),
    *("sample_from_anchor", "causal", "is_causal", "sliding_window_non_causal", "swa_window_size"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
    *("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
    *(f"lilicorr_{name}" for name in ("candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio")),
    *("lilicorr_factor_dim", "lilicorr_vector_eps", "lilicorr_logit_scale", "lilicorr_enabled", "has_own_lm_head"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
)
# Keys that change what is computed, with the one value that is supported.
_FIXED: Mapping[str, Any] = {
    "attention_mode": "gqa",
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_swa": False,
    "use_aux_hidden_state": True,
    "logit_scale": 1,
    "is_neox_style": True,
}
# Further keys that change nothing here.
_HARMLESS = (
    *("num_anchors", "num_target_layers", "layer_ids", "auto_map", "embed_requires_grad", "target_hidden_size"),
    *("dflash_config", "transformer_layer_config", "speculators_config", "speculators_version"),
    "speculators_model_type",
)
# Names of LiLiCorr's parts in some files, and in the others.
_LATTICE_NAMES = {
    "feature_norm.": "feature_mlp.0.",
    "feature_mlp.up_proj.": "feature_mlp.1.",
    "feature_mlp.down_proj.": "feature_mlp.3.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
}
_HEAD_PREFIX = "logit_head."  # early files of SpecForge


@dataclass(frozen=True)
class BlockCheckpoint:
    """A validated block drafter."""

    config: BlockConfig
    tensors: TensorSource
    format: str  # dflash, dflash2, dspark, domino, lilicorr or xpress
    trained_for: str | None = None  # the target that its file names
    notes: tuple[str, ...] = ()  # notes on how its config.json was read


def block_format(raw: Mapping[str, Any]) -> str | None:
    """Return the format of a block drafter by its `config.json`; None: it is none. Raise ModelError for a drafter that
    is not supported."""
    named = raw.get("speculators_model_type")
    if named is not None:
        return str(named) if named in _SPECULATORS else None
    names = raw.get("architectures")
    names = names if isinstance(names, list) else []
    architecture = next((str(name) for name in names if name in _ARCHITECTURES or name in _REFUSED), None)
    section = raw.get("dflash_config")
    projector = section.get("projector_type") if isinstance(section, Mapping) else None
    if isinstance(section, Mapping) and (projector == "lilicorr" or section.get("lilicorr_enabled")):
        return "lilicorr"
    if architecture in _REFUSED or projector not in (None, "domino", "dflash", "dspark"):
        raise ModelError(f"{_FILE}: {_REFUSED.get(architecture or '', projector)} is not supported", hint=_OTHER)
    if architecture == "DSparkDraftModel" and "markov_rank" not in {**raw, **(section or {})}:
        # DeepSeek-V4's drafter has the same name and other layers.
        raise ModelError(
            f"{_FILE}: a DSparkDraftModel of model_type {shown(raw.get('model_type'))} is not supported", hint=_OTHER
        )
    if projector in ("domino", "dspark"):
        return str(projector)
    return "dflash" if architecture is None and section is not None else _ARCHITECTURES.get(architecture or "")


def open_block_drafter(path: Path, target: Checkpoint) -> BlockCheckpoint:
    """Open and validate the directory of a block drafter (config.json and weights). Raise ModelError."""
    check_no_adapter(path)
    file = path / "config.json"
    if not is_there(file):
        raise ModelError(f"{path} has no config.json", hint="a drafter is a directory with config.json and its weights")
    raw = read_json(file)
    kind = block_format(raw)
    if kind is None:
        raise ModelError(
            f"{path} is no block drafter that is known: architectures {shown(raw.get('architectures'))}",
            hint="known are DFlash, DFlash2, DSpark, Domino, LiLiCorr, XPress; EAGLE heads have methods of their own",
        )
    reader = _BlockJson(raw, kind)
    modelopt = path / "hf_quant_config.json"
    reader.check_supported(read_json(modelopt) if is_there(modelopt) else None)
    files = open_tensors(path)
    try:
        if fp8 := [f"{name} is {dtype}" for name, dtype in files.dtypes.items() if dtype.startswith("float8")]:
            raise ModelError(f"the block drafter has tensors in FP8: {first_names(fp8)}", hint=_OTHER)
        tensors = _BlockTensors(files, target)
        shapes = reader.used(tensors.shapes())
        block = reader.block(shapes, target.config)
        problems = tensor_problems(expected_block_tensors(block), shapes)
        if problems:
            raise ModelError(
                f"the block drafter does not fit its config.json and this target: {problems}",
                hint="check that it belongs to the target",
            )
        if block.has_vocab_map:
            target_ids_of(tensors.load("d2t"), tensors.load("t2d"), target.config.vocab_size)
    except ModelError:
        files.close()
        raise
    return BlockCheckpoint(block, tensors, kind, reader.trained_for(), tuple(reader.notes(block)))


class _BlockJson:
    """A drafter's config.json. Its keys are at the top, or in `dflash_config`."""

    def __init__(self, raw: Mapping[str, Any], kind: str) -> None:
        self._raw, self._kind = raw, kind
        self._is_speculators = "speculators_model_type" in raw
        self._parts = {"": raw}
        for name in ("dflash_config", "transformer_layer_config"):
            part = raw.get(name)
            self._parts[f"{name}."] = {} if part is None else mapping(part, f"{_FILE}: {name}")
        self._layers = dict(self._parts["transformer_layer_config."] if self._is_speculators else raw)

    def check_supported(self, modelopt: Mapping[str, Any] | None) -> None:
        """Raise ModelError for a value that is not supported. `modelopt`: the drafter's `hf_quant_config.json`."""
        for prefix, part in self._parts.items():
            if parse_quantization(dict(part), modelopt) is not None:
                raise ModelError("the block drafter is quantised, which is not supported", hint=_OTHER)
            for key, value in _FIXED.items():
                if part.get(key) not in (None, value) and not (key == "attention_mode" and part[key] == "mha"):
                    raise ModelError(
                        f"{_FILE} has {prefix}{key}: {shown(part[key])}; only {shown(value)} is supported", hint=_OTHER
                    )
        if self._one("attention_modes") is not None:
            raise ModelError(f"{_FILE}: attention_modes is not supported", hint=_OTHER)

    def block(self, shapes: Mapping[str, tuple[int, ...]], target: ModelConfig) -> BlockConfig:
        """Return the description of the drafter. `shapes`: its tensors."""
        decoder, causal = self._decoder(target)
        size, mask = self._count("block_size"), self._count("mask_token_id", at_least=0)
        if size < 2:
            raise ModelError(f"{_FILE}: block_size is {size}; a block has 2 tokens or more")
        has_embedding, has_lm_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
        if decoder.hidden_size != target.hidden_size and not (has_embedding and has_lm_head):
            raise ModelError(
                f"the block drafter's hidden size is {decoder.hidden_size}, the target's {target.hidden_size}",
                hint="a drafter works only with the target it was trained for",
            )
        if decoder.vocab_size != target.vocab_size:
            raise ModelError(
                f"the block drafter's vocabulary has {decoder.vocab_size} tokens, the target's {target.vocab_size}",
                hint="a drafter works only with the target it was trained for",
            )
        if mask >= decoder.vocab_size:
            raise ModelError(f"{_FILE}: mask_token_id is {mask}, and the vocabulary has {decoder.vocab_size} tokens")
        draft_vocab_size = self._count("draft_vocab_size", default=decoder.vocab_size)
        if self._kind == "dflash2" and ("d2t" in shapes or draft_vocab_size != decoder.vocab_size):
            raise ModelError("the block drafter is a DFlash2 with a reduced vocabulary: no format has one", hint=_OTHER)
        if draft_vocab_size != decoder.vocab_size and "d2t" not in shapes:
            raise ModelError(f"the block drafter has draft_vocab_size {draft_vocab_size}, and no tensor d2t")
        head = self._head(decoder.hidden_size, size)
        block = BlockConfig(
            decoder,
            size,
            mask,
            self._aux_layers(target.num_layers),
            target.hidden_size,
            draft_vocab_size,
            self._first(),
            head,
            self._convolution(decoder.hidden_size, size),
            causal,
            has_embedding,
            has_lm_head,
            "d2t" in shapes,
            "mask_embedding" in shapes,
            self._confidence_size(decoder.hidden_size, head, shapes),
            self._number("input_embedding_scale", 1.0),
            self._number("output_multiplier", 1.0),
            self._number("final_logit_softcapping", 0.0) or None,
        )
        if isinstance(head, SelectorConfig | LatticeConfig) and not 1 <= head.top_k <= draft_vocab_size:
            raise ModelError(f"{_FILE}: the head has {head.top_k} candidates, and there are {draft_vocab_size} tokens")
        if min(block.embedding_scale, block.logits_scale) <= 0 or (block.logits_soft_cap or 0) < 0:
            raise ModelError(
                f"{_FILE}: input_embedding_scale, output_multiplier and final_logit_softcapping must be positive",
                hint=_OTHER,
            )
        return block

    def _decoder(self, target: ModelConfig) -> tuple[ModelConfig, tuple[bool, ...]]:
        """Return the configuration of the layers, and which are causal in a block. All formats have Qwen3's layers,
        whatever family their files name."""
        sizes = {key: value for key, value in self._layers.items() if key not in _READ}
        types, window = sizes.pop("layer_types", None), self._one("swa_window_size") or sizes.get("sliding_window")
        if types is not None:
            if SLIDING in types and sizes.get("use_sliding_window") is False:
                raise ModelError(
                    f"{_FILE} contradicts itself: layer_types has {SLIDING}, and use_sliding_window is false",
                    hint=_OTHER,
                )
            for key in ("sliding_window", "use_sliding_window", "max_window_layers"):
                sizes.pop(key, None)
        config = parse_hf_config({**sizes, "model_type": "qwen3"})
        windows = config.sliding_windows
        if types is not None:
            if not isinstance(types, list) or len(types) != config.num_layers:
                raise ModelError(f"{_FILE}: layer_types must be a list of {config.num_layers} types")
            if others := set(types) - {SLIDING, "full_attention"}:
                raise ModelError(f"{_FILE}: layer type {shown(min(map(str, others)))} is not supported", hint=_OTHER)
            window = None if window is None else whole_number(window, f"{_FILE}: sliding_window")
            windows = windows_of(types, window, "sliding_window is null")
        causal = self._one("is_causal")
        causal = self._one("causal") if causal is None else causal
        if causal is not None:
            of_layers = (flag(causal, f"{_FILE}: causal"),) * len(windows)
        else:
            default = self._kind == "dflash2" and self._is_speculators
            sees_all = self._flag("sliding_window_non_causal", default=default)
            of_layers = tuple(one is not None and not sees_all for one in windows)
        layers = replace(
            config.as_head(qkv_bias=config.qkv_bias, output_bias=config.output_bias),
            num_layers=config.num_layers,
            sliding_windows=windows,
            qk_norm=True,
            max_position_embeddings=target.max_position_embeddings,
        )
        return layers, of_layers if any(of_layers) else ()

    def _aux_layers(self, num_layers: int) -> tuple[int, ...]:
        key = "aux_hidden_state_layer_ids" if self._is_speculators else "target_layer_ids"
        ids = self._one(key)
        if not isinstance(ids, list) or not ids:
            raise ModelError(f"{_FILE}: {key} must be a list of layers of the target, not {shown(ids)}", hint=_OTHER)
        least, shift = (0, 0) if self._is_speculators else (-1, 1)
        layers = tuple(whole_number(one, f"{_FILE}: {key}", at_least=least) + shift for one in ids)
        if list(layers) != sorted(set(layers)) or layers[-1] > num_layers:
            raise ModelError(
                f"{_FILE}: {key} is {shown(ids)}; layers must rise, and the target has {num_layers}",
                hint="a drafter works only with the target it was trained for",
            )
        if layers[-1] == num_layers and not self._is_speculators and "dflash_config" in self._raw:
            # transformers returns the last output after the final norm, other programs before it.
            raise ModelError(f"{_FILE}: {key} has the target's last layer, which is not supported", hint=_OTHER)
        return layers

    def _first(self) -> int:
        """Return the first position of a block that drafts."""
        anchor = self._one("sample_from_anchor")
        if anchor is not None:
            return 0 if flag(anchor, f"{_FILE}: sample_from_anchor") else 1
        is_shifted = self._kind == "dspark" and self._one("projector_type") is None
        return 0 if self._flag("shift_label", default=is_shifted) else 1

    def _head(self, hidden_size: int, block_size: int) -> HeadConfig | None:
        if self._kind == "dspark":
            rank = self._count("markov_rank", at_least=0, default=256 if self._is_speculators else None)
            kind = self._one("markov_head_type") or "vanilla"
            if rank and kind not in ("vanilla", "gated", "rnn"):
                raise ModelError(f"{_FILE}: markov_head_type {shown(kind)} is not supported", hint=_OTHER)
            return MarkovConfig(rank, cast(Any, kind)) if rank else None
        if self._kind == "dflash2":
            return SelectorConfig(self._count("selector_rank", default=256), self._count("selector_top_k", default=16))
        if self._kind == "domino":
            skipped = self._count("pure_draft_prefix_len", at_least=0, default=0)
            first = self._first() + skipped
            return DominoConfig(self._count("emb_dim"), self._count("gru_hidden_dim"), first)
        if self._kind == "lilicorr":
            return self._lattice(hidden_size, block_size)
        if self._kind == "xpress":
            rank = self._count("xpress_rank", default=256)
            inner = rank * self._count("xpress_mlp_ratio", default=2)
            return RefinerConfig(rank, inner, self._count("num_jacobi_passes", default=6), block_size)
        return None

    def _lattice(self, hidden_size: int, block_size: int) -> LatticeConfig:
        p = "lilicorr_"
        own = self._count(f"{p}hidden_size", at_least=0) or hidden_size
        num_heads, inner = self._count(f"{p}num_heads"), int(own * self._number(f"{p}mlp_ratio"))
        eps, scale = self._number(f"{p}vector_eps"), self._number(f"{p}logit_scale")
        if own % num_heads or inner < 1 or not 0 < eps < 0.5 or scale <= 0 or self._first() != 1:
            raise ModelError(f"{_FILE}: the sizes of its LiLiCorr head do not fit each other", hint=_OTHER)
        top_k, factors = self._count(f"{p}candidate_topk"), self._count(f"{p}factor_dim")
        num_layers = self._count(f"{p}num_layers")
        return LatticeConfig(own, num_layers, num_heads, inner, top_k, factors, eps, scale, block_size)

    def _convolution(self, hidden_size: int, block_size: int) -> ConvolutionConfig | None:
        if self._kind not in ("dflash2", "lilicorr"):
            return None
        taps = self._count("conv_kernel_size", at_least=0, default=2 if self._kind == "dflash2" else 0)
        if not taps:
            return None
        group_size = self._count("conv_group_size", default=16)
        if taps > block_size or hidden_size % group_size:
            raise ModelError(
                f"{_FILE}: conv_kernel_size {taps} or conv_group_size {group_size} does not fit a block of "
                f"{block_size} and a hidden size of {hidden_size}"
            )
        return ConvolutionConfig(taps, group_size)

    def used(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the tensors without a confidence head that the configuration turns off."""
        is_off = not self._flag("enable_confidence_head", default=True)
        return {name: shape for name, shape in shapes.items() if not (is_off and name.startswith("confidence_head."))}

    def _confidence_size(self, hidden_size: int, head: HeadConfig | None, shapes: Mapping[str, tuple[int, ...]]) -> int:
        if "confidence_head.proj.weight" not in shapes:
            return 0
        with_markov = self._flag("confidence_head_with_markov", default=True) and isinstance(head, MarkovConfig)
        return hidden_size + (head.rank if with_markov and isinstance(head, MarkovConfig) else 0)

    def trained_for(self) -> str | None:
        """Return the target that the file names; None: it names none."""
        section = self._raw.get("speculators_config")
        verifier = section.get("verifier") if isinstance(section, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        return name if isinstance(name, str) and name else None

    def notes(self, block: BlockConfig) -> list[str]:
        layers = ", ".join(map(str, block.aux_layers))
        notes = [
            f"speculation.draft: {self._kind}, blocks of {block.block_size} with {block.head_name}; it reads the "
            f"inputs of layers {layers}"
        ]
        if block.confidence_size:
            notes.append(
                "speculation.draft: its confidence head estimates how likely drafts are: speculation.verify_budget "
                "reads it, and nothing else does"
            )
        elif self._flag("enable_confidence_head"):
            notes.append(
                "speculation.draft: its config.json has enable_confidence_head, and its files have no confidence head: "
                "speculation.verify_budget reads the probabilities of the drafts"
            )
        if ignored := self._ignored():
            notes.append(f"speculation.draft: its config.json has keys that specbatch ignores: {first_names(ignored)}")
        return notes

    def _ignored(self) -> list[str]:
        known, family = {*_READ, *_FIXED, *_HARMLESS}, FAMILIES["qwen3"]
        names: list[str] = []
        for prefix, part in self._parts.items():
            own = {key: value for key, value in part.items() if key not in known}
            names += [f"{prefix}{key}" for key in unknown_keys(own, family.keys, family.neutral)]
        return names

    def _one(self, key: str) -> Any:
        """Return the value of a key; None: there is none. That in `dflash_config` is used before the one at the top."""
        value = self._parts["dflash_config."].get(key)
        return self._raw.get(key) if value is None else value

    def _count(self, key: str, *, at_least: int = 1, default: int | None = None) -> int:
        value = self._one(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{_FILE} has no {key}", hint=_OTHER)
        return whole_number(value, f"{_FILE}: {key}", at_least=at_least)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._one(key)
        if value is None and default is not None:
            return default
        return number(value, f"{_FILE}: {key}")

    def _flag(self, key: str, *, default: bool = False) -> bool:
        value = self._one(key)
        return default if value is None else flag(value, f"{_FILE}: {key}")


class _BlockTensors:
    """The tensors of a drafter's files under the names of `expected_block_tensors`. With a reduced vocabulary, t2d is
    made where it is missing, and the LM head is the target's rows where the files have none."""

    def __init__(self, files: TensorSource, target: Checkpoint) -> None:
        self._files, self._target = files, target
        self._names: dict[str, str] = {}
        for name in files.shapes():
            # Copies of the target's norm and LM head, from training.
            if is_stored_rotary(name) or name.startswith("verifier_"):
                continue
            own = name.removeprefix("model.").removeprefix(_HEAD_PREFIX)
            if own.startswith("candidate_selector.") and own.endswith("codebook.weight"):
                own = own.removesuffix(".weight")
            if own.startswith("lilicorr."):
                for named, numbered in _LATTICE_NAMES.items():
                    own = own.replace(named, numbered)
            if own in self._names:
                raise ModelError(f"the block drafter has {self._names[own]} and {name}, which are the same tensor")
            self._names[own] = name
        self._shapes = {own: tuple(files.shapes()[name]) for own, name in self._names.items()}
        if "d2t" in self._shapes:
            self._shapes.setdefault("t2d", (target.config.vocab_size,))
            self._shapes.setdefault("lm_head.weight", (*self._shapes["d2t"], target.config.hidden_size))
        else:
            self._shapes.pop("t2d", None)
        # Some files have further dimensions of size 1.
        if len(self._shapes.get("mask_embedding", ())) > 1:
            self._shapes["mask_embedding"] = self._shapes["mask_embedding"][-1:]
        for name in ("lilicorr.slot_embedding", "lilicorr.rank_embedding"):
            if len(shape := self._shapes.get(name, ())) > 2:
                self._shapes[name] = (math.prod(shape[:-1]), shape[-1])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        if name in self._names:
            return self._files.load(self._names[name]).view(self._shapes[name])
        if name not in self._shapes:
            raise KeyError(name)
        d2t = self._files.load("d2t").to(torch.int64)
        ids = d2t + torch.arange(len(d2t))
        config = self._target.config
        if name == "t2d":
            return torch.isin(torch.arange(config.vocab_size), ids)
        weight_VE = self._target.tensors.load(config.lm_head_name)
        return weight_VE[ids.to(weight_VE.device)]

    def close(self) -> None:
        self._files.close()
