"""EAGLE-3 heads in training: the unrolled steps against our own drafting, the checkpoint, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from specbatch.cache.pages import PagePool
from specbatch.draft.network import EagleNet
from specbatch.draft.shape import DraftShape
from specbatch.errors import InputError
from specbatch.models.config import expected_tensors
from specbatch.models.eagle_config import default_aux_layers
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import open_eagle_head
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_decoder
from specbatch.train.checkpoint import save_checkpoint
from specbatch.train.eagle import unroll as unrolled_steps
from specbatch.train.eagle.batch import collate
from specbatch.train.eagle.export import checkpoint_tensors, config_json
from specbatch.train.eagle.head import DraftHead, head_config, initialise
from specbatch.train.eagle.learner import EagleLearner
from specbatch.train.eagle.unroll import attend, losses, unroll
from specbatch.train.examples import Example
from specbatch.train.layers import rotary_tables
from specbatch.train.target import FrozenTarget, TargetRows
from specbatch.train.trainer import Trainer, TrainSettings
from specbatch.types import SamplingParams
from tests.oracle.engine import OracleEngine
from tests.oracle.neural import NeuralProposer
from tests.oracle.ngram import NoProposer
from tests.oracle.proposer import Proposer
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import (
    CPU,
    VOCAB,
    RandomTensors,
    attention_of,
    random_prompts,
    run,
    target_config,
    tiny_config,
)

LAYERS, WIDTH = 8, 41  # the layers of the target, and the size of the draft vocabulary
DRAFT_IDS = torch.arange(VOCAB)[torch.arange(VOCAB) % 3 != 1][:WIDTH]


class Source(RandomTensors):
    """Random weights as a checkpoint has them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(shapes, seed=0)
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def close(self) -> None:
        """Nothing is open."""


class Trained:
    """The weights of a trained head, and what its files hold in addition."""

    def __init__(self, weights: dict[str, Tensor], files: TensorSource) -> None:
        self._weights, self._files = weights, files

    def load(self, name: str) -> Tensor:
        return self._weights[name] if name in self._weights else self._files.load(name)


def target_checkpoint() -> Checkpoint:
    config = tiny_config(LAYERS)
    return Checkpoint(None, config, Source(expected_tensors(config)), "random")


def random_head(seed: int = 1) -> Any:
    """A head in float64 whose every weight is random, so that nothing is hidden by a zero or a one."""

    head = DraftHead(head_config(tiny_config(LAYERS), WIDTH).decoder, WIDTH).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name))
    return head


