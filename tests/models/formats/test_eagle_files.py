"""Each key and tensor of published EAGLE heads is applied or refused by name, never ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.decoder import Decoder
from specbatch.models.eagle_config import EagleKind, default_aux_layers, expected_eagle_tensors
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import LAYER_IDS, EagleCheckpoint, open_eagle_head
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from tests.eagle_reference import LAYERS, VOCAB, E, Reference, head_tensors, random_target, write_head
from tests.tiny_models import CPU, attention_of

NESTED = "eagle_config"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return random_target(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def opened(path: Path, target: Checkpoint, kind: EagleKind = "eagle3", **config: Any) -> EagleCheckpoint:
    """A head with these keys in its config.json."""
    return open_eagle_head(write_head(path, head_tensors(kind), **config), kind, target)


@pytest.mark.parametrize(
    ("config", "layers", "outputs"),
    [
        ({}, default_aux_layers(LAYERS), None),
        ({LAYER_IDS: None, NESTED: {LAYER_IDS: []}}, default_aux_layers(LAYERS), None),  # ModelOpt writes an empty list
        ({LAYER_IDS: [1, 3, 4]}, (1, 3, 4), "[2, 4, 5]"),
        ({NESTED: {LAYER_IDS: [0, 1, LAYERS]}}, (0, 1, LAYERS), ""),  # no outputs: there is no such layer
        ({LAYER_IDS: [1, 3, 4], NESTED: {LAYER_IDS: [1, 3, 4]}}, (1, 3, 4), "[2, 4, 5]"),
    ],
)
def test_layer_ids(
    config: dict[str, Any], layers: tuple[int, ...], outputs: str | None, target: Checkpoint, tmp_path: Path
) -> None:
    """`outputs`: what the note proposes where the file means outputs; None: there is no note."""
    found = opened(tmp_path, target, **config)
    assert (found.config.aux_layers, found.may_be_outputs) == (layers, bool(outputs))
    expected = f"speculation.aux_layers: inputs of layers {', '.join(map(str, layers))} (vLLM's reading of {LAYER_IDS}"
    if outputs:
        expected += f"; SGLang reads outputs, which would be {outputs} here"
    assert list(found.notes) == ([] if outputs is None else [expected + ")"])


def test_configured_layers_override_the_file(target: Checkpoint, tmp_path: Path) -> None:
    contradiction = {LAYER_IDS: [1, 3, 4], NESTED: {LAYER_IDS: [1, 3, 5]}}
    path = write_head(tmp_path, head_tensors("eagle3"), **contradiction)
    found = open_eagle_head(path, "eagle3", target, (2, 4, 5))
    assert (found.config.aux_layers, found.may_be_outputs) == ((2, 4, 5), False)
    assert found.notes == ("speculation.aux_layers: inputs of layers 2, 4, 5 (as configured)",)
    with pytest.raises(ModelError, match=r"contradicts itself.*\[1, 3, 5\]"):
        open_eagle_head(path, "eagle3", target)
    # A target that is too shallow for the usual layers has others.
    shallow = replace(target, config=replace(target.config, num_layers=4))
    assert open_eagle_head(path, "eagle3", shallow, (1, 2, 4)).config.aux_layers == (1, 2, 4)


@pytest.mark.parametrize("layers", [(), (1, 2), (1, 2, 3, 4), (2, 1, 3), (1, 1, 2), (1, 2, LAYERS + 1)], ids=str)
def test_layers_that_cannot_be_read_are_refused(layers: tuple[int, ...], target: Checkpoint, tmp_path: Path) -> None:
    path = write_head(tmp_path, head_tensors("eagle3"), **({LAYER_IDS: list(layers)} if layers else {}))
    for configured in [layers, None] if layers else [layers]:
        message = "rising order, mostly three, and none above 8"
        if len(layers) in (2, 4):
            message = rf"its fc reads 3 layers of the target, and {len(layers)} are named"
        with pytest.raises(ModelError, match=message) as error:
            open_eagle_head(path, "eagle3", target, configured)
        assert "speculation.aux_layers" in str(error.value.hint)


SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": E, "intermediate_size": 40}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_before_fc": True}, "missing: input_norm.weight"),
        ({NESTED: {"norm_before_fc": True}}, "missing: input_norm.weight"),
        ({"fc_norm": True}, r"missing: fc_norm\.0"),
        ({"fc_norm": True, "norm_before_fc": True}, "both norm_before_fc and fc_norm"),
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"num_hidden_layers": 2}, r"missing: layers\.1\."),
        ({"target_hidden_size": 2 * E}, f"target_hidden_size: {2 * E}; only {E}"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state: False; only True"),
        ({NESTED: {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        ({NESTED: {"use_input_layernorm_in_first_layer": False}}, "use_input_layernorm_in_first_layer"),
        ({NESTED: {"use_last_layernorm": False}}, "use_last_layernorm"),
        ({NESTED: {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({NESTED: {"next_layer_regular": False}}, "next_layer_regular"),
        ({NESTED: {"parallel_draft_step": 4}}, "parallel_draft_step: 4; only 1"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"layer_types": ["sliding_attention"]}, "layer_types.*only 'full_attention'"),
        ({"is_causal": False}, "is_causal False"),
        ({"is_neox_style": False}, "is_neox_style: False; only True"),
        ({NESTED: {"attn_logit_softcapping": 9.0}}, "attn_logit_softcapping 9.0"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window: 8, which is not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "window: 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the draft head is quantised"),
        ({"quantization_config": {"quant_method": "hqq"}}, "is quantised .'hqq'."),
        ({"transformer_layer_config": SIZES | {"quantization_config": {"quant_method": "fp8"}}}, "is quantised"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type: 'peagle'; only 'eagle3'"),
        ({NESTED: 3}, "eagle_config must be a JSON object"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"norm_before_residual": True, NESTED: {"norm_before_residual": False}}, "contradicts itself"),
        ({LAYER_IDS: [-1, 2, 3]}, f"an element of {LAYER_IDS} must be a whole number"),
        ({LAYER_IDS: 3}, f"{LAYER_IDS} must be a list"),
        ({LAYER_IDS: [1, 2, "3"]}, f"an element of {LAYER_IDS} must be a whole number"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be a whole number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_computed_otherwise_is_refused_by_name(
    config: dict[str, Any], message: str, target: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, target, **config)


def test_the_mask_token_of_p_eagle(target: Checkpoint, tmp_path: Path) -> None:
    tensors = head_tensors("eagle3") | {"mask_hidden": torch.zeros(1, 1, 3 * E)}
    for token, message in (
        (VOCAB, f"mask_token_id is {VOCAB}, and the vocabulary has {VOCAB} tokens"),
        (None, "one mask"),
    ):
        path = write_head(tmp_path / str(token), tensors, mask_token_id=token)
        with pytest.raises(ModelError, match=message):
            open_eagle_head(path, "eagle3", target, parallel=True)


def test_a_window_of_the_family_or_of_all_positions_is_none_of_the_head(target: Checkpoint, tmp_path: Path) -> None:
    for i, config in enumerate([{}, {"sliding_window": None}, {"sliding_window": 4096}]):
        opened(tmp_path / str(i), target, model_type="mistral", max_position_embeddings=4096, **config)


def test_files_of_another_kind_next_to_a_head_are_refused(target: Checkpoint, tmp_path: Path) -> None:
    path = write_head(tmp_path / "modelopt", head_tensors("eagle3"))
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match="the draft head is quantised"):
        open_eagle_head(path, "eagle3", target)
    tensors = head_tensors("eagle3")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e5m2)
    with pytest.raises(ModelError, match=r"1 tensors in FP8.*fc.weight is float8_e5m2"):
        open_eagle_head(write_head(tmp_path / "fp8", tensors), "eagle3", target)
    path = write_head(tmp_path / "adapter", head_tensors("eagle3"))
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has an adapter"):
        open_eagle_head(path, "eagle3", target)


def test_keys_that_change_nothing_are_read(target: Checkpoint, tmp_path: Path) -> None:
    nested = {
        LAYER_IDS: [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "norm_before_fc": False,
    }
    plain = {
        "target_hidden_size": E,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": None,
        "logit_scale": 1.0,
        "norm_before_residual": False,
        "layer_types": ["full_attention"],
        NESTED: nested,
    }
    found = opened(tmp_path, target, **plain)
    assert found.config == opened(tmp_path, target).config
    assert not found.notes
    # EAGLE-1/2 take no features of layers.
    assert not opened(tmp_path, target, "eagle", use_aux_hidden_state=False, num_hidden_layers=1).notes
    found = opened(tmp_path, target, "eagle", **{LAYER_IDS: [1, 3, 4]})  # it reads the last hidden state alone
    assert (found.config.aux_layers, found.may_be_outputs, found.notes) == ((), False, ())


def test_unknown_keys_are_named(target: Checkpoint, tmp_path: Path) -> None:
    [note] = opened(tmp_path, target, aux_mixing="banded", eagle_config={"post_fc_norm": True}, dropout=0.5).notes
    assert note.endswith("keys that specbatch ignores: aux_mixing, eagle_config.post_fc_norm")


def speculators(path: Path, tensors: dict[str, Tensor], draft_vocab: int | None, **changes: Any) -> Path:
    """The same head as vLLM's speculators write it."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    sizes = json.loads((write_head(path, renamed) / "config.json").read_text())
    del sizes["architectures"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": sizes,
        "draft_vocab_size": draft_vocab or VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
        LAYER_IDS: None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    } | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("draft_vocab", [None, 23])
