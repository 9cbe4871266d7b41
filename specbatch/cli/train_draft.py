"""`specbatch train-draft`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, cast

import typer

from specbatch import startup
from specbatch.cli.commands import app, examples, note_one_engine
from specbatch.cli.endings import user_errors
from specbatch.cli.options import ConfigOptions, flag, path_option, with_config_options
from specbatch.cli.streams import print_data
from specbatch.errors import ConfigError
from specbatch.startup import prepare_libraries

_eagle = functools.partial(typer.Option, rich_help_panel="EAGLE-3 heads")
_block = functools.partial(typer.Option, rich_help_panel="Block drafters")
_training = functools.partial(typer.Option, rich_help_panel="Training")


@app.command(
    "train-draft",
    epilog=examples(
        "specbatch train-draft prompts.jsonl --model org/name -o my-head --eval held-out.jsonl",
        "specbatch train-draft --invent 10000 --model org/name --kind block -o my-drafter",
    ),
)
@with_config_options
def train_draft(
    given: ConfigOptions,
    output: Annotated[Path, path_option("--output", "-o", metavar="DIR", help="The drafter: speculation.draft.")],
    data: Annotated[
        list[str] | None, typer.Argument(metavar="FILE[:ROWS]", help="JSON lines of prompts. The target answers them.")
    ] = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="eagle3 or block: the speculation.method that drafts with it.")
    ] = "eagle3",
    held_out: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="FILE[:ROWS]", help="Prompts to measure on. Can be given several times."),
    ] = None,
    invent: Annotated[int, typer.Option(metavar="N", help="The target also makes up prompts, in N tries.")] = 0,
    temperatures: Annotated[
        str, typer.Option(metavar="T,T", help="The target answers each prompt once at each temperature.")
    ] = "0,0.8",
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="WAYS",
            help="What --eval measures: num_steps/topk/num_draft_tokens, METHOD=DRAFT:3/1/4, ngram, none.",
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Only answers, training or evaluation. Can be given several times."),
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", help="Begin the stages again.")] = False,
    draft_vocab: Annotated[
        int | None, _training(metavar="N", help="The N most frequent tokens are drafted.", show_default="32000")
    ] = None,
    unroll: Annotated[
        int | None, _eagle(metavar="N", help="The number of draft steps to train.", show_default="7")
    ] = None,
    block_size: Annotated[int | None, _block(metavar="N", help="Tokens of a block.", show_default="8")] = None,
    layers: Annotated[int | None, _block(metavar="N", help="Layers of the drafter.", show_default="2")] = None,
    intermediate_size: Annotated[
        int | None, _block(metavar="N", help="The width of its MLPs.", show_default="that of the target")
    ] = None,
    kv_heads: Annotated[
        int | None,
        _block(metavar="N", help="Key/value heads of a layer.", show_default="as many as the target"),
    ] = None,
    features: Annotated[
        int | None, _block(metavar="N", help="Layers of the target that it reads.", show_default="3")
    ] = None,
    blocks: Annotated[
        int | None,
        _block(
            metavar="N",
            help="Blocks that learn at a step, rounded up to a multiple of 128.",
            show_default="half of the tokens of a step",
        ),
    ] = None,
    head: Annotated[
        str | None,
        _block(metavar="NAME", help="domino, markov (DSpark) or none (DFlash).", show_default="domino"),
    ] = None,
    markov_rank: Annotated[
        int | None, _block(metavar="N", help="The rank of a Markov head.", show_default="hidden size / 16")
    ] = None,
    gru_size: Annotated[
        int | None, _block(metavar="N", help="The state of Domino's GRU.", show_default="hidden size / 2")
    ] = None,
    inner_size: Annotated[
        int | None, _block(metavar="N", help="The rank of the logits of Domino.", show_default="hidden size / 4")
    ] = None,
    variation: Annotated[
        float | None,
        _block(
            metavar="SHARE",
            help="The share of the total variation distance in the loss; the rest is cross entropy.",
            show_default="0 without a head, else 0.9",
        ),
    ] = None,
    epochs: Annotated[int, _training(metavar="N", help="Passes over all answers.")] = 4,
    max_steps: Annotated[int | None, _training(metavar="N", help="The most steps of the optimiser.")] = None,
    lr: Annotated[
        float | None,
        _training(
            metavar="RATE",
            help="The learning rate.",
            show_default="1e-3 (Muon: 6e-3) at hidden size 512, then as 1/sqrt",
        ),
    ] = None,
    warmup: Annotated[float, _training(metavar="SHARE", help="The share of steps with a rising rate.")] = 0.05,
    optimizer: Annotated[
        str | None,
        _training(
            metavar="NAME",
            help="adamw, or muon, which has AdamW for norms and tables of tokens.",
            show_default="muon for block, adamw for eagle3",
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, _training(metavar="N", help="Tokens of a step.", show_default="16384 on CUDA, 1024 on a CPU")
    ] = None,
    max_length: Annotated[int, _training(metavar="N", help="The longest text, in tokens.")] = 1024,
    validation: Annotated[float, _training(metavar="SHARE", help="The share of prompts that is held out.")] = 0.02,
    compile_steps: Annotated[bool, _training("--compile", metavar="", help="Use torch.compile for the steps.")] = False,
) -> None:
    """Train a drafter for a target, from nothing but prompts. The same command again resumes."""
    with user_errors() as console:
        from specbatch.train.start import Kind, TrainDraftOptions

        options = TrainDraftOptions(
            data=tuple(data or ()),
            output=output,
            kind=cast(Kind, kind),
            held_out=tuple(held_out or ()),
            invent=invent,
            stages=tuple(stage) if stage else TrainDraftOptions.stages,
            overwrite=overwrite,
            temperatures=temperatures,
            shapes=shapes,
            draft_vocab=draft_vocab,
            unroll=unroll,
            block_size=block_size,
            layers=layers,
            intermediate_size=intermediate_size,
            kv_heads=kv_heads,
            features=features,
            blocks=blocks,
            head=head,
            markov_rank=markov_rank,
            gru_size=gru_size,
            inner_size=inner_size,
            variation=variation,
            epochs=epochs,
            max_steps=max_steps,
            lr=lr,
            warmup=warmup,
            optimizer=optimizer,
            batch_tokens=batch_tokens,
            max_length=max_length,
            validation=validation,
            compile=compile_steps,
        )
        options.check()
        if given.method is not None or given.draft is not None:
            raise ConfigError(
                "train-draft decides itself how to draft: --method and --draft have no effect", "--shapes"
            )
        if given.temperature is not None:
            raise ConfigError("train-draft answers each prompt at several temperatures", "--temperatures")
        note_one_engine(given.load(), console)
        prepare_libraries()
        startup.import_engine()
        from specbatch.train.answers import Pipeline
        from specbatch.train.command import train_draft as train

        pipeline = Pipeline(given.config, tuple(given.sets), startup.runtime(console), console)
        table = train(options, pipeline)
        if table is not None:
            print_data(f"{table}\n")
