"""Block drafters that vLLM's speculators saves: its own modules compute the expected logits. Skipped without the
package (`pip install speculators`).

Windows are longer than the text here. In training, speculators counts them from the root of a block; vLLM, which runs
these drafters, counts them from each position, as specbatch does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.formats.block_files import open_block_drafter
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from tests.eagle_reference import DIM, HEADS, KV_HEADS, VOCAB, E, random_target
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, attention_of

MASK, AUX, LENGTH, ANCHORS = 60, [2, 4, 7], 30, 6
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, windows": {"block_size": 4},
    "dspark": {"markov_rank": 4, "draft_vocab_size": 23},
    "dspark, gated": {"markov_rank": 4, "markov_head_type": "gated"},
    "dspark, rnn": {"markov_rank": 4, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "dflash2": {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
    "xpress": {"xpress_rank": 4},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return random_target(tmp_path_factory.mktemp("target"))


def random_drafter(name: str, target: Checkpoint) -> Any:
    """Make a small drafter with speculators' classes, with the target's embeddings and LM head."""
    kind = name.partition(",")[0]
    pytest.importorskip("speculators.models")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40, "use_sliding_window": True}
    layers = Qwen3Config(
        vocab_size=VOCAB, hidden_size=E, intermediate_size=40, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, max_position_embeddings=64, attn_implementation="eager",
        **(windows if "windows" in name else {}),
    )  # fmt: skip
    settings = {"block_size": 5, "draft_vocab_size": VOCAB, **KINDS[name]}
    config = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=layers, aux_hidden_state_layer_ids=AUX, mask_token_id=MASK, **settings
    )
    torch.manual_seed(1)
    model = SpeculatorModel.registry[kind](config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.25 + (parameter.ndim == 1)
    model.embed_tokens.weight.data = target.tensors.load("model.embed_tokens.weight")
    if settings["draft_vocab_size"] == VOCAB:
        model.lm_head.weight.data = target.tensors.load("lm_head.weight")
    else:
        ids = torch.randperm(VOCAB)[: settings["draft_vocab_size"]].sort().values
        model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True))
        model.d2t.copy_(ids - torch.arange(len(ids)))
    return model


def expected_logits(model: Any, features: Tensor, tokens: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the logits of the drafts by the position of the root, with the text's own tokens before each draft; and
    their confidences, if the drafter has any."""
    hidden, logits, _, _, indices = model._backbone_forward(
        features[None], tokens[None], torch.ones(1, LENGTH), torch.randn(1, LENGTH, E),
        torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=ANCHORS,
    )  # fmt: skip
    size, is_shifted = model.block_size, model.config.sample_from_anchor
    logits, hidden = logits.view(ANCHORS, size, -1), hidden.view(ANCHORS, size, -1)
    block = tokens[indices].view(ANCHORS, size)
    before = block if is_shifted else torch.cat((block[:, :1], block[:, :-1]), 1)
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if hasattr(model, "candidate_selector"):
        ids, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    if hasattr(model, "refiner_head"):
        root, before_root = block[:, :1], tokens[indices.view(ANCHORS, size)[:, :1] - 1]
        refined = logits
        for _ in range(model.config.num_jacobi_passes):
            chosen = refined.argmax(-1)
            chosen[:, :1] = root
            refined = logits + model.refiner_head.block_bias(torch.cat((before_root, chosen[:, :-1]), 1), hidden)
        logits = refined
    confidences = {}
    if getattr(model, "confidence_head", None) is not None:
        read = hidden
        if model.config.confidence_head_with_markov:
            read = torch.cat((hidden, model.markov_head.prev_embeddings(before)), -1)
        confidences = dict(zip(indices.view(ANCHORS, size)[:, 0].tolist(), model.confidence_head(read), strict=True))
    first = 0 if is_shifted else 1
    of_roots = zip(indices.view(ANCHORS, size)[:, 0].tolist(), logits, strict=True)
    return {root: part[first:] for root, part in of_roots}, confidences


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_speculators(name: str, target: Checkpoint, tmp_path: Path) -> None:
    model = random_drafter(name, target)
    model.save_pretrained(tmp_path)
    features, tokens = torch.randn(LENGTH, len(AUX) * E), torch.randint(1, VOCAB, (LENGTH,))
    expected, confidences = expected_logits(model, features, tokens)

    opened = open_block_drafter(tmp_path, target)
    decoder = build_decoder(target.config, target.tensors, 64, torch.float32, CPU)
    weights = WeightLoader(opened.tensors, torch.float32, CPU)
    drafter = BlockDrafter(opened.config, weights, decoder, attention_of(opened.config.decoder), 64)
    cache = drafter.new_cache(65, torch.float32)
    size, num_drafts = opened.config.block_size, opened.config.max_drafts
    past = batch_of([Span([0], 0, LENGTH)], 64, CPU)
    drafter.forward(tokens, drafter.features(features, [features]), past, cache)
    # A block writes over the context after its root.
    for root in sorted(expected, reverse=True):
        batch = batch_of([Span([0], root, size)], 64, CPU)
        block = drafter.block_output(tokens[root : root + 1], tokens[root - 1 : root], None, batch, cache, num_drafts)
        steps = drafter.head.steps(block)
        found = torch.cat([steps(draft, tokens[root + draft : root + draft + 1]) for draft in range(num_drafts)])
        torch.testing.assert_close(found, expected[root], atol=1e-4, rtol=1e-4)
        assert (drafter.confidence is not None) == bool(confidences) == name.startswith("dspark")
        if drafter.confidence is not None:
            sure = drafter.confidence.steps(block)
            found = torch.cat([sure(draft, tokens[root + draft : root + draft + 1]) for draft in range(num_drafts)])
            torch.testing.assert_close(found.exp(), confidences[root].sigmoid(), atol=1e-4, rtol=1e-4)