def inference_head(head: Any, target: Checkpoint, folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """The same head as the engine has it, through the checkpoint, and the target's decoder."""

    config = head_config(target.config, WIDTH)
    tensors = checkpoint_tensors(head.state_dict(), DRAFT_IDS, target.config.vocab_size, torch.float32)
    save_checkpoint(folder, tensors, config_json(config, target.config, torch.float32))
    checked = open_eagle_head(folder, "eagle3", target)
    opened, source = checked.config, checked.tensors
    decoder = build_decoder(target.config, target.tensors, 300, dtype, CPU)
    weights = WeightLoader(source, dtype, CPU)
    if dtype == torch.float64:  # the trained weights, not the float32 ones of the file
        weights = WeightLoader(Trained(head.state_dict(), source), dtype, CPU)
    model = EagleHead(opened, weights, decoder, attention_of(opened.decoder), 300)
    return model, decoder


@pytest.mark.parametrize("num_steps", [1, 5])
def test_unrolled_training_is_what_drafting_does(num_steps: int, tmp_path: Path) -> None:
    """Every chain of two sequences of a padded batch, every step: the training's logits are those that the engine's
    head gives, drafting step by step behind the same prefix with the same tokens."""

    target, head = target_checkpoint(), random_head()
    sequences = [p[:19] for p in random_prompts(2, shared=4, longest=40, seed=3)]
    sequences[1] = sequences[1][:12]
    length = 24
    tokens_BL = torch.zeros(2, length, dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BL[b, : len(tokens)] = torch.tensor(tokens)
    frozen = FrozenTarget(target, default_aux_layers(LAYERS), DRAFT_IDS, 2 * length, length, torch.float64, CPU)
    features, hidden = frozen.features(tokens_BL)
    tables = tuple(t.double() for t in rotary_tables(head.config, length + num_steps, CPU))
    with torch.no_grad():
        unrolled = [head.logits(h) for h in unroll(head, frozen.embedding_VE, tokens_BL, features, tables, num_steps)]

    model, decoder = inference_head(head, target, tmp_path)
    checked = 0
    for b, tokens in enumerate(sequences):
        layout = batch_of([Span([0], 0, len(tokens))], 64, CPU)
        cache = decoder.new_cache(64, torch.float64)
        last, captured = decoder.forward(torch.tensor(tokens), layout, cache, default_aux_layers(LAYERS))
        rows = frozen.rows(hidden, b * length + torch.arange(len(tokens)))
        logits = decoder.logits(last)
        assert torch.allclose(rows.logits_QW, logits[:, DRAFT_IDS], atol=1e-9)
        best = logits.argmax(-1)
        inside = torch.isin(best, DRAFT_IDS)
        assert torch.equal(rows.best_Q >= 0, inside)
        assert torch.equal(DRAFT_IDS[rows.best_Q[inside]], best[inside])
        for t in range(len(tokens) - 1):
            draft = model.new_cache(64, torch.float64)
            layout = batch_of([Span([0], 0, t + 1)], 64, CPU)
            fed = model.features(last[: t + 1], [c[: t + 1] for c in captured])
            out = model.forward(torch.tensor(tokens[1 : t + 2]), fed, layout, draft)[-1:]
            for j in range(min(num_steps, len(tokens) - 1 - t)):
                if j > 0:
                    layout = batch_of([Span([0], t + j, 1)], 64, CPU)
                    out = model.forward(torch.tensor(tokens[t + 1 + j : t + 2 + j]), out.clone(), layout, draft)
                assert torch.allclose(model.logits(out)[0], unrolled[j][b, t], atol=1e-9, rtol=1e-9), (b, t, j)
                checked += 1
    assert checked == sum(min(num_steps, n - 1 - t) for n in map(len, sequences) for t in range(n - 1))


def test_attention_of_later_steps_has_gradients_for_all_keys() -> None:
    """Against the equation written out: a softmax over the causal part and the diagonals."""

    generator = torch.Generator().manual_seed(0)

    def rand(heads: int) -> Tensor:
        return torch.randn(2, heads, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    q, keys, values = rand(4), [rand(2) for _ in range(3)], [rand(2) for _ in range(3)]
    inputs = [q, *keys, *values]
    found = attend(q, keys, values)
    k, v = ([x.repeat_interleave(2, 1) for x in xs] for xs in (keys, values))
    scores = (q @ k[0].transpose(2, 3)).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    diagonals = [(q * x).sum(-1, keepdim=True) for x in k[1:]]
    p = (torch.cat([scores, *diagonals], -1) / 8**0.5).softmax(-1)
    expected = p[..., :6] @ v[0] + sum(p[..., 6 + i : 7 + i] * v[1 + i] for i in range(2))
    assert torch.allclose(found, expected, atol=1e-12)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs, retain_graph=True),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)
        assert a.abs().max() > 0


def test_loss_is_masked_soft_cross_entropy_with_and_without_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:

    head = random_head()
    hidden = [torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows = [
        unrolled_steps.StepRows(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])),
        unrolled_steps.StepRows(torch.tensor([1, 2]), torch.tensor([1, 2])),
    ]
    logits = torch.randn(3, WIDTH, dtype=torch.float64) * 3
    target = TargetRows(logits, torch.tensor([5, -1, int(logits[2].argmax())]))
    gradients = []
    for kept in (2**30, 0):
        monkeypatch.setattr(unrolled_steps, "_KEPT_LOGITS", kept)
        found = losses(head, hidden, rows, target)
        gradients.append(torch.autograd.grad(found.total, [*hidden, head.lm_head.weight]))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert gradients[0][0][0, 2].abs().max() == 0, "its best token is not in the draft vocabulary"
    log_q = [torch.log_softmax(head.logits(h[0]), -1) for h in hidden]
    p = torch.softmax(logits, -1)
    first = -((p[0] * log_q[0][1]).sum() + (p[2] * log_q[0][3]).sum()) / 2
    second = -(p[2] * log_q[1][2]).sum()
    assert torch.allclose(found.steps[0], first)
    assert torch.allclose(found.steps[1], second)
    assert torch.allclose(found.total, (first + 0.8 * second) / 1.8)
    assert found.hits[0].tolist() == [int(log_q[0][1].argmax()) == 5, False, log_q[0][3].argmax() == logits[2].argmax()]


def test_collated_rows_teach_the_right_tokens() -> None:
    """Chain t at step j learns what the target says at position t + 1 + j; root and prediction are in the answer."""

    examples = [Example(list(range(100, 110)), 4, 0, True), Example(list(range(200, 207)), 5, 1, True)]
    batch = collate(examples, 4)
    assert batch.tokens_BL.shape == (2, 64)
    wanted = batch.target_rows_Q.tolist()
    assert wanted == [4, 5, 6, 7, 8, 64 + 5]
    flat = batch.tokens_BL.view(-1)
    for j, step in enumerate(batch.steps):
        pairs = list(zip(step.rows_R.tolist(), step.target_R.tolist(), strict=True))
        for row, q in pairs:
            assert wanted[q] == row + 1 + j
            assert flat[row + 1] >= (104 if row < 64 else 205), "the root is in the answer"
            assert flat[row + 2 + j] > 0, "and so is what it drafts"
        assert [row for row, _ in pairs] == [*range(3, 8 - j), *([68] if j == 0 else [])]


