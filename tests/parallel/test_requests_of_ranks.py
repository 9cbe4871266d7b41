"""Ranks with requests of their own, whose tokens travel to the ranks of their experts, answer as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.parallel.group import Group
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.engine import test_constrained as constrained
from tests.engine.graphs import Replays
from tests.grammar.tiny_tokenizer import END
from tests.parallel.test_cuda_group import cuda_group
from tests.parallel.threads import ThreadGroup, on_ranks
from tests.tiny_models import random_prompts, run, run_requests, tiny_device_engine, tiny_engine

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 3, 8)
GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_k=30, top_p=0.95, seed=5, logprobs=2)
PROMPTS = random_prompts(3, shared=17) + random_prompts(2, seed=1) + [[5, 6, 7, 8, 9] * 4]
ENGINES = {"CPU": tiny_engine, "fixed shapes": tiny_device_engine}
SETTINGS: dict[str, Any] = {"num_pages": 256, "family": "qwen3-moe", "num_layers": 3}


def requests(params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Request]:
    return [Request(i, prompt, params, RngKey(params.seed or 0, i, 0)) for i, prompt in enumerate(prompts)]


def outputs(completions: list[Completion]) -> list[Any]:
    return [
        (c.token_ids, str(c.finish_reason), c.speculation, c.logprobs is None, c.prompt_logprobs is None)
        for c in completions
    ]


def of_ranks(
    size: int,
    make: Callable[[Group], Engine],
    wanted: Callable[[], list[Request]],
    owner: Callable[[int], int],
) -> tuple[list[Completion], list[Engine]]:
    """Return the completions of all ranks, and their engines. `wanted`: makes the requests. `owner`: their ranks."""

    def work(group: Group) -> tuple[dict[int, Completion], Engine]:
        engine = make(group)
        own = [request for request in wanted() if owner(request.request_id) == group.rank]
        for request in own:
            engine.submit(request)
        done: dict[int, Completion] = {}
        while any(left for (left,) in group.agree([len(own) - len(done)])):
            done |= {completion.request_id: completion for completion in engine.step()}
            engine.check_integrity()
        return done, engine

    results = on_ranks(size, work)
    done = {i: completion for found, _ in results for i, completion in found.items()}
    return [done[i] for i in sorted(done)], [engine for _, engine in results]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.wide)])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    ("method", "shape", "params"),
    [
        ("none", None, GREEDY),
        ("none", None, SAMPLED),
        ("ngram", CHAIN, GREEDY),
        ("draft_model", TREE, SAMPLED),
        ("draft_model", CHAIN, SAMPLED),
        ("eagle", CHAIN, GREEDY),
        ("eagle3", TREE, SAMPLED),
    ],
)
def test_texts_and_rounds_are_those_of_one_process(
    method: str, shape: DraftShape | None, params: SamplingParams, kind: str, size: int
) -> None:
    """The dtype is float64, where no sum in another order moves a token. Rank 1 has two thirds of the requests."""
    alone = run(ENGINES[kind](method, shape, **SETTINGS), PROMPTS, params)

    def make(group: Group) -> Engine:
        return ENGINES[kind](method, shape, group=group, division="requests", **SETTINGS)

    found, engines = of_ranks(size, make, lambda: requests(params), lambda i: 1 if i % 3 else i % size)
    assert outputs(found) == outputs(alone)
    assert all(engine.num_running == engine.num_waiting == 0 for engine in engines)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": 18},
        {"prefill_chunk_tokens": 3, "prefix_cache": False},
        {"max_batch_size": 1, "page_size": 1},
        {"max_batch_size": 12, "shape": ByBatch((2, 5), (CHAIN, TREE))},
        {"min_lane": 1, "max_batch_size": 12},
        {"family": "flex-olmo", "num_layers": 2},
        {"family": "glm4-moe", "num_layers": 3},
    ],
    ids=["preempted", "small chunks", "alone", "schedule", "lanes", "norms after", "shared experts"],
)
def test_scheduling_changes_nothing(settings: dict[str, Any], kind: str) -> None:
    settings = {"num_pages": 256, **SETTINGS, **settings}
    shape = settings.pop("shape", TREE)
    single = {name: value for name, value in settings.items() if name != "min_lane"}
    params = SAMPLED if shape == TREE else GREEDY  # a sampled chain depends on its drafts
    alone = run(ENGINES[kind]("draft_model", shape, **single), PROMPTS, params)

    def make(group: Group) -> Engine:
        return ENGINES[kind]("draft_model", shape, group=group, division="requests", **settings)

    found, engines = of_ranks(2, make, lambda: requests(params), lambda i: int(i > 3))
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    assert any(engine.stats.preemptions for engine in engines) == (settings["num_pages"] == 18)


def test_tokens_are_written_to_the_place_from_which_they_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two lanes. A rank whose tokens are filled up to the number of another rank has no place for them: what travels
    from there begins at another address."""
    places, addresses = list[Tensor](), set[int]()

    def place(group: Group, like: Tensor) -> Tensor:
        places.append(torch.full_like(like, torch.nan))
        return places[-1]

    def dispatch(group: ThreadGroup, x: Tensor) -> Callable[[], Tensor]:
        addresses.add(x.data_ptr())
        return group.start_gather(x)

    monkeypatch.setattr(ThreadGroup, "dispatch_place", place)
    monkeypatch.setattr(ThreadGroup, "start_dispatch", dispatch)
    alone = run(tiny_engine(**SETTINGS), PROMPTS, GREEDY)

    def make(group: Group) -> Engine:
        return tiny_engine(group=group, division="requests", min_lane=1, max_batch_size=12, **SETTINGS)

    found, _ = of_ranks(2, make, lambda: requests(GREEDY), lambda i: int(i > 3))
    assert outputs(found) == outputs(alone)
    assert len(places) > 40
    assert all(place.isfinite().all() for place in places)
    assert {place.data_ptr() for place in places} <= addresses, "tokens in a place did not travel from there"


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    "special",
    [
        {"temperature": 0.8, "seed": 5},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"allowed_token_ids": (3, 4, 5, 50)},
        {"logit_bias": {7: 3.0}, "frequency_penalty": 0.5},
    ],
    ids=lambda special: next(iter(special)),
)
def test_requests_of_one_rank_that_want_more(special: dict[str, Any], kind: str) -> None:
    """The other rank's requests want less, and those of a third rank end before."""

    def wanted() -> list[Request]:
        made = []
        for i, request in enumerate(requests(GREEDY)):
            more = {"max_tokens": 3} if i % 3 == 2 else special if i % 3 else {}
            made.append(replace(request, params=replace(request.params, **more)))
        return made

    alone = run_requests(ENGINES[kind]("draft_model", CHAIN, **SETTINGS), wanted())

    def make(group: Group) -> Engine:
        return ENGINES[kind]("draft_model", CHAIN, group=group, division="requests", **SETTINGS)

    found, _ = of_ranks(3, make, wanted, lambda i: i % 3)
    assert outputs(found) == outputs(alone)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("method", ["none", pytest.param("draft_model-chain", marks=pytest.mark.wide), "eagle3-tree"])
