"""`norm_before_residual`, other layer ids, a missing LM head, several layers, further norms and P-EAGLE through both
engines: what is computed, and that texts stay plain decoding's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.chain import ChainDraft
from specbatch.draft.method import DraftTrees
from specbatch.draft.peagle import ParallelEagleDraft
from specbatch.draft.shape import DraftShape
from specbatch.models.config import expected_tensors as decoder_tensors
from specbatch.models.eagle_config import EagleConfig, expected_eagle_tensors
from specbatch.models.rope import RopeConfig
from specbatch.types import SamplingParams
from tests.eagle_reference import THETA, VOCAB, E, Reference, target_features
from tests.tiny_models import (
    AUX_LAYERS,
    HEAD_SEED,
    RandomTensors,
    num_target_layers,
    random_prompts,
    run,
    tiny_config,
    tiny_decoder,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

LAYERS = num_target_layers("eagle3")
CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 2, 6)
TRAITS: dict[str, dict[str, Any]] = {
    "normed residual": {"norm_before_residual": True},
    "other layers": {"aux_layers": (0, 1, 3)},
    "last output": {"aux_layers": (1, 2, LAYERS), "norm_before_residual": True},
    "no LM head": {"lacks_lm_head": True},
    "two layers": {"decoder": tiny_config(2, rope=RopeConfig(theta=THETA), qk_norm=True)},
    "joined norm": {"input_norms": "joined", "aux_layers": (0, 2)},
    "normed output": {"input_norms": "each", "norm_output": True},
    "P-EAGLE": {"mask_token_id": VOCAB - 1, "input_norms": "each"},
}
GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5)


@dataclass
class Seen:
    """What a row drafted from, and what it drafted."""

    row: int
    length: int
    feature_E: Tensor
    drafts: list[int]


@pytest.mark.parametrize("name", ["usual", *TRAITS])
def test_the_device_engine_drafts_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every round, of prompts that end in one chunk and of such that do not."""
    traits = {"decoder": tiny_config(1, rope=RopeConfig(theta=THETA)), **TRAITS.get(name, {})}
    method = "peagle" if name == "P-EAGLE" else "eagle3"
    engine = tiny_device_engine(method, CHAIN, num_pages=256, prefill_chunk_tokens=9, **traits)
    seen: list[Seen] = []
    drafting = ParallelEagleDraft if name == "P-EAGLE" else ChainDraft
    real: Any = drafting.draft

    def draft(self: Any, rows: BatchView, state: RequestTable, sampled: bool) -> DraftTrees:
        features = state.features_SE[rows.req_idx_B].clone()
        found = real(self, rows, state, sampled)
        for b in (rows.field(Field.DONE) == 0).nonzero().view(-1).tolist():
            row, length = int(rows.field(Field.STREAM)[b]), int(rows.length_B[b])
            seen.append(Seen(row, length, features[b], found.tokens_BN[b].tolist()))
        return found

    monkeypatch.setattr(drafting, "draft", draft)
    prompts = random_prompts(3, shared=6)
    texts = [prompt + c.token_ids for prompt, c in zip(prompts, run(engine, prompts, GREEDY), strict=True)]

    config = tiny_config(LAYERS)
    target = tiny_decoder(config, torch.float64)
    layers = traits.get("aux_layers", AUX_LAYERS)
    fields = {"kind": "eagle3", "feature_size": E, "draft_vocab_size": VOCAB, "aux_layers": layers}
    flags = dict.fromkeys(("has_fc_bias", "has_embedding", "has_vocab_map"), False)
    head = EagleConfig(**{**fields, **flags, **traits})
    weights = RandomTensors(expected_eagle_tensors(head), HEAD_SEED)._tensors
    files: Any = SimpleNamespace(tensors=RandomTensors(decoder_tensors(config), 0))
    if name == "no LM head":
        weights["lm_head.weight"] = files.tensors.load("lm_head.weight")
    normed = (traits.get(trait, False) for trait in ("norm_before_residual", "norm_output"))
    reference = Reference("eagle3", weights, files, *normed)
    assert len(seen) >= 15
    for one in seen:
        tokens = texts[one.row][: one.length + 1]  # the root is the last
        features = target_features(target, reference, tokens[:-1], layers)
        assert torch.allclose(one.feature_E, reference.forward(tokens[1:], features)[-1], atol=1e-4)  # float32 angles
        if name == "P-EAGLE":
            assert one.drafts == [tokens[-1], *_parallel_drafts(reference, tokens, features)]
            continue
        [longest] = [path for path in reference.tree(tokens[1:], features, CHAIN) if len(path) == CHAIN.num_steps]
        assert one.drafts == [tokens[-1], *longest]


def _parallel_drafts(reference: Reference, tokens: list[int], features: Tensor) -> list[int]:
    """Return the drafts of one pass over the text and mask tokens after it, each with the learned feature."""
    num_masks = CHAIN.num_steps - 1
    masked = reference.project(list(reference.w["mask_hidden"][None].chunk(3, -1))).expand(num_masks, -1)
    hidden = reference.forward([*tokens[1:], *[VOCAB - 1] * num_masks], torch.cat((features, masked)))
    return reference.log_probs(hidden[-CHAIN.num_steps :]).argmax(-1).tolist()


@pytest.mark.parametrize("shape", [CHAIN, DraftShape(3, 3, 8)], ids=str)
def test_parallel_drafts_are_lossless(shape: DraftShape) -> None:
    """Random drafts are often right, because the vocabulary has few tokens."""
    prompts = random_prompts(5, shared=6, vocab=7)
    settings: dict[str, Any] = {"num_pages": 256, "prefill_chunk_tokens": 16, "vocab": 7}
    for params in (GREEDY, SAMPLED):
        plain = run(tiny_oracle("none", num_layers=LAYERS, **settings), prompts, params)
        traits = {"decoder": tiny_config(2, vocab=7), "coupled": params is SAMPLED and shape.is_chain}
        runs = [
            run(make("peagle", shape, **settings, **traits), prompts, params)
            for make in (tiny_engine, tiny_device_engine)
        ]
        for found in runs:
            assert [c.token_ids for c in found] == [c.token_ids for c in plain]
            assert sum(c.speculation.accepted for c in found) > 2
        assert [c.speculation for c in runs[0]] == [c.speculation for c in runs[1]]


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, CHAIN) for name in TRAITS if name != "P-EAGLE"), ("last output", TREE)]
)
def test_texts_are_plain_decodings_and_both_engines_agree(name: str, shape: DraftShape) -> None:
    prompts = random_prompts(4, shared=6)
    settings: dict[str, Any] = {"num_pages": 256, "prefill_chunk_tokens": 16}
    usual = run(tiny_oracle("eagle3", shape, **settings), prompts, SAMPLED)
    traits = TRAITS[name]
    for params in (GREEDY, SAMPLED):
        oracle = run(tiny_oracle("eagle3", shape, **settings, **traits), prompts, params)
        device = run(tiny_device_engine("eagle3", shape, **settings, **traits), prompts, params)
        assert [c.token_ids for c in device] == [c.token_ids for c in oracle]
        assert [c.speculation for c in device] == [c.speculation for c in oracle]
        if params is GREEDY:
            plain = run(tiny_device_engine("none", num_layers=LAYERS, **settings), prompts, params)
            assert [c.token_ids for c in oracle] == [c.token_ids for c in plain]
        elif shape.is_chain:  # p/q: what was drafted is in the text
            assert [c.token_ids for c in oracle] != [c.token_ids for c in usual]
