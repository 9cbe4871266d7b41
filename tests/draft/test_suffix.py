"""The method `suffix`: lossless drafts from other rows' outputs, from a file, and from the row's own text."""

from __future__ import annotations

import pytest
import torch

from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.draft.suffix import SharedTexts, SuffixDraft
from specbatch.engine.engine import Engine
from specbatch.types import Completion, SamplingParams
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine, tiny_oracle

CHAIN = DraftShape(31, 1, 32)
SHAPES: dict[str, DraftShape | Schedule] = {
    "chain": CHAIN,
    "schedule": ByBatch((2, 3, 8), (CHAIN, None, DraftShape(3, 1, 4))),
}
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.5, top_k=8, seed=5)
SCHEDULING = {
    "batch 1": {"max_batch_size": 1, "prefill_chunk_tokens": 3},
    "batch 16": {"max_batch_size": 16},
    "preemption": {"max_batch_size": 4, "num_pages": 24},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some prompts come twice, so that their greedy outputs do."""
    return [*random_prompts(6, shared=9, longest=12), [3, 4, 3, 5] * 3] * 2


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[bool, list[Completion]]:
    """Completions of the oracle, by whether it samples."""
    return {
        sampled: run(tiny_oracle("none", num_pages=256), prompts, params)
        for sampled, params in ((False, GREEDY), (True, SAMPLED))
    }


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


def shared_by(engine: Engine) -> SharedTexts:
    [shared] = {id(m.shared): m.shared for m in methods_of(engine)}.values()
    return shared


def methods_of(engine: Engine) -> list[SuffixDraft]:
    methods = [round_.method for round_ in engine.executor.rounds.items]
    return [method for method in methods if isinstance(method, SuffixDraft)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_lossless(
    shape: str, scheduling: str, sampled: bool, prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    engine = tiny_engine("suffix", SHAPES[shape], **{"num_pages": 256, **SCHEDULING[scheduling]})
    completions = run(engine, prompts, SAMPLED if sampled else GREEDY)
    assert texts(completions) == texts(plain[sampled])
    assert sum(c.speculation.accepted for c in completions) > 3, "hardly a draft was right: this proves little"
    if scheduling == "preemption":
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_padded_chains_are_verified_alike(params: SamplingParams, prompts: list[list[int]]) -> None:
    """Engines with fixed shapes, as on a GPU, give the same texts."""
    exact, padded = (make("suffix", CHAIN, num_pages=256) for make in (tiny_engine, tiny_device_engine))
    expected, found = run(exact, prompts, params), run(padded, prompts, params)
    assert texts(found) == texts(expected)


def test_a_second_run_drafts_from_the_first(prompts: list[list[int]], plain: dict[bool, list[Completion]]) -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=1)
    first = run(engine, prompts[:7], GREEDY)
    second = run(engine, prompts[:7], GREEDY)
    assert texts(first) == texts(second) == texts(plain[False][:7])
    rounds = [sum(c.speculation.rounds for c in one) for one in (first, second)]
    assert rounds[1] < 0.7 * rounds[0]


def test_sources_are_counted_and_add_up(prompts: list[list[int]]) -> None:
    """Greedy rows come twice, so the second ones draft from the job. With a file of all outputs, they draft from it."""
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=2)
    completions = run(engine, prompts, GREEDY)
    sources = engine.stats.draft_sources.tokens
    assert sources["job"][1] > 0
    assert set(sources) <= {"row", "job"}
    drafted, accepted = (sum(getattr(c.speculation, name) for c in completions) for name in ("drafted", "accepted"))
    of_device = [sum(column) for column in zip(*sources.values(), strict=True)]
    # The device accepts a few tokens after a stop, which completions do not have.
    assert of_device[0] == drafted
    assert accepted <= of_device[1] <= accepted + 32
    assert engine.stats.draft_sources.tokens == sources, "read twice, counted twice"

    other = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=2)
    shared_by(other).corpus.load([list(c.token_ids) for c in completions])
    again = run(other, prompts, GREEDY)
    assert texts(again) == texts(completions)
    assert other.stats.draft_sources.tokens["corpus"][1] > 50


def test_the_tokens_of_the_last_round_are_added(prompts: list[list[int]]) -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=1)
    [first] = run(engine, prompts[:1], GREEDY)
    tokens = torch.tensor([first.token_ids], dtype=torch.int32)
    one, length = torch.ones(1, dtype=torch.int64), torch.tensor([len(first.token_ids) - 1])
    drafts, counts, *_ = shared_by(engine).corpus.search(tokens, one - 1, length, one, 0.01, 1)
    assert counts.tolist() == [1]
    assert drafts.tolist() == [[first.token_ids[-1]]]


def test_the_rows_own_text_is_drafted_where_the_corpus_has_nothing() -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256)
    run(engine, [[7] * 9], SamplingParams(max_tokens=12, logit_bias={7: 100.0}))
    assert engine.stats.draft_sources.tokens["row"][1] > 8


def test_drafts_that_are_always_accepted_change_the_output(
    prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    """The comparison with plain decoding sees drafts that are accepted without being right."""
    engine = tiny_engine("suffix", CHAIN, num_pages=256, simulate=8.0)
    assert texts(run(engine, prompts, GREEDY)) != texts(plain[False])
