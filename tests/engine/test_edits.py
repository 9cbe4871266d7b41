"""Rules of requests: the engine against the oracle, which applies them one token after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbatch.batch import Edits, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftTrees
from specbatch.draft.shape import DraftShape
from specbatch.engine.edits import edited_logits
from specbatch.engine.engine import Engine
from specbatch.engine.rules import make_rules
from specbatch.engine.table_writer import write_rules
from specbatch.engine.transfers import Transfers
from specbatch.errors import FieldError
from specbatch.kernels import torch as reference
from specbatch.types import Completion, EngineLimits, FinishReason, Request, RngKey, SamplingParams
from tests.engine.graphs import Replays
from tests.tiny_models import (
    VOCAB,
    random_prompts,
    round_of,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

SHAPES: dict[str, tuple[str, DraftShape | None]] = {
    "none": ("none", None),
    "ngram": ("ngram", DraftShape(4, 1, 5)),
    "draft_model-chain": ("draft_model", DraftShape(3, 1, 4)),
    "draft_model-tree": ("draft_model", DraftShape(3, 3, 8)),
    "eagle3-chain": ("eagle3", DraftShape(3, 1, 4)),
    "eagle3-tree": ("eagle3", DraftShape(3, 2, 6)),
}
Rule = tuple[dict[str, Any], tuple[tuple[int, ...], ...]]  # sampling options, bad words
RULES: dict[str, Rule] = {
    "repetition": ({"repetition_penalty": 1.3}, ()),
    "less repetition": ({"repetition_penalty": 0.8, "presence_penalty": -0.5}, ()),
    "presence": ({"presence_penalty": 1.5}, ()),
    "frequency": ({"frequency_penalty": 0.7}, ()),
    "bias": ({"logit_bias": {3: 4.0, 0: -100.0, 60: 2.5}}, ()),
    "allowed": ({"allowed_token_ids": tuple(range(0, VOCAB, 2))}, ()),
    "bad words": ({"allowed_token_ids": (3, 5, 8)}, ((5, 5), (3, 8, 3), (8, 3), (7,), (5, 3, 3, 5))),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": tuple(range(20))}, ()),
    "all": (
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "logit_bias": {5: 3.0, 7: 3.0},
            "min_tokens": 5,
            "stop_token_ids": (7, 9),
        },
        ((5, 5), (11,)),
    ),
}
NONE: Rule = ({}, ())


def requests(rules: list[Rule], temperatures: tuple[float, ...] = (0.0,), **sampling: Any) -> list[Request]:
    """Of some prompts, the first of which comes more than once, every fourth with log-probabilities. `temperatures`: of
    one request after the other."""
    prompts = random_prompts(len(rules), shared=9)
    wanted = []
    for i, (options, bad_words) in enumerate(rules):
        params = SamplingParams(
            temperature=temperatures[i % len(temperatures)],
            **{"max_tokens": 12, "logprobs": None if i % 4 else 1, **options, **sampling},
        )
        wanted.append(Request(i, prompts[0 if i % 3 == 2 else i], params, RngKey(7, i, 0), bad_words=bad_words))
    return wanted


def decided(completions: list[Completion]) -> list[Any]:
    return [
        (
            c.token_ids,
            c.finish_reason,
            c.speculation,
            f"{c.margin.value:.3g}",  # a GPU adds in another order
            c.no_token_left,
            # Of the model, without the rules.
            [(f"{lp.logprob:.4f}", lp.top[0][0]) for lp in c.logprobs or ()],
        )
        for c in completions
    ]


MIXED = [NONE, *RULES.values(), NONE, RULES["all"]]
SLOW = [pytest.param(case, (t,), marks=pytest.mark.slow) for case in SHAPES for t in (0.0, 0.9)]


@pytest.mark.parametrize(
    ("case", "temperatures"),
    [("none", (0.0, 0.9)), ("draft_model-tree", (0.0, 0.9)), ("eagle3-chain", (0.9, 0.0)), *SLOW],
)
def test_as_the_oracle(case: str, temperatures: tuple[float, ...]) -> None:
    wanted = requests(MIXED, temperatures)
    expected = decided(run_requests(tiny_oracle(*SHAPES[case], eos=(0,)), wanted))
    assert decided(run_requests(tiny_engine(*SHAPES[case], eos=(0,)), wanted)) == expected
    assert decided(run_requests(tiny_device_engine(*SHAPES[case], eos=(0,)), wanted)) == expected


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_preempted_and_recomputed_requests(make: Callable[..., Engine]) -> None:
    """With chunks shorter than a prompt, pages that prompts share, and a cache that is too small."""
    wanted = requests([RULES["all"], RULES["bad words"], NONE, RULES["min_tokens"]] * 2, (0.0, 0.9), max_tokens=16)
    expected = decided(run_requests(make(prefix_cache=False), wanted))
    engine = make(*SHAPES["draft_model-tree"], num_pages=24, prefill_chunk_tokens=7)
    found = decided(run_requests(engine, wanted))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_prompt_tokens > 0


def test_few_kinds_of_graphs() -> None:
    """Whatever rules the requests of a batch have: one graph of each size for those that forbid, one for all."""
    engine = tiny_device_engine(eos=(0,))
    runner = Replays(lambda key: False)
    engine.executor.mode, engine.executor.runner = "round", runner  # type: ignore[assignment]
    names = ["allowed", "bad words", "min_tokens", "allowed", "presence", "bias", "repetition", "all"]
    wanted = requests([RULES[name] for name in names], max_tokens=5, min_tokens=3, logprobs=None)
    expected = decided(run_requests(tiny_device_engine(eos=(0,)), wanted))
    assert decided(run_requests(engine, wanted)) == expected
    kinds = {key[3].edits for key in runner.tried}
    assert kinds == {Edits.MASK | Edits.BAD_WORDS, Edits.MASK | Edits.BAD_WORDS | Edits.VALUES}
    assert Edits.NONE.family is Edits.NONE


def test_what_a_plan_of_memory_counts_for_rules_is_what_they_take() -> None:
    table = RequestTable(4, 1, 40, 1, False, torch.float32, torch.device("cpu"))
    assert table.rule_bytes == 0
    with Allocated() as allocated:
        table.add_rules(VOCAB).add_node_masks(6)
    assert table.rule_bytes == allocated.num_bytes
    table.remove_rules()
    assert (table.rule_bytes, table.tokens_SL.shape) == (0, (5, 0))


class Allocated(TorchDispatchMode):
    """Bytes of tensors that are made and kept."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.zeros.default, torch.ops.aten.full.default):
            self.num_bytes += out.nbytes
        return out


