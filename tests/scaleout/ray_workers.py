"""Stub workers for tests with Ray. Their methods are called in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from specbatch.errors import RankDied, SpecbatchError


class StubWorker:
    def __init__(self) -> None:
        self.calls = 0

    def pid(self) -> int:
        return os.getpid()

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def facts(self) -> dict[str, object]:
        return {
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "folder": os.getcwd(),
            "torch": "torch" in sys.modules,
        }

    def echo(self, value: object) -> object:
        return value

    def rest(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def spin(self) -> None:
        while True:
            pass

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def leave(self, code: int) -> None:
        sys.exit(code)

    def refuse(self) -> None:
        raise SpecbatchError("no such model", "give another name")

    def lose_a_rank(self) -> None:
        raise RankDied("rank 1 of engine.tensor_parallel ended by signal 9", "run the same command again")

    def fail(self) -> None:
        raise ValueError("a mistake of ours")

    def unsendable(self) -> object:
        return threading.Lock()


class NeverMade:
    def __init__(self) -> None:
        raise SpecbatchError("no weights", None)
