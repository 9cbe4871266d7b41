"""Block drafters in training: the pass over many blocks against drafting, losses, resuming, the checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, InputError
from specbatch.models.blocks.config import BlockConfig, MarkovConfig
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.formats.block_files import open_block_drafter
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build, build_decoder
from specbatch.setup.resolve import resolve
from specbatch.torch_threads import use_threads
from specbatch.train.block import losses as block_losses
from specbatch.train.block.attention import TILE, flex_attention_of, masked_attention, tile_mask
from specbatch.train.block.batch import BlockBatch, all_roots, collate, random_roots
from specbatch.train.block.drafter import TrainedBlocks, initialise
from specbatch.train.block.export import checkpoint_tensors, config_json
from specbatch.train.block.learner import BlockLearner
from specbatch.train.block.losses import LossSettings
from specbatch.train.block.sizes import BlockSizes, block_config, feature_layers
from specbatch.train.checkpoint import save_checkpoint, stored
from specbatch.train.examples import Example, draft_vocabulary
from specbatch.train.start import HeadName
from specbatch.train.target import FrozenTarget
from specbatch.train.trainer import Trainer, TrainSettings
from specbatch.types import SamplingParams
from tests.oracle.spans import Span, batch_of
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import CPU, VOCAB, attention_of, random_prompts, run, tiny_config
from tests.train.test_eagle import LAYERS, Trained, target_checkpoint

SIZE, MASK = 5, 2
LOSS = LossSettings(0.5, 2.0)


DRAFT_IDS = torch.tensor([t for t in range(VOCAB) if t % 3])
HEADS: tuple[HeadName, ...] = "none", "markov", "domino"


def sizes_of(head: HeadName, num_layers: int = 2, **changes: Any) -> BlockSizes:
    """Make small sizes. A head that is not there has none."""
    sizes: dict[str, Any] = {"markov": {"markov_rank": 4}, "domino": {"gru_size": 6, "inner_size": 10}}.get(head, {})
    return BlockSizes(num_layers, SIZE, 3, 40, head=head, **{**sizes, **changes})


def config_of(head: HeadName, num_layers: int = 2, **changes: Any) -> BlockConfig:
    return block_config(tiny_config(LAYERS), sizes_of(head, num_layers, **changes), MASK)


def random_drafter(block: BlockConfig) -> TrainedBlocks:
    """Make a drafter in float64 whose every weight is random, so that nothing is hidden by a zero or a one."""
    drafter = TrainedBlocks(block, DRAFT_IDS if block.has_vocab_map else None).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name))
    return drafter


def learner_of(drafter: TrainedBlocks, batch_tokens: int = 64, seed: int = 0) -> BlockLearner:
    def frozen() -> FrozenTarget:
        ids_W = DRAFT_IDS if drafter.block.has_vocab_map else None
        return FrozenTarget(target_checkpoint(), drafter.block.aux_layers, ids_W, 256, 64, torch.float64, CPU)

    return BlockLearner(drafter, frozen, LOSS, batch_tokens // SIZE, batch_tokens, 64, seed, CPU)


def examples_of(count: int) -> list[Example]:
    prompts = random_prompts(count, shared=8, longest=30, seed=3)
    return [Example(p[: 40 - 3 * (i % 5)], 2 + i % 3, i, True) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_pass_over_many_blocks_is_what_drafting_does(head: HeadName, is_reduced: bool, tmp_path: Path) -> None:
    """All blocks of two texts: the logits in training are those of the drafter that was saved and opened, which drafts
    one block after the other from its cache."""
    vocab = len(DRAFT_IDS) if is_reduced else None
    block, target = config_of(head, draft_vocab_size=vocab), target_checkpoint()
    drafter = random_drafter(block)
    learner = learner_of(drafter)
    learner.load_target()
    examples = examples_of(2)
    [batch] = learner.whole(examples)
    frozen = learner.make_target()
    features_BLF, _ = frozen.features(batch.tokens_BL)
    with torch.no_grad():
        hidden_QE = learner.hidden_states(batch, features_BLF.flatten(0, 1))
        states_NJX = drafter.head_states(batch.before_NJ, frozen.embedding_VE)
        states_RX = states_NJX.flatten(0, 1)[batch.drafts_R]
        found_RW = drafter.logits(hidden_QE[batch.learn_R], states_RX, frozen.draft_head_WE)

    save_checkpoint(tmp_path, stored(drafter.state_dict(), torch.float32), config_json(block, "tiny"))
    opened = open_block_drafter(tmp_path, target)
    assert replace(opened.config, decoder=block.decoder) == block
    assert opened.config.decoder.rope == block.decoder.rope
    decoder = build_decoder(target.config, target.tensors, 300, torch.float64, CPU)
    weights = WeightLoader(Trained(drafter.state_dict(), opened.tensors), torch.float64, CPU)
    model = BlockDrafter(opened.config, weights, decoder, attention_of(block.decoder), 300)
    expected: dict[tuple[int, int], Tensor] = {}  # the key is the row of the token before the draft, and the step
    for b, example in enumerate(examples):
        tokens = torch.tensor(example.tokens)
        layout = batch_of([Span([0], 0, len(tokens))], 64, CPU)
        _, states = decoder.forward(tokens, layout, decoder.new_cache(64, torch.float64), block.aux_layers)
        for root in range(example.prompt_length, len(tokens) - 1):
            cache = model.new_cache(64, torch.float64)
            features = model.features(states[0], [s[:root] for s in states])
            model.forward(tokens[:root], features, batch_of([Span([0], 0, root)], 64, CPU), cache)
            layout = batch_of([Span([0], root, SIZE)], 64, CPU)
            output = model.block_output(tokens[root : root + 1], None, None, layout, cache, block.max_drafts)
            steps = model.head.steps(output)
            for j in range(min(block.max_drafts, len(tokens) - 1 - root)):
                row = steps(j, tokens[root + j : root + j + 1])[0]
                expected[b * batch.tokens_BL.shape[1] + root - 1, j] = row
    rows = [(row, j) for j, rows in enumerate(batch.rows) for row in rows.tolist()]
    assert sorted(rows) == sorted(expected)
    assert len(rows) > 100
    assert found_RW.shape[1] == (vocab or VOCAB)
    for row, found_W in zip(rows, found_RW, strict=True):
        torch.testing.assert_close(found_W, expected[row], atol=1e-9, rtol=1e-9)
    if is_reduced:
        assert model.target_ids is not None
        assert torch.equal(model.target_ids, DRAFT_IDS)


@pytest.mark.parametrize("size", [5, 8])
def test_flex_attention_sees_what_the_mask_says(size: int) -> None:
    """And its tiles are those that the mask has something in."""
    block = block_config(tiny_config(LAYERS), BlockSizes(1, size, 3), MASK)
    texts = [Example(list(range(300)), 30, 0, True), Example(list(range(200)), 10, 1, True)]
    batch = collate(texts, random_roots(texts, 100, 0), block, (6 * TILE, TILE))
    assert batch.tokens_BL.shape == (2, 320)
    num_queries = TILE * size
    generator = torch.Generator().manual_seed(0)
    q_HQD = torch.randn(4, num_queries, 16, generator=generator)
    k_GSD, v_GSD = (torch.randn(2, 6 * TILE + num_queries, 16, generator=generator) for _ in range(2))
    attends = masked_attention(batch), flex_attention_of(batch, compiled=False)
    expected, found = (attend(q_HQD, k_GSD, v_GSD, 0.3) for attend in attends)
    torch.testing.assert_close(found, expected)

    mask = tile_mask(batch)
    assert mask.mask_mod is not None
    q, key = torch.arange(num_queries)[:, None], torch.arange(6 * TILE + num_queries)
    dense = mask.mask_mod(torch.tensor(0), torch.tensor(0), q, key).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    assert torch.equal(mask.to_dense()[0, 0].bool(), dense.any(dim=3).any(dim=1))
    assert int(mask.full_kv_num_blocks.sum()) == int(dense.all(dim=3).all(dim=1).sum()) > 0


def test_blocks_learn_from_the_right_positions() -> None:
    block = config_of("none")
    texts = [Example(list(range(100, 110)), 4, 0, True), Example(list(range(200, 207)), 5, 1, True)]
    roots = all_roots(texts)
    assert roots.tolist() == [[0, 4], [0, 5], [0, 6], [0, 7], [0, 8], [1, 5]]
    batch = collate(texts, roots, block)
    flat = batch.tokens_BL.view(-1)
    target_R, before_R = batch.target_rows_Q[batch.target_R], batch.before_NJ.flatten()[batch.drafts_R]
    assert batch.counts == [6, 4, 3, 2], "a draft after the end of the text learns nothing"
    assert batch.tokens_NK.tolist() == [[t, *[MASK] * 4] for t in (104, 105, 106, 107, 108, 205)]
    for step, (learn, target, before, chain) in enumerate(
        zip(
            *(t.split(batch.counts) for t in (batch.learn_R, target_R, before_R, batch.chains_R)),
            strict=True,
        )
    ):
        number = learn // SIZE
        assert torch.equal(learn % SIZE, torch.full_like(learn, step + 1)), "the first mask drafts first"
        root = batch.ends_N[number]
        assert torch.equal(target, root + step), "this position of the target predicts the draft"
        assert torch.equal(before, flat[root + step])
        assert torch.equal(chain, root - 1)
    assert batch.starts_N.tolist() == [0] * 5 + [64]
    padded = collate(texts, roots, block, (256, 8))
    assert padded.tokens_NK.shape == (8, SIZE)
    assert padded.ends_N[6:].tolist() == [0, 0]
    chosen = random_roots(texts, 3, 7)
    assert torch.equal(chosen, random_roots(texts, 3, 7))
    assert len({tuple(random_roots(texts, 3, s).flatten().tolist()) for s in range(20)}) > 5


def test_the_loss_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are kept, or computed again. Drafts that the draft vocabulary lacks are misses and have no loss."""
    block = config_of("domino", draft_vocab_size=len(DRAFT_IDS))
    drafter = random_drafter(block)
    learner = learner_of(drafter)
    learner.load_target()
    [batch] = learner.whole(examples_of(2))
    frozen = learner.make_target()
    features, last = frozen.features(batch.tokens_BL)
    hidden = learner.hidden_states(batch, features.flatten(0, 1)).detach().requires_grad_()
    gradients = []
    for kept, at_once in ((2**30, 2**28), (0, VOCAB * 7)):
        monkeypatch.setattr(block_losses, "_KEPT_LOGITS", kept)
        monkeypatch.setattr(block_losses, "_LOGITS_AT_ONCE", at_once)
        compare = block_losses.loss_of_logits
        right = frozen.rows(last, batch.target_rows_Q)
        found = block_losses.losses(drafter, hidden, batch, frozen, right, LOSS, compare)
        inputs = [hidden, drafter.prefix_gru.weight_ih_l0, drafter.embed_proj[2].weight]
        gradients.append(torch.autograd.grad(found.total, inputs))
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
        assert a.abs().max() > 0
    states_RX = drafter.head_states(batch.before_NJ, frozen.embedding_VE).flatten(0, 1)[batch.drafts_R]
    q = drafter.logits(hidden[batch.learn_R], states_RX, frozen.draft_head_WE).softmax(-1)
    all_logits = torch.nn.functional.linear(last, frozen.lm_head_VE)[batch.target_rows_Q][batch.target_R]
    p = all_logits[:, DRAFT_IDS].softmax(-1)
    known = torch.isin(all_logits.argmax(-1), DRAFT_IDS)
    assert 0.4 < known.double().mean() < 0.9
    of_drafts = 0.5 * -(p * q.log()).sum(-1) + 0.5 * (1 - torch.minimum(p, q).sum(-1))
    steps = [part[k] for part, k in zip(of_drafts.split(batch.counts), known.split(batch.counts), strict=True)]
    weights = [math.exp(-j / 2) for j in range(block.max_drafts)]
    for step, part in zip(found.steps, steps, strict=True):
        assert torch.allclose(step, part.mean())
    whole = sum(w * part.sum() for w, part in zip(weights, steps, strict=True))
    assert torch.allclose(found.total, whole / sum(w * len(part) for w, part in zip(weights, steps, strict=True)))
    assert torch.equal(torch.cat(found.hits), (q.argmax(-1) == p.argmax(-1)) & known)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.wide)])
