"""Shapes by the number of running rows: the texts stay those of plain decoding, whatever a round drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.config_load import config_to_dict, load_config
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.executor import GraphMode, padded_sizes
from specbatch.errors import ConfigError
from specbatch.graphs.runner import ladder
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    round_of,
    run,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

CHAIN, LONG, TREE = DraftShape(2, 1, 3), DraftShape(5, 1, 6), DraftShape(3, 2, 6)
# Rows end at different times: every entry is used, in both directions (prompts are submitted in two waves).
DEEPENING: Schedule = ByBatch((1, 2, 4), (LONG, TREE, CHAIN))
WITH_PLAIN: Schedule = ByBatch((1, 3, 5), (TREE, None, LONG))
PLAIN_FIRST: Schedule = ByBatch((2, 9), (None, CHAIN))


def test_what_is_captured_is_what_is_run() -> None:
    for items in (
        ByBatch((1, 3, 5), ("a", "b", "c")),
        ByBatch((33, 256), ("a", "b")),
        ByBatch((2, 9), ("a", "b")),
        ByBatch.always("a"),
    ):
        for largest in (1, 2, 4, 40, 256):
            captured = {(padded.size, item) for padded, item in padded_sizes(items, largest)}
            run = {(min(s for s in ladder(largest) if s >= n), items.index(n)) for n in range(1, largest + 1)}
            assert captured == run


def test_by_batch() -> None:
    items = ByBatch((2, 5), ("few", "many"))
    assert [items.at(n) for n in (1, 2, 3, 5, 6, 100)] == ["few", "few", "many", "many", "many", "many"]
    assert [list(items.batches(i, 7)) for i in (0, 1)] == [[1, 2], [3, 4, 5, 6, 7]]
    assert [list(items.batches(i, 1)) for i in (0, 1)] == [[1], []]
    assert list(ByBatch.always("all").batches(0, 3)) == [1, 2, 3]
    assert items.map(len) == ByBatch((2, 5), (3, 4))


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "fixed"])
@pytest.mark.parametrize(
    "schedule", [DEEPENING, WITH_PLAIN, PLAIN_FIRST], ids=["deepening", "with-plain", "plain-first"]
)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_text_is_that_of_plain_decoding(method: str, schedule: Schedule, device: bool) -> None:
    prompts = random_prompts(7, shared=6)
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 5}
    params = [SamplingParams(max_tokens=4 + 3 * i) for i in range(len(prompts))]
    plain = tiny_oracle("none", num_layers=num_target_layers(method), **settings)
    expected = run_each(plain, prompts, params)
    engine = (tiny_device_engine if device else tiny_engine)(method, schedule, **settings)
    actual = run_each(engine, prompts, params)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    counts = engine.stats.speculation
    assert counts.proposed_at[0] > 0
    assert (counts.proposed_at[0] < counts.rounds) == (None in schedule.items), "plain rounds are rounds without drafts"
    if LONG in schedule.items:
        assert counts.proposed_at[LONG.num_steps - 1] > 0


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "fixed"])
def test_sampled_trees_and_ngrams_do_not_depend_on_it(device: bool) -> None:
    """They accept the target's own draws; only chains of a sampling draft are drawn together with it."""
    prompts = random_prompts(9, shared=6)
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    expected = run(tiny_oracle("none", num_pages=256), prompts, params)
    make = tiny_device_engine if device else tiny_engine
    trees: Schedule = ByBatch((1, 3), (DraftShape(4, 3, 12), TREE))
    for method, schedule in (("draft_model", trees), ("ngram", DEEPENING_CHAINS)):
        actual = run(make(method, schedule, num_pages=256), prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


DEEPENING_CHAINS: Schedule = ByBatch((1, 2, 4), (DraftShape(7, 1, 8), None, CHAIN))


def test_drafts_follow_rounds_that_did_not_draft() -> None:
    """A draft that is the target itself is right after plain rounds, too: draft-extend went on."""
    prompts = random_prompts(3)
    params = [SamplingParams(max_tokens=count) for count in (8, 8, 40)]
    schedule: Schedule = ByBatch((1, 4), (LONG, None))
    for make in (tiny_engine, tiny_device_engine):
        engine = make("draft_model", schedule, num_pages=256)
        net: Any = round_of(engine).method.net
        net._model = round_of(engine)._target
        net.cache = net._model.new_cache(257 * 4, torch.float64)
        counts = run_each(engine, prompts, params)[2].speculation
        assert counts.proposed_at[0] < counts.rounds, "no round was plain"
        assert counts.drafted > 20, "the last request alone drafts deeply"
        assert counts.drafted - counts.accepted < LONG.num_steps, "all but those past the end are accepted"


def run_each(engine: Any, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(Request(i, prompt, own, RngKey(0, i, 0)))
    done = {}
    while len(done) < len(prompts):
        for completion in engine.step():
            done[completion.request_id] = completion
    return [done[i] for i in range(len(prompts))]


def loaded(*sets: str) -> Any:
    return load_config(None, ["model.target=random:tiny", "engine.device=cpu", *sets])


SETS = ("speculation.method=draft_model", "speculation.draft=random:tiny")
DETERMINISTIC = ["engine.deterministic=true"]


def test_read_and_resolved() -> None:
    text = "[{max_batch: 4, num_steps: 5, topk: 4}, {max_batch: 32, num_steps: 3}, {max_batch: 256, num_steps: 0}]"
    run = resolve(loaded(*SETS, f"speculation.schedule={text}"))
    assert run.speculation.schedule == ByBatch((4, 32, 256), (DraftShape(5, 4, 8), DraftShape(3, 1, 4), None))
    assert run.speculation.num_lookahead == 1 + 4 * 4
    assert config_to_dict(run.config)["speculation"]["schedule"][2] == {
        "max_batch": 256, "num_steps": 0, "topk": 1, "num_draft_tokens": 1
    }  # fmt: skip
    assert any("requests run at the same time" in note for note in run.notes)
    plain = resolve(loaded(f"speculation.schedule={text}", "speculation.method=none"))
    assert plain.speculation.schedule == ByBatch.always(None)
    assert plain.config.speculation.schedule is None


def test_no_note_where_drafts_are_coupled() -> None:
    text = "[{max_batch: 4, num_steps: 5}, {max_batch: 32, num_steps: 3}]"
    notes = [resolve(loaded(*SETS, f"speculation.schedule={text}", *more)).notes for more in ([], DETERMINISTIC)]
    assert ["requests run at the same time" in "".join(lines) for lines in notes] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        "[{max_batch: 4, num_steps: 5, topk: 4}, {max_batch: 32, num_steps: 2, topk: 2}]",
        "[{max_batch: 4, num_steps: 5, topk: 4}, {max_batch: 32, num_steps: 0}]",
        "[{max_batch: 4, num_steps: 2}, {max_batch: 32, num_steps: 2}]",
    ],
)
def test_no_note_where_sampled_texts_depend_on_nothing(text: str) -> None:
    """Trees and plain decoding draw the same numbers, and so do chains of one length."""
    run = resolve(loaded(*SETS, f"speculation.schedule={text}"))
    assert not any("requests run at the same time" in note for note in run.notes)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["speculation.schedule=3"], "speculation.schedule must be a list of mappings, not 3"),
        (["speculation.schedule=[{num_steps: 3}]"], r"speculation.schedule\[0\].max_batch is missing"),
        (["speculation.schedule=[{max_batch: 0}]"], r"speculation.schedule\[0\].max_batch must be >= 1"),
        (["speculation.schedule=[{max_batch: 1, steps: 3}]"], r"unknown option speculation.schedule\[0\].steps"),
        (["speculation.schedule=[]"], "drafts for no number of rows"),
        (["speculation.schedule=[{max_batch: 8, num_steps: 0}]"], "drafts for no number of rows"),
        (["speculation.schedule=[{max_batch: 8}, {max_batch: 8}]"], r"schedule\[1\].max_batch must be more than"),
        (["speculation.schedule=[{max_batch: 8, num_draft_tokens: 1}]"], r"schedule\[0\]: "),
        (["speculation.schedule=[{max_batch: 8}]", "speculation.num_steps=3"], "are both set"),
        (["speculation.schedule=[{max_batch: 8}]", "speculation.simulate_acceptance=2"], "one figure for one shape"),
    ],
)  # fmt: skip
def test_mistakes(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(loaded(*SETS, *sets))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("graphs", ["round", "phases"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_graphs_of_every_entry(method: str, graphs: GraphMode) -> None:
    """Captured for the sizes that each entry is run at; replayed as the batch shrinks."""
    prompts = random_prompts(9, shared=6)
    params = [SamplingParams(max_tokens=8 + 7 * i) for i in range(len(prompts))]
    schedule = DEEPENING_CHAINS if method == "ngram" else WITH_PLAIN
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 5, "dtype": torch.float64}
    expected = run_each(tiny_oracle(method, schedule, **settings), prompts, params)
    engine = tiny_device_engine(method, schedule, device=torch.device("cuda"), graphs=graphs, **settings)
    engine.executor.capture(False, lambda progress: None)
    aux_hidden_states = engine.executor.num_graphs
    actual = run_each(engine, prompts, params)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert engine.executor.num_graphs == aux_hidden_states, "captured in mid-run"
