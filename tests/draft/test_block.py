"""Block drafters: no draft of theirs changes the output."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView
from specbatch.draft.method import DraftTrees
from specbatch.draft.network import BlockNet
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.draft.tree import beam_candidates
from specbatch.engine.round import Round
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels import torch as ops
from specbatch.models.blocks.config import (
    ConvolutionConfig,
    DominoConfig,
    LatticeConfig,
    MarkovConfig,
    RefinerConfig,
    SelectorConfig,
)
from specbatch.models.blocks.heads import BlockOutput, ConfidenceHead
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.coins import target_sequences
from tests.draft.test_sampling_chi_square import ALPHA, p_value
from tests.tiny_models import (
    BLOCK_SIZE,
    num_target_layers,
    random_prompts,
    run,
    target_config,
    tiny_config,
    tiny_decoder,
    tiny_device_engine,
    tiny_draft_net,
    tiny_engine,
    tiny_oracle,
)

VOCAB = 7  # so that random drafts are often right
CHAIN, SHORT = DraftShape(BLOCK_SIZE - 1, 1, BLOCK_SIZE), DraftShape(2, 1, 3)
TREE = DraftShape(4, 3, 12)
SHAPES: dict[str, DraftShape | Schedule] = {
    "whole": CHAIN,
    "short": SHORT,
    "tree": TREE,
    "tree of few nodes": DraftShape(5, 2, 5),
    "schedule": ByBatch((2, 3, 8), (CHAIN, None, SHORT)),
}
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_k=5, seed=5)
SCHEDULING = {
    "batch 1": {"max_batch_size": 1, "prefill_chunk_tokens": 3},
    "batch 16": {"max_batch_size": 16},
    "preemption": {"max_batch_size": 4, "num_pages": 30},
}
WINDOWS = tiny_config(2, 32, VOCAB, qk_norm=True, sliding_windows=(9, None))
TRAITS: dict[str, dict[str, Any]] = {
    "none": {},
    "windows, causal": {"decoder": WINDOWS, "causal_layers": (True, False)},
    "anchor": {"first": 0},
    "markov": {"head": MarkovConfig(4)},
    "gated": {"head": MarkovConfig(4, "gated"), "first": 0},
    "rnn": {"head": MarkovConfig(4, "rnn"), "first": 0},
    "selector": {"head": SelectorConfig(4, 3), "convolution": ConvolutionConfig(2, 4)},
    "domino": {"head": DominoConfig(6, 5, 2)},
    "refiner": {"head": RefinerConfig(4, 8, 3, BLOCK_SIZE)},
    "lattice": {"head": LatticeConfig(8, 2, 2, 16, 3, 6, 1e-4, 8.0, BLOCK_SIZE)},
    "mask embedding": {"has_mask_embedding": True, "embedding_scale": 0.5, "logits_scale": 0.7, "logits_soft_cap": 2.0},
}
SETTINGS: dict[str, Any] = {"num_pages": 256, "vocab": VOCAB}
ENGINES = (tiny_engine, tiny_device_engine)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(6, shared=9, longest=30, vocab=VOCAB)


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[bool, list[Completion]]:
    """The oracle's texts by whether it samples."""
    oracle = {**SETTINGS, "num_layers": num_target_layers("block")}
    return {
        sampled: run(tiny_oracle("none", **oracle), prompts, params)
        for sampled, params in ((False, GREEDY), (True, SAMPLED))
    }


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


def accepted(completions: list[Completion]) -> int:
    return sum(c.speculation.accepted for c in completions)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_lossless(
    shape: str, scheduling: str, sampled: bool, prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    settings = {**SETTINGS, **SCHEDULING[scheduling], "coupled": sampled}
    engine = tiny_engine("block", SHAPES[shape], **settings)
    found = run(engine, prompts, SAMPLED if sampled else GREEDY)
    assert texts(found) == texts(plain[sampled])
    assert accepted(found) > 2, "hardly a draft was right: this proves little"
    if scheduling == "preemption":
        assert engine.stats.preemptions > 0
    else:
        assert engine.stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("make", ENGINES)
def test_a_schedule_of_trees_and_chains_is_lossless(
    make: Any, sampled: bool, prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    schedule = ByBatch((3, 8), (TREE, CHAIN))
    settings = {**SETTINGS, **TRAITS["domino"], "max_batch_size": 8, "coupled": sampled}
    engine = make("block", schedule, **settings)
    params = [replace(SAMPLED if sampled else GREEDY, max_tokens=count) for count in (4, 4, 8, 8, 16, 16, 16, 16)]
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=False)):
        engine.submit(Request(i, prompt, one, RngKey(one.seed or 0, i, 0)))
    found: list[Completion] = []
    while engine.num_running or engine.num_waiting:
        found += engine.step()
    found = sorted([*found, *engine.drain()], key=lambda one: one.request_id)
    for one, whole in zip(found, plain[sampled], strict=False):
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    assert accepted(found) > 2
    depths = [depth for depth, rounds in enumerate(engine.stats.speculation.depths) if rounds]
    assert {4, 5} <= {*depths}, depths


