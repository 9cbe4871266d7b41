"""Trains an EAGLE-3 draft head for a target, from nothing but prompts: see docs/draft-heads.md.

    python scripts/train_draft/train_draft.py TARGET --data FILE[:ROWS] ... [--invent N] -o DIR [--eval FILE[:ROWS] ...]

Three stages, each of which skips what is done, so the same command goes on after an interruption:

1. answers: the target answers the prompts with this project's engine, greedily and sampled
   (DIR/training/answers.jsonl);
2. training: the head learns to say what the target says on these texts (DIR/config.json, DIR/model.safetensors,
   DIR/training.png);
3. evaluation: acceptance lengths on rows that were held out, with --eval (DIR/acceptance.json).

DIR is then a speculation.draft for `specbatch generate`, and a draft model for SGLang and vLLM.

The data is the user's business: what a head has been trained on must not be what it is measured on. Test sets (GSM8K
test, HumanEval, MT-bench) belong to --eval alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from specbatch.train.answers import INTERRUPTED, run_rows
from specbatch.train.evaluate import evaluate, held_out_rows, parse_ways, table
from specbatch.train.examples import Example, draft_vocabulary, make_examples, padded_length, split
from specbatch.train.eagle.export import export
from specbatch.train.eagle.head import DraftHead, head_config, initialise
from specbatch.train.invent import invent
from specbatch.train.plot import plot
from specbatch.train.prompts import PromptFile, distinct, read_lines, read_prompts, rows_of, write_job
from specbatch.train.target import FrozenTarget
from specbatch.train.trainer import Trainer, TrainSettings, described

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, InputError, SpecbatchError
from specbatch.files.local import disk_errors
from specbatch.files.template_files import with_template_texts
from specbatch.models.eagle_config import eagle_config, expected_eagle_tensors
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.setup.sampling import has_chat_template

SHAPES = "3/1/4,5/1/6,7/1/8,5/4/8,7/10/60"
STAGES = ("answers", "training", "evaluation")
PLAIN = ("speculation.method=none",)
USAGE_ERROR = 2


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="as model.target: directory, hub id, .gguf file or builtin:NAME")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE[:ROWS]", help="JSONL files of prompts")
    parser.add_argument(
        "--invent", type=int, default=0, metavar="N", help="N tries of the target at making up a prompt"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--eval", nargs="+", default=[], metavar="FILE[:ROWS]", help="JSONL files of held-out prompts")
    parser.add_argument("-c", "--config", type=Path, help="YAML file, as for specbatch generate")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="an option; may be repeated")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage; may be repeated")
    parser.add_argument("--overwrite", action="store_true", help="start the chosen stages again")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--temperatures", default="0,0.8", help="one answer to each prompt at each (default: %(default)s)"
    )
    answers.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--draft-vocab", type=int, default=32000, help="tokens of the draft (default: %(default)s)")
    training.add_argument("--unroll", type=int, default=7, help="draft steps that are trained (default: %(default)s)")
    training.add_argument("--epochs", type=int, default=4)
    training.add_argument("--max-steps", type=int, help="steps of the optimiser, where fewer than all epochs")
    training.add_argument("--lr", type=float, help="default: 1e-3 at hidden size 512, less by the root of larger ones")
    training.add_argument("--warmup", type=float, default=0.05, help="share of all steps (default: %(default)s)")
    training.add_argument("--batch-tokens", type=int, help="with padding; default: 16384 on CUDA, 1024 on CPU")
    training.add_argument("--max-length", type=int, default=1024, help="longest sequence (default: %(default)s)")
    training.add_argument("--validation", type=float, default=0.02, help="share of the prompts (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--compile", action="store_true", help="torch.compile the unrolled steps")
    evaluation = parser.add_argument_group("evaluation")
    evaluation.add_argument(
        "--shapes",
        default=SHAPES,
        help="ways to draft: steps/topk/tokens, DRAFT:steps/topk/tokens, ngram, none (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    args.stage = args.stage or list(STAGES)
    if "answers" in args.stage and not args.data and not args.invent:
        parser.error("prompts are needed: --data FILE, --invent N or both")
    return args


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


def main(arguments: list[str] | None = None) -> int:
    """Return an exit code as specbatch does: 0, 2 for mistakes of the user, 130 after an interruption."""
    args = parse_arguments(arguments)
    try:
        run(args)
    except SpecbatchError as error:
        say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return USAGE_ERROR
    except KeyboardInterrupt:
        say("interrupted: run the same command again to go on")
        return INTERRUPTED
    return 0


def run(args: argparse.Namespace) -> None:
    """Run all stages that are asked for. It raises SpecbatchError."""
    began = time.perf_counter()
    files = Files(args.output)
    with disk_errors(files.training):
        files.training.mkdir(parents=True, exist_ok=True)
    ways = parse_ways(args.shapes)
    data, eval_files = ([PromptFile.parse(text) for text in texts] for texts in (args.data, args.eval))
    sets = [
        f"model.target={args.target}",
        "model.generation_config=none",
        f"sampling.max_tokens={args.max_tokens}",
        *args.set,
    ]
    temperatures = [_number(part) for part in args.temperatures.split(",")]
    plan = _resolve(args, [*sets, *PLAIN])
    as_text = not has_chat_template(plan.config.data, plan.tokenizer)
    evaluates = "evaluation" in args.stage and eval_files
    _check(args, plan, as_text)
    held_out = held_out_rows(eval_files, as_text)
    for way in ways:
        if evaluates and way.model is not None:
            _resolve(args, [*sets, *way.sets(files.folder)])
    if "answers" in args.stage:
        prompts = read_prompts(data)
        if args.invent:
            texts = TextProcessor(plan.tokenizer, plan.config.data)
            made_up = invent(
                args.invent,
                args.seed,
                plan.tokenizer,
                texts,
                files.training,
                sets,
                args.config,
                overwrite=args.overwrite,
            )
            say(f"answers: {len(made_up):,} prompts made up ({_seconds(began)} so far)")
            prompts = distinct([*prompts, *made_up])
        if not prompts:
            raise InputError("there are no prompts to answer", "give more with --data or --invent")
        rows = rows_of(prompts, temperatures, as_text)
        write_job(files.prompts, rows, files.answers, overwrite=args.overwrite)
        # Each row has a temperature, but the engine prepares for sampling by the temperature of the config.
        how = [*PLAIN, f"sampling.temperature={max(temperatures)}"]
        how.append("data.separate_reasoning=false")  # the head learns from all tokens
        report = run_rows(files.prompts, files.answers, [*sets, *how], args.config, overwrite=args.overwrite)
        tokens = report["tokens"]["completion"]
        say(f"answers: {report['rows']['ok']:,} with {tokens:,} tokens ({_seconds(began)} so far)")
    if "training" in args.stage:
        train(args, plan, files)
        say(f"training: finished ({_seconds(began)} so far)")
    if evaluates:
        if args.overwrite:
            files.report.unlink(missing_ok=True)
        print(table(evaluate(files.folder, held_out, ways, sets, args.config, files.report, say)))
    say(f"done in {_seconds(began)}")


def train(args: argparse.Namespace, plan: ResolvedRun, files: Files) -> None:
    """Run stage 2: from the answers to the checkpoint and the picture."""
    device, config = plan.device, plan.target.config
    train_set, validation = split(_examples(args, plan, files), args.validation, args.seed)
    ends = [t for t in {*config.eos_token_ids, plan.tokenizer.eos_token_id} if isinstance(t, int)]
    draft_ids_W, covered = draft_vocabulary(train_set, args.draft_vocab, config.vocab_size, ends)
    num_tokens = sum(len(e.answer) for e in train_set)
    say(
        f"training: {len(train_set):,} answers with {num_tokens:,} tokens, {len(validation):,} held out;"
        f" {len(draft_ids_W):,} draft tokens make up {covered:.2%} of them"
    )
    head_of_target = head_config(config, len(draft_ids_W))
    head = DraftHead(head_of_target.decoder, len(draft_ids_W))
    initialise(head, plan.target, draft_ids_W, args.seed)
    batch_tokens = args.batch_tokens or (16384 if device.type == "cuda" else 1024)
    longest = padded_length(max(len(e.tokens) for e in (*train_set, *validation)))

    def load_target() -> FrozenTarget:
        return FrozenTarget(plan.target, draft_ids_W, max(batch_tokens, longest), longest, plan.dtype, device)

    settings = TrainSettings(
        num_steps=args.unroll,
        epochs=args.epochs,
        max_steps=args.max_steps,
        lr=args.lr or 1e-3 * (512 / config.hidden_size) ** 0.5,
        warmup=args.warmup,
        weight_decay=0.01,
        batch_tokens=batch_tokens,
        seed=args.seed,
    )
    trainer = Trainer(
        settings,
        head.to(device),
        load_target,
        train_set,
        validation,
        files.training,
        device,
        say,
        compile_steps=args.compile,
    )
    records = trainer.run(overwrite=args.overwrite)
    path = export(files.folder, head_of_target, head.state_dict(), draft_ids_W, config)
    say(f"{path}: {path.stat().st_size / 1e6:.2f} MB; " + described(records[-1]["validation"]))
    plot(records, files.folder / "training.png", f"EAGLE-3 head for {args.target}", say)
    del trainer, head
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engines of the evaluation take the free memory


def _examples(args: argparse.Namespace, plan: ResolvedRun, files: Files) -> list[Example]:
    if not files.answers.is_file():
        raise InputError(f"there are no answers in {files.training}", "run the stage answers first")
    rows = read_lines(files.prompts)
    config = plan.target.config
    return make_examples(
        rows, read_lines(files.answers), plan.tokenizer, plan.config.data, config.vocab_size, args.max_length
    )


def _resolve(args: argparse.Namespace, sets: list[str]) -> ResolvedRun:
    return resolve(with_template_texts(load_config(args.config, sets)))


def _check(args: argparse.Namespace, plan: ResolvedRun, as_text: bool) -> None:
    """Raise errors now for mistakes that would show late."""
    config = plan.target.config
    if args.invent < 0:
        raise ConfigError("--invent must be at least 0")
    if args.invent and as_text:
        raise ConfigError("--invent needs a chat template, and the target has none", "give prompts with --data")
    for name in ("unroll", "epochs", "max_tokens", "draft_vocab", "max_length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 < args.validation < 1:
        raise ConfigError("--validation is a share, above 0 and below 1")
    # The same checks as for a head with files: a target that is too shallow is refused there.
    head = head_config(config, min(args.draft_vocab, config.vocab_size))
    eagle_config("eagle3", head.decoder, head.draft_vocab_size, expected_eagle_tensors(head), config)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--temperatures: {text!r} is no number") from error


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"


def say(line: str) -> None:
    """Print progress to stderr, because stdout has the table of the evaluation."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
