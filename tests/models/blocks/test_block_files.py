"""Block drafters that do not run are refused by name, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.formats.block_files import BlockCheckpoint, block_format, open_block_drafter
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import ResolvedRun, resolve
from tests.block_reference import random_tensors, write_drafter
from tests.eagle_reference import random_target
from tests.models.blocks.test_reference import (
    CASES,
    IDS,
    MASK,
    SIZE,
    VOCAB,
    Case,
    as_json,
    described,
    dflash,
    speculators,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("target")
    random_target(path, vocab_size=VOCAB).tensors.close()
    byte_tokenizer(264, (0,)).save_pretrained(path)
    return open_checkpoint(path)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no block size": (as_json(block_size=None), "has no block_size"),
    "small block": (as_json(block_size=1), "a block has 2 tokens or more"),
    "no layers": (as_json(dflash_config={"mask_token_id": MASK}), "target_layer_ids must be a list of layers"),
    "falling layers": (as_json(**dflash(target_layer_ids=[4, 1])), "layers must rise"),
    "last layer": (as_json(**dflash(target_layer_ids=[1, 7])), "the target's last layer"),
    "too many layers": (speculators("dflash", aux_hidden_state_layer_ids=[2, 9]), "the target has 8"),
    "mask token": (as_json(**dflash(mask_token_id=99)), "mask_token_id is 99"),
    "hidden size": (as_json(hidden_size=64), "hidden size is 64, the target's 32"),
    "vocabulary": (as_json(vocab_size=99), "vocabulary has 99 tokens, the target's 12"),
    "quantised": (as_json(quantization_config={"quant_method": "fp8"}), "quantised"),
    "sinks": (as_json(**dflash(attention_sink_bias=True)), "attention_sink_bias: True"),
    "windows of all layers": (as_json(**dflash(use_swa=True)), "use_swa: True"),
    "latent attention": (as_json(**dflash(attention_mode="mla")), "attention_mode: 'mla'"),
    "mixed attention": (as_json(**dflash(attention_modes=["gqa", "kda"])), "attention_modes is not supported"),
    "layer types": (as_json(layer_types=["full_attention", "linear"]), "layer type 'linear'"),
    "projector": (as_json(**dflash(projector_type="other")), "other is not supported"),
    "DeepSeek-V4": (
        as_json(architectures=["DSparkDraftModel"], model_type="deepseek_v4"),
        "DSparkDraftModel of model_type 'deepseek_v4'",
    ),
    "Markov head": (
        as_json(architectures=["DSparkDraftModel"], markov_rank=4, markov_head_type="lstm"),
        "markov_head_type 'lstm'",
    ),
    "convolution": (
        as_json(
            architectures=["DFlash2DraftModel"],
            **dflash(conv_kernel_size=9, conv_group_size=8, selector_rank=4, selector_top_k=3),
        ),
        "conv_kernel_size 9",
    ),
    "candidates": (
        as_json(
            architectures=["DFlash2DraftModel"],
            **dflash(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=30),
        ),
        "30 candidates",
    ),
    "vocabulary of DFlash2": (
        as_json(
            architectures=["DFlash2DraftModel"],
            draft_vocab_size=8,
            **dflash(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=3),
        ),
        "a DFlash2 with a reduced vocabulary",
    ),
    "neighbouring dimensions": (as_json(is_neox_style=False), "is_neox_style: False"),
    "no windows": (
        as_json(layer_types=["sliding_attention", "full_attention"], sliding_window=9, use_sliding_window=False),
        "use_sliding_window is false",
    ),
    "no scale": (as_json(**dflash(output_multiplier=0)), "must be positive"),
    "another kind": (speculators("medusa"), "no block drafter that is known"),
    "an EAGLE head": (as_json(architectures=["LlamaForCausalLMEagle3"], dflash_config=None), "no block drafter"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_by_name(fault: str, target: Checkpoint, tmp_path: Path) -> None:
    config, match = FAULTS[fault]
    config = {key: value for key, value in config.items() if value is not None}
    path = write_drafter(tmp_path, random_tensors(described(CASES["DFlash"])), config)
    with pytest.raises(ModelError, match=match) as caught:
        open_block_drafter(path, target)
    assert caught.value.hint or fault in ("small block", "mask token", "convolution", "candidates", "layers")


def test_tensors_that_do_not_fit(target: Checkpoint, tmp_path: Path) -> None:
    tensors = random_tensors(described(CASES["DFlash"]))
    changed = {
        "missing: fc.weight": {name: tensor for name, tensor in tensors.items() if name != "fc.weight"},
        "unknown: extra.weight": {**tensors, "extra.weight": torch.zeros(3)},
        r"norm\.weight is \[5\], expected \[32\]": {**tensors, "norm.weight": torch.zeros(5)},
        "same tensor": {**tensors, "model.norm.weight": torch.ones(32)},
        "in FP8": {**tensors, "fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)},
    }
    for number, (match, other) in enumerate(changed.items()):
        with pytest.raises(ModelError, match=match):
            open_block_drafter(write_drafter(tmp_path / str(number), other, as_json()), target)
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_block_drafter(tmp_path / "nowhere", target)


def opened(path: Path, target: Checkpoint, config: dict[str, Any], case: str = "DFlash") -> BlockCheckpoint:
    found = open_block_drafter(write_drafter(path, random_tensors(described(CASES[case])), config), target)
    found.tensors.close()
    return found


def test_keys_that_decide_what_is_computed(target: Checkpoint, tmp_path: Path) -> None:
    """`shift_label` of all heads of SpecForge, windows as vLLM reads them, and DSpark by the name of its head."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    assert opened(tmp_path / "1", target, as_json(**dflash(shift_label=True))).config.first == 0
    block = opened(
        tmp_path / "2", target, as_json(**windows, **dflash(swa_window_size=3, causal=True), is_causal=False)
    )
    assert (block.config.decoder.sliding_windows, block.config.causal_layers) == ((3, None), ())
    for number, (shifted, first) in enumerate(((None, 1), (True, 0), (False, 1))):
        config = as_json(**dflash(projector_type="dspark", markov_rank=4, shift_label=shifted))
        found = opened(tmp_path / f"dspark{number}", target, config, "DSpark of SpecForge")
        assert (found.format, found.config.first) == ("dspark", first)


