"""The number of threads on CPU: it follows what other processes leave, and no bit depends on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from specbatch.draft.shape import DraftShape
from specbatch.engine import cpu_threads
from specbatch.engine.cpu_threads import (
    CpuReading,
    ThreadGovernor,
    agreeing,
    attention_sample,
    cpu_quota,
    limit_threads,
    new_governor,
    read_cpu,
)
from specbatch.models.config import ModelConfig
from specbatch.models.linears.packed import PackedGatedLinear, PackedLinear, thread_counts
from specbatch.startup import bound_spinning
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.oracle.sampling import distribution
from tests.tiny_models import random_prompts, run, tiny_config, tiny_engine


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """Cores of which other processes take some; this process uses what is left, up to its threads."""

    def __init__(self, cores: int) -> None:
        self.cores, self.others, self.threads = cores, 0.0, cores
        self.wall = self.idle = self.own = 0.0
        self.looks = 0

    def read(self) -> CpuReading:
        self.looks += 1
        return CpuReading(self.wall, self.idle, self.own)

    def set_threads(self, count: int) -> None:
        self.threads = count

    def governor(self, counts: tuple[int, ...], quota: float = math.inf) -> ThreadGovernor:
        return ThreadGovernor(counts, quota, clock=lambda: self.wall, read=self.read, set_threads=self.set_threads)

    def run(self, governor: ThreadGovernor, seconds: float) -> int:
        """Threads after `seconds` of steps of 0.1 s."""
        for _ in range(round(seconds * 10)):
            wanted = self.threads + self.others
            share = min(1.0, self.cores / wanted)  # the scheduler is fair
            own = self.threads * share
            self.wall += 0.1
            self.own += own * 0.1
            self.idle += (self.cores - own - self.others * share) * 0.1
            governor.update()
        return self.threads


def test_a_quiet_machine_keeps_all_threads_and_is_looked_at_once_a_second() -> None:
    machine = Machine(8)
    assert machine.run(machine.governor(thread_counts(8)), 20) == 8
    assert machine.looks <= 21


@pytest.mark.parametrize(
    ("cores", "others", "threads"), [(2, 1, 1), (2, 2, 1), (2, 6, 1), (2, 0.4, 2), (8, 8, 2), (8, 3, 4), (8, 40, 1)]
)
def test_threads_follow_what_others_take(cores: int, others: float, threads: int) -> None:
    machine = Machine(cores)
    governor = machine.governor(thread_counts(cores))
    machine.others = others
    assert machine.run(governor, 12) == threads
    machine.others = 0
    assert machine.run(governor, 2) == threads, "a moment of quiet is not enough"
    assert machine.run(governor, 15) == cores


def test_quota_of_the_control_group(tmp_path: Path) -> None:
    machine = Machine(8)
    assert machine.run(machine.governor(thread_counts(8), quota=2.0), 3) == 2
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) == math.inf
    assert cpu_quota(tmp_path / "none") == math.inf


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_set_is_not_changed(name: str) -> None:
    torch.set_num_threads(64)
    limit_threads({name: "64"})
    assert torch.get_num_threads() == 64
    assert new_governor([tiny_config()], {name: "64"}) is None
    limit_threads({})
    assert torch.get_num_threads() <= 64
    torch.set_num_threads(1)
    assert new_governor([tiny_config()], {}) is None, "one thread leaves nothing to choose"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_spinning_is_bounded_unless_the_user_said_how(given: dict[str, str], spins: str | None) -> None:
    environment = dict(given)
    bound_spinning(environment)
    assert environment.get("GOMP_SPINCOUNT") == spins


def test_this_machine_can_be_read() -> None:
    first, second = read_cpu(), read_cpu()
    assert second.wall > first.wall
    assert second.idle >= first.idle
    assert second.own >= first.own


def test_a_system_that_does_not_count_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some sandboxes. This process would seem to have just the cores that it uses, and never more."""
    times = psutil.cpu_times(percpu=True)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [core._replace(idle=0.0, iowait=0.0) for core in times])
    torch.set_num_threads(4)
    assert new_governor([tiny_config()], {}) is None


def test_a_machine_that_cannot_be_read_for_a_while_keeps_its_threads() -> None:
    machine = Machine(8)

    def read() -> CpuReading:
        if 5 < machine.wall < 15:
            raise OSError(24, "Too many open files")
        return machine.read()

    governor = ThreadGovernor(thread_counts(8), clock=lambda: machine.wall, read=read, set_threads=machine.set_threads)
    machine.others = 8
    threads = machine.run(governor, 4)
    assert threads < 8
    machine.others = 0
    assert machine.run(governor, 9) == threads
    assert machine.run(governor, 20) == 8