def test_the_norms_of_a_head_begin_as_those_of_a_gemma() -> None:
    """They multiply by 1 + weight there, and the norm before the MLP has another name."""

    config = target_config("gemma2", LAYERS, 32, VOCAB)
    target = Checkpoint(None, config, Source(expected_tensors(config)), "tiny")
    head = DraftHead(head_config(config, WIDTH).decoder, WIDTH)
    initialise(head, target, DRAFT_IDS, 0)
    prefix = f"model.layers.{LAYERS - 1}."
    for found, name in (
        (head.midlayer.hidden_norm, f"{prefix}input_layernorm.weight"),
        (head.midlayer.post_attention_layernorm, f"{prefix}pre_feedforward_layernorm.weight"),
        (head.norm, "model.norm.weight"),
    ):
        assert torch.equal(found.weight, (1 + target.tensors.load(name)).float())


def trainer(folder: Path, examples: list[Any], say: Callable[[str], None], max_steps: int) -> Any:
    """A training of the tiny target in float64, which saves after every step."""

    target = target_checkpoint()
    head = DraftHead(head_config(target.config, WIDTH).decoder, WIDTH).double()
    initialise(head, target, DRAFT_IDS, 0)
    folder.mkdir(exist_ok=True)
    settings = TrainSettings(1000, max_steps, 1e-2, 0.1, 0.01, 256, 0)
    frozen = FrozenTarget(target, default_aux_layers(LAYERS), DRAFT_IDS, 256, 64, torch.float64, CPU)
    learner = EagleLearner(head, lambda: frozen, 3, 64, CPU)
    return Trainer(settings, learner, examples, examples[:4], folder, CPU, say, save_seconds=0.0)


def tiny_run(
    proposer: Callable[[Any], Proposer], decoder: Any, prompts: list[list[int]]
) -> tuple[list[Any], OracleEngine]:
    pool = PagePool(64, 4)
    engine = OracleEngine(
        decoder,
        proposer(pool),
        decoder.new_cache(256, torch.float64),
        pool,
        max_length=200,
        max_batch_size=4,
        prefill_chunk_tokens=32,
        prefix_cache=True,
        eos_token_ids=(),
    )
    return run(engine, prompts, SamplingParams(max_tokens=24)), engine


@pytest.mark.wide
def test_training_pays_in_the_engine_as_validation_says(tmp_path: Path) -> None:
    """Overfitted to the target's own answers: the loss falls, the engine takes exactly as many rounds as validation
    simulates, and the text is plain decoding's."""

    target = target_checkpoint()
    decoder = build_decoder(target.config, target.tensors, 300, torch.float64, CPU)
    prompts = random_prompts(8, longest=12)
    plain, _ = tiny_run(lambda pool: NoProposer(), decoder, prompts)
    pairs = enumerate(zip(prompts, plain, strict=True))
    examples = [Example([*p, *c.token_ids], len(p), i, True) for i, (p, c) in pairs]
    training = trainer(tmp_path / "work", examples, lambda line: None, 60)
    records = training.run()
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), "the rest is the entropy of the target"
    summary = records[-1]["validation"]
    assert summary["accuracy"][0] > 0.35, "a third of the tokens is not in the draft vocabulary"

    model, decoder = inference_head(training.module, target, tmp_path / "head")

    def proposer(pool: PagePool) -> Proposer:
        net = EagleNet(model, model.new_cache(256, torch.float64))
        return NeuralProposer(net, DraftShape(3, 1, 4), VOCAB, 4, CPU)

    drafted, engine = tiny_run(proposer, decoder, prompts[:4])
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain[:4]]
    rounds = engine.stats.speculation.rounds
    assert summary["tokens_per_round"] == {"3": round(sum(e.num_chains for e in examples[:4]) / rounds, 4)}
    assert summary["tokens_per_round"]["3"] > 1.2


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:

    examples = [Example(p[:40], 2, i, True) for i, p in enumerate(random_prompts(12, shared=8, longest=30))]
    whole = trainer(tmp_path / "a", examples, lambda line: None, 20)
    expected = whole.run()

    def interrupt(at: int, line: str) -> None:
        if line.startswith(f"step {at}:"):
            raise KeyboardInterrupt

    for stop in (8, 12, 16):
        part = trainer(tmp_path / "b", examples, partial(interrupt, stop), 20)
        with pytest.raises(KeyboardInterrupt):
            part.run()
    lines: list[str] = []
    part = trainer(tmp_path / "b", examples, lines.append, 20)
    records = part.run()
    assert lines[0].startswith("resuming training at step 15")
    for (name, a), b in zip(whole.module.state_dict().items(), part.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name

    def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "seconds"} for r in found]

    assert timeless(records) == timeless(expected)
    assert timeless([json.loads(line) for line in part.metrics.read_text().splitlines()]) == timeless(expected)
    again = trainer(tmp_path / "b", examples, lines.append, 20)
    assert timeless(again.run()) == timeless(expected)
    assert "all 20 steps are done" in lines[-1]
    with pytest.raises(InputError, match="max_steps: 20, now 21"):
        trainer(tmp_path / "b", examples, lines.append, 21).run()


