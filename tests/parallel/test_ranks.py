"""Ranks as processes: they answer as one engine does, and end with it."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from specbatch.config_load import load_config
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import ConfigError, MemoryShortage, ModelError, SpecbatchError
from specbatch.grammar.compiler import GrammarCompiler, MatcherSpec
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.reasoning import Reasoning
from specbatch.setup.build import build_engine
from specbatch.setup.ranks import ranked_engine as ranks
from specbatch.setup.ranks.process import _RankLoop, open_group, run_rank
from specbatch.setup.ranks.ranked_engine import DividedEngine, RankedEngine, build_ranked
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.types import (
    BatchEngine,
    Completion,
    EngineLimits,
    FinishReason,
    Request,
    RngKey,
    SamplingParams,
)
from tests.grammar.tiny_tokenizer import tiny_tokenizer

_CONTEXT = multiprocessing.get_context("fork")
PROMPTS = [[7, 8, 9, 10] * 3, [7, 8, 9, 10, 11, 12], [200, 3, 5]]
GREEDY = SamplingParams(max_tokens=12)
SETS = ["engine.device=cpu", "engine.kv_cache_tokens=2048", "speculation.method=ngram"]
# Larger models do not measure at the start what lanes gain: it takes most of the time of a test.
ONE_LANE = "engine.two_batch_overlap=off"


class Forked:
    """A rank without seconds of imports. It has no file of this process but its connection, as a new one."""

    def __init__(self, connection: Connection) -> None:
        self._process = _CONTEXT.Process(target=self._main, args=(connection,))
        self._process.start()
        self.pid = self._process.pid or 0

    @staticmethod
    def _main(connection: Connection) -> None:
        sys.stderr = sys.__stderr__  # pytest's is a file
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 1024)
        run_rank(connection)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        # `join` takes a process that has closed its files for one that has ended, and then waits without an end.
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self._process.exitcode) is None:
            if time.monotonic() >= end:
                raise TimeoutError
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        self._process.kill()


def resolved(model: Path, *sets: str) -> ResolvedRun:
    return resolve(load_config(None, [f"model.target={model}", *SETS, *sets]))


def answers(engine: BatchEngine, params: SamplingParams = GREEDY, stop: Any = None) -> list[Completion]:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0), stop))
    done: dict[int, Completion] = {}
    while len(done) < len(PROMPTS):
        done |= {c.request_id: c for c in engine.step()}
    return [done[i] for i in range(len(PROMPTS))]


@pytest.fixture
def ranked(tiny_model: Path) -> Iterator[RankedEngine]:
    engine = build_ranked(resolved(tiny_model, "engine.tensor_parallel=2"), start=Forked)
    yield engine
    engine.close()


def test_two_processes_answer_as_one(ranked: RankedEngine, tiny_model: Path) -> None:
    alone = build_engine(resolved(tiny_model))

    def stop(tokens: Sequence[int], start: int, num_new: int) -> int | None:
        """A stop string that ends with the fifth token."""
        return 5 if len(tokens) - start >= 5 else None

    sampled = SamplingParams(max_tokens=12, temperature=0.9, seed=3, logprobs=1)
    for params, check in ((GREEDY, None), (sampled, None), (GREEDY, stop)):
        mine, theirs = answers(ranked, params, check), answers(alone, params, check)
        assert [(c.token_ids, c.finish_reason, c.speculation) for c in mine] == [
            (c.token_ids, c.finish_reason, c.speculation) for c in theirs
        ]
        assert check is None or [len(c.token_ids) for c in mine] == [5, 5, 5]
    assert ranked.limit_length(100) == alone.limit_length(100) == 100
    assert ranked.limits == alone.limits
    assert ranked.stats.speculation == alone.stats.speculation


@pytest.mark.parametrize(
    ("method", "max_automata"), [("none", 128), ("none", 1), pytest.param("ngram", 128, marks=pytest.mark.wide)]
)
def test_two_processes_with_grammars_answer_as_one(tiny_model: Path, method: str, max_automata: int) -> None:
    """Each has matchers of its own; with reasoning before the answer, too. Where rank 0 has no automaton of a grammar,
    the other has none either."""
    reasoning = Reasoning(None, (12,), 512)
    specs = [MatcherSpec(Constraint("regex", "regex", "(name: [0-9]{2}, ){1,3}")), None]
    specs.append(MatcherSpec(Constraint("regex", "regex", "[ab]+ and the end"), reasoning))
    specs.append(MatcherSpec(Constraint("response_format", "json_schema", '{"type": "object"}')))

    def texts(engine: BatchEngine, run_: ResolvedRun) -> list[Any]:
        compiler, found = GrammarCompiler(run_.tokenizer, max_automata=max_automata), dict[int, Completion]()
        for spec in filter(None, specs[::-1]):  # Rank 0 can meet grammars in another order.
            spec.make(compiler)
        for i, spec in enumerate(2 * specs):
            params = SamplingParams(max_tokens=16, temperature=(0.0, 0.8)[i % 2], seed=i)
            matcher = None if spec is None else spec.make(compiler)
            engine.submit(Request(i, [7 + i, 8, 9], params, RngKey(0, i, 0), None, (), matcher, spec))
        while len(found) < 2 * len(specs):
            found |= {c.request_id: c for c in engine.step()}
        return [(found[i].token_ids, found[i].finish_reason, found[i].speculation) for i in sorted(found)]

    options = [f"speculation.method={method}", "engine.max_batch_size=5"]
    together, alone = resolved(tiny_model, "engine.tensor_parallel=2", *options), resolved(tiny_model, *options)
    engine = build_ranked(together, start=Forked)
    try:
        found = texts(engine, together)
    finally:
        engine.close()
    expected = texts(build_engine(alone), alone)
    assert found == expected
    assert engine.stats.speculation.accepted > 10


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_rank_follows_grammars_with_the_device_where_rank_0_does(is_followed: bool) -> None:
    """Even if it has met more grammars than get automata."""
    submitted = list[Request]()
    engine: Any = SimpleNamespace(submit=submitted.append, follows_newest=is_followed)
    run_: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), division="tensors")
    loop = _RankLoop(engine, None, run_, SimpleNamespace(size=2))  # type: ignore[arg-type]
    loop._grammars._num_automata = 1000
    spec = MatcherSpec(Constraint("regex", "regex", "a"))
    loop._repeat_submit(Request(0, [1], GREEDY, RngKey(0, 0, 0), matcher_spec=spec), False, is_followed)
    assert submitted[0].matcher is not None
    assert isinstance(submitted[0].matcher.automaton, str) != is_followed
    engine.follows_newest = not is_followed
    with pytest.raises(AssertionError, match="has none"):
        loop._repeat_submit(Request(1, [1], GREEDY, RngKey(0, 1, 0)), False, is_followed)


def test_two_processes_in_fp8_answer_as_one(tiny_model: Path) -> None:
    """The other process gets a copy of what is to be quantised while loading."""
    options = ["model.quantization=fp8", "speculation.method=none"]
    alone = answers(build_engine(resolved(tiny_model, *options)))
    engine = build_ranked(resolved(tiny_model, "engine.tensor_parallel=2", *options), start=Forked)
    try:
        assert [c.token_ids for c in answers(engine)] == [c.token_ids for c in alone]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(["engine.tensor_parallel=2"], marks=pytest.mark.wide),
        ["engine.tensor_parallel=2", "engine.expert_parallel=on"],
    ],
)
def test_two_processes_with_experts_answer_as_one(ranks: list[str]) -> None:
    """As targets, and as a draft model, of which each has all."""
    model = Path("random:tiny-experts")
    options = ["model.dtype=float64", "speculation.method=draft_model", f"speculation.draft={model}", ONE_LANE]
    alone = build_engine(resolved(model, *options))
    engine = build_ranked(resolved(model, *ranks, *options), start=Forked)
    try:
        mine, theirs = answers(engine), answers(alone)
        assert [(c.token_ids, c.speculation) for c in mine] == [(c.token_ids, c.speculation) for c in theirs]
        assert engine.stats.experts == alone.stats.experts
    finally:
        engine.close()


def stop_at_five(tokens: Sequence[int], start: int, num_new: int) -> int | None:
    """Find a stop string that ends with the fifth token."""
    return 5 if len(tokens) - start >= 5 else None


class StopTexts:
    """Makes the checks of the rows' stop strings, in each process."""

    def texts(self, tokenizer: Any) -> StopTexts:
        return self

    def stop_check(self, params: SamplingParams) -> Any:
        return stop_at_five


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("eagle3", 2),
        *(
            pytest.param(method, size, marks=pytest.mark.wide)
            for method in ("none", "ngram", "draft_model", "eagle", "eagle3")
            for size in (2, 4)
            if (method, size) != ("eagle3", 2)
        ),
    ],
)
def test_processes_with_requests_of_their_own_answer_as_one(method: str, size: int) -> None:
    """Greedy, sampled and with log-probabilities, stop strings and grammars; several jobs, one after the other."""
    model = Path("random:tiny-experts")
    drafts = {"draft_model": model, "eagle": "random:eagle", "eagle3": "random:eagle3"}
    options = ["model.dtype=float64", f"speculation.method={method}", "engine.max_batch_size=4", ONE_LANE]
    options += [f"speculation.draft={drafts[method]}"] if method in drafts else []
    ranks = [f"engine.tensor_parallel={size}", "engine.expert_parallel=on", "engine.dp_attention=on"]
    together, alone = resolved(model, *ranks, *options), resolved(model, *options)

    def results(engine: BatchEngine, run_: ResolvedRun) -> list[Any]:
        compiler, found = GrammarCompiler(run_.tokenizer), dict[int, Completion]()
        for i in range(11):
            more = {"temperature": 0.8} if i % 4 == 1 else {"logprobs": 1} if i % 4 == 2 else {}
            params = SamplingParams(max_tokens=8 + i, seed=i, **more)  # type: ignore[arg-type]
            request = Request(i, [7 + i, 8, 9, 10] * (1 + i % 3), params, RngKey(0, i, 0))
            if i % 4 == 3:
                request.matcher_spec = MatcherSpec(Constraint("regex", "regex", "(name: [0-9]{2}, ){1,3}"))
                request.matcher = request.matcher_spec.make(compiler)
            if i % 5 == 4:
                request.check_stop, request.stop_spec = stop_at_five, StopTexts()
            engine.submit(request)
        assert engine.num_running + engine.num_waiting == 11
        while len(found) < 11:
            assert len(engine.tokens_so_far()) <= 11
            found |= {c.request_id: c for c in engine.step()}
        assert engine.num_running == engine.num_waiting == 0
        assert engine.step() == []
        return [(c.token_ids, c.finish_reason, c.speculation, c.logprobs is None) for _, c in sorted(found.items())]

    engine = build_ranked(together, start=Forked)
    try:
        found = [results(engine, together) for _ in range(2)]
        assert isinstance(engine, DividedEngine)
        stats = engine.stats
    finally:
        engine.close()
    one = build_engine(alone)
    assert found == [results(one, alone) for _ in range(2)]
    assert stats.speculation == one.stats.speculation
    assert stats.experts.load == one.stats.experts.load
    assert (stats.generated_tokens, stats.prompt_tokens) == (one.stats.generated_tokens, one.stats.prompt_tokens)
    assert stats.rounds < one.stats.rounds


