"""`specbatch train-draft`: three stages, each of which skips what is done.

1. answers: the target answers the prompts with this project's engine, greedily and sampled
   (DIR/training/answers.jsonl);
2. training: the drafter learns to say what the target says on these texts (DIR/config.json, DIR/model.safetensors,
   DIR/training.png);
3. evaluation: acceptance lengths on rows that were held out (DIR/acceptance.json).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specbatch.errors import ConfigError, InputError
from specbatch.files.local import disk_errors
from specbatch.files.template_files import with_template_texts
from specbatch.models.blocks.config import BlockConfig
from specbatch.models.eagle_config import EagleConfig, eagle_config, expected_eagle_tensors
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.resolve import ResolvedRun
from specbatch.setup.sampling import has_chat_template
from specbatch.train.answers import Pipeline, run_rows
from specbatch.train.block import drafter as blocks
from specbatch.train.block import export as block_export
from specbatch.train.block.drafter import TrainedBlocks
from specbatch.train.block.learner import BlockLearner
from specbatch.train.block.losses import LossSettings
from specbatch.train.block.sizes import BlockSizes, block_config
from specbatch.train.checkpoint import save_checkpoint
from specbatch.train.eagle import export as eagle_export
from specbatch.train.eagle import head as eagle
from specbatch.train.eagle.head import DraftHead, head_config
from specbatch.train.eagle.learner import EagleLearner
from specbatch.train.evaluate import Way, evaluate, held_out_rows, parse_ways, table
from specbatch.train.examples import Example, draft_vocabulary, make_examples, padded_length, split
from specbatch.train.invent import invent
from specbatch.train.learner import Learner
from specbatch.train.plot import plot
from specbatch.train.prompts import PromptFile, distinct, read_lines, read_prompts, rows_of, write_job
from specbatch.train.start import TrainDraftOptions
from specbatch.train.target import FrozenTarget, check_target
from specbatch.train.trainer import Trainer, TrainSettings, described

_EAGLE_SHAPES = "3/1/4,5/1/6,7/1/8,5/4/8,7/10/60"
_PLAIN = ("speculation.method=none", "speculation.draft=null")
_WEIGHT_DECAY = 0.01
_RATES = {"adamw": 1e-3, "muon": 6e-3}  # learning rates at a hidden size of 512


@dataclass(frozen=True)
class Files:
    """The paths of files in the output folder."""

    folder: Path

    @property
    def training(self) -> Path:
        return self.folder / "training"

    @property
    def prompts(self) -> Path:
        return self.training / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        return self.training / "answers.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "acceptance.json"


def train_draft(options: TrainDraftOptions, pipeline: Pipeline) -> str | None:
    """Run all stages that are asked for. Return the table of the evaluation; None: nothing was evaluated. Raise
    SpecbatchError."""
    began = time.perf_counter()
    options.check()
    files = Files(options.output)
    with disk_errors(files.training):
        files.training.mkdir(parents=True, exist_ok=True)
    data, eval_files = ([PromptFile.parse(text) for text in texts] for texts in (options.data, options.held_out))
    plan = _resolve(pipeline, _PLAIN)
    described_drafter = _description(options, plan)
    ways = parse_ways(options.shapes or _default_shapes(described_drafter))
    as_text = not has_chat_template(plan.config.data, plan.tokenizer)
    if options.invent and as_text:
        raise ConfigError("--invent needs a chat template, and the target has none", "give files of prompts")
    check_target(plan.target.config)
    evaluates = "evaluation" in options.stages and eval_files
    held_out = held_out_rows(eval_files, as_text)
    if evaluates:
        _check_ways(ways, described_drafter, options, pipeline, files)
    if "answers" in options.stages:
        _answer(options, data, plan, as_text, pipeline, files, began)
    if "training" in options.stages:
        _train(options, described_drafter, plan, pipeline, files)
        pipeline.say(f"training: finished ({_seconds(began)} so far)")
    found = None
    if evaluates:
        if options.overwrite:
            files.report.unlink(missing_ok=True)
        found = table(evaluate(files.folder, options.kind, held_out, ways, pipeline, files.report))
    pipeline.say(f"done in {_seconds(began)}")
    return found


def _description(options: TrainDraftOptions, plan: ResolvedRun) -> EagleConfig | BlockConfig:
    """Return the description of the drafter to train. Raise SpecbatchError if the target cannot have it."""
    config = plan.target.config
    draft_vocab_size = min(options.draft_vocab or 32000, config.vocab_size)
    if options.kind == "eagle3":
        # The same checks as for a head with files: a target that is too shallow is refused there.
        head = head_config(config, draft_vocab_size)
        eagle_config("eagle3", head.decoder, head.draft_vocab_size, expected_eagle_tensors(head), config)
        return head
    sizes = BlockSizes(
        options.layers or 2,
        options.block_size or 8,
        options.features or 3,
        options.intermediate_size,
        options.kv_heads,
        options.head_name,
        options.markov_rank,
        options.gru_size,
        options.inner_size,
        draft_vocab_size,
    )
    return block_config(config, sizes, _mask_token(plan))


def _mask_token(plan: ResolvedRun) -> int:
    """Return the token whose embedding marks what is to be drafted. It is never a root: a mask or padding, or the end
    of a text."""
    tokenizer, config = plan.tokenizer, plan.target.config
    for token in (getattr(tokenizer, "mask_token_id", None), tokenizer.pad_token_id, *config.eos_token_ids):
        if isinstance(token, int) and token < config.vocab_size:
            return token
    return config.vocab_size - 1


def _default_shapes(drafter: EagleConfig | BlockConfig) -> str:
    if isinstance(drafter, EagleConfig):
        return _EAGLE_SHAPES
    steps = sorted({min(n, drafter.max_drafts) for n in (3, 5, drafter.max_drafts)})
    return ",".join(f"{n}/1/{n + 1}" for n in steps)


def _check_ways(
    ways: Sequence[Way],
    drafter: EagleConfig | BlockConfig,
    options: TrainDraftOptions,
    pipeline: Pipeline,
    files: Files,
) -> None:
    """Raise SpecbatchError for a way to draft that cannot run."""
    most = drafter.max_drafts if isinstance(drafter, BlockConfig) else None
    for way in ways:
        if way.model is not None:
            _resolve(pipeline, way.sets(files.folder, options.kind))
        elif most is not None and way.shape is not None and way.shape.num_steps > most:
            raise ConfigError(
                f"--shapes: {way.name} does not fit these blocks",
                f"they draft at most {most} tokens after each other: {most}/1/{most + 1}",
            )


def _answer(
    options: TrainDraftOptions,
    data: Sequence[PromptFile],
    plan: ResolvedRun,
    as_text: bool,
    pipeline: Pipeline,
    files: Files,
    began: float,
) -> None:
    """Run stage 1: the target answers the prompts."""
    prompts = read_prompts(data)
    if options.invent:
        texts = TextProcessor(plan.tokenizer, plan.config.data)
        made_up = invent(
            options.invent,
            plan.config.engine.seed,
            plan.tokenizer,
            texts,
            files.training,
            pipeline,
            overwrite=options.overwrite,
        )
        pipeline.say(f"answers: {len(made_up):,} prompts made up ({_seconds(began)} so far)")
        prompts = distinct([*prompts, *made_up])
    if not prompts:
        raise InputError("there are no prompts to answer", "give more files of prompts, or --invent N")
    temperatures = options.numbers()
    write_job(files.prompts, rows_of(prompts, temperatures, as_text), files.answers, overwrite=options.overwrite)
    # Each row has a temperature, but the engine prepares for sampling by the temperature of the config.
    how = [*_PLAIN, f"sampling.temperature={max(temperatures)}"]
    how.append("data.separate_reasoning=false")  # the drafter learns from all tokens
    report = run_rows(files.prompts, files.answers, how, pipeline, overwrite=options.overwrite)
    tokens = report["tokens"]["completion"]
    pipeline.say(f"answers: {report['rows']['ok']:,} with {tokens:,} tokens ({_seconds(began)} so far)")


def _train(
    options: TrainDraftOptions,
    drafter: EagleConfig | BlockConfig,
    plan: ResolvedRun,
    pipeline: Pipeline,
    files: Files,
) -> None:
    """Run stage 2: from the answers to the checkpoint and the picture."""
    device, config = plan.device, plan.target.config
    train_set, validation = split(_examples(options, plan, files), options.validation, plan.config.engine.seed)
    num_tokens = sum(len(e.answer) for e in train_set)
    pipeline.say(f"training: {len(train_set):,} answers with {num_tokens:,} tokens, {len(validation):,} held out")
    batch_tokens = options.batch_tokens or (16384 if device.type == "cuda" else 1024)
    settings = TrainSettings(
        epochs=options.epochs,
        max_steps=options.max_steps,
        lr=options.lr or _RATES[options.optimizer_name] * (512 / config.hidden_size) ** 0.5,
        warmup=options.warmup,
        weight_decay=_WEIGHT_DECAY,
        batch_tokens=batch_tokens,
        seed=plan.config.engine.seed,
        optimizer=options.optimizer_name,
    )
    longest = padded_length(max(len(e.tokens) for e in (*train_set, *validation)))
    sizes = _Sizes(batch_tokens, longest)
    draft_ids_W = _draft_ids(drafter.draft_vocab_size, plan, train_set, pipeline)
    if isinstance(drafter, EagleConfig):
        learner = _eagle_learner(options, drafter, plan, draft_ids_W, sizes)
    else:
        learner = _block_learner(options, drafter, plan, draft_ids_W if drafter.has_vocab_map else None, sizes)
    learner.module.to(device)
    trainer = Trainer(settings, learner, train_set, validation, files.training, device, pipeline.say)
    records = trainer.run(overwrite=options.overwrite)
    if isinstance(drafter, EagleConfig):
        weights = learner.module.state_dict()
        tensors = eagle_export.checkpoint_tensors(weights, draft_ids_W, config.vocab_size)
        path = save_checkpoint(files.folder, tensors, eagle_export.config_json(drafter, config))
    else:
        name = plan.config.model.target
        assert isinstance(learner.module, TrainedBlocks)
        tensors = block_export.checkpoint_tensors(learner.module, plan.target)
        path = save_checkpoint(files.folder, tensors, block_export.config_json(drafter, name))
    pipeline.say(f"{path}: {path.stat().st_size / 1e6:.2f} MB; " + described(records[-1]["validation"]))
    plot(records, files.folder / "training.png", f"{options.kind} for {plan.config.model.target}", pipeline.say)
    del trainer, learner
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engines of the evaluation take the free memory


@dataclass(frozen=True)
class _Sizes:
    batch_tokens: int
    longest: int  # the length of the longest padded text

    @property
    def most(self) -> int:
        """Return the most tokens of a batch, padding included."""
        return max(self.batch_tokens, self.longest)


def _draft_ids(size: int, plan: ResolvedRun, train_set: Sequence[Example], pipeline: Pipeline) -> torch.Tensor:
    """Return the target ids of the draft vocabulary (W,)."""
    target = plan.target.config
    ends = [t for t in {*target.eos_token_ids, plan.tokenizer.eos_token_id} if isinstance(t, int)]
    draft_ids_W, covered = draft_vocabulary(train_set, size, target.vocab_size, ends)
    pipeline.say(f"training: {len(draft_ids_W):,} draft tokens make up {covered:.2%} of the answers")
    return draft_ids_W


def _eagle_learner(
    options: TrainDraftOptions, config: EagleConfig, plan: ResolvedRun, draft_ids_W: torch.Tensor, sizes: _Sizes
) -> Learner:
    head = DraftHead(config.decoder, config.draft_vocab_size)
    eagle.initialise(head, plan.target, draft_ids_W, plan.config.engine.seed)

    def make_target() -> FrozenTarget:
        return FrozenTarget(
            plan.target, config.aux_layers, draft_ids_W, sizes.most, sizes.longest, plan.dtype, plan.device
        )

    return EagleLearner(
        head.to(plan.device), make_target, options.unroll or 7, sizes.longest, plan.device,
        compile_steps=options.compile,
    )  # fmt: skip


def _block_learner(
    options: TrainDraftOptions, block: BlockConfig, plan: ResolvedRun, draft_ids_W: torch.Tensor | None, sizes: _Sizes
) -> Learner:
    seed = plan.config.engine.seed
    drafter = TrainedBlocks(block, draft_ids_W)
    blocks.initialise(drafter, plan.target, seed)

    def make_target() -> FrozenTarget:
        return FrozenTarget(
            plan.target, block.aux_layers, draft_ids_W, sizes.most, sizes.longest, plan.dtype, plan.device
        )

    variation = options.variation
    if variation is None:
        variation = 0.0 if block.head is None else 0.9
    # The authors of DFlash give 4, 5 and 7 for blocks of 8, 10 and 16.
    loss = LossSettings(variation, block.block_size / 2)
    return BlockLearner(
        drafter.to(plan.device), make_target, loss, options.blocks or sizes.batch_tokens // 2, sizes.batch_tokens,
        sizes.longest, seed, plan.device, compile_loss=options.compile,
    )  # fmt: skip


def _examples(options: TrainDraftOptions, plan: ResolvedRun, files: Files) -> list[Example]:
    if not files.answers.is_file():
        raise InputError(f"there are no answers in {files.training}", "run the stage answers first")
    rows = read_lines(files.prompts)
    config = plan.target.config
    return make_examples(
        rows, read_lines(files.answers), plan.tokenizer, plan.config.data, config.vocab_size, options.max_length
    )


def _resolve(pipeline: Pipeline, more: Sequence[str]) -> ResolvedRun:
    run: ResolvedRun = pipeline.runtime.resolve(with_template_texts(pipeline.config(more)))
    return run


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"