def test_a_request_index_forgets_its_rules() -> None:
    """The next request with it has none."""
    engine = tiny_engine(max_batch_size=1)
    first, second = requests([RULES["all"], NONE])
    expected = run_requests(tiny_engine(), [second])
    run_requests(engine, [first])
    assert decided(run_requests(engine, [second])) == decided(expected)


def test_without_rules_nothing_is_kept() -> None:
    engine = tiny_engine("draft_model", DraftShape(3, 1, 4))
    run_requests(engine, requests([NONE] * 3))
    state = round_of(engine).state
    assert state.rules is None
    assert state.tokens_SL.shape[1] == 0


@pytest.mark.parametrize("case", ["none", "draft_model-tree"])
def test_bad_words_that_leave_no_token(case: str) -> None:
    """The error says that the rules are the reason, which the logits do not show."""
    bad_words = ((3, 3), (3, 5), (5, 3), (5, 5))
    [request] = requests([({"allowed_token_ids": (3, 5)}, bad_words)])
    for make in (tiny_engine, tiny_oracle):
        [completion] = run_requests(make(*SHAPES[case]), [request])
        assert (completion.finish_reason, completion.no_token_left) == (FinishReason.ERROR, True)
        assert completion.token_ids in ([3], [5])


def _table(rules: list[Rule], num_prompt: int, lengths: list[int]) -> tuple[RequestTable, BatchView]:
    """Running requests with random texts, one for each rule and a last one without."""
    generator = torch.Generator().manual_seed(0)
    state = RequestTable(len(rules), 1, 40, 1, True, torch.float32, torch.device("cpu"))
    state.tokens_SL.copy_(torch.randint(0, 9, state.tokens_SL.shape, generator=generator))
    state.ints_SF[:, Field.LENGTH] = torch.tensor(lengths)
    for line, (options, bad_words) in enumerate(rules):
        made = make_rules(SamplingParams(**options), bad_words, EngineLimits(30, VOCAB))
        assert made is not None
        write_rules(state.add_rules(VOCAB), Transfers(torch.device("cpu")), line, made, num_prompt)
    return state, BatchView.gather(state, torch.arange(len(lengths)), 4, reference)