def test_a_compiled_loss_is_the_same_loss(backend: str) -> None:
    """The losses and their gradients are equal, for two numbers of drafts. Inductor compiles C++ for 20 s; the other
    backend runs the graphs that Inductor gets."""
    compiled = torch.compile(block_losses.loss_of_logits, dynamic=True, backend=backend)
    generator = torch.Generator().manual_seed(0)
    for count in (9, 5):
        logits, target = (torch.randn(count, 50, generator=generator) * 3 for _ in range(2))
        found, gradients = [], []
        for function in (block_losses.loss_of_logits, compiled):
            leaf = logits.clone().requires_grad_()
            found.append(function(leaf, target, 0.3))
            gradients.append(torch.autograd.grad(found[-1].sum(), leaf)[0])
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_matrices_between_hidden_states_have_muon(optimizer: str, tmp_path: Path) -> None:
    """Its first update of a matrix changes most directions alike. AdamW's changes all elements alike."""
    training = trainer(tmp_path / "a", examples_of(12), lambda line: None, 1, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in training.module.state_dict().items()}
    training.run()
    updates = {name: tensor - before[name] for name, tensor in training.module.state_dict().items()}
    values = torch.linalg.svdvals(updates["layers.0.mlp.gate_proj.weight"])
    assert (bool(values.median() > 0.5 * values[0])) == (optimizer == "muon")
    table = updates["markov_head.markov_w2.weight"].abs()
    assert table.max() < 1.01 * table.median(), "a table of tokens has AdamW"


