"""EAGLE-3 and P-EAGLE heads that vLLM's speculators saves: its own modules compute the expected logits. Skipped without
the package (`pip install speculators`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import open_eagle_head
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from tests.eagle_reference import DIM, HEADS, KV_HEADS, VOCAB, E, random_target
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, attention_of

MASK, LENGTH, NUM_MASKS = 60, 20, 3
TRAITS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, Llama's layers": {"family": LlamaConfig, "norm_before_residual": True, "draft_vocab_size": 23},
    "eagle3, two layers": {"num_layers": 2, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 4]},
    "eagle3, 3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "peagle": {"num_layers": 2, "mask_token_id": MASK},
    "peagle, norms": {"mask_token_id": MASK, "fc_norm": True, "draft_vocab_size": 23, "family": LlamaConfig},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return random_target(tmp_path_factory.mktemp("target"))


def random_head(kind: str, num_layers: int = 1, family: Any = Qwen3Config, **traits: Any) -> Any:
    pytest.importorskip("speculators.models")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    layers = family(
        vocab_size=VOCAB, hidden_size=E, intermediate_size=40, num_hidden_layers=num_layers, head_dim=DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    settings = {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [2, 4, 7], **traits}
    config = SpeculatorModelConfig.registry[kind](transformer_layer_config=layers, **settings)
    torch.manual_seed(1)
    model = SpeculatorModel.registry[kind](config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.25 + (parameter.ndim == 1)
    if settings["draft_vocab_size"] != VOCAB:
        ids = torch.randperm(VOCAB)[: settings["draft_vocab_size"]].sort().values
        model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True))
        model.d2t.copy_(ids - torch.arange(len(ids)))
    return model


def expected_logits(model: Any, kind: str, features: Tensor, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits of all positions, and then of the mask tokens after the last one."""
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    nothing: dict[str, Any] = {"document_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    if kind == "eagle3":
        model(features[None], tokens[None], ttt_steps=1, **nothing)
        return seen[0]
    anchors = torch.cat((torch.arange(LENGTH), torch.full((NUM_MASKS,), LENGTH - 1)))
    depths = torch.cat((torch.zeros(LENGTH, dtype=torch.long), torch.arange(1, NUM_MASKS + 1)))
    core = "speculators.models.peagle.core"
    monkeypatch.setattr(f"{core}.generate_cod_sample_indices", lambda **settings: (anchors, depths))
    monkeypatch.setattr(f"{core}.compute_metrics", lambda **results: (None, None))
    # It reads tokens and states of all positions, also those of mask tokens, before it leaves them out.
    more = torch.zeros(NUM_MASKS, dtype=torch.long)
    nothing["document_ids"] = torch.zeros(1, LENGTH + NUM_MASKS, dtype=torch.long)
    model(
        torch.cat((features, features[:NUM_MASKS]))[None], torch.cat((tokens, more))[None],
        verifier_last_hidden_states=torch.randn(1, LENGTH + NUM_MASKS, E), **nothing,
    )  # fmt: skip
    return seen[0]


@pytest.mark.parametrize("name", TRAITS)
@torch.inference_mode()
def test_logits_are_those_of_speculators(
    name: str, target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = name.partition(",")[0]
    model = random_head(kind, **TRAITS[name])
    model.save_pretrained(tmp_path)
    num_features = len(model.config.eagle_aux_hidden_state_layer_ids)
    features, tokens = torch.randn(LENGTH, num_features * E), torch.randint(1, VOCAB, (LENGTH,))
    expected = expected_logits(model, kind, features, tokens, monkeypatch)

    opened = open_eagle_head(tmp_path, "eagle3", target, parallel=kind == "peagle")
    decoder = build_decoder(target.config, target.tensors, 64, torch.float32, CPU)
    weights = WeightLoader(opened.tensors, torch.float32, CPU)
    head = EagleHead(opened.config, weights, decoder, attention_of(opened.config.decoder), 64)
    read = head.features(features, list(features.chunk(num_features, dim=-1)))
    if kind == "peagle":
        assert head.mask_feature_E is not None
        read = torch.cat((read, head.mask_feature_E.expand(NUM_MASKS, -1)))
        tokens = torch.cat((tokens, torch.full((NUM_MASKS,), MASK)))
    batch = batch_of([Span([0], 0, len(tokens))], 64, CPU)
    hidden = head.forward(tokens, read, batch, head.new_cache(65, torch.float32))
    found = head.raw_logits(hidden)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if opened.config.norm_output:  # what the next position reads
        torch.testing.assert_close(hidden @ model.lm_head.weight.T, found, atol=1e-4, rtol=1e-4)