def test_speculators_files_are_the_same_head(draft_vocab: int | None, target: Checkpoint, tmp_path: Path) -> None:
    tensors = head_tensors("eagle3", draft_vocab, embedding=True)
    theirs = write_head(tmp_path / "theirs", tensors, draft_vocab, norm_before_residual=True)
    expected = open_eagle_head(theirs, "eagle3", target)
    found = open_eagle_head(speculators(tmp_path / "found", tensors, draft_vocab), "eagle3", target)
    assert found.config == expected.config
    assert found.config.norm_before_residual
    assert not found.notes
    for name in expected_eagle_tensors(found.config):
        assert torch.equal(found.tensors.load(name), tensors[name]), name
    # A key that is missing is read as vLLM does, and that is named.
    silent = open_eagle_head(
        speculators(tmp_path / "silent", tensors, draft_vocab, norm_before_residual=None), "eagle3", target
    )
    assert silent.config.norm_before_residual
    assert "norm_before_residual true (vLLM's reading" in silent.notes[0]
    assert not opened(tmp_path / "own", target).config.norm_before_residual


def decoder_of(target: Checkpoint) -> Decoder:
    return build_decoder(target.config, target.tensors, 64, torch.float64, CPU)


def head_model(found: EagleCheckpoint, decoder: Decoder) -> EagleHead:
    weights = WeightLoader(found.tensors, torch.float64, CPU)
    attention = attention_of(found.config.decoder)
    return EagleHead(found.config, weights, decoder, attention, 64)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 23, VOCAB])
