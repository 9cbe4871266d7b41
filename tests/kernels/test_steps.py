"""The small steps of a round, torch and Triton alike, against plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.batch import LIKELY_COLUMNS, NO_TOKEN, NUM_FIELDS, Committed, Field
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []
PAGE = 4


def on_device(values: object) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def slot_table(num_slots: int, num_pages: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_slots * num_pages, generator=generator).int().view(num_slots, num_pages).to(DEVICE)


@pytest.mark.parametrize("case", ["chain", "tree", "draft step", "extend", "plain"])
def test_span_layout(ops: Ops, case: str) -> None:
    """The arguments that a round gives it, against the same in plain Python."""
    lengths, ends = [0, 3, 17, 30, 5], [0, 0, 1, 0, 0]  # the fourth ends where its pages do
    ints = torch.zeros(5, NUM_FIELDS, dtype=torch.int64, device=DEVICE)
    ints[:, Field.LENGTH], ints[:, Field.DONE] = on_device(lengths), on_device(ends)
    table = slot_table(5, 8, 0)
    length, done = ints[:, Field.LENGTH], ints[:, Field.DONE]
    depths, counts = [0, 1, 1, 2, 2, 3], [1, 3, 2, 2, 1]
    arguments: dict[str, tuple[int, dict[str, Any]]] = {
        "plain": (1, {}),
        "chain": (2, {"start": 3, "position": 3}),
        "tree": (6, {"depths_BQ": on_device([depths]).expand(5, -1)}),
        "draft step": (4, {"start": 9, "position": 3, "position_stride": 0, "mask_start": 1}),
        "extend": (3, {"start": 1, "position": 1, "num_written_B": on_device(counts)}),
    }
    num_queries, options = arguments[case]
    found = ops.raw.span_layout(table, PAGE, length, done, num_queries, **options)
    start, position = options.get("start", 0), options.get("position", 0)
    slots, positions = [], []
    for b in range(5):
        for q in range(num_queries):
            index = lengths[b] + start + q
            page = int(table[b, min(index // PAGE, table.shape[1] - 1)])
            written = not ends[b] and (case != "extend" or q < counts[b])
            slots.append(page * PAGE + index % PAGE if written else -1)
            offset = depths[q] if case == "tree" else q * options.get("position_stride", 1)
            positions.append(lengths[b] + position + offset)
    assert found.slots_T.tolist() == slots
    assert found.positions_T.tolist() == positions
    assert found.starts_B.tolist() == [n + start for n in lengths]
    assert found.mask_starts_B.tolist() == [n + options.get("mask_start", 0) for n in lengths]
    assert found.query_starts.tolist() == [b * num_queries for b in range(6)]


class Requests:
    """State of 12 slots and padding, in Python and on the device; sequences of every kind of ending."""

    def __init__(self, seed: int, keeps_tokens: bool) -> None:
        rng = random.Random(seed)
        self.ints = [[rng.randrange(10) for _ in range(NUM_FIELDS)] for _ in range(13)]
        for slot, ints in enumerate(self.ints):
            ints[Field.LENGTH] = rng.randrange(20)
            ints[Field.LIMIT] = ints[Field.LENGTH] + 1 + rng.choice([1, 2, 5, 40])
            ints[Field.DONE] = int(slot in (4, 12))
            ints[Field.IGNORE_EOS] = rng.randrange(2)
            ints[Field.STOP :] = [rng.choice([-1, rng.randrange(12)]) for _ in ints[Field.STOP :]]
        self.history = [[rng.randrange(100) for _ in range(32 if keeps_tokens else 0)] for _ in range(13)]
        self.table = slot_table(13, 16, seed)
        self.ints_SF = on_device(self.ints)
        self.tokens_SL = torch.tensor(self.history, dtype=torch.int32, device=DEVICE).view(13, -1)

    def commit(self, slot: int, tokens: list[int], eos: list[int]) -> None:
        """What the engine of the host does with new tokens. NO_TOKEN ends the request; the device goes on with 0."""
        ints = self.ints[slot]
        if ints[Field.DONE]:
            return
        length = ints[Field.LENGTH]
        room = ints[Field.LIMIT] - length - 1
        failed, tokens = tokens[-1] == NO_TOKEN, [max(token, 0) for token in tokens]
        stops = ints[Field.STOP :] + ([] if ints[Field.IGNORE_EOS] else eos)
        ints[Field.DONE] = int(failed or len(tokens) >= room or any(t in stops for t in tokens[:room]))
        ints[Field.LENGTH] = min(length + len(tokens), ints[Field.LIMIT] - 1)
        ints[Field.ROOT] = tokens[-1]
        for i, token in enumerate(tokens, start=length + 1):
            if i < len(self.history[slot]):
                self.history[slot][i] = token

    def slot_of(self, slot: int, index: int) -> int:
        return int(self.table[slot, index // PAGE]) * PAGE + index % PAGE


def random_trees(batch: int, num_nodes: int, depth: int, rng: random.Random) -> tuple[list, list, list, list]:
    """Tokens, parents, depths and choices, which often follow the tree."""
    tokens, parents, depths, choice = [], [], [], []
    for _ in range(batch):
        row_tokens, row_parents, row_depths = [0], [-1], [0]
        taken = set()
        while len(row_tokens) < num_nodes:
            parent, token = rng.randrange(len(row_tokens)), rng.randrange(12)
            if (parent, token) not in taken and row_depths[parent] < depth:
                taken.add((parent, token))
                row_tokens.append(token)
                row_parents.append(parent)
                row_depths.append(row_depths[parent] + 1)
        row_choice = [rng.choice([NO_TOKEN, rng.randrange(12), rng.randrange(12)]) for _ in range(num_nodes)]
        for node in range(1, num_nodes):
            if rng.random() < 0.7:
                row_choice[row_parents[node]] = row_tokens[node]
        tokens.append(row_tokens)
        parents.append(row_parents)
        depths.append(row_depths)
        choice.append(row_choice)
    return tokens, parents, depths, choice


def packed(scores: list[float]) -> list[int]:
    """Pack the numbers of drafts with at least each probability: six numbers of five bits, and a bit, in a column."""
    counts = [sum(score >= -0.1 * 1.4**k for score in scores[1:]) for k in range(12)]
    return [
        sum(min(count, 31) << 5 * i for i, count in enumerate(part)) + (1 << 30) for part in (counts[:6], counts[6:])
    ]


@pytest.mark.parametrize("keeps_tokens", [False, True])
@pytest.mark.parametrize("case", ["root alone", "chain", "short chains", "drawn", "tree", "given path"])
def test_commit_round(ops: Ops, case: str, keeps_tokens: bool) -> None:
    lengths, failed = set(), set()
    for seed in range(3):
        rng = random.Random(seed)
        state = Requests(seed, keeps_tokens)
        rows = [*rng.sample(range(12), 8), 12, 12]
        batch, eos = len(rows), [3, 11]
        num_nodes = {"root alone": 1, "tree": 20, "given path": 20}.get(case, 6)
        is_tree = num_nodes == 20
        max_path = 5 if is_tree else num_nodes
        tokens, parents, depths, choice = random_trees(batch, num_nodes, 4 if is_tree else num_nodes, rng)
        if not is_tree:
            parents = [list(range(-1, num_nodes - 1))] * batch
            for b in range(batch):
                for node in range(1, num_nodes):
                    choice[b][node - 1] = tokens[b][node] if rng.random() < 0.7 else rng.choice([NO_TOKEN, 3, 8])
        sizes = [rng.randrange(1, num_nodes + 1) if case == "short chains" else num_nodes for _ in rows]
        paths = [walk(*row) for row in zip(tokens, parents, choice, sizes, strict=True)]
        drawn = [rng.choice([NO_TOKEN, rng.randrange(12), rng.randrange(12)]) for _ in rows]
        broken = [rng.randrange(num_nodes) if case == "drawn" else 0 for _ in rows]
        scores = [[0.0, *sorted((-7.0 * rng.random() for _ in range(num_nodes - 1)), reverse=True)] for _ in rows]
        if case in ("drawn", "given path"):
            paths = [path[: rng.randrange(1, len(path) + 1)] for path in paths]
        new = [
            [*(tokens[b][node] for node in path[1:]), drawn[b] if case == "drawn" else choice[b][path[-1]]]
            for b, path in enumerate(paths)
        ]
        before = [list(ints) for ints in state.ints]
        options: dict[str, Tensor] = {}
        if is_tree:
            options |= {"parents_BN": on_device(parents), "depths_BN": on_device(depths)}
        if case == "short chains":
            options["num_nodes_B"] = on_device(sizes)
        if case in ("drawn", "given path"):
            options["num_path_B"] = on_device([len(path) for path in paths])
        if case == "given path":
            options["path_BN"] = on_device([path + [7] * (num_nodes - len(path)) for path in paths])
        if case == "drawn":
            options |= {"next_token_B": on_device(drawn), "num_broken_B": on_device(broken)}
            options["scores_BN"] = torch.tensor(scores, dtype=torch.float32, device=DEVICE)
        margins = [[rng.random() for _ in range(num_nodes)] for _ in rows]
        if case != "short chains":
            options["margin_BN"] = on_device(margins)
        found: Committed = ops.raw.commit_round(
            state.ints_SF,
            state.tokens_SL,
            state.table,
            on_device(rows),
            PAGE,
            on_device(eos),
            max_path,
            on_device(tokens),
            None if case == "drawn" else on_device(choice),
            **options,
        )
        for b, (slot, path) in enumerate(zip(rows, paths, strict=True)):
            state.commit(slot, new[b], eos)
            length, live = before[slot][Field.LENGTH], not before[slot][Field.DONE]
            pad = [0] * (max_path - len(path))
            assert found.path_BM[b].tolist() == path + pad
            assert found.tokens_BM[b].tolist() == [*new[b][:-1], max(new[b][-1], 0), *pad]
            depth = max(depths[b]) if is_tree else sizes[b] - 1
            likely = packed(scores[b]) if case == "drawn" else [0] * LIKELY_COLUMNS
            report = [len(path) if live else 0, sizes[b] - 1, depth, broken[b], *likely, *new[b], *pad]
            assert found.output_BZ[b, : len(report)].tolist() == report
            on_path = torch.full((max_path,), torch.inf)
            if case != "short chains":
                on_path[: len(path)] = torch.tensor([margins[b][node] for node in path])
            assert torch.equal(found.output_BZ[b, len(report) :].cpu().view(torch.float32), on_path)
            assert found.accept_index_T.view(batch, -1)[b].tolist() == [b * num_nodes + node for node in path + pad]
            for index, node in enumerate(path):
                moved = live and node != index
                at = b * max_path + index
                assert found.source_T[at] == state.slot_of(slot, length + node)
                assert found.target_T[at] == (state.slot_of(slot, length + index) if moved else -1)
            assert found.target_T.view(batch, -1)[b, len(path) :].tolist() == [-1] * len(pad)
            lengths.add(len(path))
            failed.add(new[b][-1] == NO_TOKEN)
        assert found.num_path_B.tolist() == [len(path) for path in paths]
        assert state.ints_SF.tolist() == state.ints
        assert state.tokens_SL.tolist() == state.history
        assert found.output_BZ.dtype == torch.int32
    assert len(lengths) > 1 or case == "root alone"
    assert failed == {False, True}


def walk(tokens: list[int], parents: list[int], choice: list[int], size: int) -> list[int]:
    path = [0]
    while True:
        children = [n for n in range(1, size) if parents[n] == path[-1] and tokens[n] == choice[path[-1]]]
        if not children:
            return path
        path += children


@pytest.mark.parametrize(("batch", "num_nodes"), [(1, 4), (5, 3), (40, 8), (8, 33)])
def test_share_budget(ops: Ops, batch: int, num_nodes: int) -> None:
    """The best drafts of all, of equal ones the shallowest; each chain keeps its root."""
    generator = torch.Generator().manual_seed(batch)
    steps = -torch.randint(0, 4, (batch, num_nodes - 1), generator=generator).float() / 4  # many are equal
    scores = torch.cat((torch.zeros(batch, 1), steps.cumsum(1)), dim=1)
    scores[::7, 2:] = -torch.inf
    scores[1::5, -1:] = torch.nan
    scores[3::5, 1], scores[4::5, 1] = 0.0, -0.0
    done = (torch.arange(batch) % 6 == 4).long()
    for num_verified in {batch, batch + 1, (batch + batch * num_nodes) // 2, batch * num_nodes}:
        keys = {}
        for b, line in enumerate(scores.tolist()):
            for n, score in enumerate(line[1:], start=1):
                keys[b, n] = (torch.inf if score != score or done[b] else -score, n, b)
        chosen = sorted(keys, key=lambda place: keys[place])[: num_verified - batch]
        expected = [1 + sum(b == one for one, _ in chosen) for b in range(batch)]
        columns = torch.stack((done, done), dim=1).to(DEVICE)
        found = ops.raw.share_budget(scores.to(DEVICE), columns[:, 1], num_verified)
        assert found.tolist() == expected
        assert sum(expected) == num_verified


@pytest.mark.parametrize("counts", [[1], [3, 1, 4, 1], [4, 4], [1, 1, 1, 1, 2]])
def test_pack_nodes(ops: Ops, counts: list[int]) -> None:
    batch, num_nodes = len(counts), 4
    tokens, slots, positions = torch.randperm(3 * batch * num_nodes).to(DEVICE).view(3, batch, num_nodes)
    found = ops.raw.pack_nodes(on_device(counts), tokens, slots.reshape(-1), positions.reshape(-1), sum(counts))
    kept = [(b, n) for b, count in enumerate(counts) for n in range(count)]
    assert found.nodes_T.tolist() == [b * num_nodes + n for b, n in kept]
    for packed, whole in ((found.tokens_T, tokens), (found.slots_T, slots), (found.positions_T, positions)):
        assert packed.tolist() == [int(whole[b, n]) for b, n in kept]
    assert found.query_starts.tolist() == [sum(counts[:b]) for b in range(batch + 1)]
    for b, count in enumerate(counts):
        assert found.index_BN[b].tolist() == [kept.index((b, min(n, count - 1))) for n in range(num_nodes)]
