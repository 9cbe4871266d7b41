"""A worker: one process with one engine that runs rows. A job has one in its own process, or several in a pool."""

from __future__ import annotations

import copy
import dataclasses
import gc
import platform
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specbatch.config import Config
from specbatch.counts import EngineStats, GrammarCounts, SpeculationCounts
from specbatch.job.runner import Load, RowRunner
from specbatch.results.fingerprint import ModelFiles, job_fingerprint
from specbatch.results.finished import Finished
from specbatch.results.stats import commit, device_name, versions
from specbatch.rows.shard import Shard
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import BatchEngine

if TYPE_CHECKING:
    from specbatch.setup.resolve import ResolvedRun


@dataclass(frozen=True)
class Runtime:
    """The parts that need models: `engine.build` in the tool, stubs in tests."""

    resolve: Callable[[Config], Any]  # -> ResolvedRun
    build_engine: Callable[[Any, Callable[[str], None]], BatchEngine]  # (run, on_progress)
    model_paths: Callable[[Config], Mapping[str, Path]]  # paths of the models by option; the config is resolved


@dataclass(frozen=True)
class Description:
    """Description of a job, as it is decided where the job runs. It can be sent, because it has no tokenizer and no
    weights."""

    config: Config  # resolved
    row_tokens: int | None  # see `job_fingerprint`
    digests: Mapping[str, str]  # digest of the models' files by option
    models: Mapping[str, str]  # what the models are, by option
    notes: Sequence[str]  # what was decided
    low_acceptance: str | None  # likely causes, if hardly any draft is accepted; None: no warning
    node: str
    made_by: Mapping[str, Any]  # versions, commit, device
    weights: Mapping[str, Any]  # ModelFiles.record()
    # values that also change the bits of a deterministic run
    bits_depend_on: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(
        self, source: Mapping[str, Any], limit: int | None, shard: Shard | None = None, *, has_grammars: bool = False
    ) -> dict[str, Any]:
        """The job's identity. `source`: of the input."""
        job = job_fingerprint(self.config, source, limit, shard=shard, row_tokens=self.row_tokens, models=self.digests)
        if self.config.engine.deterministic:
            bits = {"device": self.made_by["device"], **self.bits_depend_on}
            job.update({f"{name} (engine.deterministic)": value for name, value in bits.items()})
        if has_grammars:
            job["llguidance (grammars)"] = self.made_by["versions"].get("llguidance")
        return job


@dataclass(frozen=True)
class Loaded:
    """Values that were decided when the engine was built."""

    longest_row: int  # tokens of a row, prompt and output, that memory allows
    notes: Sequence[str]


@dataclass(slots=True)
class Slice:
    """The rows that a worker finished in one exchange, and its state after it."""

    finished: Finished
    load: Load
    started: Sequence[int] = ()  # indices of the rows that can no longer be dropped
    models: Mapping[str, Any] = field(default_factory=dict)  # ModelFiles.record()


class Worker:
    """The methods are called in this order: describe, load, limit_length, exchange ...

    All raise SpecbatchError for what the user can mend.
    """

    def __init__(self, runtime: Runtime, log: Callable[[str], None] = lambda line: None) -> None:
        self._runtime = runtime
        self._log = log

    def describe(self, config: Config) -> Description:
        """Decide every `auto`, and read what the models are. It downloads models that are not on this machine."""
        run: ResolvedRun = self._runtime.resolve(config)
        self._run = run
        self._texts = TextProcessor(run.tokenizer, run.config.data)
        self._texts.check_grammar(run.config.sampling)
        self.models = ModelFiles(self._runtime.model_paths(run.config), self._log)
        data = replace(run.config.data, chat_template_date=self._texts.printed_day)
        return Description(
            replace(run.config, data=data),
            run.row_tokens,
            dict(self.models.digests),
            dict(run.description),
            list(run.notes),
            run.low_acceptance,
            platform.node(),
            {"versions": versions(), "commit": commit(), "device": device_name(run.config.engine.device)},
            self.models.record(),
            dict(run.bits_depend_on),
        )

    @property
    def run(self) -> Any:
        """The ResolvedRun, after `describe`."""
        return self._run

    def model_differences(self, recorded: Mapping[str, Any]) -> list[str]:
        return self.models.differences(recorded)

    def load(self, on_progress: Callable[[str], None] = lambda step: None) -> Loaded:
        """Build the engine."""
        known = len(self._run.notes)
        self._freeze_heap()
        engine = self._runtime.build_engine(self._run, on_progress)
        self.models.check_loaded()
        self.models.hash_later()
        self.runner = RowRunner(engine, self._texts, self._run.config)
        return Loaded(engine.limit_length(None), list(self._run.notes[known:]))

    def _freeze_heap(self) -> None:
        """Let the garbage collector skip the objects that exist now, until this worker is closed or gone. They are a
        million objects of libraries, which it would walk again and again. The engine is not among them, because its
        parts refer to each other. If a program has frozen its heap itself, this does nothing."""
        self._thaw_heap: Callable[[], object] = lambda: None
        if gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._thaw_heap = weakref.finalize(self, gc.unfreeze)

    def limit_length(self, tokens: int) -> int:
        """See `BatchEngine.limit_length`."""
        return self.runner.engine.limit_length(tokens)

    def exchange(self, rows: Sequence[RawRow], drop: Sequence[int], seconds: float) -> Slice:
        """Take `rows`, and run until `seconds` have passed or nothing is left. Rows with an index in `drop` are left
        out if they have not begun."""
        end = time.perf_counter() + seconds
        runner = self.runner
        if drop:
            runner.drop(set(drop))
        for row in rows:
            runner.add(row)
        while True:
            runner.start_rows()
            if not runner.is_busy or runner.is_full or time.perf_counter() >= end:
                break
            runner.step()
        return Slice(runner.take(), runner.load(), list(runner.rows_in_flight()), self.models.record())

    def close(self) -> None:
        """Stop what runs in the background, and close the engine. Weights stay until the object is gone."""
        if hasattr(self, "runner"):
            self.runner.close()
            self.runner.engine.close()
            self._thaw_heap()
        if hasattr(self, "models"):
            self.models.close()


