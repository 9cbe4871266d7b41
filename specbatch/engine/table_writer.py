"""The device tables of running requests: the integers and floats of each request, its tokens, its page table.

Requests are given a request index on the host, and written to the device with the next prefill chunk. Page tables are
uploaded where they have grown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from specbatch.batch import ANY_TOKEN, FREE, MAX_STOP_IDS, NUM_FIELDS, Edits, Field
from specbatch.cache.grammar_table import GrammarTable
from specbatch.cache.request_table import RequestTable
from specbatch.cache.rule_table import RuleTable
from specbatch.cache.states import StateCache
from specbatch.engine.rules import Rules
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Transfers


class TableWriter:
    """The writer of the device tables. `num_requests`: the number of request indices of `state`, without the
    padding's. `states`: the states of a hybrid."""

    def __init__(
        self,
        state: RequestTable,
        transfers: Transfers,
        num_requests: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        states: StateCache | None = None,
    ) -> None:
        self._state, self._states = state, states
        self._transfers = transfers
        self._page_table = np.zeros(state.page_table_SP.shape, dtype=np.int32)
        self._num_pages_of = [0] * num_requests  # number of pages in the table for each request index
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._started: list[Sequence] = []  # requests that are not yet on the device
        self._with_rules: set[int] = set()  # request indices whose line in the rules' table changes something

    def start(self, seq: Sequence, running: Iterable[Sequence]) -> None:
        """Give a request an index that none of `running` has."""
        taken = {other.req_idx for other in running}
        seq.req_idx = next(index for index in range(len(self._num_pages_of)) if index not in taken)
        self._num_pages_of[seq.req_idx] = 0
        self._started.append(seq)

    def forget_started(self) -> None:
        self._started.clear()

    def upload_started(self) -> None:
        if not self._started:
            return
        self._upload_rules()
        ints = np.zeros((len(self._started), NUM_FIELDS), dtype=np.int64)
        floats = np.ones((len(self._started), 3))
        for i, seq in enumerate(self._started):
            params, rng = seq.request.params, seq.request.rng
            ints[i, Field.LIMIT], ints[i, Field.DONE] = seq.max_length, 1
            ints[i, Field.IGNORE_EOS], ints[i, Field.TOP_K] = params.ignore_eos, params.top_k
            ints[i, Field.SEED], ints[i, Field.STREAM] = _signed64(rng.seed), _signed64(rng.stream)
            ints[i, Field.SAMPLE] = rng.sample
            stops = params.stop_token_ids[:MAX_STOP_IDS]
            ints[i, Field.STOP :] = [*stops, *[-1] * (MAX_STOP_IDS - len(stops))]
            floats[i] = params.temperature, params.top_p, params.min_p
            if self._state.predicted_SL.shape[1]:
                ints[i, Field.NUM_PREDICTED] = len(seq.predicted)
        self._upload_texts(self._state.tokens_SL, {seq.req_idx: seq.tokens for seq in self._started})
        self._upload_texts(self._state.predicted_SL, {seq.req_idx: seq.predicted for seq in self._started})
        req_idx = self._transfers.upload(np.array([seq.req_idx for seq in self._started], dtype=np.int64))
        self._state.ints_SF.index_copy_(0, req_idx, self._transfers.upload(ints))
        if self._states is not None:
            for seq in self._started:
                self._states.start(seq.req_idx, seq.checkpoint)
        self._upload_automata(req_idx)
        self._state.floats_S3.index_copy_(0, req_idx, self._transfers.upload(floats).to(self._state.floats_S3.dtype))
        self._started.clear()

    def _upload_texts(self, table_SL: Tensor, texts: Mapping[int, list[int]]) -> None:
        """Write texts to the beginnings of their lines, all in one copy, because each copy takes the host some time."""
        width = table_SL.shape[1]
        if not width or not any(texts.values()):
            return
        counts = np.array([len(text) for text in texts.values()])
        firsts = np.array([*texts], dtype=np.int64) * width
        index = np.repeat(firsts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        tokens = np.fromiter(chain.from_iterable(texts.values()), dtype=np.int32, count=len(index))
        table_SL.view(-1).index_copy_(0, self._transfers.upload(index), self._transfers.upload(tokens))

    def _upload_automata(self, req_idx: Tensor) -> None:
        """Write the states of the requests that start in the automata of their grammars."""
        if (table := self._state.grammars) is None:
            return
        states = [
            (FREE, 0) if seq.automaton is None else table.start(seq.automaton, seq.automaton.state_after(seq.generated))
            for seq in self._started
        ]
        values = self._transfers.upload(np.array(states, dtype=np.int32))
        table.states_S.index_copy_(0, req_idx, values[:, 0])
        table.automata_S.index_copy_(0, req_idx, values[:, 1])

    def _upload_rules(self) -> None:
        """Write the rules of the requests that start. This comes before their tokens: the first rules make room for
        these."""
        if stale := [seq.req_idx for seq in self._started if seq.req_idx in self._with_rules]:
            self._state.add_rules(self._vocab_size).clear(self._transfers.upload(np.array(stale, dtype=np.int64)))
            self._with_rules.difference_update(stale)
        for seq in self._started:
            if seq.rules is not None and seq.rules.edits != Edits.GRAMMAR:  # An automaton needs no line.
                self._with_rules.add(seq.req_idx)
                table = self._state.add_rules(self._vocab_size)
                write_rules(table, self._transfers, seq.req_idx, seq.rules, seq.num_prompt)

    def make_rules(self, edits: Edits) -> None:
        """Make the tables of rules and of grammars, if there are none: a round of all ranks has the rules of other
        ranks' requests."""
        if edits & ~Edits.GRAMMAR:
            self._state.add_rules(self._vocab_size)
        if edits & Edits.GRAMMAR:
            self.grammars()

    def grammars(self) -> GrammarTable:
        """Return the table of grammars."""
        return self._state.add_grammars(self._vocab_size, self._eos_token_ids)

    def node_masks(self, num_nodes: int) -> RuleTable:
        """Return the rules' table, with room for the masks of that number of nodes."""
        table = self._state.add_rules(self._vocab_size)
        table.add_node_masks(num_nodes)
        return table

    def upload_pages(self, sequences: Iterable[Sequence]) -> None:
        """Upload the page tables that changed."""
        grown = [seq for seq in sequences if self._num_pages_of[seq.req_idx] != len(seq.pages)]
        if not grown:
            return
        for seq in grown:
            known = self._num_pages_of[seq.req_idx]
            self._page_table[seq.req_idx, known : len(seq.pages)] = seq.pages[known:]
        changed = [seq.req_idx for seq in grown]
        req_idx = self._transfers.upload(np.array(changed, dtype=np.int64))
        self._state.page_table_SP.index_copy_(0, req_idx, self._transfers.upload(self._page_table[changed]))
        for seq in grown:  # The numbers are stored last, because an upload may run out of memory.
            self._num_pages_of[seq.req_idx] = len(seq.pages)

    def upload_host_trees(self, sequences: Seq[Sequence], packed_BZ: np.ndarray) -> None:
        """Upload the next round's trees, which `HostDraftMethod.pack` made."""
        req_idx = self._transfers.upload(np.array([seq.req_idx for seq in sequences], dtype=np.int64))
        table_SZ = self._state.host_trees_SZ[:, : packed_BZ.shape[1]]
        table_SZ.index_copy_(0, req_idx, self._transfers.upload(packed_BZ))


def write_rules(table: RuleTable, transfers: Transfers, line: int, rules: Rules, num_prompt: int) -> None:
    """Into a line that has none."""

    def put(buffer: Tensor, values: Any) -> None:
        array = np.asarray(values)
        first = buffer[line] if buffer.ndim > 1 else buffer[line : line + 1]
        first[: len(array)].copy_(transfers.upload(array))

    put(table.edits_S, [int(rules.edits)])
    put(table.num_prompt_S, [num_prompt])
    put(table.min_tokens_S, [rules.min_tokens])
    put(table.penalties_S3, rules.penalties)
    put(table.masks_S2W, rules.masks_2W)
    if rules.biases:
        put(table.bias_ids_SK, list(rules.biases))
        put(table.biases_SK, list(rules.biases.values()))
    if rules.bad_words:
        starts = np.full((len(rules.bad_words), table.bad_starts_SCM.shape[2]), ANY_TOKEN)
        for start, word in zip(starts, rules.bad_words, strict=True):
            start[: len(word) - 1] = word[-2::-1]
        put(table.bad_ends_SC, [word[-1] for word in rules.bad_words])
        put(table.bad_starts_SCM, starts)


def _signed64(value: int) -> int:
    """A 64-bit word as int64 holds it."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
