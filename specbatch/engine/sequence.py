"""The state of one request between rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from specbatch.counts import SpeculationCounts
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.rules import Rules
from specbatch.logprobs import TokenLogprob
from specbatch.types import NO_MARGIN, Margin, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` = prompt and generated tokens. `num_computed_tokens` of them have their target KV written. Between
    rounds that is all but the last: the *root* of the next tree, sampled but not yet run through the target.
    """

    request: Request
    tokens: list[int]
    max_length: int  # largest length of `tokens`: by max_tokens, or the end of the context or the cache
    num_computed_tokens: int = 0
    # Of rounds that are under way on the device: slots that they commit at most, and how many rounds. 0 on the host's
    # For the rounds in flight on the device: the most slots that they commit, and the number of rounds. 0 on the host's
    # own engine.
    num_in_flight: int = 0
    rounds_in_flight: int = 0
    req_idx: int = -1  # its line in the request table, while running
    was_admitted: bool = False  # before a preemption, perhaps
    num_cached: int = 0  # slots whose entries others had computed, all before its own
    num_uncached: int | None = None  # while it waits: tokens to compute, as the prefix cache was when it was asked
    is_finished: bool = False
    pages: list[int] = field(default_factory=list)
    num_draft_computed: int = 0  # valid slots of the draft network's cache, while the prompt is computed
    draft_state: Any = None  # state of a draft method on the host
    # log-probabilities of the generated tokens, see `read_records`
    logprobs: bytearray = field(default_factory=bytearray)
    margin: Margin = NO_MARGIN  # margin of the generated tokens, whether they are sampled or not
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    rules: Rules | None = None
    # keys: index of the token, as far as computed
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    grammar: GrammarState | None = None
    goes_back: bool = False  # the device continued with a token that the grammar refuses, see `unchecked_round`
    num_forced_room: int = 0  # nodes that its grammar may add to a tree, see `grammar.MAX_FORCED`

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def scored_tokens(self) -> range:
        """Indices of the prompt's tokens whose log-probabilities are wanted: once for the completions of a row."""
        params = self.request.params
        if params.prompt_logprobs is None or self.request.rng.sample:
            return range(0)
        return range(max(1, params.prompt_logprobs_start), self.num_prompt)

    @property
    def max_cached(self) -> int:
        """Tokens that may come from the prefix cache when the request is admitted: the first sample needs the logits of
        the last one, and a log-probability those of the token before it."""
        missing = [i for i in self.scored_tokens if i not in self.prompt_logprobs] if self.scored_tokens else ()
        return min(missing, default=self.num_prefill_tokens) - 1

    @property
    def generated(self) -> Seq[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that a prefill must commit before rounds can go on: the prompt, or, after a preemption, all but the
        root."""
        return max(self.num_prompt, len(self.tokens) - 1)

    @property
    def prefill_done(self) -> bool:
        """Nothing of the prompt is left to prefill; its first token may still be under way."""
        # As `>= num_prefill_tokens`, in fewer calls: it is asked of every request before every round.
        return self.num_computed_tokens >= len(self.tokens) - 1 and self.num_computed_tokens >= len(
            self.request.prompt_token_ids
        )

    @property
    def can_go_on(self) -> bool:
        """Its prompt is computed, and it does not surely end in the rounds in flight: each commits a token or more."""
        return len(self.tokens) + self.rounds_in_flight < self.max_length and self.prefill_done

    @property
    def is_prefilled(self) -> bool:
        """There is a root, and everything before it is committed."""
        return self.num_computed_tokens == len(self.tokens) - 1 >= self.num_prompt
