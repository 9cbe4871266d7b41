"""The command line of `specbatch train-draft`, and the checks that need no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, cast, get_args

from specbatch.errors import ConfigError

HeadName = Literal["domino", "markov", "none"]
HEADS: tuple[str, ...] = get_args(HeadName)
Kind = Literal["eagle3", "block"]  # the method that will draft with it
KINDS: tuple[str, ...] = get_args(Kind)
OPTIMIZERS = ("adamw", "muon")
STAGES = ("answers", "training", "evaluation")
_EAGLE_ONLY = ("unroll",)
_BLOCK_ONLY = (
    *("block_size", "blocks", "layers", "intermediate_size", "kv_heads", "features"),
    *("head", "markov_rank", "gru_size", "inner_size", "variation"),
)
_AT_LEAST = {
    **dict.fromkeys(("epochs", "max_steps", "batch_tokens", "draft_vocab", "unroll", "layers", "features"), 1),
    **dict.fromkeys(("intermediate_size", "kv_heads", "blocks", "markov_rank", "gru_size", "inner_size"), 1),
    **{"block_size": 2, "max_length": 4, "invent": 0},
}


@dataclass(frozen=True)
class TrainDraftOptions:
    """The command line. None: the default, which can depend on the target."""

    data: tuple[str, ...]  # FILE or FILE:ROWS
    output: Path
    kind: Kind = "eagle3"
    held_out: tuple[str, ...] = ()  # FILE or FILE:ROWS
    invent: int = 0
    stages: tuple[str, ...] = STAGES
    overwrite: bool = False
    temperatures: str = "0,0.8"
    shapes: str | None = None
    draft_vocab: int | None = None
    # An EAGLE-3 head.
    unroll: int | None = None
    # A block drafter.
    block_size: int | None = None
    blocks: int | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    kv_heads: int | None = None
    features: int | None = None
    head: str | None = None
    markov_rank: int | None = None
    gru_size: int | None = None
    inner_size: int | None = None
    variation: float | None = None
    # The training.
    epochs: int = 4
    max_steps: int | None = None
    lr: float | None = None
    warmup: float = 0.05
    optimizer: str | None = None
    batch_tokens: int | None = None
    max_length: int = 1024
    validation: float = 0.02
    compile: bool = False

    def check(self) -> None:
        """Raise ConfigError for a value that is not legal, or an option of another kind of drafter."""
        if self.kind not in KINDS:
            raise ConfigError(f"--kind {self.kind} is not known", f"kinds: {', '.join(KINDS)}")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer {self.optimizer} is not known", f"optimizers: {', '.join(OPTIMIZERS)}")
        if unknown := set(self.stages) - set(STAGES):
            raise ConfigError(f"--stage {min(unknown)} is not known", f"stages: {', '.join(STAGES)}")
        if "answers" in self.stages and not self.data and not self.invent:
            raise ConfigError("there are no prompts", "give files of prompts, --invent N or both")
        others = _BLOCK_ONLY if self.kind == "eagle3" else _EAGLE_ONLY
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name in others and value is not None:
                other = "block" if self.kind == "eagle3" else "eagle3"
                raise ConfigError(f"{flag_of(name)} is for --kind {other}", "leave it out, or change --kind")
            if name in _AT_LEAST and value is not None and value < _AT_LEAST[name]:
                raise ConfigError(f"{flag_of(name)} must be at least {_AT_LEAST[name]}, got {value}")
        if self.head is not None and self.head not in HEADS:
            raise ConfigError(f"--head {self.head} is not known", f"heads: {', '.join(HEADS)}")
        for name, head in (("markov_rank", "markov"), ("gru_size", "domino"), ("inner_size", "domino")):
            if getattr(self, name) is not None and self.head_name != head:
                raise ConfigError(f"{flag_of(name)} is for --head {head}", "leave it out, or change --head")
        if not 0 < self.validation < 1:
            raise ConfigError("--validation is a share, above 0 and below 1")
        if self.variation is not None and not 0 <= self.variation <= 1:
            raise ConfigError("--variation is a share, from 0 to 1")
        if not 0 <= self.warmup <= 1:
            raise ConfigError("--warmup is a share, from 0 to 1")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError("--lr must be a number above 0")
        if self.stages == ("evaluation",) and not self.held_out:
            raise ConfigError("--stage evaluation has no prompts to measure on", "give them by --eval FILE")
        if self.shapes is not None and not ("evaluation" in self.stages and self.held_out):
            raise ConfigError("--shapes is for the evaluation, and nothing is evaluated", "add --eval FILE")
        self.numbers()

    @property
    def head_name(self) -> HeadName:
        """Return the head of a block drafter."""
        return cast(HeadName, self.head or "domino")

    @property
    def optimizer_name(self) -> str:
        """Return the optimizer: by default the one that was measured for this kind of drafter."""
        return self.optimizer or ("muon" if self.kind == "block" else "adamw")

    def numbers(self) -> list[float]:
        """Return the temperatures. Raise ConfigError for text that is no temperature."""
        found = []
        for part in self.temperatures.split(","):
            try:
                found.append(float(part))
            except ValueError as error:
                raise ConfigError(f"--temperatures: {part!r} is no number") from error
            if not 0 <= found[-1] < math.inf:
                raise ConfigError(f"--temperatures: {part} is no temperature", "0 is greedy; others are above it")
        return found


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"