def test_ignored_keys_are_named(target: Checkpoint, tmp_path: Path) -> None:
    raw = speculators("dflash", magic=3)
    raw["transformer_layer_config"]["inner"] = True
    for number, (config, names) in enumerate(
        (
            (as_json(), None),
            (speculators("dflash", embed_requires_grad=True, speculators_version="0.9"), None),
            (raw, "magic, transformer_layer_config.inner"),
            (as_json(top=2, **dflash(magic=3)), "top, dflash_config.magic"),
        )
    ):
        notes = opened(tmp_path / str(number), target, config).notes[1:]
        assert [note.partition("ignores: ")[2] for note in notes] == ([] if names is None else [names])


def test_the_two_meanings_of_dspark() -> None:
    """The architecture is decided by the keys of its file."""
    assert block_format(as_json(architectures=["DSparkDraftModel"], markov_rank=4)) == "dspark"
    assert block_format(as_json(architectures=["DSparkDraftModel"], **dflash(markov_rank=4))) == "dspark"
    with pytest.raises(ModelError, match="DSpark for DeepSeek-V4"):
        block_format({"architectures": ["DSparkV41DraftModel"]})
    assert block_format({"architectures": ["LlamaForCausalLM"]}) is None
    assert block_format({"architectures": 3}) is None


def resolved(target: Checkpoint, draft: object, *sets: str) -> ResolvedRun:
    given = f"model.target={target.path}", "engine.device=cpu", "speculation.method=block", f"speculation.draft={draft}"
    return resolve(load_config(None, [*given, *sets]))