def test_checkpoints_have_the_public_names(tmp_path: Path) -> None:

    target = target_checkpoint().config
    stored = checkpoint_tensors(random_head().state_dict(), DRAFT_IDS, VOCAB)
    save_checkpoint(tmp_path, stored, config_json(head_config(target, WIDTH), target))
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        "self_attn.q_proj": (32, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "hidden_norm": (32,),
        "post_attention_layernorm": (32,),
    }
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (WIDTH, 32)}
    assert {n: tuple(t.shape) for n, t in tensors.items() if n not in ("d2t", "t2d")} == expected
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["d2t"] + torch.arange(WIDTH), DRAFT_IDS)
    assert torch.equal(tensors["t2d"].nonzero().view(-1), DRAFT_IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (WIDTH, VOCAB, 1)
    assert config["tie_word_embeddings"] is False
    assert LlamaConfig(**config).rope_parameters["rope_theta"] == 10000.0
    opened = open_eagle_head(tmp_path, "eagle3", replace(target_checkpoint(), config=target)).config
    assert (opened.draft_vocab_size, opened.has_vocab_map, opened.has_embedding) == (WIDTH, True, False)
    # Of the layers that training reads, under every reading of a file that names none.
    assert (opened.aux_layers, opened.norm_before_residual) == (default_aux_layers(LAYERS), False)
    assert opened.decoder.rope == target.rope


def test_bfloat16_products_give_nearly_the_same_loss_and_gradients() -> None:
    """The target is in bfloat16, and the head's parameters are in float32 under autocast, as on CUDA."""

    batch = collate([Example(p[:40], 2, i, True) for i, p in enumerate(random_prompts(6, shared=8, longest=30))], 3)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head = random_head().float()
        frozen = FrozenTarget(target_checkpoint(), default_aux_layers(LAYERS), DRAFT_IDS, 6 * 64, 64, dtype, CPU)
        features, hidden = frozen.features(batch.tokens_BL)
        assert features.dtype == dtype
        tables = rotary_tables(head.config, 64 + 3, CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            unrolled = unroll(head, frozen.embedding_VE, batch.tokens_BL, features, tables, 3)
            total = losses(head, unrolled, batch.steps, frozen.rows(hidden, batch.target_rows_Q)).total
        total.backward()
        assert {h.dtype for h in unrolled} == {torch.float32}, "the residual stream is as wide as the parameters"
        found.append((total.detach(), head.fc.weight.grad, head.midlayer.self_attn.k_proj.weight.grad))
    assert abs(float(found[0][0] - found[1][0])) < 0.02 * float(found[0][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.95


@pytest.mark.gpu
def test_training_on_cuda_goes_as_on_cpu(tmp_path: Path) -> None:
    """The target over Triton's kernels in bfloat16, autocast, the fused optimiser: losses near float32's on CPU."""

    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    examples = [Example(p[:60], 2, i, True) for i, p in enumerate(random_prompts(24, shared=8, longest=50))]
    target, settings = target_checkpoint(), TrainSettings(100, 30, 1e-2, 0.1, 0.01, 512, 0)
    losses = []
    for device, dtype in ((CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
        folder = tmp_path / device.type
        folder.mkdir()
        for _ in range(2):  # the second reads the checkpoint on the device, and has nothing to do
            head = DraftHead(head_config(target.config, WIDTH).decoder, WIDTH)
            initialise(head, target, DRAFT_IDS, 0)
            frozen = partial(FrozenTarget, target, default_aux_layers(LAYERS), DRAFT_IDS, 512, 64, dtype, device)
            arguments = (examples[4:], examples[:4], folder, device, lambda line: None)
            records = Trainer(
                settings, EagleLearner(head.to(device), frozen, 3, 64, device), *arguments, save_seconds=0.0
            ).run()
            assert sum("loss" in r for r in records) == 30
        losses.append(torch.tensor([r["loss"] for r in records if "loss" in r]))
    assert (losses[0] - losses[1]).abs().max() < 0.05 * losses[0].max()
