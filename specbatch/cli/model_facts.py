"""The facts of a model that `specbatch models inspect` prints, from its files. No weight is read."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specbatch.cli.draft_facts import Facts, draft_method, inspected_draft, open_head
from specbatch.errors import SpecbatchError
from specbatch.models.checks import first_names
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from specbatch.models.formats.mtp_files import open_mtp
from specbatch.models.formats.tokenizer import describe_tokenizer_difference, load_tokenizer
from specbatch.models.pass_weights import PassWeights
from specbatch.setup.backend import LACKS
from specbatch.setup.memory import GIB

_BYTES = torch.bfloat16.itemsize


def inspected(path: Path, draft: Path | None = None) -> Facts:
    """Return the facts of a model, or of a draft head. `draft`: a head or a draft model, of which the last lines say
    whether it fits. Raise SpecbatchError for a model that does not run."""
    if draft is None and (method := draft_method(path)) is not None:
        return inspected_draft(path, method)
    model = open_checkpoint(path)
    try:
        files = model.description.removesuffix(" dequantised")  # a run may leave layers packed, see `quantised`
        facts = [("files", files), *_code(model), *_sizes(model.config), *_weights(model)]
        tokenizer, words = _tokenizer(path, model.config)
        facts.append(("tokenizer", words))
        if model.ignored:
            facts.append(("ignored keys", first_names(model.ignored, limit=20)))
        if draft is not None:
            facts.append((f"draft {draft.name}", _fit(draft, model, tokenizer)))
        return facts
    finally:
        model.tensors.close()


def _code(model: Checkpoint) -> Facts:
    config = model.config
    if not config.is_native:
        return [("model.backend", f"transformers ({config.model_type})"), ("runs", LACKS)]
    text = f", the text part of a {model.text_of} model; images are refused" if model.text_of is not None else ""
    return [("model.backend", f"native ({config.model_type}){text}")]


def _sizes(config: ModelConfig) -> Facts:
    heads = f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of {config.head_dim}"
    windows = sorted({window for window in config.sliding_windows if window is not None})
    shown = f"; windows of {', '.join(map(str, windows))} tokens" if windows else ""
    facts = [
        ("layers", f"{config.num_layers} of {config.hidden_size}, with {heads}{shown}"),
        ("vocabulary", f"{config.vocab_size} tokens; a text ends with {list(config.eos_token_ids) or 'none'}"),
        ("longest row", f"{config.max_position_embeddings} tokens"),
    ]
    if (moe := config.moe) is not None:
        facts.append(("experts", f"{moe.num_experts} in each of {sum(moe.layers)} layers, {moe.top_k} of a token"))
    return facts


def _weights(model: Checkpoint) -> Facts:
    config = model.config
    token_bytes = 2 * len(config.cached_layers) * config.num_kv_heads * config.head_dim * _BYTES
    facts = []
    if config.is_native:
        weights = PassWeights.of_all(config)
        used = f", of which a token uses {weights.active / 1e9:.2f}" if config.moe is not None else ""
        billions = f"{weights.total / 1e9:.2f} billion parameters{used}"
        facts.append(("weights", f"{billions}; {weights.total * _BYTES / GIB:.1f} GiB in bfloat16"))
        if (quantization := model.quantization) is not None:
            left = weights.total * _BYTES - quantization.saved_bytes(expected_tensors(config), _BYTES)
            facts.append(("quantised", f"{quantization.describe()}; {left / GIB:.1f} GiB on CUDA if layers stay so"))
    if config.delta is not None:
        facts.append(("state", f"{config.delta.matrix_bytes / 2**20:.1f} MiB a row in float32, of a hybrid's layers"))
    return [*facts, ("KV cache", f"{token_bytes / 1024:.1f} KiB a token in bfloat16")]


def _tokenizer(path: Path, config: ModelConfig) -> tuple[PreTrainedTokenizerBase | None, str]:
    try:
        tokenizer = load_tokenizer(path)
    except SpecbatchError as error:
        return None, f"error: {error.message} ({error.hint})"
    chat = "a chat template" if tokenizer.chat_template else "no chat template: prompts are continued"
    more = "; it has more tokens than the model" if len(tokenizer) > config.vocab_size else ""
    return tokenizer, f"{len(tokenizer)} tokens, {chat}{more}"


def _fit(draft: Path, model: Checkpoint, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Say how a draft can be used, or why not."""
    try:
        method = draft_method(draft)
        if method is not None:
            head = open_mtp(model, draft) if method == "mtp" else open_head(draft, method, model)
            head.tensors.close()
            return f"speculation.method: {method}"
    except SpecbatchError as error:
        return f"does not fit. {error.message}"
    try:
        other = open_checkpoint(draft)
        other.tensors.close()
        own = load_tokenizer(draft)
    except SpecbatchError as error:
        return f"does not fit. draft_model: {error.message}"
    difference = "the model has no tokenizer" if tokenizer is None else describe_tokenizer_difference(tokenizer, own)
    return f"does not fit: {difference}" if difference else "speculation.method: draft_model"