class _InStep:
    """An engine whose step waits until that of the other rank begins. Rank 1 then finishes all requests, and takes
    longer than rank 0."""

    limits, stats = EngineLimits(9, 9), EngineStats(generated_tokens=1)

    def __init__(self, barrier: threading.Barrier, rank: int) -> None:
        self._barrier, self._rank, self._requests = barrier, rank, list[Request]()

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def step(self) -> list[Completion]:
        self._barrier.wait()
        time.sleep(0.1 * self._rank)
        done, self._requests = self._requests, []
        many = [1] * 1_000_000  # more than a connection holds
        return [Completion(r.request_id, many, FinishReason.LENGTH, None, SpeculationCounts()) for r in done]


def test_many_completions_of_a_rank_do_not_hold_the_next_step() -> None:
    barrier = threading.Barrier(2, timeout=20)  # a rank that writes, and is not read, does not come
    run_: Any = SimpleNamespace(config=SimpleNamespace(engine=SimpleNamespace(tensor_parallel=2)), on_cuda=False)
    run_.division, run_.tokenizer = "requests", tiny_tokenizer()
    threads = []

    def start(connection: Connection) -> Any:
        connection = Connection(os.dup(connection.fileno()))

        def work() -> None:
            connection.recv_bytes()
            connection.send(("started",))
            with contextlib.suppress(EOFError, threading.BrokenBarrierError):
                _RankLoop(cast(Any, _InStep(barrier, 1)), connection, run_, cast(Any, group)).run_own()

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return SimpleNamespace(poll=lambda: None, wait=lambda seconds: threads[0].join(seconds), kill=lambda: None)

    group = SimpleNamespace(size=2, device=torch.device("cpu"))
    others = ranks.OtherRanks(run_, start)
    engine = DividedEngine(cast(Any, _InStep(barrier, 0)), others, cast(Any, group))
    for i in range(2):
        engine.submit(Request(i, [1 + i], GREEDY, RngKey(0, i, 0)))
    found = [c.request_id for _ in range(2) for c in engine.step()]
    assert sorted(found) == [0, 1]
    assert engine.stats.generated_tokens == 2
    others.close()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_nothing_runs_after_a_step_that_failed_in_its_middle(
    ranked: RankedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits in the sum at which this one failed. It would add a part of the next step there."""
    sums = iter(range(3))
    start_sum = ranked._group.start_sum

    def fails(*args: Any) -> Any:
        if next(sums) == 2:
            raise MemoryShortage("the memory ran out")
        return start_sum(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ranked._group, "start_sum", fails)
        with pytest.raises(MemoryShortage):
            answers(ranked)
    for call in (ranked.step, lambda: ranked.limit_length(None), lambda: answers(ranked)):
        with pytest.raises(ModelError, match="ranks can run no other one"):
            call()
    ranked._others._ranks[0].process.kill()  # The end of the engine would wait for it, and kill it then.


@pytest.mark.parametrize("call", ["step", "tokens_so_far"])
def test_an_answer_that_was_not_read_is_no_answer_to_the_next_call(call: str) -> None:
    """A signal comes while rank 0 waits for an answer."""
    sent = list[Any]()

    class Signal(BaseException):
        """Unlike KeyboardInterrupt, it does not end the tests if this one fails."""

    class Others:
        size, shared, failure = 2, staticmethod(contextlib.nullcontext), staticmethod(lambda: None)

        def send(self, *message: Any) -> None:
            self.send_to(1, *message)

        def send_to(self, number: int, *message: Any) -> None:
            sent.append(message[0])

        def receive(self, number: int) -> Any:
            raise Signal

    own: Any = SimpleNamespace(step=list, tokens_so_far=dict, submit=sent.append, limits=EngineLimits(9, 9))
    engine = DividedEngine(own, cast(Any, Others()), cast(Any, SimpleNamespace(size=2, device=torch.device("cpu"))))
    for i in range(2):
        engine.submit(Request(i, [1 + i], GREEDY, RngKey(0, i, 0)))
    with pytest.raises(Signal):
        getattr(engine, call)()
    sent.clear()
    for other in (engine.step, engine.tokens_so_far):
        with pytest.raises(ModelError, match="has failed"):
            other()
    assert not sent


def test_a_rank_is_killed_that_has_requests_of_its_own() -> None:
    ranks = ["engine.tensor_parallel=2", "engine.expert_parallel=on", "engine.dp_attention=on", ONE_LANE]
    engine = build_ranked(resolved(Path("random:tiny-experts"), *ranks), start=Forked)
    (rank,) = engine._others._ranks
    answers(engine)
    os.kill(rank.process.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match=r"rank 1 .* ended"):
        answers(engine)
    engine.close()


def test_a_rank_that_is_killed_is_an_error(ranked: RankedEngine) -> None:
    (rank,) = ranked._others._ranks
    answers(ranked)
    os.kill(rank.process.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match=r"rank 1 .* ended") as error:
        answers(ranked)
    assert "run the same command again" in str(error.value.hint)


def test_a_rank_that_is_killed_during_the_start_is_an_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Forked] = []

    def start(connection: Connection) -> Forked:
        started.append(Forked(connection))
        return started[0]

    def opened(*args: Any) -> Any:
        found = open_group(*args)
        os.kill(started[0].pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(ranks, "open_group", opened)
    with pytest.raises(ModelError, match=r"rank 1 .* ended"):
        build_ranked(resolved(tiny_model, "engine.tensor_parallel=2"), start=start)


def test_where_a_gpu_waits_for_a_killed_rank_the_process_ends_without_it(
    ranked: RankedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = ranked._others._ranks
    found: list[SpecbatchError] = []
    monkeypatch.setattr(ranks, "end_without_gpu", found.append)
    monkeypatch.setattr(ranked._group, "device", torch.device("cuda"))
    answers(ranked)
    os.kill(rank.process.pid, signal.SIGKILL)
    with pytest.raises(ModelError) as error:
        answers(ranked)
    assert found == [error.value]
    monkeypatch.setattr(ranked._group, "close", lambda: pytest.fail("it would wait for the GPU"))
    ranked.close()


@pytest.mark.wide
def test_a_process_that_ends_without_its_gpu_frees_nothing() -> None:
    code = """
import sys, time
from specbatch.setup.ranks.process import end_without_gpu
from specbatch.errors import SpecbatchError

class Waits:
    def __del__(self):
        print("freed", flush=True)
        time.sleep(60)

def step():
    group = Waits()
    raise SpecbatchError("a rank has ended")

try:
    step()
except SpecbatchError as error:
    end_without_gpu(error)
print("results", end="")
sys.exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (2, "results", "")


def test_a_rank_that_runs_other_calls_is_an_error(ranked: RankedEngine) -> None:
    ranked._others.send("step", 123)
    with pytest.raises(ModelError, match="rank 0 has 123 tokens"):
        answers(ranked)


@pytest.mark.parametrize("error", [ModelError("no such file", "look for it"), ValueError("wrong")], ids=repr)
def test_a_rank_with_an_error_ends_as_usual_where_nobody_reads_it(error: Exception) -> None:
    """Rank 0 has ended. Reading the run raises, as it does where a file of the model is gone."""

    class Raises:
        def __reduce__(self) -> Any:
            return _raise, (error,)

    mine, theirs = multiprocessing.Pipe()
    mine.send_bytes(pickle.dumps(Raises()))
    mine.close()
    rank = Forked(theirs)
    theirs.close()
    assert rank.wait(30) == (2 if isinstance(error, ModelError) else 3)


def _raise(error: Exception) -> None:
    raise error


def test_ranks_end_with_the_engine(tiny_model: Path) -> None:
    engine = build_ranked(resolved(tiny_model, "engine.tensor_parallel=2"), start=Forked)
    others = engine._others
    process, folder = psutil.Process(others._ranks[0].process.pid), others.meeting.parent
    assert folder.is_dir()
    del engine, others
    gc.collect()
    assert psutil.wait_procs([process], timeout=5)[1] == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["engine.tensor_parallel=5"], "too many for this model"),
        (["engine.tensor_parallel=0"], "engine.tensor_parallel"),
        (["model.target=random:qwen3-30b-a3b", "engine.tensor_parallel=33"], "too many for this model"),
    ],
)
def test_what_cannot_run_is_refused(tiny_model: Path, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tiny_model, *sets)


