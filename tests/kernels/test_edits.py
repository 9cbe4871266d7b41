"""Rules of requests: both implementations, each node on its own against the oracle's rules, in one batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbatch.batch import Edits, TreeNodes
from specbatch.cache.rule_table import RuleTable
from specbatch.engine.rules import make_rules
from specbatch.engine.table_writer import write_rules
from specbatch.engine.transfers import Transfers
from specbatch.kernels import torch as reference
from specbatch.types import EngineLimits, SamplingParams
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []

VOCAB, NUM_PROMPT, CPU = 61, 8, torch.device("cpu")
BAD_WORDS = ((5, 5), (3, 8, 3), (8, 3), (7,), (5, 3, 3, 5), *((a, b, 0) for a in range(9) for b in range(9)))
RULES: list[tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = [
    ({"repetition_penalty": 1.3}, ()),
    ({"repetition_penalty": 0.8, "presence_penalty": -0.5}, ()),
    ({"frequency_penalty": 0.7}, ()),
    ({"logit_bias": {3: 4.0, 0: -100.0, 60: 2.5}}, ()),
    ({"allowed_token_ids": tuple(range(0, VOCAB, 2))}, ()),
    ({}, BAD_WORDS),
    ({"min_tokens": 6, "stop_token_ids": tuple(range(20))}, ()),
    ({"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {5: 3.0},
      "min_tokens": 5, "stop_token_ids": (7, 9)}, BAD_WORDS),
]  # fmt: skip
PARENTS = (-1, 0, 1, 0, 2, 3)
FORBID = Edits.MASK | Edits.BAD_WORDS


def table() -> tuple[RuleTable, torch.Tensor]:
    """A line for each rule, one with a mask of nodes, one without rules; and texts."""
    rules = RuleTable(len(RULES) + 2, VOCAB, torch.float32, CPU)
    rules.add_node_masks(len(PARENTS))
    assert rules.node_masks_SNW is not None
    for line, (options, bad_words) in enumerate(RULES):
        made = make_rules(SamplingParams(**options), bad_words, EngineLimits(30, VOCAB))
        assert made is not None
        write_rules(rules, Transfers(CPU), line, made, NUM_PROMPT)
    line = len(RULES)
    rules.node_masks_SNW[line] = torch.randint(-(2**31), 2**31 - 1, rules.node_masks_SNW[line].shape).int()
    rules.edits_S[line] = int(Edits.NODE_MASK)
    return rules, torch.randint(0, 9, (len(RULES) + 2, 40)).int()


def nodes_of(lines: list[int], shape: str) -> TreeNodes:
    torch.manual_seed(1)
    width = {"root": 1, "chain": 4, "tree": len(PARENTS)}[shape]
    tokens, lengths = torch.randint(0, 9, (len(lines), width)), torch.tensor([10 + i % 5 for i in lines])
    depths = mask = None
    if shape == "tree":
        depths_of, sees = [0], [1]
        for node, parent in enumerate(PARENTS[1:], start=1):
            depths_of.append(depths_of[parent] + 1)
            sees.append(sees[parent] | 1 << node)
        depths = torch.tensor(depths_of).expand(len(lines), -1)
        mask = torch.tensor(sees, dtype=torch.int32).expand(len(lines), -1)[:, :, None]
    return TreeNodes(torch.tensor(lines), lengths, tokens, depths, mask)


def on_device(rules: RuleTable) -> Any:
    moved = {field.name: getattr(rules, field.name) for field in dataclasses.fields(rules)}
    return dataclasses.make_dataclass("Rules", moved)(
        **{name: None if x is None else x.to(DEVICE) for name, x in moved.items()}
    )


def edited(raw: Any, nodes: TreeNodes, rules: Any, text: torch.Tensor, edits: Edits, logits: torch.Tensor) -> Any:
    x = logits.to(DEVICE, copy=True)
    given = TreeNodes(*(None if one is None else one.to(DEVICE) for one in nodes))
    raw.edit_logits(x, given, rules, text.to(DEVICE), edits)
    return x.cpu()


@pytest.mark.parametrize("shape", ["root", "chain", "tree"])
@pytest.mark.parametrize("edits", [FORBID, FORBID | Edits.VALUES, FORBID | Edits.VALUES | Edits.NODE_MASK], ids=str)
def test_as_the_reference_of_one_request_at_a_time(ops: Ops, shape: str, edits: Edits) -> None:
    """The reference itself is compared with the oracle where the engine is tested. What a kind needs, and is not asked
    for, is not done; lines without rules stay."""
    torch.manual_seed(0)
    rules, text = table()
    lines = list(range(len(RULES) + 2))
    nodes = nodes_of(lines, shape)
    width = nodes.tokens_BN.shape[1]
    logits = torch.randn(len(lines) * width, VOCAB).to(torch.float32 if edits & Edits.VALUES else torch.bfloat16)
    found = edited(ops.raw, nodes, on_device(rules), text, edits, logits)
    for i, line in enumerate(lines):
        part = slice(i * width, (i + 1) * width)
        kinds = Edits(int(rules.edits_S[line])) & edits
        expected = logits[part].clone()
        if kinds:
            reference.edit_logits(expected, nodes.of_request(i, width), rules, text, kinds)
        torch.testing.assert_close(found[part], expected, rtol=1e-6, atol=0, msg=f"line {line}")
        assert torch.equal(found[part], logits[part]) != bool(kinds), line


class Launches(TorchDispatchMode):
    """Counts operations of torch that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "most"), [(Edits.BAD_WORDS, 40), (FORBID | Edits.VALUES, 110)], ids=str)
def test_few_launches_in_the_reference(kind: Edits, most: int) -> None:
    """A bad word of 16 tokens costs what one of two does."""
    rules, text = table()
    with Launches() as launches:
        reference.edit_logits(torch.randn(20, VOCAB), nodes_of([0, 5, 6, 7, 9], "chain"), rules, text, kind)
    assert launches.count <= most


def test_few_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five kernels of Triton, and three small operations of torch."""
    pytest.importorskip("triton")
    from specbatch.kernels.triton import edits

    kernels = [
        name
        for name in vars(edits)
        if name in ("_forbid", "_forbid_bad_words", "_add_biases", "_count_text", "_penalise")
    ]
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: launched.append(self.name)

    for name in kernels:
        monkeypatch.setattr(edits, name, Counted(name))
    rules, text = table()
    nodes = nodes_of(list(range(len(RULES) + 2)), "tree")
    with Launches() as launches:
        edits.edit_logits(
            torch.randn(nodes.tokens_BN.numel(), VOCAB), nodes, rules, text, FORBID | Edits.VALUES | Edits.NODE_MASK
        )
    assert sorted(launched) == sorted(kernels)
    assert launches.count <= 4