@pytest.mark.parametrize("traits", TRAITS)
def test_all_heads_are_lossless(traits: str, prompts: list[list[int]], plain: dict[bool, list[Completion]]) -> None:
    """The shapes of a CPU and those of a GPU give the same drafts."""
    shape = DraftShape(4, 1, 5)
    runs = [run(make("block", shape, **SETTINGS, **TRAITS[traits]), prompts, GREEDY) for make in ENGINES]
    for found in runs:
        assert texts(found) == texts(plain[False])
        assert accepted(found) > 1
    assert [c.speculation for c in runs[0]] == [c.speculation for c in runs[1]]


@pytest.mark.parametrize("traits", TRAITS)
def test_drawn_drafts_do_not_depend_on_the_batch(traits: str, prompts: list[list[int]]) -> None:
    """Drafts are drawn from the head's distribution, and are in the text. Both engines draw the same."""
    settings = {**SETTINGS, **TRAITS[traits]}
    runs = [
        run(make("block", CHAIN, **settings, max_batch_size=size), prompts, SAMPLED)
        for make, size in ((tiny_engine, 1), (tiny_engine, 6), (tiny_device_engine, 3))
    ]
    assert accepted(runs[0]) > 1
    for found in runs[1:]:
        assert texts(found) == texts(runs[0])
        assert [c.speculation for c in found] == [c.speculation for c in runs[0]]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("traits", TRAITS)
def test_trees_of_all_heads_are_lossless(
    traits: str, sampled: bool, prompts: list[list[int]], plain: dict[bool, list[Completion]]
) -> None:
    """Sampled texts are those of plain decoding, too, because the choice of nodes is not drawn."""
    settings = {**SETTINGS, **TRAITS[traits], "max_batch_size": 6}
    params = SAMPLED if sampled else GREEDY
    runs = [run(make("block", TREE, **settings), prompts, params) for make in ENGINES]
    for found in runs:
        assert texts(found) == texts(plain[sampled])
    assert [c.speculation for c in runs[0]] == [c.speculation for c in runs[1]]
    chain = run(tiny_engine("block", DraftShape(4, 1, 5), **settings, coupled=True), prompts, params)
    assert accepted(runs[0]) > accepted(chain)


@pytest.mark.parametrize("draft_vocab", [None, 5])
@pytest.mark.parametrize("traits", [name for name in TRAITS if name not in ("windows, causal", "mask embedding")])
def test_the_score_of_a_node_is_the_probability_of_its_path(traits: str, draft_vocab: int | None) -> None:
    """A chain that is given the tokens of the path has the same probabilities."""
    if draft_vocab is not None and traits == "selector":
        pytest.skip("no format has a DFlash2 with a reduced vocabulary")
    target = tiny_decoder(target_config("llama", 3, 32, VOCAB), torch.float64)
    net = tiny_draft_net(
        "block", target, 8, torch.float64, draft_vocab=draft_vocab, draft_seed=0, scale=0.5, **TRAITS[traits]
    )
    assert isinstance(net, BlockNet)
    model, batch = net.model, 3
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    first, num_drafts = model.block.first, model.block.max_drafts
    hidden_BKE, feature_BE = noise(batch, BLOCK_SIZE, 32), noise(batch, 32)
    logits_SBW = noise(num_drafts, batch, draft_vocab or VOCAB)
    root_B, before_B = torch.tensor([1, 4, 2]), torch.tensor([3, 3, 5])

    def steps(first_request: int, end: int) -> Any:
        of = slice(first_request, end)
        return model.head.steps(
            BlockOutput(
                hidden_BKE[of], logits_SBW[:, of], first, root_B[of], before_B[of], feature_BE[of], net.target_ids
            )
        )

    of_all = steps(0, batch)
    candidates = beam_candidates(
        ops,
        TREE,
        of_all(0, root_B),
        lambda step, beam, of: of_all(step, beam.tokens_BK.reshape(-1), of),
        net.target_ids,
    )
    ids = torch.arange(VOCAB) if net.target_ids is None else net.target_ids
    depths = set()
    for b in range(batch):
        tokens, scores, parents = (part[b].tolist() for part in candidates)
        for node in range(TREE.num_candidates):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            of_one, before, expected = steps(b, b + 1), root_B[b : b + 1], 0.0
            for depth, one in enumerate(path):
                log_p = of_one(depth, before)[0].log_softmax(-1)
                expected += float(log_p[ids == tokens[one]])
                before = torch.tensor([tokens[one]])
            assert scores[node] == pytest.approx(expected, abs=1e-5)
            depths.add(len(path))
    assert depths == {1, 2, 3, 4}