@pytest.mark.parametrize(
    "owner",
    [
        lambda i: i % 3,
        pytest.param(lambda i: int(constrained.ROWS[i] == "none"), marks=pytest.mark.wide),
    ],
    ids=["in turn", "with grammars or without"],
)
def test_grammars_of_one_rank(owner: Callable[[int], int], method: str, kind: str) -> None:
    """The other ranks run the same kinds of rounds. With fixed shapes plain decoding has room for forced tokens."""
    case = constrained.SHAPES[method]
    settings = {**SETTINGS, "eos": (END,)}

    def wanted() -> list[Request]:
        return constrained.requests((0.0, 0.9))

    alone = run_requests(ENGINES[kind](*case, **settings), wanted())

    def make(group: Group) -> Engine:
        return ENGINES[kind](*case, group=group, division="requests", **settings)

    found, engines = of_ranks(3, make, wanted, owner)
    assert constrained.texts(found) == constrained.texts(alone)
    assert engines[0].stats.grammar.masks > 0


def test_experts_are_counted_once() -> None:
    """Each rank counts the choices of its own tokens."""
    alone = tiny_engine("none", None, **SETTINGS)
    run(alone, PROMPTS, GREEDY)

    def make(group: Group) -> Engine:
        return tiny_engine("none", None, group=group, division="requests", **SETTINGS)

    _, engines = of_ranks(2, make, lambda: requests(GREEDY), lambda i: i % 2)
    first, second = (engine.stats.experts.load for engine in engines)
    both = [[a + b for a, b in zip(*layers, strict=True)] for layers in zip(first, second, strict=True)]
    assert both == alone.stats.experts.load
    assert sum(map(sum, first)) > 0


@pytest.mark.parametrize("method", ["none", "draft_model-tree"])
def test_ranks_capture_and_replay_the_same_graphs(method: str) -> None:
    """Ranks use the groups of GPUs, whose collectives are replaced. Requests of one rank have grammars or are
    sampled."""
    case, made = constrained.SHAPES[method], list[list[str]]()
    settings = {**SETTINGS, "eos": (END,)}

    def wanted() -> list[Request]:
        more = requests(GREEDY, random_prompts(12, seed=3))
        return [*constrained.requests((0.0, 0.9)), *(replace(one, request_id=100 + one.request_id) for one in more)]

    alone = run_requests(tiny_device_engine(*case, **settings), wanted())

    def make(group: Group) -> Engine:
        mine, fake = cuda_group(group, host=group)
        engine = tiny_device_engine(*case, group=mine, division="requests", **settings)
        engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
        made.append(fake.calls)
        return engine

    found, engines = of_ranks(2, make, wanted, lambda i: int(i >= 100))
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    first, second = (engine.executor.runner.tried for engine in engines)  # type: ignore[union-attr]
    assert first == second, "in the same order"
    assert len(first) > 3
    assert set(made[0]) == {"gather", "exchange"}, "in float64; the order of calls is that of all ranks"


@pytest.mark.parametrize("division", ["experts", "requests"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_speculation_equals_plain_bit_for_bit_in_float32(size: int, division: Any) -> None:
    """Neither what runs with a request nor its rank changes a bit, because a sum over ranks has one order."""
    found = []
    settings = {**SETTINGS, "dtype": torch.float32}
    for method, shape, batch, owner in (
        ("none", None, 4, lambda i: i % size),
        ("draft_model", TREE, 3, lambda i: int(i > 2)),
        ("none", None, 12, lambda i: size - 1),
    ):

        def make(group: Group, method: Any = method, shape: Any = shape, batch: int = batch) -> Engine:
            more = {**settings, "max_batch_size": batch}
            return tiny_engine(method, shape, group=group, division=division, **more)

        if division == "experts":  # all ranks run all requests
            results = on_ranks(size, lambda group, make=make: run(make(group), PROMPTS, SAMPLED))  # type: ignore[misc]
            completions = results[0]
        else:
            completions, _ = of_ranks(size, make, lambda: requests(SAMPLED), owner)
        found.append([(c.token_ids, c.logprobs) for c in completions])
    assert found[0] == found[1] == found[2]
