"""The file jobs of an evaluation, over one engine."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.evals.compare import LOGPROBS, Difference, difference, differing_rows
from specbatch.evals.files import answers_path, differing_paths, prompts_path, results_path, samples_path
from specbatch.evals.plan import Plan, plan_config, stop_tokens
from specbatch.evals.report import Measured
from specbatch.evals.score import read_results, score
from specbatch.files.local import disk_errors, write_whole
from specbatch.files.paths import stats_path_of
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.plan import with_shared_tokens
from specbatch.job.pool import LocalPool
from specbatch.job.terminal import print_notes
from specbatch.job.worker import Runtime, SharedRuntime, Worker
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import source_of_lines
from specbatch.rows.tokenizer import TextProcessor
from specbatch.signals import INTERRUPTED
from specbatch.text.chat_template import ChatTemplate

_PROGRESS_SECONDS = 5.0


class Interrupted(Exception):
    """A job ended early, by SIGINT or SIGTERM."""


class Runner:
    """Answers the rows of all tasks with one configuration, and measures the answers."""

    def __init__(
        self, folder: Path, runtime: Runtime, console: Console, *, began: float, overwrite: bool, quarantine: bool
    ) -> None:
        self._folder = folder
        self._runtime = runtime
        self._console = console
        self._began: float | None = began  # the first job's statistics count the start of the program
        self._overwrite = overwrite
        self._quarantine = quarantine
        self._shared: SharedRuntime | None = None
        self._stop_tokens: dict[str, list[int]] = {}

    def run(self, plans: Sequence[Plan], config: Config, variant: str) -> dict[str, Measured]:
        """Answer the rows of all plans and measure the answers, by task. `variant`, "" or "none", names the folder.

        Raises Interrupted.
        """
        if self._shared is not None:
            self._shared.release()
        # A task says which prompts are chats; its other prompts run as text. And it says how it samples.
        as_text = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, prompts_as_chat=False),
            model=dataclasses.replace(config.model, generation_config="none"),
        )
        self._shared = SharedRuntime(self._runtime, with_shared_tokens_of(as_text, plans))
        tokenizer = self._shared.resolved.tokenizer
        for plan in plans:
            if plan.task.prompt.kind == "chat":
                _check_chat_template(ChatTemplate(tokenizer, plan_config(config, plan, ()).data), plan)
        if self._overwrite:  # until this run has its own
            for path in (results_path(self._folder), samples_path(self._folder)):
                with disk_errors(path):
                    path.unlink(missing_ok=True)
        for plan in plans:
            write_whole(prompts_path(plan), plan.lines())
            extra = self._stop_tokens[plan.task.name] = stop_tokens(tokenizer, plan.sampling.stop)
            without = ", without speculation" if variant else ""
            print_notes([f"{plan.task.name}{without}: {len(plan.rows):,} rows"], self._console)
            self._generate(prompts_path(plan), answers_path(plan, variant), plan_config(config, plan, extra))
        return {plan.task.name: self._measure(plan, variant) for plan in plans}

    def differences(self, plan: Plan, config: Config) -> list[Difference]:
        """The rows whose text differs from that of the run without speculation, which was the last one. They run once
        more with log-probabilities, which the timed runs do without.

        Raises Interrupted.
        """
        results = read_results(answers_path(plan, ""))
        plain = read_results(answers_path(plan, "none"))
        rows = differing_rows(results, plain)
        # Samples may differ: other draws of the same distribution. Choices have no tokens to compare.
        if not rows or plan.sampling.temperature > 0 or plan.choices is not None:
            return [Difference(i, plan.ids[i], None, None) for i in rows]
        assert self._shared is not None, "run() comes first"
        own = plan_config(config, plan, self._stop_tokens[plan.task.name])
        own = dataclasses.replace(own, sampling=dataclasses.replace(own.sampling, logprobs=LOGPROBS, n=1))
        prompts, answers = differing_paths(plan)
        write_whole(prompts, plan.lines(rows))
        self._generate(prompts, answers, own, overwrite=True)  # quick, and derived from the other two: always new
        texts = TextProcessor(self._shared.resolved.tokenizer, own.data)
        pairs = zip(rows, read_results(answers), strict=True)
        return [difference(i, results[i], again, texts.decode) for i, again in pairs]

    def _measure(self, plan: Plan, variant: str) -> Measured:
        answers = answers_path(plan, variant)
        stats = json.loads(stats_path_of(answers).read_text(encoding="utf-8"))
        return Measured(score(plan, read_results(answers), _progress(self._console)), stats)

    def _generate(self, prompts: Path, answers: Path, config: Config, overwrite: bool = False) -> None:
        assert self._shared is not None
        answers.parent.mkdir(parents=True, exist_ok=True)
        overwrite = overwrite or self._overwrite
        options = GenerateOptions(str(prompts), answers, overwrite=overwrite, quarantine=self._quarantine)
        began = time.perf_counter() if self._began is None else self._began
        self._began = None
        pool = LocalPool(Worker(self._shared.runtime, lambda line: print_notes([line], self._console)))
        outcome = run_file_job(options, config, pool, self._console, began=began, summary=False)
        if outcome.exit_code == INTERRUPTED:
            raise Interrupted


def with_shared_tokens_of(config: Config, plans: Sequence[Plan]) -> Config:
    """One engine runs all tasks: what prompts of the task share whose prompts share the most."""
    counted = [config]
    for plan in plans:
        own = plan_config(config, plan, ())
        source = source_of_lines(plan.task.name, plan.lines())
        found = with_shared_tokens(config, source, RowParser(own.sampling, own.data, own.model.target))
        counted.append(found)
    return max(counted, key=lambda one: -1 if one.engine.shared_tokens is None else one.engine.shared_tokens)


def _check_chat_template(template: ChatTemplate, plan: Plan) -> None:
    if not template.exists:
        raise ConfigError(
            f"the task {plan.task.name} needs a chat template, and the model has none",
            "--set data.chat_template=PATH gives one",
        )
    template.check()


def _progress(console: Console) -> Callable[[int, int], None]:
    """Prints every few seconds how many programs have run."""
    last = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            console.print(f"{done:,}/{total:,} programs run", soft_wrap=True)

    return on_progress
