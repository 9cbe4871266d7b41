"""The candidates worth replaying: all of the legal ones but for a ladder of tree sizes."""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.draft.shape import DraftShape
from specbatch.tune.candidates import NgramShape

MAX_NODES = 64  # of a tree
NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
NGRAM_NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
NGRAM_MATCHES = ((1, 3), (1, 5), (2, 3), (2, 5), (2, 8), (3, 5), (3, 8), (4, 8))  # shortest and longest suffix


def neural_space(topk: int, depth: int, max_nodes: int = MAX_NODES, nodes: Sequence[int] = NODES) -> list[DraftShape]:
    """Shapes of at most so many branches and steps. Chains have num_steps + 1 nodes; trees 2 to topk + (num_steps - 1)
    * topk^2 + 1, and of those the sizes in `nodes`, with the largest that is allowed.

    Trees of fewer nodes than a path of num_steps has are left out: no node of theirs is as deep as the last steps, so
    the same tree costs fewer steps. So are trees that another shape is for less: of one draft (the chain 1/1/2), and of
    one step with fewer drafts than branches.
    """
    shapes = [DraftShape(steps, 1, steps + 1) for steps in range(1, depth + 1) if steps < max_nodes]
    for k in range(2, topk + 1):
        for steps in range(1, depth + 1):
            most = min(max_nodes, DraftShape(steps, k, 2).num_candidates + 1)
            sizes = sorted({n for n in nodes if n < most} | {most})
            shapes += [DraftShape(steps, k, n) for n in sizes if n > max(steps, 2, k if steps == 1 else 0)]
    for shape in shapes:
        shape.check()
    return shapes


def ngram_space(
    max_nodes: int = MAX_NODES,
    nodes: Sequence[int] = NGRAM_NODES,
    matches: Sequence[tuple[int, int]] = NGRAM_MATCHES,
) -> list[NgramShape]:
    """Every size with every pair of match lengths."""
    return [NgramShape(n, low, high) for low, high in matches for n in nodes if n <= max_nodes]


def batch_ladder(max_running: int, graph_sizes: Sequence[int] = ()) -> list[int]:
    """Batch sizes to choose a shape for, up to `max_running` and with it: the sizes of captured graphs, between which a
    round costs the same; without any, every size up to 4 and about three to each doubling from there."""
    if graph_sizes:
        return sorted({size for size in graph_sizes if size < max_running} | {max_running})
    sizes, size = {max_running}, 1
    while size < max_running:
        sizes.add(size)
        size += max(1, size // 4 if size < 8 else size // 3)
    return sorted(sizes)
