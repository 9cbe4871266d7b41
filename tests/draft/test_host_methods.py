"""Drafts that the host makes: a new method is one file and one entry, and no draft of it changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.config import SpeculationSection
from specbatch.config_load import load_config
from specbatch.draft import METHODS, DraftParts, MethodEntry
from specbatch.draft.host import HostSequence, HostTrees
from specbatch.draft.ngram import HostNgramDraft, NgramDraft, RowIndex
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence as EngineSequence
from specbatch.errors import ConfigError
from specbatch.kernels import ops_for
from specbatch.setup.resolve import resolve
from specbatch.types import Completion, SamplingParams
from tests.draft.suffix_automaton import SuffixAutomaton, SuffixDraft
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine, tiny_oracle

CHAIN, TREE = DraftShape(4, 1, 5), DraftShape(3, 2, 8)
SHAPES: dict[str, DraftShape | Schedule] = {
    "chain": CHAIN,
    "tree": TREE,
    "schedule": ByBatch((2, 3, 8), (CHAIN, None, TREE)),
}
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.5, top_k=8, seed=5)
SCHEDULING = {
    "batch 1": {"max_batch_size": 1, "prefill_chunk_tokens": 3},
    "batch 16": {"max_batch_size": 16},
    "preemption": {"max_batch_size": 4, "num_pages": 24},
}


@pytest.fixture(autouse=True)
def _suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "toy", MethodEntry(lambda shape, parts: SuffixDraft(shape)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    repeated = [[5, 6, 7, 8, 9] * 3, [3, 4, 3, 5] * 3, [7] * 9]
    return random_prompts(5, shared=9, longest=12) + repeated


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[bool, list[Completion]]:
    """Of the oracle, by whether it samples."""
    return {
        sampled: run(tiny_oracle("none", num_pages=256), prompts, params)
        for sampled, params in ((False, GREEDY), (True, SAMPLED))
    }


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_method_is_lossless(
    shape: str, scheduling: str, sampled: bool, prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    engine = tiny_engine("toy", SHAPES[shape], **{"num_pages": 256, **SCHEDULING[scheduling]})
    completions = run(engine, prompts, SAMPLED if sampled else GREEDY)
    assert texts(completions) == texts(plain[sampled])
    assert sum(c.speculation.accepted for c in completions) > 3, "hardly a draft was right: this proves little"
    if scheduling == "preemption":
        assert engine.stats.preemptions > 0
    else:
        assert engine.stats.cached_prompt_tokens > 0


def test_the_schedule_drafts_trees_chains_and_nothing(prompts: list[list[int]]) -> None:
    """By the number of running requests."""
    chains: set[int] = set()
    trees: set[int] = set()

    class Noted(SuffixDraft):
        def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
            (chains if self._topk == 1 else trees).add(len(sequences))
            return super().host_draft(sequences)

    METHODS["toy"] = MethodEntry(lambda shape, parts: Noted(shape))  # of this test: the fixture puts it back
    for batch in (8, 2, 1):
        run(tiny_engine("toy", SHAPES["schedule"], num_pages=256, max_batch_size=batch), prompts, GREEDY)
    assert chains == {1, 2}
    assert {8} < trees <= {4, 5, 6, 7, 8}


def test_trees_are_better_than_chains_here(prompts: list[list[int]]) -> None:
    """Branches are verified, not only carried along: some second child is accepted."""
    params = SamplingParams(max_tokens=24)
    runs = [run(tiny_engine("toy", shape, num_pages=256), prompts, params) for shape in (CHAIN, TREE)]
    depth2 = [sum(sum(c.speculation.accepted_at[:1]) for c in completions) for completions in runs]
    rounds = [sum(c.speculation.rounds for c in completions) for completions in runs]
    assert depth2[1] / rounds[1] > depth2[0] / rounds[0]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_the_host_drafts_from_all_tokens(shape: DraftShape, prompts: list[list[int]]) -> None:
    """Every result is read before the next round: the root is the last token, and nothing is in flight."""
    seen = 0

    class Checked(SuffixDraft):
        def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
            nonlocal seen
            for seq in sequences:
                assert isinstance(seq, EngineSequence)
                assert seq.is_prefilled, "a token is not there yet"
                assert seq.rounds_in_flight == 0
                seen += 1
            return super().host_draft(sequences)

    METHODS["toy"] = MethodEntry(lambda shape, parts: Checked(shape))
    run(tiny_device_engine("toy", shape, num_pages=256), prompts, GREEDY)
    assert seen > 50


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_padded_trees_are_verified_alike(shape: str, params: SamplingParams, prompts: list[list[int]]) -> None:
    """With fixed shapes, as on a GPU: every tree takes the draft shape's number of nodes."""
    exact, padded = (make("toy", SHAPES[shape], num_pages=256) for make in (tiny_engine, tiny_device_engine))
    expected, found = run(exact, prompts, params), run(padded, prompts, params)
    assert texts(found) == texts(expected)
    assert [c.speculation for c in found] == [c.speculation for c in expected]