def test_more_heads_begin_as_those_of_the_target() -> None:
    batch, hidden = None, []
    for kv_heads in (None, 4):
        block = config_of("markov", num_kv_heads=kv_heads)
        drafter = TrainedBlocks(block)
        initialise(drafter, target_checkpoint(), 0)
        learner = learner_of(drafter.double())
        learner.load_target()
        batch = batch or learner.batch(examples_of(2), 0)
        features_BLF, _ = learner.make_target().features(batch.tokens_BL)
        hidden.append((block, learner.hidden_states(batch, features_BLF.flatten(0, 1))))
    assert [block.decoder.num_kv_heads for block, _ in hidden] == [2, 4]
    # Other weights are random, and those of fc have the same seed.
    torch.testing.assert_close(hidden[0][1], hidden[1][1], atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="--kv-heads 3 does not divide the 4 query heads"):
        config_of("markov", num_kv_heads=3)


def trainer(
    folder: Path,
    examples: list[Example],
    say: Callable[[str], None],
    max_steps: int,
    head: HeadName = "markov",
    optimizer: str = "adamw",
    **sizes: Any,
) -> Any:
    """Make a training of the tiny target in float64, which saves after every step."""
    drafter = TrainedBlocks(config_of(head, **sizes)).double()
    initialise(drafter, target_checkpoint(), 0)
    folder.mkdir(exist_ok=True)
    settings = TrainSettings(1000, max_steps, 1e-2, 0.1, 0.01, 256, 0, optimizer)
    return Trainer(settings, learner_of(drafter), examples, examples[:4], folder, CPU, say, save_seconds=0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_training_ends_with_the_same_weights(optimizer: str, tmp_path: Path) -> None:
    """And the loss falls."""
    examples = examples_of(12)
    whole = trainer(tmp_path / "a", examples, lambda line: None, 16, optimizer=optimizer)
    expected = whole.run()
    losses = [r["loss"] for r in expected if "loss" in r]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])

    def interrupt(line: str) -> None:
        if line.startswith("step 12:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", examples, interrupt, 16, optimizer=optimizer).run()
    lines: list[str] = []
    part = trainer(tmp_path / "b", examples, lines.append, 16, optimizer=optimizer)
    records = part.run()
    assert lines[0].startswith("resuming training at step 11")
    for (name, a), b in zip(whole.module.state_dict().items(), part.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name

    def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "seconds"} for r in found]

    assert timeless(records) == timeless(expected)
    with pytest.raises(InputError, match=r"head: .*Markov.*now 'None'"):
        trainer(tmp_path / "b", examples, lines.append, 16, head="none").run()
    with pytest.raises(InputError, match="kv_heads: 2, now 4"):
        trainer(tmp_path / "b", examples, lines.append, 16, num_kv_heads=4).run()


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cpu", 3)])
def test_the_host_makes_batches_for_a_gpu_with_one_thread(device: str, threads: int, tmp_path: Path) -> None:
    tested = trainer(tmp_path, examples_of(6), print, 4, head="none")
    tested._device = torch.device(device)
    with use_threads(3):
        with tested.host_threads():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3