def test_an_idle_engine_leaves_all_threads_to_the_next() -> None:
    """An engine that is built in the same process counts them."""
    machine = Machine(2)
    governor = machine.governor(thread_counts(2))
    machine.others = 2
    assert machine.run(governor, 3) == 1
    engine = tiny_engine("none", dtype=torch.float32, num_pages=256, threads=governor)
    prompts = random_prompts(2)
    run(engine, prompts[:1], SamplingParams(max_tokens=2))
    assert machine.threads == governor.current == 2
    assert machine.run(governor, 3) == 1, "it goes on looking"
    engine.submit(Request(0, prompts[0], SamplingParams(max_tokens=3), RngKey(0, 0, 0)))
    engine.step()
    assert machine.threads == 1, "not while it runs"


def test_counts() -> None:
    assert thread_counts(1) == (1,)
    assert thread_counts(2) == (2, 1)
    assert thread_counts(4) == (4, 3, 2, 1)
    assert thread_counts(16) == (16, 12, 8, 4, 2, 1)


def test_counts_that_give_other_bits_are_not_used() -> None:
    config = tiny_config()

    def sample() -> list[torch.Tensor]:
        return [x * (2 if torch.get_num_threads() == 2 else 1) for x in attention_sample(config)]

    assert agreeing((3, 2, 1), lambda: attention_sample(config)) == (3, 2, 1)
    assert agreeing((3, 2, 1), sample) == (3, 1)


def test_every_model_is_asked_for_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled chain's text depends on the bits of the draft, too."""
    target, draft = tiny_config(), tiny_config(hidden=64)

    def sample(config: ModelConfig) -> list[torch.Tensor]:
        return [torch.ones(1) * (torch.get_num_threads() if config is draft else 1)]

    monkeypatch.setattr(cpu_threads, "attention_sample", sample)
    torch.set_num_threads(2)
    assert new_governor([target], {}) is not None
    assert new_governor([target, draft], {}) is None


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_probabilities_have_the_same_bits_with_every_number_of_threads(vocab: int) -> None:
    """Torch adds up so many numbers in as many parts as there are threads."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3
    for params in (SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)):
        results = []
        for count in (4, 3, 2, 1):
            torch.set_num_threads(count)
            results.append((distribution(logits, params), torch.log_softmax(logits, dim=-1)))
        for p, logprobs in results:
            assert torch.equal(p, results[0][0])
            assert torch.equal(logprobs, results[0][1])


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 48), (576, 960), (1536, 576), (896, 4864)])
def test_products_have_the_same_bits_with_every_number_of_threads(inputs: int, outputs: int) -> None:
    torch.set_num_threads(4)
    generator = torch.Generator().manual_seed(0)
    weight, other = (torch.randn(outputs, inputs, generator=generator) * 0.02 for _ in range(2))
    linear, gated = PackedLinear(weight), PackedGatedLinear(weight, other, None, "silu")
    x = torch.randn(200, inputs, generator=generator)
    whole, whole_gated = linear(x), gated(x)
    for count in (3, 2, 1):
        torch.set_num_threads(count)
        for rows in (1, 5, 16, 33, 200):
            assert torch.equal(linear(x[:rows]), whole[:rows]), f"{rows} rows, {count} threads"
            assert torch.equal(gated(x[:rows]), whole_gated[:rows]), f"{rows} rows, {count} threads"


class Changing:
    """In place of a governor: another number of threads at each step."""

    def __init__(self) -> None:
        self.steps = 0

    def update(self) -> None:
        self.steps += 1
        torch.set_num_threads(1 + self.steps % 3)

    def rest(self) -> None:
        pass


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("none", None),
        pytest.param("ngram", DraftShape(3, 1, 4), marks=pytest.mark.slow),
        pytest.param("eagle3", DraftShape(3, 2, 6), marks=pytest.mark.wide),
    ],
)
def test_engine_has_the_same_bits_while_threads_change(method: str, shape: DraftShape | None) -> None:
    params = SamplingParams(max_tokens=24, logprobs=2)
    prompts = random_prompts(6, shared=10)

    def logprobs(threads: Changing | None) -> list[object]:
        torch.set_num_threads(4)
        engine = tiny_engine(method, shape, dtype=torch.float32, num_pages=256, threads=threads)  # type: ignore[arg-type]
        done: list[Completion] = run(engine, prompts, params)
        return [(c.token_ids, c.logprobs) for c in done]

    changing = Changing()
    assert logprobs(changing) == logprobs(None)
    assert changing.steps > 10
