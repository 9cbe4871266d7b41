"""The facts of a draft head or block drafter that `specbatch models inspect` prints, from its files alone. No weight is
read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specbatch.errors import ModelError
from specbatch.models.checks import first_names
from specbatch.models.config import ModelConfig
from specbatch.models.eagle_config import EagleConfig, default_aux_layers
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.block_files import BlockCheckpoint, block_format, open_block_drafter
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint, open_eagle_head
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.formats.mtp_files import check_saved_layer
from specbatch.models.formats.tensor_files import open_tensors

Facts = list[tuple[str, str]]  # a name, and what there is to say
_BYTES, _MIB = torch.bfloat16.itemsize, 2**20
_MANY_LAYERS = 1000  # layers of a target that is not known


def draft_method(path: Path) -> str | None:
    """Return the speculation.method of a folder's draft head; None: it is no head. Raise ModelError for a drafter that
    is known and not supported."""
    file = path / "config.json"
    if not path.is_dir() or not is_there(file):
        return None
    raw = read_json(file)
    if block_format(raw) is not None:
        return "block"
    named = raw.get("speculators_model_type")
    if named is not None:
        if named not in ("eagle3", "peagle", "mtp"):
            raise ModelError(f"{path}: speculators_model_type {named} is not supported", hint="use another drafter")
        return str(named)
    files = open_tensors(path)
    names = {name.removeprefix("model.") for name in files.shapes()}
    files.close()
    if "fc.weight" not in names or not any(name.startswith(("midlayer.", "layers.0.")) for name in names):
        return None
    if "mask_hidden" in names:
        return "peagle"
    return "eagle3" if any(name.endswith(".hidden_norm.weight") for name in names) else "eagle"


def open_head(path: Path, method: str, target: Checkpoint) -> EagleCheckpoint | BlockCheckpoint:
    """Open a draft head for a target. Raise ModelError if it does not fit."""
    if method == "block":
        return open_block_drafter(path, target)
    kind: Any = "eagle" if method == "eagle" else "eagle3"
    return open_eagle_head(path, kind, target, parallel=method == "peagle")


def inspected_draft(path: Path, method: str) -> Facts:
    """Return the facts of a draft head. Raise ModelError for one that does not run with any target."""
    raw = read_json(path / "config.json")
    if method == "mtp":
        check_saved_layer(path)
        return [
            ("draft", "mtp, a layer for multi-token prediction that speculators has saved"),
            ("use", f"speculation.method: mtp, speculation.draft: {path}; the target is a hybrid such as Qwen3.5"),
        ]
    head = open_head(path, method, Checkpoint(None, _any_target(raw), _NoTensors(), "not known"))
    try:
        c = head.config
        block = head if isinstance(head, BlockCheckpoint) else None
        facts = [("draft", _kind(head, method)), ("use", f"speculation.method: {method}, speculation.draft: {path}")]
        named = _named_target(raw)
        facts.append(("target", _target_words(named, c.decoder, c.aux_layers)))
        facts.append(
            ("tokenizer", "that of the target; its file has no copy" if not _has_tokenizer(path) else "a copy")
        )
        facts.append(("mode", _mode(path)))
        if block is not None:
            size, drafts = block.config.block_size, block.config.max_drafts
            facts.append(("block", f"{size} positions in one pass, up to {drafts} drafts a round"))
            if block.config.confidence_size:
                facts.append(("confidence", "a head that says how likely drafts are, for speculation.verify_budget"))
        sizes = head.tensors.shapes()
        count = sum(math.prod(shape) for name, shape in sizes.items() if name not in ("t2d", "d2t"))
        cached = 2 * c.decoder.num_layers * c.decoder.num_kv_heads * c.decoder.head_dim * _BYTES
        facts.append(
            (
                "memory",
                f"{count / 1e6:.0f} million parameters, {count * _BYTES / _MIB:.0f} MiB in bfloat16; KV cache "
                f"{cached / 1024:.1f} KiB a token",
            )
        )
        if c.draft_vocab_size != c.decoder.vocab_size:
            facts.append(("vocabulary", f"drafts only {c.draft_vocab_size} of {c.decoder.vocab_size} tokens"))
        notes = [note for note in head.notes if "ignores" in note]
        return [*facts, *(("note", note.partition(": ")[2]) for note in notes)]
    finally:
        head.tensors.close()


def _kind(head: EagleCheckpoint | BlockCheckpoint, method: str) -> str:
    c = head.config
    layers = f"{c.decoder.num_layers} layer{'s' if c.decoder.num_layers > 1 else ''} of {c.decoder.hidden_size}"
    if isinstance(head, BlockCheckpoint):
        return f"block drafter ({head.format}), {layers}, {head.config.head_name}"
    names = {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
    assert isinstance(c, EagleConfig)
    name = "EAGLE-3.1" if method == "eagle3" and (c.norm_output or c.input_norms == "each") else names[method]
    return f"{name} head, {layers}"


def _target_words(named: str | None, decoder: ModelConfig, layers: tuple[int, ...]) -> str:
    words = f"{named or 'not named by its files'}; a model of {decoder.hidden_size} with {decoder.vocab_size} tokens"
    if not layers:
        return words
    read = first_names(list(map(str, layers)), limit=12)
    if layers == default_aux_layers(_MANY_LAYERS):
        read = "2, L / 2 and L - 3 of L (the default)"
    return f"{words}, of which it reads the inputs of layers {read}"


def _named_target(raw: Mapping[str, Any]) -> str | None:
    section = raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def _has_tokenizer(path: Path) -> bool:
    return any(is_there(path / name) for name in ("tokenizer.json", "tokenizer_config.json"))


def _mode(path: Path) -> str:
    """Say for which mode of thinking the head was trained: no format has a key for it, but pages say it."""
    unknown = "not said by its files: in another mode of thinking than in training, fewer drafts are right"
    file = path / "README.md"
    if not is_there(file):
        return unknown
    lines = file.read_text(errors="replace").splitlines()
    said = next((line.strip() for line in lines if "thinking" in line.lower()), None)
    return unknown if said is None else f"its README.md says: {said[:160]}"


def _any_target(raw: Mapping[str, Any]) -> ModelConfig:
    """Return a target that a head can be for: of its sizes, with many layers."""
    sizes = raw.get("transformer_layer_config") or raw
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = parse_hf_config(
        {"model_type": "llama", "num_hidden_layers": 1, **{k: sizes[k] for k in keys if k in sizes}}
    )
    layers = raw.get("num_target_layers")
    count = layers if isinstance(layers, int) and layers > 0 else _MANY_LAYERS
    return replace(config, num_layers=count, sliding_windows=(None,) * count)


class _NoTensors:
    """The tensors of a target that is not known."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def load(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def close(self) -> None:
        """Nothing is open."""
