"""Rounds that read shared prefixes once: the same tokens, whatever groups form and dissolve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.cache.cascade_costs import CascadeCosts
from specbatch.cache.prefix_groups import Group, GroupLimits
from specbatch.config import EngineSection
from specbatch.config_load import load_config
from specbatch.draft.shape import DraftShape
from specbatch.engine.batch_groups import BatchGroups
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode
from specbatch.errors import ConfigError
from specbatch.setup import cascade as resolve_cascade
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.graphs import Replays
from tests.marks import slow_on_cpu
from tests.tiny_models import random_prompts, run_requests, tiny_device_engine, tiny_oracle

LIMITS = GroupLimits(2, 64, min_batch=3)  # of padded sizes, 1 and 2 are without groups
COSTS = CascadeCosts(32, 128, 4096)  # of Llama-3-8B
SHAPES = {
    "none": None,
    "ngram": DraftShape(3, 1, 4),
    "draft_model": DraftShape(3, 1, 4),
    "eagle3": DraftShape(3, 3, 8),
}


def resolved(
    section: EngineSection, windows: Sequence[int | None] = (None, 64)
) -> tuple[GroupLimits | None, list[str]]:
    notes: list[str] = []
    return resolve_cascade.resolve_cascade(section, "triton", COSTS, windows, 1, 512, notes), notes


def requests(temperature: float = 0.0, copies: int = 1, longer: int = 0) -> list[Request]:
    """Ten prompts: five after 70 common tokens, three after others, two alone. Each ends after another number of
    tokens."""
    prompts = [*random_prompts(5, 1, longest=20, shared=70), *random_prompts(3, 2, longest=9, shared=66)]
    prompts += random_prompts(2, 3, longest=80)
    params = [SamplingParams(max_tokens=4 + 3 * (i % 5) + longer, temperature=temperature) for i in range(len(prompts))]
    return [
        Request(copies * i + j, prompt, params[i], RngKey(0, i, j))
        for i, prompt in enumerate(prompts)
        for j in range(copies)
    ]


def watched(engine: Engine) -> list[list[Group]]:
    """The groups of each round that runs."""
    seen: list[list[Group]] = []
    run = engine.executor.run

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(engine.executor.groups)
        return run(*args, **kwargs)

    engine.executor.run = watch  # type: ignore[method-assign]
    return seen


def texts(engine: Any, wanted: list[Request]) -> list[list[int]]:
    return [completion.token_ids for completion in run_requests(engine, wanted)]


@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        ("none", 0.9),
        ("ngram", 0.0),
        ("draft_model", 0.9),
        ("eagle3", 0.0),
        *map(slow_on_cpu, ["none", "ngram", "draft_model", "eagle3"], [0.0, 0.9, 0.0, 0.9]),
    ],
)
def test_tokens_are_those_of_the_oracle(method: str, temperature: float) -> None:
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8}
    expected = texts(tiny_oracle(method, SHAPES[method], **settings), requests(temperature))
    engine = tiny_device_engine(method, SHAPES[method], **settings, cascade=LIMITS)
    seen = watched(engine)
    assert texts(engine, requests(temperature)) == expected
    sizes = {tuple(sorted(len(group.members) for group in groups)) for groups in seen}
    assert len(sizes) > 3, "the groups did not change"
    assert () in sizes
    assert any(len(both) == 2 for both in sizes)


def test_preempted_requests_come_back_with_other_pages() -> None:
    wanted = requests(copies=2, longer=30)[:10]
    settings: dict[str, Any] = {"num_pages": 62, "max_batch_size": 10}
    expected = texts(tiny_oracle(**settings), wanted)
    engine = tiny_device_engine(**settings, cascade=LIMITS)
    seen = watched(engine)
    assert texts(engine, wanted) == expected
    assert engine.stats.preemptions > 0
    assert any(seen)


def test_captures_see_no_group() -> None:
    """What is captured runs on padding, perhaps of a smaller batch than the last one's."""
    engine = tiny_device_engine(num_pages=512, max_batch_size=8, cascade=LIMITS)
    table = engine._state.groups
    assert table is not None

    class Watching(Replays):
        def capture(self, key: Any, function: Any) -> Any:
            groups = table.of_batch(8)
            assert groups is not None
            assert not any(part.any() for part in groups), key
            return super().capture(key, function)

    runner = Watching(lambda key: False)
    engine.executor.runner, engine.executor.mode = runner, "round"  # type: ignore[assignment]
    wanted = requests()[2:7]
    expected = texts(tiny_oracle(num_pages=512, max_batch_size=8), wanted)
    seen = watched(engine)
    assert texts(engine, wanted) == expected
    assert len(runner) > 2
    assert runner.num_replays > len(runner)
    assert any(seen)


