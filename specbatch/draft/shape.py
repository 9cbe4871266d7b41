"""Draft shapes: the legal ones, and the room that their rounds need.

Node 0 of a draft tree is the *root*: the last sampled token, whose key and value are not in the cache yet. A parent
comes before its children. A chain is a tree without branches.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A draft shape: the number of draft steps, of branches that each step keeps, and of nodes that are verified (the
    root included)."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    ngram_match: tuple[int, int] | None = None  # (min_match, max_match) in tokens, if a plan for n-gram drafts has them

    def __str__(self) -> str:
        if self.ngram_match is not None:
            return "{} ({}-{})".format(self.num_draft_tokens, *self.ngram_match)
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"

    @staticmethod
    def ngram(num_draft_tokens: int, min_match: int, max_match: int) -> DraftShape:
        """Make the shape of n-gram drafts, with the lengths of matches."""
        return DraftShape(num_draft_tokens - 1, 1, num_draft_tokens, (min_match, max_match))

    @property
    def max_path(self) -> int:
        """Nodes of the longest path, the root included. A round commits at most this number of tokens."""
        return min(self.num_steps + 1, self.num_draft_tokens)

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """Nodes that drafting scores: topk at the first step, topk for each of topk branches at every later one."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    def check(self) -> None:
        """Raise a ConfigError that names the parameter out of its legal range, if there is one."""
        if self.num_steps < 1 or self.topk < 1:
            raise ConfigError(
                f"speculation.num_steps and speculation.topk must be at least 1, got {self.num_steps} and {self.topk}"
            )
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError(
                f"speculation.num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} for a chain (topk: 1),"
                f" got {self.num_draft_tokens}",
                hint="leave num_draft_tokens out, or raise topk to draft a tree",
            )
        if not 2 <= self.num_draft_tokens <= self.num_candidates + 1:
            raise ConfigError(
                f"speculation.num_draft_tokens must be between 2 and {self.num_candidates + 1}"
                f" for num_steps {self.num_steps} and topk {self.topk}, got {self.num_draft_tokens}",
                hint="a tree has the root and topk + (num_steps - 1) * topk^2 candidates",
            )
        if self.ngram_match is not None and not 1 <= self.ngram_match[0] <= self.ngram_match[1]:
            raise ConfigError(
                "a match has 1 token or more, and min_match is not above max_match: got {}-{}".format(*self.ngram_match)
            )


def num_lookahead(shape: DraftShape | None, draft_kv_offset: int | None) -> int:
    """Return the number of slots past the committed ones that a round may write. They are for the target's tree, the
    draft network's branches, and, after a round that accepted everything, the new root in the draft's cache.

    `shape`: the draft shape, or None for rounds without drafts, in which a draft network can still follow.
    `draft_kv_offset`: see `DraftNet`; None: there is no draft network.
    """
    num_nodes = 1 if shape is None else shape.num_draft_tokens
    if draft_kv_offset is None:
        return num_nodes
    branches = 0 if shape is None else shape.topk * (shape.num_steps - 1)
    return draft_kv_offset + max(num_nodes, branches)
