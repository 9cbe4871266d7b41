"""Runs the largest prompt chunk and the largest rounds before there is a KV cache, and measures the memory they take:
see `sizing.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from specbatch.batch import ALL_EDITS, LogitsIndices, PagedBatch, StateSpans
from specbatch.engine.budget_graphs import MAX_AT_START
from specbatch.engine.executor import GraphMode, RoundExecutor, padded_sizes
from specbatch.engine.logprobs import MAX_TOP_LOGPROBS
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.engine.prefill.models import PromptPieces, piecewise_trunks, token_sizes
from specbatch.engine.prefill.packing import ChunkCut, PromptChunk
from specbatch.engine.round import Round, Wanted
from specbatch.graphs.runner import GraphRunner
from specbatch.models.pass_weights import PassWeights
from specbatch.setup.round_parts import RoundParts, Rounds

_PROMPT_GRAPHS = 16  # rough number of prompt graphs of a job
_GRAPH_BYTES = 1 << 20  # The driver keeps at least these for a graph; some graphs find room in what it has.
_SHORT_PROMPT = 32  # tokens
_STRIDE = 7919  # from a token to the next one


@dataclass(frozen=True, slots=True)
class Trial:
    """The rounds that were made for batches and prompt chunks of these sizes, and the bytes that running them takes.
    `eager_bytes`: taken at once and given back. `graph_bytes`: kept by CUDA graphs. `rule_bytes`: kept by the tables of
    rules, from the first row with rules on. `piece_bytes`: kept by graphs of pieces of prompts; None: prompts are not
    computed in pieces."""

    max_batch_size: int
    prefill_chunk_tokens: int
    rounds: Rounds  # with empty caches
    chunk_cost: ChunkCost
    eager_bytes: int
    graph_bytes: int
    rule_bytes: int
    piece_bytes: int | None = None

    @property
    def reserved(self) -> int:
        return self.eager_bytes + self.graph_bytes + self.rule_bytes + (self.piece_bytes or 0)


@dataclass(frozen=True)
class TrialRunner:
    """The runner of trials. `max_length`: the length of the longest row that the cache may turn out to hold.
    `whole_prompts`: chunks of short prompts are graphs, if rounds are. `pieces`: the pieces for other chunks; None:
    these have no graphs. `shrinks`: a graph that does not fit into memory is left out. `new_runner`: makes the runner
    for the graphs of pieces."""

    parts: RoundParts
    max_length: int
    graphs: GraphMode
    whole_prompts: bool
    pieces: PromptPieces | None = None
    shrinks: bool = True
    new_runner: Callable[[torch.device], GraphRunner] = GraphRunner

    def run(self, max_batch_size: int, prefill_chunk_tokens: int) -> Trial:
        """Leaves the caches empty. Raises where memory runs out."""
        target, device, size = self.parts.target, self.parts.device, self.parts.page_size
        config = self.parts.largest_part
        # The trial's cache holds one prompt chunk; a page after it is spare, as in the real one.
        made = self.parts.make(max_batch_size, self.max_length, (-(-prefill_chunk_tokens // size) + 2) * size)
        rounds = made.items
        table = rounds.items[0].state
        chunk_cost = ChunkCost.of_model(
            config.num_layers,
            PassWeights.of_layers(config),
            prefill_chunk_tokens,
            self.whole_prompts,
        )
        prompt = rounds.items[0]  # used for prompts, which are the same for all draft methods
        prompt_bytes = self._prompt_peak(prompt, prefill_chunk_tokens)
        padded_bytes = self._prompt_peak(prompt, chunk_cost.graph_tokens) if chunk_cost.graph_tokens else 0
        trial_short_prompts(prompt, max_batch_size, prefill_chunk_tokens)
        padding = torch.full((max_batch_size,), table.padding, dtype=torch.int64, device=device)
        table.add_rules(target.config.vocab_size).add_node_masks(self.parts.num_lookahead)
        table.add_grammars(target.config.vocab_size, prompt.eos_token_ids)
        rule_bytes = table.rule_bytes
        eager_bytes, sizes = prompt_bytes, padded_sizes(rounds, max_batch_size)
        for i, (rows, _) in {i: size for size, i in reversed(sizes)}.items():  # the largest of each
            eager_bytes = max(eager_bytes, self._round_peak(rounds.items[i], padding[:rows]))
        graph_bytes = self._graph_bytes(made, max_batch_size, len(sizes), padded_bytes)
        piece_bytes = None if self.pieces is None else self._piece_bytes(self.pieces, made, prefill_chunk_tokens)
        table.remove_rules()  # most jobs have none
        made.resize_caches(0)
        return Trial(
            max_batch_size, prefill_chunk_tokens, made, chunk_cost, eager_bytes, graph_bytes, rule_bytes, piece_bytes
        )

    def _graph_bytes(self, made: Rounds, max_batch_size: int, num_sizes: int, padded_bytes: int) -> int:
        """Estimate the bytes of the graphs of rounds. All graphs share one pool, which is as large as the largest
        needs: that one is captured here. In addition, the driver keeps some bytes for each graph, and some for all. A
        quarter is added, because pools are fragmented."""
        if self.graphs == "none":
            return 0
        executor = RoundExecutor(
            made.items, max_batch_size, self.parts.device, self.graphs, made.lanes, shrinks=self.shrinks
        )
        assert executor.runner is not None
        with torch.inference_mode():
            executor.capture_largest()
        runner = executor.runner
        if not runner:
            raise torch.OutOfMemoryError("no CUDA graph fits")
        more = runner.bytes - runner.pool_bytes - runner.first_bytes
        of_driver = max(_GRAPH_BYTES, more // max(1, len(runner) - 1))
        # Rows may ask for samples, for log-probabilities and for rules at any time: eight graphs of each size then. And
        # rounds may choose fewer nodes.
        num_graphs = num_sizes * (8 + max(len(round_.method.sizes) for round_ in made.items.items))
        if self.parts.budget is not None and self.parts.budget.changes:
            num_graphs += MAX_AT_START * len(made.items.items)
        num_graphs += _PROMPT_GRAPHS if padded_bytes else 0
        kept = runner.pool_bytes + runner.first_bytes + num_graphs * of_driver
        del executor, runner
        gc.collect()
        # Prompts' graphs are captured as they come up. Where the small ones are first, each size doubles what the one
        # before took, and none fits into what that left in their pool.
        return kept * 5 // 4 + 2 * padded_bytes

    def _piece_bytes(self, pieces: PromptPieces, made: Rounds, prefill_chunk_tokens: int) -> int | None:
        """Estimate the bytes of the graphs of pieces of prompts; None: they do not fit. The largest are captured here;
        as for rounds, the driver keeps some bytes for each graph in addition to the pool."""
        sizes, runner = token_sizes(self.parts.target, prefill_chunk_tokens), self.new_runner(self.parts.device)
        net = made.items.items[0].method.net
        trunks = piecewise_trunks(pieces, made.caches[0], net, sizes[-1:], runner)
        fits = trunks.target is not None and (pieces.draft is None or trunks.draft is not None)
        kept = 2 * runner.pool_bytes + max(0, runner.bytes - runner.pool_bytes) * len(sizes)
        del runner, trunks
        gc.collect()
        return kept * 5 // 4 if fits else None

    def _prompt_peak(self, round_: Round, num_tokens: int) -> int:
        """Return the peak of a prompt chunk, in one lane and, if there can be two, in two: which needs more depends on
        the model."""
        ways = [round_] if round_.two_lanes is None else [round_, round_.with_two_lanes(None)]
        return max(_peak(self.parts.device, partial(trial_prompt, way, num_tokens)) for way in ways)

    def _round_peak(self, round_: Round, req_idx_B: torch.Tensor) -> int:
        return _peak(self.parts.device, lambda: trial_round(round_, req_idx_B, MAX_TOP_LOGPROBS))


def _peak(device: torch.device, function: Callable[[], None]) -> int:
    """Bytes that `function` needs in addition to what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def trial_round(round_: Round, padding: torch.Tensor, num_top: int | None) -> None:
    """The largest round. All rows are padding: it computes everything and writes nothing. Rows may ask for samples,
    log-probabilities and rules, which take the most memory; the table of rules is there."""
    round_(padding)
    round_(padding, Wanted(True, num_top))
    with_room = round_.drafting(round_.method.with_room(len(padding)))
    with_room(padding, Wanted(True, num_top, ALL_EDITS))