def test_a_suffix_automaton_finds_what_followed() -> None:
    """Against a search of the text, over random texts of few tokens."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        text = rng.integers(0, 3, size=int(rng.integers(1, 25))).tolist()
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        expected: set[int] = set()
        for size in range(len(text) - 1, 0, -1):
            expected = {
                text[end] for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]
            }
            if expected:
                break
        assert {token for token, _ in automaton.following(automaton.longest_match)} == expected, text


@pytest.mark.parametrize("num_pages", [256, 24], ids=["roomy", "preemption"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ngrams_of_host_and_device_are_the_oracles(
    params: SamplingParams, num_pages: int, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and counts, of both methods with the name `ngram`."""
    oracle = run(tiny_oracle("ngram", CHAIN, num_pages=num_pages), prompts, params)

    def on_device(shape: DraftShape, parts: DraftParts) -> NgramDraft:
        return NgramDraft(shape, *parts.ngram_match, parts.ops)

    monkeypatch.setitem(METHODS, "device ngram", MethodEntry(on_device))
    for method, make in (("ngram", tiny_engine), ("device ngram", tiny_device_engine)):
        engine = make(method, CHAIN, num_pages=num_pages)
        found = run(engine, prompts, params)
        assert texts(found) == texts(oracle), method
        assert [c.speculation for c in found] == [c.speculation for c in oracle], method
        assert (engine.stats.preemptions > 0) == (num_pages == 24)
    assert sum(c.speculation.accepted for c in oracle) > 0


def test_a_preempted_sequence_keeps_its_index(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RowIndex] = []

    class Counted(RowIndex):
        def __init__(self, predicted: list[int], min_match: int, max_match: int) -> None:
            super().__init__(predicted, min_match, max_match)
            made.append(self)

    monkeypatch.setattr("specbatch.draft.ngram.RowIndex", Counted)
    engine = tiny_engine("ngram", CHAIN, num_pages=24)
    run(engine, prompts, GREEDY)
    assert engine.stats.preemptions > 0
    assert len(made) == len(prompts)


@pytest.mark.parametrize(
    ("tokens", "parents", "num_nodes", "problem"),
    [
        ([0, 5, 5], [-1, 0, 0], 3, "different tokens"),
        ([0, 5, 6], [-1, 2, 0], 3, "before its children"),
        ([0, 5, 6], [-1, 0, -1], 3, "before its children"),
        ([0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], 5, "a path has at most 4"),
        ([0] * 9, [-1] * 9, 1, "the draft shape has 8"),
        ([0, 5], [-1, 0], 0, "its root"),
        ([0, 5], [-1, 0], 3, "no more nodes than tokens"),
    ],
)
def test_a_tree_that_is_none_is_an_error(tokens: list[int], parents: list[int], num_nodes: int, problem: str) -> None:
    trees = HostTrees(np.array([tokens]), np.array([num_nodes]), np.array([parents]))
    with pytest.raises(AssertionError, match=problem):
        SuffixDraft(TREE).pack(trees)


def test_nodes_past_the_end_may_be_anything() -> None:
    tokens, parents = np.array([[0, 5, 5, 5]]), np.array([[-1, 0, 0, 3]])
    packed = SuffixDraft(TREE).pack(HostTrees(tokens, np.array([2]), parents))
    assert packed[0, 0] == 2


