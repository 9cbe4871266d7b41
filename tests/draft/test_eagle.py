"""EAGLE heads loaded from checkpoint folders, against the plain reimplementation in `eagle_reference.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from specbatch.cache.pages import PagePool
from specbatch.draft.network import EagleNet
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.errors import ModelError
from specbatch.models.eagle_config import EagleKind, default_aux_layers, target_ids_of
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import LAYER_IDS, open_eagle_head
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from specbatch.types import Request, RngKey, SamplingParams
from tests.eagle_reference import (
    LAYERS,
    VOCAB,
    Reference,
    head_tensors,
    random_target,
    target_features,
    write_head,
)
from tests.oracle.engine import OracleEngine
from tests.oracle.neural import NeuralProposer
from tests.oracle.spans import Span, batch_of
from tests.oracle.tree import DraftTree
from tests.oracle.verify import Accepted
from tests.tiny_models import CPU, attention_of, random_prompts, run, tiny_oracle


@dataclass(frozen=True)
class Case:
    """A head: how its tensors are made, its config.json, and what has to come of that."""

    kind: EagleKind
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = default_aux_layers(LAYERS)
    norm_before_residual: bool = False
    norm_output: bool = False


KINDS = {
    "eagle": Case("eagle"),
    "eagle-bias": Case("eagle", {"fc_bias": True, "qkv_bias": True, "embedding": True}),
    "eagle3": Case("eagle3"),
    "eagle3-reduced": Case("eagle3", {"draft_vocab": 23}),
    "eagle3-map-of-all": Case("eagle3", {"draft_vocab": VOCAB, "vocab_map": True, "embedding": True}),
    "eagle3-normed-residual": Case("eagle3", {}, {"norm_before_residual": True}, norm_before_residual=True),
    "eagle3-other-layers": Case("eagle3", {}, {LAYER_IDS: [1, 3, 6]}, (1, 3, 6)),
    "eagle3-two-features": Case("eagle3", {"num_features": 2}, {LAYER_IDS: [1, 6]}, (1, 6)),
    "eagle3-three-layers": Case("eagle3", {"num_layers": 3, "qk_norm": True}, {"num_hidden_layers": 3}),
    "eagle3-joined-norm": Case("eagle3", {"input_norms": "joined"}, {"norm_before_fc": True}),
    "eagle3.1": Case("eagle3", {"input_norms": "each"}, {"fc_norm": True, "norm_output": True}, norm_output=True),
    "eagle3-nested-first-and-last": Case("eagle3", {}, {"eagle_config": {LAYER_IDS: [0, 3, LAYERS]}}, (0, 3, LAYERS)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return random_target(tmp_path_factory.mktemp("target"))


def test_tapped_layers_are_those_of_the_public_code(target: Checkpoint) -> None:
    """`hidden_states[i]` of transformers is the input of layer i; the last one is the output after the final norm."""
    model = LlamaForCausalLM.from_pretrained(target.path).eval()
    tokens = random_prompts(1, longest=1, shared=30)[0]
    assert default_aux_layers(LAYERS) == (2, 4, 5)
    assert default_aux_layers(32) == (2, 16, 29)
    decoder = build_decoder(target.config, target.tensors, 64, torch.float32, CPU)
    everything = tuple(range(LAYERS + 1))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        layout = batch_of([Span([0], 0, len(tokens))], len(tokens), CPU)
        hidden, aux_hidden_states = decoder.forward(
            torch.tensor(tokens), layout, decoder.new_cache(len(tokens), torch.float32), everything
        )
        aux_hidden_states[-1] = model.model.norm(aux_hidden_states[-1])
    for found, expected in zip([*aux_hidden_states, hidden], [*states, states[-1]], strict=True):
        assert torch.allclose(found, expected[0], atol=1e-3)  # values up to 20, layers apart by more than 1


@pytest.mark.parametrize("shape", [DraftShape(4, 1, 5), DraftShape(3, 3, 12), DraftShape(2, 2, 4)], ids=str)
@pytest.mark.parametrize("case", KINDS)
def test_drafts_are_those_of_the_reference(
    case: str, shape: DraftShape, target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tree of a whole generation, so after prefill chunks, prefix hits, accepted and rejected drafts."""
    made = KINDS[case]
    tensors = head_tensors(made.kind, **made.options)
    path = write_head(tmp_path, tensors, made.options.get("draft_vocab"), **made.config)
    opened = open_eagle_head(path, made.kind, target)
    head, source = opened.config, opened.tensors
    reference = Reference(made.kind, tensors, target, made.norm_before_residual, made.norm_output)
    decoder = build_decoder(target.config, target.tensors, 300, torch.float64, CPU)
    model = EagleHead(head, WeightLoader(source, torch.float64, CPU), decoder, attention_of(head.decoder), 300)
    pool = PagePool(64, 4)
    net = EagleNet(model, model.new_cache(256, torch.float64))
    proposer = NeuralProposer(net, shape, VOCAB, 4, CPU)
    engine = OracleEngine(
        decoder,
        proposer,
        decoder.new_cache(256, torch.float64),
        pool,
        max_length=200,
        max_batch_size=3,
        prefill_chunk_tokens=7,
        prefix_cache=True,
        eos_token_ids=(),
    )
    checked = 0
    depths: set[int] = set()
    accepted_before: set[int] = set()
    real = proposer.propose

    def accept_anything(sequences: list[Sequence], tree: DraftTree, logits_TV: Tensor) -> list[Accepted]:
        """Random heads are rarely right, so a path is accepted whatever the target predicts: what matters here is what
        the head makes of it."""
        result, first = [], 0
        for b in range(len(sequences)):
            n = tree.num_nodes[b]
            path = [[0, n - 1, n // 2, 1][(checked + b) % 4]]
            while path[0]:
                path.insert(0, int(tree.parents_BN[b, path[0]]))
            result.append(Accepted(path, int(logits_TV[first + path[-1]].argmax())))
            accepted_before.add(len(path) - 1)
            first += n
        return result

    monkeypatch.setattr("tests.oracle.engine.verify", accept_anything)

    def propose(sequences: list[Sequence]) -> DraftTree:
        nonlocal checked
        tree = real(sequences)
        for b, seq in enumerate(sequences):
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, tree.num_nodes[b]):
                paths.append((*paths[tree.parents_BN[b, node]], int(tree.tokens_BN[b, node])))
            features = target_features(decoder, reference, seq.tokens[:-1], made.layers)
            expected = reference.tree(seq.tokens[1:], features, shape)
            assert set(paths[1:]) == set(expected), f"after {len(seq.tokens)} tokens"
            depths.update(map(len, paths))
            checked += 1
        return tree

    monkeypatch.setattr(proposer, "propose", propose)
    run(engine, random_prompts(2, shared=9, longest=12), SamplingParams(max_tokens=16))
    assert checked >= 8
    assert len(depths) > 2
    assert 0 in accepted_before
    assert max(accepted_before) >= 2


def test_sampled_chains_are_drawn_from_the_heads_distribution(target: Checkpoint, tmp_path: Path) -> None:
    """With a reduced vocabulary: q over the target's ids, zero where the draft has no token."""
    tensors = head_tensors("eagle3", draft_vocab=23)
    opened = open_eagle_head(write_head(tmp_path, tensors, 23), "eagle3", target)
    head, source = opened.config, opened.tensors
    reference = Reference("eagle3", tensors, target)
    decoder = build_decoder(target.config, target.tensors, 100, torch.float64, CPU)
    model = EagleHead(head, WeightLoader(source, torch.float64, CPU), decoder, attention_of(head.decoder), 100)
    proposer = NeuralProposer(EagleNet(model, model.new_cache(64, torch.float64)), DraftShape(1, 1, 2), VOCAB, 8, CPU)
    cache = decoder.new_cache(64, torch.float64)
    options = {"max_length": 60, "max_batch_size": 1, "prefill_chunk_tokens": 64, "prefix_cache": False}
    engine = OracleEngine(decoder, proposer, cache, PagePool(8, 8), **options, eos_token_ids=())  # type: ignore[arg-type]
    engine.submit(Request(0, [1, 2, 3, 4], SamplingParams(temperature=0.8), RngKey(0, 0, 0)))
    engine.step()
    [seq] = engine._scheduler.running
    [q] = proposer.propose([seq]).draft_probs
    assert q is not None
    hidden = reference.forward(seq.tokens[1:], target_features(decoder, reference, seq.tokens[:-1]))[-1]
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    for draft_id, p in enumerate(F.softmax(reference.log_probs(hidden) / 0.8, -1)):
        expected[reference.to_target(draft_id)] = p
    assert torch.allclose(q[0], expected, atol=1e-12)
    assert torch.equal(q[0] > 0, tensors["t2d"]), "d2t and t2d name different tokens"


FAULTS: dict[str, tuple[EagleKind, dict[str, Any], dict[str, Any], list[str]]] = {
    "hidden size": ("eagle", {}, {"hidden_size": 64, "head_dim": 8}, ["hidden size is 64", "32"]),
    "vocabulary": ("eagle", {}, {"vocab_size": 99}, ["vocabulary has 99", "61"]),
    "eagle3 as eagle": ("eagle", {"kind": "eagle3"}, {}, ["no eagle checkpoint", "layers.0.self_attn.q_proj.weight"]),
    "eagle as eagle3": ("eagle3", {"kind": "eagle"}, {}, ["no eagle3 checkpoint", "midlayer", "missing"]),
    "draft vocabulary": ("eagle3", {"draft_vocab": 23}, {"draft_vocab_size": 29}, ["lm_head.weight", "23", "29"]),
    "unnamed draft vocabulary": ("eagle3", {"draft_vocab": 23}, {"draft_vocab_size": None}, ["lm_head.weight", "23"]),
    "missing tensor": ("eagle3", {"drop": "midlayer.hidden_norm.weight"}, {}, ["missing: midlayer.hidden_norm.weight"]),
    "missing map": ("eagle3", {"draft_vocab": 23, "drop": "d2t"}, {"draft_vocab_size": 23}, ["missing: d2t"]),
    "unknown tensor": ("eagle", {"add": "layers.0.surprise.weight"}, {}, ["unknown: layers.0.surprise.weight"]),
    "heads": ("eagle", {}, {"num_key_value_heads": 4}, ["k_proj.weight is [16, 32], expected [32, 32]"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_heads_are_refused_by_name(fault: str, target: Checkpoint, tmp_path: Path) -> None:
    kind, options, changes, words = FAULTS[fault]
    options = dict(options)
    written: EagleKind = options.pop("kind", kind)
    drop, add = options.pop("drop", None), options.pop("add", None)
    tensors = head_tensors(written, **options)
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(3)
    with pytest.raises(ModelError) as error:
        open_eagle_head(write_head(tmp_path, tensors, **changes), kind, target)
    for word in words:
        assert word in error.value.message
    if fault != "vocabulary":
        assert error.value.hint


def test_eagle3_needs_seven_layers(target: Checkpoint, tmp_path: Path) -> None:
    shallow = replace(target, config=replace(target.config, num_layers=6))
    path = write_head(tmp_path, head_tensors("eagle3"))
    with pytest.raises(ModelError, match="only 6"):
        open_eagle_head(path, "eagle3", shallow)
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_eagle_head(tmp_path / "nowhere", "eagle3", target)


def test_vocabulary_maps_that_contradict_themselves_are_refused() -> None:
    ids = torch.tensor([1, 5, 9])
    d2t, t2d = ids - torch.arange(3), torch.zeros(12, dtype=torch.bool).index_fill_(0, ids, True)
    assert torch.equal(target_ids_of(d2t, t2d, 12), ids)
    for wrong_d2t, wrong_t2d in (
        (torch.tensor([1, 4, 3]), t2d),  # 1, 5, 5
        (torch.tensor([-1, 4, 7]), t2d),  # below zero
        (torch.tensor([1, 4, 17]), t2d),  # past the vocabulary
        (d2t, t2d.roll(1)),
    ):
        with pytest.raises(ModelError, match="d2t"):
            target_ids_of(wrong_d2t, wrong_t2d, 12)


def test_a_reduced_distribution_keeps_its_mass() -> None:
    proposer = tiny_oracle("eagle3", DraftShape(3, 1, 4), draft_vocab=4)._proposer
    q = proposer._widen(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))  # type: ignore[attr-defined]
    ids = proposer._net.target_ids  # type: ignore[attr-defined]
    assert q[ids].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert abs(float(q.sum()) - 1) < 1e-12
