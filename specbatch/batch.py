"""The types that kernels, caches, models and the engine exchange: the layout of a batch, drafts, the fields of running
requests and the output of a round.

Shape suffixes: B sequences, T packed new tokens, R selected tokens, P pages of a table, W words of a mask, K branches,
C candidates, M longest path (root counted), Z columns of the round output.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # the target's choice where its logits are not finite
LOWEST_LOGIT = -1e38  # a lower logit, -inf or one of the lowest finite numbers, is a masked token
MAX_STOP_IDS = 6  # the stop tokens that the device finds; if a request has more, the host finds those a round later


class Field(IntEnum):
    """Fields of a running request, by column of `RequestTable.ints_SF`."""

    LENGTH = 0  # tokens whose keys and values the target has computed
    ROOT = 1  # the last sampled token: node 0 of the next tree
    LIMIT = 2  # the maximum number of tokens, root included
    DONE = 3  # 0: the request goes on
    IGNORE_EOS = 4
    TOP_K = 5
    SEED = 6
    STREAM = 7
    SAMPLE = 8
    NUM_PREDICTED = 9  # tokens in `RequestTable.predicted_SL`
    STOP = 10  # the first of MAX_STOP_IDS stop tokens, which are the last fields; -1: none


NUM_FIELDS = int(Field.STOP) + MAX_STOP_IDS


class Edits(IntFlag):
    """Kinds of changes to logits. The host knows before a launch which ones the batch needs; a batch without any runs
    as if there were none."""

    NONE = 0
    MASK = 1  # tokens that are forbidden after any text: `RuleBuffers.masks_S2W`
    NODE_MASK = 2  # tokens that the host forbids at each node: `RuleBuffers.node_masks_SNW`
    BAD_WORDS = 4  # bad words of several tokens
    VALUES = 8  # biases and penalties: logits become float32
    GRAMMAR = 16  # tokens that the automata of `GrammarBuffers` forbid at each node

    @property
    def family(self) -> Edits:
        """The edits that a CUDA graph for such a batch applies: none, those of grammars alone, all that forbid tokens,
        or all. So there are few graphs. Kernels read which edits each request has."""
        if not self or self is Edits.GRAMMAR:
            return self
        of_grammars = Edits.GRAMMAR if self & Edits.NODE_MASK else Edits.NONE
        return self | Edits.MASK | Edits.BAD_WORDS | of_grammars


ALL_EDITS = Edits.MASK | Edits.NODE_MASK | Edits.BAD_WORDS | Edits.VALUES | Edits.GRAMMAR

# Values in place of a token before a bad word's last one. ANY_TOKEN matches each token. The prompt's tokens are read as
# NO_TEXT, so that bad words are found in the output alone. NEVER matches nothing: this line has no bad word here.
ANY_TOKEN, NO_TEXT, NEVER = -1, -2, -3


@dataclass(slots=True)
class RuleBuffers:
    """The rules that change the logits of running requests: a line for each request index, and one for padding. A line
    without rules changes nothing.

    Shape suffixes: S lines, N tree nodes, W words of a mask, K biases, C bad words, M tokens of a bad word before its
    last one.
    """

    edits_S: Tensor  # int64, `Edits` of each line
    num_prompt_S: Tensor  # int64, tokens
    min_tokens_S: Tensor  # int64
    penalties_S3: Tensor  # repetition, frequency, presence
    # Bit t % 32 of word t // 32: token t is allowed. Each line has one mask for outputs of fewer than min_tokens
    # tokens, and one for longer outputs.
    masks_S2W: Tensor  # int32
    bias_ids_SK: Tensor  # int64
    biases_SK: Tensor  # 0 where there is none
    bad_ends_SC: Tensor  # int64, the last tokens of bad words
    bad_starts_SCM: Tensor  # int64, the tokens before, the nearest first
    # int32 masks like masks_S2W, for each node of the next round's trees. Node 0 also has the mask for a prompt's first
    # token. After drafting, the host writes the masks that acceptance needs; the others allow everything. None: there
    # is no room for them yet.
    node_masks_SNW: Tensor | None


# States of `GrammarBuffers` that belong to no automaton. A request without one is in FREE, where all tokens may come.
# No text leads on from DEAD, to which forbidden tokens lead. In BROKEN no token may come: a request would be there that
# had committed a forbidden token.
FREE, DEAD, BROKEN = 0, 1, 2


class TrieLevel(NamedTuple):
    """The nodes of one depth in the tree of all tokens' bytes, for the reference kernel. Shape suffixes: N nodes, E
    tokens that end in them."""

    parents_N: np.ndarray  # int64, the indices of the nodes before them in the level above
    bytes_N: np.ndarray  # uint8
    tokens_E: np.ndarray  # int64
    ends_E: np.ndarray  # int64, the node of each of these tokens


@dataclass(slots=True)
class GrammarBuffers:
    """The automata of grammars, over the bytes of texts, and the states of running requests in them. The states of all
    automata have numbers of their own.

    Shape suffixes: Q states, K classes of bytes, G automata, V tokens, F bytes of all tokens, C masks, W words of a
    mask, S request indices.
    """

    next_QK: Tensor  # int32, the state after a byte of each class
    forced_Q: Tensor  # int32, the only token that may come; -1: all may come whose bytes lead on
    accepts_Q: Tensor  # bool, the text may end
    leaves_Q: Tensor  # bool, the automaton does not know what may come next: the request is done on the device
    classes_GB: Tensor  # uint8, the class of each byte
    # int32, (V + 1,): the bytes of token t are starts[t] to starts[t + 1]. A token without bytes may not come.
    starts_V: Tensor
    bytes_F: Tensor  # uint8
    states_S: Tensor  # int32, the state of each request after its root
    automata_S: Tensor  # int32, the automaton of each request
    # Masks of states like `RuleBuffers.masks_S2W`, without the tokens that end a text. The mask of state q can only be
    # at q % C.
    masks_CW: Tensor  # int32
    owners_C: Tensor  # int32, the state that a mask belongs to; -1: none
    eos_K: Tensor  # int64, tokens that end a text
    max_token_bytes: int = 255  # bytes of the longest token
    trie: list[TrieLevel] | None = None  # the tree of all tokens' bytes, made for the first mask on a CPU


class TreeNodes(NamedTuple):
    """The nodes of B draft trees and the text before them."""

    req_idx_B: Tensor  # int64
    length_B: Tensor  # int64, tokens before the root
    tokens_BN: Tensor  # int64
    depths_BN: Tensor | None  # int64; None: trees are chains
    mask_BNW: Tensor | None  # int32 words: the nodes that a node sees; None: trees are chains

    def of_request(self, i: int, num_nodes: int) -> TreeNodes:
        """Return the first `num_nodes` nodes of tree i."""
        one, nodes = slice(i, i + 1), slice(num_nodes)
        return TreeNodes(
            self.req_idx_B[one],
            self.length_B[one],
            self.tokens_BN[one, nodes],
            None if self.depths_BN is None else self.depths_BN[one, nodes],
            None if self.mask_BNW is None else self.mask_BNW[one, nodes],
        )


class Output(IntEnum):
    """Columns of the round output, which is all that the host reads of a round. The last columns are the M tokens, and
    then the bits of their M margins (float32, see `kernels.torch.sampling.argmax_and_margin`)."""

    NUM_NEW = 0  # new tokens; 0: the request is done
    NUM_DRAFTED = 1  # drafts that were verified
    DEPTH = 2  # the depth of the draft tree
    NUM_BROKEN = 3  # drafts whose probabilities are NaN
    LIKELY = 4  # how probable the drafts were, in LIKELY_COLUMNS columns; 0: that is not known
    TOKENS = 6


# The probabilities of drafts that a round reports: how many drafts of a chain had at least the first of these, the
# second, and so on, whether they were verified or not. The logarithms of these bounds follow each other by a ratio.
# Shape suffix: K bounds.
_FIRST_BOUND, _BOUND_RATIO, NUM_BOUNDS = 0.1, 1.4, 12
LIKELY_COLUMNS, LIKELY_BITS = 2, 5  # A number takes LIKELY_BITS bits, and a larger one is the largest of these.
LIKELY_PER_COLUMN = NUM_BOUNDS // LIKELY_COLUMNS
LIKELY_KNOWN = 1 << LIKELY_BITS * LIKELY_PER_COLUMN  # the bit of a column that is known
LOG_BOUNDS_K = -_FIRST_BOUND * _BOUND_RATIO ** np.arange(NUM_BOUNDS)


PREFIX_UNIT = 64  # The number of tokens that a group shares is a multiple of it.


class PrefixGroups(NamedTuple):
    """Sequences of a batch whose first pages are the same pages, in groups (at most G; a sequence is in one, or in
    none). All int32. Rounds read them on the device, so that groups may change under a captured graph."""

    sizes_G: Tensor  # the number of sequences; 0: there is no such group
    firsts_G: Tensor  # the index of the group's first member in `members_B`, where groups follow each other
    # The number of tokens that the group shares: a multiple of PREFIX_UNIT and of the page size. They come before the
    # new tokens of all members.
    tokens_G: Tensor
    members_B: Tensor  # sequences, by index in the batch
    tokens_B: Tensor  # the number of tokens that each sequence shares with its group; 0: it is in no group

    def of_batch(self, size: int) -> PrefixGroups:
        """Return the groups for the first `size` sequences. All members are among these."""
        return self._replace(members_B=self.members_B[:size], tokens_B=self.tokens_B[:size])


class PrefixParts(NamedTuple):
    """Attention of T tokens to the keys that their groups share, in P parts, whose sums are not merged yet. Tokens
    without a group, and tokens that a part does not reach, are not written."""

    sums_PTHD: Tensor  # sums of values times weights; the head dimension may be padded
    weights_PTH2: Tensor  # the largest score, by which weights are measured, and the sum of weights


class StateSpans(NamedTuple):
    """The lines of a batch's sequences in the state cache (`cache/states.py`), for layers whose state moves over the
    tokens."""

    lines_B: Tensor  # int64
    # True: these are prompts, whose tokens all stay. False: they are nodes, which the next round replays.
    is_prompt: bool
    # int64: the number of tokens after which the state of a prompt is copied to a checkpoint, and the checkpoint's
    # line; -1: there is none. None: there is none in the batch.
    checkpoint_at_B: Tensor | None = None
    checkpoint_line_B: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The layout of T new tokens of B sequences. It is the same for every layer of a forward pass.

    Sequence b has new tokens [query_starts[b], query_starts[b + 1]) of the packed batch. They come after the first
    `starts[b]` slots of its pages. Without a mask, token i sees slots [0, starts[b] + i]. With a mask, all slots before
    `mask_starts[b]` are visible, and slot mask_starts[b] + j is visible if bit j % 32 of the token's word j // 32 is
    set. The host reads nothing of this, so lengths may change under a captured graph.
    """

    slots_T: Tensor  # int64; the slots where keys and values are written; -1: they are not written
    positions_T: Tensor  # int64, rotary positions
    page_table_BP: Tensor  # int32
    page_size: int
    starts_B: Tensor  # int32
    query_starts: Tensor  # (B + 1,) int32
    max_queries: int  # the most new tokens of one sequence
    mask_TW: Tensor | None = None  # int32 words
    mask_starts_B: Tensor | None = None  # int32
    # `query_starts` on the host, if the batch is prompts. None: each sequence has `max_queries` new tokens, or this is
    # a `part`.
    host_query_starts: np.ndarray | None = None
    groups: PrefixGroups | None = None  # None: each sequence reads all its keys
    states: StateSpans | None = None  # None: no layer has states

    def masked(self, mask_TW: Tensor) -> PagedBatch:
        """Return the batch with a mask, whose bits begin with the first new token of each sequence."""
        return replace(self, mask_TW=mask_TW, mask_starts_B=self.starts_B)

    def part(self, first_B: Tensor, end_B: Tensor) -> tuple[PagedBatch, Tensor]:
        """Return the batch of tokens [first, end) of each sequence, and their indices (T') in this batch, in which each
        sequence has `max_queries` new tokens. The host reads the number of tokens."""
        query = torch.arange(self.max_queries, device=first_B.device)
        is_part = (query >= first_B[:, None]) & (query < end_B[:, None])
        index_T = is_part.view(-1).nonzero()[:, 0]
        part = PagedBatch(
            self.slots_T[index_T],
            self.positions_T[index_T],
            self.page_table_BP,
            self.page_size,
            (self.starts_B + first_B).int(),
            torch.nn.functional.pad(is_part.sum(1).cumsum(0), (1, 0)).int(),
            self.max_queries,
            None if self.mask_TW is None else self.mask_TW[index_T],
            self.mask_starts_B,
            states=self.states,
        )
        return part, index_T

    def divided(self, num_seqs: int, num_tokens: int, cut: int = 0) -> tuple[PagedBatch, PagedBatch]:
        """Divide the batch into its first `num_seqs` sequences and the others. The first part has `num_tokens` new
        tokens. `cut`: the first tokens of the next sequence that are in the first part, too. The second part then reads
        keys and values that the first writes to the cache."""
        assert self.groups is None, "groups would be divided"
        assert not cut or self.mask_TW is None, "nodes of a tree would be divided"
        parts = (
            (slice(num_tokens), slice(num_seqs + (cut > 0)), slice(num_seqs + (cut > 0) + 1)),
            (slice(num_tokens, None), slice(num_seqs, None), slice(num_seqs, None)),
        )
        first, second = (
            replace(
                self,
                slots_T=self.slots_T[tokens],
                positions_T=self.positions_T[tokens],
                page_table_BP=self.page_table_BP[seqs],
                starts_B=self.starts_B[seqs],
                query_starts=self.query_starts[ends],
                mask_TW=None if self.mask_TW is None else self.mask_TW[tokens],
                mask_starts_B=None if self.mask_starts_B is None else self.mask_starts_B[seqs],
                host_query_starts=None if self.host_query_starts is None else self.host_query_starts[ends],
                states=None,  # hybrids have one lane
            )
            for tokens, seqs, ends in parts
        )
        starts, host_starts = second.query_starts - num_tokens, second.host_query_starts
        host_starts = None if host_starts is None else host_starts - num_tokens
        second = replace(second, query_starts=starts, host_query_starts=host_starts)
        return (first, second) if not cut else (first._ending_at(num_tokens), second._beginning_after(cut))

    def _ending_at(self, num_tokens: int) -> PagedBatch:
        """Return the batch with its query starts cut at this number of new tokens."""
        host = self.host_query_starts
        host = None if host is None else np.minimum(host, num_tokens)
        return replace(self, query_starts=self.query_starts.clamp(max=num_tokens), host_query_starts=host)

    def _beginning_after(self, cut: int) -> PagedBatch:
        """Return the batch without the first `cut` new tokens of its first sequence, where `query_starts` is -cut."""
        starts_B, host = self.starts_B.clone(), self.host_query_starts
        starts_B[:1] += cut
        host = None if host is None else np.maximum(host, 0)
        return replace(self, starts_B=starts_B, query_starts=self.query_starts.clamp(min=0), host_query_starts=host)

    def copied(self) -> PagedBatch:
        """Return a copy in new memory. The addresses of a part's tensors need not be multiples of 16 bytes, and kernels
        would be compiled again for such addresses."""
        tensors: dict[str, Any] = {
            f.name: value.clone() for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The R tokens of a batch whose hidden states are needed. For the other tokens, a model's last layer computes keys
    and values only."""

    index_R: Tensor  # int64, indices of packed tokens
    batch: PagedBatch  # the same tokens, each as the only new token of a sequence

    @staticmethod
    def of(
        batch: PagedBatch,
        index_R: Tensor,
        starts_R: Tensor,
        page_table_RP: Tensor,
        groups: PrefixGroups | None = None,
    ) -> LogitsIndices:
        """Select tokens of `batch`. `starts_R`: the number of slots before each token. `page_table_RP`: the pages of
        its sequence. `groups`: the groups, if each sequence has one selected token."""
        count = index_R.shape[0] + 1
        alone = PagedBatch(
            batch.slots_T[index_R],
            batch.positions_T[index_R],
            page_table_RP,
            batch.page_size,
            starts_R.to(torch.int32),
            torch.arange(count, dtype=torch.int32, device=index_R.device),
            max_queries=1,
            host_query_starts=None if batch.host_query_starts is None else np.arange(count, dtype=np.int32),
            groups=groups,
        )
        return LogitsIndices(index_R, alone)

    def divided(self, num_selected: int, num_tokens: int) -> tuple[LogitsIndices, LogitsIndices]:
        """Divide the selection of a batch that is divided after `num_tokens` tokens. The first `num_selected` selected
        tokens are in its first part."""
        first, second = self.batch.divided(num_selected, num_selected)
        later_R = self.index_R[num_selected:] - num_tokens
        return LogitsIndices(self.index_R[:num_selected], first), LogitsIndices(later_R, second.copied())


def slots_of(page_table_BP: Tensor, page_size: int, index_BQ: Tensor) -> Tensor:
    """Return the cache slots (B, Q) of positions `index_BQ` within each sequence's pages. Positions past the table get
    its last page, and the caller masks them."""
    page_index = (index_BQ // page_size).clamp_(max=page_table_BP.shape[1] - 1)
    return page_table_BP.gather(1, page_index).to(torch.int64) * page_size + index_BQ % page_size


class Spans(NamedTuple):
    """The new tokens of a batch (see `PagedBatch`)."""

    slots_T: Tensor  # int64; -1: not written
    positions_T: Tensor  # int64
    starts_B: Tensor  # int32, slots before the new tokens
    mask_starts_B: Tensor  # int32
    query_starts: Tensor  # (B + 1,) int32


class PackedNodes(NamedTuple):
    """The T nodes of a batch that a round verifies, if chains are cut. Those of a sequence follow each other."""

    nodes_T: Tensor  # int64, the index of each among all B * N nodes
    # int64, the index of each node among the T. A node that is not among them has that of the last one before it.
    index_BN: Tensor
    tokens_T: Tensor  # int64
    slots_T: Tensor  # int64
    positions_T: Tensor  # int64
    query_starts: Tensor  # (B + 1,) int32


class Beam(NamedTuple):
    """The branches of a tree that is being drafted."""

    scores_BK: Tensor  # float32, cumulative log-probability
    tokens_BK: Tensor  # int64, ids of the target's vocabulary
    index_BK: Tensor  # int64, index of the candidate
    parent_BK: Tensor  # int64, the branch of the step before that is its parent; in the first step the branch itself
    seen_BKW: Tensor  # int32: bit i * K + j of the words is set if it sees branch j of step i


class Candidates(NamedTuple):
    """All nodes that drafting scores, filled step by step. `select_nodes` chooses from them."""

    tokens_BC: Tensor  # int64
    scores_BC: Tensor  # float32
    parents_BC: Tensor  # int64, -1: the root


class Committed(NamedTuple):
    """The result of a round. Paths and tokens are 0 after their first `num_path_B` of M elements."""

    path_BM: Tensor  # int64, the nodes of the accepted path, root first
    num_path_B: Tensor  # int64, 1 .. M: nodes of the path, and also the number of new tokens
    tokens_BM: Tensor  # int64, the accepted drafts and the target's own token
    # int32, see `Output`. The last token is NO_TOKEN where the target's logits are not finite.
    output_BZ: Tensor
    accept_index_T: Tensor  # int64, (B * M) packed tokens of the path's nodes
    source_T: Tensor  # int64, (B * M) cache slots of the path's nodes
    target_T: Tensor  # int64, (B * M) slots to which they move; -1: a node is there already, or is not on the path