def test_trees_of_another_kind_than_the_shape() -> None:
    chain, tree = SuffixDraft(CHAIN), SuffixDraft(TREE)
    with pytest.raises(AssertionError, match="topk is 1"):
        chain.pack(HostTrees(np.array([[0, 5]]), np.array([2]), np.array([[-1, 0]])))
    with pytest.raises(AssertionError, match="at most 4"):
        tree.pack(HostTrees.chains([[1, 2, 3, 4]]))
    as_tree = tree.pack(HostTrees.chains([[1, 2, 3], [4]]))
    table = RequestTable(2, 1, 1, 1, False, torch.float32, torch.device("cpu"), tree.num_host_columns)
    table.host_trees_SZ[:2] = torch.from_numpy(as_tree)
    view = BatchView.gather(table, torch.tensor([0, 1]), 4, ops_for(torch.device("cpu"), torch.float32))
    trees = tree.draft(view, table, sampled=False)
    assert trees.parents_BN is not None
    assert trees.depths_BN is not None
    assert trees.mask_BNW is not None
    assert trees.tokens_BN[:, 1:4].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert trees.parents_BN[:, :4].tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert trees.depths_BN[:, :4].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert trees.mask_BNW[:, :4, 0].tolist() == [[1, 3, 7, 15], [1, 3, 4, 8]]


def test_masks_of_more_than_32_nodes() -> None:
    """The 33rd node's bit is in the next word, the 32nd's is a sign."""
    method = SuffixDraft(DraftShape(2, 40, 41))
    tokens, parents = np.arange(41)[None], np.array([[-1, *[0] * 31, *[31] * 9]])
    packed = method.pack(HostTrees(tokens, np.array([41]), parents))
    mask = packed[0, 2:].reshape(41, 5)[:, 3:].astype(np.uint32)
    assert mask[31].tolist() == [1 | 1 << 31, 0]
    assert mask[40].tolist() == [1 | 1 << 31, 1 << 8]


def test_the_configuration_names_the_methods() -> None:
    """A new entry of METHODS is a legal value, and only such are."""
    legal = set(get_args(get_type_hints(SpeculationSection)["method"]))
    assert legal - {"auto"} == set(METHODS) - {"toy"}


def test_a_host_methods_topk_has_no_draft_vocabulary_as_its_bound() -> None:
    """A method without a draft network has none; a network's topk is at most its vocabulary."""
    config = load_config(None, ["model.target=random:tiny", "engine.device=cpu"])
    section = replace(config.speculation, num_steps=2, topk=1000, num_draft_tokens=1001)
    toy: Any = "toy"  # no legal value, but an entry of METHODS
    host = resolve(replace(config, speculation=replace(section, method=toy)))
    assert host.speculation.schedule.items == (DraftShape(2, 1000, 1001),)
    network = replace(section, method="draft_model", draft="random:tiny")
    with pytest.raises(ConfigError, match=r"speculation.topk is 1000, but the draft's vocabulary has only \d+ tokens"):
        resolve(replace(config, speculation=network))


def test_ngram_on_a_cpu_is_a_host_draft() -> None:
    parts = DraftParts(torch.device("cpu"), torch)  # type: ignore[arg-type]
    assert isinstance(METHODS["ngram"].make(CHAIN, parts), HostNgramDraft)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "phases", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_method_is_lossless_on_a_gpu(shape: str, graphs: Any, prompts: list[list[int]]) -> None:
    """In float64, in which a GPU writes the texts that a CPU does; under graphs the trees are input."""
    for params in (GREEDY, SAMPLED):
        expected = run(tiny_engine("toy", SHAPES[shape], num_pages=256), prompts, params)
        engine = tiny_device_engine("toy", SHAPES[shape], num_pages=256, device=torch.device("cuda"), graphs=graphs)
        found = run(engine, prompts, params)
        assert texts(found) == texts(expected)
        assert [c.speculation for c in found] == [c.speculation for c in expected]
