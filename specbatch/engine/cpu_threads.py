"""The number of threads that compute on CPU cores which other processes use too.

An OpenMP barrier ends when its slowest thread arrives. On a busy core that thread waits for its turn while the others
spin. One thread for each core that is free avoids both. So the number of threads follows what other processes leave:
down at once, up after a few quiet seconds.

Only numbers of threads that give the same bits are used: `models/linears/packed.py` checks the matrix
products, `agreeing` the attention. What the user set (OMP_NUM_THREADS, MKL_NUM_THREADS) is never changed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from specbatch.attention.cpu import TorchAttention
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.linears.packed import thread_counts
from specbatch.torch_threads import use_threads

_WINDOW_SECONDS = 1.0
_QUIET_WINDOWS = 3  # windows with room for more threads, before their number goes up
_TOLERANCE = 0.45  # a core counts as free while other processes take less than about half of it
_SET_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds since some fixed time."""

    wall: float
    idle: float  # summed over the cores that this process may use
    own: float  # CPU time of this process


def read_cpu() -> CpuReading:
    """Raises psutil.Error or OSError where the system does not say: in some sandboxes no core is ever idle."""
    allowed = _allowed_cores()
    cores = psutil.cpu_times(percpu=True)
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for number, core in enumerate(cores) if number in allowed)
    if not idle:
        raise OSError("the idle time of these cores is not counted")
    return CpuReading(time.perf_counter(), idle, time.process_time())


class ThreadGovernor:
    """Sets the number of threads for torch. `update` is called often; it looks at the machine once a second.

    `counts`: the numbers to choose from. `quota`: cores that the control group allows. The rest are seams for tests.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        quota: float = math.inf,
        *,
        clock: Callable[[], float] = time.perf_counter,
        read: Callable[[], CpuReading] = read_cpu,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._counts = sorted(counts)
        self._quota = quota
        self._clock = clock
        self._read = read
        self._set_threads = set_threads
        self._last = read()
        self._quiet = 0
        self.current = self._counts[-1]

    def update(self) -> None:
        """Follow what other processes took since the last look."""
        if self._clock() - self._last.wall < _WINDOW_SECONDS:
            return
        last = self._last
        try:
            self._last = now = self._read()
        except (psutil.Error, OSError):  # too many open files, say: no reason to end a job
            return
        # Cores that were idle, and cores that this process had.
        free = (now.idle - last.idle + now.own - last.own) / (now.wall - last.wall)
        wanted = max((n for n in self._counts if n <= min(free, self._quota) + _TOLERANCE), default=self._counts[0])
        self._quiet = self._quiet + 1 if wanted > self.current else 0
        if wanted < self.current or self._quiet >= _QUIET_WINDOWS:
            self._use(wanted)

    def rest(self) -> None:
        """All threads again: another engine may be built, and it counts what there is."""
        if self.current != self._counts[-1]:
            self._use(self._counts[-1])

    def _use(self, count: int) -> None:
        self.current, self._quiet = count, 0
        self._set_threads(count)


def limit_threads(environment: Mapping[str, str] = os.environ) -> None:
    """At most as many threads as cores that this process may use, unless the user set their number."""
    if not any(environment.get(name) for name in _SET_BY_USER):
        cores = max(1, math.ceil(min(len(_allowed_cores()), cpu_quota())))
        torch.set_num_threads(min(torch.get_num_threads(), cores))


def new_governor(configs: Sequence[ModelConfig], environment: Mapping[str, str] = os.environ) -> ThreadGovernor | None:
    """Make the governor for models whose GEMMs are packed. Return None if the number of threads must not change: the
    user set it, or the system does not say what other processes take, or no other number gives the same bits."""
    counts = thread_counts(torch.get_num_threads())
    if any(environment.get(name) for name in _SET_BY_USER) or len(counts) == 1:
        return None
    counts = agreeing(counts, lambda: [out for config in configs for out in attention_sample(config)])
    try:
        return ThreadGovernor(counts, cpu_quota()) if len(counts) > 1 else None
    except (psutil.Error, OSError, NotImplementedError):
        return None


def agreeing(counts: tuple[int, ...], compute: Callable[[], list[Tensor]]) -> tuple[int, ...]:
    """Those of `counts`, the first included, under which `compute` gives the same bits as under the first."""
    results = []
    for count in counts:
        with use_threads(count):
            results.append(compute())
    return tuple(n for n, result in zip(counts, results, strict=True) if all(map(torch.equal, result, results[0])))


def attention_sample(config: ModelConfig) -> list[Tensor]:
    """Attention over random keys: a prompt, a decode step and a chain to verify."""
    backend = TorchAttention(config.num_heads, config.num_kv_heads, config.head_dim, _CPU)
    page, tokens = 16, 320  # more than one of attention's chunks of keys
    cache = KVCache(1, tokens, config.num_kv_heads, config.head_dim, torch.float32, _CPU)
    generator = torch.Generator().manual_seed(0)
    q_THD, k_THD, v_THD = (
        torch.randn(tokens, heads, config.head_dim, generator=generator)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    index, table = torch.arange(tokens), torch.arange(tokens // page, dtype=torch.int32)[None]
    cache.write(0, index, k_THD, v_THD)
    results = []
    for start, count in ((0, tokens), (tokens - 1, 1), (tokens - 8, 8)):
        new = index[start : start + count]
        starts, ends = torch.tensor([start], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
        plan = backend.plan(PagedBatch(new, new, table, page, starts, ends, count))
        results.append(backend.attend(plan, q_THD[:count], cache, 0, None))
    return results


def cpu_quota(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process's control group allows (cgroup v2); infinity without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup, or "max"
        return math.inf


def usable_cores() -> float:
    """Return the number of cores that this process may use. It need not be a whole number."""
    return min(len(_allowed_cores()), cpu_quota())


def _allowed_cores() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return frozenset(range(os.cpu_count() or 1))