def _trees(num_requests: int) -> DraftTrees:
    """Nodes 1 and 3 hang on the root, 2 and 4 on 1, 5 on 2."""
    tokens = torch.randint(0, 9, (num_requests, 6), generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([-1, 0, 1, 0, 1, 2]).expand(num_requests, -1)
    depths = torch.tensor([0, 1, 2, 1, 2, 3]).expand(num_requests, -1)
    sees = torch.tensor([1, 3, 7, 9, 19, 39], dtype=torch.int32).expand(num_requests, -1)
    return DraftTrees(tokens, None, parents, depths, sees[:, :, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """All is computed element by element, or counted: deterministic mode needs no kernels of its own here. The logits
    that come in stay where they are kept."""
    rules = list(RULES.values())
    lengths = [10 + i % 3 for i in range(len(rules) + 1)]
    state, view = _table(rules, 8, lengths)
    trees = _trees(len(lengths))
    logits = torch.randn(len(lengths) * 6, VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = logits.clone()
    edits = Edits.MASK | Edits.BAD_WORDS | Edits.VALUES
    found = edited_logits(state, view, trees, logits, edits, reference, fixed_shapes=True, keep=True)
    assert found.dtype == torch.float32
    assert torch.equal(logits, before)
    assert torch.equal(found[-6:], before[-6:].float())  # without rules
    part = edited_logits(state, view, trees, logits, edits, reference, fixed_shapes=False, keep=True)
    assert torch.equal(part, found)
    for i in range(len(rules)):
        line = torch.tensor([i])
        alone = edited_logits(
            state, BatchView.gather(state, line, 4, reference),
            DraftTrees(*(None if x is None else x[i : i + 1] for x in (trees.tokens_BN, None, trees.parents_BN,
                                                                       trees.depths_BN, trees.mask_BNW))),
            logits[6 * i : 6 * i + 6], edits, reference, fixed_shapes=True, keep=True,
        )  # fmt: skip
        assert torch.equal(alone, found[6 * i : 6 * i + 6])
        assert not torch.equal(alone, before[6 * i : 6 * i + 6].float())


def test_masks_of_nodes() -> None:
    """A grammar forbids tokens at each node of a tree. Other requests, and other nodes, keep theirs."""
    state, view = _table([RULES["allowed"]], 8, [10, 11])
    table = state.add_rules(VOCAB)
    table.add_node_masks(6)
    assert table.node_masks_SNW is not None
    table.node_masks_SNW[1, 2] = torch.tensor([0b1010, 0])
    table.edits_S[1] = int(Edits.NODE_MASK)
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(2))
    edits = Edits.MASK | Edits.NODE_MASK
    for fixed_shapes in (False, True):
        found = edited_logits(state, view, _trees(2), logits, edits, reference, fixed_shapes=fixed_shapes, keep=True)
        assert found[8].isfinite().nonzero()[:, 0].tolist() == [1, 3]
        assert torch.equal(found[[6, 7, 9, 10, 11]], logits[[6, 7, 9, 10, 11]])
        assert found[:6].isfinite().sum(1).tolist() == [31] * 6


@pytest.mark.parametrize(
    ("options", "bad_words", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, (), "logit_bias: 61 is not a token id (0 .. 60)"),
        ({"allowed_token_ids": (VOCAB,)}, (), "allowed_token_ids: 61 is not a token id (0 .. 60)"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, (), "logit_bias may have up to 1024 entries, not 1025"),
        ({}, tuple((1, 1 + i // 60, i % 60) for i in range(257)), "with and without a space before them, not 257"),
        ({}, (tuple(range(17)),), "up to 16 tokens in a word, not 17"),
        (
            {"allowed_token_ids": (3,)},
            ((3,),),
            "no token is left to choose: allowed_token_ids and bad_words forbid all",
        ),
        ({"allowed_token_ids": (0,), "min_tokens": 2}, (), "allowed_token_ids and min_tokens forbid all"),
    ],
)
def test_rules_that_cannot_be_followed(options: dict[str, Any], bad_words: Any, message: str) -> None:
    limits = EngineLimits(30, 2000 if "1025" in message else VOCAB, eos_token_ids=(0,))
    with pytest.raises(FieldError, match=re.escape(message)):
        make_rules(SamplingParams(**options), bad_words, limits)


def test_an_end_that_the_model_does_not_have_is_no_error() -> None:
    rules = make_rules(SamplingParams(min_tokens=2), (), EngineLimits(30, VOCAB, eos_token_ids=(5, 10 * VOCAB)))
    assert rules is not None
    is_allowed = np.unpackbits(rules.allowed(()).view(np.uint8), bitorder="little")
    assert np.flatnonzero(is_allowed[:VOCAB] == 0).tolist() == [5]


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    """As in vLLM: the option is about the output."""
    [request] = requests([NONE])
    prompt, [plain] = list(request.prompt_token_ids), run_requests(tiny_engine(), [request])
    first, second = plain.token_ids[:2]
    for bad_words, is_plain in (((prompt[-1], first),), True), (((first, second),), False):
        [found] = run_requests(tiny_engine(), [replace(request, bad_words=bad_words)])
        assert (found.token_ids == plain.token_ids) == is_plain
