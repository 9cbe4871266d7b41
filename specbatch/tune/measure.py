"""Times the parts of rounds and prompt chunks, for `costs.CostModel` to be fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft import NoDraft
from specbatch.draft.method import DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.tune.costs import Measurement
from specbatch.tune.session import Session
from specbatch.tune.timing import TIMED_TOKENS, dummy_batch, dummy_requests, time_methods, time_steps

_GRAPH_NOISE = 0.02  # of the median of a captured graph's times
_CUDA_STEPS, _CPU_STEPS = 40, 3
_SHORT_SECONDS = 0.5  # of a prompt; what takes longer is timed twice
_PROMPT_REPEATS = 4
_NGRAM_NODES = (2, 3, 5, 9, 17, 33)


def probes(depth: int, topk: int, *, every: bool = False) -> list[DraftShape]:
    """Shapes that show every part: chains up to `depth`, and trees of 1 and 2 steps by branches up to `topk`, which
    give the costs of a later step. `every`: chains of every length, and more sizes of trees. What verification takes
    rises by leaps with the tokens of the batch, which a line between a few sizes passes over."""
    lengths = range(1, depth + 1) if every else sorted({1, 2, max(1, depth // 2), depth})
    shapes = [DraftShape(steps, 1, steps + 1) for steps in lengths]
    branches = [k for k in (2, 4, 8, 16) if k <= topk]
    for k, nodes in zip(branches, (6, 16, 32, 64), strict=False):
        shapes += [DraftShape(1, k, k + 1), DraftShape(2, k, min(nodes, 1 + k + k * k))]
    if every and branches:
        k = branches[-1]
        shapes += [DraftShape(2, k, nodes) for nodes in (12, 24, 48, 64) if k + 1 < nodes <= 1 + k + k * k]
    return list(dict.fromkeys(shapes))


def time_plain(session: Session, batch: int, context: int) -> list[Measurement]:
    """On CUDA: plain rounds of `batch` requests of `context` tokens, and what the host and the copies take of any
    round; empty where the cache does not hold that many requests."""
    engine, net = session.engine, session.parts.net
    context = _longest_context(session, context)
    if not _fits(session, batch, context):
        return []
    session.use(ByBatch.always(None))
    with dummy_batch(engine, batch, context):
        plain, *followed = time_methods(engine, [NoDraft(), *([NoDraft(net)] if net is not None else [])])
        whole, host = time_steps(engine, _CUDA_STEPS)
    found = [Measurement("plain", batch, 1, plain["round"], _GRAPH_NOISE), Measurement("host", batch, 1, host)]
    if plain["round"] > host:  # else the device waits, and what it does in addition to the graph does not show
        found.append(Measurement("copies", batch, 1, max(0.0, whole - plain["round"])))
    found += [Measurement("extend", batch, 1, parts["extend"], _GRAPH_NOISE) for parts in followed]
    return found


def time_batch(session: Session, batch: int, context: int, depth: int, topk: int, max_nodes: int) -> list[Measurement]:
    """The parts of drafting rounds of `batch` requests of `context` tokens, at widths of up to `max_nodes` nodes of all
    requests together; without CUDA, of plain rounds, too. Empty where the cache does not hold that many requests, or
    nothing can be drafted for them. Without a draft network, widths are those of n-gram drafts."""
    if session.parts.net is None:
        shapes = [DraftShape(n - 1, 1, n) for n in _NGRAM_NODES if n <= session.engine.num_lookahead]
    else:
        shapes = probes(depth, topk, every=session.on_cuda)
    fitting = [shape for shape in shapes if batch * shape.num_draft_tokens <= max_nodes]
    context = _longest_context(session, context)
    if not fitting or not _fits(session, batch, context):
        return []
    methods = [_FixedDraft(shape) if session.parts.net is None else session.make(shape) for shape in fitting]
    if session.on_cuda:
        with dummy_batch(session.engine, batch, context):
            return list(_rounds(session, batch, fitting, time_methods(session.engine, methods)))
    session.use(ByBatch.always(None))
    with dummy_batch(session.engine, batch, context):
        whole, _ = time_steps(session.engine, _CPU_STEPS)
        plain, *times = time_methods(session.engine, [NoDraft(session.parts.net), *methods])
    found = list(_plain(session, batch, whole, plain, whole - (plain["round"] - plain["extend"])))
    return found + list(_rounds(session, batch, fitting, times))


def _longest_context(session: Session, context: int) -> int:
    """At most `context`: tokens of a request that may still write TIMED_TOKENS."""
    return max(1, min(context, session.engine.limits.max_prompt_tokens - TIMED_TOKENS))


def _fits(session: Session, batch: int, context: int) -> bool:
    """Whether the cache holds that many of these requests."""
    engine = session.engine
    pages = -(-(context + TIMED_TOKENS + engine.num_lookahead) // engine.page_size) + 1
    return batch * pages <= engine.num_pages


def _plain(session: Session, batch: int, ms: float, parts: dict[str, float], rest: float) -> Iterator[Measurement]:
    """`ms`: of a plain round without the draft network; `rest`: of any round, beyond its parts."""
    yield Measurement("plain", batch, 1, ms)
    if session.parts.net is None:
        yield Measurement("verify", batch, 1, parts["verify"])  # of requests for which nothing is found
    else:
        yield Measurement("extend", batch, 1, parts["extend"])
    yield Measurement("overhead", batch, 1, max(0.0, rest))


def _rounds(
    session: Session, batch: int, shapes: list[DraftShape], times: list[dict[str, float]]
) -> Iterator[Measurement]:
    for shape, parts in zip(shapes, times, strict=True):
        noise = _GRAPH_NOISE if session.on_cuda else math.inf
        yield from _parts(batch, shape, session.parts.net, parts, _first_step(shape, shapes, times), noise)


def time_prompts(session: Session, chunk_tokens: int) -> list[Measurement]:
    """A chunk of each size: one prompt, prefill and first token; with the draft network, whose own prompts are part of
    what a prompt costs, and without."""
    session.use(ByBatch.always(DraftShape(1, 1, 2)))
    found = list(_prompts(session, chunk_tokens, "prefill"))
    if session.parts.net is not None:
        session.use(ByBatch.always(None))
        found += _prompts(session, chunk_tokens, "prefill_plain")
    return found


def _prompts(session: Session, chunk_tokens: int, kind: str) -> Iterator[Measurement]:
    longest = min(chunk_tokens, session.engine.limits.max_prompt_tokens - 1)
    # Chunks that are graphs are padded to the next power of two (`prompt_graphs`): at three quarters of one, what is
    # added is what is added on average. A full chunk is none of them, but one somewhat short of it may be.
    sizes = (16, 96, 384, 1536, 3 * chunk_tokens // 4, chunk_tokens)
    best = {max(1, min(longest, size)): math.inf for size in sizes}
    # Size after size, then again: what is compiled and loaded at first must not count as the first size's.
    for repeat in range(_PROMPT_REPEATS):
        for tokens, seconds in best.items():
            if repeat < 2 or seconds < _SHORT_SECONDS:
                requests = dummy_requests(session.engine.limits.vocab_size, 1, tokens, 1)
                best[tokens] = min(seconds, session.run(requests).seconds)
    for tokens, seconds in sorted(best.items()):
        yield Measurement(kind, 1, tokens, 1e3 * seconds)


def _first_step(shape: DraftShape, shapes: list[DraftShape], times: list[dict[str, float]]) -> float:
    """What drafting one step with as many branches takes; 0 for n-gram drafts, which have no steps."""
    alike = (t["draft"] for s, t in zip(shapes, times, strict=True) if (s.num_steps, s.topk) == (1, shape.topk))
    return next(alike, 0.0)


def _parts(
    batch: int, shape: DraftShape, net: DraftNet | None, parts: dict[str, float], first_step: float, noise: float
) -> Iterator[Measurement]:
    kind = "verify" if shape.is_chain else "verify_tree"
    yield Measurement(kind, batch, shape.num_draft_tokens, parts["verify"], noise)
    if net is None:
        return
    yield Measurement("extend", batch, shape.max_path, parts["extend"], noise)
    if shape.num_steps == 1:
        yield Measurement("draft_start", batch, shape.topk, parts["draft"], noise)
    else:
        later = parts["draft"] - first_step
        # Each of the two is off by so much, and what is left is less than either.
        share = noise * math.hypot(parts["draft"], first_step) / later if later > 0 else math.inf
        yield Measurement("draft_step", batch, shape.topk, max(0.0, later / (shape.num_steps - 1)), share)


class _FixedDraft(NoDraft):
    """Chains of full length whatever the text offers: what verifying them costs, not what they are worth."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.num_nodes = self.max_path = self.num_lookahead = shape.num_draft_tokens

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> DraftTrees:
        root_B1 = rows.field(Field.ROOT)[:, None]
        return DraftTrees(torch.cat((root_B1, torch.zeros_like(root_B1).expand(-1, self.num_nodes - 1)), dim=1))
