"""Times the parts of rounds and prompt chunks, for `costs.CostModel` to be fitted to.

On CUDA each part is timed as a captured graph over rows that stand still; the oracle engine runs real rounds and says
what their parts took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

import torch

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft import NoDraft, make_method
from specbatch.draft.method import DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.base import check_finite
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.sequence import Sequence as Row
from specbatch.oracle.engine import Engine
from specbatch.oracle.ngram import NoProposer
from specbatch.oracle.proposer import Proposer
from specbatch.oracle.schedule import ScheduledProposer
from specbatch.oracle.tree import DraftTree
from specbatch.tune.costs import Measurement
from specbatch.tune.session import Session
from specbatch.tune.timing import TIMED_TOKENS, dummy_requests, time_methods, time_steps

_GRAPH_NOISE = 0.02  # of the median of a captured graph's times
_ROUNDS = 3  # of the oracle engine, for each shape; after one to warm up
_SHORT_SECONDS = 0.5  # of a prompt; what takes longer is timed twice
_PROMPT_TURNS = 4
_NGRAM_NODES = (2, 3, 5, 9, 17, 33)


def probes(depth: int, topk: int, *, every: bool = False) -> list[DraftShape]:
    """Shapes that between them show every part: chains up to `depth`, and trees of 1 and 2 steps by branches up to
    `topk`, which is where a later step's costs come from. `every`: chains of every length, and more sizes of trees.
    What verification takes rises by leaps with the tokens of all rows, which a line between a few sizes passes over."""
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
    """Of the device engine: plain rounds of `batch` rows of `context` tokens, and what the host and the copies have to
    do with any round; empty where the cache does not hold so many rows."""
    engine, net = session.engine, session.parts.net
    assert isinstance(engine, DeviceEngine)
    context = max(1, min(context, engine.limits.max_prompt_tokens - TIMED_TOKENS))
    if not _fits(engine, batch, context + TIMED_TOKENS):
        return []
    plain = time_methods(engine, batch, context, [NoDraft()])[0]["round"]
    found = [Measurement("plain", batch, 1, plain, _GRAPH_NOISE)]
    session.use(ByBatch.always(None))
    whole, host = time_steps(engine, batch, context)
    found.append(Measurement("host", batch, 1, host))
    if plain > host:  # else the device waits, and what it does beside the graph does not show
        found.append(Measurement("copies", batch, 1, max(0.0, whole - plain)))
    if net is not None:
        followed = time_methods(engine, batch, context, [NoDraft(net)])[0]
        found.append(Measurement("extend", batch, 1, followed["extend"], _GRAPH_NOISE))
    return found


def time_batch(session: Session, batch: int, context: int, depth: int, topk: int, most_nodes: int) -> list[Measurement]:
    """The parts of drafting rounds of `batch` rows of `context` tokens (of the oracle engine: and of plain ones), at
    widths of up to `most_nodes` nodes of all rows together; empty where the cache does not hold so many rows, or
    nothing can be drafted for so many. Without a draft network, widths are those of lookups."""
    engine = session.engine
    if session.parts.net is None:
        shapes = [DraftShape(n - 1, 1, n) for n in _NGRAM_NODES if n <= engine.num_lookahead]
    else:
        shapes = probes(depth, topk, every=isinstance(engine, DeviceEngine))
    fitting = [shape for shape in shapes if batch * shape.num_draft_tokens <= most_nodes]
    written = TIMED_TOKENS if isinstance(engine, DeviceEngine) else _oracle_tokens(fitting)
    context = max(1, min(context, engine.limits.max_prompt_tokens - written))
    if not fitting or not _fits(engine, batch, context + written):
        return []
    if isinstance(engine, DeviceEngine):
        return list(_on_device(session, engine, batch, context, fitting))
    return list(_oracle(session, engine, batch, context, fitting))


def _fits(engine: Engine | DeviceEngine, batch: int, tokens: int) -> bool:
    """Whether the cache holds so many rows of so many tokens."""
    pages = -(-(tokens + engine.num_lookahead) // engine.page_size) + 1
    return batch * pages <= engine.num_pages


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
    # All sizes by turns: what is compiled and loaded at first must not count as the first size's.
    for turn in range(_PROMPT_TURNS):
        for tokens, seconds in best.items():
            if turn < 2 or seconds < _SHORT_SECONDS:
                best[tokens] = min(
                    seconds, session.run(dummy_requests(session.engine.limits.vocab_size, 1, tokens, 1)).seconds
                )
    for tokens, seconds in sorted(best.items()):
        yield Measurement(kind, 1, tokens, 1e3 * seconds)


def _on_device(
    session: Session, engine: DeviceEngine, batch: int, context: int, shapes: list[DraftShape]
) -> Iterator[Measurement]:
    net = session.parts.net
    methods = [_FixedDraft(s) if net is None else make_method(session.method, s, session.parts) for s in shapes]
    times = time_methods(engine, batch, context, methods)
    for shape, parts in zip(shapes, times, strict=True):
        yield from _parts(batch, shape, net, parts, _first_step(shape, shapes, times), _GRAPH_NOISE)


def _first_step(shape: DraftShape, shapes: list[DraftShape], times: list[dict[str, float]]) -> float:
    """What drafting one step with as many branches takes; 0 for lookups of several tokens, which have no steps."""
    alike = (t["draft"] for s, t in zip(shapes, times, strict=True) if (s.num_steps, s.topk) == (1, shape.topk))
    return next(alike, 0.0)


def _parts(
    batch: int, shape: DraftShape, net: DraftNet | None, parts: dict[str, float], first_step: float, rng: float
) -> Iterator[Measurement]:
    kind = "verify" if shape.is_chain else "verify_tree"
    yield Measurement(kind, batch, shape.num_draft_tokens, parts["verify"], rng)
    if net is None:
        return
    yield Measurement("extend", batch, min(shape.num_steps + 1, shape.num_draft_tokens), parts["extend"], rng)
    if shape.num_steps == 1:
        yield Measurement("draft_start", batch, shape.topk, parts["draft"], rng)
    else:
        later = parts["draft"] - first_step
        # Each of the two is off by so much, and what is left is less than either.
        share = rng * math.hypot(parts["draft"], first_step) / later if later > 0 else math.inf
        yield Measurement("draft_step", batch, shape.topk, max(0.0, later / (shape.num_steps - 1)), share)


def _oracle(
    session: Session, engine: Engine, batch: int, context: int, shapes: list[DraftShape]
) -> Iterator[Measurement]:
    net = session.parts.net
    proposers: list[Proposer] = []
    for shape in shapes:
        proposers.append(_FixedProposer(shape) if net is None else session.proposer(shape))
    switch = _Switch(NoProposer() if net is None else proposers[0])
    session.use_proposer(switch)
    for request in dummy_requests(engine.limits.vocab_size, batch, context, _oracle_tokens(shapes)):
        engine.submit(request)
    while engine.num_waiting or not engine.is_prefilled:
        check_finite(engine.step())
    assert engine.num_running == batch, "the cache does not hold so many rows"

    def timed(proposer: Proposer) -> dict[str, float]:
        switch.current = proposer
        parts: dict[str, list[float]] = {"draft": [], "verify": [], "extend": [], "round": []}
        for number in range(_ROUNDS + 1):
            began = time.perf_counter()
            check_finite(engine.step())
            values = (*engine.phase_seconds, time.perf_counter() - began)
            if number:
                for name, value in zip(parts, values, strict=True):
                    parts[name].append(1e3 * value)
        return {name: statistics.median(values) for name, values in parts.items()}

    plain = timed(NoProposer())
    if net is None:
        yield Measurement("plain", batch, 1, plain["round"])
        yield Measurement("verify", batch, 1, plain["verify"])  # of rows for which nothing is found
    else:
        yield Measurement("plain", batch, 1, plain["round"] - plain["extend"])
        yield Measurement("extend", batch, 1, plain["extend"])
    times = [timed(proposer) for proposer in proposers]
    engine.abort_all()
    for shape, parts in zip(shapes, times, strict=True):
        yield from _parts(batch, shape, net, parts, _first_step(shape, shapes, times), math.inf)
    rest = [p["round"] - p["draft"] - p["verify"] - p["extend"] for p in times]
    yield Measurement("overhead", batch, 1, max(0.0, statistics.median(rest)))


def _oracle_tokens(shapes: list[DraftShape]) -> int:
    """More than a timed row may write."""
    return (len(shapes) + 2) * (_ROUNDS + 1) * (1 + max((shape.num_steps for shape in shapes), default=0))


class _Switch(ScheduledProposer):
    """Drafts as `current` does, whoever that is; the leader follows what is committed."""

    def __init__(self, leader: Proposer) -> None:
        super().__init__(ByBatch.always(leader), leader)
        self.current = leader

    def propose(self, sequences: list[Row]) -> DraftTree:
        return self.current.propose(sequences)


class _FixedProposer(NoProposer):
    """Chains of full length whatever the text offers: what verifying them costs, not what they are worth."""

    def __init__(self, shape: DraftShape) -> None:
        self._count = shape.num_draft_tokens - 1
        self.num_lookahead = shape.num_draft_tokens

    def propose(self, sequences: list[Row]) -> DraftTree:
        return DraftTree.chain([[seq.tokens[-1], *[0] * self._count] for seq in sequences])


class _FixedDraft(NoDraft):
    """The same for the device engine."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.num_nodes = self.max_path = self.num_lookahead = shape.num_draft_tokens

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> DraftTrees:
        root_B1 = rows.field(Field.ROOT)[:, None]
        return DraftTrees(torch.cat((root_B1, torch.zeros_like(root_B1).expand(-1, self.num_nodes - 1)), dim=1))