@pytest.mark.wide
@pytest.mark.parametrize("head", ["none", "markov", "domino"])
def test_a_trained_drafter_drafts_as_validation_says(head: HeadName, tmp_path: Path) -> None:
    """Overfitted to the target's own answers, then opened by the engine: the text is that of plain decoding, and the
    engine takes exactly the rounds that validation has counted."""
    path = write_checkpoint(tmp_path / "target", num_hidden_layers=7, vocab_size=260, eos_token_id=256)
    target = open_checkpoint(path)
    sizes = "engine.max_batch_size=1", "engine.kv_cache_tokens=2048", "model.dtype=float32"

    def engine_of(*sets: str) -> Any:
        return build(resolve(load_config(None, [f"model.target={path}", "engine.device=cpu", *sizes, *sets]))).engine

    prompts = random_prompts(4, longest=12, vocab=250)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = run(engine_of("speculation.method=none"), prompts, params, check=False)
    pairs = enumerate(zip(prompts, plain, strict=True))
    examples = [Example([*p, *c.token_ids], len(p), i, True) for i, (p, c) in pairs]

    draft_ids_W, covered = draft_vocabulary(examples, 40, 260)
    assert 0.5 < covered < 1
    block = block_config(target.config, BlockSizes(1, SIZE, 2, head=head, draft_vocab_size=40), 256)
    drafter = TrainedBlocks(block, draft_ids_W)
    initialise(drafter, target, 0)
    frozen = partial(FrozenTarget, target, block.aux_layers, draft_ids_W, 256, 64, torch.float32, CPU)
    learner = BlockLearner(drafter, frozen, LossSettings(0.0, 3.0), 64, 256, 64, 0, CPU)
    settings = TrainSettings(1000, 40, 1e-2, 0.1, 0.0, 256, 0)
    work = tmp_path / "work"
    work.mkdir()
    records = Trainer(settings, learner, examples, examples, work, CPU, lambda line: None).run()
    summary = records[-1]["validation"]["tokens_per_round"]
    tensors = checkpoint_tensors(drafter, target, torch.float32)
    assert ("lm_head.weight" in tensors) == (head != "domino")  # other engines read it from files of speculators
    save_checkpoint(tmp_path / "drafter", tensors, config_json(block, str(path)))
    sets = ["speculation.method=block", f"speculation.draft={tmp_path / 'drafter'}"]
    engine = engine_of(*sets, f"speculation.num_steps={block.max_drafts}")
    drafted = run(engine, prompts, params, check=False)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    rounds = sum(c.speculation.rounds for c in drafted)
    assert summary[str(block.max_drafts)] == round(sum(e.num_chains for e in examples) / rounds, 4)
    assert summary[str(block.max_drafts)] > 1.3


