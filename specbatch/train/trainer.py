"""The training loop: AdamW or Muon with warm-up and cosine, checkpoints to resume from, metrics, validation.

Parameters are float32 and products run in bfloat16 (autocast) on CUDA: a drafter is small, so master copies apart from
bfloat16 weights would save little, and float32 parameters keep small updates. On CPU everything is float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbatch.errors import InputError
from specbatch.torch_threads import use_threads
from specbatch.train.acceptance import Acceptance
from specbatch.train.checkpoint import SAME_COMMAND, first_line
from specbatch.train.examples import Example, batches
from specbatch.train.learner import Learner, Losses

_BETAS, _CLIP, _MIN_LR_SHARE = (0.9, 0.95), 0.5, 0.05
_LOGS, _VALIDATIONS = 400, 20  # about this number of records in a whole run
_STEPS_A_VALIDATED_BATCH = 4
_MUON_ASPECT = 4  # the length of a matrix by its width up to which Muon has it
_SHOWN_STEPS = 8  # a block can have many, and a line is to be read
_DAMAGED = "--overwrite starts again; -o DIR trains elsewhere"


@dataclass(frozen=True)
class TrainSettings:
    """The settings on which the weights depend in addition to the examples. A checkpoint of other settings is
    refused."""

    epochs: int
    max_steps: int | None  # the most steps of the optimiser; None: all epochs
    lr: float
    warmup: float  # the share of all steps with a rising rate
    weight_decay: float  # the decay of matrices; norms have none
    batch_tokens: int
    seed: int
    optimizer: str = "adamw"  # or muon: Muon for matrices, AdamW for what is no matrix between hidden states


class Trainer:
    """One training run in `folder` (checkpoint.pt, metrics.jsonl). The module of `learner` has the initial weights."""

    def __init__(
        self,
        settings: TrainSettings,
        learner: Learner,
        train: Sequence[Example],
        validation: Sequence[Example],
        folder: Path,
        device: torch.device,
        say: Callable[[str], None],
        *,
        save_seconds: float = 60.0,
    ) -> None:
        self._settings, self._learner, self.module = settings, learner, learner.module
        self._train, self._validation = train, validation
        self._folder, self._device, self._say = folder, device, say
        self._save_seconds = save_seconds
        self._plan = _plan(train, settings)
        self._fingerprint = _fingerprint(settings, learner, train, validation)
        self._optimizers = _optimizers(self.module, settings, fused=device.type == "cuda")
        self._step = 0
        self._seconds = 0.0  # the time of training, over all sessions

    @property
    def num_steps(self) -> int:
        return len(self._plan)

    @property
    def checkpoint(self) -> Path:
        return self._folder / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        return self._folder / "metrics.jsonl"

    def run(self, *, overwrite: bool = False) -> list[dict[str, Any]]:
        """Train to the end, from the checkpoint if there is one. Return all records of the metrics.

        It raises InputError for a checkpoint of another run.
        """
        if not overwrite:
            self._resume()
        records = self._read_metrics()
        if self._step == self.num_steps and records and "validation" in records[-1]:
            self._say(f"training: all {self.num_steps:,} steps are done")
            return records
        self._learner.load_target()
        if 0 < self._step < self.num_steps:
            self._say(f"resuming training at step {self._step:,} of {self.num_steps:,}")
        began = saved = shown = time.monotonic()
        before, tokens = self._seconds, 0
        log_every = max(self.num_steps // _LOGS, 1)
        # Far enough apart that validation takes a small part of the time, however short the run is.
        validate_every = max(self.num_steps // _VALIDATIONS, _STEPS_A_VALIDATED_BATCH * len(self._validation_plan()))
        pending: list[Losses] = []
        with self.metrics.open("a", encoding="utf-8") as file, self.host_threads():

            def record(entry: dict[str, Any]) -> None:
                records.append(entry)
                file.write(json.dumps(entry) + "\n")
                file.flush()

            if not records or self._step == self.num_steps:  # the file of metrics is new, or has lost its end
                record({"step": self._step, "validation": self._validate()})
            while self._step < self.num_steps:
                chosen = [self._train[i] for i in self._plan[self._step]]
                pending.append(self._optimise(chosen))
                tokens += sum(len(e.tokens) for e in chosen)
                self._step += 1
                last = self._step == self.num_steps
                if self._step % log_every == 0 or last:
                    self._seconds = before + time.monotonic() - began
                    record(self._summary(pending))
                    pending = []
                if self._step % validate_every == 0 or last:
                    validation = self._validate()
                    record({"step": self._step, "validation": validation})
                    self._say(f"step {self._step:,}: " + described(validation))
                now = time.monotonic()
                self._seconds = before + now - began
                if last or now - saved >= self._save_seconds:
                    self._save()
                    saved = now
                if now - shown >= 10 and "loss" in records[-1]:
                    shown = now
                    loss = records[-1]["loss"]
                    left = (now - began) / max(tokens, 1) * self._tokens_left()
                    self._say(
                        f"step {self._step:,}/{self.num_steps:,} · loss {loss:.3f}"
                        f" · {tokens / (now - began):,.0f} tok/s · {left:,.0f} s left"
                    )
        return records

    def host_threads(self) -> AbstractContextManager[None]:
        """Compute with one thread of the host where a GPU trains.

        The host makes batches by many small operations. Threads would wait for each other in each of them, and for long
        if other processes have the cores: 370 ms a batch in place of 6 (two cores, one of them busy).
        """
        return use_threads(1) if self._device.type == "cuda" else nullcontext()

    def _optimise(self, examples: Sequence[Example]) -> Losses:
        rate = self._rate(self._step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        found = self._losses(self._learner.batch(examples, self._step))
        self.module.zero_grad(set_to_none=True)
        found.total.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
        return Losses(found.total.detach(), [x.detach() for x in found.steps], found.hits)

    def _losses(self, batch: Any) -> Losses:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._learner.losses(batch.to(self._device))

    def _rate(self, step: int) -> float:
        """Compute the learning rate: linear warm-up, then half a cosine down to a twentieth."""
        s = self._settings
        warmup = max(round(self.num_steps * s.warmup), 1)
        if step < warmup:
            return s.lr * (step + 1) / warmup
        progress = (step - warmup) / max(self.num_steps - warmup, 1)
        return s.lr * (_MIN_LR_SHARE + (1 - _MIN_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2)

    @torch.no_grad()
    def _validate(self) -> dict[str, Any]:
        found = Acceptance(self._learner.weights)
        for indices in self._validation_plan():
            examples = [self._validation[i] for i in indices]
            found.add(examples, ((batch, self._losses(batch)) for batch in self._learner.whole(examples)))
        return found.summary()

    def _validation_plan(self) -> list[list[int]]:
        lengths = [len(e.tokens) for e in self._validation]
        return batches(lengths, self._settings.batch_tokens, self._settings.seed, -1)

    def _summary(self, pending: Sequence[Losses]) -> dict[str, Any]:
        """Return one record for the steps since the last record."""
        loss = torch.stack([p.total for p in pending]).mean().item()
        if not math.isfinite(loss):
            raise InputError(f"the loss is {loss} at step {self._step:,}", "lower --lr, and add --overwrite")
        num = len(self._learner.weights)
        hits = [torch.stack([p.hits[j].sum() for p in pending]).sum().item() for j in range(num)]
        rows = [sum(p.hits[j].shape[0] for p in pending) for j in range(num)]
        return {
            "step": self._step,
            "loss": round(loss, 5),
            "losses": [round(torch.stack([p.steps[j] for p in pending]).mean().item(), 5) for j in range(num)],
            "accuracy": [round(h / max(r, 1), 5) for h, r in zip(hits, rows, strict=True)],
            "lr": self._rate(self._step - 1),
            "seconds": round(self._seconds, 2),
        }

    def _tokens_left(self) -> int:
        return sum(len(self._train[i].tokens) for batch in self._plan[self._step :] for i in batch)

    def _save(self) -> None:
        state = {
            "fingerprint": self._fingerprint,
            "step": self._step,
            "seconds": self._seconds,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        try:
            torch.save(state, temporary)
        except (OSError, RuntimeError) as error:  # Torch's writer of files raises RuntimeError where the disk is full.
            raise InputError(f"cannot write {temporary}: {first_line(error)}", SAME_COMMAND) from error
        os.replace(temporary, self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            state = torch.load(self.checkpoint, map_location=self._device, weights_only=True)
            theirs, ours = state["fingerprint"], self._fingerprint
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Damaged bytes raise many kinds, those of pickle among them.
            raise InputError(f"{self.checkpoint} is damaged: {first_line(error)}", _DAMAGED) from error
        if changed := [f"{k}: {theirs.get(k)!r}, now {v!r}" for k, v in ours.items() if theirs.get(k) != v]:
            raise InputError(
                f"{self.checkpoint} belongs to another training: {'; '.join(changed)}",
                "--overwrite starts again; -o DIR trains elsewhere",
            )
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step, self._seconds = state["step"], state["seconds"]

    def _read_metrics(self) -> list[dict[str, Any]]:
        """Read the records up to the checkpoint. Later ones are dropped from the file, because their steps run
        again."""
        records = []
        if self.metrics.is_file() and self._step:
            # The last line may be half written: a run that was killed there had not reached the next checkpoint.
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            try:
                found = [json.loads(line) for line in lines if line.endswith("\n")]
                records = [record for record in found if record["step"] <= self._step]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.metrics} is damaged", _DAMAGED) from error
        self.metrics.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return records


def described(validation: dict[str, Any]) -> str:
    """Describe a validation in one line."""
    shares = " ".join(f"{a:.2f}" for a in validation["accuracy"][:_SHOWN_STEPS])
    lengths = ", ".join(f"{steps} steps {length:.2f}" for steps, length in validation["tokens_per_round"].items())
    return f"validation loss {validation['loss']:.3f}, right by step {shares}; tokens per round: {lengths}"


def _plan(train: Sequence[Example], settings: TrainSettings) -> list[list[int]]:
    lengths = [len(e.tokens) for e in train]
    plan: list[list[int]] = []
    for epoch in range(settings.epochs):
        plan += batches(lengths, settings.batch_tokens, settings.seed, epoch)
        if settings.max_steps is not None and len(plan) >= settings.max_steps:
            return plan[: settings.max_steps]
    return plan


def _optimizers(module: nn.Module, settings: TrainSettings, *, fused: bool) -> list[torch.optim.Optimizer]:
    """Return the optimisers of all parameters. Norm weights do not decay.

    Muon (Jordan et al. 2024) makes the singular values of an update equal. That is meant for matrices between hidden
    states, and not for tables of tokens, which are much longer than wide. Its rates are scaled to those of AdamW.
    """
    matrices = [p for p in module.parameters() if p.dim() > 1]
    norms = [p for p in module.parameters() if p.dim() <= 1]
    found: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        between = [p for p in matrices if p.dim() == 2 and max(p.shape) <= _MUON_ASPECT * min(p.shape)]
        if between:
            found.append(torch.optim.Muon(between, settings.lr, settings.weight_decay, adjust_lr_fn="match_rms_adamw"))
        chosen = {id(p) for p in between}
        matrices = [p for p in matrices if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return [*found, torch.optim.AdamW(groups, settings.lr, _BETAS, fused=fused)]


def _fingerprint(
    settings: TrainSettings, learner: Learner, train: Sequence[Example], validation: Sequence[Example]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for e in (*train, *validation):
        digest.update(torch.tensor([e.prompt_length, *e.tokens, -1]).numpy().tobytes())
    initial = hashlib.sha256()
    for tensor in learner.module.state_dict().values():
        initial.update(tensor.detach().float().cpu().numpy().tobytes())
    return {
        **dataclasses.asdict(settings),
        **learner.settings(),
        "examples": digest.hexdigest()[:16],
        "initial": initial.hexdigest()[:16],
    }