def trial_short_prompts(round_: Round, max_batch_size: int, prefill_chunk_tokens: int) -> None:
    """Chunks of other sizes. They take less memory, and other kernels."""
    num_prompts = 1
    while num_prompts * _SHORT_PROMPT < prefill_chunk_tokens:
        num_tokens = num_prompts * _SHORT_PROMPT
        trial_prompt(round_, num_tokens)
        if num_prompts <= max_batch_size:
            trial_prompt(round_, num_tokens, num_prompts)
        num_prompts *= 2


@torch.inference_mode()
def trial_prompt(round_: Round, num_tokens: int, num_prompts: int | None = None) -> None:
    """Run a chunk of prompts of equal length, which end there; the last one has the tokens that are left. `num_prompts`
    None: it is one prompt, and for each request index a token is chosen after it, as if short prompts ended there. All
    of it is in padding's line of the request table, which stays done."""
    state, page_size = round_.state, round_.page_size
    device = state.ints_SF.device
    pages = -(-num_tokens // page_size)
    table = torch.arange(max(pages + 1, state.page_table_SP.shape[1]), dtype=torch.int32, device=device)[None]
    index = torch.arange(num_tokens, device=device)
    num_seqs = num_prompts or 1
    length = num_tokens // num_seqs
    ends = np.array([*range(0, num_seqs * length, length), num_tokens], np.int32)
    positions = index - (index // length).clamp(max=num_seqs - 1) * length
    layout = PagedBatch(
        index,
        positions % round_.num_positions,
        table.repeat(num_seqs, 1),
        page_size,
        torch.zeros(num_seqs, dtype=torch.int32, device=device),
        torch.from_numpy(ends).to(device),
        num_tokens - (num_seqs - 1) * length,
        host_query_starts=ends,
        states=StateSpans(torch.full((num_seqs,), state.padding, dtype=torch.int64, device=device), is_prompt=True),
    )
    last = index[-state.padding :] if num_prompts is None else layout.query_starts[1:].long() - 1
    ready = torch.full_like(last, state.padding)
    zeros = torch.zeros_like(index)
    saved = state.ints_SF[state.padding].clone()
    logits_indices = LogitsIndices.of(layout, last, positions[last], table.repeat(last.shape[0], 1))
    cut, half = None, num_tokens // 2
    if round_.two_lanes is not None and half >= round_.two_lanes.min_prompt_lane:
        num_selected = half // length if num_prompts is not None else max(0, half - (num_tokens - len(last)))
        cut = ChunkCut(half // length, half, half % length, num_selected)
    chunk = PromptChunk(
        index * _STRIDE % round_.vocab_size,  # If all tokens were the same one, all would choose the same experts.
        layout,
        ready,
        logits_indices,
        positions[last] + 1,
        torch.full_like(last, -1),
        zeros,
        layout,
        logits_indices,
        cut=cut,
    )
    round_.prefill(chunk, Wanted(True, MAX_TOP_LOGPROBS))
    state.ints_SF[state.padding] = saved