@pytest.mark.parametrize("traits", ["none", "markov", "refiner"])
def test_a_reduced_vocabulary(traits: str, prompts: list[list[int]], plain: dict[bool, list[Completion]]) -> None:
    for make in ENGINES:
        found = run(make("block", CHAIN, draft_vocab=4, **SETTINGS, **TRAITS[traits]), prompts, GREEDY)
        assert texts(found) == texts(plain[False])
        assert accepted(found) > 3


CONFIDENCE: dict[str, dict[str, Any]] = {
    "confidence": {"head": MarkovConfig(4, "gated"), "first": 0, "confidence_size": 32 + 4},
    "confidence by the hidden state": {"confidence_size": 32},
}


@pytest.mark.parametrize("traits", ["markov", "refiner", *CONFIDENCE])
def test_a_budget_for_verification(traits: str, prompts: list[list[int]], plain: dict[bool, list[Completion]]) -> None:
    for make in ENGINES:
        settings: dict[str, Any] = {**SETTINGS, **(TRAITS | CONFIDENCE)[traits], "max_batch_size": 6}
        found = run(make("block", CHAIN, budget=VerifyBudget(1.5), **settings), prompts, GREEDY)
        assert texts(found) == texts(plain[False])
        whole = run(make("block", CHAIN, **settings), prompts, GREEDY)
        assert sum(c.speculation.drafted for c in found) < sum(c.speculation.drafted for c in whole)


@pytest.mark.parametrize("make", ENGINES)
def test_the_confidence_head_shares_the_budget(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that finds all drafts equally likely gives each request the same number of nodes. Without a budget nothing
    reads it, and the drafts are the same."""
    prompts = random_prompts(6, shared=9, longest=30, vocab=VOCAB)
    settings: dict[str, Any] = {**SETTINGS, **CONFIDENCE["confidence"], "max_batch_size": 6}
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def differences() -> list[int]:
        """Return by how much the numbers of verified nodes differ in each round."""
        found: list[int] = []
        real = Round.share_budget

        def noted(self: Round, view: BatchView, trees: DraftTrees, num_verified: int) -> DraftTrees:
            shared = real(self, view, trees, num_verified)
            is_running_B = view.field(Field.DONE) == 0
            assert shared.num_verified_B is not None
            if is_running_B.any():
                counts_B = shared.num_verified_B[is_running_B]
                found.append(int(counts_B.max() - counts_B.min()))
            return shared

        with monkeypatch.context() as patch:
            patch.setattr(Round, "share_budget", noted)
            run(make("block", CHAIN, budget=VerifyBudget(3), **settings), prompts, params)
        return found

    assert max(differences()) > 2
    monkeypatch.setattr(ConfidenceHead, "steps", lambda self, block: lambda draft, before_B: before_B * 0 - 0.5)
    assert max(differences()) <= 1
    monkeypatch.setattr(ConfidenceHead, "steps", None)
    run(make("block", CHAIN, **settings), prompts, params)


@pytest.mark.parametrize("shape", [DraftShape(2, 1, 3), DraftShape(2, 2, 5)], ids=["chain", "tree"])
@pytest.mark.parametrize("budget", [None, 1.8])
@pytest.mark.parametrize("traits", ["markov", "lattice", "confidence"])
def test_drawn_blocks_have_the_distribution_of_the_target(traits: str, budget: float | None, shape: DraftShape) -> None:
    """Whole outputs of many requests with the same prompt, against all outputs and their probabilities."""
    params, prompt = SamplingParams(max_tokens=3, temperature=1.3, top_p=0.97, seed=11), [1, 2, 3, 4, 1, 2, 3, 4]
    tiny: dict[str, Any] = {"vocab": 5, "hidden": 16, "num_pages": 600, "scale": 0.5, "max_batch_size": 100}
    if budget is not None and not shape.is_chain:
        pytest.skip("only chains share a budget")
    heads = TRAITS | {"confidence": {"head": MarkovConfig(4), "confidence_size": 16 + 4}}
    engine = tiny_engine(
        "block", shape, draft_vocab=3, budget=None if budget is None else VerifyBudget(budget),
        prefill_chunk_tokens=500, **tiny, **heads[traits],
    )  # fmt: skip
    counts: Counter[tuple[int, ...]] = Counter()
    for row in range(400):
        engine.submit(Request(row, prompt, params, RngKey(11, row, 0)))
    while engine.num_running or engine.num_waiting:
        counts.update(tuple(c.token_ids) for c in engine.step())
    counts.update(tuple(c.token_ids) for c in engine.drain())
    assert counts.total() == 400
    target = tiny_oracle("none", num_layers=num_target_layers("block"), **tiny)._target
    assert p_value(counts, target_sequences(target, prompt, params)) > ALPHA
