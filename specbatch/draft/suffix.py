"""Drafts from the outputs of all rows of a job, and from a file of earlier results (`speculation.corpus`).

The engine's requests share a corpus (`corpus.py`). Each round searches it for the last tokens of every request, and
adds the tokens that it commits. A request's prompt is not in the corpus: its own prompt and output are searched as
`ngram` does. Of the two, the drafts that are worth more are taken, by estimates that are calibrated while rows run
(`calibration.py`). A draft is worth what its probability is above the *price* of a node: 0 where all drafts are
verified, else the largest probability of the drafts that the last rounds left out.

Which tokens are in the corpus depends on the rows that ran before, so a resumed job can draft otherwise. The drafts are
deterministic, and the target decides about each of them, so texts do not change.

Shape suffixes: B requests, C chains of a request, D drafts, N nodes, S request indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Committed, Field, Output
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import DraftSources, EngineStats
from specbatch.draft.calibration import Calibration, Chains
from specbatch.draft.corpus import Corpus
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.shape import DraftShape
from specbatch.kernels.chains import NETWORK
from specbatch.kernels.corpus import MAX_SIZE, match_estimates

SOURCES = ("row", "job", "corpus", "network")  # the keys of `DraftSources`, see `kernels/chains.py`
_NEW_PRICE = 0.2  # share that a round has in the price of a node
_SLACK = 0.5  # The corpus is searched to this share of the least probability, because calibration may raise estimates.


class SharedTexts:
    """The corpus of an engine, the counts of drafts by source, and their calibration. All draft shapes share these.
    It lives as long as the engine: graphs hold the addresses of its buffers."""

    def __init__(
        self,
        max_tokens: int,
        texts: Sequence[list[int]],
        device: torch.device,
        ops: ModuleType,
        *,
        with_network: bool = False,
    ) -> None:
        """Make a corpus with earlier results. `texts`: their tokens, the newest last. `with_network`: a network drafts,
        too."""
        self.corpus = Corpus(max_tokens, device, ops)
        self.corpus.load(texts)
        self.calibration = Calibration(len(SOURCES) + 1, NETWORK if with_network else 0, device, ops)
        self._counts = torch.zeros(len(SOURCES), 2, dtype=torch.int64, device=device)  # drafted, accepted
        # The mean over the last rounds of the largest probability of a draft that was not verified.
        self.price = torch.zeros(1, dtype=torch.float32, device=device)

    def count(self, drafted_B: Tensor, source_B: Tensor, num_new_B: Tensor) -> None:
        """Count the drafts that a round verified. `source_B`: an index of SOURCES. `num_new_B`: the tokens that it
        committed; 0: the request is done."""
        drafted_B = drafted_B * (num_new_B > 0)
        accepted_B = torch.minimum((num_new_B - 1).clamp(min=0), drafted_B)
        self._counts.index_add_(0, source_B, torch.stack((drafted_B, accepted_B), dim=1))

    def read(self) -> DraftSources:
        """Return the counts. The host waits for the device."""
        counts: list[list[int]] = self._counts.tolist()
        return DraftSources({name: sums for name, sums in zip(SOURCES, counts, strict=True) if sums[0]})


class SuffixDraft(DraftMethod):
    """Chains from the corpus that all rows share, or from the row's own text."""

    reads_tokens = True

    def __init__(
        self, shape: DraftShape, min_match: int, min_probability: float, shared: SharedTexts, ops: ModuleType
    ) -> None:
        """`min_match`: tokens of the shortest match in the row's own text. `min_probability`: a draft ends where the
        probability that all of it is right is less."""
        self.num_nodes = self.max_path = self.num_lookahead = shape.num_draft_tokens
        self.sizes = sizes_up_to(self.num_nodes)
        self._min_match, self._least, self.shared, self._ops = min_match, min_probability, shared, ops
        self._estimates_MD = match_estimates(MAX_SIZE, self.num_nodes - 1, shared.corpus.words_H.device)

    def narrowed(self, num_nodes: int) -> SuffixDraft:
        other = copy(self)
        other.num_nodes = other.max_path = other.num_lookahead = num_nodes
        return other

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        if self.num_nodes == 1:
            table.drafted_S3.index_fill_(0, view.req_idx_B, 0)
            return DraftTrees(view.field(Field.ROOT)[:, None])
        return self.choose(view, table, *self.chains(view, table))

    def chains(self, view: BatchView, table: RequestTable, *of_network: Tensor | None) -> tuple[Chains, Tensor | None]:
        """Return the chains from the row's text, from the corpus and from a network, and their tokens without what was
        drawn (None: nothing was). `of_network`: the last arguments of `join_chains`; nothing: there is no network."""
        num_drafts, length_B, limit_B = self.num_nodes - 1, view.length_B + 1, view.field(Field.LIMIT)
        of_row_BD, num_row_B, matched_B = self._ops.ngram_lookup(
            table.tokens_SL, table.predicted_SL, view.req_idx_B, length_B, view.field(Field.NUM_PREDICTED), limit_B,
            self._min_match, MAX_SIZE, num_drafts,
        )  # fmt: skip
        of_job_BD, _, probabilities_BD, is_loaded_B = self.shared.corpus.search(
            table.tokens_SL, view.req_idx_B, length_B, limit_B, self._least * _SLACK, num_drafts
        )
        *chains, known_BCD = self._ops.join_chains(
            of_row_BD, num_row_B, matched_B, self._estimates_MD, of_job_BD, probabilities_BD, is_loaded_B, *of_network
        )
        return Chains(*chains), known_BCD

    def choose(
        self, view: BatchView, table: RequestTable, chains: Chains, known_BCD: Tensor | None = None
    ) -> DraftTrees:
        """Choose the chain of each request whose drafts are worth most, by their probabilities and the price of a node.
        `known_BCD`: the last chain was drawn at random, and the choice reads the one before it in its place, and these
        tokens in place of those of the chains; None: no chain was drawn."""
        read = chains if known_BCD is None else chains._replace(tokens_BCD=known_BCD)
        probabilities_BCD, judged = self.shared.calibration.judge(read)
        tokens_BN, scores_BN, num_nodes_B, chosen_B3, is_given_B = self._ops.choose_chain(
            view.field(Field.ROOT), chains.tokens_BCD, probabilities_BCD, chains.sources_BC, self.shared.price,
            self._least, known_BCD is not None,
        )  # fmt: skip
        table.drafted_S3.index_copy_(0, view.req_idx_B, chosen_B3)
        judged = judged._replace(chains=chains)
        return DraftTrees(tokens_BN, num_nodes_B, scores_BN=scores_BN, judged=judged, is_given_B=is_given_B)

    def follow(
        self, view: BatchView, table: RequestTable, trees: DraftTrees, committed: Committed, eos_K: Tensor
    ) -> None:
        output_BZ = committed.output_BZ
        num_new_B, verified_B = output_BZ[:, Output.NUM_NEW].long(), output_BZ[:, Output.NUM_DRAFTED].long()
        drafted_B, source_B, index_B = table.drafted_S3[view.req_idx_B].unbind(dim=1)
        verified_B = torch.minimum(drafted_B, verified_B)  # without what a grammar has put in
        self.shared.count(verified_B, source_B, num_new_B)
        if trees.judged is not None:
            drawn_B = None if trees.is_given_B is None else verified_B * ~trees.is_given_B
            self.shared.calibration.learn(trees.judged, index_B, committed.tokens_BM, num_new_B, drawn_B)
            assert trees.scores_BN is not None
            self.shared.price.lerp_(self._ops.largest_left(trees.scores_BN, verified_B, num_new_B), _NEW_PRICE)
        max_new = committed.path_BM.shape[1]
        self.shared.corpus.add(table.tokens_SL, view.req_idx_B, view.length_B + 1, num_new_B, max_new, eos_K)

    def record(self, stats: EngineStats) -> None:
        stats.draft_sources = self.shared.read()


def sizes_up_to(num_nodes: int) -> tuple[int, ...]:
    """List the numbers of nodes from which rounds choose: 1, 2, 4, ... and `num_nodes`."""
    return (*(1 << i for i in range((num_nodes - 1).bit_length())), num_nodes)