def test_groups_are_found_where_the_batch_changes() -> None:
    engine = tiny_device_engine(num_pages=512, max_batch_size=8, cascade=LIMITS)
    groups: BatchGroups = engine._groups
    for request in requests()[:5]:
        engine.submit(request)
    while not (engine.num_running == 5 and engine.is_prefilled):
        engine.step()
    batch = list(engine._scheduler.running)
    first = groups.of(batch, 1)
    assert [sorted(group.members) for group in first] == [[0, 1, 2, 3, 4]]
    assert groups.of(list(batch), 1) is first
    assert [sorted(group.members) for group in groups.of(batch[2:], 1)] == [[0, 1, 2]]
    assert [sorted(group.members) for group in groups.of(batch, 1)] == [[0, 1, 2, 3, 4]]
    pages, batch[0].pages = batch[0].pages, [500, *batch[0].pages[1:]]
    groups.forget(batch[0].req_idx)
    assert [sorted(group.members) for group in groups.of(batch, 1)] == [[1, 2, 3, 4]]
    batch[0].pages = pages


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["engine.device=cpu"], "needs engine.attention triton, not torch"),
        (["engine.deterministic=true"], "cannot be combined with engine.deterministic"),
    ],
)
def test_what_has_no_cascade_refuses_it_by_name(sets: list[str], words: str) -> None:
    for value in ("on", "true"):
        with pytest.raises(ConfigError, match=words):
            resolve(load_config(None, ["model.target=random:tiny", f"engine.cascade_attention={value}", *sets]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"two_batch_overlap": "on"}, "cannot be combined with engine.two_batch_overlap"),
        ({"prefix_cache": False}, "needs engine.prefix_cache"),
    ],
)
def test_options_that_it_does_not_go_with(options: dict[str, Any], words: str) -> None:
    assert resolved(EngineSection(cascade_attention="on"))[0] is not None
    with pytest.raises(ConfigError, match=words):
        resolved(EngineSection(cascade_attention="on", **options))


def test_layers_with_windows_do_not_share() -> None:
    with pytest.raises(ConfigError, match="needs a layer without a sliding window"):
        resolved(EngineSection(cascade_attention="on"), windows=(64, 64))
    assert resolved(EngineSection(shared_tokens=4000), windows=(64, 64)) == (None, [])


def test_auto_follows_the_costs() -> None:
    least = {}
    for shared in (0, 256, 1000, 4000):
        found, notes = resolved(EngineSection(shared_tokens=shared))
        least[shared] = None if found is None else found.min_batch
        assert len(notes) == 1
        assert ("off" in notes[0]) == (found is None)
    assert least == {0: None, 256: 288, 1000: 64, 4000: 16}
    found, notes = resolved(EngineSection())
    assert found is None
    assert "it is not known whether prompts begin alike" in notes[0]
    for section in (EngineSection(prefix_cache=False), EngineSection(deterministic=True)):
        assert resolved(replace(section, shared_tokens=4000)) == (None, [])
    assert resolved(EngineSection(cascade_attention="off", shared_tokens=4000)) == (None, [])
    assert resolved(EngineSection(cascade_attention="on"))[0] == GroupLimits()


def test_groups_that_lose_are_left_out() -> None:
    """Of ten requests, five share 64 tokens: too few for any GPU, and for one that reads slowly enough not."""
    slow = CascadeCosts(1, 1, 10**6)
    for costs, is_grouped in ((COSTS, False), (slow, True)):
        engine = tiny_device_engine(num_pages=512, max_batch_size=8, cascade=replace(LIMITS, costs=costs))
        seen = watched(engine)
        texts(engine, requests())
        assert any(seen) is is_grouped


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", SHAPES)
def test_tokens_on_a_gpu(method: str, temperature: float, graphs: GraphMode, dtype: torch.dtype) -> None:
    """Nothing waits for the device, either."""
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "dtype": dtype}
    expected = texts(tiny_oracle(method, SHAPES[method], **settings), requests(temperature))
    cuda = torch.device("cuda")
    engine = tiny_device_engine(method, SHAPES[method], **settings, device=cuda, graphs=graphs, cascade=LIMITS)
    seen = watched(engine)
    assert texts(engine, requests(temperature)) == expected
    assert any(seen)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert texts(engine, requests(temperature)) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
