"""One engine on several ranks: processes of this host that compute one model together (`models/linears/sharded.py`).

This process is rank 0. It reads rows and writes results. It starts the other ranks, and sends each of them every call
of its own engine. All ranks run the same scheduler on the same calls and the same tokens, so they agree on batches and
pages without asking. Only stop strings are looked for here alone, and the others get what was found. If ranks have
requests of their own (`DividedEngine`), a rank gets the calls that are about its requests, and all steps, each of which
it answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from specbatch.counts import EngineStats
from specbatch.engine.engine import Engine
from specbatch.engine.sequence import check_prompt
from specbatch.errors import ModelError, RankDied, SpecbatchError
from specbatch.parallel.group import Group
from specbatch.setup.build import StartClock, build
from specbatch.setup.ranks.process import RankStart, end_process, end_without_gpu, open_group
from specbatch.setup.resolve import ResolvedRun
from specbatch.types import Completion, EngineLimits, Request, StopCheck

_END_SECONDS = 5.0  # a rank ends when its connection does
_NOTICE_SECONDS = 2.0  # time from a broken connection to the end of the process at its other side
_LOOK_SECONDS = 0.2
_MORE_OF_ONE_PROMPT = 8  # requests that a rank can have more than another one, if they have one prompt
_IS_EXITING = 0x4  # PF_EXITING of Linux
_STUCK_SECONDS = 5.0  # time from a rank's end to the end of a process that waits for it


class RankProcess(Protocol):
    """The part of subprocess.Popen that is used. Tests fork instead, which is faster."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_process(connection: Connection) -> RankProcess:
    """A rank that reads `connection`. It looks for modules where this process does. Its standard output is not ours: a
    command's results may go there."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    code += "from specbatch.setup.ranks.process import main; main()"
    number = connection.fileno()
    command = [sys.executable, "-c", code, json.dumps(sys.path), str(number)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(number,))


@dataclass
class _Rank:
    number: int
    process: RankProcess
    connection: Connection


@dataclass
class _Calls:
    """The calls of this process, for the thread that watches it."""

    is_closing: threading.Event = field(default_factory=threading.Event)
    # time at which it began a step that needs the other ranks; None: it is in no such step
    shared_since: float | None = None


class OtherRanks:
    """All ranks but this one. `end` is called where a rank has ended and this process waits for it on a GPU, which
    nothing can interrupt: `stuck_seconds` later it is still in the same block `with others.shared()`."""

    def __init__(
        self,
        run: ResolvedRun,
        start: Callable[[Connection], RankProcess] = start_process,
        end: Callable[[SpecbatchError], None] = end_process,
        stuck_seconds: float = _STUCK_SECONDS,
    ) -> None:
        self.size = size = run.config.engine.tensor_parallel
        self._folder = Path(tempfile.mkdtemp(prefix="specbatch-ranks-"))
        self.meeting = self._folder / "meeting"
        self._ranks: list[_Rank] = []
        self._calls = _Calls()
        self._finalizer = weakref.finalize(self, _end, self._ranks, self._folder, self._calls)
        if run.on_cuda:
            # The thread has no reference to this object, which ends the ranks when it is gone.
            watched = (self._ranks, self._folder, self._calls, end, stuck_seconds)
            threading.Thread(target=_watch, args=watched, daemon=True).start()
        for number in range(1, size):
            mine, theirs = Pipe()
            self._ranks.append(_Rank(number, start(theirs), mine))
            theirs.close()
        # A message can be larger than a pipe holds, and a rank reads it once its modules are imported. So all of them
        # are running before the first one gets its message.
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # it has ended: that is found next
                # Not by `send`, which shares memory of tensors with processes that have this one's key.
                start_of_rank = RankStart(run, rank.number, str(self.meeting), os.getpid())
                rank.connection.send_bytes(pickle.dumps(start_of_rank))
        for rank in self._ranks:
            self._expect(rank, "started")

    def wait_ready(self) -> None:
        for rank in self._ranks:
            self._expect(rank, "ready")

    def send(self, *message: Any) -> None:
        for number in range(1, self.size):
            self.send_to(number, *message)

    def send_to(self, number: int, *message: Any) -> None:
        rank = self._ranks[number - 1]
        try:
            rank.connection.send(message)
        except OSError:
            raise self.failure() or _ended(rank.number, None, None) from None

    def receive(self, number: int) -> tuple[Any, ...]:
        """Wait for a rank's answer, and return it. Raise its error if it sends that, or has ended."""
        rank = self._ranks[number - 1]
        try:
            message: tuple[Any, ...] = rank.connection.recv()
        except (EOFError, OSError):
            raise self.failure() or _ended(number, None, None) from None
        if message[0] in ("failed", "died"):
            raise _ended(number, None, message)
        return message

    def failure(self) -> ModelError | None:
        """The error of a rank that has ended, if there is one."""
        end = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < end:
            for rank in self._ranks:
                if _has_ended(rank.process):
                    return _ended(rank.number, rank.process.poll(), _last_word(rank))
            time.sleep(0.01)
        return None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Mark a block that needs all ranks: it cannot succeed if one of them has ended. Outside of such blocks this
        process notices the end by its next message, and may do something else for any time. Blocks may be nested."""
        before = self._calls.shared_since
        self._calls.shared_since = time.monotonic() if before is None else before
        try:
            yield
        finally:
            self._calls.shared_since = before

    def close(self) -> None:
        self._finalizer()

    def _expect(self, rank: _Rank, word: str) -> None:
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            raise self.failure() or _ended(rank.number, None, None) from None
        if message != (word,):
            raise _ended(rank.number, rank.process.poll(), message)


def _last_word(rank: _Rank) -> Any:
    message = None
    try:
        while rank.connection.poll():  # it may have sent completions before
            message = rank.connection.recv()
    except (EOFError, OSError):
        pass
    return message


def _ended(number: int, code: int | None, message: Any) -> ModelError:
    """`message`: the last one of the rank, which can be ("failed", message, hint) of an error that users can mend, or
    ("died", reason) of another one."""
    name = message[0] if isinstance(message, tuple) else None
    if name == "failed":
        return ModelError(f"rank {number} of engine.tensor_parallel: {message[1]}", message[2])
    how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by signal {-code}"
    why = f": {message[1]}" if name == "died" else f" ended{how}"
    return RankDied(
        f"rank {number} of engine.tensor_parallel{why}",
        "finished rows are kept: run the same command again to go on",
    )


def _has_ended(process: RankProcess) -> bool:
    """Also where the process is ending: one that was killed is waited for until its GPU is free, which can last as long
    as that GPU waits for this one."""
    if process.poll() is not None:
        return True
    try:  # Linux has this file; field 9 holds the flags.
        flags = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return bool(flags & _IS_EXITING)


def _watch(
    ranks: Sequence[_Rank], folder: Path, calls: _Calls, end: Callable[[SpecbatchError], None], stuck_seconds: float
) -> None:
    found = None
    while not calls.is_closing.wait(_LOOK_SECONDS):
        ended = next((rank for rank in list(ranks) if _has_ended(rank.process)), None)
        if ended is None:
            continue
        now, since = time.monotonic(), calls.shared_since
        found = now if found is None else found
        if since is None or now - max(found, since) < stuck_seconds:
            continue
        error = _ended(ended.number, ended.process.poll(), _last_word(ended))
        for rank in ranks:
            rank.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        end(error)
        return


def _end(ranks: Sequence[_Rank], folder: Path, calls: _Calls) -> None:
    calls.is_closing.set()
    for rank in ranks:
        rank.connection.close()
    for rank in ranks:
        try:
            rank.process.wait(_END_SECONDS)
        except (subprocess.TimeoutExpired, TimeoutError):
            rank.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                rank.process.wait(_END_SECONDS)  # it may wait for this process's GPU
    shutil.rmtree(folder, ignore_errors=True)


class RankedEngine:
    """The engine of rank 0, as a `types.BatchEngine`."""

    def __init__(self, engine: Engine, others: OtherRanks, group: Group) -> None:
        self._engine, self._others, self._group = engine, others, group
        self._is_sound = True  # False: a call has failed in its middle

    @property
    def start_seconds(self) -> dict[str, float]:
        """The seconds of each part of the start, and of the parts of this rank's engine, which is one of them."""
        return self._engine.start_seconds

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def tokens_so_far(self) -> dict[int, int]:
        return self._engine.tokens_so_far()

    def limit_length(self, tokens: int | None) -> int:
        limit = self._engine.limit_length(tokens)
        self._send("limit_length", tokens)
        return limit

    def submit(self, request: Request) -> None:
        check = request.check_stop
        assert request.matcher is None or request.matcher_spec is not None, "the other ranks could make no matcher"
        self._engine.submit(request if check is None else replace(request, check_stop=self._sent(check)))
        # A matcher belongs to a process: the other ranks make theirs.
        sent = replace(request, check_stop=None, matcher=None)
        self._send("submit", sent, check is not None, self._engine.follows_newest)

    def step(self) -> list[Completion]:
        self._send("step", self._engine.stats.generated_tokens)
        return self._own_step()

    def _own_step(self) -> list[Completion]:
        """Run the step of this rank's engine, which the other ranks run, too."""
        try:
            with self._others.shared():
                return self._engine.step()
        except BaseException as error:
            self._is_sound = False
            # Gloo raises RuntimeError if the other side of a connection is gone.
            lost = self._others.failure() if isinstance(error, RuntimeError) else None
            if lost is None:
                raise
            self._ending_with(lost)
            raise lost from error

    def close(self) -> None:
        """End the ranks, and close this one's part of the group. The others' processes give theirs back as they end.

        After a step that failed, the group stays: the error's traceback can hold graphs, and the GPU can wait for a
        rank that has ended."""
        try:
            if self._is_sound:
                with self._others.shared():
                    self._engine.release_graphs()  # closing waits for the last one
                    self._group.close()
        finally:
            self._others.close()

    def _send(self, *message: Any) -> None:
        with self._talking():
            self._others.send(*message)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Mark a block that talks to other ranks, one of which may have ended. Raise ModelError if an earlier call has
        failed in its middle: the ranks would add parts of different steps, and answers would belong to other calls."""
        if not self._is_sound:
            raise ModelError(
                "a step of engine.tensor_parallel has failed, so its ranks can run no other one",
                "load the model again; finished rows are kept",
            )
        try:
            with self._others.shared():  # a connection that nobody reads any more takes only so much
                yield
        except BaseException as error:
            self._is_sound = False
            if isinstance(error, ModelError):
                self._ending_with(error)
            raise

    def _ending_with(self, lost: ModelError) -> None:
        """Have this process end without its GPU, if it has one: that may wait for a rank that has ended."""
        if self._group.device.type == "cuda":
            end_without_gpu(lost)

    def _sent(self, check: StopCheck) -> StopCheck:
        """Wrap `check`: the other ranks get each answer, in this order."""

        def answer(tokens: Sequence[int], start: int, num_new: int) -> int | None:
            keep = check(tokens, start, num_new)
            self._send("stop", keep)
            return keep

        return answer


class DividedEngine(RankedEngine):
    """The engine of rank 0 if each rank has requests of its own. It gives a request to the rank with the fewest, and
    returns the completions of all ranks."""

    def __init__(self, engine: Engine, others: OtherRanks, group: Group) -> None:
        super().__init__(engine, others, group)
        self._requests: list[set[int]] = [set() for _ in range(group.size)]  # the ids of each rank's requests
        self._stats = [EngineStats() for _ in range(group.size)]  # those that each rank has sent last
        self._last_prompt: Sequence[int] | None = None
        self._last_rank = 0

    @property
    def stats(self) -> EngineStats:
        """The sums over ranks. Ranks run together, so of seconds and rounds these are those of the busiest rank."""
        self._stats[0] = self._engine.stats
        return together(self._stats)

    @property
    def num_running(self) -> int:
        own = self._engine.num_running + self._engine.num_waiting
        return sum(map(len, self._requests)) - own + self._engine.num_running

    def tokens_so_far(self) -> dict[int, int]:
        found = self._engine.tokens_so_far()
        with self._talking():
            for number in range(1, self._others.size):
                if self._requests[number]:
                    self._others.send_to(number, "tokens_so_far")
                    found |= self._others.receive(number)[1]
        return found

    def submit(self, request: Request) -> None:
        number = self._rank_for(request)
        if number == 0:
            self._engine.submit(request)
        else:
            assert request.matcher is None or request.matcher_spec is not None, "the other rank could make no matcher"
            check_prompt(request.prompt_token_ids, self._engine.limits)
            with self._talking():
                # Checks and matchers belong to a process: the other rank makes its own.
                self._others.send_to(number, "submit", replace(request, check_stop=None, matcher=None))
        self._requests[number].add(request.request_id)

    def _rank_for(self, request: Request) -> int:
        """Choose the rank of a request. Completions of one prompt share its pages, so they are on one rank, unless that
        has many more requests."""
        if request.check_stop is not None and request.stop_spec is None:
            return 0  # the check cannot leave this process
        loads = list(map(len, self._requests))
        number, least = self._last_rank, min(loads)
        if request.prompt_token_ids is not self._last_prompt or loads[number] > least + _MORE_OF_ONE_PROMPT:
            number = loads.index(least)
        self._last_prompt, self._last_rank = request.prompt_token_ids, number
        return number

    def step(self) -> list[Completion]:
        """Run a step on all ranks, and wait for what each of them has finished. A connection holds less than the
        completions of many requests, so a rank could not begin the next step before they are read."""
        if not any(self._requests):
            return []
        self._send("step")
        done = self._own_step()
        self._requests[0].difference_update(completion.request_id for completion in done)
        with self._talking():
            for number in range(1, self._others.size):
                _, of_rank, stats = self._others.receive(number)
                self._requests[number].difference_update(completion.request_id for completion in of_rank)
                self._stats[number] = stats or self._stats[number]
                done = done + of_rank
        return done


def together(of_ranks: list[EngineStats]) -> EngineStats:
    """Add the counters of ranks that ran at the same time. Of what all do at once, the largest number counts."""
    total = EngineStats()
    for stats in of_ranks:
        total.add(stats)
    for item in fields(EngineStats):
        if item.name in ("rounds", "late_graphs") or item.name.endswith("seconds"):
            setattr(total, item.name, max(getattr(stats, item.name) for stats in of_ranks))
    return total


def build_ranked(
    run: ResolvedRun,
    on_progress: Callable[[str], None] = lambda progress: None,
    start: Callable[[Connection], RankProcess] = start_process,
) -> RankedEngine:
    """Build the engine (see `build_engine`) on `engine.tensor_parallel` ranks. The other ranks end with the engine, or
    with this process."""
    size = run.config.engine.tensor_parallel
    on_progress(f"starting {size - 1} more ranks")
    clock = StartClock()
    others, is_built = OtherRanks(run, start), False
    clock.passed("ranks started")
    try:
        with others.shared():
            own, group = open_group(run, 0, str(others.meeting))
            clock.passed("ranks connected")
            engine = build(own, on_progress, group).engine
            is_built = True
            clock.passed("engine built")
        others.wait_ready()
        clock.passed("other ranks ready")
    except BaseException as error:
        lost = error if is_built and isinstance(error, ModelError) else None
        if isinstance(error, RuntimeError):  # Gloo or NCCL raises it if the other side of a connection is gone.
            lost = others.failure()
        if lost is not None and run.on_cuda:
            end_without_gpu(lost)
        others.close()
        if lost is None or lost is error:
            raise
        raise lost from error
    engine.start_seconds = clock.seconds | engine.start_seconds
    if run.on_cuda:
        run.notes.append(f"engine.tensor_parallel: {size} ranks, {clock.in_words()}")
    made = DividedEngine if run.division == "requests" else RankedEngine
    return made(engine, others, group)