def test_commands_that_run_one_process_refuse_it(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="this runs one process"):
        build_engine(resolved(tiny_model, "engine.tensor_parallel=2"))


def command(model: Path, output: str, *sets: str) -> list[str]:
    more = [part for one in (f"model.target={model}", *SETS, *sets) for part in ("--set", one)]
    return [sys.executable, "-m", "specbatch", "generate", "d.jsonl", "-o", output, *more]


@pytest.mark.slow
def test_a_killed_job_leaves_nothing_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    """By the command: kill -9 of rank 0 and of rank 1, then the file of a run that nobody disturbed."""
    rows = [{"prompt_token_ids": [7, i % 100 + 5, 9], "max_tokens": 200, "ignore_eos": True} for i in range(60)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path)}
    ranks = "engine.tensor_parallel=2"
    options = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE}
    subprocess.run(command(tiny_model, "whole.jsonl", ranks), check=True, **options)
    for victim in (0, 1):
        with subprocess.Popen(command(tiny_model, "r.jsonl", ranks), **options) as job:
            end, partial = time.monotonic() + 60, tmp_path / "r.jsonl.partial"
            while time.monotonic() < end and (not partial.exists() or partial.stat().st_size < 5000 * (victim + 1)):
                time.sleep(0.02)
            (other,) = psutil.Process(job.pid).children()
            (job if victim == 0 else other).kill()
            assert job.wait(30) == (-9 if victim == 0 else 2)
            assert psutil.wait_procs([other], timeout=5)[1] == []
    subprocess.run(command(tiny_model, "r.jsonl", ranks), check=True, **options)
    assert (tmp_path / "r.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
