"""The state of one request between rounds: its tokens and pages, from its start to its completion."""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from specbatch.batch import NO_TOKEN, Edits
from specbatch.cache.request_table import MAX_PREDICTED
from specbatch.counts import SpeculationCounts
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.logprobs import read_records
from specbatch.engine.rules import Rules, make_rules
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.matcher import FollowedAutomaton
from specbatch.types import NO_MARGIN, Completion, EngineLimits, FinishReason, Margin, Request

# Tokens of the prompt's end before a prediction. With them, the output's first token has an occurrence there.
_CONTEXT = 16


def check_prompt(prompt: Seq[int], limits: EngineLimits) -> None:
    """Raise ValueError for a prompt that does not fit `limits`."""
    if not 1 <= len(prompt) <= limits.max_prompt_tokens:
        raise ValueError(f"a prompt has 1 to {limits.max_prompt_tokens} tokens here, got {len(prompt)}")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise ValueError(f"a token id is outside the vocabulary of {limits.vocab_size}")


class Needs(NamedTuple):
    """The needs of a request in a round. A batch has few different ones."""

    is_sampled: bool
    num_logprobs: int | None  # likely tokens with log-probabilities; None: no log-probabilities
    edits: int  # the `Edits` that its rules make, as a plain integer, which is hashed faster


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` = prompt and generated tokens. `num_computed_tokens` of them have their target KV written. Between
    rounds that is all but the last: the *root* of the next tree, sampled but not yet run through the target.
    """

    request: Request
    tokens: list[int]
    max_length: int  # largest length of `tokens`: by max_tokens, or the end of the context or the cache
    num_computed_tokens: int = 0
    # For the rounds in flight on the device: the most tokens that they commit, and the number of rounds.
    num_in_flight: int = 0
    rounds_in_flight: int = 0
    req_idx: int = -1  # its line in the request table, while running
    was_admitted: bool = False  # before a preemption, perhaps
    checkpoint: int | None = None  # the line that the state of a hybrid starts from; None: from nothing
    num_shared: int = 0  # tokens, in whole pages, that other prompts of a hybrid are known to begin with
    num_cached: int = 0  # slots whose entries others had computed, all before its own
    num_uncached: int | None = None  # while it waits: tokens to compute, as the prefix cache was when it was asked
    is_finished: bool = False
    pages: list[int] = field(default_factory=list)
    num_draft_computed: int = 0  # valid slots of the draft network's cache, while the prompt is computed
    predicted: list[int] = field(default_factory=list)  # see `HostSequence`
    draft_state: Any = None  # state of a draft method on the host
    # log-probabilities of the generated tokens, see `read_records`
    logprobs: bytearray = field(default_factory=bytearray)
    margin: Margin = NO_MARGIN  # margin of the generated tokens, whether they are sampled or not
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    rules: Rules | None = None
    # keys: index of the token, as far as computed
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    # The two ways to follow a grammar: on the host, or on the device with an automaton. One of them is None.
    grammar: GrammarState | None = None
    automaton: FollowedAutomaton | None = None
    make_grammar: Callable[[], GrammarState] | None = None  # makes `grammar` at the beginning of the output
    leaves_automaton: bool = False  # its output goes on in a way that the automaton does not have
    num_forced_room: int = 0  # nodes that its grammar may add to a tree, see `tree.MAX_FORCED`
    # These are fields because rounds read them of each request.
    num_prompt: int = field(init=False)  # tokens of the prompt
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        self._note_needs()

    @classmethod
    def of(
        cls, request: Request, limits: EngineLimits, max_length: int, automaton: FollowedAutomaton | None = None
    ) -> Sequence:
        """Start a request. Raises ValueError for a prompt that does not fit `limits`. `max_length` bounds prompt and
        output together. `automaton`: that of its grammar, if the device follows it."""
        prompt = list(request.prompt_token_ids)
        check_prompt(prompt, limits)
        params, matcher = request.params, request.matcher
        of_grammar = Edits.NODE_MASK if automaton is None else Edits.GRAMMAR
        rules = make_rules(params, request.bad_words, limits, Edits.NONE if matcher is None else of_grammar)
        make: Callable[[], GrammarState] | None = None
        if matcher is not None:
            ends = limits.eos_token_ids, params.stop_token_ids
            make = partial(GrammarState, matcher, *ends, limits.vocab_size)
        grammar = make() if make is not None and automaton is None else None
        predicted: list[int] = []
        if request.predicted_token_ids:
            predicted = [*prompt[-_CONTEXT:], *request.predicted_token_ids][: min(max_length, MAX_PREDICTED)]
        longest = min(len(prompt) + params.max_tokens, max_length)
        return cls(
            request, prompt, longest, predicted=predicted, rules=rules, grammar=grammar, automaton=automaton,
            make_grammar=make,
        )  # fmt: skip

    def leave_automaton(self) -> None:
        """Let the host follow the grammar from now on. The request must not run."""
        assert self.rules is not None
        self.rules = replace(self.rules, edits=self.rules.edits & ~Edits.GRAMMAR | Edits.NODE_MASK)
        self._note_needs()
        self.grammar, self.automaton, self.leaves_automaton = self._grammar_on_host(), None, False

    def _note_needs(self) -> None:
        params, edits = self.request.params, Edits.NONE if self.rules is None else self.rules.edits
        self.needs = Needs(params.temperature > 0, params.logprobs, int(edits))

    @property
    def has_grammar(self) -> bool:
        return self.make_grammar is not None

    def _grammar_on_host(self) -> GrammarState | None:
        """Return the grammar as the host follows it, whether it does or not; None: there is no grammar."""
        return self.make_grammar() if self.grammar is None and self.make_grammar is not None else self.grammar

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
        return self.num_computed_tokens >= len(self.tokens) - 1 and self.num_computed_tokens >= self.num_prompt

    @property
    def can_go_on(self) -> bool:
        """Its prompt is computed, and it does not surely end in the rounds in flight: each commits a token or more."""
        # As with `prefill_done`, in fewer calls.
        length, computed = len(self.tokens), self.num_computed_tokens
        return (
            length + self.rounds_in_flight < self.max_length and computed >= length - 1 and computed >= self.num_prompt
        )

    @property
    def is_prefilled(self) -> bool:
        """There is a root, and everything before it is committed."""
        return self.num_computed_tokens == len(self.tokens) - 1 >= self.num_prompt

    def append(self, tokens: list[int], eos: Set[int]) -> FinishReason | None:
        """Append new tokens up to where the request ends; return the reason if it does.

        End-of-sequence and stop are looked for before the length is: a last token that is both counts as a stop. The
        last may be NO_TOKEN: an error, unless the request ends before it.
        """
        request = self.request
        params, kept, reason = request.params, tokens, None
        failed = kept[-1] == NO_TOKEN
        if failed:
            kept = kept[:-1]
        room = self.max_length - len(self.tokens)
        if len(kept) >= room:
            kept, reason = kept[:room], FinishReason.LENGTH
        if params.stop_token_ids or not (params.ignore_eos or eos.isdisjoint(kept)):  # hardly ever
            for i, token in enumerate(kept):
                if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
                    kept, reason = kept[: i + 1], FinishReason.STOP
                    break
        self.tokens += kept
        if (check := request.check_stop) is not None and kept:
            keep = check(self.tokens, self.num_prompt, len(kept))
            if keep is not None:
                del self.tokens[self.num_prompt + keep :]
                reason = FinishReason.STOP
        return FinishReason.ERROR if failed and reason is None else reason

    def leave_round(self, max_path: int) -> None:
        """Take back a round that may have committed `max_path` tokens: it has failed, or does not count."""
        self.num_in_flight -= max_path
        self.rounds_in_flight -= 1

    def completion(self, reason: FinishReason) -> Completion:
        """Return what the request has become."""
        params = self.request.params
        tokens, logprobs = list(self.generated), None
        if params.logprobs is not None:
            logprobs = read_records(tokens, self.logprobs)
        scored = None
        if params.prompt_logprobs is not None:
            scored = TokenLogprobs.of(self.prompt_logprobs[i] for i in self.scored_tokens)
        problem, failed = None, reason is FinishReason.ERROR
        if failed and (grammar := self._grammar_on_host()) is not None:
            problem = grammar.failure_after(self.tokens, self.num_prompt)
        return Completion(
            self.request.request_id,
            tokens,
            reason,
            logprobs,
            self.counts,
            self.margin if params.temperature == 0 else NO_MARGIN,
            prompt_logprobs=scored,
            incomplete=reason is FinishReason.LENGTH and not self._may_end(),
            grammar_error=problem,
            no_token_left=failed and problem is None and self._has_no_token_left(),
        )

    def _may_end(self) -> bool:
        """Return whether the grammar lets the output end here."""
        if self.automaton is not None:
            state = self.automaton.state_after(self.generated)
            if state > 0 and not self.automaton.leaves_Q[state]:
                return bool(self.automaton.accepts_Q[state])
        grammar = self._grammar_on_host()
        return grammar is None or grammar.may_end_after(self.tokens, self.num_prompt)

    def _has_no_token_left(self) -> bool:
        """Return whether the rules and the grammar forbid all tokens after the output."""
        if self.rules is None:
            return False
        allowed_W = self.rules.allowed(self.generated)
        if (grammar := self._grammar_on_host()) is not None:
            grammar.follow(self.tokens, self.num_prompt)
            mask_W = grammar.mask()  # a model can have more tokens than its tokenizer
            allowed_W = allowed_W[: len(mask_W)] & mask_W
        return not allowed_W.any()
