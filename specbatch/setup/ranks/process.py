"""The process of a rank other than 0, and the exit of a process whose GPU waits for a dead rank. The rank repeats each
call of rank 0's engine (`ranked_engine.py`), or runs requests of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from specbatch.engine.engine import Engine
from specbatch.errors import USAGE_ERROR, SpecbatchError
from specbatch.grammar.compiler import GrammarCompiler, grammar_threads
from specbatch.parallel.algorithms import DTYPES
from specbatch.parallel.cuda import CudaGroup, TorchCollectives
from specbatch.parallel.gloo import GlooGroup
from specbatch.parallel.group import Group
from specbatch.setup.build import build
from specbatch.setup.resolve import ResolvedRun
from specbatch.types import Request, StopCheck

_LOOK_SECONDS = 0.5
# Rank 0 decides what a signal to all processes of a job means.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RankStart:
    """The first message to a rank. `meeting`: a file by which the ranks find each other."""

    run: ResolvedRun  # its files are opened again
    rank: int
    meeting: str
    parent: int  # process id


def open_group(run: ResolvedRun, rank: int, meeting: str) -> tuple[ResolvedRun, Group]:
    """The run as this rank builds it, and the ranks. On CUDA a rank has the GPU of its number. Raises RuntimeError
    where another rank does not come."""
    size = run.config.engine.tensor_parallel
    if not run.on_cuda:
        return run, GlooGroup(rank, size, meeting)
    device = torch.device("cuda", rank)
    collectives = TorchCollectives(rank, size, meeting, device)
    host = GlooGroup(rank, size, f"{meeting} of hosts") if run.division == "requests" else None
    travels = run.division == "requests" and run.dtype in DTYPES
    lane_tokens = -(-run.engine.prefill_chunk_tokens // 2) if travels else 0
    group = CudaGroup(
        rank,
        size,
        device,
        collectives,
        fixed_order=run.config.engine.deterministic,
        two_passes=run.engine.lanes is not None,
        dispatch_bytes=lane_tokens * run.target.config.hidden_size * run.dtype.itemsize,
        host=host,
    )
    return replace(run, device=device), group


def main() -> None:
    run_rank(Connection(int(sys.argv[2])))


def run_rank(connection: Connection) -> None:
    """Until the connection ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        start: RankStart = connection.recv()
        _end_with(start.parent)
        connection.send(("started",))
        run, group = open_group(start.run, start.rank, start.meeting)
        engine = build(run, group=group).engine
        connection.send(("ready",))
        rank = _RankLoop(engine, connection, run, group)
        if run.division == "requests":
            rank.run_own()
        else:
            rank.repeat()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _leave(0)  # rank 0 has ended
    except SpecbatchError as error:
        with contextlib.suppress(OSError):  # rank 0 has ended, too
            connection.send(("failed", error.message, error.hint))
        _leave(2)
    except Exception as error:
        with contextlib.suppress(OSError):  # rank 0 has ended: that was the error
            connection.send(("died", f"{type(error).__name__}: {error}"))
            traceback.print_exc()
        _leave(3)


def _compiler(run: ResolvedRun, group: Group, **bounds: int) -> GrammarCompiler:
    """Without a bound of time, in which rank 0 has compiled the same."""
    return GrammarCompiler(run.tokenizer, grammar_threads(group.size), max_seconds=None, **bounds)


def _leave(code: int) -> None:
    """Exit this process. If it uses a GPU, exit at once: NCCL, and a GPU in the middle of a sum, would wait for the
    other ranks."""
    if torch.cuda.is_initialized():
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


class _RankLoop:
    """The loop of a rank over the messages of rank 0."""

    def __init__(self, engine: Engine, connection: Connection, run: ResolvedRun, group: Group) -> None:
        self._engine, self._connection, self._tokenizer = engine, connection, run.tokenizer
        bounds = {} if run.division == "requests" else {"max_automata": sys.maxsize}  # Rank 0 alone has decided.
        self._grammars = _compiler(run, group, **bounds)
        self._of_host = _compiler(run, group, max_automata=0)  # It compiles what the host follows.
        self._texts: Any = None  # makes checks for stop strings; made for the first one

    def repeat(self) -> None:
        """Repeat each call of rank 0's engine."""
        while True:
            message: tuple[Any, ...] = self._connection.recv()
            if message[0] == "submit":
                self._repeat_submit(*message[1:])
            elif message[0] == "step":
                mine = self._engine.stats.generated_tokens
                assert mine == message[1], f"rank 0 has {message[1]} tokens, and this rank {mine}"
                self._engine.step()
            else:
                self._engine.limit_length(message[1])

    def run_own(self) -> None:
        """Run requests that only this rank has, in step with the other ranks. Answer each step with what has finished,
        and with the counters if something has."""
        engine = self._engine
        while True:
            message: tuple[Any, ...] = self._connection.recv()
            if message[0] == "submit":
                request: Request = message[1]
                self._submit(request, self._check(request), self._grammars)
            elif message[0] == "step":
                done = engine.step()
                self._connection.send(("done", done, engine.stats if done else None))
            elif message[0] == "tokens_so_far":
                self._connection.send(("tokens_so_far", engine.tokens_so_far()))
            else:
                engine.limit_length(message[1])

    def _repeat_submit(self, request: Request, has_check: bool, is_followed: bool) -> None:
        """Submit a request as rank 0 did. `is_followed`: its device follows the request's grammar. Whether there is an
        automaton depends on time, and on the grammars before it, so that rank 0 alone decides."""
        self._submit(request, self._answer if has_check else None, self._grammars if is_followed else self._of_host)
        assert self._engine.follows_newest == is_followed, (
            "rank 0 has an automaton of a grammar, and this rank has none"
        )

    def _submit(self, request: Request, check: StopCheck | None, compiler: GrammarCompiler) -> None:
        spec = request.matcher_spec
        matcher = None if spec is None else spec.make(compiler)
        self._engine.submit(replace(request, check_stop=check, matcher=matcher))

    def _answer(self, tokens: Sequence[int], start: int, num_new: int) -> int | None:
        """Return what rank 0 has found in these tokens."""
        name, keep = self._connection.recv()
        assert name == "stop", f"this rank looks for a stop string, and rank 0 calls {name}"
        return keep  # type: ignore[no-any-return]

    def _check(self, request: Request) -> StopCheck | None:
        if request.stop_spec is None:
            return None
        if self._texts is None:
            self._texts = request.stop_spec.texts(self._tokenizer)
        check: StopCheck | None = self._texts.stop_check(request.params)
        return check


def _end_with(parent: int) -> None:
    """A rank that waits for others in the middle of a step does not see that its connection ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_process(error: SpecbatchError) -> None:
    """Exit now: a thread waits for the GPU, and for a dead rank. Finished rows are kept, as they are when a process is
    killed."""
    hint = "" if error.hint is None else f"hint: {error.hint}\n"
    os.write(2, f"error: {error.message}\n{hint}".encode())
    os._exit(USAGE_ERROR)


def end_without_gpu(error: SpecbatchError) -> None:
    """Exit when the program is done, before the interpreter frees objects: NCCL's wait for the GPU, and it for a dead
    rank. Nothing can interrupt that wait. Until then the frames of `error`, which came in the middle of a call, keep
    those objects. The operating system frees the memory."""
    atexit.register(_exit_flushed, error)


def _exit_flushed(kept: SpecbatchError) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(USAGE_ERROR)