class SharedRuntime:
    """Resolves a configuration once and builds its engine once, when a job first needs it.

    `runtime` is for the jobs: they can differ in `sampling` and `data`, on which no part of an engine depends.
    """

    def __init__(self, inner: Runtime, config: Config) -> None:
        self._inner = inner
        self._engine: BatchEngine | None = None
        self.resolved: Any = inner.resolve(config)
        self.runtime = Runtime(self._resolve, self._build, inner.model_paths)

    def release(self) -> None:
        """Free the engine and the GPU's memory."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        gc.collect()
        torch = sys.modules.get("torch")  # a stub engine needs no torch
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _resolve(self, config: Config) -> Any:
        own = dataclasses.replace(self.resolved.config, sampling=config.sampling, data=config.data)
        # The decisions are printed once: by the first job that needs the engine.
        notes = self.resolved.notes if self._engine is None else []
        return dataclasses.replace(self.resolved, config=own, notes=notes)

    def _build(self, run: Any, log: Callable[[str], None]) -> BatchEngine:
        if self._engine is None:
            self._engine = self._inner.build_engine(run, log)
        return cast(BatchEngine, _OneJob(self._engine))


class _OneJob:
    """An engine whose statistics begin now; everything else is the engine's own."""

    def __init__(self, engine: BatchEngine) -> None:
        assert engine.num_running == engine.num_waiting == 0, "the job before has left something"
        self._engine = engine
        self._before = copy.deepcopy(engine.stats)

    @property
    def stats(self) -> EngineStats:
        return counts_since(self._engine.stats, self._before)

    def close(self) -> None:
        """The next job runs on the same engine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def counts_since(now: EngineStats, before: EngineStats) -> EngineStats:
    """`now` less `before`, an earlier copy of the same engine's statistics."""
    sums = ("speculation", "grammar", "experts", "draft_sources")
    numbers = {f.name: getattr(now, f.name) for f in dataclasses.fields(EngineStats) if f.name not in sums}
    grammar = GrammarCounts(
        **{
            f.name: getattr(now.grammar, f.name) - getattr(before.grammar, f.name)
            for f in dataclasses.fields(GrammarCounts)
        }
    )
    experts = copy.deepcopy(now.experts)
    experts.add(before.experts, times=-1)
    sources = copy.deepcopy(now.draft_sources)
    sources.add(before.draft_sources, times=-1)
    counts = SpeculationCounts()
    for f in dataclasses.fields(SpeculationCounts):
        new, old = getattr(now.speculation, f.name), getattr(before.speculation, f.name)
        if isinstance(new, list):
            value = [n - (old[i] if i < len(old) else 0) for i, n in enumerate(new)]
            while value and value[-1] == 0:  # depths that only earlier jobs reached
                value.pop()
        else:
            value = new - old
        setattr(counts, f.name, value)
    differences = {name: value - getattr(before, name) for name, value in numbers.items()}
    return EngineStats(**differences, speculation=counts, grammar=grammar, experts=experts, draft_sources=sources)
