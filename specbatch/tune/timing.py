"""Times the parts of an engine's rounds and prompt chunks: for `costs.CostModel` and for the benchmarks.

Requests of equal length are computed up to their first token, and then one round of them runs again and again. On CUDA
that round is one graph with events between its parts; elsewhere the wall clock times each part. The engine must be
idle, and is idle afterwards.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft import METHODS, NoDraft
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine, check_finite
from specbatch.engine.round import Round
from specbatch.graphs.runner import GraphRunner
from specbatch.setup.dummies import dummy_batch, dummy_requests, fits
from specbatch.tune.costs import Measurement
from specbatch.tune.session import Session

_WARM_SECONDS = 0.05  # a GPU that was idle while the host compiled takes a while to run at full speed
_CUDA_REPEATS, _CPU_REPEATS = 20, 3
_WARM_STEPS = 3
_GRAPH_NOISE = 0.02  # relative noise of the median of a recorded graph's times
_CUDA_STEPS, _CPU_STEPS = 40, 3
_SHORT_SECONDS = 0.5  # seconds of a short prompt; longer ones are timed twice
_PROMPT_REPEATS = 4
_PHASES = ("draft", "verify", "extend")
_NGRAM_NODES = (2, 3, 5, 9, 17, 33)


def time_phases(engine: Engine, batch_size: int, context: int = 1000) -> dict[str, float]:
    """Time the draft method that the engine uses for that many requests. See `time_methods`."""
    with dummy_batch(engine, batch_size, context):
        return time_methods(engine, [engine.executor.rounds.at(batch_size).method])[0]


@torch.inference_mode()
def time_methods(engine: Engine, methods: Sequence[DraftMethod]) -> list[dict[str, float]]:
    """Median milliseconds of draft, verify, extend and the whole round of a dummy batch, with each of the draft
    methods. The batch is left as it was."""
    check_finite(engine.drain())
    running = engine.prepare_round()
    round_ = engine.executor.rounds.items[0]
    padding = [round_.state.padding] * (engine.executor.padded_size(len(running)) - len(running))
    req_idx_B = torch.tensor(running + padding, device=engine.device)
    restore = round_.state.saved()
    time_one = _time_graph if engine.device.type == "cuda" else _time_calls
    return [time_one(round_.drafting(method), req_idx_B, restore) for method in methods]


def time_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """Median milliseconds of a round of a dummy batch as the engine drafts now, launched and read by its own steps:
    (all of it, the part in which the host was busy). Its requests must not end: each may write TIMED_TOKENS."""
    batch_size, rounds = engine.num_running, engine.stats.rounds
    whole, host = list[float](), list[float]()
    for _ in range(_WARM_STEPS + steps):
        began, waited = time.perf_counter(), engine.waited_seconds
        check_finite(engine.step())
        whole.append(1e3 * (time.perf_counter() - began))
        host.append(whole[-1] - 1e3 * (engine.waited_seconds - waited))
    assert engine.stats.rounds - rounds == _WARM_STEPS + steps, "not every step was a round"
    assert engine.num_running == batch_size, "requests have ended"
    return statistics.median(whole[_WARM_STEPS:]), statistics.median(host[_WARM_STEPS:])


def _time_graph(round_: Round, req_idx_B: Tensor, restore: Callable[[], None]) -> dict[str, float]:
    runner, found = GraphRunner(req_idx_B.device), list[list[float]]()
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(_PHASES) + 1)]
    # A capture runs the round, too: it must write nothing and advance no request.
    round_.state.ints_SF[:, Field.DONE] = 1
    try:
        runner.capture(("round",), lambda: _run(round_, req_idx_B, lambda i: events[i].record()))
        warm = time.perf_counter() + _WARM_SECONDS
        while len(found) < _CUDA_REPEATS:
            restore()
            runner.replay(("round",))
            torch.cuda.synchronize()
            if time.perf_counter() >= warm:
                found.append([events[0].elapsed_time(event) for event in events])
    finally:
        restore()
    return _medians(found)


def _time_calls(round_: Round, req_idx_B: Tensor, restore: Callable[[], None]) -> dict[str, float]:
    found, marks = list[list[float]](), [0.0] * (len(_PHASES) + 1)

    def mark(i: int) -> None:
        marks[i] = 1e3 * time.perf_counter()

    for _ in range(1 + _CPU_REPEATS):
        try:
            _run(round_, req_idx_B, mark)
        finally:
            restore()
        found.append([one - marks[0] for one in marks])
    return _medians(found[1:])  # the first warms up


def _run(round_: Round, req_idx_B: Tensor, mark: Callable[[int], None]) -> Tensor:
    """Run a greedy round; return its output. `mark` is called before each phase and after the last."""
    mark(0)
    view, trees = round_.draft(req_idx_B, False)
    mark(1)
    verified = round_.verify(view, trees)
    mark(2)
    round_.extend(view, trees, verified)
    mark(3)
    assert verified.committed is not None
    return verified.committed.output_BZ


def _medians(marks: list[list[float]]) -> dict[str, float]:
    """Compute the median time of each phase and of the round. `marks`: for each run the milliseconds at which each
    phase began, and at which the round ended."""
    spans = {name: [m[i + 1] - m[i] for m in marks] for i, name in enumerate(_PHASES)}
    spans["round"] = [m[-1] for m in marks]
    return {name: statistics.median(values) for name, values in spans.items()}


def probes(depth: int, topk: int, *, every: bool = False, tree_depth: int = 2) -> list[DraftShape]:
    """Shapes that show every part: chains up to `depth`, and trees of 1 and `tree_depth` steps by branches up to
    `topk`, which give the costs of a later step. `every`: chains of every length, and more sizes of trees. What
    verification takes rises by leaps with the tokens of the batch, which a line between a few sizes passes over."""
    lengths = range(1, depth + 1) if every else sorted({1, 2, max(1, depth // 2), depth})
    shapes = [DraftShape(steps, 1, steps + 1) for steps in lengths]
    branches = [k for k in (2, 4, 8, 16) if k <= topk]
    for k, nodes in zip(branches, (6, 16, 32, 64), strict=False):
        most = DraftShape(tree_depth, k, 2).num_candidates + 1
        shapes += [DraftShape(1, k, k + 1), DraftShape(tree_depth, k, min(nodes, most))]
    if every and branches:
        k = branches[-1]
        most = DraftShape(tree_depth, k, 2).num_candidates + 1
        shapes += [DraftShape(tree_depth, k, nodes) for nodes in (12, 24, 48, 64) if k + 1 < nodes <= most]
    return list(dict.fromkeys(shapes))


def time_plain(session: Session, batch: int, context: int) -> list[Measurement]:
    """Time plain rounds on CUDA of `batch` requests of `context` tokens, and the time of the host and of copies in any
    round. The list is empty if the cache does not hold that number of requests."""
    engine, net = session.engine, session.parts.net
    if not fits(engine, batch, context):
        return []
    session.use(ByBatch.always(None))
    with dummy_batch(engine, batch, context, session.texts):
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
        # A step after one pass takes little of its time: the mean of many steps shows it.
        tree_depth = depth if METHODS[session.method].one_pass else 2
        shapes = probes(depth, topk, every=session.on_cuda, tree_depth=tree_depth)
    fitting = [shape for shape in shapes if batch * shape.num_draft_tokens <= max_nodes]
    if not fitting or not fits(session.engine, batch, context):
        return []
    vocab_size = session.engine.limits.vocab_size
    methods = [
        _FixedDraft(shape, vocab_size) if session.parts.net is None else session.make(shape) for shape in fitting
    ]
    if session.on_cuda:
        with dummy_batch(session.engine, batch, context, session.texts):
            return list(_parts(session, batch, fitting, time_methods(session.engine, methods)))
    session.use(ByBatch.always(None))
    with dummy_batch(session.engine, batch, context, session.texts):
        whole, _ = time_steps(session.engine, _CPU_STEPS)
        plain, *times = time_methods(session.engine, [NoDraft(session.parts.net), *methods])
    # Without a network: requests for which nothing is found.
    alone = "verify" if session.parts.net is None else "extend"
    # milliseconds of any round that its parts do not explain
    rest = max(0.0, whole - (plain["round"] - plain["extend"]))
    found = [("plain", whole), (alone, plain[alone]), ("overhead", rest)]
    return [Measurement(kind, batch, 1, ms) for kind, ms in found] + list(_parts(session, batch, fitting, times))


def _parts(
    session: Session, batch: int, shapes: list[DraftShape], times: list[dict[str, float]]
) -> Iterator[Measurement]:
    noise = _GRAPH_NOISE if session.on_cuda else math.inf
    first_steps = {s.topk: parts["draft"] for s, parts in zip(shapes, times, strict=True) if s.num_steps == 1}
    for shape, parts in zip(shapes, times, strict=True):
        kind = "verify" if shape.is_chain else "verify_tree"
        yield Measurement(kind, batch, shape.num_draft_tokens, parts["verify"], noise)
        if session.parts.net is None:
            continue
        yield Measurement("extend", batch, shape.max_path, parts["extend"], noise)
        if shape.is_chain and METHODS[session.method].one_pass:
            yield Measurement("draft_pass", batch, shape.num_steps, parts["draft"], noise)
            continue
        if shape.num_steps == 1:
            yield Measurement("draft_start", batch, shape.topk, parts["draft"], noise)
            continue
        first = first_steps.get(shape.topk, 0.0)
        later = parts["draft"] - first
        # Each of the two is off by so much, and what is left is less than either.
        share = noise * math.hypot(parts["draft"], first) / later if later > 0 else math.inf
        yield Measurement("draft_step", batch, shape.topk, max(0.0, later / (shape.num_steps - 1)), share)


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
                requests = dummy_requests(session.engine.limits.vocab_size, 1, tokens, 1, session.texts)
                best[tokens] = min(seconds, session.run(requests).seconds)
    for tokens, seconds in sorted(best.items()):
        yield Measurement(kind, 1, tokens, 1e3 * seconds)


class _FixedDraft(NoDraft):
    """Chains of full length whatever the text offers: what verifying them costs, not what they are worth. Their tokens
    differ, because equal ones would be computed by the same experts."""

    def __init__(self, shape: DraftShape, vocab_size: int) -> None:
        super().__init__()
        self.num_nodes = self.max_path = self.num_lookahead = shape.num_draft_tokens
        self._vocab_size = vocab_size

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> DraftTrees:
        root_B1 = rows.field(Field.ROOT)[:, None]
        steps_N = torch.arange(self.num_nodes, device=root_B1.device)
        return DraftTrees((root_B1 + 7919 * steps_N) % self._vocab_size)
