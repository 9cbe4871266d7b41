"""Block drafters from files: their logits are those of the public code, round after round."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.config_load import load_config
from specbatch.models.blocks.config import (
    BlockConfig,
    ConvolutionConfig,
    DominoConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
)
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.blocks.heads import BlockOutput
from specbatch.models.formats.block_files import open_block_drafter
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.models.rope import RopeConfig
from specbatch.setup.build import build
from specbatch.setup.resolve import resolve
from specbatch.types import SamplingParams
from tests.block_reference import EPS, THETA, BlockReference, random_tensors, write_drafter
from tests.eagle_reference import DIM, HEADS, KV_HEADS, LAYERS, E, random_target
from tests.tiny_models import random_prompts, run, tiny_config

VOCAB, SIZE, MASK = 12, 5, 10  # few tokens, so that random drafts are often right
IDS = [1, 4, 6]  # layers of the target, whose outputs are read


def decoder_config(**changes: object) -> Any:
    sizes: dict[str, object] = {
        "model_type": "qwen3",
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "qk_norm": True,
        "rms_norm_eps": EPS,
        "rope": RopeConfig(theta=THETA),
    }
    return tiny_config(2, E, VOCAB, **{**sizes, **changes})


def as_json(**changes: Any) -> dict[str, Any]:
    """Return config.json as z-lab writes it."""
    return {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "vocab_size": VOCAB,
        "hidden_size": E,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 32,
        "num_target_layers": LAYERS,
        "block_size": SIZE,
        "dflash_config": {"target_layer_ids": IDS, "mask_token_id": MASK},
    } | changes


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    """Return config.json as speculators writes it, which numbers layers by their inputs."""
    raw = as_json()
    layers = {key: value for key, value in raw.items() if key not in ("architectures", "block_size", "dflash_config")}
    return {
        "architectures": ["Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "block_size": SIZE,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [i + 1 for i in IDS],
        "draft_vocab_size": VOCAB,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "org/target"}},
    } | changes


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    block: dict[str, Any] = field(default_factory=dict)  # fields of the description that it must lead to


def dflash(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": IDS, "mask_token_id": MASK, **keys}}


_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
_CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
# All tokens are candidates, because the test makes some drafts right.
_LATTICE = {
    "lilicorr_hidden_size": 8,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2,
    "lilicorr_candidate_topk": VOCAB,
    "lilicorr_factor_dim": 6,
    "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 8,
}
_DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "target_layer_ids": IDS,
    "mask_token_id": MASK,
    "num_anchors": 4,
    "markov_rank": 4,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
CASES = {
    "DFlash": Case(as_json()),
    "DFlash, windows": Case(
        as_json(**_WINDOWS),
        {"decoder": decoder_config(sliding_windows=(9, None)), "causal_layers": (True, False)},
    ),
    "DFlash, windows, not causal": Case(
        as_json(**_WINDOWS, is_causal=False), {"decoder": decoder_config(sliding_windows=(9, None))}
    ),
    "DFlash, biases": Case(as_json(attention_bias=True), {"decoder": decoder_config(qkv_bias=True, output_bias=True)}),
    "DFlash, scales": Case(
        as_json(
            **dflash(block_size=SIZE, input_embedding_scale=0.5, output_multiplier=0.7, final_logit_softcapping=2.0)
        ),
        {"embedding_scale": 0.5, "logits_scale": 0.7, "logits_soft_cap": 2.0},
    ),
    "DFlash, mask embedding": Case(as_json(), {"has_mask_embedding": True}),
    "DFlash2": Case(
        as_json(architectures=["DFlash2DraftModel"], **dflash(**_CONVOLUTION)),
        {"head": SelectorConfig(4, 3), "convolution": ConvolutionConfig(2, 8)},
    ),
    "DSpark of DeepSpec": Case(
        as_json(**_DEEPSPEC),
        {
            **{"head": MarkovConfig(4, "gated"), "first": 0, "confidence_size": E + 4},
            **{"has_embedding": True, "has_lm_head": True},
        },
    ),
    "DSpark of SpecForge": Case(
        as_json(architectures=["DSparkDraftModel"], markov_rank=4), {"head": MarkovConfig(4), "first": 0}
    ),
    "DSpark, confidence by the hidden state": Case(
        as_json(**{**_DEEPSPEC, "confidence_head_with_markov": False}),
        {"head": MarkovConfig(4, "gated"), "first": 0, "confidence_size": E},
    ),
    "Domino": Case(
        as_json(
            architectures=["DominoDraftModel"],
            **dflash(projector_type="domino", emb_dim=6, gru_hidden_dim=5, pure_draft_prefix_len=1),
        ),
        {"head": DominoConfig(6, 5, 2)},
    ),
    "Domino, shifted": Case(
        as_json(**dflash(projector_type="domino", emb_dim=6, gru_hidden_dim=5, shift_label=True)),
        {"head": DominoConfig(6, 5, 0), "first": 0},
    ),
    "LiLiCorr": Case(
        as_json(**dflash(projector_type="lilicorr", **_LATTICE, conv_kernel_size=2, conv_group_size=8)),
        {"head": LatticeConfig(8, 2, 2, 16, VOCAB, 6, 1e-4, 8.0, SIZE), "convolution": ConvolutionConfig(2, 8)},
    ),
    "LiLiCorr, as wide": Case(
        as_json(architectures=["LiLiCorrDraftModel"], **dflash(**{**_LATTICE, "lilicorr_hidden_size": 0})),
        {"head": LatticeConfig(E, 2, 2, 2 * E, VOCAB, 6, 1e-4, 8.0, SIZE)},
    ),
    "speculators, DFlash": Case(speculators("dflash", draft_vocab_size=8), {"draft_vocab_size": 8}),
    "speculators, DSpark": Case(
        speculators("dspark", markov_rank=4, markov_head_type="rnn", draft_vocab_size=8),
        {"head": MarkovConfig(4, "rnn"), "first": 0, "confidence_size": E + 4, "draft_vocab_size": 8},
    ),
    "speculators, DFlash2": Case(
        speculators("dflash2", **_CONVOLUTION),
        {"head": SelectorConfig(4, 3), "convolution": ConvolutionConfig(2, 8)},
    ),
    "speculators, XPress": Case(
        speculators("xpress", xpress_rank=4, num_jacobi_passes=3), {"head": RefinerConfig(4, 8, 3, SIZE)}
    ),
}


def described(case: Case) -> BlockConfig:
    """Return the description that a file must lead to."""
    fields: dict[str, Any] = {"decoder": decoder_config(), "draft_vocab_size": VOCAB} | case.block
    fields["has_vocab_map"] = fields["draft_vocab_size"] != VOCAB
    fields.setdefault("has_lm_head", fields["has_vocab_map"])
    aux = tuple(i + 1 for i in IDS)
    return BlockConfig(block_size=SIZE, mask_token_id=MASK, aux_layers=aux, feature_size=E, **fields)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("target")
    random_target(path, vocab_size=VOCAB, rope_theta=THETA).tensors.close()
    byte_tokenizer(264, (0,)).save_pretrained(path)  # It has more tokens than the model. Prompts are tokens.
    return open_checkpoint(path)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_reference(
    name: str, target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all rounds of some texts, after chunks of prompts, prefix hits, and accepted and rejected drafts."""
    case = CASES[name]
    block = described(case)
    tensors = random_tensors(block)
    write_drafter(tmp_path, tensors, case.config)
    opened = open_block_drafter(tmp_path, target)
    found = opened.config
    assert found.decoder.rope == block.decoder.rope
    assert (found.head, found.convolution, found.first) == (block.head, block.convolution, block.first)
    assert (found.aux_layers, found.causal_layers) == (block.aux_layers, block.causal_layers)
    opened.tensors.close()

    assert target.path is not None
    model = LlamaForCausalLM.from_pretrained(target.path).eval()
    embedding, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    reference = BlockReference(block, tensors, embedding, lm_head)
    passes: list[tuple[int, list[Tensor], list[int], list[float]]] = []
    text: list[int] = []
    real = BlockDrafter.block_output

    def recorded(
        self: BlockDrafter,
        root_B: Tensor,
        before_B: Tensor | None,
        feature_BE: Tensor | None,
        batch: PagedBatch,
        cache: KVCache,
        num_drafts: int,
    ) -> BlockOutput:
        output = real(self, root_B, before_B, feature_BE, batch, cache, num_drafts)
        logits: list[Tensor] = []
        before: list[int] = []
        sure: list[float] = []
        length, num_right = int(batch.starts_B[0]), len(passes) % 5
        passes.append((length, logits, before, sure))
        steps = type(self.head).steps(self.head, output)
        confidence = None if self.confidence is None else self.confidence.steps(output)

        def noted(draft: int, before_B: Tensor) -> Tensor:
            """Random drafts are rarely right. So the first ones of most rounds are made so."""
            row_BW = steps(draft, before_B).clone()
            logits.append(row_BW[0].clone())
            before.append(int(before_B[0]))
            if confidence is not None:
                sure.append(float(confidence(draft, before_B)[0].exp()))
            if draft < num_right and length + 1 + draft < len(text):
                is_right_W = (torch.arange(VOCAB) if self.target_ids is None else self.target_ids) == text[
                    length + 1 + draft
                ]
                row_BW[:, is_right_W] = 100.0
            return row_BW

        monkeypatch.setattr(self.head, "steps", lambda block: noted)
        return output

    monkeypatch.setattr(BlockDrafter, "block_output", recorded)

    def engine_of(*sets: str) -> Any:
        sizes = "engine.max_batch_size=1", "engine.prefill_chunk_tokens=7", "engine.kv_cache_tokens=1024"
        config = load_config(None, [f"model.target={target.path}", "engine.device=cpu", *sizes, *sets])
        return build(resolve(config)).engine

    plain, engine = (
        engine_of("speculation.method=none"),
        engine_of("speculation.method=block", f"speculation.draft={tmp_path}"),
    )
    accepted = checked = 0
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for prompt in random_prompts(3, shared=9, longest=12, vocab=MASK):
        [expected_one] = run(plain, [prompt], params, check=False)
        text[:] = prompt + expected_one.token_ids
        passes.clear()
        [completion] = run(engine, [prompt], params, check=False)
        assert completion.token_ids == expected_one.token_ids
        accepted += completion.speculation.accepted
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in IDS], -1)
        for length, logits, before, sure in passes:
            if length >= len(text):
                continue
            expected = reference.logits(text[: length + 1], features[:length], before)
            assert len(logits) == block.max_drafts
            # Sums of large terms are rounded: processors differ by a few 1e-5 of the largest logit.
            largest = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(torch.stack(logits), expected, atol=1e-4 * largest, rtol=1e-4)
            assert bool(sure) == bool(block.confidence_size)
            if sure:
                confidences = reference.confidences(text[: length + 1], features[:length], before)
                torch.testing.assert_close(torch.tensor(sure), confidences, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked > 20
    assert accepted > 20