def test_checkpoints_have_the_public_names() -> None:
    block = config_of("markov", num_layers=1)
    layer = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    expected: dict[str, tuple[int, ...]] = {f"layers.0.self_attn.{n}_proj.weight": s for n, s in layer.items()}
    expected |= {f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"}
    expected |= {f"layers.0.mlp.{n}_proj.weight": (40, 32) for n in ("gate", "up")}
    expected |= {f"layers.0.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    expected |= {"layers.0.mlp.down_proj.weight": (32, 40), "fc.weight": (32, 96)}
    expected |= {"hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {"markov_head.markov_w1.weight": (VOCAB, 4), "markov_head.markov_w2.weight": (VOCAB, 4)}
    assert {n: tuple(t.shape) for n, t in TrainedBlocks(block).state_dict().items()} == expected
    config = json.loads(json.dumps(config_json(block, "org/target")))
    assert (config["speculators_model_type"], config["markov_rank"], config["sample_from_anchor"]) == (
        "dspark",
        4,
        True,
    )
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    config = config_json(config_of("none"), "org/target")
    assert (config["speculators_model_type"], config["sample_from_anchor"]) == ("dflash", False)


def test_a_head_of_domino_has_the_public_names() -> None:
    block = config_of("domino", draft_vocab_size=len(DRAFT_IDS))
    names = {n: tuple(t.shape) for n, t in TrainedBlocks(block, DRAFT_IDS).state_dict().items() if "layers" not in n}
    assert names == {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "prefix_gru.weight_ih_l0": (18, 32),
        "prefix_gru.weight_hh_l0": (18, 6),
        "embed_proj.0.weight": (10, 38),
        "embed_proj.2.weight": (len(DRAFT_IDS), 10),
        "d2t": (len(DRAFT_IDS),),
        "t2d": (VOCAB,),
    }
    config: Any = config_json(block, "org/target")
    assert (config["architectures"], config["draft_vocab_size"]) == (["DominoDraftModel"], len(DRAFT_IDS))
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 4]


def test_layers_that_a_drafter_reads() -> None:
    assert feature_layers(30, 3) == (2, 14, 27)
    assert feature_layers(36, 5) == (2, 10, 18, 25, 33)
    assert feature_layers(7, 1) == (2,)
    for num_layers, count in ((7, 4), (4, 1)):
        with pytest.raises(ConfigError, match=f"cannot read {count} layers"):
            feature_layers(num_layers, count)
    with pytest.raises(ConfigError, match="has a bias"):
        block_config(replace(tiny_config(LAYERS), lm_head_bias=True), sizes_of("none"), MASK)


def test_a_drafter_begins_as_the_last_layers_of_its_target() -> None:
    block, target = config_of("markov"), target_checkpoint()
    drafter = TrainedBlocks(block)
    initialise(drafter, target, 0)
    prefix = f"model.layers.{LAYERS - 2}."
    load = target.tensors.load
    first = drafter.layers[0]
    assert torch.equal(first.self_attn.q_proj.weight, load(f"{prefix}self_attn.q_proj.weight").float())
    assert torch.equal(first.mlp.down_proj.weight, load(f"{prefix}mlp.down_proj.weight")[:, :40].float())
    assert torch.equal(drafter.hidden_norm.weight, load(f"{prefix}input_layernorm.weight").float())
    assert isinstance(block.head, MarkovConfig)
    assert drafter.markov_head.markov_w2.weight.abs().max() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("size", [7, 8])
def test_compiled_flex_attention_has_the_gradients_of_the_mask(size: int) -> None:
    """For several batches of one size, for which it is compiled once."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    block = block_config(tiny_config(LAYERS), BlockSizes(1, size, 3), MASK)
    texts = [Example(list(range(300)), 30, 0, True), Example(list(range(200)), 10, 1, True)]
    device = torch.device("cuda")
    num_keys = 6 * TILE + TILE * size
    for seed in range(3):
        batch: BlockBatch = collate(texts, random_roots(texts, 100, seed), block, (6 * TILE, TILE)).to(device)
        torch.manual_seed(seed)
        inputs = [
            torch.randn(n, s, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for n, s in ((9, TILE * size), (3, num_keys), (3, num_keys))
        ]
        weight = torch.randn(9, TILE * size, 64, device=device)
        found = []
        for attend in (masked_attention(batch), flex_attention_of(batch)):
            out = attend(*inputs, 0.125)
            found.append([out, *torch.autograd.grad((out.float() * weight).sum(), inputs)])
        for a, b in zip(*found, strict=True):
            assert torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.999


@pytest.mark.gpu
def test_training_on_cuda_goes_as_on_cpu(tmp_path: Path) -> None:
    """The target in bfloat16, autocast, FlexAttention, the fused optimiser: losses near those of float32 on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    examples, target = examples_of(24), target_checkpoint()
    losses = []
    for device, dtype in ((CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
        folder = tmp_path / device.type
        folder.mkdir()
        for _ in range(2):  # the second reads the checkpoint on the device, and has nothing to do
            drafter = TrainedBlocks(config_of("domino", draft_vocab_size=len(DRAFT_IDS)), DRAFT_IDS)
            initialise(drafter, target, 0)
            frozen = partial(FrozenTarget, target, drafter.block.aux_layers, DRAFT_IDS, 512, 64, dtype, device)
            learner = BlockLearner(drafter.to(device), frozen, LOSS, 128, 512, 64, 0, device)
            settings = TrainSettings(100, 30, 1e-2, 0.1, 0.01, 512, 0)
            arguments = (examples[4:], examples[:4], folder, device, lambda line: None)
            records = Trainer(settings, learner, *arguments, save_seconds=0.0).run()
            assert sum("loss" in r for r in records) == 30
        losses.append(torch.tensor([r["loss"] for r in records if "loss" in r]))
    assert (losses[0] - losses[1]).abs().max() < 0.05 * losses[0].max()