def test_a_missing_lm_head_is_the_targets(
    draft_vocab: int | None, tied: bool, target: Checkpoint, tied_target: Checkpoint, tmp_path: Path
) -> None:
    """Its rows for the draft vocabulary where there is a map; `VOCAB`: a map of all, which reorders them."""
    target = tied_target if tied else target
    tensors = head_tensors("eagle3", draft_vocab, vocab_map=True)
    if draft_vocab == VOCAB:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        tensors["d2t"] = ids - torch.arange(VOCAB)
    whole = target.tensors.load("model.embed_tokens.weight" if tied else "lm_head.weight")
    del tensors["lm_head.weight"]
    found = open_eagle_head(write_head(tmp_path, tensors, draft_vocab, tie_word_embeddings=tied), "eagle3", target)
    assert any("it has no LM head" in note for note in found.notes)
    decoder = decoder_of(target)
    model = head_model(found, decoder)
    assert (model.lm_head is decoder.lm_head) == (draft_vocab is None), "the whole head is shared, and not kept twice"
    hidden = torch.randn(3, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits = model.logits(hidden)
    normed = Reference("eagle3", tensors | {"lm_head.weight": whole}, target).norm(hidden, "norm.weight")
    expected = normed @ whole.double().T
    ids = model.target_ids if model.target_ids is not None else torch.arange(VOCAB)
    assert logits.shape == (3, draft_vocab or VOCAB)
    assert torch.allclose(logits, expected[:, ids])
    # A head's LM head is used, even if its config.json says that embeddings are tied.
    own = open_eagle_head(write_head(tmp_path, head_tensors("eagle3"), tie_word_embeddings=True), "eagle3", target)
    assert own.config.has_lm_head
    assert not own.notes


def test_a_missing_t2d_is_made_of_d2t(target: Checkpoint, tmp_path: Path) -> None:
    tensors = head_tensors("eagle3", 23)
    t2d = tensors.pop("t2d")
    found = open_eagle_head(write_head(tmp_path, tensors, 23), "eagle3", target)
    assert torch.equal(found.tensors.load("t2d"), t2d)
    ids = head_model(found, decoder_of(target)).target_ids
    assert ids is not None
    assert torch.equal(ids, t2d.nonzero().view(-1))
    tensors["d2t"] += VOCAB  # a map that leaves the vocabulary is refused as ever
    with pytest.raises(ModelError, match="d2t of the draft head"):
        open_eagle_head(write_head(tmp_path, tensors, 23), "eagle3", target)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_stored_rotary_frequencies_are_skipped(kind: EagleKind, target: Checkpoint, tmp_path: Path) -> None:
    tensors = head_tensors(kind)
    names = ("rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
    tensors |= dict.fromkeys(names, torch.ones(4))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    found = open_eagle_head(write_head(tmp_path, tensors), kind, target)
    assert not any("rotary" in name for name in found.tensors.shapes())


def test_one_tensor_under_two_names_is_refused(target: Checkpoint, tmp_path: Path) -> None:
    tensors = head_tensors("eagle3")
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    with pytest.raises(ModelError, match="the same tensor"):
        open_eagle_head(write_head(tmp_path, tensors), "eagle3", target)