def test_the_number_of_drafts_is_that_of_the_block(target: Checkpoint, tmp_path: Path) -> None:
    def written(name: str) -> Path:
        case: Case = CASES[name]
        return write_drafter(tmp_path / name, random_tensors(described(case)), case.config)

    run = resolved(target, written("DFlash"))
    assert (run.speculation.section.num_steps, run.speculation.section.num_draft_tokens) == (SIZE - 1, SIZE)
    assert run.speculation.num_lookahead == SIZE
    assert any("dflash, blocks of 5 with no head" in note for note in run.notes)
    anchored = resolved(target, written("DSpark of DeepSpec"))
    assert anchored.speculation.section.num_steps == SIZE
    assert any("confidence head estimates how likely drafts are" in note for note in anchored.notes)
    tensors = random_tensors(described(CASES["DSpark of DeepSpec"]))
    without = {name: tensor for name, tensor in tensors.items() if "confidence" not in name}
    lost = resolved(target, write_drafter(tmp_path / "lost", without, CASES["DSpark of DeepSpec"].config))
    assert any("its files have no confidence head" in note for note in lost.notes)
    config = {**CASES["DSpark of DeepSpec"].config, "enable_confidence_head": False}
    unused = resolved(target, write_drafter(tmp_path / "unused", tensors, config))
    assert not any("confidence" in note for note in unused.notes)
    assert isinstance(unused.draft, BlockCheckpoint)
    assert not unused.draft.config.confidence_size
    build_engine(unused)
    short = resolved(target, tmp_path / "DFlash", "speculation.num_steps=2")
    assert (short.speculation.section.num_draft_tokens, short.speculation.num_lookahead) == (3, SIZE)
    with pytest.raises(ConfigError, match=r"num_steps is 7, and a block of this drafter has 4 drafts"):
        resolved(target, tmp_path / "DFlash", "speculation.num_steps=7")
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 6, and a block of this drafter has 4") as refused:
        resolved(target, tmp_path / "DFlash", "speculation.num_draft_tokens=6")
    assert refused.value.hint == "set speculation.num_draft_tokens to at most 5, or leave it out"
    trees = {
        ("speculation.topk=2",): (SIZE - 1, 2, 8),
        ("speculation.topk=2", "speculation.num_steps=1"): (1, 2, 3),
        ("speculation.topk=3", "speculation.num_draft_tokens=12"): (SIZE - 1, 3, 12),
        ("speculation.topk=2", "speculation.num_steps=2", "speculation.num_draft_tokens=7"): (2, 2, 7),
    }
    for sets, shape in trees.items():
        tree = resolved(target, tmp_path / "DFlash", *sets).speculation
        assert (tree.section.num_steps, tree.section.topk, tree.section.num_draft_tokens) == shape
        assert tree.num_lookahead == max(SIZE, shape[2])
    by_batch = (
        "speculation.schedule=[{max_batch: 1}, {max_batch: 2, topk: 2}, {max_batch: 3, topk: 2, num_steps: 1}, "
        "{max_batch: 4, num_draft_tokens: 3}]"
    )
    shapes = resolved(target, tmp_path / "DFlash", by_batch).speculation.shapes
    assert list(map(str, shapes)) == [f"{SIZE - 1}/1/{SIZE}", f"{SIZE - 1}/2/8", "1/2/3", "2/1/3"]
    with pytest.raises(ConfigError, match=r"num_draft_tokens must be between 2 and 15"):
        resolved(target, tmp_path / "DFlash", "speculation.topk=2", "speculation.num_draft_tokens=16")
    with pytest.raises(ConfigError, match=r"is shared by chains, and the draft shape 4/2/8 is a tree"):
        resolved(target, tmp_path / "DFlash", "speculation.topk=2", "speculation.verify_budget=2")
    with pytest.raises(ConfigError, match=r"needs speculation\.draft"):
        resolve(load_config(None, ["speculation.method=block", "engine.device=cpu"]))
    assert len(IDS) == 3


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "domino", "lilicorr", "xpress"])
def test_random_drafters(name: str) -> None:
    sets = "model.target=random:tiny", "speculation.method=block", f"speculation.draft=random:{name}"
    run = resolve(load_config(None, [*sets, "engine.device=cpu"]))
    assert run.speculation.section.num_steps == (16 if name == "dspark" else 15)
    tree = resolve(load_config(None, [*sets, "engine.device=cpu", "speculation.topk=4"])).speculation.section
    assert (tree.num_steps, tree.num_draft_tokens) == ((16, 17) if name == "dspark" else (15, 16))
    by_batch = resolve(
        load_config(None, [*sets, "engine.device=cpu", "speculation.schedule=[{max_batch: 9, topk: 4}]"])
    )
    assert list(map(str, by_batch.speculation.shapes)) == ["16/4/17" if name == "dspark" else "15/4/16"]
    with pytest.raises(ModelError, match="is a draft head, not a model"):
        resolve(load_config(None, [f"model.target=random:{name}", "engine.device=cpu"]))


def test_capped_logits_of_a_padded_lm_head_are_contiguous() -> None:
    """The kernel that caps takes no rows that are apart, as those of the target's LM head can be."""
    drafter = object.__new__(BlockDrafter)
    drafter.block = SimpleNamespace(logits_scale=1.0, logits_soft_cap=5.0)  # type: ignore[assignment]
    drafter._lm_head = lambda x: torch.zeros(len(x), 8)[:, :5]  # type: ignore[assignment]
    drafter._soft_capped = lambda x, cap: x  # type: ignore[method-assign, assignment]
    assert drafter.raw_logits(torch.zeros(3, 2)).is_contiguous()
